"""A user's script on several ranks does the same under `meshwright run`, torchrun and alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.forked_commands import ForkedCommand

SCRIPT = """
import sys, time
import torch
from torch import nn
from meshwright.training.module import exit_codes, fit

generator = torch.Generator().manual_seed(0)
data = [(torch.randn(4, generator=generator), torch.tensor(number % 3)) for number in range(40)]
pause = float(sys.argv[1])

def build():
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 3))

def loss(module, batch):
    time.sleep(pause)
    return nn.functional.cross_entropy(module(batch[0]), batch[1])

with exit_codes():
    print("before")
    if "fault" in sys.argv:
        raise LookupError("of the script \x1b[2J")
    train = {"steps": 8, "batch": 8, "learning_rate": 0.01}
    recipe = {"layout": "dp2 zero3", "train": train, "checkpoint": {"every": 2}}
    result = fit(build, loss, data, recipe=recipe, overrides=sys.argv[2:])
    if result:
        print("loss", result["loss"])
"""
MESHWRIGHT = ("-m", "meshwright")
TORCHRUN = ("-m", "torch.distributed.run")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "classify.py").write_text(SCRIPT)
    return tmp_path


def outcome(place: Path, *words: object) -> tuple[int, str, str]:
    """Exit code, output and errors of `python WORDS...`, without loading torch anew."""
    process = ForkedCommand([*map(str, words)], place)
    output, errors = process.communicate(timeout=200)
    return process.wait(), output, errors


def executed(place: Path, *words: object) -> tuple[int, str, str]:
    """The same of a new Python."""
    ended = subprocess.run([sys.executable, *map(str, words)], cwd=place, capture_output=True, text=True, timeout=250)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """An undisturbed run of two ranks: its directory, output and errors."""
    place = tmp_path_factory.mktemp("whole")
    (place / "classify.py").write_text(SCRIPT)
    code, output, errors = outcome(place, *MESHWRIGHT, "run", "--ranks", 2, "--json", "classify.py", 0)
    assert code == 0, errors
    return place, output, errors


def losses(place: Path, run: str = "classify") -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (place / "runs" / run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def test_launcher_returns_result_of_last_fit(whole, place):
    document, errors = json.loads(whole[1]), whole[2]
    assert document["step"] == 8 and document["layout"] == "dp2 zero3 fp32" and document["schema"] == 1
    assert errors.count("before\n") == 2
    assert document["predicted"]["sent_bytes_per_step"] == document["measured"]["sent_bytes_per_step"]
    # On one rank, by python alone, the run resumes; one process cannot be two ranks.
    shutil.copytree(whole[0] / "runs", place / "runs")
    code, output, errors = outcome(place, "classify.py", 0, "layout=dp1 mb2", "train.steps=9")
    assert code == 0 and output.startswith("before\nloss ") and "resumed from step-000008" in errors
    assert [step for step, _ in losses(place)] == list(range(1, 10))
    code, output, errors = outcome(place, "classify.py", 0)
    line = errors.splitlines()[-1]
    assert code == 2 and line.startswith("meshwright: error: ") and "meshwright run --ranks 2 classify.py" in line


def test_mistake_is_one_line_and_script_fault_keeps_traceback(place, command_line, monkeypatch):
    monkeypatch.chdir(place)
    code, _, errors = outcome(place, *MESHWRIGHT, "run", "--ranks", 2, "classify.py", 0, "train.stepz=5")
    assert code == 2 and errors.strip().splitlines()[-1].startswith('meshwright: error: override "train.stepz=5"')
    code, _, errors = outcome(place, *MESHWRIGHT, "run", "classify.py", 0, "fault")
    assert code == 1 and "classify.py" in errors
    assert "LookupError: of the script \\x1b[2J" in errors and "\x1b" not in errors
    assert command_line("run", "nowhere.py").errors == "meshwright: error: script nowhere.py does not exist\n"
    assert not (place / "runs" / "nowhere").exists()


@pytest.mark.slow
def test_killed_and_stopped_script_resumes_bit_for_bit(whole, place):
    command = (*MESHWRIGHT, "run", "--ranks", 2, "classify.py", 0.3)
    run = place / "runs" / "classify"

    def after_step(step: int, number: signal.Signals, whom: str) -> tuple[int, str]:
        process = ForkedCommand([*map(str, command)], place)
        deadline = time.monotonic() + 120
        while not [*run.glob("checkpoints/*/manifest.json")] or losses(place)[-1][0] < step:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        ranks = json.loads((run / "ranks.json").read_text())
        os.kill(ranks["1"] if whom == "rank 1" else process.pid, number)
        errors = process.communicate(timeout=120)[1]
        return process.returncode, errors

    code, errors = after_step(3, signal.SIGKILL, "rank 1")
    assert code == 3 and "rank 1" in errors and "the same command resumes from step-00000" in errors
    code, errors = after_step(5, signal.SIGTERM, "launcher")
    assert code == 143 and "after saving step" in errors
    assert outcome(place, *command)[0] == 0
    assert losses(place) == losses(whole[0])


@pytest.mark.exhaustive
@pytest.mark.slow
def test_torchrun_gives_the_same_losses(whole, place):
    code, output, errors = executed(place, *TORCHRUN, "--standalone", "--nproc-per-node", 2, "classify.py", 0)
    assert code == 0 and output.count("loss ") == 1, errors
    assert losses(place) == losses(whole[0])


CLASSIFIER = REPOSITORY / "examples" / "bert_classifier.py"


def parse_accuracies(output: str) -> list[float]:
    """The classifier's accuracy and that of the most frequent class, in percent."""
    return [float(part.partition("%")[0]) for part in output.split(": ")[-2:]]


@pytest.mark.slow
def test_example_classifier_prints_accuracies(place):
    few = ("train.steps=8", "train.batch=8", "train.warmup=2", "train.validation_sequences=50")
    code, output, errors = outcome(place, *MESHWRIGHT, "run", "--ranks", 2, CLASSIFIER, *few, "checkpoint.every=8")
    assert code == 0 and all(0 <= share <= 100 for share in parse_accuracies(output)), errors


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "starter",
    [(*MESHWRIGHT, "run", "--ranks", 2), (*TORCHRUN, "--standalone", "--nproc-per-node", 2)],
    ids=["our launcher", "torchrun"],
)
def test_example_classifier_beats_majority_class(starter, place):
    faster = ("train.steps=160", "train.batch=32", "train.learning_rate=15e-4", "train.validation_sequences=500")
    once = ("train.validate_every=160", "checkpoint.every=160")
    code, output, errors = executed(place, *starter, CLASSIFIER, *faster, *once)
    assert code == 0, errors
    accuracy, most = parse_accuracies(output)
    assert accuracy > most + 10, output
