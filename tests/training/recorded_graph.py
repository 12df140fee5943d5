"""CUDA graphs without a GPU: a capture records all operators on CPU tensors, and the calls of emulated ranks to each
other; a replay runs them on the same tensors, without the Python code that made them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.emulation.call_matcher import CallMatcher
from meshwright.emulation.exchange import RankCall

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
        if any(each.name == "site" for each in operator._schema.arguments):  # of `comm`: it calls other ranks
            with self, torch.no_grad():
                return OPDEFS[operator._schema.name]._init_fn(*args, **kwargs)
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

    def __enter__(self) -> Any:
        _CAPTURES.setdefault(threading.get_ident(), []).append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        captures = _CAPTURES[threading.get_ident()]
        captures.pop()
        if captures:  # the end of an operator of `comm`
            return
        for _, _, _, outputs in self.graph.calls:
            for output in outputs:
                if output.is_floating_point():
                    output.fill_(torch.nan)
        for tensor, value in reversed(self.before):
            tensor.copy_(value)


_CAPTURES: dict[int, list[Capture]] = {}
"""Nested captures of each thread, by thread ID."""


class _CapturedWork:
    """Handle of a captured call to other ranks; the wait for it is captured too. post: posts the call and returns its
    handle. graph: records both."""

    def __init__(self, post: Callable[[], Any], graph: RecordedGraph) -> None:
        self._post, self._graph = post, graph
        self._record(self._run)

    def wait(self, *timeout: Any) -> bool:
        """Wait for the call, now and at this place of each replay."""
        self._record(lambda: self._work.wait())  # of the latest replay
        return True

    def _run(self) -> None:
        self._work = self._post()

    def _record(self, action: Callable[[], object]) -> None:
        action()
        self._graph.calls.append((action, (), {}, []))


class CapturedCalls(ExitStack):
    """Context manager in which a capture records the calls of emulated ranks to each other. matcher: matches the ranks'
    calls."""

    def __init__(self, matcher: CallMatcher) -> None:
        super().__init__()
        calls = [(matcher, name) for name in ("join", "send", "receive")]
        for owner, name in (*calls, (dist, "batch_isend_irecv")):
            self.enter_context(mock.patch.object(owner, name, self._capture(getattr(owner, name))))

    def _capture(self, post: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function `post`, which makes calls to other ranks, with its calls captured."""

        def make(*given: Any, **options: Any) -> Any:
            captures = _CAPTURES.get(threading.get_ident())
            if not captures:
                return post(*given, **options)
            tensors = [(each.inputs, each.outputs) if isinstance(each, RankCall) else None for each in given]

            def post_again() -> Any:
                """Post the call with its own tensors: emulation forgets those of a call that has been made."""
                renewed = [
                    each if kept is None else replace(each, inputs=kept[0], outputs=kept[1])
                    for each, kept in zip(given, tensors, strict=True)
                ]
                held = _CAPTURES.pop(threading.get_ident(), [])  # the messages of a group are not recorded again
                try:
                    found = post(*renewed, **options)
                finally:
                    _CAPTURES[threading.get_ident()] = held
                return found[0] if isinstance(found, list) else found

            work = _CapturedWork(post_again, captures[0].graph)
            return [work] if isinstance(given[0], list) else work

        return make
