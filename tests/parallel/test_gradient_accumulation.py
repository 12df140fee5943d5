"""Accumulation of weight gradients into the buffers of FSDP units."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.model.transformer import Transformer
from meshwright.parallel import zero
from meshwright.parallel.zero_engine import ZeroEngine
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset

multiply_add = torch.addmm


def add_wide_product(
    total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float, out: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Stand-in for CUDA's kernel of `torch.addmm` with `out_dtype`: 16-bit operands, sums in float32, without
    reading `total` if `beta` is 0."""
    assert out is total and out.dtype == out_dtype == torch.float32 and a.dtype == b.dtype == torch.bfloat16
    return multiply_add(total.clone(), a.float(), b.float(), beta=beta, out=out)


@pytest.mark.parametrize("cuda", [True, False])
def test_products_on_a_gpu_are_added_in_float32_without_rounding(monkeypatch: pytest.MonkeyPatch, cuda: bool):
    config, mesh = preset("llama-tiny"), Mesh.single(Layout.parse("bf16"))
    model = Transformer(config, device="meta", dtype=torch.bfloat16)
    engine = ZeroEngine(model, parameter_table(config), mesh, seed=1, parameter_dtype=torch.bfloat16)
    weight = next(each for name, each in model.named_parameters() if name.endswith("mlp.up.weight"))
    name, index = engine.gradients._place[weight]
    unit = next(each for each in engine.shards if each.flat.name == name)
    assert unit.unsharded_gradient is not None
    unit.unsharded_gradient.fill_(float("nan"))
    make = torch.Generator().manual_seed(0)
    operands = [[torch.randn(64, size, generator=make).bfloat16() for size in weight.shape] for _ in range(2)]

    engine.begin_step(2)
    (stage,) = engine.partition.stages
    with monkeypatch.context() as patch:
        if cuda:
            patch.setattr(torch.Tensor, "is_cuda", True)
            patch.setattr(torch, "addmm", add_wide_product)
        for dy, x in operands:
            engine.start_pass(stage)
            engine.gradients.accumulate_product(weight, dy, x)
            engine.gradients._running = None  # a pass through this weight alone
    total: Any = engine.gradients.reducer.unsharded(name).view(index)[0]
    exact = sum(dy.double().T @ x.double() for dy, x in operands)
    error = float((total.double() - exact).norm() / exact.norm())
    assert error < 1e-6 if cuda else 1e-3 < error < 1e-2


def test_reductions_that_start_again_wait_for_their_own_sums_alone(monkeypatch: pytest.MonkeyPatch):
    """As those of a CUDA graph after each replay."""
    handles: list[mock.Mock] = []

    def post(*_: Any, **__: Any) -> mock.Mock:
        handles.append(mock.Mock())
        return handles[-1]

    monkeypatch.setattr(zero, "reduce_scatter", post)
    monkeypatch.setattr(zero, "all_reduce", post)
    axes = SimpleNamespace(reduction=None, replica=SimpleNamespace(trivial=False), tied=None)
    flat = SimpleNamespace(view_parameters=lambda buffer: [buffer])
    buffer = torch.zeros(4)
    unit: Any = SimpleNamespace(zero=1, axes=axes, flat=flat, unsharded_gradient=buffer, gradient=buffer[:2])
    reducer, starts = zero.GradientReducer({"layer": unit}, mock.Mock()), list[Any]()
    reducer.launch = starts.append
    reducer.reduce("layer", last=True)
    for _ in range(2):
        starts[0]()
        reducer.finish()
    assert [handle.wait.call_count for handle in handles] == [1] * 4  # two reduce-scatters, two sums over replicas
