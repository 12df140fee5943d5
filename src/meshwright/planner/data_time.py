"""What data parallelism and the optimizer add to a step: sums of gradients, gathers of parameters, the update.

Everything takes numbers of one layout, or arrays of many that share the level of ZeRO: the search prices all at once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from meshwright.planner.engines import Engine
from meshwright.program.durations import Floats

Seconds = Callable[[str, str, Floats], Floats]
"""The time of an operation over an axis, on vectors of so many bytes."""

OPTIMIZER_BYTES = {"adamw": 42.0, "adam": 42.0, "sgd": 22.0, "momentum": 30.0}
"""Moved for each parameter that a rank updates, with float32 masters: AdamW reads master, gradient and two moments and
writes all but the gradient (28), writes the parameter (2) and clips (a norm's look at the gradient, a product: 12); SGD
has no moments, or one."""

NARROW_OPTIMIZER_BYTES = {"adamw": 20.0, "adam": 20.0, "sgd": 12.0, "momentum": 16.0}
"""The same where everything is bf16."""

SHARES = (("data", "shard", "replica"), ("expert_data", "expert_shard", "expert_replica"))
"""Of dense parameters and of experts that lie apart: over whom gradients are summed, over whom ZeRO shards, and who
holds the same shard."""


def level_in_time(zero: int, ranks: int, engine: Engine) -> int:
    """The level of ZeRO whose calls a step on so many pipeline ranks has: where an engine holds gathered parameters and
    whole gradients from the first micro-batch to the last, there is one gather and one sum a step, as under ZeRO-1."""
    return 1 if zero == 3 and ranks > 1 and engine.holds_in_pipelines else zero


def passes_beside(schedule: str, ranks: int, micro_batches: Floats | int) -> Floats:
    """Of how many micro-batches the pass is that a rank's sums or gathers run beside: one. Where ranks take their
    stages in turns, the first and the last round, as many as ranks, go through one stage after the other."""
    return np.minimum(ranks, micro_batches) if schedule == "interleaved" else np.ones(())


def zero_calls(
    zero: int, seconds: Seconds, dense: Floats, spread: Floats, itemsize: int, engine_bytes: int
) -> tuple[Floats, Floats]:
    """Seconds of the gather and the scatter of `dense` and `spread` parameters in every micro-batch (ZeRO-2 and 3)."""
    gather = scatter = np.zeros(())
    for numel, (_, axis, _) in zip((dense, spread), SHARES, strict=True):
        if zero == 3:
            gather = gather + seconds("all-gather", axis, numel * itemsize)
        if zero >= 2:
            scatter = scatter + seconds("reduce-scatter", axis, numel * engine_bytes)
    return gather, scatter


def gradient_waits(
    zero: int,
    seconds: Seconds,
    dense: Floats,
    spread: Floats,
    shards: Floats | int,
    spread_shards: Floats | int,
    layers: Floats | int,
    first_forward: Floats,
    last_backward: Floats,
    share: Floats | float,
    engine: Engine,
    itemsize: int,
    gradient_bytes: int,
) -> Floats:
    """What sums of gradients, and ZeRO's gathers of new parameters, cost once a step beyond the backward pass beside
    which they run. ZeRO-2 and 3 did the sums in every micro-batch.

    dense, spread: parameters of a rank; first_forward, last_backward: seconds; share: what communication takes from
    work (`tax`); shards, spread_shards: ranks that ZeRO shards them over.
    """
    sums = gathers = np.zeros(())
    for (numel, count), (whole, axis, replicas) in zip(((dense, shards), (spread, spread_shards)), SHARES, strict=True):
        size = numel * gradient_bytes
        if zero == 0:
            sums = sums + seconds("all-reduce", whole, size)
        elif zero == 1:
            sums = sums + seconds("reduce-scatter", axis, size)
        if zero:
            sums = sums + seconds("all-reduce", replicas, size / count)
        if zero in (1, 2):
            gathers = gathers + seconds("all-gather", axis, numel * itemsize)
    if not engine.overlaps_data:
        return sums + gathers
    if not engine.overlaps_gathers:
        return beside(sums, last_backward, layers, share) + gathers
    return beside(sums, last_backward, layers, share) + beside(gathers, first_forward, layers, share)


def beside(calls: Floats, work: Floats, layers: Floats | int, share: Floats | float) -> Floats:
    """What calls cost that run layer by layer beside a pass of so many seconds: one layer's, or what is longer than the
    pass, and what they take from it."""
    waited = np.maximum(calls / layers, calls - work * (layers - 1) / layers)
    return waited + share * (calls - np.minimum(calls, waited))


def updated(zero: int, dense: Floats, spread: Floats, shards: Floats | int, spread_shards: Floats | int) -> Floats:
    """Parameters that a rank updates."""
    return dense / shards + spread / spread_shards if zero else dense + spread


def update_bytes(optimizer: str, engine: Engine, itemsize: int) -> float:
    """Moved for each of them."""
    narrow = engine.gradient_bytes == 2 and itemsize == 2
    return (NARROW_OPTIMIZER_BYTES if narrow else OPTIMIZER_BYTES)[optimizer]
