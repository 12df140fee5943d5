"""When the parameters of a stage's units come and go: the model tells of each unit, and ZeRO gathers and releases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from meshwright.parallel.units import UnitBuffers
from meshwright.spec.stages import LOOKED_UP


class StageUnits:
    """The `units` (model/units.py) of one stage: each is there while the stage computes with it, the next of the same
    stage is on its way, and under ZeRO-3 nothing else of it has memory.

    units: of the stage, in forward order; needs: the buffers that each of them computes with.

    `keep_last`: whether the last unit stays for a backward pass, because that follows at once.
    """

    def __init__(self, units: Sequence[str], needs: Mapping[str, Sequence[UnitBuffers]]) -> None:
        self.keep_last = True
        self._order = tuple(units)
        self._index = {name: index for index, name in enumerate(self._order)}
        self._needs = needs
        self._gathers = any(buffers.zero for needed in needs.values() for buffers in needed)
        self._sharded = {name: [buffers for buffers in needed if buffers.zero == 3] for name, needed in needs.items()}
        # What a later unit computes with again (a tied embedding) stays from the first use to the last.
        self._released_after: dict[str, list[UnitBuffers]] = {}
        later: set[int] = set()
        for name in reversed(self._order):
            self._released_after[name] = [each for each in self._sharded[name] if id(each) not in later]
            later.update(map(id, self._sharded[name]))

    def enter(self, name: str, x: Any) -> Any:
        """The forward pass comes to a unit: its parameters are there when this returns; the next unit's are on their
        way."""
        if not self._gathers:
            return x
        sharded = self._sharded[name]
        for buffers in sharded:
            buffers.fetch()
        following = self._index[name] + 1
        if following < len(self._order):
            for buffers in self._sharded[self._order[following]]:
                buffers.fetch()
        for buffers in self._needs[name]:
            buffers.need()
        if sharded and isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
            return _Hook.apply(x, partial(self._backward_leaves, name))
        return x

    def leave(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The forward pass is done with a unit. Its parameters go, unless the backward pass begins with them."""
        if not self._sharded.get(name):
            return x
        with_backward = x.requires_grad and torch.is_grad_enabled()
        if not (with_backward and self.keep_last and name == self._order[-1]):
            for buffers in self._released_after[name]:
                buffers.release()
        return _Hook.apply(x, partial(self._backward_enters, name)) if with_backward else x

    def release(self) -> None:
        """Nobody computes with the stage now."""
        for sharded in self._sharded.values():
            for buffers in sharded:
                buffers.release()

    def _backward_enters(self, name: str) -> None:
        """The backward pass comes to a unit."""
        if name in LOOKED_UP:
            return
        for buffers in self._sharded[name]:
            buffers.fetch()
        before = self._index[name] - 1
        if before >= 0 and self._order[before] not in LOOKED_UP:
            for buffers in self._sharded[self._order[before]]:
                buffers.fetch()
        for buffers in self._sharded[name]:
            buffers.need()

    def _backward_leaves(self, name: str) -> None:
        """The backward pass is done with a unit: every gradient function inside it has run."""
        for buffers in self._sharded[name]:
            buffers.release()


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
