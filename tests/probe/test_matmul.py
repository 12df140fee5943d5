"""Matrix product rates, and the choice between bf16 and fp32 on a loaded machine."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch

from meshwright.machine import has_bf16_instructions
from meshwright.probe import matmul


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 sse", True),
        ("flags\t\t: fpu amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("flags\t\t: fpu avx512f avx512_fp16 avx2", False),
        ("model name\t: a bf16 machine", False),
    ],
)
def test_bf16_instructions_are_read_from_cpuinfo(tmp_path, line, expected):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\nbugs\t\t: none\n")
    assert has_bf16_instructions(tmp_path / "cpuinfo") is expected
    assert not has_bf16_instructions(tmp_path / "none")


def test_bf16_is_not_chosen_without_instructions(monkeypatch):
    monkeypatch.setattr(matmul, "has_bf16_instructions", lambda: False)
    monkeypatch.setattr(matmul, "_time_products", lambda *_: pytest.fail("measured"))
    assert not matmul.is_bf16_faster("cpu")


@pytest.mark.parametrize(("bf16_seconds", "expected"), [(0.5, True), (0.9, False)])
@pytest.mark.parametrize("loaded", [torch.float32, torch.bfloat16])
def test_precision_choice_is_robust_to_load(monkeypatch, loaded, bf16_seconds, expected):
    """Nine of ten products in one dtype take ten times as long, as on a loaded machine."""
    slowness = cycle([10.0] * 9 + [1.0])

    def time_products(dtype, device, shapes, seconds):
        idle = bf16_seconds if dtype is torch.bfloat16 else 1.0
        return [(1.0, [idle * (next(slowness) if dtype is loaded else 1.0) for _ in range(4)]) for _ in shapes]

    monkeypatch.setattr(matmul, "has_bf16_instructions", lambda: True)
    monkeypatch.setattr(matmul, "_time_products", time_products)
    assert matmul.is_bf16_faster("cpu") is expected


def test_matmul_rate_is_flop_over_seconds():
    rate = matmul.measure_matmul_rate(torch.float32, "cpu", 0.01)
    assert 1e8 < rate < 1e14
