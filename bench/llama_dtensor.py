"""The peer of the tensor-parallel races: a Llama in plain PyTorch, split as torchtitan's users split theirs.

Separate projections, `nn.RMSNorm`, SDPA, the logits of all tokens at once; `split` is torchtitan's plan for Llama 3
(ColwiseParallel, RowwiseParallel, SequenceParallel, the loss on a split vocabulary), `shard` its `fully_shard` of each
block and of the whole. `load` gives it the values that our model of the same shape begins with.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from meshwright.model.initialise import initialise
from meshwright.model.transformer import Transformer
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table
from peers import rotate


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.size = config.head_dim
        self.wq = nn.Linear(config.hidden, config.heads * self.size, bias=False)
        self.wk = nn.Linear(config.hidden, config.kv_heads * self.size, bias=False)
        self.wv = nn.Linear(config.hidden, config.kv_heads * self.size, bias=False)
        self.wo = nn.Linear(config.heads * self.size, config.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, sequence, _ = x.shape
        # -1: the number of local heads depends on the sharding of the products.
        q, k, v = (w(x).view(batch, sequence, -1, self.size).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        out = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, sequence, -1))


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.w2 = nn.Linear(config.intermediate, config.hidden, bias=False)
        self.w3 = nn.Linear(config.hidden, config.intermediate, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(config), FeedForward(config)
        self.attention_norm = nn.RMSNorm(config.hidden, config.norm_epsilon)
        self.ffn_norm = nn.RMSNorm(config.hidden, config.norm_epsilon)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, config: ModelConfig, sequence: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleDict({str(layer): Block(config) for layer in range(config.layers)})
        self.norm = nn.RMSNorm(config.hidden, config.norm_epsilon)
        self.output = nn.Linear(config.hidden, config.vocabulary, bias=False)
        half = config.head_dim // 2
        angles = torch.outer(torch.arange(sequence), config.rope_theta ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x, self.cos, self.sin)
        return self.output(self.norm(x))


def load(model: Llama, config: ModelConfig, seed: int) -> None:
    """Give the peer, before it is split, the values of ours."""
    ours = Transformer(config, dtype=torch.float32)
    initialise(ours, parameter_table(config), seed)
    theirs = model.state_dict()
    values = {name: value.detach() for name, value in ours.named_parameters()}
    theirs["tok_embeddings.weight"].copy_(values["embedding.weight"])
    theirs["norm.weight"].copy_(values["final_norm.weight"])
    theirs["output.weight"].copy_(values["head.weight"])
    heads = [config.heads * config.head_dim, config.kv_heads * config.head_dim, config.kv_heads * config.head_dim]
    for layer in range(config.layers):
        mine, block = f"layers.{layer}.", f"layers.{layer}."
        fused = values[mine + "attention.qkv.weight"].split(heads)
        for name, value in zip(("wq", "wk", "wv"), fused, strict=True):
            theirs[f"{block}attention.{name}.weight"].copy_(value)
        for name, value in zip(("w1", "w3"), values[mine + "mlp.up.weight"].chunk(2), strict=True):
            theirs[f"{block}feed_forward.{name}.weight"].copy_(value)
        theirs[block + "attention.wo.weight"].copy_(values[mine + "attention.output.weight"])
        theirs[block + "feed_forward.w2.weight"].copy_(values[mine + "mlp.down.weight"])
        theirs[block + "attention_norm.weight"].copy_(values[mine + "attention_norm.weight"])
        theirs[block + "ffn_norm.weight"].copy_(values[mine + "mlp_norm.weight"])


def split(model: Llama, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """torchtitan's plan for Llama 3 with the loss on a split vocabulary; without sequence parallelism the norms and the
    residuals are whole on every rank."""
    between: Any = Shard(1) if sequence_parallel else Replicate()
    norm = {"norm": SequenceParallel()} if sequence_parallel else {}
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            **norm,
            "output": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for block in model.layers.values():
        plan: dict[str, Any] = {
            "attention": PrepareModuleInput(
                input_layouts=(between, None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=between),
            "feed_forward": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=between),
            "feed_forward.w3": ColwiseParallel(),
        }
        if sequence_parallel:
            plan |= {"attention_norm": SequenceParallel(), "ffn_norm": SequenceParallel()}
        parallelize_module(block, mesh, plan)


def shard(model: Llama, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """fully_shard per block and around the rest, parameters in `dtype` and gradients summed in float32."""
    options: dict[str, Any] = {"mesh": mesh}
    if dtype != torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.layers.values():
        fully_shard(block, **options)
    fully_shard(model, **options)
