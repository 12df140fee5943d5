"""bench/serving.py and bench/serving_load.py: what they record, and which results they keep."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.serving.serve import _StartupTimer
from tests.conftest import REPOSITORY


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.syspath_prepend(str(REPOSITORY / "bench"))
    return importlib.import_module("serving_race"), importlib.import_module("serving_peers")


def test_phases_of_the_last_start_are_read_from_its_lines(bench: tuple[Any, Any], tmp_path: Path):
    _, peers = bench
    log = tmp_path / "meshwright.log"
    log.write_text("HTTP started: 9.00 s\n")
    contender = SimpleNamespace(log=log, _log_start=log.stat().st_size)
    with log.open("a") as lines:
        phases = _StartupTimer(lambda line: print(line, file=lines))
        phases.end("checkpoint checked, tokenizer loaded")
        phases.end("ranks started (2 ranks, avx2, kernels d792001ea9501f9c, weights and pool in 0.18 s)")
        print(
            "memory: 2048 KV blocks of 16 tokens on each rank", "ready at http://127.0.0.1:1 after 5.79 s", file=lines
        )
        phases.end("HTTP started")
    found = peers.Contender.phases(contender)
    assert list(found) == ["checkpoint checked, tokenizer loaded", "ranks started", "HTTP started"]
    assert all(0 <= seconds < 5 for seconds in found.values())


def test_own_contenders_are_recorded_with_their_instruction_set(
    bench: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    serving, _ = bench
    contender = SimpleNamespace(
        precision="bf16", instruction_set="avx2", command=["x"], settings={}, ready_seconds=1.0,
        resident_bytes=lambda: 0, generate=lambda *_: None,
    )  # fmt: skip
    monkeypatch.setattr(serving, "STARTS", dict.fromkeys(("meshwright", "engine", "vllm"), lambda *_: contender))
    monkeypatch.setattr(serving, "CACHE", tmp_path)
    monkeypatch.setattr(serving, "installed_version", lambda name: "1")
    race = serving.Race("m", "bf16", ["meshwright", "engine", "vllm"], restart=False)
    for name in race.names:
        race._start(name)
    sets = {name: about.get("instruction_set") for name, about in race.about.items()}
    assert sets == {"meshwright": "avx2", "engine": "avx2", "vllm": None}


def test_decode_that_reads_faster_than_the_read_stream_is_measured_again(bench: tuple[Any, Any]):
    serving, _ = bench
    speeds, seen = iter([130.0, 120.0, 90.0, *[150.0] * 4]), list[str]()
    stream = SimpleNamespace(measure=lambda: seen.append("stream") or 900.0)

    def generate(prompts: list[list[int]], tokens: int, seconds: float) -> SimpleNamespace:
        seen.append(repr(prompts[0][:8]))
        return SimpleNamespace(figures=lambda: {"decode_tokens_per_second": next(speeds)})

    race = SimpleNamespace(turn=lambda name, use, _: use(SimpleNamespace(generate=generate), 0))
    wave, share = serving.measure_decode(race, "m", stream, 9, seed=1)
    assert wave is not None and share.attempts == [1.3, 1.2, 0.9] and share.valid
    assert seen[::3] == seen[2::3] == ["stream"] * 3 and len(set(seen[1::3])) == 3  # no prompt twice
    _, never = serving.measure_decode(race, "m", stream, 9, seed=1)
    assert never.attempts == [1.5] * 4 and not never.valid
    assert serving.summarise_shares([share, never])["median"] == 0.9
    assert serving.summarise_shares([never])["median"] is None
    assert [each["valid"] for each in serving.summarise_shares([share, never])["rounds"]] == [True, False]


def test_a_turn_that_other_processes_disturb_is_repeated_and_the_least_disturbed_counts(
    bench: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    serving, _ = bench
    shares = iter([0.5, 0.2, 0.01, 0.4, 0.2, 0.3])
    meter = SimpleNamespace(begin=lambda: None, end=lambda: next(shares))
    monkeypatch.setattr(serving, "OtherLoad", lambda session: meter)
    monkeypatch.setattr(serving, "CACHE", tmp_path)
    race = serving.Race("m", "bf16", ["engine"], restart=False)
    race._alive["engine"] = SimpleNamespace(process=SimpleNamespace(pid=1), turn=nullcontext)

    def generate(contender: Any, attempt: int) -> Any:
        return serving.Wave(float(attempt), 1, [0.0], [1.0])

    quiet, disturbed = (race.turn("engine", generate, attempts) for attempts in (8, 3))
    assert (quiet.seconds, quiet.others) == (2.0, 0.01)  # the first that is not disturbed
    assert (disturbed.seconds, disturbed.others, disturbed.figures()["others"]) == (1.0, 0.2, 0.2)


def test_contenders_that_do_not_fit_together_run_one_at_a_time(
    bench: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    serving, peers = bench
    events = list[str]()

    class Fake(SimpleNamespace):
        def generate(self, prompts: list[list[int]], tokens: int, seconds: float) -> Any:
            if tokens == serving.TOKENS and (self.name, len(prompts)) == ("vllm", 32):
                raise peers.ContenderFailed(f"{tmp_path}/vllm ended")
            return serving.Wave(1.0, 1, [0.0], [1.0])

        def close(self) -> None:
            events.append(f"end {self.name}")

    def start(name: str) -> Any:
        events.append(f"start {name}")
        process = SimpleNamespace(pid=1)
        return Fake(
            name=name, process=process, turn=nullcontext, command=["x"], precision="", instruction_set="", settings={},
            ready_seconds=1.0, resident_bytes=lambda: 0,
        )  # fmt: skip

    names = ["engine", "vllm"]
    monkeypatch.setattr(serving, "STARTS", {name: lambda *_, name=name: start(name) for name in names})
    monkeypatch.setattr(serving, "CACHE", tmp_path)
    monkeypatch.setattr(serving, "ReadStream", lambda size: None)
    monkeypatch.setattr(serving, "MOST_OTHERS", 1.0)  # other tests run meanwhile
    monkeypatch.setattr(serving, "installed_version", lambda name: "1")
    race = serving.Race("m", "bf16", names, restart=True)
    waves, _ = serving.run_rounds(race, 2, (8, 32), float("inf"), bytes_per_token=4)
    race.close()
    turns = ("engine", "vllm", "vllm", "engine")  # one start for both concurrencies of a round
    assert events == [f"{event} {name}" for name in turns for event in ("start", "end")]
    assert {count: {name: len(each) for name, each in found.items()} for count, found in waves.items()} == {
        8: {"engine": 2, "vllm": 2},
        32: {"engine": 2, "vllm": 0},
    }
    assert race.failures == {"vllm": ["~/.cache/meshwright-bench/vllm ended"]}


def test_a_race_is_stored_beside_those_of_the_same_machine(
    bench: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    serving, common = importlib.import_module("serving"), importlib.import_module("common")
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    for cpu, model, dtype, value in (
        ("a", "other", "bf16", 1), ("b", "small", "bf16", 2), ("b", "small", "fp32", 3), ("b", "large", "bf16", 4),
        ("b", "small", "bf16", 5),
    ):  # fmt: skip
        monkeypatch.setattr(common, "machine", lambda cpu=cpu: {"cpu": cpu})
        serving.store_race("race", model, dtype, {"value": value})
    stored = json.loads((tmp_path / "race.json").read_text())
    assert stored["machine"] == {"cpu": "b"}
    assert stored["models"] == {
        "small": {"bf16": {"value": 5}, "fp32": {"value": 3}},
        "large": {"bf16": {"value": 4}},
    }


def test_parts_of_the_load_test_that_others_write_meanwhile_are_kept(
    bench: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    load, common = importlib.import_module("serving_load"), importlib.import_module("common")
    monkeypatch.setattr(common, "RESULTS", tmp_path)

    def run_part(name: str, options: Any) -> dict[str, Any]:
        common.write_result("load", {"parts": {"schema": {"passed": False}, "retries": {"passed": False}}}, quiet=True)
        return {"passed": True}

    monkeypatch.setattr(load, "run_part", run_part)
    monkeypatch.setattr(sys, "argv", ["serving_load.py", "--parts", "schema", "--name", "load"])
    load.main()
    parts = json.loads((tmp_path / "load.json").read_text())["parts"]
    assert {name: part["passed"] for name, part in parts.items()} == {"schema": True, "retries": False}
    assert set(parts["schema"]) == {"passed", "seconds", "date", "model", "dtype"}


def test_settings_of_a_contender_are_recorded_without_paths_of_the_machine(
    bench: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    serving, _ = bench
    monkeypatch.setattr(serving, "CACHE", tmp_path)
    monkeypatch.setattr(serving, "installed_version", lambda name: "1")
    contender = SimpleNamespace(
        precision="bf16", command=["x"], settings={"LD_PRELOAD": f"{tmp_path}/a.so:{tmp_path}/b.so", "blocks": 32},
        ready_seconds=1.0, resident_bytes=lambda: 0, generate=lambda *_: None,
    )  # fmt: skip
    monkeypatch.setattr(serving, "STARTS", {"vllm": lambda *_: contender})
    race = serving.Race("m", "bf16", ["vllm"], restart=False)
    race._start("vllm")
    cache = "~/.cache/meshwright-bench"
    assert race.about["vllm"]["settings"] == {"LD_PRELOAD": f"{cache}/a.so:{cache}/b.so", "blocks": 32}


def test_load_of_other_processes_leaves_out_the_own_ones(bench: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch):
    load = importlib.import_module("processor_load")
    busy, of_session, own = iter([100.0, 109.0]), iter([20.0, 23.0]), iter([5.0, 6.0])
    monkeypatch.setattr(load, "read_busy_seconds", lambda: next(busy))
    monkeypatch.setattr(load, "read_session_seconds", lambda session: next(of_session))
    monkeypatch.setattr(
        load, "os", SimpleNamespace(times=lambda: SimpleNamespace(user=next(own), system=0.0), cpu_count=lambda: 2)
    )
    monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=iter([0.0, 10.0]).__next__))
    meter = load.OtherLoad(7)
    meter.begin()
    assert meter.end() == meter.share == pytest.approx((9 - 3 - 1) / 10 / 2)


def test_processor_seconds_of_a_session_are_those_of_its_processes(bench: tuple[Any, Any]):
    """A lower bound of the machine's seconds and an equality of the session's: both hold on a crowded machine too."""
    load = importlib.import_module("processor_load")
    busy = load.read_busy_seconds()
    loop = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    command, pipe = [sys.executable, "-c", loop], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as other:
        assert other.stdout is not None
        other.stdout.readline()
        seconds = load.read_session_seconds(other.pid)
        other.communicate(b"\n")
    assert 0.25 <= seconds <= 0.45
    assert load.read_busy_seconds() - busy >= 0.25


def test_result_about_retries_needs_samples_and_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "bench"))
    judge = importlib.import_module("load_overload").judge_retries
    enough = judge([True] * 55 + [False] * 5, [(1.2, 1.0)] * 20)
    assert enough["passed"] and enough["share_that_succeed_at_first_retry"] == 0.9167
    few = judge([True] * 59, [(1.2, 1.0)] * 3)
    assert not few["passed"]
    assert few["verdict"] == "too few samples: 3 clients probed, 20 needed, 59 clients returned, 60 needed"
    for retried, waits in (([True] * 53 + [False] * 7, [(1.2, 1.0)] * 20), ([True] * 60, [(1.6, 1.0)] * 20)):
        assert (found := judge(retried, waits))["verdict"] == "share or ratio missed" and not found["passed"]
