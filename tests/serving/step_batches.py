"""Step batches made by hand, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from meshwright.kernels.operations import BLOCK_TOKENS
from meshwright.serving import scheduler
from meshwright.serving.engine import Runner
from meshwright.serving.logit_rows import Draw
from meshwright.serving.scheduler import StepBatch


@dataclass
class Chunk:
    """Tokens of a sequence to compute: those from `begin` on, at blocks `table`."""

    tokens: Sequence[int]
    begin: int
    table: Sequence[int] = field(default_factory=lambda: range(1, 40))


class GreedySequence:
    """Stands in for a scheduler's sequence whose tokens are sampled greedily."""

    def prepare_draw(self, position: int) -> Draw:
        return Draw()


def make_batch(chunks: Sequence[Chunk], all_rows: bool = True, tables: int = 1) -> StepBatch:
    """One step of these chunks, with logits of all rows or of each sequence's last. tables: number of block tables;
    that with index t has the blocks tables * b + t for the blocks b of a chunk."""
    width = max(len(chunk.table) for chunk in chunks)
    blocks_WSB = np.zeros((tables, len(chunks), width), np.int32)
    tokens, positions, owners, starts = [], [], [], [0]
    for number, chunk in enumerate(chunks):
        blocks_WSB[:, number, : len(chunk.table)] = tables * np.array(chunk.table) + np.arange(tables)[:, None]
        for place, token in enumerate(chunk.tokens, start=chunk.begin):
            tokens.append(token)
            positions.append(place)
            owners.append(number)
        starts.append(len(tokens))
    at = np.array(positions)
    slots = np.ascontiguousarray(blocks_WSB[:, owners, at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS)
    rows = range(len(tokens)) if all_rows else [start - 1 for start in starts[1:]]
    context = [chunk.begin + len(chunk.tokens) for chunk in chunks]
    computed = [range(chunk.begin, chunk.begin + len(chunk.tokens)) for chunk in chunks]
    parts = [scheduler.Chunk(GreedySequence(), each, each if all_rows else each[-1:]) for each in computed]
    arrays = (np.array(each, np.int32) for each in (tokens, positions, slots, starts, context))
    return StepBatch(*arrays, blocks_WSB, np.array(rows, np.int32), parts)


def read_in_pieces(
    runner: Runner, tokens: Sequence[int], pieces: Sequence[int], table: Sequence[int], tables: int = 1
) -> np.ndarray:
    """Logits of all tokens, read in chunks of the given sizes."""
    found, begin = [], 0
    for size in pieces:
        found.append(runner.run(make_batch([Chunk(tokens[begin : begin + size], begin, table)], tables=tables)).copy())
        begin += size
    return np.concatenate(found)
