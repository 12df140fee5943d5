"""Functions that the ranks of test_pipeline.py run: toy stages of uneven widths, in float64."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.comm.faults import Fault
from meshwright.comm.mesh import Mesh
from meshwright.errors import RankLost
from meshwright.layout import Layout
from meshwright.parallel.pipeline import Key, Pipeline
from meshwright.program.pipeline import Kind, PipelineProgram
from meshwright.program.pipeline_text import parse_pipeline
from meshwright.schedules.library import generate
from tests.program.pipeline_interpreter import random_program

ROWS = 2


def width(stage: int) -> int:
    """Number of columns of a stage's input; neighbours differ."""
    return 3 + stage % 3


def weight(stage: int) -> torch.Tensor:
    make = torch.Generator().manual_seed(stage)
    return torch.randn(width(stage), width(stage + 1), generator=make, dtype=torch.float64)


def sample(micro_batch: int) -> torch.Tensor:
    make = torch.Generator().manual_seed(1000 + micro_batch)
    return torch.randn(ROWS, width(0), generator=make, dtype=torch.float64)


def truth(stages: int, micro_batches: int) -> tuple[list[torch.Tensor], float]:
    """Gradients of all stages and the loss, on one device."""
    weights = [weight(stage).requires_grad_() for stage in range(stages)]
    loss = torch.zeros((), dtype=torch.float64)
    for micro_batch in range(micro_batches):
        x = sample(micro_batch)
        for each in weights:
            x = (x @ each).tanh()
        loss = loss + x.square().sum()
    loss.backward()
    return [each.grad for each in weights], loss.item()


