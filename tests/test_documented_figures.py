"""Figures that plan.md and benchmarks.md copy from `bench/results` are those of the results."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.cost.bounds import read_bounds_table
from meshwright.planner.cost.rates import constants

REPOSITORY = Path(__file__).resolve().parent.parent
PLAN, BENCHMARKS = ((REPOSITORY / "docs" / f"{name}.md").read_text() for name in ("plan", "benchmarks"))
MOST_TYPICAL = 0.15
"""Error of a source's median rate above which plan.md gives the range of skills."""

SOURCES = {
    "llm-foundry on 8 to 64 A100-40 (ZeRO-3)": "llm-foundry@8c8dd48",
    "Megatron-LM, 22B to 1T parameters (Korthikanti et al. 2022)": "Reducing Activation Recomputation",
    "Megatron-LM, 1.7B to 1T (Narayanan et al. 2021)": "Megatron-LM SC21",
    "zero-bubble pipelines (Qi et al. 2023)": "Zero Bubble PP",
    "NeMo on Megatron-Core, 8 to 2,048 H100, 8B to 405B, bf16 (NVIDIA/dgxc-benchmarking)": (
        "^NVIDIA/dgxc.*(llama|nemotron|gpt3).*BF16"
    ),
    "the same in fp8": "^NVIDIA/dgxc.*(llama|nemotron|gpt3).*FP8",
    "the same of Grok-1, a mixture, bf16 and fp8": "grok1",
    "NeMo 24.07, fp8, H100": r"performance_summary.md \(24.07\)",
    "NeMo 25.02 and 25.04, fp8, B200 and GB200": "nemo-framework performance summary 25.0",
    "Megatron-Bridge, fp8 (two in bf16), H100 to GB300, 18 of them mixtures": "Megatron-Bridge",
    "torchtitan, A100": "torchtitan.*A100",
    "torchtitan, H100 of 500 W and H200, bf16 and fp8": "torchtitan.*(H100$|h100|h200)",
    "llm-foundry, A100-80": "llm-foundry@061f2c7.*A100",
    "llm-foundry, H100, bf16 and fp8": "llm-foundry@061f2c7.*H100",
    "nanotron, 1B to 80B on 8 to 256 H100, 126 layouts (ultra-scale playbook)": "nanotron",
    "FSDP of fms-fsdp, Automodel, TinyLlama": "fms-fsdp|Automodel|TinyLlama",
    "Megatron-DeepSpeed: BLOOM, MT-NLG 530B, GPT-NeoX-20B": "tr11-176B|Megatron-Turing|NeoX",
    "MaxText, Llama 2 70B on 64 to 2,048 H100, bf16 and fp8 (priced as if all were recomputed)": "MaxText",
    "PaxML, 5B and 175B on 16 to 2,048 H100 and A100": "PaxML",
    "NeMo, sequences of 4,096 to 1,048,576 tokens, fp8, H100": "long_sequence",
    "NeMo, fine-tuning, fp8, H100": "finetuning",
    "Llama 3 405B on 8,192 and 16,384 H100, ZeRO-2 (arXiv:2407.21783, table 4)": "^Llama 3 ",
    "NeMo 26.02 on B200": "NeMo 26.02",
}
"""Row of plan.md's table of accuracy: regular expression of its sources in `plan_accuracy.json`."""


