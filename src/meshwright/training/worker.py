"""One rank: started by the launcher (`python -m meshwright.training.worker`) or by torchrun, Kubernetes or SLURM."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import RankLost, UserError
from meshwright.launcher import rendezvous
from meshwright.launcher.device import agree_on_device, choose_device
from meshwright.launcher.host_calls import HostCalls
from meshwright.launcher.hosts import agree_on_interface
from meshwright.launcher.rank_process import run_rank
from meshwright.launcher.rank_threads import (
    ThreadChoice,
    agree_on_threads,
    local_threads,
    resolve_threads,
    resumed_state,
    share_this_host,
)
from meshwright.launcher.rendezvous import Place, check_world_size
from meshwright.launcher.started_rank import machine_memory
from meshwright.monitoring.memory import keep_freed_memory
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.planner.machine_profile import LOCK_SECONDS
from meshwright.terminal import print_message
from meshwright.training.first_start import measure_run
from meshwright.training.process_constants import LIMIT_SECONDS

if TYPE_CHECKING:
    from meshwright.recipe import Recipe

# --- started by the launcher


def train_as_described(description: dict[str, Any], start: Place) -> dict[str, Any]:
    """Train the recipe of the launcher's description and return the run's result document."""
    from meshwright.recipe import load_recipe_text

    recipe = load_recipe_text(description["recipe"], description["source"], trust=description.get("trust", False))
    return _train(recipe, start, RunDirectory(description["directory"]), description["threads"], description["options"])


# --- started by others


def join(recipe: Recipe, *, probe: bool = True, **options: Any) -> dict[str, Any]:
    """Be the rank that torchrun, Kubernetes or SLURM started this process as, and return the run's result.

    probe: as `launch_recipe` has it; by rank 0, where all ranks share its host, while the others wait to meet it. Where
    `run.collective_timeout` is shorter than a measurement may take, nothing is measured.

    `options` go to `meshwright.training.loop.train`. Rank 0 locks the run directory for all.
    """
    from meshwright.launcher.recipe_checks import check_memory, check_recipe

    start = rendezvous.place(recipe.run.rendezvous)
    check_world_size(start, recipe.parsed_layout)
    check_recipe(recipe)
    one_host = start.ranks == (start.host_ranks or 1)
    if one_host:
        check_memory(recipe, machine_memory())
    if start.rank == 0 and start.host_ranks is not None:
        warning = rendezvous.tensor_across_hosts(recipe.parsed_layout, start.host_ranks)
        if warning is not None:
            print_message(f"meshwright: warning: {warning}")
    directory = RunDirectory(recipe.run_directory)
    patient = recipe.run.collective_timeout > LOCK_SECONDS + LIMIT_SECONDS
    if probe and start.rank == 0 and patient and share_this_host(start):
        with suppress(UserError), directory:  # what is wrong here is said by all ranks when they have met
            measure_run(recipe, local_threads(recipe, start.ranks).count, print_message)
    return _train(recipe, start, directory, None, options, lock=True)


def join_script(
    recipe: Recipe, start: Place, work: Callable[..., dict[str, Any]], locked: Path | None, **options: Any
) -> dict[str, Any]:
    """Do `work(recipe, mesh, run directory, **options)` as the rank at `start`, in a script of the user's. `locked`:
    the run directory that this process's launcher holds."""
    directory = recipe.run_directory
    lock = locked is None or directory.resolve() != locked.resolve()
    return _train(recipe, start, RunDirectory(directory), None, options, lock, work)


