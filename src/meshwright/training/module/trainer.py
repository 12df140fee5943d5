"""One rank of a training run of a foreign module: the steps of every trainer, around a module that is not ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import nn

from meshwright.comm import collectives
from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.parallel.flat_buffers import TensorSlice
from meshwright.parallel.module.prefetch import ModulePrefetcher
from meshwright.parallel.module.table import ModuleDescription
from meshwright.parallel.pipeline import Compute
from meshwright.parallel.step import TARGET_SITE
from meshwright.parallel.zero_engine import ZeroEngine
from meshwright.planner.data_calls import Work, by_axis, by_site
from meshwright.planner.module_traffic import module_calls
from meshwright.schedules.library import program_of
from meshwright.spec.foreign import ModulePartition
from meshwright.training.module.data import TrainingSamples, draw_from, on_device, seed_for
from meshwright.training.module.recipe import ModuleRecipe
from meshwright.training.module.task import Task
from meshwright.training.module.values import KeptValues
from meshwright.training.trainer import PARAMETER_DTYPES, Trainer, Validation, Verdict, choose_products


class Batch(NamedTuple):
    """A micro-batch: the number of its first sample, what `collate` made, and how many items its loss is over."""

    number: int
    content: Any
    items: int


class ModulePasses:
    """Forward and backward of a step, as `parallel.step.ForwardBackward` does it for a transformer. `mark`: told of
    each part of the work that has ended. `seed`: of what the module draws (dropout)."""

    def __init__(
        self, module: nn.Module, task: Task, parallel: ZeroEngine, seed: int, mark: Callable[[str], None]
    ) -> None:
        self.module, self.parallel, self.mark = module, parallel, mark
        self._task, self.seed = task, seed
        self.program = program_of(parallel.mesh.layout)
        self.watched: Callable[[Compute], Compute] | None = None
        """While a profile is taken: what stands around the compute steps of a training step."""
        (self.stage,) = parallel.partition.stages
        prefetcher = self.prefetcher = cast(ModulePrefetcher, parallel.prefetchers[self.stage.index])
        parallel.gradients.on_complete, parallel.gradients.on_reduce = prefetcher.on_complete, prefetcher.on_reduce

    def train(self, micro_batches: Sequence[Batch], targets: float) -> torch.Tensor:
        """`parallel.shards` have the true gradients afterwards. targets: what the sum of losses is divided by. Returns
        this rank's loss (float64)."""
        self.parallel.begin_step(len(micro_batches))
        compute = _ModuleCompute(self, micro_batches, targets)
        watched: Compute = compute if self.watched is None else self.watched(compute)
        for number in range(len(micro_batches)):
            watched.forward(0, 0, number, None)
            watched.backward(0, 0, number, None)
        self.parallel.finish()
        self.mark("reduce")
        return compute.total

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """The sum of the batch's losses, in float32 at least."""
        loss = self._task.loss(self.module, batch.content)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            shape = f"shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, torch.Tensor) else repr(type(loss))
            raise UserError(f"the loss should be a tensor of one real number, and is {shape}")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise UserError("the loss depends on no parameter that is trained: nothing in it requires a gradient")
        loss = loss.reshape(()).to(torch.promote_types(loss.dtype, torch.float32))
        return loss * batch.items if self._task.reduction == "mean" else loss

    def evaluate(self, batch: Batch) -> list[torch.Tensor | float]:
        """The sum of the batch's losses, its items, and the sums of what is measured beside, without gradients."""
        with torch.no_grad(), self.prefetcher.forward(self.parallel.mesh.shard, backward_follows=False):
            loss = self.loss_sum(batch)
            measured = [measure(self.module, batch.content) for measure in self._task.measures.values()]
        self.prefetcher.reshard()
        return [loss, batch.items, *measured]


