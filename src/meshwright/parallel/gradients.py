"""From the gradients of backward passes to sums over ranks: collected in one flat buffer per unit, reduced as soon as a
unit is complete, while the passes go on below.

A pass is the backward pass of one micro-batch through one stage. Where it is split (input gradients now, weight
gradients later), it is paused in between; what it has found of units that are not complete it keeps until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn

from meshwright.comm.collectives import all_reduce, reduce_scatter
from meshwright.comm.handle import Handle
from meshwright.parallel.buffers import REDUCTIONS_IN_FLIGHT, TransientBuffers
from meshwright.parallel.units import UnitBuffers

GRADIENT_SITE = "data.gradients"
REPLICA_SITE = "data.gradients.replicas"
HOLDER_SITE = "pipeline.gradients.shared"


@dataclass(slots=True)
class Pass:
    """A backward pass under way: the units that are not reduced yet, last one of the stage first, and of each the
    parameters that the pass has not reached."""

    order: list[str]
    missing: dict[str, set[int]]
    held: list[tuple[nn.Parameter, torch.Tensor]] | None = None  # a list while the pass may be paused
    early: dict[str, list[tuple[nn.Parameter, torch.Tensor]]] = field(default_factory=dict)  # what it held, by unit


class GradientSums:
    """The gradients of one rank's units. `units` in the order of the table, `parameters` those bound to them."""

    def __init__(
        self,
        units: Mapping[str, UnitBuffers],
        parameters: Mapping[str, Sequence[nn.Parameter]],
        transient: TransientBuffers,
    ) -> None:
        self._units, self._parameters, self._transient = units, parameters, transient
        self._place = {
            parameter: (name, index) for name, bound in parameters.items() for index, parameter in enumerate(bound)
        }
        # PyTorch keeps hooks where Python's garbage collector does not look: a strong reference would never be freed.
        take = WeakMethod(self._take)

        def taken(parameter: torch.Tensor) -> None:
            found = take()
            assert found is not None, "a backward pass through a model whose gradients nobody sums any more"
            found(parameter)

        for parameter in self._place:
            parameter.register_post_accumulate_grad_hook(taken)
        self._in_flight: deque[_Reduction] = deque()
        self.completed: Callable[[str], None] = lambda name: None
        """Told of each unit when the running pass has found the gradients of all its parameters."""
        self.reducing: Callable[[str], None] = lambda name: None
        """Told of each unit before its reduction begins."""
        self.begin({})

    def begin(self, passes: Mapping[str, int]) -> None:
        """Forget the gradients. `passes`: how many passes will bring each unit a part of its gradient."""
        assert not self._in_flight, "the step before was not finished"
        self._passes = {name: passes.get(name, 0) for name in self._units}
        self._idle = [name for name, count in self._passes.items() if not count]
        self._running: Pass | None = None
        self._replica_sums: list[Handle] = []
        self._open: dict[str, _Whole] = {}
        self._shard_is_stale = dict.fromkeys(self._units, True)

    # --- one pass

    def start(self, units: Iterable[str], split: bool = False) -> Pass:
        """A pass through `units` (in forward order) begins; `split`: it will be paused."""
        assert self._running is None, "one pass at a time"
        order = list(units)[::-1]
        missing = {name: set(range(len(self._parameters[name]))) for name in order}
        self._running = Pass(order, missing, [] if split else None)
        return self._running

    def pause(self, still_to_come: Collection[nn.Parameter]) -> None:
        """The pass has all but the gradients of some parameters: the units that have none of them are complete."""
        running = self._running
        assert running is not None and running.held is not None
        places = {self._place[parameter] for parameter in still_to_come}
        coming = {name for name, _ in places}
        held, running.held = running.held, None
        for parameter, gradient in held:
            if self._place[parameter][0] not in coming:
                self.collect(parameter, gradient)
        complete = [name for name in running.order if name not in coming]
        for name in complete:
            self._pass_is_done(name)
        running.order = [name for name in running.order if name in coming]
        running.held = [each for each in held if self._place[each[0]][0] in coming]
        running.missing = {name: {index for of, index in places if of == name} for name in running.order}
        self._running = None

    def resume(self, paused: Pass) -> None:
        """The rest of a pass: `collect` what is still to come, then `end`. What a unit had before joins the first that
        comes, so that one unit's buffer is needed at a time."""
        assert self._running is None and paused.held is not None
        self._running, held, paused.held = paused, paused.held, None
        for each in held:
            paused.early.setdefault(self._place[each[0]][0], []).append(each)

    def end(self) -> None:
        """The pass has everything; parameters that it did not reach took no part in the loss."""
        running = self._running
        assert running is not None
        for name in running.order:
            running.missing[name].clear()
        self._advance(running)
        self._running = None

    def leave_out(self, units: Iterable[str]) -> None:
        """The running pass does not go through some of its units."""
        running = self._running
        assert running is not None
        for name in units:
            running.missing[name].clear()
        self._advance(running)

    def collect(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """A parameter's gradient of the running pass: it is added to what the unit's buffer has."""
        running = self._running
        assert running is not None, "a gradient outside of every pass"
        if running.held is not None:
            running.held.append((parameter, gradient))
            return
        view, stale = self._view(parameter)
        if stale:
            view.copy_(gradient)
        else:
            view.add_(gradient)
        del gradient
        self._reached(running, parameter)

    def collect_product(self, parameter: nn.Parameter, dy_NY: torch.Tensor, x_NX: torch.Tensor) -> None:
        """`collect` of dyᵀ x; where nothing has to be rounded in between, the product itself adds it to the buffer."""
        running = self._running
        assert running is not None, "a gradient outside of every pass"
        unit = self._units[self._place[parameter][0]]
        if running.held is not None or unit.gradient.dtype != x_NX.dtype:
            self.collect(parameter, dy_NY.T @ x_NX)
            return
        view, stale = self._view(parameter)
        torch.addmm(view, dy_NY.T, x_NX, beta=0 if stale else 1, out=view)
        self._reached(running, parameter)

    def _view(self, parameter: nn.Parameter) -> tuple[torch.Tensor, bool]:
        """Where a parameter's gradient is summed, and whether what is there is to be overwritten; from now on not."""
        name, index = self._place[parameter]
        assert self._running is not None
        for each in self._running.early.pop(name, ()):
            self.collect(*each)
        whole = self._whole(name)
        stale = index in whole.stale
        whole.stale.discard(index)
        return whole.views[index], stale

    def _reached(self, running: Pass, parameter: nn.Parameter) -> None:
        name, index = self._place[parameter]
        running.missing[name].discard(index)
        if not running.missing[name]:
            self.completed(name)
            self._advance(running)

    def _take(self, parameter: Any) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:  # else it came or comes another way (model/weight_gradients.py)
            self.collect(parameter, gradient)

    def _advance(self, running: Pass) -> None:
        """Start the reductions that can start. Always in the same order, or ranks would pair the wrong ones."""
        while running.order and not running.missing[running.order[0]]:
            self._pass_is_done(running.order.pop(0))

    def _pass_is_done(self, name: str) -> None:
        self._passes[name] -= 1
        assert self._passes[name] >= 0, f"{name}: more passes than said"
        if self._units[name].zero >= 2 or self._passes[name] == 0:
            self.reducing(name)
            self._reduce(name)

    def _whole(self, name: str) -> _Whole:
        """A whole gradient buffer for a unit, and its parameters' views of it."""
        if name not in self._open:
            unit = self._units[name]
            buffer = unit.accumulator
            if buffer is None:
                buffer = self._transient.take(unit.flat.padded)
                buffer[unit.flat.numel :].zero_()
            views = unit.gradient_views(buffer)
            self._open[name] = _Whole(buffer, views, set(range(len(views))))
        return self._open[name]

    # --- sums over ranks

    def _reduce(self, name: str) -> None:
        unit, whole = self._units[name], self._whole(name)
        axes, last = unit.axes, self._passes[name] == 0
        for index in whole.stale:
            whole.views[index].zero_()  # took no part in any loss
        whole.stale.clear()
        del self._open[name]  # the next pass must not write into what is on its way
        if unit.zero == 0:
            if not axes.data.trivial:
                handle = all_reduce(whole.buffer, axes.data, GRADIENT_SITE, async_op=True)
                self._in_flight.append(_Reduction(unit, handle))
            return
        while len(self._in_flight) >= REDUCTIONS_IN_FLIGHT:
            self._complete(self._in_flight.popleft())
        output = unit.gradient if self._shard_is_stale[name] else torch.empty_like(unit.gradient)
        self._shard_is_stale[name] = False
        handle = reduce_scatter(output, whole.buffer, axes.shard, GRADIENT_SITE, async_op=True)
        self._in_flight.append(_Reduction(unit, handle, output, whole.buffer, last))

    def _complete(self, reduction: _Reduction) -> None:
        """Wait for a unit's reduction, add it up, and give the whole buffer back."""
        reduction.handle.wait()
        if reduction.output is None:
            return
        unit = reduction.unit
        if unit.zero >= 2:
            assert reduction.whole is not None
            self._transient.give(reduction.whole)
        if reduction.output is not unit.gradient:
            unit.gradient.add_(reduction.output)
        if reduction.last and not unit.axes.replica.trivial:
            self._replica_sums.append(all_reduce(unit.gradient, unit.axes.replica, REPLICA_SITE, async_op=True))

    def finish(self) -> None:
        """Wait for the reductions, and add up what ranks of several stages have of one unit."""
        left = [name for name, passes in self._passes.items() if passes]
        assert not left, f"passes are missing: {left}"
        while self._in_flight:
            self._complete(self._in_flight.popleft())
        for handle in self._replica_sums:
            handle.wait()
        self._replica_sums.clear()
        for name in self._idle:
            self._units[name].gradient.zero_()
        shared = [
            all_reduce(unit.gradient, unit.axes.holders, HOLDER_SITE, async_op=True)
            for unit in self._units.values()  # in the order of the table on all of them
            if unit.axes.holders is not None
        ]
        for handle in shared:
            handle.wait()


@dataclass(slots=True)
class _Whole:
    """A unit's whole gradient buffer, its parameters' views of it, and which of them are out of date (overwritten, not
    added to)."""

    buffer: torch.Tensor
    views: list[torch.Tensor]
    stale: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Reduction:
    """A unit's gradient on its way from the `whole` buffer to its shard (`output`; None: an all-reduce in place)."""

    unit: UnitBuffers
    handle: Handle
    output: torch.Tensor | None = None
    whole: torch.Tensor | None = None
    last: bool = True
