"""Multi-token prediction in training: one more layer that predicts the token after the next (DeepSeek-V3,
arXiv:2412.19437, section 2.2).

Shapes: B sequences, S tokens of a sequence, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.model.axis_operations import AxisOperations
from meshwright.model.block import Block
from meshwright.model.documents import MicroBatch
from meshwright.model.layers import Linear, make_norm
from meshwright.model.loss import IGNORED
from meshwright.spec.config import ModelConfig


class PredictionModule(nn.Module):
    """Multi-token prediction module of DeepSeek-V3 (arXiv:2412.19437, eqs. 21 to 23): a projection and a transformer
    block. The projection joins a token's normalised hidden state and the embedding of the next token. The module shares
    embedding and output head with the model.

    `config`: model configuration; `axes`: communication of the mesh axes; `options`: `device` and `dtype` of the
    parameters.
    """

    def __init__(self, config: ModelConfig, axes: AxisOperations, **options: Any) -> None:
        super().__init__()
        self.embedding_norm = make_norm(config, **options)
        self.hidden_norm = make_norm(config, **options)
        self.projection = Linear(2 * config.hidden, config.hidden, bias=False, **options)
        self.block = Block(config, axes, config.layers, **options)
        self.norm = make_norm(config, **options)

    def project(self, x_BSH: Tensor, next_BSH: Tensor) -> Tensor:
        """Return the input of the block, [B, S, H]: the projection of a token's normalised hidden state and the next
        token's embedding.

        `x_BSH`: output of the model's final norm; `next_BSH`: embeddings of the next tokens. With sequence parallelism,
        arguments and result are this rank's token slices."""
        return self.projection(torch.cat([self.embedding_norm(next_BSH), self.hidden_norm(x_BSH)], dim=-1))


def shift_by_one(batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Shift the inputs of multi-token prediction by one position. Return two tensors [B, S]: the token after each token
    of the micro-batch `batch`, and the target of that next token. The target is -100 (ignored) at the end of a sequence
    and where the next token is in another document."""
    next_BS = batch.tokens_BS.roll(-1, dims=1)
    after_BS = batch.targets_BS.roll(-1, dims=1)
    after_BS[:, -1] = IGNORED
    if (starts_BS := batch.documents.starts_BS) is not None:
        after_BS = after_BS.masked_fill(starts_BS != starts_BS.roll(-1, dims=1), IGNORED)
    return next_BS, after_BS
