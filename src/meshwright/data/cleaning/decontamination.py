"""Decontamination: documents that share n-grams of words with an evaluation set (GPT-3, arXiv:2005.14165,
appendix C).
"""

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
from meshwright.data.records.record_files import format_position, iterate_file_records
from meshwright.data.sources.contents import hash_source
from meshwright.data.sources.reading import Reader, open_source
from meshwright.data.sources.resolution import KEYED_FORMATS, SourceFile, find_files
from meshwright.data.sources.streams import Stream
from meshwright.errors import UserError
from meshwright.untrusted import describe_parse_error

SHORTEST = 8  # words; overlap with a shorter example is no evidence (arXiv:2005.14165, appendix C)
_KEY = "data.clean.evaluation_sets"
_UNDECODABLE = re.compile("[\udc80-\udcff]")


class EvaluationSets:
    """Detector of text that overlaps with evaluation sets, such as benchmarks. It stores the hashes of all word n-grams
    of their examples, in lower case without punctuation (n = 13 in arXiv:2005.14165, appendix C).

    A text file or page is one example. A JSON or Parquet record is one example, of all its strings joined. If a record
    has several strings, each string is a further example. An example with fewer than n words counts as one n-gram if it
    has at least 8 words, and is ignored otherwise.
    """

    def __init__(self, paths: Sequence[str], n: int) -> None:
        """Read the evaluation sets and hash their n-grams. paths: path, glob or URL of each evaluation set. n: words in
        an n-gram. Raises `UserError` for a set that cannot be read or has no example of 8 words.
        """
        self.n = n
        runs: dict[int, list[Hashes]] = defaultdict(list)
        for path in paths:
            before = sum(map(len, runs.values()))
            for text in itertools.chain.from_iterable(map(_iterate_examples, _find_files(path))):
                words = Words(text)
                if len(words) >= min(n, SHORTEST):
                    runs[min(n, len(words))].append(words.hash_ngrams(min(n, len(words))))
            if sum(map(len, runs.values())) == before:
                raise UserError(
                    f"data.clean.evaluation_sets: {path} has no example of at least {min(n, SHORTEST)} words"
                )
        self.runs = {length: np.unique(np.concatenate(hashes)) for length, hashes in sorted(runs.items())}

    def measure_overlap(self, text: str) -> float:
        """Return the fraction, in [0, 1], of the words of `text` that are part of an n-gram of an evaluation set."""
        words = Words(text)
        change = np.zeros(len(words) + 1, np.int64)
        found = False
        for length, known in self.runs.items():
            keys = words.hash_ngrams(length)
            places = np.searchsorted(known, keys)
            places[places == len(known)] = 0
            hits = np.flatnonzero(known[places] == keys)
            if len(hits):
                found = True
                change[hits] += 1
                change[hits + length] -= 1
        return float((np.cumsum(change)[:-1] > 0).mean()) if found else 0.0


def hash_evaluation_sets(
    paths: Sequence[str], cache: Path | None = None, log: Callable[[str], None] = lambda line: None
) -> list[str]:
    """Return "format:SHA-256" of each file of the evaluation sets; the cache key of the prepared data contains it.
    paths: path, glob or URL of each set. Raises `UserError` if a file cannot be read.

    cache: directory that stores file listings of remote stores (None: not stored); log: receives a line when a store is
    unreachable and its stored listing is used.
    """
    return [f"{file.format}:{hash_source(file)}" for path in paths for file in _find_files(path, cache, log)]


def _find_files(
    path: str, cache: Path | None = None, log: Callable[[str], None] = lambda line: None
) -> list[SourceFile]:
    """Return the files of the evaluation set `path` (path, glob or URL). cache: directory that stores file listings of
    remote stores (None: not stored); log: receives a line when a stored listing is used.
    """
    return find_files([path], "auto", cache, _KEY, log, records=True)


def _iterate_examples(file: SourceFile) -> Iterator[str]:
    """Yield the text of each example in an evaluation file. A text file or page is one example. A JSON or Parquet
    record gives all its strings joined by line feeds and, if there are several, each string by itself. Raises
    `UserError` if the file is not UTF-8 text or not valid JSON.
    """
    if file.format not in KEYED_FORMATS:
        for document in Reader(longest=sys.maxsize).read_documents(file):
            if document.text is None or _UNDECODABLE.search(document.text):
                raise UserError(f"{_KEY}: {file.path} cannot be read: it is not UTF-8 text")
            yield document.text
        return
    with open_source(file) as stream:
        for value in _iterate_json(file, stream) if file.format == "json" else _iterate_records(file, stream):
            strings = list(_iterate_strings(value))
            yield "\n".join(strings)
            if len(strings) > 1:
                yield from strings


def _iterate_records(file: SourceFile, stream: Stream) -> Iterator[Any]:
    """Yield the parsed records of a JSON Lines or Parquet file. stream: the file's decompressed bytes. Raises
    `UserError` for a record that cannot be parsed.
    """
    for position, value, problem in iterate_file_records(file, stream, None, "utf-8"):
        if problem is not None:
            raise UserError(f"{_KEY}: {format_position(file, position)} {problem}")
        yield value


def _iterate_json(file: SourceFile, stream: Stream) -> Iterator[Any]:
    """Parse a file that is one JSON document and yield the elements of its list, or the whole value if it is no list.
    stream: the file's decompressed bytes. file: names the file in errors. Raises `UserError` if the file is not JSON.
    """
    try:
        value = json.loads(stream.read().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{_KEY}: {file.path} is not JSON ({describe_parse_error(error)})") from None
    yield from value if isinstance(value, list) else [value]


def _iterate_strings(value: Any) -> Iterator[str]:
    """Yield all strings inside a JSON value (the values of objects, not their keys), in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _iterate_strings(item)
