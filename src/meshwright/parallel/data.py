"""Data parallelism: replicas, ZeRO 1 to 3 (arXiv 1910.02054) and hybrid sharding, on one flat buffer per unit.

| zero | parameters               | gradients                    | optimizer | calls a step of m micro-batches    |
|------|--------------------------|------------------------------|-----------|------------------------------------|
| 0    | whole                    | whole                        | whole     | all-reduce                         |
| 1    | whole, gathered once     | whole                        | shard     | reduce-scatter, all-gather         |
| 2    | whole, gathered once     | shard, whole while collected | shard     | m reduce-scatters, all-gather      |
| 3    | gathered around each use | shard, whole while collected | shard     | m reduce-scatters, 2 m all-gathers |

With hybrid sharding all of this happens inside a sharding group, and each shard's gradient is all-reduced once across
the groups. Reductions start while the backward pass goes on below; gathers run ahead of their use. Gradients are
summed, never averaged, in the dtype of the master. With tensor parallelism the flat buffers hold this rank's slices;
with expert parallelism the experts of a layer lie in a second one, between the ranks that hold the same of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.comm.collectives import all_reduce
from meshwright.comm.mesh import Mesh
from meshwright.model.pairs import Pairs
from meshwright.parallel.buffers import TransientBuffers, kept_buffers
from meshwright.parallel.gathering import StageUnits
from meshwright.parallel.gradients import GradientSums, Pass
from meshwright.parallel.pieces import Piece, buffer_name, flat_unit, part_of, pieces_of
from meshwright.parallel.tensor import PartialGradients
from meshwright.parallel.units import FlatAxes, UnitBuffers
from meshwright.spec.parameters import ParameterTable
from meshwright.spec.partition import Partition
from meshwright.spec.rows import Part, padded_numel
from meshwright.spec.stages import Stage

TARGET_SITE = "data.targets"


@dataclass(frozen=True, slots=True)
class Shard:
    """What the optimizer updates of one unit: [start, stop) of its flat buffer. `master` and `gradient` are 1-D, of
    equal length and dtype; weight decay applies to their first `decay_numel` elements. `balancing`: where in them the
    biases of routers lie, whose gradient is their experts' load above the mean."""

    unit: str
    master: torch.Tensor
    gradient: torch.Tensor
    decay_numel: int
    start: int
    stop: int
    balancing: tuple[tuple[int, int], ...] = ()


def count_targets(targets: Iterable[torch.Tensor], mesh: Mesh) -> int:
    """Target tokens of the whole step (those that are not -100) over all ranks, given this rank's micro-batches: what
    every loss of the step is divided by. At least 1."""
    count = torch.zeros((), dtype=torch.int64, device=mesh.device)
    for micro_batch in targets:
        count += (micro_batch != -100).sum()
    all_reduce(count, mesh.data, TARGET_SITE)
    return max(1, int(count))


