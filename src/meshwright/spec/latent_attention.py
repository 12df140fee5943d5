"""Sizes of multi-head latent attention (MLA), and their ``config.json`` keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.errors import UserError
from meshwright.limits import shorten_repr

if TYPE_CHECKING:
    from meshwright.spec.config_reader import Reader


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), in elements.

    A token has one latent vector of size ``rank``, from which the keys and values of all heads are projected, and one
    rotary key of size ``rotary_dim``, which all heads share. The first ``head_dim - rotary_dim`` features of a query or
    key have no position. ``value_dim``: size of a head's values. ``query_rank``: size of the latent vector of the
    queries; None: queries are projected from the hidden state directly, as in DeepSeek-V2-Lite.
    """

    rank: int
    rotary_dim: int
    value_dim: int
    query_rank: int | None = None

    @property
    def cached_dim(self) -> int:
        """Elements that a KV cache stores for each token and layer: the latent vector and the rotary key."""
        return self.rank + self.rotary_dim

    def tensors(self, hidden: int, heads: int, head_dim: int) -> list[tuple[str, str, int, tuple[int, ...], int]]:
        """List the weights of the projections and norms before the attention scores, in forward order. An item is a
        tuple of five: role, such as "query_down"; name of the model parameter that contains the weight, such as the
        fused "qkv"; start index of the weight along dim 0 of this parameter; shape; number of rows per head.

        The number of rows per head is 0 for the projections and norms of latent vectors, which every tp rank holds in
        full (with partial gradients). hidden: size of the hidden state; heads: number of heads; head_dim: size of a
        head's query."""
        query, both = heads * head_dim, head_dim - self.rotary_dim + self.value_dim
        queries: list[tuple[str, str, int, tuple[int, ...], int]] = [("query", "qkv", 0, (query, hidden), head_dim)]
        if self.query_rank is not None:
            queries = [
                ("query_down", "qkv", 0, (self.query_rank, hidden), 0),
                ("query_norm", "query_norm", 0, (self.query_rank,), 0),
                ("query_up", "query_up", 0, (query, self.query_rank), head_dim),
            ]
        return [
            *queries,
            ("latent_down", "qkv", self.query_rank or query, (self.cached_dim, hidden), 0),
            ("latent_norm", "latent_norm", 0, (self.rank,), 0),
            ("latent_up", "latent_up", 0, (heads * both, self.rank), both),
        ]

    def products(self, hidden: int, heads: int, head_dim: int) -> dict[str, tuple[int, int]]:
        """Return the matrix products before the attention scores, {name of the model parameter: (output size, input
        size)}. hidden: size of the hidden state; heads: number of heads on a tp rank; head_dim: size of a head's query.
        """
        found = dict[str, tuple[int, int]]()
        for _, name, _, shape, _ in self.tensors(hidden, heads, head_dim):
            if len(shape) > 1:
                found[name] = (found.get(name, (0, 0))[0] + shape[0], shape[1])
        return found

    def find_problem(self, head_dim: int, heads: int, kv_heads: int) -> str | None:
        """Return an error message for the first invalid size; None if all are valid. head_dim: size of a head's query;
        heads, kv_heads: numbers of query and key-value heads.
        """
        for name in ("rank", "rotary_dim", "value_dim", "query_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                return f"latent.{name} must be at least 1, not {value}"
        if self.rotary_dim % 2 or self.rotary_dim >= head_dim:
            return f"latent.rotary_dim {self.rotary_dim} must be even and less than head_dim {head_dim}"
        if kv_heads != heads:
            return f"latent attention has as many key-value heads as heads: {heads}, not {kv_heads}"
        return None


def read_latent_attention(read: Reader) -> dict[str, Any]:
    """Read the ModelConfig fields ``latent`` and ``head_dim`` of a model with latent attention; return {field: value}.
    read: typed access to the ``config.json``."""
    _, query_rank = read.get(("q_lora_rank",))  # null: no latent vector
    if query_rank is not None:
        query_rank = read.integer("hidden", ("q_lora_rank",))
    rotary = read.integer("head_dim", ("qk_rope_head_dim",))
    latent = LatentAttention(
        rank=read.integer("hidden", ("kv_lora_rank",)),
        rotary_dim=rotary,
        value_dim=read.integer("head_dim", ("v_head_dim",)),
        query_rank=query_rank,
    )
    for key in ("rope_scaling", "rope_parameters"):
        entry = read.data.get(key)
        if not isinstance(entry, dict) or not entry.get("mscale_all_dim"):
            continue
        kind = entry.get("rope_type", entry.get("type", "default"))
        if kind not in ("default", "yarn"):
            raise UserError(
                f'{read.where}: {key}: "mscale_all_dim" scales attention scores with RoPE scaling "yarn" only, not '
                f"with {shorten_repr(kind)}"
            )
    return {"latent": latent, "head_dim": read.integer("head_dim", ("qk_nope_head_dim",)) + rotary}


def write_latent_attention(latent: LatentAttention, head_dim: int) -> dict[str, Any]:
    """Return the ``config.json`` keys of latent attention with their values; the inverse of `read_latent_attention`.
    head_dim: size of a head's query."""
    return {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.rank,
        "qk_nope_head_dim": head_dim - latent.rotary_dim,
        "qk_rope_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        "attention_bias": False,
    }
