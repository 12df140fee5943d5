"""Measurement points of a probe: matrix products, elementwise passes over memory, and kernels of a layer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from meshwright.planner.hardware.measured import FORMS
from meshwright.probe.stopwatch import Stopwatch

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PASSES = {"copy": 2, "add": 3, "silu": 2}
"""Memory pass (elementwise operation) -> bytes that it reads and writes, in multiples of a tensor's bytes."""
_SMALL_SIDES = ((64, 64), (256, 64), (64, 256), (256, 256), (1024, 256), (256, 1024), (1024, 1024))
_LARGE_SIDES = ((4096, 1024), (1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336))
"""(output size, input size) of matrix products."""


@dataclass(frozen=True, slots=True)
class MeasurementPoint:
    """One timed measurement, at one size and precision: a matrix product, an elementwise operation limited by memory
    bandwidth ("memory pass"), or an operation of a transformer layer.

    Attributes:
        kind: "product" (matrix product), "pass" (memory pass) or "kernel" (operation of a transformer layer, such as
            norm or attention).
        name: Name of the memory pass or operation; for a product "forward", "input-gradient" or "weight-gradient".
        precision: Such as "bf16".
        sizes: (tokens, output size, input size) of a product, else (elements,).
        make: For kind "kernel", function (device) -> function that runs the operation once on inputs allocated there;
            else None.
        kernels: Number of device kernels that one run launches.
        kernel_bytes: Mean bytes that each of these kernels reads and writes."""

    kind: str
    name: str
    precision: str
    sizes: tuple[int, ...]
    make: Callable[[torch.device], Callable[[], Any]] | None = None
    kernels: float = 1.0
    kernel_bytes: float = 0.0

    @property
    def bytes(self) -> float:
        """Bytes that one device kernel of the measured operation reads and writes. A memory pass (elementwise
        operation) has one kernel; an operation of a transformer layer may have several, whose mean is returned. Not
        defined for matrix products. The planner interpolates measured times by this number."""
        if self.make is not None:
            return self.kernel_bytes
        return float(PASSES[self.name] * self.sizes[0] * DTYPES[self.precision].itemsize)


@dataclass(frozen=True, slots=True)
class MeasurementPlan:
    """Plan of a probe: what to measure, at which sizes and for how long.

    Attributes:
        shapes: (tokens, output size, input size) of matrix products.
        pass_sizes: Numbers of elements of the tensors of memory passes (elementwise operations).
        vector_bytes: Bytes of the full vector of collectives, and of copies between host and GPU.
        precisions: Precisions of products, passes and layer operations, such as "bf16".
        disk_bytes: Bytes written to the disk (0: not measured).
        point_seconds: Seconds of measuring for each measurement point.
        kernel_sizes: Numbers of elements of the tensors of layer operations (norm, attention ...).
        steps: Number of training steps of the reference model (a small transformer) under each layout, summed over all
            rounds.
        rounds: Number of rounds into which these steps are divided; in each, all layouts take turns.
        axes: Mesh axes under which the reference model is trained, of "tp" and "cp"; without "cp" ring attention is not
            timed.
        single_rank: True to also measure one rank alone.
        compare_seconds: Seconds for comparing the ranks with each other, to find slow ones (0: not compared).
    """

    shapes: tuple[tuple[int, int, int], ...]
    pass_sizes: tuple[int, ...]
    vector_bytes: tuple[int, ...]
    precisions: tuple[str, ...]
    disk_bytes: int = 2**26
    point_seconds: float = 0.04
    kernel_sizes: tuple[int, ...] = ()
    steps: int = 12
    rounds: int = 3
    axes: tuple[str, ...] = ("tp", "cp")
    single_rank: bool = True
    compare_seconds: float = 4.0

    @classmethod
    def default(cls, device: str) -> MeasurementPlan:
        """Return the default plan of `meshwright probe`. device: "cpu" for a plan with the sizes of small models,
        "cuda" for a plan with the sizes of large models."""
        if device == "cpu":
            return cls(
                (*_combine_shapes((32, 256, 2048), _SMALL_SIDES), (512, 4096, 1024), (256, 8192, 256)),
                _list_powers(8, 24, 2),
                _list_powers(10, 24, 2),
                ("fp32", "bf16"),
                kernel_sizes=(2**12, 2**16, 2**18, 2**20, 2**21),
            )
        shapes = _combine_shapes((256, 2048, 8192), _SMALL_SIDES + _LARGE_SIDES)
        shapes += ((8192, 8192, 8192), (2048, 32768, 4096))
        return cls(shapes, _list_powers(8, 28, 4), _list_powers(10, 28, 2), ("fp32", "tf32", "bf16", "fp16"))

    @classmethod
    def short(cls, precisions: tuple[str, ...], axes: tuple[str, ...]) -> MeasurementPlan:
        """Return the plan for predicting one training run on CPUs, which takes about 10 seconds.

        precisions: precisions of the run, such as "bf16". axes: mesh axes of the run, of "tp" and "cp", whose ranks
        communicate in every layer.
        """
        return cls(
            _combine_shapes((256, 2048), _SMALL_SIDES),
            _list_powers(12, 22, 5),
            _list_powers(10, 25, 5),
            precisions,
            disk_bytes=0,
            point_seconds=0.012,
            kernel_sizes=(2**14, 2**17, 2**20),
            steps=3,
            rounds=1,
            axes=axes,
            single_rank=False,
            compare_seconds=0.0,
        )

    def list_points(self) -> list[MeasurementPoint]:
        """List the measurement points of matrix products and memory passes at all precisions and sizes of the plan.
        fp32 copies are always included, since they predict the optimizer's time."""
        products = [
            MeasurementPoint("product", form, precision, shape)
            for precision in self.precisions
            for form in FORMS
            for shape in self.shapes
        ]
        passes = [
            (name, precision) for precision in self.precisions if precision in ("fp32", "bf16") for name in PASSES
        ]
        passes += [] if ("copy", "fp32") in passes else [("copy", "fp32")]
        return products + [
            MeasurementPoint("pass", name, precision, (elements,))
            for name, precision in passes
            for elements in self.pass_sizes
        ]


