"""Temporaries inside the backward of attention in plain torch. Attention in tiles (`model/tiled_attention.py`) is
replayed tile by tile and variable by variable: a variable keeps its tensor until the next one is assigned.

The starts of documents decide which keys a tile has; a tile has a mask over its keys if its queries attend to different
sets of them. If the starts are unknown, the worst case is assumed: every tile has all earlier keys and a mask over
them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from meshwright.planner.cost.dimensions import Dimensions, count_flash_lines
from meshwright.planner.cost.micro_batch import LayerKind, MicroBatch, Starts
from meshwright.planner.cost.tables import holds
from meshwright.planner.memory.snapshot import Allocation, activation, count_bytes
from meshwright.planner.memory.temporaries import Pass
from meshwright.spec.policy import ACCELERATOR_TILE, TILE_QUERIES, TILE_SCORES

LAST_TILES = 4
"""Number of last tiles that are replayed for a sequence of one document; they have the most keys."""


class Tiles(NamedTuple):
    """Sizes of the tiles into which attention over some number of tokens is split. A tile is a block of queries of
    several sequences and heads, with all keys to which they attend.

    rows, kv_heads: sequences and key-value heads processed together; group: query heads of each key-value head;
    queries: queries of a tile, for each head; length: tokens of a sequence.
    """

    rows: int
    kv_heads: int
    group: int
    queries: int
    length: int


def choose_tiles(batch: MicroBatch, heads: int, kv_heads: int, length: int) -> Tiles:
    """Return the tile sizes of attention with `heads` query and `kv_heads` key-value heads over `length` tokens. batch:
    sizes of the micro-batch."""
    most_queries, most = (TILE_QUERIES, TILE_SCORES) if batch.device == "cpu" else ACCELERATOR_TILE
    group, queries = max(1, heads // kv_heads), min(most_queries, length)
    per_head = group * queries * length
    together = max(1, min(kv_heads, most // per_head))
    rows = max(1, min(batch.rows, most // (per_head * kv_heads)))
    return Tiles(rows, together, group, queries, length)


def attention_workspaces(batch: MicroBatch, kind: LayerKind) -> list[Allocation]:
    """Return the temporaries inside the backward of attention in plain torch, which is computed in tiles or as a ring.
    kind: kind of the layer."""
    if batch.ring:
        return _ring_backward(batch, kind)
    plain = holds("capped | !cuda & !encoder", Dimensions(batch, kind).true)  # an encoder's kernel is PyTorch's own
    return tiled_backward(batch, kind) if plain else []


def _ring_backward(batch: MicroBatch, kind: LayerKind) -> list[Allocation]:
    """Return the temporaries at the peak of ring attention's backward: gradient sums, KV blocks being sent and
    received, and the tensors of a tile or of the kernel's results. kind: kind of the layer."""
    heads, kv_heads, half = batch.heads, batch.kv_heads, batch.tokens // 2
    cut = choose_tiles(batch, heads, kv_heads, half)
    sizes = {
        "half": half, "blocks": 1 + min(2, batch.cp - 1),
        "before": int(half > cut.queries or cut.kv_heads < kv_heads or cut.rows < batch.rows),
        "ring_lines": count_flash_lines(batch, heads, half, batch.ring_documents if batch.masked else 0),
        "cut_lines": cut.rows * cut.kv_heads * cut.group * cut.queries,
        "cut_queries": cut.queries, "cut_rows": cut.rows, "cut_kv_heads": cut.kv_heads,
        "repeats": int(kv_heads < heads), "copies_halves": int(batch.masked and batch.rows > 1),
    }  # fmt: skip
    snapshots = Pass(Dimensions(batch, kind, sizes)).snapshots("ring")
    return max((tensors for _, tensors in snapshots), key=count_bytes)


class Tile(NamedTuple):
    """One tile (block of queries) of attention for one sequence. queries, keys: number of queries and of keys; masked:
    True if it has a mask."""

    queries: int
    keys: int
    masked: bool


@lru_cache(maxsize=256)
def tiled_backward(batch: MicroBatch, kind: LayerKind) -> list[Allocation]:
    """Return the temporaries at the peak of tiled attention's backward, without the gradients that it returns, for the
    micro-batch in which they are largest: masks of all tiles; tensors of the tile being computed; copies of keys and
    values, and sums of their gradients. kind: kind of the layer."""
    starts, rows = batch.starts, batch.rows
    of_each = [starts[at : at + rows] for at in range(0, len(starts), rows)] if starts else [None]
    return max((_replay_backward(batch, kind, each) for each in of_each), key=count_bytes)


