"""Model FLOPs of a token by operation, and the convention by which they are counted.

Conventions in use differ by up to an eighth (causal or full attention, recomputation counted or not), so that a
utilisation without its convention says little.
"""

from __future__ import annotations

from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table
from meshwright.spec.work import ATTENTION_CORE, RECOMPUTED, head_flops, keys_per_token, layer_flops

__all__ = ["FLOPS_CONVENTION", "forward_flops_per_token", "keys_per_token", "training_flops_per_token"]

FLOPS_CONVENTION = (
    "model FLOPs: 2 per multiply-add of matrix products, attention counted for the keys a token sees (causal, window), "
    "backward twice the forward, without weight gradients of frozen parameters, recomputation not counted, embedding "
    "lookup free"
)


def forward_flops_per_token(config: ModelConfig, sequence: int, causal: bool = True) -> dict[str, float]:
    """Return the floating-point operations of one token's forward pass, by operation, summed over the layers.

    sequence: number of tokens that attend to each other (documents in a packed sequence are not told apart).
    causal=False counts attention as if every token saw the whole sequence, as the PaLM paper does (arXiv:2204.02311,
    appendix B).
    """
    total: dict[str, float] = {}
    for layer in range(config.layers):
        for operation, flops in layer_flops(config, layer, sequence, causal).items():
            total[operation] = total.get(operation, 0.0) + flops
    return total | {"head": head_flops(config, sequence)}


def training_flops_per_token(config: ModelConfig, sequence: int, causal: bool = True, recompute: str = "none") -> float:
    """Return the floating-point operations that training on one token takes: forward, and twice as many backward; as
    many as forward of products of frozen weights.

    sequence: tokens that attend to each other; causal: each sees only those before it. With recompute ("selective",
    "full") the repeated forward operations are added, which gives hardware FLOPs; utilisation by `FLOPS_CONVENTION`
    leaves it at "none".
    """
    forward = forward_flops_per_token(config, sequence, causal)
    repeated = sum(forward.get(operation, 0.0) for operation in RECOMPUTED[recompute])
    if config.adapter is None:
        return 3 * sum(forward.values()) + repeated
    core = sum(forward[operation] for operation in ATTENTION_CORE)
    trained = sum(2.0 * entry.numel * entry.active for entry in parameter_table(config).trained.entries)
    return 2 * sum(forward.values()) + core + 3 * trained + repeated
