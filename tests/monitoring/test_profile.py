"""A profile shows the steps of all ranks under the names of the program, on one clock, without changing results."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import UserError
from meshwright.launcher.recipe_checks import check_recipe
from meshwright.layout import Layout
from meshwright.monitoring.profile_trace import (
    THREADS,
    RankSteps,
    Span,
    build_rank_trace,
    compute_clock_offset,
    merge_rank_traces,
)
from meshwright.monitoring.timed_calls import TimedCall
from meshwright.program.durations import Durations
from meshwright.program.simulate_pipeline import simulate_pipeline
from meshwright.program.timeline import build_pipeline_timeline
from meshwright.program.trace import build_chrome_trace
from meshwright.recipe import load_recipe
from meshwright.schedules.library import generate, generate_for_layout
from tests.conftest import exhaustive
from tests.training import training_cases as cases

ROUNDING = 0.01  # microseconds


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("profile")


def read(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt") as file:
        return json.load(file)


class Trace:
    """A trace as a reader of Chromium's Trace Event Format parses it; violations of the format fail."""

    def __init__(self, trace: dict[str, Any]) -> None:
        self.processes: dict[int, str] = {}
        self.threads: dict[int, tuple[int, str]] = {}  # by number: process, name
        self.slices: dict[str, list[dict]] = defaultdict(list)  # by "process: thread", in the order of start times
        for event in trace["traceEvents"]:
            if event["name"] == "process_name":
                assert event["pid"] not in self.processes
                self.processes[event["pid"]] = event["args"]["name"]
            if event["name"] == "thread_name":
                assert event["tid"] not in self.threads, "readers want numbers of threads to be of one process alone"
                self.threads[event["tid"]] = event["pid"], event["args"]["name"]
        for event in trace["traceEvents"]:
            if event["ph"] in ("X", "s", "f"):
                process, name = self.threads[event["tid"]]
                assert process == event["pid"]
            if event["ph"] == "X":
                assert event["dur"] >= 0
                self.slices[f"{self.processes[event['pid']]}: {name}"].append(event)
        for name, slices in self.slices.items():
            slices.sort(key=lambda event: (event["ts"], -event["dur"]))
            if "stream" not in name:  # torch's own on a device
                self._nest(name, slices)

    def _nest(self, name: str, slices: list[dict]) -> None:
        open_: list[float] = []
        for event in slices:
            end = event["ts"] + event["dur"]
            while open_ and open_[-1] <= event["ts"] + ROUNDING:
                open_.pop()
            assert not open_ or end <= open_[-1] + ROUNDING, (name, event)
            open_.append(end)

    def of(self, thread: str) -> list[tuple[str, str, str]]:
        """Return names, kinds and descriptions of the slices of a thread and of the threads that overlap with it."""
        return [name for key, slices in self.slices.items() if key.startswith(thread) for name in names(slices)]

    def steps(self, rank: int) -> list[dict]:
        """Return the compute steps of a rank."""
        return [event for event in self.slices[f"rank {rank}: steps"] if "stage" in event["args"]]

    def calls(self, rank: int) -> list[dict]:
        return [
            event
            for name, slices in self.slices.items()
            if name.startswith(f"rank {rank}: calls")
            for event in slices
            if event["cat"] == "call"
        ]


def names(events: list[dict]) -> list[tuple[str, str, str]]:
    return [(event["name"], event["cat"], event["args"]["what"]) for event in events]


def profile(place: Path) -> Path:
    [directory] = sorted((place / "run/profile").iterdir())
    return directory


