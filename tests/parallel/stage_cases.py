"""Functions that the ranks of test_stages.py run: one observed step of a layout."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.comm.mesh import Mesh
from meshwright.data import prepare
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.model import loss
from meshwright.model.documents import Documents, MicroBatch
from meshwright.parallel.context import shard_sequences
from meshwright.parallel.flat_buffers import TensorSlice
from meshwright.parallel.parallelize import parallelize
from meshwright.parallel.step import ForwardBackward, count_targets
from meshwright.program.pipeline import Kind
from meshwright.recipe import load_recipe_text
from meshwright.schedules.library import generate_for_layout
from meshwright.spec.parameters import parameter_table
from meshwright.training.language_model import LanguageModelTask
from meshwright.training.model_config import resolve_model_config
from meshwright.training.trainer import Trainer
from meshwright.verification.problem import Problem
from meshwright.verification.samples import Batch
from tests.batches import make_batch, share_of


def tensors_of(batch: Batch, mesh: Mesh) -> MicroBatch:
    """This rank's slices of tokens, targets and documents of a batch of unsharded sequences."""
    tokens, targets = torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets)
    return shard_sequences(tokens, targets, Documents.from_ids(batch.document_ids), mesh)


class Rank:
    """Model, ZeRO engine and passes of this rank, and its micro-batches of the first step."""

    def __init__(self, problem: Problem, layout_text: str, dtype: torch.dtype = torch.float64) -> None:
        self.layout = Layout.parse(layout_text)
        self.mesh = Mesh.create(self.layout)
        self.table = parameter_table(problem.config)
        master = torch.float64 if dtype == torch.float64 else torch.float32
        self.model, self.engine, program = parallelize(
            problem.config, self.mesh, problem.sequence, seed=3, parameter_dtype=dtype, master_dtype=master
        )
        self.partition = self.engine.partition
        self.passes = ForwardBackward(self.model, self.engine, program)
        mine = share_of(make_batch(problem, 0), self.mesh.dp.rank, self.mesh.dp.size, self.layout.micro_batches)
        self.micro_batches: list[Any] = [tensors_of(batch, self.mesh) for batch in mine]
        self.targets = count_targets((targets for _, targets, _ in self.micro_batches), self.mesh)


def names_and_holdings(problem: Problem, layout_text: str) -> dict[str, Any]:
    """Names of this rank's parameters, the slices that it writes and holds, its memory and the prediction."""
    rank = Rank(problem, layout_text)
    rank.passes.train(rank.micro_batches, rank.targets)
    found = {
        "names": [name for name, _ in rank.model.named_parameters()],
        "owned": [(piece.name, piece.start, piece.stop) for piece in rank.engine.master_slices(owned=True)],
        "masters": [(piece.name, piece.start, piece.tensor.clone()) for piece in rank.engine.master_slices(False)],
        "memory": rank.engine.memory(),
        "predicted": rank.engine.predicted_bytes(),
        "calls": {(call["site"], call["operation"]): call["calls"] for call in rank.mesh.record.table()},
    }
    rank.mesh.close()
    return found


def gradients_of_a_step(problem: Problem, layout_text: str, backend: str | None = None) -> list[TensorSlice]:
    """This rank's slices of the reduced gradients. `backend`: torch.compile backend of the blocks."""
    rank = Rank(problem, layout_text)
    if backend is not None:
        rank.model.compile_blocks(backend=backend)
    rank.passes.train(rank.micro_batches, rank.targets)
    gradients = [shard.gradient for shard in rank.engine.shards]
    found = rank.engine.slices_like("gradient", gradients, owned=False)
    rank.mesh.close()
    return [dataclasses.replace(piece, tensor=piece.tensor.clone()) for piece in found]


def gathered_under_zero3(problem: Problem, layout_text: str) -> dict[str, Any]:
    """Units unsharded between the steps of a program and, at most, within them; unsharded gradient buffers too."""
    rank = Rank(problem, layout_text)
    units = rank.engine._units
    seen: dict[str, list[set[str]]] = {"between": [], "within": []}

    def there() -> set[str]:
        return {name for name, unit in units.items() if unit.parameters.untyped_storage().nbytes() > 0}

    for prefetcher in rank.engine.prefetchers.values():
        enter = prefetcher.enter

        def watched(name: str, x: Any, enter: Any = enter) -> Any:
            result = enter(name, x)
            assert name in there()
            seen["within"].append(there())
            return result

        prefetcher.enter = watched  # type: ignore[method-assign]
    run = rank.passes._pipeline
    steps: list[str] = []
    _watch_steps(run, lambda kind: (steps.append(kind), seen["between"].append(there())))
    rank.passes.train(rank.micro_batches, rank.targets)
    after = there()
    rank.mesh.close()
    return {**seen, "steps": steps, "after": after}


