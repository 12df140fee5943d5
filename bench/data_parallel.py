"""Two processes, one thread each: our data parallelism against torch DDP, our ZeRO-3 against `fully_shard`.

The same model code, weights and batches on both sides, and the whole step: forward, backward, reduction, clipping,
AdamW. In every pair of turns each side runs one step, in alternating order, within the same processes.

    python bench/data_parallel.py [--pairs 12] [--only ddp-fp32]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
from bench.shared.engine_step import make_engine_step
from common import paired_ratio, write_result
from meshwright.comm.local import LocalRanks
from meshwright.layout import Layout
from meshwright.model.initialise import initialise
from meshwright.model.transformer import Transformer
from meshwright.recipe import Recipe
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_from_recipe import config_from_recipe
from meshwright.spec.parameters import parameter_table

SHAPE = {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 8, "intermediate": 1408, "vocabulary": 8192}
SEQUENCE, ROWS = 512, 1  # tokens per sequence; sequences per rank and step
WARM = 2

RACES = {
    "ddp-fp32": ("dp2", "fp32"),
    "zero3-fp32": ("dp2 zero3", "fp32"),
    "zero3-bf16": ("dp2 zero3", "bf16"),
}


def recipe() -> Recipe:
    """The model and optimizer of the race: a llama of 30 M parameters, AdamW."""
    return Recipe.from_tables(
        {
            "layout": "dp2",
            "model": {"family": "llama", "tied": False, **SHAPE},
            "data": {"source": "stdlib", "tokenizer": "bytes", "sequence": SEQUENCE},
            "train": {"steps": 1000, "batch": 2 * ROWS, "learning_rate": 1e-4},
        }
    )


def theirs(config: ModelConfig, layout: Layout, dtype: torch.dtype) -> Callable[[Any], float]:
    """DDP with buckets as gradient views, or fully_shard per block and around the whole, as their tutorials do it."""
    model = Transformer(config, dtype=torch.float32)
    initialise(model, parameter_table(config), 0)
    if layout.zero == 0:
        wrapped: Any = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        options = {} if dtype == torch.float32 else {"mp_policy": policy}
        for block in model.layers:
            fully_shard(block, **options)
        wrapped = fully_shard(model, **options)
    train = recipe().train
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": train.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=tuple(train.betas), eps=train.epsilon, fused=True)

    def step(batch: Any) -> float:
        tokens, goals = batch
        loss = wrapped(tokens, goals) / goals.numel()  # their mean over ranks is the mean over all tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    return step


def race(name: str, pairs: int) -> dict[str, Any]:
    """On one rank: seconds of every step of both sides, and both losses after the warm-up."""
    layout_text, precision = RACES[name]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    config = config_from_recipe(recipe().model, SEQUENCE, SHAPE["vocabulary"])
    layout = Layout.parse(layout_text)
    sides = {
        "ours": make_engine_step(config, layout, dtype, 0, recipe().train),
        "theirs": theirs(config, layout, dtype),
    }
    random = torch.Generator().manual_seed(dist.get_rank())
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--only", choices=RACES)
    arguments = parser.parse_args()
    parameters = parameter_table(config_from_recipe(recipe().model, SEQUENCE, SHAPE["vocabulary"])).numel
    results: dict[str, Any] = {}
    for name in [arguments.only] if arguments.only else RACES:
        with LocalRanks(2, threads=1, timeout=3600) as ranks:
            first = ranks.run("data_parallel:race", name, arguments.pairs)[0]
        seconds, processor = first["seconds"], first["processor_seconds"]
        # First steps only: both overfit one batch, and rounding differences grow.
        losses = zip(first["losses"]["ours"][:4], first["losses"]["theirs"][:4], strict=True)
        difference = max(abs(mine - other) for mine, other in losses)
        results[name] = {
            "layout": RACES[name][0],
            "precision": RACES[name][1],
            "peer": "DistributedDataParallel" if RACES[name][0] == "dp2" else "fully_shard",
            "ours_seconds": round(statistics.median(seconds["ours"]), 4),
            "theirs_seconds": round(statistics.median(seconds["theirs"]), 4),
            "speed_ratio": paired_ratio(seconds["ours"], seconds["theirs"]),
            "processor_seconds_ratio": paired_ratio(processor["ours"], processor["theirs"]),  # per rank
            "largest_loss_difference_of_4_steps": difference,
        }
        print(name, results[name], file=sys.stderr)
    shape = {**SHAPE, "sequence": SEQUENCE, "rows_per_rank": ROWS, "parameters": parameters}
    if arguments.only:
        return
    write_result("data_parallel", {"processes": 2, "threads": 1, "shape": shape, "races": results})


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
