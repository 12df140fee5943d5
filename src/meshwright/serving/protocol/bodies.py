"""JSON bodies of the endpoints: the fields that are read, with ranges and defaults, and those that are refused.

Names and meanings are those of OpenAI's API, vLLM and llama.cpp. Free of torch."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from meshwright.data.records.template_inputs import Conversation, parse_conversation
from meshwright.errors import UserError
from meshwright.serving import sampling
from meshwright.serving.prompts import Prompts, PromptTooLong
from meshwright.serving.protocol import parameters
from meshwright.serving.protocol.errors import ApiError
from meshwright.untrusted import check_nesting

_SUBJECT = re.compile("(Input|List|String|Dictionary|Tuple) should")


def _make_wrong_field_error(name: str, message: str, kind: str = "wrong_field") -> PydanticCustomError:
    """Create the pydantic error with this `message` about the field `name`, for validators that check several fields at
    once. kind: pydantic error type."""
    return PydanticCustomError(kind, message, {"field": name})  # type: ignore[arg-type]


def _allow_null(schema: dict[str, Any]) -> None:
    """Change a JSON schema in place so that each optional field also accepts null, which means its default."""
    for name, field in schema["properties"].items():
        if name not in schema.get("required", ()):
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}]}


class Body(BaseModel):
    """Base class of JSON request bodies and of objects in them. A field that is null has its default; unknown fields
    are ignored.

    `unsupported`: {name of an unsupported field: values without effect, which are accepted}; other values are an error,
    unless the body declares the field."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, json_schema_extra=_allow_null)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = parameters.UNSUPPORTED

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        """Return the JSON object `values` without null fields; raise an error for an unsupported value of a field."""
        if not isinstance(values, dict):
            return values
        given = {name: value for name, value in values.items() if value is not None}
        for name, value in given.items():
            if name not in cls.model_fields and name in cls.unsupported and value not in cls.unsupported[name]:
                raise _make_wrong_field_error(name, "not supported by this server", "unsupported_parameter")
        return given


class ChatMessage(Body):
    """One message of a conversation, as in OpenAI's API. content: a text or a list of text parts; null if an
    assistant's message has only tool calls. tool_calls: the calls, in OpenAI's format. tool_call_id: ID of the call
    that a message of the role "tool" answers."""

    unsupported = parameters.UNSUPPORTED_IN_MESSAGES

    role: Literal["system", "user", "assistant", "tool", "developer"]
    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=4096)]


class TemplateBody(Body):
    """Base class of the bodies that may have a conversation for the model's chat template."""

    messages: Messages | None = None
    tools: list[dict[str, Any]] = Field([], max_length=1024, description="functions that the prompt describes")
    chat_template_kwargs: dict[str, Any] = Field({}, description="further variables of the chat template")
    add_generation_prompt: bool = Field(True, description="end messages with the header of the assistant's next turn")

    def to_conversation(self) -> tuple[Conversation, bool]:
        """Return (the conversation, True to append the header of the assistant's next turn). Raises UserError, whose
        message begins with the name of the wrong field."""
        messages = [message.model_dump() for message in self.messages or []]
        return parse_conversation(messages, self.tools, self.chat_template_kwargs), self.add_generation_prompt


class ConversationBody(TemplateBody):
    """Body of `/apply-template`: a conversation's messages, with tools."""

    messages: Messages


class TokenizeBody(TemplateBody):
    """Body of `/tokenize`: exactly one of `prompt` (vLLM), `content` (llama.cpp) and `messages`."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    add_special_tokens: bool = Field(True, description="begin the prompt with the model's start token")
    add_special: bool = Field(False, description="the same for content")
    parse_special: parameters.ParseSpecial = False
    return_token_strs: bool = Field(False, description="return the text of each token as `token_strs`")
    with_pieces: bool = Field(False, description="return each token as an object of `id` and `piece`")

    @model_validator(mode="after")
    def _check_given(self) -> TokenizeBody:
        """Check that exactly one of `prompt`, `content` and `messages` is given."""
        if [self.prompt, self.content, self.messages].count(None) != 2:
            raise _make_wrong_field_error("prompt", "give one of prompt, content and messages")
        if self.tools and self.messages is None:
            raise _make_wrong_field_error("tools", "needs messages")
        return self


class DetokenizeBody(Body):
    """Body of `/detokenize`: token IDs to be converted to text."""

    model: str | None = None
    tokens: Annotated[list[sampling.TokenId], Field(fail_fast=True)]


class StreamOptions(Body):
    """`stream_options` of a request: options to report token usage in a streamed response."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    include_usage: bool = Field(False, description="send the usage before the end of the stream")
    continuous_usage_stats: bool = Field(False, description="send the usage so far with every chunk")


