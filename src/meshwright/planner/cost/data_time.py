"""Seconds that data parallelism and the optimizer add to a step: gradient reductions, parameter all-gathers, the
update.

Everything takes numbers of one layout, or arrays of many that share the level of ZeRO: the search prices all at once.
"""

from __future__ import annotations

import numpy as np

from meshwright.planner.cost.engines import Engine
from meshwright.program.durations import Floats

OPTIMIZER_BYTES = {"adamw": 42.0, "adam": 42.0, "sgd": 22.0, "momentum": 30.0}
"""Moved for each parameter that a rank updates, with float32 masters: AdamW reads master, gradient and two moments and
writes all but the gradient (28), writes the parameter (2) and clips (a norm's look at the gradient, a product: 12); SGD
has no moments, or one."""

NARROW_OPTIMIZER_BYTES = {"adamw": 20.0, "adam": 20.0, "sgd": 12.0, "momentum": 16.0}
"""The same where everything is bf16."""

SHARES = (("data", "shard", "replica"), ("expert_data", "expert_shard", "expert_replica"))
"""Mesh axes of dense and of expert-parallel parameters: those over which gradients are summed, over which ZeRO shards,
and whose ranks hold the same shard."""


def communicated_level(zero: int, ranks: int, engine: Engine) -> int:
    """Return the ZeRO stage whose communication a step makes: `zero`, the layout's stage, except 1 instead of 2 or 3 if
    the engine gathers parameters and reduces gradients only once a step under a pipeline. ranks: pipeline ranks."""
    return 1 if zero >= 2 and ranks > 1 and engine.holds_in_pipelines else zero


def overlapping_passes(schedule: str, ranks: int, micro_batches: Floats | int) -> Floats:
    """Return the number of micro-batches whose computation a rank's gradient reductions or parameter gathers can
    overlap: 1, or, under "interleaved", as many as pipeline ranks (at most all micro-batches). ranks: pipeline
    ranks."""
    return np.minimum(ranks, micro_batches) if schedule == "interleaved" else np.ones(())


def exposed_zero_seconds(
    gather: Floats | float,
    scatter: Floats | float,
    layers: Floats | int,
    forward: Floats,
    back: Floats,
    share: Floats | float,
) -> tuple[Floats, Floats]:
    """Return the exposed seconds of (forward, backward) that ZeRO-2 and 3 add to a stage's micro-batch, with prefetch
    of one layer: the first all-gather, and what the others exceed a layer's computation by.

    gather, scatter: seconds of a layer's all-gather and reduce-scatter; layers: number in the stage; forward, back:
    seconds of the stage's computation; share: slow-down of overlapped computation, as a fraction of the communication's
    seconds.
    """
    waited = gather + (layers - 1) * np.maximum(0.0, gather - forward / layers)
    both = gather + scatter
    waited_back = scatter + (layers - 1) * np.maximum(0.0, both - back / layers)
    taken = share * (layers * gather - waited), share * np.maximum(0.0, layers * both - waited_back)
    return waited + taken[0], waited_back + taken[1]


def exposed_seconds(calls: Floats, work: Floats, layers: Floats | int, share: Floats | float) -> Floats:
    """Return the exposed seconds of communication that overlaps a forward or backward pass, layer by layer.

    calls: seconds of the communication; work: seconds of the pass; layers: number of layers in it; share: seconds by
    which each overlapped second of communication slows the computation. Exposed are one layer's call, or what exceeds
    the pass, plus that slow-down.
    """
    waited = np.maximum(calls / layers, calls - work * (layers - 1) / layers)
    return waited + share * (calls - np.minimum(calls, waited))


def updated_parameters(
    zero: int, dense: Floats, expert: Floats, shards: Floats | int, expert_shards: Floats | int
) -> Floats:
    """Return the number of parameters that a rank's optimizer updates. zero: ZeRO stage; dense, expert: number of dense
    and of expert-parallel parameters of the rank, unsharded; shards, expert_shards: ranks over which ZeRO shards these
    (from stage 1 on)."""
    return dense / shards + expert / expert_shards if zero else dense + expert


def update_bytes(optimizer: str, engine: Engine, itemsize: int) -> float:
    """Return the bytes that the optimizer step reads and writes for each parameter that it updates. optimizer: such as
    "adamw"; engine: training engine, whose gradient type counts; itemsize: bytes of a parameter."""
    narrow = engine.narrow_states and engine.gradient_bytes == 2 and itemsize == 2
    return (NARROW_OPTIMIZER_BYTES if narrow else OPTIMIZER_BYTES)[optimizer]
