"""FLOPs of each operation of a model per token in the forward pass, by which pipeline stages are balanced."""

from __future__ import annotations

from meshwright.spec.config import ModelConfig

ATTENTION_CORE = ("attention.scores", "attention.values")
"""Matmuls of two activations: backward has two input-gradient matmuls for each, and no weight gradient."""

RECOMPUTED: dict[str, tuple[str, ...]] = {
    "none": (),
    "selective": ATTENTION_CORE,
    "full": ("attention.qkv", *ATTENTION_CORE, "attention.output", "mlp.router", "mlp.up", "mlp.down"),
}
"""Operations that the backward pass recomputes, by activation checkpointing mode. Selective: the attention core
(Korthikanti et al. 2022, arXiv:2205.05198, section 5), which a flash kernel's backward recomputes anyway. The head is
never recomputed."""


MASKED_SHARE = 0.15
"""Share of tokens that a masked language model masks and its head computes (Devlin et al. 2019, arXiv:1810.04805,
section 3.1)."""


def count_predictions(config: ModelConfig, rows: int, sequence: int) -> int:
    """Return the number of positions at which the output head computes logits, for a batch of `rows` sequences of
    `sequence` tokens. A decoder computes logits at all tokens. An encoder with the masked-language-model head computes
    them at the fraction `MASKED_SHARE` of the tokens, any other encoder at one token per sequence. config:
    configuration of the model."""
    if not config.encoder:
        return rows * sequence
    return max(1, round(MASKED_SHARE * rows * sequence)) if config.head == "masked" else rows


def keys_per_token(sequence: int, window: int | None = None, causal: bool = True, chunks: bool = False) -> float:
    """Return the mean number of keys that a token attends to in a sequence of `sequence` tokens. window: sliding window
    in tokens; None: no window. causal: False: a token attends to the whole sequence (or window). chunks: True if the
    sequence is cut into chunks of `window` tokens, and a token attends only within its chunk.

    Causal without a window, the exact result is (sequence + 1) / 2, not the usual sequence / 2.
    """
    width = sequence if window is None else min(window, sequence)
    if not causal:
        return float(width)
    if chunks:
        whole, rest = divmod(sequence, width)
        return (whole * width * (width + 1) / 2 + rest * (rest + 1) / 2) / sequence
    return (width * (width + 1) / 2 + (sequence - width) * width) / sequence


def layer_flops(config: ModelConfig, layer: int, sequence: int, causal: bool = True) -> dict[str, float]:
    """Return the forward FLOPs per token of the layer with index `layer`, as {operation name ("attention.qkv",
    "mlp.up", ...): FLOPs}. config: configuration of the model; in a mixture of experts only the experts that a token
    uses count. sequence: tokens of a sequence. causal: True to count only attention scores that the causal mask does
    not hide, about half; False: to count all."""
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    keys = keys_per_token(sequence, config.layer_window(layer), causal and not config.encoder, config.window_chunks)
    up_matrices = 2 if config.gated else 1
    router, width = {}, config.intermediate
    if config.has_experts(layer):
        router = {"mlp.router": 2.0 * config.hidden * (config.experts + config.shared_gate)}
        width = config.experts_per_token * config.expert_intermediate + config.shared_intermediate
    values = config.heads * config.value_dim
    projections = config.hidden * (query + 2 * key)
    if latent := config.latent:
        products = latent.products(config.hidden, config.heads, config.head_dim).values()
        projections = sum(outputs * inputs for outputs, inputs in products)
    return {
        "attention.qkv": 2.0 * projections,
        "attention.scores": 2.0 * keys * query,
        "attention.values": 2.0 * keys * values,
        "attention.output": 2.0 * values * config.hidden,
        **router,
        "mlp.up": 2.0 * up_matrices * config.hidden * width,
        "mlp.down": 2.0 * width * config.hidden,
    }


def prediction_flops(config: ModelConfig, sequence: int) -> float:
    """Return the forward FLOPs per token of the module of multi-token prediction, with its output head; 0 without such
    a module. config: configuration of the model. sequence: tokens of a sequence."""
    if not config.prediction_layers:
        return 0.0
    layer = sum(layer_flops(config, config.layers, sequence).values())
    return layer + 4.0 * config.hidden**2 + head_flops(config, sequence)


def head_flops(config: ModelConfig, sequence: int) -> float:
    """Return the forward FLOPs per token of the matmuls of the output head, averaged over a sequence of `sequence`
    tokens. The head of an encoder computes only the masked tokens (the fraction `MASKED_SHARE`) or one position per
    sequence. config: configuration of the model."""
    if not config.encoder:
        return 2.0 * config.hidden * config.vocabulary
    share = MASKED_SHARE if config.head == "masked" else 1 / sequence
    outputs = {"masked": config.vocabulary, "classes": len(config.labels)}.get(config.head, 0)
    return share * 2.0 * config.hidden * (config.hidden + outputs)
