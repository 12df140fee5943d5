"""Initial values are a function of (seed, name on disk)."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

from meshwright.layout import Layout
from meshwright.model.initialise import extract_entry, initial_value, initialise, make_initial_slice
from meshwright.model.transformer import Transformer
from meshwright.parallel.flat_buffers import make_flat_layout, select_columns
from meshwright.spec.initial_values import draw_normal_values
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset


def test_initial_value_is_independent_of_other_parameters():
    small, deep = preset("llama-tiny"), dataclasses.replace(preset("llama-tiny"), layers=9, vocabulary=77)
    name = "model.layers.1.self_attn.q_proj.weight"
    first, second = (parameter_table(config).entry(name) for config in (small, deep))
    assert torch.equal(initial_value(first, 3), initial_value(second, 3))
    torch.manual_seed(123)
    assert torch.equal(initial_value(first, 3), initial_value(first, 3))


def test_seed_and_name_both_matter():
    table = parameter_table(preset("llama-tiny"))
    query = table.entry("model.layers.1.self_attn.q_proj.weight")
    other = dataclasses.replace(query, name="model.layers.0.self_attn.q_proj.weight")
    assert not torch.equal(initial_value(query, 0), initial_value(query, 1))
    assert not torch.equal(initial_value(query, 0), initial_value(other, 0))


def test_initial_standard_deviations_follow_parameter_table():
    table = parameter_table(dataclasses.replace(preset("gpt2-tiny"), hidden=128, head_dim=16, vocabulary=3000))
    for entry in table.entries:
        value = initial_value(entry, 0)
        assert value.shape == entry.shape
        assert value.dtype == torch.float32
        if entry.initial.kind == "normal":
            assert abs(float(value.std()) / entry.initial.std - 1) < 0.05, entry.name
            assert abs(float(value.mean())) < 0.05 * entry.initial.std, entry.name
        else:
            assert value.unique().tolist() == [float(entry.initial.kind == "ones")]


def test_every_parameter_is_filled_from_its_entries():
    for name in ("llama-tiny", "gpt2-tiny", "qwen3-tiny"):
        config = preset(name)
        table = parameter_table(config)
        model = Transformer(config, dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        initialise(model, table, seed=5)
        parameters = dict(model.named_parameters())
        for entry in table.entries:
            assert torch.equal(extract_entry(parameters[entry.tensor], entry), initial_value(entry, 5).double()), (
                entry.name
            )


@pytest.mark.parametrize("layout", ["dp8 zero3", "tp2", "dp4 tp2 zero1"])
def test_rank_draws_only_values_that_it_holds(monkeypatch: pytest.MonkeyPatch, layout: str):
    table, parsed, drawn = parameter_table(preset("gpt2-tiny")), Layout.parse(layout), []

    def draw(seed: int, name: str, start: int, stop: int, *rest: Any) -> Any:
        drawn.append(stop - start)
        return draw_normal_values(seed, name, start, stop, *rest)

    monkeypatch.setattr("meshwright.model.initialise.draw_normal_values", draw)
    shards = parsed.dp if parsed.zero else 1
    for rank in range(parsed.world_size):
        drawn.clear()
        at = parsed.coordinates(rank)
        flat = make_flat_layout(table, "layers.1", shards, parsed, at)
        size = flat.padded // shards
        start = size * (at["dp"] if parsed.zero else 0)
        shard = torch.full((size,), float("nan"))
        flat.fill(shard, start, partial(make_initial_slice, seed=5))
        assert sum(drawn) <= size
        for part, first, last in flat.find_slices(start, start + size):
            whole = initial_value(part.entry, 5)
            stored = (whole.T if part.entry.transposed else whole).reshape(-1)
            values = select_columns(stored, part.columns)[part.begin :][first - part.offset : last - part.offset]
            assert torch.equal(shard[first - start : last - start], values), part.entry.name


def test_placed_parameter_round_trips():
    entry = parameter_table(preset("gpt2-tiny")).entry("transformer.h.0.attn.c_attn.weight")
    assert entry.transposed
    whole = torch.zeros(entry.model_shape)
    value = torch.randn(entry.shape)
    extract_entry(whole, entry).copy_(value)
    assert torch.equal(whole, value.T)
    assert torch.equal(extract_entry(whole, entry), value)
