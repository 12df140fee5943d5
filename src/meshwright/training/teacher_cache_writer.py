"""Writing of a teacher's cache (`meshwright data teacher`): runs the teacher over all prepared sequences, on one device
or on the ranks of a layout (`python -m meshwright.training.teacher_cache_writer`)."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.checkpoint.agreement import Agreement
from meshwright.comm.mesh import Mesh
from meshwright.data import PreparedData, prepare
from meshwright.errors import UserError
from meshwright.launcher.device import choose_single_device
from meshwright.launcher.launcher import LaunchSpec, launch
from meshwright.launcher.rank_process import run_rank
from meshwright.launcher.rendezvous import RendezvousInfo
from meshwright.layout import Layout
from meshwright.model.documents import Documents, MicroBatch
from meshwright.parallel.context import shard_sequences
from meshwright.recipe import Recipe, load_recipe_text
from meshwright.spec.config_json import config_from_path
from meshwright.spec.distillation import fit_vocabulary, make_teacher_layout
from meshwright.spec.refuse import refuse
from meshwright.terminal import print_message
from meshwright.threads import choose_threads
from meshwright.training.teacher import Teacher
from meshwright.training.teacher_cache import Shard, TeacherCache
from meshwright.training.teacher_targets import top_log_probabilities
from meshwright.training.worker import run_script_as_rank

TOKENS = 4096
"""Tokens of the sequences that make up a micro-batch, on all ranks together."""


def write_teacher_cache(
    recipe: Recipe, data: PreparedData, log: Callable[[str], None] = print_message, layout: Layout | None = None
) -> dict[str, Any]:
    """Complete the cache of a teacher's most probable next tokens: run the teacher on the sequences whose files are
    missing or damaged (found by checksums). Return the JSON document of `meshwright data teacher`: "directory",
    "sequences", "bytes", "computed" (number of sequences computed now), "mean_rest" (mean probability of the tokens
    that are not stored).

    recipe: settings, which name the teacher. data: prepared data. log: called with progress lines, unless ranks are
    started, which print theirs. layout: layout of ranks that are started on this machine to run the teacher; None: no
    ranks are started, and the teacher runs in this process with `run.threads` threads if set. Raises `UserError` if the
    teacher cannot run on the layout, or a file cannot be written."""
    layout = Layout() if layout is None else layout
    check_teacher_on_layout(recipe, layout)
    cache = TeacherCache(recipe, data)
    with cache.lock(log):
        missing = cache.find_missing_shards()
        if missing and layout.world_size == 1:
            device = choose_single_device(recipe.run.device)
            with _limit_threads(recipe.run.threads):
                compute_shards(cache, recipe, Mesh.single(layout, device), missing, log)
        elif missing:
            _launch_ranks(recipe, layout, cache, missing, log)
        return cache.write_manifest() | {"computed": sum(shard.sequences for shard in missing)}


@contextmanager
def _limit_threads(threads: int | None) -> Iterator[None]:
    """Context manager in which torch computes with `threads` threads; None: the number of threads is not changed."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_teacher_on_layout(recipe: Recipe, layout: Layout) -> None:
    """Raise `UserError` if the teacher of `recipe` cannot run on `layout`."""
    given = recipe.distill
    assert given.teacher is not None
    if layout.precision not in (None, "fp32"):
        raise UserError(f'layout "{layout}": a teacher\'s cache is computed in fp32; leave {layout.precision} out')
    config = config_from_path(given.teacher)
    refuse(make_teacher_layout(layout, "same", config), config, layout.dp * layout.micro_batches, recipe.data.sequence)


def compute_shards(
    cache: TeacherCache, recipe: Recipe, mesh: Mesh, shards: Sequence[Shard], log: Callable[[str], None]
) -> None:
    """Run the teacher in fp32 on the sequences of `shards` and write their files. Each rank computes the micro-batches
    of its dp rank, and writes the positions that it holds into the files' memory maps. A micro-batch has the same
    sequences on every layout.

    cache: cache that the shards belong to. recipe: settings, which name the teacher. mesh: device mesh. log: called
    with progress lines on rank 0. Raises `UserError` on every rank if any rank cannot write a file. Collective.
    """
    given, agreement = recipe.distill, Agreement(mesh)
    assert given.teacher is not None
    config = fit_vocabulary(config_from_path(given.teacher), cache.vocabulary)
    teacher = Teacher(config, mesh, ("same", recipe.data.sequence), torch.float32)
    teacher.load(Path(given.teacher))
    done = 0
    for shard in shards:
        with _raise_on_every_rank(cache, agreement):
            if mesh.rank == 0:
                cache.create_files(shard)
        with _raise_on_every_rank(cache, agreement):
            files = cache.map_unfinished(shard)
        _compute_shard(cache, teacher, mesh, shard, files)
        with _raise_on_every_rank(cache, agreement):
            for file in files:
                file.flush()
        with _raise_on_every_rank(cache, agreement):
            if mesh.rank == 0:
                cache.finish_files(shard)
        if mesh.rank == 0:
            done += shard.sequences
            log(f"teacher: {done:,} of {sum(each.sequences for each in shards):,} sequences")


