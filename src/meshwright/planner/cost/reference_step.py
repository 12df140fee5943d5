"""Ratio of a measured training step to the sum of its operations timed alone, by which the planner multiplies
predictions.

Timed alone, operations find their operands in the caches and no rank waits. In a step, operands come from memory, and
ranks wait for the slowest in every layer. The effect depends on the machine, so `meshwright probe` measures a small
reference model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshwright.layout import Layout
from meshwright.planner.cost.engines import Engine
from meshwright.planner.cost.layer_times import MICRO_BATCH_PARTS, UNCORRECTED
from meshwright.planner.cost.step_time import step_time
from meshwright.planner.hardware.cluster import Cluster
from meshwright.program.durations import Floats
from meshwright.spec.config import ModelConfig

LEAST, MOST = 0.5, 20.0
"""Smallest and largest accepted factor; values outside are measurement noise."""


class ReferenceModel(NamedTuple):
    """The small model whose training step `meshwright probe` measures. config: model; rows: sequences that each rank
    computes in a step; sequence: tokens of a sequence."""

    config: ModelConfig
    rows: int
    sequence: int


def reference_model(kind: str) -> ReferenceModel:
    """Return the small model whose training step `meshwright probe` measures; its sizes suit the devices. kind: "cpu"
    or "cuda"."""
    if kind == "cpu":
        return ReferenceModel(_llama(hidden=256, layers=4, heads=8, intermediate=704, vocabulary=4096), 4, 256)
    return ReferenceModel(_llama(hidden=1024, layers=4, heads=16, intermediate=2816, vocabulary=16384), 4, 2048)


def _llama(hidden: int, layers: int, heads: int, intermediate: int, vocabulary: int) -> ModelConfig:
    """Return a Llama config of the given sizes, with half as many key-value as query heads."""
    return ModelConfig(
        family="llama", vocabulary=vocabulary, hidden=hidden, layers=layers, heads=heads, kv_heads=heads // 2,
        head_dim=hidden // heads, intermediate=intermediate, max_positions=4096, norm="rmsnorm", norm_epsilon=1e-5,
        activation="silu", gated=True, positions="rope",
    )  # fmt: skip


def batch_of(layout: Layout, model: ReferenceModel) -> int:
    """Return the number of sequences, over all ranks, of a training step of the reference model: `model.rows` for each
    rank."""
    return model.rows * layout.world_size


@lru_cache(maxsize=32)
def measured_step_factors(cluster: Cluster, precision: str, engine: Engine) -> Floats:
    """Return factors [5], one for each part of a micro-batch (compute, tensor, context, expert, data). Each is the
    part's seconds in a measured training step, divided by the sum of its operations timed alone; 1 if not measured.
    precision: such as "bf16".

    All factors are 1 for engines other than `meshwright`. Compiled blocks use the factors of eager blocks."""
    measured = cluster.measured
    if measured is None or not measured.steps or engine.name != "meshwright":
        return UNCORRECTED
    layouts = [Layout.parse(each.layout) for each in measured.steps]
    timed = ("tensor" if each.tp > 1 else "context" if each.cp > 1 else "data" for each in layouts)
    steps = {(part, each.precision): step for part, each, step in zip(timed, layouts, measured.steps, strict=True)}
    base = steps.get(("data", precision)) or next((each for (axis, _), each in steps.items() if axis == "data"), None)
    if base is None:
        return UNCORRECTED
    parts = _sum_operations(cluster, Layout.parse(base.layout))
    found = dict.fromkeys(MICRO_BATCH_PARTS, 1.0)
    found["compute"] = _discard_noise((base.seconds - parts["data"]) / parts["compute"])
    for (axis, other), each in steps.items():
        if axis == "data":
            continue
        alike = steps.get(("data", other), base)
        parts, own = (_sum_operations(cluster, Layout.parse(step.layout)) for step in (each, alike))
        working = _discard_noise((alike.seconds - own["data"]) / own["compute"]) * parts["compute"]
        found[axis] = _discard_noise((each.seconds - working - parts["data"]) / parts[axis])
    if not any(axis == "context" for axis, _ in steps):
        found["context"] = found["tensor"]
    found["expert"] = found["tensor"]
    return np.array([found[part] for part in MICRO_BATCH_PARTS])


def _discard_noise(factor: float) -> float:
    """Return a measured factor, or 1 if it lies outside [`LEAST`, `MOST`] and so must be noise."""
    return factor if LEAST <= factor <= MOST else 1.0


def _sum_operations(cluster: Cluster, layout: Layout) -> Mapping[str, float]:
    """Predict one training step of the reference model as the sum of its operations, each timed alone. Return {part of
    the step: seconds}."""
    assert cluster.measured is not None
    model = reference_model(cluster.kind)
    # As it was measured: on all ranks of its hosts, and before any calibration.
    then = replace(
        cluster, devices=layout.world_size, devices_per_node=min(cluster.measured.ranks, layout.world_size),
        calibration=None,
    )  # fmt: skip
    return step_time(model.config, layout, then, model.sequence, batch_of(layout, model)).breakdown
