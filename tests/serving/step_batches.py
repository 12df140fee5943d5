"""Step batches made by hand, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from meshwright.kernels.operations import BLOCK_TOKENS
from meshwright.serving.runner import Runner
from meshwright.serving.scheduler import StepBatch


@dataclass
class Chunk:
    """Tokens of a sequence to compute: those from `begin` on, at blocks `table`."""

    tokens: Sequence[int]
    begin: int
    table: Sequence[int] = field(default_factory=lambda: range(1, 40))


def make_batch(chunks: Sequence[Chunk], all_rows: bool = True) -> StepBatch:
    """One step of these chunks, with logits of all rows or of each sequence's last."""
    width = max(len(chunk.table) for chunk in chunks)
    tables = np.zeros((len(chunks), width), np.int32)
    tokens, positions, slots, starts = [], [], [], [0]
    for number, chunk in enumerate(chunks):
        tables[number, : len(chunk.table)] = chunk.table
        for place, token in enumerate(chunk.tokens, start=chunk.begin):
            tokens.append(token)
            positions.append(place)
            slots.append(chunk.table[place // BLOCK_TOKENS] * BLOCK_TOKENS + place % BLOCK_TOKENS)
        starts.append(len(tokens))
    rows = range(len(tokens)) if all_rows else [start - 1 for start in starts[1:]]
    context = [chunk.begin + len(chunk.tokens) for chunk in chunks]
    arrays = (np.array(each, np.int32) for each in (tokens, positions, slots, starts, context))
    return StepBatch(*arrays, tables, np.array(rows, np.int32), [])


def read_in_pieces(runner: Runner, tokens: Sequence[int], pieces: Sequence[int], table: Sequence[int]) -> np.ndarray:
    """Logits of all tokens, read in chunks of the given sizes."""
    found, begin = [], 0
    for size in pieces:
        found.append(runner.run(make_batch([Chunk(tokens[begin : begin + size], begin, table)])).copy())
        begin += size
    return np.concatenate(found)
