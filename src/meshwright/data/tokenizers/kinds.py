"""The kinds of tokenizer that are made here: bytes, and five that `tokenizers` trains on the corpus.

No text can spell a special token of these: BPE, word and Unigram cut text where GPT-2 does, WordPiece where BERT does,
which parts `<|` from `endoftext`, and the character kind never joins two characters.
"""

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
"""The tokens of single bytes as SentencePiece writes them, for characters that are no tokens."""

# Radford et al. 2019, "Language Models are Unsupervised Multitask Learners": the pattern of GPT-2's encoder.py.
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of tokenizer.

    `title`: its name in a sentence. `least`: the fewest tokens it
    has, whatever it is trained on. `make(vocabulary, texts)` trains it on all of `texts`. `unknown`: what it writes for
    text that it has no token for; None where there is no such text, and decoding gives back every text.
    """

    title: str
    least: int
    make: Callable[[int, Iterator[str]], Tokenizer]
    unknown: str | None = None
    trained: bool = True

    def config(self) -> dict[str, Any]:
        """Its tokenizer_config.json."""
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
        }
        return config if self.unknown is None else {**config, "unk_token": self.unknown}


def byte_tokenizer() -> Tokenizer:
    """Token b is byte b, 256 ends a text."""
    characters = byte_characters()
    tokenizer = Tokenizer(models.BPE(vocab={character: byte for byte, character in enumerate(characters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_special(END_OF_TEXT)])
    return tokenizer


def _bpe(vocabulary: int, texts: Iterator[str]) -> Tokenizer:
    """0 ends a text, then the 256 bytes, then merges; words are split as GPT-2 splits them (Radford et al. 2019)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_special(END_OF_TEXT)],
        initial_alphabet=byte_characters(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _word(vocabulary: int, texts: Iterator[str]) -> Tokenizer:
    """0 ends a text, 1 is any word that is not among the most frequent ones; a word has the space before it."""
    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocabulary, special_tokens=[_special(END_OF_TEXT), _special(UNKNOWN)], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _character(vocabulary: int, texts: Iterator[str]) -> Tokenizer:
    """0 ends a text, then the 256 bytes, then the most frequent characters; others are written as their bytes."""
    tokens = [END_OF_TEXT, *BYTES, *_frequent(texts)[: vocabulary - 257]]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([_special(END_OF_TEXT)])
    return tokenizer


def _wordpiece(vocabulary: int, texts: Iterator[str]) -> Tokenizer:
    """0 ends a text, 1 is any word with a character that is not known; cut as BERT cuts text, case and accents kept.

    Devlin et al. 2019, "BERT"; pieces are chosen as for BPE. A character has two tokens, as the first of a word and as
    a later one, and characters have at most half of all tokens.
    """
    normalizer = normalizers.BertNormalizer(strip_accents=False, lowercase=False)
    kept = [normalizer.normalize_str(text) for text in texts]
    alphabet = [character for character in _frequent(kept) if not character.isspace()][: vocabulary // 4]
    # Named before the trainer meets them: it numbers what it meets in an order of chance, and ties go by number.
    later = [f"##{character}" for character in alphabet if not _stands_alone(character)]
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
    made.add_special_tokens([_special(END_OF_TEXT), _special(UNKNOWN)])
    return made


def _unigram(vocabulary: int, texts: Iterator[str]) -> Tokenizer:
    """0 ends a text, then the 256 bytes, then pieces, the most probable first; words are split as GPT-2 splits them.

    Kudo 2018, "Subword Regularization": SentencePiece's model with byte fallback. A space is a space in it and not
    U+2581, so that a text which holds that character comes back as well. Characters have at most half of the pieces:
    rarer ones are left out of the training and written as their bytes.
    """
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    room, kept = vocabulary - 257, list(texts)
    characters = _frequent(kept)[: room // 2]  # more, and the trainer never ends
    pieces: list[tuple[str, float]] = []
    if characters:
        among = "".join(rf"\x{{{ord(character):x}}}" for character in characters)
        others = Regex(f"[^{among}]+")
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(others, "removed"), words])
        tokenizer.train_from_iterator(kept, trainers.UnigramTrainer(vocab_size=room, show_progress=False))
        pieces = _in_order(tokenizer)
    fallback = [(END_OF_TEXT, 0.0), *((byte, 0.0) for byte in BYTES)]
    made = Tokenizer(models.Unigram([*fallback, *pieces], 0, True))  # every byte has a token, so 0 is never written
    made.pre_tokenizer = words
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([_special(END_OF_TEXT)])
    return made


def _frequent(texts: Iterable[str]) -> list[str]:
    """The characters of `texts`, the most frequent first."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    return sorted(counts, key=lambda character: (-counts[character], character))


def _stands_alone(character: str) -> bool:
    """Whether BERT makes a word of it wherever it stands: punctuation and Chinese characters."""
    code = ord(character)
    chinese = 0x3400 <= code <= 0x4DBF or 0x4E00 <= code <= 0x9FFF or 0xF900 <= code <= 0xFAFF or code >= 0x20000
    return chinese or character in string.punctuation or unicodedata.category(character).startswith("P")


def _in_order(tokenizer: Tokenizer) -> list[tuple[str, float]]:
    """The pieces of a trained Unigram model by falling probability.

    The trainer adds up in any order and gives the characters that it had dropped scores by chance, 0.0001 apart: the
    sums are rounded and those characters all get the lowest score, so that the same text makes the same tokenizer.
    """
    pieces = [(piece, round(score, 6)) for piece, score in json.loads(tokenizer.to_str())["model"]["vocab"]]
    lowest = min((score for _, score in pieces), default=0.0)
    chosen = [score for piece, score in pieces if len(piece) > 1]
    scored = min(chosen, default=lowest)
    pieces = [(piece, lowest if len(piece) == 1 and score < scored else score) for piece, score in pieces]
    return sorted(pieces, key=lambda pair: (-pair[1], pair[0]))


KINDS: dict[str, Kind] = {
    "bytes": Kind("a byte tokenizer", 257, lambda vocabulary, texts: byte_tokenizer(), trained=False),
    "bpe": Kind("a byte-level BPE", 257, _bpe),
    "word": Kind("a word tokenizer", 2, _word, UNKNOWN),
    "character": Kind("a character tokenizer", 257, _character),
    "wordpiece": Kind("a WordPiece tokenizer", 2, _wordpiece, UNKNOWN),
    "unigram": Kind("a Unigram tokenizer", 257, _unigram),
}
assert tuple(KINDS) == TOKENIZERS


def byte_characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte: itself where it prints, else one from U+0100 on."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in prints else next(others)) for byte in range(256)]


def _special(token: str) -> AddedToken:
    return AddedToken(token, special=True, normalized=False)
