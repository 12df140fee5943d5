"""`train.profile`: what the ranks did in some steps, as traces that Perfetto opens, under the names of the program."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from meshwright.checkpoint.agreement import Agreement
from meshwright.comm import collectives
from meshwright.comm.mesh import Mesh
from meshwright.comm.watched_calls import settle_calls, watching
from meshwright.monitoring.clock import StepClock
from meshwright.monitoring.profile_trace import RankSteps, Span, clock_offset, merged, of_rank
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.parallel.pipeline import Compute
from meshwright.parallel.step import ForwardBackward
from meshwright.program.pipeline import Kind, PipelineProgram
from meshwright.program.timeline import WORDS, StepNames
from meshwright.recipe import Recipe

MERGED = "all-ranks.json.gz"
MEETINGS = 7  # by which the clocks of other hosts are compared
_AFTER = {"": "data", "reduce": "agreement", "agree": "update"}
"""The part of a step that begins at a mark. Between the data and the reductions are the steps of the program."""
_PARTS = {"data": "data", "reduce": "reduce", "agree": "agreement", "update": "update"}


class ProfiledTrainer(Protocol):
    """The attributes of a trainer that a profile reads and hooks into."""

    steps_done: int
    clock: StepClock
    passes: ForwardBackward


class Profile:
    """Takes the profile that a recipe asks for. Every rank has one and calls it alike, around every training step."""

    def __init__(self, recipe: Recipe, mesh: Mesh, directory: RunDirectory, say: Callable[[str], None]) -> None:
        first, _, last = (recipe.train.profile or "0:-1").partition(":")
        self.first, self.last = int(first), int(last or first)
        ranks = recipe.train.profile_ranks
        self._operators = not ranks or mesh.rank in ranks
        self._recipe, self._mesh, self._directory, self._say = recipe, mesh, directory, say
        self._taking: _Taking | None = None

    def before_step(self, trainer: ProfiledTrainer) -> bool:
        """Called before a step. Returns True if the profile watches it."""
        if self._taking is None and self.first <= trainer.steps_done + 1 <= self.last:
            self._taking = _Taking(trainer, self._mesh, self._operators)
        if self._taking is not None:
            self._taking.step_begins()
        return self._taking is not None

    def after_step(self, trainer: ProfiledTrainer, ending: bool) -> bool:
        """Called after a step. Returns True if it was watched, and took longer for it. ending: it was the last step."""
        if self._taking is None:
            return False
        self._taking.step_done()
        if ending or trainer.steps_done >= self.last:
            taken, self._taking = self._taking, None
            taken.stop()
            self._write(taken, trainer.passes.program, trainer.steps_done)
        return True

    def _write(self, taken: _Taking, program: PipelineProgram, last: int) -> None:
        """Each rank its own file, then rank 0 that of all. What cannot be written is said, and training goes on."""
        rank, agreement = self._mesh.rank, Agreement(self._mesh)
        name = f"steps-{last - taken.steps + 1:06d}-{last:06d}"
        directory = self._directory.path / "profile" / name
        steps = taken.rank_steps()
        problem = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            kernels: list[dict[str, Any]] = []
            if taken.operators is not None:
                events = _operators(taken.operators, directory / f".rank-{rank:05d}.json")
                trace, kernels = of_rank(steps, events)
                _write_json(directory / f"rank-{rank:05d}.json.gz", trace)
            _write_json(_part(directory, rank), steps.table() | {"kernels": kernels})
        except OSError as error:
            problem = f"the profile in {directory} cannot be written: {(error.strerror or str(error)).lower()}"
        said = agreement.first_text(problem)
        if rank == 0 and said is None:
            try:
                parts = [_read_json(_part(directory, other)) for other in range(self._mesh.world_size)]
                _write_json(directory / MERGED, merged(parts, program, self._places()))
            except OSError as error:
                said = 0, f"the profile in {directory} cannot be written: {(error.strerror or str(error)).lower()}"
        agreement.all_true(True)  # rank 0 has read them
        if rank == 0:
            for other in range(self._mesh.world_size):
                with suppress(OSError):
                    _part(directory, other).unlink()
            those = f"step {last}" if taken.steps == 1 else f"steps {last - taken.steps + 1} to {last}"
            self._say(said[1] if said else f"profile of {those}: {directory / MERGED} (ui.perfetto.dev opens it)")

    def _places(self) -> dict[int, int]:
        """The rank of the program that each rank of the world is."""
        groups = self._mesh.layout.groups("pp")
        return {rank: place for ranks in groups for place, rank in enumerate(ranks)}


class _Taking:
    """A profile that is being taken on this rank."""

    def __init__(self, trainer: ProfiledTrainer, mesh: Mesh, operators: bool) -> None:
        self.steps = 0
        self.spans: list[Span] = []
        self.operators: Any = None
        self._trainer, self._mesh = trainer, mesh
        self._names = StepNames(trainer.passes.program)
        self._annotations = ExitStack()  # the one around a part of the step that is under way
        self._marked = self._begun = 0
        self._zero, self._offset = _clocks(mesh)
        self._watch = watching(mesh.communicator)
        self.calls = self._watch.__enter__()
        trainer.clock.listener = self._mark
        trainer.passes.watched = lambda compute: _NamedCompute(compute, self._compute_step)
        if operators:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells standard error when it begins and ends
            activities = [torch.profiler.ProfilerActivity.CPU]
            if mesh.device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self.operators = torch.profiler.profile(activities=activities)
            mesh.communicator.around = torch.profiler.record_function
            self.operators.start()

    def step_begins(self) -> None:
        """The clock's marks follow."""
        self._begun = time.time_ns()

    def step_done(self) -> None:
        """The last of them has come."""
        self.steps += 1
        step = self._trainer.steps_done
        self.spans.append(Span("step", f"step {step}", f"step {step}", self._begun, time.time_ns()))

    def stop(self) -> None:
        """Nothing is watched any more. A call that begins under torch's profiler and ends after it would spoil the
        process's memory (torch 2.13), so all are waited for first. Raises RankLost."""
        self._trainer.clock.listener = self._trainer.passes.watched = None
        self._mesh.communicator.around = None
        settle_calls(self._mesh.communicator)
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize(self._mesh.device)
        if self.operators is not None:
            self.operators.stop()
        self._watch.__exit__(None, None, None)

    def rank_steps(self) -> RankSteps:
        """What was seen, on the clock that all ranks share."""
        return RankSteps(self._mesh.rank, self._zero + self._offset, self.spans, self.calls)

    def _annotated(self, name: str) -> AbstractContextManager[Any]:
        return torch.profiler.record_function(name) if self.operators is not None else ExitStack()

    def _mark(self, part: str) -> None:
        """A part of the step has ended, another begins."""
        now = time.time_ns()
        self._annotations.close()
        if part in _PARTS:
            self.spans.append(Span(_PARTS[part], _PARTS[part], _PARTS[part], self._marked, now))
        self._marked = now
        if part in _AFTER:
            self._annotations.enter_context(self._annotated(_AFTER[part]))

    @contextmanager
    def _compute_step(self, kind: Kind, stage: int, replica: int, micro_batch: int) -> Iterator[None]:
        label, name = self._names.of(kind, stage, replica, micro_batch)
        begun = time.time_ns()
        with self._annotated(label):
            yield
        where = {"stage": stage, "replica": replica, "micro_batch": micro_batch}
        self._marked = time.time_ns()
        self.spans.append(Span(WORDS[kind], label, name, begun, self._marked, where))


