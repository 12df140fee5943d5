"""Process of one rank of a layout under verification: runs the real trainer on a synthetic problem and returns its
results."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch

from meshwright.checkpoint import Checkpointer, SaveOptions
from meshwright.collectives.named import load_named_programs
from meshwright.comm.faults import Fault
from meshwright.comm.mesh import Mesh
from meshwright.data import PreparedData
from meshwright.errors import RanksDisagree, UserError
from meshwright.layout import Layout
from meshwright.model.transformer import Transformer
from meshwright.monitoring.records import StepOutcome
from meshwright.parallel.flat_buffers import TensorSlice
from meshwright.recipe import CollectivesRecipe
from meshwright.spec.policy import FUSED_ACCUMULATION_MIN_NUMEL
from meshwright.training.distillation import Distillation
from meshwright.training.language_model import LanguageModelTask
from meshwright.training.loss_scale import LossScale
from meshwright.training.precision import Arithmetic
from meshwright.training.preference import Preferences
from meshwright.training.teacher import Teacher
from meshwright.training.trainer import Trainer
from meshwright.verification.late_completion import complete_late
from meshwright.verification.local_faults import LocalFault
from meshwright.verification.problem import Problem
from meshwright.verification.samples import MAX_PAIRS, SyntheticData
from meshwright.verification.tensor_pickle import pickle_with_tensors

COMPILING_SECONDS = 600.0
"""Time limit of a collective while other ranks may be compiling, on a busy machine."""
COUNTERS = ("step", "samples", "optimizer_steps", "skipped_steps", "skipped_in_a_row", "loss_scale")


@dataclass
class StepResult:
    """Results of one training step on one rank.

    Attributes:
        loss, norm: Global loss (nats per loss term) and global gradient norm.
        scale: Loss scale.
        gradients: This rank's slices of the gradients before clipping.
        weights: This rank's slices of the master weights after the update."""

    loss: float
    norm: float
    scale: float
    gradients: list[TensorSlice]
    weights: list[TensorSlice]


@dataclass
class RankResult:
    """All results of one rank's training run.

    Attributes:
        steps: {step (from 0): its results}.
        optimizer, parameters, final_loss: Optimizer state, unsharded parameters and validation loss after the last
            step.
        counters: {number of steps done: checkpoint counters by name}.
        not_restored: Lines on differences between the state saved in a checkpoint and the state of the trainer that
            resumed from this checkpoint.
        calls_first_step, calls: Records of the collective calls of the first step and of all steps.
        affected_calls: Number of values that the planted fault changed.
        refused: Error message if the training itself detected the fault; else None.
    """

    steps: dict[int, StepResult] = field(default_factory=dict)
    optimizer: list[TensorSlice] = field(default_factory=list)
    parameters: list[TensorSlice] = field(default_factory=list)
    counters: dict[int, dict[str, Any]] = field(default_factory=dict)
    not_restored: list[str] = field(default_factory=list)
    final_loss: float = math.nan
    calls_first_step: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    affected_calls: int = 0
    refused: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to rebuild the result from a pickle: its tensors are pickled as NumPy arrays."""
        return _unpickle_result, (pickle_with_tensors(vars(self)),)


def _unpickle_result(data: bytes) -> RankResult:
    """Rebuild a result from `data`, the pickle of its fields."""
    return RankResult(**pickle.loads(data))


@dataclass(frozen=True)
class StepRange:
    """Range of training steps [first, stop), counted from 0. first: first step; if it is not 0, the run begins by
    loading the checkpoint saved after this number of steps. stop: number of steps after which a checkpoint is saved and
    the run ends; None: the run continues to the last step and saves no checkpoint at its end."""

    first: int = 0
    stop: int | None = None


WHOLE = StepRange()


def run_rank(
    problem: Problem,
    layout_text: str,
    collectives: CollectivesRecipe | None = None,
    faults: Sequence[Fault | LocalFault | None] = (None,),
    directory: str | None = None,
    span: StepRange = WHOLE,
) -> list[RankResult]:
    """Train on this rank once for each of `faults`, all in one mesh; return one result for each.

    problem: model, data and optimizer. layout_text: layout notation. collectives: the recipe's choice of collective
    algorithms; None: the defaults. faults: deliberate bug to plant in each run; an entry None: no bug. directory:
    directory for checkpoints; required if the problem is resumed in the middle, or `span` ends with a save or begins
    with a load. span: training steps to run.
    """
    layout = Layout.parse(layout_text)
    programs = load_named_programs(collectives or CollectivesRecipe(), layout)
    backend = problem.compile_backend
    mesh = Mesh.create(layout, timeout_seconds=60.0 if backend is None else COMPILING_SECONDS, programs=programs)
    try:
        results = []
        for number, fault in enumerate(faults):
            planted = fault.plant() if isinstance(fault, LocalFault) else nullcontext()
            mesh.inject(None if isinstance(fault, LocalFault) else fault)
            mesh.record.clear()
            subdirectory = None if directory is None else Path(directory) / (str(number) if fault else "")
            compiling = nullcontext() if backend is None else _require_compiled_graphs(backend, mesh.rank)
            completing = complete_late() if problem.late_completion else nullcontext()
            with planted as strikes, compiling, completing as late:
                try:
                    result = _VerificationRun(problem, layout, mesh, subdirectory).run(span)
                except (RanksDisagree, UserError) as error:  # raised on all ranks, so that none waits for another
                    if fault is None and isinstance(error, UserError):
                        raise
                    result = RankResult(refused=str(error))
            if late is not None and late.faults:
                more = f" (and {len(late.faults) - 1} more)" if len(late.faults) > 1 else ""
                result.refused = f"late completion: {late.faults[0]}{more}"
            result.affected_calls = mesh.faults.affected_calls if strikes is None else strikes.count
            results.append(result)
        mesh.inject(None)
        return results
    finally:
        mesh.close()


class _RecordingTrainer(Trainer):
    """Trainer that keeps a copy of each step's gradients, taken before clipping and update, in `gradients`."""

    gradients: list[TensorSlice]

    def _read_outcome(self, values: torch.Tensor) -> StepOutcome:
        """Return the step's outcome as `Trainer._read_outcome` does, and store a copy of the gradients, divided by the
        loss scale, in `self.gradients`. values: all-reduced results of the step."""
        verdict = super()._read_outcome(values)
        unscaled = [shard.gradient / verdict.loss_scale for shard in self.parallel.shards]
        self.gradients = self.parallel.slices_like("gradient", unscaled, owned=False)
        return verdict


