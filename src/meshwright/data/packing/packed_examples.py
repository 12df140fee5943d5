"""Reading examples: whole ones packed into rows, with the tokens that are trained on, and what did not fit counted.

Shapes: B rows, S tokens in a row. A row has room for S + 1 tokens: the last one is only a target.
"""

from __future__ import annotations

import hashlib
import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.data.packing.packed import NO_TARGET, TokenBatch, TokenRows
from meshwright.data.packing.shards import TRAINED, Shard
from meshwright.errors import UserError

OPEN_ROWS = 256  # among which the best one is chosen for an example


@dataclass(frozen=True, slots=True)
class Plan:
    """Which examples lie in which row.

    kept [examples kept, pieces]: tokens of each piece, cut where the example was too long. numbers [examples kept]:
    which examples these are. order [examples kept]: their places in `kept`, row after row; row r has those from
    bounds[r] to bounds[r + 1]. rows_by_source: rows of each source; one number where sources are not kept apart.
    report: see `PackedExamples.report`.
    """

    kept: NDArray[np.int64]
    numbers: NDArray[np.int64]
    order: NDArray[np.int64]
    bounds: NDArray[np.int64]
    rows_by_source: list[int]
    report: dict[str, int]


class PackedExamples(TokenRows):
    """One split as examples, each whole in one row; no example sees another under `document_mask`, and its positions
    begin at 0.

    An example has `pieces` documents, one after the other in its row: one, or of a preference record two: of pair k of
    a row, document 2k is the prompt and the chosen response, 2k + 1 the prompt and the rejected one. Targets are tokens
    of responses, or with `train_on` "all" every token but a document's first. What is left of a row is padding, without
    targets, and has the row's last document id for itself.

    Rows follow from the lengths alone: examples are taken in order, and each goes where the least room is left by it,
    among the `OPEN_ROWS` rows that were begun last and are not full; with `pack` false each has a row for itself. One
    that is longer than a row loses its end (`too_long` "truncate"), or all of itself ("drop"), or is an error
    ("refuse"); one that has no target is left out.
    """

    def __init__(
        self,
        directory: Path,
        shards: Sequence[Shard],
        dtype: np.dtype[Any],
        sequence: int,
        document_mask: bool,
        padding: int,
        sources: Sequence[int] | None = None,
        *,
        pieces: int = 1,
        train_on: str = "responses",
        pack: bool = True,
        too_long: str = "truncate",
        decode: Callable[[NDArray[Any]], str] = str,
    ) -> None:
        """`sources`: the number of shards of each source, where no row may have examples of two. `decode`: of tokens,
        for the error about a too long example."""
        super().__init__(directory, shards, dtype, sequence, document_mask, padding, sources)
        self.pieces, self.train_on, self.pack, self.too_long, self.decode = pieces, train_on, pack, too_long, decode

    @property
    def sequences_by_source(self) -> list[int]:
        return self.plan.rows_by_source

    @property
    def rows(self) -> int:
        return len(self.plan.bounds) - 1

    @property
    def examples_by_row(self) -> NDArray[np.int64]:
        """How many examples each row has; of preferences, pairs."""
        return np.diff(self.plan.bounds)

    @property
    def report(self) -> dict[str, int]:
        """Counts: `examples` there are, `trained` ones, `truncated` of these; `too_long` and `without_response`, left
        out; `targets`, and `lost_targets` of truncated and dropped examples; `padding`, tokens of all rows."""
        return self.plan.report

    def texts(self) -> Iterator[str]:
        """The text of each record, in order; see `Example.text`."""
        return itertools.islice(
            super().texts(), 0, None, self.pieces
        )  # that of all its documents stands with the first

    @property
    def rows_sha256(self) -> str:
        """Equal where the rows have the same tokens of the same examples in the same places."""
        digest = hashlib.sha256()
        for part in (self.plan.numbers, self.plan.kept, self.plan.order, self.plan.bounds):
            digest.update(f"{part.shape} ".encode() + np.ascontiguousarray(part, "<i8").tobytes())
        return digest.hexdigest()

    @cached_property
    def _documents(self) -> NDArray[np.int64]:
        """[documents, 2]: where each begins and ends in the tokens of all shards."""
        starts = [self._index(shard)[:, 0].astype(np.int64) for shard in self.shards]
        begins = np.concatenate([np.zeros(0, np.int64), *map(np.add, starts, self._bounds[:-1])])
        return np.stack([begins, np.append(begins[1:], self.tokens)[: len(begins)]], axis=1)

    @cached_property
    def plan(self) -> Plan:
        """The rows. `UserError`: an example is too long, and such are refused."""
        assert self.pieces >= 1
        room = self.sequence + 1
        begins = self._documents[:, 0].reshape(-1, self.pieces)
        lengths = np.diff(self._documents).reshape(-1, self.pieces)
        long = lengths.sum(axis=1) > room
        if self.too_long == "refuse" and long.any():
            raise self._refused(int(np.flatnonzero(long)[0]), int(long.sum()), int(lengths.sum(axis=1).max()), room)
        targets = self._targets()
        before, kept = targets.copy(), lengths.copy()
        for number in np.flatnonzero(long).tolist():
            kept[number] = _shortened(lengths[number], room)
            spans = zip(begins[number].tolist(), kept[number].tolist(), strict=True)
            targets[number] = [self._targets_between(begin, begin + length) for begin, length in spans]
        answered = (before > 0).all(axis=1)
        dropped = long & answered if self.too_long == "drop" else np.zeros(len(long), bool)
        used = (targets > 0).all(axis=1) & ~dropped
        numbers = np.flatnonzero(used)
        sizes = kept[numbers].sum(axis=1)
        rows: list[list[int]] = []
        by_source = []
        for first, end in self._examples_by_source():
            own = slice(*np.searchsorted(numbers, [first, end]))
            places = range(len(numbers))[own]
            packed = best_fit(sizes[own].tolist(), room) if self.pack else [[place] for place in range(len(places))]
            rows += [[places[place] for place in row] for row in packed]
            by_source.append(len(packed))
        return Plan(
            kept[numbers],
            numbers,
            np.array([place for row in rows for place in row], np.int64),
            np.cumsum([0, *map(len, rows)], dtype=np.int64),
            by_source,
            {
                "examples": len(lengths),
                "trained": len(numbers),
                "truncated": int((used & long).sum()),
                "too_long": int(dropped.sum()),
                "without_response": int((~used & ~dropped).sum()),
                "targets": int(targets[numbers].sum()),
                "lost_targets": int(before.sum() - targets[numbers].sum()),
                "padding": len(rows) * room - int(sizes.sum()),
            },
        )

    def batch(self, numbers: ArrayLike, *, padded: bool = False) -> TokenBatch:
        rows = np.asarray(numbers, dtype=np.int64)
        assert rows.ndim == 1, rows.shape
        assert padded or rows.size == 0 or 0 <= rows.min() <= rows.max() < self.sequences, (rows, self.sequences)
        plan, room = self.plan, self.sequence + 1
        values = np.full((len(rows), room), self.padding, dtype=np.int64)
        trained = np.zeros((len(rows), room), dtype=bool)
        ids = np.zeros((len(rows), room), dtype=np.int32)
        for place, row in enumerate(rows.tolist()):
            if row >= self.rows:
                continue
            at = document = 0
            for example in plan.order[plan.bounds[row] : plan.bounds[row + 1]].tolist():
                for piece, length in enumerate(plan.kept[example].tolist()):
                    begin = int(self._documents[plan.numbers[example] * self.pieces + piece, 0])
                    here = slice(at, at + length)
                    values[place, here], trained[place, here] = self._read(begin, begin + length)
                    ids[place, here] = document
                    at, document = at + length, document + 1
            ids[place, at:] = document
        targets = np.where(trained[:, 1:], values[:, 1:], NO_TARGET)
        ids = ids[:, :-1] if self.document_mask else np.zeros_like(ids[:, :-1])
        return TokenBatch(np.ascontiguousarray(values[:, :-1]), targets, np.ascontiguousarray(ids))

    def _read(self, begin: int, end: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """The tokens of a document's beginning, and which of them are targets."""
        number = int(np.searchsorted(self._bounds, begin, side="right")) - 1
        span = slice(begin - int(self._bounds[number]), end - int(self._bounds[number]))
        tokens = self._shard(number)[span]
        if self.train_on == "all":
            trained = np.ones(len(tokens), bool)
            trained[:1] = False  # nothing comes before it
            return tokens, trained
        return tokens, self._shard(number, TRAINED)[span] != 0

    def _targets_between(self, begin: int, end: int) -> int:
        return int(self._read(begin, end)[1].sum())

    def _targets(self) -> NDArray[np.int64]:
        """[examples, pieces]: targets of each whole document."""
        if self.train_on == "all":
            return np.diff(self._documents).reshape(-1, self.pieces) - 1
        counts = [self._index(shard)[:, 2].astype(np.int64) for shard in self.shards]
        return np.concatenate([np.zeros(0, np.int64), *counts]).reshape(-1, self.pieces)

    def _examples_by_source(self) -> list[tuple[int, int]]:
        """Of each source that is kept apart, its first example and one past its last."""
        ends = np.cumsum([0, *(shard.documents for shard in self.shards)])[self._shards_before].tolist()
        return list(itertools.pairwise(ends))

    def _refused(self, number: int, count: int, longest: int, room: int) -> UserError:
        begins, ends = self._documents[number * self.pieces], self._documents[(number + 1) * self.pieces - 1]
        size = int(ends[1] - begins[0])
        beginning = self.decode(self._read(int(begins[0]), min(int(ends[1]), int(begins[0]) + 40))[0])
        more = f", and so are {count - 1:,} more" if count > 1 else ""
        return UserError(
            f"data.too_long: example {number + 1:,} of the {self.directory.name} split has {size:,} tokens, more than "
            f"the {room:,} of a row{more}; it begins with {beginning[:80]!r}; raise data.sequence to {longest - 1}, or "
            'set data.too_long to "truncate" or "drop"'
        )


def best_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Rows of at most `room` tokens for things of these sizes, each row the places of its things, in order.

    Each thing goes into the open row with the least room that takes it, else begins a row; at most `OPEN_ROWS` are open
    (the fullest is closed), so that it takes n log n time and neighbours stay near. (Best fit needs at most 1.7 times
    the fewest rows, were all to stay open: Johnson et al. 1974, doi:10.1137/0203025.)
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room that is left, row), ascending
    for place, size in enumerate(sizes):
        assert 0 < size <= room, (size, room)
        at = bisect_left(open_rows, (size, -1))
        if at < len(open_rows):
            left, row = open_rows.pop(at)
            rows[row].append(place)
        else:
            left, row = room, len(rows)
            rows.append([place])
        if left - size:
            insort(open_rows, (left - size, row))
        if len(open_rows) > OPEN_ROWS:
            open_rows.pop(0)
    return rows


def _shortened(lengths: NDArray[np.int64], room: int) -> NDArray[np.int64]:
    """Lengths that add up to `room`: only those are cut that are longer than the others leave room for."""
    kept = lengths.copy()
    left, pieces = room, len(lengths)
    for piece in np.argsort(lengths, kind="stable").tolist():
        kept[piece] = min(int(lengths[piece]), left // pieces)
        left, pieces = left - int(kept[piece]), pieces - 1
    return kept