UNSEEN = {
    "InternLM, 7B on 8 to 1,024 A100": ("development", "^InternLM/InternLM"),
    "FlagPerf, Megatron and DeepSpeed, 6B to 70B on A100, A800, H100 and H800": ("development", "^FlagOpen"),
    "XTuner, sequences of 8,192 to 1,048,576 tokens, 7B to 70B on A100": ("development", "xtuner"),
    "OLMo-core, 1B to 13B on 8 H100, bf16 and fp8": ("development", "OLMo"),
    "Automodel, mixtures on 8 to 1,024 H100; FSDP and DeepSpeed, 7B on 4 A100": (
        "development",
        "Automodel|huggingface/blog",
    ),
    "MegaScale's Megatron-LM, 175B on 256 to 12,288 A100": ("test", "MegaScale"),
    "flash-attention's GPT3, 125M to 2.7B on 8 A100": ("test", "Dao-AILab"),
    "fms-fsdp, later edition, 7B to 34B on 96 A100 and 128 H100": ("test", "fms-fsdp"),
    "PaddleNLP and FlagPerf's Paddle, 7B and 13B on 8 A100": ("test", "Paddle|paddle"),
    "NeMo, sequences of 8,192 to 1,048,576 tokens, fp8, on 2 to 256 B200": ("test", "long_sequence"),
    "swiss-ai, 8B on 64 to 256 GH200": ("test", "swiss-ai"),
    "NeMo's Llama-3 70B on 128 H100; Qwen3-235B on 256; Nemotron-4 340B on 6,144": (
        "test",
        "gpu-recipes|qwen3|Nemotron-4",
    ),
    "BigScience, 119 layouts and shapes of GPT on 8 to 384 A100": ("test", "bigscience"),
    "KempnerForge, 7B to 175B on 1 to 360 H200, FSDP with tensor parallelism": ("fresh", "Kempner"),
    "torchtitan, 8B and 70B on 64 and 256 H100 with tensor parallelism, bf16 and fp8": ("fresh", "torchtitan"),
    "Megatron-Bridge 25.09, fp8, H100 to GB200, 6 of 14 mixtures": ("fresh", "Megatron-Bridge"),
    "fms-acceleration, 8B on 4 A100": ("fresh", "fms-acceleration"),
    "torchao's torchtitan, 8B on 8 H100, bf16 and fp8": ("fresh_2", "float8.*H100"),
    "AMD: torchao and OTel's torchtitan, Primus, 8B and 30B-A3B on 8 MI300X or MI355X": (
        "fresh_2",
        "MI300X|OTel|Primus",
    ),
    "Sheared LLaMA, 1.3B and 2.7B on 16 A100": ("fresh_2", "Shearing"),
    "Megatron-LLaMA, 13B on 32 to 512 A100": ("fresh_2", "Megatron-LLaMA"),
    "ms-swift, Megatron and DeepSpeed, 14B on 8 A800": ("fresh_2", "ms-swift"),
    "DLPerf, Megatron-LM of 2021, 16 layouts of GPT on 1 to 32 V100": ("fresh_2", "DLPerf"),
    "Megatron-Core, 7B to 70B on 4 to 64 GB200": ("fresh_2", "GB200"),
    "Megatron-LM, 30B-A3B on 8 GH200 of JUPITER": ("fresh_2", "JUPITER"),
    "Megatron-Bridge by a user, 20 layouts of Qwen3 on 8 and 16 H100": ("fresh_2", "BastiaanGroot"),
    "Halo, 4B and 8B on one B300": ("fresh_2", "halo"),
    "Nemotron-4 15B with NeMo, bf16 and fp8, on 64 to 512 B200 of Together AI": ("fresh_3", "Together"),
    "DeepSpeed, LLaMA-7B on 8 A800": ("fresh_3", "chenyaofo"),
    "torchtitan, 8B on 4 GB200, bf16 and MXFP8": ("fresh_3", "GB200"),
    "torchao's torchtitan, 8B on 8 B200 of limited power, bf16 and fp8": ("fresh_3", "mx_formats"),
    "Megatron-LM's examples, 8B to 405B on 8 to 1,024 H100, fp8": ("fresh_3", "examples/llama"),
    "MaxText, 405B on 256 B200, fp8; AuroraGPT 2B on 4 and 8 A100": ("fresh_3", "gpu-recipes|ezpz"),
    "zero-bubble's 1F1B, GPTs of 32 to 64 layers on 8 to 32 A100": ("fresh_4", "sail-sg"),
    "OELLM, 32B on 32 to 4,096 GH200 of JUPITER, bf16 and fp8": ("fresh_4", "OpenEuroLLM"),
    "four programs on one sequence of 2,048 tokens, 14B on 8 H100 and 8 H200": ("fresh_4", "Qwen3-14B"),
    "FSDP, 7B and 72B on 8 to 64 H100 of Azure": ("fresh_4", "Jingchao"),
    "Megatron-Bridge by AWS, 30B-A3B on 64 B200 and 64 H200": ("fresh_4", "Qwen3-30B"),
    "NeMo by a user, 7B on 4 A100; Arctic's sequences of 160,000 and 1.1 million tokens, 8B on 8 H100": (
        "fresh_4",
        "NeMo|Arctic",
    ),
    "torchtitan and FSDP2 with tensor parallelism over 8, one sequence, 32B on 8 H100": ("fresh_4", "DeepSpeed TP"),
    "Megatron-Core's folding, 57B-A14B and 8x7B to 8x22B on 64 to 1,024 H100": ("test_2", "Folding|moe/README"),
    "two users' Megatron-LM, 8B to 140B on 4 to 32 GH200 of Alps, bf16 and fp8": ("test_2", "gipfelsturm"),
    "NVIDIA's recipes run by Together AI, 15B to 405B on 64 to 512 B200": ("test_2", "Together"),
    "Megatron-Bridge by AWS, 8B on 16 B300; by a user, OLMoE on 8 H100": ("test_2", "Qwen3-8B|OLMoE"),
    "torchtitan, 32B on 8 to 64 H100, 8B on one GB200, a mixture on 8 B200": (
        "test_2",
        "torchtitan|one GB200|pith-train",
    ),
    "Fast-LLM and Colossal-AI, 7B on 4 to 128 A100, H100 and H200; NeMo, 8B on one GB300": (
        "test_2",
        "Fast-LLM|Colossal|dgx-spark",
    ),
    "VectorLM, FSDP, 8B on 1 to 4 A100": ("test_3", "vectorlm"),
    "DHelix's Megatron-LM, 14B on 8 H200 and 32B on 32 H800": ("test_3", "dhelix"),
    "users' Megatron-Bridge and Megatron-LM, 30B-A3B on 8 B200": ("test_3", "overdrive|jeromeku"),
}
"""Row of the table: part of the unseen runs, and regular expression of its sources."""


