"""The launcher: ranks start and end together, and their end is reported by one line and the right exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshwright.errors import CheckFailed, RankLost, Terminated, UserError
from meshwright.launcher import launcher
from meshwright.launcher.launcher import LaunchSpec, RankFault, launch
from meshwright.launcher.rendezvous import STOPS_ONCE
from meshwright.launcher.started_rank import start_rank
from meshwright.threads import build_child_environment, count_available_cores
from tests.training.launcher_ranks import COMMAND, ROOT


def start(directory: Path, case: str, ranks: int = 2, log: list[str] | None = None, **options):
    lines = log if log is not None else []
    return launch(LaunchSpec({"case": case}, ranks, directory, command=COMMAND, log=lines.append, **options))


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def processes(directory: Path) -> list[int]:
    return [*json.loads((directory / "ranks.json").read_text()).values()]


def test_launcher_returns_result_of_rank_0(tmp_path, capfd):
    (tmp_path / "other").touch()  # ranks.json alone would be removed, as after a failed start
    result = start(tmp_path, "tell", ranks=3)
    assert (result["rank"], result["ranks"]) == (0, 3) and len(result["long"]) == 300_000
    assert result["threads"] == max(1, count_available_cores() // 3)
    assert result["spin"] == build_child_environment()["GOMP_SPINCOUNT"]
    written = json.loads((tmp_path / "ranks.json").read_text())
    assert list(written) == ["0", "1", "2"] and written["0"] == result["process"]
    assert result["group"] == os.getpgid(0)  # children stay in the launcher's process group
    output, errors = capfd.readouterr()
    assert output == "" and "something on standard output" in errors


def test_recipe_sets_threads_and_rendezvous(tmp_path):
    result = start(tmp_path, "tell", threads=5, rendezvous_url="tcp://127.0.0.1:1")
    assert result["threads"] == 5 and result["method"] == "tcp://127.0.0.1:1"


def test_killed_rank_ends_others_within_seconds_and_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 16}\n{"step": 17, "loss": 2.0}\n{"event": "x"}\n{"st')
    begun = time.monotonic()
    with pytest.raises(RankLost) as caught:
        start(tmp_path, "rank 1 is killed", ranks=3)
    assert time.monotonic() - begun < 40, "the others would have slept for a minute"
    dead = processes(tmp_path)[1]
    assert str(caught.value) == (
        f"rank 1 (process {dead}) was killed by signal 9 (SIGKILL) after step 17; "
        "there is no checkpoint yet: the same command starts from the beginning"
    )
    assert caught.value.exit_code == 3
    assert not any(map(alive, processes(tmp_path)))


def test_failing_rank_is_named_instead_of_ranks_it_abandoned(tmp_path):
    with pytest.raises(RankLost, match=r"^rank 1 \(process \d+\) was killed by signal 9"):
        start(tmp_path, "rank 1 is killed and the others notice", ranks=3)
    with pytest.raises(RankLost, match=r"^rank 2 \(process \d+\) ended with exit code 7 and no report"):
        start(tmp_path, "rank 2 exits", ranks=3)


def test_abandoned_rank_is_reported_without_other_evidence(tmp_path):
    with pytest.raises(RankLost, match=r"^rank 0 was left alone in data.gradients; there is no checkpoint yet"):
        start(tmp_path, "left alone")


def test_missing_rank_prints_its_stack_while_alive(tmp_path):
    log: list[str] = []
    with pytest.raises(RankLost, match=r"^rank 0 has not entered call 1 of ranks 0,1 \(all_reduce data.gradients over"):
        start(tmp_path, "rank 0 is elsewhere", log=log)
    assert log == [f"full report: {tmp_path / 'rank-lost.txt'}"]
    assert re.search(
        r"stack, innermost frame first:\n +File .*launcher_ranks.py\", line \d+ in case_rank_0_is_else",
        (tmp_path / "rank-lost.txt").read_text(),
    )


def test_hang_of_a_device_is_reported_though_the_host_is_stuck(tmp_path):
    begun = time.monotonic()
    with pytest.raises(
        RankLost, match=r"^rank 1 has not entered call 1 of .*, where rank 0 has been waiting for 0\.\d s"
    ):
        start(tmp_path, "device of rank 0 hangs")
    assert time.monotonic() - begun < 30, "both would have slept for a minute"
    report = (tmp_path / "rank-lost.txt").read_text()
    assert re.search(r"  rank 0 \(process \d+, timed out\): has been waiting for .* in call 1 of", report), report


def test_stopped_waiting_rank_without_report_is_still_named(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(launcher, "STOPPED_SECONDS", 0.2)
    with pytest.raises(RankLost, match=r"^rank 0 has not entered call 1 of .*, where rank 1 has been waiting for"):
        start(tmp_path, "stopped in a call", collective_timeout=0.5)
    assert re.search(r"rank 1 \(process \d+, stopped \(state T\)\): has been", (tmp_path / "rank-lost.txt").read_text())
    assert not any(map(alive, processes(tmp_path)))


def test_stopped_rank_outside_calls_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(launcher, "STOPPED_SECONDS", 0.2)
    begun = time.monotonic()
    with pytest.raises(
        RankLost, match=r"^rank 0 is stopped \(state T\), in no call; its last completed call was call 1 \(all_reduce"
    ):
        start(tmp_path, "stopped outside calls", collective_timeout=0.5)
    assert time.monotonic() - begun < 40, "rank 1 would have slept for a minute"
    assert not any(map(alive, processes(tmp_path)))


def test_user_error_on_all_ranks_is_reported_once(tmp_path, capfd):
    with pytest.raises(UserError, match="^data.source: no such file: corpus.txt$") as caught:
        start(tmp_path, "user error", ranks=3)
    assert caught.value.exit_code == 2
    assert capfd.readouterr().err == ""
    with pytest.raises(CheckFailed, match="11 steps"):
        start(tmp_path, "check failed")


def test_fault_shows_traceback_of_first_failing_rank(tmp_path, capfd):
    with pytest.raises(RankFault, match=r"rank 1 \(process \d+\) failed before the first step:") as caught:
        start(tmp_path, "fault on rank 1")
    text = str(caught.value)
    assert "ZeroDivisionError: the cause" in text and "in case_fault_on_rank_1" in text and "consequence" not in text
    assert capfd.readouterr().err == ""


def test_restarts_continue_until_run_succeeds(tmp_path):
    log: list[str] = []
    assert start(tmp_path, "die twice", log=log, restarts=3) == {"deaths": 2}
    assert len(log) == 2 and log[1].endswith("restarting (2 of 3)") and "(SIGKILL)" in log[1]
    (tmp_path / "deaths").unlink()
    with pytest.raises(RankLost):
        start(tmp_path, "die twice", restarts=1)


def test_user_error_is_not_retried(tmp_path):
    log: list[str] = []
    with pytest.raises(UserError):
        start(tmp_path, "user error", log=log, restarts=3)
    assert log == []


def test_rendezvous_file_is_removed_afterwards(tmp_path):
    result = start(tmp_path, "meet", ranks=2)
    assert result["sum"] == 3.0 and result["method"].startswith("file://")
    assert not Path(result["method"].removeprefix("file://")).parent.exists()


# --- a launcher in its own process, which then gets a signal

LAUNCHER = f"""
import sys; sys.path.insert(0, {ROOT!r})
from pathlib import Path
from meshwright.errors import MeshwrightError
from meshwright.launcher.launcher import LaunchSpec, launch
from tests.training.launcher_ranks import COMMAND
try:
    print(launch(LaunchSpec({{"case": sys.argv[2]}}, 2, Path(sys.argv[1]), command=COMMAND)))
