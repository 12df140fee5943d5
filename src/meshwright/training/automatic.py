"""Resolve `layout = "auto"` to the planner's fastest layout that fits this machine's devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.errors import UserError
from meshwright.launcher.rank_threads import compute_layer_flops
from meshwright.layout import Layout
from meshwright.planner.cost.engines import choose_run_engine
from meshwright.planner.hardware.cluster import Cluster, cluster, this_machine
from meshwright.planner.models import config_of
from meshwright.planner.search.estimate import problem_of
from meshwright.planner.search.search import search
from meshwright.recipe import Recipe
from meshwright.threads import choose_threads
from meshwright.training.first_start import find_hardware_profile, measure_first_start


def search_fastest_layout(recipe: Recipe, ranks: int | None, log: Callable[[str], None], *, probe: bool = False) -> str:
    """Search for the layout of a recipe (the settings of a run) with `layout = "auto"`: the layout that the planner
    predicts to be the fastest of those that fit into memory. Return the layout as text such as "dp2 zero1". The text
    names no precision, which the run chooses later.

    ranks: number of ranks that another launcher has started; None: one per GPU of this machine, or as many CPU
    processes as the hardware profile (measured machine speeds) was made with. log: called with each log line. probe:
    True to measure machine speeds first if the run computes on CPUs and no profile is stored; the measurement uses
    `ranks` processes, or two if `ranks` is None. `UserError` if there is no hardware profile or no layout fits.
    """
    where = _find_devices(recipe, ranks, log if probe else None)
    config, assumed = config_of(recipe)
    problem = problem_of(
        config, where, sequence=recipe.data.sequence, batch=recipe.train.batch, optimizer=recipe.train.optimizer,
        compile=recipe.train.compile, engine=choose_run_engine(recipe.train.tensor_overlap, where.kind),
    )  # fmt: skip
    found = search(replace(problem, pairs=recipe.objective != "next-token", assumed=assumed), 1)
    if not found.best:
        raise UserError(
            f'layout = "auto": none of {found.searched:,} layouts fits into the memory of {where.name} '
            f"({where.devices} devices); take a smaller batch, shorter sequences or more devices"
        )
    best = found.best[0]
    layout = str(replace(best.layout, precision=None))
    log(
        f"layout = {layout}: predicted to be the fastest of {found.searched:,} layouts on {where.name}; "
        f"{best.time.seconds:.3g} s a step ({best.time.low:.3g} to {best.time.high:.3g})"
    )
    return layout


def _find_devices(recipe: Recipe, ranks: int | None, log: Callable[[str], None] | None) -> Cluster:
    """Return the description (number, speeds, links) of the devices on which the recipe would train: this machine's
    GPUs; without GPUs its CPU processes, as measured in the hardware profile.

    ranks: number of devices; None: all GPUs, or as many processes as the profile was measured with. log: called with
    each log line while a missing CPU profile is measured; None: measure nothing and raise `UserError` without a
    profile."""
    import torch

    if recipe.run.device != "cpu" and torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        local = torch.cuda.device_count()
        table = {"device": name, "devices": ranks or local, "devices_per_node": min(local, ranks or local)}
        return cluster(table, 'layout = "auto"')
    where = None
    if not this_machine().exists():
        many = ranks or 2
        threads = recipe.run.threads or choose_threads(
            many, None, compute_layer_flops(recipe, Layout.parse(f"dp{many}"))
        )
        if log is not None:
            measure_first_start(
                Layout(dp=many), recipe.run.device, threads, log, compiled=recipe.train.compile, search=True
            )
        where = find_hardware_profile(many, threads)
    where = where or cluster("this", 'layout = "auto"')
    return where if ranks in (None, where.devices) else replace(where, devices=ranks, devices_per_node=ranks)