class _ModuleCompute:
    """The `Compute` (parallel/pipeline.py) of one step: the whole module is its only stage."""

    def __init__(self, passes: ModulePasses, micro_batches: Sequence[Batch], targets: float) -> None:
        self._passes, self._micro_batches, self._targets = passes, micro_batches, targets
        self.total = torch.zeros((), dtype=torch.float64, device=passes.parallel.mesh.device)
        self._loss: torch.Tensor | None = None

    def forward(self, stage: int, replica: int, micro_batch: int, x: torch.Tensor | None) -> None:
        passes, batch = self._passes, self._micro_batches[micro_batch]
        draw_from(seed_for(passes.seed, "forward", batch.number), passes.parallel.mesh.device)
        self._loss = None
        with passes.prefetcher.forward(passes.parallel.mesh.shard):
            if batch.items:
                self._loss = passes.loss_sum(batch) / self._targets
                self.total += self._loss.detach()
        passes.mark("forward")

    def backward(self, stage: int, replica: int, micro_batch: int, d_out: torch.Tensor | None) -> None:
        passes, parallel = self._passes, self._passes.parallel
        parallel.start_pass(passes.stage)
        with passes.prefetcher.backward(parallel.gradients):
            if self._loss is not None:
                self._loss.backward()  # type: ignore[no-untyped-call]
        self._loss = None
        parallel.end_pass(passes.stage)
        passes.mark("backward")

    def input_gradient(self, stage: int, replica: int, micro_batch: int, d_out: torch.Tensor | None) -> NoReturn:
        raise AssertionError("no backward is split")

    def weight_gradient(self, stage: int, replica: int, micro_batch: int) -> NoReturn:
        raise AssertionError("no backward is split")

    def buffer(self, stage: int, replica: int, micro_batch: int) -> NoReturn:
        raise AssertionError("nothing comes from another stage")