except MeshwrightError as error:
    print(error)
    sys.exit(error.exit_code)
except KeyboardInterrupt:
    sys.exit(130)
"""


@contextmanager
def start_apart(directory: Path, case: str) -> Iterator[subprocess.Popen]:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(directory), case],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(lambda: all((directory / f"ready-{rank}").exists() for rank in range(2)))
        yield launcher
    finally:
        launcher.kill()
        launcher.communicate()


def test_time_limit_of_a_start_ends_ranks(tmp_path):
    (tmp_path / "other").touch()  # ranks.json alone would be removed, as after a failed start
    with pytest.raises(RankLost, match=r"^not finished after 0\.5 s$"):
        start(tmp_path, "never ends", limit_seconds=0.5)
    wait_for(lambda: not any(map(alive, processes(tmp_path))))


@pytest.mark.parametrize("to", ["launcher", "group"])
def test_sigterm_lets_all_ranks_save_and_ends_with_143(tmp_path, to):
    with start_apart(tmp_path, "save on sigterm") as launcher:
        os.kill(launcher.pid, signal.SIGTERM) if to == "launcher" else os.killpg(launcher.pid, signal.SIGTERM)
        assert launcher.communicate(timeout=100)[0] == "stopped by SIGTERM after saving step 40\n"
    assert launcher.returncode == Terminated.exit_code == 143
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()


def test_sigterm_before_first_step_ends_run_immediately(tmp_path):
    with start_apart(tmp_path, "still loading") as launcher:
        os.kill(launcher.pid, signal.SIGTERM)
        line = launcher.communicate(timeout=100)[0]
        assert line.startswith("stopped by SIGTERM before a checkpoint was due; there is no checkpoint yet: the same")
    assert launcher.returncode == 143


def test_terminal_interrupt_saves_and_exits_130(tmp_path):
    with start_apart(tmp_path, "save on sigterm") as launcher:
        os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does: to the whole group
        launcher.communicate(timeout=100)
    assert launcher.returncode == 130
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()


def test_second_sigterm_kills_ranks(tmp_path):
    with start_apart(tmp_path, "never end") as launcher:
        os.kill(launcher.pid, signal.SIGTERM)
        time.sleep(0.3)
        assert launcher.poll() is None  # a save may take long
        os.kill(launcher.pid, signal.SIGTERM)
        launcher.communicate(timeout=100)
    assert launcher.returncode == 143
    assert not any(map(alive, processes(tmp_path)))


def test_second_sigterm_is_ignored_where_another_process_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv(STOPS_ONCE, "1")
    with start_apart(tmp_path, "never end") as launcher:
        for _ in range(2):
            os.kill(launcher.pid, signal.SIGTERM)
            time.sleep(0.3)
        assert launcher.poll() is None and all(map(alive, processes(tmp_path)))


def test_killed_launcher_ends_its_ranks_and_frees_directory(tmp_path):
    with start_apart(tmp_path, "never end") as launcher:
        ranks = processes(tmp_path)
        assert all(map(alive, ranks))
        launcher.kill()
    wait_for(lambda: not any(map(alive, ranks)))
    assert start(tmp_path, "tell")["rank"] == 0


def test_second_run_in_same_directory_ends_with_one_line(tmp_path):
    with start_apart(tmp_path, "never end") as launcher:
        with pytest.raises(UserError) as caught:
            start(tmp_path, "tell")
        assert f"{tmp_path} is in use by process {launcher.pid} on {socket.gethostname()} since 20" in str(caught.value)
        assert caught.value.exit_code == 2
        assert all(map(alive, processes(tmp_path)))  # of the first launcher
        os.kill(processes(tmp_path)[0], signal.SIGKILL)
        assert "rank 0 (process" in launcher.communicate(timeout=100)[0]
    assert launcher.returncode == 3


def test_failed_rank_start_leaves_no_open_file_descriptors(tmp_path):
    before = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        start_rank(0, 1, {}, [str(tmp_path / "nothing")], 1, [])
    assert os.listdir("/proc/self/fd") == before
