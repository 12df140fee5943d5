"""Verification on one rank in this process: the trainer matches the reference; planted local faults are caught."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.checkpoint import Checkpointer
from meshwright.data.order import SampleOrder
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.model import experts, layers
from meshwright.spec.chunks import split_loss_chunks
from meshwright.spec.config import ModelConfig
from meshwright.spec.policy import TILE_QUERIES
from meshwright.spec.presets import preset
from meshwright.training import optimizer, trainer
from meshwright.verification.cases import Case, CaseBuilder, choose_other_layout
from meshwright.verification.compare import TOLERANCES, Comparison, compare
from meshwright.verification.local_faults import LOCAL_FAULTS, FaultCounter, LocalFault
from meshwright.verification.problem import Problem
from meshwright.verification.ranks import RankResult, StepRange, run_rank
from meshwright.verification.reference import Reference, compute_sample_index, learning_rate
from meshwright.verification.samples import make_sequences
from tests.verification.local_fault_names import NEEDS_RANKS

LAYOUT = Layout.parse("dp1 mb2")


def maker(model: str = "llama-3-8b", layout: Layout = LAYOUT, **changes: Any) -> CaseBuilder:
    config: ModelConfig = dataclasses.replace(preset(model), **changes)
    return CaseBuilder(layout, config)


@cache
def reference(problem: Problem) -> Reference:
    return Reference(problem)


def run(problem: Problem, directory: Path, fault: LocalFault | None = None) -> tuple[RankResult, Comparison]:
    """Train a problem on one rank, with a fault if given; return its results and their comparison."""
    (result,) = run_rank(problem, str(LAYOUT), None, [fault], str(directory))
    return result, compare(reference(problem), [result], LAYOUT)


PROBLEMS = {
    "updates": maker().make_update_problem(layers=2),
    "momentum": maker().make_momentum_problem(),
    "dtypes": maker().make_dtype_problem(),
    "long sequences": maker().make_long_sequence_problem(),
}


# --- correct training passes


COMPILING = dataclasses.replace(maker(), compiled=True)
CASES = [each.name for each in COMPILING.make_all_cases() if each.resume_layout is None]
SLOW = ("loss chunks", "compiled by inductor")


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[pytest.mark.exhaustive] if name in SLOW else []) for name in CASES],
)
def test_trainer_matches_one_device(case: str, tmp_path: Path):
    (problem,) = (each.problem for each in COMPILING.make_all_cases() if each.name == case)
    _, found = run(problem, tmp_path)
    assert found.passed, found.failure
    assert found.worst_error < TOLERANCES[problem.dtype]
    assert found.worst_error > 1e-17, "nothing was compared"


def test_float32_rounding_stays_below_the_tolerance_in_a_deep_model_with_post_norms(tmp_path: Path):
    deep = CaseBuilder(Layout.parse("pp5:v-min mb3"), preset("glm4-tiny")).make_dtype_problem()
    assert deep.config.layers == 11
    _, found = run(dataclasses.replace(deep, batch=4), tmp_path)
    assert found.passed, found.failure
    assert found.worst_error < TOLERANCES["float32"] / 2


def test_float32_case_passes(tmp_path: Path):
    """With SGD instead of AdamW, and a constant loss scale."""
    problem = CaseBuilder(LAYOUT, preset("gpt2"), "float32").make_update_problem(layers=2)
    assert problem.training.optimizer == "sgd" and problem.training.loss_scale_every == 0
    assert run(problem, tmp_path)[1].failure is None


def test_run_resumed_on_another_layout_matches_one_device(tmp_path: Path):
    problem, other = maker().make_update_problem(), choose_other_layout(LAYOUT)
    assert other != LAYOUT and problem.resumed_at == (2, 3)
    for layout, span in ((LAYOUT, StepRange(0, 3)), (other, StepRange(3))):
        (result,) = run_rank(problem, str(layout), None, [None], str(tmp_path), span)
        found = compare(reference(problem), [result], layout)
        assert found.passed and sorted(result.steps) == list(range(span.first, span.stop or 4)), found.failure


# --- restored state


@pytest.mark.parametrize("key", ["skipped_in_a_row", "threads", "data_sha256"])
def test_resume_compares_every_key_of_the_state(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The resumed trainer's state must equal the saved state in every key."""
    problem, right, calls = PROBLEMS["updates"], trainer.Trainer.state, iter(range(100))
    monkeypatch.setattr(trainer.Trainer, "state", lambda self: {**right(self), key: f"changed {next(calls)}"})
    (result,) = run_rank(problem, str(LAYOUT), None, [None], str(tmp_path))
    assert [text.partition(" is ")[0] for text in result.not_restored] == [key, key]
    result.counters = {steps: reference(problem).compute_expected_counters(steps) for steps in result.counters}
    assert str(compare(reference(problem), [result], LAYOUT).failure).startswith(f"{key} is changed")


