"""The first start of a run measures the machine once; later starts read the stored profile; a failure does not stop the
run."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.errors import RankLost, Terminated, UserError
from meshwright.launcher.rendezvous import RendezvousInfo
from meshwright.layout import Layout
from meshwright.machine import PROBE_VARIABLE
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.planner.cost.bounds import StepProperties, bound_seconds
from meshwright.planner.cost.step_time import step_time
from meshwright.planner.hardware.cluster import cluster
from meshwright.planner.hardware.machine_profile import HardwareProfileKey, ProcessConstants, ProcessKey
from meshwright.probe import communication
from meshwright.probe import ranks as probe_ranks
from meshwright.probe.points import MeasurementPlan
from meshwright.spec.presets import preset
from meshwright.threads import build_child_environment, count_available_cores
from meshwright.toml import read_toml
from meshwright.training import first_start
from meshwright.training.automatic import search_fastest_layout
from meshwright.training.first_start import describe_missing, find_hardware_profile, measure_first_start
from meshwright.training.measurement_failures import LOGGED_VARIABLE, FailedMeasurement
from meshwright.training.measurement_lock import measurement_lock
from meshwright.training.prediction import find_training_cluster
from meshwright.training.start import launch_recipe
from meshwright.training.worker import train_as_rank
from tests.planner.calibration_cases import cluster_file
from tests.training import training_cases as cases
from tests.training.test_process_memory import CONSTANTS

FAILED = "hardware measurement failed: "
DP2, TP2 = Layout.parse("dp2 bf16"), Layout.parse("tp2 bf16")


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine is known, and starts may measure."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(PROBE_VARIABLE)
    monkeypatch.setenv(LOGGED_VARIABLE, "")
    monkeypatch.setattr(first_start, "runs_on_cpu", lambda device: device != "cuda")


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The measurements that were requested, with a fake probe."""
    tables, found = read_toml(cluster_file(tmp_path / "elsewhere"), "cluster file"), []

    def probe(ranks: int, device: str, directory: Path, *, threads: int, short: dict[str, Any], log: Any) -> Any:
        fastest = short.pop("fastest")
        found.append({"ranks": ranks, "threads": threads, **short, **({"fastest": True} if fastest else {})})
        named = {**tables, "name": f"{ranks} x {threads}", "devices": ranks, "devices_per_node": ranks}
        return {"kind": "cpu", "failed": None, "cluster": named, "fastest": "bf16" if fastest else None}

    monkeypatch.setattr(probe_ranks, "probe", probe)
    return found


@pytest.fixture
def measured_memory(monkeypatch: pytest.MonkeyPatch) -> list[ProcessKey]:
    """The processes whose memory was measured, with a fake measurement."""
    found: list[ProcessKey] = []

    def measure(keys: list[ProcessKey], log: Any) -> list[ProcessConstants]:
        found.extend(keys)
        return [CONSTANTS] * len(keys)

    monkeypatch.setattr(first_start, "measure_process_memory", measure)
    return found


def profile_path() -> Path:
    """Return the path of the hardware profile for two ranks of one thread."""
    return HardwareProfileKey.here(count_available_cores(), 2, 1).path


def started(layout: Layout, **more: Any) -> list[str]:
    """Return the log lines of a start with one thread per rank."""
    lines: list[str] = []
    measure_first_start(layout, "auto", 1, lines.append, **more)
    return lines


def test_first_start_measures_and_the_second_does_not(asked: list[dict[str, Any]]):
    assert find_hardware_profile(2, 1) is None
    lines = started(DP2)
    assert asked == [{"ranks": 2, "threads": 1, "precisions": ["bf16"], "axes": []}]
    assert str(HardwareProfileKey.here(count_available_cores(), 2, 1).path) in lines[0] and "--no-probe" in lines[0]
    assert ": about 8 s, once (" in lines[0] and len(lines) == 2 and lines[1].startswith("measured in ")
    assert started(DP2) == [] and len(asked) == 1
    found = find_hardware_profile(2, 1)
    assert found is not None and found.name == "2 x 1"
    assert find_hardware_profile(2, 2) is None and find_hardware_profile(1, 1) is None


