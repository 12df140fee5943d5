"""`meshwright probe`: measurements of all ranks, the hardware profile for `plan`, slow ranks, failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from meshwright.comm.local import LocalRanks
from meshwright.errors import RankLost, UserError
from meshwright.launcher.launcher import LaunchSpec, launch
from meshwright.launcher.rendezvous import RendezvousInfo
from meshwright.planner.hardware.cluster import cluster
from meshwright.planner.hardware.measured import FORMS, read_measured
from meshwright.probe import points, stopwatch
from meshwright.probe import ranks as probe_ranks
from meshwright.probe.communication import OPERATIONS, compute_slowest_median
from meshwright.probe.compare import THRESHOLD
from meshwright.probe.points import MeasurementPlan, MeasurementPoint, make_call, time_call, time_point
from meshwright.probe.report import fit_link, format_cluster_file, format_summary, make_cluster_tables, make_document
from meshwright.probe.steps import list_reference_layouts
from tests.probe import probe_cases
from tests.probe.probe_cases import SMALL


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[LocalRanks]:
    with LocalRanks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def found(two_ranks: LocalRanks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return two_ranks.run(probe_cases.measured, str(tmp_path_factory.mktemp("disk")))[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from meshwright.probe.rank import Host, make_probe_mesh, measure

    mesh = make_probe_mesh(1, 1, "cpu")
    return measure(mesh, SMALL, Host(1, tmp_path_factory.mktemp("disk")))


def test_every_measurement_has_all_ranks_and_one_rank_alone(found: dict[str, Any]):
    measured = read_measured(found["measured"], "probe")
    assert (measured.backend, measured.ranks, measured.threads) == ("gloo", 2, 1)
    settings = {(each.form, each.ranks, each.threads) for each in measured.products}
    assert settings == {(form, *setting) for form in FORMS for setting in ((2, 1), (1, 1), (1, 2))}
    assert all(each.shapes == SMALL.shapes for each in measured.products)
    assert {(each.name, each.ranks, each.threads) for each in measured.passes} == {
        (name, *setting) for name in ("copy", "add", "silu") for setting in ((2, 1), (1, 1), (1, 2))
    }
    assert {(each.operation, each.ranks, each.place) for each in measured.collectives} == {
        (operation, 2, "inside") for operation in OPERATIONS
    }
    slower = {
        (what, rank)
        for what, ratios in found["ratios"].items()
        for rank, ratio in enumerate(ratios)
        if ratio > THRESHOLD
    }  # empty unless other load slows one of the two down
    assert {(each["what"], each["rank"]) for each in found["slow"]} == slower
    assert dict(measured.starts).keys() == {"rank", "operation", "differentiated_operation"}
    assert measured.disk_write > 0 and measured.disk_read > 0
    assert found["threads"] == 1  # restored
    assert found["progress"][-1] == "disk"


def test_measured_times_scale_with_work(found: dict[str, Any]):
    """The limits are wide: 1 MFLOP/s to 100 TFLOP/s, memory 10 MB/s to 10 TB/s."""
    measured = read_measured(found["measured"], "probe")
    for each in measured.products:
        for (tokens, out, inner), seconds in zip(each.shapes, each.seconds, strict=True):
            assert 1e6 < 2 * tokens * out * inner / seconds < 1e14
    for each in measured.passes:
        assert each.curve.sizes == tuple({"copy": 8, "add": 12, "silu": 8}[each.name] * n for n in SMALL.pass_sizes)
        assert 1e7 < each.curve.sizes[-1] / each.curve.seconds[-1] < 1e13
    for each in measured.collectives:
        assert 1e-6 < each.curve.seconds[0] < 0.5


def test_cluster_file_is_read_by_planner(found: dict[str, Any], tmp_path: Path):
    tables = make_cluster_tables(found, "cpu")
    path = tmp_path / "cluster.toml"
    path.write_text(format_cluster_file(tables, ["first line", "second line"]))
    assert path.read_text().startswith("# first line\n# second line\n")
    here = cluster(str(path))
    assert (here.devices, here.devices_per_node, here.nodes) == (2, 2, 1)
    measured = read_measured(found["measured"], "probe")
    assert here.measured is not None
    for loaded, saved in zip(here.measured.products, measured.products, strict=True):
        key = (loaded.form, loaded.ranks, loaded.threads, loaded.shapes)
        assert key == (saved.form, saved.ranks, saved.threads, saved.shapes)
        assert loaded.seconds == pytest.approx(saved.seconds, rel=1e-3)
    best = max(
        2 * a * b * c / seconds
        for each in measured.products
        if each.ranks == 2
        for (a, b, c), seconds in zip(each.shapes, each.seconds, strict=True)
    )
    assert here.peak("fp32") == pytest.approx(best, rel=1e-3)
    with pytest.raises(UserError, match="no known peak for bf16; it has fp32"):
        here.peak("bf16")
    message = next(one.curve for one in measured.collectives if (one.operation, one.ranks) == ("send-receive", 2))
    assert here.inside.latency == pytest.approx(min(message.seconds), rel=1e-3)
    assert 2**20 < here.device.memory_bytes < 2**44


def test_summary_and_document_cover_every_measurement(found: dict[str, Any]):
    tables = make_cluster_tables(found, "cpu")
    document = json.loads(json.dumps(make_document(found, tables, "here.toml"), allow_nan=False))
    assert document["cluster_file"] == "here.toml"
    assert {"devices", "device", "measured", "hosts", "ratios", "threshold", "slow", "seconds"} <= document.keys()
    busy = {**found, "measured": {**found["measured"], "disturbed": 0.204}}
    text = format_summary(busy, "here.toml")
    for word in (
        "matmul fp32",
        "memory",
        "all-reduce 2",
        "send-receive 2",
        "disk",
        "a rank waited for a core 20% of the time",
        "start-up",
        "slowest",
        "here.toml",
    ):
        assert word in text, word


def test_slow_rank_is_reported(two_ranks: LocalRanks, tmp_path: Path):
    """Rank 1 computes everything twice."""
    results = two_ranks.run(probe_cases.measured, str(tmp_path), None, 1)
    for found in results:
        assert {(each["rank"], each["what"]) for each in found["slow"]} == {(1, "products"), (1, "memory")}
        assert found["ratios"]["products"][1] == pytest.approx(2, rel=0.35)
        assert found["ratios"]["memory"][1] == pytest.approx(2, rel=0.35)
    assert "warning: rank 1 (on host-0) is slow" in format_summary(results[0], "here.toml")


def test_hosts_are_measured_inside_and_across(tmp_path: Path):
    with LocalRanks(4) as ranks:
        found = ranks.run(probe_cases.measured, str(tmp_path), 2)[0]
    assert found["hosts"] == ["host-0", "host-0", "host-1", "host-1"]
    places = {(each["place"], each["ranks"]) for each in found["measured"]["collectives"]}
    assert places == {("inside", 2), ("across", 2), ("world", 4)}
    tables = make_cluster_tables(found, "cpu")
    assert (tables["devices"], tables["devices_per_node"]) == (4, 2)
    assert {"inside_gb_per_second", "across_gb_per_second", "across_latency_seconds"} <= tables.keys()


def test_single_rank_probe_works(alone: dict[str, Any], tmp_path: Path):
    assert alone["measured"]["collectives"] == []
    assert alone["slow"] == [] and alone["ratios"]["products"] == [1.0]
    path = tmp_path / "cluster.toml"
    path.write_text(format_cluster_file(make_cluster_tables(alone, "cpu"), []))
    assert cluster(str(path)).devices == 1


def test_known_gpu_keeps_catalogue_data_and_reports_its_memory(alone: dict[str, Any]):
    found = {**alone, "device": {"name": "NVIDIA H200", "memory_bytes": 150_000_000_000}}
    here = cluster(make_cluster_tables(found, "cuda"))
    assert (here.device.name, here.device.memory_bytes, here.peak("bf16")) == ("h200", 150e9, 989e12)
    found["device"]["name"] = "NVIDIA H200 MIG 1g.18gb"
    assert cluster(make_cluster_tables(found, "cuda")).device.name == "NVIDIA H200 MIG 1g.18gb"


@pytest.mark.parametrize("form", FORMS)
def test_three_products_match_linear_function(form: str):
    tokens, out, inner = 5, 7, 3
    x = torch.randn(tokens, inner, requires_grad=True)
    weight = torch.randn(out, inner, requires_grad=True)
    y = torch.nn.functional.linear(x, weight)
    y.sum().backward()
    result = make_call(MeasurementPoint("product", form, "fp32", (tokens, out, inner)), torch.device("cpu"))()
    assert result.shape == {"forward": y, "input-gradient": x.grad, "weight-gradient": weight.grad}[form].shape


def test_call_time_is_median_of_batches(monkeypatch: pytest.MonkeyPatch):
    clock = {"now": 0.0, "calls": 0}
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(stopwatch, "read_waiting_times", lambda threads: {})

    def call() -> None:
        clock["calls"] += 1
        clock["now"] += 0.5 if clock["calls"] in (40, 90) else 0.001  # two hiccups

    assert time_call(call, torch.device("cpu"), 0.2) == pytest.approx(0.001)


@pytest.mark.parametrize(("kind", "calls"), [("product", 1), ("kernel", 2)])
def test_long_product_is_timed_in_its_first_call(kind: str, calls: int, monkeypatch: pytest.MonkeyPatch):
    """A layer operation is not: its first backward pass may import modules."""
    clock = [0.0]
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(stopwatch, "read_waiting_times", lambda threads: {})
    made: list[float] = []

    def call() -> None:
        made.append(3.0 if not made else 2.0)
        clock[0] += made[-1]

    monkeypatch.setattr(points, "make_call", lambda point, device: call)
    point = MeasurementPoint(kind, "forward", "fp32", (2, 2, 2))
    assert (time_point(point, torch.device("cpu"), 0.1), len(made)) == (made[-1], calls)


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="the kernel does not count waiting times")
def test_time_excludes_waits_for_other_programs():
    """With two busy processes on the same core, this process gets a third of its time."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    x = torch.randn(256, 256)
    busy = []
    try:
        torch.set_num_threads(1)
        os.sched_setaffinity(0, {min(cores)})
        alone = time_call(lambda: x @ x, torch.device("cpu"), 0.05)
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
        begun, waited = time.perf_counter(), 0.0
        while waited < 0.2 and time.perf_counter() < begun + 5:  # until the busy processes have started
            watch = stopwatch.Stopwatch()
            contended = time_call(lambda: x @ x, torch.device("cpu"), 0.2)
            passed, waited = watch.read()
        assert waited > 0.2 and passed > 1.3 * (passed - waited)
        assert contended < 2 * alone  # wall-clock time is three times as long
    finally:
        for each in busy:
            each.kill()
            each.wait()
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


