"""Activation memory of a layer under other engines, as published, and the bytes of model states per parameter.

All figures are bytes, with two per number of a 16-bit type. These are closed forms from papers, not measured here;
those of the engine `meshwright` are in `saved.py`.

Megatron-LM (Korthikanti et al. 2022, arXiv:2205.05198, section 4): fused kernels that save their inputs. For a GPT (f =
4h, multi-head, dropout, no flash attention) the sum is sbh (34 + 5as/h), and with tensor and sequence parallelism its
published parts (equations 1, 2, 4 and 6); grouped queries, SwiGLU and flash attention are counted in the same way.
Eager PyTorch, as in Hugging Face and torchtitan: counted from the operations; float32 norms, all operands of products,
norms and activations saved. torchtitan's selective recomputation "op" saves every second matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from meshwright.planner.cost.micro_batch import MicroBatch, Number

Saved = Iterator[tuple[str, Number]]


def published_layer(batch: MicroBatch, mixture: bool = False) -> dict[str, Number]:
    """Return {operation: bytes} of the activations that one layer saves on one rank under the micro-batch's engine, as
    published; Megatron-LM's for an engine without published figures. mixture: True if the layer's MLP is a mixture of
    experts."""
    return dict(_ENGINES.get(batch.engine.name, _megatron)(batch, mixture))


def _mlp(batch: MicroBatch, mixture: bool) -> tuple[Number, Number]:
    """Return (MLP inputs of a token: one for each chosen expert, hidden features of these MLPs together on a rank).
    mixture: the MLP is a mixture of experts."""
    config = batch.config
    if not mixture:
        return 1.0, config.intermediate / batch.tp
    expert = config.experts_per_token * config.expert_intermediate / (batch.etp if batch.expert_parallel else batch.tp)
    return config.experts_per_token + (config.shared_intermediate > 0), expert + config.shared_intermediate / batch.tp


def _megatron(batch: MicroBatch, mixture: bool) -> Saved:
    """Yield (operation, bytes) of the activations that one Megatron-LM layer saves on one rank. mixture: the layer's
    MLP is a mixture of experts."""
    config, layout, t = batch.config, batch.layout, batch.tp
    tokens = batch.rows * batch.sequence / batch.cp
    h, query, key = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    stream = 2 * tokens * h / (t if layout.tensor_sequence_parallel else 1)
    if layout.recompute == "full":
        yield "layer.input", stream
        return
    yield "attention_norm.input", stream
    yield "attention.qkv.input", stream
    yield "attention.query_key", 2 * tokens * (query + key) / t
    yield "attention.value", 2 * tokens * key / t
    if batch.kernel == "scores" and layout.recompute == "none":
        scores = config.heads * batch.sequence * tokens / t
        yield "attention.softmax", 2 * scores
        if batch.engine.dropout:
            yield "attention.dropout_mask", scores
            yield "attention.dropout", 2 * scores
    yield "attention.output.input", 2 * tokens * query / t
    if batch.engine.dropout:
        yield "attention.output.dropout_mask", stream / 2
    yield "mlp_norm.input", stream
    copies, columns = _mlp(batch, mixture)
    yield "mlp.up.input", copies * stream
    yield "mlp.activation.input", 2 * tokens * columns * (2 if config.gated else 1)
    yield "mlp.down.input", 2 * tokens * columns
    if batch.engine.dropout:
        yield "mlp.dropout_mask", stream / 2


def _eager(batch: MicroBatch, mixture: bool, every_second: bool = False) -> Saved:
    """Yield (operation, bytes) of the activations that one layer of eager PyTorch operations saves on one rank.
    mixture: the layer's MLP is a mixture of experts; every_second: selective recompute saves every second matrix
    product."""
    config, layout, t = batch.config, batch.layout, batch.tp
    tokens = batch.rows * batch.sequence / batch.cp
    h, query, key = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
    stream = 2 * tokens * h / (t if layout.tensor_sequence_parallel else 1)
    copies, columns = _mlp(batch, mixture)
    if layout.recompute == "full":
        yield "layer.input", stream
        return
    if layout.recompute == "selective" and every_second and not mixture:
        # The block's input, every second product (queries, values, half of up and gate, down) and the attention core
        # with its log-sum-exp.
        yield "layer.input", stream
        yield "attention.query_and_value", 2 * tokens * (query + key) / t
        yield "attention.output.input", (2 * query + 4 * config.heads) * tokens / t
        yield "mlp.up.output", 2 * tokens * columns
        if batch.engine.fusion != "compiled":
            yield "mlp.down.output", stream
        return
    for name in ("attention_norm", "mlp_norm"):
        yield f"{name}.input_and_output", 2 * stream
        yield f"{name}.in_float32", 3 * stream
    yield "attention.qkv.output", 2 * tokens * (query + 2 * key) / t
    yield "attention.rotated", 2 * tokens * (query + key) / t
    if config.query_key_norm:
        yield "attention.query_key_norm", 3 * 2 * tokens * (query + key) / t
    if batch.kernel == "scores" and layout.recompute == "none":
        yield "attention.scores", 5 * config.heads * batch.sequence * tokens / t
    yield "attention.output.input", 2 * tokens * query / t
    if mixture:
        yield "mlp.dispatched", copies * stream
    yield "mlp", 2 * tokens * columns * (4 if config.gated else 2)


def _eight_bit(batch: MicroBatch, mixture: bool) -> Saved:
    """Yield (operation, bytes) of the activations that one layer of DeepSeek-V3 saves on one rank in fp8 training
    (arXiv:2412.19437): norms, SwiGLU and the up-projections of latent attention are recomputed (section 3.2.3), inputs
    of linear layers and of SwiGLU are saved in 8 bits, that of attention's output projection in 12 (section 3.3.3)."""
    config, tokens, recompute = batch.config, batch.rows * batch.sequence / batch.cp, batch.layout.recompute
    yield "attention_norm.input", 2 * tokens * config.hidden
    if recompute == "full":
        return
    latent = config.latent
    vectors = (latent.query_rank or 0) + latent.cached_dim if latent else 3 * config.heads * config.head_dim
    yield "attention.latents", tokens * vectors
    yield "attention.output.input", (1.5 * config.value_dim + 4) * tokens * config.heads  # and the log-sum-exp
    yield "mlp_norm.input", 2 * tokens * config.hidden
    copies, columns = _mlp(batch, mixture)
    yield "mlp.up.input", tokens * copies * config.hidden
    yield "mlp.activation.input", 2 * tokens * columns
    if recompute == "none":
        yield "attention.query_key_value", 2 * tokens * config.heads * (2 * config.head_dim + config.value_dim)
        yield "mlp.down.input", tokens * columns


