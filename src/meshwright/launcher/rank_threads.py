"""The number of threads of a run's ranks: chosen once and kept on resume, as the bits of a result depend on it. Free of
torch."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meshwright.checkpoint import newest
from meshwright.data.tokenizers.tokenizer import find_least_vocabulary
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.limits import limit_of
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.planner.flops import training_flops_per_token
from meshwright.recipe import Recipe
from meshwright.spec.config_from_recipe import config_from_recipe
from meshwright.threads import are_threads_set_by_user, choose_threads, count_available_cores

if TYPE_CHECKING:
    from meshwright.launcher.rendezvous import Place


@dataclass(frozen=True)
class ThreadChoice:
    """Threads per rank. note: a line for the user, empty where there is nothing to report."""

    count: int
    note: str = ""


def resolve_threads(recipe: Recipe, default: int, state: dict[str, Any] | None) -> ThreadChoice:
    """Return `run.threads`; else the threads of the checkpoint that is resumed under the same layout; else `default`.

    default: of a fresh run. state: the checkpoint's, None for a fresh run.
    """
    if recipe.run.threads is not None:
        return ThreadChoice(recipe.run.threads)
    if state is None or not same_layout(recipe.parsed_layout, state.get("layout")):
        return ThreadChoice(default)
    before = state.get("threads")
    if not isinstance(before, int) or not 1 <= before <= limit_of("threads"):  # it may be a stranger's checkpoint
        return ThreadChoice(default)
    if before == default:
        return ThreadChoice(before)
    why = "OMP_NUM_THREADS" if are_threads_set_by_user() else f"{count_available_cores()} available cores"
    note = (
        f"threads: keeping {before} per rank from the checkpoint for bitwise reproducibility ({why} would give "
        f"{default}; set run.threads={default} to change)"
    )
    return ThreadChoice(before, note)


def thread_change_note(before: int | None, now: int | None) -> str | None:
    """Return a note that results may differ in their last bits if the thread count changed since the checkpoint, else
    None.

    `before` or `now` None: unknown, or without effect on the device.
    """
    if before is None or now is None or before == now:
        return None
    return (
        f"threads per rank changed from {before} to {now}: results may differ in the last bits from an uninterrupted "
        "run"
    )


def same_layout(layout: Layout, saved: object) -> bool:
    """Return True if a checkpoint's layout text equals `layout`, precision aside (the saved one is resolved)."""
    try:
        other = Layout.parse(saved) if isinstance(saved, str) else None
    except UserError:
        return False
    return other is not None and replace(layout, precision=None) == replace(other, precision=None)


def layer_flops(recipe: Recipe, layout: Layout | None = None) -> float | None:
    """Return the FLOPs of one layer on one rank: forward and backward of a micro-batch.

    The whole model's, LM head included, divided by its layers. layout: the recipe's unless given. None for a user's own
    module.
    """
    if recipe.model is None:  # type: ignore[redundant-expr]
        return None
    layout, sequence = layout or recipe.parsed_layout, recipe.data.sequence
    config = config_from_recipe(recipe.model, sequence, find_least_vocabulary(recipe.data.tokenizer))
    tokens = recipe.train.batch / layout.dp / layout.micro_batches * sequence
    return training_flops_per_token(config, sequence) * tokens / config.layers / (layout.tp * layout.cp)


def resumed_state(recipe: Recipe) -> dict[str, Any] | None:
    """Return the state of the newest checkpoint in the recipe's run directory, None without one."""
    checkpoint = newest(RunDirectory(recipe.run_directory).checkpoints)
    return None if checkpoint is None else checkpoint.state()


def local_threads(recipe: Recipe, ranks: int) -> ThreadChoice:
    """Return the threads per rank of a run whose `ranks` ranks are all on this machine."""
    return _threads_per_rank(recipe, ranks, None)


def share_this_host(place: Place) -> bool:
    """Return True if all ranks of the run are on this rank's host and share its cores (SLURM gave no rank cores of
    its own). The thread count can then be computed without asking other ranks. place: this rank's number, the number
    of ranks, and of ranks on its host.
    """
    return place.ranks == (place.host_ranks or 1) and bool(cores_of_rank(os.environ)["shared"])


def agree_on_threads(recipe: Recipe, place: Place, store: Any) -> ThreadChoice:
    """Return the threads per rank where torchrun, Kubernetes or SLURM started the ranks: rank 0 decides, by the rank
    with fewest cores.

    Collective: every rank calls it with the common `store`. `UserError` on all ranks if rank 0 finds one.
    """
    store.set(f"meshwright/cores/{place.rank}", json.dumps(cores_of_rank(os.environ)))
    if place.rank == 0:
        share = smallest_share([json.loads(store.get(f"meshwright/cores/{rank}")) for rank in range(place.ranks)])
        try:
            found = _threads_per_rank(recipe, 1, share)
        except UserError as error:
            store.set("meshwright/threads", f"!{error}")  # the others wait for an answer
            raise
        store.set("meshwright/threads", str(found.count))
        return found
    answer = store.get("meshwright/threads").decode()
    if answer.startswith("!"):
        raise UserError(answer[1:])
    return ThreadChoice(int(answer))


def _threads_per_rank(recipe: Recipe, ranks: int, cores: int | None) -> ThreadChoice:
    """Return the threads of each of `ranks` ranks that share `cores` cores (None: those available to this process)."""
    return resolve_threads(recipe, choose_threads(ranks, cores, layer_flops(recipe)), resumed_state(recipe))


def cores_of_rank(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return this rank's host name, the cores available to it, and True under "shared" if other ranks use them too.

    environment: SLURM_CPUS_PER_TASK gives the cores of one task alone.
    """
    own = environment.get("SLURM_CPUS_PER_TASK", "")
    shared = not own.isdecimal() or not int(own)
    cores = count_available_cores() if shared else min(count_available_cores(), int(own))
    return {"host": socket.gethostname(), "cores": cores, "shared": shared}


def smallest_share(ranks: list[dict[str, Any]]) -> int:
    """Return the fewest cores that any rank has to itself. ranks: the `cores_of_rank` of each."""
    ranks_on = Counter(each["host"] for each in ranks)
    return max(1, min(each["cores"] // (ranks_on[each["host"]] if each["shared"] else 1) for each in ranks))
