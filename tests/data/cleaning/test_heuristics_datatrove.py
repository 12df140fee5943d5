"""The heuristics with datatrove's defaults give the verdicts that datatrove 0.10.1 with spaCy 3.8.18 gave."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.data.cleaning import heuristics, heuristics_datatrove
from meshwright.data.cleaning.rules import Cleaner, list_enabled_rules
from meshwright.errors import UserError
from meshwright.recipe import CleanRecipe

# Recorded by datatrove's filters on texts made of Meshwright's documentation, three for each rule.
VERDICTS = [json.loads(line) for line in Path(__file__).with_name("datatrove_verdicts.jsonl").read_text().splitlines()]


@pytest.fixture
def spacy() -> None:
    pytest.importorskip("spacy")


@pytest.mark.usefixtures("spacy")
@pytest.mark.parametrize("number", range(len(VERDICTS)))
def test_verdicts_and_kept_lines_are_those_of_datatrove(number: int):
    recorded: dict[str, Any] = VERDICTS[number]
    for family, rule in recorded["rules"].items():
        recipe = CleanRecipe(
            heuristics=[family], heuristics_like="datatrove", maximum_repetition=1.0, maximum_control_fraction=1.0
        )
        verdict = Cleaner(recipe).judge_document(recorded["text"])
        assert verdict.rule == rule, family
        if family == "c4" and rule is None:
            assert verdict.text == recorded["c4_text"]


def test_recorded_verdicts_differ_from_those_of_the_papers_values():
    def differs(recorded: dict[str, Any], family: str) -> bool:
        text = recorded["text"]
        if family == "c4":
            text = heuristics.filter_c4_lines(text)[0]
        found = heuristics.CHECKS[family](text) if text.strip() else ("c4_sentences", "")
        return (found is None) != (recorded["rules"][family] is None)

    for family in ("gopher-quality", "c4", "fineweb"):
        assert sum(differs(recorded, family) for recorded in VERDICTS) >= 1, family


def test_line_filter_needs_no_spacy_and_keeps_three_words_and_single_quotes():
    text = "Only three words.\nHe said 'no more'\nTwo words.\nWe use cookies on this page.\nSee [3] the page [edit]."
    assert heuristics_datatrove.filter_c4_lines(text) == (
        "Only three words.\nHe said 'no more'\nSee  the page .", 2
    )  # fmt: skip


def test_line_breaks_per_word_are_a_rule_of_datatrove_alone():
    enabled = {
        like: list_enabled_rules(CleanRecipe(heuristics=["fineweb"], heuristics_like=like))
        for like in ("papers", "datatrove")
    }
    assert set(enabled["datatrove"]) - set(enabled["papers"]) == {"fineweb_newlines"}


def test_missing_spacy_error_shows_install_command(monkeypatch: pytest.MonkeyPatch):
    heuristics_datatrove.load_spacy.cache_clear()
    monkeypatch.setitem(sys.modules, "spacy", None)
    with pytest.raises(UserError, match=r"pip install 'meshwright\[spacy\]'"):
        Cleaner(CleanRecipe(heuristics=["fineweb"], heuristics_like="datatrove"))
    Cleaner(CleanRecipe(heuristics_like="datatrove"))  # nothing needs it
