"""The tokenizer report matches a direct count."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.data import prepare
from meshwright.data.tokenizers.kinds import KINDS, UNKNOWN
from meshwright.data.tokenizers.page import render_tokenizer_page
from meshwright.data.tokenizers.report import describe_tokens, list_readable_tokens, measure_tokenizer
from meshwright.recipe import DataRecipe

ENGLISH = [f"The {number}th line says <b>nothing</b> new, and says it {number % 3} times." for number in range(90)]
CODE = [f"def f{number}(x):\n    return x + {number}\n" for number in range(60)]
SMALL = 4000  # tokens of a shard, so that there are several


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources: English lines, and a directory of programs."""
    place = tmp_path_factory.mktemp("report")
    (place / "english.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ENGLISH))
    (place / "code").mkdir()
    for number, text in enumerate(CODE):
        (place / "code" / f"{number:02d}.py").write_text(text)
    return place


def recipe(place: Path, name: str) -> DataRecipe:
    sources = [str(place / "code"), str(place / "english.jsonl")]
    return DataRecipe(
        source=sources, tokenizer=name, vocabulary=320, sequence=16, validation_fraction=0.2, shard_tokens=SMALL,
        cache=str(place / "cache"),
    )  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_tokenizer_report_matches_count_per_text(place: Path, name: str):
    data = prepare(recipe(place, name))
    report = measure_tokenizer(recipe(place, name), data)
    counts: Counter[int] = Counter()
    for source, texts in zip(report["sources"], (CODE, ENGLISH), strict=True):
        tokens = [data.tokenizer.encode([text])[0].tolist() for text in texts]
        for one in tokens:
            counts.update(one)
        total, size = sum(map(len, tokens)), sum(len(text.encode()) for text in texts)
        assert (source["documents"], source["bytes"], source["tokens"]) == (len(texts), size, total)
        assert source["bytes_per_token"] == size / total
    assert report["tokens"] == counts.total() and report["used"] == len(counts)
    special = {data.tokenizer.tokenizer.token_to_id(token) for token in data.tokenizer.special}
    assert report["unused"] == data.vocabulary - len(counts.keys() | special)
    for least, number in report["occur_at_least"].items():
        assert number == sum(count >= int(least) for count in counts.values())
    assert [row["count"] for row in report["most_frequent"]] == [count for _, count in counts.most_common(20)]
    assert all(row["count"] == counts[row["id"]] for row in report["longest"])
    unused = {token["id"] for token in report["unused_tokens"]}
    assert unused.isdisjoint(counts) and len(unused) == min(100, report["unused"])
    unknown = report["unknown"]
    if KINDS[name].unknown is None:
        assert unknown is None and report["round_trip"]["exact"] == report["round_trip"]["documents"] > 20
    else:
        assert (unknown["text"], unknown["count"]) == (UNKNOWN, counts[unknown["id"]])
        assert report["round_trip"]["exact"] < report["round_trip"]["documents"]


def test_longest_tokens_have_longest_texts(place: Path):
    data = prepare(recipe(place, "bpe"))
    lengths = [len(row["text"]) for row in measure_tokenizer(recipe(place, "bpe"), data)["longest"]]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > 5


def test_first_round_trip_difference_is_shown(place: Path):
    found = measure_tokenizer(recipe(place, "wordpiece"), prepare(recipe(place, "wordpiece")))["round_trip"]
    assert found["first_difference"]["text"] != found["first_difference"]["decoded"]
    assert len(found["first_difference"]["text"]) <= 40


@pytest.mark.parametrize("name", KINDS)
def test_text_is_described_token_by_token(place: Path, name: str):
    tokenizer = prepare(recipe(place, name)).tokenizer
    shown = describe_tokens(tokenizer, "The naïve 世 says")
    assert [token["id"] for token in shown["tokens"]] == tokenizer.encode(["The naïve 世 says"])[0].tolist()
    texts = [token["text"] for token in shown["tokens"]]
    if KINDS[name].unknown is None:
        assert shown["exact"]
        raw = b"".join(
            bytes([int(text[3:5], 16)]) if re.fullmatch("<0x[0-9A-F]{2}>", text) else text.encode() for text in texts
        )
        assert raw.decode() == "The naïve 世 says"
    else:
        assert UNKNOWN in texts and not shown["exact"]


def test_every_token_has_a_text(place: Path):
    for name in KINDS:
        tokenizer = prepare(recipe(place, name)).tokenizer
        assert sorted(list_readable_tokens(tokenizer)) == list(range(tokenizer.vocabulary))


def test_page_is_self_contained_and_escapes_text(place: Path):
    data = prepare(recipe(place, "word"))
    written = render_tokenizer_page(
        measure_tokenizer(recipe(place, "word"), data), describe_tokens(data.tokenizer, "The <script> ")
    )
    assert written.startswith("<!doctype html>") and "http" not in written and "<script" not in written
    assert "nothing" in written and "<b>" not in written and "english.jsonl" in written


@pytest.fixture
def toml(place: Path, tmp_path: Path) -> Path:
    path = tmp_path / "r.toml"
    path.write_text(
        '[model]\nfamily = "llama"\nlayers = 1\nhidden = 8\nheads = 1\n'
        f'[data]\nsource = ["{place}/code", "{place}/english.jsonl"]\ntokenizer = "word"\nvocabulary = 320\n'
        f'sequence = 16\nvalidation_fraction = 0.2\nshard_tokens = {SMALL}\ncache = "{place}/cache"\n'
        "[train]\nsteps = 1\nbatch = 1\nlearning_rate = 1e-3\n"
    )
    return path


def test_the_command_prints_the_report_and_writes_the_page(
    command_line: Callable[..., Any], place: Path, toml: Path, tmp_path: Path
):
    html = tmp_path / "page.html"
    found = command_line("data", "tokenizer", toml, "--text", "The says", "--html", html, "--json")
    document = json.loads(found.output)
    assert found.code == 0 and document["schema"] == 1
    report = measure_tokenizer(recipe(place, "word"), prepare(recipe(place, "word")))
    assert {key: document[key] for key in report} == json.loads(json.dumps(report))
    assert document["shown"]["tokens"][1]["text"] == " says" and html.read_text().startswith("<!doctype")
    text = command_line("data", "tokenizer", toml, "data.tokenizer=bpe").output
    assert "bytes per token" in text and "decoded" in text and str(place / "code") in text.replace("\n", "")


def test_tokens_that_look_like_markup_are_shown_verbatim(command_line: Callable[..., Any], toml: Path):
    text = command_line("data", "tokenizer", toml, "data.tokenizer=bytes", "--text", "[/x] [red]").output
    assert "‹[› ‹/› ‹x› ‹]›" in text
    word = command_line("data", "tokenizer", toml, "data.tokenizer=character", "--text", "[b]").output
    assert "‹b›" in word


def test_unwritable_page_is_one_error_line(command_line: Callable[..., Any], toml: Path, tmp_path: Path):
    found = command_line("data", "tokenizer", toml, "--html", tmp_path / "no" / "page.html")
    assert found.code == 2 and found.errors.splitlines()[-1].startswith("meshwright: error: cannot write")
