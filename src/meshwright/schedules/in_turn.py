"""Writes the steps of a rank that holds two chunks in phrases, as papers print them: `F0 F1`, `F0&B1 F1&B0`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from meshwright.program.pipeline import Kind, RankBuilder

_KINDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.INPUT_GRADIENT, "W": Kind.WEIGHT_GRADIENT}


@dataclass(frozen=True)
class Chunk:
    """One stage of one replica on a rank, and the micro-batches that it takes in turn."""

    stage: int
    micro_batches: range
    replica: int = 0


class InTurn:
    """Writes phrases for one rank; every chunk takes its micro-batches in turn, forwards and backwards alike.

    F: forward, B: whole backward, I: input gradient, W: weight gradient, each followed by the number of the chunk. `W`
    without a number is the oldest weight gradient that has been put off, of whichever chunk. `&` joins a forward and a
    backward that overlap. A step for which no micro-batch is left is left out.
    """

    def __init__(self, rank: RankBuilder, chunks: Sequence[Chunk]) -> None:
        self.rank, self.chunks = rank, chunks
        self._forward = [iter(chunk.micro_batches) for chunk in chunks]
        self._backward = [iter(chunk.micro_batches) for chunk in chunks]
        self._put_off: list[tuple[int, int]] = []  # weight gradients: chunk, micro-batch

    def write(self, phrase: str, times: int = 1) -> None:
        """The phrase, so many times in a row; none for a number below 1."""
        for _ in range(times):
            for word in phrase.split():
                with self.rank.together() if "&" in word else nullcontext():
                    for step in word.split("&"):
                        self._write_step(step)

    def _write_step(self, step: str) -> None:
        kind = _KINDS[step[0]]
        number = int(step[1:]) if len(step) > 1 else None
        if kind == Kind.WEIGHT_GRADIENT:
            found = next((at for at, (held, _) in enumerate(self._put_off) if number in (None, held)), None)
            number, micro_batch = self._put_off.pop(found) if found is not None else (None, None)
        else:
            assert number is not None, f"{step}: of which chunk?"
            micro_batch = next((self._forward if kind == Kind.FORWARD else self._backward)[number], None)
        if number is None or micro_batch is None:
            return
        if kind == Kind.INPUT_GRADIENT:
            self._put_off.append((number, micro_batch))
        self.rank.add(kind, micro_batch, self.chunks[number].stage, self.chunks[number].replica)
