"""Closed forms against figures in papers."""

from __future__ import annotations

import dataclasses

import pytest

from bench.published_runs import PUBLISHED, Run, runs
from meshwright.layout import Layout
from meshwright.planner.api import plan
from meshwright.planner.cost.engines import ENGINES
from meshwright.planner.cost.micro_batch import MicroBatch, Number
from meshwright.planner.cost.step_time import problem_for, step_time
from meshwright.planner.hardware.cluster import cluster
from meshwright.planner.memory.published import published_layer, state_bytes
from meshwright.planner.memory.rank_memory import fullest_rank
from meshwright.planner.memory.states import flats_of, list_states
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import PRESETS, preset
from tests.conftest import covering

GIGA = 1e9


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_memory_on_64_ranks_matches_paper(zero: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, figure 1."""
    assert round(7.5 * state_bytes(zero, 64).total, 1) == gigabytes


def test_mixed_precision_takes_16_or_18_bytes_per_parameter() -> None:
    assert state_bytes(0, 1).total == 16 and state_bytes(0, 1, wide_gradients=True).total == 18
    assert round(7 * state_bytes(0, 1).total) == 112  # 7B: 112 GB
    assert round(175 * state_bytes(0, 1).total) == 2800
    alone = state_bytes(0, 1, narrow=False)
    assert (alone.weights, alone.gradients, alone.optimizer) == (4, 4, 8)  # no fp32 master weights in float32
    assert round(PRESETS["llama-3-8b"].parameters * alone.total / 2**30, 1) == 119.7


SIZED = [name for name, found in PRESETS.items() if found.parameters is not None]


@pytest.mark.parametrize("name", covering(SIZED, lambda name: {preset(name).family}))
def test_one_device_holds_every_parameter(name: str) -> None:
    table = parameter_table(preset(name))
    flats = flats_of(table, Layout(), table.units)
    held = sum(flat.numel for flat in flats)
    assert held == table.numel
    padding = sum(flat.padded - flat.numel for flat in flats)
    assert sum(each.bytes for _, each in list_states(flats, "bfloat16", "float32", "adamw")) == 18 * held + 6 * padding


GPT = preset("gpt3-175b")  # h = 12288, a = 96, f = 4h
S, B, H, A = 2048, 1, 12288, 96


def saved(
    engine: str, config: ModelConfig, layout: str = "dp1", sequence: int = 8192, **options: str
) -> dict[str, Number]:
    batch = MicroBatch.of(config, Layout.parse(layout), B, sequence, engine=ENGINES[engine], **options)
    return published_layer(batch)


def total(engine: str, layout: str, **options: str) -> float:
    return sum(saved(engine, GPT, layout, S, **options).values())


def test_gpt_layer_saves_34_sbh_and_5_as2b() -> None:
    """Korthikanti et al. 2022, equation 1, and its forms with tensor (2) and sequence parallelism (4)."""
    options = {"kernel": "scores"}
    sbh, scores = S * B * H, 5 * A * S / H
    assert total("megatron", "dp1", **options) == pytest.approx(sbh * (34 + scores), rel=1e-12)
    assert total("megatron", "tp8:nosp", **options) == pytest.approx(sbh * (10 + 24 / 8 + scores / 8), rel=1e-12)
    assert total("megatron", "tp8", **options) == pytest.approx(sbh / 8 * (34 + scores), rel=1e-12)


def test_recomputation_leaves_34_sbh_over_t_or_2_sbh() -> None:
    """Equation 6, and section 5."""
    options = {"kernel": "scores"}
    assert total("megatron", "tp8 ac:selective", **options) == pytest.approx(34 * S * B * H / 8, rel=1e-12)
    assert total("megatron", "tp8:nosp ac:full", **options) == 2 * S * B * H


def test_fused_llama_layer_saves_34_sbh() -> None:
    """2 b s h (4 + 2q + 2g + 3F) with q = 1, g = 1/4, F = 3.5: 17 units."""
    config = preset("llama-3-8b")
    kept = saved("megatron-core", config)
    assert sum(kept.values()) == 34 * 8192 * 4096


def test_gradients_of_megatron_core_are_moved_in_16_bits_and_held_in_float32() -> None:
    """megatron/core/distributed/distributed_data_parallel.py, grad_dtype: as the parameters in NVIDIA's recipes, whose
    times are published; float32 in other runs, whose memory must not be too low."""
    core = ENGINES["megatron-core"]
    found = plan("llama-3-8b", "8xh100-sxm", "dp8 zero1", sequence=2048, batch=8, engine=core.name).best
    held = found.memory.by_category()
    assert held["gradients"] == 2 * held["parameters"]
    for wide, more in ((dataclasses.replace(core, gradient_bytes=4), True), (core, False)):
        again = step_time(preset("llama-3-8b"), found.layout, cluster("8xh100-sxm"), 2048, 8, engine=wide)
        assert (again.seconds > found.time.seconds) == more


def test_published_runs_of_llm_foundry_fit() -> None:
    """Their micro-batches are as large as the devices allow: some take more than 90 % of the memory, none more than all
    of it."""
    shares = []
    for one in runs(PUBLISHED):
        if isinstance(one, Run) and one.engine.name == "llm-foundry":
            [layout] = one.layouts
            problem = problem_for(one.config, layout, one.cluster, one.sequence, one.batch, engine=one.engine)
            shares.append(fullest_rank(problem, layout).device_bytes / problem.usable_bytes)
    assert len(shares) == 123 and 0.9 < max(shares) < 1


def test_eager_llama_layer_saves_nearly_twice_as_much() -> None:
    config = preset("llama-3-8b")
    kept = saved("torchtitan", config)
    q, g, f = 1, 0.25, 3.5
    assert sum(kept.values()) == 2 * 8192 * 4096 * (2 + (q + 2 * g) + q + 2 + 4 * f + (q + g) + 6)
    normed = dataclasses.replace(preset("qwen3-8b"))
    more = saved("torchtitan", normed)
    assert "attention.query_key_norm" in more


def test_torchtitan_layer_keeps_its_gathered_inputs() -> None:
    """Those of its first products, whole on every rank; not where activations are whole anyway, nor Megatron-LM's."""
    config = preset("llama-3-8b")
    kept = {layout: saved("torchtitan", config, layout) for layout in ("tp8", "tp8:nosp", "dp1")}
    gathered = kept["tp8"]["attention.qkv.gathered"] + kept["tp8"]["mlp.up.gathered"]
    assert gathered == 2 * 2 * 8192 * 4096
    assert sum(kept["tp8"].values()) - gathered == sum(kept["dp1"].values()) / 8
    assert not any("gathered" in name for name in (*kept["tp8:nosp"], *kept["dp1"], *saved("megatron", config, "tp8")))


def test_torchtitan_selective_saves_every_second_product_and_attention():
    """Of Llama 3 8B a token and layer: the block's input, queries, values, half of the way up, attention's result with
    its log-sums, the way down."""
    config = preset("llama-3-8b")
    kept = saved("torchtitan", config, "ac:selective")
    assert sum(kept.values()) == 8192 * (2 * (4096 + 4096 + 1024 + 14336 + 4096 + 4096) + 4 * 32)


@pytest.mark.parametrize(("layout", "received"), [("ac:selective", 0), ("dp8 ep8 ac:selective", 2 * 8 * 2048)])
def test_torchtitan_selective_saves_only_dispatch_and_combine_of_experts(layout: str, received: int):
    """Its list of saved operations has no grouped product. Per token and layer of Qwen3-30B-A3B: the block's
    input, queries, values, attention's result with its log-sums, and eight copies each of dispatch and combine."""
    config = preset("qwen3-30b-a3b")
    batch = MicroBatch.of(config, Layout.parse(layout), 1, 1024, engine=ENGINES["torchtitan"].compiled())
    kept = published_layer(batch, mixture=True)
    assert sum(kept.values()) == 1024 * (2 * (2048 + 4096 + 512 + 4096 + received) + 4 * 32)


def test_dispatch_and_combine_carry_no_copy_for_the_shared_expert():
    config = preset("deepseek-v2-lite")
    batch = MicroBatch.of(config, Layout.parse("dp8 ep8 ac:selective"), 1, 1024, engine=ENGINES["torchtitan"])
    sent = 2 * 2 * 1024 * 6 * 2048
    assert config.shared_intermediate and published_layer(batch, mixture=True)["mlp.dispatched_and_combined"] == sent


def test_recomputed_block_saves_only_its_ranks_tokens():
    for engine in ("megatron", "torchtitan"):
        assert total(engine, "tp8 ac:full") == 2 * S * B * H / 8
        assert total(engine, "tp8:nosp ac:full") == 2 * S * B * H


def test_torchtitan_peaks_with_tensor_parallelism_are_near_publication() -> None:
    """Llama 3.1 70B on 256 H100, compiled, in fp8 (table 4): the loss over sharded logits holds more than another."""
    case = {"sequence": 8192, "batch": 512, "engine": "torchtitan-2024", "compile": True}
    one = plan("llama-3.1-70b", "256xh100-96", "dp32 zero3 tp8 ac:full fp8", **case).best
    held = (one.memory.peak_bytes + one.memory.slack_bytes) / 2**30
    assert held == pytest.approx(71.9, rel=0.1)


@pytest.mark.parametrize(
    ("layout", "devices", "batch", "gib"),
    [("dp8 zero3 ac:selective", 8, 16, 82.4), ("dp128 zero3 ac:selective", 128, 256, 67.0)],
)
def test_torchtitan_peaks_match_publication(layout: str, devices: int, batch: int, gib: float) -> None:
    """Llama 3.1 8B, sequences of 8,192, not compiled (benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3):
    what the allocator holds, its slack included."""
    one = plan("llama-3.1-8b", f"{devices}xh100-96", layout, sequence=8192, batch=batch, engine="torchtitan-2024").best
    held = (one.memory.peak_bytes + one.memory.slack_bytes) / 2**30
    assert held == pytest.approx(gib, rel=0.08)


def test_logits_are_whole_on_every_rank_where_the_loss_gathers_them() -> None:
    """KempnerForge gathers them over tp (in 16 bits), and its loss holds six more bytes of each; Megatron-Core's
    stay sharded."""
    tokens, vocabulary = 2 * 4096, preset("llama-3-8b").vocabulary
    for engine, ranks in (("kempnerforge", 1), ("megatron-core", 4)):
        one = plan("llama-3-8b", "8xh100-sxm", "dp2 tp4", sequence=4096, batch=4, engine=engine).best
        (logits,) = (item.bytes for item in one.memory.items if item.name == "logits")
        assert logits == tokens * vocabulary * (2 + ENGINES[engine].loss_holds) / ranks, engine


@pytest.mark.parametrize(
    ("model", "layout", "devices", "batch", "gib"),
    [
        ("llama-3-8b", "dp4 zero3 mb2 ac:full", 4, 32, 61.1),
        ("llama-3-70b", "dp40 zero3 tp4 mb4 ac:full", 160, 320, 82.9),
    ],
)
def test_gradients_that_are_held_whole_match_publication(
    model: str, layout: str, devices: int, batch: int, gib: float
) -> None:
    """KempnerForge reduces gradients in a step's last micro-batch: without tensor parallelism, and where ZeRO-3 would
    leave next to nothing of them (bench/data/unseen_runs.csv). After one micro-batch there is nothing to hold."""

    def held(layout: str, batch: int) -> float:
        one = plan(
            model, f"{devices}xh200", layout, sequence=4096, batch=batch, engine="kempnerforge", compile=True
        ).best
        return (one.memory.peak_bytes + one.memory.slack_bytes) / 2**30

    whole = held(layout, batch)
    assert whole == pytest.approx(gib, rel=0.08)
    micro = int(layout.split("mb")[1].split()[0])
    assert held(layout.replace(f" mb{micro}", ""), batch // micro) < 0.75 * whole


def test_fused_head_and_loss_hold_no_logits() -> None:
    """As fms-acceleration measured Liger (bench/data/unseen_runs.csv): Llama 3 8B on 4 A100, 4 and 16 sequences."""
    for batch, gib in ((16, 37.4), (64, 56.2)):
        one = plan(
            "llama-3-8b", "4xa100-80", "dp4 zero3 ac:full", sequence=4096, batch=batch, engine="transformers-liger"
        )
        peak = one.best.memory
        assert peak.gib()["workspace"] < 1 and peak.by_category()["logits"] == 0
        assert (peak.peak_bytes + peak.slack_bytes) / 2**30 == pytest.approx(gib, rel=0.08)
