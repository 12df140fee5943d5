"""Tables of the fields of a Hugging Face ``config.json``, by family: fields that are read, fields that change nothing
here, and fields that are accepted at neutral values only.

Fields outside these tables are listed in one warning. `tests/spec/test_config_fields.py` compares the tables with the
configuration classes of transformers and with the keys that `config_json` looks up.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import ModelWarning, UserError
from meshwright.limits import shorten, shorten_repr
from meshwright.spec.families import Family


@dataclass(frozen=True, slots=True)
class NeutralValue:
    """Rule for a `config.json` field that Meshwright does not implement: values with which the field has no effect on
    the computation are accepted, all other values are refused. ``text``: description of the accepted values in error
    messages. ``accepts``: function (value, all ModelConfig fields by name) -> True for an accepted value."""

    text: str
    accepts: Callable[[object, Mapping[str, Any]], bool]  # the value, and the fields of ModelConfig


def _accept_only(*values: object) -> NeutralValue:
    """Return the rule for a `config.json` field that accepts only the given `values` and names them in errors."""
    return NeutralValue(" or ".join(map(repr, values)), lambda value, fields: value in values)


_ABSENT = NeutralValue("None", lambda value, fields: False)
_NOTHING = NeutralValue("empty", lambda value, fields: not value)
_EVERY_LAYER_ROTATES = NeutralValue(
    "1 for every layer", lambda value, fields: isinstance(value, list) and all(entry == 1 for entry in value)
)
_FULL_ATTENTION = NeutralValue(
    '"full_attention" for every layer',
    lambda value, fields: isinstance(value, list) and all(entry == "full_attention" for entry in value),
)
_AS_WINDOWED = NeutralValue(
    "the value that fits its sliding_window", lambda value, fields: value is (fields.get("sliding_window") is not None)
)
_AS_ALL_LAYERS = NeutralValue(
    "one name for all layers, that which fits its sliding_window",
    lambda value, fields: (
        isinstance(value, list)
        and {*map(str, value)} == {"full_attention" if fields.get("sliding_window") is None else "sliding_attention"}
    ),
)
_WINDOW_BASE = NeutralValue(
    "the rope_theta of its layers with a sliding window", lambda value, fields: value == fields["window_rope_theta"]
)
_HEAD_DIM = NeutralValue("the size of a head", lambda value, fields: value == fields["head_dim"])
_ROTARY_DIM = NeutralValue("qk_rope_head_dim", lambda value, fields: value == fields["latent"].rotary_dim)
_EXPERTS = NeutralValue("the number of experts", lambda value, fields: value == fields["experts"])
_USED_EXPERTS = NeutralValue("num_experts_per_tok", lambda value, fields: value == fields["experts_per_token"])
_SCALE_OF_HEAD = NeutralValue(
    "1 / sqrt(size of a head)",
    lambda value, fields: isinstance(value, int | float) and abs(value * fields["head_dim"] ** 0.5 - 1) < 1e-6,
)

# Ignored in every family: metadata, caches, outputs, dropout (0 here) and generation settings.
_METADATA = """_attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _experts_implementation _experts_implementation_internal _flash_attn_2_enabled _name_or_path _output_attentions
    _post_init_done attn_implementation architectures auto_map dtype finetuning_task ignore_keys_at_rope_validation
    is_llama_config model_type revision task_specific_params tokenizer_class torch_dtype torchscript
    transformers.js_config transformers_version unsloth_fixed unsloth_version use_bfloat16 id2label label2id num_labels
    _num_labels problem_type
    quantization_config compression_config
    initializer_range gradient_checkpointing chunk_size_feed_forward pretraining_tp tie_encoder_decoder """
_DROPOUT = """attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout embd_pdrop hidden_dropout
    hidden_dropout_prob resid_pdrop summary_first_dropout """
_GENERATION = """bad_words_ids begin_suppress_tokens cache_implementation decoder_start_token_id diversity_penalty
    do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id
    length_penalty max_length max_new_tokens min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_router_logits output_scores prefix
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate suppress_tokens temperature
    tf_legacy_loss top_k top_p typical_p use_cache use_return_dict bos_token_id eos_token_id pad_token_id sep_token_id
    cls_token_id mask_token_id unk_token_id """
_IGNORED = frozenset((_METADATA + _DROPOUT + _GENERATION).split())

# Default for all families; `_OWN_NEUTRAL` overrides it.
_NEUTRAL: dict[str, NeutralValue] = {
    **dict.fromkeys(
        ("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv", "attention_chunk_size", "text_config",
         "rope_local_base_freq", "rotary_dim", "altup_num_inputs", "sliding_window_pattern", "kv_lora_rank",
         "q_lora_rank", "cross_attention_hidden_size", "num_kv_shared_layers"),
        _ABSENT,
    ),
    **dict.fromkeys(
        ("embedding_multiplier", "logits_scaling", "logit_scale", "residual_multiplier", "rotary_pct", "rope_percent",
         "partial_rotary_factor", "attention_out_multiplier", "lm_head_multiplier", "key_multiplier"),
        _accept_only(1.0),
    ),
    **dict.fromkeys(
        ("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "attention_out_bias", "use_qk_norm", "qk_norm",
         "qk_layernorm", "use_post_norm", "use_mrope", "alibi", "use_alibi", "parallel_attn", "use_parallel_residual",
         "rope_interleaved", "rope_interleave", "add_cross_attention", "is_encoder_decoder", "is_decoder",
         "apply_residual_connection_post_layernorm", "use_bidirectional_attention", "scale_attn_by_inverse_layer_idx",
         "attention_sink", "add_final_layer_norm", "norm_topk_prob"),
        _accept_only(False),
    ),
    **dict.fromkeys(("scale_attn_weights", "is_causal", "use_rmsnorm"), _accept_only(True)),
    **dict.fromkeys(("n_group", "topk_group", "moe_layer_freq"), _accept_only(1)),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
         "moe_intermediate_size", "shared_expert_intermediate_size", "router_jitter_noise", "num_nextn_predict_layers",
         "mtp_num_hidden_layers"),
        _accept_only(0),
    ),
    **dict.fromkeys(("pruned_heads", "mlp_only_layers"), _NOTHING),
    "attention_multiplier": _SCALE_OF_HEAD,
    "query_pre_attn_scalar": _HEAD_DIM,
    "use_sliding_window": _AS_WINDOWED,
    "no_rope_layers": _EVERY_LAYER_ROTATES,
    "layer_types": _FULL_ATTENTION,
    "position_embedding_type": _accept_only("absolute"),
}  # fmt: skip

_EVERY = "vocab_size tie_word_embeddings hidden_size num_hidden_layers num_attention_heads "
_SCALED_FROM = "original_max_position_embeddings "
_ROPE = "rope_theta rope_scaling rope_parameters " + _SCALED_FROM
_DECODER = _EVERY + _ROPE + "max_position_embeddings intermediate_size num_key_value_heads head_dim "
_LLAMA = _DECODER + "hidden_act rms_norm_eps "
_WINDOWS = "sliding_window layer_types use_sliding_window "
_GEMMA = _DECODER + (
    "rms_norm_eps hidden_activation sliding_window layer_types attention_bias query_pre_attn_scalar "
    "final_logit_softcapping "
)
_MIXTURE = "num_experts_per_tok router_aux_loss_coef "
_QWEN_MIXTURE = _MIXTURE + "num_experts moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers "
_DEEPSEEK_MIXTURE = (
    "n_routed_experts num_experts_per_tok n_shared_experts moe_intermediate_size first_k_dense_replace "
    "routed_scaling_factor n_group topk_group "
)
_LATENT = _LLAMA.replace("head_dim ", "") + "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim "

# Family -> fields that are read, in addition to those in `_IGNORED`.
_READ: dict[str, str] = {
    "llama": _LLAMA + "attention_bias mlp_bias",
    "mistral": _LLAMA + "sliding_window",
    "qwen2": _LLAMA + _WINDOWS + "max_window_layers",
    "qwen3": _LLAMA + _WINDOWS + "max_window_layers attention_bias",
    "mixtral": _LLAMA + _MIXTURE + "sliding_window num_local_experts",
    "qwen2_moe": _LLAMA + _WINDOWS + _QWEN_MIXTURE + "max_window_layers qkv_bias shared_expert_intermediate_size",
    "qwen3_moe": _LLAMA + _QWEN_MIXTURE + "sliding_window use_sliding_window attention_bias num_local_experts",
    "dots1": _LLAMA + _DEEPSEEK_MIXTURE + "sliding_window layer_types max_window_layers attention_bias norm_topk_prob",
    "deepseek_v2": _LATENT + _DEEPSEEK_MIXTURE + "topk_method router_aux_loss_coef",
    "deepseek_v3": _LATENT + _DEEPSEEK_MIXTURE + "norm_topk_prob rope_interleave",
    "gpt2": _EVERY
    + "max_position_embeddings n_embd n_layer n_head n_inner n_positions activation_function layer_norm_epsilon",
    "bloom": _EVERY + "n_embed n_layer n_head seq_length activation_function layer_norm_epsilon",
    "bert": _EVERY + "max_position_embeddings intermediate_size hidden_act type_vocab_size layer_norm_eps",
    "gemma2": _GEMMA + "attn_logit_softcapping",
    "gemma3_text": _GEMMA.replace(_SCALED_FROM, "") + "rope_local_base_freq sliding_window_pattern",
    "granite": _LLAMA
    + "attention_bias mlp_bias attention_multiplier embedding_multiplier residual_multiplier logits_scaling",
    "granitemoe": _LLAMA
    + _MIXTURE
    + "num_local_experts attention_bias attention_multiplier embedding_multiplier residual_multiplier logits_scaling",
    "olmo2": _LLAMA + "attention_bias",
    "olmo3": _LLAMA.replace(_SCALED_FROM, "") + "attention_bias sliding_window layer_types",
    "smollm3": _LLAMA + _WINDOWS + "attention_bias mlp_bias no_rope_layers no_rope_layer_interval",
    "phi3": _LLAMA + "sliding_window partial_rotary_factor",
    "glm4": _LLAMA + "attention_bias partial_rotary_factor",
    "glm4_moe": _LLAMA + _DEEPSEEK_MIXTURE + "attention_bias partial_rotary_factor use_qk_norm norm_topk_prob",
    "gpt_oss": _LLAMA
    + _MIXTURE
    + "num_local_experts sliding_window layer_types attention_bias swiglu_limit swiglu_alpha output_router_logits",
    "llama4_text": _LLAMA
    + "num_experts_per_tok num_local_experts intermediate_size_mlp moe_layers interleave_moe_layer_step use_qk_norm "
    "attention_bias attention_chunk_size layer_types no_rope_layers no_rope_layer_interval attn_temperature_tuning "
    "attn_scale floor_scale",
    "nemotron": _DECODER + "hidden_act norm_eps attention_bias mlp_bias",
}

# Family -> fields without effect; in planning-only families, without effect on sizes and operations.
_OWN_IGNORED: dict[str, str] = {
    # Sizes of a summarising head, an old name of n_positions, and the precision of an intermediate result.
    "gpt2": "summary_type summary_use_proj summary_activation summary_proj_to_labels n_ctx reorder_and_upcast_attn "
    "n_special predict_special_tokens",
    "llama": "max_sequence_length",  # an old name of max_position_embeddings
    "bert": "directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head "
    "pooler_type",
    "bloom": "slow_but_exact masked_softmax_fusion offset_alibi attention_softmax_in_fp32 bias_dropout_fusion "
    "skip_bias_add skip_bias_add_qkv hidden_act n_inner",
    "gemma2": "hidden_act cache_implementation",
    "gemma3_text": "hidden_act _sliding_window_pattern cache_implementation",
    "phi3": "embd_pdrop resid_pdrop",
    "nemotron": "partial_rotary_factor rope_percent",
    "dots1": "ep_size",
    "glm4_moe": "num_mtp_layers num_nextn_predict_layers",  # layers that predict further tokens
    # The training code's loss settings; transformers computes no load-balancing loss in these families.
    "deepseek_v2": "ep_size aux_loss_alpha seq_aux",
    "deepseek_v3": "ep_size aux_loss_alpha seq_aux num_nextn_predict_layers num_mtp_layers",
    # transformers computes no load-balancing loss.
    "llama4_text": "router_aux_loss_coef for_llm_compressor",
    "gpt_oss": "initial_context_length",  # transformers does not read it
    "qwen3_moe": "max_window_layers",  # every layer has a window or none has
}

_OWN_NEUTRAL: dict[str, dict[str, NeutralValue]] = {
    "bert": {"problem_type": _accept_only("single_label_classification")},  # the loss of an encoder's head
    "qwen2": {"attention_bias": _accept_only(True), "qkv_bias": _accept_only(True)},
    "qwen2_moe": {"attention_bias": _accept_only(True)},
    "qwen3": {name: _accept_only(True) for name in ("use_qk_norm", "qk_norm", "qk_layernorm")},
    "qwen3_moe": {
        **{name: _accept_only(True) for name in ("use_qk_norm", "qk_norm", "qk_layernorm")},
        "layer_types": _AS_ALL_LAYERS,
    },
    "mistral": {"layer_types": _AS_ALL_LAYERS},
    "mixtral": {"norm_topk_prob": _accept_only(True), "layer_types": _AS_ALL_LAYERS},
    "phi3": {"layer_types": _AS_ALL_LAYERS},
    "glm4_moe": {"num_local_experts": _EXPERTS},
    "gpt_oss": {
        "norm_topk_prob": _accept_only(True), "num_experts": _EXPERTS, "experts_per_token": _USED_EXPERTS,
    },
    "granitemoe": {"norm_topk_prob": _accept_only(True)},
    "olmo3": {"rope_local_base_freq": _WINDOW_BASE},  # transformers does not know it
    "deepseek_v2": {
        "head_dim": _ROTARY_DIM, "qk_head_dim": _HEAD_DIM, "scoring_func": _accept_only("softmax"),
        "num_experts": _EXPERTS, "num_local_experts": _EXPERTS,
    },
    "deepseek_v3": {
        "head_dim": _ROTARY_DIM, "qk_head_dim": _HEAD_DIM, "scoring_func": _accept_only("sigmoid"),
        "topk_method": _accept_only("noaux_tc"), "num_experts": _EXPERTS, "num_local_experts": _EXPERTS,
    },
    "dots1": {
        **{name: _accept_only(True) for name in ("use_qk_norm", "qk_norm", "qk_layernorm")},
        "scoring_func": _accept_only("sigmoid", "noaux_tc"), "topk_method": _accept_only("noaux_tc"),
        "num_experts": _EXPERTS, "num_local_experts": _EXPERTS,  # its other names in transformers
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FieldTable:
    """Table of the known ``config.json`` fields of a family. read: fields that set ModelConfig fields. ignored: fields
    without effect on the computation. neutral: {field that is accepted only at some values: rule for these values}.
    """

    read: frozenset[str]
    ignored: frozenset[str]
    neutral: Mapping[str, NeutralValue]


def get_field_table(family: str) -> FieldTable:
    """Return the table of known ``config.json`` fields of a family, given by its ``model_type``."""
    read = frozenset(_READ[family].split())
    own = _OWN_NEUTRAL.get(family, {})
    ignored = (_IGNORED | frozenset(_OWN_IGNORED.get(family, "").split())) - read - own.keys()
    neutral = _NEUTRAL | own
    return FieldTable(read, ignored, {name: one for name, one in neutral.items() if name not in read | ignored})


def check_fields(data: Mapping[str, Any], family: Family, fields: Mapping[str, Any], where: str) -> None:
    """Check every field of a ``config.json`` object (``data``) against the known fields of its family; null fields are
    skipped.

    ``fields``: the ModelConfig fields that `config_json` read from ``data``, by name; ``where``: name of the
    configuration in errors. Raises ``UserError`` for a value that changes the computation in a way that is not
    implemented. Warns (`ModelWarning`) of unknown fields, of custom code, and of a transformers class
    (``architectures``) that is not the family's.
    """
    table = get_field_table(family.name)
    unknown = []
    for name, value in data.items():
        if value is None or name in table.read or name in table.ignored:
            continue
        neutral = table.neutral.get(name)
        if neutral is None:
            unknown.append(name)
        elif not neutral.accepts(value, fields):
            raise UserError(
                f'{where}: unsupported "{name}" = {shorten_repr(value)}; {family.name} supports only {neutral.text}'
            )
    if unknown:
        names = ", ".join(f'"{shorten(str(name), 80)}"' for name in unknown[:8])
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        warnings.warn(
            f"{where}: unknown {family.name} fields ignored: {names}{more}; results differ from the original model if "
            "they change the computation",
            ModelWarning,
            stacklevel=2,
        )
    if foreign := format_foreign_architecture_warning(data, family):
        warnings.warn(f"{where}: {foreign}", ModelWarning, stacklevel=2)


def format_foreign_architecture_warning(data: Mapping[str, Any], family: Family) -> str | None:
    """Return a one-line warning if a ``config.json`` object (`data`) asks for custom code, or names a transformers
    class (``architectures``) that is not the class of `family`; else None. family: the family as which `data` was read.
    """
    if data.get("auto_map"):
        return f'"auto_map": custom modeling code (trust_remote_code) is never run; treated as {family.architecture}'
    named = data.get("architectures") or [family.architecture]
    first = named[0] if isinstance(named, list) else named
    if not family.encoder and str(first).lower() != family.architecture.lower():
        named = shorten(str(first), 80)
        return f'"architectures" names {named}; treated as {family.architecture}, whose layers may differ'
    return None