def test_measurement_on_a_busy_machine_is_reported_and_repeated(asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Repeated until the machine is idle; a worse measurement does not replace a better one."""
    inner, shares = probe_ranks.probe, [0.4, 0.7, None]

    def probe(*args: Any, **more: Any) -> Any:
        found = inner(*args, **more)
        share = shares[len(asked) - 1]
        found["cluster"]["measured"] = {**found["cluster"]["measured"], **({"disturbed": share} if share else {})}
        return found

    monkeypatch.setattr(probe_ranks, "probe", probe)
    monkeypatch.setattr(first_start, "measure_busy_share", lambda: 0.0)
    highs = []
    for share in (0.4, 0.4, None):
        lines = started(DP2)
        assert ("the next start on an idle machine measures again" in lines[1]) is (share is not None)
        found = find_hardware_profile(2, 1)
        assert found is not None and found.measured is not None and found.measured.disturbed == share
        step = StepProperties(False, "CPU", False, "meshwright", False, 2, 64, 1, 1.0, 64)
        seconds, low, high, _ = bound_seconds(found, step)
        assert low < seconds == 1.0 < high
        highs.append(high)
    assert highs[0] == highs[1] == pytest.approx(highs[2] / 0.6)
    assert started(DP2) == [] and len(asked) == 3


def test_measurement_on_a_busy_machine_is_kept_while_the_machine_is_busy(
    asked, measured_memory, monkeypatch: pytest.MonkeyPatch
):
    """The next start with idle cores measures again."""
    inner, busy = probe_ranks.probe, [0.9]

    def probe(*args: Any, **more: Any) -> Any:
        found = inner(*args, **more)
        found["cluster"]["measured"] = {**found["cluster"]["measured"], "disturbed": 0.5}
        return found

    monkeypatch.setattr(probe_ranks, "probe", probe)
    monkeypatch.setattr(first_start, "measure_busy_share", lambda: busy[0])
    started(DP2)
    assert started(DP2) == [
        "hardware profile: measured on a busy machine; kept, since other programs use 90% of its cores"
    ]
    assert len(asked) == 1
    with_memory = started(DP2, compiled=False)
    assert len(measured_memory) == 1 and sum("kept, since other programs" in line for line in with_memory) == 1
    busy[0] = 0.1
    started(DP2)
    assert len(asked) == 2


def test_start_that_needs_more_measures_that_too(asked: list[dict[str, Any]]):
    for layout in (DP2, TP2, Layout.parse("dp2 fp32"), TP2, Layout.parse("dp2 fp32"), DP2):
        started(layout)
    assert [(each["precisions"], each["axes"]) for each in asked] == [
        (["bf16"], []),
        (["bf16"], ["tp"]),
        (["bf16", "fp32"], ["tp"]),
    ]


@pytest.mark.parametrize(
    ("layout", "axes"), [("dp2 zero3", []), ("pp2 mb2", []), ("dp2 ep2", ["tp"]), ("cp2:ulysses", ["cp"])]
)
def test_axes_that_price_a_layout_are_measured(asked: list[dict[str, Any]], layout: str, axes: list[str]):
    started(Layout.parse(layout))
    assert asked[0]["axes"] == axes


def test_layout_without_precision_is_measured_in_the_fastest(
    asked: list[dict[str, Any]], measured_memory: list[ProcessKey], monkeypatch: pytest.MonkeyPatch
):
    """The fastest precision is found once; what earlier starts measured is measured again, so that it stays."""
    monkeypatch.setattr(first_start, "has_bf16_instructions", lambda: True)
    started(Layout.parse("dp2 fp32"), compiled=False)
    started(Layout.parse("dp2"), compiled=False)
    assert [(each["precisions"], "fastest" in each) for each in asked] == [(["fp32"], False), (["fp32"], True)]
    assert [each.precision for each in measured_memory] == ["fp32", "bf16"]
    for layout in ("dp2", "dp2 fp32", "dp2 bf16"):
        assert started(Layout.parse(layout), compiled=False) == []
    started(Layout.parse("dp4"), compiled=False)
    assert asked[2:] == [{"ranks": 4, "threads": 1, "precisions": ["bf16"], "axes": []}]


def test_search_over_layouts_measures_every_candidate_precision(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(first_start, "has_bf16_instructions", lambda: True)
    started(Layout.parse("dp2"), search=True)
    assert asked == [{"ranks": 2, "threads": 1, "precisions": ["bf16", "fp32"], "axes": ["cp", "tp"]}]


def test_cpu_without_bf16_instructions_is_measured_in_fp32_only(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(first_start, "has_bf16_instructions", lambda: False)
    started(Layout.parse("dp2"))
    assert [each["precisions"] for each in asked] == [["fp32"]]


@pytest.mark.parametrize(
    ("layout", "device", "instructions", "warned"),
    [
        ("dp2 bf16", "cpu", False, True), ("fp16", "cpu", False, True), ("dp2 bf16", "cuda", False, False),
        ("dp2 bf16", "cpu", True, False), ("dp2", "cpu", False, False), ("fp32", "cpu", False, False),
    ],
)  # fmt: skip
def test_precision_without_cpu_instructions_gives_a_warning(layout, device, instructions, warned, monkeypatch):
    monkeypatch.setattr(first_start, "has_bf16_instructions", lambda: instructions)
    warning = first_start.describe_slow_precision(Layout.parse(layout), device)
    assert (warning is not None) is warned
    assert warning is None or "takes the faster one" in warning


def test_failed_measurement_is_one_line_and_not_stored(asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch):
    inner, failed = probe_ranks.probe, {"rank": 1, "line": "RuntimeError: no room", "at": 0.0}
    monkeypatch.setattr(probe_ranks, "probe", lambda *args, **more: inner(*args, **more) | {"failed": failed})
    monkeypatch.setattr(first_start, "measure_busy_share", lambda: 0.0)
    lines = started(DP2)
    assert "rank 1: RuntimeError: no room" in lines[1] and find_hardware_profile(2, 1) is None
    # On an idle machine it would fail again: it is not repeated, until the user deletes the record that the line names.
    (line,) = started(DP2)
    assert len(asked) == 1 and "no room" in line
    failed = FailedMeasurement.read(profile_path())
    assert failed is not None and f"after {failed.path} is deleted, the next start measures again" in line
    # The note about the missing prediction repeats neither the error nor the remedy, unless this start, such as one
    # with --no-probe, has not logged them. Ranks are started with the launcher's environment.
    assert build_child_environment(1)[LOGGED_VARIABLE] == failed.file
    with monkeypatch.context() as another_start:
        another_start.setenv(LOGGED_VARIABLE, "")
        assert describe_missing("no profile", "auto", profile_path()) == (
            "no profile; hardware measurement failed: rank 1: RuntimeError: no room (at an earlier start); after "
            f"{failed.path} is deleted, the next start measures again unless --no-probe is given"
        )
    assert (
        describe_missing("no profile", "auto", profile_path()) == "no profile, since its measurement failed (see above)"
    )
    failed.path.unlink()
    started(DP2)
    assert len(asked) == 2


def test_measurement_that_failed_on_a_busy_machine_is_repeated_on_an_idle_one(asked, monkeypatch: pytest.MonkeyPatch):
    inner, busy = probe_ranks.probe, [0.9, 0.8, 0.1]  # after the failure, at the second start, at the third
    monkeypatch.setattr(probe_ranks, "probe", raising(RankLost("more than 60 s")))
    monkeypatch.setattr(first_start, "measure_busy_share", lambda: busy.pop(0))
    again = "the next start while other programs use less than 25% of the cores measures again"
    assert started(DP2)[1].endswith(again)
    monkeypatch.setattr(probe_ranks, "probe", inner)
    assert started(DP2) == [f"{FAILED}more than 60 s (at an earlier start); {again}"]
    assert asked == []
    started(DP2)
    assert len(asked) == 1 and find_hardware_profile(2, 1) is not None and busy == []


def test_probe_with_equal_threads_is_used_and_others_ignored(asked: list[dict[str, Any]], tmp_path: Path):
    cluster_file(tmp_path / "config")
    assert started(DP2) == [] and asked == []
    many = []
    measure_first_start(DP2, "auto", 3, many.append)
    assert [each["threads"] for each in asked] == [3]
    probed, kept = find_hardware_profile(2, 1), find_hardware_profile(2, 3)
    assert probed is not None and kept is not None
    assert (probed.name, kept.name) == ("host: 2 x Example CPU", "2 x 3")


def test_switch_and_gpus_skip_the_measurement(asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch):
    measure_first_start(DP2, "cuda", 1, pytest.fail)
    monkeypatch.setenv(PROBE_VARIABLE, "0")
    assert started(DP2) == [] and asked == []


@pytest.mark.parametrize("damage", ["{", '{"version": 1}', "tables"])
def test_damaged_file_is_measured_again(asked: list[dict[str, Any]], damage: str):
    started(DP2)
    path = profile_path()
    path.write_text(path.read_text().replace('"shapes"', '"sapes"') if damage == "tables" else damage)
    started(DP2)
    assert len(asked) == 2 and find_hardware_profile(2, 1) is not None


@pytest.mark.parametrize("error", [RankLost("rank 1 was killed"), UserError("no room"), OSError("full"), KeyError("x")])
def test_measurement_failure_is_one_line(monkeypatch: pytest.MonkeyPatch, error: Exception):
    monkeypatch.setattr(probe_ranks, "probe", raising(error))
    lines = started(DP2)
    assert "hardware measurement failed" in lines[1] and str(error).strip("'") in lines[1]
    assert lines[1].endswith("measures again") and len(lines) == 2
    assert find_hardware_profile(2, 1) is None


@pytest.mark.parametrize("error", [Terminated("stopped"), KeyboardInterrupt()])
def test_stop_signal_ends_the_start(monkeypatch: pytest.MonkeyPatch, error: BaseException):
    monkeypatch.setattr(probe_ranks, "probe", raising(error))
    with pytest.raises(type(error)):
        started(DP2)


def raising(error: BaseException) -> Callable[..., Any]:
    def probe(*_: Any, **__: Any) -> Any:
        raise error

    return probe


def test_unwritable_profile_directory_is_one_line(asked: list[dict[str, Any]], tmp_path: Path):
    (tmp_path / "cache").write_text("a file")
    lines = started(DP2)
    assert len(lines) == 1 and "hardware measurement failed" in lines[0] and asked == []


def test_start_waits_for_another_that_measures(asked: list[dict[str, Any]]):
    """The second process finds the profile that the first has stored."""
    waiting: list[str] = []
    with measurement_lock(pytest.fail):
        others = [threading.Thread(target=measure_first_start, args=(DP2, "cpu", 1, waiting.append)) for _ in range(2)]
        for other in others:
            other.start()
        while waiting.count("waiting for another start that measures this machine") < 2:
            time.sleep(0.01)
        assert asked == []
    for other in others:
        other.join()
    assert len(asked) == 1 and sum(line.startswith("measured in ") for line in waiting) == 1


def test_run_is_predicted_from_measurement_at_its_start(asked: list[dict[str, Any]], tmp_path: Path):
    trainer: Any = SimpleNamespace(
        device=torch.device("cpu"), mesh=SimpleNamespace(world_size=2), recipe=cases.recipe(tmp_path, "dp2 bf16")
    )
    threads = torch.get_num_threads()
    with pytest.raises(UserError, match=r"no hardware profile for 2 ranks x \d+ threads?; .*without --no-probe"):
        find_training_cluster(trainer)
    measure_first_start(DP2, "cpu", threads, lambda line: None)
    assert find_training_cluster(trainer).name == f"2 x {threads}"


def test_automatic_layout_measures_missing_hardware_profile_if_allowed(
    asked: list[dict[str, Any]], measured_memory: list[ProcessKey], monkeypatch: pytest.MonkeyPatch
):
    from tests.training.test_automatic import TABLES, Recipe

    monkeypatch.setattr(first_start, "has_bf16_instructions", lambda: True)
    recipe = Recipe.from_tables(TABLES)
    with pytest.raises(UserError, match="no hardware profile"):
        search_fastest_layout(recipe, None, print)
    assert Layout.parse(search_fastest_layout(recipe, None, lambda line: None, probe=True)).world_size == 2
    assert [(each["ranks"], each["precisions"], each["axes"]) for each in asked] == [
        (2, ["bf16", "fp32"], ["cp", "tp"])
    ]
    assert [(each.precision, each.compiled) for each in measured_memory] == [("bf16", False), ("fp32", False)]


def test_launcher_measures_with_the_run_directory_locked(asked, measured_memory, tmp_path: Path, monkeypatch):
    """With the ranks' number of threads; not while another run has locked the directory, nor after the last step."""
    recipe = cases.recipe(tmp_path, "dp1 fp32", run_threads=3)
    monkeypatch.setattr("meshwright.launcher.launcher._run_attempts", lambda spec, directory: {"threads": spec.threads})
    assert launch_recipe(recipe, probe=False) == {"threads": 3} and asked == []
    with RunDirectory(recipe.run_directory), pytest.raises(UserError, match="is in use"):
        launch_recipe(recipe)
    assert asked == measured_memory == []
    done = SimpleNamespace(step=recipe.train.steps)
    monkeypatch.setattr(first_start, "find_newest", lambda directory: done)
    launch_recipe(recipe)
    assert asked == measured_memory == []
    done.step -= 1
    launch_recipe(recipe)
    assert [(each["ranks"], each["threads"], each["precisions"]) for each in asked] == [(1, 3, ["fp32"])]
    assert measured_memory == [ProcessKey("fp32", 3, False)] and measured_memory[0].read() == CONSTANTS


@pytest.mark.parametrize(
    ("rank", "host_ranks", "probe", "measures"),
    [(0, 2, True, True), (1, 2, True, False), (0, 1, True, False), (0, 2, False, False)],
)
def test_external_ranks_measure_if_all_are_on_one_host(
    asked, measured_memory, tmp_path: Path, monkeypatch, rank: int, host_ranks: int, probe: bool, measures: bool
):
    place = RendezvousInfo(rank, 2, rank, "env://", "torchrun", host_ranks)
    monkeypatch.setattr("meshwright.launcher.rendezvous.read_rendezvous_info", lambda method: place)
    monkeypatch.setattr("meshwright.training.worker._run_as_rank", lambda *_, **__: {"done": True})
    recipe = cases.recipe(tmp_path, "dp2 fp32", run_threads=3)
    assert train_as_rank(recipe, probe=probe) == {"done": True}
    assert [(each["ranks"], each["threads"]) for each in asked] == [(2, 3)] * measures


def test_external_rank_measures_nothing_if_its_port_is_taken(asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The rendezvous then fails, with its own message."""
    monkeypatch.setattr("meshwright.training.worker._run_as_rank", lambda *_, **__: {"done": True})
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        method = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        monkeypatch.setattr(
            "meshwright.launcher.rendezvous.read_rendezvous_info", lambda _: RendezvousInfo(0, 2, 0, method, "SLURM", 2)
        )
        assert train_as_rank(cases.recipe(tmp_path, "dp2 fp32")) == {"done": True} and asked == []


def test_rank_with_own_core_set_skips_measurement(asked, measured_memory, tmp_path: Path, monkeypatch):
    """A rank may not start ranks on the cores of others; the run uses the threads of its own share."""
    monkeypatch.setattr(
        "meshwright.launcher.rendezvous.read_rendezvous_info",
        lambda method: RendezvousInfo(0, 2, 0, "env://", "SLURM", 2),
    )
    monkeypatch.setattr("meshwright.training.worker._run_as_rank", lambda *_, **__: {"done": True})
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "4")
    assert train_as_rank(cases.recipe(tmp_path, "dp2 fp32")) == {"done": True} and asked == measured_memory == []
    monkeypatch.delenv("SLURM_CPUS_PER_TASK")
    train_as_rank(cases.recipe(tmp_path, "dp2 fp32"))
    assert len(asked) == len(measured_memory) == 1


def test_advice_names_the_switch_in_force(monkeypatch: pytest.MonkeyPatch):
    path = profile_path()
    assert describe_missing("none", "auto", path) == "none; start once without --no-probe"
    assert describe_missing("none", "auto", path, "run it") == "none; run it, or start once without --no-probe"
    monkeypatch.setattr(first_start, "runs_on_cpu", lambda device: device == "cpu")  # as with a GPU
    assert describe_missing("none", "auto", path) == "none; start once with run.device=cpu"
    monkeypatch.setenv(PROBE_VARIABLE, "0")
    assert describe_missing("none", "cpu", path) == "none; start once without MESHWRIGHT_PROBE=0"


def test_short_measurement_prices_every_kind_of_step(monkeypatch: pytest.MonkeyPatch):
    """One rank measures, with fewer and smaller points."""
    short = MeasurementPlan.short

    def shorter(precisions: tuple[str, ...], axes: tuple[str, ...]) -> MeasurementPlan:
        found = short(precisions, axes)
        return replace(found, shapes=found.shapes[:3], point_seconds=0.001, steps=1, kernel_sizes=(2**14, 2**17))

    monkeypatch.setattr(MeasurementPlan, "short", shorter)
    wanted = {"precisions": ["fp32"], "axes": ["tp"], "fastest": True}
    monkeypatch.setattr(communication, "is_bf16_faster", lambda device: False)
    found = probe_ranks._measure(
        RendezvousInfo(0, 1, 0, "", "itself"), {"device": "cpu", "disk": "", "plan": {}, "short": wanted}
    )
    assert (found["kind"], found["failed"], found["fastest"]) == ("cpu", None, "fp32")
    machine = cluster(found["cluster"])
    assert machine.measured is not None and machine.measured.disk_write is None
    assert {each.ranks for each in machine.measured.products} == {1}
    assert [each.layout for each in machine.measured.steps] == ["fp32"]
    config = preset("gpt2")
    for compiled in (False, True):
        assert step_time(config, Layout.parse("dp1 fp32"), machine, 64, 4, compile=compiled).seconds > 0


@pytest.mark.exhaustive
def test_measurement_does_not_change_bits_of_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """By the real launcher and a real measurement."""
    weights = []
    for name, probe in (("probed", True), ("not", False)):
        recipe = cases.recipe(tmp_path / name, "dp2 bf16", train_steps=3)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache-{name}"))
        result = launch_recipe(recipe, probe=probe, show_progress=False)
        files = sorted(Path(result["checkpoint"]).rglob("*.safetensors"))
        weights.append([file.read_bytes() for file in files])
        assert (result["predicted"]["step_seconds"] is not None) == probe
    assert weights[0] == weights[1] and weights[0]


def test_announced_seconds_are_the_sum_of_the_parts(asked, measured_memory, monkeypatch: pytest.MonkeyPatch):
    """One precision takes 8 s, a further one 5, process memory 5; compiled blocks take longer."""
    monkeypatch.setattr(first_start, "has_bf16_instructions", lambda: True)
    assert ": about 13 s, once (" in started(Layout.parse("dp2"), compiled=False)[0]
    assert measured_memory == [ProcessKey("bf16", 1, False)]
    assert ": about 18 s, once (" in started(Layout.parse("dp4"), compiled=False, search=True)[0]
    assert ": about 37 s, once (" in started(DP2, compiled=True)[0] and len(asked) == 2


def test_measurement_lock_times_out():
    lines: list[str] = []
    with measurement_lock(lines.append), pytest.raises(UserError, match="still holds"):
        with measurement_lock(lines.append, seconds=0.2):
            pytest.fail("two at a time")
    assert lines == ["waiting for another start that measures this machine"]
    with measurement_lock(pytest.fail):
        pass