def test_time_includes_waits_if_ranks_share_cores(monkeypatch: pytest.MonkeyPatch):
    waits = iter([{"7": 0}, {"7": 400_000_000}])
    monkeypatch.setattr(stopwatch, "read_waiting_times", lambda threads: next(waits))
    monkeypatch.setattr(stopwatch.time, "perf_counter", iter([1.0, 2.0, 1.0, 2.0]).__next__)
    assert stopwatch.Stopwatch().read_seconds() == pytest.approx(0.6, abs=0.01)
    monkeypatch.setattr(stopwatch.Stopwatch, "shared", True)
    assert stopwatch.Stopwatch().read_seconds() == 1.0


def test_collective_time_is_slowest_rank_without_waits_for_cores():
    assert compute_slowest_median([[1, 9, 3], [2, 1, 8], [1, 1, 1]], [[0] * 3] * 3) == 8
    assert compute_slowest_median([[5.0], [6.0]], [[1.0], [3.0]]) == 2.0


def test_link_latency_and_bandwidth_are_fitted_from_message_times():
    from meshwright.planner.hardware.measured import Curve

    sizes = tuple(float(2**exponent) for exponent in range(10, 25, 2))
    rate, latency = fit_link(Curve(sizes, tuple(3e-5 + size / 2e9 for size in sizes)))
    assert rate == pytest.approx(2e9, rel=1e-3)
    assert latency == pytest.approx(3e-5, rel=0.05)