class Toy:
    """Stages tanh(x W) with autograd; the lifetimes of transferred tensors are recorded."""

    def __init__(self, program: PipelineProgram) -> None:
        self.last = program.stages - 1
        self.weights: dict[int, torch.Tensor] = {}
        self.kept: dict[tuple[int, int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self.queued: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.gradients: dict[int, torch.Tensor] = {}
        self.loss, self.peak = 0.0, 0
        self.alive: dict[str, StorageWeakRef] = {}
        self.late: list[str] = []  # outputs still alive when their gradient has arrived
        self.calls: Counter[str] = Counter()

    def run(self, kind: Kind, key: Key, x: torch.Tensor | None) -> torch.Tensor | None:
        if kind == Kind.WEIGHT_GRADIENT:
            return self.weight_gradient(*key)
        of_kind = {Kind.FORWARD: self.forward, Kind.BACKWARD: self.backward, Kind.INPUT_GRADIENT: self.input_gradient}
        return of_kind[kind](*key, x)

    def forward(self, stage: int, replica: int, micro_batch: int, x: torch.Tensor | None) -> torch.Tensor | None:
        self.calls["F"] += 1
        assert (x is None) == (stage == 0)
        if x is None:
            x = sample(micro_batch)
        else:
            assert x.shape == (ROWS, width(stage)) and not x.requires_grad
            x = x.requires_grad_()
            self.alive[f"input {stage} {replica} {micro_batch}"] = StorageWeakRef(x.untyped_storage())
        weight_ = self.weights.setdefault(stage, weight(stage).requires_grad_())
        y = (x @ weight_).tanh()
        self.kept[stage, replica, micro_batch] = x if stage else None, y
        self.peak = max(self.peak, len(self.kept) + len(self.queued))
        if stage == self.last:
            self.loss += y.square().sum().item()
            return None
        out = y + 0.0  # a separate tensor that nothing here references
        self.alive[f"output {stage} {replica} {micro_batch}"] = StorageWeakRef(out.untyped_storage())
        return out

    def _begin(self, stage: int, replica: int, micro_batch: int, d_out: torch.Tensor | None) -> Any:
        x, y = self.kept.pop((stage, replica, micro_batch))
        if d_out is None:
            d_out = 2 * y.detach()
        else:
            assert d_out.shape == y.shape
            sent = f"input {stage + 1} {replica} {micro_batch}" not in self.alive
            if sent and not self.alive[f"output {stage} {replica} {micro_batch}"].expired():
                self.late.append(f"output {stage} {replica} {micro_batch}")
            self.alive[f"gradient {stage} {replica} {micro_batch}"] = StorageWeakRef(d_out.untyped_storage())
        return x, y, d_out

    def _add(self, stage: int, gradient: torch.Tensor) -> None:
        self.gradients[stage] = self.gradients.get(stage, 0) + gradient

    def backward(self, stage: int, replica: int, micro_batch: int, d_out: torch.Tensor | None) -> torch.Tensor | None:
        self.calls["B"] += 1
        x, y, d_out = self._begin(stage, replica, micro_batch, d_out)
        if x is None:
            self._add(stage, *torch.autograd.grad(y, self.weights[stage], d_out))
            return None
        dx, dw = torch.autograd.grad(y, (x, self.weights[stage]), d_out)
        self._add(stage, dw)
        return dx

    def input_gradient(
        self, stage: int, replica: int, micro_batch: int, d_out: torch.Tensor | None
    ) -> torch.Tensor | None:
        self.calls["I"] += 1
        x, y, d_out = self._begin(stage, replica, micro_batch, d_out)
        self.queued[stage, replica, micro_batch] = y, d_out
        return None if x is None else torch.autograd.grad(y, x, d_out, retain_graph=True)[0]

    def weight_gradient(self, stage: int, replica: int, micro_batch: int) -> None:
        self.calls["W"] += 1
        y, d_out = self.queued.pop((stage, replica, micro_batch))
        self._add(stage, *torch.autograd.grad(y, self.weights[stage], d_out))

    def buffer(self, key: Key) -> torch.Tensor:
        return torch.full((ROWS, width(key[0])), torch.nan, dtype=torch.float64)


def run(program: PipelineProgram, mesh: Mesh, steps: int = 1) -> dict[str, Any]:
    """Gradients and loss of this rank after `steps` runs, and the runtime's peak memory."""
    pipeline = Pipeline(program, mesh.pp)
    for _ in range(steps):
        toy = Toy(program)
        pipeline.run(toy)
    assert not toy.kept and not toy.queued
    gradients = {stage: gradient.numpy() for stage, gradient in toy.gradients.items()}
    left = [name for name, storage in toy.alive.items() if not storage.expired()]
    return {
        "gradients": gradients,
        "loss": toy.loss,
        "peak": toy.peak / program.chunks,
        "promised": float(pipeline.checked.peak_activations[mesh.pp.rank]),
        "late": toy.late,
        "left": left,
        "calls": dict(toy.calls),
        "record": mesh.record.table(),
    }


def named(names: list[str], ranks: int, micro_batches: int, layout: str, steps: int = 2) -> list[dict[str, Any]]:
    """Run each schedule (a name, or `@FILE`) `steps` times over the same mesh."""
    mesh = Mesh.create(Layout.parse(layout))
    results = []
    for name in names:
        mesh.record.clear()
        results.append(run(generate(name, ranks, micro_batches), mesh, steps))
    mesh.close()
    return results


def random_ones(seeds: list[int], layout: str) -> list[dict[str, Any]]:
    mesh = Mesh.create(Layout.parse(layout))
    results = [run(random_program(random.Random(seed)), mesh) for seed in seeds]
    mesh.close()
    return results


def spoilt(site: str, kind: str, call: int | None = None) -> tuple[float, list[Any], int]:
    """Loss, gradients and the number of calls with the fault."""
    mesh = Mesh.create(Layout(pp=2, micro_batches=3))
    mesh.faults.inject(Fault(site, "transfer", kind, call=call))
    result = run(generate("1f1b", 2, 3), mesh)
    struck = mesh.faults.affected_calls
    mesh.close()
    return result["loss"], list(result["gradients"].values()), struck


PASSING = "pipeline x\nranks 2\nmicro-batches 1\nplacement 0 1\nrank 0\n0F0\n0B0\nrank 1\n1F0\n1B0\n"


def left_alone(absent: int) -> str:
    """Error message of a rank whose neighbour never arrives."""
    mesh = Mesh.create(Layout(pp=2), timeout_seconds=0.5)
    if mesh.rank == absent:
        return ""
    with pytest.raises(RankLost) as error:
        Pipeline(parse_pipeline(PASSING), mesh.pp).run(Toy(parse_pipeline(PASSING)))
    return str(error.value)
