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

from meshwright.planner.cost.micro_batch import MicroBatch, Starts
from meshwright.planner.memory.snapshot import Allocation, count_bytes, workspace
from meshwright.spec.policy import ACCELERATOR_TILE, TILE_QUERIES, TILE_SCORES

LAST_TILES = 4
"""Number of last tiles that are replayed for a sequence of one document; they have the most keys."""


class Tiles(NamedTuple):
    """Sizes of the tiles into which attention over some number of tokens is split. A tile is a block of queries of
    several sequences and heads, with all keys to which they attend.

    rows, kv_heads: sequences and key-value heads processed together; group: query heads of each key-value head;
    queries: queries of a tile, for each head; several_groups: False if all sequences and heads are processed together.
    """

    rows: int
    kv_heads: int
    group: int
    queries: int
    length: int
    several_groups: bool = True

    @property
    def lines(self) -> int:
        """Number of rows of a tile's score matrix: queries, times sequences and query heads processed together."""
        return self.rows * self.kv_heads * self.group * self.queries

    @property
    def before(self) -> int:
        """Number of keys of the tile that is computed just before the largest tile, and whose tensors are still
        allocated; 0 if there is no such tile."""
        if self.length > self.queries:
            return (self.length - 1) // self.queries * self.queries
        return self.length if self.several_groups else 0


