"""ZeRO engine: all FSDP units of one rank, the order of calls in a step, and the state that checkpoints and memory
ledgers read.

`parallel/zero.py` explains ZeRO and has its collectives; `parallel/parallelize.py` applies the engine to a model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from meshwright.comm.mesh import EXPERT_AXES, Axis, Mesh
from meshwright.model.initialise import ReadSlice, make_initial_slice
from meshwright.parallel.flat_buffers import GradientBufferPool, TensorSlice, cut_slices, make_flat_layout, split_evenly
from meshwright.parallel.gradient_accumulation import BackwardPass, GradientAccumulator
from meshwright.parallel.tensor import PartialGradients
from meshwright.parallel.zero import FsdpUnit, GradientReducer, ParameterPrefetcher, ShardingAxes
from meshwright.planner.memory.states import flats_of, list_states
from meshwright.spec.parameter_entries import EXPERT_BUFFERS, BufferKind
from meshwright.spec.parameters import ParameterTable
from meshwright.spec.partition import Partition
from meshwright.spec.stages import Stage


class ZeroEngine:
    """Owner of a model's parameters, master weights and gradients on one rank; it makes the collective calls of data
    parallelism and ZeRO.

    A training step calls `begin_step`; then for each micro-batch and stage of this rank the forward, with
    `units=prefetchers[stage.index]`, and the backward pass, between `start_pass` and `end_pass`
    (parallel/stage_compute.py); then `finish`. The optimizer updates the master weights of `shards`, and
    `all_gather_parameters` ends the step.

    The model's parameters become views of flat buffers, which each step overwrites with the master weights. Values must
    therefore be loaded into the master weights (`master_slices(owned=False)`, then `all_gather_parameters`), never into
    the model.

    table: the model's parameter table. mesh: device mesh of this rank, whose layout gives the ZeRO stage. seed:
    initialises the parameters; None: keep the values that the model has (not on the meta device). parameter_dtype:
    dtype of parameters and compute. master_dtype: dtype of master weights and gradients. partition: assigns FSDP units
    to pipeline stages, and stages to ranks (each rank holds only the units of its stages); None: one stage."""

    prefetcher_class: type[Any] = ParameterPrefetcher

    def __init__(
        self, model: nn.Module, table: ParameterTable, mesh: Mesh, *, seed: int | None, parameter_dtype: torch.dtype,
        master_dtype: torch.dtype = torch.float32, partition: Partition | None = None,
    ) -> None:  # fmt: skip
        self.mesh = mesh
        self.table = table
        partition = Partition.whole(table) if partition is None else partition
        self.partition = partition
        self.parameter_dtype = parameter_dtype
        self.master_dtype = master_dtype
        held = partition.units_on(mesh.pp.rank)
        tied = self._make_tied_axes()
        self._units: dict[str, FsdpUnit] = {}
        """The FSDP units by the name of their flat buffer."""
        self._trained: dict[str, FsdpUnit] = {}
        """Those of `_units` that have gradients: all but frozen ones."""
        self._units_of: dict[str, list[FsdpUnit]] = {name: [] for name in held}
        """The FSDP units of each unit of the model: one for each of its flat buffers."""
        parameters: dict[str, list[nn.Parameter]] = {}
        for name in held:
            for buffer in table.unit_buffers(name, mesh.layout):
                unit = self._build_unit(name, buffer, tied[name])
                if seed is None:
                    unit.flat.fill_from_model(unit.master, unit.start, model)
                else:
                    unit.flat.fill(unit.master, unit.start, partial(make_initial_slice, seed=seed))
                self._units[unit.flat.name] = unit
                self._units_of[name].append(unit)
                bound = unit.flat.bind(model, unit.parameters)
                if unit.trainable:
                    self._trained[unit.flat.name] = unit
                    parameters[unit.flat.name] = bound
                if unit.zero == 3:
                    unit.reshard()  # before the next unit is built: the whole model may be too large for one device
        self.prefetchers: dict[int, Any] = {}
        """Prefetchers by stage index; the model calls them around each unit (model/axis_operations.py)."""
        for stage in partition.stages_on(mesh.pp.rank):
            names = partition.units(stage)
            needs = {name: self._list_units(table.needed_by(name)) for name in names}
            self.prefetchers[stage.index] = self.prefetcher_class(names, needs)
        self.shards = list(self._trained.values())
        """The trained FSDP units, of whose shards the optimizer updates the master weights."""
        ranges = [(unit, *each) for unit in self.shards for each in unit.flat.split_by_copies(unit.start, unit.stop)]
        self._summed = [unit.gradient[low - unit.start : high - unit.start] for unit, low, high, _ in ranges]
        """Slices of gradients whose elements count in gradient norms."""
        self._copies = torch.tensor(
            [copies * unit.replicas for unit, _, _, copies in ranges], dtype=torch.float64, device=mesh.device
        )
        """Number of ranks that hold each of these slices."""
        self.frozen = [unit for unit in self._units.values() if not unit.trainable]
        self._partial = PartialGradients(self.shards, table, mesh)
        sharded = [[unit for unit in units if unit.trainable and unit.zero >= 2] for units in self._units_of.values()]
        sizes = [tuple(unit.flat.padded for unit in units) for units in sharded]
        self._pool = GradientBufferPool(mesh.device, master_dtype, sizes)
        self.gradients = GradientAccumulator(self._trained, parameters, GradientReducer(self._trained, self._pool))
        self.all_gather_parameters()

    def _make_tied_axes(self) -> dict[str, Axis | None]:
        """Return {FSDP unit name: mesh axis of the pipeline ranks that hold the unit, None if a single rank holds it}.
        Collective: every rank creates all process groups."""
        axes = {places: self.mesh.make_subset_axis("pp", places) for places in self.partition.shared_places()}
        return {name: axes.get(self.partition.holders(name)) for name in self.table.units}

    def _build_unit(self, name: str, buffer: BufferKind, tied: Axis | None) -> FsdpUnit:
        """Build the `FsdpUnit` of one flat buffer of the FSDP unit `name`.

        `buffer`: kind of the parameters in it: "dense" (trained), "experts" (routed experts under expert parallelism),
        "frozen", "frozen_experts" or "packed" (quantized). `tied`: mesh axis over all pipeline ranks that hold a copy
        of the unit, such as a tied embedding; None if this pipeline rank alone holds the unit."""
        mesh = self.mesh
        experts = buffer in EXPERT_BUFFERS
        sharding = {same: getattr(mesh, name if experts else same) for name, same in EXPERT_AXES.items()}
        axes = ShardingAxes(**sharding, tied=tied)
        zero = mesh.layout.zero if not axes.shard.trivial else 0
        shards = axes.shard.size if zero else 1
        flat = make_flat_layout(self.table, name, shards, mesh.layout, mesh.layout.coordinates(mesh.rank), buffer)
        return FsdpUnit(flat, zero, axes, self.parameter_dtype, self.master_dtype)

    def _list_units(self, names: Iterable[str]) -> list[FsdpUnit]:
        """Return the FSDP units of the units of the model called `names`, one for each of their flat buffers."""
        return list(chain.from_iterable(self._units_of[name] for name in names))

    def _list_trained_names(self, stage: Stage) -> list[str]:
        """Return the names of the trained flat buffers that a pipeline stage uses, in the order of first use."""
        units = self._list_units(self.partition.needed_units(stage))
        return [unit.flat.name for unit in units if unit.trainable]

    # --- one step

    def begin_step(self, micro_batches: int | Mapping[int, int]) -> None:
        """Discard the last step's gradients. `micro_batches`: number of backward passes through each stage of this rank
        in the coming step: one number for all stages, or stage index -> number."""
        passes = dict.fromkeys(self._trained, 0)
        for stage in self.partition.stages_on(self.mesh.pp.rank):
            count = micro_batches if isinstance(micro_batches, int) else micro_batches.get(stage.index, 0)
            for name in self._list_trained_names(stage):
                passes[name] += count
        self.gradients.begin_step(passes)

    def start_pass(self, stage: Stage, split: bool = False) -> BackwardPass:
        """Start a backward pass of one micro-batch through a stage and return the state of the pass. `split`: True if
        the pass first computes only input gradients, until `pause_pass` is called."""
        return self.gradients.start(self._list_trained_names(stage), split)

    def pause_pass(self, stage: Stage, deferred: Collection[nn.Parameter]) -> None:
        """Pause a split backward pass through `stage` once its input gradients are computed, and reshard the stage's
        parameters. `deferred`: parameters whose weight gradients are computed later, after `gradients.resume`, and
        passed to `gradients.accumulate`."""
        self.gradients.pause(deferred)
        self.prefetchers[stage.index].reshard()

    def end_pass(self, stage: Stage) -> None:
        """End the backward pass of one micro-batch through a stage, after all of its gradients are accumulated."""
        self.gradients.end()
        self.prefetchers[stage.index].reshard()

    def finish(self) -> None:
        """Wait for the gradient reductions of a step. Afterwards the attribute `gradient` of each unit in `shards` is
        the sum over all ranks and micro-batches."""
        self.gradients.finish()
        for unit in self._units.values():
            if unit.pending_all_gather is not None:  # unused in this step, and updated next
                unit.unshard()
        self.gradients.reducer.launch(self._partial.all_reduce)

    def squared_norm_share(self) -> torch.Tensor:
        """Return this rank's contribution to the squared global gradient norm, float64 scalar; the contributions of all
        ranks (`mesh.world`) sum to it. An element that n ranks hold counts 1 / n on each of them. The result is
        infinite or NaN if any gradient is infinite or NaN.
        """
        if self._summed and self.mesh.device.type == "cuda":  # few kernels for all slices
            norms = torch.stack(torch._foreach_norm(self._summed, 2, torch.float64))
            return (norms.square() / self._copies).sum()
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for gradient, copies in zip(self._summed, self._copies, strict=True):
            total += _sum_squares(gradient) / copies
        return total

    def initialise(self, seed: int) -> None:
        """Initialise the parameters in place from `seed`; the values depend on (seed, parameter name) alone, not on the
        parallel layout."""
        self.load(partial(make_initial_slice, seed=seed))

    def load(self, read_slice: ReadSlice) -> None:
        """Load parameter values into master weights and parameters. `read_slice`: function (entry, start, stop,
        columns) -> values that reads a slice of a parameter entry (one tensor of a checkpoint)."""
        for unit in self._units.values():
            unit.flat.fill(unit.master, unit.start, read_slice)
        self.all_gather_parameters()

    def all_gather_parameters(self) -> None:
        """Copy the master weights to the parameters and start the all-gathers of ZeRO-1 and 2; the next forward waits
        for each FSDP unit's parameters before it uses them."""
        for unit in self._units.values():
            unit.update_parameters()

    # --- slices for checkpoints, bytes for ledgers

    def master_slices(self, owned: bool) -> list[TensorSlice]:
        """Return the trained master weights as slices of parameter entries (checkpoint tensors).

        `owned`: True: the slices that this rank writes to a checkpoint (over all ranks, each element is in one slice);
        False: all slices that this rank holds and must read."""
        return self.slices_like("master", [shard.master for shard in self.shards], owned)

    def slices_like(self, kind: str, tensors: Sequence[torch.Tensor], owned: bool) -> list[TensorSlice]:
        """Return optimizer state of one kind, such as Adam's first moment, as slices of parameter entries (checkpoint
        tensors), cut at the same elements as the slices of `master_slices`.

        `kind`: label of the slices, such as "exp_avg". `tensors`: one 1-D tensor for each unit in `shards`, as long as
        its master weights. `owned`: True for the slices that this rank writes to a checkpoint, False for all that it
        must read.
        """
        slices: list[TensorSlice] = []
        position = self.mesh.layout.coordinates(self.mesh.rank) if owned else None
        for tensor, unit in zip(tensors, self.shards, strict=True):
            low = unit.start
            high = min(unit.stop, unit.flat.numel)
            if owned:
                low, high = split_evenly(low, max(low, high), unit.replica, unit.replicas)
            slices += cut_slices(unit.flat, kind, tensor, unit.start, low, high, position)
        return slices

    def parameter_slices(self) -> list[TensorSlice]:
        """Return copies of this rank's parameters, in the dtype of compute, as slices of parameter entries (checkpoint
        tensors). Collective: sharded parameters are all-gathered, so every rank must call it, between steps."""
        slices: list[TensorSlice] = []
        for unit in self._units.values():
            unit.unshard()
            values = unit.flat.storage_format.unpack(unit.parameters.clone(), torch.float32)
            slices += cut_slices(unit.flat, "parameter", values, 0, 0, unit.flat.numel)
            if unit.zero == 3:
                unit.reshard()
        return slices

    def memory(self) -> dict[str, int]:
        """Return the bytes that this rank holds now, by kind: "parameters", "masters" (0 if master weights and
        parameters share memory), "gradients", and "gradient_buffers" (buffers for unsharded gradients that are
        allocated but not in use)."""
        units = self._units.values()
        scales = chain.from_iterable(unit.flat.storage_format.scales for unit in units)
        kinds: dict[str, Iterable[torch.Tensor]] = {
            "parameters": [*(unit.parameters for unit in units), *(unit.parameter_shard for unit in units), *scales],
            "masters": [unit.master for unit in units],
            "gradients": [unit.gradient for unit in units],
            "gradient_buffers": self._pool.idle(),
        }
        sizes = dict.fromkeys(kinds, 0)
        seen: set[int] = set()
        for kind, tensors in kinds.items():
            for storage in (tensor.untyped_storage() for tensor in tensors):
                if storage.nbytes() and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    sizes[kind] += storage.nbytes()
        return sizes

    def predicted_bytes(self) -> dict[str, int]:
        """Return the planner's prediction of `memory` between steps, computed from the parameter table: bytes of
        "parameters", "masters", "gradients" and "gradient_buffers" on this rank."""
        sizes = dict.fromkeys(("parameters", "masters", "gradients", "gradient_buffers"), 0)
        flats = flats_of(self.table, self.mesh.layout, list(self._units_of))
        parameter, master = (str(each).removeprefix("torch.") for each in (self.parameter_dtype, self.master_dtype))
        for kind, state in list_states(flats, parameter, master, optimizer="sgd"):
            sizes[kind] += int(state.bytes)
        return sizes


def _sum_squares(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of the 1-D tensor `values` as a float64 scalar. The sums of blocks of 4096 elements are
    added in float64: a single float32 sum over millions of elements loses four digits."""
    row = 4096
    whole = values.numel() // row * row
    rows = torch.linalg.vector_norm(values[:whole].view(-1, row), dim=1).double()
    rest = torch.linalg.vector_norm(values[whole:]).double()
    return rows.square().sum() + rest.square()
