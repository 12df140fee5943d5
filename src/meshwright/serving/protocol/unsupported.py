"""Known request fields that this server does not support, in one table for all endpoints. Free of torch."""

from __future__ import annotations

from typing import Any

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI's API
    **dict.fromkeys(("tools", "functions"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "response_format": ({"type": "text"},),
    "modalities": ([], ["text"]),
    **dict.fromkeys(("audio", "prediction", "web_search_options", "reasoning", "reasoning_effort", "verbosity"), ()),
    "suffix": ("",),
    **dict.fromkeys(("echo", "store"), (False,)),
    "best_of": (1,),
    "service_tier": ("auto", "default"),
    # vLLM
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend"), ()),
    **dict.fromkeys(("guided_whitespace_pattern", "structural_tag", "repetition_detection"), ()),
    **dict.fromkeys(("structured_outputs", "chat_template_kwargs", "mm_processor_kwargs"), ({},)),
    **dict.fromkeys(("documents", "prompt_embeds", "thinking", "kv_transfer_params", "lora_request", "vllm_xargs"), ()),
    "thinking_token_budget": (),
    **dict.fromkeys(("logits_processors", "bad_words", "allowed_token_ids", "logprob_token_ids"), ([],)),
    **dict.fromkeys(("use_beam_search", "early_stopping", "continue_final_message", "echo_prompt"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "detokenize"), (True,)),
    **dict.fromkeys(("add_generation_prompt", "include_reasoning"), (True,)),
    "chat_template": ("",),
    "length_penalty": (1,),
    "truncation_side": ("left",),
    # llama.cpp
    "parse_special": (False,),
    "grammar": ("",),
    "json_schema": ({},),
    **dict.fromkeys(("mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range", "n_indent"), (0,)),
    **dict.fromkeys(("tfs_z", "typical_p"), (1,)),
    **dict.fromkeys(("samplers", "lora", "image_data", "multimodal_data", "response_fields"), ([],)),
    **dict.fromkeys(("top_n_sigma", "t_max_predict_ms", "n_keep"), (0, -1)),
    "min_keep": (0, 1),
    "repeat_last_n": (-1,),
    "cache_prompt": (True,),
    **dict.fromkeys(("post_sampling_probs", "timings_per_token", "return_progress"), (False,)),
}
"""{name: values that are accepted because they change nothing}; other values are refused, wherever the body does not
declare a field of this name."""

UNSUPPORTED_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    **dict.fromkeys(("name", "function_call", "tool_call_id", "audio"), ()),
}
"""The same for the messages of a conversation."""
