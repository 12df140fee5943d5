"""Registration of custom operators without loading torch's compiler, which would take over a second."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

COMPILER = "torch._dynamo"


def custom_operator(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that registers a function as the torch custom operator `name`, like
    `torch.library.custom_op(name, mutates_args=(), schema=schema)`. The function must not mutate its arguments.

    schema: operator schema; None: inferred from the function's annotations."""

    def define(function: Callable[..., Any]) -> Any:
        """Register `function` as the custom operator `name` and return the operator."""
        operator = torch.library.custom_op(name, function, mutates_args=(), schema=schema)
        # torch keeps the kernel out of graphs that are compiled, for which it loads the compiler at the first call.
        kernels: dict[str | None, Callable[..., Any]] = getattr(operator, "_backend_fns", {})
        for device, kernel in kernels.items():
            kernels[device] = _without_compiler(kernel)
        return operator

    return define


def _without_compiler(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `kernel`, the decorated implementation of a custom operator, without loading torch's
    compiler. (The decorator that torch.library adds would load the compiler in its first call. The returned function
    bypasses the decorator unless torch's compiler is already loaded.)"""
    plain = getattr(kernel, "__wrapped__", kernel)

    @functools.wraps(kernel)
    def run(*arguments: Any, **options: Any) -> Any:
        """Call the kernel with the operator's arguments: undecorated if torch's compiler is not loaded, else the
        decorated function."""
        return (kernel if COMPILER in sys.modules else plain)(*arguments, **options)

    return run
