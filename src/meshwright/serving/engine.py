"""Serving engine of one rank: each step schedules a batch, runs the model, samples tokens and records the results.

In a pipeline of N stages the sequences are in N groups that rotate through the stages. In slot k all ranks schedule a
batch of group k mod N, and stage s computes the batch of slot k - s. The tokens that the last stage samples travel back
through all stages; each records them in its scheduler before it schedules that group again. This is 1F1B
(`schedules/synchronous.py`) with the return of the tokens in place of the backward pass; the 1F1B program is checked,
and its steady state (all stages busy) is executed.

Shapes: T tokens of a batch, H hidden, R rows of logits.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from meshwright.comm.collectives import transfer
from meshwright.comm.handle import Handle
from meshwright.comm.mesh import Mesh
from meshwright.comm.transport import Message
from meshwright.errors import UserError
from meshwright.kernels.build import list_supported_instruction_sets
from meshwright.kernels.choice import INSTRUCTION_SET_VARIABLE, PLAIN_TORCH, load_kernels
from meshwright.planner.serving.ledger import KERNEL_DTYPES, ServingSizes
from meshwright.program.check_pipeline import check_pipeline
from meshwright.program.pipeline import Kind
from meshwright.schedules.synchronous import one_f_one_b
from meshwright.schedules.transfers import with_transfers
from meshwright.serving.device_logits import DeviceLogits
from meshwright.serving.logit_rows import StepOutput
from meshwright.serving.native_runner import NativeRunner
from meshwright.serving.rank_starter import RankPlan
from meshwright.serving.request import Output, Request
from meshwright.serving.sampling import TokenResult
from meshwright.serving.scheduler import Scheduler, StepBatch, sample_batch
from meshwright.serving.torch_runner import TorchRunner
from meshwright.serving.weights import RankWeights
from meshwright.spec.block_tables import block_tables
from meshwright.spec.config import ModelConfig

HIDDEN_SITE, TOKENS_SITE = "serving.hidden", "serving.tokens"

DEVICE_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes that the Triton kernels support."""

Group = tuple[tuple[Kind, int], ...]
"""Steps that are posted together, each with its batch counted from the slot's."""


class Runner(Protocol):
    """Interface of the runners, which compute the steps of one rank on its part of the model.

    Attributes:
        config: Configuration of the model.
        instruction_set: Instruction set of the CPU kernels, or name of the device.
        version: Version of the kernels, or "torch ..." without kernels; equal versions give equal bits on equal
            devices.
    """

    config: ModelConfig
    instruction_set: str
    version: str

    def run(self, batch: StepBatch, hidden: npt.NDArray[np.float32] | None = None) -> StepOutput:
        """Compute this rank's pipeline stage for a batch of T tokens, and write the tokens' keys and values to the KV
        cache. The last stage returns the logits of the R output rows (tokens whose logits are wanted): float32 [R, V]
        for V vocabulary entries, or R objects of type `LogitRow`. Any other stage returns the hidden states, float32
        [T, H] with hidden size H. The result is valid until the next call. `hidden`: the previous stage's hidden states
        [T, H]; None on the first stage."""

    def memory(self) -> dict[str, int]:
        """Return {kind: bytes}: `weights`, `kv` (cache), `logits`, and with kernels `workspace` (buffers)."""


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
        self._last = {"tokens": len(batch.tokens), "context": batch.keys}

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


def derive_steady_state(stages: int, stage: int) -> tuple[Group, ...]:
    """Return the actions of one pipeline rank in each slot (call of `PipelineEngine.step`) while all `stages` stages
    are busy. They are the steady state of the training schedule 1F1B, where the return of a batch's sampled tokens
    takes the place of the batch's backward. stage: index of the rank's stage.

    The result is a tuple of groups in order; a group is a tuple of actions that are started together. An action is
    (kind, offset) and applies to the batch that was scheduled in slot (present slot + offset). Kinds are FORWARD
    (compute the batch), BACKWARD (record its sampled tokens), and sends and receives of hidden states or tokens.
    """
    program = with_transfers(one_f_one_b(stages, 6 * stages))
    check_pipeline(program)
    steps, groups = program.steps, list[list[tuple[Kind, int]]]()
    for at in steps.of_rank(stage):
        if not groups or steps.group[at] != steps.group[at - 1]:
            groups.append([])
        groups[-1].append((Kind(int(steps.kind[at])), int(steps.micro_batch[at])))
    begins = {step[1]: place for place, group in enumerate(groups) for step in group if step[0] == Kind.FORWARD}

    def period(batch: int) -> tuple[Group, ...]:
        """Return the groups of steps that this stage executes from the forward of micro-batch number `batch` up to that
        of the next one. Micro-batches in the result are numbered relative to the present slot, `batch` + `stage`."""
        found = groups[begins[batch] : begins[batch + 1]]
        return tuple(tuple(sorted((kind, number - batch - stage) for kind, number in group)) for group in found)

    steady = period(3 * stages)
    assert steady == period(3 * stages + 1), "1F1B repeats itself with every micro-batch"
    return steady


