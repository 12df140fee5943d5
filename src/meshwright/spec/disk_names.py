"""Names of tensors in Hugging Face checkpoints by model family. ``{i}`` is the index of the layer."""

from __future__ import annotations

from collections.abc import Mapping

_LAYER = "model.layers.{i}"
_LLAMA = {
    "embedding": "model.embed_tokens",
    "attention_norm": f"{_LAYER}.input_layernorm",
    "query": f"{_LAYER}.self_attn.q_proj",
    "key": f"{_LAYER}.self_attn.k_proj",
    "value": f"{_LAYER}.self_attn.v_proj",
    "query_norm": f"{_LAYER}.self_attn.q_norm",
    "key_norm": f"{_LAYER}.self_attn.k_norm",
    "attention_output": f"{_LAYER}.self_attn.o_proj",
    "mlp_norm": f"{_LAYER}.post_attention_layernorm",
    "gate": f"{_LAYER}.mlp.gate_proj",
    "up": f"{_LAYER}.mlp.up_proj",
    "down": f"{_LAYER}.mlp.down_proj",
    "final_norm": "model.norm",
    "head": "lm_head",
}
# {e} is the expert's number.
_MIXTRAL = {name: disk for name, disk in _LLAMA.items() if name not in ("gate", "up", "down")} | {
    "router": f"{_LAYER}.block_sparse_moe.gate",
    "expert_gate": f"{_LAYER}.block_sparse_moe.experts.{{e}}.w1",
    "expert_up": f"{_LAYER}.block_sparse_moe.experts.{{e}}.w3",
    "expert_down": f"{_LAYER}.block_sparse_moe.experts.{{e}}.w2",
}
_QWEN_MOE = _LLAMA | {
    "router": f"{_LAYER}.mlp.gate",
    "expert_gate": f"{_LAYER}.mlp.experts.{{e}}.gate_proj",
    "expert_up": f"{_LAYER}.mlp.experts.{{e}}.up_proj",
    "expert_down": f"{_LAYER}.mlp.experts.{{e}}.down_proj",
    "shared_gate": f"{_LAYER}.mlp.shared_expert.gate_proj",
    "shared_up": f"{_LAYER}.mlp.shared_expert.up_proj",
    "shared_down": f"{_LAYER}.mlp.shared_expert.down_proj",
    "shared_expert_gate": f"{_LAYER}.mlp.shared_expert_gate",
}
_DOTS1 = _QWEN_MOE | {
    "shared_gate": f"{_LAYER}.mlp.shared_experts.gate_proj",
    "shared_up": f"{_LAYER}.mlp.shared_experts.up_proj",
    "shared_down": f"{_LAYER}.mlp.shared_experts.down_proj",
}
_DEEPSEEK = {name: disk for name, disk in _DOTS1.items() if name not in ("key", "value", "query_norm", "key_norm")} | {
    "query_down": f"{_LAYER}.self_attn.q_a_proj",
    "query_norm": f"{_LAYER}.self_attn.q_a_layernorm",
    "query_up": f"{_LAYER}.self_attn.q_b_proj",
    "latent_down": f"{_LAYER}.self_attn.kv_a_proj_with_mqa",
    "latent_norm": f"{_LAYER}.self_attn.kv_a_layernorm",
    "latent_up": f"{_LAYER}.self_attn.kv_b_proj",
}
_PREDICTION = {  # a layer after the last one
    "prediction_embedding_norm": f"{_LAYER}.enorm",
    "prediction_hidden_norm": f"{_LAYER}.hnorm",
    "prediction_projection": f"{_LAYER}.eh_proj",
    "prediction_norm": f"{_LAYER}.shared_head.norm",
}
_GEMMA2 = _LLAMA | {
    "attention_post_norm": f"{_LAYER}.post_attention_layernorm",
    "mlp_norm": f"{_LAYER}.pre_feedforward_layernorm",
    "mlp_post_norm": f"{_LAYER}.post_feedforward_layernorm",
}
_OLMO = {name: disk for name, disk in _GEMMA2.items() if name not in ("attention_norm", "mlp_norm")}
_PHI3 = _LLAMA | {"qkv": f"{_LAYER}.self_attn.qkv_proj", "gate_up": f"{_LAYER}.mlp.gate_up_proj"}
_GLM4 = _LLAMA | {
    "attention_post_norm": f"{_LAYER}.post_self_attn_layernorm",
    "mlp_post_norm": f"{_LAYER}.post_mlp_layernorm",
    "gate_up": f"{_LAYER}.mlp.gate_up_proj",
}
_GPT_OSS = {name: disk for name, disk in _LLAMA.items() if name not in ("gate", "up", "down")} | {
    "sinks": f"{_LAYER}.self_attn.sinks",
    "router": f"{_LAYER}.mlp.router",
    "expert_gate_up": f"{_LAYER}.mlp.experts.gate_up_proj",
    "expert_down": f"{_LAYER}.mlp.experts.down_proj",
}
_GRANITE_MOE = {name: disk for name, disk in _LLAMA.items() if name not in ("gate", "up", "down")} | {
    "router": f"{_LAYER}.block_sparse_moe.router.layer",
    "expert_gate_up": f"{_LAYER}.block_sparse_moe.input_linear.weight",
    "expert_down": f"{_LAYER}.block_sparse_moe.output_linear.weight",
}
_LLAMA4 = _LLAMA | {
    **{part: f"{_LAYER}.feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    **{f"shared_{part}": f"{_LAYER}.feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "router": f"{_LAYER}.feed_forward.router",
    "expert_gate_up": f"{_LAYER}.feed_forward.experts.gate_up_proj",
    "expert_down": f"{_LAYER}.feed_forward.experts.down_proj",
}
_NEMOTRON = {name: disk for name, disk in _LLAMA.items() if name != "gate"}
_BLOCK = "transformer.h.{i}"
_GPT2 = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "attention_norm": f"{_BLOCK}.ln_1",
    "qkv": f"{_BLOCK}.attn.c_attn",
    "attention_output": f"{_BLOCK}.attn.c_proj",
    "mlp_norm": f"{_BLOCK}.ln_2",
    "up": f"{_BLOCK}.mlp.c_fc",
    "down": f"{_BLOCK}.mlp.c_proj",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}
