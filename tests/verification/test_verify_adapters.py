"""Adapters match one device, whose weights have the adapter merged into them, on several layouts."""

from __future__ import annotations

import dataclasses
import re

import pytest

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.spec.adapter_config import AdapterConfig
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from meshwright.spec.refuse import refuse
from meshwright.verification.problem import scale_down_config
from meshwright.verification.run import run_verification
from tests.conftest import exhaustive

pytestmark = pytest.mark.usefixtures("first_case_alone")

SOME = [
    ("llama-3-8b", "lora", ("all-linear",), "dp2 tp2 zero3"),  # two key-value heads, shared by no ranks
    ("gpt2", "dora", ("c_attn", "c_proj"), "tp2 pp2 mb2 ac:full"),
    ("deepseek-v2-lite", "lora", ("all-linear",), "tp2"),  # latent attention
    ("mixtral-8x7b-v0.1", "dora", ("w1", "w2", "w3", "q_proj"), "dp2 tp2 ep2:etp2 zero3"),  # routed experts
]
MORE = [
    ("qwen3-0.6b", "rslora", ("q_proj",), "pp2:zb-v mb4"), ("qwen3-0.6b", "lora", ("all-linear",), "tp4:nosp"),
    ("qwen3-0.6b", "lora", ("all-linear",), "cp2:ulysses tp2"), ("llama-3-8b", "lora", ("v_proj",), "dp4 zero3 hs2"),
    ("qwen1.5-moe-a2.7b", "lora", ("all-linear",), "dp2 ep2 zero3"),
    ("deepseek-v2", "dora", ("all-linear",), "tp2 zero3"),
    ("qwen1.5-moe-a2.7b", "rslora", ("*.experts.*.down_proj", "*.experts.*.up_proj"), "tp2 pp2 mb2"),
    ("mixtral-8x7b-v0.1", "lora", ("w1", "w2", "w3"), "pp2:zb-v mb4 ac:full"),
    ("mixtral-8x7b-v0.1", "lora", ("w1", "w2", "w3", "q_proj"), "dp2 ep2 zero3"),
    ("mixtral-8x7b-v0.1", "lora", ("w1", "w2"), "tp2 ep1:etp2"), ("mixtral-8x7b-v0.1", "dora", ("w1", "w2"), "tp2"),
    ("mixtral-8x7b-v0.1", "dora", ("w2", "w3"), "dp4 ep2:etp2 zero2 ac:full"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("packed", "layout"),
    [("nf4-double", "dp2 tp2 zero3"), *exhaustive(("nf4", "dp2 tp2 zero3"), ("int8", "tp2 pp2 mb2"))],
)
def test_adapter_on_packed_base_matches_unpacked_weights_on_one(packed, layout):
    adapter = AdapterConfig("dora", 3, 6.0, ("all-linear",), packed=packed)
    document = run_verification(layout, model=dataclasses.replace(preset("llama-3-8b"), adapter=adapter))
    assert document["passed"], document["failure"]
    assert document["worst"]["relative_error"] < 1e-12


@pytest.mark.parametrize("name", ["qwen3-0.6b", "gpt2", "gemma-2-2b"])
def test_elements_of_frozen_tensors_differ_so_that_their_exchange_is_detected(name):
    config = dataclasses.replace(preset(name), adapter=AdapterConfig())
    scaled = scale_down_config(config, layers=2)
    for entry in parameter_table(scaled).entries:
        if not entry.trainable:
            assert entry.initial.kind == "normal" and entry.initial.std > 0, entry.name


def test_layout_that_would_cut_a_packed_block_is_refused():
    adapter = AdapterConfig(packed="nf4")
    config = dataclasses.replace(preset("llama-3-8b"), intermediate=14336 + 64, adapter=adapter)
    refuse(Layout.parse("tp1"), config, 8)
    with pytest.raises(UserError, match=r"tp2 gives each rank 7200 .* cuts blocks of 64"):
        refuse(Layout.parse("tp2"), config, 8)


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("dora", ("all-linear",)), ("lora", ("*.shared_experts.*", "q_b_proj")), ("lora", ("*.experts.*.up_proj",))],
)
def test_scaled_down_model_has_adapters_on_the_same_kinds_of_layers(kind, targets):
    config = dataclasses.replace(preset("deepseek-v2"), adapter=AdapterConfig(kind, 3, 6.0, targets))
    kinds = []
    for each in (config, scale_down_config(config, tp=2)):
        names = [entry.name for entry in parameter_table(each).trained.entries]
        kinds.append({re.sub(r"\.\d+\.", ".N.", name) for name in names})
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize(("name", "kind", "targets", "layout"), [*SOME, *exhaustive(*MORE)])
def test_adapter_on_several_ranks_matches_merged_weights_on_one(name, kind, targets, layout):
    config = dataclasses.replace(preset(name), adapter=AdapterConfig(kind, 3, 6.0, targets))
    document = run_verification(layout, model=config)
    assert document["passed"], document["failure"]
    assert document["worst"]["relative_error"] < 1e-12
    assert ".lora_" in document["worst"]["name"]
