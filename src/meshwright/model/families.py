"""Model families: what all models of one share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """What all models of a family share. ``fixed`` holds the fields of ModelConfig that have one value only."""

    name: str
    architecture: str
    fixed: Mapping[str, object]
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys a config.json may leave out
    planning_only: str | None = None


_ROPE_DECODER: dict[str, object] = {
    "norm": "rmsnorm",
    "gated": True,
    "positions": "rope",
    "norm_bias": False,
    "post_norms": False,
    "embedding_norm": False,
}
_GPT: dict[str, object] = {
    "norm": "layernorm",
    "gated": False,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "sliding_window": None,
    "windowed_layers": None,
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "norm_bias": True,
    "query_key_norm": False,
    "post_norms": False,
}
_NO_WINDOW: dict[str, object] = {"sliding_window": None, "windowed_layers": None}
_NO_BIAS: dict[str, object] = {"qkv_bias": False, "output_bias": False, "mlp_bias": False}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "llama",
            "LlamaForCausalLM",
            _ROPE_DECODER | _NO_WINDOW | {"query_key_norm": False},
            {"bos_token_id": 1, "eos_token_id": 2},
        ),
        Family(
            "mistral",
            "MistralForCausalLM",
            _ROPE_DECODER | _NO_BIAS | {"query_key_norm": False, "windowed_layers": None},
            {"num_key_value_heads": 8, "sliding_window": 4096, "bos_token_id": 1, "eos_token_id": 2},
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            _ROPE_DECODER | {"qkv_bias": True, "output_bias": False, "mlp_bias": False, "query_key_norm": False},
            {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            _ROPE_DECODER | {"mlp_bias": False, "query_key_norm": True},
            {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
        ),
        Family(
            "gpt2",
            "GPT2LMHeadModel",
            _GPT | {"positions": "learned", "embedding_norm": False},
            {"tie_word_embeddings": True, "bos_token_id": 50256, "eos_token_id": 50256},
        ),
        Family(
            "bloom",
            "BloomForCausalLM",
            _GPT | {"positions": "alibi", "embedding_norm": True},
            {"tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2},
            planning_only="its ALiBi positions and embedding norm are not computed",
        ),
        Family(
            "gemma2",
            "Gemma2ForCausalLM",
            _ROPE_DECODER | {"mlp_bias": False, "query_key_norm": False, "post_norms": True},
            {
                "num_key_value_heads": 4,
                "head_dim": 256,
                "sliding_window": 4096,
                "tie_word_embeddings": True,
                "bos_token_id": 2,
                "eos_token_id": 1,
            },
            planning_only="its capped scores, scaled embeddings and norms after each sublayer are not computed",
        ),
    )
}
