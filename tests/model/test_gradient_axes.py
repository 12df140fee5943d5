"""The table's gradient axes against autograd: a whole tensor-parallel group in one autograd graph.

Every rank has its own copy of its shard, cut by the table's boxes, whose gradient is that rank's partial gradient.
Reduced over the table's axes, partial gradients must equal the gradient of the one-device model.

Shapes: S tokens, H hidden, N heads, D head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.layout import Layout
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import ParameterTable, parameter_table
from meshwright.spec.presets import preset

SEQUENCE, VOCABULARY = 16, 19
SMALL: dict[str, Any] = {
    "hidden": 16,
    "heads": 4,
    "head_dim": 4,
    "intermediate": 24,
    "vocabulary": VOCABULARY,
    "layers": 2,
}
CONFIGS = {
    "llama with biases": dataclasses.replace(
        preset("llama-tiny"), **SMALL, kv_heads=2, qkv_bias=True, output_bias=True, mlp_bias=True
    ),
    "llama untied, one key-value head": dataclasses.replace(preset("llama-tiny"), **SMALL, kv_heads=1, tied=False),
    "qwen3": dataclasses.replace(preset("qwen3-tiny"), **SMALL, kv_heads=2),
    "gpt2": dataclasses.replace(preset("gpt2-tiny"), **SMALL, kv_heads=4, max_positions=SEQUENCE),
}
Ranks = list[torch.Tensor]


class CopyTo(torch.autograd.Function):
    """Input of a column-parallel product without sequence parallelism: identity; backward sums over ranks."""

    @staticmethod
    def forward(ctx: Any, *x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(one.clone() for one in x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(sum(gradients) for _ in gradients)  # type: ignore[misc]


class ReduceFrom(torch.autograd.Function):
    """Output of a row-parallel product without sequence parallelism: sum over ranks; backward is the identity."""

    @staticmethod
    def forward(ctx: Any, *x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(sum(x) for _ in x)  # type: ignore[misc]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


class Group:
    """All tp ranks in one process: their parameters by name, and their forward."""

    def __init__(self, config: ModelConfig, layout: Layout, parameters: list[dict[str, torch.Tensor]]) -> None:
        self.config, self.layout, self.parameters = config, layout, parameters
        self.sequence_parallel = layout.tp > 1 and layout.tensor_sequence_parallel

    def enter(self, x: Ranks) -> Ranks:
        if self.sequence_parallel:
            return [torch.cat(x)] * len(x)
        return list(CopyTo.apply(*x))

    def leave(self, x: Ranks) -> Ranks:
        if self.sequence_parallel:
            return list(torch.stack(x).sum(0).chunk(len(x)))
        return list(ReduceFrom.apply(*x))

    def each(self, function: Callable[..., torch.Tensor], *x: Ranks) -> Ranks:
        return [function(parameters, *ones) for parameters, *ones in zip(self.parameters, *x, strict=True)]

    def norm(self, name: str, x: Ranks) -> Ranks:
        def one(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            weight = parameters[f"{name}.weight"]
            if self.config.norm == "layernorm":
                return F.layer_norm(x, weight.shape, weight, parameters[f"{name}.bias"], 1e-5)
            return F.rms_norm(x, weight.shape, weight, 1e-5)

        return self.each(one, x)

    def attention(self, parameters: dict[str, torch.Tensor], name: str, x_SH: torch.Tensor) -> torch.Tensor:
        config = self.config
        heads = config.heads // self.layout.tp
        kv_heads = max(1, config.kv_heads // self.layout.tp)
        qkv = F.linear(x_SH, parameters[f"{name}.qkv.weight"], parameters.get(f"{name}.qkv.bias"))
        qkv_NSD = qkv.view(SEQUENCE, heads + 2 * kv_heads, config.head_dim).transpose(0, 1)
        q, k, v = qkv_NSD.split([heads, kv_heads, kv_heads])
        if config.query_key_norm:
            q = F.rms_norm(q, (config.head_dim,), parameters[f"{name}.query_norm.weight"], 1e-5)
            k = F.rms_norm(k, (config.head_dim,), parameters[f"{name}.key_norm.weight"], 1e-5)
        k, v = (one.repeat_interleave(heads // kv_heads, 0) for one in (k, v))
        o_NSD = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return o_NSD.transpose(0, 1).reshape(SEQUENCE, -1) @ parameters[f"{name}.output.weight"].T

    def mlp(self, parameters: dict[str, torch.Tensor], name: str, x_SH: torch.Tensor) -> torch.Tensor:
        y = F.linear(x_SH, parameters[f"{name}.up.weight"], parameters.get(f"{name}.up.bias"))
        if self.config.gated:
            gate, up = y.chunk(2, -1)
            y = F.silu(gate) * up
        else:
            y = F.gelu(y)
        return y @ parameters[f"{name}.down.weight"].T

    def add_bias(self, name: str, x: Ranks) -> Ranks:
        return self.each(lambda parameters, x: x + parameters[name] if name in parameters else x, x)

    def embed(self, tokens_S: torch.Tensor) -> Ranks:
        share = self.parameters[0]["embedding.weight"].shape[0]
        parts = []
        for rank, parameters in enumerate(self.parameters):
            local = tokens_S - rank * share
            mine = (local >= 0) & (local < share)
            parts.append(parameters["embedding.weight"][local.clamp(0, share - 1)] * mine[:, None])
        x = self.leave(parts)
        if self.config.positions == "learned":
            places = (
                torch.arange(SEQUENCE).chunk(len(x)) if self.sequence_parallel else [torch.arange(SEQUENCE)] * len(x)
            )
            x = [
                one + parameters["positions.weight"][place]
                for one, parameters, place in zip(x, self.parameters, places, strict=True)
            ]
        return x

    def loss(self, tokens_S: torch.Tensor, targets_S: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens_S)
        for layer in range(self.config.layers):
            for part, function in (("attention", self.attention), ("mlp", self.mlp)):
                name = f"layers.{layer}.{part}"
                inner = self.enter(self.norm(f"{name}_norm", x))
                summed = self.leave(self.each(lambda p, x, f=function, n=name: f(p, n, x), inner))
                bias = f"{name}.{'output' if part == 'attention' else 'down'}.bias"
                x = [one + other for one, other in zip(x, self.add_bias(bias, summed), strict=True)]
        head = "embedding.weight" if self.config.tied else "head.weight"
        inner = self.enter(self.norm("final_norm", x))
        logits = torch.cat(self.each(lambda parameters, x: x @ parameters[head].T, inner), -1)
        return F.cross_entropy(logits[:, : self.config.vocabulary], targets_S, reduction="sum")


def cut(table: ParameterTable, whole: dict[str, torch.Tensor], layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    """A rank's model parameters, cut from unsharded entries (as the model stores them)."""
    parts = {}
    for tensor in table.tensors:
        local = torch.zeros(tensor.local_shape(layout), dtype=torch.float64)
        for entry in tensor.entries:
            for box in table.local_slices(entry, layout, layout.coordinates(rank)):
                local[box.local_slices] = whole[entry.name][box.slices]
        parts[tensor.name] = local
    return parts


