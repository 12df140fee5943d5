"""Step times: components add up, simulator and closed forms agree, published layers and runs are predicted."""

from __future__ import annotations

import csv
import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bench.published_runs import UNSEEN, Run, runs
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.planner.cost.blocks import layer_operators, list_operations
from meshwright.planner.cost.communication import count_parameters, group_of, timed_calls
from meshwright.planner.cost.engines import ENGINES
from meshwright.planner.cost.micro_batch import MicroBatch
from meshwright.planner.cost.pipeline_times import exposed_seconds
from meshwright.planner.cost.rates import Collectives, Group, Rates, straggler_terms
from meshwright.planner.cost.step_time import PARTS, StepTime, step_time
from meshwright.planner.memory.rank_memory import memory_of
from meshwright.planner.search.screen import Problem
from meshwright.spec.adapter_config import AdapterConfig
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from meshwright.spec.stages import Stage, cut_into_stages, whole_model
from meshwright.toml import read_packaged_toml
from tests.planner.cost.test_rates import of
from tests.planner.hardware.test_measured import example


def step_time_of(model: str, layout: str, device: str = "h100-sxm", batch: int = 64, **options: object) -> StepTime:
    parsed = Layout.parse(layout)
    cluster = of(device, parsed.world_size, across=50e9)
    return step_time(preset(model), parsed, cluster, 4096, batch, **options)  # type: ignore[arg-type]