class PipelineEngine(Engine):
    """Serving engine of one pipeline stage. The sequences are divided into as many groups as there are stages; in each
    slot (one call of `step`), every stage computes the batch of a different group.

    runner: computes this stage. scheduler: must have been built with as many groups as there are stages. mesh: gives
    the axis pp."""

    def __init__(self, runner: Runner, scheduler: Scheduler, mesh: Mesh) -> None:
        """Derive the steady-state steps of this stage; arguments: see the class."""
        super().__init__(runner, scheduler)
        self._axis, self._stages, self._stage = mesh.pp, mesh.pp.size, mesh.pp.rank
        self._order = derive_steady_state(self._stages, self._stage)
        self._slot = 0
        self._batches: dict[int, StepBatch | None] = {}  # by slot, until they are recorded
        self._hidden: dict[int, torch.Tensor] = {}  # [T, H], to be sent
        self._results: dict[int, list[TokenResult]] = {}
        self._pending: dict[tuple[Kind, int], tuple[torch.Tensor, Handle]] = {}

    @property
    def idle(self) -> bool:
        """True if every request has finished and no batch is in flight in any stage."""
        return self.scheduler.idle and not any(self._batches.values())

    def step(self) -> list[Output]:
        """Run one slot of the pipeline, in three parts: schedule the next batch of one group of sequences; compute this
        stage for the batch that has arrived here; record the sampled tokens of the batch whose tokens have come back
        from the last stage. Return the outputs of this last batch."""
        slot, self._last = self._slot, {}
        self._batches[slot] = self.scheduler.schedule(slot % self._stages)
        outputs: list[Output] = []
        for group in self._order:
            for kind, offset in group:
                number = slot + offset
                if (batch := self._batches.get(number)) is None:
                    continue
                if kind == Kind.FORWARD:
                    self._compute(number, batch)
                elif kind == Kind.BACKWARD:
                    outputs = self._record_results(number, batch)
                else:
                    self._start_transfer(kind, number, batch)
        self._batches.pop(slot - self._stages + 1, None)
        self._slot += 1
        return outputs

    def _compute(self, number: int, batch: StepBatch) -> None:
        """Run this rank's stage on `batch`, and store the resulting hidden states, which are sent to the next stage.
        The last stage samples the batch's tokens instead. number: slot (call of `step`) in which the batch was
        scheduled."""
        hidden_TH = self._finish_transfer(Kind.RECEIVE_FORWARD, number).numpy() if self._stage > 0 else None
        found = self._run(batch, hidden=hidden_TH)
        self._complete(batch, found)
        if self._stage == self._stages - 1:
            self._results[number] = sample_batch(batch, found)
        else:
            assert isinstance(found, np.ndarray)
            self._hidden[number] = torch.from_numpy(found.copy())  # as the runner's next call overwrites it

    def _record_results(self, number: int, batch: StepBatch) -> list[Output]:
        """Record the sampled tokens of `batch` in this stage's scheduler; return the batch's outputs. The last stage
        has sampled these tokens itself; any other stage first receives them from the next stage. number: slot (call of
        `step`) in which the batch was scheduled."""
        if self._stage < self._stages - 1 and len(batch.output_rows):
            self._results[number] = _decode_results(self._finish_transfer(Kind.RECEIVE_BACKWARD, number))
        results = self._results.get(number, [])
        if self._stage == 0:
            self._results.pop(number, None)
        return self.scheduler.record_results(batch, results)

    def _start_transfer(self, kind: Kind, number: int, batch: StepBatch) -> None:
        """Start one send or receive for `batch`, which `_finish_transfer` ends. kind: SEND_FORWARD or RECEIVE_FORWARD
        for hidden states, which go to the next stage; SEND_BACKWARD or RECEIVE_BACKWARD for sampled tokens, which go to
        the previous stage. number: slot (call of `step`) in which the batch was scheduled."""
        options = [chunk.sequence.request.sampling for chunk in batch.chunks]
        alternatives = max(max(each.logprobs or 0, each.prompt_logprobs or 0) for each in options)
        alternatives = min(alternatives, self.runner.config.vocabulary)  # no token has more
        if kind == Kind.RECEIVE_FORWARD:
            tensor = torch.empty(len(batch.tokens), self.runner.config.hidden)
        elif kind == Kind.SEND_FORWARD:
            tensor = self._hidden.pop(number)
        elif len(batch.output_rows) == 0:
            self._results.pop(number, None)  # the middle of a prompt: no tokens
            return
        elif kind == Kind.RECEIVE_BACKWARD:
            tensor = torch.empty(len(batch.output_rows), 2 + 2 * alternatives, dtype=torch.float64)
        else:
            tensor = _encode_results(self._results.pop(number), alternatives)
        arrives = kind in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)
        forward = kind in (Kind.RECEIVE_FORWARD, Kind.SEND_FORWARD)
        peer, site = self._stage + (-1 if arrives is forward else 1), HIDDEN_SITE if forward else TOKENS_SITE
        if not arrives:
            for key in [key for key in self._pending if key[0] == kind]:
                self._finish_transfer(*key)  # so that the buffers of earlier sends can be freed
        message = Message(tensor, peer, arrives, site, f"{kind.name} {number}")
        (handle,) = transfer([message], self._axis)
        self._pending[kind, number] = tensor, handle

    def _finish_transfer(self, kind: Kind, number: int) -> torch.Tensor:
        """Wait for a send or receive that `_start_transfer` has started with the same arguments; return its tensor."""
        tensor, handle = self._pending.pop((kind, number))
        handle.wait()
        return tensor


