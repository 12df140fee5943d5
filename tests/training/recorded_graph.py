"""CUDA graphs without a GPU: a capture records all operators on CPU tensors, a replay runs them on the same tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
WAITING = frozenset({
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default,
    aten.is_nonzero.default,
})  # fmt: skip
"""Operators for which the host waits for a GPU, which no capture allows."""


class CaptureFailed(Exception):
    """Raised if the host waits for the device during a capture."""


def list_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from list_tensors(each)


def _list_storages(value: Any) -> set[int]:
    """Return identifiers of the storages of all tensors in `value`."""
    return {each.untyped_storage()._cdata for each in list_tensors(value)}


class RecordedGraph:
    """Stand-in for `torch.cuda.CUDAGraph`. calls: (operator, arguments, keyword arguments, its outputs that are no
    views) of each captured operator that computes, in order. replays: number of replays."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for operator, arguments, options, outputs in self.calls:
                found = [
                    each
                    for each in list_tensors([operator(*arguments, **options)])
                    if not _list_storages([each]) & _list_storages([arguments, options])
                ]
                for output, value in zip(outputs, found, strict=True):
                    output.copy_(value)


class Capture(TorchDispatchMode):
    """Stand-in for `torch.cuda.graph`. As on a GPU, nothing is computed at the end of the capture: tensors made in it
    are NaN, and all others have the values from before. graph: records the operators. capture_error_mode: argument of
    `torch.cuda.graph`."""

    def __init__(self, graph: RecordedGraph, capture_error_mode: str) -> None:
        super().__init__()
        assert capture_error_mode == "thread_local", "a background save uses the GPU too"
        self.graph = graph
        self.made: set[int] = set()
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operator in WAITING:
            raise CaptureFailed(f"the host waits for {operator}")
        parameters = operator._schema.arguments
        named = {each.name: value for each, value in zip(parameters, args, strict=False)} | kwargs
        written = [
            named[each.name]
            for each in parameters
            if each.name in named and each.alias_info is not None and each.alias_info.is_write
        ]
        for tensor in list_tensors(written):
            if not _list_storages([tensor]) & self.made:
                self.before.append((tensor.detach(), tensor.detach().clone()))
        result = operator(*args, **kwargs)
        given = _list_storages([args, kwargs])
        outputs = [each for each in list_tensors([result]) if not _list_storages([each]) & given]
        self.made |= _list_storages(outputs)
        if outputs or written:
            self.graph.calls.append((operator, args, kwargs, outputs))
        return result

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for _, _, _, outputs in self.graph.calls:
            for output in outputs:
                if output.is_floating_point():
                    output.fill_(torch.nan)
        for tensor, value in reversed(self.before):
            tensor.copy_(value)