def choose_tiles(batch: MicroBatch, heads: int, kv_heads: int, length: int) -> Tiles:
    """Return the tile sizes of attention with `heads` query and `kv_heads` key-value heads over `length` tokens. batch:
    sizes of the micro-batch."""
    most_queries, most = (TILE_QUERIES, TILE_SCORES) if batch.device == "cpu" else ACCELERATOR_TILE
    group, queries = max(1, heads // kv_heads), min(most_queries, length)
    per_head = group * queries * length
    together = max(1, min(kv_heads, most // per_head))
    rows = max(1, min(batch.rows, most // (per_head * kv_heads)))
    return Tiles(rows, together, group, queries, length, together < kv_heads or rows < batch.rows)


class TiledAttention(NamedTuple):
    """Attention of one rank that is computed in tiles (blocks of queries).

    Attributes:
        tiles: Sizes of the tiles.
        rows: Sequences of the micro-batch.
        kv_heads: Key-value heads.
        size: Elements of a head.
        itemsize, sum_itemsize: Bytes of an element of the inputs, and of sums.
        rotated: True if queries and keys are copies in head-major order (made by rotary positions or query-key norms).
        apart: True if only the queries are copies, with rows that are not contiguous.
        capped: True if scores have a softcap, whose derivative is allocated in addition.
        window: Most tokens that a query attends to; None for all.
        starts: For each sequence of all micro-batches, the token positions at which documents begin; None: each
            sequence is one document, or the positions are unknown (`unknown`).
        unknown: True if documents may begin anywhere, for which the worst case is assumed; `starts` is then None.
    """

    tiles: Tiles
    rows: int
    kv_heads: int
    size: int
    itemsize: int
    sum_itemsize: int
    rotated: bool = False
    apart: bool = False
    capped: bool = False
    window: int | None = None
    starts: Starts | None = None
    unknown: bool = False


class Tile(NamedTuple):
    """One tile (block of queries) of attention for one sequence. queries, keys: number of queries and of keys; mask:
    bytes of its mask, 0 without a mask."""

    queries: int
    keys: int
    mask: int


@lru_cache(maxsize=256)
def backward_temporaries(attention: TiledAttention) -> list[Allocation]:
    """Return the temporaries at the peak of tiled attention's backward, without the gradients that it returns, for the
    micro-batch in which they are largest: masks of all tiles; tensors of the tile being computed; copies of keys and
    values, and sums of their gradients."""
    starts, rows = attention.starts, attention.rows
    of_each = [starts[at : at + rows] for at in range(0, len(starts), rows)] if starts else [None]
    return max((_replay_backward(attention._replace(starts=each)) for each in of_each), key=count_bytes)


def list_tiles(attention: TiledAttention, starts: Starts | None) -> list[Tile]:
    """Return, in order, the tiles of sequences that are processed together. A tile has every key to which one of its
    queries attends in any of the sequences. starts: for each of these sequences, the token positions at which documents
    begin; None if each sequence is one document."""
    found, (length, step) = [], (attention.tiles.length, attention.tiles.queries)
    window = length if attention.window is None else attention.window

    def find_first_key(row: Sequence[int], place: int) -> int:
        """Return the first token that the query at token `place` attends to; row: where the sequence's documents
        begin."""
        return max(row[bisect_right(row, place) - 1], place - window + 1)

    for start in range(0, length, step):
        stop = min(length, start + step)
        oldest, newest = (
            choose(find_first_key(row, place) for row in starts or ((0,),))
            for choose, place in ((min, start), (max, stop - 1))
        )
        queries, keys = stop - start, stop - oldest
        found.append(Tile(queries, keys, queries * keys * attention.sum_itemsize if newest > oldest else 0))
    return found


def _replay_backward(attention: TiledAttention) -> list[Allocation]:
    """Replay the allocations of tiled attention's backward for one micro-batch, tile by tile; return the temporaries at
    the memory peak, with tensors that are being assigned then."""
    now = {"triangle": attention.tiles.queries**2 * attention.sum_itemsize}
    most, then = 0, dict(now)
    for new, temporaries in _list_row_assignments(attention):
        total = sum(now.values()) + sum(new.values()) + temporaries
        if total > most:
            most, then = total, now | {f"new {name}": size for name, size in new.items()}
        now |= new
    of_keys = sum(then.get(name, 0) for name in ("k", "v", "wide k", "dk", "dv"))
    masks = then.get("masks", 0) + then.get("new masks", 0)
    found = [workspace("tile masks", masks)] if masks else []
    of_tiles = most - of_keys - masks
    return [*found, workspace("attention tiles", of_tiles), workspace("tile keys and values", of_keys)]


Assignment = tuple[dict[str, int], int]
"""Allocations at one point: ({variable: bytes of its new tensor}, bytes of temporaries at that point). The old tensors
of the variables are freed after all new ones are allocated."""


def _list_row_assignments(of: TiledAttention) -> Iterator[Assignment]:
    """Yield the assignments of tensors in backward's loops over groups of sequences and of key-value heads, in order.

    If every sequence is one document, all groups of sequences are alike and only the first two are replayed: the
    second, because tensors of the first are still allocated when it begins."""
    groups = range(0, of.rows, of.tiles.rows)
    for row in groups if of.starts else groups[:2]:
        rows = min(of.tiles.rows, of.rows - row)
        tiles = list_tiles(of, of.starts and of.starts[row : row + rows])
        masks = sum(tile.mask for tile in tiles) * rows
        yield {"masks": max(masks, _worst_masks(of, rows, tiles)) if of.unknown else masks}, 0
        for head in range(0, of.kv_heads, of.tiles.kv_heads)[:2]:  # later groups add nothing to the peak
            last = tiles if of.starts else tiles[-LAST_TILES:]
            yield from _list_tile_assignments(of, rows, min(of.tiles.kv_heads, of.kv_heads - head), last)


def _worst_masks(of: TiledAttention, rows: int, tiles: Sequence[Tile]) -> int:
    """Return the most bytes that attention masks can take if documents may begin anywhere. rows: number of sequences
    processed together; tiles: tiles of a sequence that is one document.

    With one sequence, the masks of different tiles have at most one tile of keys in common, as each mask ends at the
    start of a document. With several sequences, each tile may have a mask over all its keys."""
    if rows == 1:
        return tiles[0].queries * (of.tiles.length + tiles[0].queries * (len(tiles) - 1)) * of.sum_itemsize
    return rows * sum(tile.queries * tile.keys for tile in tiles) * of.sum_itemsize


def _list_tile_assignments(of: TiledAttention, rows: int, kv_heads: int, tiles: Sequence[Tile]) -> Iterator[Assignment]:
    """Yield the assignments of tensors for one group of sequences and key-value heads. rows, kv_heads: numbers of
    sequences and heads; tiles: tiles of one sequence."""
    x, wide = of.itemsize, of.sum_itemsize
    together = rows == 1 or kv_heads == 1  # then rows and heads are one dimension, wherever they lie
    head_after_head = together or (of.rotated and kv_heads == of.kv_heads)
    each, upcast = rows * kv_heads * of.tiles.length * of.size, wide if x < wide else 0
    yield {"k": 0 if head_after_head else each * x, "v": 0 if together else each * x}, 0
    yield {"wide k": each * upcast}, 0
    yield {"dk": each * wide, "dv": each * wide}, 0
    for tile in tiles:
        lines = rows * kv_heads * of.tiles.group * tile.queries
        scores, columns = lines * tile.keys, lines * of.size
        whole = of.tiles.group == 1 or ((of.rotated or of.apart) and tile.queries == of.tiles.length)
        query, gradient = head_after_head and whole, together and of.tiles.group == 1
        slope = scores * wide if of.capped else 0
        of_keys = rows * kv_heads * tile.keys * of.size * (x + upcast)
        yield {"q": 0 if query else columns * x, "d_out": 0 if gradient else columns * x}, 0
        yield {}, columns * wide + (4 if of.capped else 1) * scores * wide
        yield {}, 2 * scores * wide + slope
        yield {"slope": slope, "p": scores * x}, 0
        yield {}, of_keys
        yield {"dp": scores * x}, 0
        yield {"ds": scores * x}, 0
        yield {}, scores * (wide + upcast) if of.capped else 0  # multiplied in the wide type
        yield {"dq": columns * x}, 0
        yield {}, of_keys
    yield {}, each * upcast
