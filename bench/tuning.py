"""Hyper-parameter search against a frozen reference recipe: do the settings found within a stated budget have a lower
loss on files that the search never saw?

    python bench/tuning.py [--trials 30]

The standard library's sources are divided by the hash of their names: one fifth is never seen by the search, neither in
training nor in validation. The reference is the recipe as written here, with common settings (the learning rate and
betas of GPT-3's smallest model, arXiv:2005.14165, a warm-up of a tenth); the search has 30 trials of the same length.
Then both recipes are trained from three other seeds, and evaluated on the unseen files.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import shutil
import statistics
import sysconfig
import tempfile
from pathlib import Path

import meshwright as mw
from common import write_result

SEEDS = (11, 12, 13)
STUDENT_T = 4.303  # 97.5% quantile of Student's t distribution with two degrees of freedom
RECIPE = {
    "model": {
        "family": "llama", "layers": 2, "hidden": 96, "heads": 4, "kv_heads": 2, "intermediate": 256, "tied": True,
    },
    "data": {"source": "", "tokenizer": "bpe", "vocabulary": 1024, "sequence": 128, "validation_fraction": 0.05},
    "train": {
        "steps": 200, "batch": 16, "learning_rate": 6e-4, "betas": [0.9, 0.95], "weight_decay": 0.1, "warmup": 20,
        "validate_every": 25, "validation_sequences": 128,
    },
}  # fmt: skip
SPACE = {
    "train.learning_rate": {"log": [1e-4, 1e-1]},
    "train.warmup": {"uniform": [0, 60]},
    "train.weight_decay": {"log": [1e-3, 1.0]},
    "train.betas": {"choice": [[0.9, 0.95], [0.9, 0.99], [0.8, 0.95]]},
    "train.minimum_learning_rate": {"uniform": [0.0, 0.3]},
}


def divide_sources(directory: Path) -> tuple[Path, Path]:
    """Copy the standard library's top-level modules into two directories: seen by the search, and unseen (a fifth)."""
    seen, unseen = directory / "seen", directory / "unseen"
    for place in (seen, unseen):
        place.mkdir()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        held = hashlib.sha256(file.name.encode()).digest()[0] % 5 == 0
        shutil.copy(file, (unseen if held else seen) / file.name)
    return seen, unseen


def main() -> None:
    """Search, train both recipes from three seeds, and write bench/results/tuning.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=30)
    trials = parser.parse_args().trials
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        seen, unseen = divide_sources(directory)
        files = {"data.source": str(seen), "data.cache": str(directory / "cache")}
        search = {**files, "tune.space": SPACE, "tune.trials": trials, "run.directory": str(directory / "search")}
        found = mw.tune(RECIPE, search, directory=directory / "study")
        losses: dict[str, list[float]] = {"reference": [], "found": []}
        for seed in SEEDS:
            for name, values in (("reference", {}), ("found", found.best["parameters"])):
                run = directory / f"{name}-{seed}"
                changes = {**files, **values, "run.seed": seed, "run.directory": str(run)}
                result = mw.train(RECIPE, changes, probe=False)
                losses[name].append(mw.evaluate(result.checkpoint, data=unseen).loss)
                print(f"seed {seed}, {name}: {losses[name][-1]:.4f} nats per token on unseen files", flush=True)
    gains = [before - after for before, after in zip(losses["reference"], losses["found"], strict=True)]
    half = STUDENT_T * statistics.stdev(gains) / math.sqrt(len(gains))
    mean = statistics.mean(gains)
    print(f"gain {mean:.4f} nats per token, 95% interval {mean - half:.4f} to {mean + half:.4f}")
    write_result("tuning", {
        "recipe": RECIPE, "space": SPACE, "budget": {"trials": trials},
        "search": {"trials": found.trials, "pruned": found.pruned, "failed": found.failed, "seconds": found.seconds,
                   "best": {key: found.best[key] for key in ("value", "parameters")}},
        "seeds": SEEDS, "loss_on_unseen_files": losses,
        "gain": {"mean": mean, "low": mean - half, "high": mean + half},
    })  # fmt: skip


if __name__ == "__main__":
    main()
