"""Floating-point operations of a model by operation, and the convention they are counted by.

Conventions in use differ by up to an eighth (causal or full attention, recomputation counted or not), so that a
utilisation without its convention says little.
"""

from __future__ import annotations

from meshwright.model.config import ModelConfig

FLOPS_CONVENTION = (
    "model FLOPs: 2 per multiply-add of matrix products, attention counted for the keys a token sees (causal, window), "
    "backward twice the forward, recomputation not counted, embedding lookup free"
)

# What is computed a second time in the backward pass. Selective: the core of attention (Korthikanti et al. 2022,
# arXiv:2205.05198, section 5), which a flash kernel's backward contains anyway. The head is never recomputed.
_RECOMPUTED: dict[str, tuple[str, ...]] = {
    "none": (),
    "selective": ("attention.scores", "attention.values"),
    "full": (
        "attention.qkv",
        "attention.scores",
        "attention.values",
        "attention.output",
        "mlp.router",
        "mlp.up",
        "mlp.down",
    ),
}


def keys_per_token(sequence: int, window: int | None = None, causal: bool = True) -> float:
    """Keys that a token of a sequence sees, on average.

    Causal without a window: (sequence + 1) / 2, which the usual "half" rounds off. Not causal: all of the sequence, or
    of the window, as if nothing were masked.
    """
    width = sequence if window is None else min(window, sequence)
    if not causal:
        return float(width)
    return (width * (width + 1) / 2 + (sequence - width) * width) / sequence


def forward_flops_per_token(config: ModelConfig, sequence: int, causal: bool = True) -> dict[str, float]:
    """Floating-point operations of one token's forward pass, by operation and summed over the layers.

    ``sequence``: tokens that attend to each other (documents in a packed row are not told apart). ``causal=False``
    counts attention as if every token saw the whole sequence, as the PaLM paper does (arXiv:2204.02311, appendix B).
    """
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layers = config.layers
    keys = sum(keys_per_token(sequence, config.layer_window(layer), causal) for layer in range(layers))
    up_matrices = 2 if config.gated else 1
    # What a token computes with: its experts and the shared one, in dense layers the one MLP.
    sparse = config.expert_layers
    width = (layers - sparse) * config.intermediate
    width += sparse * (config.experts_per_token * config.expert_intermediate + config.shared_intermediate)
    router = {"mlp.router": sparse * 2.0 * config.hidden * (config.experts + config.shared_gate)} if sparse else {}
    return {
        "attention.qkv": layers * 2.0 * config.hidden * (query + 2 * key),
        "attention.scores": 2.0 * keys * query,
        "attention.values": 2.0 * keys * query,
        "attention.output": layers * 2.0 * query * config.hidden,
        **router,
        "mlp.up": 2.0 * up_matrices * config.hidden * width,
        "mlp.down": 2.0 * width * config.hidden,
        "head": 2.0 * config.hidden * config.vocabulary,
    }


def training_flops_per_token(config: ModelConfig, sequence: int, causal: bool = True, recompute: str = "none") -> float:
    """Floating-point operations that training on one token takes: forward, and twice as many backward.

    With ``recompute`` ("selective", "full") the repeated forward operations are added, which gives hardware FLOPs;
    utilisation by ``FLOPS_CONVENTION`` leaves it at "none".
    """
    forward = forward_flops_per_token(config, sequence, causal)
    return 3 * sum(forward.values()) + sum(forward.get(operation, 0.0) for operation in _RECOMPUTED[recompute])
