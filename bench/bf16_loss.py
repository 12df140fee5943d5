"""Loss of bf16 training against float32 training, with the same model, samples and steps.

Small Llamas and a mixture learn the text of modules of the standard library, byte by byte, with several seeds. In
addition to the correct trainer, faulty ones keep one sum or state in bfloat16 instead of float32; the bound of
tests/training/test_bf16_training.py must detect them. "medium", of 4.3 million parameters and 300 steps, takes minutes
for each run and runs only if it is named. Results of sizes that are not run are kept if they are of the same machine
and versions.

    python bench/bf16_loss.py [--seeds 6] [--faulty-seeds 3] [--sizes tiny small mixture] [--faults updates ...]
    python bench/bf16_loss.py --sizes medium --seeds 1 --faults "master weights"
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from common import read_stored, write_result
from meshwright.comm.mesh import Mesh
from meshwright.data import prepare
from meshwright.layout import Layout
from meshwright.model import experts, layers, loss, rope, tiled_attention
from meshwright.recipe import Recipe
from meshwright.training.language_model import LanguageModelTask
from meshwright.training.model_config import resolve_model_config
from meshwright.training.precision import PARAMETER_DTYPES, Arithmetic
from meshwright.training.trainer import Trainer

MODULES = [Path(sysconfig.get_path("stdlib"), name) for name in ("argparse.py", "ast.py", "inspect.py")]
LLAMA: dict[str, Any] = {"family": "llama", "kv_heads": 2, "tied": True}
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "model": {**LLAMA, "layers": 2, "hidden": 64, "heads": 4, "intermediate": 128},
        "train": {"steps": 100, "batch": 8, "learning_rate": 2e-3, "warmup": 10},
        "data": {"sequence": 128},
    },
    "small": {
        "model": {**LLAMA, "layers": 4, "hidden": 128, "heads": 4, "intermediate": 352},
        "train": {"steps": 100, "batch": 8, "learning_rate": 1e-3, "warmup": 10},
        "data": {"sequence": 128},
    },
    "medium": {
        "model": {**LLAMA, "layers": 6, "hidden": 256, "heads": 8, "intermediate": 704},
        "train": {"steps": 300, "batch": 4, "learning_rate": 6e-4, "warmup": 20},
        "data": {"sequence": 128},
    },
    "mixture": {
        "model": {**LLAMA, "family": "mixtral", "layers": 2, "hidden": 64, "heads": 4, "intermediate": 64, "experts": 4,
                  "experts_per_token": 2},
        "train": {"steps": 100, "batch": 8, "learning_rate": 2e-3, "warmup": 10},
        "data": {"sequence": 128},
    },
}  # fmt: skip
NARROW = {
    "softmax of attention": tiled_attention,
    "loss": loss,
    "norms": layers,  # and the accumulation of the embedding gradient
    "rotary tables": rope,
    "router": experts,
}
"""What computes in at least float32, and the module that does."""


def recipe(size: str, seed: int, cache: str) -> Recipe:
    """Four micro-batches a step, so that gradients are summed."""
    tables = SIZES[size]
    return Recipe.from_tables(
        {
            "layout": "mb4",
            "run": {"directory": f"{cache}/run", "seed": seed, "device": "cpu"},
            "model": tables["model"],
            "data": {"source": [str(path) for path in MODULES], "tokenizer": "bytes", "cache": cache, **tables["data"]},
            "train": {"validation_sequences": 32, **tables["train"]},
        }
    )


def train(recipe: Recipe, precision: str, fault: str = "none") -> tuple[list[float], float]:
    """The loss of each step, and the validation loss after the last."""
    data = prepare(recipe.data, recipe.run.seed)
    masters = torch.bfloat16 if fault == "master weights" else torch.float32
    arithmetic = Arithmetic(PARAMETER_DTYPES[precision], masters)
    with contextlib.ExitStack() as stack:
        mesh = stack.enter_context(contextlib.closing(Mesh.create(Layout.parse(f"mb4 {precision}"), "cpu")))
        if fault in NARROW:
            stack.enter_context(patch.object(NARROW[fault], "at_least_float32", lambda dtype: dtype))
        trainer = Trainer(
            LanguageModelTask(
                recipe, mesh.layout, resolve_model_config(recipe, data), data, mesh, arithmetic=arithmetic
            )
        )
        if fault in ROUNDED:
            ROUNDED[fault](trainer)
        losses = [trainer.step().loss for _ in range(recipe.train.steps)]
        return losses, trainer.task.validate().loss


def round_updates(trainer: Trainer) -> None:
    """Master weights are float32, and rounded after each update."""
    all_gather_parameters = trainer.parallel.all_gather_parameters

    def rounded() -> None:
        round_to_bfloat16(shard.master for shard in trainer.parallel.shards)
        all_gather_parameters()

    trainer.parallel.all_gather_parameters = rounded  # type: ignore[method-assign]


def round_sums(trainer: Trainer) -> None:
    """The gradient is rounded after each micro-batch."""
    sums = trainer.parallel.gradients
    mark = sums._mark_accumulated

    def rounded(running: Any, parameter: Any) -> None:
        name, index = sums._place[parameter]
        round_to_bfloat16([sums._reducer.unsharded(name).views[index]])
        mark(running, parameter)

    sums._mark_accumulated = rounded  # type: ignore[method-assign]


def round_moments(trainer: Trainer) -> None:
    """AdamW's moments are rounded after each update."""
    step = trainer.optimizer.step

    def rounded(*arguments: float) -> None:
        step(*arguments)
        for tensors in trainer.optimizer.state_tensors().values():
            round_to_bfloat16(tensors)

    trainer.optimizer.step = rounded  # type: ignore[method-assign]


