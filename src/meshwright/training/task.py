"""Interface between `Trainer` and a training task: a recipe's language model (training/language_model.py) or a script's
module (training/module/module_task.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from meshwright.checkpoint.agreement import Agreement
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.monitoring.records import Metrics, RunDescription, Validation
from meshwright.parallel.flat_buffers import TensorSlice
from meshwright.parallel.stage_compute import Divisor
from meshwright.parallel.step import TermCount
from meshwright.parallel.zero_engine import ZeroEngine
from meshwright.recipe import Recipe
from meshwright.spec.parameters import ParameterTable


@dataclass(frozen=True, slots=True)
class RunStart:
    """Argument of `Task.prepare`: state of the run before its first step.

    directory: run directory. agreement: object by which ranks exchange flags and texts. saved: content of `state.json`
    in the resumed checkpoint; None for a fresh run. log: function that prints a line on rank 0."""

    directory: Path
    agreement: Agreement
    saved: Mapping[str, Any] | None
    log: Callable[[str], None]


class Task(Protocol):
    """Interface of a training task: model, data and loss on one rank, as the trainer uses them.

    layout: degrees of parallelism. table: parameter table (name, shape and sharding of each parameter). mesh: device
    mesh of this rank. parallel: ZeRO engine of this rank. passes: object that runs the forward and backward passes of a
    step; the profiler wraps it. The trainer passes the micro-batches that `load_step` returns to the other methods
    without looking into them."""

    @property
    def recipe(self) -> Recipe:
        """Recipe (all settings) of the run."""

    layout: Layout
    table: ParameterTable
    mesh: Mesh
    parallel: ZeroEngine
    passes: Any

    # --- a step

    def load_step(self, step: int) -> Sequence[Any]:
        """Return this rank's micro-batches of the step with index `step` (from 0)."""

    @property
    def can_launch_ahead(self) -> bool:
        """True if a step may be launched before the outcome of the one before is read: its start changes nothing that
        this outcome needs, and a skipped step leaves nothing to restore."""

    def prefetch_step(self, step: int) -> None:
        """Load the micro-batches of the coming step, `step`, in advance, if they do not depend on the present one. The
        trainer calls it on a GPU once it has queued the present step's work."""

    def count_terms(self, micro_batches: Any) -> TermCount:
        """Start to count the loss terms (target tokens, pairs or items) of a step: their number in this rank's
        `micro_batches`, summed over all ranks. Return a function that waits for this sum and returns it (1 if it is 0).
        The summed loss is divided by it. Collective."""

    def forward_backward(self, micro_batches: Any, divisor: Divisor) -> torch.Tensor:
        """Run forward and backward of this rank's `micro_batches`; afterwards the shards of `parallel` hold the
        gradients of the summed loss divided by `divisor`, a number or a function that returns it.

        Returns float64 [1 + metrics]: this rank's contributions to the divided loss and to the metric sums (which are
        not divided). Summed over all ranks they are the loss and the metric sums of the step."""

    def discard_step(self) -> None:
        """Undo a skipped step: restore the module's buffers. Parameters and optimizer state are unchanged, because a
        skipped step does not update them."""

    def report(self, means: Sequence[float]) -> Metrics:
        """Return the step's metrics by name. means [metrics]: the metric sums over all ranks, divided by the number of
        loss terms."""

    # --- around steps

    def describe(self) -> RunDescription:
        """Return the description of model and data for the run's report, without the device's peak FLOP/s."""

    def prepare(self, start: RunStart) -> None:
        """Compute or load the inputs that do not change during training, such as reference log-probabilities; called
        once, before the first step.

        start: run directory, resumed state and log. If this fails on any rank, all ranks raise that rank's `UserError`.
        Collective."""

    def validate(self) -> Validation:
        """Return the mean loss and the metrics of the first `train.validation_sequences` samples of the validation
        data, without updating parameters. Collective."""

    def state(self) -> dict[str, Any]:
        """Return the task's entries of a checkpoint's `state.json`, which identify the data. A run resumes only if they
        are unchanged."""

    def buffer_slices(self, owned: bool) -> list[TensorSlice]:
        """Return buffers and frozen parameters as checkpoint slices. owned: True to return only the slices that this
        rank writes; False to return all, to be filled when a checkpoint is loaded."""

    def buffer_bytes(self) -> dict[str, int]:
        """Return {"buffers": bytes of all buffers and frozen parameters on this rank}; empty for a model without
        them."""

    def predicted_traffic(self) -> dict[str, int]:
        """Return the predicted bytes that this rank sends in a step, by call site (label of a collective call in the
        code)."""

    def predicted_traffic_by_axis(self) -> dict[str, int]:
        """Return the predicted bytes that this rank sends in a step, by mesh axis ("data", "tp" ...)."""
