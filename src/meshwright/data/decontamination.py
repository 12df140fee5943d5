"""Documents that hold pieces of an evaluation set: runs of words that both have, as GPT-3's authors looked for them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.files import sha256_of_file
from meshwright.data.words import Hashes, Words
from meshwright.errors import UserError

SHORTEST = 8  # words; a shorter example of an evaluation set says nothing (arXiv:2005.14165, appendix C)


class EvaluationSets:
    """The runs of `n` folded words of evaluation sets (13 in arXiv:2005.14165, appendix C).

    An example of 8 to n - 1 words counts as one run. A text file is one example, a line of JSON Lines is one: all the
    strings in it, in their order, and each of them alone.
    """

    def __init__(self, paths: Sequence[str], n: int) -> None:
        """`UserError`: a set that cannot be read, or that holds no example of 8 words."""
        self.n = n
        runs: dict[int, list[Hashes]] = defaultdict(list)
        for path in paths:
            before = sum(map(len, runs.values()))
            for text in _examples(Path(path).expanduser()):
                words = Words(text)
                if len(words) >= min(n, SHORTEST):
                    runs[min(n, len(words))].append(words.runs(min(n, len(words))))
            if sum(map(len, runs.values())) == before:
                raise UserError(f"data.clean.evaluation_sets: {path} holds no example of {min(n, SHORTEST)} words")
        self.runs = {length: np.unique(np.concatenate(hashes)) for length, hashes in sorted(runs.items())}

    def share(self, text: str) -> float:
        """The share of a text's words that stand in a run which an evaluation set holds too."""
        words = Words(text)
        change = np.zeros(len(words) + 1, np.int64)
        found = False
        for length, known in self.runs.items():
            keys = words.runs(length)
            places = np.searchsorted(known, keys)
            places[places == len(known)] = 0
            hits = np.flatnonzero(known[places] == keys)
            if len(hits):
                found = True
                change[hits] += 1
                change[hits + length] -= 1
        return float((np.cumsum(change)[:-1] > 0).mean()) if found else 0.0


def digests(paths: Sequence[str]) -> list[str]:
    """The SHA-256 of each evaluation set, and how it is read. `UserError`: one cannot be read."""
    found = []
    for path in paths:
        try:
            kind = "lines" if _has_lines(Path(path)) else "text"
            found.append(f"{kind}:{sha256_of_file(Path(path).expanduser())}")
        except OSError as error:
            raise _unreadable(path, error.strerror or str(error)) from None
    return found


def _unreadable(path: str | Path, reason: str) -> UserError:
    return UserError(f"data.clean.evaluation_sets: {path} cannot be read: {reason}")


def _has_lines(path: Path) -> bool:
    """Whether each line is an example: JSON Lines."""
    return path.suffix.lower() in (".jsonl", ".ndjson")


def _examples(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or "it is not UTF-8 text"
        raise _unreadable(path, reason) from None
    if not _has_lines(path):
        yield text
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            strings = list(_strings(json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise UserError(f"data.clean.evaluation_sets: {path}:{number}: not JSON ({error})") from None
        yield "\n".join(strings)
        if len(strings) > 1:
            yield from strings


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
