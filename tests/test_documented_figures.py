"""Figures that benchmarks.md, plan.md and plan-accuracy.md copy from measurements in `bench/results` are theirs."""

from __future__ import annotations

import re
import statistics

from meshwright.planner.cost.rates import constants
from tests.documented_figures import ACCURACY, BENCHMARKS, PLAN, cells, load_result, number_text


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
    [row] = [line for line in ACCURACY.splitlines() if line.startswith("| two-core machine, after a probe")]
    assert f"| {len(result)} | {mean:.1%} | {bias:+.1%} |" in row
    assert f"unscaled, the predictions are {-max(raw):.0%} to {-min(raw):.0%} too short" in ACCURACY
    name = "two CPU cores, after a probe, scaled to the CPU speed during it (`bench/plan_this_machine.py`)"
    assert cells(PLAN, name) == [str(len(result)), f"{mean:.1%}", ""]
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
    assert (
        f"the bounds are {low} and {high} times the predicted time" in PLAN
        and f"bounds are {low} and {high} times" in ACCURACY
    )
    within = sum(low < one < high for one in ratio.values())
    assert (
        f"Of the {number_text(len(ratio))} steps on one H100 after a probe, {number_text(within)} were within"
        in ACCURACY
    )
    assert f"eager `mb4` took {ratio['mb4 bf16', False]:.2f} times" in ACCURACY
    assert f"compiled `ac:selective` {ratio['ac:selective bf16', True]:.2f} times" in ACCURACY
    assert f"eager `ac:selective`, which took {ratio['ac:selective bf16', False]:.2f} times" in ACCURACY
    unscaled = [
        one["measured_as_it_was"] / one["predicted_seconds"] for one in load_result("plan_this_machine")["layouts"]
    ]
    within = sum(low < one < high for one in unscaled)
    assert f"{number_text(within)} of {number_text(len(unscaled))} layouts were within them unscaled" in ACCURACY
    assert f"the demo's took {max(unscaled):.2f} times" in ACCURACY


def test_steps_on_one_gpu_after_a_probe():
    errors = {name: one["time_error_by_probe"] for name, one in load_result("gpu_plan")["runs"].items()}
    others = [errors.pop(name) for name in ("ac:selective bf16 compiled", "ac:selective bf16", "mb4 bf16")]
    [row] = [line for line in ACCURACY.splitlines() if line.startswith("| the same: compiled `ac:selective`; eager")]
    for error, cell in zip(others, row.split(" | ")[2].split("; "), strict=True):
        assert f"{abs(error):.0%}".rstrip("%") in re.findall(r"\d+", cell)
    name = "one H100, after a probe: eager, `ac:full`, float32; compiled"
    runs, most = cells(ACCURACY, name)[:2]
    assert runs == str(len(errors))
    assert max(map(abs, errors.values())) <= float(most.removeprefix("at most ").rstrip("%")) / 100


def test_peaks_of_the_ledger():
    """Against the engine on fake CUDA tensors, and of compiled blocks."""
    result = load_result("gpu_ledger")
    errors = [abs(line["error"]) for line in result["lines"]]
    small = sum(error <= 0.001 for error in errors)
    text = f"{len(errors)} steps: at most {max(errors):.1%}, at most 0.1% for {small}; saved activations of "
    assert f"{text}{result['forwards_as_said']} of {result['forwards']} forwards" in PLAN
    name = "against the engine on fake CUDA tensors, storage by storage (`bench/gpu_ledger.py`)"
    assert cells(ACCURACY, name)[:2] == [str(len(errors)), f"at most {max(errors):.1%}"]
    lines = load_result("compiled_memory")["lines"]
    errors = [abs(line["error"]) for line in lines]
    steps = {tuple(line[key] for key in ("model", "layout", "dtype", "rows", "sequence")) for line in lines}
    most, median = f"at most {max(errors):.1%}", f"median {statistics.median(errors):.2%}"
    name = f"compiled blocks, CPU, {len(lines)} peaks (`bench/compiled_memory.py`)"
    assert cells(ACCURACY, name)[:2] == [str(len(steps)), f"{median}, {most}"]
    assert f"| {len(steps)} steps ({len(lines)} peaks): {most}, {median} |" in PLAN


def test_peaks_of_runs():
    result = load_result("plan_against_runs")
    priced = [line for line in result["lines"] if not any(words in line["case"] for words in result["not_priced"])]
    text = f"{len(priced)} runs: median {result['median_error']:.2%}, at most {result['largest_error']:.1%}"
    assert f"{text}; bytes and FLOPs equal |" in PLAN
    assert (result["beyond_limits"], result["runs_with_wrong_bytes"], result["largest_flops_error"]) == ([], 0, 0.0)
    [other] = [line["error"] for line in result["lines"] if line not in priced]
    text = "Not priced is the memory of [collective programs](training.md#programs-for-gradients)"
    assert f"{text} ({-other:.1%} of the peak in one run)" in PLAN


def test_gpu_hours_of_deepseek_v3():
    result = load_result("deepseek_v3")
    chosen, others = result["hai-llm"], result["others"]
    rows = {
        "thousand GPU hours per trillion tokens": ("thousand_gpu_hours_per_trillion", 0),
        "million GPU hours of pre-training, 14.8 trillion tokens": ("million_gpu_hours_pretraining", 2),
    }
    for name, (key, digits) in rows.items():
        one = chosen[key]
        predicted, low, high = (f"{one[each]:.{digits}f}" for each in ("predicted", "low", "high"))
        assert cells(ACCURACY, name) == [predicted, f"{low} to {high}", f"{one['published']:g}"]
    name = "memory of the device with the highest peak, GiB"
    assert cells(ACCURACY, name)[0] == f"{chosen['device_gib']:.1f}"
    hours = {name: one["thousand_gpu_hours_per_trillion"]["predicted"] for name, one in others.items()}
    text = f"With flash attention 2 it would be {hours['flash-2 in place of flash-3']:.0f} thousand GPU hours per "
    text += "trillion tokens, with exposed dispatch and combine "
    assert f"{text}{hours['no overlap of dispatch and combine']:.0f}." in ACCURACY
