"""Threads of a process: their number, its origin, and the spin policy of libgomp."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright import threads
from meshwright.errors import UserError
from meshwright.limits import get_limit
from meshwright.threads import (
    are_threads_set_by_user,
    build_child_environment,
    check_local_threads,
    choose_threads,
    measure_busy_share,
    prepare_process,
    read_user_threads,
)


@pytest.mark.parametrize(("said", "count"), [("3", 3), ("4,2", 4), ("", None), ("0", None), ("many", None)])
def test_omp_num_threads_is_parsed_like_openmp(said, count):
    assert read_user_threads({"OMP_NUM_THREADS": said}) == count
    assert read_user_threads({}) is None


def test_the_default_of_torchrun_is_nobodys_choice():
    assert read_user_threads({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}) is None
    assert read_user_threads({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "x"}) == 2


def test_an_absurd_omp_num_threads_is_one_line(monkeypatch, command_line):
    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    outcome = command_line("generate", "nothing", "--prompt", "x")
    assert outcome.code == 2 and outcome.errors.count("\n") == 1
    assert "meshwright: error: OMP_NUM_THREADS 100000 is too large: at most 1,024 (" in outcome.errors
    with pytest.raises(UserError, match="OMP_NUM_THREADS 100000 is too large"):
        build_child_environment(2)


def test_spin_policy_is_set_unless_user_has_set_one():
    environment: dict[str, str] = {}
    prepare_process(environment)
    assert environment == threads.OPENMP_SPIN_POLICY
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        own = {name: "7"}
        prepare_process(own)
        assert own == {name: "7"}


@pytest.mark.skipif(sys.platform != "linux", reason="torch's wheels load libgomp on Linux alone")
def test_command_sets_spin_policy_before_torch_loads_libgomp(tmp_path):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    code = (
        "import sys; from meshwright.cli.main import main; assert 'torch' not in sys.modules; "
        "main(sys.argv[1:]); import torch"
    )
    command = [sys.executable, "-c", code, "generate", str(tmp_path), "--prompt", "x"]
    ended = subprocess.run(command, env=clean | {"OMP_DISPLAY_ENV": "verbose"}, capture_output=True, text=True)
    assert f"GOMP_SPINCOUNT = '{threads.OPENMP_SPIN_POLICY['GOMP_SPINCOUNT']}'" in ended.stderr


def test_a_child_has_the_policy_and_its_threads(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    found = build_child_environment(2)
    assert (
        found["OMP_NUM_THREADS"] == "2"
        and not are_threads_set_by_user(found)
        and threads.OPENMP_SPIN_POLICY.items() <= found.items()
    )
    assert build_child_environment()["OMP_NUM_THREADS"] == "5" and are_threads_set_by_user()
    assert are_threads_set_by_user({**found, "OMP_NUM_THREADS": "3"})  # changed afterwards
    assert "GOMP_SPINCOUNT" not in os.environ


def test_threads_share_cores_as_far_as_work_suffices(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    enough = threads.FLOPS_PER_THREAD
    assert [choose_threads(ranks, 16) for ranks in (1, 2, 3, 16, 64)] == [16, 8, 5, 1, 1]
    assert [choose_threads(1, 16, work * enough) for work in (0.1, 1.9, 2, 7.5, 1000)] == [1, 1, 2, 7, 16]
    assert choose_threads(8, 16, 1000 * enough) == 2
    assert choose_threads(1, 10_000) == get_limit("threads")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # the user's number
    assert choose_threads(8, 16, 0.1 * enough) == 3


def test_measured_cases_choose_the_second_thread_where_it_loses_least(monkeypatch):
    """Regret: log of the time over that of the better choice, over all cases of one rank, idle and busy."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    document = json.loads((Path(__file__).parents[1] / "bench/results/threads.json").read_text())
    cases = [case for case in document["cases"].values() if case["ranks"] == 1]
    assert len(cases) == 10

    def regret(choose: Callable[[float], int]) -> float:
        ratios = [
            (choose(case["layer_flops"]), times["2 threads, spin 1000"] / times["1 thread"])
            for case in cases
            for times in (case[state]["milliseconds_a_step"] for state in ("quiet", "busy"))
        ]
        return sum(math.log((ratio if count == 2 else 1) / min(1, ratio)) for count, ratio in ratios)

    ours = regret(lambda flops: choose_threads(1, 2, flops))
    for other in (0.0, *(case["layer_flops"] + 1 for case in cases)):
        assert ours <= regret(lambda flops, least=other: 1 + (flops >= least)) + 1e-9  # type: ignore[misc]


def test_threads_of_all_ranks_are_bounded(monkeypatch):
    monkeypatch.setattr(threads, "count_available_cores", lambda: 8)
    check_local_threads(64, 16)
    with pytest.raises(UserError, match=r"^64 ranks x 17 threads are more than the 1,024 threads allowed on this"):
        check_local_threads(64, 17)
    monkeypatch.setattr(threads, "count_available_cores", lambda: 512)
    check_local_threads(64, 17)


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        (
            "cpu  100 0 0 100 0 0 0 0",
            "cpu  130 10 10 140 10 0 0 0",
            0.5,
        ),  # 50 idle or on a disk, 50 busy
        ("cpu  100 0 0 100 0 0 0 0", "cpu  100 0 0 150 0 0 0 0", 0.0),
        ("cpu  100 0 0 100 0 0 0 0", "cpu  100 0 0 100 0 0 0 50", 1.0),  # steal time of the hypervisor
        ("cpu  100 0 0 100 0 0 0 0", "cpu  100 0 0 100 0 0 0 0", 0.0),  # no tick passed
        ("cpu  1 2", "cpu  1 2", 0.0),  # no Linux
    ],
)
def test_busy_share_is_that_of_ticks_that_are_not_idle(monkeypatch, before, after, share):
    class Stat:
        texts = iter([f"{before}\ncpu0 1 2 3\n", f"{after}\ncpu0 1 2 3\n"])

        def __init__(self, path: str) -> None:
            assert path == "/proc/stat"

        def read_text(self) -> str:
            return next(self.texts)

    monkeypatch.setattr(threads, "Path", Stat)
    assert measure_busy_share(0.0) == pytest.approx(share)
