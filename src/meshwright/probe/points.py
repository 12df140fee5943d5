"""What a rank computes to be measured: matrix products over shapes and precisions, passes over memory and pieces of a
layer over sizes."""

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
    """One thing to time. ``kind``: product, pass or piece (of a layer); ``name``: a product's form, a pass's or a
    piece's name; ``sizes``: (tokens, out, in), or (elements,). Of a piece ``make`` gives the call to time on a device,
    of so many ``kernels``, each of which reads and writes ``kernel_bytes``."""

    kind: str
    name: str
    precision: str
    sizes: tuple[int, ...]
    make: Callable[[torch.device], Callable[[], Any]] | None = None
    kernels: float = 1.0
    kernel_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        """What a pass, or a kernel of a piece, reads and writes."""
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
        """What is measured on "cpu" and on "cuda" unless said: sizes of small models there, of large ones here."""
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
                _powers(8, 24, 2),
                _powers(10, 24, 2),
                ("fp32", "bf16"),
                pieces=(2**12, 2**16, 2**18, 2**20, 2**21),
            )
        sides += ((4096, 1024), (1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336))
        shapes = [(tokens, *side) for tokens in (256, 2048, 8192) for side in sides]
        shapes += [(8192, 8192, 8192), (2048, 32768, 4096)]
        return cls(tuple(shapes), _powers(8, 28, 4), _powers(10, 28, 2), ("fp32", "tf32", "bf16", "fp16"))

    @classmethod
    def short(cls, precisions: tuple[str, ...], axes: tuple[str, ...]) -> Effort:
        """What the prediction of one run on processors needs, in some 10 seconds: its ``precisions``, and the
        reference steps of those of its ``axes`` whose ranks wait for each other in every layer."""
        sides = ((64, 64), (256, 64), (64, 256), (256, 256), (1024, 256), (256, 1024), (1024, 1024))
        shapes = [(tokens, *side) for tokens in (256, 2048) for side in sides]
        return cls(
            tuple(shapes),
            _powers(12, 22, 5),
            _powers(10, 25, 5),
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
        """All that is computed, in order. Copies of float32 are always among it: they price the optimizer."""
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


class Yardstick:
    """A product that is timed beside everything else: how fast a processor is just now. Cores that are shared with
    others of their host lose a third of their speed for seconds on end, and whatever is measured then would say so of
    itself alone."""

    def __init__(self, device: torch.device) -> None:
        self._call = partial(torch.nn.functional.linear, torch.randn(256, 512), torch.randn(512, 512))
        self._processor = device.type == "cpu"

    def seconds(self) -> float:
        """Of one product, the median of five; on other devices always the same."""
        if not self._processor:
            return 1.0
        with torch.no_grad():
            return statistics.median(_batch(self._call, torch.device("cpu"), 1) for _ in range(5))


def _powers(first: int, last: int, step: int) -> tuple[int, ...]:
    return tuple(2**exponent for exponent in range(first, last + 1, step))


def call_of(point: Point, device: torch.device) -> Callable[[], Any]:
    """The call that a point times, on tensors of its own."""
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
def precision_set(precision: str) -> Iterator[None]:
    """Within it, float32 products on a GPU use tf32 units where that is the precision, and none otherwise."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def time_point(point: Point, device: torch.device, seconds: float) -> float:
    """Seconds of one call, of a piece of one of its kernels: the median of batches within about `seconds`, three at
    least unless one takes longer."""
    with torch.no_grad(), precision_set(point.precision):
        return time_call(call_of(point, device), device, seconds) / point.kernels


def time_call(call: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """The same of any call. A batch has as many calls as fill some of the time: a device is asked without waiting."""
    call()  # kernels are chosen and packed here
    once = _batch(call, device, 1)
    if once > seconds:
        return once
    calls = max(1, int(seconds / 8 / once))
    times = [_batch(call, device, calls) for _ in range(max(3, min(8, int(seconds / (calls * once)))))]
    return statistics.median(times)


def _batch(call: Callable[[], Any], device: torch.device, calls: int) -> float:
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - begun) / calls


def synchronize(device: torch.device) -> None:
    """Wait for what the device has been asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