class _NamedCompute:
    """A `Compute` (parallel/pipeline.py) with each of its steps inside `around`."""

    def __init__(self, compute: Compute, around: Callable[[Kind, int, int, int], AbstractContextManager[None]]) -> None:
        self._compute, self._around = compute, around
        self.buffer = compute.buffer

    def forward(self, stage: int, replica: int, micro_batch: int, x: torch.Tensor | None) -> torch.Tensor | None:
        with self._around(Kind.FORWARD, stage, replica, micro_batch):
            return self._compute.forward(stage, replica, micro_batch, x)

    def backward(self, stage: int, replica: int, micro_batch: int, d_out: torch.Tensor | None) -> torch.Tensor | None:
        with self._around(Kind.BACKWARD, stage, replica, micro_batch):
            return self._compute.backward(stage, replica, micro_batch, d_out)

    def input_gradient(
        self, stage: int, replica: int, micro_batch: int, d_out: torch.Tensor | None
    ) -> torch.Tensor | None:
        with self._around(Kind.INPUT_GRADIENT, stage, replica, micro_batch):
            return self._compute.input_gradient(stage, replica, micro_batch, d_out)

    def weight_gradient(self, stage: int, replica: int, micro_batch: int) -> None:
        with self._around(Kind.WEIGHT_GRADIENT, stage, replica, micro_batch):
            self._compute.weight_gradient(stage, replica, micro_batch)


# --- clocks


def _clocks(mesh: Mesh) -> tuple[int, int]:
    """When the profile begins, on rank 0's clock, and how far this rank's clock is ahead of it (nanoseconds)."""
    size, rank = mesh.world_size, mesh.rank
    seen = torch.zeros(MEETINGS + 1, size, dtype=torch.int64)
    for meeting in range(MEETINGS):  # nobody leaves before all have come: they leave at nearly the same moment
        collectives.barrier(mesh.world, "profile.clocks")
        seen[meeting, rank] = time.time_ns()
    seen[MEETINGS, rank] = _machine()
    together = seen.to(mesh.device)
    collectives.all_reduce(together, mesh.world, "profile.clocks")
    *times, machines = together.tolist()
    return times[-1][0], clock_offset(times, machines, rank)


def _machine() -> int:
    """A number that processes with one clock share; another in every process where it is not known (not Linux)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        boot = os.urandom(16)
    return int.from_bytes(hashlib.sha256(boot).digest()[:7], "little")


# --- files


def _part(directory: Path, rank: int) -> Path:
    return directory / f".steps-{rank:05d}.json.gz"


def _operators(profiler: Any, path: Path) -> dict[str, Any]:
    """The trace that torch's profiler has taken; `path` is where it leaves it for a moment."""
    try:
        profiler.export_chrome_trace(str(path))
        if not path.exists():
            raise OSError(f"{path} could not be written")
        trace: dict[str, Any] = json.loads(path.read_bytes())
        return trace
    finally:
        path.unlink(missing_ok=True)


def _write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        with gzip.open(fresh, "wt", compresslevel=3) as file:
            json.dump(value, file)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def _read_json(path: Path) -> Any:
    with gzip.open(path, "rt") as file:
        return json.load(file)