class ModuleTrainer(Trainer):
    """`Trainer` for a foreign module.

    module: with the values that it starts from, on the mesh's device; its trained parameters become views of flat
    buffers. derived: what `parallel.module.table.describe_module` found in it.
    """

    def __init__(
        self,
        task: Task,
        recipe: ModuleRecipe,
        layout: Layout,
        mesh: Mesh,
        module: nn.Module,
        derived: ModuleDescription,
    ) -> None:
        self.recipe, self.layout, self.mesh, self.task = recipe, layout, mesh, task
        self.device = torch.device(mesh.device)
        self.module, self.table, self.derived = module, derived.table, derived
        choose_products(layout.precision, self.device)
        dtype = parameter_dtype(module, layout)
        self.parallel = ZeroEngine(
            module,
            derived.table,
            mesh,
            seed=None,
            parameter_dtype=dtype,
            master_dtype=torch.promote_types(dtype, torch.float32),
            partition=ModulePartition.whole(derived.table),
            prefetcher=ModulePrefetcher,  # type: ignore[arg-type]
        )
        self._stand_by()
        train, seed = recipe.train, recipe.run.seed
        self.values = KeptValues(module, mesh)
        passes = ModulePasses(module, task, self.parallel, seed, self.clock.mark)
        named = dict(module.named_parameters())
        unit_of = {id(named[row.name]): row.unit for row in derived.table.rows}
        passes.prefetcher.attach(derived.units, unit_of)
        self.passes = passes  # type: ignore[assignment]
        self.samples = TrainingSamples(
            task.data, seed, train.batch, mesh.dp.size, mesh.dp.rank, layout.micro_batches, task.collate, task.workers
        )

    def validate(self) -> Validation:
        """Over the first `train.validation_sequences` samples of the validation data."""
        data, mesh, train = self.task.validation, self.mesh, self.recipe.train
        assert data is not None
        count = min(train.validation_sequences, len(data))
        size = max(1, train.batch // (self.layout.dp * self.layout.micro_batches))
        names = list(self.task.measures)
        sums = torch.zeros(2 + len(names), dtype=torch.float64, device=self.device)
        training = [inner for inner in self.module.modules() if inner.training]
        self.module.eval()
        passes: ModulePasses = self.passes  # type: ignore[assignment]
        for first in range(0, count, size * mesh.dp.size):  # every rank as often: units come and go for all of them
            start = first + mesh.dp.rank * size
            wanted = range(start, min(start + size, count)) or range(1)  # beyond the end: one that does not count
            draw_from(seed_for(self.recipe.run.seed, "validation", start), self.device)
            batch = self._batch(start, len(wanted), self.task.collate([data[index] for index in wanted]))
            found = passes.evaluate(batch)
            if start < count and batch.items:
                sums += torch.stack([torch.as_tensor(each, device=self.device).double() for each in found])
        for inner in training:
            inner.training = True
        collectives.all_reduce(sums, mesh.world, "validation.loss")
        loss_sum, items, *beside = sums.tolist()
        measures = {name: value / max(1.0, items) for name, value in zip(names, beside, strict=True)}
        return Validation(loss_sum / max(1.0, items), measures=measures)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold beside tensors to go on bit for bit."""
        return {
            "step": self.steps_done,
            "samples": self.steps_done * self.recipe.train.batch,
            "optimizer_steps": self.optimizer.step_count,
            "skipped_steps": self.skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "loss_scale": self.loss_scale.state(),
            "seed": self.recipe.run.seed,
            "data_samples": len(self.task.data),
            "threads": self.threads,
            "layout": str(self.layout),
            "recipe": self.recipe.to_toml(),
        }

    def slices(self, owned: bool) -> list[TensorSlice]:
        """Masters and optimizer state, and what is kept beside them."""
        return super().slices(owned) + self.values.slices(owned)

    def memory(self) -> dict[str, int]:
        """Bytes of state that this rank holds, by kind."""
        return super().memory() | {"buffers": self.values.nbytes()}

    def predicted_bytes(self) -> dict[str, int]:
        """The same by shapes and dtypes alone, between steps."""
        return super().predicted_bytes() | {"buffers": self.values.nbytes()}

    def predicted_traffic(self) -> dict[str, int]:
        """Bytes that this rank sends in a step, by call site."""
        return by_site(self._calls())

    def predicted_traffic_by_axis(self) -> dict[str, int]:
        """The same by axis of the mesh."""
        return by_axis(self._calls())

    def _calls(self) -> dict[tuple[str, str], int]:
        passes: ModulePasses = self.passes  # type: ignore[assignment]
        averaged, copied = self.values.numbers()
        return module_calls(
            self.table,
            self.layout,
            self._work(),
            self.mesh.rank,
            held=passes.prefetcher.held,
            averaged=averaged,
            copied=copied,
            looked_at=self.values.looked_at(),
        )

    def _work(self) -> Work:
        return Work(
            self.recipe.train.batch,
            1,
            parameter_bytes=self.parallel.parameter_dtype.itemsize,
            master_bytes=self.parallel.master_dtype.itemsize,
            device=self.device.type,
            collectives=self.mesh.communicator.programs.named,
        )

    # --- a step

    def _micro_batches(self) -> list[Any]:
        self.values.begin_step()
        return [
            self._batch(number, samples, content) for number, samples, content in self.samples.step(self.steps_done)
        ]

    def _batch(self, number: int, samples: int, content: Any) -> Batch:
        count = self.task.count
        items = samples if count is None else int(count(content))
        if items < 0:
            raise UserError(f"count gives {items} items for a batch: there cannot be fewer than none")
        return Batch(number, on_device(content, self.device, self.parallel.parameter_dtype), items)

    def _terms(self, micro_batches: list[Any]) -> int:
        items = torch.tensor(sum(batch.items for batch in micro_batches), dtype=torch.int64, device=self.device)
        collectives.all_reduce(items, self.mesh.data, TARGET_SITE)
        return max(1, int(items))

    def _agree(self, loss_sum: torch.Tensor, terms: int, stop: bool, save_failed: bool) -> Verdict:
        self.values.end_step()
        return super()._agree(loss_sum, terms, stop, save_failed)

    def _take_back(self) -> None:
        self.values.take_back()


def parameter_dtype(module: nn.Module, layout: Layout) -> torch.dtype:
    """What the module computes in: as the layout says, else float32, or float64 where the module has that."""
    if layout.precision is not None:
        if layout.precision not in PARAMETER_DTYPES:
            raise UserError(f'layout "{layout}": a module of your own is trained in {", ".join(PARAMETER_DTYPES)}')
        return PARAMETER_DTYPES[layout.precision]
    wide = any(each.dtype == torch.float64 for each in module.parameters() if each.requires_grad)
    return torch.float64 if wide else torch.float32
