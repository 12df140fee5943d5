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

from meshwright.checkpoint import find_newest
from meshwright.data.tokenizers.tokenizer import find_smallest_vocabulary
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.limits import get_limit
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.recipe import Recipe
from meshwright.spec.config_from_recipe import config_from_recipe
from meshwright.spec.flops import training_flops_per_token
from meshwright.threads import are_threads_set_by_user, choose_threads, count_available_cores

if TYPE_CHECKING:
    from meshwright.launcher.rendezvous import RendezvousInfo


@dataclass(frozen=True)
class ThreadChoice:
    """Chosen number of threads per rank, `count`. note: a line for the user on the reason, empty if there is nothing to
    report."""

    count: int
    note: str = ""


def resolve_threads(recipe: Recipe, default: int, state: dict[str, Any] | None) -> ThreadChoice:
    """Choose the threads per rank: `run.threads` of the recipe, if set; else the thread count in the checkpoint from
    which the run resumes, if the checkpoint was saved with the same layout; else `default`.

    state: content of the checkpoint's `state.json`, None for a fresh run.
    """
    if recipe.run.threads is not None:
        return ThreadChoice(recipe.run.threads)
    if state is None or not is_same_layout(recipe.parsed_layout, state.get("layout")):
        return ThreadChoice(default)
    before = state.get("threads")
    if not isinstance(before, int) or not 1 <= before <= get_limit("threads"):  # checkpoints are untrusted
        return ThreadChoice(default)
    if before == default:
        return ThreadChoice(before)
    why = "OMP_NUM_THREADS" if are_threads_set_by_user() else f"{count_available_cores()} available cores"
    note = (
        f"threads: keeping {before} per rank from the checkpoint for bitwise reproducibility ({why} would give "
        f"{default}; set run.threads={default} to change)"
    )
    return ThreadChoice(before, note)


def format_thread_change(before: int | None, now: int | None) -> str | None:
    """Return a line for the user if the number of threads per rank changed, which can change the last bits of results;
    None if the number did not change. before: number in the checkpoint; now: present number. If either is None
    (unknown, or on a GPU, where the number has no effect), the result is None."""
    if before is None or now is None or before == now:
        return None
    return (
        f"threads per rank changed from {before} to {now}: results may differ in the last bits from an uninterrupted "
        "run"
    )


def is_same_layout(layout: Layout, saved: object) -> bool:
    """Return True if the layout notation `saved` in a checkpoint is valid and equals `layout`, apart from the
    precision, which is not compared."""
    try:
        other = Layout.parse(saved) if isinstance(saved, str) else None
    except UserError:
        return False
    return other is not None and replace(layout, precision=None) == replace(other, precision=None)


def compute_layer_flops(recipe: Recipe, layout: Layout | None = None) -> float | None:
    """Return the FLOPs of one layer on one rank for the forward and backward of one micro-batch: the FLOPs of the whole
    model, LM head included, divided by the number of layers and by the degrees of tensor and context parallelism. None
    for a user's own module.

    layout: layout of the ranks; None: the recipe's.
    """
    if recipe.model is None:  # type: ignore[redundant-expr]
        return None
    layout, sequence = layout or recipe.parsed_layout, recipe.data.sequence
    config = config_from_recipe(recipe.model, sequence, find_smallest_vocabulary(recipe.data.tokenizer))
    tokens = recipe.train.batch / layout.dp / layout.micro_batches * sequence
    return training_flops_per_token(config, sequence) * tokens / config.layers / (layout.tp * layout.cp)


def read_resumed_state(recipe: Recipe) -> dict[str, Any] | None:
    """Read `state.json` (training state) of the newest checkpoint in the recipe's run directory, and return its
    content; None if there is no checkpoint."""
    checkpoint = find_newest(RunDirectory(recipe.run_directory).checkpoints)
    return None if checkpoint is None else checkpoint.state()


def choose_local_threads(recipe: Recipe, ranks: int, cores: int | None = None) -> ThreadChoice:
    """Choose the number of threads per rank: `run.threads` of the recipe, else the number in the checkpoint to resume
    from, else a default from the number of cores and the FLOPs of a layer. ranks: number of ranks that share the cores.
    cores: number of cores; None: all cores available to this process."""
    return resolve_threads(
        recipe, choose_threads(ranks, cores, compute_layer_flops(recipe)), read_resumed_state(recipe)
    )


def ranks_share_one_host(info: RendezvousInfo) -> bool:
    """Return True if all ranks of the run are on this host and share its cores. The thread count can then be chosen
    without asking other ranks. Return False if SLURM has assigned cores to each rank. info: number of all ranks and
    number of ranks on this host."""
    return info.ranks == (info.host_ranks or 1) and bool(read_rank_cores(os.environ)["shared"])


def agree_on_threads(recipe: Recipe, info: RendezvousInfo, store: Any) -> ThreadChoice:
    """Choose the number of threads per rank in a run that torchrun, Kubernetes or SLURM started. Rank 0 chooses one
    number for all ranks, limited by the rank with the fewest cores. Collective: every rank calls it.

    recipe: recipe of the run. info: this rank's number and the number of ranks. store: key-value store that all ranks
    share. If rank 0 gets a `UserError`, all ranks raise it.
    """
    store.set(f"meshwright/cores/{info.rank}", json.dumps(read_rank_cores(os.environ)))
    if info.rank == 0:
        share = compute_min_cores_per_rank(
            [json.loads(store.get(f"meshwright/cores/{rank}")) for rank in range(info.ranks)]
        )
        try:
            found = choose_local_threads(recipe, 1, share)
        except UserError as error:
            store.set("meshwright/threads", f"!{error}")  # which the other ranks wait for
            raise
        store.set("meshwright/threads", str(found.count))
        return found
    answer = store.get("meshwright/threads").decode()
    if answer.startswith("!"):
        raise UserError(answer[1:])
    return ThreadChoice(int(answer))


def read_rank_cores(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the host and cores of this rank: {"host": host name, "cores": number of cores available to the rank,
    "shared": True if other ranks use the same cores}. environment: environment variables, of which SLURM_CPUS_PER_TASK
    is the number of cores that the rank has to itself."""
    own = environment.get("SLURM_CPUS_PER_TASK", "")
    shared = not own.isdecimal() or not int(own)
    cores = count_available_cores() if shared else min(count_available_cores(), int(own))
    return {"host": socket.gethostname(), "cores": cores, "shared": shared}


def compute_min_cores_per_rank(ranks: list[dict[str, Any]]) -> int:
    """Return the smallest number of cores per rank, at least 1; shared cores are divided by the number of ranks on the
    host. ranks: result of `read_rank_cores` on each rank."""
    ranks_on = Counter(each["host"] for each in ranks)
    return max(1, min(each["cores"] // (ranks_on[each["host"]] if each["shared"] else 1) for each in ranks))