def make_teacher(problem: Problem, mesh: Mesh) -> Teacher:
    """Return the teacher of a distillation problem on this rank of `mesh`, with parameters drawn from the problem's
    seed + 1. Collective."""
    assert problem.teaching is not None
    given, layers = problem.teaching, [teacher for _, teacher in problem.teaching.loss.layer_map]
    dtype = getattr(torch, problem.dtype)
    return Teacher(given.teacher, mesh, (given.layout, problem.sequence), dtype, layers, problem.seed + 1)


class _VerificationRun:
    """Training run of a `Problem` (model, data, optimizer settings) on one rank. The run saves checkpoints and resumes
    from them as the problem requires. layout: parallel layout. mesh: mesh of the ranks. directory: directory of the
    checkpoints; None if the run neither saves nor loads any."""

    def __init__(self, problem: Problem, layout: Layout, mesh: Mesh, directory: Path | None) -> None:
        """Store the problem, its layout and mesh. directory: directory for checkpoints; None if none is saved."""
        self.problem, self.layout, self.mesh, self.directory = problem, layout, mesh, directory

    def run(self, span: StepRange) -> RankResult:
        """Run the steps of `span` and return this rank's results."""
        problem, result = self.problem, RankResult()
        trainer = self._make_trainer() if span.first == 0 else self._resume_trainer()
        for step in range(span.first, problem.steps if span.stop is None else span.stop):
            if step in problem.resumed_at and step > span.first:
                self._save_checkpoint(trainer)
                saved = trainer.state()
                del trainer
                trainer = self._resume_trainer()
                result.not_restored += _describe_differences(step, saved, trainer.state())
            result.counters[step] = _read_counters(trainer)
            poisoned = step == problem.nan_step and self.mesh.rank == self.mesh.world_size - 1
            with _inject_nan(cast(LanguageModelTask, trainer.task).model) if poisoned else nullcontext():
                verdict = trainer.step()
            weights = _clone_slices(trainer.parallel.master_slices(owned=False))
            result.steps[step] = StepResult(
                verdict.loss, verdict.gradient_norm, verdict.loss_scale, trainer.gradients, weights
            )
            if step == 0:
                result.calls_first_step = self.mesh.record.table()
        if span.stop is not None:
            self._save_checkpoint(trainer)
            return result
        result.final_loss = trainer.task.validate().loss  # with parameters in the model's dtype
        result.calls = self.mesh.record.table()
        result.optimizer = [item for item in _clone_slices(trainer.slices(owned=False)) if item.kind != "master"]
        result.parameters = trainer.parallel.parameter_slices()
        result.counters[problem.steps] = _read_counters(trainer)
        return result

    def _make_trainer(self, initialise: bool = True) -> _RecordingTrainer:
        """Return a new trainer for the problem. initialise: True: initialise the weights from the seed; False: leave
        that to the checkpoint that will be loaded."""
        problem, training = self.problem, self.problem.training
        data = SyntheticData(problem)
        # 0: wgrad kernels accumulate into the gradient buffer, as in large models.
        fused = 0 if problem.fused_gradient_accumulation else FUSED_ACCUMULATION_MIN_NUMEL
        dtypes = getattr(torch, problem.dtype), getattr(torch, problem.resolved_master_dtype)
        arithmetic = Arithmetic(*dtypes, fused, problem.compile_backend or "inductor")
        task = LanguageModelTask(
            problem.make_recipe(self.layout), self.layout, problem.config, cast(PreparedData, data), self.mesh,
            initialise=initialise, arithmetic=arithmetic,
        )  # fmt: skip
        trainer = _RecordingTrainer(task)
        if training.loss_scale_every:
            trainer.loss_scale = LossScale(training.loss_scale, training.loss_scale_every)
        if isinstance(task.objective, Preferences):
            assert problem.preference is not None
            task.objective.reference = data.response_reference()
            task.objective.max_terms = 2 * MAX_PAIRS // problem.preference.responses
        if isinstance(task.objective, Distillation):
            task.objective.teacher = make_teacher(problem, self.mesh)
        return trainer

    def _save_checkpoint(self, trainer: Trainer) -> None:
        """Save a checkpoint of the trainer; `UserError` if that fails."""
        self._checkpointer.save(trainer.steps_done, trainer.slices(owned=True), trainer.state())
        if (reason := self._checkpointer.failed()) is not None:
            raise UserError(f"verify cannot save its checkpoint in {self.directory}: {reason}")

    def _resume_trainer(self) -> _RecordingTrainer:
        """Return a new trainer that resumes from the newest checkpoint, as `training.loop` does."""
        trainer = self._make_trainer(initialise=False)
        loaded = self._checkpointer.load_newest(trainer.slices(owned=False))
        if loaded is None:
            raise UserError(f"verify cannot load its checkpoint: none found in {self.directory}")
        trainer.restore(loaded[1])
        return trainer

    @cached_property
    def _checkpointer(self) -> Checkpointer:
        """`Checkpointer` that saves and loads the run's checkpoints in its directory."""
        assert self.directory is not None, "a problem that is resumed needs a directory"
        return Checkpointer(self.directory, self.mesh, self.problem.config, SaveOptions(background=False))


