"""Data parallelism with sharded model states: ZeRO 1 to 3, FSDP's units and overlap, hybrid sharding.

Idea. N ranks train on different samples. Plain data parallelism repeats parameters, gradients and optimizer state on
each of them. ZeRO (Rajbhandari et al. 2019, arXiv:1910.02054, section 5) shards what a rank does not need at
the moment: the optimizer state (stage 1), the gradients (2), the parameters (3). As in FSDP (Zhao et al. 2023,
arXiv:2304.11277, section 3.2) the FSDP unit, a layer say, is what is sharded and gathered together: one flat buffer.

| zero | parameters                  | gradients                     | optimizer | calls a step of m micro-batches    |
|------|-----------------------------|-------------------------------|-----------|------------------------------------|
| 0    | unsharded                   | unsharded                     | unsharded | all-reduce                         |
| 1    | unsharded, gathered once    | unsharded                     | shard     | reduce-scatter, all-gather         |
| 2    | unsharded, gathered once    | shard, unsharded in backward  | shard     | m reduce-scatters, all-gather      |
| 3    | shard, gathered around uses | shard, unsharded in backward  | shard     | m reduce-scatters, 2 m all-gathers |

Mathematics. A unit's n parameters are flattened and padded to N s elements: w. Rank r owns the shard
w_r = w[r s : (r + 1) s]. With the loss L_rm of rank r and micro-batch m, divided by the targets of the whole step
(gradients are summed, never averaged), and fp32 master weights v_r, a step is

    g_r = (sum over ranks and m of dL_rm / dw)[r s : (r + 1) s]      reduce-scatter, in the dtype of the masters
    v_r = update(v_r, g_r),  w_r = v_r rounded                       optimizer, on the shard alone
    w   = (w_0, ..., w_{N-1})                                        all-gather

An all-reduce is a reduce-scatter and an all-gather, so stage 1 sends what plain data parallelism sends, stage 3 half
as much again (ZeRO, section 7). Hybrid sharding (FSDP, section 3.2.2) does all of this inside a sharding group and
all-reduces the gradient shards once a step over the groups' replicas.

Overlap (FSDP, section 3.3). `ParameterPrefetcher` starts the all-gather of a unit while the one before computes, under
ZeRO-3 into the memory of the unit before that one: the layers of a pass share two buffers. `GradientReducer` sums
gradients during the backward pass of earlier layers, at most REDUCTIONS_IN_FLIGHT together.

With tensor parallelism the flat buffers hold this rank's slices. With expert parallelism the experts of a layer are a
separate FSDP unit, over the ranks that hold the same experts. `parallel/zero_engine.py` combines the units of a rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch

from meshwright.comm.collectives import all_gather, all_reduce, reduce_scatter
from meshwright.comm.handle import Handle
from meshwright.comm.mesh import Axis
from meshwright.model.axis_operations import Units
from meshwright.parallel.flat_buffers import FlatLayout, GradientBufferPool
from meshwright.spec.parameter_entries import REDUCTIONS_IN_FLIGHT
from meshwright.spec.stages import LOOKED_UP

PARAMETER_SITE = "data.parameters"
GRADIENT_SITE = "data.gradients"
REPLICA_SITE = "data.gradients.replicas"
TIED_SITE = "pipeline.gradients.shared"
REUSES_MEMORY = hasattr(torch.UntypedStorage, "_swap_data_ptr_")  # private to torch; without it, memory is freed


# --- memory and all-gather


@dataclass(frozen=True, slots=True)
class ShardingAxes:
    """Mesh axes over which an FSDP unit is sharded and its gradient summed.

    `data`: ranks over which the gradient is summed; `shard`: ranks over which ZeRO shards the unit; `reduction`: the
    same, for reductions of gradients; `replica`: ranks that hold the same shard (hybrid sharding). `tied`: pipeline
    ranks that all hold the unit, because its embedding is tied to the output head or a bidirectional schedule has two
    copies of the model; None if a single pipeline rank holds the unit."""

    data: Axis
    shard: Axis
    reduction: Axis
    replica: Axis
    tied: Axis | None = None


class FsdpUnit:
    """Flat buffers of one FSDP unit on one rank, all 1-D; [start, stop) are the elements of this rank's shard.
    Arguments: `flat`: layout of the flat buffer; `zero`: ZeRO stage, 0 to 3; `axes`: mesh axes over which the unit is
    sharded and its gradient summed; `parameter_dtype`, `master_dtype`: dtypes of parameters and of master weights.
    Attributes:

    parameters          unsharded, in the parameter dtype; the model's parameters are views of it. Under ZeRO-3 it has
                        memory only from `unshard` to `reshard`, which frees it or hands it to another unit. The
                        storage stays the same: tensors saved for the backward pass become valid again when the unit is
                        unsharded.
    parameter_shard     `parameters[start:stop]`, which the all-gather sends; under ZeRO-3 separate memory, else a view.
    master              the master weights that the optimizer updates, [start, stop); `parameter_shard` itself where
                        the dtypes agree.
    trainable           False: the parameters are frozen, without gradient; `master` is `parameter_shard`.
    gradient            gradient summed over ranks and micro-batches, [start, stop), in the dtype of `master`.
    unsharded_gradient  gradient before its reduction over ranks; None under ZeRO-2 and 3, where it exists only in
                        the backward pass.
    replicas, replica   number of ranks that hold the same shard (among ranks with one tp index), and this rank's
                        index among them.
    decay_numel         number of elements at the beginning of the shard to which weight decay applies.
    rate_factor         factor on the learning rate of all elements of the shard.
    balancing           index ranges (start, stop) in the shard of router biases; the gradient of such a bias is its
                        expert's load minus the mean load.
    """

    def __init__(
        self, flat: FlatLayout, zero: int, axes: ShardingAxes, parameter_dtype: torch.dtype, master_dtype: torch.dtype
    ) -> None:
        self.flat = flat
        self.axes = axes
        self.trainable = flat.trainable
        parameter_dtype = flat.storage_format.dtype or parameter_dtype
        if not self.trainable:  # nothing is updated: ZeRO can shard the parameters, or leave them as they are
            zero = 3 if zero == 3 else 0
            master_dtype = parameter_dtype
        self.zero = zero
        replicas = axes.data if zero == 0 else axes.replica
        self.replicas = replicas.size
        self.replica = replicas.rank
        if axes.tied is not None:
            self.replicas *= axes.tied.size
            self.replica = self.replica * axes.tied.size + axes.tied.rank
        length = flat.padded // axes.shard.size if zero else flat.numel
        self.start = axes.shard.rank * length if zero else 0
        self.stop = self.start + length
        self.decay_numel = min(max(flat.decay_numel - self.start, 0), length)
        self.rate_factor = flat.rate_factor
        self.balancing = tuple(
            (low - self.start, high - self.start)
            for part, low, high in flat.find_slices(self.start, self.stop)
            if part.entry.balances
        )
        zeros = partial(torch.zeros, device=axes.shard.communicator.device)
        count_items = flat.storage_format.count_items
        self.parameters = zeros(count_items(flat.padded), dtype=parameter_dtype)
        mine = self.parameters[flat.locate_items(self.start, self.stop)]
        self.parameter_shard = zeros(count_items(length), dtype=parameter_dtype) if zero == 3 else mine
        self.master = self.parameter_shard if parameter_dtype == master_dtype else zeros(length, dtype=master_dtype)
        self.unsharded_gradient: torch.Tensor | None = None
        if zero < 2 and self.trainable:
            self.unsharded_gradient = zeros(flat.padded, dtype=master_dtype)
            self.gradient = self.unsharded_gradient[self.start : self.stop]
        else:
            self.gradient = zeros(length if self.trainable else 0, dtype=master_dtype)
        self.is_unsharded = True
        self.pending_all_gather: Handle | None = None
        self._storage: Any = self.parameters.untyped_storage()
        self._bytes = self._storage.nbytes()

    def start_all_gather(self) -> None:
        """Start to all-gather the parameters over the shard axis, unless they are unsharded or already in flight."""
        if self.is_unsharded or self.pending_all_gather is not None:
            return
        if not self._storage.nbytes():
            self._storage.resize_(self._bytes)
        self.pending_all_gather = all_gather(
            self.parameters, self.parameter_shard, self.axes.shard, PARAMETER_SITE, async_op=True
        )

    def unshard(self) -> None:
        """Make the unsharded parameters available: start their all-gather unless it is in flight, and wait for it."""
        if self.is_unsharded:
            return
        self.start_all_gather()
        assert self.pending_all_gather is not None
        self.pending_all_gather.wait()
        self.pending_all_gather = None
        self.is_unsharded = True

    def reshard(self, next_units: Iterable[FsdpUnit] = ()) -> None:
        """Free the memory of the unsharded parameters (ZeRO-3 only); an all-gather in flight is first waited for.
        `next_units`: units that are all-gathered next; the first of them that needs as much memory and has none reuses
        it, so that the allocator cannot split it between the two uses."""
        if self.pending_all_gather is not None:
            self.unshard()
        fitting = (each for each in next_units if each._bytes == self._bytes and not each._storage.nbytes())
        if REUSES_MEMORY and self.is_unsharded and (unit := next(fitting, None)) is not None:
            unit._storage._swap_data_ptr_(self._storage)  # tensors saved for backward refer to storages, which stay
        self._storage.resize_(0)
        self.is_unsharded = False

    def update_parameters(self) -> None:
        """Copy the master weights to the parameter shard, rounded to its dtype. Under ZeRO-1 and 2, start the
        all-gather of the parameters; under ZeRO-3 they are all-gathered later, before each use."""
        if self.zero == 3:
            self.reshard()
        elif self.pending_all_gather is not None:
            self.unshard()
        if self.parameter_shard.data_ptr() != self.master.data_ptr():
            self.parameter_shard.copy_(self.master)
        if self.zero in (1, 2):
            self.is_unsharded = False
            self.start_all_gather()


# --- reduction of gradients


@dataclass(slots=True)
class UnshardedGradient:
    """Gradient of an FSDP unit before its reduction over ranks.

    `buffer`: the gradient, 1-D; `views`: one view of the buffer per parameter, in the parameter's shape; `stale`:
    indices of views that still hold values of an earlier step; the next gradient overwrites these instead of being
    added."""

    buffer: torch.Tensor
    views: list[torch.Tensor]
    stale: set[int] = field(default_factory=set)

    def view(self, index: int) -> tuple[torch.Tensor, bool]:
        """Return (view, stale) of the parameter number `index` and mark it as no longer stale. stale: True if the
        caller must overwrite the view's values, False if it must add to them."""
        stale = index in self.stale
        self.stale.discard(index)
        return self.views[index], stale


