"""The heuristics with datatrove's defaults against datatrove's own filters: verdict, rule and kept lines of each text.

python bench/datatrove_heuristics.py PAGES

PAGES is a directory of saved pages (.html), as for bench/page_extraction.py. Texts are the main texts of the pages by
both extractors, their paragraphs, prefixes and shuffled, repeated and decorated versions, so that all rules apply.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)

sys.path.insert(0, str(Path(__file__).parent))
from common import write_result
from meshwright.data.cleaning import heuristics, heuristics_datatrove
from meshwright.data.sources.page_process import get_page_extractor
from meshwright.names import EXTRACTORS

FILTERS = {
    "gopher-quality": GopherQualityFilter(),
    "gopher-repetition": GopherRepetitionFilter(),
    "c4": C4QualityFilter(),
    "fineweb": FineWebQualityFilter(),
}
# datatrove's reason -> our rule.
REASONS = {
    "gopher_short_doc": "gopher_words", "gopher_long_doc": "gopher_words",
    "gopher_below_avg_threshold": "gopher_word_length", "gopher_above_avg_threshold": "gopher_word_length",
    "gopher_too_many_hashes": "gopher_symbols", "gopher_too_many_ellipsis": "gopher_symbols",
    "gopher_too_many_bullets": "gopher_bullets", "gopher_too_many_end_ellipsis": "gopher_ellipses",
    "gopher_below_alpha_threshold": "gopher_letters", "gopher_enough_stop_words": "gopher_stop_words",
    "dup_para_frac": "gopher_duplicate_paragraphs", "dup_para_char_frac": "gopher_duplicate_paragraph_characters",
    "dup_line_frac": "gopher_duplicate_lines", "dup_line_char_frac": "gopher_duplicate_line_characters",
    **{f"top_{n}_gram": f"gopher_top_{n}_gram" for n in (2, 3, 4)},
    **{f"duplicated_{n}_n_grams": f"gopher_duplicate_{n}_grams" for n in range(5, 11)},
    "lorem_ipsum": "c4_lorem_ipsum", "curly_bracket": "c4_curly_bracket", "too_few_sentences": "c4_sentences",
    "empty": "fineweb_punctuation", "line_punct_ratio": "fineweb_punctuation",
    "short_line_ratio": "fineweb_short_lines",
    "char_dup_ratio": "fineweb_duplicate_lines", "list_ratio": "fineweb_newlines",
}  # fmt: skip


def vary(texts: list[str], seed: int) -> list[str]:
    """The texts, their parts, and versions that rules are made for."""
    draw = random.Random(seed)
    found = []
    for text in texts:
        lines = text.split("\n")
        paragraphs = [line for line in lines if len(line) > 60]
        some = draw.sample(lines, min(len(lines), 6))
        found += [text, text[: draw.randint(50, 1500)], "\n".join(draw.sample(lines, len(lines)))]
        found += ["\n".join(paragraphs), " ".join(lines), "\n\n".join([*paragraphs[:3], *paragraphs[:2]])]
        found += ["\n".join(lines + some), "\n".join(lines + some[:1]), "\n".join(f"- {line}" for line in paragraphs)]
        found += [text.replace(".", "..."), text.replace(". ", ".\n"), text.replace(" ", " # ", len(lines))]
        found += ["\n".join(f"{line} …" if draw.random() < 0.35 else line for line in lines)]
        words = text.split()
        at = draw.randrange(max(1, len(words)))
        inserted = draw.choice(["lorem ipsum", "{", "JavaScript", "Privacy Policy.", "[3]", "IS_ALPHA", "x" * 1001])
        found += [" ".join([*words[:at], inserted, *words[at:]]), " ".join(words[at : at + 20] * 6 + words[:300])]
        found += [" ".join(word if draw.random() < 0.75 else f"{draw.randint(0, 999)}" for word in words)]
    return [text for text in dict.fromkeys(found) if text.strip()]


def ours(family: str, text: str) -> tuple[str | None, str]:
    if family == "c4":
        text, _ = heuristics_datatrove.filter_c4_lines(text)
    found = heuristics_datatrove.CHECKS[family](text)
    return (found[0] if found else None), text


def theirs(family: str, text: str) -> tuple[str | None, str]:
    document = Document(text=text, id="0")
    answer = FILTERS[family].filter(document)
    return (REASONS[answer[1]] if isinstance(answer, tuple) else None), document.text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", type=Path)
    arguments = parser.parse_args()
    pages = [page.read_text(errors="replace") for page in sorted(arguments.pages.rglob("*.html"))]
    main_texts = [
        text for name in EXTRACTORS for page in pages if (text := get_page_extractor(name).extract_text(page)[0])
    ]
    texts = vary(main_texts, 0)
    figures: dict[str, Any] = {}
    seconds = Counter[str]()
    for family in FILTERS:
        rules, unlike, like_papers = Counter[str](), [], 0
        for text in texts:
            begun = time.process_time()
            mine = ours(family, text)
            between = time.process_time()
            other = theirs(family, text)
            seconds.update({"ours": between - begun, "datatrove": time.process_time() - between})
            rules[other[0] or "kept"] += 1
            if mine[0] != other[0] or (mine[0] is None and mine[1] != other[1]):
                unlike.append([mine[0], other[0], text[:80]])
            plain = heuristics.filter_c4_lines(text)[0] if family == "c4" else text
            like_papers += (heuristics.CHECKS[family](plain) is None) == (other[0] is None)
        figures[family] = {
            "unlike": len(unlike),
            "examples": unlike[:3],
            "datatrove": dict(rules.most_common()),
            "share_with_the_verdict_of_the_papers_values": round(like_papers / len(texts), 4),
        }
    versions = {name: metadata.version(name) for name in ("datatrove", "spacy")}
    write_result(
        "datatrove_heuristics",
        {"versions": versions, "texts": len(texts), "cpu_seconds": dict(seconds), "families": figures},
    )


if __name__ == "__main__":
    main()
