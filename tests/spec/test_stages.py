"""Pipeline stages: contiguous, complete, and as balanced as an exhaustive search finds."""

from __future__ import annotations

import dataclasses
from itertools import combinations, pairwise

import pytest

from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from meshwright.spec.stages import (
    Stage,
    cut_into_even_stages,
    cut_into_stages,
    cut_past_shares,
    list_stage_units,
    whole_model,
)
from meshwright.spec.work import head_flops, layer_flops

MODELS = ("gpt2", "llama-3-8b", "gemma-2-2b", "mixtral-8x7b-v0.1")


def cost(config, stage: Stage, sequence: int) -> float:
    total = sum(sum(layer_flops(config, layer, sequence).values()) for layer in stage.layers)
    return total + stage.first * 2.0 * config.hidden + stage.last * head_flops(config, sequence)


def all_cuts(config, count: int):
    for ends in combinations(range(1, config.layers), count - 1):
        runs = list(pairwise([0, *ends, config.layers]))
        yield [Stage(i, range(*run), i == 0, i == count - 1) for i, run in enumerate(runs)]


@pytest.mark.parametrize(
    ("layers", "count", "sizes"),
    [
        (96, 8, [12] * 8),
        (22, 8, [2, 3, 3, 3, 3, 3, 3, 2]),  # arXiv:2401.10241, section 5: one layer fewer in the first and last stage
        (126, 16, [7, *[8] * 14, 7]),  # arXiv:2407.21783, section 3.3.2: one layer fewer each on the first and the last
        (5, 3, [1, 2, 2]),
        (7, 7, [1] * 7),
    ],
)
def test_even_stages_leave_ends_with_fewer_layers(layers: int, count: int, sizes: list[int]):
    found = cut_into_even_stages(dataclasses.replace(preset("gpt2"), layers=layers), count)
    assert [len(stage.layers) for stage in found] == sizes
    assert [layer for stage in found for layer in stage.layers] == list(range(layers))
    assert [(stage.first, stage.last) for stage in found] == [(at == 0, at == count - 1) for at in range(count)]


@pytest.mark.parametrize(("count", "sizes"), [(2, [18, 14]), (8, [5, 4, 4, 5, 4, 4, 4, 2]), (1, [32]), (32, [1] * 32)])
def test_stages_past_their_shares_begin_with_more_layers(count: int, sizes: list[int]):
    """Llama-3-8B, whose head has the weights of 2.16 layers of which keys and values are not grouped."""
    config = preset("llama-3-8b")
    found = cut_past_shares(config, count)
    assert [len(stage.layers) for stage in found] == sizes
    assert [layer for stage in found for layer in stage.layers] == list(range(config.layers))
    assert [(stage.first, stage.last) for stage in found] == [(at == 0, at == count - 1) for at in range(count)]


@pytest.mark.parametrize("count", [2, 3, 5, 8, 13, 16])
def test_stages_past_their_shares_end_with_the_block_that_passes_a_threshold(count: int):
    """Block by block, as nanotron's `build_model` deals them out, as long as the last rank gets a layer."""
    config = preset("llama-3-8b")
    layer, head = 4 * config.hidden**2 + 3 * config.hidden * config.intermediate, config.hidden * config.vocabulary
    total, sizes, rank = config.layers * layer + head, [0] * count, 0
    for index in range(config.layers):
        sizes[rank] += 1
        rank += (index + 1) * layer > total * (rank + 1) / count
    found = [len(stage.layers) for stage in cut_past_shares(config, count)]
    assert found[:-2] == sizes[:-2] and sum(found) == sum(sizes)
    assert found == sizes or sizes[-1] == 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 9])
def test_pipeline_partition_is_the_most_even(name: str, count: int):
    """Uneven models: a head worth several layers, windows in every other layer, few layers."""
    for layers, vocabulary in ((9, 499), (9, 400_000), (10, 50_000)):
        config, windowed = preset(name), preset(name).windowed_layers
        config = dataclasses.replace(
            config, layers=layers, vocabulary=vocabulary, windowed_layers=windowed and windowed[:layers]
        )
        found = cut_into_stages(config, count, 4096)
        sizes = [cost(config, stage, 4096) for stage in found]
        least = min(max(cost(config, s, 4096) for s in cut) for cut in all_cuts(config, count))
        assert max(sizes) <= least * (1 + 1e-9)
        squares = [
            sum(size * size for size in made)
            for cut in all_cuts(config, count)
            if max(made := [cost(config, s, 4096) for s in cut]) <= least * (1 + 1e-9)
        ]
        assert sum(size * size for size in sizes) <= min(squares) * (1 + 1e-9)


@pytest.mark.parametrize("count", [1, 2, 5, 16, 31, 32])
def test_stages_cover_all_layers_in_order_without_empty_ones(count: int):
    config = preset("llama-3-8b")
    found = cut_into_stages(config, count, 8192)
    assert [stage.index for stage in found] == list(range(count))
    assert [layer for stage in found for layer in stage.layers] == list(range(config.layers))
    assert all(len(stage.layers) for stage in found)
    assert [stage.first for stage in found] == [True] + [False] * (count - 1)
    assert [stage.last for stage in found] == [False] * (count - 1) + [True]


def test_a_head_worth_layers_shortens_the_last_stage():
    """Llama-3-8B's head is worth about 2.2 of its layers at 8192 tokens."""
    lengths = [len(stage.layers) for stage in cut_into_stages(preset("llama-3-8b"), 4, 8192)]
    assert lengths == [8, 9, 9, 6]


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b"])
def test_units_of_stages_match_parameter_table(name: str):
    config = preset(name)
    table = parameter_table(config)
    assert list_stage_units(table, whole_model(config)) == table.units
    assert (
        tuple(unit for stage in cut_into_stages(config, 4, 1024) for unit in list_stage_units(table, stage))
        == table.units
    )


def test_a_hundred_layers_are_cut_quickly():
    config = preset("llama-3.1-405b")
    assert len(cut_into_stages(config, 64, 8192)) == 64
