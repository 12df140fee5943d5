"""Fields that requests for text have in common, their limits, and the fields that are refused. Free of torch."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, WrapValidator
from pydantic_core import from_json

from meshwright.errors import UserError
from meshwright.serving.protocol.errors import ApiError
from meshwright.serving.sampling import Sampling
from meshwright.untrusted import check_nesting

MOST_CHOICES = 128  # `n`; as OpenAI's API
MOST_SEQUENCES = 1024  # prompts x n of one HTTP request
MOST_LOGPROBS = 20  # alternatives of a token; as OpenAI's API
MOST_MESSAGES = 4096
MOST_STOPS = 32  # stop strings, each of at most 128 characters

STOP_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1, "maxLength": 128},
        {"type": "array", "maxItems": MOST_STOPS, "items": {"type": "string", "minLength": 1, "maxLength": 128}},
        {"type": "null"},
    ]
}

# Fields that other servers know and this one cannot honour, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tools", "functions", "logits_processors", "bad_words", "allowed_token_ids"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("response_format",), ({"type": "text"},)),
    **dict.fromkeys(("modalities",), ([], ["text"])),
    **dict.fromkeys(("audio", "prediction", "web_search_options", "reasoning", "reasoning_effort", "verbosity"), ()),
    **dict.fromkeys(("suffix", "grammar", "chat_template"), ("",)),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend"), ()),
    **dict.fromkeys(("structured_outputs", "json_schema", "chat_template_kwargs", "mm_processor_kwargs"), ({},)),
    **dict.fromkeys(("documents", "prompt_embeds", "prompt_logprobs", "truncate_prompt_tokens", "thinking"), ()),
    **dict.fromkeys(("use_beam_search", "early_stopping", "continue_final_message", "store", "echo_prompt"), (False,)),
    **dict.fromkeys(("return_tokens_as_token_ids",), (False,)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("length_penalty", "typical_p"), (1, 1.0)),
    **dict.fromkeys(("service_tier",), ("auto", "default")),
    **dict.fromkeys(("kv_transfer_params", "lora_request", "vllm_xargs"), ()),
}


def _parse_stop(value: Any, _: Any) -> tuple[str, ...]:
    """Validate a string or a list of strings; return them as a tuple."""
    stops = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("should be a string or a list of strings")
    if len(stops) > MOST_STOPS or not all(1 <= len(stop) <= 128 for stop in stops):
        raise ValueError("should be at most 32 strings of 1 to 128 characters")
    return tuple(stops)


def _parse_bias(value: Any, _: Any) -> dict[int, float]:
    """Validate an object from token ID to bias; return it with whole numbers as keys."""
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > 1024:
        raise ValueError("should be an object of at most 1,024 token IDs, each with a number")
    found = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise ValueError(f"key {key[:20]!r} should be a token ID")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            raise ValueError(f"of token {key} should be a number from -100 to 100")
        found[int(key)] = float(bias)
    return found


_BIAS_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "maxProperties": 1024,
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        },
        {"type": "null"},
    ]
}
Stop = Annotated[tuple[str, ...], WrapValidator(_parse_stop), WithJsonSchema(STOP_SCHEMA)]
LogitBias = Annotated[dict[int, float], WrapValidator(_parse_bias), WithJsonSchema(_BIAS_SCHEMA)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Body(BaseModel):
    """JSON body of a request. null is the default of every field; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}


class StreamOptions(Body):
    """What a stream reports beside text."""

    include_usage: bool | None = Field(None, description="send the usage before the end of the stream")
    continuous_usage_stats: bool | None = Field(None, description="send the usage so far with every chunk")


