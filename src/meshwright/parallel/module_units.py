"""When the parameters of a foreign module's units come and go: hooks on its modules, and on what autograd saves.

The module is not ours: it may enter units in another order than it names them, enter one twice, on some ranks not at
all, or reach into one from outside. So gathers follow one order that does not depend on it: forward every unit once,
backward every unit once the other way round. Whoever comes to a unit has those before it in the order gathered first;
at the end the rest follows. Likewise a unit's gradients are reduced when the gather of the one before it has begun,
and those of units that a pass left out at once. Ranks so pair the same calls whatever they compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from meshwright.comm.collectives import all_reduce
from meshwright.comm.mesh import Axis
from meshwright.parallel.gradients import GradientSums
from meshwright.parallel.units import UnitBuffers
from meshwright.spec.foreign import REST

HELD_SITE = "module.units"


class ModuleUnits:
    """The units of a foreign module (as `StageUnits` those of a transformer's stage): each is there while it is
    computed with. `held`: those that stay for a whole pass, because they are used outside of their modules or more than
    once; the first forward finds them out."""

    def __init__(self, units: Sequence[str], needs: Mapping[str, Sequence[UnitBuffers]]) -> None:
        self._order = tuple(units)
        self._buffers = {name: buffers for name in units for buffers in needs[name]}
        self.sharded = any(each.zero == 3 for each in self._buffers.values())
        self.held = {REST} & set(units)
        self._settled = {True: False, False: False}  # whether all agree on `held`, in training and in evaluation
        self._found: set[str] = set()
        self._entered: set[str] = set()  # in this forward
        self._to_come: deque[str] = deque()  # what this pass has not begun to gather
        self._backward = False
        self._came_to: str | None = None
        self._storages = {each.parameters.untyped_storage()._cdata: name for name, each in self._buffers.items()}

    def attach(self, modules: Mapping[str, nn.Module], parameters: Mapping[int, str]) -> None:
        """Hook on to the modules that are units. parameters: name of the unit of each parameter, by `id`."""
        self._unit_of = parameters
        if not self.sharded:
            return
        enter, leave = map(torch.compiler.disable, (self._enter, self._leave))  # not sooner: it loads the compiler
        for name, module in modules.items():
            module.register_forward_pre_hook(partial(enter, name))
            module.register_forward_hook(partial(leave, name))

    @contextmanager
    def forward(self, axis: Axis, *, backward_follows: bool = True) -> Iterator[None]:
        """Around the forward pass of a micro-batch. `axis`: of the ranks that share the units."""
        self._backward = False
        if not self.sharded:
            for buffers in self._buffers.values():
                buffers.need()  # ZeRO-1 and 2 gather them once a step
            yield
            return
        self._keeps_last = backward_follows
        settled = self._settled[backward_follows]
        self._entered = set()
        held = [name for name in self._order if name in self.held]
        self._to_come = deque([*held, *(name for name in self._order if name not in self.held)])
        for name in held:
            self.come_to(name)
        if backward_follows:
            hooks: AbstractContextManager[Any] = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        else:
            hooks = nullcontext()
        with hooks, nullcontext() if settled else _Watch(self._used):
            yield
        self._come_to_the_rest()
        if not settled:
            self._settled[backward_follows] = self._settle(axis)
        for name in self._order:
            if self._stays(name):
                self._buffers[name].need()
            else:
                self._buffers[name].release()

    @contextmanager
    def backward(self, gradients: GradientSums) -> Iterator[None]:
        """Around its backward pass, whose gradients are summed there."""
        if not self.sharded:
            yield
            return
        self._backward = True
        self._to_come = deque(name for name in reversed(self._order) if not self._stays(name))
        gradients.leave_out(name for name in self._order if name not in self._entered | self.held)
        yield
        self._come_to_the_rest()
        self._backward = False

    def completed(self, name: str) -> None:
        """The gradients of all parameters of a unit are there: every function that it computes with has run."""
        if self._backward and name not in self.held:
            self._buffers[name].release()

    def reducing(self, name: str) -> None:
        """The gradients of a unit are about to be reduced: the gather of the next unit on the way back comes first."""
        if self._backward:
            self._fetch_through(self._following(name))

    def release(self) -> None:
        """Nobody computes with the module now."""
        if self.sharded:
            for buffers in self._buffers.values():
                buffers.release()

    def come_to(self, name: str) -> None:
        """Return when a unit is there; the next one in the order is on its way."""
        if name == self._came_to and self._buffers[name].gathered:
            return
        self._came_to = name
        self._fetch_through(name)
        self._buffers[name].need()
        self._fetch_through(self._following(name))

    # --- inside

    def _stays(self, name: str) -> bool:
        """Whether a unit is there from its forward to its backward: held ones, and the last, with which that begins."""
        others = [each for each in self._order if each not in self.held]
        return name in self.held or (self._keeps_last and others[-1:] == [name])

    def _following(self, name: str) -> str | None:
        """The unit that comes after this one in the pass, held ones aside."""
        here = self._order.index(name)
        after = reversed(self._order[:here]) if self._backward else self._order[here + 1 :]
        return next((each for each in after if each not in self.held), None)

    def _fetch_through(self, name: str | None) -> None:
        """Begin the gathers of the units up to this one, unless that was done."""
        while name in self._to_come:
            self._buffers[self._to_come.popleft()].fetch()

    def _come_to_the_rest(self) -> None:
        while self._to_come:
            self._buffers[self._to_come.popleft()].fetch()

    def _enter(self, name: str, module: nn.Module, inputs: Any) -> None:
        buffers = self._buffers[name]
        self._entered.add(name)
        there = buffers.gathered or buffers.gathering is not None or name in self._to_come
        if not there and not self._backward:
            self._found.add(name)  # for the second time
        self.come_to(name)

    def _leave(self, name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._backward:  # computed again: its backward follows
            return
        for each in tree_leaves(outputs):
            if isinstance(each, torch.Tensor) and self._unit_in(each) is not None:
                self._found.add(name)  # it hands its parameters out
        if name not in self._found and not self._stays(name):
            self._buffers[name].release()

    def _used(self, parameter: torch.Tensor) -> None:
        """Somebody computes with a parameter, perhaps from outside of its unit."""
        name = self._unit_of.get(id(parameter))
        if name is not None and not self._buffers[name].gathered:
            self._found.add(name)
            self.come_to(name)

    def _settle(self, axis: Axis) -> bool:
        """From now on units are held that any rank has found to be used otherwise than between enter and leave. Whether
        any rank has gone through a unit at all."""
        found = [*(int(name in self._found) for name in self._order), len(self._entered)]
        flags = torch.tensor(found, device=self._device)
        all_reduce(flags, axis, HELD_SITE)
        *found, entered = flags.tolist()
        self.held |= {name for name, flag in zip(self._order, found, strict=True) if flag}
        self.release()  # ranks may have kept different ones
        return entered > 0

    @property
    def _device(self) -> torch.device:
        return next(iter(self._buffers.values())).parameters.device

    def _unit_in(self, tensor: torch.Tensor) -> str | None:
        """The unit whose memory a tensor is a view of."""
        if tensor.layout != torch.strided:
            return None
        return self._storages.get(tensor.untyped_storage()._cdata)

    def _pack(self, tensor: torch.Tensor) -> Any:
        name = self._unit_in(tensor)
        return tensor if name is None else _Saved(name, tensor)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Saved):
            return saved  # type: ignore[no-any-return]
        self.come_to(saved.unit)
        return saved.tensor


class _Saved:
    """A view of a unit's memory that autograd keeps for the backward pass; the memory itself comes and goes."""

    __slots__ = ("tensor", "unit")

    def __init__(self, unit: str, tensor: torch.Tensor) -> None:
        self.unit, self.tensor = unit, tensor


class _Watch(TorchFunctionMode):
    """Tells of every parameter that a function of torch is called with."""

    def __init__(self, used: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._used = used

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _asks_about(function):
            for each in tree_leaves((args, kwargs or {})):
                if isinstance(each, nn.Parameter):
                    self._used(each)
        return function(*args, **(kwargs or {}))


def _asks_about(function: Any) -> bool:
    """Whether a function of torch only asks what a tensor is like, and reads none of its elements."""
    name = getattr(function, "__name__", "")
    if name == "__get__":  # of a property
        return getattr(getattr(function, "__self__", None), "__name__", "") not in ("T", "mT", "H", "mH", "data")
    return name in _QUESTIONS


_QUESTIONS = {
    *("size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "element_size", "is_contiguous"),
    *("is_floating_point", "is_complex", "get_device", "data_ptr", "untyped_storage", "__len__", "__hash__"),
    *("is_same_size", "__set__", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
}
