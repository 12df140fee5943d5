"""Custom operators that run without torch's compiler until something else has loaded it, which takes over a second."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

COMPILER = "torch._dynamo"


def custom_operator(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """As `torch.library.custom_op(name, mutates_args=(), schema=schema)`; None: the schema of the annotations."""

    def define(function: Callable[..., Any]) -> Any:
        operator = torch.library.custom_op(name, function, mutates_args=(), schema=schema)
        # torch keeps the kernel out of graphs that are compiled, for which it loads the compiler at the first call.
        kernels: dict[str | None, Callable[..., Any]] = getattr(operator, "_backend_fns", {})
        for device, kernel in kernels.items():
            kernels[device] = _without_compiler(kernel)
        return operator

    return define


def _without_compiler(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, or what it wraps while there is no compiler to keep it from."""
    plain = getattr(kernel, "__wrapped__", kernel)

    @functools.wraps(kernel)
    def run(*arguments: Any, **options: Any) -> Any:
        return (kernel if COMPILER in sys.modules else plain)(*arguments, **options)

    return run
