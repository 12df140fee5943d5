"""Measurement points of a rank: matrix products, elementwise passes over memory, and kernels of a layer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from meshwright.planner.measured import FORMS

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PASSES = {"copy": 2, "add": 3, "silu": 2}
"""Passes over memory, and how many times the bytes of a tensor each reads and writes."""


@dataclass(frozen=True, slots=True)
class Point:
    """One call to time.

    ``kind``: "product", "pass" or "piece" (a kernel of a layer). ``name``: form of the product, or name of the pass or
    kernel. ``sizes``: (tokens, out, in), or (elements,). For a piece, ``make`` creates the call on a device; it runs
    ``kernels`` kernels that read and write ``kernel_bytes`` each.
    """

    kind: str
    name: str
    precision: str
    sizes: tuple[int, ...]
    make: Callable[[torch.device], Callable[[], Any]] | None = None
    kernels: float = 1.0
    kernel_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        """Bytes read and written by a pass, or by one kernel of a piece."""
        if self.make is not None:
            return self.kernel_bytes
        return float(PASSES[self.name] * self.sizes[0] * DTYPES[self.precision].itemsize)


@dataclass(frozen=True, slots=True)
class Effort:
    """Measurement plan of a probe.

    shapes: (m, n, k) of matrix products
    passes, pieces: elements of the tensors of elementwise kernels and of parts of a step
    vectors: bytes of the whole vector of a collective
    precisions: dtypes of products and pieces
    disk: bytes written (0: not measured)
    seconds: time for each point
    steps: training steps of a reference model under each layout
    rounds: repetitions in which reference layouts alternate
    axes: tp/cp axes measured
    single_rank: also measure a single rank
    compare: seconds for which the ranks are compared with each other (0: not at all)
    """

    shapes: tuple[tuple[int, int, int], ...]
    passes: tuple[int, ...]
    vectors: tuple[int, ...]
    precisions: tuple[str, ...]
    disk: int = 2**26
    seconds: float = 0.04
    pieces: tuple[int, ...] = ()
    steps: int = 12
    rounds: int = 3
    axes: tuple[str, ...] = ("tp", "cp")
    single_rank: bool = True
    compare: float = 4.0

    @classmethod
    def of(cls, device: str) -> Effort:
        """Return the default plan for "cpu" (sizes of small models) or "cuda" (of large ones)."""
        sides: tuple[tuple[int, int], ...] = (
            (64, 64),
            (256, 64),
            (64, 256),
            (256, 256),
            (1024, 256),
            (256, 1024),
            (1024, 1024),
        )
        if device == "cpu":
            shapes = [(tokens, *side) for tokens in (32, 256, 2048) for side in sides]
            shapes += [(512, 4096, 1024), (256, 8192, 256)]
            return cls(
                tuple(shapes),
                _list_powers(8, 24, 2),
                _list_powers(10, 24, 2),
                ("fp32", "bf16"),
                pieces=(2**12, 2**16, 2**18, 2**20, 2**21),
            )
        sides += ((4096, 1024), (1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336))
        shapes = [(tokens, *side) for tokens in (256, 2048, 8192) for side in sides]
        shapes += [(8192, 8192, 8192), (2048, 32768, 4096)]
        return cls(tuple(shapes), _list_powers(8, 28, 4), _list_powers(10, 28, 2), ("fp32", "tf32", "bf16", "fp16"))

    @classmethod
    def short(cls, precisions: tuple[str, ...], axes: tuple[str, ...]) -> Effort:
        """Return the plan for predicting one run on CPUs, about 10 seconds.

        precisions: of the run. axes: those of its tp and cp axes whose ranks synchronize in every layer, for reference
        steps.
        """
        sides = ((64, 64), (256, 64), (64, 256), (256, 256), (1024, 256), (256, 1024), (1024, 1024))
        shapes = [(tokens, *side) for tokens in (256, 2048) for side in sides]
        return cls(
            tuple(shapes),
            _list_powers(12, 22, 5),
            _list_powers(10, 25, 5),
            precisions,
            disk=0,
            seconds=0.012,
            pieces=(2**14, 2**17, 2**20),
            steps=4,
            rounds=1,
            axes=axes,
            single_rank=False,
            compare=0.0,
        )

    def points(self) -> list[Point]:
        """Return the products and passes in order. fp32 copies are always included, since they price the optimizer."""
        products = [
            Point("product", form, precision, shape)
            for precision in self.precisions
            for form in FORMS
            for shape in self.shapes
        ]
        passes = [
            (name, precision) for precision in self.precisions if precision in ("fp32", "bf16") for name in PASSES
        ]
        passes += [] if ("copy", "fp32") in passes else [("copy", "fp32")]
        return products + [
            Point("pass", name, precision, (elements,)) for name, precision in passes for elements in self.passes
        ]


class ReferenceKernel:
    """Small matrix product (256 x 512 by 512 x 512, float32) that is timed beside every measurement to correct it for
    the processor's present speed: cores shared with other tenants lose a third of their speed for seconds.

    device: on any but a CPU nothing is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._call = partial(torch.nn.functional.linear, torch.randn(256, 512), torch.randn(512, 512))
        self._processor = device.type == "cpu"

    def seconds(self) -> float:
        """Measure the present duration of the small product in seconds (median of five calls); return 1.0,
        unmeasured, on devices other than CPUs.
        """
        if not self._processor:
            return 1.0
        with torch.no_grad():
            return statistics.median(_time_batch(self._call, torch.device("cpu"), 1) for _ in range(5))


