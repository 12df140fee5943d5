"""Matrix product rate of a device: the peak for MFU (model FLOPs utilization) where the vendor publishes none."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch

from meshwright.machine import has_bf16_instructions
from meshwright.probe.points import synchronize

# (tokens, out, in) of a small transformer's products, large enough to be compute-bound on a few cores.
SHAPES = ((1024, 1024, 1024), (2048, 1536, 512), (2048, 512, 1536))
DECIDING_SHAPES = ((512, 512, 512), (512, 1024, 256))  # smaller: of many products, some run undisturbed
TURNS = 4


def measure_matmul_rate(dtype: torch.dtype, device: torch.device | str = "cpu", seconds: float = 0.15) -> float:
    """Measure the sustained FLOP/s of matrix products (`torch.nn.functional.linear`) in `dtype`, with the process's
    current number of threads. Return the highest rate of a few shapes; the rate of a shape is at its median time.

    device: device to measure. seconds: approximate duration of the whole measurement.
    """
    products = _time_products(dtype, torch.device(device), SHAPES, seconds)
    return max(flops / statistics.median(times) for flops, times in products)


def is_bf16_faster(device: torch.device | str = "cpu") -> bool:
    """Return True if matrix products on `device` reach at least 1.2 times as many FLOP/s in bf16 as in float32, so that
    bf16 pays for its casts.

    The rates are measured only on CPUs with bf16 instructions; the result is True on GPUs and False on other CPUs. Both
    dtypes are timed in turn, and their shortest times are compared, since other load only lengthens times.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return True
    if not has_bf16_instructions():
        return False
    rate = dict.fromkeys((torch.float32, torch.bfloat16), 0.0)
    for _ in range(TURNS):
        for dtype in rate:
            products = _time_products(dtype, device, DECIDING_SHAPES, 0.04)
            rate[dtype] = max(rate[dtype], *(flops / min(times) for flops, times in products))
    return rate[torch.bfloat16] >= 1.2 * rate[torch.float32]


def _time_products(
    dtype: torch.dtype, device: torch.device, shapes: Sequence[tuple[int, int, int]], seconds: float
) -> list[tuple[float, list[float]]]:
    """Time matrix products in `dtype` on `device`; return (FLOPs of one product, seconds of each repetition) for each
    shape. shapes: (tokens, output size, input size). seconds: duration of the whole measurement."""
    products = []
    for tokens, out, inner in shapes:
        x = torch.randn(tokens, inner, device=device).to(dtype)
        weight = torch.randn(out, inner, device=device).to(dtype)
        torch.nn.functional.linear(x, weight)  # warm-up: chooses kernels and packs weights
        times: list[float] = []
        deadline = time.perf_counter() + seconds / len(shapes)
        while len(times) < 3 or time.perf_counter() < deadline:
            synchronize(device)
            start = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            synchronize(device)
            times.append(time.perf_counter() - start)
        products.append((2.0 * tokens * out * inner, times))
    return products
