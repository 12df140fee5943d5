"""Orders in which the kernels need the rows of weights: an expert's gate before its up projection, latent vectors
before queries, rotated features in pairs half of them apart. Torch-free.

Attention scores do not depend on the order of features, so that a server may permute those of queries and keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.spec.config import ModelConfig

Array = npt.NDArray[Any]


def order_rows(
    config: ModelConfig, name: str, values: Array, features: Sequence[int] | None = None, kv_heads: int = 0
) -> Array:
    """Return the rows `values` of the model parameter `name` on a rank in the order that the kernels need; those of
    most parameters are returned as they are. features: order of a head's features [D] by which kernels rotate pairs
    half of the features apart; None: the model's own. kv_heads: key-value heads of the rank, whose values keep their
    order."""
    if config.latent is not None:
        return _order_latent_rows(config, name, values)
    if features is None or not any(part in name for part in (".qkv.", ".query_norm.", ".key_norm.")):
        return values
    ordered, size = values.copy(), config.head_dim
    count = len(values) - (kv_heads * size if ".qkv." in name else 0)
    heads = values[:count].reshape(-1, size, *values.shape[1:])
    ordered[:count] = heads[:, features].reshape(ordered[:count].shape)
    return ordered


def separate_gates(values: Array, experts: int) -> Array:
    """Return the rows `values` [E 2F, ...] of the gate and up projections of E experts, which alternate (gate 0, up 0,
    gate 1, ...), with the F rows of each expert's gate before those of its up projection. experts: E."""
    width = len(values) // experts // 2
    return values.reshape(experts, width, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def spread_bias(values: Array, experts: int, hidden: int, first: int) -> Array:
    """Return the biases [E, H] of the down projections of E experts, zeros outside of this rank's slice of each.
    values: the slices of all experts, concatenated. experts: E. hidden: H. first: index in H at which a slice begins.
    """
    slices = values.reshape(experts, -1)
    spread = np.zeros((experts, hidden), np.float32)
    spread[:, first : first + slices.shape[1]] = slices
    return spread


def _order_latent_rows(config: ModelConfig, name: str, values: Array) -> Array:
    """Return the rows `values` of a parameter of latent attention in the order of `operations.LatentAttention`: those
    of the latent vector and the rotary key before those of the queries, and of the E rotated features of each, pair i
    at i and i + E/2. name: name of the parameter."""
    latent = config.latent
    assert latent is not None
    rotary = np.arange(latent.rotary_dim)
    if config.rotary_interleaved:  # pairs of neighbours
        rotary = rotary.reshape(-1, 2).T.reshape(-1)
    plain = config.head_dim - latent.rotary_dim
    of_head = np.concatenate([np.arange(plain), plain + rotary])

    order = np.arange(len(values))
    heads = (np.arange(0, len(values), config.head_dim)[:, None] + of_head).reshape(-1)
    if ".query_up." in name:
        order = heads
    elif ".qkv." in name:
        begin = len(values) - latent.cached_dim
        queries = heads[:begin] if latent.query_rank is None else order[:begin]
        order = np.concatenate([order[begin : begin + latent.rank], begin + latent.rank + rotary, queries])
    return np.take(values, order, axis=0)