@pytest.mark.parametrize("layout", ["tp2", "tp2:nosp", "tp4", "tp4:nosp"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_partial_gradients_summed_by_table_equal_gradient(config: ModelConfig, layout: str):
    table, layout_ = parameter_table(config), Layout.parse(layout)
    generator = torch.Generator().manual_seed(3)
    whole = {
        entry.name: torch.randn(entry.model_shape, generator=generator, dtype=torch.float64) * 0.3
        for entry in table.entries
    }
    tokens_S, targets_S = torch.randint(VOCABULARY, (2, SEQUENCE), generator=generator)

    def gradients(layout: Layout) -> tuple[torch.Tensor, list[dict[str, torch.Tensor]]]:
        ranks = [cut(table, whole, layout, rank) for rank in range(layout.tp)]
        for parameters in ranks:
            for parameter in parameters.values():
                parameter.requires_grad_()
        loss = Group(config, layout, ranks).loss(tokens_S, targets_S)
        loss.backward()
        return loss, [
            {name: one.grad for name, one in parameters.items() if one.grad is not None} for parameters in ranks
        ]

    true_loss, (true,) = gradients(Layout())
    loss, parts = gradients(layout_)
    torch.testing.assert_close(loss, true_loss, rtol=1e-12, atol=0)

    for entry in table.entries:
        replicas, place = entry.replicas(layout_), table.tensor(entry.tensor).local_offset(entry, Layout())
        expected = true[entry.tensor][place : place + entry.model_shape[0]]
        for rank in range(layout_.tp):
            first = rank // replicas * replicas
            summed = range(first, first + replicas) if "tp" in entry.gradient_axes(layout_) else [rank]
            for box in table.local_slices(entry, layout_, {"tp": rank}):
                found = sum(parts[other][entry.tensor][box.local_slices] for other in summed)
                torch.testing.assert_close(
                    found, expected[box.slices], rtol=1e-9, atol=1e-12, msg=f"{entry.name}, rank {rank}"
                )
