"""Thresholds of the language rule by length: calibrated on half of a machine's message catalogs, tested on the others.

python bench/language_thresholds.py [--catalogs /usr/share/locale] [--texts 150]

Texts are messages of gettext catalogs and their translations in 36 languages, without placeholders, markup and options,
of at least 70 % letters. Programs are split into halves by the hash of their name. A text is kept for a language if the
probability of this language reaches the threshold. A threshold is the smallest multiple of 0.05 at which at most 0.2 %
of the texts of other languages are kept for a language, on average over languages, on the first half.
"""

from __future__ import annotations

import argparse
import gettext
import hashlib
import random
import re
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from common import write_result
from meshwright.data.cleaning.language import SHORT_TEXTS, measure_languages

LANGUAGES = [
    *("ar", "bg", "ca", "cs", "da", "de", "el", "en", "es", "et", "fa", "fi", "fr", "he", "hi", "hr", "hu", "id", "it"),
    *("ja", "ko", "lt", "lv", "nl", "pl", "pt", "ro", "ru", "sk", "sl", "sv", "th", "tr", "uk", "vi", "zh"),
]
DIRECTORIES = {"zh": ("zh_CN", "zh_TW", "zh_Hans"), "pt": ("pt", "pt_BR")}
BINS = ((10, 20), (20, 40), (40, 100), (100, 10_000))
FALSE_ACCEPTS = 0.002
FIXED = 0.65
_NO_WORDS = re.compile(
    r"%[-#0-9.*$]*(?:\([a-z_]+\))?[a-zA-Z%]|\{[^}]*\}|<[^>]*>|&[a-z]+;|[_&](?=\w)|https?://\S+|--?[a-z][\w-]*|\\[a-z]"
)


def read_catalogs(root: Path) -> dict[tuple[str, int], set[str]]:
    """{(language, half): texts}."""
    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    for language in LANGUAGES:
        for name in DIRECTORIES.get(language, (language,)):
            for path in sorted((root / name / "LC_MESSAGES").glob("*.mo")):
                if path.stem.startswith("iso_"):  # names of countries and languages
                    continue
                half = int(hashlib.sha256(path.stem.encode()).hexdigest(), 16) % 2
                try:
                    with path.open("rb") as file:
                        catalog: dict[Any, str] = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
                except UnicodeDecodeError:  # some name a wrong charset
                    continue
                for key, translation in catalog.items():
                    message = key[0] if isinstance(key, tuple) else key
                    if message and translation != message:
                        found[language, half].update(strip(translation))
                        found["en", half].update(strip(message))
    return found


def strip(text: str) -> list[str]:
    """The text without what is no language, if most of it is letters."""
    text = " ".join(_NO_WORDS.sub(" ", text).split())
    return [text] if len(text) >= BINS[0][0] and sum(map(str.isalpha, text)) >= 0.7 * len(text) else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--catalogs", type=Path, default=Path("/usr/share/locale"))
    parser.add_argument("--texts", type=int, default=150, help="of a language, a half and a range of lengths")
    arguments = parser.parse_args()
    catalogs = read_catalogs(arguments.catalogs)
    draw = random.Random(0)
    figures: list[dict[str, Any]] = []
    for low, high in BINS:
        own: list[list[float]] = [[], []]  # probability of the text's language
        others: list[list[float]] = [[], []]  # of each other language
        best: list[list[bool]] = [[], []]  # the text's language is the most probable one
        for half in (0, 1):
            for language in LANGUAGES:
                texts = sorted(text for text in catalogs[language, half] if low <= len(text) < high)
                for text in draw.sample(texts, min(len(texts), arguments.texts)):
                    measured = measure_languages(text)
                    own[half].append(measured[language])
                    others[half] += [measured[other] for other in LANGUAGES if other != language]
                    best[half].append(max(measured, key=measured.__getitem__) == language)

        def rate(values: list[float], threshold: float) -> float:
            return round(float((np.array(values) >= threshold).mean()), 5)

        grid = [step / 20 for step in range(1, 20)]
        chosen = next(threshold for threshold in grid if rate(others[0], threshold) <= FALSE_ACCEPTS)
        used = next((threshold for longest, threshold in SHORT_TEXTS if low < longest), FIXED)
        figures.append(
            {
                "characters": [low, high],
                "texts": [len(own[0]), len(own[1])],
                "calibrated_threshold": chosen,
                "threshold": used,
                "held_out": {
                    "most_probable": round(float(np.mean(best[1])), 4),
                    **{
                        name: {"kept": rate(own[1], threshold), "false_accepts": rate(others[1], threshold)}
                        for name, threshold in (("fixed", FIXED), ("calibrated", chosen), ("used", used))
                    },
                },
            }
        )
    write_result(
        "language_thresholds",
        {"py3langid": metadata.version("py3langid"), "languages": LANGUAGES, "fixed": FIXED, "ranges": figures},
    )


if __name__ == "__main__":
    main()
