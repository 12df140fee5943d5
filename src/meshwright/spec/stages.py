"""Cut a model's layers into contiguous pipeline stages of balanced FLOPs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import ParameterTable
from meshwright.spec.work import head_flops, layer_flops, prediction_flops

LOOKED_UP = ("embedding", "positions", "token_types")
"""FSDP units whose tensors are look-up tables: the backward pass does not read them."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Pipeline stage: consecutive layers of a model. index: number of the stage, from 0. layers: indices of its layers.
    first: True if the stage has the embedding. last: True if the stage has the final norm and the head."""

    index: int
    layers: range
    first: bool
    last: bool


def whole_model(config: ModelConfig) -> Stage:
    """Return the single pipeline stage that holds the whole model with configuration `config`."""
    return Stage(0, range(config.layers), first=True, last=True)


@lru_cache(maxsize=1024)
def cut_into_stages(config: ModelConfig, count: int, sequence: int) -> tuple[Stage, ...]:
    """Cut the model with configuration `config` into `count` pipeline stages of at least one layer each, balanced in
    FLOPs for sequences of `sequence` tokens; return them in forward order.

    The cut minimizes the FLOPs of the largest stage, then the sum of the stages' squared FLOPs. The head counts; an
    embedding look-up counts as two operations per feature. Among equal cuts, later stages get more layers, because they
    hold the fewest activations in most schedules.
    """
    assert 1 <= count <= config.layers, (count, config.layers)
    costs = [sum(layer_flops(config, layer, sequence).values()) for layer in range(config.layers)]
    costs[0] += 2.0 * config.hidden
    costs[-1] += head_flops(config, sequence) + prediction_flops(config, sequence)
    ends = _cut_balanced(costs, count)
    return tuple(
        Stage(index, range(start, end), first=index == 0, last=index == count - 1)
        for index, (start, end) in enumerate(pairwise([0, *ends]))
    )


def cut_into_even_stages(config: ModelConfig, count: int) -> tuple[Stage, ...]:
    """Cut the model with configuration `config` into `count` pipeline stages of equal numbers of layers, regardless of
    embedding and head; return them in forward order. If the layers do not divide evenly, the stages in the middle have
    one layer more.
    """
    assert 1 <= count <= config.layers, (count, config.layers)
    least, more = divmod(config.layers, count)
    before = (count - more + 1) // 2
    sizes = [least + (before <= index < before + more) for index in range(count)]
    ends = np.cumsum(sizes).tolist()
    return tuple(
        Stage(index, range(start, end), first=index == 0, last=index == count - 1)
        for index, (start, end) in enumerate(pairwise([0, *ends]))
    )


def cut_past_shares(config: ModelConfig, count: int) -> tuple[Stage, ...]:
    """Cut the model with configuration `config` into `count` pipeline stages, each of which ends with the layer by
    which it and the stages before it have more than their share of the multiplied weights, as in nanotron
    (`build_model`); return them in forward order. Early stages get more layers than late ones.

    Keys and values count as without grouping, the head as one layer; each stage has at least one layer.
    """
    assert 1 <= count <= config.layers, (count, config.layers)
    layer = 4 * config.hidden**2 + 3 * config.hidden * config.intermediate
    total = config.layers * layer + config.hidden * config.vocabulary
    ends = [
        min(total * (index + 1) // (count * layer) + 1, config.layers - (count - 1 - index)) for index in range(count)
    ]
    return tuple(
        Stage(index, range(start, end), first=index == 0, last=index == count - 1)
        for index, (start, end) in enumerate(pairwise([0, *ends]))
    )


def list_stage_units(table: ParameterTable, stage: Stage) -> tuple[str, ...]:
    """Return the names of the FSDP units of `stage` (parameters that ZeRO-3 all-gathers together), in forward order.
    table: the model's parameter table.
    """
    before = [unit for unit in table.units[:-1] if not unit.startswith("layers.")] if stage.first else []
    middle = [f"layers.{layer}" for layer in stage.layers]
    return (*before, *middle, *(table.units[-1:] if stage.last else ()))


def _cut_balanced(costs: list[float], count: int) -> list[int]:
    """Cut the layers into `count` consecutive stages of balanced cost; return the exclusive end index of each stage.
    costs: FLOPs of each layer.
    """
    size = len(costs)
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    # Cost of a stage of the layers [start, end), at [end, start]; infinite without layers.
    cost = np.where(np.tri(size + 1, k=-1, dtype=bool), sums[:, None] - sums[None, :], math.inf)

    def solve(limit: float, worth: bool) -> tuple[float, list[np.ndarray]]:
        """Cut all layers into `count` consecutive stages, none of which costs more than `limit` FLOPs, by dynamic
        programming. worth: True to minimise the sum of the stages' squared costs, False their maximum.

        Return that minimum, and arrays `starts` with starts[k][end] = first layer of stage k if stages 0 to k hold the
        layers [0, end).
        """
        one = np.where(cost <= limit, cost, math.inf)
        value, starts = np.where(np.arange(size + 1) == 0, 0.0, math.inf), []
        for _ in range(count):
            table = value[None, :] + one * one if worth else np.maximum(value[None, :], one)
            least = table.min(axis=1)
            starts.append((table <= least[:, None] * (1 + 1e-12)).argmax(axis=1))  # ties: the longest last stage
            value = least
        return float(value[size]), starts

    least, _ = solve(math.inf, worth=False)
    _, starts = solve(least * (1 + 1e-9), worth=True)
    ends = [size]
    for k in range(count - 1, 0, -1):
        ends.append(int(starts[k][ends[-1]]))
    return ends[::-1]
