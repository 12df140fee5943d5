"""Writes the steps of a rank that holds two chunks in phrases, as papers print them: `F0 F1`, `F0&B1 F1&B0`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshwright.program.pipeline import COMPUTING, RankBuilder

_FORWARD, _BACKWARD, _INPUT_GRADIENT, _WEIGHT_GRADIENT = (int(kind) for kind in COMPUTING)
_KINDS = {"F": _FORWARD, "B": _BACKWARD, "I": _INPUT_GRADIENT, "W": _WEIGHT_GRADIENT}


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
        self._places = [(chunk.stage, chunk.replica) for chunk in chunks]
        self._put_off: list[tuple[int, int]] = []  # weight gradients: chunk, micro-batch

    def write(self, phrase: str, times: int = 1) -> None:
        """The phrase, so many times in a row; none for a number below 1."""
        words = _parsed(phrase)
        for _ in range(times):
            for word in words:
                if len(word) == 1:
                    self._write_step(*word[0])
                else:
                    with self.rank.together():
                        for step in word:
                            self._write_step(*step)

    def _write_step(self, kind: int, number: int | None) -> None:
        if kind == _WEIGHT_GRADIENT:
            put_off = self._put_off
            found = next((at for at, (held, _) in enumerate(put_off) if number is None or number == held), None)
            if found is None:
                return
            chunk, micro_batch = put_off.pop(found)
        else:
            assert number is not None, "a forward or a backward of which chunk?"
            chunk = number
            micro_batch = next((self._forward if kind == _FORWARD else self._backward)[chunk], -1)
            if micro_batch < 0:
                return
            if kind == _INPUT_GRADIENT:
                self._put_off.append((chunk, micro_batch))
        self.rank.add(kind, micro_batch, *self._places[chunk])


@lru_cache(maxsize=128)
def _parsed(phrase: str) -> list[list[tuple[int, int | None]]]:
    """Kind and chunk of each step, word by word."""
    return [
        [(_KINDS[step[0]], int(step[1:]) if step[1:] else None) for step in word.split("&")] for word in phrase.split()
    ]
