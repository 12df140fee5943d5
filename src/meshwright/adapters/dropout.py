"""Dropout of the inputs of adapters, whose mask is a function of (seed, sample, position, layer, feature) alone: every
layout drops the same elements, and a recomputed forward those of the first one.

Shapes: B sequences, C tokens of a sequence on this rank, X inputs of the layer on this rank, R rows of A.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.nn.functional as F

from meshwright.model.documents import Documents

# Multipliers of splitmix64 (Steele et al. 2014) and of MurmurHash3's 32-bit finaliser, as signed integers.
_MIX_64 = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
_MIX_32 = (-0x7A143595, -0x3D4D51CB)
_STEP = -0x61C8864680B583EB


def _mix_64(value: torch.Tensor) -> torch.Tensor:
    """Return the int64 hash of each number in `value`, by the finaliser of splitmix64; products wrap around modulo
    2^64.
    """
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * _MIX_64[0]
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * _MIX_64[1]
    return value ^ ((value >> 31) & 0x1FFFFFFFF)


def sample_keys(seed: int, numbers: torch.Tensor) -> torch.Tensor:
    """Return one random-number key per training sample, int64 of the shape of `numbers`. The dropout masks of a
    sample's tokens are derived from its key.

    seed: seed of the training run. numbers: global numbers of the samples, counted over all steps."""
    digest = hashlib.sha256(f"adapter dropout, seed {seed}".encode()).digest()
    return _mix_64(numbers.long() * _STEP + int.from_bytes(digest[:8], "little", signed=True))


def copy_keys(keys_N: torch.Tensor, experts_N: torch.Tensor) -> torch.Tensor:
    """Return one random-number key per token copy (a token sent to one of its experts), int32 [N] for N copies. The key
    is a hash of token and expert, so that the experts of a token drop different elements.

    keys_N: key of each copy's token. experts_N: global index of each copy's expert."""
    return _mix_64(keys_N.long() + experts_N.long() * _STEP).int()


class TokenKeys:
    """Random-number keys of the tokens of the current micro-batch, one per token, shared by all adapters of a model.
    The key of a token and the index of a feature determine whether the element is dropped, so that all ranks and
    recomputed forwards draw the same mask.

    Attribute `keys_BC`: int32 [B, C], for B sequences with C tokens each on this rank; None: nothing is dropped."""

    keys_BC: torch.Tensor | None = None

    def set(self, documents: Documents, tokens: int) -> None:
        """Compute the keys of a micro-batch's tokens and store them in `keys_BC`. The key of a token is a hash of its
        sample's key and of its position in the sequence.

        documents: document boundaries of the micro-batch. Its `samples_B` has the samples' keys; None, as in
        validation: nothing is dropped. Its `indices_C` has the tokens' positions under context parallelism. tokens:
        number of tokens of a sequence on this rank."""
        keys_B = documents.samples_B
        if keys_B is None:
            self.keys_BC = None
            return
        places_C = documents.indices_C
        if places_C is None:
            places_C = torch.arange(tokens, device=keys_B.device)
        self.keys_BC = _mix_64(keys_B[:, None] + places_C * _STEP).int()


class Dropout:
    """Dropout of the input of one adapted layer: an element is set to 0 with probability `probability`, and otherwise
    divided by 1 - `probability`. All adapted matrices of the layer share one mask.

    name: name of the layer, such as "layers.3.attention.qkv". features: index in the unsharded layer of each of this
    rank's X input features, int64 [X]. tokens: random-number keys of the micro-batch's tokens."""

    def __init__(self, probability: float, name: str, features: torch.Tensor, tokens: TokenKeys) -> None:
        self.tokens, self.scale = tokens, 1 / (1 - probability)
        self._threshold = round(probability * 2**32) - 2**31
        digest = hashlib.sha256(f"adapter dropout, {name}".encode()).digest()
        self._keys_X = _mix_64(features * _STEP + int.from_bytes(digest[:8], "little", signed=True)).int()

    @property
    def active(self) -> bool:
        """True if dropout applies now: gradients are enabled, and the tokens of the micro-batch have random-number keys
        (they have none in validation)."""
        return self.tokens.keys_BC is not None and torch.is_grad_enabled()

    def mask(self, keys_BC: torch.Tensor) -> torch.Tensor:
        """Return the dropout mask, bool [B, C, X], for B sequences of C tokens and X input features: False for each
        element to drop. keys_BC: random-number key of each token, int32."""
        if self._keys_X.device != keys_BC.device:
            self._keys_X = self._keys_X.to(keys_BC.device)
        bits = (keys_BC[..., None] ^ self._keys_X) * _MIX_32[0]
        bits ^= (bits >> 13) & 0x7FFFF
        bits *= _MIX_32[1]
        bits ^= (bits >> 16) & 0xFFFF
        return bits >= self._threshold

    def apply(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the activations `x` after dropout: elements where `mask` is False become 0, all other elements are
        divided by the probability of keeping an element. x, mask: [B, C, X], for B sequences of C tokens and X input
        features."""
        # A product with the mask would first convert the mask to the dtype of x.
        return x.masked_fill(~mask, 0.0).mul_(self.scale)

    def product(self, x: torch.Tensor, a_RX: torch.Tensor) -> torch.Tensor:
        """Return dropout(x) Aᵀ, [B, C, R], for B sequences of C tokens. x: input of the layer, [B, C, X], with X input
        features. a_RX: A, with R rows: one or several adapter matrices A, stacked."""
        assert self.tokens.keys_BC is not None and x.shape[:-1] == self.tokens.keys_BC.shape, x.shape
        return _DroppedProduct.apply(x, a_RX, self.tokens.keys_BC, self)  # type: ignore[no-untyped-call, no-any-return]


class _DroppedProduct(torch.autograd.Function):
    """Autograd function of dropout(x) Aᵀ, which saves x and recomputes the dropout mask in backward."""

    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, a_RX: torch.Tensor, keys_BC: torch.Tensor, dropout: Dropout
    ) -> torch.Tensor:
        """Return dropout(x) Aᵀ, [B, C, R], for B sequences of C tokens. x: [B, C, X], with X input features. a_RX: A,
        [R, X]. keys_BC: random-number key of each token. dropout: object that computes the mask. context: autograd
        context."""
        context.save_for_backward(x, a_RX, keys_BC)
        context.dropout = dropout
        return F.linear(x * dropout.mask(keys_BC), a_RX) * dropout.scale

    @staticmethod
    def backward(context: Any, d_low: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        """Return (gradient of x, gradient of A, None, None); a gradient that is not required is None too. d_low: output
        gradient, [B, C, R], for B sequences of C tokens and R rows of A. context: autograd context."""
        x, a_RX, keys_BC = context.saved_tensors
        mask, d_low = context.dropout.mask(keys_BC), d_low * context.dropout.scale
        needs_x, needs_a = context.needs_input_grad[:2]
        d_a = d_low.flatten(0, -2).T @ (x * mask).flatten(0, -2) if needs_a else None
        return (d_low @ a_RX) * mask if needs_x else None, d_a, None, None