LAYOUTS = (
    *("dp8", "dp8 zero1 mb2", "dp16 zero3 ac:full", "dp16 zero3 hs8", "tp8", "tp8:nosp ac:selective", "cp4 dp2"),
    *(
        "cp2:ulysses tp2 dp2",
        "pp4 mb8",
        "pp4:interleaved:2 mb8",
        "pp4:zb-v mb16",
        "dp2 pp4:dualpipe mb8",
        "pp2:gpipe mb4",
    ),
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_components_add_up_to_the_step(layout: str):
    found = step_time_of("llama-3-8b", layout)
    assert set(found.breakdown) == set(PARTS)
    assert all(seconds >= 0 for seconds in found.breakdown.values())
    assert sum(found.breakdown.values()) == pytest.approx(found.seconds)
    assert found.low < found.seconds < found.high and found.high / found.low <= 1.75
    axes = Layout.parse(layout)
    for part, there in (("tensor", axes.tp > 1), ("context", axes.cp > 1), ("bubble", axes.pp > 1), ("expert", False)):
        assert (found.breakdown[part] > 0) == there, part


@pytest.mark.parametrize(
    "layout", ["pp4 mb16", "pp8 mb32", "pp4:gpipe mb16", "pp4:interleaved:2 mb16", "pp4:zb-h1 mb16"]
)
def test_simulator_and_closed_form_agree(layout: str):
    config = dataclasses.replace(preset("gpt3-175b"), layers=32, vocabulary=1024)  # equal stages
    parsed = Layout.parse(f"{layout} tp8")
    cluster = of("a100-80", parsed.world_size)
    clock, closed = (
        step_time(config, parsed, cluster, 2048, 64, engine="megatron", simulate=simulate).seconds
        for simulate in (True, False)
    )
    assert closed == pytest.approx(clock, rel=0.02)


def test_pipeline_throughput_grows_with_micro_batches_as_published():
    """Qi et al. 2023 (arXiv:2401.10241, table 4), 1F1B on 8 stages with 24, 32 and 64 micro-batches: 11.8, 12.5 and
    13.6 samples a second."""
    config = dataclasses.replace(preset("gpt2-xl"), layers=22, hidden=2304, heads=24, kv_heads=24, head_dim=96)
    config = dataclasses.replace(config, intermediate=9216)
    rates = []
    for count in (24, 32, 64):
        layout = Layout.parse(f"pp8 mb{count}")
        rates.append(count / step_time(config, layout, of("a100-80"), 1024, 6 * count, engine="zero-bubble").seconds)
    assert rates[1] / rates[0] == pytest.approx(12.5 / 11.8, rel=0.02)
    assert rates[2] / rates[0] == pytest.approx(13.6 / 11.8, rel=0.035)


def test_layer_times_match_publication(shared_data: Path):
    """Korthikanti et al. 2022 (arXiv:2205.05198, table 4): one layer of the 22B model on 8 A100, forward and backward,
    in five modes."""
    config = dataclasses.replace(preset("gpt3-175b"), hidden=6144, heads=64, kv_heads=64, head_dim=96)
    config = dataclasses.replace(config, intermediate=24576, layers=3)
    cluster, megatron = of("a100-80"), ENGINES["megatron"]
    rates, stage = Rates.of(cluster, "fp16"), Stage(1, range(1, 2), first=False, last=False)
    seen, collectives = 0, Collectives(cluster)
    with (shared_data / "measured" / "training_runs.csv").open() as file:
        for row in csv.DictReader(file):
            if not row["metric"].startswith("layer_"):
                continue
            recompute = "" if row["recompute"] == "none" else f" ac:{row['recompute']}"
            layout = Layout.parse(("tp8" if row["sp"] == "yes" else "tp8:nosp") + recompute)
            forward = row["metric"] == "layer_forward_time"
            seconds = 0.0
            batch = MicroBatch.of(config, layout, 4, 2048, engine=megatron, kernel=megatron.attention)
            for one in list_operations(batch, stage):
                seconds += rates.seconds(one) * ((one.phase == "forward") == forward)
            for call in timed_calls(layer_operators(batch, stage.layers[0])):
                taken = collectives.cost(call.operation, group_of(layout, call.axis, cluster)).seconds_at(call.size)
                seconds += call.count * taken * ((call.phase == "forward") == forward and call.overlaps is None)
            assert seconds * 1e3 == pytest.approx(float(row["value"]), rel=0.12), row
            seen += 1
    assert seen == 10


def test_broadcasts_of_parameters_take_a_latency_for_each_rank():
    """InternLM's updated parameters: in a sharding group of 8 they take as long as an all-gather, over 1,024 devices
    each of as many broadcasts waits for the hops of the whole ring (published: 7.2 s a step in place of 4.5)."""
    measured = {one.layouts[0]: one for one in runs(UNSEEN, half="development") if isinstance(one, Run)}
    for name, longer in (("dp1024 zero1 hs8 mb4", (0.0, 0.05)), ("dp1024 zero1 mb4", (1.0, 6.0))):
        one = measured[Layout.parse(name)]
        times = [
            step_time(
                one.config, one.layouts[0], one.cluster, one.sequence, one.batch,
                engine=dataclasses.replace(one.engine, broadcasts=each),
            ).seconds
            for each in (False, True)
        ]  # fmt: skip
        assert one.engine.name == "internlm" and one.engine.broadcasts
        assert longer[0] <= times[1] - times[0] <= longer[1], (name, times)


@pytest.mark.parametrize("layout", ["dp1", "tp2", "tp4:nosp", "dp2 tp2 ep2", "dp4 ep2:etp2"])
@pytest.mark.parametrize(
    "name",
    [
        "llama-tiny",
        "gpt2-tiny",
        "qwen2-moe-tiny",
        "dots1-tiny",
        "gemma-2-2b",
        "qwen3-tiny",
        "olmo2-tiny",
        "glm4-moe-tiny",
    ],
)
def test_closed_form_parameters_match_parameter_table(name: str, layout: str):
    config, parsed = preset(name), Layout.parse(layout)
    config = dataclasses.replace(config, experts=4) if config.experts else config
    if parsed.expert_parallel and not config.experts:
        return
    table = parameter_table(config)
    for part, mine in zip(
        ("dense", "experts"),
        count_parameters(MicroBatch.of(config, parsed, 1, 64), whole_model(config)),
        strict=True,
    ):
        assert mine == sum(table.unit_numel(unit, parsed, part) for unit in table.units)  # type: ignore[arg-type]
    stages = cut_into_stages(config, 2, 64)
    parts = [count_parameters(MicroBatch.of(config, parsed, 1, 64), stage)[0] for stage in stages]
    again = table.unit_numel("embedding", parsed) if config.tied else 0
    assert sum(parts) == sum(table.unit_numel(unit, parsed) for unit in table.units) + again


def test_groups_of_consecutive_ranks_are_within_nodes():
    layout = Layout.parse("dp4 tp4 cp2 pp2")
    cluster = of("h100-sxm", 64)
    assert group_of(layout, "tp", cluster) == Group(4, 4)
    assert group_of(layout, "cp", cluster) == Group(2, 2)
    assert group_of(layout, "data", cluster) == Group(8, 2)
    for axis in ("tp", "cp", "data", "replica"):
        found = layout.groups(axis)[0]
        assert group_of(layout, axis, cluster).ranks == len(found)
        assert group_of(layout, axis, cluster).in_node == sum(rank // 8 == found[0] // 8 for rank in found)


@pytest.mark.parametrize(("nodes", "size"), [(2, 6), (3, 8), (4, 6), (2, 8), (1, 12), (8, 4)])
def test_group_across_node_boundary_counts_as_split(nodes: int, size: int):
    """Against the ranks themselves: of all groups of an axis that with the most borders in it."""
    seen = 0
    others = {"tp4": 4, "tp2 cp3": 6, "zero3 hs3": 1, "tp3": 3, "tp2 pp2": 4, "ep2": 1, "ep3:etp2": 1}
    for text, rest in others.items():
        dp = nodes * size // rest
        if nodes * size % rest or ("3" in text and dp % 6 and rest == 1):
            continue
        layout, seen = Layout.parse(f"dp{dp} {text}"), seen + 1
        cluster = dataclasses.replace(of("h100-sxm", nodes * size), devices_per_node=size)
        for axis in ("tp", "cp", "data", "shard", "replica", "ep", "etp", "expert_data"):
            found, groups = group_of(layout, axis, cluster), layout.groups(axis)
            fewest = min(max(Counter(rank // size for rank in group).values()) for group in groups)
            assert found.ranks == len(groups[0])
            inside = all(len({rank // size for rank in group}) == 1 for group in groups)
            assert (found.nodes == 1) == inside, (text, axis)
            assert found.in_node <= max(1, fewest), (text, axis)
    assert seen


def test_faster_configurations_are_faster():
    fast = step_time_of("llama-3-8b", "dp8 zero3 ac:full").seconds
    assert step_time_of("llama-3-8b", "dp8 zero3").seconds < fast
    assert step_time_of("llama-3-8b", "dp8 zero3 ac:full", "a100-80").seconds > 2 * fast
    assert step_time_of("llama-3-8b", "dp8 zero3 ac:full", compile=True).seconds < fast
    assert (
        step_time_of("llama-3-8b", "pp8 mb64").breakdown["bubble"]
        < step_time_of("llama-3-8b", "pp8 mb8").breakdown["bubble"] * 1.01
    )
    inside, across = (step_time_of("llama-3-8b", f"tp{tp}", batch=16).breakdown["tensor"] for tp in (8, 16))
    assert across > 1.2 * inside


def test_unknown_names_and_indivisible_batches_are_refused():
    with pytest.raises(UserError, match=r"batch 63 is not a multiple of dp x mb = 8"):
        step_time_of("llama-3-8b", "dp8", batch=63)
    with pytest.raises(UserError, match="optimizer"):
        step_time_of("llama-3-8b", "dp8", optimizer="adamq")


def test_days_of_training_match_closed_form():
    """6 N T: 175B parameters on 300B tokens in 30 days at 160 achieved TFLOP/s a device take 760 devices; at 140 on
    1,024 devices, with 8 for full recomputation, 34 days (Narayanan et al. 2021, arXiv:2104.04473, eq. 4)."""
    assert round(6 * 175e9 * 300e9 / 160e12 / 30 / 86400) == 760
    assert round(8 * 300e9 * 175e9 / (1024 * 140e12) / 86400) == 34


def test_gpt3_on_1024_a100_takes_about_the_published_month():
    """The same 34 days from the planner: 1,536 sequences of 2,048 tokens, tensor 8, pipeline 16."""
    layout = Layout.parse("dp8 tp8:nosp pp16:interleaved:3 mb192 ac:full")
    config = dataclasses.replace(preset("gpt3-175b"), vocabulary=51200)
    found = step_time(config, layout, of("a100-80", 1024), 2048, 1536, engine="megatron", simulate=False)
    assert found.seconds * 300e9 / 2048 / 1536 / 86400 == pytest.approx(34, rel=0.15)


def test_preference_loss_computes_logits_twice():
    """One more product of the head: the next-token loss computes gradients in its forward."""
    plain, pairs = (step_time_of("llama-3-8b", "dp8", pairs=flag).breakdown["compute"] for flag in (False, True))
    config, tokens = preset("llama-3-8b"), 64 // 8 * 4096
    fastest = 2 * tokens * config.hidden * config.vocabulary / 989e12
    assert fastest < pairs - plain < 3 * fastest
    again = "pp2:gpipe mb4 ac:full"  # recomputed in any case
    assert step_time_of("llama-3-8b", again, pairs=True).seconds == step_time_of("llama-3-8b", again).seconds


def test_overlapped_communication_costs_one_layers_share():
    calls, layers = np.array(8.0), 4
    assert exposed_seconds(calls, np.array(100.0), layers, 0.0) == 2.0  # the first of four layers overlaps with nothing
    assert exposed_seconds(calls, np.array(100.0), layers, 0.5) == 2.0 + 0.5 * 6.0
    assert exposed_seconds(calls, np.array(4.0), layers, 0.0) == 8.0 - 3.0  # more than three quarters of the pass


def test_interleaved_pipeline_overlaps_more_of_its_reductions():
    """Reductions of the last chunk overlap with the backward of four micro-batches instead of one."""
    plain, turns = (
        step_time_of("llama-3-70b", f"dp8 zero1 tp8 pp4:{schedule} mb8", engine="megatron-core").breakdown
        for schedule in ("1f1b", "interleaved:5")
    )
    assert turns["data"] < 0.7 * plain["data"]


def test_parameters_kept_through_a_pipeline_are_gathered_once():
    torchtitan = ENGINES["torchtitan"]
    again = dataclasses.replace(torchtitan, holds_in_pipelines=False)
    once, every = (
        step_time_of("llama-3-70b", "dp8 zero3 tp2 pp4 mb8", engine=engine).breakdown["data"]
        for engine in (torchtitan, again)
    )
    assert once < 0.7 * every
    alone = [
        step_time_of("llama-3-70b", "dp8 zero3 tp8", engine=engine).breakdown["data"] for engine in (torchtitan, again)
    ]
    assert alone[0] == alone[1]


def test_gathered_parameters_are_copied_before_forward_and_backward():
    """Against bytes: FSDP2 reads and writes 16-bit parameters twice a micro-batch, where more than one rank shards."""
    titan, llama = ENGINES["torchtitan"], preset("llama-3-8b")
    views = dataclasses.replace(titan, copies_gathered=False)
    for layout, copies in (("dp8 zero3 mb4", 4), ("dp8 zero1 mb4", 0), ("zero3 mb4", 0)):
        copied, viewed = (step_time_of("llama-3-8b", layout, engine=engine).breakdown for engine in (titan, views))
        memory = Rates.of(of("h100-sxm", 8), "bf16").memory
        seconds = copies * 2 * 2 * 2 * parameter_table(llama).numel / memory
        assert copied["compute"] - viewed["compute"] == pytest.approx(seconds, rel=1e-6), layout


def test_products_overlap_all_but_one_chunk_of_their_communication():
    megatron = ENGINES["megatron-core"]
    bare = dataclasses.replace(megatron, overlaps_tensor=None)
    hidden, seen = (
        step_time_of("llama-3-70b", "dp2 tp8 mb4", engine=engine).breakdown["tensor"] for engine in (megatron, bare)
    )
    assert seen / 8 < hidden < seen / 2


def test_overlap_of_a_recipe_hides_collectives_behind_products():
    """On CPUs only if it is asked for."""
    ours = ENGINES["meshwright"]
    overlapped = ours.overlapped("auto", "cuda")
    for layout, engine in (("dp2 tp8 mb4", ours), ("dp2 tp8:nosp mb4", ours.compiled())):
        engines = engine.overlapped("auto", "cuda"), engine
        hidden, seen = (step_time_of("llama-3-70b", layout, engine=each) for each in engines)
        assert seen.breakdown["tensor"] / 8 < hidden.breakdown["tensor"] < seen.breakdown["tensor"] / 2
        assert hidden.seconds < seen.seconds
    assert ours.overlapped("auto", "cpu") == ours.overlapped("off", "cuda") == ours
    assert ours.overlapped("chunks", "cpu") == overlapped


@pytest.mark.parametrize(
    ("adapter", "layers"),
    [
        (AdapterConfig("dora"), ()),
        (AdapterConfig(packed="nf4", targets=("q_proj", "v_proj")), ("attention.input",)),
        (AdapterConfig(dropout=0.1), ("attention.output", "mlp.output")),
    ],
)
def test_only_products_that_overlap_with_those_of_adapters_are_priced_so(
    adapter: AdapterConfig, layers: tuple[str, ...]
):
    config = dataclasses.replace(preset("llama-3-8b"), adapter=adapter)
    engine = ENGINES["meshwright"].overlapped("chunks", "cuda")
    operators = layer_operators(MicroBatch.of(config, Layout.parse("tp8"), 1, 4096, engine=engine), 1)
    calls = (call for operator in operators for call in operator.collectives)
    hidden = {call.sites[0][0] for call in calls if call.overlaps == "product"}
    assert hidden == {f"{layer}{back}" for layer in layers for back in ("", ".backward")}


def test_dispatch_is_hidden_behind_the_shared_expert_and_combine_is_not():
    narrow, wide = (
        step_time(
            dataclasses.replace(preset("qwen1.5-moe-a2.7b"), shared_intermediate=width), Layout.parse("dp8 ep8"),
            of("h100-sxm", 8), 4096, 8,
        ).breakdown["expert"]
        for width in (8, 1 << 16)
    )  # fmt: skip
    tax = read_packaged_toml("planner/cost/rates.toml")["overlap"]["tax"]["inside"]
    assert (1 + tax) / 2 < wide / narrow < 0.65  # the narrow one's kernels hide a little, too


def test_fp8_speeds_up_only_linear_layers():
    """A step takes more than half its bf16 time: attention, head and loss stay in bf16, and operands are cast."""
    wide, narrow = (
        step_time_of("llama-3-8b", f"dp8 mb4 {precision}", engine="megatron-core") for precision in ("bf16", "fp8")
    )
    assert 0.6 < narrow.seconds / wide.seconds < 0.85


def test_gradients_kept_through_a_pipeline_are_reduced_once():
    """ZeRO-2 under a pipeline: with Megatron Core a reduction a step as under ZeRO-1, and gradients that stay whole
    until then (arXiv:2407.21783, section 3.3.2: "we do not reshard"); elsewhere a reduction for each micro-batch."""
    core = ENGINES["megatron-core"]
    every = dataclasses.replace(core, holds_in_pipelines=False)
    one, two, each = (
        step_time_of("llama-3-70b", f"dp8 zero{zero} tp2 pp4 mb8", engine=engine).breakdown["data"]
        for zero, engine in ((1, core), (2, core), (2, every))
    )
    assert one == two < 0.6 * each
    cluster, config = of("h100-sxm", 64, across=50e9), preset("llama-3-70b")
    problems = (Problem(config, cluster, 4096, 64, engine) for engine in (core, every))
    held, sharded = (memory_of(each, Layout.parse("dp8 zero2 tp2 pp4 mb8"), 1).peak_bytes for each in problems)
    stage = 20 / 80 * (parameter_table(config).numel - 2 * config.vocabulary * config.hidden) / 2
    assert held - sharded == pytest.approx(4 * stage, rel=0.01)
    titan = Problem(config, cluster, 4096, 64, ENGINES["torchtitan"])  # ZeRO-3: parameters stay gathered, too
    gathered = memory_of(titan, Layout.parse("dp8 zero3 tp2 pp4 mb8"), 1).by_category()["communication"]
    assert gathered == pytest.approx(2 * stage, rel=0.01)


def test_gradients_in_small_buckets_wait_for_more_latencies():
    core = ENGINES["megatron-core"]
    small, large, whole = (
        step_time_of("llama-3-8b", "dp64 zero1 mb1", engine=dataclasses.replace(core, bucket_bytes=size)).breakdown[
            "data"
        ]
        for size in (200e6, 2e9, 1e12)
    )
    assert small > large > whole


def test_step_waits_for_the_host_where_kernels_are_short():
    """A small model's kernels are shorter than what PyTorch takes to launch them."""
    fast = dataclasses.replace(ENGINES["nanotron"], host_seconds=0.0)
    slow = dataclasses.replace(ENGINES["nanotron"], host_seconds=1e-4)
    small, large = (
        [step_time_of(name, "dp8 mb8", engine=engine).breakdown["compute"] for engine in (fast, slow)]
        for name in ("llama-tiny", "llama-3-8b")
    )
    assert small[1] > 2 * small[0] and large[1] < 1.2 * large[0]


def test_messages_of_megatron_core_grow_with_data_parallel_ranks():
    """`bucket_size` of megatron/core/distributed/distributed_data_parallel.py: 40 million gradients, or a million for
    each rank; then 512 ranks wait for fewer latencies than with messages of equal size."""
    core = dataclasses.replace(ENGINES["megatron-core"], overlaps_data=False)
    equal = dataclasses.replace(core, bucket_rank_bytes=0.0)
    for layout, fewer in (("dp32 zero1", False), ("dp512 zero1", True)):
        grown, same = (step_time_of("llama-3-8b", layout, batch=512, engine=each).seconds for each in (core, equal))
        assert grown < same if fewer else grown == same, layout


def test_host_launches_products_of_all_heads_at_once():
    """If launches by the host take longer than the kernels, a step does not take longer with more rows."""
    slow = dataclasses.replace(ENGINES["megatron"], host_seconds=1.0)
    one, four = (step_time_of("gpt2", "dp1", "a100-80", rows, engine=slow).seconds for rows in (1, 4))
    assert four == pytest.approx(one, rel=0.01)


def test_host_launches_products_of_all_experts_at_once():
    """If launches by the host take longer than the kernels, a step does not take longer with more experts."""
    slow, mixture = dataclasses.replace(ENGINES["megatron"], host_seconds=1.0), preset("mixtral-8x7b-v0.1")
    two, eight = (
        step_time(
            dataclasses.replace(mixture, layers=2, experts=experts),
            Layout.parse("dp1"),
            of("b200", 1),
            512,
            1,
            engine=slow,
        ).seconds
        for experts in (2, 8)
    )
    assert eight == pytest.approx(two, rel=0.01)


def test_all_devices_wait_for_the_slowest():
    """More with more nodes; not on a machine that was measured, whose measurement has it."""
    one, many = of("h100-sxm", 8), of("h100-sxm", 1024)
    assert straggler_terms(one) == (1.0, pytest.approx(0.005))
    factor, seconds = straggler_terms(many)
    assert 1.01 < factor < 1.05 and 0.03 < seconds < 0.2
    measured = dataclasses.replace(example(), copies=())
    assert straggler_terms(dataclasses.replace(many, measured=measured)) == (1.0, 0.0)


@pytest.mark.parametrize(("ep", "places"), [(16, 2), (8, 8)])
def test_tokens_are_sent_once_to_each_node_or_rank(ep: int, places: int):
    """The experts of a token that are on one node receive it by one message between nodes; on one node those of a rank.
    Against tokens that choose at random."""
    core = ENGINES["megatron-core"]
    each = dataclasses.replace(core, dispatches_by_node=False)
    once, several = (
        step_time_of("qwen3-30b-a3b", f"dp64 ep{ep}", engine=engine).breakdown["expert"] for engine in (core, each)
    )
    chosen, generator = 8, np.random.default_rng(0)
    distinct = np.mean([len(set(generator.integers(places, size=chosen))) for _ in range(2000)])
    assert distinct / chosen < once / several < 1.5 * distinct / chosen


def test_gate_in_kernels_of_its_own_moves_more_bytes():
    nanotron = ENGINES["nanotron"]
    fused = dataclasses.replace(nanotron, fuses_gates=True, host_seconds=0.0)
    apart = dataclasses.replace(nanotron, host_seconds=0.0)
    for model, more in (("llama-3-8b", True), ("gpt3-175b", False)):
        times = [step_time_of(model, "dp8", engine=engine).breakdown["compute"] for engine in (fused, apart)]
        assert (times[0] < times[1]) == more
