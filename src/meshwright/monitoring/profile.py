"""Profiler of a run (`train.profile`): records the steps of all ranks and writes traces for Perfetto, whose spans have
the names of the pipeline program's steps."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from meshwright.checkpoint.agreement import Agreement
from meshwright.checkpoint.files import replace_file
from meshwright.comm import collectives
from meshwright.comm.mesh import Mesh
from meshwright.errors import error_reason
from meshwright.monitoring.clock import StepClock
from meshwright.monitoring.profile_trace import (
    RankSteps,
    Span,
    build_rank_trace,
    compute_clock_offset,
    merge_rank_traces,
)
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.monitoring.timed_calls import settle_calls, time_calls
from meshwright.parallel.pipeline import Compute, Key
from meshwright.parallel.step import ForwardBackward
from meshwright.program.pipeline import Kind, PipelineProgram
from meshwright.program.timeline import WORDS, StepNames
from meshwright.recipe import Recipe

MERGED = "all-ranks.json.gz"
MEETINGS = 7  # barriers at which the clocks of hosts are compared
_AFTER = {"": "data", "reduce": "agreement", "agree": "update"}
"""Phase of a step that begins at each mark of the clock. The passes of the pipeline program are recorded one by one."""
_PARTS = {"data": "data", "reduce": "reduce", "agree": "agreement", "update": "update"}
"""Name in the trace of the phase that ends at each mark."""


class ProfiledTrainer(Protocol):
    """Interface of a trainer for the profiler. steps_done: number of steps done; clock: clock of the phases of a step;
    passes: object that runs forward and backward."""

    steps_done: int
    clock: StepClock
    passes: ForwardBackward


class Profile:
    """Profiler of the training steps that `train.profile` names, such as "10:12"; writes Chrome traces into the run
    directory. Every rank calls `before_step` and `after_step` around every training step.

    recipe: recipe of the run. mesh: mesh of its ranks. directory: run directory. log: called with each log line."""

    def __init__(self, recipe: Recipe, mesh: Mesh, directory: RunDirectory, log: Callable[[str], None]) -> None:
        """Parse the recipe's `train.profile`; arguments: see the class."""
        first, _, last = (recipe.train.profile or "0:-1").partition(":")
        self.first, self.last = int(first), int(last or first)
        ranks = recipe.train.profile_ranks
        self._record_operators = not ranks or mesh.rank in ranks
        self._recipe, self._mesh, self._directory, self._log = recipe, mesh, directory, log
        self._recording: _ProfileRecording | None = None

    def before_step(self, trainer: ProfiledTrainer) -> bool:
        """Start recording if the profiled range begins with the next step. Return True if the next step is recorded.
        All ranks must call it, as it synchronizes them. trainer: trainer of this rank."""
        if self._recording is None and self.first <= trainer.steps_done + 1 <= self.last:
            self._recording = _ProfileRecording(trainer, self._mesh, self._record_operators)
        if self._recording is not None:
            self._recording.begin_step()
        return self._recording is not None

    def after_step(self, trainer: ProfiledTrainer, ending: bool) -> bool:
        """Record the end of a step if it is profiled, and write the trace after the last profiled step or at the end of
        the run. Return True if the step was recorded. trainer: trainer of this rank. ending: True if the run ends after
        this step."""
        if self._recording is None:
            return False
        self._recording.end_step()
        if ending or trainer.steps_done >= self.last:
            recording, self._recording = self._recording, None
            recording.stop()
            self._write_traces(recording, trainer.passes.program, trainer.steps_done)
        return True

    def _write_traces(self, recording: _ProfileRecording, program: PipelineProgram, last: int) -> None:
        """Write each rank's trace, then the merged trace of all ranks on rank 0; log its path or the failure. All ranks
        must call it, as it synchronizes them.

        recording: the recorded steps; program: the pipeline schedule; last: number of the last recorded step.
        """
        rank, agreement = self._mesh.rank, Agreement(self._mesh)
        name = f"steps-{last - recording.steps + 1:06d}-{last:06d}"
        directory = self._directory.path / "profile" / name
        recorded = recording.collect_rank_steps()
        problem = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            kernels: list[dict[str, Any]] = []
            if recording.operators is not None:
                events = _load_operator_trace(recording.operators, directory / f".rank-{rank:05d}.json")
                trace, kernels = build_rank_trace(recorded, events)
                _write_json(directory / f"rank-{rank:05d}.json.gz", trace)
            _write_json(_get_steps_path(directory, rank), recorded.to_table() | {"kernels": kernels})
        except OSError as error:
            problem = f"the profile in {directory} cannot be written: {error_reason(error)}"
        failure = agreement.broadcast_first_text(problem)
        if rank == 0 and failure is None:
            try:
                parts = [_read_json(_get_steps_path(directory, other)) for other in range(self._mesh.world_size)]
                _write_json(directory / MERGED, merge_rank_traces(parts, program, self._map_pipeline_ranks()))
            except OSError as error:
                failure = 0, f"the profile in {directory} cannot be written: {error_reason(error)}"
        agreement.all_true(True)  # barrier: rank 0 has read the files of all ranks
        if rank == 0:
            for other in range(self._mesh.world_size):
                with suppress(OSError):
                    _get_steps_path(directory, other).unlink()
            steps = f"step {last}" if recording.steps == 1 else f"steps {last - recording.steps + 1} to {last}"
            self._log(failure[1] if failure else f"profile of {steps}: {directory / MERGED} (opens in ui.perfetto.dev)")

    def _map_pipeline_ranks(self) -> dict[int, int]:
        """Return the pipeline rank of every rank, as global rank -> rank on axis pp."""
        groups = self._mesh.layout.groups("pp")
        return {rank: place for ranks in groups for place, rank in enumerate(ranks)}


