"""Closed forms of how long a pipeline takes, and of how many micro-batches wait in it: what the planner screens layouts
by. `simulate_pipeline` decides."""

from __future__ import annotations

import numpy as np

from meshwright.names import BIDIRECTIONAL_SCHEDULES
from meshwright.program.durations import Floats

__all__ = ["SPLIT", "closed_makespan", "in_flight", "places_of"]

SPLIT = ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "interleaved-zb")
"""Weight gradients come later: what they need waits, whatever else is computed again."""

V_SHAPED = ("zb-v", "v-half", "v-min", "dualpipe-v")
"""Of a rank's two stages the second is as far from the end as the first from the start."""


def places_of(schedule: str, ranks: int, chunks: int) -> list[list[int]]:
    """The stages of each rank under a schedule of this name; of one of two replicas both."""
    if schedule in V_SHAPED:
        return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]
    if schedule in BIDIRECTIONAL_SCHEDULES:
        return [[rank, ranks - 1 - rank] for rank in range(ranks)]
    return [list(range(rank, ranks * chunks, ranks)) for rank in range(ranks)]


def closed_makespan(
    schedule: str, chunks: int, micro_batches: Floats | int, phases: Floats, counts: Floats, stages: int,
    transfer: Floats | float,
) -> tuple[Floats, Floats]:  # fmt: skip
    """Makespan of a schedule, and the part of it that messages are.

    phases [forward and both gradients, ..., kinds of ranks]: seconds of a rank's stages and a micro-batch; counts
    [kinds of ranks]: how many ranks there are of each kind; transfer [...]: seconds of a message. With F, B and W those
    of a rank: 1F1B and GPipe idle for the F + B + W of the other ranks (Narayanan et al. 2021, arXiv:2104.04473,
    section 2.2), interleaved ones for a chunk of each, ZB-H1 for F + B - W, ZB-H2 for F + B - 2 W (Qi et al. 2023,
    arXiv:2401.10241, table 2), V-Half and V-Min for about 1/2 and 2/3 of 1F1B's.
    """
    whole = phases.sum(axis=0)
    busiest = whole.argmax(axis=-1)[..., None]
    most = np.take_along_axis(whole, busiest, -1)[..., 0]
    f, b, w = ((times * counts).sum(-1) - np.take_along_axis(times, busiest, -1)[..., 0] for times in phases)
    none = np.zeros(())
    bubble = {
        "zb-h1": lambda: np.maximum(none, f + b - w),
        "zb-h2": lambda: np.maximum(none, f + b - 2 * w),
        "zb-v": lambda: np.maximum(none, f + b - 2 * w) / 2,
        "v-half": lambda: (f + b + w) / 2,
        "v-min": lambda: (f + b + w) * 2 / 3,
        "dualpipe": lambda: np.maximum(none, (f + b + w) / 2 - w),
        "dualpipe-v": lambda: np.maximum(none, (f + b + w) / 2 - w),
        "chimera": lambda: (f + b + w) / 2,
        "auto": lambda: np.maximum(none, f + b - w),
    }.get(schedule, lambda: (f + b + w) / chunks)()
    # A message goes each way over each boundary while the pipeline fills and drains; in 1F1B every micro-batch's round
    # trip also carries one each way, because nothing else is there to do meanwhile.
    ranks = counts.sum()
    messages: Floats = np.asarray(2 * (stages - 1) * transfer, dtype=np.float64)
    if schedule == "1f1b":
        messages = messages + 2 * transfer * (micro_batches - 1) * (ranks - 1) / ranks
    return micro_batches * most + bubble + messages, messages


def in_flight(schedule: str, ranks: int, chunks: int) -> tuple[Floats, Floats]:
    """Micro-batches that each rank holds at most, in units of its whole share of one (of a schedule of two replicas: of
    one replica's), where there are many: those that wait for their backward, and those of which only weight gradients
    are left.

    1F1B: as many as there are stages from here to the end; interleaved: (2 (p - r - 1) + (v - 1) p + 1) / v (Narayanan
    et al. 2021, arXiv:2104.04473, section 2.2). ZB-H1 holds p in all, ZB-H2 2 p - 1, of which later ranks have more
    that are through their first half; ZB-V p (Qi et al. 2023, arXiv:2401.10241), V-Half and V-Min about a half and a
    third (Qi et al. 2024, arXiv:2405.15362), DualPipe p + 1.
    """
    rank = np.arange(ranks, dtype=np.float64)
    none = np.zeros(ranks)
    if schedule == "1f1b":
        return ranks - rank, none
    if schedule == "interleaved":
        return (2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1) / chunks, none
    if schedule == "zb-h1":
        return ranks - rank, rank
    if schedule == "zb-h2":
        return 2 * (ranks - rank) - 1, 2 * rank
    every = {
        "gpipe": np.inf, "looped-bfs": np.inf, "v-half": ranks // 2 + 1,
        "v-min": 2 * -(-ranks // 6) + (2 if ranks > 4 else 0), "dualpipe": ranks + 1, "dualpipe-v": ranks + 0.5,
        "chimera": ranks / 2 + 1, "gems": 1,
    }.get(schedule, ranks)  # fmt: skip
    # Of schedules that split backwards a chunk's weight gradients are left for a while.
    return np.full(ranks, float(every)), none + (0.5 if schedule in SPLIT or schedule.startswith("dualpipe") else 0.0)
