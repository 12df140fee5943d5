"""The request body and responses of llama.cpp's `/completion`. Free of torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, WrapValidator
from pydantic_core import to_json

from meshwright.serving.choices import Choice, Piece, StopRule
from meshwright.serving.prompts import Prompts
from meshwright.serving.protocol.answers import describe_token
from meshwright.serving.protocol.bodies import TextPrompt
from meshwright.serving.protocol.fields import MOST_LOGPROBS, UNSUPPORTED, SamplingBody
from meshwright.serving.protocol.jobs import Job, check_length, make_request_id
from meshwright.serving.request import Request

_PROMPT_SCHEMA = {
    "anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}]
}
_SETTINGS = ("seed", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")
_STOP_TYPES = {"length": "limit", "cancelled": "none"}


def _parse_prompt(value: Any, _: Callable[[Any], Any]) -> TextPrompt:
    """Validate one prompt: a string or token IDs."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(type(token) is int for token in value)):
        return value
    raise ValueError("should be one string, or token IDs that are not empty")


class LlamaBody(SamplingBody):
    """Body of `/completion`, with llama.cpp's names and defaults: temperature 0.8, top_k 40, top_p 0.95, min_p 0.05."""

    unsupported = {
        **{name: UNSUPPORTED[name] for name in ("grammar", "json_schema", "response_format", "suffix")},
        **dict.fromkeys(("mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range", "n_indent"), (0, 0.0)),
        **dict.fromkeys(("typical_p", "tfs_z"), (1, 1.0)),
        **dict.fromkeys(("samplers", "lora", "image_data", "multimodal_data"), ([],)),
    }
    defaults = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}

    prompt: Annotated[TextPrompt, WrapValidator(_parse_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
    n_predict: int | None = Field(None, ge=-1, le=2**30, description="-1: all that the model's length leaves")
    repeat_penalty: float | None = Field(None, ge=0.01, le=100, description="1; over the whole prompt and answer")
    n_probs: int | None = Field(None, ge=0, le=MOST_LOGPROBS, description="most likely tokens beside each token")
    return_tokens: bool | None = None
    cache_prompt: bool | None = Field(None, description="accepted; the prefix cache changes no answer")
    id_slot: int | None = Field(None, description="accepted; there are no slots")


def build_llama(body: LlamaBody, prompts: Prompts, model: str, name: str) -> Job:
    """Build the job of a `/completion` body. model: its name in the response. name: of the request. Raises ApiError,
    UserError."""
    tokens = prompts.encode(body.prompt) if isinstance(body.prompt, str) else prompts.check(body.prompt)
    room = max(prompts.max_length - len(tokens), 0)
    max_tokens = room if body.n_predict in (None, -1) else body.n_predict or 0
    check_length(len(tokens), max_tokens, prompts)
    penalty = 1.0 if body.repeat_penalty is None else body.repeat_penalty
    if body.seed == -1:
        body.seed = None
    sampling = body.to_sampling(
        prompts.ends, max_tokens=max_tokens, repetition_penalty=penalty, logprobs=body.n_probs or None
    )
    sampling.check_vocabulary(prompts.vocabulary)
    choice = Choice(0, Request(make_request_id(name), tuple(tokens), sampling), prompts, StopRule(body.stop))
    return Job([choice], LlamaForm(body, prompts, model), bool(body.stream), None)


class LlamaForm:
    """Responses of `/completion`."""

    def __init__(self, body: LlamaBody, prompts: Prompts, model: str) -> None:
        self._body, self._prompts, self._model = body, prompts, model

    def open_choice(self, choice: Choice) -> bytes:
        """Return the events with which a choice begins in a stream: none."""
        return b""

    def format_piece(self, choice: Choice, piece: Piece, choices: Sequence[Choice]) -> bytes:
        """Return the event of a new piece; the last one has all figures."""
        if piece.finish_reason is not None:
            return b"data: " + to_json(self._finished(choice, piece, whole=False)) + b"\n\n"
        if not piece.text and not self._body.n_probs:
            return b""
        return b"data: " + to_json({**self._content(piece), "stop": False, **self._counts(choice)}) + b"\n\n"

    def close_stream(self, choices: Sequence[Choice]) -> bytes:
        """Return the events with which a stream ends: none."""
        return b""

    def answer(self, choices: Sequence[Choice], pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the whole response."""
        return self._finished(choices[0], pieces[0], whole=True)

    def _content(self, piece: Piece) -> dict[str, Any]:
        """Return the text and tokens of a piece."""
        told: dict[str, Any] = {
            "index": 0,
            "content": piece.text,
            "tokens": [token.result.token for token in piece.tokens] if self._body.return_tokens else [],
        }
        if self._body.n_probs:
            told["completion_probabilities"] = [
                {
                    "id": result.token,
                    **describe_token(self._prompts, result.token, result.logprob),
                    "top_logprobs": [
                        {"id": number, **describe_token(self._prompts, number, value)} for number, value in result.top
                    ],
                }
                for result, _ in piece.tokens
            ]
        return told

    def _counts(self, choice: Choice) -> dict[str, int]:
        """Return the numbers of tokens so far."""
        return {"tokens_predicted": choice.completion_tokens, "tokens_evaluated": len(choice.request.tokens)}

    def _finished(self, choice: Choice, piece: Piece, whole: bool) -> dict[str, Any]:
        """Return the last event of a stream, or the `whole` response."""
        now, sampling = time.perf_counter(), choice.request.sampling
        first = choice.first or now
        prompt, predicted = len(choice.request.tokens) - choice.cached_tokens, choice.completion_tokens
        given = self._body.prompt
        word = choice.stop_reason if isinstance(choice.stop_reason, str) else ""
        return {
            **self._content(piece),
            "id_slot": -1,
            "stop": True,
            "model": self._model,
            **self._counts(choice),
            "generation_settings": {
                "n_predict": sampling.max_tokens,
                "repeat_penalty": sampling.repetition_penalty,
                **{name: getattr(sampling, name) for name in _SETTINGS},
                "stop": list(self._body.stop),
                "ignore_eos": bool(self._body.ignore_eos),
                "n_probs": self._body.n_probs or 0,
                "stream": not whole,
            },
            "prompt": given if isinstance(given, str) else self._prompts.decode(given),
            "has_new_line": "\n" in piece.text,
            "truncated": False,
            "stop_type": "word" if word else _STOP_TYPES.get(str(choice.finish_reason), "eos"),
            "stopping_word": word,
            "tokens_cached": choice.cached_tokens,
            "timings": {
                "cache_n": choice.cached_tokens,
                **_rates("prompt", prompt, first - choice.begun),
                **_rates("predicted", predicted, now - first),
            },
        }


def _rates(name: str, tokens: int, seconds: float) -> dict[str, float]:
    """Return llama.cpp's figures on a number of tokens in a time."""
    return {
        f"{name}_n": tokens,
        f"{name}_ms": seconds * 1000,
        f"{name}_per_token_ms": seconds * 1000 / max(tokens, 1),
        f"{name}_per_second": tokens / max(seconds, 1e-9),
    }