class GenerationBody(Body):
    """Base class of the bodies of all endpoints that generate text: sampling options, stop conditions and streaming, as
    in OpenAI's API and vLLM."""

    default_tokens: ClassVar[int | None] = None  # of `max_tokens`; None: up to the model's maximum length

    max_tokens: sampling.TokenCount | None
    model: str | None = Field(None, description="name of the served model")
    n: parameters.ChoiceCount = Field(1, description="choices for each prompt")
    temperature: sampling.Temperature = 1.0
    top_p: sampling.TopP = 1.0
    top_k: sampling.TopK = 0
    min_p: sampling.MinP = 0.0
    repetition_penalty: sampling.RepetitionPenalty = 1.0
    presence_penalty: sampling.AdditivePenalty = 0.0
    frequency_penalty: sampling.AdditivePenalty = 0.0
    logit_bias: dict[parameters.BiasedToken, sampling.Bias] | list[parameters.BiasPair] = Field(
        {}, max_length=1024, description="by token ID, or as llama.cpp's pairs [token ID, bias]; false there: -100"
    )
    seed: sampling.Seed | None = Field(None, description="null: chosen at random, and returned")
    min_tokens: sampling.TokenCount = Field(0, description="tokens before a stop token or string may end the answer")
    stop: parameters.StopString | Annotated[list[parameters.StopString], Field(max_length=32)] = []
    stop_token_ids: Annotated[list[sampling.TokenId], Field(max_length=1024, fail_fast=True)] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = Field(False, description="do not stop at the model's end tokens")
    add_special_tokens: bool = Field(True, description="begin a text prompt with the model's start token")
    truncate_prompt_tokens: Annotated[int, Field(ge=1, le=2**30)] | Literal[-1] | None = Field(
        None, description="keep only this many last tokens of the prompt; -1: the model's maximum length"
    )
    prompt_logprobs: parameters.Alternatives | None = None
    stream: bool = False
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1, description="lower values are admitted first")
    timeout: float | None = Field(None, gt=0, le=1e6, description="seconds until the request is cancelled (408)")
    cache_salt: str = Field("", max_length=256, description="share the prefix cache only with requests of equal salt")

    @property
    def alternatives(self) -> int | None:
        """Number of most likely tokens to report for each token of the answer; None: no log-probabilities at all."""
        raise NotImplementedError

    def encode(self, prompts: Prompts) -> list[tuple[list[int], str | None]]:
        """Tokenize the body's prompts. Return a pair for each prompt: (token IDs, text of the prompt if it is to be put
        before the answer, else None). prompts: the model's tokenizer. Raises UserError for an invalid prompt."""
        raise NotImplementedError

    def truncate(self, tokens: list[int], prompts: Prompts) -> list[int]:
        """Return the last tokens of a prompt, at most as many as the field `truncate_prompt_tokens` says (None: all;
        -1: the model's maximum length, `prompts.max_length`). tokens: the prompt's token IDs."""
        most = prompts.max_length if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens
        return tokens if most is None else tokens[-most:]

    def to_sampling(self, ends: Collection[int], max_tokens: int, score_prompt: bool) -> sampling.Sampling:
        """Convert the body to the engine's sampling options. ends: IDs of the model's end tokens. max_tokens: most
        tokens of the answer. score_prompt: True to report the prompt's log-probabilities too. Raises UserError."""
        same = "temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty min_tokens"
        biases = self.logit_bias.items() if isinstance(self.logit_bias, dict) else self.logit_bias
        scored = [] if self.prompt_logprobs is None else [self.prompt_logprobs]
        if score_prompt and self.alternatives is not None:
            scored.append(self.alternatives)
        return sampling.Sampling(
            **{name: getattr(self, name) for name in same.split()},
            logit_bias={int(token): -100.0 if bias is False else bias for token, bias in biases},
            seed=secrets.randbits(32) if self.seed is None else self.seed,
            max_tokens=max_tokens,
            stop_tokens=frozenset(self.stop_token_ids) | frozenset(() if self.ignore_eos else ends),
            logprobs=self.alternatives,
            prompt_logprobs=max(scored, default=None),
        )


