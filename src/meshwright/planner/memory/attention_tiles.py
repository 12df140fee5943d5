"""Peak of temporaries in the backward of CPU attention: the loop over tiles of `model/tiled_attention.py`, variable by
variable. A variable keeps its tensor until the next one is assigned.

Where documents begin decides which keys a tile has, and where its queries see differently many it has a mask over all
of them. Of documents whose places are not known the most that any could take is said: a tile never has more keys than
those before it, and at worst every tile that could has a mask over all of these.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from meshwright.planner.cost.micro_batch import Starts

LAST_TILES = 4
"""Number of tiles that are compared in a sequence of one document: its last tiles have the most keys."""


class Heads(NamedTuple):
    """Sizes of CPU attention that is computed tile by tile, on one rank.

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
    """Memory layout of attention's input tensors. rotated: queries and keys are copies in head-major order (rotary
    positions or query-key norms made them). apart: only the queries are copies, whose rows are not contiguous. capped:
    scores have a softcap, whose derivative is kept beside them."""

    rotated: bool
    apart: bool = False
    capped: bool = False


class Tile(NamedTuple):
    """One tile of attention, for one sequence. queries, keys: their number; mask: bytes of its mask, 0 without a
    mask."""

    queries: int
    keys: int
    mask: int


class TileBytes(NamedTuple):
    """Temporary memory of tiled attention's backward at its peak, in bytes, without its result tensors.

    masks: masks of all tiles; tiles: scores and other tensors of the tile being computed; keys_and_values: gradient
    sums and copies of keys and values.
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
    heads: Heads, strides: InputStrides, window: int | None, x: int, wide: int, starts: Starts | None, unknown: bool
) -> TileBytes:
    """Return the temporary memory of tiled attention's backward at its peak, the maximum over all micro-batches.

    heads: sizes. strides: memory layout of the inputs. window: most tokens that a query attends to, None for all. x,
    wide: bytes of an element of the inputs, and of the sums. starts: token positions at which documents begin, for each
    sequence of all micro-batches; None: each sequence is one document, or, if `unknown`, documents may begin anywhere
    (worst case).
    """
    micro_batches = [None] if not starts else [starts[at : at + heads.rows] for at in range(0, len(starts), heads.rows)]
    loops = [_BackwardReplay(heads, strides, window, x, wide, each, unknown) for each in micro_batches]
    return max((loop.run() for loop in loops), key=lambda each: each.all)


def _worst_masks(rows: int, tiles: Sequence[Tile], wide: int) -> int:
    """Return the most bytes that the masks of some sequences can take if documents may begin anywhere.

    rows: sequences processed together; tiles: those of a sequence that is one document; wide: bytes of a mask's
    element. For one sequence, masks of different tiles overlap by at most a tile, as each ends at the start of a
    document. For several, each tile may have a mask over all its keys.
    """
    queries, length = tiles[0].queries, sum(tile.queries for tile in tiles)
    if rows == 1:
        return queries * (length + queries * (len(tiles) - 1)) * wide
    return rows * sum(tile.queries * tile.keys for tile in tiles) * wide


def _tiles(heads: Heads, window: int | None, starts: Starts | None, wide: int) -> list[Tile]:
    """Return the tiles, in order, of sequences that are processed together; the keys of a tile are those that a query
    of any of the sequences attends to.

    window: most tokens that a query attends to, None for all; starts: token positions at which documents begin in each
    of these sequences, None for one document each; wide: bytes of a mask's element.
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
        found.append(Tile(queries, keys, queries * keys * wide if newest > oldest else 0))
    return found