_ENGINES: dict[str, Callable[[MicroBatch, bool], Saved]] = {
    "torchtitan": partial(_eager, every_second=True), "llm-foundry": _eager, "nanotron": _eager, "hai-llm": _eight_bit,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes per parameter. weights, gradients: of weights and of gradients; optimizer: of optimizer state, fp32 master
    weights included."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Sum of all bytes per parameter."""
        return self.weights + self.gradients + self.optimizer

    def sharded(self, zero: int, ranks: Number) -> tuple[Number, Number, Number]:
        """Return the bytes per parameter of (weights, gradients, optimizer state) on each of `ranks` ranks over which
        ZeRO stage `zero` shards."""
        each = self.weights, self.gradients, self.optimizer
        return tuple(size / (ranks if zero >= level else 1) for size, level in zip(each, (3, 2, 1), strict=True))  # type: ignore[return-value]


def state_bytes(zero: int, ranks: int, narrow: bool = True, wide_gradients: bool = False) -> StateBytes:
    """Return Adam's bytes per parameter on each of `ranks` ranks under ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054,
    section 3.1, figure 1). zero: ZeRO stage, 0 to 3.

    narrow: mixed precision, 2 + 2 + 12 bytes for weight, gradient and optimizer state, or 2 + 4 + 12 with
    wide_gradients (float32); else float32, 4 + 4 + 8.
    """
    each = StateBytes(2.0, 4.0 if wide_gradients else 2.0, 12.0) if narrow else StateBytes(4.0, 4.0, 8.0)
    return StateBytes(*each.sharded(zero, ranks))
