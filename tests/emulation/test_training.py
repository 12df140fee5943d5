"""This engine's training runs on emulated ranks: the bits of gloo processes, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright.comm.local import LocalRanks
from meshwright.emulation.ranks import EmulatedRanks
from meshwright.errors import UserError
from meshwright.training import worker
from meshwright.training.api import Result
from tests.conftest import Outcome
from tests.training import training_cases as cases


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedRanks]:
    """Two emulated ranks that must not measure the machine."""
    monkeypatch.setattr(worker, "measure_run", lambda *_: pytest.fail("measured the machine"))
    with mw.emulate(2) as ranks:
        yield ranks


@pytest.mark.parametrize(("layout", "initialized"), [("dp4 fp32", True), ("tp2 pp2 mb2 fp32", False)])
def test_training_has_the_bits_of_processes(
    layout: str, initialized: bool, four: LocalRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker, "measure_run", lambda *_: pytest.fail("measured the machine"))
    changes = {"train_steps": 2, "train_validate_every": 2, "train_validation_sequences": 4}
    cases.run_without_error(four, tmp_path / "processes", layout, **changes)

    def train() -> Result:
        return mw.train(cases.recipe(tmp_path / "emulated", layout, **changes))

    with mw.emulate(4, initialized=initialized) as ranks:
        leader, *others = ranks.run(train)
        assert leader.step == 2 and [each.loss for each in others] == [None] * 3
    assert not torch.are_deterministic_algorithms_enabled()
    assert cases.trace(tmp_path / "emulated") == cases.trace(tmp_path / "processes")
    weights = [
        (tmp_path / where / "run/checkpoints/step-000002/model.safetensors").read_bytes()
        for where in ("emulated", "processes")
    ]
    assert weights[0] == weights[1]


def test_run_resumes_on_the_same_emulated_ranks(pair: EmulatedRanks, tmp_path: Path):
    def train(layout: str, steps: int) -> Result:
        return mw.train(cases.recipe(tmp_path, layout, train_steps=steps, train_schedule="constant"))

    pair.run(train, "dp2 fp32", 2)
    first = cases.trace(tmp_path)
    assert [step for step, *_ in first] == [1, 2]
    assert pair.run(train, "pp2 fp32", 3)[0].step == 3
    assert cases.trace(tmp_path)[:2] == first and cases.trace(tmp_path)[2][0] == 3


@pytest.mark.parametrize(
    ("layout", "changes", "reason"),
    [
        ("auto", {}, 'layout = "auto" is not emulated: give a layout'),
        ("dp2", {"collectives_all_reduce": "ring"}, r"\[collectives\] is not emulated"),
        ("dp2", {"train_profile": "2"}, "train.profile is not emulated"),
        ("dp4", {}, 'layout "dp4" needs 4 ranks, but 2 were started'),
    ],
)
def test_what_threads_lack_is_refused_before_data_are_prepared(
    layout: str, changes: dict[str, str], reason: str, pair: EmulatedRanks, tmp_path: Path
):
    recipe = cases.recipe(tmp_path / "place", layout, **changes)
    with pytest.raises(UserError, match=reason):
        pair.run(lambda: mw.train(recipe))
    assert not (tmp_path / "cache").exists()


SCRIPT = """
import sys, torch
import meshwright as mw
samples = [(torch.full((4,), number / 32), torch.tensor([number % 2.0])) for number in range(32)]
def loss(module, batch):
    inputs, targets = batch
    return torch.nn.functional.mse_loss(module(inputs), targets)
recipe = {"layout": "dp2", "train": {"steps": 2, "batch": 8, "learning_rate": 1e-2}, "run": {"directory": "runs/1"}}
result = mw.fit(lambda: torch.nn.Linear(4, 1), loss, samples, recipe=recipe, workers=int(sys.argv[1]))
print(result and result["step"])
"""


def test_fit_trains_without_worker_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Callable[..., Outcome]
):
    monkeypatch.chdir(tmp_path)
    Path("linear.py").write_text(SCRIPT)
    outcome = command_line("run", "--emulate", 2, "linear.py", 0)
    assert outcome.code == 0, outcome.errors
    assert sorted(outcome.output.splitlines()) == ["[rank 0] 2", "[rank 1] None"]
    assert "layout: dp2 fp32 on 2 emulated ranks x 1 thread\n" in outcome.errors
    outcome = command_line("run", "--emulate", 2, "linear.py", 1)
    assert (outcome.code, outcome.output) == (2, "")
    assert outcome.errors.splitlines() == [
        "meshwright: error: workers=1 is not emulated: an emulated rank starts no processes; use workers=0"
    ]