_BLOOM = {
    "embedding": "transformer.word_embeddings",
    "embedding_norm": "transformer.word_embeddings_layernorm",
    "attention_norm": f"{_BLOCK}.input_layernorm",
    "qkv": f"{_BLOCK}.self_attention.query_key_value",
    "attention_output": f"{_BLOCK}.self_attention.dense",
    "mlp_norm": f"{_BLOCK}.post_attention_layernorm",
    "up": f"{_BLOCK}.mlp.dense_h_to_4h",
    "down": f"{_BLOCK}.mlp.dense_4h_to_h",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}
_BERT_LAYER = "bert.encoder.layer.{i}"
_BERT = {
    "embedding": "bert.embeddings.word_embeddings",
    "positions": "bert.embeddings.position_embeddings",
    "token_types": "bert.embeddings.token_type_embeddings",
    "embedding_norm": "bert.embeddings.LayerNorm",
    "query": f"{_BERT_LAYER}.attention.self.query",
    "key": f"{_BERT_LAYER}.attention.self.key",
    "value": f"{_BERT_LAYER}.attention.self.value",
    "attention_output": f"{_BERT_LAYER}.attention.output.dense",
    "attention_norm": f"{_BERT_LAYER}.attention.output.LayerNorm",
    "up": f"{_BERT_LAYER}.intermediate.dense",
    "down": f"{_BERT_LAYER}.output.dense",
    "mlp_norm": f"{_BERT_LAYER}.output.LayerNorm",
    "pooler": "bert.pooler.dense",
    "transform": "cls.predictions.transform.dense",
    "transform_norm": "cls.predictions.transform.LayerNorm",
    "head": "cls.predictions",  # its matrix is the embedding's
    "classifier": "classifier",
}
DISK_NAMES: Mapping[str, Mapping[str, str]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "mixtral": _MIXTRAL,
    "qwen2_moe": _QWEN_MOE,
    "qwen3_moe": _QWEN_MOE,
    "dots1": _DOTS1,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK | _PREDICTION,
    "gpt2": _GPT2,
    "bloom": _BLOOM,
    "granite": _LLAMA,
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "smollm3": _LLAMA,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2,
    "phi3": _PHI3,
    "glm4": _GLM4,
    "glm4_moe": _DOTS1,
    "gpt_oss": _GPT_OSS,
    "granitemoe": _GRANITE_MOE,
    "llama4_text": _LLAMA4,
    "nemotron": _NEMOTRON,
    "bert": _BERT,
}

# Name prefix that files of a base model (without its head) omit, such as GPT-2's own files.
BASE_PREFIX = {
    family: {"gpt2": "transformer.", "bloom": "transformer.", "bert": "bert."}.get(family, "model.")
    for family in DISK_NAMES
}

# Name prefixes of further heads that a file may contain, such as BERT's own files, and of the other parts of a
# multimodal model.
OTHER_HEADS = {
    "bert": ("pooler.", "cls.", "classifier.", "qa_outputs."),
    "gemma3_text": ("vision_tower.", "multi_modal_projector."),
    "llama4_text": ("vision_model.", "multi_modal_projector."),
}

# Name prefixes of the language model in the files of a multimodal model -> the prefix without the other parts.
NESTED_PREFIXES = {
    "llama4_text": {"language_model.model.": "model.", "language_model.lm_head.": "lm_head."},
    "gemma3_text": {
        "language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model.",
    },
}  # fmt: skip

# Families whose files also hold layers that predict further tokens, numbered after the last layer; they are ignored.
FURTHER_LAYERS = frozenset({"deepseek_v3", "glm4_moe"})

# Former endings of tensor names -> current endings.
FORMER_ENDINGS = {
    "bert": {
        "LayerNorm.gamma": "LayerNorm.weight",
        "LayerNorm.beta": "LayerNorm.bias",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
}