def load_result(name: str) -> dict[str, Any]:
    """Return the document `bench/results/NAME.json`."""
    found: dict[str, Any] = json.loads((REPOSITORY / "bench" / "results" / f"{name}.json").read_text())
    return found


def load_sources() -> dict[str, dict[str, Any]]:
    """Return the sources of published step times in `plan_accuracy.json` by name."""
    accuracy = load_result("plan_accuracy")
    found: dict[str, dict[str, Any]] = accuracy["sources"] | accuracy["published"]["sources"]
    return found


def cells(page: str, name: str) -> list[str]:
    """Return the cells of the one table row of a page whose first cell is `name`, without the first."""
    [row] = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


def number_text(value: int) -> str:
    """Return a number from 0 to 12 as a word."""
    words = "zero one two three four five six seven eight nine ten eleven twelve"
    return words.split()[value]


def accuracy_cells(chosen: list[dict[str, Any]]) -> list[str]:
    """Return the cells of the table's row of these sources."""
    runs = sum(one["runs"] for one in chosen)

    def mean(key: str) -> float:
        return sum(one["runs"] * one[key] for one in chosen) / runs

    shares = [f"{mean(key):.0%}" for key in ("bounds_hold", "held_out_bounds_hold")]
    return [str(runs), f"{mean('mean_error'):.1%}", f"{mean('bias'):+.1%}", *shares]


@pytest.mark.parametrize("name", SOURCES)
def test_accuracy_of_sources(name: str):
    chosen = [one for source, one in load_sources().items() if re.search(SOURCES[name], source)]
    assert cells(PLAN, name) == accuracy_cells(chosen)


