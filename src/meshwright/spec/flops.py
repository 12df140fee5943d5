"""Model FLOPs of a token by operation, and the convention by which they are counted.

Conventions in use differ by up to an eighth (causal or full attention, recomputation counted or not), so an MFU needs
its convention stated.
"""

from __future__ import annotations

from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table
from meshwright.spec.work import ATTENTION_CORE, RECOMPUTED, head_flops, layer_flops, prediction_flops

FLOPS_CONVENTION = (
    "model FLOPs: 2 per multiply-add of matrix products, attention counted for the keys a token sees (causal, window), "
    "backward twice the forward, without weight gradients of frozen parameters, recomputation not counted, embedding "
    "lookup free"
)


def forward_flops_per_token(config: ModelConfig, sequence: int, causal: bool = True) -> dict[str, float]:
    """Return {operation: FLOPs of one token in the forward pass, summed over all layers}.

    sequence: number of tokens that attend to each other; documents packed into one sequence are not distinguished.
    causal: True if a token attends only to tokens before it; False counts attention over the whole sequence, as the
    PaLM paper does (arXiv:2204.02311, appendix B)."""
    total: dict[str, float] = {}
    for layer in range(config.layers):
        for operation, flops in layer_flops(config, layer, sequence, causal).items():
            total[operation] = total.get(operation, 0.0) + flops
    return total | {"head": head_flops(config, sequence)}


def training_flops_per_token(config: ModelConfig, sequence: int, causal: bool = True, recompute: str = "none") -> float:
    """Return the FLOPs of training on one token: once those of the forward, and twice as many for the backward (once
    for matrix products with frozen weights, which have no weight gradient).

    sequence: tokens that attend to each other; causal: True if a token attends only to tokens before it. recompute:
    "none" for model FLOPs, as in `FLOPS_CONVENTION`. With "selective" or "full" the repeated forward is added, which
    gives hardware FLOPs."""
    forward = forward_flops_per_token(config, sequence, causal)
    repeated = sum(forward.get(operation, 0.0) for operation in RECOMPUTED[recompute])
    if config.adapter is None:
        return 3 * (sum(forward.values()) + prediction_flops(config, sequence)) + repeated
    core = sum(forward[operation] for operation in ATTENTION_CORE)
    trained = sum(2.0 * entry.numel * entry.active for entry in parameter_table(config).trained.entries)
    return 2 * sum(forward.values()) + core + 3 * trained + repeated
