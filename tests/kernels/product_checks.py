"""Checks of products with activations, of experts and of heads, which tests of several libraries share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from meshwright.kernels.library import Kernels
from meshwright.kernels.operations import Activation, Experts, ExpertsWorkspace, Linear
from meshwright.kernels.row_order import find_gate_order
from meshwright.model.axis_operations import SINGLE_DEVICE
from meshwright.model.experts import Mixture
from meshwright.spec.config import ModelConfig
from meshwright.spec.latent_attention import LatentAttention
from tests.kernels.conftest import Batch, one_sequence

ROWS = 5
BLOCK_ROWS = 256  # of kernels/product.h


def draw_floats(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def round_floats(x: np.ndarray) -> np.ndarray:
    """The nearest numbers that bfloat16 has."""
    return torch.from_numpy(x).bfloat16().float().numpy()


def run(kernels: Kernels, *ops: object, batch: Batch | None = None) -> None:
    """Execute operations as one list."""
    operations = kernels.create_op_list()
    for op in ops:
        operations.append(op)
    operations.run(one_sequence(ROWS) if batch is None else batch)


def relative_error(ours: np.ndarray, exact: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return float(np.abs(ours - exact.numpy()).max() / exact.abs().max())


def wide(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).double()


def expert_config(**fields: Any) -> ModelConfig:
    """A small mixture of experts."""
    options: dict[str, Any] = {
        "family": "qwen3_moe", "query_key_norm": True, "vocabulary": 99, "hidden": 24, "layers": 1, "heads": 2,
        "kv_heads": 2, "head_dim": 12, "intermediate": 7, "norm": "rmsnorm", "norm_epsilon": 1e-6, "activation": "silu",
        "gated": True, "positions": "rope", "max_positions": 64, "experts": 10, "experts_per_token": 3,
        "expert_intermediate": 21,
    }  # fmt: skip
    return ModelConfig(**options | fields)


CONFIGS = {
    "softmax": expert_config(),
    "normalised": expert_config(normalise_choice=True, experts_per_token=1, experts=2),
    "sigmoid": expert_config(
        family="dots1",
        router="sigmoid",
        router_bias=True,
        routed_scale=2.5,
        normalise_choice=True,
        shared_intermediate=21,
    ),
    "softmax groups": expert_config(
        family="deepseek_v2", query_key_norm=False, rotary_interleaved=True, latent=LatentAttention(8, 4, 8),
        expert_groups=5, groups_per_token=2, router_loss=0.0, shared_intermediate=21,
    ),
    "sigmoid groups": expert_config(
        family="dots1", router="sigmoid", router_bias=True, expert_groups=5, groups_per_token=2, normalise_choice=True,
        shared_intermediate=21,
    ),
    "biases": expert_config(
        family="gpt_oss", query_key_norm=False, mlp_bias=True, attention_sinks=True, normalise_choice=True,
        swiglu_limit=1.5, swiglu_alpha=1.702, intermediate=21,
    ),
    "weighted inputs": expert_config(
        family="llama4_text", query_key_norm=False, rotary_interleaved=True, window_chunks=True, router="sigmoid",
        routed_input=True, experts_per_token=2, shared_intermediate=21,
    ),
}  # fmt: skip


def mixture_op(
    kernels: Kernels,
    mixture: Mixture,
    out: np.ndarray,
    x: np.ndarray,
    held: range,
    dtype: str = "float32",
    **fields: Any,
) -> Experts:
    """The operation of a layer's routed experts, of which a rank holds `held` in `dtype`."""
    config, numpy = mixture.router.config, lambda tensor: tensor.detach().numpy()
    biases = (None, None, None)
    up = numpy(mixture.experts.up.weight).reshape(config.experts, -1, config.hidden)
    order = find_gate_order(up.shape[1] // 2, config.experts_interleaved)
    if config.mlp_bias:
        up_bias = numpy(mixture.experts.up.bias).reshape(config.experts, -1)
        up_bias = np.take(up_bias, order, axis=1)
        biases = numpy(mixture.router.bias), up_bias, numpy(mixture.experts.down.bias)
    down = numpy(mixture.experts.down.weight).reshape(config.experts, config.hidden, -1)
    return Experts(
        out=out,
        x=x,
        router=kernels.pack(numpy(mixture.router.weight), "float32"),
        up=kernels.pack(up[held.start : held.stop], dtype, order),
        down=kernels.pack(down[held.start : held.stop], dtype),
        workspace=ExpertsWorkspace(
            len(x), config.experts, config.experts_per_token, config.hidden, config.expert_intermediate
        ),
        top_k=config.experts_per_token,
        activation=Activation(config.activation, True, config.swiglu_limit or 0.0, config.swiglu_alpha),
        router_kind="logits" if config.routed_input else config.router,
        biases=biases,
        choice_bias=numpy(mixture.router.bias) if config.router_bias else None,
        groups=(config.expert_groups, config.groups_per_token),
        on_input=config.routed_input,
        normalise=config.normalise_choice,
        scale=config.routed_scale,
        first=held.start,
        **fields,
    )


def build_mixture(config: ModelConfig) -> Mixture:
    """A layer of experts with random weights, which bfloat16 has."""
    mixture = Mixture(config, SINGLE_DEVICE)
    generator = torch.Generator().manual_seed(0)
    for parameter in mixture.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
        parameter.data = parameter.data.bfloat16().float()
    return mixture


def check_experts(kernels: Kernels, name: str, dtype: str, tokens: int = 50) -> None:
    """Results of experts equal the model's layer, and those of a row do not depend on the other rows. Kernels that
    multiply in bfloat16 round the activations between the two products, to half of 2^-8."""
    config, x = CONFIGS[name], round_floats(draw_floats(5, tokens, 24))
    mixture, out = build_mixture(config), np.empty_like(x)
    op = mixture_op(kernels, mixture, out, x, range(config.experts), dtype)
    run(kernels, op, batch=one_sequence(tokens))
    assert tokens == 50 or np.bincount(op.workspace.chosen.reshape(-1)).max() > BLOCK_ROWS
    exact = build_mixture(config).double()._forward_routed(wide(x)[None], None)[0][0].detach()
    assert relative_error(out, exact) < (4e-3 if dtype == "bfloat16" else 2e-6)
    for row in (0, 17, tokens - 1):
        alone = np.empty((1, 24), np.float32)
        op = mixture_op(kernels, mixture, alone, x[row : row + 1], range(config.experts), dtype)
        run(kernels, op, batch=one_sequence(1))
        assert np.array_equal(alone[0], out[row])


def check_gated(kernels: Kernels, dtype: str, rows: int) -> None:
    """A product with biases and a gated activation equals float64, with an incomplete panel and many panels."""
    weight, x = round_floats(draw_floats(0, 2 * 150, 21)), round_floats(draw_floats(1, rows, 21))
    bias, order, out = draw_floats(2, 2 * 150), find_gate_order(150), np.empty((rows, 150), np.float32)
    packed = kernels.pack(weight, dtype, order)
    run(kernels, Linear(out, x, packed, bias[order], activation=Activation("silu", True)), batch=one_sequence(rows))
    gate, up = (wide(x) @ wide(weight).T + wide(bias)).chunk(2, dim=1)
    assert relative_error(out, F.silu(gate) * up) < 1e-6


def check_heads(kernels: Kernels, heads: int, dtype: str, rows: int) -> None:
    """A product of each head with its own matrix equals float64 and leaves the columns between the results. A row's
    results do not depend on the other rows."""
    weight, x = round_floats(draw_floats(0, heads, 21, 12)), round_floats(draw_floats(2, rows, 13 * heads))
    out, bias = draw_floats(3, rows, 24 * heads), draw_floats(4, heads, 21)
    before, packed = out.copy().reshape(rows, heads, 24), kernels.pack(weight, dtype)
    run(kernels, Linear(out, x, packed, bias, steps=(24, 13)), batch=one_sequence(rows))
    exact = torch.einsum("thk,hnk->thn", wide(x.reshape(rows, heads, 13)[..., :12]), wide(weight)) + wide(bias)
    found = out.reshape(rows, heads, 24)
    assert relative_error(found[..., :21], exact) < 1e-6
    assert np.array_equal(found[..., 21:], before[..., 21:])
    for row in (2, rows - 1):
        alone = np.empty((1, 24 * heads), np.float32)
        run(kernels, Linear(alone, x[row : row + 1], packed, bias, steps=(24, 13)), batch=one_sequence(1))
        assert np.array_equal(alone.reshape(heads, 24)[:, :21], found[row, :, :21])
