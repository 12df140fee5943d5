"""Serving engine of one rank: each step schedules a batch, runs the model, samples tokens and records the results."""

from __future__ import annotations

import time
from typing import Any

from meshwright.serving.device_logits import DeviceLogits
from meshwright.serving.logit_rows import StepOutput
from meshwright.serving.request import Output, Request
from meshwright.serving.runner import Runner
from meshwright.serving.scheduler import Scheduler, StepBatch, sample_batch
from meshwright.serving.step_limits import StepLimits
from meshwright.spec.block_tables import block_tables
from meshwright.spec.config import ModelConfig


class Engine:
    """Serving engine of one rank: schedules, runs and samples the steps of continuous batching. It is deterministic:
    the ranks of a replica (one copy of the model) get equal calls and so stay in equal states.

    Attributes:
        runner: Computes a step's logits on this rank's part of the model.
        scheduler: Chooses the tokens of each step.
        ahead: The next step, (its batch, result of the runner), if it was launched ahead of its turn; else None.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        """Create an engine without requests; arguments: see the class."""
        self.runner, self.scheduler = runner, scheduler
        self.ahead: tuple[StepBatch, StepOutput] | None = None
        self._last: dict[str, int] = {}  # figures of the last step; none if it computed nothing
        self._kernel_seconds = 0.0

    @property
    def idle(self) -> bool:
        """True if every request that was added has finished."""
        return self.scheduler.idle

    def add(self, request: Request) -> None:
        """Queue a request. Raises UserError if it has a token ID outside the vocabulary, or needs more tokens than the
        KV pool or `max_length` allows."""
        request.check_vocabulary(self.runner.config.vocabulary)
        self.scheduler.add(request)

    def cancel(self, request_id: str) -> Output | None:
        """Cancel the request with the ID `request_id` and return its last output; None if the ID is unknown or the
        request has finished."""
        return self.scheduler.cancel(request_id)

    def step(self) -> list[Output]:
        """Run one step (at most one batch of tokens) and return the new outputs, one for each request that got tokens
        or ended; empty if no sequence can run now.

        If a GPU has sampled all tokens of a decode step itself (`DeviceLogits.decided`), the following step is launched
        before the host reads these tokens, so that the GPU does not wait for the host. If a sequence has then ended,
        the additional token that was computed for it is discarded.
        """
        self._last = {}
        launched, self.ahead = self.ahead, None
        if launched is None:
            if (batch := self.scheduler.schedule()) is None:
                return []
            launched = batch, self._run(batch)
        batch, found = launched
        if isinstance(found, DeviceLogits) and found.decided:
            following = self.scheduler.schedule_following(batch)
            self.ahead = None if following is None else (following, self._run(following, after=found))
        self._complete(batch, found)
        return self.scheduler.record_results(batch, sample_batch(batch, found))

    def _run(self, batch: StepBatch, **given: Any) -> StepOutput:
        """Run the forward pass of `batch` on the runner; return its result, which a GPU may still be computing. given:
        further keyword arguments of `Runner.run`."""
        began = time.perf_counter()
        found = self.runner.run(batch, **given)
        self._kernel_seconds += time.perf_counter() - began
        return found

    def _complete(self, batch: StepBatch, found: StepOutput) -> None:
        """Wait until `found`, the result of the runner for `batch`, has been computed, and update the time and token
        counts that `report` returns."""
        began = time.perf_counter()
        if isinstance(found, DeviceLogits):
            found.wait()
        self._kernel_seconds += time.perf_counter() - began
        # Each token attends to those up to itself.
        self._last = {"tokens": len(batch.tokens), "context": int(batch.positions.sum()) + len(batch.tokens)}

    def report(self) -> dict[str, Any]:
        """Return the engine's counts and times by name, for the server's metrics: the counts of `Scheduler.stats`;
        `tokens`, number of tokens of the last step; `context`, number of keys that a token of the last step attends to,
        summed over its tokens; `kernel_seconds`, time spent in the runner since the start. `tokens` and `context` are
        absent if the last step computed nothing."""
        return {**self._last, **self.scheduler.stats, "kernel_seconds": self._kernel_seconds}

    def properties(self) -> dict[str, Any]:
        """Return properties of the engine by name: `instruction_set` (of the CPU kernels, or the GPU's name), `kernels`
        (version of the kernels), `memory` ({kind, such as "weights" or "kv": bytes}) and `block_tables` (number of
        block tables per sequence)."""
        runner, tables = self.runner, len(self.scheduler.windows)
        about = {"instruction_set": runner.instruction_set, "kernels": runner.version, "block_tables": tables}
        return {**about, "memory": runner.memory()}


def build_scheduler(config: ModelConfig, limits: StepLimits, groups: int = 1) -> Scheduler:
    """Create the scheduler for a model and the sizes in `limits`. config: model configuration, from which the sliding
    windows of the block tables follow. groups: number of pipeline stages. The sequences are divided into as many
    groups, and each step schedules one group."""
    return Scheduler(limits, block_tables(config, groups).windows, groups)
