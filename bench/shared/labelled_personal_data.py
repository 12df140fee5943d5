"""Texts with labelled personal data and lookalikes, and precision and recall of finders on them.

`personal_data_held_out.jsonl` was written before the rules, which were made on `personal_data_development.jsonl` and on
manuals. One case is a line: the kind that it is about, its text, and the spans in it, in their order, as [kind, words].
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from meshwright.data.cleaning.personal_data import Span

DATA = Path(__file__).parent.parent / "data"
PARTS = ("held_out", "development")
KINDS = ("email", "phone", "ip")


@dataclass(frozen=True)
class Case:
    """A labelled text. about: the kind that it has, or looks as if it had. spans: what a finder should return."""

    about: str
    text: str
    spans: frozenset[Span]


@dataclass
class Score:
    """Numbers of spans that a finder returns rightly (to the character), returns wrongly, and misses."""

    right: int = 0
    wrong: int = 0
    missed: int = 0

    @property
    def precision(self) -> float:
        """Fraction of the returned spans that are right."""
        return self.right / (self.right + self.wrong)

    @property
    def recall(self) -> float:
        """Fraction of the labelled spans that are returned."""
        return self.right / (self.right + self.missed)


def load_cases(part: str) -> list[Case]:
    """Read the cases of a part, "held_out" or "development"."""
    lines = (DATA / f"personal_data_{part}.jsonl").read_text(encoding="utf-8").splitlines()
    return [_read_case(line) for line in lines]


def _read_case(line: str) -> Case:
    """Parse a line and locate its spans."""
    fields = json.loads(line)
    spans, end = [], 0
    for kind, words in fields["spans"]:
        start = fields["text"].index(words, end)
        end = start + len(words)
        spans.append(Span(start, end, kind))
    return Case(fields["about"], fields["text"], frozenset(spans))


def score_finder(cases: Iterable[Case], find: Callable[[str], Iterable[Span]]) -> dict[str, Score]:
    """Return {kind: score} of `find`, which returns the spans in a text, and under "all" that of all kinds together."""
    scores = {kind: Score() for kind in (*KINDS, "all")}
    for case in cases:
        found = set(find(case.text))
        for kind, score in scores.items():
            mine = {span for span in found if kind in (span.kind, "all")}
            labelled = {span for span in case.spans if kind in (span.kind, "all")}
            score.right += len(mine & labelled)
            score.wrong += len(mine - labelled)
            score.missed += len(labelled - mine)
    return scores
