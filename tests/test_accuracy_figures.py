"""Figures that plan-accuracy.md, plan.md and benchmarks.md copy from `plan_accuracy.json` are those of the result."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest

from meshwright.planner.cost.bounds import read_bounds_table
from tests.documented_figures import ACCURACY, BENCHMARKS, PLAN, cells, load_result, number_text

MOST_TYPICAL = 0.15
"""Error of a source's median rate above which plan-accuracy.md gives the range of skills."""

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
"""Row of plan-accuracy.md's tables: regular expression of its sources in `plan_accuracy.json`."""


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
"""Row of plan-accuracy.md's tables: part of the unseen runs, and regular expression of its sources."""

SETS = {
    "development": "development",
    "test 1": "test",
    "fresh 1": "fresh",
    "fresh 2": "fresh_2",
    "fresh 3": "fresh_3",
    "fresh 4": "fresh_4",
    "test 2": "test_2",
    "test 3": "test_3",
}
"""Name of a set in plan-accuracy.md: part of the unseen runs in `plan_accuracy.json`."""


def load_sources() -> dict[str, dict[str, Any]]:
    """Return the sources of published step times in `plan_accuracy.json` by name."""
    accuracy = load_result("plan_accuracy")
    found: dict[str, dict[str, Any]] = accuracy["sources"] | accuracy["published"]["sources"]
    return found


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
    assert cells(ACCURACY, name) == accuracy_cells(chosen)


@pytest.mark.parametrize("name", UNSEEN)
def test_accuracy_of_unseen_sources(name: str):
    half, pattern = UNSEEN[name]
    sources = load_result("plan_accuracy")["unseen"][half]["sources"]
    assert cells(ACCURACY, name) == accuracy_cells(
        [one for source, one in sources.items() if re.search(pattern, source)]
    )


def set_cells(part: dict[str, Any]) -> list[str]:
    """Return the cells of a set's row, without the error when it was first priced."""
    shares = [f"{part[key]:.0%}" for key in ("bounds_hold", "held_out_bounds_hold")]
    return [str(part["runs"]), *(f"{part[key]:.1%}" for key in ("mean_error", "mean_error_of_sources")), *shares]


def test_accuracy_of_unseen_sets():
    unseen = load_result("plan_accuracy")["unseen"]
    rows = [line for line in ACCURACY.splitlines() if line.startswith("| development | test 1")]
    shares = ACCURACY.split(rows[0])[1].splitlines()[2].strip("| ").split(" | ")
    for (name, part), share in zip(SETS.items(), shares, strict=True):
        found = unseen[part]
        [row] = [line for line in ACCURACY.splitlines() if line.startswith(f"| {name} | {found['runs']} |")]
        assert row.startswith(f"| {name} | {' | '.join(set_cells(found))} |")
        assert share == f"{found['held_out_bounds_hold_of_projects']:.0%}"
        patterns = [pattern for each, pattern in UNSEEN.values() if each == part]
        for source in found["sources"]:
            assert sum(bool(re.search(pattern, source)) for pattern in patterns) == 1, source
    tested, fresh = unseen["test"], unseen["fresh"]
    text = (
        f"then 13.0%, 12.5%, 11.7%, and is {tested['mean_error']:.1%} now; over sources 11.9%, 13.0%, 12.2%, 10.3% and "
    )
    assert f"{text}{tested['mean_error_of_sources']:.1%}" in ACCURACY
    first, second = (
        f"{sum(one['bounds_hold'] for one in part['sources'].values()) / len(part['sources']):.0%}"
        for part in (tested, fresh)
    )
    text = f"With every source the same weight, {first} of its runs are within the bounds, of fresh 1 {second}."
    assert text in ACCURACY


def test_numbers_of_runs():
    accuracy = load_result("plan_accuracy")
    together, unseen = accuracy["together"]["runs"], [accuracy["unseen"][part] for part in SETS.values()]
    others = sum(part["runs"] for part in unseen)
    assert f"There are {together + others:,} runs with step times" in ACCURACY
    sources = sum(len(part["sources"]) for part in unseen)
    assert f"the other {others} runs, of {sources} sources, are in `unseen_runs.csv`" in ACCURACY
    refused = len(accuracy["refused"]) + len(accuracy["published"]["refused"])
    assert f"{refused} of {together + refused} runs are refused" in ACCURACY
    tests = [part for name, part in zip(SETS, unseen, strict=True) if name.startswith("test")]
    refused = sum(len(part["refused"]) for part in tests)
    tried = sum(part["runs"] for part in tests) + refused
    assert f"Of test 1 to 3, {refused} of {tried} runs are refused" in ACCURACY
    given = accuracy["giving_bounds"]["runs"]
    assert f"errors of the {given:,} runs of all sets" in ACCURACY and f"{given:,} of which give the bounds" in PLAN


