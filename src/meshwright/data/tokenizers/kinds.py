"""Kinds of tokenizers that Meshwright creates: bytes, and five that the `tokenizers` library trains on the corpus.

Text cannot spell a special token of these: BPE, word and Unigram pre-tokenize as GPT-2 does, WordPiece as BERT does,
both of which separate `<|` from `endoftext`; the character kind never joins two characters."""

from __future__ import annotations

import json
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from meshwright.names import TOKENIZERS

END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "[UNK]"
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
"""Tokens of single bytes in SentencePiece's notation, for characters outside the vocabulary."""

# Radford et al. 2019, "Language Models are Unsupervised Multitask Learners": the pattern of GPT-2's encoder.py.
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class TokenizerKind:
    """One kind of tokenizer that Meshwright can create, such as "bpe".

    title: name of the kind in a sentence, with article. smallest_vocabulary: smallest possible vocabulary size. make:
    function (vocabulary, texts) that returns a tokenizer of at most `vocabulary` tokens, trained on `texts`. unknown:
    token for text outside the vocabulary; None if every text can be encoded and decoded exactly. trained: True if the
    tokenizer depends on `texts`.
    """

    title: str
    smallest_vocabulary: int
    make: Callable[[int, Iterator[str]], Tokenizer]
    unknown: str | None = None
    trained: bool = True

    def make_config(self) -> dict[str, Any]:
        """Return the content of tokenizer_config.json as JSON."""
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
        }
        return config if self.unknown is None else {**config, "unk_token": self.unknown}


