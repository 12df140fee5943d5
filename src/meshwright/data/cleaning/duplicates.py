"""Duplicate keys by an external sort: keys are partitioned on disk and sorted one partition at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

KEYS_PER_PARTITION = 1 << 21  # keys sorted at a time, about 100 MB
_MAX_PARTITIONS = 512  # files open at a time

Keys = NDArray[np.uint64]
Numbers = NDArray[np.int64]


def find_repeated_keys(
    chunks: Iterator[tuple[Keys, Numbers]], total: int, directory: Path, keys_per_partition: int | None = None
) -> Iterator[tuple[Numbers, Numbers]]:
    """Find the documents whose key equals the key of an earlier document, by a sort on disk. For each partition of the
    keys, yield two arrays, int64 [m]: the numbers of the m documents found, and for each of these documents the number
    of the first document with the same key.

    chunks: yields (keys, uint64 [n, words per key]; document numbers [n]), with ascending document numbers. total:
    expected number of keys, which determines the number of partitions. directory: for temporary files; created if
    needed. keys_per_partition: approximate number of keys in a partition, which is sorted in memory; None: 2^21.
    """
    parts = min(_MAX_PARTITIONS, -(-total // (keys_per_partition or KEYS_PER_PARTITION)))
    if parts <= 1:
        yield _find_repeated_in_memory([*chunks])
        return
    paths = [directory / f"{number:03d}.keys" for number in range(parts)]
    directory.mkdir(exist_ok=True)
    width = 1
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("wb")) for path in paths]
        for keys, numbers in chunks:
            width = keys.shape[1]
            # The high bits choose the part; keys are hashes, so parts are about as large.
            chosen = ((keys[:, 0] >> np.uint64(32)) * np.uint64(parts)) >> np.uint64(32)
            order = np.argsort(chosen, kind="stable")
            records = np.concatenate([keys, numbers[:, None].astype(np.uint64)], axis=1)[order]
            borders = np.searchsorted(chosen[order], np.arange(parts + 1))
            for file, begin, end in zip(files, borders, borders[1:], strict=False):
                file.write(records[begin:end].tobytes())
    for path in paths:
        records = np.fromfile(path, np.uint64).reshape(-1, width + 1)
        path.unlink()
        yield _find_repeated_in_memory([(records[:, :width], records[:, width].astype(np.int64))])
    directory.rmdir()


def _find_repeated_in_memory(chunks: Sequence[tuple[Keys, Numbers]]) -> tuple[Numbers, Numbers]:
    """Find the documents whose key equals the key of an earlier document. Return two arrays [m]: the numbers of the m
    documents found, and for each of these documents the number of the first document with the same key. chunks: (keys,
    uint64 [n, words per key]; document numbers [n]), with ascending document numbers."""
    if not chunks:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    keys = np.concatenate([keys for keys, _ in chunks])
    numbers = np.concatenate([numbers for _, numbers in chunks])
    order = np.lexsort(keys.T)  # stable: equal keys stay in the order of the documents
    keys, numbers = keys[order], numbers[order]
    first = np.ones(len(keys), bool)
    first[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    earliest = numbers[np.flatnonzero(first)[np.cumsum(first) - 1]]
    return numbers[~first], earliest[~first]
