"""One rank of a training run, started by the launcher (`python -m meshwright.training.worker`), torchrun, Kubernetes or
SLURM."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.emulation.scheduler import is_emulated_rank
from meshwright.errors import RankLost, UserError
from meshwright.launcher import rendezvous
from meshwright.launcher.device import agree_on_device, choose_device, get_pci_address
from meshwright.launcher.gpu_process import bind_to_gpu_cores, prepare_gpu_process
from meshwright.launcher.host_calls import HostCalls
from meshwright.launcher.host_memory import read_machine_memory
from meshwright.launcher.hosts import agree_on_interface
from meshwright.launcher.rank_process import run_rank
from meshwright.launcher.rank_threads import (
    ThreadChoice,
    agree_on_threads,
    choose_local_threads,
    ranks_share_one_host,
    read_resumed_state,
    resolve_threads,
)
from meshwright.launcher.rendezvous import RendezvousInfo, check_world_size
from meshwright.monitoring.memory import keep_freed_memory
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.terminal import print_message
from meshwright.threads import check_local_threads
from meshwright.training.first_start import MAX_SECONDS, measure_run

if TYPE_CHECKING:
    from meshwright.recipe import Recipe

# --- started by the launcher


def train_as_described(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    """Train a recipe on this rank, a process that Meshwright's launcher started, and return the result document (JSON
    dict of figures).

    description: JSON dict from the launcher with recipe, run directory, threads and options; start: rank, world size
    and rendezvous of this process."""
    from meshwright.recipe import load_recipe_text

    recipe = load_recipe_text(description["recipe"], description["source"], trust=description.get("trust", False))
    directory = RunDirectory(description["directory"])
    return _run_as_rank(recipe, start, directory, description["threads"], description["options"])


# --- started by others


def train_as_rank(recipe: Recipe, *, probe: bool = True, **options: Any) -> dict[str, Any]:
    """Train a recipe in this process, one of the ranks that torchrun, Kubernetes or SLURM started. Return the result
    document (JSON dict of figures, complete only on rank 0). Rank 0 locks the run directory. Collective.

    probe: True: rank 0 measures this machine before training if predictions need it, while the other ranks wait. There
    is no measurement on emulated ranks, on several hosts, and if the wait would exceed `run.collective_timeout`.
    options: keyword arguments of `meshwright.training.loop.train` (`show_progress`).
    """
    from meshwright.launcher.recipe_checks import check_adapter_from, check_memory, check_recipe

    start = rendezvous.read_rendezvous_info(recipe.run.rendezvous)
    check_world_size(start, recipe.parsed_layout)
    check_recipe(recipe)
    if read_resumed_state(recipe) is None:
        check_adapter_from(recipe)
    one_host = start.ranks == (start.host_ranks or 1)
    if one_host:
        check_memory(recipe, read_machine_memory())
    if start.rank == 0 and start.host_ranks is not None:
        warning = rendezvous.warn_of_tensor_across_hosts(recipe.parsed_layout, start.host_ranks)
        if warning is not None:
            print_message(f"meshwright: warning: {warning}")
    directory = RunDirectory(recipe.run_directory)
    patient = recipe.run.collective_timeout > MAX_SECONDS
    if probe and start.rank == 0 and patient and ranks_share_one_host(start) and not is_emulated_rank():
        with suppress(UserError), directory:  # an error here is raised again, on this rank or all, after this block
            rendezvous.check_port_free(start.method)
            measure_run(recipe, choose_local_threads(recipe, start.ranks).count, print_message)
    return _run_as_rank(recipe, start, directory, None, options, lock=True)


def run_script_as_rank(
    recipe: Recipe, start: RendezvousInfo, work: Callable[..., dict[str, Any]], locked: Path | None, **options: Any
) -> dict[str, Any]:
    """Set up this rank of a user's script (device, process group, mesh) and return the result of `work(recipe, mesh,
    run directory, **options)`.

    start: rank, world size and rendezvous of this process. locked: run directory that this process's launcher has
    locked; None: none. If the recipe's run directory is not `locked`, rank 0 locks the recipe's run directory here.
    """
    directory = recipe.run_directory
    lock = locked is None or directory.resolve() != locked.resolve()
    return _run_as_rank(recipe, start, RunDirectory(directory), None, options, lock, work)


def _run_as_rank(
    recipe: Recipe,
    start: RendezvousInfo,
    directory: RunDirectory,
    threads: int | None,
    options: dict[str, Any],
    lock: bool = False,
    work: Callable[..., dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Set up this rank (device, process group, threads, mesh) and return the result of `work(recipe, mesh, directory,
    **options)`.

    start: rank, world size and rendezvous of this process. directory: run directory. threads: number of intra-op
    threads that the launcher chose; None: choose it here. lock: True if rank 0 must lock the run directory. work:
    function to call; None: `training.loop.train`."""
    import torch
    import torch.distributed as dist

    from meshwright.collectives.named import load_named_programs
    from meshwright.comm.mesh import Mesh
    from meshwright.launcher.device_watch import watch_device_calls

    if work is None:
        from meshwright.training.loop import train

        work = train
    keep_freed_memory()
    timeout = recipe.run.collective_timeout
    store = None
    if lock and start.ranks > 1:
        store = rendezvous.connect_to_store(start, timeout)
        _set_gloo_interface(start, store)
        device = agree_on_device(recipe.run.device, start, store)
    else:
        device = choose_device(recipe.run.device, start.local_rank or 0)
    joined = is_emulated_rank() and dist.is_initialized()  # by `mw.emulate`, or by the script before
    if device.startswith("cuda"):
        launched = start.started_by == rendezvous.LAUNCHER  # which starts all ranks on its host
        prepare_gpu_process(start.ranks if launched else start.host_ranks or torch.cuda.device_count())
        torch.cuda.set_device(device)
    elif start.ranks > 1:
        separate_compile_caches(start.rank if start.local_rank is None else start.local_rank)
    if start.ranks > 1 and not joined:
        store = store or rendezvous.connect_to_store(start, timeout)
        rendezvous.initialise_process_group(start, store, device, timeout)
    _set_threads(recipe, start, store if lock else None, threads, note=not device.startswith("cuda"))
    if device.startswith("cuda"):
        bind_to_gpu_cores(get_pci_address(device))  # after the number of threads was chosen from all cores
    calls = None
    mesh: Mesh | None = None
    try:
        if lock:
            _lock_run_directory(directory, start, store)
            _write_process_ids(directory, start, store)
            if store is not None and start.started_by != rendezvous.LAUNCHER and not is_emulated_rank():
                calls = HostCalls.create(directory, start, store)
        layout = recipe.parsed_layout
        programs = load_named_programs(recipe.collectives, layout, recipe.where)
        if is_emulated_rank():
            _check_emulated(recipe, bool(programs))
        mesh = Mesh.create(layout, device, timeout, programs)
        with watch_device_calls(mesh.communicator, calls):
            return work(recipe, mesh, directory, **options)
    except RankLost as error:
        if calls is None:
            raise
        raise calls.report(error) from error
    finally:
        if calls is not None and not isinstance(sys.exc_info()[1], RankLost):
            calls.close()
        if start.rank == 0:
            directory.close()
        if mesh is not None:  # before the process groups are destroyed
            mesh.communicator.release_graphs()
        if start.ranks > 1 and not joined and sys.exc_info()[0] is None:
            dist.destroy_process_group()


def _set_threads(recipe: Recipe, start: RendezvousInfo, store: Any, given: int | None, note: bool) -> None:
    """Set torch's number of intra-op threads: `given`, the launcher's choice; if it is None, `run.threads` of the
    recipe; without that, the number in the resumed checkpoint if its layout is the same; else a number chosen from
    cores and model size (for a user's own module, torch's current number).

    store: key-value store by which ranks agree on the number, None if they need not agree. note: True to print the
    reason for the choice. start: rank and world size of this process.
    """
    import torch

    if given is None and recipe.model is None:  # type: ignore[redundant-expr]
        found = resolve_threads(recipe, torch.get_num_threads(), read_resumed_state(recipe))
    elif given is None and store is not None:
        found = agree_on_threads(recipe, start, store)
    elif given is None:
        found = choose_local_threads(recipe, 1)
    else:
        found = ThreadChoice(given)
    if note and found.note and start.rank == 0:
        print_message(found.note)
    check_local_threads(start.host_ranks or 1, found.count)
    torch.set_num_threads(found.count)  # set in any case: MKL might otherwise start fewer threads


def _check_emulated(recipe: Recipe, has_programs: bool) -> None:
    """Raise `UserError` if the recipe uses a feature that emulated ranks (threads of one process) do not support.
    has_programs: True if the table [collectives] replaces collectives of the backend by programs of sends and receives.
    """
    if has_programs:
        raise UserError("[collectives] is not emulated: a rank runs collective programs on a thread of their own")
    if recipe.train.profile:
        raise UserError("train.profile is not emulated: PyTorch's profiler records a process, not one of its ranks")


def separate_compile_caches(rank: int) -> None:
    """Give each rank of this host a separate Inductor cache directory, unless the environment sets a directory. With a
    shared directory, a rank may load a library that another rank, compiling for the CPU, is still writing (torch 2.13).

    rank: index of this rank on the host."""
    user = os.getuid() if hasattr(os, "getuid") else "user"
    place = Path(tempfile.gettempdir(), f"meshwright-compiled-{user}", f"rank-{rank}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(place))


def _set_gloo_interface(start: RendezvousInfo, store: Any) -> None:
    """Set gloo's network interface to the interface by which this host reaches the other hosts, unless the environment
    sets an interface.

    start: rank, world size and rendezvous of this process. store: key-value store that all ranks share. Collective."""
    interface = agree_on_interface(start, store)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _lock_run_directory(directory: RunDirectory, start: RendezvousInfo, store: Any) -> None:
    """Lock the run directory on rank 0; if that fails, every rank raises rank 0's `UserError`. start: rank and world
    size of this process. store: key-value store that all ranks share, None for one rank. Collective."""
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


def _write_process_ids(directory: RunDirectory, start: RendezvousInfo, store: Any) -> None:
    """Collect the process IDs of all ranks and write them to the run directory, on rank 0. start: rank and world size
    of this process. store: key-value store through which the IDs are exchanged, None for one rank. Collective."""
    processes = [os.getpid()]
    if store is not None:
        store.set(f"meshwright/process/{start.rank}", str(os.getpid()))
        if start.rank == 0:
            processes = [int(store.get(f"meshwright/process/{rank}")) for rank in range(start.ranks)]
    if start.rank == 0:
        directory.write_ranks(processes)


if __name__ == "__main__":
    run_rank(train_as_described)
