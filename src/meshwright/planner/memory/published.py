"""Activation memory of a layer under other engines, as published, and the arithmetic of model states.

Sizes: s tokens in a row, b rows, h hidden, a heads, f MLP columns; t ranks of tensor parallelism. Bytes, with two for a
number in the narrow type. These are closed forms from papers, not measured here; our own engine's are in `saved.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.names import unknown
from meshwright.spec.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of a layer and a micro-batch, as input of published closed forms for activation memory.

    rows, sequence: sequences of the micro-batch, and tokens of each; flash: attention scores are never written to
    memory; dropout: dropout masks are saved, one byte per element; mixture: the layer's MLP is a mixture of experts.
    """

    rows: int
    sequence: int
    config: ModelConfig
    layout: Layout
    flash: bool = True
    dropout: bool = False
    mixture: bool = False
    compiled: bool = False

    @property
    def mlp(self) -> tuple[float, float]:
        """Pair: number of MLP inputs per token (one for each chosen expert), and total hidden columns of these MLPs on
        a rank."""
        config, layout = self.config, self.layout
        if not self.mixture:
            return 1.0, config.intermediate / layout.tp
        cut = layout.etp if layout.expert_parallel else layout.tp
        columns = config.experts_per_token * config.expert_intermediate / cut + config.shared_intermediate / layout.tp
        return config.experts_per_token + (config.shared_intermediate > 0), columns


class PublishedEngine(Protocol):
    """Interface of a training engine whose saved activations are published. name: such as "megatron"; source: the
    publication."""

    name: str
    source: str

    def kept(self, shape: LayerShape) -> Iterator[tuple[str, float]]:
        """Yield (operation, bytes) of the activations that one layer saves on one rank. shape: sizes of layer and
        micro-batch."""


class Megatron:
    """Activation memory of Megatron-LM's transformer layer: fused kernels that save their inputs in the 16-bit type.

    For a GPT (f = 4h, multi-head, dropout, no flash attention) the sum is sbh (34 + 5as/h), and with tensor and
    sequence parallelism its published parts (Korthikanti et al. 2022, arXiv:2205.05198, equations 1, 2, 4 and 6).
    Grouped queries, SwiGLU and flash attention are counted in the same way.
    """

    name = "megatron"
    source = "Korthikanti et al. 2022, arXiv:2205.05198, section 4, equations 1 to 6"

    def kept(self, shape: LayerShape) -> Iterator[tuple[str, float]]:
        """Yield (operation, bytes) of the activations that one Megatron-LM layer saves on one rank. shape: sizes of
        layer and micro-batch."""
        config, layout = shape.config, shape.layout
        t = layout.tp
        whole = t if t > 1 and layout.tensor_sequence_parallel else 1  # what only sequence parallelism cuts
        tokens = shape.rows * shape.sequence / layout.cp
        h, query, key = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
        if layout.recompute == "full":
            yield "layer.input", 2 * tokens * h / whole
            return
        yield "attention_norm.input", 2 * tokens * h / whole
        yield "attention.qkv.input", 2 * tokens * h / whole
        yield "attention.query_key", 2 * tokens * (query + key) / t
        yield "attention.value", 2 * tokens * key / t
        if not shape.flash and layout.recompute == "none":
            scores = config.heads * shape.sequence * tokens / t
            yield "attention.softmax", 2 * scores
            if shape.dropout:
                yield "attention.dropout_mask", scores
                yield "attention.dropout", 2 * scores
        yield "attention.output.input", 2 * tokens * query / t
        if shape.dropout:
            yield "attention.output.dropout_mask", tokens * h / whole
        yield "mlp_norm.input", 2 * tokens * h / whole
        copies, columns = shape.mlp
        yield "mlp.up.input", 2 * tokens * copies * h / whole
        yield "mlp.activation.input", 2 * tokens * columns * (2 if config.gated else 1)
        yield "mlp.down.input", 2 * tokens * columns
        if shape.dropout:
            yield "mlp.dropout_mask", tokens * h / whole


