"""ZeRO prefetcher for user-defined modules, by hooks on submodules and on saved tensors.

A user's module may enter FSDP units in another order than it declares them, enter one twice, skip one on some ranks, or
use one's parameters from outside. So all-gathers follow a fixed order: every unit once in forward, once in reverse in
backward. Entering a unit first starts the all-gathers of all units before it; at the end the rest follow. Likewise a
unit's gradients are reduced after the all-gather of its predecessor has started, those of skipped units immediately.
So ranks issue matching calls whichever units they use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from meshwright.comm.collectives import all_reduce
from meshwright.comm.mesh import Axis
from meshwright.parallel.gradient_accumulation import GradientAccumulator
from meshwright.parallel.zero import FsdpUnit
from meshwright.spec.foreign import REST

HELD_SITE = "module.units"


class ModulePrefetcher:
    """ZeRO-3 prefetcher for the FSDP units of a user-defined module, which are all-gathered, prefetched and resharded.
    `units`: names of the FSDP units in declaration order; `needs`: {unit name: list with one item, the unit's flat
    buffer}.

    Attribute `held`: names of the units that stay unsharded from the start of forward to the end of backward: their
    parameters are used outside of the unit's submodule, or the submodule is called more than once. The first passes
    detect these units."""

    def __init__(self, units: Sequence[str], needs: Mapping[str, Sequence[FsdpUnit]]) -> None:
        self._order = tuple(units)
        self._units = {name: unit for name in units for unit in needs[name]}
        self.sharded = any(unit.zero == 3 for unit in self._units.values())
        self.held = {REST} & set(units)
        self._settled = {True: False, False: False}  # if all ranks agree on `held`, in training and in evaluation
        self._found: set[str] = set()  # units to be held from the next pass on
        self._entered: set[str] = set()  # in this forward
        self._to_gather: deque[str] = deque()  # units whose all-gather this pass has not started
        self._backward = False
        self._current: str | None = None
        self._storages = {unit.parameters.untyped_storage()._cdata: name for name, unit in self._units.items()}

    def attach(self, modules: Mapping[str, nn.Module], parameters: Mapping[int, str]) -> None:
        """Register forward hooks on the submodules that are FSDP units. `modules`: unit name -> submodule;
        `parameters`: `id(parameter)` -> name of the unit that contains the parameter."""
        self._unit_of = parameters
        if not self.sharded:
            return
        # Not sooner: it loads the compiler.
        enter, leave = map(torch.compiler.disable, (self._before_forward, self._after_forward))
        for name, module in modules.items():
            module.register_forward_pre_hook(partial(enter, name))
            module.register_forward_hook(partial(leave, name))

    @contextmanager
    def forward(self, axis: Axis, *, backward_follows: bool = True) -> Iterator[None]:
        """Context manager around the forward pass of a micro-batch, in which the hooks unshard and reshard FSDP units
        (ZeRO-3 only; otherwise all units are unsharded at the start).

        `axis`: the ranks that run this pass, all of which must enter the context; `backward_follows`: False if no
        backward pass follows (evaluation)."""
        self._backward = False
        if not self.sharded:
            for unit in self._units.values():
                unit.unshard()  # ZeRO-1 and 2 all-gather once a step
            yield
            return
        self._keeps_last = backward_follows
        settled = self._settled[backward_follows]
        self._entered = set()
        held = [name for name in self._order if name in self.held]
        self._to_gather = deque([*held, *(name for name in self._order if name not in self.held)])
        for name in held:
            self._unshard(name)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        uses = nullcontext() if settled else _ParameterUses(self._hold_outside_use)
        with hooks if backward_follows else nullcontext(), uses:
            yield
        self._start_remaining_all_gathers()
        if not settled:
            self._settled[backward_follows] = self._agree_on_held(axis)
        for name in self._order:
            if self._stays_unsharded(name):
                self._units[name].unshard()
            else:
                self._units[name].reshard()

    @contextmanager
    def backward(self, gradients: GradientAccumulator) -> Iterator[None]:
        """Context manager around the backward pass of a micro-batch, in which FSDP units are all-gathered before use
        (ZeRO-3). The accumulator `gradients` gets the names of units that the forward did not use, since these get no
        gradient."""
        if not self.sharded:
            yield
            return
        self._backward = True
        self._to_gather = deque(name for name in reversed(self._order) if not self._stays_unsharded(name))
        gradients.skip(name for name in self._order if name not in self._entered | self.held)
        yield
        self._start_remaining_all_gathers()
        self._backward = False

    def on_complete(self, name: str) -> None:
        """Callback of `GradientAccumulator`: reshard the FSDP unit `name`, all of whose gradients the running backward
        pass has computed."""
        if self._backward and name not in self.held:
            self._units[name].reshard()

    def on_reduce(self, name: str) -> None:
        """Callback of `GradientAccumulator`, called just before the reduction of the gradients of the FSDP unit `name`
        starts. Start the all-gather of the unit that follows in backward first, so that all ranks issue the two
        collective calls in the same order."""
        if self._backward:
            self._start_all_gathers_through(self._next_unit(name))

    def reshard(self) -> None:
        """Reshard all FSDP units at the end of a pass (ZeRO-3; otherwise do nothing)."""
        if self.sharded:
            for unit in self._units.values():
                unit.reshard()

    # --- the order of the all-gathers

    def _unshard(self, name: str) -> None:
        """Unshard the FSDP unit `name` (wait for its all-gather) and start the all-gather of the next unit."""
        if name == self._current and self._units[name].is_unsharded:
            return
        self._current = name
        self._start_all_gathers_through(name)
        self._units[name].unshard()
        self._start_all_gathers_through(self._next_unit(name))

    def _stays_unsharded(self, name: str) -> bool:
        """Return True if the FSDP unit `name` stays unsharded from forward to backward: it is in `self.held`, or it is
        the last unit, with which backward begins.
        """
        others = [each for each in self._order if each not in self.held]
        return name in self.held or (self._keeps_last and others[-1:] == [name])

    def _next_unit(self, name: str) -> str | None:
        """Return the name of the FSDP unit that follows `name` in the running pass, skipping units in `self.held`
        (units that stay unsharded during whole passes); None after the last unit."""
        here = self._order.index(name)
        after = reversed(self._order[:here]) if self._backward else self._order[here + 1 :]
        return next((each for each in after if each not in self.held), None)

    def _start_all_gathers_through(self, name: str | None) -> None:
        """Start the pending all-gathers of this pass in their fixed order, up to and including the all-gather of the
        FSDP unit `name`. Do nothing if `name` is None or its all-gather has already started."""
        while name in self._to_gather:
            self._units[self._to_gather.popleft()].start_all_gather()

    def _start_remaining_all_gathers(self) -> None:
        """Start all all-gathers that the running pass has not started yet, in their fixed order."""
        if self._to_gather:
            self._start_all_gathers_through(self._to_gather[-1])

    # --- the units that are held

    def _before_forward(self, name: str, module: nn.Module, inputs: Any) -> None:
        """Forward pre-hook of the submodule `module`, the FSDP unit `name`: unshard the unit. A unit entered twice in
        one forward pass is marked to stay unsharded in later passes. `inputs`: ignored.
        """
        unit = self._units[name]
        self._entered.add(name)
        expected = unit.is_unsharded or unit.pending_all_gather is not None or name in self._to_gather
        if not expected and not self._backward:
            self._found.add(name)  # entered a second time
        self._unshard(name)

    def _after_forward(self, name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        """Forward hook of the submodule `module`, the FSDP unit `name`: reshard the unit, or mark it to stay unsharded
        in later passes if `outputs` contain one of its parameters. `inputs`: ignored.
        """
        if self._backward:  # recomputed: its backward follows
            return
        for each in tree_leaves(outputs):
            if isinstance(each, torch.Tensor) and self._find_unit(each) is not None:
                self._found.add(name)  # its output contains a parameter
        if name not in self._found and not self._stays_unsharded(name):
            self._units[name].reshard()

    def _hold_outside_use(self, parameter: torch.Tensor) -> None:
        """Unshard the FSDP unit of `parameter`, which is read outside of the unit's submodule, and mark the unit to
        stay unsharded in all later passes.
        """
        name = self._unit_of.get(id(parameter))
        if name is not None and not self._units[name].is_unsharded:
            self._found.add(name)
            self._unshard(name)

    def _agree_on_held(self, axis: Axis) -> bool:
        """Exchange over `axis` the FSDP units that ranks have marked to stay unsharded during whole passes, and add
        them to `self.held`. Then reshard all units. Collective. Return False if some unit's submodule ran on no rank in
        this pass, so that the next pass must exchange the marks again."""
        found = [*(int(name in self._found) for name in self._order), len(self._entered)]
        flags = torch.tensor(found, device=next(iter(self._units.values())).parameters.device)
        all_reduce(flags, axis, HELD_SITE)
        *found, entered = flags.tolist()
        self.held |= {name for name, flag in zip(self._order, found, strict=True) if flag}
        self.reshard()  # ranks may have unsharded different units
        return entered > 0

    # --- parameters that autograd saves

    def _find_unit(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the FSDP unit in whose parameter buffer `tensor` is stored; None if in none."""
        stored = tensor.layout == torch.strided
        return self._storages.get(tensor.untyped_storage()._cdata) if stored else None

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Saved-tensor hook: return a `_SavedView` if `tensor` is a view of an FSDP unit's parameters, else `tensor`
        unchanged."""
        name = self._find_unit(tensor)
        return tensor if name is None else _SavedView(name, tensor)

    def _unpack(self, saved: Any) -> torch.Tensor:
        """Saved-tensor hook, the inverse of `_pack`. If `saved` is a `_SavedView`, unshard its FSDP unit and return the
        view; otherwise return `saved` unchanged."""
        if not isinstance(saved, _SavedView):
            return saved
        self._unshard(saved.unit)
        return saved.tensor


class _SavedView(NamedTuple):
    """Stand-in that autograd saves for backward instead of a view of an FSDP unit's parameters; the unit is unsharded
    before the view is read.

    unit: name of the unit; tensor: the view, whose storage has no memory while the unit is sharded.
    """

    unit: str
    tensor: torch.Tensor


class _ParameterUses(TorchFunctionMode):
    """Torch function mode that calls the function `use` with every `nn.Parameter` argument of a torch function that
    reads the parameter's values, before that function runs. With it, parameters that are used outside of their FSDP
    unit are unsharded in time."""

    def __init__(self, use: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._use = use

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _reads_metadata(function):
            for each in tree_leaves((args, kwargs or {})):
                if isinstance(each, nn.Parameter):
                    self._use(each)
        return function(*args, **(kwargs or {}))


def _reads_metadata(function: Any) -> bool:
    """Return True if the torch function `function` reads only metadata of its tensor arguments (such as shape and
    dtype) and none of their elements."""
    name = getattr(function, "__name__", "")
    if name == "__get__":  # of a property
        return getattr(getattr(function, "__self__", None), "__name__", "") not in ("T", "mT", "H", "mH", "data")
    return name in _METADATA


_METADATA = {
    *("size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "element_size", "is_contiguous"),
    *("is_floating_point", "is_complex", "get_device", "data_ptr", "untyped_storage", "__len__", "__hash__"),
    *("is_same_size", "__set__", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
}
