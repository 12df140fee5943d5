"""Table 2 of the Chimera paper (Li and Hoefler, SC 2021, arXiv 2107.06925) on a grid of D stages and N micro-batches.

Its bubble ratios hold where a backward takes two forwards, Chimera's where it takes one. docs/schedules.md prints the
table for one D and N, and another test holds the page to the clock.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshwright.program.simulate_pipeline import Durations, PipelineTiming, simulate_pipeline
from meshwright.schedules.library import generate

GRID = [(4, 4), (4, 8), (4, 32), (8, 8), (8, 64), (16, 32)]
Form = Callable[[int, int], float]
# Published as, schedule: bubble ratio; weights of the ranks with the least and the most (M_theta), activations (M_a).
TABLE: dict[tuple[str, str], tuple[Form, Form, Form, Form, Form]] = {
    ("PipeDream", "pipedream"): (lambda D, N: 0, lambda D, N: 1, lambda D, N: D, lambda D, N: 1, lambda D, N: D),
    ("PipeDream-2BW", "pipedream-2bw"): (
        lambda D, N: 0,
        lambda D, N: 2,
        lambda D, N: 2,
        lambda D, N: 1,
        lambda D, N: D,
    ),
    ("GPipe", "gpipe"): (
        lambda D, N: (D - 1) / (N + D - 1),
        lambda D, N: 1,
        lambda D, N: 1,
        lambda D, N: N,
        lambda D, N: N,
    ),
    ("GEMS", "gems"): (
        lambda D, N: (D - 1) / (D + 1 / 2),
        lambda D, N: 2,
        lambda D, N: 2,
        lambda D, N: 1,
        lambda D, N: 1,
    ),
    ("DAPPLE", "1f1b"): (
        lambda D, N: (D - 1) / (N + D - 1),
        lambda D, N: 1,
        lambda D, N: 1,
        lambda D, N: 1,
        lambda D, N: D,
    ),
    ("Chimera", "chimera"): (
        lambda D, N: (D - 2) / (2 * N + D - 2),
        lambda D, N: 2,
        lambda D, N: 2,
        lambda D, N: D / 2 + 1,
        lambda D, N: D,
    ),
}


def simulated(schedule: str, D: int, N: int) -> PipelineTiming:
    program = generate(schedule, D, N)
    inputs, weights = (0.5, 0.5) if schedule == "chimera" else (1, 1)
    return simulate_pipeline(program, Durations.per_rank(program, 1, inputs, weights))


@pytest.mark.parametrize(("published", "schedule"), TABLE)
@pytest.mark.parametrize(("D", "N"), GRID)
def test_the_clock_gives_the_published_figures(published: str, schedule: str, D: int, N: int) -> None:
    bubble, *spans = TABLE[published, schedule]
    timing = simulated(schedule, D, N)
    if published == "GEMS":  # approximate; one micro-batch fills and drains the pipeline alone
        assert timing.bubble_fraction == pytest.approx(bubble(D, N), abs=0.05)
    elif published.startswith("PipeDream"):
        if N >= 3 * D:
            assert timing.steady_bubble_fraction == 0
    else:
        assert timing.bubble_fraction == pytest.approx(bubble(D, N))
    weights, activations = timing.weight_copies, timing.peak_activations
    found = [weights.min(), weights.max(), activations.min(), activations.max()]
    if published.startswith("PipeDream") and N < 2 * D:  # too short to use all versions
        del found[:2], spans[:2]
    assert found == [form(D, N) for form in spans]
