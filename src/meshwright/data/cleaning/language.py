"""Language identification by py3langid: 97 languages, a model inside the package, no network."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from meshwright.errors import UserError
from meshwright.names import nearest

# (Texts of fewer characters, probability that they must reach). Calibrated by bench/language_thresholds.py so that on
# average at most 0.2 % of the texts of another language are kept for a language.
SHORT_TEXTS = ((20, 0.25), (40, 0.20), (100, 0.10))
_SAMPLE = 1_000  # characters read at the beginning and in the middle; more would change no result


def check_languages(languages: list[str]) -> None:
    """Raise `UserError` unless the identification model knows every code of `languages` (ISO 639-1, such as "en")."""
    known = [str(code) for code in load_identifier().labels]
    for language in languages:
        if language not in known:
            close = nearest(language, known)
            hint = f'did you mean "{close}"?' if close else "codes are those of ISO 639-1, such as en, de, zh"
            raise UserError(f'data.clean.languages: unknown language "{language}"; {hint}')


def choose_threshold(characters: int, minimum: float) -> float:
    """Return the language probability that a text of `characters` characters must reach to be kept: `minimum`, or the
    threshold of the table `SHORT_TEXTS` for its length, whichever is lower."""
    return min(minimum, next((threshold for longest, threshold in SHORT_TEXTS if characters < longest), minimum))


def describe_thresholds(minimum: float) -> str:
    """Return the probability thresholds by text length as text, such as "0.25 below 20 characters, ..., else 0.65".
    minimum: threshold of long texts."""
    below = [f"{min(minimum, threshold):.2f} below {longest}" for longest, threshold in SHORT_TEXTS]
    return f"{', '.join(below)} characters, else {minimum:.2f}"


def measure_languages(text: str) -> dict[str, float]:
    """Identify the language of a text from its beginning and middle; returns {ISO 639-1 code: probability in [0, 1]}
    of all known languages, the most probable first.
    """
    if len(text) > 3 * _SAMPLE:
        middle = len(text) // 2
        text = f"{text[:_SAMPLE]}\n{text[middle : middle + _SAMPLE]}"
    return {str(code): float(probability) for code, probability in load_identifier().rank(text)}


def find_foreign_language(text: str, languages: Sequence[str], minimum: float) -> str | None:
    """Check the language of a text. Return None if the text is in one of `languages`: the sum of their probabilities
    reaches the threshold for the text's length. Otherwise return the most probable language and this sum as text, such
    as "fr, probability 0.91; of en, probability 0.02 < 0.65". languages: ISO 639-1 codes. minimum: threshold for long
    texts."""
    measured = measure_languages(text)
    probability = sum(measured[language] for language in {*languages})
    threshold = choose_threshold(len(text), minimum)
    if probability >= threshold:
        return None
    (first, own), *_ = measured.items()
    listed = "" if first in languages else f", probability {own:.2f}; of {', '.join(languages)}"
    return f"{first}{listed}, probability {probability:.2f} < {threshold:.2f}"


@cache
def load_identifier() -> Any:
    """Load py3langid's language identification model. Raises `UserError` if the package is not installed."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise UserError(
            "data.clean.languages needs py3langid: run `pip install 'meshwright[language]'` or remove the key"
        ) from None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