def round_to_bfloat16(tensors: Any) -> None:
    for tensor in tensors:
        tensor.copy_(tensor.bfloat16())


ROUNDED: dict[str, Callable[[Trainer], None]] = {
    "updates": round_updates,
    "sums of gradients": round_sums,
    "moments": round_moments,
}
FAULTS = ("master weights", *ROUNDED, *NARROW)


def deviations(losses: list[float], validation: float, right: tuple[list[float], float]) -> dict[str, float]:
    """Differences of losses (nats per token), bf16 - float32: of the first step, the largest of any step, root mean
    square, mean over the last third, validation."""
    differences = [ours - theirs for ours, theirs in zip(losses, right[0], strict=True)]
    last = differences[-len(differences) // 3 :]
    found = {
        "first": differences[0],
        "largest": max(map(abs, differences)),
        "rms": statistics.fmean(each**2 for each in differences) ** 0.5,
        "last_third": statistics.fmean(last),
        "validation": validation - right[1],
    }
    return {name: round(value, 6) for name, value in found.items()}


def runs(sizes: list[str], seeds: int, faulty_seeds: int, faults: list[str]) -> Iterator[dict[str, Any]]:
    """The right trainer with every seed, those with faults with the first `faulty_seeds` alone."""
    with tempfile.TemporaryDirectory() as cache:
        for size in sizes:
            for seed in range(seeds):
                wanted = recipe(size, seed, cache)
                right = train(wanted, "fp32")
                for fault in ("none", *(faults if seed < faulty_seeds else [])):
                    if fault != "router" or "experts" in SIZES[size]["model"]:
                        found = deviations(*train(wanted, "bf16", fault), right)
                        yield {"size": size, "seed": seed, "fault": fault, "float32_loss": round(right[1], 4), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--faulty-seeds", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[size for size in SIZES if size != "medium"])
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = [run for run in read_stored("bf16_loss").get("runs", []) if run["size"] not in arguments.sizes]
    for run in runs(arguments.sizes, arguments.seeds, arguments.faulty_seeds, arguments.faults):
        print(run, flush=True)
        found.append(run)
    write_result("bf16_loss", {"sizes": SIZES, "runs": found})


if __name__ == "__main__":
    main()
