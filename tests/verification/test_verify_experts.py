"""Mixtures of experts match one device on every layout, including load balancing."""

from __future__ import annotations

import dataclasses

import pytest

from meshwright.layout import Layout
from meshwright.spec.presets import preset
from meshwright.spec.refuse import refuse
from meshwright.verification.problem import scale_down_config
from meshwright.verification.run import run_verification
from tests.conftest import exhaustive

pytestmark = pytest.mark.usefixtures("first_case_alone")

MODELS = ("mixtral-8x7b-v0.1", "qwen2-moe-tiny", "qwen3-30b-a3b", "dots-llm1")


SOME = [
    ("qwen2-moe-tiny", "dp2 tp2 zero2 ep4 ac:selective"),
    ("dots-llm1", "dp3 ep3"), ("deepseek-v3", "tp2 pp2 mb2"), ("mixtral-8x7b-v0.1", "cp2 pp2 ep2 mb2"),
    ("gpt-oss-20b", "tp2 cp2 ep2:etp2 zero1 ac:selective"),
]  # fmt: skip
MORE = [
    ("mixtral-8x7b-v0.1", "dp4 zero3 ep2:etp2 mb2"), ("qwen2-moe-tiny", "tp4 ac:selective"),
    ("mixtral-8x7b-v0.1", "dp4 zero2 hs2 ac:full"), ("qwen2-moe-tiny", "dp2 zero3 ac:selective"),
    ("dots-llm1", "dp2 zero1 mb4"), ("qwen3-30b-a3b", "dp2 tp2:nosp zero3 mb2"),
    ("dots-llm1", "dp2 tp2:nosp zero1 ep2:etp2"),
    ("mixtral-8x7b-v0.1", "dp1 mb4"), ("qwen2-moe-tiny", "dp2 mb2"), ("qwen3-30b-a3b", "dp3 zero1"),
    ("dots-llm1", "dp4 zero3 mb2 ac:full"), ("mixtral-8x7b-v0.1", "tp2"), ("dots-llm1", "dp2 tp2 zero1"),
    ("qwen3-30b-a3b", "dp4 zero1 hs2 ep2 ac:full"), ("deepseek-v3", "tp2:nosp cp2 ac:full"),
    ("deepseek-v2", "cp2:ulysses pp2 mb2"), ("deepseek-v2-lite", "pp2:zb-v mb4 zero1"),
    ("deepseek-v2", "dp4 zero3 ep2:etp2 mb2"), ("deepseek-v3", "pp2:dualpipe mb4 ac:selective"),
    ("deepseek-v3", "cp2"), ("deepseek-v2-lite", "dp2 tp2 zero1 mb2"), ("gpt-oss-20b", "tp4:nosp ac:full"),
    ("gpt-oss-20b", "cp4"), ("gpt-oss-20b", "dp2 cp2:ulysses zero3 ep2"), ("gpt-oss-20b", "pp2:zb-v mb4 tp2 zero2"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout"), [*SOME, *exhaustive(*MORE)])
def test_mixture_on_several_ranks_matches_one_device(name: str, layout: str, request: pytest.FixtureRequest):
    if not preset(name).router_bias:  # as `first_case_alone` says
        request.getfixturevalue("three_layers")
    document = run_verification(layout, model=name)
    assert document["passed"], document["failure"]
    assert document["worst"]["relative_error"] < 1e-12


@pytest.mark.parametrize(
    "layout",
    ["tp2 pp2:zb-v mb4 zero1", *exhaustive("dp2 zero3", "tp2:nosp ep2 ac:full", "dp2 zero2 pp2 ac:selective", "tp2")],
)
def test_multi_token_prediction_on_several_ranks_matches_one_device(layout: str):
    config = dataclasses.replace(preset("deepseek-v3"), prediction_layers=1)
    document = run_verification(layout, model=config)
    assert document["passed"], document["failure"]
    assert document["worst"]["relative_error"] < 1e-12


@pytest.mark.exhaustive
def test_every_fault_of_a_mixture_is_caught():
    document = run_verification("dp2 zero2", model="dots-llm1", mutate=True)
    assert document["passed"], document["mutations"]["missed"]
    assert document["mutations"]["planted"] == document["mutations"]["caught"] + document["mutations"]["neutral"]


@pytest.mark.parametrize("kinds", ["fewer", pytest.param("all", marks=pytest.mark.exhaustive)])
def test_every_expert_parallel_fault_is_caught(kinds, two_layers, request):
    if kinds == "fewer":
        request.getfixturevalue("fewer_kinds")
    document = run_verification("dp2 zero1 ep2", model="mixtral-8x7b-v0.1", mutate=True)
    mutations = document["mutations"]
    assert document["passed"], mutations["missed"]
    assert mutations["planted"] == mutations["caught"] + mutations["neutral"]
    sites = {fault["fault"].split(" (")[0] for fault in mutations["faults"]}
    assert {"experts.counts", "experts.dispatch", "experts.combine", "experts.dispatch.backward"} <= sites
    for fault in mutations["faults"]:
        if fault["fault"].startswith("experts.counts"):
            assert "token counts of another call" in fault["said"], fault


@pytest.mark.exhaustive
def test_every_fault_with_ep_and_etp_is_caught():
    document = run_verification("dp2 zero2 tp2:nosp ep2:etp2", model="qwen1.5-moe-a2.7b", mutate=True)
    assert document["passed"], document["mutations"]["missed"]


def test_small_mixture_has_just_enough_experts_for_its_ranks():
    for name in MODELS:
        small = scale_down_config(preset(name), tp=2, ep=4, etp=2)
        assert (small.experts, small.expert_intermediate) == (8, 38 if small.family == "mixtral" else 12)
        refuse(Layout.parse("dp4 tp2 ep4:etp2"), small, 4, planning=True)


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v2", "deepseek-v3"])
def test_small_model_keeps_latent_attention_and_expert_groups(name: str):
    config = preset(name)
    small = scale_down_config(config, ep=2)
    assert small.latent and config.latent
    assert (small.latent.query_rank is None) == (config.latent.query_rank is None)
    assert small.rotary_interleaved == config.rotary_interleaved
    assert (small.expert_groups, small.groups_per_token) == ((1, 1) if config.expert_groups == 1 else (3, 2))
    assert small.experts % 2 == 0


@pytest.mark.parametrize("name", MODELS)
def test_small_mixture_keeps_features_of_large_one(name: str):
    config = preset(name)
    small = scale_down_config(config)
    assert (small.experts, small.experts_per_token) == (5, min(3, config.experts_per_token))
    assert (small.shared_intermediate > 0, small.router_loss > 0, bool(small.dense_layers)) == (
        config.shared_intermediate > 0, config.router_loss > 0, bool(config.dense_layers),
    )  # fmt: skip
    same = ("family", "router", "router_bias", "normalise_choice", "routed_scale", "shared_gate")
    assert [getattr(small, name) for name in same] == [getattr(config, name) for name in same]
    assert dataclasses.replace(small) == small