def test_summary_of_accuracy():
    """plan.md repeats figures of plan-accuracy.md."""
    accuracy = load_result("plan_accuracy")
    together, held_back, given = (accuracy[key] for key in ("together", "held_back", "giving_bounds"))
    unfitted, unseen = accuracy["giving_bounds_unfitted"], accuracy["unseen"]
    fitted = together["runs"] - held_back["runs"]
    means = {
        key: (together[key] * together["runs"] - held_back[key] * held_back["runs"]) / fitted
        for key in ("mean_error", "bounds_hold", "held_out_bounds_hold")
    }
    shares = [f"{means[key]:.0%}" for key in ("bounds_hold", "held_out_bounds_hold")]
    first = [str(fitted), f"{means['mean_error']:.1%}"]
    assert cells(ACCURACY, "fitted")[:5] == [*first, "", *shares]
    name = "published runs; rates were fitted to them, or chosen with them in sight"
    assert cells(PLAN, name) == [*first, shares[0]]
    name = "published runs; no rate was fitted to them, but errors of most were studied"
    assert cells(PLAN, name) == [
        str(unfitted["runs"]), f"{unfitted['mean_error']:.1%}", f"{unfitted['bounds_hold']:.0%}",
    ]  # fmt: skip
    tests = [unseen[part] for part in ("test_2", "test_3")]
    assert cells(PLAN, "published runs of the test sets 2; 3, which give neither rates nor bounds") == [
        "; ".join(str(one["runs"]) for one in tests),
        "; ".join(f"{one['mean_error']:.1%}" for one in tests),
        "; ".join(f"{one['bounds_hold']:.0%}" for one in tests),
    ]
    every = given["runs"] + sum(one["runs"] for one in tests)
    assert f"compared with {every:,} published runs of other training programs, {given['runs']:,} of which" in PLAN
    assert given["runs"] == fitted + unfitted["runs"]
    shown = {name: kind for name, kind in accuracy["kinds"].items() if kind["runs"] >= 15}
    for name, kind in shown.items():
        assert cells(PLAN, name) == [str(kind["runs"]), f"{kind['mean_error']:.1%}"]
    assert len(re.findall(r"^\| (?:dense|experts), .*\|$", PLAN, re.MULTILINE)) == len(shown)


def peak_cells(beginning: str) -> list[str]:
    """Return the number of runs and the errors of the one row of published peaks that begins so."""
    [row] = [line for line in ACCURACY.splitlines() if line.startswith(f"| {beginning}")]
    return [cell.strip() for cell in row.strip("|").split("|")][1:3]


def test_published_peaks():
    accuracy = load_result("plan_accuracy")
    memory = accuracy["published"]["memory"]
    titan = [one for name, one in memory.items() if "202412" in name]
    expected = [str(sum(one["runs"] for one in titan)), "; ".join(f"{one['mean_error']:.1%}" for one in titan)]
    assert peak_cells("torchtitan's allocator, December 2024") == expected
    [fused] = [one for name, one in memory.items() if "2025-06_torchtitan" in name]
    assert cells(ACCURACY, "the same, June 2025, H200, where the loss is compiled") == [
        str(fused["runs"]), f"{fused['mean_error']:.0%}", f"{fused['bias']:+.0%}",
    ]  # fmt: skip
    sizes: dict[str, list[dict[str, Any]]] = {"1B|3B": [], "8B": [], "80B": []}
    for size, chosen in sizes.items():
        chosen += [one for name, one in memory.items() if re.search(rf"nanotron.*, ({size}) on", name)]
    ends = [sorted({f"{100 * end(one['mean_error'] for one in chosen):.1f}" for end in (min, max)}, key=float)
            for chosen in sizes.values()]  # fmt: skip
    runs = sum(one["runs"] for chosen in sizes.values() for one in chosen)
    assert peak_cells("nanotron: 1B and 3B") == [str(runs), "; ".join(f"{' to '.join(each)}%" for each in ends)]
    [memory] = accuracy["unseen"]["test"]["memory"].values()
    found = [str(memory["runs"]), f"{memory['mean_error']:.1%}", f"{memory['bias']:+.1%}"]
    assert cells(ACCURACY, "PaddleNLP, 7B and 13B on 8 A100 (unseen)") == found
    rows = {
        "fresh 1, since": ("fresh", "mean_error", "{:.0%}"),
        "fresh 2, medians": ("fresh_2", "median_error", "{:.1%}"),
        "fresh 3: torchao": ("fresh_3", "mean_error", "{:.0%}"),
        "fresh 4: zero-bubble": ("fresh_4", "mean_error", "{:.0%}"),
        "test 2: Colossal-AI": ("test_2", "mean_error", "{:.0%}"),
    }
    largest = 0.0
    for beginning, (part, key, form) in rows.items():
        memory = accuracy["unseen"][part]["memory"].values()
        errors = [one[key] for one in memory]
        largest = max(largest, *errors)
        assert peak_cells(beginning) == [
            str(sum(one["runs"] for one in memory)),
            "; ".join(form.format(error) for error in errors),
        ]
    assert f"are 1 to {largest:.0%} off" in PLAN


