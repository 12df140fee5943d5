"""Each cleaning rule drops its target and keeps other texts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.data.cleaning import heuristics_datatrove, language, rules
from meshwright.data.cleaning.repetition import measure_repeated_lines
from meshwright.data.cleaning.rules import RULES, Cleaner, is_code_file, list_enabled_rules
from meshwright.errors import UserError
from meshwright.recipe import CleanRecipe


def dropped(text: str | None, name: str = "", **clean: Any) -> str | None:
    return Cleaner(CleanRecipe(**clean)).judge_document(text, name).rule


ORDINARY = "def answer():\n\treturn 42  # größer als 41, 世界\n\x0c\n"


def test_ordinary_text_is_kept_unchanged():
    verdict = Cleaner(CleanRecipe()).judge_document(ORDINARY)
    assert verdict.rule is None and verdict.text == ORDINARY and verdict.content == ORDINARY.encode()


@pytest.mark.parametrize(
    ("rule", "text", "clean"),
    [
        ("encoding", None, {}),
        ("encoding", "a byte that did not decode: \udcff", {}),
        ("encoding", "half of a pair from a JSON escape: \ud83d", {}),
        ("control_characters", "\x1b[31mred\x1b[0m" * 3, {}),
        ("control_characters", "a\x00", {}),
        ("length", "", {}),
        ("length", " \n\t ", {}),
        ("length", "short", {"minimum_characters": 6}),
        ("length", "", {"minimum_characters": 0}),  # an empty text is always dropped
        ("length", "longer", {"maximum_characters": 5}),
        ("repetition", "the same line\n" * 10, {}),
    ],
)
def test_rule_drops_its_target(rule: str, text: str | None, clean: dict[str, Any]):
    assert rule in RULES
    assert dropped(text, **clean) == rule


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("x" * 99 + "\x07", {"maximum_control_fraction": 0.01}),
        ("sixsix", {"minimum_characters": 6, "maximum_characters": 6}),
        ("same\n" * 4 + "other\n" * 4, {"maximum_repetition": 0.75}),
        ("the same line\n" * 10, {"maximum_repetition": 1.0}),
    ],
)
def test_rule_keeps_values_at_its_threshold(text: str, clean: dict[str, Any]):
    assert dropped(text, **clean) is None


def test_digest_ignores_outer_white_space():
    cleaner = Cleaner(CleanRecipe())
    one, same, other = (cleaner.judge_document(text).digest for text in ("one", "\none \n", "One"))
    assert one == same != other


def test_repetition_is_fraction_of_repeated_lines():
    assert measure_repeated_lines("a\nb\n\n  a\nc\na") == pytest.approx(2 / 5)
    assert measure_repeated_lines("") == measure_repeated_lines("a\nb") == 0


def test_only_enabled_rules_run():
    assert list_enabled_rules(CleanRecipe()) == (
        *("encoding", "control_characters", "length", "repetition", "exact_duplicates"),
    )
    everything = CleanRecipe(
        required_keys={"url": "text"},
        languages=["en"],
        heuristics=["fineweb", "c4", "gopher-repetition", "gopher-quality"],
        blocked_words="words.txt",
        evaluation_sets=["set.jsonl"],
        heuristics_like="datatrove",
        near_duplicates=True,
        sentence_duplicates=True,
    )
    assert list_enabled_rules(everything, extracts=True) == RULES


@pytest.mark.parametrize(
    "library, clean",
    [("py3langid", {"languages": ["en"]}), ("spacy", {"heuristics": ["c4"], "heuristics_like": "datatrove"})],
)
def test_versions_of_libraries_are_in_the_cache_key_and_missing_ones_name_the_extra(
    library: str, clean: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    versions = {"py3langid": "1", "spacy": "1"}
    monkeypatch.setattr(rules.metadata, "version", lambda name: versions[name])
    first = rules.collect_key_fields(CleanRecipe(**clean), tmp_path, print)
    versions[library] = "2"
    assert rules.collect_key_fields(CleanRecipe(**clean), tmp_path, print) != first

    def miss(name: str) -> str:
        raise rules.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(rules.metadata, "version", miss)
    for module in ("spacy", "py3langid.langid"):
        monkeypatch.setitem(sys.modules, module, None)
    language.load_identifier.cache_clear()
    heuristics_datatrove.load_spacy.cache_clear()
    with pytest.raises(UserError, match=r"pip install 'meshwright\[(language|spacy)\]'"):
        rules.collect_key_fields(CleanRecipe(**clean), tmp_path, print)


def test_code_is_detected_by_file_name():
    assert all(map(is_code_file, ("a/b.py", "x.CPP", "lib.rs.gz", "stdlib/json/decoder.py", "long.py#2")))
    assert not any(map(is_code_file, ("a.wet.gz:17 http://a.b/c.html", "a.parquet:row 3", "a.wet:2 http://a.pl#2")))
    assert not any(map(is_code_file, ("a.txt", "corpus.jsonl:17", "README", "py", "a.py.txt", "corpus.json.txt:3")))


def test_prose_rules_skip_code_unless_enabled():
    code = "for i in range(3):\n    print(i)\n"
    assert dropped(code, "a.txt", heuristics=["gopher-quality"]) == "gopher_words"
    assert dropped(code, "a.py", heuristics=["gopher-quality"]) is None
    assert dropped(code, "a.py", heuristics=["gopher-quality"], heuristics_on_code=True) == "gopher_words"
