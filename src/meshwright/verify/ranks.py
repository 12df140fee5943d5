"""One rank of a layout under verification: the same problem through `parallel/`, and everything that it came to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from meshwright.collectives.named import named_programs
from meshwright.comm.collectives import all_reduce
from meshwright.comm.faults import Fault
from meshwright.comm.mesh import Mesh
from meshwright.errors import RanksDisagree
from meshwright.layout import Layout
from meshwright.model.parameters import parameter_table
from meshwright.model.partition import Partition
from meshwright.model.stage_times import program_for
from meshwright.model.transformer import Transformer
from meshwright.parallel.data import DataParallel, loss_share
from meshwright.parallel.pieces import Piece
from meshwright.parallel.stage_compute import MicroBatch
from meshwright.parallel.step import ForwardBackward, count_terms
from meshwright.recipe import CollectivesRecipe
from meshwright.verify.problem import Problem, make_batch, share_of
from meshwright.verify.reference import tensors_of

VERDICT_SITE = "step.verdict"


@dataclass
class RankResult:
    """What one rank saw: per step the global loss, the global norm and the gradients it holds; its masters at the end;
    the loss of one more batch; the calls of the first step and of all; how often the planted fault struck; why ranks
    that noticed a fault by themselves went no further."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[list[Piece]] = field(default_factory=list)
    masters: list[Piece] = field(default_factory=list)
    final_loss: float = math.nan
    calls_first_step: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    struck: int = 0
    refused: str | None = None


def run_rank(
    problem: Problem,
    layout_text: str,
    collectives: CollectivesRecipe | None = None,
    faults: Sequence[Fault | None] = (None,),
    poison: int | None = None,
) -> list[RankResult]:
    """Run the problem on this rank once for each of `faults` (None: nothing is spoilt), all over one mesh. `poison`: in
    this step the last rank makes a value that is not a number. `collectives`: the programs that a recipe names."""
    layout = Layout.parse(layout_text)
    programs = named_programs(collectives or CollectivesRecipe(), layout)
    mesh = Mesh.create(layout, timeout_seconds=60.0, programs=programs)
    try:
        results = []
        for fault in faults:
            mesh.plant(fault)
            mesh.record.clear()
            try:
                results.append(_run(problem, layout, mesh, poison))
            except RanksDisagree as error:  # on all of them, and nobody waits for anybody
                results.append(RankResult(struck=mesh.faults.struck, refused=str(error)))
        return results
    finally:
        mesh.close()


def _run(problem: Problem, layout: Layout, mesh: Mesh, poison: int | None) -> RankResult:
    dtype = getattr(torch, problem.dtype)
    table, program = parameter_table(problem.config), program_for(layout, problem.config, problem.sequence)
    partition = Partition.of(program, problem.config, table, problem.sequence)
    stages = partition.held(mesh.pp.rank)
    model = Transformer(problem.config, axes=mesh, dtype=dtype, recompute=layout.recompute, stages=stages)
    parallel = DataParallel(
        model, table, mesh, seed=problem.seed, parameter_dtype=dtype, master_dtype=dtype, partition=partition
    )
    preference = problem.preference
    passes = ForwardBackward(model, parallel, program, add_at_once_from=0, preference=preference)  # as large models do
    result = RankResult()
    for step in range(problem.steps):
        batches = _micro_batches(problem, step, layout, mesh)
        terms = count_terms(batches, mesh)
        with _poisoned(model) if step == poison and mesh.rank == mesh.world_size - 1 else nullcontext():
            total = passes.train(batches, terms)
        verdict = torch.stack([loss_share(total, mesh, preference is not None), parallel.squared_norm_share()])
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
    # The loss of one more batch shows the last update as the model sees it.
    batches = _micro_batches(problem, problem.steps, layout, mesh)
    total = loss_share(passes.evaluate(batches, count_terms(batches, mesh)), mesh, preference is not None)
    all_reduce(total, mesh.world, VERDICT_SITE)
    result.final_loss = float(total)
    result.calls = mesh.record.table()
    result.struck = mesh.faults.struck
    return result


def _micro_batches(problem: Problem, step: int, layout: Layout, mesh: Mesh) -> list[MicroBatch]:
    """What this rank trains on in a step."""
    batches = share_of(make_batch(problem, step), mesh.dp.rank, mesh.dp.size, layout.micro_batches)
    return [tensors_of(batch, mesh) for batch in batches]


@contextmanager
def _poisoned(model: Transformer) -> Iterator[None]:
    """Inside, what the first layer here gives is not a number."""
    block = next(block for block in model.layers if block is not None)
    hook = block.register_forward_hook(lambda module, inputs, output: (output[0] * math.nan, output[1]))
    try:
        yield
    finally:
        hook.remove()


def _copied(pieces: list[Piece]) -> list[Piece]:
    return [replace(piece, tensor=piece.tensor.clone()) for piece in pieces]
