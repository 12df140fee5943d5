"""Parameters of requests, in one table for all endpoints: limits and descriptions of those that several of them have,
and the known ones that this server does not support. Free of torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from meshwright.limits import get_limit
from meshwright.serving.sampling import Bias, TokenId

MAX_SEQUENCES = 1024  # prompts x n of one HTTP request

Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_SEQUENCES, fail_fast=True)]
TokenLists = Annotated[list[Tokens], Field(min_length=1, max_length=MAX_SEQUENCES, fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=128)]
BiasedToken = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
# left_to_right: a bias of 0 must not become False, which bans the token. Not strict: a JSON array is a list.
PairedBias = Annotated[Bias | Literal[False], Field(union_mode="left_to_right")]
BiasPair = Annotated[tuple[TokenId, PairedBias], Field(strict=False)]
Alternatives = Annotated[int, Field(ge=0, le=20, description="number of most likely tokens reported for each token")]
ParseSpecial = Annotated[bool, Field(description="parse special tokens that a text prompt spells")]

ChoiceCount = Annotated[int, Field(ge=1, le=get_limit("choices"))]

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
