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
    """Return the ZeRO level whose calls a step makes. zero, ranks: the layout's level, and its pipeline ranks; 1
    instead of 3 where the engine, under a pipeline, gathers and reduces once a step."""
    return 1 if zero == 3 and ranks > 1 and engine.holds_in_pipelines else zero


def passes_beside(schedule: str, ranks: int, micro_batches: Floats | int) -> Floats:
    """Return the number of micro-batches whose pass overlaps a rank's reductions or gathers: 1, or, under
    "interleaved", as many as pipeline ranks (at most all micro-batches)."""
    return np.minimum(ranks, micro_batches) if schedule == "interleaved" else np.ones(())


def zero_calls(
    zero: int, seconds: Seconds, dense: Floats, spread: Floats, itemsize: int, engine_bytes: int
) -> tuple[Floats, Floats]:
    """Return the seconds of (all-gather, reduce-scatter) that ZeRO-2 and 3 add to every micro-batch.

    zero: level; seconds: cost function of (operation, axis, bytes); dense, spread: number of dense and of
    expert-parallel parameters; itemsize, engine_bytes: bytes of a parameter and of a gradient.
    """
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
    """Return the exposed seconds, once a step, of gradient reductions and of ZeRO's parameter all-gathers.

    Under ZeRO-2 and 3 the reductions are in every micro-batch instead.

    Args:
        zero: Level.
        seconds: Cost function of (operation, axis, bytes).
        dense, spread: Dense and expert-parallel parameters of a rank.
        shards, spread_shards: Ranks that ZeRO shards them over.
        layers: Of a rank.
        first_forward, last_backward: Seconds of the computation that gathers and reductions can overlap.
        share: Slow-down of overlapped computation, as a share of the communication's seconds.
        engine: Says what it overlaps.
        itemsize, gradient_bytes: Bytes of a parameter and of a gradient.
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
    """Return the exposed seconds of communication that overlaps a pass, layer by layer.

    calls: seconds of the communication; work: of the pass; layers: in it; share: seconds that each overlapped second of
    communication takes from the computation. Exposed: one layer's call, or the excess over the pass, and that
    slow-down.
    """
    waited = np.maximum(calls / layers, calls - work * (layers - 1) / layers)
    return waited + share * (calls - np.minimum(calls, waited))


def updated(zero: int, dense: Floats, spread: Floats, shards: Floats | int, spread_shards: Floats | int) -> Floats:
    """Return the number of parameters that a rank's optimizer updates. dense, spread: dense and expert-parallel ones
    that it holds; shards, spread_shards: ranks that ZeRO shards them over (not at level 0)."""
    return dense / shards + spread / spread_shards if zero else dense + spread


def update_bytes(optimizer: str, engine: Engine, itemsize: int) -> float:
    """Return the bytes read and written by the optimizer step for each updated parameter. itemsize: bytes of a
    parameter."""
    narrow = engine.gradient_bytes == 2 and itemsize == 2
    return (NARROW_OPTIMIZER_BYTES if narrow else OPTIMIZER_BYTES)[optimizer]