def _list_powers(first: int, last: int, step: int) -> tuple[int, ...]:
    """Return the powers of two with exponents `first`, `first` + `step` ... up to `last`."""
    return tuple(2**exponent for exponent in range(first, last + 1, step))


def make_call(point: Point, device: torch.device) -> Callable[[], Any]:
    """Return a function that runs the kernel of `point` once, on tensors that it allocates on `device` now."""
    dtype = DTYPES[point.precision]
    if point.make is not None:
        return point.make(device)
    if point.kind == "pass":
        x = torch.randn(point.sizes[0], device=device).to(dtype)
        if point.name == "copy":
            return partial(torch.Tensor.copy_, torch.empty_like(x), x)
        if point.name == "add":
            return partial(torch.add, x, x.clone())
        return partial(torch.nn.functional.silu, x)
    tokens, out, inner = point.sizes
    x = torch.randn(tokens, inner, device=device).to(dtype)
    weight = torch.randn(out, inner, device=device).to(dtype)
    gradient = torch.randn(tokens, out, device=device).to(dtype)
    if point.name == "forward":
        return partial(torch.nn.functional.linear, x, weight)
    if point.name == "input-gradient":
        return partial(torch.matmul, gradient, weight)
    return partial(torch.matmul, gradient.t(), x)


@contextmanager
def use_precision(precision: str) -> Iterator[None]:
    """Allow tf32 for float32 products inside the context if the precision is "tf32", else forbid it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def time_point(point: Point, device: torch.device, seconds: float) -> float:
    """Return the seconds of one call of the point (for a piece, of one of its kernels): median of batches within
    about `seconds`.
    """
    with torch.no_grad(), use_precision(point.precision):
        return time_call(make_call(point, device), device, seconds) / point.kernels


def time_call(call: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Return the seconds of one call of `call`: median of at least three batches within about `seconds`, or a single
    call if it takes longer.

    A batch repeats the call to fill the time between synchronizations.
    """
    call()  # kernels are chosen and packed here
    once = _time_batch(call, device, 1)
    if once > seconds:
        return once
    calls = max(1, int(seconds / 8 / once))
    times = [_time_batch(call, device, calls) for _ in range(max(3, min(8, int(seconds / (calls * once)))))]
    return statistics.median(times)


def _time_batch(call: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Time `calls` repetitions between synchronizations; returns seconds per call."""
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - begun) / calls


def synchronize(device: torch.device) -> None:
    """Wait for queued CUDA kernels."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
