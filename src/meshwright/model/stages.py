"""Which layers each stage of a pipeline has: contiguous, and so that the stage with the most work has little of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise

from meshwright.model.config import ModelConfig
from meshwright.model.parameters import ParameterTable
from meshwright.model.work import head_flops, layer_flops

LOOKED_UP = ("embedding", "positions")
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
    costs[-1] += head_flops(config)
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
    sums = [0.0, *accumulate(costs)]
    size = len(costs)

    def best(limit: float, worth: bool) -> list[list[tuple[float, int]]]:
        """table[k][i]: for the first i costs in k runs of at most `limit`, the smallest maximum (or, if `worth`, sum of
        squares) and where the last run starts."""
        table = [[(math.inf, 0)] * (size + 1) for _ in range(count + 1)]
        table[0][0] = (0.0, 0)
        for k in range(1, count + 1):
            for i in range(k, size + 1):
                for start in range(k - 1, i):  # of equal ones the first, whose last run is the longest
                    before, cost = table[k - 1][start][0], sums[i] - sums[start]
                    if cost > limit:
                        continue
                    value = before + cost * cost if worth else max(before, cost)
                    if value < table[k][i][0] * (1 - 1e-12):
                        table[k][i] = (value, start)
        return table

    least = best(math.inf, worth=False)[count][size][0]
    table = best(least * (1 + 1e-9), worth=True)
    ends, end = [size], size
    for k in range(count, 1, -1):
        end = table[k][end][1]
        ends.append(end)
    return ends[::-1]
