"""Language identification works offline, and only documents in the configured languages are kept."""

from __future__ import annotations

import sys

import pytest

from meshwright.data.cleaning import language
from meshwright.data.cleaning.rules import Cleaner
from meshwright.errors import UserError
from meshwright.recipe import CleanRecipe

TEXTS = {
    "en": "The children went down to the river in the evening to watch the boats come home.",
    "de": "Die Kinder gingen am Abend zum Fluss hinunter, um die Boote heimkehren zu sehen.",
    "fr": "Les enfants descendaient le soir vers la rivière pour regarder rentrer les bateaux.",
    "ru": "Вечером дети спускались к реке посмотреть, как возвращаются домой лодки.",
    "zh": "傍晚，孩子们走到河边去看船只回家。",
}


@pytest.fixture(autouse=True)
def with_the_library() -> None:
    pytest.importorskip("py3langid")


@pytest.mark.parametrize("code", TEXTS)
def test_only_listed_languages_are_kept(code: str):
    assert Cleaner(CleanRecipe(languages=[code])).judge_document(TEXTS[code]).rule is None
    others = Cleaner(CleanRecipe(languages=[other for other in TEXTS if other != code]))
    assert others.judge_document(TEXTS[code]).rule == "language"
    assert others.judge_document(TEXTS[code], "code.py").rule is None  # source code is not checked for its language


def test_language_below_minimum_probability_is_dropped():
    assert (
        Cleaner(CleanRecipe(languages=["en"], minimum_language_probability=1.0)).judge_document("no 12").rule
        == "language"
    )


def test_unknown_language_is_refused():
    with pytest.raises(UserError, match='unknown language "english"'):
        Cleaner(CleanRecipe(languages=["english"]))


def test_missing_language_library_error_shows_install_command(monkeypatch: pytest.MonkeyPatch):
    language._load_identifier.cache_clear()
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    with pytest.raises(UserError, match=r"pip install 'meshwright\[language\]'"):
        Cleaner(CleanRecipe(languages=["en"]))