@pytest.mark.parametrize("name", UNSEEN)
def test_accuracy_of_unseen_sources(name: str):
    half, pattern = UNSEEN[name]
    sources = load_result("plan_accuracy")["unseen"][half]["sources"]
    assert cells(PLAN, name) == accuracy_cells([one for source, one in sources.items() if re.search(pattern, source)])


def test_accuracy_of_unseen_halves():
    unseen = load_result("plan_accuracy")["unseen"]
    rows = [line for line in PLAN.splitlines() if line.startswith("| **step time; unseen sources")]
    parts = ("development", "test", "fresh", "fresh_2", "fresh_3", "fresh_4", "test_2", "test_3")
    for half, row in zip(parts, rows, strict=True):
        found = unseen[half]
        shares = " | ".join(f"{found[key]:.0%}" for key in ("bounds_hold", "held_out_bounds_hold"))
        assert row.endswith(f"| {found['runs']} | {found['mean_error']:.1%} | | {shares} |")
        patterns = [pattern for each, pattern in UNSEEN.values() if each == half]
        for source in found["sources"]:
            assert sum(bool(re.search(pattern, source)) for pattern in patterns) == 1, source
    tested, fresh = unseen["test"], unseen["fresh"]
    text = (
        f"then 13.0%, 12.5%, 11.7%, and is {tested['mean_error']:.1%} now; over sources 11.9%, 13.0%, 12.2%, 10.3% and "
    )
    assert f"{text}{tested['mean_error_of_sources']:.1%}" in PLAN
    shares = " and ".join(
        f"{sum(one['bounds_hold'] for one in part['sources'].values()) / len(part['sources']):.0%}"
        for part in (tested, fresh)
    )
    assert f"with every source the same weight, {shares} of the runs of these two parts are within the bounds" in PLAN
    again = [f"{one['median_error']:.1%}" for one in unseen["fresh_2"]["memory"].values()]
    [row] = [line for line in PLAN.splitlines() if line.startswith("| peaks of the second fresh part")]
    assert "; ".join(again) in row
    [memory] = tested["memory"].values()
    name = "PaddleNLP's peaks, 7B and 13B on 8 A100 (unseen)"
    assert cells(PLAN, name)[:3] == [str(memory["runs"]), f"{memory['mean_error']:.1%}", f"{memory['bias']:+.1%}"]
    errors = [f"{one['mean_error']:.0%}" for one in fresh["memory"].values()]
    [row] = [line for line in PLAN.splitlines() if line.startswith("| peaks of the fresh part")]
    assert "; ".join(errors) in row and f"| {sum(one['runs'] for one in fresh['memory'].values())} |" in row


def test_published_peaks():
    memory = load_result("plan_accuracy")["published"]["memory"]
    titan = [f"{one['mean_error']:.1%}" for name, one in memory.items() if "202412" in name]
    [row] = [line for line in PLAN.splitlines() if line.startswith("| torchtitan's published peaks")]
    assert f"| 18 | {'; '.join(titan)} |" in row


def test_bounds_by_kind():
    accuracy = load_result("plan_accuracy")
    for name, kind in accuracy["kinds"].items():
        tested = accuracy["unseen"]["test_2_kinds"].get(name)
        found = [str(kind["runs"]), str(kind["projects"])]
        found += [f"{kind['held_out_bounds_hold']:.0%}", f"{kind['held_out_high_to_low']:.2f}"]
        new = "" if tested is None else f"{tested['held_out_bounds_hold']:.0%}, {tested['held_out_high_to_low']:.2f}"
        assert cells(PLAN, name) == [*found, new + (f" ({tested['runs']})" if tested else "")]


def test_factors_of_bounds():
    """In the order of bounds.toml."""
    table, begin = read_bounds_table(), PLAN.index("| property of the step |")
    rows = PLAN[begin:].split("\n\n")[0].splitlines()[2:]
    for row, name in zip(rows, table.above, strict=True):
        assert f"| {math.exp(-table.below[name]):.2f} | {math.exp(table.above[name]):.2f} |" in row