def test_times_are_corrected_by_reference_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """From the sixth of twelve points on, points and reference kernel take twice as long."""
    from meshwright.probe import rank

    class Clock:
        """Clock of reference kernel and points: half the speed from the sixth point on."""

        calls = 0

        @property
        def pace(self) -> float:
            return 2.0 if self.calls > 5 else 1.0

        def point(self, *_: object) -> float:
            return 0.01 * self.pace

    clock = Clock()

    class Slowed:
        def measure_seconds(self) -> float:
            return 0.001 * clock.pace

    def timed(*_: object) -> float:
        clock.calls += 1
        return clock.point()

    monkeypatch.setattr(rank, "time_point", timed)
    points = SMALL.list_points()[:12]
    mesh = rank.make_probe_mesh(1, 1, "cpu")
    (times,), level = rank._time_points(mesh, points, 1, 1, 0.0, Slowed())  # type: ignore[arg-type]
    assert times == pytest.approx([times[0]] * 12) and level == pytest.approx(0.002)


def test_default_plan_fits_in_its_time_budget():
    """Number of points x seconds x phases, well under the five minutes that a probe may take."""
    for device, phases in (("cpu", 3), ("cuda", 1)):
        plan = MeasurementPlan.default(device)
        assert (
            len(plan.list_points()) * plan.point_seconds * phases + len(plan.vector_bytes) * 5 * plan.point_seconds * 8
            < 90
        )


