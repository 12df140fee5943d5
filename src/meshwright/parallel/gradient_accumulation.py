"""Gradient accumulation over backward passes, into one unsharded buffer per FSDP unit. A unit's reduction over ranks
starts as soon as its gradient is complete, while backward continues with earlier layers.

A pass is the backward pass of one micro-batch through one stage. A split pass (input gradients now, weight gradients
later) is paused in between and holds the gradients of incomplete units.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn

from meshwright.model.precision import adds_in_float32
from meshwright.parallel.zero import FsdpUnit, GradientReducer


@dataclass(slots=True)
class BackwardPass:
    """State of a running or paused backward pass of one micro-batch through one stage. A split pass pauses between its
    input gradients and its weight gradients.

    `order`: names of the FSDP units whose gradients are incomplete, in backward order. `missing`: {unit name: indices
    of its parameters without a gradient}. `held`: (parameter, gradient) pairs that a split pass has stored before its
    pause, instead of adding them to the gradient buffers; None in a pass that is not split or is resumed. `early`:
    after the pass is resumed, {unit name: the stored pairs that are not yet added to the gradient buffers}."""

    order: list[str]
    missing: dict[str, set[int]]
    held: list[tuple[nn.Parameter, torch.Tensor]] | None = None
    early: dict[str, list[tuple[nn.Parameter, torch.Tensor]]] = field(default_factory=dict)


class GradientAccumulator:
    """Accumulator of this rank's parameter gradients over the backward passes of a step. It adds gradients from
    autograd and from `accumulate` to the buffers of the parameters' FSDP units. When all gradients of a unit are
    complete, their reduction over ranks starts.

    `units`: FSDP units by name, in the order of the parameter table; `parameters`: unit name -> its parameters;
    `reducer`: reduces complete gradients over ranks, also an attribute."""

    def __init__(
        self, units: Mapping[str, FsdpUnit], parameters: Mapping[str, Sequence[nn.Parameter]], reducer: GradientReducer
    ) -> None:
        self._units = units
        self._parameters = parameters
        self.reducer = reducer
        self._place = {
            parameter: (name, index) for name, bound in parameters.items() for index, parameter in enumerate(bound)
        }
        # PyTorch holds hooks outside of Python's garbage collector: a strong reference would never be freed.
        weak = WeakMethod(self._take_from_autograd)

        def take(parameter: torch.Tensor) -> None:
            """Post-accumulate hook: move the parameter's gradient to its unit's buffer."""
            method = weak()
            assert method is not None, "backward through a model whose gradient accumulator was freed"
            method(parameter)

        for parameter in self._place:
            parameter.register_post_accumulate_grad_hook(take)
        self.on_complete: Callable[[str], None] = lambda name: None
        """Called with each unit when the running pass has the gradients of all its parameters."""
        self.on_reduce: Callable[[str], None] = lambda name: None
        """Called with each unit before its reduction starts."""
        self.begin_step({})

    def begin_step(self, passes: Mapping[str, int]) -> None:
        """Begin a training step: the next gradients overwrite the gradients of the last step. `passes`: name of each
        FSDP unit -> number of backward passes that will go through it in this step; missing names count as 0."""
        self.reducer.begin_step()
        self._passes = {name: passes.get(name, 0) for name in self._units}
        self._running: BackwardPass | None = None

    def finish(self) -> None:
        """Wait until all gradients of the step are reduced. Asserts that all backward passes that `begin_step`
        announced have taken place."""
        left = [name for name, passes in self._passes.items() if passes]
        assert not left, f"passes are missing: {left}"
        self.reducer.launch(self.reducer.finish)

    # --- one pass

    def start(self, units: Iterable[str], split: bool = False) -> BackwardPass:
        """Start a backward pass of one micro-batch through the FSDP units named `units` (in forward order) and return
        its state.

        `split`: True if the pass computes only input gradients until `pause`, and the weight gradients after
        `resume`."""
        assert self._running is None, "one pass at a time"
        order = list(units)[::-1]
        missing = {name: set(range(len(self._parameters[name]))) for name in order}
        self._running = BackwardPass(order, missing, [] if split else None)
        return self._running

    def pause(self, deferred: Collection[nn.Parameter]) -> None:
        """Pause the running split pass after its input gradients. `deferred`: parameters whose gradients will be
        computed after `resume`. FSDP units without such parameters are complete and are reduced now."""
        running = self._running
        assert running is not None and running.held is not None
        places = {self._place[parameter] for parameter in deferred}
        coming = {name for name, _ in places}
        held, running.held = running.held, None
        for parameter, gradient in held:
            if self._place[parameter][0] not in coming:
                self.accumulate(parameter, gradient)
        for name in [name for name in running.order if name not in coming]:  # complete
            self._end_unit(name)
        running.order = [name for name in running.order if name in coming]
        running.held = [each for each in held if self._place[each[0]][0] in coming]
        running.missing = {name: {index for of, index in places if of == name} for name in running.order}
        self._running = None

    def resume(self, paused: BackwardPass) -> None:
        """Resume the split backward pass `paused`. Its weight gradients then arrive through `accumulate`, and `end`
        must be called after them. Gradients that were stored before the pause are added to the buffer of their FSDP
        unit when the unit's next gradient arrives, so that few buffers exist at a time."""
        assert self._running is None and paused.held is not None
        self._running = paused
        for each in paused.held:
            paused.early.setdefault(self._place[each[0]][0], []).append(each)
        paused.held = None

    def end(self) -> None:
        """End the running backward pass. Parameters without a gradient count as complete, and the FSDP units that are
        not reduced yet are reduced now (under ZeRO-0 and 1 only after a unit's last pass of the step)."""
        assert self._running is not None
        self.skip(self._running.order)
        self._running = None

    def skip(self, units: Iterable[str]) -> None:
        """Declare that the FSDP units named `units` get no further gradients in the running backward pass. The gradient
        of such a unit is reduced once all units before it (in backward order) are complete."""
        running = self._running
        assert running is not None
        for name in units:
            running.missing[name].clear()
        self._end_units(running)

    def accumulate(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Add a parameter's gradient (of the parameter's shape) to the buffer of its FSDP unit. If a split pass is
        still computing its input gradients, the gradient is stored now and added later."""
        running = self._running
        assert running is not None, "a gradient outside of a backward pass"
        if running.held is not None:
            running.held.append((parameter, gradient))
            return
        view, stale = self._gradient_view(running, parameter)
        if stale:
            view.copy_(gradient)
        else:
            view.add_(gradient)
        del gradient
        self._mark_accumulated(running, parameter)

    def accumulate_product(self, parameter: nn.Parameter, dy_NY: torch.Tensor, x_NX: torch.Tensor) -> None:
        """Add the gradient dyᵀ x of the weight `parameter` [Y, X] to the buffer of its FSDP unit. `dy_NY`, `x_NX`:
        output gradient and input of N tokens. The matrix product itself accumulates into the buffer where dtypes agree,
        and on CUDA from 16 bits into float32, without rounding in between. While a split pass computes its input
        gradients, the gradient is stored, and added later.
        """
        running = self._running
        assert running is not None, "a gradient outside of a backward pass"
        total = self._units[self._place[parameter][0]].gradient.dtype
        wide: dict[str, Any] = {"out_dtype": total} if adds_in_float32(x_NX) and total == torch.float32 else {}
        if running.held is not None or not (wide or total == x_NX.dtype):
            self.accumulate(parameter, dy_NY.T @ x_NX)
            return
        view, stale = self._gradient_view(running, parameter)
        torch.addmm(view, dy_NY.T, x_NX, beta=0 if stale else 1, out=view, **wide)
        self._mark_accumulated(running, parameter)

    def _take_from_autograd(self, parameter: Any) -> None:
        """Post-accumulate-grad hook: if autograd has set `parameter.grad`, add it to the gradient buffer of the
        parameter's FSDP unit, and set `parameter.grad` to None."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:  # else a queue accumulates it (model/weight_gradients.py)
            self.accumulate(parameter, gradient)

    def _gradient_view(self, running: BackwardPass, parameter: nn.Parameter) -> tuple[torch.Tensor, bool]:
        """Return (view, stale). view: a parameter's elements in the gradient buffer of its FSDP unit. stale: True if
        the caller must overwrite the view's values, False if it must add to them.

        Side effect: gradients of the unit that were stored before a pause are added to the buffer. `running`: state of
        the running pass."""
        name, index = self._place[parameter]
        for each in running.early.pop(name, ()):
            self.accumulate(*each)
        return self.reducer.unsharded(name).view(index)

    def _mark_accumulated(self, running: BackwardPass, parameter: nn.Parameter) -> None:
        """Record in `running`, the state of the running pass, that a parameter's gradient is in the buffer. If no other
        gradient of its FSDP unit is missing in this pass, the unit is complete and can be reduced."""
        name, index = self._place[parameter]
        running.missing[name].discard(index)
        if not running.missing[name]:
            self.on_complete(name)
            self._end_units(running)

    def _end_units(self, running: BackwardPass) -> None:
        """Reduce the FSDP units at the front of `running.order` (incomplete units, in backward order) whose gradients
        are all accumulated, and remove these units from `running.order`. The fixed order makes the collective calls of
        all ranks match.
        """
        while running.order and not running.missing[running.order[0]]:
            self._end_unit(running.order.pop(0))

    def _end_unit(self, name: str) -> None:
        """Record that the running backward pass has computed all gradients of the FSDP unit `name`. With ZeRO-2 and 3
        start the reduction of its gradient now; with ZeRO-0 and 1 only if this was the step's last pass."""
        self._passes[name] -= 1
        last = self._passes[name] == 0
        assert self._passes[name] >= 0, f"{name}: more passes than expected"
        if last or self._units[name].zero >= 2:
            self.on_reduce(name)
            self.reducer.reduce(name, last)
