"""Language identification works offline, and only documents in the configured languages are kept."""

from __future__ import annotations

import re
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
    language.load_identifier.cache_clear()
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    with pytest.raises(UserError, match=r"pip install 'meshwright\[language\]'"):
        Cleaner(CleanRecipe(languages=["en"]))


# Messages of programs that the fixed threshold 0.65 drops.
SHORT = {
    "en": ("Trough Border", "Noting disappearance of"),
    "de": ("Ungültiger Dateiname", "Verfügbare Hilfe:", "Ausgabefach:"),
    "fr": ("Clé d'enregistrement invalide", "Pas de la progression en pulsation"),
    "es": ("Cualquier tecla Alt", "No se permite el elemento dentro de"),
    "sv": ("Barnpackningsriktning", "Alternativ som anger det vertikala beteendet på barnet"),
    "nl": ("Verzoekmodus", "Stuurprogramma ontbreekt"),
    "it": ("Inchiostro in esaurimento", "Testo riepilogo notifica."),
    "pl": ("Pusta płyta DVD", "Kolor tła akapitu"),
}


def test_short_texts_of_the_right_language_are_kept_and_those_of_others_dropped():
    texts = [(code, text) for code, pair in SHORT.items() for text in pair]
    assert all(language.measure_languages(text)[code] < 0.65 for code, text in texts)
    kept = [
        (code, asked)
        for asked in SHORT
        for code, text in texts
        if Cleaner(CleanRecipe(languages=[asked])).judge_document(text).rule is None
    ]
    assert kept == [(code, code) for code, _ in texts]  # at most 0.2 % of the 112 others: none


def test_threshold_depends_on_length_and_never_exceeds_the_recipe():
    found = [language.choose_threshold(count, 0.65) for count in (1, 19, 20, 39, 40, 99, 100, 10_000)]
    assert found == [0.25, 0.25, 0.20, 0.20, 0.10, 0.10, 0.65, 0.65]
    assert language.choose_threshold(10, 0.05) == 0.05
    assert language.describe_thresholds(0.65) == ("0.25 below 20, 0.20 below 40, 0.10 below 100 characters, else 0.65")


def test_probabilities_of_all_listed_languages_count_together():
    text = "Datoteka ne postoji na ovom mjestu i ne može se otvoriti, a korisnik o tome nije obaviješten na vrijeme."
    measured, several = language.measure_languages(text), ["hr", "bs", "sr"]  # which are much alike
    assert max(measured[code] for code in several) < 0.9 < sum(measured[code] for code in several)
    assert language.find_foreign_language(text, several, 0.9) is None
    found = language.find_foreign_language(text, several[:1], 0.9)
    assert found is not None and re.fullmatch(
        r"(hr|bs, probability 0\.\d\d; of hr), probability 0\.\d\d < 0\.90", found
    )