def _encode_results(results: Sequence[TokenResult], alternatives: int) -> torch.Tensor:
    """Encode the sampled tokens `results` as one tensor to send, float64 [R, 2 + 2 x alternatives]. A row has token ID
    and log-probability of the sampled token, then of each of the most likely tokens; NaN: absent. alternatives: most
    likely tokens of a row at most."""
    rows = [[result.token, result.logprob, *(each for pair in result.top for each in pair)] for result in results]
    width = 2 + 2 * alternatives
    return torch.from_numpy(np.array([[*row, *[None] * (width - len(row))] for row in rows], np.float64))


def _decode_results(encoded: torch.Tensor) -> list[TokenResult]:
    """Decode the tensor [R, 2 + 2 x alternatives] of `_encode_results`."""
    results = list[TokenResult]()
    for token, logprob, *top in encoded.tolist():
        pairs = tuple((int(each), value) for each, value in zip(top[::2], top[1::2], strict=True) if each >= 0)
        results.append(TokenResult(int(token), None if math.isnan(logprob) else logprob, pairs))
    return results


def build_scheduler(config: ModelConfig, sizes: ServingSizes, groups: int = 1) -> Scheduler:
    """Create the scheduler for a model. config: model configuration, from which the sliding windows of the block tables
    follow. sizes: largest step and KV pool. groups: number of pipeline stages. The sequences are divided into as many
    groups, and each step schedules one group."""
    return Scheduler(sizes, block_tables(config, groups).windows, groups)


def build_runner(plan: RankPlan, mesh: Mesh) -> Runner:
    """Build the runner for this rank, of Triton kernels on a GPU, of compiled kernels or plain torch on a CPU: load its
    part of the model and allocate its KV pool.

    plan: settings, of which checkpoint, sizes, instruction set and `batch_invariant` are used. mesh: mesh of the
    replica, with axes tp, pp, and ep inside tp. Raises UserError if the checkpoint is damaged or of an encoder, needs
    kernels that cannot be built or run here, or has a dtype that they do not support.
    """
    weights, sizes, chosen = RankWeights(Path(plan.checkpoint), mesh), plan.sizes, plan.instruction_set
    if mesh.device.type == "cuda":
        if sizes.dtype not in DEVICE_DTYPES:
            raise UserError(f"dtype {sizes.dtype}: on a GPU serving takes {', '.join(DEVICE_DTYPES)}")
        try:
            from meshwright.kernels import device_operations
        except ModuleNotFoundError as error:
            raise UserError(f"serving on a GPU needs {error.name}: run pip install triton") from None
        from meshwright.serving.device_runner import DeviceRunner

        return DeviceRunner(weights, mesh, sizes, device_operations, batch_invariant=plan.batch_invariant)
    compiled = sizes.dtype in KERNEL_DTYPES and chosen != PLAIN_TORCH
    if compiled and (kernels := load_kernels(chosen)) is not None:
        kernels.set_threads(sizes.threads)
        return NativeRunner(kernels, weights, mesh, sizes.dtype, sizes)
    if mesh.layout.expert_parallel:
        raise UserError(f"ep{mesh.ep.size} needs the compiled kernels: install g++, or leave ep out")
    return TorchRunner(weights, mesh, sizes)


def build_engine(plan: RankPlan, mesh: Mesh) -> Engine:
    """Load this rank's part of a model and return its engine: a `PipelineEngine` if pp > 1. plan: settings of the
    ranks. mesh: mesh of this rank. Raises UserError if the checkpoint is damaged or of an encoder, or if the kernels
    cannot be built or this processor lacks the plan's instruction set."""
    chosen, supported = plan.instruction_set, list_supported_instruction_sets()
    if chosen not in (None, PLAIN_TORCH, *supported):
        raise UserError(
            f"rank {mesh.rank} on {socket.gethostname()} runs {', '.join(supported) or 'no kernels'}, but the server "
            f"has chosen {chosen}: use the same kind of processor, or set {INSTRUCTION_SET_VARIABLE} to what all run"
        )
    runner = build_runner(plan, mesh)
    scheduler = build_scheduler(runner.config, plan.sizes, groups=mesh.pp.size)
    return Engine(runner, scheduler) if mesh.pp.size == 1 else PipelineEngine(runner, scheduler, mesh)