# --- ranks started by the launcher


def test_launcher_starts_processes_that_measure(tmp_path: Path):
    small = {"shapes": [[16, 16, 16]], "pass_sizes": [256], "kernel_sizes": [4096], "vector_bytes": [1024]}
    plan = {**small, "precisions": ["fp32"], "point_seconds": 0.002}
    found = probe_ranks.probe(
        2, "cpu", tmp_path, {**plan, "disk_bytes": 2**16, "steps": 1, "axes": ["tp"]}, log=lambda line: None
    )
    assert (found["rank"], found["kind"], len(found["hosts"])) == (0, "cpu", 2)
    starts = found["measured"]["starts"]
    assert starts["rank"] > 0 and starts["meeting"] > 0  # which is longer depends on other programs
    assert list(tmp_path.iterdir()) == []
    steps = {each["layout"]: each["seconds"] for each in found["measured"]["steps"]}
    assert list(steps) == ["dp2 fp32", "tp2 fp32"] and min(steps.values()) > 0.01


def test_failed_reference_steps_keep_other_results(found: dict[str, Any]):
    """Rank 1 fails; rank 0 loses it in a collective call."""
    store = HashStore()

    def failing(error: Exception) -> Callable[..., Any]:
        def measure(*_: Any) -> Any:
            raise error

        return measure

    steps = [
        probe_ranks._GuardedSteps(failing(error), RendezvousInfo(rank, 2, rank, "env://", "test"), store)
        for rank, error in ((1, ValueError("no such\ninstruction")), (0, RankLost("rank 1 has ended")))
    ]
    assert [each(None, 1.0) for each in steps] == [[], []]
    assert {(each.failed["rank"], each.failed["line"]) for each in steps} == {(1, "ValueError: no such instruction")}
    later = probe_ranks._GuardedSteps(failing(OSError("closed")), RendezvousInfo(0, 2, 0, "env://", "test"), store)
    assert later(None, 1.0) == [] and later.failed["rank"] == 1
    failed = {**found, "failed": steps[1].failed}
    line = (
        "on rank 1 (on host-0), so predicted times will be less accurate; everything else was measured: ValueError: no"
    )
    tables = make_cluster_tables(failed, "cpu")
    assert [
        row for row in format_summary(failed, "here.toml").splitlines() if line in row and row.startswith("warning: ")
    ]
    assert line in make_document(failed, tables, "here.toml")["failed"]["line"]
    assert make_document(found, tables, "here.toml")["failed"] is None
    alone = probe_ranks._GuardedSteps(failing(MemoryError("too much")), RendezvousInfo(0, 1, 0, "env://", "test"), None)
    assert alone(None, 1.0) == [] and alone.failed["line"] == "MemoryError: too much"


def test_rank_lost_in_reference_steps_is_reported():
    def lose(*_: Any) -> Any:
        raise RankLost("rank 1 was killed")

    steps = probe_ranks._GuardedSteps(lose, RendezvousInfo(0, 2, 0, "env://", "test"), HashStore())
    with pytest.raises(RankLost, match="rank 1 was killed"):
        steps(None, 1.0)