@contextmanager
def _require_compiled_graphs(backend: str, rank: int) -> Iterator[None]:
    """Context manager around a run under torch.compile. On entry it discards the compiled graphs of earlier runs.
    Inside the `with` block, exceeding torch's recompile limit raises an error instead of falling back to eager
    execution. backend: backend of torch.compile. rank: rank of this process."""
    import torch._dynamo
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    from meshwright.training.worker import separate_compile_caches

    if backend == "inductor":
        # Importing torch._dynamo sets the variable to torch's default, which all ranks share; the user did not set it.
        if os.environ.get("TORCHINDUCTOR_CACHE_DIR") == default_cache_dir():
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        separate_compile_caches(rank)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


@contextmanager
def _inject_nan(model: Transformer) -> Iterator[None]:
    """Context manager that makes training steps non-finite: the output of the model's first layer on this rank is
    NaN."""
    block = next(block for block in model.layers if block is not None)
    hook = block.register_forward_hook(lambda module, inputs, output: (output[0] * math.nan, output[1]))
    try:
        yield
    finally:
        hook.remove()


def _read_counters(trainer: Trainer) -> dict[str, Any]:
    """Return the counters in the trainer's checkpoint state by name: `COUNTERS` ("step", "samples" ...)."""
    state = trainer.state()
    return {name: state[name] for name in COUNTERS}


def _describe_differences(step: int, saved: dict[str, Any], restored: dict[str, Any]) -> list[str]:
    """Return one line for each key of the checkpoint state that differs between `saved` and `restored`. step: number of
    steps done."""
    return [
        f"{key} is {restored.get(key)} after the resume at step {step + 1}, not {saved.get(key)}"
        for key in sorted({*saved, *restored})
        if saved.get(key) != restored.get(key)
    ]


def _clone_slices(slices: list[TensorSlice]) -> list[TensorSlice]:
    """Return copies of the slices with cloned tensors."""
    return [replace(item, tensor=item.tensor.clone()) for item in slices]
