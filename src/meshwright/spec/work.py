"""How much arithmetic each part of a model is, a token and forward pass: what stages are balanced by."""

from __future__ import annotations

from meshwright.spec.config import ModelConfig

ATTENTION_CORE = ("attention.scores", "attention.values")
"""Products of activations alone: on the way back each is two products, and none is a weight's gradient."""

RECOMPUTED: dict[str, tuple[str, ...]] = {
    "none": (),
    "selective": ATTENTION_CORE,
    "full": ("attention.qkv", *ATTENTION_CORE, "attention.output", "mlp.router", "mlp.up", "mlp.down"),
}
"""What is computed a second time in the backward pass. Selective: the core of attention (Korthikanti et al. 2022,
arXiv:2205.05198, section 5), which a flash kernel's backward contains anyway. The head is never recomputed."""


MASKED_SHARE = 0.15
"""Of the tokens of a masked language model (Devlin et al. 2019, arXiv:1810.04805, section 3.1): only these go through
the head."""


def predictions(config: ModelConfig, rows: int, sequence: int) -> int:
    """What goes through the head of rows of `sequence` tokens: each token, of an encoder each masked one (as many as
    `MASKED_SHARE` says) or each row."""
    if not config.encoder:
        return rows * sequence
    return max(1, round(MASKED_SHARE * rows * sequence)) if config.head == "masked" else rows


def keys_per_token(sequence: int, window: int | None = None, causal: bool = True) -> float:
    """Keys that a token of a sequence sees, on average.

    Causal without a window: (sequence + 1) / 2, which the usual "half" rounds off. Not causal: all of the sequence, or
    of the window, as if nothing were masked.
    """
    width = sequence if window is None else min(window, sequence)
    if not causal:
        return float(width)
    return (width * (width + 1) / 2 + (sequence - width) * width) / sequence


def layer_flops(config: ModelConfig, layer: int, sequence: int, causal: bool = True) -> dict[str, float]:
    """Floating-point operations of one layer, by operation. A token of a mixture computes with the experts that it
    chooses and the shared one."""
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    keys = keys_per_token(sequence, config.layer_window(layer), causal and not config.encoder)
    up_matrices = 2 if config.gated else 1
    router, width = {}, config.intermediate
    if config.has_experts(layer):
        router = {"mlp.router": 2.0 * config.hidden * (config.experts + config.shared_gate)}
        width = config.experts_per_token * config.expert_intermediate + config.shared_intermediate
    return {
        "attention.qkv": 2.0 * config.hidden * (query + 2 * key),
        "attention.scores": 2.0 * keys * query,
        "attention.values": 2.0 * keys * query,
        "attention.output": 2.0 * query * config.hidden,
        **router,
        "mlp.up": 2.0 * up_matrices * config.hidden * width,
        "mlp.down": 2.0 * width * config.hidden,
    }


def head_flops(config: ModelConfig, sequence: int) -> float:
    """Floating-point operations of the head's products; of an encoder for the part of a row's tokens that go through
    it."""
    if not config.encoder:
        return 2.0 * config.hidden * config.vocabulary
    share = MASKED_SHARE if config.head == "masked" else 1 / sequence
    outputs = {"masked": config.vocabulary, "classes": len(config.labels)}.get(config.head, 0)
    return share * 2.0 * config.hidden * (config.hidden + outputs)
