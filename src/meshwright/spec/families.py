"""Model families and the architecture choices that all models of a family share."""

from __future__ import annotations

from dataclasses import replace

from meshwright.spec.family_record import Experts, Family, Setting, Windows

__all__ = ["FAMILIES", "NESTED", "OPTIONS", "Experts", "Family", "Setting", "Windows"]

_ROPE_DECODER: dict[str, object] = {
    "norm": "rmsnorm",
    "gated": True,
    "positions": "rope",
    "norm_bias": False,
}
_PLAIN_HEADS: dict[str, object] = {"query_key_norm": False}
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
}
_SOFTMAX_ROUTER: dict[str, object] = {"router": "softmax", "router_bias": False, "routed_scale": 1.0}
_NO_SHARED_EXPERT: dict[str, object] = {"shared_intermediate": 0, "shared_gate": False}
_NO_WINDOW: dict[str, object] = {"sliding_window": None, "windowed_layers": None}
_NO_BIAS: dict[str, object] = {"qkv_bias": False, "output_bias": False, "mlp_bias": False}
_DEEPSEEK: dict[str, object] = _ROPE_DECODER | _NO_WINDOW | _NO_BIAS | {"query_key_norm": False, "shared_gate": False}
_LATENT_KEYS: dict[str, tuple[str, ...]] = {"head_dim": ()}  # its parts have keys of their own
_LATENT_DEFAULTS = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128}  # fmt: skip
_MISTRAL_DEFAULTS = {
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_QWEN_DEFAULTS = {"max_position_embeddings": 32768, "sliding_window": 4096}
_LLAMA_DEFAULTS = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
_MLP_BIAS = {"mlp_bias": Setting("mlp_bias", "flag")}
_GPT2_KEYS: dict[str, tuple[str, ...]] = {
    "hidden": ("n_embd", "hidden_size"),
    "layers": ("n_layer", "num_hidden_layers"),
    "heads": ("n_head", "num_attention_heads"),
    "kv_heads": ("n_head", "num_attention_heads"),
    "head_dim": (),  # always hidden / heads
    "intermediate": ("n_inner",),
    "max_positions": ("n_positions", "max_position_embeddings"),
    "activation": ("activation_function",),
    "norm_epsilon": ("layer_norm_epsilon",),
}
_GRANITE_FACTORS = {
    "attention_scale": Setting("attention_multiplier"),
    "embedding_scale": Setting("embedding_multiplier"),
    "residual_scale": Setting("residual_multiplier"),
    "logit_divisor": Setting("logits_scaling"),
}
# OLMo 2 and 3: norms on the outputs of the sublayers alone, a norm over all heads' queries, another over their keys.
_OLMO = _ROPE_DECODER | {
    "mlp_bias": False, "pre_norms": False, "post_norms": True, "query_key_norm": True, "projection_norm": True,
}  # fmt: skip
_OLMO_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "eos_token_id": 50279, "pad_token_id": 1}
# Gemma 2 and 3: scaled embedding, norms before and after each sublayer that multiply by 1 + weight.
_GEMMA = _ROPE_DECODER | {
    "mlp_bias": False, "post_norms": True, "zero_centred_norms": True, "embedding_scale": None,
}  # fmt: skip
_GEMMA_DEFAULTS = {
    "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1, "query_pre_attn_scalar": 256,
}  # fmt: skip
_GEMMA_SETTINGS = {
    "attention_scale": Setting("query_pre_attn_scalar", "inverse_square"),
    "logit_softcap": Setting("final_logit_softcapping", "limit"),
}
# Experts chosen by sigmoids and a bias that balances their load, one wide shared expert; the first layers are dense.
_SIGMOID_ROUTER: dict[str, object] = {
    "router": "sigmoid", "router_bias": True, "router_loss": 0.0, "shared_gate": False,
}  # fmt: skip

_STACKED_EXPERTS = Experts(("num_local_experts",), None, None, stacked=True)
_SIGMOID_EXPERTS = Experts(
    ("n_routed_experts",), loss=None, shared="n_shared_experts", shared_copies=True, scale="routed_scaling_factor",
    dense="first", groups="always",
)  # fmt: skip
_DEEPSEEK_EXPERTS = Experts(
    ("n_routed_experts",), normalised=None, shared="n_shared_experts", shared_copies=True,
    scale="routed_scaling_factor", dense="first", groups="method",
)  # fmt: skip

