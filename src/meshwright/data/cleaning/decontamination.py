"""Documents that hold pieces of an evaluation set: runs of words that both have, as GPT-3's authors looked for them."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.cleaning.words import Hashes, Words
from meshwright.data.records.record_files import file_records
from meshwright.data.sources.contents import digest_of
from meshwright.data.sources.reading import Reader, opened
from meshwright.data.sources.resolution import KEYED_FORMATS, SourceFile, find_files
from meshwright.data.sources.streams import Stream
from meshwright.errors import UserError

SHORTEST = 8  # words; a shorter example of an evaluation set says nothing (arXiv:2005.14165, appendix C)
_KEY = "data.clean.evaluation_sets"
_UNDECODABLE = re.compile("[\udc80-\udcff]")


class EvaluationSets:
    """The runs of `n` folded words of evaluation sets (13 in arXiv:2005.14165, appendix C).

    A set is whatever a source may be. An example of 8 to n - 1 words counts as one run. A text file is one example, so
    is a page; so is a record of JSON or a row of Parquet: all the strings in it, in their order, and each of them
    alone.
    """

    def __init__(self, paths: Sequence[str], n: int) -> None:
        """`UserError`: a set that cannot be read, or that holds no example of 8 words."""
        self.n = n
        runs: dict[int, list[Hashes]] = defaultdict(list)
        for path in paths:
            before = sum(map(len, runs.values()))
            for text in itertools.chain.from_iterable(map(_examples, _files(path))):
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


def digests(
    paths: Sequence[str], cache: Path | None = None, log: Callable[[str], None] = lambda line: None
) -> list[str]:
    """The SHA-256 of the files of each evaluation set, and how they are read. `UserError`: one cannot be read.

    `cache`, `log`: as of `find_files`.
    """
    return [f"{file.format}:{digest_of(file)}" for path in paths for file in _files(path, cache, log)]


def _files(path: str, cache: Path | None = None, log: Callable[[str], None] = lambda line: None) -> list[SourceFile]:
    return find_files([path], "auto", cache, _KEY, log, records=True)


def _examples(file: SourceFile) -> Iterator[str]:
    if file.format not in KEYED_FORMATS:
        for document in Reader(longest=sys.maxsize).documents(file):
            if document.text is None or _UNDECODABLE.search(document.text):
                raise UserError(f"{_KEY}: {file.path} cannot be read: it is not UTF-8 text")
            yield document.text
        return
    with opened(file) as stream:
        for value in _json_document(file, stream) if file.format == "json" else _records(file, stream):
            strings = list(_strings(value))
            yield "\n".join(strings)
            if len(strings) > 1:
                yield from strings


def _records(file: SourceFile, stream: Stream) -> Iterator[Any]:
    for record in file_records(file, stream, None, "utf-8"):
        if record.problem is not None:
            raise UserError(f"{_KEY}: {record.where} {record.problem}")
        yield record.value


def _json_document(file: SourceFile, stream: Stream) -> Iterator[Any]:
    """The records of a JSON list; of another JSON document all of it."""
    try:
        value = json.loads(stream.read().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{_KEY}: {file.path} is not JSON ({error})") from None
    yield from value if isinstance(value, list) else [value]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
