"""Figures that benchmarks.md, plan.md and plan-accuracy.md copy from measurements in `bench/results` are theirs."""

from __future__ import annotations

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