class PromptBody(GenerationBody):
    """Base class of the bodies that have a `prompt` (texts or token IDs) instead of messages. echo: True to put the
    prompt's text before the answer."""

    prompt: str | parameters.Tokens | parameters.Texts | parameters.TokenLists
    max_tokens: sampling.TokenCount | None = Field(None, description="default: 16")
    logprobs: parameters.Alternatives | None = None
    parse_special: parameters.ParseSpecial = False
    echo: bool = Field(False, description="begin the text with the prompt; with logprobs, score its tokens")

    @property
    def alternatives(self) -> int | None:
        """Number of most likely tokens to report for each token of the answer; None: no log-probabilities at all."""
        return self.logprobs

    def encode(self, prompts: Prompts) -> list[tuple[list[int], str | None]]:
        """Tokenize the body's prompts. Return a pair for each prompt: (token IDs, text of the prompt if `echo` is true,
        else None). prompts: the model's tokenizer. Raises UserError for an invalid prompt."""
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        inputs: list[tuple[list[int], str | None]] = []
        for given in cast("list[str | list[int]]", [self.prompt] if single else self.prompt):
            if isinstance(given, str):
                whole = prompts.encode(given, self.add_special_tokens, parse_special=self.parse_special)
            else:
                whole = prompts.check(given)
            tokens = self.truncate(whole, prompts)
            echoed = None
            if self.echo:
                echoed = given if isinstance(given, str) and tokens == whole else prompts.decode(tokens)
            inputs.append((tokens, echoed))
        return inputs


class LlamaBody(PromptBody):
    """Body of llama.cpp's `/completion`, with llama.cpp's field names, defaults, and meanings of 0 and -1."""

    prompt: str | parameters.Tokens
    n: int = Field(1, ge=1, le=1)
    temperature: sampling.Temperature = 0.8
    top_p: sampling.TopP = 0.95
    top_k: sampling.TopK = 40
    min_p: sampling.MinP = 0.05
    repetition_penalty: sampling.RepetitionPenalty = Field(1.0, alias="repeat_penalty")
    max_tokens: sampling.TokenCount | Literal[-1] | None = Field(
        None, alias="n_predict", description="-1: up to the model's maximum length"
    )
    logprobs: parameters.Alternatives | None = Field(None, alias="n_probs")
    return_tokens: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, values: Any) -> Any:
        """Return the JSON object `values` without fields whose value means the default (`neutral`)."""
        neutral = {"seed": -1, "n_predict": -1, "n_probs": 0}
        return {name: value for name, value in values.items() if name not in neutral or value != neutral[name]}


class OpenAIBody(GenerationBody):
    """Base class of the bodies of OpenAI's `/v1/completions` and `/v1/chat/completions`: the fields of both."""

    best_of: parameters.ChoiceCount | None = Field(None, description="must equal n")
    stream_options: StreamOptions = Field(default_factory=lambda: StreamOptions.model_validate({}))
    return_token_ids: bool = Field(False, description="return the `token_ids` of each choice")
    return_tokens_as_token_ids: bool = Field(False, description="show a token in logprobs as token_id:7")

    @model_validator(mode="after")
    def _check_pairs(self) -> OpenAIBody:
        """Raise an error if `best_of` differs from `n`, `stream_options` comes without `stream`, or `prompt_logprobs`
        with `stream`."""
        for holds, field, message in (
            (self.best_of in (None, self.n), "best_of", "not supported, except equal to n"),
            (self.stream or "stream_options" not in self.model_fields_set, "stream_options", "needs stream: true"),
            (not self.stream or self.prompt_logprobs is None, "prompt_logprobs", "not supported with stream: true"),
        ):
            if not holds:
                raise _make_wrong_field_error(field, message)
        return self


