"""NumPy execution of a collective program, which shows the vector of every rank after each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshwright.collectives.library import generate
from meshwright.program.buffer_frames import Arrow, build_frames
from meshwright.program.check_collective import CheckedCollective, check_collective

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Round:
    """Buffers of all ranks after one round of a collective program. A round is a set of sends that run at the same
    time.

    title: name of the round, such as `round 1 of 6`. arrows: the round's sends, each with the rank and first slot at
    both ends; empty for the buffers before the first round. values: [ranks, slots], the number in each slot (buffer for
    one chunk of the vector) of each rank.
    """

    title: str
    arrows: tuple[Arrow, ...]
    values: Floats


def check_program(operation: str, algorithm: str, ranks: int, reduction: str = "sum") -> CheckedCollective:
    """Generate the collective program of an algorithm and verify it; return the verified program.

    operation: name of a collective, such as "all-reduce". algorithm: name such as "ring". ranks: number of ranks.
    reduction: "sum" or "maximum". Raises ProgramError if the program does not compute the operation.
    """
    return check_collective(replace(generate(operation, algorithm, ranks), reduction=reduction))


def execute(checked: CheckedCollective, vectors: Sequence[Sequence[float]]) -> list[Round]:
    """Execute a collective program on numbers; return the ranks' buffers at the start and after each round (sends that
    run at the same time).

    checked: a program whose buffer has one slot (buffer for one chunk) for each chunk of the vector. vectors:
    [ranks][chunks], one number per chunk. All sends of a round read before any of them writes.
    """
    combine = np.maximum if checked.program.reduction == "maximum" else np.add
    values = np.array(vectors, dtype=np.float64)
    assert values.shape == (checked.program.ranks, checked.program.slots), values.shape
    rounds = []
    for frame in build_frames(checked):
        before = values.copy()
        for arrow in frame.arrows:
            read = before[arrow.source, arrow.slot : arrow.slot + arrow.count]
            written = values[arrow.target, arrow.into : arrow.into + arrow.count]
            written[:] = combine(written, read) if arrow.adds else read
        rounds.append(Round(frame.title, frame.arrows, values.copy()))
    return rounds


def format_vector(values: Sequence[float] | Floats) -> str:
    """Format the vector `values` as numbers with six significant digits, separated by spaces: `1 20 300`."""
    return " ".join(f"{value:.6g}" for value in values)