def create_byte_tokenizer() -> Tokenizer:
    """Create a tokenizer of bytes: id b is byte b, id 256 the end-of-text token."""
    characters = list_byte_characters()
    tokenizer = Tokenizer(models.BPE(vocab={character: byte for byte, character in enumerate(characters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_make_special(END_OF_TEXT)])
    return tokenizer


def _train_bpe(vocabulary: int, texts: Iterator[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer with GPT-2's pre-tokenization (Radford et al. 2019): id 0 is the end-of-text
    token, then come the 256 bytes, then merges. vocabulary: maximum number of tokens. texts: training texts.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_make_special(END_OF_TEXT)],
        initial_alphabet=list_byte_characters(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _train_word(vocabulary: int, texts: Iterator[str]) -> Tokenizer:
    """Train a tokenizer whose tokens are words with the space before them: id 0 is the end-of-text token, 1 any word
    outside the vocabulary. vocabulary: maximum number of tokens. texts: training texts.
    """
    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocabulary, special_tokens=[_make_special(END_OF_TEXT), _make_special(UNKNOWN)], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _build_character(vocabulary: int, texts: Iterator[str]) -> Tokenizer:
    """Build a tokenizer of characters: id 0 is the end-of-text token, then come the 256 bytes for all other characters
    (byte fallback), then the most frequent characters of `texts`. vocabulary: maximum number of tokens.
    """
    tokens = [END_OF_TEXT, *BYTES, *_rank_characters(texts)[: vocabulary - 257]]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([_make_special(END_OF_TEXT)])
    return tokenizer


def _train_wordpiece(vocabulary: int, texts: Iterator[str]) -> Tokenizer:
    """Train a WordPiece tokenizer, cased, accents kept: id 0 is the end-of-text token, 1 any word with an unknown
    character. vocabulary: maximum number of tokens. texts: training texts.

    Pre-tokenization of BERT (Devlin et al. 2019); subwords are chosen as for BPE. A character has two tokens, at the
    beginning of a word and inside it, and characters take at most half of the vocabulary.
    """
    normalizer = normalizers.BertNormalizer(strip_accents=False, lowercase=False)
    kept = [normalizer.normalize_str(text) for text in texts]
    alphabet = [character for character in _rank_characters(kept) if not character.isspace()][: vocabulary // 4]
    # Listed in advance: the trainer numbers new tokens in random order, and breaks ties by number.
    later = [f"##{character}" for character in alphabet if not _is_separate_word(character)]
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, UNKNOWN, *later],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(kept, trainer)
    made = Tokenizer(models.WordPiece(tokenizer.get_vocab(with_added_tokens=False), unk_token=UNKNOWN))
    made.normalizer, made.pre_tokenizer = normalizer, tokenizer.pre_tokenizer
    made.decoder = decoders.WordPiece(cleanup=True)
    made.add_special_tokens([_make_special(END_OF_TEXT), _make_special(UNKNOWN)])
    return made


def _train_unigram(vocabulary: int, texts: Iterator[str]) -> Tokenizer:
    """Train a Unigram tokenizer with byte fallback: id 0 is the end-of-text token, then come the 256 bytes, then
    subwords by falling probability. vocabulary: maximum number of tokens. texts: training texts.

    Kudo 2018, "Subword Regularization"; pre-tokenized as GPT-2. Spaces are kept instead of U+2581, so that texts with
    that character decode exactly. Characters take at most half of the subwords; rarer ones are excluded from training
    and encoded as bytes.
    """
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    room, kept = vocabulary - 257, list(texts)
    characters = _rank_characters(kept)[: room // 2]  # with more the trainer does not terminate
    pieces: list[tuple[str, float]] = []
    if characters:
        among = "".join(rf"\x{{{ord(character):x}}}" for character in characters)
        others = Regex(f"[^{among}]+")
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(others, "removed"), words])
        tokenizer.train_from_iterator(kept, trainers.UnigramTrainer(vocab_size=room, show_progress=False))
        pieces = _sort_subwords(tokenizer)
    fallback = [(END_OF_TEXT, 0.0), *((byte, 0.0) for byte in BYTES)]
    made = Tokenizer(models.Unigram([*fallback, *pieces], 0, True))  # every byte has a token, so 0 is never written
    made.pre_tokenizer = words
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([_make_special(END_OF_TEXT)])
    return made


def _rank_characters(texts: Iterable[str]) -> list[str]:
    """Return the distinct characters of `texts`, the most frequent first."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    return sorted(counts, key=lambda character: (-counts[character], character))


def _is_separate_word(character: str) -> bool:
    """Return True if BERT's pre-tokenization makes a character a word by itself: punctuation and Chinese characters."""
    code = ord(character)
    chinese = 0x3400 <= code <= 0x4DBF or 0x4E00 <= code <= 0x9FFF or 0xF900 <= code <= 0xFAFF or code >= 0x20000
    return chinese or character in string.punctuation or unicodedata.category(character).startswith("P")


def _sort_subwords(tokenizer: Tokenizer) -> list[tuple[str, float]]:
    """Return (subword, log-probability) of all subwords of `tokenizer`, a trained Unigram model, the most probable
    first.

    Every training on the same text gives the same result: log-probabilities are rounded, since the trainer sums them in
    varying order, and characters that the trainer dropped, whose values are random, get the lowest value.
    """
    pieces = [(piece, round(score, 6)) for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"]]
    lowest = min((score for _, score in pieces), default=0.0)
    chosen = [score for piece, score in pieces if len(piece) > 1]
    scored = min(chosen, default=lowest)
    pieces = [(piece, lowest if len(piece) == 1 and score < scored else score) for piece, score in pieces]
    return sorted(pieces, key=lambda pair: (-pair[1], pair[0]))


KINDS: dict[str, TokenizerKind] = {
    "bytes": TokenizerKind("a byte tokenizer", 257, lambda vocabulary, texts: create_byte_tokenizer(), trained=False),
    "bpe": TokenizerKind("a byte-level BPE", 257, _train_bpe),
    "word": TokenizerKind("a word tokenizer", 2, _train_word, UNKNOWN),
    "character": TokenizerKind("a character tokenizer", 257, _build_character),
    "wordpiece": TokenizerKind("a WordPiece tokenizer", 2, _train_wordpiece, UNKNOWN),
    "unigram": TokenizerKind("a Unigram tokenizer", 257, _train_unigram),
}
assert tuple(KINDS) == TOKENIZERS


def list_byte_characters() -> list[str]:
    """Return the 256 characters that represent the bytes in byte-level tokenizers: the character with the byte's code
    if that is printable, else the next unused character from U+0100 on.
    """
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in prints else next(others)) for byte in range(256)]


def _make_special(token: str) -> AddedToken:
    """Build a special token of the `tokenizers` library with the text `token`."""
    return AddedToken(token, special=True, normalized=False)
