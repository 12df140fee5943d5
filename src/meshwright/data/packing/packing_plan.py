"""Plan of packing examples whole into rows: the options, best fit, truncation, and counts of preference pairs."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

OPEN_ROWS = 256  # rows with remaining capacity that best fit chooses from


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """Assignment of examples to R packed rows. An example is a parsed record of D documents (2 for preference pairs,
    else 1). K examples are in rows; the others are dropped.

    kept: int64 [K, D], tokens of each document after truncation. numbers: int64 [K], index of each packed example among
    all examples. order, bounds: int64 [K] and [R + 1]: row r contains the examples order[bounds[r]:bounds[r + 1]], as
    indices in [0, K). rows_by_source: number of rows of each data source; one number, for all sources, if rows may mix
    sources. report: counts by name, as `PackedExamples.report` lists them.

    For labelled examples (KTO), else empty: prompts: int64 [K], tokens before the response. partners: int64 [K], index
    in [0, K) of the example whose response replaces the original response in mismatched rows.
    """

    kept: NDArray[np.int64]
    numbers: NDArray[np.int64]
    order: NDArray[np.int64]
    bounds: NDArray[np.int64]
    rows_by_source: list[int]
    report: dict[str, int]
    prompts: NDArray[np.int64]
    partners: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackingSettings:
    """Options for packing examples (parsed records) into rows.

    documents_per_example: 1, or 2 for preference pairs. labelled: True for single responses with a label (KTO).
    train_on: tokens that are loss targets, "responses" or "all". pack: True if a row may contain several examples;
    False: one per row. too_long: treatment of examples longer than a row, "truncate", "drop" or "refuse" (raise
    `UserError`). decode: converts token ids to text, for error messages.
    """

    documents_per_example: int = 1
    labelled: bool = False
    train_on: str = "responses"
    pack: bool = True
    too_long: str = "truncate"
    decode: Callable[[NDArray[Any]], str] = str


def pack_best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack items into bins by best fit with at most 256 open bins (`OPEN_ROWS`); returns the item indices of each bin.

    sizes: size of each item, at most `capacity`. capacity: size of a bin. Items are placed in order. An item goes into
    the open bin with the least remaining capacity that suffices, else into a new bin; if more than 256 bins are then
    open, the fullest one is closed. This takes n log n time and keeps neighbours together. (With all bins open, best
    fit needs at most 1.7 times the fewest bins: Johnson et al. 1974, doi:10.1137/0203025.)
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (remaining capacity, row), ascending
    for place, size in enumerate(sizes):
        assert 0 < size <= capacity, (size, capacity)
        at = bisect_left(open_rows, (size, -1))
        if at < len(open_rows):
            left, row = open_rows.pop(at)
            rows[row].append(place)
        else:
            left, row = capacity, len(rows)
            rows.append([place])
        if left - size:
            insort(open_rows, (left - size, row))
        if len(open_rows) > OPEN_ROWS:
            open_rows.pop(0)
    return rows


def truncate_lengths(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """Return the token counts to which an example's documents are truncated so that their sum is at most `capacity`.
    All documents get the same limit, so that the two responses of a pair are treated alike. lengths: token counts,
    [documents]."""
    return np.full(len(lengths), min(int(lengths.min()), capacity // len(lengths)))


def describe_pairs(targets: NDArray[np.int64], identical: int) -> dict[str, int]:
    """Return counts of preference pairs: `identical`, pairs dropped because both documents are equal; `pairs`, pairs in
    rows; `chosen_tokens` and `rejected_tokens`, target tokens of their responses; `chosen_longer`, pairs whose chosen
    response is longer. The result is empty if each example has one document.

    targets: target tokens of each document of the examples in rows, [examples, documents per example]. identical:
    number of identical pairs.
    """
    if targets.shape[1] != 2:
        return {}
    chosen, rejected = targets.T
    lengths = {"chosen_tokens": int(chosen.sum()), "rejected_tokens": int(rejected.sum())}
    return {"identical": identical, "pairs": len(targets), **lengths, "chosen_longer": int((chosen > rejected).sum())}