def count_pairs(pairs: Iterable[Pairs], mesh: Mesh) -> int:
    """The same of pairs of responses, of which ranks of cp have parts of the same ones."""
    count = torch.zeros((), dtype=torch.int64, device=mesh.device)
    for micro_batch in pairs:
        count += micro_batch.count
    all_reduce(count, mesh.data, TARGET_SITE)
    return max(1, int(count) // mesh.cp.size)


def loss_share(loss: torch.Tensor, mesh: Mesh, of_pairs: bool = False) -> torch.Tensor:
    """This rank's share of the step's loss, given the loss of its own samples: the shares' sum over `mesh.world` is the
    loss, not finite if it is not on any rank. Ranks of tp compute the same loss, and so do those of cp where it is one
    of whole responses (`of_pairs`), not of tokens."""
    return loss / (mesh.tp.size * (mesh.cp.size if of_pairs else 1))


class DataParallel:
    """Parameters, masters and gradients of `model` on one rank, and the collective calls that keep ranks in step.

    A step: `begin_step`, then for each micro-batch and stage of this rank a forward with `units=stage_units(stage)`
    and a backward pass between `start_pass` and `end_pass` (parallel/stage_compute.py); `finish`; the optimizer updates
    `shards`; `publish`. The model's parameters become views of flat buffers; load values into the masters
    (`master_pieces(owned=False)`, then `publish`), never into the model.

    The rank holds the units of its stages alone (`partition`). Where the model is one stage, `units=self` and
    `backward` do the same by hand.

    seed: initial values (a function of seed and parameter name); None keeps the values the model has, if it has memory.
    """

    def __init__(
        self,
        model: nn.Module,
        table: ParameterTable,
        mesh: Mesh,
        *,
        seed: int | None,
        parameter_dtype: torch.dtype,
        master_dtype: torch.dtype = torch.float32,
        partition: Partition | None = None,
        stage_units: type[StageUnits] = StageUnits,
    ) -> None:
        self.mesh, self.table = mesh, table
        self.partition = partition = Partition.whole(table) if partition is None else partition
        self.parameter_dtype, self.master_dtype = parameter_dtype, master_dtype
        self._units: dict[str, UnitBuffers] = {}
        self._parts: dict[str, dict[str, Part]] = {
            name: {buffer_name(name, part): part for part in table.unit_parts(name, mesh.layout)}
            for name in partition.units_at(mesh.pp.rank)
        }
        """The flat buffers of each unit."""
        parameters: dict[str, list[nn.Parameter]] = {}
        axes = self._axes()
        for name, parts in self._parts.items():
            for buffers, part in parts.items():
                unit = self._buffers(name, part, axes[name])
                if seed is None:
                    unit.take_over(model)
                else:
                    unit.initialise(seed)
                self._units[buffers] = unit
                parameters[buffers] = unit.bind(model)
                if unit.zero == 3:
                    unit.release()  # before the next unit is made: the whole model may be too large for one device
        needs = {name: [self._units[each] for each in self._buffers_of(table.needed_by(name))] for name in self._parts}
        self._stages = {
            stage.index: stage_units(names, {name: needs[name] for name in names})
            for stage in partition.held(mesh.pp.rank)
            for names in (partition.units(stage),)
        }
        self.shards = [self._shard(unit) for unit in self._units.values()]
        self._partial = PartialGradients(self._units.values(), table, mesh)
        sizes = [
            tuple(self._units[each].flat.padded for each in parts if self._units[each].zero >= 2)
            for parts in self._parts.values()
        ]
        self._transient = TransientBuffers(mesh.device, master_dtype, sizes)
        self.gradients = GradientSums(self._units, parameters, self._transient)
        self.publish()

    def _axes(self) -> dict[str, dict[Part, FlatAxes]]:
        """Between which ranks each unit of the model lies. Every rank makes the groups of all of them."""
        mesh, partition = self.mesh, self.partition
        groups = {}
        for name in self.table.units:
            places = partition.holders(name)
            if len(places) > 1 and places not in groups:
                groups[places] = mesh.among("pp", places)
        found: dict[str, dict[Part, FlatAxes]] = {}
        for name in self.table.units:
            holders = groups.get(partition.holders(name))
            experts = FlatAxes(mesh.expert_data, mesh.expert_shard, mesh.expert_replica, holders)
            found[name] = {"dense": FlatAxes(mesh.data, mesh.shard, mesh.replica, holders), "experts": experts}
        return found

    def _buffers_of(self, units: Iterable[str]) -> list[str]:
        """The names of the units' flat buffers, in their order."""
        return [buffers for name in units for buffers in self._parts[name]]

    def _buffers(self, name: str, part: Part, between: Mapping[Part, FlatAxes]) -> UnitBuffers:
        mesh, axes = self.mesh, between[part]
        zero = mesh.layout.zero if not axes.shard.trivial else 0
        shards = axes.shard.size if zero else 1
        flat = flat_unit(self.table, name, shards, mesh.layout, mesh.layout.coordinates(mesh.rank), part)
        return UnitBuffers(flat, zero, axes, mesh.device, self.parameter_dtype, self.master_dtype)

    def _shard(self, unit: UnitBuffers) -> Shard:
        decay = min(max(unit.flat.decay_numel - unit.start, 0), unit.stop - unit.start)
        balancing = tuple(
            (low - unit.start, high - unit.start)
            for part, low, high in unit.flat.within(unit.start, unit.stop)
            if part.row.balances
        )
        return Shard(unit.flat.name, unit.master, unit.gradient, decay, unit.start, unit.stop, balancing)

    # --- one step

    def begin_step(self, micro_batches: int | Mapping[int, int]) -> None:
        """Forget the last step's gradients. `micro_batches`: how many backward passes will follow, through every stage
        that this rank holds or, by its number, through each."""
        passes = dict.fromkeys(self._units, 0)
        for stage in self.partition.held(self.mesh.pp.rank):
            count = micro_batches if isinstance(micro_batches, int) else micro_batches.get(stage.index, 0)
            for name in self._buffers_of(self.partition.needed(stage)):
                passes[name] += count
        self.gradients.begin(passes)

    def zero_gradients(self) -> None:
        """Forget the gradients: the next backward overwrites them."""
        self.gradients.begin({})

    def backward(self, loss: torch.Tensor) -> None:
        """Backward pass of one micro-batch through a model that is one stage."""
        (stage,) = self.partition.stages
        self.start_pass(stage)
        loss.backward()
        self.end_pass(stage)

    def start_pass(self, stage: Stage, split: bool = False) -> Pass:
        """A backward pass through a stage begins; `split`: `pause_pass` will end its first part."""
        return self.gradients.start(self._buffers_of(self.partition.needed(stage)), split)

    def pause_pass(self, stage: Stage, still_to_come: Collection[nn.Parameter]) -> None:
        """All gradients are there but those of some parameters, which `gradients.resume` and `collect` will bring."""
        self.gradients.pause(still_to_come)
        self._stages[stage.index].release()

    def end_pass(self, stage: Stage) -> None:
        """All gradients of the pass are there."""
        self.gradients.end()
        self._stages[stage.index].release()

    def finish(self) -> None:
        """Wait for the reductions; `shard.gradient` is now the sum over all ranks and micro-batches, the true gradient
        of what this rank holds."""
        self.gradients.finish()
        for unit in self._units.values():
            if unit.gathering is not None:  # no pass went through it: what others gather is about to change
                unit.need()
        self._partial.add_up()

    def squared_norm_share(self) -> torch.Tensor:
        """This rank's share of the squared global gradient norm (float64): their sum over `mesh.world` is the square,
        not finite if any gradient on any rank is not. Who holds the same element shares it."""
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for unit in self._units.values():
            for low, high, copies in unit.flat.copies(unit.start, unit.stop):
                total += _squared_norm(unit.gradient[low - unit.start : high - unit.start]) / (copies * unit.copies)
        return total

    def initialise(self, seed: int) -> None:
        """Start from initial values, which depend on (seed, parameter name) alone."""
        for unit in self._units.values():
            unit.initialise(seed)
        self.publish()

    def publish(self) -> None:
        """Bring the parameters up to the masters. Gathers run on; the next forward waits for each unit when it enters
        it."""
        for unit in self._units.values():
            unit.publish()

    # --- called by the model around each unit

    def stage_units(self, stage: Stage) -> StageUnits:
        """What the model is to tell about the units of a stage."""
        return self._stages[stage.index]

    def enter(self, name: str, x: Any) -> Any:
        """The forward pass of a model that is one stage comes to a unit."""
        return self._stages[0].enter(name, x)

    def leave(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """It is done with the unit."""
        return self._stages[0].leave(name, x)

    # --- what a checkpoint and a ledger need

    def master_pieces(self, owned: bool) -> list[Piece]:
        """The masters as pieces of rows: with `owned` those that this rank writes (together the ranks write each
        element once), else all that it holds and must read."""
        return self.pieces_like("master", [shard.master for shard in self.shards], owned)

    def pieces_like(self, kind: str, tensors: Sequence[torch.Tensor], owned: bool) -> list[Piece]:
        """The same for other state: `tensors`, one per shard, as long as its master."""
        pieces: list[Piece] = []
        position = self.mesh.tp.rank if owned else None
        for shard, tensor, unit in zip(self.shards, tensors, self._units.values(), strict=True):
            low, high = shard.start, min(shard.stop, unit.flat.numel)
            if owned:
                low, high = part_of(low, max(low, high), unit.copy, unit.copies)
            pieces += pieces_of(unit.flat, kind, tensor, shard.start, low, high, position)
        return pieces

    def parameter_pieces(self) -> list[Piece]:
        """Copies of the unsharded parameters in their own dtype, all-gathered where they are sharded. Every rank calls
        it, between steps."""
        pieces: list[Piece] = []
        for unit in self._units.values():
            unit.need()
            pieces += pieces_of(unit.flat, "parameter", unit.parameters.clone(), 0, 0, unit.flat.numel)
            if unit.zero == 3:
                unit.release()
        return pieces

    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds now: parameters, masters (where they are not the parameters), gradients, and whole
        gradient buffers kept for the next backward."""
        kinds: dict[str, list[torch.Tensor]] = {"parameters": [], "masters": [], "gradients": []}
        for unit in self._units.values():
            kinds["parameters"] += [unit.parameters, unit.source]
            kinds["masters"].append(unit.master)
            kinds["gradients"].append(unit.gradient)
        kinds["gradient_buffers"] = self._transient.kept()
        seen: set[int] = set()
        sizes = {}
        for kind, tensors in kinds.items():
            sizes[kind] = 0
            for storage in (tensor.untyped_storage() for tensor in tensors):
                if storage.nbytes() and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    sizes[kind] += storage.nbytes()
        return sizes

    def predicted_bytes(self) -> dict[str, int]:
        """The same from the table alone, between steps: shapes, dtypes and the ZeRO stage."""
        parameter, master = self.parameter_dtype.itemsize, self.master_dtype.itemsize
        sizes = dict.fromkeys(("parameters", "masters", "gradients", "gradient_buffers"), 0)
        transient = []
        for name, parts in self._parts.items():
            taken = []
            for buffers, part in parts.items():
                unit = self._units[buffers]
                zero, shards = unit.zero, unit.axes.shard.size if unit.zero else 1
                numel = self.table.unit_numel(name, self.mesh.layout, part)
                padded = padded_numel(numel, shards)
                sizes["parameters"] += padded * parameter // (shards if zero == 3 else 1)
                sizes["masters"] += 0 if parameter == master else (padded if zero else numel) * master // shards
                sizes["gradients"] += padded * master // (shards if zero >= 2 else 1)
                taken += [padded] if zero >= 2 else []
            transient.append(tuple(taken))
        sizes["gradient_buffers"] = sum(size * count * master for size, count in kept_buffers(transient).items())
        return sizes


def _squared_norm(values: torch.Tensor) -> torch.Tensor:
    """Sum of squares in float64, from norms of short rows: one float32 sum over millions loses four digits."""
    row = 4096
    whole = values.numel() // row * row
    rows = torch.linalg.vector_norm(values[:whole].view(-1, row), dim=1).double()
    rest = torch.linalg.vector_norm(values[whole:]).double()
    return rows.square().sum() + rest.square()
