"""Closed forms of a pipeline's makespan and of its micro-batches in flight, with which the planner screens layouts; the
simulator predicts the best ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.names import BIDIRECTIONAL_SCHEDULES
from meshwright.program.durations import Floats

SPLIT_SCHEDULES = ("zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "interleaved-zb", "dualpipe", "dualpipe-v", "auto")
"""Schedules with split backward, whose weight gradients fill the bubbles."""

BUBBLES = {
    "zb-h1": (1, 1), "auto": (1, 1), "zb-h2": (2, 1), "zb-v": (2, 2), "v-half": (-1, 2), "v-min": (-1, 1.5),
    "dualpipe": (1, 2), "dualpipe-v": (1, 2), "chimera": (-1, 2),
}  # fmt: skip
"""{schedule: (a, d)}: its bubble is (F + B - a W) / d, at least 0. F, B and W: seconds of forward, input gradient and
weight gradient of a micro-batch on all other ranks. Other schedules: a = -1, d = chunks of a rank."""

V_SHAPED = ("zb-v", "v-half", "v-min", "dualpipe-v")
"""Schedules in which rank r holds stages r and 2 p - 1 - r of the 2 p stages (p ranks)."""


def stages_by_rank(schedule: str, ranks: int, chunks: int) -> list[list[int]]:
    """Return the stage indices of each pipeline rank under a schedule such as "1f1b". ranks: number of pipeline ranks;
    chunks: number of stages on each rank. V-shaped schedules have two stages on each rank; bidirectional schedules have
    one stage of each of the two replicas."""
    if schedule in V_SHAPED:
        return [[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]
    if schedule in BIDIRECTIONAL_SCHEDULES:
        return [[rank, ranks - 1 - rank] for rank in range(ranks)]
    return [list(range(rank, ranks * chunks, ranks)) for rank in range(ranks)]


def followed_at_once(schedule: str, ranks: int) -> bool:
    """Return True if, under a schedule, the last stage runs each backward directly after its forward; False if all
    forwards run first (GPipe). ranks: pipeline ranks."""
    return schedule not in ("gpipe", "looped-bfs") or ranks == 1


class BusiestRank(NamedTuple):
    """Seconds of one micro-batch on the pipeline rank that computes longest, under several layouts.

    own: seconds by phase (forward, input gradient, weight gradient) on this rank [3, layouts]; others: the same, summed
    over all other ranks [3, layouts]; total: seconds of all phases on this rank [layouts]; ranks: number of pipeline
    ranks."""

    own: Floats
    others: Floats
    total: Floats
    ranks: int


def find_busiest_rank(ranks: Floats, counts: Floats) -> BusiestRank:
    """Return the times of the pipeline rank that computes longest. Pipeline ranks with equal stages are given once
    ("distinct").

    ranks: seconds of one micro-batch by phase, in all stages of each distinct rank [distinct ranks, 3, layouts];
    counts: number of pipeline ranks equal to each distinct rank."""
    own = ranks[0]
    if len(counts) > 1:
        total = ranks[:, 0] + ranks[:, 1] + ranks[:, 2]
        own = np.take_along_axis(ranks, total.argmax(axis=0)[None, None], 0)[0]
    others: Floats = np.tensordot(counts, ranks, 1) - own
    return BusiestRank(own, others, own[0] + own[1] + own[2], int(counts.sum()))


def closed_makespan(
    schedule: str, micro_batches: Floats | int, busiest: BusiestRank, stages: int, transfer: Floats | float
) -> tuple[Floats, Floats]:
    """Return (makespan, seconds of the makespan due to messages) of a pipeline schedule in closed form, for one layout
    or for an array of layouts. The makespan is the time from the first forward to the last backward of a step.

    Args:
        schedule: Such as "1f1b".
        micro_batches: Number of micro-batches of a step.
        busiest: Seconds of one micro-batch on the busiest rank and on all others.
        stages: Number of stages of the pipeline.
        transfer: Seconds of one message between stages.

    Sources, with F, B and W for forward, input gradient and weight gradient of a rank: 1F1B and GPipe idle for the F +
    B + W of the other ranks (Narayanan et al. 2021, arXiv:2104.04473, section 2.2), interleaved schedules for one chunk
    of each, ZB-H1 for F + B - W, ZB-H2 for F + B - 2 W (Qi et al. 2023, arXiv:2401.10241, table 2), V-Half and V-Min
    for about 1/2 and 2/3 of 1F1B's. The makespan is at least the time of one micro-batch through all stages and back,
    plus one stage's time of each other micro-batch; this bound applies with fewer micro-batches than ranks. Under GEMS
    two micro-batches are in flight, and the backwards of all follow one another (Li and Hoefler 2021, figure 2)."""
    (own_f, _, own_w), (f, b, w), most, ranks = busiest
    none, chunks = np.zeros(()), stages // ranks
    filled, divisor = BUBBLES.get(schedule, (-1, chunks))
    bubble = np.maximum(none, f + b - filled * w) / divisor
    # A message goes each way over each boundary while the pipeline fills and drains; in 1F1B every micro-batch's round
    # trip also carries one each way, because nothing else is there to do meanwhile.
    messages: Floats = np.asarray(2 * (stages - 1) * transfer, dtype=np.float64)
    if schedule == "1f1b":
        messages = messages + 2 * transfer * (micro_batches - 1) * (ranks - 1) / ranks
    if schedule == "gems":
        return micro_batches * (b + w + most - own_f) + f + own_f + messages, messages
    split = schedule in SPLIT_SCHEDULES
    left = own_w if split else none  # may wait until nobody needs this rank
    needed = most - left if split else most
    pieces = 2 if schedule in V_SHAPED else chunks
    queue = micro_batches / 2 if schedule in BIDIRECTIONAL_SCHEDULES else micro_batches
    through = f + b + (none if split else w) + needed + ((queue - 1) * needed + left) / pieces
    return np.maximum(micro_batches * most + bubble, through) + messages, messages


def in_flight(
    schedule: str, ranks: int, chunks: int, micro_batches: Floats | int, places: Sequence[int] | None = None
) -> tuple[Floats, Floats]:
    """Return (waiting, queued): how many micro-batches' activations each pipeline rank holds at the times when its
    memory may peak. Both are arrays [times, ranks, *shape of micro_batches].

    Args:
        schedule: Such as "1f1b".
        ranks: Number of pipeline ranks.
        chunks: Model chunks (stages) of a rank.
        micro_batches: Number of micro-batches of a step, or an array of such numbers.
        places: Pipeline ranks to return; None for all.

    Returns:
        waiting: micro-batches whose backward has not run. queued: micro-batches of which only the weight gradients are
            left to compute. One micro-batch counts as 1 if it is held in all stages of the rank (bidirectional
            schedules: in all stages of one replica).

    1F1B holds as many as there are stages from this one to the last; interleaved (2 (p - r - 1) + (v - 1) g + 1) / v
    for groups of g micro-batches, as many as ranks where they divide (Narayanan et al. 2021, arXiv:2104.04473, section
    2.2). ZB-H1 holds p in all, ZB-H2 2 p - 1, ZB-V p (Qi et al. 2023, arXiv:2401.10241), V-Half and V-Min about a half
    and a third (Qi et al. 2024, arXiv:2405.15362), DualPipe p + 1, Chimera from p / 2 + 1 at both ends to p in the
    middle (Li and Hoefler 2021, arXiv:2107.06925, table 2). The split into waiting and queued, and the numbers for few
    micro-batches, are fitted to the schedule programs (`schedules/`)."""
    m = np.asarray(micro_batches, dtype=np.float64)[None]
    rank = np.array(range(ranks) if places is None else places, dtype=np.float64).reshape(-1, *[1] * (m.ndim - 1))
    p, none, after = float(ranks), np.zeros_like(rank * m), ranks - 1 - rank
    group = np.ceil(m / np.maximum(1, m // p))

    def moments(*pairs: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
        """Stack (waiting, queued) pairs, one for each time, into two arrays [times, ranks, *micro_batches], at least
        0."""
        waiting, queued = (np.stack([each + none for each in column]) for column in zip(*pairs, strict=True))
        return np.maximum(0.0, waiting), np.maximum(0.0, queued)

    if schedule in ("zb-h1", "zb-h2"):
        twice = 2 if schedule == "zb-h2" else 1
        most = np.minimum(m, twice * p - twice + 1)
        waits = np.minimum(m, twice * after + 1)
        lacking = np.maximum(0.0, twice * (p - 1) - most)
        left = np.minimum(most, np.maximum(1.0, twice * rank + 1 - lacking))
        return moments((waits, np.minimum(most - waits, left)), (most - left, left))
    if schedule in (*V_SHAPED, "interleaved-zb"):
        share = 0.5 if schedule in V_SHAPED else 1 / chunks  # of a rank's stages
        if schedule == "interleaved-zb":
            most = np.minimum(m, (p + (chunks - 1) * group) / chunks)
            left = np.minimum(m, (rank + 1) / chunks)
            rest = most - left
        elif schedule == "zb-v":
            most = np.minimum(np.minimum(m, p), (m + 1 + rank) / 2)
            left = 0.5 + np.clip((rank + 1) * (m - p) / p, 0.0, rank)
            rest = np.minimum(after / 2, most - 0.5)
        elif schedule == "dualpipe-v":
            most, left, rest = np.minimum(m, p + 0.5), (rank + 1) / 2, after / 2
        else:
            most = np.minimum(m, ranks // 2 + 1 if schedule == "v-half" else (ranks + 1) // 3 + 1)
            least = 1.0 if schedule == "v-min" or ranks % 2 else 2.0
            last = np.minimum(most, np.maximum(least, most - 2 * (m - most)))
            left = 1 + (last - 1) * rank / max(1, ranks - 1)
            rest = most - left
        return moments((most, none), (most - share, share + none), (rest, left))
    if schedule == "dualpipe":
        return moments((np.minimum(m, p + 1), none), (p - 1 + none, 1 + none), (none, p / 2 + none))
    most = {
        "1f1b": ranks - rank, "gpipe": m, "looped-bfs": m, "gems": 1.0,
        "interleaved": (2 * after + (chunks - 1) * group + 1) / chunks,
        "chimera": p / 2 + 1 + np.minimum(rank, after),  # of both directions together
    }.get(schedule, p)  # fmt: skip
    return moments((np.minimum(m, most), none))