def _train(
    recipe: Recipe,
    start: Place,
    directory: RunDirectory,
    threads: int | None,
    options: dict[str, Any],
    lock: bool = False,
    work: Callable[..., dict[str, Any]] | None = None,
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from meshwright.collectives.named import named_programs
    from meshwright.comm.mesh import Mesh

    if work is None:
        from meshwright.training.loop import train

        work = train
    keep_freed_memory()
    timeout = recipe.run.collective_timeout
    store = None
    if lock and start.ranks > 1:
        store = rendezvous.meet(start, timeout)
        _find_the_way(start, store)
        device = agree_on_device(recipe.run.device, start, store)
    else:
        device = choose_device(recipe.run.device, start.local_rank or 0)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    elif start.ranks > 1:
        _compile_apart(start)
    if start.ranks > 1:
        store = store or rendezvous.meet(start, timeout)
        rendezvous.initialise(start, store, device, timeout)
    _set_threads(recipe, start, store if lock else None, threads, note=not device.startswith("cuda"))
    calls = None
    try:
        if lock:
            _lock_for_all(directory, start, store)
            _write_ranks(directory, start, store)
            if store is not None and start.started_by != rendezvous.LAUNCHER:
                calls = HostCalls.agree(directory, start, store)
        layout = recipe.parsed_layout
        programs = named_programs(recipe.collectives, layout, recipe.where)
        mesh = Mesh.create(layout, device, timeout, programs)
        return work(recipe, mesh, directory, **options)
    except RankLost as error:
        if calls is None:
            raise
        raise calls.report(error) from error
    finally:
        if calls is not None and not isinstance(sys.exc_info()[1], RankLost):
            calls.close()
        if start.rank == 0:
            directory.unlock()
        if start.ranks > 1 and sys.exc_info()[0] is None:
            dist.destroy_process_group()


def _set_threads(recipe: Recipe, start: Place, store: Any, given: int | None, note: bool) -> None:
    """Compute with `given` threads; unless given, with those of `run.threads` or of the run that is resumed, else by
    the rule for ranks that others started, else, in a script of the user's, as many as it has left set. note: print the
    line about the choice, if there is one: not where the ranks compute on GPUs."""
    import torch

    if given is None and recipe.model is None:  # type: ignore[redundant-expr]
        found = resolve_threads(recipe, torch.get_num_threads(), resumed_state(recipe))
    elif given is None and store is not None:
        found = agree_on_threads(recipe, start, store)
    elif given is None:
        found = local_threads(recipe, 1)
    else:
        found = ThreadChoice(given)
    if note and found.note and start.rank == 0:
        print_message(found.note)
    torch.set_num_threads(found.count)  # however many there are: MKL then starts no fewer


def _compile_apart(start: Place) -> None:
    """Give each rank of a host a place for its compiled code, unless the environment names one for all: ranks that
    compile for a CPU at once may load a library that another is still writing (torch 2.13)."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    rank = start.rank if start.local_rank is None else start.local_rank
    place = Path(tempfile.gettempdir(), f"meshwright-compiled-{user}", f"rank-{rank}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(place))


def _find_the_way(start: Place, store: Any) -> None:
    """Have gloo talk on the network that leads to the other hosts, unless the environment says which to use."""
    interface = agree_on_interface(start, store)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _lock_for_all(directory: RunDirectory, start: Place, store: Any) -> None:
    """Rank 0 takes the run directory; when it cannot, every rank raises rank 0's `UserError`."""
    problem = ""
    if start.rank == 0:
        try:
            directory.lock()
        except UserError as error:
            problem = str(error)
    if store is not None:
        if start.rank == 0:
            store.set("meshwright/directory", problem or "locked")
        problem = store.get("meshwright/directory").decode()
    if problem not in ("", "locked"):
        raise UserError(problem)


def _write_ranks(directory: RunDirectory, start: Place, store: Any) -> None:
    processes = [os.getpid()]
    if store is not None:
        store.set(f"meshwright/process/{start.rank}", str(os.getpid()))
        if start.rank == 0:
            processes = [int(store.get(f"meshwright/process/{rank}")) for rank in range(start.ranks)]
    if start.rank == 0:
        directory.write_ranks(processes)


if __name__ == "__main__":
    run_rank(train_as_described)
