"""Preparation survives kills at any time, damaged files and concurrent processes."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.data import prepare
from meshwright.recipe import DataRecipe
from tests.data.corpus import files, recipe, undisturbed

PROGRAM = """
import sys
from meshwright.data import prepare
from meshwright.recipe import DataRecipe
recipe = DataRecipe.model_validate_json(sys.stdin.read())
print("ready", flush=True)
prepare(recipe, log=lambda line: print(line, file=sys.stderr, flush=True))
"""


def start(data: DataRecipe, log: Path) -> subprocess.Popen[str]:
    """Start a process that prepares `data` and writes its log lines to the file `log`; return when it begins."""
    with log.open("w") as lines:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=lines, text=True
        )
    assert process.stdin and process.stdout
    process.stdin.write(data.model_dump_json())
    process.stdin.close()
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()
    return process


def test_preparation_killed_at_random_times_ends_with_same_bytes(corpus: Path, tmp_path: Path):
    expected = undisturbed("bpe")
    data = recipe(corpus, tmp_path, tokenizer="bpe")
    begun = time.perf_counter()
    prepare(recipe(corpus, tmp_path / "timed", tokenizer="bpe"))
    usual = time.perf_counter() - begun
    moments, kills = random.Random(1), 0
    for attempt in range(20):
        if attempt >= 2 and kills >= 2:
            break  # more attempts only if the measured time was unusual
        process = start(data, Path(os.devnull))
        time.sleep(moments.uniform(0, usual))
        process.send_signal(signal.SIGKILL)
        kills += process.wait(timeout=60) == -signal.SIGKILL
    assert kills >= 2
    prepare(data)
    assert {name: digest for name, digest in files(tmp_path).items() if not name.startswith("timed")} == expected


def prepare_and_die(data: DataRecipe, steps: int) -> None:
    """Prepare, but exit without clean-up just before disk operation number `steps` (sync, rename, removal ...)."""
    count = 0

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            count += 1
            if count > steps:
                os._exit(42)
            return call(*arguments, **keywords)

        return wrapped

    for name in ("fsync", "replace", "mkdir", "unlink", "rmdir"):
        setattr(os, name, dying(getattr(os, name)))
    prepare(data)


def test_preparation_killed_at_any_disk_operation_resumes_identically(corpus: Path, tmp_path: Path):
    expected = undisturbed("bytes")
    # Children of a server without threads: a fork of this process could hold locks that are never released.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["meshwright.data"])
    step, code, wounded = 0, 42, recipe(corpus, tmp_path / "wounded")
    while code == 42:
        # One cache that is hit by every kill, and a new one for some of the steps.
        fresh = [recipe(corpus, tmp_path / f"step {step}")] if step % 3 == 0 else []
        for data in (*fresh, wounded):
            process = context.Process(target=prepare_and_die, args=(data, step))
            process.start()
            process.join(60)
            code = process.exitcode or 0
            if data is not wounded:
                prepare(data)
                assert files(Path(data.cache or "")) == expected, f"killed before step {step}"
        step += 11 if step > 6 else 1
    prepare(wounded)
    assert files(tmp_path / "wounded") == expected
    assert step > 20


def test_finished_shard_is_not_rewritten(corpus: Path, tmp_path: Path):
    data = recipe(corpus, tmp_path)
    directory = prepare(data).directory
    (directory / "manifest.json").unlink()
    (directory / "train" / "00002.json").unlink()
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}
    prepare(data)
    changed = {path.name for path, when in before.items() if path.stat().st_mtime_ns != when}
    assert changed - {"lock"} == {"00002.tokens.bin", "00002.documents.npy"}


def damaged(path: Path, how: str) -> None:
    contents = bytearray(path.read_bytes())
    if how == "flipped":
        contents[len(contents) // 2] ^= 1
    path.unlink()
    if how != "missing":
        path.write_bytes(contents[: -1 if how == "cut" else None])


@pytest.mark.parametrize("how", ["cut", "missing", "flipped"])
@pytest.mark.parametrize(
    "name",
    ["train/00001.tokens.bin", "validation/00000.text.txt", "train/00000.documents.npy", "tokenizer/tokenizer.json"],
)
def test_damaged_file_is_logged_and_prepared_again(corpus: Path, tmp_path: Path, name: str, how: str):
    data = recipe(corpus, tmp_path)
    path = prepare(data).directory / name
    damaged(path, how)
    log: list[str] = []
    prepare(data, log=log.append, check=how == "flipped")
    problem = {"cut": "has", "missing": "is missing", "flipped": "is damaged"}[how]
    assert any(line.startswith(f"{path} {problem}") and line.endswith("preparing it again") for line in log)
    assert files(tmp_path) == undisturbed("bytes")


@pytest.mark.parametrize(
    "name", ["manifest.json", "survey.json", "survey.npy", "tokenizer.record.json", "train/00000.json"]
)
@pytest.mark.parametrize("how", ["cut", "missing"])
def test_damaged_records_are_rewritten(corpus: Path, tmp_path: Path, name: str, how: str):
    data = recipe(corpus, tmp_path)
    directory = prepare(data).directory
    damaged(directory / name, how)
    (directory / "manifest.json").unlink(missing_ok=True)
    prepare(data)
    assert files(tmp_path) == undisturbed("bytes")


def test_one_process_prepares_while_others_log_their_wait(corpus: Path, tmp_path: Path):
    data = recipe(corpus, tmp_path, tokenizer="bpe")
    directory = prepare(recipe(corpus, tmp_path / "elsewhere", tokenizer="bpe")).directory
    lock = tmp_path / directory.name / "lock"
    lock.parent.mkdir()
    hold = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); f.write('1234'); f.flush()"
    )
    program = f"{hold}; print(flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", program, str(lock)], stdout=subprocess.PIPE)
    assert holder.stdout
    holder.stdout.readline()

    alive: dict[str, bool] = {}

    def log(line: str) -> None:
        if not alive:
            alive[line] = holder.poll() is None
            threading.Timer(0.5, holder.kill).start()  # the kernel releases the lock of a killed process
            return
        try:  # the lock is released shortly before the killed process has ended
            holder.wait(timeout=5)
        except subprocess.TimeoutExpired:
            pass
        alive[line] = holder.poll() is None

    prepare(data, log=log)
    holder.wait()
    holder.stdout.close()
    waiting, *others = alive
    assert waiting == f"waiting for process 1234, which is preparing the same data in {lock.parent}"
    assert alive[waiting] and others and not any(alive[line] for line in others)


def test_four_concurrent_processes_prepare_once(corpus: Path, tmp_path: Path):
    logs = [tmp_path / f"{number}.log" for number in range(4)]
    processes = [start(recipe(corpus, tmp_path / "cache"), log) for log in logs]
    assert [process.wait(timeout=60) for process in processes] == [0] * 4
    assert files(tmp_path / "cache") == undisturbed("bytes")
    assert "".join(log.read_text() for log in logs).count("packed train") == 1