class _BackwardReplay:
    """Replay of the allocations of tiled attention's backward, tile by tile, to find the memory peak.

    heads: sizes; strides: memory layout of the inputs; window: most tokens that a query attends to, None for all; x,
    wide: bytes of an element of inputs and sums; starts: where documents begin in each sequence; unknown: they may
    begin anywhere. Attributes: `names` maps each live variable to its bytes, `now` is their sum, `most` the peak so far
    in bytes, `then` the variables at the peak.
    """

    def __init__(
        self,
        heads: Heads,
        strides: InputStrides,
        window: int | None,
        x: int,
        wide: int,
        starts: Starts | None,
        unknown: bool,
    ) -> None:
        self.heads, self.strides, self.window, self.x, self.wide, self.starts = heads, strides, window, x, wide, starts
        self.unknown = unknown
        self.names: dict[str, int] = {"triangle": heads.queries**2 * wide}
        self.now = self.names["triangle"]
        self.most, self.then = 0, dict(self.names)

    def run(self) -> TileBytes:
        """Replay all tiles; return the temporary bytes at the peak."""
        for rows, tiles in self._row_groups():
            masks = sum(tile.mask for tile in tiles) * rows
            if self.unknown:
                masks = max(masks, _worst_masks(rows, tiles, self.wide))
            self._give(masks=masks)
            if self.starts is None:
                tiles = tiles[-LAST_TILES:]
            for kv_heads in self._head_groups():
                self._group(rows, kv_heads, tiles)
        of_keys = sum(size for name, size in self.then.items() if name in ("k", "v", "wide k", "dk", "dv"))
        masks = self.then.get("masks", 0) + self.then.get("new masks", 0)
        return TileBytes(masks, self.most - of_keys - masks, of_keys)

    def _row_groups(self) -> Iterator[tuple[int, list[Tile]]]:
        """Yield (number of sequences, tiles of one of them) for each group of sequences that are processed together.

        Where every sequence is one document, all groups are alike and only the first two are yielded: enough to include
        the time at which one group's tensors are still allocated while the next begins.
        """
        heads = self.heads
        groups = range(0, heads.rows, heads.rows_at_once)
        for row in groups if self.starts else groups[:2]:
            rows = min(heads.rows_at_once, heads.rows - row)
            starts = None if self.starts is None else self.starts[row : row + rows]
            yield rows, _tiles(heads, self.window, starts, self.wide)

    def _head_groups(self) -> list[int]:
        """Return the number of key-value heads in each group that is processed together; only the first two groups are
        listed, as all are alike."""
        heads = self.heads
        groups = range(0, heads.kv_heads, heads.kv_heads_at_once)
        return [min(heads.kv_heads_at_once, heads.kv_heads - head) for head in groups[:2]]

    def _group(self, rows: int, kv_heads: int, tiles: Sequence[Tile]) -> None:
        """Replay the allocations for one group of sequences and key-value heads. rows, kv_heads: how many of each;
        tiles: those of one sequence."""
        heads, x, wide = self.heads, self.x, self.wide
        together = rows == 1 or kv_heads == 1  # then rows and heads are one dimension, wherever they lie
        head_after_head = together or (self.strides.rotated and kv_heads == heads.kv_heads)
        each = rows * kv_heads * heads.length * heads.size
        self._give(k=0 if head_after_head else each * x, v=0 if together else each * x)
        self._give(**{"wide k": each * wide if x < wide else 0})
        self._give(dk=each * wide, dv=each * wide)
        for tile in tiles:
            lines = rows * kv_heads * heads.group * tile.queries
            scores, columns = lines * tile.keys, lines * heads.size
            copied = self.strides.rotated or self.strides.apart
            whole = heads.group == 1 or (copied and tile.queries == heads.length)
            self._give(
                q=0 if head_after_head and whole else columns * x,
                d_out=0 if together and heads.group == 1 else columns * x,
            )
            capped = self.strides.capped
            self._passing(columns * wide + (4 if capped else 1) * scores * wide)
            slope = scores * wide if capped else 0
            self._passing(2 * scores * wide + slope)
            if x < wide:
                self._passing(scores * (wide + x) + slope)
            self._name("slope", slope)
            self._name("p", scores * x)
            of_keys = rows * kv_heads * tile.keys * heads.size * (x if x == wide else x + wide)
            self._passing(of_keys)
            self._give(dp=scores * x)
            self._give(ds=scores * x)
            if capped:
                self._passing(scores * (wide + x if x < wide else wide))
            self._give(dq=columns * x)
            self._passing(of_keys)
        if x < wide:
            self._passing(each * wide)

    def _give(self, **names: int) -> None:
        """Allocate a tensor for each given variable (keyword: name, value: bytes); then release the tensors that these
        variables held before."""
        for name, size in names.items():
            self.names[f"new {name}"] = size
            self.now += size
        self._passing(0)
        for name in names:
            self._name(name, self.names.pop(f"new {name}"), made=True)

    def _name(self, name: str, size: int, made: bool = False) -> None:
        """Bind a variable to a new tensor of `size` bytes, which releases its old tensor. made: `now` includes the new
        one already."""
        self.now += (0 if made else size) - self.names.get(name, 0)
        self.names[name] = size

    def _passing(self, size: int) -> None:
        """Update the peak, with `size` bytes of temporaries in addition to the live variables."""
        if self.now + size > self.most:
            self.most, self.then = self.now + size, dict(self.names)
