"""Inputs of attention layers besides the hidden states: rotary positions, attention masks, the KV cache.

Shapes: B sequences, S tokens of a sequence (new ones, with a cache), N query heads, K key-value heads, D head size, R
rotated features of a head.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from meshwright.model.axis_operations import ContextOperations
from meshwright.model.documents import ONE_DOCUMENT, Documents
from meshwright.model.rope import RotaryTable, TemperatureTable, make_table
from meshwright.model.scaled_dot_product import AttentionMask, choose_mask_form
from meshwright.spec.config import ModelConfig
from meshwright.spec.rope_scaling import Rotation, Temperature

Rotated = tuple[Tensor, Tensor | None] | None
"""Rotary cosine and sine of each token, [B or 1, 1, S, R/2] each; factors on its queries [B or 1, 1, S, 1] and None;
None without either."""


class AttentionCache(Protocol):
    """Interface of a KV cache of all attention layers. It stores the keys and values of new tokens, and computes the
    attention of new tokens to the cached tokens and to themselves.

    length: number of cached tokens of each sequence. Position IDs of new tokens start at `length`, unless the caller
    passes other position IDs."""

    length: int

    def attend(
        self, layer: int, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor | None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Store the keys `k_BKSD` and values `v_BKSD` of S new tokens of each sequence in the cache of layer number
        `layer`. Return the causal attention [B, N, S, D] of the new queries `q_BNSD` to the cached and the new tokens,
        within the layer's sliding window. `v_BKSD` None: the keys are the values too, stored once (latent attention).

        `sinks`: attention-sink score of each query head [N]; None: none."""

    def advance(self, tokens: int) -> None:
        """Add `tokens`, the number of new tokens of each sequence, to `length`, the number of cached tokens. Called
        when all layers have stored the new keys and values."""


class TokenInput(NamedTuple):
    """Tokens of a forward pass, B sequences of S tokens on this rank.

    `tokens_BS`: token IDs; `documents`: document boundaries in packed sequences; `cache`: KV cache of the preceding
    tokens (None: none); `positions_BS`: position IDs; None: 0, 1, 2 ... within each document, or continuing after the
    cached tokens."""

    tokens_BS: Tensor
    documents: Documents = ONE_DOCUMENT
    cache: AttentionCache | None = None
    positions_BS: Tensor | None = None


class AttentionInputs(NamedTuple):
    """Inputs of one attention layer besides the hidden states.

    `rotation`: rotary cosine and sine of each token; None with learned positions. `visible`: attention mask; in a
    decoder None is plain causal, in an encoder unmasked. `cache`: KV cache, in which the new keys and values are stored
    under the layer number `layer`; attention then covers the cached tokens too, and `visible` is ignored."""

    rotation: Rotated
    visible: AttentionMask
    cache: AttentionCache | None = None
    layer: int = 0


class AttentionInputBuilder:
    """Builder of the attention inputs of a decoder's layers, with the tables of rotary angles.

    `config`: model configuration; `context`: communication of context parallelism, which makes the masks; `dtype`:
    dtype of the model. Attribute `served_length`: tokens of the longest sequence of a server, by which LongRoPE chooses
    its factors; None: LongRoPE chooses them for each document by the document's length."""

    def __init__(self, config: ModelConfig, context: ContextOperations, dtype: torch.dtype) -> None:
        self._config = config
        self._context = context
        self._dtype = dtype
        self.served_length: int | None = None
        self.tables: dict[Rotation | Temperature, RotaryTable | TemperatureTable] = {}

    def build(self, layers: Iterable[int], given: TokenInput) -> dict[int, AttentionInputs]:
        """Return {layer: attention inputs} for the tokens `given` and each of `layers`. Layers with the same window
        share a mask, layers with the same rotary settings share cosine and sine."""
        tokens_BS, documents, cache, positions_BS = given
        sequence = tokens_BS.shape[1]
        cached = 0 if cache is None else cache.length
        if positions_BS is not None:
            stop = int(positions_BS.max()) + 1  # only here must the host wait for a GPU
        elif (positions_BS := documents.positions_BS()) is not None:
            stop = sequence * self._context.size
        else:
            stop = cached + sequence
        masks: dict[int | None, AttentionMask] = {}
        rotations: dict[Rotation | Temperature | None, Rotated] = {None: None}
        inputs = {}
        for layer in layers:
            window = self._config.layer_window(layer)
            if cache is None and window not in masks:
                masks[window] = self._make_mask(window, tokens_BS, documents)
            turn = self._config.layer_positions(layer)
            if turn is not None and turn not in rotations:
                table = self.tables.setdefault(turn, make_table(turn, self._dtype, self.served_length))
                rotations[turn] = table.look_up(positions_BS, cached, stop, tokens_BS.device, documents)
            number = 0 if cache is None else layer  # one number without a cache: all layers share a compiled graph
            inputs[layer] = AttentionInputs(rotations[turn], masks.get(window), cache, number)
        return inputs

    def _make_mask(self, window: int | None, tokens_BS: Tensor, documents: Documents) -> AttentionMask:
        """Return the attention mask of the layers with the sliding window `window` (tokens; None: none), in the format
        that their attention kernel reads. In models with chunked attention `window` is the size of the chunks.

        `tokens_BS`: token IDs; `documents`: document boundaries."""
        config, context, device = self._config, self._context, tokens_BS.device
        assert context.size == 1 or documents.indices_C is not None, "context parallelism needs indices_C"
        rows, tokens = tokens_BS.shape
        if window is not None and config.window_chunks:
            documents = documents.cut_into_chunks(window, rows, tokens * context.size, device)
            window = None
        size = max(config.head_dim, config.value_dim)
        capped = config.attention_softcap is not None
        form = choose_mask_form(device, self._dtype, size, capped, config.attention_sinks)
        return context.make_attention_mask(documents, tokens, window, device, form)
