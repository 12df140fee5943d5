"""Orders in which the kernels need the rows of weights: gate and up projections in turn, latent vectors before queries,
rotated features in pairs half of them apart. Torch-free.

Attention scores do not depend on the order of features, so that a server may permute those of queries and keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from meshwright.spec.config import ModelConfig
from meshwright.spec.latent_attention import LatentAttention

Array = npt.NDArray[Any]


def find_row_order(config: ModelConfig, name: str, rows: int, kv_heads: int = 0) -> Array | None:
    """Return the order in which the kernels need the rows of a weight: the j-th element is the index of the row at
    position j. None, for most weights: the order does not change.

    name: name of the model parameter. rows: number of its rows on this rank. kv_heads: key-value heads on this rank;
    the rows of their values are not permuted. The features of a head are permuted so that each rotated pair is (i, i +
    D/2)."""
    if config.latent is not None:
        return _find_latent_order(config, config.latent, name, rows)
    features = find_half_rotation_order(config)
    if features is None or not any(part in name for part in (".qkv.", ".query_norm.", ".key_norm.")):
        return None
    order, size = np.arange(rows), config.head_dim
    count = rows - (kv_heads * size if ".qkv." in name else 0)
    order[:count] = order[:count].reshape(-1, size)[:, features].reshape(-1)
    return order


def find_gate_order(width: int, interleaved: bool = False) -> Array:
    """Return the order in which panels of 16 rows of gate alternate with those of the same rows of up, so that an item
    of a product has both for its activation: the j-th element is the index of the row of the fused gate and up
    projection at position j. The last two panels are filled up with row 0. width: number of rows of each, the
    intermediate size. interleaved: True if the rows alternate (gate 0, up 0, gate 1, ...), False if all of gate
    come first."""
    rows = np.arange(2 * width).reshape((width, 2) if interleaved else (2, width))
    padded = np.pad(rows.T if interleaved else rows, ((0, 0), (0, -width % 16)))
    return padded.reshape(2, -1, 16).swapaxes(0, 1).reshape(-1)


def spread_bias(values: Array, experts: int, hidden: int, first: int) -> Array:
    """Return the biases of the down projections of E experts at full width, [E, H]; elements outside this rank's slice
    are 0.

    values: this rank's slice of each expert's bias, concatenated. experts: E. hidden: H, the hidden size. first: index
    in H of the slice's first element."""
    slices = values.reshape(experts, -1)
    spread = np.zeros((experts, hidden), np.float32)
    spread[:, first : first + slices.shape[1]] = slices
    return spread


def _find_latent_order(config: ModelConfig, latent: LatentAttention, name: str, rows: int) -> Array | None:
    """Return the order of the rows of a weight of latent attention that the kernels need; None if it does not change.
    Rows of the latent vector and of the rotary key come before the rows of the queries. A head has E rotated features;
    the two rows of the i-th rotated pair are moved to i and i + E/2.

    latent: sizes. name: name of the parameter. rows: number of its rows."""
    if ".query_up." not in name and ".qkv." not in name:
        return None
    rotary = np.arange(latent.rotary_dim)
    if config.rotary_interleaved:  # pairs of neighbours
        rotary = rotary.reshape(-1, 2).T.reshape(-1)
    plain = config.head_dim - latent.rotary_dim
    of_head = np.concatenate([np.arange(plain), plain + rotary])
    order = np.arange(rows)
    heads: Array = (np.arange(0, rows, config.head_dim)[:, None] + of_head).reshape(-1)
    if ".query_up." in name:
        return heads
    begin = rows - latent.cached_dim
    queries = heads[:begin] if latent.query_rank is None else order[:begin]
    return np.concatenate([order[begin : begin + latent.rank], begin + latent.rank + rotary, queries])


def find_half_rotation_order(config: ModelConfig) -> list[int] | None:
    """Return the order in which a head's D features must be arranged for kernels that rotate feature i with feature i +
    D/2: the j-th element is the index of the model's feature at position j. Return None if the model has this order
    already, or no rotary positions.

    `config`: model configuration. Features without rotation are paired too, at the angle 0 (`model.rope.pad_pairs`)."""
    size, rotated = config.head_dim, config.rotary_dim
    if config.positions != "rope" or (rotated == size and not config.rotary_interleaved):
        return None
    pairs = [
        (2 * pair, 2 * pair + 1) if config.rotary_interleaved else (pair, pair + rotated // 2)
        for pair in range(rotated // 2)
    ]
    pairs += [(each, each + (size - rotated) // 2) for each in range(rotated, rotated + (size - rotated) // 2)]
    return [first for first, _ in pairs] + [second for _, second in pairs]
