"""One block of a decoder: attention and an MLP or a mixture of experts, with their norms and residual sums.

Shapes: B sequences, S tokens of a sequence, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from meshwright.model.attention import Attention
from meshwright.model.attention_inputs import AttentionInputs
from meshwright.model.axis_operations import AxisOperations
from meshwright.model.experts import Mixture
from meshwright.model.latent_attention import LatentAttention
from meshwright.model.layers import FeedForward, Linear, make_norm
from meshwright.spec.config import ModelConfig


class Block(nn.Module):
    """Transformer block: x + attention(norm(x)), then x + mlp(norm(x)), where the MLP may be a mixture of experts. Some
    model families normalise the outputs of attention and MLP, in addition to their inputs or instead of them. Some
    scale the outputs.

    `config`: model configuration; `axes`: communication of the mesh axes; `layer`: index of the block in the model;
    `options`: `device` and `dtype` of the parameters.
    """

    def __init__(self, config: ModelConfig, axes: AxisOperations, layer: int, **options: Any) -> None:
        super().__init__()
        self.attention_norm = make_norm(config, config.pre_norms, **options)
        self.attention = (LatentAttention if config.latent else Attention)(config, axes, **options)
        self.attention_post_norm = make_norm(config, config.post_norms, **options)
        self.mlp_norm = make_norm(config, config.pre_norms, **options)
        self.mlp = (Mixture if config.has_experts(layer) else FeedForward)(config, axes, **options)
        self.mlp_post_norm = make_norm(config, config.post_norms, **options)
        self.residual_scale = config.residual_scale

    def forward(
        self, x_BSH: Tensor, inputs: AttentionInputs, counted_B: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the block's output [B, S, H] for the hidden states `x_BSH`, and the load-balancing loss of its mixture
        of experts (None without experts, or without `counted_B`).

        `inputs`: positions, mask and KV cache of attention; `counted_B`: number of target tokens of each sequence."""
        x_BSH, normed_BSH = self.attend(x_BSH, inputs)
        if not isinstance(self.mlp, Mixture):
            return self.add(x_BSH, self.mlp(normed_BSH), self.mlp_post_norm), None
        y_BSH, balance = self.mlp(normed_BSH, counted_B)
        return self.add(x_BSH, y_BSH, self.mlp_post_norm), balance

    def add(self, x_BSH: Tensor, y_BSH: Tensor, norm: nn.Module | None) -> Tensor:
        """Return the residual sum x + s norm(y). x: hidden states `x_BSH`; y: output `y_BSH` of a sublayer (attention
        or MLP); s: the model's residual multiplier (1 in most families). `norm`: norm of the sublayer's output; None: y
        is added without a norm.
        """
        y_BSH = y_BSH if norm is None else norm(y_BSH)
        return x_BSH + (y_BSH if self.residual_scale == 1 else y_BSH * self.residual_scale)

    def attend(self, x_BSH: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        """Run the first half of the block on hidden states x (`x_BSH`): return (y, norm(y)), [B, S, H] each, where y =
        x + attention(norm(x)) and norm(y) is the input of the MLP. `inputs`: positions, mask and KV cache."""
        # No variable holds attention's input or output while the second norm is computed.
        y_BSH = self.attention(x_BSH if self.attention_norm is None else self.attention_norm(x_BSH), inputs)
        x_BSH = self.add(x_BSH, y_BSH, self.attention_post_norm)
        del y_BSH
        return x_BSH, x_BSH if self.mlp_norm is None else self.mlp_norm(x_BSH)

    def linear_layers(self) -> list[Linear]:
        """Return the linear layers through which every token passes: the linear layers of attention and of a dense MLP,
        without experts."""
        of_mlp = [self.mlp.up, self.mlp.down] if isinstance(self.mlp, FeedForward) else []
        return [*self.attention.linear_layers(), *of_mlp]


def compile_around_dispatch(
    run_dense: Callable[..., Any], attend: Callable[..., Any], mixture: Callable[..., Any]
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return a function with the arguments and result of `Block.forward` that runs a block in compiled parts.

    For a block without experts the function calls `run_dense` (compiled). For a block with experts it calls `attend`
    (compiled; attention and norms), then `mixture` (not compiled; the experts): torch.compile cannot trace token
    dispatch, and a graph break inside activation checkpointing would leave the whole block uncompiled.
    """

    def run(
        block: Block, x_BSH: Tensor, inputs: AttentionInputs, counted_B: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run one transformer block, with or without experts; arguments and result are those of `Block.forward`."""
        if not isinstance(block.mlp, Mixture):
            return run_dense(block, x_BSH, inputs, counted_B)
        x_BSH, normed_BSH = attend(block, x_BSH, inputs)
        y_BSH, balance = mixture(block.mlp, normed_BSH, counted_B)
        return block.add(x_BSH, y_BSH, block.mlp_post_norm), balance

    return run