def _watch_steps(pipeline: Any, note: Any) -> None:
    run = pipeline.run

    def watched(compute: Any) -> None:
        step = compute.run

        def noted(kind: Kind, key: Any, x: Any) -> Any:
            result = step(kind, key, x)
            note(kind.name.lower())
            return result

        compute.run = noted
        run(compute)

    pipeline.run = watched


def bf16_copies(problem: Problem, layout_text: str) -> list[tuple[str, int, torch.Tensor]]:
    """Masters of this rank after two updates with bf16 parameters."""
    rank = Rank(problem, layout_text, torch.bfloat16)
    for _ in range(2):
        rank.passes.train(rank.micro_batches, rank.targets)
        for shard in rank.engine.shards:
            shard.master.sub_(shard.gradient, alpha=0.2)
        rank.engine.all_gather_parameters()
    held = [(piece.name, piece.start, piece.tensor.clone()) for piece in rank.engine.master_slices(owned=False)]
    rank.mesh.close()
    return held


def outputs_kept(problem: Problem, layout_text: str) -> list[bool]:
    """For each output sent by this rank's stages: True if its memory was still allocated when its backward began."""
    from torch.multiprocessing.reductions import StorageWeakRef

    rank = Rank(problem, layout_text)
    sent: dict[tuple[int, int, int], StorageWeakRef] = {}
    kept: list[bool] = []
    pipeline = rank.passes._pipeline
    run = pipeline.run

    def watched(compute: Any) -> None:
        step = compute.run

        def noted(kind: Kind, key: Any, x: Any) -> Any:
            if kind == Kind.BACKWARD and key in sent:
                kept.append(not sent[key].expired())
            out = step(kind, key, x)
            if kind == Kind.FORWARD and out is not None:
                sent[key] = StorageWeakRef(out.untyped_storage())
            return out

        compute.run = noted
        run(compute)

    pipeline.run = watched  # type: ignore[method-assign]
    rank.passes.train(rank.micro_batches, rank.targets)
    rank.mesh.close()
    return kept


def head_gradients_kept(problem: Problem, layout_text: str) -> list[int]:
    """Number of head weight gradients in memory at the start of each backward of the last stage."""
    rank = Rank(problem, layout_text)
    found: list[int] = []
    made: list[StorageWeakRef] = []
    collect = loss._Gradients.collect

    def watch_gradients(sums: loss._Gradients) -> tuple[torch.Tensor | None, ...]:
        gradients = collect(sums)
        if gradients[1] is not None:
            made.append(StorageWeakRef(gradients[1].untyped_storage()))
        return gradients

    pipeline = rank.passes._pipeline
    run = pipeline.run

    def watched(compute: Any) -> None:
        step = compute.run

        def noted(kind: Kind, key: Any, x: Any) -> Any:
            if kind == Kind.BACKWARD and rank.partition.stages[key[0]].last:
                found.append(sum(not each.expired() for each in made))
            return step(kind, key, x)

        compute.run = noted
        run(compute)

    pipeline.run = watched  # type: ignore[method-assign]
    with mock.patch.object(loss._Gradients, "collect", watch_gradients):
        rank.passes.train(rank.micro_batches, rank.targets)
    rank.mesh.close()
    return found


def gathers_in_flight_after_a_step(problem: Problem, layout_text: str) -> dict[str, int]:
    """Number of parameter all-gathers in flight when updates begin, after steps without passes and with all passes."""
    rank = Rank(problem, layout_text)
    counts = {}
    for what in ("published", "idle", "trained"):
        if what == "idle":
            rank.engine.begin_step(0)
            rank.engine.finish()
        elif what == "trained":
            rank.engine.all_gather_parameters()
            rank.passes.train(rank.micro_batches, rank.targets)
        counts[what] = sum(unit.pending_all_gather is not None for unit in rank.engine._units.values())
    rank.mesh.close()
    return counts


def trainer_of_another_program(text: str) -> str:
    """Error message of the trainer if the last rank has read another program than the others."""
    recipe = load_recipe_text(text, "recipe")
    layout = recipe.parsed_layout
    mesh = Mesh.create(layout)
    read = (
        generate_for_layout(dataclasses.replace(layout, schedule="gpipe"))
        if mesh.rank == 3
        else generate_for_layout(layout)
    )
    data = prepare(recipe.data, recipe.run.seed)
    try:
        with mock.patch("meshwright.parallel.parallelize.program_for", lambda *arguments: read):
            Trainer(LanguageModelTask(recipe, layout, resolve_model_config(recipe, data), data, mesh))
    except UserError as error:
        return str(error)
    finally:
        mesh.close()
    return ""