@pytest.mark.parametrize("layout", ["pp2:zb-v mb4", "pp2:dualpipe mb4", *exhaustive("pp2 mb4")])
def test_profiled_steps_follow_simulated_program_on_one_clock(two, home, layout):
    place = home / layout
    [outcome, _] = cases.run_without_error(two, place, f"{layout} fp32", train_profile="3:4", model_layers=4)
    directory = profile(place)
    assert directory.name == "steps-000003-000004"
    assert {path.name for path in directory.iterdir()} == {
        "all-ranks.json.gz", "rank-00000.json.gz", "rank-00001.json.gz",
    }  # fmt: skip
    assert f"profile of steps 3 to 4: {directory / 'all-ranks.json.gz'} (opens in ui.perfetto.dev)" in outcome["said"]
    trace = Trace(read(directory / "all-ranks.json.gz"))
    program = generate_for_layout(Layout.parse(layout))
    timing = simulate_pipeline(program, Durations(1.0, 1.0, 1.0))
    simulated = Trace(build_chrome_trace(build_pipeline_timeline(program, timing)))
    title = f"{program.name}, simulated with the median times measured here, without transfer time"
    assert list(trace.processes.values()) == ["rank 0", "rank 1", title]
    for rank in (0, 1):
        expected = simulated.of(f"{simulated.processes[0]}: rank {rank}")
        found = names(trace.steps(rank))
        assert Counter(found) == Counter(expected * 2)  # of two steps
        assert Counter(trace.of(f"{title}: rank {rank}")) == Counter(expected)
    steps = [event for rank in (0, 1) for event in trace.steps(rank)]
    half = {rank: len(trace.steps(rank)) // 2 for rank in (0, 1)}
    for part in (slice(None, half[0]), slice(half[0], None)):  # inputs of a stage are computed before: the clocks agree
        done = {}
        these = [event for rank in (0, 1) for event in trace.steps(rank)[part]]
        for event in these:
            where = (event["cat"], *(event["args"][key] for key in ("replica", "micro_batch", "stage")))
            done[where] = event
        for (kind, replica, micro_batch, stage), event in done.items():
            ahead = 1 if kind == "forward" else -1
            following = done.get((kind, replica, micro_batch, stage + ahead))
            if following is not None and kind != "weight gradient":
                assert event["ts"] + event["dur"] <= following["ts"] + ROUNDING, (event, following)
    assert steps


def test_profile_names_calls_by_site_and_step_parts(two, home):
    place = home / "calls"
    [outcome, _] = cases.run_without_error(two, place, "dp2 zero3 mb2 fp32", train_profile="3", train_validate_every=2)
    trace = Trace(read(profile(place) / "all-ranks.json.gz"))
    assert list(trace.processes.values()) == ["rank 0", "rank 1"]  # one stage: there is no pipeline to simulate
    sent = outcome["result"]["measured"]["sent_bytes_per_step"]
    for rank in (0, 1):
        calls = trace.calls(rank)
        by_site = Counter(event["name"] for event in calls)
        assert set(by_site) >= set(sent), by_site
        # A ring's share of each call: what this rank is known to send at this site in a step.
        gradients = sum(event["args"]["bytes"] for event in calls if event["name"] == "data.gradients")
        assert gradients // 2 == sent["data.gradients"]
        parts = [event["name"] for event in trace.slices[f"rank {rank}: steps"]]
        assert parts == ["step 3", "data", "F0", "B0", "F1", "B1", "reduce", "agreement", "update"]
        [step, *inside] = trace.slices[f"rank {rank}: steps"]
        for event, following in pairwise(inside):
            assert step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= following["ts"] + ROUNDING


def test_profiled_steps_change_no_results_and_are_not_measured(two, home):
    cases.run_without_error(two, home / "without", "dp2 zero1 fp32")
    fault = "count_calls_when_a_profile_ends"
    outcomes = cases.run_without_error(two, home / "with", "dp2 zero1 fp32", fault=fault, train_profile="3:5")
    assert all(
        "in flight at its end: 0" in outcome["said"] for outcome in outcomes
    )  # although parameters were being all-gathered
    assert cases.trace(home / "with") == cases.trace(home / "without")
    assert [line["step"] for line in cases.metrics(home / "with") if line.get("profiled")] == [3, 4, 5]
    seconds = next(line["seconds"] for line in cases.metrics(home / "with") if line.get("step") == 6)
    assert outcomes[0]["result"]["measured"]["step_seconds"] == seconds  # the others are warm-up, or were watched


def test_rank_profile_has_torch_operators_inside_steps(two, home):
    place = home / "operators"
    cases.run_without_error(two, place, "dp2 fp32", train_profile="3", train_profile_ranks=[1])
    directory = profile(place)
    assert {path.name for path in directory.iterdir()} == {"all-ranks.json.gz", "rank-00001.json.gz"}
    trace = Trace(read(directory / "rank-00001.json.gz"))
    [step] = [event for event in trace.slices["rank 1: steps"] if event["name"] == "step 3"]
    [forward] = trace.steps(1)[:1]
    operators = [event for key, events in trace.slices.items() if ": operators" in key for event in events]
    products = [event for event in operators if event["name"] in ("aten::mm", "aten::addmm")]
    # A loaded machine may suspend the process between the readings of the two clocks: a wide margin,
    # which still finds a wrong time base (seconds) and wrong units (factors of 1,000).
    margin = 100_000.0  # microseconds
    assert len(products) > 20 and all(
        step["ts"] - margin < event["ts"] < step["ts"] + step["dur"] + margin for event in products
    )
    annotated = [event for event in operators if event["name"] == "F0" and event["cat"] == "user_annotation"]
    assert len(annotated) == 1 and abs(annotated[0]["ts"] - forward["ts"]) < margin
    assert not any(event["name"] == "aten::mm" for event in read(directory / "all-ranks.json.gz")["traceEvents"])


def test_stopped_run_writes_partial_profile_and_resumes_it(two, home):
    place = home / "stopped"
    outcomes = cases.run(two, place, "dp2 zero3 fp32", fault="stop_in_step_4", train_profile="3:6")
    assert outcomes[0]["error"].startswith("Terminated")
    cases.run_without_error(two, place, "dp2 zero3 fp32", train_profile="3:6")
    found = sorted((place / "run/profile").iterdir())
    assert [path.name for path in found] == ["steps-000003-000004", "steps-000005-000006"]
    for directory in found:
        Trace(read(directory / "all-ranks.json.gz"))


def test_unwritable_profile_does_not_stop_run(two, home):
    place = home / "blocked"
    (place / "run").mkdir(parents=True)
    (place / "run/profile").write_text("another file")
    [outcome, _] = cases.run_without_error(two, place, "dp2 fp32", train_profile="2")
    [said] = [line for line in outcome["said"] if line.startswith("the profile")]
    assert said.startswith(f"the profile in {place}/run/profile/steps-000002-000002 cannot be written: ")
    assert outcome["result"]["step"] == 6


# --- the trace itself


def test_clock_offsets_are_medians_over_barriers():
    times = [[100, 1103], [200, 1199], [300, 1900]]  # once rank 1 was held up
    assert compute_clock_offset(times, [7, 8], 1) == 1003
    assert compute_clock_offset(times, [7, 7], 1) == 0 and compute_clock_offset(times, [7, 8], 0) == 0


def rank_steps(rank: int = 0, zero: int = 1_000_000) -> RankSteps:
    span = Span("update", "update", "update", zero + 5000, zero + 9000)
    calls = [
        TimedCall("first", "all_reduce", "data", 8, zero + 1000, zero + 3000, zero + 4000),
        TimedCall("second", "all_gather", "data", 8, zero + 2000, None, zero + 5000),
        TimedCall("third", "all_gather", "data", 8, zero + 4000, None, zero + 6000),
        TimedCall("never", "all_gather", "data", 8, zero + 4500),
    ]
    return RankSteps(rank, zero, [span], calls)


def test_concurrent_calls_are_drawn_on_separate_threads():
    steps = RankSteps.from_table(json.loads(json.dumps(rank_steps().to_table())))
    assert steps == rank_steps()
    trace = Trace(build_rank_trace(steps, {"traceEvents": []})[0])
    placed = {event["name"]: event for events in trace.slices.values() for event in events}
    assert [placed[name]["tid"] for name in ("first", "second", "third")] == [1, 2, 1]
    assert (placed["first"]["ts"], placed["first"]["dur"]) == (1.0, 3.0)
    assert (placed["wait"]["ts"], placed["wait"]["dur"], placed["wait"]["tid"]) == (3.0, 1.0, 1)
    assert "never" not in placed


def test_device_kernels_are_in_merged_trace_by_stream():
    """As torch 2.13 writes them on CUDA: processes are devices, threads streams, arrows lead from launch to kernel."""
    common, launch = {"ph": "X", "dur": 2.0}, {"ph": "X", "dur": 0.5}
    operators = {
        "baseTimeNanoseconds": 500_000,
        "traceEvents": [
            {**common, "cat": "cpu_op", "name": "aten::mm", "pid": 99, "tid": 99, "ts": 510.0},
            {**launch, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 99, "tid": 99, "ts": 511.0},
            {"ph": "s", "id": 4, "pid": 99, "tid": 99, "ts": 511.0, "cat": "ac2g", "name": "ac2g"},
            {**common, "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 520.0},
            {"ph": "f", "id": 4, "pid": 0, "tid": 7, "ts": 520.0, "cat": "ac2g", "name": "ac2g", "bp": "e"},
            {**common, "cat": "gpu_user_annotation", "name": "F0", "pid": 0, "tid": 7, "ts": 520.0, "dur": 4.0},
            {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 0, "args": {"name": "python"}},
            {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": 600.0},
        ],
    }  # fmt: skip
    parts = []
    for rank in (0, 1):
        trace, kernels = build_rank_trace(rank_steps(rank), operators)
        whole = Trace(trace)
        assert {event["name"] for event in whole.slices[f"rank {rank}: operators of thread 99"]} == {
            "aten::mm", "cudaLaunchKernel",
        }  # fmt: skip
        parts.append(rank_steps(rank).to_table() | {"kernels": kernels})
    trace = Trace(merge_rank_traces(parts, generate("1f1b", 1, 2), {0: 0, 1: 0}))
    for rank in (0, 1):
        on_device = trace.slices[f"rank {rank}: device 0, stream 7"]
        assert [(event["name"], event["ts"]) for event in on_device] == [("F0", 20.0), ("gemm", 20.0)]
        assert on_device[0]["tid"] // THREADS == rank
    assert not any("operators" in name for name in trace.slices)


# --- mistakes


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.profile=ten", 'should be steps, as "10" or "10:12" (the first and the last), not "ten"'),
        ("train.profile=5:3", '"5:3" ends before it begins; write "3:5"'),
        ("train.profile=0:3", "should be steps"),
        ("train.profile=3:100000", 'profile = "3:100000" ends after the last step: steps = '),
    ],
)
def test_invalid_profile_steps_are_refused_in_one_line(tiny_recipe, override, words):
    with pytest.raises(UserError) as caught:
        load_recipe(tiny_recipe, [override])
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_profile_of_missing_rank_is_refused(tiny_recipe):
    with pytest.raises(UserError, match="train.profile_ranks: there is no rank 9: the layout has ranks 0 to "):
        check_recipe(load_recipe(tiny_recipe, ["train.profile_ranks=[9]"]))