class TorchEager:
    """Activation memory of a Llama layer of eager PyTorch operations, as in Hugging Face and torchtitan: float32 norms,
    all SwiGLU operands saved.

    every_second: True if selective recomputation is torchtitan's "op" (every second matrix product is saved).
    """

    name = "torchtitan"
    source = "counted from the operations; an operand of every product, norm and activation"
    every_second = True

    def kept(self, shape: LayerShape) -> Iterator[tuple[str, float]]:
        """Yield (operation, bytes) of the activations that one eager PyTorch layer saves on one rank. shape: sizes of
        layer and micro-batch."""
        config, layout = shape.config, shape.layout
        t = layout.tp
        whole = t if t > 1 and layout.tensor_sequence_parallel else 1
        tokens = shape.rows * shape.sequence / layout.cp
        h, query, key = config.hidden, config.heads * config.head_dim, config.kv_heads * config.head_dim
        if layout.recompute == "full":
            yield "layer.input", 2 * tokens * h / whole
            return
        copies, columns = shape.mlp
        if layout.recompute == "selective" and self.every_second and not shape.mixture:
            # The block's input, every second product (queries, values, half of the MLP's way up, its way down) and the
            # core of attention, with the logarithm of each row's sum.
            yield "layer.input", 2 * tokens * h / whole
            yield "attention.query_and_value", 2 * tokens * (query + key) / t
            yield "attention.output.input", (2 * query + 4 * config.heads) * tokens / t
            yield "mlp.up.output", 2 * tokens * columns
            if not shape.compiled:
                yield "mlp.down.output", 2 * tokens * h / whole
            return
        for name in ("attention_norm", "mlp_norm"):
            yield f"{name}.input_and_output", 2 * 2 * tokens * h / whole
            yield f"{name}.in_float32", 3 * 2 * tokens * h / whole
        yield "attention.qkv.output", 2 * tokens * (query + 2 * key) / t
        yield "attention.rotated", 2 * tokens * (query + key) / t
        if config.query_key_norm:
            yield "attention.query_key_norm", 3 * 2 * tokens * (query + key) / t
        if not shape.flash and layout.recompute == "none":
            yield "attention.scores", 5 * config.heads * shape.sequence * tokens / t
        yield "attention.output.input", 2 * tokens * query / t
        if shape.mixture:
            yield "mlp.dispatched", 2 * tokens * copies * h / whole
        yield "mlp", 2 * tokens * columns * (4 if config.gated else 2)


class Foundry(TorchEager):
    """Activation memory of a layer of MosaicML's llm-foundry (MPT): eager PyTorch operations under FSDP."""

    name = "llm-foundry"
    every_second = False


class Nanotron(TorchEager):
    """Activation memory of a layer of nanotron: eager PyTorch operations, whole blocks or nothing recomputed."""

    name = "nanotron"
    every_second = False


class HaiLlm:
    """Activation memory of a layer of DeepSeek-V3 in fp8 training: RMS norms, SwiGLU and the up-projections of latent
    attention are recomputed (section 3.2.3), inputs of linear layers and of SwiGLU are saved in 8 bits, that of
    attention's output projection in 12 (section 3.3.3)."""

    name = "hai-llm"
    source = "arXiv:2412.19437, sections 3.2.3 and 3.3.3"

    def kept(self, shape: LayerShape) -> Iterator[tuple[str, float]]:
        """Yield (operation, bytes) of the activations that one layer saves on one rank. shape: sizes of layer and
        micro-batch, without tp."""
        config, tokens = shape.config, shape.rows * shape.sequence / shape.layout.cp
        yield "attention_norm.input", 2 * tokens * config.hidden
        if shape.layout.recompute == "full":
            return
        latent = config.latent
        vectors = (latent.query_rank or 0) + latent.cached_dim if latent else 3 * config.heads * config.head_dim
        yield "attention.latents", tokens * vectors
        yield "attention.output.input", (1.5 * config.value_dim + 4) * tokens * config.heads  # and the log-sum-exp
        yield "mlp_norm.input", 2 * tokens * config.hidden
        copies, columns = shape.mlp
        yield "mlp.up.input", tokens * copies * config.hidden
        yield "mlp.activation.input", 2 * tokens * columns
        if shape.layout.recompute == "none":
            yield "attention.query_key_value", 2 * tokens * config.heads * (2 * config.head_dim + config.value_dim)
            yield "mlp.down.input", tokens * columns


PUBLISHED: dict[str, PublishedEngine] = {
    engine.name: engine for engine in (Megatron(), TorchEager(), Foundry(), Nanotron(), HaiLlm())
}


def published_layer(engine: str, shape: LayerShape) -> dict[str, float]:
    """Return the bytes of the activations that one layer saves, by operation. engine: such as "megatron"; shape: sizes
    of layer and micro-batch. Raises `UserError` for an engine without published figures."""
    if engine not in PUBLISHED:
        raise UserError(unknown("engine", engine, PUBLISHED))
    return dict(PUBLISHED[engine].kept(shape))


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes per parameter of weights, gradients and optimizer state (float32 master weights included)."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Sum of all bytes per parameter."""
        return self.weights + self.gradients + self.optimizer


def state_bytes(zero: int, ranks: int, narrow: bool = True, wide_gradients: bool = False) -> StateBytes:
    """Return Adam's bytes per parameter on each of `ranks` ranks under ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054,
    section 3.1, figure 1). zero: ZeRO stage, 0 to 3.

    narrow: mixed precision, 2 + 2 + 12 bytes for weight, gradient and optimizer state, or 2 + 4 + 12 with
    wide_gradients (float32); else float32, 4 + 4 + 8.
    """
    weights, gradients, optimizer = (2.0, 4.0 if wide_gradients else 2.0, 12.0) if narrow else (4.0, 4.0, 8.0)
    return StateBytes(
        weights / (ranks if zero == 3 else 1), gradients / (ranks if zero >= 2 else 1),
        optimizer / (ranks if zero >= 1 else 1),
    )  # fmt: skip