class _ProfileRecording:
    """Recording of consecutive training steps on this rank. trainer: trainer whose steps are recorded. mesh: mesh of
    all ranks. operators: True to record operators and kernels too, by torch.profiler."""

    def __init__(self, trainer: ProfiledTrainer, mesh: Mesh, operators: bool) -> None:
        """Start to record on this rank; arguments: see the class."""
        self.steps = 0
        self.spans: list[Span] = []
        self.operators: Any = None
        self._trainer, self._mesh = trainer, mesh
        self._names = StepNames(trainer.passes.program)
        self._annotations = ExitStack()  # annotation of the current phase of the step
        self._marked = self._begun = 0
        self._zero, self._offset = _compare_clocks(mesh)
        self._timer = time_calls(mesh.communicator)
        self.calls = self._timer.__enter__()
        trainer.clock.listener = self._on_clock_mark
        trainer.passes.watched = lambda compute: _NamedCompute(compute, self._record_pass)
        if operators:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it logs to stderr when it starts and stops
            activities = [torch.profiler.ProfilerActivity.CPU]
            if mesh.device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self.operators = torch.profiler.profile(activities=activities)
            mesh.communicator.around = torch.profiler.record_function
            self.operators.start()

    def begin_step(self) -> None:
        """Record the start time of a step."""
        self._begun = time.time_ns()

    def end_step(self) -> None:
        """Record the interval from the step's start to now."""
        self.steps += 1
        step = self._trainer.steps_done
        self.spans.append(Span("step", f"step {step}", f"step {step}", self._begun, time.time_ns()))

    def stop(self) -> None:
        """End the recording on this rank after all its collective calls have completed: a call that begins under
        torch's profiler and ends after it would corrupt the process's memory (torch 2.13). Raises RankLost."""
        self._trainer.clock.listener = self._trainer.passes.watched = None
        self._mesh.communicator.around = nullcontext
        settle_calls(self._mesh.communicator)
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize(self._mesh.device)
        if self.operators is not None:
            self.operators.stop()
        self._timer.__exit__(None, None, None)

    def collect_rank_steps(self) -> RankSteps:
        """Return the intervals and collective calls recorded on this rank so far."""
        return RankSteps(self._mesh.rank, self._zero + self._offset, self.spans, self.calls)

    def _annotate_operators(self, name: str) -> AbstractContextManager[Any]:
        """Return a context manager that groups the operators run inside its `with` block under `name` in torch's trace;
        a context manager without effect if operators are not recorded."""
        return torch.profiler.record_function(name) if self.operators is not None else ExitStack()

    def _on_clock_mark(self, part: str) -> None:
        """Record the interval of the step phase that ends now, and begin the next phase. `StepClock` calls it at each
        mark. part: name of the ended phase; "" at the start of a step, when no phase ends."""
        now = time.time_ns()
        self._annotations.close()
        if part in _PARTS:
            self.spans.append(Span(_PARTS[part], _PARTS[part], _PARTS[part], self._marked, now))
        self._marked = now
        if part in _AFTER:
            self._annotations.enter_context(self._annotate_operators(_AFTER[part]))

    @contextmanager
    def _record_pass(self, kind: Kind, stage: int, replica: int, micro_batch: int) -> Iterator[None]:
        """Context manager around one pass over a micro-batch, which records the interval of the pass. kind: forward,
        backward, input-gradient or weight-gradient pass; stage, replica (model copy), micro_batch: indices."""
        label, name = self._names.describe_step(kind, stage, replica, micro_batch)
        begun = time.time_ns()
        with self._annotate_operators(label):
            yield
        where = {"stage": stage, "replica": replica, "micro_batch": micro_batch}
        self._marked = time.time_ns()
        self.spans.append(Span(WORDS[kind], label, name, begun, self._marked, where))


