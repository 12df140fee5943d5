"""Known request fields that this server does not support, in one table for all endpoints. Free of torch."""

from __future__ import annotations

from typing import Any

# (values that are accepted because they change nothing, names of the fields); of OpenAI's API, vLLM and llama.cpp
_FIELDS: tuple[tuple[tuple[Any, ...], str], ...] = (
    ((), "audio prediction web_search_options reasoning reasoning_effort verbosity thinking thinking_token_budget"),
    ((), "guided_json guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern"),
    ((), "structural_tag repetition_detection documents prompt_embeds kv_transfer_params lora_request vllm_xargs"),
    (([],), "tools functions logits_processors bad_words allowed_token_ids logprob_token_ids"),
    (([],), "samplers lora image_data multimodal_data response_fields"),
    (({},), "structured_outputs json_schema chat_template_kwargs mm_processor_kwargs"),
    (("",), "suffix grammar chat_template"),
    ((False,), "echo store use_beam_search early_stopping continue_final_message echo_prompt parse_special"),
    ((False,), "post_sampling_probs timings_per_token return_progress"),
    ((True,), "skip_special_tokens spaces_between_special_tokens detokenize add_generation_prompt include_reasoning"),
    ((True,), "cache_prompt"),
    ((0,), "mirostat dry_multiplier xtc_probability dynatemp_range n_indent"),
    ((1,), "best_of length_penalty tfs_z typical_p"),
    ((0, 1), "min_keep"),
    ((0, -1), "top_n_sigma t_max_predict_ms n_keep"),
    ((-1,), "repeat_last_n"),
    (("none", "auto"), "tool_choice function_call"),
    (("auto", "default"), "service_tier"),
    (("left",), "truncation_side"),
    (({"type": "text"},), "response_format"),
    (([], ["text"]), "modalities"),
)
UNSUPPORTED = {name: neutral for neutral, names in _FIELDS for name in names.split()}
"""{name: values that are accepted because they change nothing}; other values are refused, wherever the body does not
declare a field of this name."""
UNSUPPORTED_IN_MESSAGES: dict[str, tuple[Any, ...]] = {"function_call": (), "audio": ()}
"""The same for the messages of a conversation."""
