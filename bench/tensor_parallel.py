"""2 and 4 processes on two cores: our tensor parallelism against torch `parallelize_module`, as torchtitan uses it.

The same shape, initial values and batches on both sides, and the whole step: forward, backward, clipping, AdamW. In
every pair of turns each side runs one step, in alternating order, within the same processes. Losses must agree.
In bf16 the peer computes under autocast with float32 parameters, ours with bf16 parameters and float32 masters.

    python bench/tensor_parallel.py [--pairs 8] [--only tp2-fp32]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
from bench.shared.engine_step import make_engine_step
from common import paired_ratio, write_result
from llama_dtensor import Llama, load, shard, split
from meshwright.comm.local import LocalRanks
from meshwright.layout import Layout
from meshwright.monitoring.memory import keep_freed_memory
from meshwright.recipe import Recipe
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_from_recipe import config_from_recipe
from meshwright.spec.parameters import parameter_table

SHAPE = {"layers": 3, "hidden": 1024, "heads": 16, "kv_heads": 16, "intermediate": 2816, "vocabulary": 8192}
SEQUENCE, ROWS = 512, 1  # tokens per sequence; sequences per replica and step
WARM = 2
SEED = 0
RATE = 1e-4


class Race(NamedTuple):
    """One comparison: ours is run under `layout`; the peer splits and shards alike."""

    layout: str
    precision: str


RACES = {
    "tp2-fp32": Race("tp2", "fp32"),
    "tp2-nosp-fp32": Race("tp2:nosp", "fp32"),
    "tp2-bf16": Race("tp2", "bf16"),
    "tp4-fp32": Race("tp4", "fp32"),
    "tp4-nosp-fp32": Race("tp4:nosp", "fp32"),
    "tp4-bf16": Race("tp4", "bf16"),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def recipe() -> Recipe:
    """The model and optimizer of the race: a llama of 55 M parameters, AdamW."""
    return Recipe.from_tables(
        {
            "layout": "dp1",
            "model": {"family": "llama", "tied": False, **SHAPE},
            "data": {"source": "stdlib", "tokenizer": "bytes", "sequence": SEQUENCE},
            "train": {"steps": 1000, "batch": ROWS, "learning_rate": RATE},
        }
    )


def theirs(config: ModelConfig, layout: Layout, dtype: torch.dtype) -> Callable[[Any], float]:
    model = Llama(config, SEQUENCE)
    load(model, config, SEED)
    mesh = init_device_mesh("cpu", (layout.dp, layout.tp), mesh_dim_names=("dp", "tp"))
    split(model, mesh["tp"], layout.tensor_sequence_parallel)
    if layout.zero == 3:
        shard(model, mesh["dp"], dtype)
    autocast = dtype != torch.float32 and layout.zero == 0
    train = recipe().train
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=tuple(train.betas), eps=train.epsilon, fused=True)

    def step(batch: Any) -> float:
        tokens, goals = batch
        with loss_parallel():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), goals.flatten())
            loss.backward()
        clip(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total = loss.detach()
        total = (total.full_tensor() if isinstance(total, DTensor) else total).clone()
        dist.all_reduce(total, group=mesh["dp"].get_group())
        return float(total) / layout.dp

    return step


def clip(parameters: list[torch.nn.Parameter]) -> None:
    """Clip to a norm of 1 as torchtitan does; without sequence parallelism norms are plain parameters."""
    kinds: dict[bool, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    squares = []
    for alike in kinds.values():
        norm = torch.nn.utils.get_total_norm([p.grad for p in alike if p.grad is not None])
        squares.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).square())
    total = torch.stack(squares).sum().sqrt()
    for alike in kinds.values():
        torch.nn.utils.clip_grads_with_norm_(alike, 1.0, total)


def race(layout_text: str, precision: str, pairs: int) -> dict[str, Any]:
    """On one rank: the seconds of every step of both sides (wall and of this process), and all losses."""
    keep_freed_memory()  # as in every rank of `meshwright train`; the same for both contenders
    dtype, layout = DTYPES[precision], Layout.parse(layout_text)
    config = config_from_recipe(recipe().model, SEQUENCE, SHAPE["vocabulary"])
    sides = {
        "ours": make_engine_step(config, layout, dtype, SEED, recipe().train),
        "theirs": theirs(config, layout, dtype),
    }
    random = torch.Generator().manual_seed(layout.coordinates(dist.get_rank())["dp"])
    batch = tuple(torch.randint(0, SHAPE["vocabulary"], (ROWS, SEQUENCE), generator=random) for _ in range(2))
    losses = {side: [step(batch) for _ in range(WARM)] for side, step in sides.items()}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    processor: dict[str, list[float]] = {side: [] for side in sides}
    for pair in range(pairs):
        for side in sorted(sides, reverse=pair % 2 == 1):
            dist.barrier()
            begun, busy = time.perf_counter(), time.process_time()
            losses[side].append(sides[side](batch))
            processor[side].append(time.process_time() - busy)
            dist.barrier()
            seconds[side].append(time.perf_counter() - begun)
    return {"seconds": seconds, "processor_seconds": processor, "losses": losses}


def compare(name: str, races: dict[str, Race], pairs: int) -> dict[str, Any]:
    """Run one race and say who was faster, and by how much losses differ."""
    layout, precision = races[name]
    with LocalRanks(Layout.parse(layout).world_size, threads=1, timeout=3600) as ranks:
        every = ranks.run("tensor_parallel:race", layout, precision, pairs)
    first = every[0]
    seconds = first["seconds"]
    processor = {
        side: [sum(rank["processor_seconds"][side][pair] for rank in every) for pair in range(pairs)]
        for side in seconds
    }
    # First steps only: both overfit one batch, and rounding differences grow.
    losses = zip(first["losses"]["ours"][:4], first["losses"]["theirs"][:4], strict=True)
    difference = max(abs(mine - other) for mine, other in losses)
    assert difference < {"fp32": 1e-4, "bf16": 2e-2}[precision], (name, first["losses"])
    result = {
        "layout": layout,
        "precision": precision,
        "processes": len(every),
        "ours_seconds": round(statistics.median(seconds["ours"]), 4),
        "theirs_seconds": round(statistics.median(seconds["theirs"]), 4),
        "speed_ratio": paired_ratio(seconds["ours"], seconds["theirs"]),
        "processor_seconds_ratio": paired_ratio(processor["ours"], processor["theirs"]),  # sum over ranks
        "largest_loss_difference_of_4_steps": difference,
    }
    print(name, result, file=sys.stderr)
    return result


def run(benchmark: str, races: dict[str, Race], peer: str, description: str | None) -> None:
    """The command line of a script of races."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--only", choices=races)
    arguments = parser.parse_args()
    names = [arguments.only] if arguments.only else list(races)
    results = {name: compare(name, races, arguments.pairs) for name in names}
    if arguments.only:
        return
    parameters = parameter_table(config_from_recipe(recipe().model, SEQUENCE, SHAPE["vocabulary"])).numel
    shape = {**SHAPE, "sequence": SEQUENCE, "rows_per_replica": ROWS, "parameters": parameters}
    write_result(benchmark, {"threads": 1, "shape": shape, "peer": peer, "races": results})


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run("tensor_parallel", RACES, "parallelize_module", __doc__)
