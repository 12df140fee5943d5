"""Accumulation of gradients over backward passes: into one unsharded buffer per FSDP unit, whose reduction starts as
soon as the unit is complete, while the pass goes on below.

A pass is the backward pass of one micro-batch through one stage. Where it is split (input gradients now, weight
gradients later), it is paused in between and holds the gradients of units that are not complete yet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn

from meshwright.parallel.zero import FsdpUnit, GradientReducer


@dataclass(slots=True)
class BackwardPass:
    """A running or paused backward pass: its units that are not complete, the stage's last one first, and for each the
    indices of tensors whose gradients are missing.

    held: gradients that wait for the pause, of a split pass; early: those held over it, by unit.
    """

    order: list[str]
    missing: dict[str, set[int]]
    held: list[tuple[nn.Parameter, torch.Tensor]] | None = None
    early: dict[str, list[tuple[nn.Parameter, torch.Tensor]]] = field(default_factory=dict)


class GradientAccumulator:
    """Takes the gradients of a rank's parameters from autograd. `units` in the order of the table, `parameters` those
    bound to them."""

    def __init__(
        self, units: Mapping[str, FsdpUnit], parameters: Mapping[str, Sequence[nn.Parameter]], reducer: GradientReducer
    ) -> None:
        self._units, self._parameters, self._reducer = units, parameters, reducer
        self._place = {
            parameter: (name, index) for name, bound in parameters.items() for index, parameter in enumerate(bound)
        }
        # PyTorch keeps hooks where Python's garbage collector does not look: a strong reference would never be freed.
        weak = WeakMethod(self._take_from_autograd)

        def take(parameter: torch.Tensor) -> None:
            method = weak()
            assert method is not None, "a backward pass through a model whose gradients nobody sums any more"
            method(parameter)

        for parameter in self._place:
            parameter.register_post_accumulate_grad_hook(take)
        self.on_complete: Callable[[str], None] = lambda name: None
        """Called with each unit when the running pass has the gradients of all its parameters."""
        self.on_reduce: Callable[[str], None] = lambda name: None
        """Called with each unit before its reduction starts."""
        self.begin_step({})

    def begin_step(self, passes: Mapping[str, int]) -> None:
        """Discard the gradients. `passes`: number of backward passes that will go through each unit."""
        self._reducer.begin_step()
        self._passes = {name: passes.get(name, 0) for name in self._units}
        self._running: BackwardPass | None = None

    def finish(self) -> None:
        """Wait until all gradients are reduced."""
        left = [name for name, passes in self._passes.items() if passes]
        assert not left, f"passes are missing: {left}"
        self._reducer.finish()

    # --- one pass

    def start(self, units: Iterable[str], split: bool = False) -> BackwardPass:
        """Start a pass through `units` (in forward order); `split`: it will be paused."""
        assert self._running is None, "one pass at a time"
        order = list(units)[::-1]
        missing = {name: set(range(len(self._parameters[name]))) for name in order}
        self._running = BackwardPass(order, missing, [] if split else None)
        return self._running

    def pause(self, still_to_come: Collection[nn.Parameter]) -> None:
        """Pause the pass, which has all but the gradients of some parameters: units without these are complete."""
        running = self._running
        assert running is not None and running.held is not None
        places = {self._place[parameter] for parameter in still_to_come}
        coming = {name for name, _ in places}
        held, running.held = running.held, None
        for parameter, gradient in held:
            if self._place[parameter][0] not in coming:
                self.accumulate(parameter, gradient)
        complete = [name for name in running.order if name not in coming]
        for name in complete:
            self._end_unit(name)
        running.order = [name for name in running.order if name in coming]
        running.held = [each for each in held if self._place[each[0]][0] in coming]
        running.missing = {name: {index for of, index in places if of == name} for name in running.order}
        self._running = None

    def resume(self, paused: BackwardPass) -> None:
        """Resume a pass: `accumulate` what is still to come, then `end`. The gradients that a unit had before the pause
        are added with the first that comes, so that one unit's buffer is needed at a time."""
        assert self._running is None and paused.held is not None
        self._running, held, paused.held = paused, paused.held, None
        for each in held:
            paused.early.setdefault(self._place[each[0]][0], []).append(each)

    def end(self) -> None:
        """End the pass; parameters that it did not reach took no part in the loss."""
        assert self._running is not None
        self.skip(self._running.order)
        self._running = None

    def skip(self, units: Iterable[str]) -> None:
        """Expect no further gradient of these units in the running pass."""
        running = self._running
        assert running is not None
        for name in units:
            running.missing[name].clear()
        self._end_units(running)

    def accumulate(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Add a gradient of the running pass to its unit's buffer."""
        running = self._running
        assert running is not None, "a gradient outside of every pass"
        if running.held is not None:
            running.held.append((parameter, gradient))
            return
        view, stale = self._view(running, parameter)
        if stale:
            view.copy_(gradient)
        else:
            view.add_(gradient)
        del gradient
        self._note(running, parameter)

    def accumulate_product(self, parameter: nn.Parameter, dy_NY: torch.Tensor, x_NX: torch.Tensor) -> None:
        """`accumulate` dyᵀ x; where nothing has to be rounded in between, the product itself adds it to the buffer."""
        running = self._running
        assert running is not None, "a gradient outside of every pass"
        unit = self._units[self._place[parameter][0]]
        if running.held is not None or unit.gradient.dtype != x_NX.dtype:
            self.accumulate(parameter, dy_NY.T @ x_NX)
            return
        view, stale = self._view(running, parameter)
        torch.addmm(view, dy_NY.T, x_NX, beta=0 if stale else 1, out=view)
        self._note(running, parameter)

    def _take_from_autograd(self, parameter: Any) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:  # else it came or comes another way (model/weight_gradients.py)
            self.accumulate(parameter, gradient)

    def _view(self, running: BackwardPass, parameter: nn.Parameter) -> tuple[torch.Tensor, bool]:
        """The view in which a parameter's gradient is accumulated, and True if it is to be overwritten."""
        name, index = self._place[parameter]
        for each in running.early.pop(name, ()):
            self.accumulate(*each)
        return self._reducer.unsharded(name).view(index)

    def _note(self, running: BackwardPass, parameter: nn.Parameter) -> None:
        """The gradient of a parameter is accumulated."""
        name, index = self._place[parameter]
        running.missing[name].discard(index)
        if not running.missing[name]:
            self.on_complete(name)
            self._end_units(running)

    def _end_units(self, running: BackwardPass) -> None:
        """Reduce complete units, always in the same order, or ranks would pair different reductions."""
        while running.order and not running.missing[running.order[0]]:
            self._end_unit(running.order.pop(0))

    def _end_unit(self, name: str) -> None:
        """End the running pass for a unit: reduce its gradient after each pass (ZeRO-2 and 3) or after the last."""
        self._passes[name] -= 1
        last = self._passes[name] == 0
        assert self._passes[name] >= 0, f"{name}: more passes than expected"
        if last or self._units[name].zero >= 2:
            self.on_reduce(name)
            self._reducer.reduce(name, last)
