"""2 and 4 processes on two cores: our pipeline runtime against torch.distributed.pipelining, schedule by schedule.

Both sides run the same schedule over the same stages with the same initial values, micro-batches and optimizer, AdamW;
the stage modules of the peer are made of our blocks and our loss, so that the runtimes alone differ. In every pair of
turns each side runs one step, in alternating order, within the same processes. Losses must agree.

    python bench/pipeline.py [--pairs 16] [--only pp2-zb-v ...] [--small]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

sys.path.insert(0, str(Path(__file__).parent))
from common import paired_ratio, write_result
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.model.documents import ONE_DOCUMENT, MicroBatch
from meshwright.model.initialise import extract_entry, initial_value
from meshwright.model.loss import linear_cross_entropy
from meshwright.model.transformer import Transformer
from meshwright.monitoring.memory import keep_freed_memory
from meshwright.parallel.parallelize import build_axes
from meshwright.parallel.step import ForwardBackward
from meshwright.parallel.zero_engine import ZeroEngine
from meshwright.recipe import Recipe
from meshwright.schedules.library import generate_for_layout
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_from_recipe import config_from_recipe
from meshwright.spec.parameters import parameter_table
from meshwright.spec.partition import Partition
from meshwright.spec.stages import Stage
from meshwright.training.optimizer import Optimizer

SHAPE = {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 8, "intermediate": 1408, "vocabulary": 4096}
SMALL = {"layers": 8, "hidden": 64, "heads": 2, "kv_heads": 2, "intermediate": 176, "vocabulary": 512}
SEQUENCE, SMALL_SEQUENCE = 256, 64
WARM = 2
SEED, RATE = 0, 1e-4


class Race(NamedTuple):
    """One comparison: the layout, and the peer's schedule."""

    layout: str
    peer: str


PEERS = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zb-v": ScheduleZBVZeroBubble,
}
RACES = {f"pp{ranks}-{name}": Race(f"pp{ranks}:{name} mb{2 * ranks}", name) for ranks in (2, 4) for name in PEERS}


def recipe(shape: dict[str, int], sequence: int) -> Recipe:
    """The model and optimizer of the race: a llama of 30 M parameters, AdamW."""
    return Recipe.from_tables(
        {
            "layout": "dp1",
            "model": {"family": "llama", "tied": False, **shape},
            "data": {"source": "stdlib", "tokenizer": "bytes", "sequence": sequence},
            "train": {"steps": 1000, "batch": 8, "learning_rate": RATE},
        }
    )


class Problem(NamedTuple):
    """What both sides are given on one rank: the stages here and everybody's micro-batches."""

    config: ModelConfig
    layout: Layout
    partition: Partition
    mesh: Mesh
    tokens: torch.Tensor  # [M, S]
    targets: torch.Tensor
    settings: Recipe


def ours(problem: Problem) -> Callable[[], float | None]:
    mesh, partition = problem.mesh, problem.partition
    model = Transformer(problem.config, axes=build_axes(mesh), device="meta", stages=partition.stages_on(mesh.pp.rank))
    table = partition.table
    parallel = ZeroEngine(model, table, mesh, seed=SEED, parameter_dtype=torch.float32, partition=partition)
    runtime = ForwardBackward(model, parallel, generate_for_layout(problem.layout))
    optimizer = Optimizer(parallel.shards, problem.settings.train)
    micro_batches = [
        MicroBatch(tokens[None], targets[None], ONE_DOCUMENT)
        for tokens, targets in zip(problem.tokens, problem.targets, strict=True)
    ]
    last = any(stage.last for stage in partition.stages_on(mesh.pp.rank))

    def step() -> float | None:
        loss = runtime.train(micro_batches, problem.targets.numel())
        optimizer.step(RATE, 1.0)
        parallel.all_gather_parameters()
        return float(loss) if last else None

    return step


