"""Start a recipe's run on this machine: checks, data preparation, measurements for predictions, then the ranks. Free of
torch."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

from meshwright.collectives.named import load_named_programs
from meshwright.launcher.host_memory import read_machine_memory
from meshwright.launcher.launcher import LaunchSpec, launch
from meshwright.launcher.rank_threads import choose_local_threads
from meshwright.launcher.recipe_checks import (
    check_adapter_from,
    check_memory,
    check_recipe,
    check_teacher_tokenizer,
    check_vocabulary,
)
from meshwright.launcher.rendezvous import check_port_free
from meshwright.monitoring.resuming import check_resume
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.recipe import Recipe
from meshwright.terminal import print_message
from meshwright.training.first_start import describe_slow_precision, measure_run, runs_on_cpu

WORKER = (sys.executable, "-P", "-m", "meshwright.training.worker")  # -P: no imports from the current directory


def launch_recipe(recipe: Recipe, *, restarts: int = 0, probe: bool = True, **options: Any) -> dict[str, Any]:
    """Train `recipe` on this machine, one process per rank of its layout, and return rank 0's result document (JSON
    dict of figures and checkpoint paths). Missing data are prepared first.

    restarts: maximum number of restarts from the newest complete checkpoint after a rank was lost. probe: measure this
    machine first (10 to 20 seconds), with the run directory locked, if predictions need it and it was never measured.
    options: keyword arguments of `meshwright.training.loop.train` (`show_progress`). Raises the ranks' exceptions
    (`UserError`, `CheckFailed` ...); `RankLost` when a rank died; `RankFault` with the traceback of an internal error;
    after all ranks have saved, `Terminated` if SIGTERM came and `KeyboardInterrupt` after an interrupt.
    """
    from meshwright.data import prepare

    # All checks run before a process is started, and data are prepared while no rank waits.
    check_recipe(recipe)
    load_named_programs(recipe.collectives, recipe.parsed_layout, recipe.where)
    with RunDirectory(recipe.run_directory):  # locked first: a second start of the same run reports the lock
        check_port_free(recipe.run.rendezvous or "")
    if check_resume(recipe) is None:
        check_adapter_from(recipe)
    data = prepare(recipe.data, recipe.run.seed, log=print_message)
    check_resume(recipe, data.sha256)
    check_vocabulary(recipe, data.vocabulary)
    check_teacher_tokenizer(recipe, data)
    check_memory(recipe, read_machine_memory())
    ranks = recipe.parsed_layout.world_size
    threads = choose_local_threads(recipe, ranks)
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
    if warning := describe_slow_precision(recipe.parsed_layout, recipe.run.device):
        spec.log(warning)
    if threads.note and runs_on_cpu(recipe.run.device):
        spec.log(threads.note)
    return launch(spec)