class CompletionBody(PromptBody, OpenAIBody):
    """Body of OpenAI's `/v1/completions`: generation from prompts."""

    default_tokens = 16  # as in OpenAI's API


class ChatBody(OpenAIBody, ConversationBody):
    """Body of OpenAI's `/v1/chat/completions`: generation of a conversation's next assistant message."""

    max_tokens: sampling.TokenCount | None = Field(None, description="default: up to the model's maximum length")
    max_completion_tokens: sampling.TokenCount | None = Field(None, description="newer name of max_tokens")
    logprobs: bool = False
    top_logprobs: parameters.Alternatives = Field(0, description="needs logprobs: true")

    @model_validator(mode="after")
    def _check_names(self) -> ChatBody:
        """Copy `max_completion_tokens`, the newer name, to `max_tokens`; raise an error for `top_logprobs` without
        `logprobs`."""
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise _make_wrong_field_error("top_logprobs", "needs logprobs: true")
        return self

    @property
    def alternatives(self) -> int | None:
        """Number of most likely tokens to report for each token of the answer; None: no log-probabilities at all."""
        return self.top_logprobs if self.logprobs else None

    def encode(self, prompts: Prompts) -> list[tuple[list[int], str | None]]:
        """Tokenize the conversation in the model's chat template. Return [(token IDs, None)]: one prompt that is not
        echoed. prompts: tokenizer and chat template. Raises UserError for an invalid conversation."""
        return [(self.truncate(prompts.encode_chat(*self.to_conversation()), prompts), None)]


_Body = TypeVar("_Body", bound=Body)


def parse_body(model: type[_Body], data: bytes | bytearray) -> _Body:
    """Parse and validate the JSON `data` as a `model`. Raises ApiError (400), which names the first wrong field."""
    try:
        values = from_json(data, allow_inf_nan=False)
        check_nesting(values)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body should be a JSON object", code="invalid_json")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _make_field_error(error) from None


def _make_field_error(error: ValidationError) -> ApiError:
    """Convert a pydantic error to an ApiError (400) about the first wrong field; the message does not show its value.
    If the field may have several types, the message is about the type that matches best, or about all if none does."""
    first, code, found = "", None, list[tuple[bool, int, str]]()
    for each in error.errors(include_url=False, include_input=False):
        place, inner = ["", ""], 0
        for part in (*each["loc"], *([each["ctx"]["field"]] if "field" in each.get("ctx", {}) else [])):
            if isinstance(part, str) and (part == "str" or not part.isidentifier() or place[0] == "logit_bias"):
                inner = 1  # a type of a union, or a key: the rest of the path is inside the value
            elif isinstance(part, int):
                place[inner] += f"[{part}]"
            else:
                place[inner] += f".{part}" if place[inner] else part
        first = first or place[0]
        if place[0] == first:
            text = f"{place[1]} {_SUBJECT.sub('should', each['msg'])}".strip().replace(" after validation", "")
            # A type of the union matches best if what is wrong is not a type, then if it is deep inside the value.
            found.append((each["type"].endswith("_type"), -place[1].count("["), text))
            code = each["type"] if each["type"] == "unsupported_parameter" else code
    best = min(found, key=lambda each: each[:2])
    texts = dict.fromkeys(each[2] for each in found if each[:2] == best[:2] == (True, 0)) or [best[2]]
    return ApiError(400, f"{first}: {', or '.join(texts)}", param=first, code=code)


def make_option_error(error: UserError, model: type[Body]) -> ApiError:
    """Convert an error of a parsed body to an ApiError (400). `param` is the field of `model` that begins its message,
    else the field of the input: an error that names no field is about the prompt, the conversation or the tokens."""
    word, fields = str(error).partition(" ")[0].rstrip(":"), model.model_fields
    source = next((name for name in ("prompt", "messages", "tokens") if name in fields), None)
    param = word if word.partition("[")[0] in fields else source
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    return ApiError(400, str(error), param=param, code=code)
