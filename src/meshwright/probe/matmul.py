"""Measures the matmul rate of the device this process runs on: the yardstick for MFU where no published peak exists."""

from __future__ import annotations

import statistics
import time

import torch

# Shapes of a small transformer's products (tokens, out, in); large enough to be limited by arithmetic on a few cores.
SHAPES = ((1024, 1024, 1024), (2048, 1536, 512), (2048, 512, 1536))


def matmul_flops_per_second(dtype: torch.dtype, device: torch.device | str = "cpu", seconds: float = 0.15) -> float:
    """Best sustained FLOP/s of `torch.nn.functional.linear` in `dtype` over a few shapes, within about `seconds`.

    The best of the shapes' medians: a yardstick must not be easy to beat. Uses this process's threads as they are set.
    """
    device = torch.device(device)
    best = 0.0
    for tokens, out, inner in SHAPES:
        x = torch.randn(tokens, inner, device=device).to(dtype)
        weight = torch.randn(out, inner, device=device).to(dtype)
        torch.nn.functional.linear(x, weight)  # warm: kernels are chosen and packed here
        times: list[float] = []
        deadline = time.perf_counter() + seconds / len(SHAPES)
        while len(times) < 3 or time.perf_counter() < deadline:
            _synchronize(device)
            start = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            _synchronize(device)
            times.append(time.perf_counter() - start)
        best = max(best, 2.0 * tokens * out * inner / statistics.median(times))
    return best


def bf16_is_faster(device: torch.device | str = "cpu") -> bool:
    """Whether bf16 products pay on this device: at least 1.2 times the float32 rate, so that casts are earned back."""
    if torch.device(device).type == "cuda":
        return True
    rate = {dtype: matmul_flops_per_second(dtype, device, 0.06) for dtype in (torch.float32, torch.bfloat16)}
    return rate[torch.bfloat16] >= 1.2 * rate[torch.float32]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
