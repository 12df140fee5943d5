"""One rank of a layout under verification: the same problem through `parallel/`, and everything that it came to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from meshwright.collectives.named import named_programs
from meshwright.comm.collectives import all_reduce
from meshwright.comm.faults import Fault
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.model.parameters import parameter_table
from meshwright.model.transformer import Transformer
from meshwright.parallel.data import DataParallel, count_targets, loss_share
from meshwright.parallel.pieces import Piece
from meshwright.recipe import CollectivesRecipe
from meshwright.verify.problem import Problem, make_batch, share_of
from meshwright.verify.reference import loss_sum, tensors_of

VERDICT_SITE = "step.verdict"


@dataclass
class RankResult:
    """What one rank saw: per step the global loss, the global norm and the gradients it holds; its masters at the end;
    the loss of one more batch; the calls of the first step and of all; how often the planted fault struck."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[list[Piece]] = field(default_factory=list)
    masters: list[Piece] = field(default_factory=list)
    final_loss: float = math.nan
    calls_first_step: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    struck: int = 0


def run_rank(
    problem: Problem,
    layout_text: str,
    collectives: CollectivesRecipe | None = None,
    faults: Sequence[Fault | None] = (None,),
    poison: int | None = None,
) -> list[RankResult]:
    """Run the problem on this rank once for each of `faults` (None: nothing is spoilt), all over one mesh. `poison`: in
    this step the last rank's loss is not a number. `collectives`: the programs that a recipe names."""
    layout = Layout.parse(layout_text)
    programs = named_programs(collectives or CollectivesRecipe(), layout)
    mesh = Mesh.create(layout, timeout_seconds=60.0, programs=programs)
    try:
        results = []
        for fault in faults:
            mesh.faults.plant(fault)
            mesh.record.clear()
            results.append(_run(problem, layout, mesh, poison))
        return results
    finally:
        mesh.close()


def _run(problem: Problem, layout: Layout, mesh: Mesh, poison: int | None) -> RankResult:
    dtype = getattr(torch, problem.dtype)
    model = Transformer(problem.config, axes=mesh, dtype=dtype, recompute=layout.recompute)
    table = parameter_table(problem.config)
    parallel = DataParallel(model, table, mesh, seed=problem.seed, parameter_dtype=dtype, master_dtype=dtype)
    result = RankResult()
    for step in range(problem.steps):
        batches = share_of(make_batch(problem, step), mesh.dp.rank, mesh.dp.size, layout.micro_batches)
        targets = count_targets((tensors_of(batch, mesh)[1] for batch in batches), mesh)
        parallel.begin_step(len(batches))
        total = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            loss = loss_sum(model, batch, parallel) / targets
            if step == poison and mesh.rank == mesh.world_size - 1:
                loss = loss * math.nan
            parallel.backward(loss)
            total += loss.detach()
        parallel.finish()
        verdict = torch.stack([loss_share(total, mesh), parallel.squared_norm_share()])
        all_reduce(verdict, mesh.world, VERDICT_SITE)
        result.losses.append(float(verdict[0]))
        result.norms.append(math.sqrt(float(verdict[1])))
        gradients = [shard.gradient for shard in parallel.shards]
        result.gradients.append(_copied(parallel.pieces_like("gradient", gradients, owned=False)))
        if bool(verdict.isfinite().all()):
            for shard in parallel.shards:
                shard.master.sub_(shard.gradient, alpha=problem.learning_rate)
            parallel.publish()
        if step == 0:
            result.calls_first_step = mesh.record.table()
    result.masters = _copied(parallel.master_pieces(owned=False))
    result.final_loss = _final_loss(problem, layout, mesh, model, parallel)
    result.calls = mesh.record.table()
    result.struck = mesh.faults.struck
    return result


def _final_loss(problem: Problem, layout: Layout, mesh: Mesh, model: Transformer, parallel: DataParallel) -> float:
    """The loss of the batch after the last step, without gradients: it shows the last update as the model sees it."""
    batches = share_of(make_batch(problem, problem.steps), mesh.dp.rank, mesh.dp.size, layout.micro_batches)
    targets = count_targets((tensors_of(batch, mesh)[1] for batch in batches), mesh)
    total = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for batch in batches:
            total += loss_sum(model, batch, parallel) / targets
    total = loss_share(total, mesh)
    all_reduce(total, mesh.world, VERDICT_SITE)
    return float(total)


def _copied(pieces: list[Piece]) -> list[Piece]:
    return [replace(piece, tensor=piece.tensor.clone()) for piece in pieces]
