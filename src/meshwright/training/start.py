"""Starts a recipe's run on this machine: refusals first, then the measurements that predictions need, then the ranks.
Free of torch."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

from meshwright.launcher.launcher import LaunchSpec, launch
from meshwright.launcher.rank_threads import local_threads
from meshwright.launcher.recipe_checks import check_memory, check_recipe
from meshwright.launcher.started_rank import machine_memory
from meshwright.recipe import Recipe
from meshwright.training.first_start import measure_run, on_processors

WORKER = (sys.executable, "-P", "-m", "meshwright.training.worker")  # -P: not from the current directory


def launch_recipe(recipe: Recipe, *, restarts: int = 0, probe: bool = True, **options: Any) -> dict[str, Any]:
    """Train `recipe` on this machine, one process for each rank of its layout, and return rank 0's result document.

    A rank or a fault that ends the run starts it again, up to `restarts` times, from the newest whole checkpoint.
    probe: measure this machine first, when the run directory is locked, where predictions need that and it was not done
    yet; some 10 seconds.
    `options` go to `meshwright.training.loop.train`. Raises what the ranks raised (`UserError`, `CheckFailed` ...);
    `RankLost` when one died; `RankFault` with its traceback; `Terminated` after SIGTERM, when all have saved;
    `KeyboardInterrupt` after an interrupt, likewise and with such a line.
    """
    check_recipe(recipe)
    check_memory(recipe, machine_memory())
    ranks = recipe.parsed_layout.world_size
    threads = local_threads(recipe, ranks)
    description = {
        "recipe": recipe.to_toml(),
        "source": str(recipe.source_path or "recipe"),
        "trust": recipe.trusted,
        "options": options,
    }
    spec = LaunchSpec(
        description,
        ranks,
        recipe.run_directory,
        restarts,
        threads.count,
        recipe.run.rendezvous,
        recipe.run.collective_timeout,
        command=WORKER,
    )
    if probe:
        spec = replace(spec, before_ranks=partial(measure_run, recipe, threads.count, spec.log))
    if threads.note and on_processors(recipe.run.device):
        spec.log(threads.note)
    return launch(spec)