def test_every_source_is_in_one_row():
    for source in load_sources():
        assert len([name for name, pattern in SOURCES.items() if re.search(pattern, source)]) == 1, source


def test_accuracy_of_all_runs():
    accuracy = load_result("plan_accuracy")
    together, held_back = accuracy["together"], accuracy["held_back"]
    sentence = f"Over all {together['runs']} runs, the mean over sources is {together['mean_error_of_sources']:.1%}"
    assert sentence in PLAN
    assert f"Of all {together['runs']} runs, {together['bounds_hold']:.0%} are within the printed bounds" in PLAN
    given, unfitted = accuracy["giving_bounds"], accuracy["giving_bounds_unfitted"]
    shares = [
        (f"{one['held_out_bounds_hold']:.0%}", f"{one['held_out_bounds_hold_of_projects']:.0%}",
         f"{one['held_out_high_to_low']:.2f}")
        for one in (given, unfitted)
    ]  # fmt: skip
    (every, weighted, ratio), others = shares
    assert f"{every} of the {given['runs']} runs are within, {weighted} with every project the same weight" in PLAN
    assert f"at a median ratio of high to low of {ratio}" in PLAN
    assert (
        f"Of the {unfitted['runs']} runs to which no rate was fitted, it is {others[0]}, {others[1]} and {others[2]}"
        in PLAN
    )
    name = "**step time; sources that no rate was fitted to; four constants were chosen with them in sight**"
    shares = [f"{held_back[key]:.0%}" for key in ("bounds_hold", "held_out_bounds_hold")]
    assert cells(PLAN, name) == [str(held_back["runs"]), f"{held_back['mean_error']:.1%}", "", *shares]


def test_skill_against_median_rates():
    """Skill: 1 - error / error of a prediction at the source's median rate."""
    sources = load_sources().values()
    spread = [one for one in sources if one["null_error"] > MOST_TYPICAL and one["runs"] > 2]
    low, high = (round(100 * end(one["skill"] for one in spread)) for end in (min, max))
    assert f"error is {low} to {high}% smaller" in PLAN
    worse = [one for one in sources if (one["skill"] or 0) < 0]
    text = f"{len(worse)} of the {len(sources)} sources ({sum(one['runs'] for one in worse)} runs)"
    assert text in PLAN


def test_published_runs_that_fit():
    sources = load_sources().items()
    fitting, core, others = 0, 0, 0
    for name, one in sources:
        fit = round(one["runs"] * one["fit"])
        fitting += fit
        if re.search(r"NVIDIA|nemo-framework|^Llama 3 ", name):
            core += one["runs"] - fit
        else:
            others += one["runs"] - fit
    assert f"the planner predicts it for {fitting} (" in PLAN
    assert f"Of the other {core + others}, {core} are of Megatron Core" in PLAN


def test_sweeps_of_layouts():
    sweeps = load_result("plan_accuracy")["sweeps"]
    slower = sorted(one["longer"] for one in sweeps if one["longer"] > 0)
    assert (
        f"Of {number_text(len(sweeps))} sweeps in which {min(one['layouts'] for one in sweeps)} to "
        f"{max(one['layouts'] for one in sweeps)} layouts" in PLAN
    )
    assert f"the fastest in {number_text(len(sweeps) - len(slower))}," in PLAN
    assert (
        f"up to {slower[-2]:.1%} longer in {number_text(len(slower) - 1)}, and {slower[-1]:.1%} longer in one" in PLAN
    )
    larger = [one["rank_correlation"] for one in sweeps if one["layouts"] >= 6]
    text = f"Rank correlations of the {number_text(len(larger))} with 6 layouts or more are {min(larger):.2f} to"
    assert f"{text} {max(larger):.2f}" in PLAN


