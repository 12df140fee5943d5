"""Search space: candidate layouts of a pipeline stage, each with the sequences of a micro-batch, and candidate
pipelines. The numbers of replicas and micro-batches follow from the cluster and the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from typing import NamedTuple

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.names import RECOMPUTE, SCHEDULE_CHUNKS
from meshwright.planner.cost.communication import divisors
from meshwright.planner.cost.engines import Engine
from meshwright.planner.problem import Problem, StageCandidate
from meshwright.spec.config import ModelConfig
from meshwright.spec.refuse import refuse

MOST_ROWS = 16
"""Largest number of sequences in a micro-batch that the search tries: more do not make matrix products faster."""

LEAST_TOKENS = 512
"""Smallest number of tokens of a sequence on a cp rank: with fewer, messages take longer than attention."""

CHUNKS = (2, 3, 4, 5, 6, 8)
"""Stages per rank that the search tries for interleaved schedules."""


class PipelineCandidate(NamedTuple):
    """A candidate pipeline, without its number of micro-batches. ranks: pipeline ranks; schedule: such as "1f1b";
    chunks: model chunks (stages) of each rank."""

    ranks: int
    schedule: str
    chunks: int


def candidates(problem: Problem) -> list[StageCandidate]:
    """Return all candidate layouts of a pipeline stage, each with a number of sequences of a micro-batch. The model and
    the engine allow all of them for some number of stages."""
    every_rows = [rows for rows in divisors(problem.batch) if rows <= MOST_ROWS]
    layouts = (stage.with_(recompute=recompute) for stage in _stages(problem) for recompute in RECOMPUTE)
    return [StageCandidate(layout, rows) for layout in layouts for rows in every_rows]


def _stages(problem: Problem) -> Iterator[Layout]:
    """Yield all candidate layouts of a pipeline stage that the model and the engine allow; recompute is not yet
    chosen."""
    config, engine = problem.config, problem.engine
    devices = problem.cluster.devices
    for tp in divisors(devices):
        # Across nodes tensor parallelism waits for the network in every product.
        if tp > problem.cluster.devices_per_node or (tp > 1 and "tp" not in engine.axes):
            continue
        for cp in divisors(devices // tp):
            if cp > 1 and (problem.sequence // cp < LEAST_TOKENS or "cp" not in engine.axes):
                continue
            for ep, etp in _experts(config, engine, devices, tp):
                for whole, method in product((True, False)[: 1 + (tp > 1)], ("ring", "ulysses")[: 1 + (cp > 1)]):
                    with suppress(UserError):
                        layout = Layout(
                            dp=ep * etp, tp=tp, tensor_sequence_parallel=whole, cp=cp, cp_method=method, ep=ep, etp=etp
                        )
                        refuse(layout, config, layout.dp, problem.sequence, planning=True)
                        yield layout


def _experts(config: ModelConfig, engine: Engine, devices: int, tp: int) -> Iterator[tuple[int, int]]:
    """Yield the candidate sizes (ep, etp) of expert parallelism, (1, 1) first. devices: number of devices of a pipeline
    stage. tp: number of tensor-parallel ranks."""
    yield 1, 1
    if config.experts and "ep" in engine.axes:
        for ep in divisors(config.experts):
            for etp in {1, tp}:
                if ep * etp > 1 and devices % (ep * etp) == 0:
                    yield ep, etp


def pipeline_candidates(problem: Problem) -> Iterator[PipelineCandidate]:
    """Yield all candidate pipelines (ranks, schedule, chunks) that the engine and the model's number of layers
    allow."""
    config, engine = problem.config, problem.engine
    for ranks in divisors(problem.cluster.devices):
        if ranks == 1:
            yield PipelineCandidate(1, "1f1b", 1)
            continue
        if "pp" not in engine.axes or ranks > config.layers or config.encoder:  # `refuse` has the reason
            continue
        for schedule in engine.schedules:
            usual, _, most = SCHEDULE_CHUNKS[schedule]
            for chunks in CHUNKS if most is None else (usual,):
                if ranks * chunks <= config.layers and not (schedule in ("dualpipe", "chimera") and ranks % 2):
                    yield PipelineCandidate(ranks, schedule, chunks)


def layout_of(
    problem: Problem, candidate: StageCandidate, pipeline: PipelineCandidate, zero: int, hybrid: int
) -> Layout:
    """Return the layout that combines a candidate stage with a pipeline. zero: ZeRO stage; hybrid: number of ranks of a
    ZeRO sharding group, 0 for all data-parallel ranks."""
    one = candidate.layout
    dp = problem.cluster.devices // (one.tp * one.cp * pipeline.ranks)
    return one.with_(
        dp=dp, zero=zero, hybrid=hybrid or None, pp=pipeline.ranks, schedule=pipeline.schedule, chunks=pipeline.chunks,
        micro_batches=problem.batch // (dp * candidate.rows), precision=problem.precision,
    )  # fmt: skip