class GradientReducer:
    """Reducer of the gradients of a rank's FSDP units over ranks. The reduction of a unit starts when backward has
    completed the unit's gradient. `units`: name -> unit; `pool`: supplies unsharded gradient buffers under ZeRO-2 and
    3."""

    def __init__(self, units: Mapping[str, FsdpUnit], pool: GradientBufferPool) -> None:
        self._units = units
        self._pool = pool
        self._in_flight: deque[tuple[Handle, Callable[[], None]]] = deque()
        """Reductions, oldest first, and the functions to call at their completion."""
        self.launch: Callable[[Callable[[], None]], None] = lambda start: start()
        """Called with each function that starts reductions or waits for them, in order; by default the function is
        called. The capture of a CUDA graph stores these functions, which are then called after each replay."""
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a training step: the first reduction of each unit overwrites the gradient of the last step. Asserts
        that no reduction is in flight."""
        assert not self._in_flight, "the previous step is not finished"
        self._open: dict[str, UnshardedGradient] = {}
        self._replica_sums: list[Handle] = []
        self._stale = set(self._units)
        """The units whose gradient shard is that of the last step."""

    def unsharded(self, name: str) -> UnshardedGradient:
        """Return the unsharded gradient of the FSDP unit `name`, into which backward accumulates. Its buffer is taken
        from the pool if the unit has none."""
        if name not in self._open:
            unit = self._units[name]
            buffer = unit.unsharded_gradient
            if buffer is None:
                buffer = self._pool.acquire(unit.flat.padded)
                buffer[unit.flat.numel :].zero_()
            views = unit.flat.view_parameters(buffer)
            self._open[name] = UnshardedGradient(buffer, views, set(range(len(views))))
        return self._open[name]

    def reduce(self, name: str, last: bool) -> None:
        """Start to reduce the gradient of the FSDP unit `name` over ranks. `last`: True if no further backward pass of
        this step adds to the gradient."""
        gradient = self.unsharded(name)
        first = name in self._stale
        self._stale.discard(name)
        for index in gradient.stale:
            gradient.views[index].zero_()  # took no part in any loss
        gradient.stale.clear()
        del self._open[name]  # the next pass must not write into a buffer that is being sent
        self.launch(partial(self._start, self._units[name], gradient.buffer, first, last))

    def _start(self, unit: FsdpUnit, buffer: torch.Tensor, first: bool, last: bool) -> None:
        """Start to reduce the gradient of `unit` in `buffer`. `first`, `last`: True if it is the first or last
        reduction of the unit in this step."""
        if unit.zero == 0:
            self._in_flight.append((all_reduce(buffer, unit.axes.data, GRADIENT_SITE, async_op=True), lambda: None))
            return
        while len(self._in_flight) >= REDUCTIONS_IN_FLIGHT:
            self._wait_for_oldest()
        output = unit.gradient if first else torch.empty_like(unit.gradient)
        handle = reduce_scatter(output, buffer, unit.axes.reduction, GRADIENT_SITE, async_op=True)
        self._in_flight.append((handle, partial(self._add_to_shard, unit, output, buffer, last)))

    def _wait_for_oldest(self) -> None:
        """Wait for the oldest reduction in flight and finish it: add its output to the shard and release its buffer."""
        handle, complete = self._in_flight.popleft()
        handle.wait()
        complete()

    def _add_to_shard(self, unit: FsdpUnit, output: torch.Tensor, buffer: torch.Tensor, last: bool) -> None:
        """Finish a completed reduction: add its `output` to the unit's gradient shard, and release the unsharded
        `buffer`.

        `last`: True for the unit's last reduction of the step. Under hybrid sharding, an all-reduce over the ranks that
        hold the same shard is then started."""
        if unit.zero >= 2:
            self._pool.release(buffer)
        if output is not unit.gradient:
            unit.gradient.add_(output)
        if last and not unit.axes.replica.trivial:
            self._replica_sums.append(all_reduce(unit.gradient, unit.axes.replica, REPLICA_SITE, async_op=True))

    def finish(self) -> None:
        """Complete the gradients of a step: wait for all reductions in flight, and set gradients of units without a
        backward pass to 0. Then all-reduce over pp the gradients of units that several pipeline ranks hold."""
        while self._in_flight:
            self._wait_for_oldest()
        while self._replica_sums:
            self._replica_sums.pop(0).wait()
        for name in self._stale:
            self._units[name].gradient.zero_()  # no backward pass went through it
        tied = [
            all_reduce(unit.gradient, unit.axes.tied, TIED_SITE, async_op=True)
            for unit in self._units.values()  # in the table's order, equal on all ranks
            if unit.axes.tied is not None
        ]
        for handle in tied:
            handle.wait()


# --- overlap of the all-gathers


class ParameterPrefetcher(Units):
    """Hooks that the model calls before and after each FSDP unit (embedding, layer, head) of one pipeline stage. The
    hooks all-gather the next unit's parameters while a unit computes and, under ZeRO-3, reshard a unit after use.

    `units`: unit names in forward order; `needs`: {unit name: flat buffers whose parameters it uses}. Attribute
    `keeps_last`: True if the last unit stays unsharded after forward, because its backward follows immediately.
    """

    def __init__(self, units: Sequence[str], needs: Mapping[str, Sequence[FsdpUnit]]) -> None:
        self.keeps_last = True
        self._needs = needs
        self._next = dict(pairwise(units))
        self._previous = {after: before for before, after in pairwise(units) if before not in LOOKED_UP}
        self._sharded = {name: [unit for unit in needs[name] if unit.zero == 3] for name in units}
        # A unit that a later one uses again (a tied embedding) stays unsharded until its last use.
        self._resharded_after: dict[str, list[FsdpUnit]] = {}
        later: set[int] = set()
        for name in reversed(units):
            self._resharded_after[name] = [unit for unit in self._sharded[name] if id(unit) not in later]
            later.update(map(id, self._sharded[name]))

    def enter(self, name: str, x: Any) -> Any:
        """Unshard the FSDP unit `name` before its forward pass and start the next unit's all-gather. Return the input
        `x`; under ZeRO-3 it is wrapped in an autograd function, which reshards the unit at the end of its backward."""
        self._unshard(name, self._next.get(name, ""))
        if self._sharded[name] and isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
            return _BackwardHook.apply(x, partial(self._leave_backward, name))
        return x

    def leave(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Reshard the FSDP unit `name` after its forward pass, unless backward begins with it. Return the output `x`;
        under ZeRO-3 it is wrapped in an autograd function, which unshards the unit at the beginning of its backward."""
        if not self._sharded[name]:
            return x
        with_backward = x.requires_grad and torch.is_grad_enabled()
        if not (with_backward and self.keeps_last and name not in self._next):
            for unit in self._resharded_after[name]:
                unit.reshard(self._list_next_units(name, self._next))
        unshard = partial(self._unshard, name, self._previous.get(name, ""))
        # The backward of an embedding needs no parameters.
        return _BackwardHook.apply(x, unshard) if with_backward and name not in LOOKED_UP else x

    def reshard(self) -> None:
        """Reshard all FSDP units of the stage at the end of a pass through it (ZeRO-3; otherwise do nothing)."""
        for unit in chain.from_iterable(self._sharded.values()):
            unit.reshard()

    def _list_next_units(self, name: str, following: Mapping[str, str]) -> Sequence[FsdpUnit]:
        """Return the units that are all-gathered next when the FSDP unit `name` is resharded: those of the unit after
        the next one. `following`: {unit: the unit that follows in this pass}."""
        return self._sharded.get(following.get(following.get(name, ""), ""), [])

    def _unshard(self, name: str, prefetched: str) -> None:
        """Unshard the parameters that the FSDP unit `name` uses (wait for their all-gathers). Then start the
        all-gathers of the unit `prefetched`; "": start none."""
        for unit in chain(self._sharded[name], self._sharded.get(prefetched, ())):
            unit.start_all_gather()
        for unit in self._needs[name]:
            unit.unshard()

    def _leave_backward(self, name: str) -> None:
        """Reshard the parameters of the FSDP unit `name` after its backward pass."""
        for unit in self._sharded[name]:
            unit.reshard(self._list_next_units(name, self._previous))


class _BackwardHook(torch.autograd.Function):
    """Autograd identity function whose backward calls a function and returns the gradient unchanged: at the end of the
    backward of an FSDP unit if applied to its input, at the beginning if applied to its output."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        """Return a view of `x` whose backward calls `call`. context: autograd context."""
        context.call = call
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        """Call the function given to `forward`, then return the gradients unchanged."""
        context.call()
        return (*gradients, None)