class _NamedCompute:
    """Wrapper of `compute`, the object that runs forward and backward passes of this rank's pipeline stages. Each pass
    runs inside a context manager that records its time. around: function (kind of pass, stage, replica (model copy),
    micro-batch) -> that context manager."""

    def __init__(self, compute: Compute, around: Callable[[Kind, int, int, int], AbstractContextManager[None]]) -> None:
        """Wrap `compute`; arguments: see the class."""
        self._compute, self._around = compute, around
        self.buffer = compute.buffer

    def run(self, kind: Kind, key: Key, x: torch.Tensor | None) -> torch.Tensor | None:
        """Run one pass of the wrapped `Compute` inside its context manager. kind: forward, backward ...; key: (stage,
        replica (model copy), micro-batch); x: activation or gradient received from another stage; None if the pass
        needs none. Return the tensor to send to the next stage (in a backward, the previous stage); None if there is
        nothing to send."""
        with self._around(kind, *key):
            return self._compute.run(kind, key, x)


# --- clocks


def _compare_clocks(mesh: Mesh) -> tuple[int, int]:
    """Compare the clocks of all ranks, by the times at which the ranks leave several barriers. Return (start of the
    profile on rank 0's clock, in nanoseconds since 1970; nanoseconds by which this rank's clock is ahead of rank 0's).
    Collective: all ranks of `mesh` call it."""
    size, rank = mesh.world_size, mesh.rank
    seen = torch.zeros(MEETINGS + 1, size, dtype=torch.int64)
    for meeting in range(MEETINGS):  # all ranks leave a barrier at nearly the same time
        collectives.barrier(mesh.world, "profile.clocks")
        seen[meeting, rank] = time.time_ns()
    seen[MEETINGS, rank] = _read_clock_id()
    together = seen.to(mesh.device)
    collectives.all_reduce(together, mesh.world, "profile.clocks")
    *times, machines = together.tolist()
    return times[-1][0], compute_clock_offset(times, machines, rank)


def _read_clock_id() -> int:
    """Return an integer that identifies this machine's clock (a hash of Linux's boot id), equal for all its processes;
    a random one if the boot id is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        boot = os.urandom(16)
    return int.from_bytes(hashlib.sha256(boot).digest()[:7], "little")


# --- files


def _get_steps_path(directory: Path, rank: int) -> Path:
    """Return the path of the temporary file in the run directory `directory` in which rank `rank` stores its recorded
    steps, for rank 0 to merge."""
    return directory / f".steps-{rank:05d}.json.gz"


def _load_operator_trace(profiler: Any, path: Path) -> dict[str, Any]:
    """Export the Chrome trace of torch's profiler to a temporary file at `path`; return its content as a dict."""
    try:
        profiler.export_chrome_trace(str(path))
        if not path.exists():
            raise OSError(f"{path} could not be written")
        trace: dict[str, Any] = json.loads(path.read_bytes())
        return trace
    finally:
        path.unlink(missing_ok=True)


def _write_json(path: Path, value: Any) -> None:
    """Write `value` as gzipped JSON to `path` atomically."""
    replace_file(path, gzip.compress(json.dumps(value).encode(), compresslevel=3), sync=False)


def _read_json(path: Path) -> Any:
    """Read the gzipped JSON file `path` and return its content."""
    return json.loads(gzip.decompress(path.read_bytes()))