class SamplingBody(Body):
    """Fields of all requests for text."""

    defaults: ClassVar[Mapping[str, float]] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

    temperature: float | None = Field(None, ge=0, le=100, description="0: the most likely token")
    top_p: float | None = Field(None, gt=0, le=1, description="1: off")
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="0 or -1: off")
    min_p: float | None = Field(None, ge=0, le=1, description="0: off")
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="0: off")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="0: off")
    logit_bias: LogitBias = {}
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="null: drawn, and returned")
    stop: Stop = ()
    ignore_eos: bool | None = Field(None, description="the model's end tokens end nothing")
    stream: bool | None = None

    def to_sampling(self, ends: Collection[int], **options: Any) -> Sampling:
        """Build the sampling options. `ends`: end tokens of the model; `options`: more fields of `Sampling`, of which
        `stop_tokens` end the answer with `ignore_eos`, too. Raises UserError."""
        chosen: dict[str, Any] = dict(self.defaults)
        chosen |= {name: value for name in chosen if (value := getattr(self, name)) is not None}
        chosen["top_k"] = max(chosen["top_k"], 0)
        stops = frozenset(options.pop("stop_tokens", ())) | frozenset(() if self.ignore_eos else ends)
        return Sampling(
            **chosen,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias,
            seed=secrets.randbits(32) if self.seed is None else self.seed,
            stop_tokens=stops,
            **options,
        )


class GenerationBody(SamplingBody):
    """Fields of `/v1/completions` and `/v1/chat/completions` alike."""

    unsupported = UNSUPPORTED

    model: str | None = Field(None, description="name of the served model; null: the one there is")
    n: int | None = Field(None, ge=1, le=MOST_CHOICES, description="choices for each prompt; 1")
    best_of: int | None = Field(None, ge=1, le=MOST_CHOICES, description="must equal n")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="1: off")
    min_tokens: int | None = Field(None, ge=0, le=2**30, description="no stop token or stop string before; 0")
    stop_token_ids: list[TokenId] | None = Field(None, max_length=1024)
    include_stop_str_in_output: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = Field(None, description="begin a text prompt with the model's start token; true")
    return_token_ids: bool | None = Field(None, description="give each choice its `token_ids`")
    priority: int | None = Field(None, ge=-(2**31), le=2**31 - 1, description="lower is admitted first; 0")
    timeout: float | None = Field(None, gt=0, le=1e6, description="seconds until the request is given up (408)")
    cache_salt: str | None = Field(None, max_length=256, description="share cached prompts with this salt alone")
    user: str | None = Field(None, description="accepted, not used")
    metadata: dict[str, Any] | None = Field(None, description="accepted, not used")

    @property
    def choices(self) -> int:
        """Choices for each prompt; ApiError if `best_of` asks for others to choose from."""
        choices = self.n or 1
        if self.best_of not in (None, choices):
            raise ApiError(400, f"best_of: not supported, except equal to n ({choices})", param="best_of")
        return choices

    def sample(self, ends: Collection[int], max_tokens: int, logprobs: int | None, prompt: bool) -> Sampling:
        """Build the sampling options. `logprobs`: alternatives to report; `prompt`: for its tokens, too. Raises
        UserError."""
        return self.to_sampling(
            ends,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            stop_tokens=self.stop_token_ids or (),
            logprobs=logprobs,
            prompt_logprobs=logprobs if prompt else None,
        )


_Model = TypeVar("_Model", bound=Body)


def parse_body(model: type[_Model], data: bytes) -> _Model:
    """Parse a JSON body. Raises ApiError 400 that names the field, for a field that cannot be honoured, too."""
    try:
        values = from_json(data, allow_inf_nan=False)
        check_nesting(values)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(values, dict):
        raise ApiError(400, "the body should be a JSON object", code="invalid_json")
    for name, neutral in model.unsupported.items():
        value = values.get(name)
        if value is not None and value not in neutral:
            raise ApiError(400, f"{name}: not supported by this server", param=name, code="unsupported_parameter")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _field_error(error) from None


def _field_error(error: ValidationError) -> ApiError:
    """Return the ApiError of the first wrong field; it does not repeat its value."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = ""
    for part in first["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else part
    return ApiError(400, f"{param}: {first['msg'].removeprefix('Value error, ')}", param=param)


def option_error(error: UserError, model: type[Body]) -> ApiError:
    """Return the ApiError of a mistake that was found after parsing; its first word may be a field of `model`."""
    message = str(error)
    word = message.split(maxsplit=1)[0].rstrip(":") if message else ""
    return ApiError(400, message, param=word if word in model.model_fields else None)
