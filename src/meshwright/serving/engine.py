"""The engine of one rank: schedule, run, sample, publish."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.serving.request import Output, Request
from meshwright.serving.runner import Runner
from meshwright.serving.scheduler import Scheduler, StepBatch, sample_batch
from meshwright.serving.step_limits import StepLimits
from meshwright.spec.config import ModelConfig

Float32 = npt.NDArray[np.float32]


class Engine:
    """Continues requests. It is deterministic: ranks of a replica that get the same calls stay in the same state.

    Attributes:
        runner: Executes the steps.
        scheduler: Chooses the tokens of each step.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.runner, self.scheduler = runner, scheduler
        self._last: dict[str, int] = {}  # figures of the last step; none if it computed nothing
        self._kernel_seconds = 0.0

    @property
    def idle(self) -> bool:
        """True if no request is unfinished."""
        return self.scheduler.idle

    def add(self, request: Request) -> None:
        """Queue a request. Raises UserError if it names a token that the model lacks, or can never fit."""
        request.check(self.runner.config.vocabulary, request.longest)
        self.scheduler.add(request)

    def cancel(self, request_id: str) -> Output | None:
        """Cancel a request and return its last output; None if it is unknown or has finished."""
        return self.scheduler.cancel(request_id)

    def step(self) -> list[Output]:
        """Run one step; return what it adds to each answer. Nothing runs while no sequence can."""
        self._last = {}
        batch = self.scheduler.schedule()
        return [] if batch is None else self.scheduler.publish(batch, sample_batch(batch, self._run(batch)))

    def _run(self, batch: StepBatch, hidden_TH: Float32 | None = None) -> Float32:
        """Run a batch, as `Runner.run`, and note its figures."""
        began = time.perf_counter()
        found = self.runner.run(batch, hidden_TH)
        self._kernel_seconds += time.perf_counter() - began
        keys = int(batch.positions.sum()) + len(batch.tokens)  # each token attends to those up to itself
        self._last = {"tokens": len(batch.tokens), "context": keys}
        return found

    def report(self) -> dict[str, Any]:
        """Return the figures of the last step (`tokens`; `context`: keys to which they attend), the scheduler's, and
        `kernel_seconds`, the time spent in the runner so far."""
        return {**self._last, **self.scheduler.stats, "kernel_seconds": self._kernel_seconds}

    def properties(self) -> dict[str, Any]:
        """Return `instruction_set`, `kernels` (their version) and `memory` (bytes by kind)."""
        runner = self.runner
        return {"instruction_set": runner.instruction_set, "kernels": runner.version, "memory": runner.memory()}


def build_scheduler(config: ModelConfig, limits: StepLimits, groups: int = 1) -> Scheduler:
    """Build a scheduler for a runner of these limits. `groups`: pipeline stages."""
    windows = {config.layer_window(layer) for layer in range(config.layers)}
    return Scheduler(limits, windows.pop() if len(windows) == 1 else None, groups)
