"""List of the tensors that emulated ranks hold: parameters of their modules and tensors of their scripts."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from meshwright.emulation.call_matcher import describe_tensor
from meshwright.flight_recorder.verdict import name_ranks


@dataclass(frozen=True, slots=True)
class HeldValue:
    """One value of a named tensor, and the ranks that hold it. A tensor that differs between ranks has one `HeldValue`
    for each distinct value.

    Attributes:
        name: Class of the module and name of the parameter, such as "Linear.weight", or name of a global variable.
        shape: Dtype and shape, "float32[4, 8]".
        ranks: Ranks whose tensors are bitwise equal.
        checksum: CRC-32 of the bytes, in hexadecimal.
    """

    name: str
    shape: str
    ranks: tuple[int, ...]
    checksum: str


class ModuleLog:
    """Record of the `torch.nn.Module`s that each rank creates. It holds references to the modules, so that modules that
    a script drops can still be listed at the end."""

    def __init__(self) -> None:
        """Start without modules."""
        self._modules: dict[int, dict[int, torch.nn.Module]] = {}
        self._children: set[int] = set()

    @contextmanager
    def record_modules(self, current: Callable[[], int]) -> Iterator[None]:
        """Context manager that records modules as the ranks create them.

        A module is recorded when it registers a parameter or a child module; the child module is recorded too. current:
        function that returns the running rank, for which a module is recorded.
        """

        def add(module: Any, *_: Any) -> None:
            """Record `module` for the running rank; called when it registers a parameter, whose arguments `_` are
            ignored."""
            self._modules.setdefault(current(), {})[id(module)] = module

        def adopt(module: Any, name: str, child: Any) -> None:
            """Record `module` and its new child module `child` (None: no child) for the running rank, and note that the
            child is not a root. name: ignored.
            """
            add(module)
            if child is not None:
                add(child)
                self._children.add(id(child))

        handles = [register_module_parameter_registration_hook(add), register_module_module_registration_hook(adopt)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def list_root_modules(self, rank: int) -> list[torch.nn.Module]:
        """Return the modules that a rank created and that are not children of other modules, in the order in which they
        were recorded."""
        return [module for key, module in self._modules.get(rank, {}).items() if key not in self._children]


def list_holdings(log: ModuleLog, namespaces: list[dict[str, Any]]) -> list[HeldValue]:
    """List the tensors that the ranks hold: parameters and buffers of their modules, and tensors in their scripts'
    global variables. Returns one entry for each name and distinct value, with the ranks that hold it.

    log: modules of each rank. namespaces: [rank], global variables of the rank's script.
    """
    found: dict[str, dict[tuple[str, str], list[int]]] = {}
    for rank, variables in enumerate(namespaces):
        roots = log.list_root_modules(rank)
        for number, module in enumerate(roots):
            prefix = f"{type(module).__name__}{f'#{number + 1}' if len(roots) > 1 else ''}."
            held = [*module.named_parameters(), *module.named_buffers()]
            _record_tensors(found, rank, ((prefix + name, tensor) for name, tensor in held))
        _record_tensors(
            found, rank, ((name, each) for name, each in variables.items() if isinstance(each, torch.Tensor))
        )
    return [
        HeldValue(name, shape, tuple(ranks), checksum)
        for name, copies in found.items()
        for (shape, checksum), ranks in copies.items()
    ]


def _record_tensors(found: dict[str, dict[tuple[str, str], list[int]]], rank: int, tensors: Any) -> None:
    """Add a rank's tensors to `found`, which maps tensor name -> (dtype and shape, checksum) -> ranks that hold this
    value. tensors: pairs (name, tensor)."""
    for name, tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a DTensor's shard
        key = (describe_tensor(local), compute_checksum(local))
        found.setdefault(name, {}).setdefault(key, []).append(rank)


def compute_checksum(tensor: torch.Tensor) -> str:
    """Return the CRC-32 of a tensor's bytes, in hexadecimal."""
    flat = tensor.detach().contiguous().cpu().view(-1)
    return f"{zlib.crc32(flat.view(torch.uint8).numpy().tobytes()):08x}"


def format_holdings(holdings: list[HeldValue]) -> str:
    """Format the list of held tensors as a text table: one line for each tensor name, with the ranks that hold each
    distinct value. Checksums are not shown: they depend on the machine's arithmetic. holdings: tensors with the ranks
    that hold them."""
    names = list(dict.fromkeys(holding.name for holding in holdings))
    width = max((len(name) for name in names), default=0)
    lines = ["tensors by rank (ranks that are listed together hold equal values)"]
    for name in names:
        copies = [holding for holding in holdings if holding.name == name]
        shapes = list(dict.fromkeys(holding.shape for holding in copies))
        texts = [f"{name_ranks(each.ranks)}{f': {each.shape}' if len(shapes) > 1 else ''}" for each in copies]
        shared = f"{shapes[0]}  " if len(shapes) == 1 else ""
        lines.append(f"  {name:<{width}}  {shared}{'; '.join(texts)}")
    return "\n".join(lines)
