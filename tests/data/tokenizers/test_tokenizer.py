"""Tokenizers round-trip text, and `transformers` loads them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from meshwright.data.tokenizers.kinds import END_OF_TEXT, KINDS, UNKNOWN, list_byte_characters
from meshwright.data.tokenizers.tokenizer import (
    TextTokenizer,
    find_smallest_vocabulary,
    find_tokenizer,
    load_tokenizer,
    write_tokenizer,
)
from meshwright.errors import UserError

CODE = [Path(json.__file__).read_text(), Path(json.decoder.__file__).read_text()] * 3
PROSE = ["Größe, 世界 and 🙂: many scripts in one line.\r\n\tEnd."]


def made(directory: Path, name: str, vocabulary: int = 600) -> TextTokenizer:
    directory.mkdir(parents=True)
    write_tokenizer(directory, name, vocabulary, find_tokenizer(name), iter(CODE + PROSE))
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, TextTokenizer]]:
    base = tmp_path_factory.mktemp("tokenizers")
    return {name: (base / name, made(base / name, name)) for name in KINDS}


EXACT = [name for name, kind in KINDS.items() if kind.unknown is None]
LOSSY = [name for name in KINDS if name not in EXACT]
each_kind = pytest.mark.parametrize("name", KINDS)


def test_smallest_vocabulary_is_known_before_reading_text(own: dict[str, tuple[Path, TextTokenizer]], tmp_path: Path):
    directory, trained = own["bpe"]
    assert find_smallest_vocabulary(str(directory)) == trained.vocabulary > 257
    assert find_smallest_vocabulary("bytes") == own["bytes"][1].vocabulary == 257
    for name in KINDS:
        write_tokenizer(tmp_path, name, 600, None, iter([]))
        assert find_smallest_vocabulary(name) == load_tokenizer(tmp_path).vocabulary


texts = st.text() | st.lists(st.sampled_from([*CODE[0].split(" ")[:200], END_OF_TEXT, " ", "\n"])).map(" ".join)


@given(text=texts)
@settings(max_examples=100)
@pytest.mark.parametrize("name", EXACT)
def test_decoding_inverts_encoding(own: dict[str, tuple[Path, TextTokenizer]], name: str, text: str):
    tokenizer = own[name][1]
    (tokens,) = tokenizer.encode([text])
    assert tokenizer.decode(tokens) == text


def test_byte_tokenizer_id_is_the_byte(own: dict[str, tuple[Path, TextTokenizer]]):
    directory, tokenizer = own["bytes"]
    text = "".join(map(chr, range(0x250))) + "世界🙂"
    (tokens,) = tokenizer.encode([text])
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.vocabulary == 257 and tokenizer.end == tokenizer.start == 256
    # The shortcut for bytes matches the tokenizer file.
    assert Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids == tokens.tolist()


def test_byte_characters_match_tokenizers_library():
    assert sorted(list_byte_characters()) == sorted(pre_tokenizers.ByteLevel.alphabet())


@each_kind
def test_text_never_becomes_a_special_token(own: dict[str, tuple[Path, TextTokenizer]], name: str):
    tokenizer = own[name][1]
    spelled = f"before{END_OF_TEXT}after {END_OF_TEXT} {END_OF_TEXT}\n{END_OF_TEXT}"
    tokens = np.concatenate(tokenizer.encode([spelled, END_OF_TEXT]))
    assert tokenizer.end not in tokens.tolist()


@each_kind
def test_special_token_in_corpus_stays_ordinary_text(tmp_path: Path, name: str):
    """The training text contains the end-of-text and unknown tokens as frequent words."""
    corpus = [f"{END_OF_TEXT} {UNKNOWN} {END_OF_TEXT} word {END_OF_TEXT}{END_OF_TEXT}"] * 50
    write_tokenizer(tmp_path, name, 400, None, iter(corpus))
    tokenizer = load_tokenizer(tmp_path)
    (tokens,) = tokenizer.encode([corpus[0]])
    special = {tokenizer.tokenizer.token_to_id(token) for token in tokenizer.special}
    assert tokenizer.end in special and special.isdisjoint(tokens.tolist())
    assert tokenizer.decode(tokens).replace(" ", "") == corpus[0].replace(" ", "")


@pytest.mark.parametrize("name", LOSSY)
def test_unknown_text_becomes_unknown_token(own: dict[str, tuple[Path, TextTokenizer]], name: str):
    tokenizer = own[name][1]
    unknown = tokenizer.tokenizer.token_to_id(UNKNOWN)
    (known, other) = tokenizer.encode([" self", " \u0416\u0416"])
    assert unknown not in known.tolist() and other.tolist() == [unknown]


def test_word_tokenizer_keeps_spaces_and_wordpiece_does_not(own: dict[str, tuple[Path, TextTokenizer]]):
    text = " return self\n    return self"
    back = {name: own[name][1].decode(own[name][1].encode([text])[0]) for name in LOSSY}
    assert back == {"word": text, "wordpiece": "return self return self"}


@each_kind
def test_tokenizer_training_is_reproducible(own: dict[str, tuple[Path, TextTokenizer]], tmp_path: Path, name: str):
    made(tmp_path / "again", name)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (own[name][0] / file).read_bytes()


@each_kind
def test_vocabulary_never_exceeds_requested_size(tmp_path: Path, name: str):
    """Also holds for a text with 5,000 different characters."""
    characters = "".join(filter(str.isprintable, map(chr, range(32, 6000))))
    for vocabulary in (257, 258, 300, 700):
        write_tokenizer(tmp_path, name, vocabulary, None, iter([characters, *CODE]))
        tokenizer = load_tokenizer(tmp_path)
        full = name != "bytes" and (name, vocabulary) != ("unigram", 258)  # too small for both kinds of pieces
        assert tokenizer.vocabulary == (vocabulary if full else 257)
        (tokens,) = tokenizer.encode([characters])
        assert (tokenizer.decode(tokens) == characters) == (name in EXACT)


def test_trained_tokenizer_has_requested_vocabulary(own: dict[str, tuple[Path, TextTokenizer]]):
    tokenizer = own["bpe"][1]
    assert tokenizer.vocabulary == 600
    assert tokenizer.tokenizer.id_to_token(0) == END_OF_TEXT == tokenizer.tokenizer.id_to_token(tokenizer.end)
    (tokens,) = tokenizer.encode(["def __init__(self):"])
    assert len(tokens) < len("def __init__(self):") * 0.6


def test_token_dtype_is_smallest_for_vocabulary():
    def with_vocabulary(size: int) -> TextTokenizer:
        words = {f"w{number}": number for number in range(size)}
        return TextTokenizer(Tokenizer(models.WordLevel(words, unk_token="w0")), 0, 0)

    assert [with_vocabulary(size).dtype.str for size in (65_536, 65_537)] == ["<u2", "<u4"]


@each_kind
def test_transformers_loads_every_kind_and_encodes_alike(own: dict[str, tuple[Path, TextTokenizer]], name: str):
    transformers = pytest.importorskip("transformers")
    directory, tokenizer = own[name]
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    for text in (CODE[0][:2000], PROSE[0], "", "  a\n\n\tb", "\u0416 \u4e16", f"a{END_OF_TEXT}b {UNKNOWN} <0x41>"):
        tokens = tokenizer.encode([text])[0].tolist()
        assert theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] == tokens
        assert theirs.decode(tokens) == tokenizer.decode(tokens)
    assert theirs(CODE[0])["input_ids"] == tokenizer.encode([CODE[0]])[0].tolist()  # no special tokens
    assert theirs.eos_token_id == tokenizer.end and theirs.eos_token == END_OF_TEXT
    assert len(theirs) == tokenizer.vocabulary and theirs.unk_token == KINDS[name].unknown


class TestExisting:
    """Existing tokenizers are used unchanged, with the BOS and EOS tokens that their files name."""

    @pytest.fixture
    def directory(self, tmp_path: Path) -> Path:
        tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens([AddedToken(word, special=True) for word in ("[B]", "[E]", "[F]")])
        tokenizer.enable_truncation(2)
        tokenizer.enable_padding()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    def load(self, name: Path, out: Path) -> TextTokenizer:
        out.mkdir()
        write_tokenizer(out, str(name), 0, find_tokenizer(str(name)), iter([]))
        return load_tokenizer(out)

    @pytest.mark.parametrize(
        ("file", "contents", "framing"),
        [
            ("tokenizer_config.json", {"eos_token": "[E]", "bos_token": "[B]"}, (3, 4)),
            ("tokenizer_config.json", {"eos_token": {"content": "[F]"}, "bos_token": None}, (5, 5)),
            ("special_tokens_map.json", {"eos_token": "[E]"}, (4, 4)),
            ("generation_config.json", {"eos_token_id": [5, 4], "bos_token_id": 3}, (3, 5)),
            ("config.json", {"eos_token_id": 4}, (4, 4)),
        ],
    )
    def test_start_and_end_tokens_are_read_from_published_files(
        self, directory: Path, file: str, contents: dict[str, object], framing: tuple[int, int]
    ):
        (directory / file).write_text(json.dumps(contents))
        for number, name in enumerate((directory, directory / "tokenizer.json")):
            tokenizer = self.load(name, directory / f"out{number}")
            assert (tokenizer.start, tokenizer.end) == framing

    def test_its_truncation_and_padding_are_off(self, directory: Path):
        (directory / "tokenizer_config.json").write_text('{"eos_token": "[E]"}')
        tokenizer = self.load(directory, directory / "out")
        assert [tokens.tolist() for tokens in tokenizer.encode(["a b a b", "a"])] == [[0, 1, 0, 1], [0]]

    def test_tokenizer_files_are_copied_unchanged(self, directory: Path):
        config = '{ "eos_token" : "[E]", "chat_template": "x" }'
        (directory / "tokenizer_config.json").write_text(config)
        self.load(directory, directory / "out")
        copied = json.loads((directory / "out" / "tokenizer_config.json").read_text())
        assert copied == json.loads(config)
        assert (directory / "out" / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()

    @pytest.mark.parametrize(
        ("files", "said"),
        [
            ({}, 'does not name the end-of-text token; write {"eos_token": "..."} into'),
            ({"tokenizer_config.json": '{"eos_token": "</s>"}'}, 'the eos_token "</s>" of'),
            ({"tokenizer_config.json": "{"}, "is not JSON"),
            ({"tokenizer_config.json": "[]"}, "is not a JSON object"),
            ({"tokenizer.json": "{}"}, "cannot be read as a tokenizer"),
        ],
    )
    def test_invalid_tokenizer_is_one_error_line(self, directory: Path, files: dict[str, str], said: str):
        for name, contents in files.items():
            (directory / name).write_text(contents)
        with pytest.raises(UserError) as caught:
            find_tokenizer(str(directory))
        assert said in str(caught.value) and "\n" not in str(caught.value)

    def test_token_id_beyond_the_largest_vocabulary_is_refused(self, directory: Path):
        (directory / "tokenizer_config.json").write_text('{"eos_token": "[E]"}')
        content = json.loads((directory / "tokenizer.json").read_text())
        content["model"]["vocab"]["a"] = 2**31  # writing this tokenizer would take 8 GiB
        (directory / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match="a token with the id 2,147,483,648; ids must be below 16,777,216"):
            find_tokenizer(str(directory))

    def test_text_without_token_is_one_error_line(self, directory: Path):
        (directory / "tokenizer_config.json").write_text('{"eos_token": "[E]"}')
        content = json.loads((directory / "tokenizer.json").read_text())
        content["model"]["unk_token"] = "missing"
        (directory / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(UserError, match="text cannot be tokenized .the tokenizers library: .*Missing"):
            self.load(directory, directory / "out").encode(["a strange text"])

    def test_directory_without_tokenizer_names_command_that_makes_one(self, tmp_path: Path):
        with pytest.raises(UserError, match=r"has no tokenizer\.json; AutoTokenizer"):
            find_tokenizer(str(tmp_path))

    def test_unknown_tokenizer_name_gets_nearest_suggestion(self):
        with pytest.raises(UserError, match='did you mean "bytes"'):
            find_tokenizer("byte")

    def test_real_models_tokenizer_adds_its_start_and_end_tokens(self, shared_data: Path, tmp_path: Path):
        tokenizer = self.load(shared_data / "stories260k", tmp_path / "out")
        assert (tokenizer.start, tokenizer.end) == (1, 2)
        (tokens,) = tokenizer.encode(["Once upon a time"])
        assert np.all(tokens > 2) and tokenizer.decode(tokens).strip() == "Once upon a time"
