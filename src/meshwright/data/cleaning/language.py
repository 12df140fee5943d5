"""Language identification by py3langid: 97 languages, a model inside the package, no network."""

from __future__ import annotations

from functools import cache
from typing import Any

from meshwright.errors import UserError
from meshwright.names import nearest

_SAMPLE = 1_000  # characters read at the beginning and in the middle; more would change no result


def check_languages(languages: list[str]) -> None:
    """Raise `UserError` unless the identification model knows every code of `languages` (ISO 639-1, such as "en")."""
    known = [str(code) for code in _load_identifier().labels]
    for language in languages:
        if language not in known:
            close = nearest(language, known)
            hint = f'did you mean "{close}"?' if close else "codes are those of ISO 639-1, such as en, de, zh"
            raise UserError(f'data.clean.languages: unknown language "{language}"; {hint}')


def identify_language(text: str) -> tuple[str, float]:
    """Identify the most probable language of a text from its beginning and middle; returns (ISO 639-1 code, probability
    in [0, 1]).
    """
    if len(text) > 3 * _SAMPLE:
        middle = len(text) // 2
        text = f"{text[:_SAMPLE]}\n{text[middle : middle + _SAMPLE]}"
    code, probability = _load_identifier().classify(text)
    return str(code), float(probability)


@cache
def _load_identifier() -> Any:
    """Load py3langid's language identification model. Raises `UserError` if the package is not installed."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise UserError(
            "data.clean.languages needs py3langid: run `pip install 'meshwright[language]'` or remove the key"
        ) from None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