def list_tiles(cut: Tiles, window: int | None, starts: Starts | None) -> list[Tile]:
    """Return, in order, the tiles of sequences that are processed together. A tile has every key to which one of its
    queries attends in any of the sequences. window: most tokens that a query attends to, None for all; starts: for each
    of these sequences, the token positions at which documents begin; None if each sequence is one document."""
    found, length = [], cut.length

    def find_first_key(row: Sequence[int], place: int) -> int:
        """Return the first token that the query at token `place` attends to; row: where the sequence's documents
        begin."""
        return max(row[bisect_right(row, place) - 1], place - (window or length) + 1)

    for start in range(0, length, cut.queries):
        stop = min(length, start + cut.queries)
        oldest, newest = (
            choose(find_first_key(row, place) for row in starts or ((0,),))
            for choose, place in ((min, start), (max, stop - 1))
        )
        found.append(Tile(stop - start, stop - oldest, newest > oldest))
    return found


def _replay_backward(batch: MicroBatch, kind: LayerKind, starts: Starts | None) -> list[Allocation]:
    """Replay the allocations of tiled attention's backward for one micro-batch, tile by tile; return the temporaries at
    the memory peak, with tensors that are being assigned then. starts: token positions at which the documents of its
    sequences begin."""
    sizes = Dimensions(batch, kind)
    cut = choose_tiles(batch, sizes["core_heads"], sizes["core_kv_heads"], batch.sequence)
    now = {"triangle": cut.queries**2 * batch.wide}
    peak = masks = of_keys = 0
    for tensors in _list_assignments(sizes, cut, starts):
        if (total := sum(now.values()) + count_bytes(tensors)) > peak:
            peak, masks = total, now.get("masks", 0) + sum(each.bytes for each in tensors if each.name == "masks")
            of_keys = sum(now.get(name, 0) for name in ("k", "v", "wide k", "dk", "dv"))
        now |= {each.name: each.bytes for each in tensors if each.category != "workspace"}
    of_masks = [Allocation("workspace", "tile masks", bytes=masks)] if masks else []
    of_tiles = Allocation("workspace", "attention tiles", bytes=peak - masks - of_keys)
    return [*of_masks, of_tiles, Allocation("workspace", "tile keys and values", bytes=of_keys)]


def _list_assignments(sizes: Dimensions, cut: Tiles, starts: Starts | None) -> Iterator[Sequence[Allocation]]:
    """Yield, in order, the allocations at each point of backward's loops over groups of sequences and of key-value
    heads: new tensors of variables, whose old tensors are freed when all new ones are allocated, and temporaries
    (category "workspace"). sizes: dimensions of the layer; starts: token positions at which documents begin.

    If every sequence is one document, all groups of sequences are alike and only the first two are replayed: the
    second, because tensors of the first are still allocated when it begins."""
    batch, kind, every = sizes.batch, sizes.kind, sizes["core_kv_heads"]
    groups = range(0, batch.rows, cut.rows)
    copied = "rotated" in sizes.true, "split_sequence" in sizes.true  # queries and keys; queries alone
    for row in groups if starts else groups[:2]:
        rows = min(cut.rows, batch.rows - row)
        tiles = list_tiles(cut, kind.window, starts and starts[row : row + rows])
        masked = sum(tile.queries * tile.keys for tile in tiles if tile.masked)
        if batch.masked and batch.starts is None:
            masked = max(masked, _worst_masks(cut.length, rows, tiles))
        yield [activation("masks", rows * masked * batch.wide)]
        for head in range(0, every, cut.kv_heads)[:2]:  # later groups add nothing to the peak
            heads = min(cut.kv_heads, every - head)
            plain = rows == 1 or heads == 1  # then rows and heads are one dimension, wherever they lie
            ordered = plain or (copied == (True, False) and heads == every)
            values = plain or (ordered and "latent" in sizes.true)
            group = {"group_rows": rows, "group_heads": heads, "copies_keys": not ordered, "copies_values": not values}
            sections = [("tile_group", Tile(0, 0, False))]
            sections += [("tile", tile) for tile in (tiles if starts else tiles[-LAST_TILES:])]
            for section, tile in (*sections, ("tile_sums", Tile(0, 0, False))):
                whole = cut.group == 1 or (any(copied) and tile.queries == cut.length)
                of_tile = {
                    "cut_lines": rows * heads * cut.group * tile.queries, "cut_keys": tile.keys,
                    "copies_queries": not (ordered and whole), "copies_gradients": not (plain and cut.group == 1),
                }  # fmt: skip
                for _, tensors in Pass(Dimensions(batch, kind, group | of_tile)).snapshots(section):
                    yield tensors


def _worst_masks(length: int, rows: int, tiles: Sequence[Tile]) -> int:
    """Return the most elements of a sequence's attention masks if documents may begin anywhere. length: tokens of the
    sequence; rows: number of sequences processed together; tiles: tiles of a sequence that is one document.

    With one sequence, the masks of different tiles have at most one tile of keys in common, as each mask ends at the
    start of a document. With several sequences, each tile may have a mask over all its keys."""
    if rows == 1:
        return tiles[0].queries * (length + tiles[0].queries * (len(tiles) - 1))
    return sum(tile.queries * tile.keys for tile in tiles)
