"""Training task of a script's own module: the implementation of `Task` for any `nn.Module`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from meshwright.comm import collectives
from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.monitoring.records import Metrics, RunDescription, Validation
from meshwright.parallel.flat_buffers import TensorSlice
from meshwright.parallel.module.prefetch import ModulePrefetcher
from meshwright.parallel.module.table import ModuleDescription
from meshwright.parallel.stage_compute import Divisor
from meshwright.parallel.step import TermCount, sum_over_data
from meshwright.parallel.zero_engine import ZeroEngine
from meshwright.planner.cost.data_calls import BufferChanges, ModuleCalls, Work, sum_by_axis, sum_by_site
from meshwright.spec.foreign import ModulePartition
from meshwright.training.module.data import BatchShare, TrainingSamples, derive_seed, move_to_device, seed_generators
from meshwright.training.module.passes import Batch, ModulePasses
from meshwright.training.module.recipe import ModuleRecipe
from meshwright.training.module.spec import ModuleSpec
from meshwright.training.module.values import UntrainedTensors
from meshwright.training.precision import PARAMETER_DTYPES, set_matmul_precision
from meshwright.training.task import RunStart


class _ModuleEngine(ZeroEngine):
    """ZeRO engine (sharding, gradient reduction, all-gathers) for a user's own module. As in torch's FSDP, hooks on the
    submodules all-gather parameters before use."""

    prefetcher_class = ModulePrefetcher


class ModuleTask:
    """Task of training a user's own torch module, on one rank; implements `Task`.

    spec: module, loss and data that the script passed to `fit`. recipe: settings of the run. layout: parallel layout
    with an explicit precision. mesh: device mesh of this rank. module: the module with initial values, on the mesh's
    device; its trained parameters become views of flat buffers. derived: parameter table and FSDP units of the module,
    from `parallel.module.table.describe_module`."""

    adapter: dict[str, Any] | None = None
    """Content of PEFT's `adapter_config.json` if an adapter is trained; None: the module itself is."""

    def __init__(
        self,
        spec: ModuleSpec,
        recipe: ModuleRecipe,
        layout: Layout,
        mesh: Mesh,
        module: nn.Module,
        derived: ModuleDescription,
    ) -> None:
        """Shard the module's parameters over the ranks and set up its data loader and passes; arguments: see the
        class.
        """
        self.recipe, self.layout, self.mesh, self.spec = recipe, layout, mesh, spec
        self.module, self.table, self.derived = module, derived.table, derived
        set_matmul_precision(layout.precision, mesh.device)
        dtype = parameter_dtype(module, layout)
        self.parallel: ZeroEngine = _ModuleEngine(
            module,
            derived.table,
            mesh,
            seed=None,
            parameter_dtype=dtype,
            master_dtype=torch.promote_types(dtype, torch.float32),
            partition=ModulePartition.whole(derived.table),
        )
        train, seed = recipe.train, recipe.run.seed
        self.values = UntrainedTensors(module, mesh)
        self.passes = ModulePasses(module, spec, self.parallel, seed)
        named = dict(module.named_parameters())
        unit_of = {id(named[entry.tensor]): entry.unit for entry in derived.table.entries}
        self.passes.prefetcher.attach(derived.units, unit_of)
        share = BatchShare(train.batch, mesh.dp.size, mesh.dp.rank, layout.micro_batches)
        self.samples = TrainingSamples(spec.data, seed, share, spec.collate, spec.workers)

    # --- a step

    def load_step(self, step: int) -> list[Batch]:
        """Load this rank's micro-batches of the step with index `step` (from 0), and copy the buffers that the step may
        change, so that `discard_step` can restore them."""
        self.values.begin_step()
        return [self._make_batch(number, samples, content) for number, samples, content in self.samples.load_step(step)]

    def prefetch_step(self, step: int) -> None:
        """Do nothing: the data loader's workers read ahead, and `load_step` copies buffers that a step changes. step:
        ignored."""

    def count_terms(self, micro_batches: Sequence[Batch]) -> TermCount:
        """Start to count the items over which the loss of a step averages: their number in this rank's `micro_batches`,
        summed over all ranks. Return a function that waits for this sum and returns it (1 if it is 0). The summed loss
        is divided by it. Collective."""
        return sum_over_data((torch.tensor(batch.items) for batch in micro_batches), self.mesh)

    def forward_backward(self, micro_batches: Sequence[Batch], divisor: Divisor) -> torch.Tensor:
        """Run forward and backward of this rank's `micro_batches`, which leaves the gradients in the ZeRO shards; then
        average over ranks the buffers that changed, such as running statistics.

        divisor: number by which the summed loss is divided, or a function that returns it. Returns float64 [1]: this
        rank's contribution to the divided loss; the contributions of all ranks sum to the loss."""
        loss = self.passes.train(micro_batches, divisor)
        self.values.end_step()
        return loss.reshape(1)

    def discard_step(self) -> None:
        """Restore the module's buffers to their values before the skipped step."""
        self.values.restore_buffers()

    def report(self, means: Sequence[float]) -> Metrics:
        """Return no metrics: the user's metric functions (`FitOptions.measures`) are computed only in validation.
        means: ignored."""
        return Metrics()

    # --- around steps

    def describe(self) -> RunDescription:
        """Return the description of module and data for the run's report; the FLOPs of a user's module are unknown."""
        units = len(self.table.units)
        sharded = f", in {units} unit{'s' if units > 1 else ''}" if self.layout.zero else ""
        return RunDescription(
            model=f"{type(self.module).__name__}, {self.table.numel / 1e6:.2f} M trained parameters{sharded}",
            data=f"{len(self.spec.data):,} samples",
            parameters=self.table.numel,
            unit="samples",
            units_per_step=self.recipe.train.batch,
            metric_names=tuple(f"validation_{name}" for name in self.spec.measures),
        )

    def prepare(self, start: RunStart) -> None:
        """Do nothing before the first step: the module is already built. start: ignored."""

    def validate(self) -> Validation:
        """Return the mean loss per item and the means of the user's metric functions (`FitOptions.measures`) on the
        first `train.validation_sequences` samples of the validation data. Collective."""
        data, mesh, train = self.spec.validation, self.mesh, self.recipe.train
        assert data is not None
        count = min(train.validation_sequences, len(data))
        size = max(1, train.batch // (self.layout.dp * self.layout.micro_batches))
        names = list(self.spec.measures)
        sums = torch.zeros(2 + len(names), dtype=torch.float64, device=mesh.device)
        training = [inner for inner in self.module.modules() if inner.training]
        self.module.eval()
        for first in range(0, count, size * mesh.dp.size):  # same count on all ranks: all-gathers are collective
            start = first + mesh.dp.rank * size
            wanted = range(start, min(start + size, count)) or range(
                1
            )  # beyond the end: one sample that is not counted
            seed_generators(derive_seed(self.recipe.run.seed, "validation", start), mesh.device)
            batch = self._make_batch(start, len(wanted), self.spec.collate([data[index] for index in wanted]))
            found = self.passes.evaluate(batch)
            if start < count and batch.items:
                sums += torch.stack([torch.as_tensor(each, device=mesh.device).double() for each in found])
        for inner in training:
            inner.training = True
        collectives.all_reduce(sums, mesh.world, "validation.loss")
        loss_sum, items, *measured = sums.tolist()
        means = {name: value / max(1.0, items) for name, value in zip(names, measured, strict=True)}
        text = "".join(f", {name.replace('_', ' ')} {value:.4f}" for name, value in means.items())
        return Validation(loss_sum / max(1.0, items), Metrics(means, text))

    def state(self) -> dict[str, Any]:
        """Return {"data_samples": number of training samples} for `state.json`. A run resumes only if this number is
        unchanged."""
        return {"data_samples": len(self.spec.data)}

    @property
    def can_launch_ahead(self) -> bool:
        """True if the module has no buffers, which a skipped step would have to restore."""
        return not self.values.has_buffers

    @property
    def saves_frozen(self) -> bool:
        """True if checkpoints hold frozen parameters."""
        buffers = dict(self.module.named_buffers())
        return any(each.name not in buffers for each in self.derived.kept)

    def buffer_slices(self, owned: bool) -> list[TensorSlice]:
        """Return buffers, and without an adapter frozen parameters, as checkpoint slices. owned: True to return only
        the slices that this rank writes (all on rank 0, none elsewhere); False to return all."""
        return self.values.slices({each.name for each in self.derived.kept}, owned)

    def buffer_bytes(self) -> dict[str, int]:
        """Return {"buffers": bytes of all buffers and frozen parameters on this rank}."""
        return {"buffers": self.values.nbytes()}

    def predicted_traffic(self) -> dict[str, int]:
        """Return the predicted bytes that this rank sends in a step, by call site (label of a collective call in the
        code)."""
        return sum_by_site(self._predict_calls())

    def predicted_traffic_by_axis(self) -> dict[str, int]:
        """Return the predicted bytes that this rank sends in a step, by mesh axis."""
        return sum_by_axis(self._predict_calls())

    def _predict_calls(self) -> dict[tuple[str, str], int]:
        """Return the predicted bytes that this rank sends in a step, by (call site, mesh axis)."""
        averaged, copied = self.values.count_synchronized()
        work = Work(
            self.recipe.train.batch,
            1,
            parameter_bytes=self.parallel.parameter_dtype.itemsize,
            master_bytes=self.parallel.master_dtype.itemsize,
            device=self.mesh.device.type,
            collectives=self.mesh.communicator.programs.named,
        )
        changes = BufferChanges(averaged, copied, self.values.count_compared())
        calls = ModuleCalls(self.table, self.layout, work, self.mesh.rank)
        return calls.count_step(self.passes.prefetcher.held, changes)

    def _make_batch(self, number: int, samples: int, content: Any) -> Batch:
        """Build a micro-batch: move collated content to the device and count the items over which the micro-batch's
        loss averages.

        number: global number of its first sample; samples: number of samples; content: the collated batch. `UserError`
        if the user's function `count` returns a negative number."""
        count = self.spec.count
        items = samples if count is None else int(count(content))
        if items < 0:
            raise UserError(f"count returned {items} items for a batch; it must not be negative")
        return Batch(number, move_to_device(content, self.mesh.device, self.parallel.parameter_dtype), items)


def parameter_dtype(module: nn.Module, layout: Layout) -> torch.dtype:
    """Return the dtype in which the module computes: the dtype of the layout's precision if it names one, else float64
    if any trained parameter is float64, else float32. `UserError` for a precision in which modules cannot be trained.
    """
    if layout.precision is not None:
        if layout.precision not in PARAMETER_DTYPES:
            raise UserError(f'layout "{layout}": a user module can be trained in {", ".join(PARAMETER_DTYPES)}')
        return PARAMETER_DTYPES[layout.precision]
    wide = any(each.dtype == torch.float64 for each in module.parameters() if each.requires_grad)
    return torch.float64 if wide else torch.float32