def test_accuracy_in_the_benchmarks():
    chosen = [cells(PLAN, name)[1] for name in list(SOURCES)[:2]]
    skills = [
        next(one["skill"] for source, one in load_sources().items() if re.search(SOURCES[name], source))
        for name in list(SOURCES)[:2]
    ]
    figures = "; ".join(
        f"{'mean error ' * (not place)}{error}, skill {skill:.2f}"
        for place, (error, skill) in enumerate(zip(chosen, skills, strict=True))
    )
    [row] = [
        line for line in BENCHMARKS.splitlines() if line.startswith("| predicted against published step times, 78")
    ]
    assert row.endswith(f"| {figures} |")


def test_durations_of_searches():
    result = load_result("plan_search")
    searches = list(result["searches"].values())
    seconds = ", ".join(f"{one['search_seconds']:.2f} s" for one in searches)
    least, most = (round(end(one["priced_per_second"] for one in searches), -3) for end in (min, max))
    layouts = f"{least:,} to {most:,} layouts evaluated per second"
    command = f"a `plan` of one layout {result['command_with_a_layout_seconds']:.2f} s"
    [row] = [line for line in BENCHMARKS.splitlines() if line.startswith("| searches on one core")]
    assert row.endswith(f"| {seconds}; {layouts}; {command} |")


def test_predicted_steps_on_one_machine():
    result = load_result("plan_this_machine")["layouts"]
    for one in result:
        figures = [f"{one[key]:.3f} s" for key in ("predicted_seconds", "measured_seconds")]
        assert cells(BENCHMARKS, f"`{one['layout']}`") == [*figures, f"{one['error']:.1%}"]
    errors = [one["error"] for one in result]
    mean, bias = sum(map(abs, errors)) / len(errors), sum(errors) / len(errors)
    raw = [one["error_as_it_was"] for one in result]
    [row] = [line for line in PLAN.splitlines() if line.startswith("| **step time on this machine, after a probe**")]
    assert f"| {len(result)} | {mean:.1%} | {bias:+.1%} |" in row
    assert f"unscaled {-max(raw):.0%} to {-min(raw):.0%} too short" in row
    longer = [one["measured_as_it_was"] / one["measured_seconds"] for one in result]
    assert f"the steps themselves took {min(longer):.2f} to {max(longer):.2f} times as long" in BENCHMARKS


def test_stalls_and_waits_on_one_gpu():
    result = load_result("gpu_one_gpu")
    [saved] = result["saving"].values()
    [row] = [line for line in BENCHMARKS.splitlines() if line.startswith("| time for which a background save of 2.6")]
    assert row.endswith(f"| {saved['first_stall_seconds']:.1f} s, {1000 * saved['stall_seconds']:.0f} ms |")
    after = [sum(places.values()) for places in result["host waits"].values()]
    [row] = [line for line in BENCHMARKS.splitlines() if line.startswith("| places where the host waits for the GPU")]
    assert row.endswith(f"; {' and '.join(map(str, after))} |")


def test_bounds_after_a_probe():
    runs = load_result("gpu_plan")["runs"].values()
    ratio = {(one["layout"], one["compiled"]): one["seconds"] / one["seconds_by_probe"] for one in runs}
    low, high = (constants()["band"][end] for end in ("low", "high"))
    assert f"the bounds are {low} and {high} times the predicted time" in PLAN.replace("\n", " ")
    within = sum(low < one < high for one in ratio.values())
    assert (
        f"Of the {number_text(len(ratio))} steps on one H100 after a probe, {number_text(within)} were within" in PLAN
    )
    assert f"eager `mb4` took {ratio['mb4 bf16', False]:.2f} times" in PLAN
    assert f"compiled `ac:selective` {ratio['ac:selective bf16', True]:.2f} times" in PLAN
    assert f"eager `ac:selective`, which took {ratio['ac:selective bf16', False]:.2f} times" in PLAN
    unscaled = [
        one["measured_as_it_was"] / one["predicted_seconds"] for one in load_result("plan_this_machine")["layouts"]
    ]
    within = sum(low < one < high for one in unscaled)
    assert f"{number_text(within)} of {number_text(len(unscaled))} layouts were within them unscaled" in PLAN
    assert f"the demo's took {max(unscaled):.2f} times" in PLAN