def test_wrong_counters_in_checkpoint_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A wrong value is restored as saved, so it must be compared with the reference."""
    right = trainer.Trainer.state
    monkeypatch.setattr(trainer.Trainer, "state", lambda self: {**right(self), "skipped_in_a_row": 0})
    result, found = run(PROBLEMS["updates"], tmp_path)
    assert result.not_restored == [] and found.failure == "skipped_in_a_row is 0 after 2 steps, not 1"


def test_checkpoints_are_saved_with_every_counter_nonzero():
    right, problem = reference(PROBLEMS["updates"]), PROBLEMS["updates"]
    saved = [right.compute_expected_counters(steps) for steps in problem.resumed_at]
    assert any(each["skipped_in_a_row"] for each in saved) and any(each["loss_scale"]["finite_steps"] for each in saved)
    assert right.compute_expected_counters(problem.steps)["loss_scale"]["value"] != saved[-1]["loss_scale"]["value"]


def test_failed_or_missing_checkpoint_is_one_error_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Checkpointer, "failed", lambda self: "no space left on device")
    line = f"verify cannot save its checkpoint in {tmp_path}: no space left on device"
    with pytest.raises(UserError, match=re.escape(line)):
        run_rank(PROBLEMS["updates"], str(LAYOUT), None, [None], str(tmp_path))
    monkeypatch.undo()
    monkeypatch.setattr(Checkpointer, "save", lambda *arguments, **options: None)
    with pytest.raises(UserError, match="verify cannot load its checkpoint: none found in"):
        run_rank(PROBLEMS["updates"], str(LAYOUT), None, [None], str(tmp_path / "other"))


# --- planted faults are caught


@pytest.mark.parametrize("name", LOCAL_FAULTS)
def test_fault_in_local_code_is_caught(name: str, tmp_path: Path):
    result, found = run(PROBLEMS[LOCAL_FAULTS[name].case], tmp_path, LocalFault(name))
    assert (result.affected_calls == 0) == (name in NEEDS_RANKS)
    assert found.passed == (name in NEEDS_RANKS), found.failure


def test_wrong_momentum_is_caught_in_float32(tmp_path: Path):
    problem = CaseBuilder(LAYOUT, preset("llama-3-8b"), "float32").make_momentum_problem()
    assert run(problem, tmp_path)[1].passed
    result, found = run(problem, tmp_path, LocalFault("SGD momentum without decay"))
    assert result.affected_calls and not found.passed


@pytest.mark.parametrize("trainable", [True, False])
def test_decay_fault_changes_only_shards_that_the_optimizer_updates(trainable: bool):
    counter, unit = FaultCounter(), SimpleNamespace(trainable=trainable, decay_numel=4, start=0, stop=8)
    unit.flat = SimpleNamespace(find_slices=lambda start, stop: [(None, start, stop)])
    LOCAL_FAULTS["weight-decay range one element too long"].wrong(counter, lambda unit: None, unit)
    assert (unit.decay_numel, counter.count) == (5, trainable)


def test_fault_counter_recognises_only_identical_objects():
    """Each object is freed before the next is created, which may get the same id."""
    strikes = FaultCounter()
    assert not any(strikes.has_seen([]) for _ in range(50))
    kept: list[int] = []
    assert not strikes.has_seen(kept) and strikes.has_seen(kept)


def mutant(owner: Any, name: str, wrong: Any) -> Any:
    return pytest.param(owner, name, wrong, id=f"{getattr(owner, '__name__', owner)}.{name}")


def _detached_choice(self: experts.Router, scores_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights_TK, chosen_TK = RIGHT_CHOICE(self, scores_TE)
    return weights_TK.detach(), chosen_TK


def _detached_norm(self: layers.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)
    return x * scale.detach() * self.weight


@cache
def passes(problem: Problem) -> bool:
    """Return True if a problem without fault passes; each is run once."""
    with tempfile.TemporaryDirectory() as directory:
        return run(problem, Path(directory))[1].passed


RIGHT_CHOICE = experts.Router.choose
RIGHT_SGD = optimizer.sgd


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        mutant(experts.Router, "choose", _detached_choice),
        mutant(layers.RMSNorm, "forward", _detached_norm),
        mutant(trainer.Trainer, "_discard_step", lambda self: self.optimizer.restore_step_count(9)),
        mutant(optimizer, "sgd", lambda *tensors, **options: RIGHT_SGD(*tensors, **options | {"weight_decay": 0.0})),
    ],
)
def test_fault_common_to_all_layouts_is_caught(
    owner: Any, name: str, wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The reference shares no module with the engine, so a fault in a module affects the engine alone."""
    mixture = maker("mixtral-8x7b-v0.1")
    problem = mixture.make_long_sequence_problem() if owner is optimizer else mixture.make_update_problem(layers=2)
    assert passes(problem)
    monkeypatch.setattr(owner, name, wrong)
    assert not run(problem, tmp_path)[1].passed


