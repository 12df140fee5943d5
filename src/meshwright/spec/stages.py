"""Which layers each stage of a pipeline has: contiguous, and so that the stage with the most work has little of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import ParameterTable
from meshwright.spec.work import head_flops, layer_flops

LOOKED_UP = ("embedding", "positions", "token_types")
"""Units whose tensors are tables: on the way back nobody reads them."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Some consecutive layers; the first stage also has the embedding, the last one the final norm and the head."""

    index: int
    layers: range
    first: bool
    last: bool


def whole_model(config: ModelConfig) -> Stage:
    """The one stage of a model that is not cut."""
    return Stage(0, range(config.layers), first=True, last=True)


@lru_cache(maxsize=1024)
def stages_of(config: ModelConfig, count: int, sequence: int) -> tuple[Stage, ...]:
    """The model cut into `count` stages, none without a layer.

    Of all cuts those in which the stage with the most arithmetic (for rows of `sequence` tokens; the head's product
    counts, looking up rows of the embedding adds two operations for each of its numbers) has the least, and of those
    the most even one: the smallest sum of squares. Of equal ones that with the longer stages at the end, which hold
    the fewest activations in most schedules.
    """
    assert 1 <= count <= config.layers, (count, config.layers)
    costs = [sum(layer_flops(config, layer, sequence).values()) for layer in range(config.layers)]
    costs[0] += 2.0 * config.hidden
    costs[-1] += head_flops(config, sequence)
    ends = _cut(costs, count)
    return tuple(
        Stage(index, range(start, end), first=index == 0, last=index == count - 1)
        for index, (start, end) in enumerate(pairwise([0, *ends]))
    )


def units_of(table: ParameterTable, stage: Stage) -> tuple[str, ...]:
    """The units of the parameter table that a stage computes with, in forward order."""
    head = table.units[-1]
    before = [unit for unit in table.units[:-1] if not unit.startswith("layers.")]
    middle = [f"layers.{layer}" for layer in stage.layers]
    return (*(before if stage.first else ()), *middle, *((head,) if stage.last else ()))


def _cut(costs: list[float], count: int) -> list[int]:
    """Where each of `count` runs of the costs ends."""
    size = len(costs)
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    # One run of the layers [start, end): what it costs, by [end, start]; nothing is no run.
    cost = np.where(np.tri(size + 1, k=-1, dtype=bool), sums[:, None] - sums[None, :], math.inf)

    def best(limit: float, worth: bool) -> tuple[float, list[np.ndarray]]:
        """For all costs in `count` runs of at most `limit` the smallest maximum (or, if `worth`, sum of squares); and
        for each number of runs and each end where the last run starts."""
        one = np.where(cost <= limit, cost, math.inf)
        value, starts = np.where(np.arange(size + 1) == 0, 0.0, math.inf), []
        for _ in range(count):
            table = value[None, :] + one * one if worth else np.maximum(value[None, :], one)
            least = table.min(axis=1)
            starts.append((table <= least[:, None] * (1 + 1e-12)).argmax(axis=1))  # of equal ones the longest last run
            value = least
        return float(value[size]), starts

    least, _ = best(math.inf, worth=False)
    _, starts = best(least * (1 + 1e-9), worth=True)
    ends = [size]
    for k in range(count - 1, 0, -1):
        ends.append(int(starts[k][ends[-1]]))
    return ends[::-1]
