"""Number of compute threads of a run's ranks: chosen once and kept on resume, as the last bits of a result depend on
it. Free of torch."""

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
    """Number of threads per rank. note: a line for the user on why, empty where there is nothing to report."""

    count: int
    note: str = ""


def resolve_threads(recipe: Recipe, default: int, state: dict[str, Any] | None) -> ThreadChoice:
    """Return the threads per rank: `run.threads`; else those of the checkpoint that is resumed under the same layout;
    else `default`. state: content of the checkpoint's `state.json`, None for a fresh run."""
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
    """Return a line for the user that results may differ in their last bits if the thread count changed from `before`
    (in the checkpoint) to `now`; None if it did not change.

    before, now: None if unknown or without effect on the device, which gives None as well.
    """
    if before is None or now is None or before == now:
        return None
    return (
        f"threads per rank changed from {before} to {now}: results may differ in the last bits from an uninterrupted "
        "run"
    )


def same_layout(layout: Layout, saved: object) -> bool:
    """Return True if the layout notation `saved` in a checkpoint is valid and equals `layout`, apart from the
    precision, which is not compared."""
    try:
        other = Layout.parse(saved) if isinstance(saved, str) else None
    except UserError:
        return False
    return other is not None and replace(layout, precision=None) == replace(other, precision=None)


def compute_layer_flops(recipe: Recipe, layout: Layout | None = None) -> float | None:
    """Return the mean FLOPs of one transformer layer on one rank, forward and backward of a micro-batch: those of the
    whole model, LM head included, divided by its number of layers. layout: None: the recipe's. None for a user's own
    module."""
    if recipe.model is None:  # type: ignore[redundant-expr]
        return None
    layout, sequence = layout or recipe.parsed_layout, recipe.data.sequence
    config = config_from_recipe(recipe.model, sequence, find_least_vocabulary(recipe.data.tokenizer))
    tokens = recipe.train.batch / layout.dp / layout.micro_batches * sequence
    return training_flops_per_token(config, sequence) * tokens / config.layers / (layout.tp * layout.cp)


def resumed_state(recipe: Recipe) -> dict[str, Any] | None:
    """Return the content of `state.json` in the newest checkpoint of the recipe's run directory, None if there is
    none."""
    checkpoint = newest(RunDirectory(recipe.run_directory).checkpoints)
    return None if checkpoint is None else checkpoint.state()


def local_threads(recipe: Recipe, ranks: int) -> ThreadChoice:
    """Return the number of threads per rank of a run whose `ranks` ranks are all on this machine."""
    return _threads_per_rank(recipe, ranks, None)


def share_this_host(place: Place) -> bool:
    """Return True if all ranks of the run are on this rank's host and share its cores (SLURM gave no rank cores of its
    own), so that the thread count needs no exchange between ranks. place: numbers of ranks in all and on each host."""
    return place.ranks == (place.host_ranks or 1) and bool(cores_of_rank(os.environ)["shared"])


def agree_on_threads(recipe: Recipe, place: Place, store: Any) -> ThreadChoice:
    """Return the threads per rank where torchrun, Kubernetes or SLURM started the ranks: rank 0 chooses for all, by the
    rank that has the fewest cores.

    place: this rank's number and the number of ranks; store: key-value store that all ranks share. Collective.
    `UserError` on all ranks if rank 0 finds one.
    """
    store.set(f"meshwright/cores/{place.rank}", json.dumps(cores_of_rank(os.environ)))
    if place.rank == 0:
        share = min_cores_per_rank([json.loads(store.get(f"meshwright/cores/{rank}")) for rank in range(place.ranks)])
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
    """Return the number of threads of each of `ranks` ranks that share `cores` cores (None: those available to this
    process)."""
    return resolve_threads(recipe, choose_threads(ranks, cores, compute_layer_flops(recipe)), resumed_state(recipe))


def cores_of_rank(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return {"host": this rank's host name, "cores": number of cores available to it, "shared": True if other ranks
    use the same cores}. environment: its SLURM_CPUS_PER_TASK is the number of cores of one task alone."""
    own = environment.get("SLURM_CPUS_PER_TASK", "")
    shared = not own.isdecimal() or not int(own)
    cores = count_available_cores() if shared else min(count_available_cores(), int(own))
    return {"host": socket.gethostname(), "cores": cores, "shared": shared}


def min_cores_per_rank(ranks: list[dict[str, Any]]) -> int:
    """Return the smallest number of cores that any rank has to itself, at least 1; shared cores are divided by the
    ranks on the host. ranks: the dict `cores_of_rank` of each rank."""
    ranks_on = Counter(each["host"] for each in ranks)
    return max(1, min(each["cores"] // (ranks_on[each["host"]] if each["shared"] else 1) for each in ranks))