def test_fault_of_compiled_code_alone_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A compiler whose code is wrong by little: only the step that compiles calls it."""

    def miscompile(function: Any, **options: Any) -> Any:
        def wrong(*arguments: Any) -> Any:
            out = function(*arguments)
            return (out[0] * (1 + 1e-6), *out[1:]) if isinstance(out, tuple) else out

        return wrong

    monkeypatch.setattr(torch, "compile", miscompile)
    compiled = COMPILING.make_default_cases()[-1].problem
    assert not run(compiled, tmp_path)[1].passed
    assert run(dataclasses.replace(compiled, compile_backend=None), tmp_path)[1].passed


def test_compiled_case_refuses_to_run_eagerly(tmp_path: Path):
    """After its limit of graphs of one function, torch runs that function eagerly."""
    import torch._dynamo

    # Not monkeypatch, whose end deletes an attribute that it does not find in the module's __dict__.
    with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(Exception, match="recompile_limit"):
        run(COMPILING.make_compiled_case("eager").problem, tmp_path)


# --- properties of the problems


def test_clipping_is_active_in_exactly_one_case():
    updates, long = reference(maker().make_update_problem()), reference(PROBLEMS["long sequences"])
    assert all(norm > 2 * updates.problem.training.clip > 0 for norm in updates.norms)
    assert all(0 < norm < long.problem.training.clip for norm in long.norms)


def test_steps_cross_epoch_end_and_change_loss_scale():
    problem = maker().make_update_problem()
    assert 2 * problem.batch < problem.train_sequences < 3 * problem.batch
    assert len(set(reference(problem).scales)) > 1 and len(set(reference(problem).losses)) == problem.steps


@pytest.mark.parametrize("layout", ["dp1", "cp2", "cp4", "dp2 tp2 cp2:ulysses"])
def test_long_sequences_span_several_tiles_and_document_counts(layout: str):
    problem = maker(layout=Layout.parse(layout)).make_long_sequence_problem()
    parsed = Layout.parse(layout)
    piece = problem.sequence // (2 * parsed.cp) if parsed.cp_method == "ring" and parsed.cp > 1 else problem.sequence
    assert piece > TILE_QUERIES
    numbers = [compute_sample_index(number, problem.train_sequences, problem.seed) for number in range(problem.batch)]
    batch = make_sequences(problem, numbers)
    counted = [ids for ids, targets in zip(batch.document_ids, batch.targets, strict=True) if (targets >= 0).any()]
    documents = [int(ids.max()) + 1 for ids in counted]
    assert 1 in documents and max(documents) > 10


def test_large_vocabulary_loss_uses_several_chunks():
    for layout in (LAYOUT, Layout.parse("tp2"), Layout.parse("cp2 tp2")):
        problem = maker(layout=layout).make_loss_chunk_problem()
        tokens = problem.sequence // layout.cp
        assert len(split_loss_chunks(tokens, -(-problem.config.vocabulary // layout.tp), "cpu")) > 1


def test_reference_order_and_learning_rates_match_documentation():
    order = SampleOrder(11, 19)
    assert order.sample(range(60)).tolist() == [compute_sample_index(number, 19, 11) for number in range(60)]
    for schedule, warmup in (("constant", 0), ("linear", 2), ("cosine", 1)):
        training = dataclasses.replace(PROBLEMS["updates"].training, schedule=schedule, warmup=warmup)
        recipe = dataclasses.replace(PROBLEMS["updates"], training=training, steps=7).make_recipe(LAYOUT)
        for step in range(7):
            assert learning_rate(step, 7, training) == pytest.approx(trainer.learning_rate(step, recipe.train))


def test_every_case_has_unique_name():
    cases: list[Case] = maker().make_all_cases()
    assert len({case.name for case in cases}) == len(cases) == 7