@contextmanager
def _raise_on_every_rank(cache: TeacherCache, agreement: Agreement) -> Iterator[None]:
    """Context manager that raises `UserError` on every rank if any rank has an `OSError` inside it, such as a full
    disk. The ranks also wait for each other at its end. cache: cache that is written. agreement: exchanges errors
    between ranks. Collective."""
    problem = None
    try:
        yield
    except OSError as error:
        problem = cache.describe_write_error(error)
    agreement.raise_first(problem)


def _compute_shard(cache: TeacherCache, teacher: Teacher, mesh: Mesh, shard: Shard, files: tuple[Any, Any]) -> None:
    """Run `teacher` on the sequences of a shard, and write what this rank computes into the shard's files. cache: cache
    that the shard belongs to. mesh: device mesh of the ranks. files: memory maps of the shard's token IDs and
    log-probabilities. Collective."""
    given = cache.recipe.distill
    rows, passes = max(1, TOKENS // cache.data.sequence), mesh.layout.micro_batches
    for start in range(0, shard.sequences, rows * mesh.dp.size * passes):
        firsts = [start + rows * (number * mesh.dp.size + mesh.dp.rank) for number in range(passes)]
        # All ranks run equally many micro-batches; what lies beyond the shard's end is not written.
        loaded = [_load_sequences(cache, mesh, shard, first + np.arange(rows)) for first in firsts]
        for number, found in teacher.run(loaded).items():
            head, count = teacher.output_head(mesh.tp), max(0, min(rows, shard.sequences - firsts[number]))
            top = top_log_probabilities(found.states_TH, head, given.temperature, given.top_k)
            if mesh.tp.rank == 0 and count:
                indices_C = loaded[number].documents.indices_C
                held = slice(None) if indices_C is None else indices_C.cpu().numpy()
                for file, part in zip(files, top, strict=True):
                    written = part.unflatten(0, (rows, -1))[:count].cpu().numpy().astype(file.dtype)
                    file[firsts[number] : firsts[number] + count, held] = written


def _load_sequences(cache: TeacherCache, mesh: Mesh, shard: Shard, places: NDArray[np.int64]) -> MicroBatch:
    """Load sequences as a micro-batch; return this rank's context-parallel slice of it. cache: cache of the teacher's
    tokens, which has the data. mesh: device mesh. places: indices of the sequences in `shard`; an index beyond its end
    loads its last sequence."""
    indices = shard.first + np.minimum(places, shard.sequences - 1)
    batch = cache.data.split(shard.split).read_batch(indices)
    tokens, targets = (torch.from_numpy(part).to(mesh.device) for part in (batch.tokens, batch.targets))
    documents = Documents.from_ids(batch.document_ids).to(mesh.device)
    return shard_sequences(tokens, targets, documents, mesh)


# --- on ranks of this machine


def _launch_ranks(
    recipe: Recipe, layout: Layout, cache: TeacherCache, shards: Sequence[Shard], log: Callable[[str], None]
) -> None:
    """Start the ranks of `layout` on this machine, which compute `shards` of the cache, and wait for them. recipe:
    settings, which name the teacher; log: called with each line for the user."""
    with tempfile.TemporaryDirectory(prefix="meshwright-teacher-") as place:
        threads = recipe.run.threads or choose_threads(layout.world_size)
        run = recipe.run.model_copy(update={"directory": place, "threads": threads})
        described = recipe.model_copy(update={"layout": str(layout), "run": run})
        description = {
            "recipe": described.to_toml(),
            "source": str(recipe.source_path or "recipe"),
            "teacher_sha256": cache.identity["teacher"],
            "shards": [list(shard) for shard in shards],
        }
        command = (sys.executable, "-P", "-m", __name__)
        spec = LaunchSpec(
            description, layout.world_size, Path(place), threads=threads, command=command, trains=False, log=log,
            collective_timeout=recipe.run.collective_timeout,
            resume_note="finished files of the cache are kept: the same command continues",
        )  # fmt: skip
        launch(spec)


def compute_as_rank(description: dict[str, Any], start: RendezvousInfo) -> dict[str, Any]:
    """Compute shards of a teacher's cache on this rank, a process that Meshwright's launcher started; return an empty
    result. description: JSON dict from the launcher with recipe, the teacher's hash and the shards; start: rank, world
    size and rendezvous of this process."""
    recipe = load_recipe_text(description["recipe"], description["source"])

    def work(recipe: Recipe, mesh: Mesh, directory: Any) -> dict[str, Any]:
        """Compute the shards on this rank of `mesh` and return an empty result. directory: ignored."""
        data = prepare(recipe.data, recipe.run.seed)
        cache = TeacherCache(recipe, data, description["teacher_sha256"])
        compute_shards(cache, recipe, mesh, [Shard(*each) for each in description["shards"]], print_message)
        mesh.close()
        return {}

    return run_script_as_rank(recipe, start, work, Path(description["directory"]))


if __name__ == "__main__":
    run_rank(compute_as_rank)