def test_coverage_of_latest_sets():
    latest = load_result("plan_accuracy")["unseen"]["test_3"]
    text = f"its mean error is {latest['mean_error']:.1%} (over sources {latest['mean_error_of_sources']:.1%}); "
    text += f"{latest['bounds_hold']:.0%} of its runs are within the bounds, at a median ratio of "
    assert f"{text}{latest['held_out_high_to_low']:.2f}." in ACCURACY


def test_bounds_by_kind():
    accuracy = load_result("plan_accuracy")
    for name, kind in accuracy["kinds"].items():
        tested = accuracy["unseen"]["test_2_kinds"].get(name)
        found = [str(kind["runs"]), str(kind["projects"])]
        found += [f"{kind['held_out_bounds_hold']:.0%}", f"{kind['held_out_high_to_low']:.2f}"]
        new = "" if tested is None else f"{tested['held_out_bounds_hold']:.0%}, {tested['held_out_high_to_low']:.2f}"
        assert cells(ACCURACY, name) == [*found, new + (f" ({tested['runs']})" if tested else "")]


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
    assert sentence in ACCURACY
    assert f"Of all {together['runs']} runs, {together['bounds_hold']:.0%} are within the printed bounds" in ACCURACY
    given, unfitted = accuracy["giving_bounds"], accuracy["giving_bounds_unfitted"]
    shares = [
        (f"{one['held_out_bounds_hold']:.0%}", f"{one['held_out_bounds_hold_of_projects']:.0%}",
         f"{one['held_out_high_to_low']:.2f}")
        for one in (given, unfitted)
    ]  # fmt: skip
    (every, weighted, ratio), others = shares
    assert (
        f"{every} of the {given['runs']:,} runs are within, {weighted} with every project the same weight" in ACCURACY
    )
    assert f"at a median ratio of high to low of {ratio}" in ACCURACY
    assert (
        f"Of the {unfitted['runs']} runs to which no rate was fitted, it is {others[0]}, {others[1]} and {others[2]}"
        in ACCURACY
    )
    assert cells(ACCURACY, "not fitted")[:5] == set_cells(held_back)


def test_skill_against_median_rates():
    """Skill: 1 - error / error of a prediction at the source's median rate."""
    sources = load_sources().values()
    spread = [one for one in sources if one["null_error"] > MOST_TYPICAL and one["runs"] > 2]
    low, high = (round(100 * end(one["skill"] for one in spread)) for end in (min, max))
    assert f"error is {low} to {high}% smaller" in ACCURACY
    worse = [one for one in sources if (one["skill"] or 0) < 0]
    text = f"{len(worse)} of the {len(sources)} sources ({sum(one['runs'] for one in worse)} runs)"
    assert text in ACCURACY


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
    assert f"the planner predicts it for {fitting} (" in ACCURACY
    assert f"Of the other {core + others}, {core} are of Megatron Core" in ACCURACY


def test_sweeps_of_layouts():
    sweeps = load_result("plan_accuracy")["sweeps"]
    slower = sorted(one["longer"] for one in sweeps if one["longer"] > 0)
    assert (
        f"Of {number_text(len(sweeps))} sweeps in which {min(one['layouts'] for one in sweeps)} to "
        f"{max(one['layouts'] for one in sweeps)} layouts" in ACCURACY
    )
    assert f"the fastest in {number_text(len(sweeps) - len(slower))}," in ACCURACY
    assert (
        f"up to {slower[-2]:.1%} longer in {number_text(len(slower) - 1)}, and {slower[-1]:.1%} longer in one"
        in ACCURACY
    )
    larger = [one["rank_correlation"] for one in sweeps if one["layouts"] >= 6]
    text = f"Rank correlations of the {number_text(len(larger))} with 6 layouts or more are {min(larger):.2f} to"
    assert f"{text} {max(larger):.2f}" in ACCURACY


def test_accuracy_in_the_benchmarks():
    chosen = [cells(ACCURACY, name)[1] for name in list(SOURCES)[:2]]
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
