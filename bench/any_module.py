"""Two processes, one thread each: any module in Meshwright's loop against torch DDP and `fully_shard`.

A plain `torch.nn` encoder of 11 M parameters that classifies token sequences, with the same weights and samples on both
sides, and the whole step: reading a batch, forward, backward, reduction, clipping, AdamW, the loss over all ranks. In
every pair of turns each side runs one step, in alternating order, within the same processes.

    python bench/any_module.py [--pairs 12] [--only ddp]
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
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).parent))
from common import paired_ratio, write_result
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.training.module.building import build_task
from meshwright.training.module.recipe import make_module_recipe
from meshwright.training.module.spec import ModuleSpec
from meshwright.training.trainer import Trainer

SHAPE = {"layers": 6, "hidden": 384, "heads": 6, "intermediate": 1536, "vocabulary": 2000, "classes": 10}
SEQUENCE, BATCH, SAMPLES = 64, 16, 512  # tokens per sequence; global batch in sequences; sequences in all
WARM = 3
RACES = {"ddp": ("dp2", "DistributedDataParallel"), "zero3": ("dp2 zero3", "fully_shard")}


class Classifier(nn.Module):
    """An encoder of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        hidden = SHAPE["hidden"]
        self.embedding = nn.Embedding(SHAPE["vocabulary"], hidden)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                hidden, SHAPE["heads"], SHAPE["intermediate"], 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(SHAPE["layers"])
        )
        self.head = nn.Linear(hidden, SHAPE["classes"])

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x_BSH = self.embedding(tokens_BS)
        for layer in self.layers:
            x_BSH = layer(x_BSH)
        return self.head(x_BSH.mean(1))


def build() -> nn.Module:
    torch.manual_seed(0)
    return Classifier()


def loss(module: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(module(batch[0]), batch[1])


def samples() -> list[Any]:
    random = torch.Generator().manual_seed(0)
    rows = torch.randint(0, SHAPE["vocabulary"], (SAMPLES, SEQUENCE), generator=random)
    labels = torch.randint(0, SHAPE["classes"], (SAMPLES,), generator=random)
    return list(zip(rows, labels, strict=True))


def ours(layout: str) -> Callable[[], float]:
    train = {"steps": 10_000, "batch": BATCH, "learning_rate": 1e-4, "schedule": "constant"}
    recipe = make_module_recipe({"layout": f"{layout} fp32", "train": train})
    spec = ModuleSpec(build, loss, samples())
    trainer = Trainer(build_task(spec, recipe, Mesh.create(recipe.parsed_layout)))
    return lambda: trainer.step().loss


def theirs(layout: str) -> Callable[[], float]:
    """As their tutorials do it: buckets as gradient views; fully_shard for each layer and around the whole."""
    module = build()
    if layout == "dp2":
        wrapped: Any = DistributedDataParallel(module, gradient_as_bucket_view=True)
    else:
        for layer in module.layers:
            fully_shard(layer)
        wrapped = fully_shard(module)
    groups = [
        {"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
    data = samples()
    sampler: Any = DistributedSampler(data, shuffle=True)  # type: ignore[arg-type]
    loader: Any = DataLoader(data, BATCH // 2, sampler=sampler)  # type: ignore[arg-type]

    def batches() -> Any:
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    following = batches()

    def step() -> float:
        value = loss(wrapped, next(following))
        value.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total = value.detach().clone()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    return step


def race(name: str, pairs: int) -> dict[str, Any]:
    """On one rank: seconds of every step of both sides, and the means of their losses."""
    layout, _ = RACES[name]
    sides = {"ours": ours(layout), "theirs": theirs(layout)}
    losses: dict[str, list[float]] = {side: [step() for _ in range(WARM)] for side, step in sides.items()}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for pair in range(pairs):
        for side in sorted(sides, reverse=pair % 2 == 1):
            dist.barrier()
            begun = time.perf_counter()
            losses[side].append(sides[side]())
            dist.barrier()
            seconds[side].append(time.perf_counter() - begun)
    return {"seconds": seconds, "losses": {side: statistics.mean(values) for side, values in losses.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--only", choices=RACES)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for name in [arguments.only] if arguments.only else RACES:
        with LocalRanks(2, threads=1, timeout=3600) as ranks:
            first = ranks.run("any_module:race", name, arguments.pairs)[0]
        seconds = first["seconds"]
        results[name] = {
            "layout": RACES[name][0],
            "peer": RACES[name][1],
            "ours_seconds": round(statistics.median(seconds["ours"]), 4),
            "theirs_seconds": round(statistics.median(seconds["theirs"]), 4),
            "ours_steps_per_second": round(1 / statistics.median(seconds["ours"]), 3),
            "theirs_steps_per_second": round(1 / statistics.median(seconds["theirs"]), 3),
            "speed_ratio": paired_ratio(seconds["ours"], seconds["theirs"]),
            "mean_losses": first["losses"],  # the sample orders differ
        }
        print(name, results[name], file=sys.stderr)
    if arguments.only:
        return
    parameters = sum(parameter.numel() for parameter in Classifier().parameters())
    shape = {**SHAPE, "sequence": SEQUENCE, "batch": BATCH, "parameters": parameters}
    write_result("any_module", {"processes": 2, "threads": 1, "shape": shape, "races": results})


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
