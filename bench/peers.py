"""The peers of the training benchmarks, each in its usual style.

`plain_model` is a hand-written Llama in the manner of nanoGPT: nn.Linear, SDPA, autocast to bf16, whole-model
torch.compile, fused AdamW. `hugging_face_config` is the same shape for the transformers Trainer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

SHAPE = {
    "vocabulary": 8192,
    "hidden": 512,
    "layers": 8,
    "heads": 8,
    "kv_heads": 8,
    "intermediate": 1408,
    "sequence": 512,
    "batch": 8,
}
"""30 M parameters: 29.9 M with a tied embedding."""


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, intermediate: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, hidden // heads
        self.norm1, self.norm2 = RMSNorm(hidden), RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, intermediate, bias=False)
        self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, sequence, hidden = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, sequence, -1, self.head_dim).transpose(1, 2)
        q, k, v = parts.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, sequence, hidden))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


class PlainModel(nn.Module):
    def __init__(self, shape: dict[str, int]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape["vocabulary"], shape["hidden"])
        self.blocks = nn.ModuleList(
            Block(shape["hidden"], shape["heads"], shape["kv_heads"], shape["intermediate"])
            for _ in range(shape["layers"])
        )
        self.norm = RMSNorm(shape["hidden"])
        self.head = nn.Linear(shape["hidden"], shape["vocabulary"], bias=False)
        self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        half = shape["hidden"] // shape["heads"] // 2
        angles = torch.outer(torch.arange(shape["sequence"]), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))


def hugging_face_config(shape: dict[str, int]):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=shape["vocabulary"],
        hidden_size=shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        intermediate_size=shape["intermediate"],
        max_position_embeddings=shape["sequence"],
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
    )


def random_batches(shape: dict[str, int], seed: int = 0):
    """Endless (tokens, targets) of a skewed unigram distribution, the same for every contender."""
    generator = torch.Generator().manual_seed(seed)
    weights = 1.0 / torch.arange(1, shape["vocabulary"] + 1)
    while True:
        drawn = torch.multinomial(
            weights, shape["batch"] * (shape["sequence"] + 1), replacement=True, generator=generator
        ).view(shape["batch"], shape["sequence"] + 1)
        yield drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