def test_killed_rank_ends_probe_with_one_line(tmp_path: Path):
    """The line mentions neither a checkpoint nor a hang report, which only training runs have."""
    lines: list[str] = []
    command = (sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    spec = LaunchSpec({}, 2, tmp_path, command=command, trains=False, log=lines.append)
    with pytest.raises(
        RankLost, match=r"rank \d .*was killed by signal 9 \(SIGKILL\) before it finished; nothing was"
    ) as lost:
        launch(spec)
    assert lines == [] and "checkpoint" not in str(lost.value) and "\n" not in str(lost.value)


@pytest.mark.parametrize("ranks", [0, 65])
def test_invalid_rank_counts_are_refused(ranks: int):
    with pytest.raises(UserError, match="choose 1 to 64"):
        probe_ranks.probe(ranks, "cpu")


def test_hosts_with_unequal_ranks_are_refused(monkeypatch: pytest.MonkeyPatch):
    class Store(dict):
        set = dict.__setitem__

        def multi_get(self, keys: list[str]) -> list[bytes]:
            return [self[key].encode() for key in keys]

    def size(hosts: list[str]) -> int:
        store = Store({f"meshwright/host/{rank}": host for rank, host in enumerate(hosts)})
        monkeypatch.setattr(probe_ranks.socket, "gethostname", lambda: hosts[0])
        return probe_ranks._count_host_ranks(RendezvousInfo(0, len(hosts), 0, "env://", "test"), store)

    assert size(["a", "a", "b", "b"]) == 2
    assert size(["a", "b"]) == 1
    assert size(["a", "a"]) == 2
    for hosts in (["a", "a", "b"], ["a", "b", "a", "b"], ["a", "b", "b", "a"]):
        with pytest.raises(UserError, match="equally many, consecutive ranks; started: 2 on a"):
            size(hosts)


# --- the command


def test_probe_command_writes_file_that_cluster_this_reads(
    found: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Callable[..., Any]
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(probe_ranks, "probe", lambda *_: {**found, "kind": "cpu", "rank": 0})
    outcome = command_line("probe", "--json")
    assert outcome.code == 0, outcome.errors
    document = json.loads(outcome.output)
    assert (document["schema"], document["cluster_file"]) == (1, str(tmp_path / "config/meshwright/cluster.toml"))
    assert cluster("this").measured is not None
    other = tmp_path / "other.toml"
    outcome = command_line("probe", "--output", other)
    assert f"cluster file: {other}" in outcome.output
    assert cluster(str(other)).measured == cluster("this").measured
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--directory", "nowhere"), "--directory: there is no directory nowhere"),
        (("--output", "nowhere/cluster.toml"), "--output: there is no directory nowhere"),
        (("--output", "."), "cannot write .: it is a directory"),
        (("--output", "/proc/cluster.toml"), "cannot write /proc/cluster.toml: No such file"),
        (("--device", "gpu"), 'unknown device "gpu"'),
        (("--ranks", "0"), "--ranks"),
        (("--rank", "2"), "did you mean --ranks?"),
    ],
)
def test_wrong_probe_command_is_one_error_line(arguments: tuple[str, ...], line: str, command_line: Callable[..., Any]):
    outcome = command_line("probe", *arguments)
    assert outcome.code == 2
    assert line in outcome.errors
    assert outcome.errors.count("\n") == 1


def test_other_torchrun_ranks_print_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Callable[..., Any]
):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(probe_ranks, "probe_on_rank", lambda *_: {"rank": 1})
    outcome = command_line("probe", "--output", tmp_path / "cluster.toml")
    assert (outcome.code, outcome.output, list(tmp_path.iterdir())) == (0, "", [])
    assert "leave it out" in command_line("probe", "--ranks", "2").errors


def test_reference_layouts_cover_every_possible_axis():
    assert [str(each) for each in list_reference_layouts("cpu", 2, 1, ("fp32", "bf16"))] == [
        "dp2 fp32", "dp2 bf16", "tp2 fp32", "cp2 fp32",
    ]  # fmt: skip
    assert [str(each) for each in list_reference_layouts("cpu", 4, 2, ("fp32",))] == [
        "dp8 fp32",
        "dp2 tp4 fp32",
        "dp2 cp4 fp32",
    ]
    assert [str(each) for each in list_reference_layouts("cpu", 3, 1, ("fp32",))] == [
        "dp3 fp32"
    ]  # no layout is divisible by 3
    assert [str(each) for each in list_reference_layouts("cpu", 1, 1, ("fp32",))] == ["fp32"]
