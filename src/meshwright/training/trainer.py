"""Training step on one rank, from batch to optimizer update."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from meshwright.comm import backend, collectives
from meshwright.monitoring.clock import StepClock
from meshwright.monitoring.records import StepOutcome
from meshwright.parallel.flat_buffers import TensorSlice
from meshwright.parallel.step import TermCount
from meshwright.spec.initial_values import INITIAL_VALUES_VERSION
from meshwright.training.learning_rate import learning_rate
from meshwright.training.loss_scale import LossScale
from meshwright.training.optimizer import GpuScale, Optimizer
from meshwright.training.task import Task


class Trainer:
    """Trainer of one rank: runs the training steps of `task` (model, data and loss), with optimizer, loss scale and
    step counters."""

    def __init__(self, task: Task) -> None:
        """Create optimizer state, loss scale and step counters for the task."""
        self.task = task
        self.recipe = task.recipe
        self.layout = task.layout
        self.mesh = task.mesh
        self.parallel = task.parallel
        self.passes = task.passes
        self.device = torch.device(self.mesh.device)
        train = self.recipe.train
        communicator = self.mesh.communicator
        self.optimizer = Optimizer(self.parallel.shards, train)
        half = self.parallel.parameter_dtype == torch.float16
        self.loss_scale = LossScale(train.loss_scale, train.loss_scale_every) if half else LossScale()
        self.updates_early = self.device.type == "cuda"
        """True if the device updates, or skips the update, before the host knows the outcome of the step."""
        self.clock = StepClock(self.device, lambda: communicator.waited_seconds)
        self.passes.mark = self.clock.mark
        self.before_update: Callable[[], None] = lambda: None
        """Called before each update of the training state."""
        self.steps_done = 0
        self.skipped = 0
        """Number of skipped steps, whose loss or gradient was not finite."""
        self.skipped_in_a_row = 0
        """Number of skipped steps since the last finite one, without those after which the loss scale was halved."""
        self.initial_values = INITIAL_VALUES_VERSION
        self._outcomes: deque[Callable[[], StepOutcome]] = deque()
        """Functions that wait for the outcomes of the steps that are launched and not finished, oldest first."""

    @property
    def can_launch_ahead(self) -> bool:
        """True if a step may be launched before the one before it is finished: on a GPU, which itself skips the update
        of a step that is not finite, if no loss scale depends on the outcome and the task allows it."""
        return self.updates_early and not self.loss_scale.dynamic and self.task.can_launch_ahead

    def step(self, **flags: bool) -> StepOutcome:
        """Run one training step and return its outcome. flags: arguments of `launch_step`. Collective."""
        self.launch_step(**flags)
        return self.finish_step()

    def launch_step(self, *, stop: bool = False, save_failed: bool = False) -> None:
        """Launch a training step: forward and backward of all micro-batches, one all-reduce of the outcome, one update.
        A GPU may still compute it at the return, and `finish_step` waits for its outcome. Collective.

        The loss is summed over the terms of the whole step on all ranks (target tokens, pairs or items) and divided by
        their number; gradients are summed over ranks, never averaged. A step whose loss or gradient norm is not finite
        on any rank is skipped on all. stop: True if this rank received SIGTERM or an interrupt. save_failed: True if
        this rank could not save a checkpoint. In the step's outcome each flag is True if it is True on any rank.
        """
        task = self.task
        clock = self.clock
        clock.start()
        micro_batches = task.load_step(self.steps_done)
        terms = task.count_terms(micro_batches)
        clock.mark("data")

        shares = task.forward_backward(micro_batches, lambda: terms() / self.loss_scale.value)

        values = self._all_reduce_outcome(shares, terms, stop, save_failed)
        clock.mark("agree")
        if self.updates_early:
            self._outcomes.append(self._copy_outcome(values))
            self._update(self._gpu_scale(values))
            task.prefetch_step(self.steps_done + 1)  # while the GPU computes this one
        else:
            outcome = self._read_outcome(values)
            if outcome.finite:
                self._update(self._gradient_scale(outcome))
            self._outcomes.append(lambda: outcome)
        self.steps_done += 1
        clock.mark("update")

    def finish_step(self) -> StepOutcome:
        """Wait for the outcome of the oldest step that is launched and not finished, count the step as skipped or not,
        and return the outcome. The host waits for a GPU's work on this step alone, not on those launched after it."""
        outcome = self._outcomes.popleft()()
        if not outcome.finite:
            self._discard_step()
            self.skipped += 1
        searching = self.loss_scale.update(outcome.loss, outcome.finite)
        if not searching:
            self.skipped_in_a_row = 0 if outcome.finite else self.skipped_in_a_row + 1
        return outcome

    @property
    def threads(self) -> int | None:
        """Number of intra-op threads of torch on a CPU, None on another device. The number affects the last bits of
        results."""
        return torch.get_num_threads() if self.device.type == "cpu" else None

    def state(self) -> dict[str, Any]:
        """Return the entries of a checkpoint's `state.json` that a bitwise resume needs: counters, loss scale, seed,
        version of the initial values, layout, recipe."""
        return {
            "step": self.steps_done,
            "samples": self.steps_done * self.recipe.train.batch,
            "optimizer_steps": self.optimizer.step_count,
            "skipped_steps": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "loss_scale": self.loss_scale.state(),
            "seed": self.recipe.run.seed,
            "initial_values": self.initial_values,
            "threads": self.threads,
            **self.task.state(),
            "layout": str(self.layout),
            "recipe": self.recipe.to_toml(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore step counters and loss scale from `state`, the content of a checkpoint's `state.json`, and all-gather
        the parameters. Called after the checkpoint's tensors were loaded into `slices(owned=False)`. Collective."""
        self.steps_done = state["step"]
        self.skipped = state["skipped_steps"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        self.initial_values = state.get("initial_values", 1)
        self.loss_scale.restore(state.get("loss_scale"))
        self.optimizer.restore_step_count(state["optimizer_steps"])
        self.parallel.all_gather_parameters()

    def slices(self, owned: bool) -> list[TensorSlice]:
        """Return master weights, optimizer state and buffers as checkpoint slices. owned: True to return only the
        slices that this rank writes; False to return all that it must read."""
        slices = self.parallel.master_slices(owned)
        for kind, tensors in self.optimizer.state_tensors().items():
            slices += self.parallel.slices_like(kind, tensors, owned)
        return slices + self.task.buffer_slices(owned)

    def memory(self) -> dict[str, int]:
        """Return the bytes of model states and buffers on this rank, by kind ("optimizer" ...)."""
        tensors = chain.from_iterable(self.optimizer.state_tensors().values())
        states = self.parallel.memory() | {"optimizer": sum(tensor.nbytes for tensor in tensors)}
        return states | self.task.buffer_bytes()

    def predicted_bytes(self) -> dict[str, int]:
        """Return the predicted bytes of model states and buffers on this rank, by kind ("optimizer" ...), computed from
        shapes and dtypes alone."""
        elements = sum(shard.stop - shard.start for shard in self.parallel.shards)
        states = {"optimizer": len(self.optimizer.state_tensors()) * elements * self.parallel.master_dtype.itemsize}
        return self.parallel.predicted_bytes() | states | self.task.buffer_bytes()

    def _all_reduce_outcome(
        self, shares: torch.Tensor, terms: TermCount, stop: bool, save_failed: bool
    ) -> torch.Tensor:
        """All-reduce the step's results over all ranks, without waiting for a GPU. Return float64 [4 + metrics +
        ranks], equal on all ranks: loss and squared gradient norm, both without the loss scale; number of ranks with
        `stop`; number of ranks with `save_failed`; means of the metrics; working seconds of each rank.

        shares [1 + metrics]: this rank's contributions to the scaled loss and to the metric sums; terms: function that
        returns the number of loss terms over all ranks; stop: True if this rank received SIGTERM or an interrupt;
        save_failed: True if it could not save a checkpoint."""
        mesh = self.mesh
        scale = self.loss_scale.value
        metrics = len(shares) - 1
        rank_seconds = [0.0] * mesh.world_size
        rank_seconds[mesh.rank] = self.clock.compute_working_seconds()
        known = [0.0, 0.0, float(stop), float(save_failed), *[0.0] * metrics, *rank_seconds]
        values = torch.tensor(known, dtype=torch.float64, pin_memory=self.device.type == "cuda")
        values = values.to(self.device, non_blocking=True)
        values[0] = shares[0] / scale
        values[1] = self.parallel.squared_norm_share() / scale**2
        values[4 : 4 + metrics] = shares[1:] / terms()
        collectives.all_reduce(values, mesh.world, "step.verdict")
        return values

    def _copy_outcome(self, values: torch.Tensor) -> Callable[[], StepOutcome]:
        """Queue a copy of the result of `_all_reduce_outcome`, `values`, to host memory. Return a function that waits
        for this copy and returns the step's outcome."""
        copied = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
        copied.copy_(values, non_blocking=True)
        stream = backend.current_stream(self.device)
        event = None if stream is None else stream.record_event()

        def read() -> StepOutcome:
            """Wait for the copy and return the outcome."""
            if event is not None:
                event.synchronize()
            return self._read_outcome(copied)

        return read

    def _read_outcome(self, values: torch.Tensor) -> StepOutcome:
        """Return the step's outcome, equal on all ranks. values: result of `_all_reduce_outcome`."""
        metrics = len(values) - 4 - self.mesh.world_size
        loss, squared_norm, stopping, failed, *rest = values.tolist()
        return StepOutcome(
            loss,
            gradient_norm=math.sqrt(squared_norm) if squared_norm >= 0 else math.nan,
            finite=math.isfinite(loss) and math.isfinite(squared_norm),
            stop=stopping > 0,
            save_failed=failed > 0,
            rank_seconds=rest[metrics:],
            loss_scale=self.loss_scale.value,
            metrics=self.task.report(rest[:metrics]),
        )

    def _gradient_scale(self, outcome: StepOutcome) -> float:
        """Return the factor by which gradients are multiplied before the update: the clipping factor of the global norm
        (1 without clipping) divided by the loss scale. outcome: norm and loss scale of this step."""
        clip = self.recipe.train.clip
        return (min(1.0, clip / (outcome.gradient_norm + 1e-6)) if clip else 1.0) / outcome.loss_scale

    def _gpu_scale(self, values: torch.Tensor) -> GpuScale:
        """Return the gradient scale of the step (norm clipping and loss scale), computed on the GPU so that the host
        does not wait. If loss or gradient norm is not finite, its field `skip` is 1, and the update is skipped.

        values: result of `_all_reduce_outcome`."""
        clip = self.recipe.train.clip
        norm = values[1].sqrt()
        divisor = ((norm + 1e-6) / clip).clamp(min=1.0) if clip else torch.ones_like(norm)
        return GpuScale((divisor * self.loss_scale.value).float(), (~values[:2].isfinite().all()).float())

    def _update(self, gradient_scale: float | GpuScale) -> None:
        """Run the optimizer on the master weights with the gradients multiplied by `gradient_scale`, then copy or
        all-gather the master weights into the parameters. Collective."""
        self.before_update()
        self.optimizer.step(learning_rate(self.steps_done, self.recipe.train), gradient_scale, self.loss_scale.value)
        self.parallel.all_gather_parameters()

    def _discard_step(self) -> None:
        """Undo a skipped step: restore the module's buffers and the optimizer's update count. Parameters and optimizer
        state were not changed."""
        self.task.discard_step()
        self.optimizer.step_count -= self.updates_early