class Part(nn.Module):
    """One stage as PyTorch's runtime wants it: a module from what enters to what leaves."""

    def __init__(self, config: ModelConfig, stage: Stage, entries: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.stage, self.model = stage, Transformer(config, stages=[stage])
        self.register_buffer("places", torch.zeros(1, 0, dtype=torch.int64))
        table, parameters = parameter_table(config), dict(self.model.named_parameters())
        with torch.no_grad():
            for entry in table.entries:
                if entry.tensor in parameters:
                    extract_entry(parameters[entry.tensor], entry).copy_(entries[entry.name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stage.first:
            return self.model.hidden(x, stage=self.stage)
        tokens = self.places.new_zeros(x.shape[:2])  # only their number matters
        return self.model.hidden(tokens, stage=self.stage, x_BSH=x)


def theirs(problem: Problem) -> Callable[[], float | None]:
    config, mesh, layout = problem.config, problem.mesh, problem.layout
    held = problem.partition.stages_on(mesh.pp.rank)
    entries = {entry.name: initial_value(entry, SEED) for entry in problem.partition.table.entries}
    parts = [Part(config, stage, entries) for stage in held]
    count = len(problem.partition.stages)
    sequence = problem.tokens.shape[1]
    hidden = torch.empty(1, sequence, config.hidden)
    stages = [
        PipelineStage(
            part, part.stage.index, count, torch.device("cpu"),
            input_args=(problem.tokens[:1] if part.stage.first else hidden.clone().requires_grad_(),),
            output_args=hidden.clone().requires_grad_(), group=mesh.pp.group,
        )
        for part in parts
    ]  # fmt: skip
    last = next((part for part in parts if part.stage.last), None)

    def loss_of(hidden_BSH: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert last is not None
        total = linear_cross_entropy(hidden_BSH.flatten(0, 1), targets.flatten(), last.model.output_head())
        return total / targets.numel()

    schedule_class = PEERS[layout.schedule]
    given = stages if layout.chunks > 1 else stages[0]
    schedule = schedule_class(given, layout.micro_batches, loss_fn=loss_of)  # it divides by the number of micro-batches
    parameters = [p for part in parts for p in part.parameters()]
    train = problem.settings.train
    decayed = [p for p in parameters if p.ndim > 1]
    plain = [p for p in parameters if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=tuple(train.betas), eps=train.epsilon, fused=True)

    def step() -> float | None:
        losses: list[torch.Tensor] = []
        inputs = [problem.tokens] if any(stage.first for stage in held) else []
        goals: dict[str, Any] = {"target": problem.targets, "losses": losses} if last is not None else {}
        schedule.step(*inputs, **goals)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).detach().mean()) if last is not None else None

    return step


def race(layout_text: str, pairs: int, small: bool) -> dict[str, Any]:
    """On one rank: the seconds of every step of both sides (wall and of this process), and the losses it has."""
    keep_freed_memory()  # as in every rank of `meshwright train`; the same for both contenders
    shape, sequence = (SMALL, SMALL_SEQUENCE) if small else (SHAPE, SEQUENCE)
    settings, layout = recipe(shape, sequence), Layout.parse(layout_text)
    config = config_from_recipe(settings.model, sequence, shape["vocabulary"])
    mesh = Mesh.create(layout)
    partition = Partition.of(generate_for_layout(layout), config, parameter_table(config), sequence)
    random = torch.Generator().manual_seed(0)
    tokens, targets = (
        torch.randint(0, shape["vocabulary"], (layout.micro_batches, sequence), generator=random) for _ in range(2)
    )
    problem = Problem(config, layout, partition, mesh, tokens, targets, settings)
    sides = {"ours": ours(problem), "theirs": theirs(problem)}
    losses = {side: [step() for _ in range(WARM)] for side, step in sides.items()}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    processor: dict[str, list[float]] = {side: [] for side in sides}
    for pair in range(pairs):
        for side in sorted(sides, reverse=pair % 2 == 1):
            dist.barrier()
            begun, busy = time.perf_counter(), time.process_time()
            losses[side].append(sides[side]())
            processor[side].append(time.process_time() - busy)
            dist.barrier()
            seconds[side].append(time.perf_counter() - begun)
    return {"seconds": seconds, "processor_seconds": processor, "losses": losses}


def compare(name: str, pairs: int, small: bool) -> dict[str, Any]:
    """Run one race and say who was faster, and by how much losses differ."""
    layout = Layout.parse(RACES[name].layout)
    with LocalRanks(layout.world_size, threads=1, timeout=3600) as ranks:
        every = ranks.run("pipeline:race", str(layout), pairs, small)
    seconds = every[0]["seconds"]
    processor = {
        side: [sum(rank["processor_seconds"][side][pair] for rank in every) for pair in range(pairs)]
        for side in seconds
    }
    losses = next(rank["losses"] for rank in every if rank["losses"]["ours"][0] is not None)
    difference = max(abs(mine - other) for mine, other in zip(losses["ours"][:4], losses["theirs"][:4], strict=True))
    assert difference < 1e-4, (name, losses)
    result = {
        "layout": str(layout),
        "peer": PEERS[RACES[name].peer].__name__,
        "ours_seconds": round(statistics.median(seconds["ours"]), 4),
        "theirs_seconds": round(statistics.median(seconds["theirs"]), 4),
        "speed_ratio": paired_ratio(seconds["ours"], seconds["theirs"]),
        "processor_seconds_ratio": paired_ratio(processor["ours"], processor["theirs"]),  # sum over ranks
        "largest_loss_difference_of_4_steps": difference,
    }
    print(name, result, file=sys.stderr, flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument(
        "--only", choices=RACES, action="append", help="run only this comparison; keep the results of the others"
    )
    parser.add_argument("--small", action="store_true", help="a tiny model to test the script; write no results")
    arguments = parser.parse_args()
    names = arguments.only or list(RACES)
    results = {name: compare(name, arguments.pairs, arguments.small) for name in names}
    if arguments.small:
        return
    if arguments.only:
        earlier = json.loads((Path(__file__).parent / "results" / "pipeline.json").read_text())["races"]
        results = {name: (earlier | results)[name] for name in RACES}
    parameters = parameter_table(config_from_recipe(recipe(SHAPE, SEQUENCE).model, SEQUENCE, SHAPE["vocabulary"])).numel
    shape = {**SHAPE, "sequence": SEQUENCE, "rows_per_micro_batch": 1, "parameters": parameters}
    write_result("pipeline", {"threads": 1, "shape": shape, "peer": "torch.distributed.pipelining", "races": results})


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
