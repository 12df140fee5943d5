"""Deterministic kernels: the same inputs give the same bits on every start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch


@contextmanager
def _deterministic_inductor() -> Iterator[None]:
    """Context manager in which Inductor (the backend of torch.compile) chooses kernels by rule, not by timing them, on
    all threads of the process."""
    from torch._inductor import config  # takes a second to import

    # An override holds on its thread alone, and autograd compiles the backward of CUDA tensors on a thread of its own,
    # which reads the default.
    internals: Any = config
    entry = internals._config["deterministic"]
    default, entry.default = entry.default, True
    try:
        with config.patch(deterministic=True):
            yield
    finally:
        entry.default = default


@contextmanager
def deterministic(wanted: bool, compiled: bool) -> Iterator[None]:
    """Context manager that makes torch deterministic: equal inputs give equal bits on CUDA too, and operations without
    a deterministic kernel raise.

    wanted: False: change nothing. compiled: True if blocks run under torch.compile; Inductor then chooses kernels
    without timing them, because after a restart other timings could lead to other choices."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    # Read by cuBLAS at its first use: makes reductions deterministic when several streams are used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    fresh_memory: Any = torch.utils.deterministic
    filled = fresh_memory.fill_uninitialized_memory
    fresh_memory.fill_uninitialized_memory = False  # a debugging aid that costs time
    try:
        with _deterministic_inductor() if compiled else nullcontext():
            yield
    finally:
        torch.use_deterministic_algorithms(before)
        fresh_memory.fill_uninitialized_memory = filled
