"""Faults during a run: signals, a second run, a full disk. Each gives one line, the right exit code, and loses nothing.

Kills and damaged checkpoints: test_launcher_training.py and test_checkpoint_faults.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from meshwright.checkpoint import find_newest, verify_checkpoint
from meshwright.comm.local import LocalRanks
from tests.forked_commands import ForkedCommand
from tests.rank_processes import read_ranks
from tests.training import training_cases as cases

STEPS = 60  # long enough that a test acts while it runs, twice


def recipe(place: Path) -> str:
    return cases.recipe(place, "dp2 zero1 fp32", train_steps=STEPS, train_batch=4).to_toml()


def begin(place: Path, *words: str) -> ForkedCommand:
    """`meshwright train` as a terminal starts it, or `python WORDS...`: in its own process group."""
    (place / "recipe.toml").write_text(recipe(place))
    return ForkedCommand(words or ("-m", "meshwright", "train", "recipe.toml"), place)


def wait_until(condition: Callable[[], bool], running: ForkedCommand) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def last_step(place: Path) -> int:
    try:
        return max((line["step"] for line in cases.metrics(place)), default=0)
    except FileNotFoundError:
        return 0


def end(running: ForkedCommand, code: int) -> list[str]:
    """The lines on standard error of a command that ends with `code`."""
    output, errors = running.communicate(timeout=100)
    assert running.returncode == code, errors
    assert "Traceback" not in errors and "{" not in output
    return errors.splitlines()


def digests(checkpoint: Path) -> dict[str, str]:
    files = (file for file in checkpoint.rglob("*") if file.is_file())
    return {
        str(file.relative_to(checkpoint)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
        # These two contain the path of the run's directory, in the recipe.
        if file.name not in ("state.json", "manifest.json")
    }


@pytest.mark.slow
def test_run_stopped_by_signal_resumes_bit_for_bit(two, tmp_path, command_line):
    whole, place = tmp_path / "whole", tmp_path / "stopped"
    for path in (whole, place):
        path.mkdir()
    assert two.run(cases.train, recipe(whole))[0]["result"]["step"] == STEPS

    running = begin(place)
    wait_until(lambda: last_step(place) >= 3, running)
    ranks = read_ranks(place / "run").values()
    for process in ranks:  # a second command waits a second for the directory, in which they would take most steps
        os.kill(process, signal.SIGSTOP)
    second = command_line("train", place / "recipe.toml")  # while the first one runs
    for process in ranks:
        os.kill(process, signal.SIGCONT)
    assert second.code == 2 and second.output == ""
    assert (
        f"{place}/run is in use by process {running.pid} on {socket.gethostname()} since 20"
        in second.errors.splitlines()[-1]
    )
    os.kill(running.pid, signal.SIGTERM)
    asked = time.monotonic()
    line = end(running, 143)[-1]
    assert time.monotonic() - asked < 60
    step = find_newest(place / "run/checkpoints").step
    assert 3 < step < STEPS and last_step(place) == step
    assert line == f"meshwright: stopped by SIGTERM after saving step {step}; the same command resumes the run"

    running = begin(place)
    wait_until(lambda: last_step(place) >= step + 3, running)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to the whole group
    lines = end(running, 130)
    assert f"resumed from step-{step:06d}: {step} of {STEPS} steps are done" in lines
    step = find_newest(place / "run/checkpoints").step
    last = f"meshwright: stopped by an interrupt after saving step {step}; the same command resumes the run"
    assert lines[-1] == last and "" not in lines and not any("interrupt" in line for line in lines[:-1])

    assert f"resumed from step-{step:06d}: {step} of {STEPS} steps are done" in end(begin(place), 0)
    checkpoints = [path / f"run/checkpoints/step-{STEPS:06d}" for path in (whole, place)]
    assert digests(checkpoints[0]) == digests(checkpoints[1]) and len(digests(checkpoints[0])) > 6
    assert cases.trace(place) == cases.trace(whole)


SLOW_START = """
import runpy, sys, time
from meshwright.training import loop

loop.prepare = lambda *_, **__: time.sleep(100)
sys.argv = ["meshwright", "train", "recipe.toml"]
runpy.run_module("meshwright", run_name="__main__")
"""
"""The same command, whose ranks take long before their first step."""


def test_signal_before_first_step_ends_run_immediately(tmp_path):
    running = begin(tmp_path, "-c", SLOW_START)
    wait_until(lambda: (tmp_path / "run/ranks.json").exists(), running)
    ranks = json.loads((tmp_path / "run/ranks.json").read_text()).values()
    os.kill(running.pid, signal.SIGTERM)
    asked = time.monotonic()
    line = end(running, 143)[-1]
    assert time.monotonic() - asked < 60
    assert line == (
        "meshwright: stopped by SIGTERM before a checkpoint was due; "
        "there is no checkpoint yet: the same command starts from the beginning"
    )
    assert not any(Path(f"/proc/{process}").exists() for process in ranks)


@pytest.fixture
def small_disk(tmp_path):
    """A disk with space for about three checkpoints of these runs."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small disk is not permitted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_full_disk_loses_only_the_last_save(small_disk, tmp_path_factory):
    """Saves are due after steps 2, 4, 6, 8; the disk is full in steps 3 and 4 and from 7 on."""
    cache = str(tmp_path_factory.getbasetemp() / "full-disk-cache")
    recipe = cases.recipe(
        small_disk, "dp2 zero1 fp32", train_steps=8, checkpoint_every=2, checkpoint_keep=1, data_cache=cache
    )
    with LocalRanks(2) as ranks:
        outcomes = ranks.run(cases.train, recipe.to_toml(), 0, "disk_fills_and_empties")
        lines = outcomes[0]["said"]
        metrics = f"{small_disk}/run/metrics.jsonl cannot be written (no space left on device); its lines are kept"
        assert 1 <= sum(line.startswith(metrics) for line in lines) <= 2  # once for each time the disk was full
        failed = [line for line in lines if "training continues" in line]
        assert len(failed) == 1 and failed[0].startswith("checkpoint of step 4 not written: ")
        assert "no space left" in failed[0] and "the newest intact checkpoint is step-000002" in failed[0]
        for outcome in outcomes:
            assert outcome["error"].startswith("UserError: checkpoint of step 8 not written: ")
            assert outcome["error"].count("\n") == 0
            assert outcome["error"].endswith("the newest intact checkpoint is step-000006")
        directory = small_disk / "run/checkpoints"
        assert sorted(name for name in os.listdir(directory) if not name.startswith(".")) == ["step-000006"]
        assert verify_checkpoint(directory / "step-000006") == []
        steps = [line["step"] for line in cases.metrics(small_disk) if "loss" in line]
        assert steps == [*range(1, len(steps) + 1)] and len(steps) >= 6  # delayed records were written in the end

        (small_disk / "run/ballast").unlink()
        again = ranks.run(cases.train, recipe.to_toml())
        assert again[0]["error"] == "" and again[0]["result"]["step"] == 8
        steps = [line["step"] for line in cases.metrics(small_disk) if "loss" in line]
        assert steps == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("what", ["metrics.jsonl", "checkpoints"])
def test_foreign_run_directory_is_one_error_line(tmp_path, what):
    recipe = cases.recipe(tmp_path, "dp1 fp32", train_steps=2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / what).mkdir() if what == "metrics.jsonl" else (tmp_path / "run" / what).write_text("a file")
    from meshwright.errors import UserError

    with pytest.raises(UserError, match=what) as caught:
        outcome = cases.train(recipe.to_toml())
        raise UserError(outcome["error"])
    assert "\n" not in str(caught.value)
