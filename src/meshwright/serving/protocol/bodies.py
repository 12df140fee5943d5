"""JSON bodies of the endpoints, as OpenAI's API and vLLM name their fields. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, WrapValidator

from meshwright.data.records.conversations import Message
from meshwright.serving.protocol.fields import (
    MOST_LOGPROBS,
    MOST_MESSAGES,
    MOST_SEQUENCES,
    UNSUPPORTED,
    Body,
    GenerationBody,
    TokenId,
)

TextPrompt = str | list[int]  # a text, or token IDs

_TOKENS_SCHEMA = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        _TOKENS_SCHEMA,
        {"type": "array", "minItems": 1, "maxItems": MOST_SEQUENCES, "items": {"type": "string"}},
        {"type": "array", "minItems": 1, "maxItems": MOST_SEQUENCES, "items": _TOKENS_SCHEMA},
    ]
}
_CONTENT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}


def _is_tokens(value: object) -> bool:
    """Return whether a value is a list of whole numbers, with at least one."""
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


def _parse_prompts(value: Any, _: Callable[[Any], Any]) -> list[TextPrompt]:
    """Validate a prompt or a list of prompts; returns a list."""
    if isinstance(value, str) or _is_tokens(value):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("should be a string, token IDs, or a list of either, and not empty")
    if len(value) > MOST_SEQUENCES:
        raise ValueError(f"should be at most {MOST_SEQUENCES} prompts, not {len(value)}")
    if not (all(isinstance(one, str) for one in value) or all(map(_is_tokens, value))):
        raise ValueError("should hold only strings, or only lists of token IDs that are not empty")
    return value


def _parse_content(value: Any, _: Callable[[Any], Any]) -> str:
    """Validate the content of a message, a string or parts of type text; returns the joined text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("should be a string or a list of parts of type text")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f'a part of type "{str(kind)[:40]}" is not supported, only "text"')
        if not isinstance(part.get("text"), str):
            raise ValueError('a part of type "text" should have a string "text"')
    return "".join(part["text"] for part in value)


class ChatMessage(Body):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool", "developer"]
    content: Annotated[str, WrapValidator(_parse_content), WithJsonSchema(_CONTENT_SCHEMA)]
    name: None = Field(None, description="not supported")
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = Field(None, description="not supported")
    function_call: None = Field(None, description="not supported")
    tool_call_id: None = Field(None, description="not supported")
    audio: None = Field(None, description="not supported")


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]


def to_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Convert the messages of a body to those of the chat template."""
    return [Message(one.role, one.content) for one in messages]


class CompletionBody(GenerationBody):
    """Body of `/v1/completions`."""

    prompt: Annotated[list[TextPrompt], WrapValidator(_parse_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: int | None = Field(None, ge=0, le=2**30, description="16")
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS, description="most likely tokens beside each token")
    echo: bool | None = Field(None, description="begin the text with the prompt; with logprobs, score its tokens")


class ChatBody(GenerationBody):
    """Body of `/v1/chat/completions`."""

    unsupported = {**UNSUPPORTED, "echo": (False,)}

    messages: Messages
    max_tokens: int | None = Field(None, ge=0, le=2**30, description="all that the model's length leaves")
    max_completion_tokens: int | None = Field(None, ge=0, le=2**30, description="newer name of max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS, description="needs logprobs: true")
    parallel_tool_calls: bool | None = Field(None, description="accepted, there are no tools")


class TokenizeBody(Body):
    """Body of `/tokenize`: one of `prompt` (vLLM), `content` (llama.cpp) and `messages`."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="begin with the model's start token; true for prompt")
    add_special: bool | None = Field(None, description="the same for content; false")
    return_token_strs: bool | None = Field(None, description="give the text of each token as `token_strs`")
    with_pieces: bool | None = Field(None, description="give each token as an object of `id` and `piece`")


class DetokenizeBody(Body):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: list[TokenId] = Field(max_length=2**22)


class ApplyTemplateBody(Body):
    """Body of `/apply-template`."""

    unsupported = {name: UNSUPPORTED[name] for name in ("tools", "chat_template", "chat_template_kwargs")}

    messages: Messages
