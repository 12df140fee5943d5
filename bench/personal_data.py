"""Masks over personal data: precision and recall on labelled texts, against datatrove and libphonenumber; their speed.

python bench/personal_data.py [--corpus PATH ... --sample 100]

The texts are those of bench/data/personal_data_*.jsonl. datatrove's formatter masks e-mail addresses and
public IPv4 addresses; libphonenumber's matcher (its Python port, region US) finds telephone numbers, and its example
numbers of all regions are found or not. With --corpus, the text files under the paths are searched, and a sample of the
hits is printed for the eye, without writing a result.
"""

from __future__ import annotations

import argparse
import gzip
import random
import statistics
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import phonenumbers
from datatrove.pipeline.formatters import PIIFormatter

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent))
from bench.shared.labelled_personal_data import KINDS, PARTS, load_cases, score_finder
from common import write_result
from meshwright.data.cleaning.finders.phone_numbers import find_phone_numbers
from meshwright.data.cleaning.personal_data import Span, find_personal_data

TYPES = phonenumbers.PhoneNumberType
FORMATS = phonenumbers.PhoneNumberFormat
FORMATTER = PIIFormatter()


def find_ours(text: str) -> list[Span]:
    """Return the spans that the masks replace."""
    return find_personal_data(text, KINDS)


def find_datatroves(text: str) -> Iterator[Span]:
    """Yield the spans that datatrove's formatter replaces."""
    for kind, replacer in (("email", FORMATTER.emails_replacer), ("ip", FORMATTER.ip_replacer)):
        for match in replacer.regex.finditer(text):
            if replacer.validator is None or replacer.validator(match[0]):
                yield Span(*match.span(), kind)


def find_libphonenumbers(text: str) -> Iterator[Span]:
    """Yield the telephone numbers that libphonenumber finds in a text of the United States."""
    for match in phonenumbers.PhoneNumberMatcher(text, "US"):
        yield Span(match.start, match.end, "phone")


FINDERS: dict[str, tuple[Callable[[str], Any], tuple[str, ...]]] = {
    "meshwright": (find_ours, (*KINDS, "all")),
    "datatrove": (find_datatroves, ("email", "ip")),
    "phonenumbers": (find_libphonenumbers, ("phone",)),
}


def score_all() -> dict[str, Any]:
    """Precision and recall of every finder, by part and kind."""
    result: dict[str, Any] = {}
    for part in PARTS:
        cases = load_cases(part)
        result[part] = {"cases": len(cases)}
        for name, (find, kinds) in FINDERS.items():
            scores = score_finder(cases, find)
            result[part][name] = {
                kind: {
                    **vars(scores[kind]),
                    "precision": round(scores[kind].precision, 3),
                    "recall": round(scores[kind].recall, 3),
                }
                for kind in kinds
            }
    return result


def find_examples() -> dict[str, dict[str, int]]:
    """Count libphonenumber's example numbers of all regions, and those found; national ones stand after "Tel:"."""
    counts = {name: {"numbers": 0, "found": 0} for name in ("international", "national")}
    for region in sorted(phonenumbers.SUPPORTED_REGIONS):
        for kind in (TYPES.FIXED_LINE, TYPES.MOBILE, TYPES.TOLL_FREE):
            number = phonenumbers.example_number_for_type(region, kind)
            if number is None:
                continue
            for name, form, before in (
                ("international", FORMATS.INTERNATIONAL, "reach me at "),
                ("international", FORMATS.E164, "reach me at "),
                ("national", FORMATS.NATIONAL, "Tel: "),
            ):
                written = phonenumbers.format_number(number, form)
                text = f"{before}{written}, thanks"
                counts[name]["numbers"] += 1
                counts[name]["found"] += [text[start:end] for start, end in find_phone_numbers(text)] == [written]
    return counts


def measure_speed(turns: int) -> dict[str, float]:
    """Megabytes per second of every finder on this Python's standard library, the median of `turns`."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:80]
    texts = [path.read_text(errors="replace") for path in paths]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    seconds: dict[str, list[float]] = {name: [] for name in FINDERS}
    for _ in range(turns):
        for name, (find, _) in FINDERS.items():
            begun = time.process_time()
            for text in texts:
                list(find(text))
            seconds[name].append(time.process_time() - begun)
    return {name: round(megabytes / statistics.median(times), 2) for name, times in seconds.items()}


def search_corpus(roots: list[Path], sample: int) -> None:
    """Print the number of hits in the text files under `roots`, and a sample of each kind in context."""
    draw = random.Random(0)
    hits: dict[str, list[str]] = {kind: [] for kind in KINDS}
    size = 0
    for path in sorted(path for root in roots for path in root.rglob("*") if path.is_file() and not path.is_symlink()):
        try:
            text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
        except (OSError, UnicodeDecodeError):
            continue
        size += len(text)
        for start, end, kind in find_ours(text):
            before, after = text[max(0, start - 60) : start], text[end : end + 30]
            hits[kind].append(repr(f"{before}[[{text[start:end]}]]{after}"))
    print(f"{size / 1e6:.1f} million characters: {Counter({kind: len(found) for kind, found in hits.items()})}")
    for kind, found in hits.items():
        distinct = sorted(set(found))
        for hit in draw.sample(distinct, min(sample, len(distinct))):
            print(kind, hit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, nargs="+")
    parser.add_argument("--sample", type=int, default=100)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.corpus:
        search_corpus(arguments.corpus, arguments.sample)
        return
    write_result(
        "personal_data",
        {
            **score_all(),
            "example_numbers": find_examples(),
            "megabytes_per_second": measure_speed(arguments.turns),
            "peers": {name: metadata.version(name) for name in ("datatrove", "phonenumbers")},
        },
    )


if __name__ == "__main__":
    main()