class ReferenceKernel:
    """Small matrix product (256 x 512 by 512 x 512, float32) that is timed right after each measurement on a CPU, to
    scale the measured time to the CPU's usual speed. (Other programs may slow the CPU down by a third for seconds.)

    device: device of the measurements; on a GPU nothing is timed or corrected.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate the operands of the product; arguments: see the class."""
        self._call = partial(torch.nn.functional.linear, torch.randn(256, 512), torch.randn(512, 512))
        self._processor = device.type == "cpu"

    def measure_seconds(self) -> float:
        """Time the reference matrix product; return the median of three calls in seconds, by which other timings are
        corrected for changes of the CPU's speed. On a GPU return 1.0: no correction is made there."""
        if not self._processor:
            return 1.0
        with torch.no_grad():
            return statistics.median(_time_batch(self._call, torch.device("cpu"), 1) for _ in range(3))


def _combine_shapes(tokens: Sequence[int], sides: Sequence[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Combine every number of tokens with every pair (output size, input size) of `sides`; return the shapes (tokens,
    output size, input size)."""
    return tuple((rows, *side) for rows in tokens for side in sides)


def _list_powers(first: int, last: int, step: int) -> tuple[int, ...]:
    """Return the powers of two 2^`first`, 2^(`first` + `step`), ..., up to at most 2^`last`."""
    return tuple(2**exponent for exponent in range(first, last + 1, step))


_PRODUCTS: dict[str, tuple[Any, str, str]] = {
    "forward": (torch.nn.functional.linear, "x", "weight"),
    "input-gradient": (torch.matmul, "gradient", "weight"),
    "weight-gradient": (lambda gradient, x: torch.matmul(gradient.t(), x), "gradient", "x"),
}
"""Form of a matrix product -> (function, names of its two operands)."""


def make_call(point: MeasurementPoint, device: torch.device) -> Callable[[], Any]:
    """Allocate the tensors of a measurement point on `device`; return a function that runs the measured operation
    once."""
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
    shapes = {"x": (tokens, inner), "weight": (out, inner), "gradient": (tokens, out)}
    call, *operands = _PRODUCTS[point.name]
    return partial(call, *(torch.randn(shapes[name], device=device).to(dtype) for name in operands))


@contextmanager
def use_precision(precision: str) -> Iterator[None]:
    """Context manager that lets float32 matrix products on GPUs use TF32 if `precision` is "tf32"; for every other
    value they use full float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def time_point(point: MeasurementPoint, device: torch.device, seconds: float) -> float:
    """Time a measurement point for about `seconds` on `device`; return the seconds of one run. For an operation that
    launches several device kernels, return the mean seconds per kernel instead."""
    cold = point.kind == "product" and device.type == "cpu"
    with torch.no_grad(), use_precision(point.precision):
        return time_call(make_call(point, device), device, seconds, cold) / point.kernels


LONG = 4
"""Multiple of the time for a point from which the first call of a CPU's matrix product is its measurement."""


def time_call(call: Callable[[], Any], device: torch.device, seconds: float, cold: bool = False) -> float:
    """Time `call()` on `device`; return the seconds of one call: the median over at least three batches of calls, with
    a synchronization before and after each batch. seconds: approximate duration of the measurement. A call that takes
    longer than `seconds` is timed once, after one warm-up call.

    cold: True to return the time of the warm-up call if it exceeds `LONG` times `seconds`, since the extra work in a
    first call is then negligible; False to time further calls."""
    first = _time_batch(call, device, 1)  # warm-up: chooses kernels and packs weights
    if cold and first > LONG * seconds:
        return first
    once = _time_batch(call, device, 1)
    if once > seconds:
        return once
    calls = max(1, int(seconds / 8 / once))
    times = [_time_batch(call, device, calls) for _ in range(max(3, min(8, int(seconds / (calls * once)))))]
    return statistics.median(times)


def _time_batch(call: Callable[[], Any], device: torch.device, calls: int) -> float:
    """Run `call` `calls` times between two synchronizations with the device; return the seconds per call."""
    synchronize(device)
    watch = Stopwatch()
    for _ in range(calls):
        call()
    synchronize(device)
    return watch.read_seconds() / calls


class _SeededBackward(torch.autograd.Function):
    """Autograd function that lets a backward pass start from a tensor with a given gradient, without a loss. Its output
    is a scalar; calling `backward` on the scalar gives the tensor that gradient."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return a scalar 0 of the dtype of `out`, to be used as the loss; its backward gives `out` the gradient
        `gradient` (same shape). ctx: autograd context."""
        ctx.gradient = gradient
        return out.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradients of the inputs of `forward`: for `out` the chosen gradient, for `gradient` None. ctx:
        autograd context. The gradient of the scalar is ignored."""
        return ctx.gradient, None


def start_backward(out: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a scalar; calling `backward()` on it runs the backward pass of `out` with the output gradient `gradient`.
    Used instead of `out.backward(gradient)`, which makes torch import sympy (half a second)."""
    found: torch.Tensor = _SeededBackward.apply(out, gradient)
    return found


def synchronize(device: torch.device) -> None:
    """Wait until the kernels queued on a CUDA device have finished; do nothing on CPUs."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
