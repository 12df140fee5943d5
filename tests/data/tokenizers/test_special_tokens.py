"""Text is never encoded as a special token, for every model type and declaration of special tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from meshwright.data import prepare
from meshwright.data.tokenizers.kinds import END_OF_TEXT, KINDS
from meshwright.data.tokenizers.special_tokens import make_text_encoder
from meshwright.data.tokenizers.tokenizer import TextTokenizer, find_tokenizer, load_tokenizer, write_tokenizer
from meshwright.errors import UserError
from meshwright.recipe import DataRecipe

LETTERS = list("abcdefghijklmnopqrstuvwxyz</>|[]_ ")


def unigram() -> Tokenizer:
    """SentencePiece model in which `</s>` is the most probable piece."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((letter, -5.0) for letter in LETTERS), ("▁", -2.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<unk>"])
    return tokenizer


def normalized_unigram() -> Tokenizer:
    """Normalizer that maps a full-width `＜/s＞` to `</s>`."""
    tokenizer = unigram()
    tokenizer.normalizer = normalizers.NFKC()
    return tokenizer


def words() -> Tokenizer:
    """Word model with the end token in its vocabulary."""
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "[UNK]": 2, "before": 3, "after": 4}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>", "[UNK]"])
    return tokenizer


def wordpiece() -> Tokenizer:
    vocab = {token: number for number, token in enumerate(["<s>", "</s>", "[UNK]", *LETTERS])}
    vocab |= {f"##{letter}": len(vocab) + number for number, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>", "[UNK]"])
    return tokenizer


def bpe(ignore_merges: bool = False, merges: tuple[tuple[str, str], ...] = ()) -> Tokenizer:
    made = [left + right for left, right in merges]
    tokens = dict.fromkeys(["<s>", "</s>", *LETTERS, *made])
    tokenizer = Tokenizer(
        models.BPE({token: number for number, token in enumerate(tokens)}, list(merges), ignore_merges=ignore_merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def merging_bpe() -> Tokenizer:
    """BPE whose merges produce `</s>` from text, and merge it further."""
    return bpe(merges=(("<", "/"), ("s", ">"), ("</", "s>"), ("a", "b"), ("</s>", "ab")))


def whole_word_bpe() -> Tokenizer:
    """`ignore_merges`: a word in the vocabulary is that token, as in Llama 3."""
    return bpe(ignore_merges=True)


def ordinary_end() -> Tokenizer:
    """The end-of-text token was added as an ordinary one, which the library finds in text."""
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(LETTERS)}, []))
    tokenizer.add_tokens([AddedToken("</s>", special=False), AddedToken("<tool>", special=False)])
    return tokenizer


MAKERS = (unigram, normalized_unigram, words, wordpiece, merging_bpe, whole_word_bpe, ordinary_end)
each_model = pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
TEXTS = ["</s>", "before </s> after", "before</s>after", " </s>", "</s></s>ab", "<s></s>", "＜/s＞", "</ s>", "<tool>"]


