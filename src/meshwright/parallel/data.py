"""Data parallelism: replicas, ZeRO 1 to 3 (arXiv 1910.02054) and hybrid sharding, on one flat buffer per unit.

| zero | parameters               | gradients                    | optimizer | calls a step of m micro-batches    |
|------|--------------------------|------------------------------|-----------|------------------------------------|
| 0    | whole                    | whole                        | whole     | all-reduce                         |
| 1    | whole, gathered once     | whole                        | shard     | reduce-scatter, all-gather         |
| 2    | whole, gathered once     | shard, whole while collected | shard     | m reduce-scatters, all-gather      |
| 3    | gathered around each use | shard, whole while collected | shard     | m reduce-scatters, 2 m all-gathers |

With hybrid sharding all of this happens inside a sharding group, and each shard's gradient is all-reduced once across
the groups. Reductions start while the backward pass goes on below; gathers run ahead of their use. Gradients are
summed, never averaged, in the dtype of the master. With tensor parallelism the flat buffers hold this rank's slices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.comm.collectives import Handle, all_reduce, reduce_scatter
from meshwright.comm.mesh import Mesh
from meshwright.model.parameters import ParameterTable
from meshwright.parallel.buffers import REDUCTIONS_IN_FLIGHT, TransientBuffers, kept_buffers
from meshwright.parallel.pieces import Piece, flat_unit, padded_numel, part_of, pieces_of
from meshwright.parallel.tensor import PartialGradients
from meshwright.parallel.units import UnitBuffers

GRADIENT_SITE = "data.gradients"
REPLICA_SITE = "data.gradients.replicas"
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


def loss_share(loss: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """This rank's share of the step's loss, given the loss of its own samples: the shares' sum over `mesh.world` is the
    loss, not finite if it is not on any rank. Ranks of tp compute the same loss."""
    return loss / mesh.tp.size


class DataParallel:
    """Parameters, masters and gradients of `model` on one rank, and the collective calls that keep ranks in step.

    A step: `begin_step`, then for each micro-batch a forward with `units=self` and `backward`; `finish`; the optimizer
    updates `shards`; `publish`. The model's parameters become views of flat buffers; load values into the masters
    (`master_pieces(owned=False)`, then `publish`), never into the model.

    seed: initial values (a function of seed and parameter name); None keeps the values the model has.
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
    ) -> None:
        self.mesh, self.table = mesh, table
        self.zero = mesh.layout.zero if mesh.shard.size > 1 else 0
        self.parameter_dtype, self.master_dtype = parameter_dtype, master_dtype
        shards = mesh.shard.size if self.zero else 1
        self._units: dict[str, UnitBuffers] = {}
        self._parameters: dict[str, list[nn.Parameter]] = {}
        for name in table.units:
            flat = flat_unit(table, name, shards, mesh.layout, mesh.layout.coordinates(mesh.rank))
            unit = UnitBuffers(flat, self.zero, mesh.shard, mesh.device, parameter_dtype, master_dtype)
            if seed is None:
                unit.take_over(model)
            else:
                unit.initialise(seed)
            self._units[name] = unit
            self._parameters[name] = unit.bind(model)
            if self.zero == 3:
                unit.release()  # before the next unit is made: the whole model may be too large for one device
            for index, parameter in enumerate(self._parameters[name]):
                parameter.register_post_accumulate_grad_hook(partial(self._collect, name, index))
        self._forward_order = list(table.units)
        self._backward_order = self._forward_order[::-1]
        # A tied head computes with the embedding's matrix: its unit stays until the head is done with it.
        self._tied = not any(tensor.name == "head.weight" for tensor in table.tensors)
        self.shards = [self._shard(unit) for unit in self._units.values()]
        self._partial = PartialGradients(self._units.values(), mesh)
        self._transient = TransientBuffers(mesh.device, master_dtype, [u.flat.padded for u in self._units.values()])
        self._begin()
        self.publish()

    def _shard(self, unit: UnitBuffers) -> Shard:
        decay = min(max(unit.flat.decay_numel - unit.start, 0), unit.stop - unit.start)
        balancing = tuple(
            (low - unit.start, high - unit.start)
            for part, low, high in unit.flat.within(unit.start, unit.stop)
            if part.row.balances
        )
        return Shard(unit.flat.name, unit.master, unit.gradient, decay, unit.start, unit.stop, balancing)

    # --- one step

    def begin_step(self, micro_batches: int) -> None:
        """Forget the last step's gradients. `micro_batches`: how many calls of `backward` will follow."""
        assert micro_batches >= 1 and not self._in_flight, "the step before was not finished"
        self._begin()

    def zero_gradients(self) -> None:
        """Forget the gradients: the next backward overwrites them."""
        self._begin()

    def _begin(self) -> None:
        self._in_flight: deque[_Reduction] = deque()
        self._replica_sums: list[Handle] = []
        self._last = True
        self._position = 0
        self._whole: dict[str, torch.Tensor] = {}
        self._views: dict[str, list[torch.Tensor]] = {}
        # Parameters whose gradient in the buffer is out of date (overwritten, not added to), and those that the
        # running backward pass has not reached yet.
        self._stale = {name: set(range(len(bound))) for name, bound in self._parameters.items()}
        self._missing: dict[str, set[int]] = {}
        self._shard_is_stale = dict.fromkeys(self._units, True)

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Backward pass of one micro-batch; `last`: no other follows in this step."""
        self._last = last
        self._position = 0
        self._missing = {name: set(range(len(bound))) for name, bound in self._parameters.items()}
        loss.backward()
        for name in self._backward_order[self._position :]:
            self._missing[name].clear()  # parameters that took no part in this loss
        self._reduce_complete_units()
        if self.zero == 3:
            for unit in self._units.values():
                unit.release()

    def finish(self) -> None:
        """Wait for the reductions; `shard.gradient` is now the sum over all ranks and micro-batches, the true gradient
        of what this rank holds."""
        while self._in_flight:
            self._complete(self._in_flight.popleft())
        for handle in self._replica_sums:
            handle.wait()
        self._replica_sums.clear()
        self._partial.add_up()

    def squared_norm_share(self) -> torch.Tensor:
        """This rank's share of the squared global gradient norm (float64): their sum over `mesh.world` is the square,
        not finite if any gradient on any rank is not. Who holds the same element shares it."""
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for unit in self._units.values():
            for low, high, copies in unit.flat.copies(unit.start, unit.stop):
                total += _squared_norm(unit.gradient[low - unit.start : high - unit.start]) / copies
        return total / (self.mesh.data.size if self.zero == 0 else self.mesh.replica.size)

    def publish(self) -> None:
        """Bring the parameters up to the masters. Gathers run on; the next forward waits for each unit when it enters
        it."""
        for unit in self._units.values():
            unit.publish()

    @contextmanager
    def whole_model(self) -> Iterator[None]:
        """All parameters gathered inside, for code that uses the model without `units`. Every rank must enter."""
        for unit in self._units.values():
            unit.fetch()
        for unit in self._units.values():
            unit.need()
        yield
        if self.zero == 3:
            for unit in self._units.values():
                unit.release()

    # --- called by the model around each unit

    def enter(self, name: str, x: Any) -> Any:
        """The forward pass comes to a unit: its parameters are there when this returns; the next unit's are on their
        way."""
        unit = self._units[name]
        if self.zero == 0:
            return x
        if self.zero == 3:
            unit.fetch()
            following = self._forward_order.index(name) + 1
            if following < len(self._forward_order):
                self._units[self._forward_order[following]].fetch()
        unit.need()
        if self.zero == 3 and isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
            return _Hook.apply(x, partial(self._backward_leaves, name))
        return x

    def leave(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The forward pass is done with a unit. Its parameters go, unless the backward pass begins with them."""
        if self.zero < 3:
            return x
        with_backward = x.requires_grad and torch.is_grad_enabled()
        final = name == self._forward_order[-1]
        kept = self._tied and name == "embedding"
        if not kept and not (final and with_backward):
            self._units[name].release()
        if final and self._tied and not with_backward:
            self._units["embedding"].release()
        return _Hook.apply(x, partial(self._backward_enters, name)) if with_backward else x

    def _backward_enters(self, name: str) -> None:
        """The backward pass comes to a unit."""
        if name == "embedding":
            return  # looking rows up has no use for the matrix on the way back
        self._units[name].fetch()
        before = self._forward_order.index(name) - 1
        if before > 0:
            self._units[self._forward_order[before]].fetch()
        self._units[name].need()

    def _backward_leaves(self, name: str) -> None:
        """The backward pass is done with a unit: every gradient function inside it has run."""
        self._units[name].release()
        if self._tied and name == self._forward_order[-1]:
            self._units["embedding"].release()

    # --- gradients

    def _collect(self, name: str, index: int, parameter: nn.Parameter) -> None:
        """Autograd has a parameter's gradient of this micro-batch: take it into the unit's buffer."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if name not in self._views:
            self._open(name)
        view = self._views[name][index]
        stale = self._stale[name]
        if index in stale:
            view.copy_(gradient)
            stale.discard(index)
        else:
            view.add_(gradient)
        del gradient
        self._missing[name].discard(index)
        if not self._missing[name]:
            self._reduce_complete_units()

    def _open(self, name: str) -> None:
        """Have a whole gradient buffer for a unit, and its parameters' views of it."""
        unit = self._units[name]
        whole = unit.accumulator
        if whole is None:
            whole = self._transient.take(unit.flat.padded)
            whole[unit.flat.numel :].zero_()
            self._stale[name] = set(range(len(self._parameters[name])))
        self._whole[name] = whole
        self._views[name] = unit.gradient_views(whole)

    def _reduce_complete_units(self) -> None:
        """Start the reductions that can start. Always in the same order, or ranks would pair the wrong ones."""
        while self._position < len(self._backward_order):
            name = self._backward_order[self._position]
            if self._missing[name]:
                return
            self._position += 1
            if self.zero >= 2 or self._last:
                self._reduce(name)

    def _reduce(self, name: str) -> None:
        unit, mesh = self._units[name], self.mesh
        if name not in self._views:
            self._open(name)
        for index in self._stale[name]:
            self._views[name][index].zero_()  # took no part in any loss
        self._stale[name].clear()
        whole = self._whole[name]
        if self.zero == 0:
            if mesh.data.size > 1:
                handle = all_reduce(whole, mesh.data, GRADIENT_SITE, async_op=True)
                self._in_flight.append(_Reduction(name, handle))
            return
        while len(self._in_flight) >= REDUCTIONS_IN_FLIGHT:
            self._complete(self._in_flight.popleft())
        output = unit.gradient if self._shard_is_stale[name] else torch.empty_like(unit.gradient)
        self._shard_is_stale[name] = False
        handle = reduce_scatter(output, whole, mesh.shard, GRADIENT_SITE, async_op=True)
        self._in_flight.append(_Reduction(name, handle, output, self._last))

    def _complete(self, reduction: _Reduction) -> None:
        """Wait for a unit's reduction, add it up, and give the whole buffer back."""
        reduction.handle.wait()
        if reduction.output is None:
            return
        name = reduction.unit
        unit = self._units[name]
        if self.zero >= 2:
            del self._views[name]
            self._transient.give(self._whole.pop(name))
        if reduction.output is not unit.gradient:
            unit.gradient.add_(reduction.output)
        if reduction.last and self.mesh.replica.size > 1:
            self._replica_sums.append(all_reduce(unit.gradient, self.mesh.replica, REPLICA_SITE, async_op=True))

    # --- what a checkpoint and a ledger need

    def master_pieces(self, owned: bool) -> list[Piece]:
        """The masters as pieces of rows: with `owned` those that this rank writes (together the ranks write each
        element once), else all that it holds and must read."""
        return self.pieces_like("master", [shard.master for shard in self.shards], owned)

    def pieces_like(self, kind: str, tensors: Sequence[torch.Tensor], owned: bool) -> list[Piece]:
        """The same for other state: `tensors`, one per shard, as long as its master."""
        pieces: list[Piece] = []
        copies = self.mesh.data if self.zero == 0 else self.mesh.replica
        position = self.mesh.tp.rank if owned else None
        for shard, tensor, unit in zip(self.shards, tensors, self._units.values(), strict=True):
            low, high = shard.start, min(shard.stop, unit.flat.numel)
            if owned:
                low, high = part_of(low, max(low, high), copies.rank, copies.size)
            pieces += pieces_of(unit.flat, kind, tensor, shard.start, low, high, position)
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
        shards = self.mesh.shard.size if self.zero else 1
        numels = [self.table.unit_numel(name, self.mesh.layout) for name in self.table.units]
        padded = [padded_numel(numel, shards) for numel in numels]
        kept = sum(size * count for size, count in kept_buffers(padded).items())
        parameter, master = self.parameter_dtype.itemsize, self.master_dtype.itemsize
        whole = sum(padded)
        exact = whole if self.zero else sum(numels)
        return {
            "parameters": whole * parameter // (shards if self.zero == 3 else 1),
            "masters": 0 if parameter == master else exact * master // shards,
            "gradients": whole * master // (shards if self.zero >= 2 else 1),
            "gradient_buffers": kept * master if self.zero >= 2 else 0,
        }


@dataclass(slots=True)
class _Reduction:
    """A unit's gradient on its way to its shard (`output`; None: an all-reduce in place)."""

    unit: str
    handle: Handle
    output: torch.Tensor | None = None
    last: bool = True


class _Hook(torch.autograd.Function):
    """Identity whose backward first calls a function. Of a unit's nodes the one on its input has the lowest sequence
    number and needs all others, so that the engine runs it last; the one on its output it runs first."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, call: Any) -> torch.Tensor:
        context.call = call
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        context.call()
        return (*gradients, None)


def _squared_norm(values: torch.Tensor) -> torch.Tensor:
    """Sum of squares in float64, from norms of short rows: one float32 sum over millions loses four digits."""
    row = 4096
    whole = values.numel() // row * row
    rows = torch.linalg.vector_norm(values[:whole].view(-1, row), dim=1).double()
    rest = torch.linalg.vector_norm(values[whole:]).double()
    return rows.square().sum() + rest.square()