_GPT_OSS_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip

OPTIONS = (
    "pre_norms", "post_norms", "zero_centred_norms", "projection_norm", "embedding_norm", "rotary_fraction",
    "rotary_interleaved", "window_rope_theta", "unrotated_layers", "attention_scale", "attention_softcap",
    "logit_softcap", "embedding_scale", "residual_scale", "logit_divisor", "attention_sinks", "swiglu_limit",
    "swiglu_alpha", "window_chunks", "rotated_norm", "temperature_tuning", "temperature_scale", "temperature_floor",
    "routed_input",
)  # fmt: skip
"""ModelConfig fields that keep their defaults in every family that names them neither in ``fixed`` nor ``settings``."""

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("llama", "LlamaForCausalLM", _ROPE_DECODER | _NO_WINDOW | _PLAIN_HEADS, _LLAMA_DEFAULTS, _MLP_BIAS),
        Family(
            "mistral",
            "MistralForCausalLM",
            _ROPE_DECODER | _NO_BIAS | _PLAIN_HEADS | {"windowed_layers": None},
            _MISTRAL_DEFAULTS | {"sliding_window": 4096},
            windows=Windows("all", listed=False),
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            _ROPE_DECODER | _PLAIN_HEADS | {"qkv_bias": True, "output_bias": False, "mlp_bias": False},
            _QWEN_DEFAULTS | {"num_key_value_heads": 32, "max_window_layers": 28},
            windows=Windows("late", switch=True),
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            _ROPE_DECODER | {"mlp_bias": False, "query_key_norm": True},
            _QWEN_DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128, "max_window_layers": 28},
            windows=Windows("late", switch=True),
        ),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            _ROPE_DECODER
            | _NO_BIAS
            | _SOFTMAX_ROUTER
            | _NO_SHARED_EXPERT
            | _PLAIN_HEADS
            | {"windowed_layers": None, "normalise_choice": True, "dense_layers": ()},
            _MISTRAL_DEFAULTS
            | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "router_aux_loss_coef": 0.001}
            | {"num_local_experts": 8, "num_experts_per_tok": 2},
            windows=Windows("all", listed=False),
            experts=Experts(("num_local_experts",), width=None, normalised=None),
        ),
        Family(
            "qwen2_moe",
            "Qwen2MoeForCausalLM",
            _ROPE_DECODER
            | _SOFTMAX_ROUTER
            | _PLAIN_HEADS
            | {"output_bias": False, "mlp_bias": False, "shared_gate": True},
            _QWEN_DEFAULTS
            | {"num_key_value_heads": 16, "max_window_layers": 28, "qkv_bias": True, "router_aux_loss_coef": 0.001}
            | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
            | {"shared_expert_intermediate_size": 5632},
            {"qkv_bias": Setting("qkv_bias", "flag")},
            windows=Windows("early", switch=True),
            experts=Experts(("num_experts",), shared="shared_expert_intermediate_size", dense="listed"),
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
            windows=Windows("all", switch=True, listed=False),
            experts=Experts(("num_experts", "num_local_experts"), dense="listed"),
        ),
        Family(
            "dots1",
            "Dots1ForCausalLM",
            _ROPE_DECODER | _SIGMOID_ROUTER | {"mlp_bias": False, "query_key_norm": True},
            {"max_position_embeddings": 2048, "moe_intermediate_size": 1408}
            | {"sliding_window": 4096, "max_window_layers": 62, "n_group": 1, "topk_group": 1},
            windows=Windows("late"),
            experts=_SIGMOID_EXPERTS,
        ),
        Family(
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            _DEEPSEEK
            | {"router": "softmax", "router_bias": False, "normalise_choice": False, "rotary_interleaved": True},
            _LATENT_DEFAULTS
            | {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "n_routed_experts": 64}
            | {
                "n_shared_experts": 2,
                "moe_intermediate_size": 1407,
                "topk_method": "greedy",
                "router_aux_loss_coef": 0,
            },
            keys=_LATENT_KEYS,
            experts=_DEEPSEEK_EXPERTS,
            latent=True,
        ),
        Family(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            _DEEPSEEK | _SIGMOID_ROUTER,
            _LATENT_DEFAULTS
            | {"max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1, "num_key_value_heads": 128}
            | {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
            | {"first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
            | {"n_group": 8, "topk_group": 4, "rope_interleave": True},
            {"rotary_interleaved": Setting("rope_interleave", "flag")},
            _LATENT_KEYS,
            experts=_SIGMOID_EXPERTS,
            latent=True,
        ),
        Family(
            "granite",
            "GraniteForCausalLM",
            _ROPE_DECODER | _NO_WINDOW | _PLAIN_HEADS,
            _LLAMA_DEFAULTS | {"attention_multiplier": 1.0},
            _MLP_BIAS | _GRANITE_FACTORS,
        ),
        Family(
            "granitemoe",
            "GraniteMoeForCausalLM",
            _ROPE_DECODER
            | _NO_WINDOW
            | _PLAIN_HEADS
            | _SOFTMAX_ROUTER
            | _NO_SHARED_EXPERT
            | {"mlp_bias": False, "normalise_choice": True, "dense_layers": ()},
            _LLAMA_DEFAULTS
            | {"attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2}
            | {"router_aux_loss_coef": 0.001},
            _GRANITE_FACTORS,
            experts=_STACKED_EXPERTS,
        ),
        Family("olmo2", "Olmo2ForCausalLM", _OLMO | _NO_WINDOW, _OLMO_DEFAULTS),
        Family(
            "olmo3",
            "Olmo3ForCausalLM",
            _OLMO,
            _OLMO_DEFAULTS | {"rope_theta": 500000.0, "rope_local_base_freq": 500000.0, "sliding_window": 4096},
            {"window_rope_theta": Setting("rope_local_base_freq", "nested")},
            windows=Windows("periodic", period=4),
        ),
        Family(
            "smollm3",
            "SmolLM3ForCausalLM",
            _ROPE_DECODER | _PLAIN_HEADS,
            {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2000000.0}
            | {"bos_token_id": 128000, "eos_token_id": 128001, "tie_word_embeddings": True},
            _MLP_BIAS,
            windows=Windows("unrotated", period=4, switch=True),
        ),
        Family(
            "gemma2",
            "Gemma2ForCausalLM",
            _GEMMA | _PLAIN_HEADS,
            _GEMMA_DEFAULTS
            | {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
            _GEMMA_SETTINGS | {"attention_softcap": Setting("attn_logit_softcapping", "limit")},
            {"activation": ("hidden_activation",)},
            windows=Windows("periodic", period=2),
        ),
        Family(
            "gemma3_text",
            "Gemma3ForCausalLM",
            _GEMMA | {"query_key_norm": True},
            _GEMMA_DEFAULTS
            | {"max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 10000.0}
            | {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216}
            | {"num_hidden_layers": 26, "num_attention_heads": 8},
            _GEMMA_SETTINGS | {"window_rope_theta": Setting("rope_local_base_freq")},
            {"activation": ("hidden_activation",)},
            windows=Windows("periodic", period=6, period_key="sliding_window_pattern"),
            nested="gemma3",
        ),
        Family(
            "phi3",
            "Phi3ForCausalLM",
            _ROPE_DECODER | _NO_BIAS | _PLAIN_HEADS | {"windowed_layers": None},
            {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
            | {"bos_token_id": 1, "eos_token_id": 32000},
            windows=Windows("all", listed=False),
            partial_rotation=True,
        ),
        Family(
            "glm4",
            "Glm4ForCausalLM",
            _ROPE_DECODER
            | _NO_WINDOW
            | _PLAIN_HEADS
            | {"output_bias": False, "mlp_bias": False, "post_norms": True, "rotary_interleaved": True},
            {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "attention_bias": True}
            | {"rms_norm_eps": 1.5625e-07, "partial_rotary_factor": 0.5, "eos_token_id": [151329, 151336, 151338]},
            {"qkv_bias": Setting("attention_bias", "flag")},
            partial_rotation=True,
        ),
        Family(
            "glm4_moe",
            "Glm4MoeForCausalLM",
            _ROPE_DECODER | _NO_WINDOW | _SIGMOID_ROUTER | {"output_bias": False, "mlp_bias": False},
            {"max_position_embeddings": 131072, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}
            | {"num_key_value_heads": 8}
            | {"moe_intermediate_size": 1408, "n_routed_experts": 128, "num_experts_per_tok": 8}
            | {"n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True},
            {"qkv_bias": Setting("attention_bias", "flag"), "query_key_norm": Setting("use_qk_norm", "flag")},
            partial_rotation=True,
            experts=_SIGMOID_EXPERTS,
        ),
        Family(
            "gpt_oss",
            "GptOssForCausalLM",
            _ROPE_DECODER
            | _PLAIN_HEADS
            | _SOFTMAX_ROUTER
            | _NO_SHARED_EXPERT
            | {"activation": "silu", "mlp_bias": True, "attention_sinks": True, "normalise_choice": True}
            | {"dense_layers": ()},
            {"num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
            | {"sliding_window": 128, "attention_bias": True, "rope_theta": 150000.0, "rope_parameters": _GPT_OSS_YARN}
            | {"num_local_experts": 128, "num_experts_per_tok": 4, "router_aux_loss_coef": 0.001}
            | {"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
            {"swiglu_limit": Setting("swiglu_limit"), "swiglu_alpha": Setting("swiglu_alpha")},
            windows=Windows("periodic", period=2),
            experts=replace(_STACKED_EXPERTS, loss_switched=True, transposed=True, interleaved=True),
        ),
        Family(
            "llama4_text",
            "Llama4ForCausalLM",
            _ROPE_DECODER
            | _PLAIN_HEADS
            | {"mlp_bias": False, "rotary_interleaved": True, "window_chunks": True, "router": "sigmoid"}
            | {"router_bias": False, "router_loss": 0.0, "normalise_choice": False, "routed_scale": 1.0}
            | {"shared_gate": False, "routed_input": True},
            {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
            | {"rope_theta": 500000.0, "intermediate_size": 8192, "intermediate_size_mlp": 16384}
            | {"num_local_experts": 16, "num_experts_per_tok": 1, "use_qk_norm": True, "attention_chunk_size": 8192}
            | {"attn_temperature_tuning": True, "attn_scale": 0.1, "floor_scale": 8192}
            | {"bos_token_id": 1, "eos_token_id": 2},
            {
                "rotated_norm": Setting("use_qk_norm", "flag"),
                "temperature_tuning": Setting("attn_temperature_tuning", "switch"),
                "temperature_scale": Setting("attn_scale"),
                "temperature_floor": Setting("floor_scale", "count"),
            },
            {"intermediate": ("intermediate_size_mlp",)},
            windows=Windows("rotated", period=4, chunked=True),
            experts=replace(
                _STACKED_EXPERTS,
                width="intermediate_size",
                loss=None,
                shared="",
                dense="interleaved",
                transposed=True,
            ),
            nested="llama4",
        ),
        Family(
            "gpt2",
            "GPT2LMHeadModel",
            _GPT | {"positions": "learned"},
            {"n_positions": 1024, "tie_word_embeddings": True, "bos_token_id": 50256, "eos_token_id": 50256},
            keys=_GPT2_KEYS,
        ),
        Family(
            "bert",
            "BertForMaskedLM",
            _GPT | {"positions": "learned", "embedding_norm": True, "tied": True},
            {"type_vocab_size": 2, "layer_norm_eps": 1e-12, "max_position_embeddings": 512}
            | {"tie_word_embeddings": True, "pad_token_id": 0},
            keys={"kv_heads": ("num_attention_heads",), "head_dim": (), "norm_epsilon": ("layer_norm_eps",)},
            heads={"BertForMaskedLM": "masked", "BertForSequenceClassification": "classes", "BertModel": "none"},
        ),
        Family(
            "bloom",
            "BloomForCausalLM",
            _GPT | {"positions": "alibi", "embedding_norm": True},
            {"tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2},
            keys=_GPT2_KEYS | {"hidden": ("hidden_size", "n_embed"), "max_positions": ("seq_length",)},
            planning_only="its ALiBi positions and embedding norm are not computed",
        ),
        Family(
            "nemotron",
            "NemotronForCausalLM",
            _ROPE_DECODER
            | _NO_WINDOW
            | _PLAIN_HEADS
            | {"norm": "layernorm", "norm_bias": True, "gated": False, "activation": "relu2"},
            {"bos_token_id": 2, "eos_token_id": 3},
            _MLP_BIAS,
            {"norm_epsilon": ("norm_eps",)},
            planning_only="its squared ReLU, partly rotated heads and norms of 1 + weight are not computed",
        ),
    )
}

NESTED: dict[str, Family] = {family.nested: family for family in FAMILIES.values() if family.nested}
"""Families of the text part of multimodal models, by the ``model_type`` of the whole model."""
