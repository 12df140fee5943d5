"""A layout that does not fit a model is refused in one line with the reason."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from meshwright.spec.refuse import refuse

TINY = preset("llama-tiny")  # 3 layers, 8 heads, 4 key-value heads, intermediate 192, 512 positions


@pytest.mark.parametrize(
    ("model", "layout", "batch", "sequence", "world_size", "said"),
    [
        ("llama-tiny", "dp2", 4, 512, 4, "it has 2 ranks (dp x tp x cp x pp), but there are 4"),
        ("llama-tiny", "dp2 mb3", 10, 512, None, "batch 10 is not a multiple of dp x mb = 6; 6 or 12 would be"),
        ("llama-tiny", "dp4", 2, 512, None, "batch 2 is not a multiple of dp x mb = 4; 4 would be"),
        ("llama-tiny", "tp3", 1, 512, None, "tp3 does not divide the model's 8 heads; 2 or 4 would"),
        ("llama-tiny", "tp16", 1, 512, None, "tp16 does not divide the model's 8 heads; 8 would"),
        ("llama-tiny", "tp2", 1, 511, None, "sequence 511 is not a multiple of tp = 2"),
        ("llama-tiny", "tp2 cp2", 1, 500, None, "sequence 500 is not a multiple of 2 x cp x tp = 8"),
        ("llama-tiny", "cp3", 1, 512, None, "sequence 512 is not a multiple of 2 x cp = 6"),
        ("llama-tiny", "tp2 cp8:ulysses", 1, 512, None, "cp8:ulysses does not divide the 4 heads of a tensor-parallel"),
        (
            "llama-tiny",
            "cp3:ulysses",
            1,
            510,
            None,
            "cp3:ulysses does not divide the 8 heads; cp3 need not divide them",
        ),
        ("llama-tiny", "pp4", 1, 512, None, "pp4 makes 4 stages, but the model has 3 layers"),
        ("llama-tiny", "pp2:interleaved", 1, 512, None, "pp2 x 2 chunks makes 4 stages, but the model has 3 layers"),
        ("llama-tiny", "dp2 ep2", 2, 512, None, "ep2:etp1 needs a model with experts, and this one has none"),
        ("mixtral-8x7b-v0.1", "dp3 ep3", 3, 512, None, "ep3 does not divide the model's 8 experts; 2 or 4 would"),
        (
            "mixtral-8x7b-v0.1",
            "dp3 ep1:etp3",
            3,
            512,
            None,
            "etp3 does not divide the model's expert width 14336; 2 or 4",
        ),
        ("mixtral-8x7b-v0.1", "tp2:nosp ep2", 3, 511, None, "sequence 511 is not a multiple of tp = 2"),
        ("gpt2-tiny", "dp1", 1, 513, None, "sequence 513 is longer than the model's 512 positions"),
    ],
)
def test_impossible_layouts_are_refused_even_when_planning(model, layout, batch, sequence, world_size, said):
    with pytest.raises(UserError) as error:
        refuse(Layout.parse(layout), preset(model), batch, sequence, world_size, planning=True)
    assert said in str(error.value)
    assert str(error.value).startswith(f'layout "{layout}": ')
    assert "\n" not in str(error.value)


def test_intermediate_size_that_tp_does_not_divide_is_refused():
    config = dataclasses.replace(TINY, intermediate=100)
    with pytest.raises(UserError, match="tp8 does not divide the model's intermediate size 100; 5 or 10 would"):
        refuse(Layout(tp=8), config, 1, planning=True)


@pytest.mark.parametrize("layout", ["tp3:nosp", "dp3 ep1:etp3"])
def test_experts_whose_output_bias_cannot_be_split_are_refused(layout: str):
    config = dataclasses.replace(preset("gpt-oss-tiny"), hidden=50, heads=3, kv_heads=3)
    axis = layout[:3] if layout.startswith("tp") else "etp3"
    with pytest.raises(UserError, match=f"{axis} does not divide the model's hidden size 50; 2 or 5 would"):
        refuse(Layout.parse(layout), config, batch=3, sequence=12)


def test_vocabulary_with_an_empty_last_slice_is_refused():
    config = dataclasses.replace(TINY, vocabulary=9)
    with pytest.raises(UserError, match="vocabulary of 9 into slices of 2, of which the last rank gets none; tp5"):
        refuse(Layout(tp=8), config, 1, planning=True)


def test_indivisible_kv_heads_and_ranks_are_refused():
    config = dataclasses.replace(TINY, hidden=48, heads=12, kv_heads=6, head_dim=4)
    with pytest.raises(UserError, match="cp4:ulysses and the 6 key-value heads do not divide each other: .* cp4 needs"):
        refuse(Layout(cp=4, cp_method="ulysses"), config, 1, planning=True)
    refuse(Layout(cp=12, cp_method="ulysses"), config, 1, planning=True)
    with pytest.raises(UserError, match="tp4 and the model's 6 key-value heads do not divide each other"):
        refuse(Layout(tp=4), config, 1, planning=True)


def test_more_tp_ranks_than_key_value_heads_in_a_fused_matrix_are_refused():
    with pytest.raises(UserError, match="tp8 is more than the model's 4 key-value heads, which family phi3 has in one"):
        refuse(Layout(tp=8), preset("phi3-tiny"), 1, planning=True)
    refuse(Layout(tp=4), preset("phi3-tiny"), 1, planning=True)


def test_options_of_other_families_are_refused():
    for field, value in (("attention_softcap", 50.0), ("residual_scale", 0.5), ("unrotated_layers", (1,))):
        with pytest.raises(UserError, match=f"{field} is always .* in family llama, not"):
            dataclasses.replace(preset("llama-tiny"), **{field: value})


@pytest.mark.parametrize(
    ("model", "layout", "said"),
    [
        ("bloom-176b", "dp1", "bloom can be planned but not run: its ALiBi positions"),
        ("llama-tiny", "pp2:pipedream", "cannot run asynchronous pipelines yet"),
        ("llama-tiny", "dp1 fp8", "cannot run this precision yet"),
    ],
)
def test_layouts_that_cannot_run_can_still_be_planned(model: str, layout: str, said: str):
    refuse(Layout.parse(layout), preset(model), 1, 512, planning=True)
    with pytest.raises(UserError) as error:
        refuse(Layout.parse(layout), preset(model), 1, 512)
    assert said in str(error.value)


def test_rotary_positions_beyond_training_length_can_be_planned():
    refuse(Layout(), preset("llama-2-7b"), 1, 32768, planning=True)
    with pytest.raises(UserError, match="sequence 32768 is longer than the model's 4096 positions"):
        refuse(Layout(), preset("llama-2-7b"), 1, 32768)


@pytest.mark.parametrize(
    "layout", ["dp1", "dp2 zero1", "dp4 zero3 hs2 mb2 ac:full", "dp2 zero2 bf16", "dp2 zero3 tp4:nosp", "dp2 tp2 cp4"]
)
def test_runnable_layouts_are_accepted(layout: str):
    parsed = Layout.parse(layout)
    refuse(parsed, TINY, 8, 512, parsed.world_size)


def test_every_accepted_tp_can_shard_the_table():
    for name in ("llama-tiny", "qwen3-tiny", "gpt2-tiny", "llama-3.2-1b", "qwen2.5-0.5b", "gpt2-xl"):
        config = dataclasses.replace(preset(name), layers=1)
        table = parameter_table(config)
        for tp in range(1, 65):
            try:
                refuse(Layout(tp=tp), config, 1, planning=True)
            except UserError:
                with pytest.raises(AssertionError):
                    [entry.local_shape(Layout(tp=tp)) for entry in table.entries]
            else:
                assert [entry.local_shape(Layout(tp=tp)) for entry in table.entries]
