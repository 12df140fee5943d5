"""The encoder: BERT (Devlin et al. 2019, arXiv:1810.04805), with bidirectional attention.

It consists of the decoder's modules (attention.py, layers.py) with post-norm residual blocks. Parameter names are those
of the parameter table (spec/parameters.py).

Shapes: B sequences, S tokens of a sequence, H hidden, V vocabulary, M masked tokens of a batch, D documents, C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import UserError
from meshwright.model import weight_gradients
from meshwright.model.attention import Attention
from meshwright.model.attention_inputs import AttentionInputs
from meshwright.model.axis_operations import NO_UNITS, SINGLE_DEVICE, AxisOperations, Recompute, Units
from meshwright.model.documents import ONE_DOCUMENT, Documents
from meshwright.model.layers import Embedding, FeedForward, Linear, activate, make_norm
from meshwright.model.loss import IGNORED, OutputHead, linear_cross_entropy
from meshwright.model.precision import at_least_float32
from meshwright.model.scaled_dot_product import make_bidirectional_mask
from meshwright.spec.config import ModelConfig


class EncoderBlock(nn.Module):
    """Post-norm transformer block: norm(x + attention(x)), then norm(x + mlp(x)) (Vaswani et al. 2017,
    arXiv:1706.03762, section 3.1).

    `config`: model configuration; `axes`: communication of the mesh axes; `options`: `device` and `dtype` of the
    parameters."""

    def __init__(self, config: ModelConfig, axes: AxisOperations, **options: Any) -> None:
        super().__init__()
        self.attention = Attention(config, axes, **options)
        self.attention_norm = make_norm(config, **options)
        self.mlp = FeedForward(config, axes, **options)
        self.mlp_norm = make_norm(config, **options)

    def forward(self, x_BSH: Tensor, added: Tensor | None) -> Tensor:
        """Return the block's output [B, S, H] for the hidden states `x_BSH`.

        `added`: additive attention mask [B or 1, 1, S or 1, S] (0 or a large negative number) from
        `make_bidirectional_mask`; None: every token attends to all tokens."""
        x_BSH = self.attention_norm(x_BSH + self.attention(x_BSH, AttentionInputs(None, added)))
        return self.mlp_norm(x_BSH + self.mlp(x_BSH))


class EncoderInputs(TypedDict, total=False):
    """Optional inputs of an encoder. attention_mask_BS: 0 at padding, to which no token attends, else 1 (default None:
    1 everywhere). token_types_BS: segment ID of each token (default None: 0 everywhere)."""

    attention_mask_BS: Tensor | None
    token_types_BS: Tensor | None


class Encoder(nn.Module):
    """BERT-style encoder with the head that `config.head` names: "masked" predicts masked tokens, "classes" classifies
    sequences (or the documents of packed sequences), "none" has only a pooler. `forward` returns a summed loss;
    `logits`, `hidden` and `pooled` return what `transformers` returns. There is no dropout.

    Parameters are uninitialised: `initialise`, `load_encoder` or an engine fills them. `device`, `dtype`: of the
    parameters (None: torch's defaults); `recompute`: activation checkpointing of the blocks; by default none. Raises
    UserError if `config` describes a decoder."""

    def __init__(
        self, config: ModelConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
        recompute: Recompute = SINGLE_DEVICE.recompute,
    ) -> None:  # fmt: skip
        super().__init__()
        if not config.encoder:
            raise UserError(f"family {config.family} is a decoder: use Transformer, not Encoder")
        self.config = config
        options: dict[str, Any] = {"device": device, "dtype": torch.get_default_dtype() if dtype is None else dtype}
        hidden = config.hidden
        self.embedding = Embedding(config.vocabulary, hidden, None, **options)
        self.positions = Embedding(config.max_positions, hidden, None, **options)
        self.token_types = Embedding(config.token_types, hidden, None, **options)
        self.embedding_norm = make_norm(config, **options)
        self.layers = nn.ModuleList(EncoderBlock(config, SINGLE_DEVICE, **options) for _ in range(config.layers))
        if config.pooled:
            self.pooler = Linear(hidden, hidden, True, **options)
        if config.head == "masked":
            self.transform = Linear(hidden, hidden, True, **options)
            self.transform_norm = make_norm(config, **options)
            self.head: Any = nn.Module()  # its weight is the embedding's
            self.head.bias = nn.Parameter(torch.empty(config.vocabulary, **options))
        elif config.head == "classes":
            self.classifier = Linear(hidden, len(config.labels), True, **options)
        self._run_block: Callable[..., Tensor] = recompute.wrap_block(recompute.wrap(EncoderBlock.__call__))
        self._recompute = recompute
        self._loss_backend: Any = None

    def compile_blocks(self, **options: Any) -> None:
        """Compile the blocks and the elementwise operations of the loss with torch.compile. `options`: keyword
        arguments of torch.compile (`dynamic` is False by default)."""
        weight_gradients.exclude_from_compiled_graphs()
        options = {"dynamic": False, **options}
        self._run_block = self._recompute.wrap_block(self._recompute.wrap(EncoderBlock.forward, options))
        self._loss_backend = options.get("backend", "inductor")

    def forward(
        self, tokens_BS: Tensor, targets: Tensor, documents: Documents | None = None, units: Units = NO_UNITS,
        **inputs: Unpack[EncoderInputs],
    ) -> Tensor:  # fmt: skip
        """Return the sum of the losses (nats, a scalar in float32 or float64) over the targets that are not -100.

        `tokens_BS`: token IDs. `targets`: with head "masked" the true token ID at each masked position, [B, S],
        elsewhere -100; only masked positions go through the head. With head "classes" the class of each sequence, [B],
        or of each of D packed documents, [D]. `units`: hooks around FSDP units; `documents`: document boundaries in
        packed sequences (None: each sequence is one document); `inputs`: attention mask (0 at padding) and segment IDs
        (fields of `EncoderInputs`).

        Raises UserError for head "none" and for sequences longer than the model's positions.
        """
        x_BSH = self.hidden(tokens_BS, documents, units, **inputs)
        x_BSH = units.enter("head", x_BSH)
        if self.config.head == "masked":
            places_M = (targets.flatten() != IGNORED).nonzero()[:, 0]
            states_MH = self._transform_for_head(x_BSH.flatten(0, 1)[places_M])
            tensor = SINGLE_DEVICE.tensor
            head = OutputHead(self.embedding.weight, tensor, self.head.bias, compile_backend=self._loss_backend)
            loss = linear_cross_entropy(states_MH, targets.flatten()[places_M], head)
        elif self.config.head == "classes":
            logits = self.classifier(self.pooled(x_BSH, documents))
            wide = logits.to(at_least_float32(logits.dtype))
            loss = F.cross_entropy(wide, targets, ignore_index=IGNORED, reduction="sum")
        else:
            raise UserError('an encoder with head "none" has no loss; compute one from `hidden` or `pooled`')
        return units.leave("head", loss)

    def hidden(
        self, tokens_BS: Tensor, documents: Documents | None = None, units: Units = NO_UNITS, *,
        attention_mask_BS: Tensor | None = None, token_types_BS: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the last block's output, [B, S, H], for the token IDs `tokens_BS`.

        `units`: hooks around FSDP units; `attention_mask_BS`: 0 at padding, to which no token attends, else 1 (None: no
        padding); `token_types_BS`: segment ID of each token (None: 0); `documents`: document boundaries in packed
        sequences (None: each sequence is one document). Raises UserError if a sequence is longer than the model's
        positions."""
        sequence = tokens_BS.shape[1]
        if sequence > (most := self.config.max_positions):
            raise UserError(f"sequences of {sequence} tokens are longer than the model's {most} positions")
        documents = ONE_DOCUMENT if documents is None else documents
        positions_BS = documents.positions_BS()
        if positions_BS is None:
            positions_BS = torch.arange(sequence, device=tokens_BS.device)[None]
        if token_types_BS is None:
            token_types_BS = torch.zeros_like(positions_BS)

        units.enter("embedding", None)
        x_BSH = units.leave("embedding", self.embedding(tokens_BS))
        x_BSH = units.leave("token_types", units.enter("token_types", x_BSH) + self.token_types(token_types_BS))
        x_BSH = units.leave("positions", units.enter("positions", x_BSH) + self.positions(positions_BS))
        x_BSH = units.leave("embedding_norm", self.embedding_norm(units.enter("embedding_norm", x_BSH)))
        added = make_bidirectional_mask(documents, attention_mask_BS, x_BSH.dtype)
        for layer, block in enumerate(self.layers):
            unit = f"layers.{layer}"
            x_BSH = units.leave(unit, self._run_block(block, units.enter(unit, x_BSH), added))
        return x_BSH

    def pooled(self, hidden_BSH: Tensor, documents: Documents | None = None) -> Tensor:
        """Return the pooler output, tanh(linear(first token)): [B, H] from the first token of each sequence or, with D
        packed `documents`, [D, H] from the first token of each document.

        `hidden_BSH`: the last block's output. Raises UserError if the model has no pooler."""
        if not self.config.pooled:
            raise UserError(f'an encoder with head "{self.config.head}" has no pooler')
        if documents is None or documents.starts_BS is None:
            first = hidden_BSH[:, 0].contiguous()  # a copy: a view would save all tokens for backward
        else:
            starts_BS = documents.starts_BS
            first = hidden_BSH[starts_BS == torch.arange(starts_BS.shape[1], device=starts_BS.device)]
        return torch.tanh(self.pooler(first))

    def logits(self, tokens_BS: Tensor, documents: Documents | None = None, **inputs: Unpack[EncoderInputs]) -> Tensor:
        """Return the logits of the head, in the model's dtype, for the token IDs `tokens_BS`: [B, S, V] over the
        vocabulary for "masked", [B, C] over the C classes for "classes" (with D packed documents [D, C]).

        `documents`: document boundaries in packed sequences (None: each sequence is one document); `inputs`: attention
        mask and segment IDs (fields of `EncoderInputs`). Raises UserError for head "none"."""
        hidden_BSH = self.hidden(tokens_BS, documents, **inputs)
        if self.config.head == "masked":
            return F.linear(self._transform_for_head(hidden_BSH), self.embedding.weight, self.head.bias)
        if self.config.head == "classes":
            return self.classifier(self.pooled(hidden_BSH, documents))
        raise UserError('an encoder with head "none" has no logits; use `hidden` or `pooled`')

    def _transform_for_head(self, x: Tensor) -> Tensor:
        """Return norm(activation(linear(x))), the transform of the masked-language-model head, for hidden states `x`
        [..., H]: [..., H]."""
        return self.transform_norm(activate(self.transform(x), self.config.activation))
