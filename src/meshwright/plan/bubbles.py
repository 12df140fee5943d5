"""Closed forms of how long a pipeline takes: what the planner screens layouts by. `simulate_pipeline` decides."""

from __future__ import annotations

import numpy as np

from meshwright.layout import Layout
from meshwright.program.durations import Floats

__all__ = ["closed_bubble"]


def closed_bubble(
    layout: Layout, forward: Floats, back: Floats, weight: Floats, places: list[list[int]], transfer: float
) -> tuple[float, float]:
    """Makespan of a schedule without its messages, plus what messages add: (makespan with messages, messages' part).

    forward, back, weight: seconds of each stage and micro-batch; places: the stages of each rank. With F, B and W those
    of a rank: 1F1B and GPipe idle for the F + B + W of the other ranks (Narayanan et al. 2021, arXiv:2104.04473,
    section 2.2), interleaved ones for a chunk of each, ZB-H1 for F + B - W, ZB-H2 for F + B - 2 W (Qi et al. 2023,
    arXiv:2401.10241, table 2), V-Half and V-Min for about 1/2 and 2/3 of 1F1B's.
    """
    rank = np.array([[sum(times[at] for at in place) for place in places] for times in (forward, back, weight)])
    whole = rank.sum(axis=0)
    busiest = int(whole.argmax())
    others = np.delete(rank, busiest, axis=1).sum(axis=1)
    f, b, w = (float(each) for each in others)
    m, p, chunks = layout.micro_batches, layout.pp, layout.chunks
    name = layout.schedule
    bubble = {
        "zb-h1": max(0.0, f + b - w),
        "zb-h2": max(0.0, f + b - 2 * w),
        "zb-v": max(0.0, f + b - 2 * w) / 2,
        "v-half": (f + b + w) / 2,
        "v-min": (f + b + w) * 2 / 3,
        "dualpipe": max(0.0, (f + b + w) / 2 - w),
        "dualpipe-v": max(0.0, (f + b + w) / 2 - w),
        "chimera": (f + b + w) / 2,
        "auto": max(0.0, f + b - w),
    }.get(name, (f + b + w) / chunks)
    # A message goes each way over each boundary while the pipeline fills and drains; in 1F1B every micro-batch's round
    # trip also carries one each way, because nothing else is there to do meanwhile.
    crossings = len(forward) - 1
    messages = 2 * crossings * transfer
    if name == "1f1b":
        messages += 2 * transfer * (m - 1) * (p - 1) / p
    makespan = m * float(whole[busiest]) + bubble + messages
    return makespan, messages
