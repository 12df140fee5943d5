"""Training killed and resumed from the command line: messages, exit codes, and the same result bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.forked_commands import ForkedCommand

RECIPE = """
layout = "dp2 zero1 fp32"
[run]
directory = "run"
[model]
family = "llama"
layers = 2
hidden = 32
heads = 4
kv_heads = 2
[data]
source = "../corpus.txt"
tokenizer = "bytes"
sequence = 32
cache = "../cache"
[train]
steps = 20
batch = 4
learning_rate = 1e-3
[checkpoint]
every = 1
"""


STARTED: list[ForkedCommand] = []


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("training")
    words = random.Random(0).choices(["alpha", "beta", "gamma", "delta", "epsilon"], k=30_000)
    lines = [" ".join(words[at : at + 10]) for at in range(0, len(words), 10)]
    (place / "corpus.txt").write_text("\n\n".join(lines) + "\n")
    yield place
    for running in STARTED:  # of a test that failed half-way
        running.kill()


def begin(directory: Path, *arguments: str) -> ForkedCommand:
    directory.mkdir(exist_ok=True, parents=True)
    (directory / "tiny.toml").write_text(RECIPE)
    running = ForkedCommand(("-m", "meshwright", "train", "tiny.toml", *arguments), directory)
    STARTED.append(running)
    return running


@pytest.fixture(scope="module")
def undisturbed(place) -> Path:
    """A run from beginning to end."""
    running = begin(place / "undisturbed", "--json")
    output, errors = running.communicate(timeout=200)
    assert running.returncode == 0, errors
    assert json.loads(output)["step"] == 20
    return place / "undisturbed"


def kill_rank(running: ForkedCommand, directory: Path, rank: int, when: Callable[[], bool]) -> int:
    """SIGKILL a rank once `when()` holds; return its process ID."""
    deadline = time.monotonic() + 60
    while not when():
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process = json.loads((directory / "run/ranks.json").read_text())[str(rank)]
    os.kill(process, signal.SIGKILL)
    return process


def last_step(directory: Path) -> int:
    try:
        lines = (directory / "run/metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return 0
    return max([json.loads(line).get("step", 0) for line in lines if line.endswith("\n")], default=0)


def digests(checkpoint: Path) -> dict[str, str]:
    files = (file for file in checkpoint.rglob("*") if file.is_file())
    return {str(file.relative_to(checkpoint)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.slow
def test_run_killed_in_step_and_save_resumes_bitwise(place, undisturbed):
    directory = place / "disturbed"
    running = begin(directory)
    killed = kill_rank(running, directory, 1, lambda: last_step(directory) >= 3)
    ended = time.monotonic()
    _, errors = running.communicate(timeout=200)
    assert running.returncode == 3 and time.monotonic() - ended < 60
    line = errors.strip().splitlines()[-1]
    assert line.startswith(f"meshwright: error: rank 1 (process {killed}) was killed by signal 9 (SIGKILL) after step ")
    assert "; the same command resumes from step-0000" in line

    before = last_step(directory)
    running = begin(directory, "--restarts", "1")
    partial = directory / "run/checkpoints"
    kill_rank(
        running,
        directory,
        0,
        lambda: last_step(directory) > before and any(name.endswith(".partial") for name in os.listdir(partial)),
    )
    _, errors = running.communicate(timeout=200)
    assert running.returncode == 0, errors
    assert "restarting (1 of 1)" in errors and errors.count("resumed from step-0000") >= 1

    expected = digests(undisturbed / "run/checkpoints/step-000020")
    assert digests(directory / "run/checkpoints/step-000020") == expected and len(expected) > 8


def test_damaged_checkpoint_is_skipped_with_one_line(undisturbed, tmp_path):
    directory = tmp_path / "copy" / "damaged"
    shutil.copytree(undisturbed, directory)
    for shared in ("corpus.txt", "cache"):
        (directory.parent / shared).symlink_to(undisturbed.parent / shared)
    file = directory / "run/checkpoints/step-000020/training/rank-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    running = begin(directory, "train.steps=21", "layout=dp1 fp32")
    _, errors = running.communicate(timeout=200)
    assert running.returncode == 0, errors
    assert "step-000020 is damaged and skipped: training/rank-00001-of-00002.safetensors was altered" in errors
    assert "resumed from step-000019" in errors
