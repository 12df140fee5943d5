"""Initial values are a function of (seed, name on disk)."""

from __future__ import annotations

import dataclasses

import torch

from meshwright.model.initialise import initial_value, initialise, place_row, take_row
from meshwright.model.transformer import Transformer
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset


def test_initial_value_is_independent_of_other_parameters():
    small, deep = preset("llama-tiny"), dataclasses.replace(preset("llama-tiny"), layers=9, vocabulary=77)
    name = "model.layers.1.self_attn.q_proj.weight"
    first, second = (parameter_table(config).row(name) for config in (small, deep))
    assert torch.equal(initial_value(first, 3), initial_value(second, 3))
    torch.manual_seed(123)
    assert torch.equal(initial_value(first, 3), initial_value(first, 3))


def test_seed_and_name_both_matter():
    table = parameter_table(preset("llama-tiny"))
    query = table.row("model.layers.1.self_attn.q_proj.weight")
    other = dataclasses.replace(query, name="model.layers.0.self_attn.q_proj.weight")
    assert not torch.equal(initial_value(query, 0), initial_value(query, 1))
    assert not torch.equal(initial_value(query, 0), initial_value(other, 0))


def test_initial_standard_deviations_follow_parameter_table():
    table = parameter_table(dataclasses.replace(preset("gpt2-tiny"), hidden=128, head_dim=16, vocabulary=3000))
    for row in table.rows:
        value = initial_value(row, 0)
        assert value.shape == row.shape
        assert value.dtype == torch.float32
        if row.initial.kind == "normal":
            assert abs(float(value.std()) / row.initial.std - 1) < 0.05, row.name
            assert abs(float(value.mean())) < 0.05 * row.initial.std, row.name
        else:
            assert value.unique().tolist() == [float(row.initial.kind == "ones")]


def test_every_parameter_is_filled_from_its_rows():
    for name in ("llama-tiny", "gpt2-tiny", "qwen3-tiny"):
        config = preset(name)
        table = parameter_table(config)
        model = Transformer(config, dtype=torch.float64)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        initialise(model, table, seed=5)
        parameters = dict(model.named_parameters())
        for row in table.rows:
            assert torch.equal(take_row(parameters[row.tensor], row), initial_value(row, 5).double()), row.name


def test_placed_parameter_round_trips():
    row = parameter_table(preset("gpt2-tiny")).row("transformer.h.0.attn.c_attn.weight")
    assert row.transposed
    whole = torch.zeros(row.engine_shape)
    value = torch.randn(row.shape)
    place_row(whole, row, value)
    assert torch.equal(whole, value.T)
    assert torch.equal(take_row(whole, row), value)