def directory_of(tokenizer: Tokenizer, directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return directory


def loaded(directory: Path, out: Path) -> TextTokenizer:
    out.mkdir()
    write_tokenizer(out, str(directory), 0, find_tokenizer(str(directory)), iter([]))
    return load_tokenizer(out)


@each_model
def test_text_never_becomes_a_special_token_of_any_model(maker: Callable[[], Tokenizer], tmp_path: Path):
    tokenizer = loaded(directory_of(maker(), tmp_path / "in"), tmp_path / "out")
    bare = maker()
    bare.encode_special_tokens = True
    ends = {bare.token_to_id(token) for token in ("<s>", "</s>")} - {None}
    # With encode_special_tokens the library still produces the special token: else the test would show nothing.
    assert any(ends & set(bare.encode(text, add_special_tokens=False).ids) for text in TEXTS)
    for tokens in tokenizer.encode(TEXTS):
        assert ends.isdisjoint(tokens.tolist())


@each_model
def test_other_text_is_encoded_unchanged(maker: Callable[[], Tokenizer], tmp_path: Path):
    tokenizer = loaded(directory_of(maker(), tmp_path / "in"), tmp_path / "out")
    texts = ["before after", "a b ab abab", "<", "s>", "</ s", "<tool>", "x_y|z [a]"]
    want = [maker().encode(text, add_special_tokens=False).ids for text in texts]
    assert [tokens.tolist() for tokens in tokenizer.encode(texts)] == want


@each_model
def test_prepared_data_have_special_tokens_only_at_document_ends(maker: Callable[[], Tokenizer], tmp_path: Path):
    directory = directory_of(maker(), tmp_path / "tokenizer")
    lines = [json.dumps({"text": f"before {'</s> ' * number}after"}) for number in range(1, 6)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    data = prepare(
        DataRecipe(
            source=str(tmp_path / "corpus.jsonl"), tokenizer=str(directory), sequence=4, validation_fraction=0.0,
            cache=str(tmp_path / "cache"), clean={"maximum_repetition": 1.0},
        )
    )  # fmt: skip
    [tokens] = data.split("train").iterate_tokens()
    assert (tokens == data.tokenizer.end).sum() == 2 * 5  # it frames each document


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_has_end_tokens_only_at_document_ends(name: str, tmp_path: Path):
    texts = [f"{number}{END_OF_TEXT} words {END_OF_TEXT * number} [UNK] <unk>" for number in range(1, 9)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    data = prepare(
        DataRecipe(
            source=str(tmp_path / "corpus.jsonl"), tokenizer=name, vocabulary=300, sequence=4, validation_fraction=0.0,
            cache=str(tmp_path / "cache"),
        )
    )  # fmt: skip
    [tokens] = data.split("train").iterate_tokens()
    assert (tokens == data.tokenizer.end).sum() == 2 * len(texts)


def test_special_token_named_only_in_config_files_is_special(tmp_path: Path):
    marked = {"35": {"content": "<tool>", "special": True}}
    for number, (file, content) in enumerate(
        [
            ("tokenizer_config.json", {"eos_token": "</s>", "additional_special_tokens": ["<tool>"]}),
            ("tokenizer_config.json", {"eos_token": "</s>", "added_tokens_decoder": marked}),
            ("special_tokens_map.json", {"additional_special_tokens": [{"content": "<tool>"}]}),
        ]
    ):
        directory = directory_of(ordinary_end(), tmp_path / f"in{number}")
        (directory / file).write_text(json.dumps(content))
        tokenizer = loaded(directory, tmp_path / f"out{number}")
        tool = tokenizer.tokenizer.token_to_id("<tool>")
        assert tool not in tokenizer.encode(["a<tool>b"])[0].tolist()
    ordinary = loaded(directory_of(ordinary_end(), tmp_path / "in"), tmp_path / "out")
    assert tool in ordinary.encode(["a<tool>b"])[0].tolist()  # an ordinary added token stays one


def test_tokenizer_with_end_as_unknown_token_is_refused(tmp_path: Path):
    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "known": 1}, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    made = loaded(directory_of(tokenizer, tmp_path / "in"), tmp_path / "out")
    assert made.encode(["known"])[0].tolist() == [1]
    with pytest.raises(UserError, match='text becomes the special token "</s>"') as caught:
        made.encode(["known", "known other"])
    assert "\n" not in str(caught.value)


def test_single_character_padding_token_stays_text():
    tokenizer = Tokenizer(models.BPE({"!": 0, "a": 1, "</s>": 2}, []))
    tokenizer.add_special_tokens(["!", "</s>"])
    (tokens,) = TextTokenizer(tokenizer, 2, 2, ["!"]).encode(["a!"])
    assert tokens.tolist() == [1, 0]


def test_ordinary_tokenizer_is_not_copied():
    """A copy costs memory; none is made if the model cannot produce special tokens."""
    tokenizer = bpe()
    assert make_text_encoder(tokenizer, {"<s>", "</s>"}) is tokenizer
    assert make_text_encoder(whole_word_bpe(), {"<s>", "</s>"}) is not tokenizer
