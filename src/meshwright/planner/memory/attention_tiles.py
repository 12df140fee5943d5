"""Peak of temporaries in the backward of CPU attention, by replaying the loop over tiles of `model/tiled_attention.py`
variable by variable. A variable keeps its tensor until the next one is assigned.

The starts of documents decide which keys a tile has; a tile has a mask over its keys if its queries attend to different
sets of them. If the starts are unknown, the worst case is assumed: every tile has all earlier keys and a mask over
them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from meshwright.planner.cost.micro_batch import Starts

LAST_TILES = 4
"""Number of last tiles that are replayed for a sequence of one document; they have the most keys."""


class Heads(NamedTuple):
    """Sizes of CPU attention that is computed in tiles of queries, on one rank.

    Attributes:
        rows: Sequences of the micro-batch.
        kv_heads: Key-value heads.
        rows_at_once: Sequences processed together.
        kv_heads_at_once: Key-value heads processed together.
        group: Query heads of each key-value head.
        size: Elements of a head.
        length: Tokens of a sequence.
        queries: Queries of a tile.
    """

    rows: int
    kv_heads: int
    rows_at_once: int
    kv_heads_at_once: int
    group: int
    size: int
    length: int
    queries: int


class InputStrides(NamedTuple):
    """Memory layout of attention's inputs. rotated: queries and keys are copies in head-major order (made by rotary
    positions or query-key norms); apart: only the queries are copies, with rows that are not contiguous; capped: scores
    have a softcap, whose derivative is allocated in addition."""

    rotated: bool
    apart: bool = False
    capped: bool = False


class Tile(NamedTuple):
    """One tile of attention for one sequence. queries, keys: number of queries and of keys; mask: bytes of its mask, 0
    without a mask."""

    queries: int
    keys: int
    mask: int


class TileBytes(NamedTuple):
    """Temporary memory at the peak of tiled attention's backward in bytes, without the tensors that it returns.

    masks: masks of all tiles; tiles: scores and other tensors of the tile being computed; keys_and_values: copies of
    keys and values, and sums of their gradients.
    """

    masks: int
    tiles: int
    keys_and_values: int

    @property
    def all(self) -> int:
        """Total temporary bytes at the peak."""
        return sum(self)


@lru_cache(maxsize=256)
def backward_bytes(
    heads: Heads,
    strides: InputStrides,
    window: int | None,
    itemsize: int,
    sum_itemsize: int,
    starts: Starts | None,
    unknown: bool,
) -> TileBytes:
    """Return the temporary memory at the peak of tiled attention's backward, the maximum over all micro-batches.

    Args:
        heads: Sizes.
        strides: Memory layout of the inputs.
        window: Most tokens that a query attends to; None for all.
        itemsize, sum_itemsize: Bytes of an element of the inputs, and of sums.
        starts: For each sequence of all micro-batches, the token positions at which documents begin; None: each
            sequence is one document.
        unknown: True, with `starts` None, to allow documents to begin anywhere (worst case).
    """
    micro_batches = [None] if not starts else [starts[at : at + heads.rows] for at in range(0, len(starts), heads.rows)]
    loops = [_BackwardReplay(heads, strides, window, itemsize, sum_itemsize, each, unknown) for each in micro_batches]
    return max((loop.run() for loop in loops), key=lambda each: each.all)


def _worst_masks(rows: int, tiles: Sequence[Tile], sum_itemsize: int) -> int:
    """Return the most bytes that the masks of sequences processed together can take if documents may begin anywhere.

    rows: number of sequences; tiles: tiles of a sequence that is one document; sum_itemsize: bytes of a mask's element.
    For one sequence, masks of different tiles overlap by at most a tile, as each ends at the start of a document. For
    several, each tile may have a mask over all its keys.
    """
    queries, length = tiles[0].queries, sum(tile.queries for tile in tiles)
    if rows == 1:
        return queries * (length + queries * (len(tiles) - 1)) * sum_itemsize
    return rows * sum(tile.queries * tile.keys for tile in tiles) * sum_itemsize


def _tiles(heads: Heads, window: int | None, starts: Starts | None, sum_itemsize: int) -> list[Tile]:
    """Return the tiles of sequences that are processed together, in order. A tile's keys include every key to which one
    of its queries attends in any of the sequences.

    heads: sizes; window: most tokens that a query attends to, None for all; starts: for each of these sequences, the
    token positions at which documents begin, None if each is one document; sum_itemsize: bytes of a mask's element.
    """
    found = []
    limited = window is not None and window < heads.length

    def first(row: Sequence[int], place: int) -> int:
        """Return the first token that the query at token `place` attends to; row: where the sequence's documents
        begin."""
        begins = row[bisect_right(row, place) - 1]
        return max(begins, place - window + 1) if limited and window is not None else begins

    for start in range(0, heads.length, heads.queries):
        stop = min(heads.length, start + heads.queries)
        rows = starts or ((0,),)
        oldest = min(first(row, start) for row in rows)
        newest = max(first(row, stop - 1) for row in rows)
        queries, keys = stop - start, stop - oldest
        found.append(Tile(queries, keys, queries * keys * sum_itemsize if newest > oldest else 0))
    return found


class _BackwardReplay:
    """Replay of the allocations of tiled attention's backward, tile by tile, to find the memory peak; arguments as of
    `backward_bytes`, for one micro-batch.

    Attributes:
        names: {variable: bytes} of the tensors that are allocated.
        now: Sum of these bytes.
        most: Peak bytes so far.
        then: {variable: bytes} at the peak.
    """

    def __init__(
        self,
        heads: Heads,
        strides: InputStrides,
        window: int | None,
        itemsize: int,
        sum_itemsize: int,
        starts: Starts | None,
        unknown: bool,
    ) -> None:
        self.heads, self.strides, self.window, self.x, self.wide, self.starts = (
            heads,
            strides,
            window,
            itemsize,
            sum_itemsize,
            starts,
        )
        self.unknown = unknown
        self.names: dict[str, int] = {"triangle": heads.queries**2 * sum_itemsize}
        self.now = self.names["triangle"]
        self.most, self.then = 0, dict(self.names)

    def run(self) -> TileBytes:
        """Replay all tiles; return the temporary bytes at the peak."""
        for rows, tiles in self._row_groups():
            masks = sum(tile.mask for tile in tiles) * rows
            if self.unknown:
                masks = max(masks, _worst_masks(rows, tiles, self.wide))
            self._assign_together(masks=masks)
            if self.starts is None:
                tiles = tiles[-LAST_TILES:]
            for kv_heads in self._head_groups():
                self._group(rows, kv_heads, tiles)
        of_keys = sum(size for name, size in self.then.items() if name in ("k", "v", "wide k", "dk", "dv"))
        masks = self.then.get("masks", 0) + self.then.get("new masks", 0)
        return TileBytes(masks, self.most - of_keys - masks, of_keys)

    def _row_groups(self) -> Iterator[tuple[int, list[Tile]]]:
        """Yield (number of sequences, tiles of one sequence) for each group of sequences that are processed together.

        If every sequence is one document, all groups are alike and only the first two are yielded: the second, because
        tensors of the first are still allocated when it begins.
        """
        heads = self.heads
        groups = range(0, heads.rows, heads.rows_at_once)
        for row in groups if self.starts else groups[:2]:
            rows = min(heads.rows_at_once, heads.rows - row)
            starts = None if self.starts is None else self.starts[row : row + rows]
            yield rows, _tiles(heads, self.window, starts, self.wide)

    def _head_groups(self) -> list[int]:
        """Return the number of key-value heads of each group that is processed together; only of the first two groups,
        as later ones add nothing to the peak."""
        heads = self.heads
        groups = range(0, heads.kv_heads, heads.kv_heads_at_once)
        return [min(heads.kv_heads_at_once, heads.kv_heads - head) for head in groups[:2]]

    def _group(self, rows: int, kv_heads: int, tiles: Sequence[Tile]) -> None:
        """Replay the allocations for one group of sequences and key-value heads. rows, kv_heads: numbers of sequences
        and heads; tiles: tiles of one sequence."""
        heads, x, wide = self.heads, self.x, self.wide
        together = rows == 1 or kv_heads == 1  # then rows and heads are one dimension, wherever they lie
        head_after_head = together or (self.strides.rotated and kv_heads == heads.kv_heads)
        each = rows * kv_heads * heads.length * heads.size
        self._assign_together(k=0 if head_after_head else each * x, v=0 if together else each * x)
        self._assign_together(**{"wide k": each * wide if x < wide else 0})
        self._assign_together(dk=each * wide, dv=each * wide)
        for tile in tiles:
            lines = rows * kv_heads * heads.group * tile.queries
            scores, columns = lines * tile.keys, lines * heads.size
            copied = self.strides.rotated or self.strides.apart
            whole = heads.group == 1 or (copied and tile.queries == heads.length)
            self._assign_together(
                q=0 if head_after_head and whole else columns * x,
                d_out=0 if together and heads.group == 1 else columns * x,
            )
            capped = self.strides.capped
            self._update_peak(columns * wide + (4 if capped else 1) * scores * wide)
            slope = scores * wide if capped else 0
            self._update_peak(2 * scores * wide + slope)
            if x < wide:
                self._update_peak(scores * (wide + x) + slope)
            self._assign("slope", slope)
            self._assign("p", scores * x)
            of_keys = rows * kv_heads * tile.keys * heads.size * (x if x == wide else x + wide)
            self._update_peak(of_keys)
            self._assign_together(dp=scores * x)
            self._assign_together(ds=scores * x)
            if capped:
                self._update_peak(scores * (wide + x if x < wide else wide))
            self._assign_together(dq=columns * x)
            self._update_peak(of_keys)
        if x < wide:
            self._update_peak(each * wide)

    def _assign_together(self, **names: int) -> None:
        """Assign new tensors to variables: all are allocated before the tensors that the variables held are freed.
        names: bytes by name of the variable."""
        for name, size in names.items():
            self.names[f"new {name}"] = size
            self.now += size
        self._update_peak(0)
        for name in names:
            self._assign(name, self.names.pop(f"new {name}"), made=True)

    def _assign(self, name: str, size: int, made: bool = False) -> None:
        """Assign a new tensor of `size` bytes to a variable, and free the tensor that it held. made: True if `now`
        already includes the new tensor."""
        self.now += (0 if made else size) - self.names.get(name, 0)
        self.names[name] = size

    def _update_peak(self, size: int) -> None:
        """Raise the peak to the bytes of all variables plus `size` bytes of temporaries, if this is more."""
        if self.now + size > self.most:
            self.most, self.then = self.now + size, dict(self.names)
