"""Simulation against the closed forms of the papers: bubble, activations, weight copies and messages.

p ranks, m micro-batches, v chunks; F, I, W: forward, input and weight gradient of a rank's share, B = I + W, R = F + B.
The bubble is the makespan without the work m R of a rank, or the longest idle time of a rank where that is said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest

from meshwright.program.simulate_pipeline import Durations, simulate_pipeline
from meshwright.schedules.library import generate
from meshwright.schedules.named import SCHEDULES


class Case(NamedTuple):
    p: int
    m: int
    F: float
    I: float  # noqa: E741
    W: float
    v: int = 1

    @property
    def B(self) -> float:
        return self.I + self.W

    @property
    def R(self) -> float:
        return self.F + self.B


@dataclass(frozen=True)
class Form:
    bubble: Callable[[Case], float]
    peak: Callable[[Case], float]
    idle: bool = False  # the bubble is the idle time inside ranks
    at_most: bool = False  # the bubble is a bound
    times: tuple[tuple[float, float, float], ...] = ((1, 1, 1), (1, 2, 1), (2, 1, 3), (1.5, 2, 0.5))  # F, I, W
    sizes: tuple[tuple[int, int], ...] = ((1, 1), (2, 2), (2, 6), (4, 4), (4, 8), (6, 12), (8, 32))
    chunks: tuple[int, ...] = (1,)
    copies: int = 1
    borders: Callable[[Case], int] = lambda c: 2 * (c.p - 1)  # messages of a micro-batch, in both directions


THREE_EQUAL = ((1.0, 1.0, 1.0), (2.0, 2.0, 2.0))
EVEN = ((2, 4), (4, 8), (4, 12), (6, 12), (8, 32))
SPLIT = (*THREE_EQUAL, (1.0, 2.0, 1.0), (1.5, 2.0, 1.5))  # W is not longer than F, nor F than I
V = {"borders": lambda c: 4 * (c.p - 1)}  # down the ranks and up again

FORMS = {
    "gpipe": Form(lambda c: (c.p - 1) * c.R, lambda c: c.m),
    "1f1b": Form(lambda c: (c.p - 1) * c.R, lambda c: min(c.p, c.m)),
    "interleaved": Form(
        lambda c: (c.p - 1) * c.R / c.v,
        lambda c: c.p + (c.p - 1) / c.v,
        chunks=(2, 3, 4),
        sizes=((2, 4), (4, 8), (4, 12), (8, 16)),
        borders=lambda c: 2 * (c.p * c.v - 1),
    ),
    "looped-bfs": Form(
        lambda c: (c.p - 1) * c.R / c.v, lambda c: c.m, chunks=(2, 3), borders=lambda c: 2 * (c.p * c.v - 1) * (c.p > 1)
    ),
    "interleaved-zb": Form(
        lambda c: (c.p - 1) * (c.F + c.I - c.W) / c.v,
        lambda c: c.p,
        times=THREE_EQUAL,
        chunks=(2, 3),
        sizes=((2, 4), (4, 8), (4, 12), (8, 16)),
        borders=lambda c: 2 * (c.p * c.v - 1),
    ),
    "zb-h1": Form(lambda c: (c.p - 1) * (c.F + c.I - c.W), lambda c: c.p, times=SPLIT),
    "zb-h2": Form(
        lambda c: (c.p - 1) * (c.F + c.I - 2 * c.W),
        lambda c: 2 * c.p - 1,
        idle=True,
        times=(*THREE_EQUAL, (1, 2, 1)),
        sizes=((1, 1), (2, 6), (4, 8), (8, 32)),
    ),
    "zb-v": Form(lambda c: (c.p - 1) / 2 * c.F, lambda c: c.p, times=THREE_EQUAL, sizes=EVEN, chunks=(2,), **V),
    "v-half": Form(
        lambda c: (c.p - 1) * c.R / 2,
        lambda c: (c.p + 2) // 2,
        at_most=True,
        times=THREE_EQUAL,
        sizes=EVEN,
        chunks=(2,),
        **V,
    ),
    "v-min": Form(
        lambda c: (c.p - 1) * c.R * 2 / 3,
        lambda c: (c.p + 4) // 3,
        at_most=True,
        times=THREE_EQUAL,
        sizes=EVEN,
        chunks=(2,),
        **V,
    ),
    "dualpipe": Form(
        lambda c: (c.p / 2 - 1) * (c.F + c.B + c.B - 3 * c.W),
        lambda c: c.p + 1,
        times=THREE_EQUAL,
        sizes=EVEN,
        copies=2,
    ),
    "dualpipe-v": Form(
        lambda c: (c.p - 1) * (c.F + c.B + c.B - 3 * c.W) / 2,
        lambda c: c.p + 0.5,
        times=THREE_EQUAL,
        sizes=EVEN,
        chunks=(2,),
        **V,
    ),
    "chimera": Form(
        lambda c: (c.p - 2) * c.F,  # forwards and backwards take the same time here
        lambda c: c.p,
        times=((2, 1, 1), (1, 0.5, 0.5)),
        sizes=((2, 2), (4, 4), (4, 16), (8, 8), (8, 32)),
        copies=2,
    ),
    # Only one micro-batch is in the backward; the next one's forward follows its gradient from rank to rank.
    "gems": Form(
        lambda c: (c.p - 1) * (c.m * c.B + c.F), lambda c: 1, sizes=((2, 2), (2, 6), (4, 8), (8, 8)), copies=2
    ),
    "pipedream": Form(lambda c: (c.p - 1) * c.R, lambda c: c.p, sizes=((1, 3), (2, 4), (4, 16), (8, 16))),
    "pipedream-2bw": Form(lambda c: (c.p - 1) * c.R, lambda c: c.p, sizes=((1, 3), (2, 6), (4, 16), (8, 32)), copies=2),
}


def cases(name: str) -> list[Case]:
    form = FORMS[name]
    return [Case(p, m, *times, v) for p, m in form.sizes for times in form.times for v in form.chunks]


def test_every_schedule_has_a_closed_form() -> None:
    assert set(FORMS) == set(SCHEDULES)


@pytest.mark.parametrize("name", FORMS)
def test_bubble_peak_weights_and_messages_are_the_papers(name: str) -> None:
    form = FORMS[name]
    for case in cases(name):
        program = generate(name, case.p, case.m, case.v if case.v > 1 else None)
        timing = simulate_pipeline(program, Durations.per_rank(program, case.F, case.I, case.W))
        bubble = timing.idle.max() if form.idle else timing.makespan - case.m * case.R
        expected = form.bubble(case)
        if form.at_most:
            assert bubble <= expected + 1e-9, case
        else:
            assert bubble == pytest.approx(expected), case
        assert timing.peak_activations.max() == form.peak(case), case
        assert timing.messages_sent.sum() == form.borders(case) * case.m, case
        assert timing.busy == pytest.approx([case.m * case.R] * case.p)
        if name == "pipedream":
            assert timing.weight_copies.tolist() == [case.p - rank for rank in range(case.p)]
        else:
            assert set(timing.weight_copies.tolist()) == {form.copies}, case


@pytest.mark.parametrize(("m", "rate"), [(24, 0.226), (32, 0.179), (64, 0.099)])
def test_1f1b_bubble_on_8_ranks_matches_zero_bubble_paper(m: int, rate: float) -> None:
    """(p - 1) / (m + p - 1) of the makespan, (p - 1) / m of the ideal: two ratios that are often confused."""
    program = generate("1f1b", 8, m)
    timing = simulate_pipeline(program, Durations.per_rank(program))
    assert timing.bubble_fraction == pytest.approx(7 / (m + 7)) == pytest.approx(rate, abs=5e-4)
    assert timing.bubble_to_ideal == pytest.approx(7 / m)


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 16), (8, 48)])
def test_asynchronous_schedules_have_no_bubble_once_full(name: str, p: int, m: int) -> None:
    program = generate(name, p, m)
    assert simulate_pipeline(program, Durations.per_rank(program)).steady_bubble_fraction == 0
