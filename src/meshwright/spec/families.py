"""Model families and the architecture choices that all models of a family share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """Architecture choices that all models of a family share. name: ``model_type`` in config.json. architecture: class
    name in transformers. fixed: {ModelConfig field: the only value that it may have}. defaults: {config.json key: value
    if the key is missing}. planning_only: reason why the family can be planned but not run; None if it can be run.
    experts: True if layers hold mixtures of experts. heads: for an encoder, {class name in transformers: its
    ``ModelConfig.head``}; empty for a decoder."""

    name: str
    architecture: str
    fixed: Mapping[str, object]
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys a config.json may leave out
    planning_only: str | None = None
    experts: bool = False  # its layers hold mixtures of experts
    heads: Mapping[str, str] = field(default_factory=dict)  # of an encoder: architecture -> ``ModelConfig.head``

    @property
    def attention_bias(self) -> bool:
        """True if the ``config.json`` key ``attention_bias`` sets the biases of all attention projections together."""
        return self.fixed["positions"] == "rope" and "output_bias" not in self.fixed

    @property
    def encoder(self) -> bool:
        """True if models of this family are encoders: bidirectional attention and post-norm layers."""
        return bool(self.heads)


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
_SOFTMAX_ROUTER: dict[str, object] = {"router": "softmax", "router_bias": False, "routed_scale": 1.0}
_NO_SHARED_EXPERT: dict[str, object] = {"shared_intermediate": 0, "shared_gate": False}
_NO_WINDOW: dict[str, object] = {"sliding_window": None, "windowed_layers": None}
_NO_BIAS: dict[str, object] = {"qkv_bias": False, "output_bias": False, "mlp_bias": False}
_MISTRAL_DEFAULTS = {
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_QWEN_DEFAULTS = {"max_position_embeddings": 32768, "sliding_window": 4096}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "llama",
            "LlamaForCausalLM",
            _ROPE_DECODER | _NO_WINDOW | {"query_key_norm": False},
            {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
        ),
        Family(
            "mistral",
            "MistralForCausalLM",
            _ROPE_DECODER | _NO_BIAS | {"query_key_norm": False, "windowed_layers": None},
            _MISTRAL_DEFAULTS | {"sliding_window": 4096},
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            _ROPE_DECODER | {"qkv_bias": True, "output_bias": False, "mlp_bias": False, "query_key_norm": False},
            _QWEN_DEFAULTS | {"num_key_value_heads": 32, "max_window_layers": 28},
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            _ROPE_DECODER | {"mlp_bias": False, "query_key_norm": True},
            _QWEN_DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128, "max_window_layers": 28},
        ),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            _ROPE_DECODER
            | _NO_BIAS
            | _SOFTMAX_ROUTER
            | _NO_SHARED_EXPERT
            | {"query_key_norm": False, "windowed_layers": None, "normalise_choice": True, "dense_layers": ()},
            _MISTRAL_DEFAULTS
            | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "router_aux_loss_coef": 0.001}
            | {"num_local_experts": 8, "num_experts_per_tok": 2},
            experts=True,
        ),
        Family(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            _ROPE_DECODER
            | _SOFTMAX_ROUTER
            | {"output_bias": False, "mlp_bias": False, "query_key_norm": False, "shared_gate": True},
            _QWEN_DEFAULTS
            | {"num_key_value_heads": 16, "max_window_layers": 28, "qkv_bias": True, "router_aux_loss_coef": 0.001}
            | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
            | {"shared_expert_intermediate_size": 5632},
            experts=True,
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            _ROPE_DECODER
            | _SOFTMAX_ROUTER
            | _NO_SHARED_EXPERT
            | {"mlp_bias": False, "query_key_norm": True, "windowed_layers": None},
            _QWEN_DEFAULTS
            | {"num_key_value_heads": 4, "router_aux_loss_coef": 0.001}
            | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
            experts=True,
        ),
        Family(
            "dots1",
            "Dots1ForCausalLM",
            _ROPE_DECODER
            | {"mlp_bias": False, "query_key_norm": True}
            | {"router": "sigmoid", "router_bias": True, "router_loss": 0.0, "shared_gate": False},
            {"max_position_embeddings": 2048, "moe_intermediate_size": 1408}
            | {"sliding_window": 4096, "max_window_layers": 62},
            experts=True,
        ),
        Family(
            "gpt2",
            "GPT2LMHeadModel",
            _GPT | {"positions": "learned", "embedding_norm": False},
            {"n_positions": 1024, "tie_word_embeddings": True, "bos_token_id": 50256, "eos_token_id": 50256},
        ),
        Family(
            "bert",
            "BertForMaskedLM",
            _GPT | {"positions": "learned", "embedding_norm": True, "tied": True},
            {"type_vocab_size": 2, "layer_norm_eps": 1e-12, "max_position_embeddings": 512}
            | {"tie_word_embeddings": True, "pad_token_id": 0},
            heads={"BertForMaskedLM": "masked", "BertForSequenceClassification": "classes", "BertModel": "none"},
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
            {"num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192, "sliding_window": 4096}
            | {"tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1},
            planning_only="its capped scores, scaled embeddings and norms after each sublayer are not computed",
        ),
        Family(
            "nemotron",
            "NemotronForCausalLM",
            _ROPE_DECODER
            | _NO_WINDOW
            | {"norm": "layernorm", "norm_bias": True, "gated": False, "activation": "relu2", "query_key_norm": False},
            {"bos_token_id": 2, "eos_token_id": 3},
            planning_only="its squared ReLU, partly rotated heads and norms of 1 + weight are not computed",
        ),
    )
}
