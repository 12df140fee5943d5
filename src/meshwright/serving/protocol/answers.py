"""Responses of `/v1/completions` and `/v1/chat/completions`, whole and as server-sent events. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic_core import to_json

from meshwright.serving.choices import Choice, Piece, PlacedToken
from meshwright.serving.prompts import Prompts

LEAST_LOGPROB = -9999.0  # what OpenAI's API writes for a probability of 0, since JSON has no infinity
END_OF_STREAM = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all parts of one response carry: its ID, time (UNIX seconds), name of the model, and seed of the draws."""

    id: str
    created: int
    model: str
    seed: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a response reports beside text.

    Attributes:
        logprobs: Log-probabilities of the tokens.
        token_ids: Token IDs of each choice.
        usage: The usage at the end of a stream.
        continuous_usage: The usage so far with every chunk of a stream.
    """

    logprobs: bool = False
    token_ids: bool = False
    usage: bool = False
    continuous_usage: bool = False


class AnswerForm(Protocol):
    """Form of the responses of one endpoint."""

    def open_choice(self, choice: Choice) -> bytes:
        """Return the events with which a choice begins in a stream."""

    def format_piece(self, choice: Choice, piece: Piece, choices: Sequence[Choice]) -> bytes:
        """Return the event of a new piece of `choice`; empty if there is nothing to say."""

    def close_stream(self, choices: Sequence[Choice]) -> bytes:
        """Return the events with which a stream ends."""

    def answer(self, choices: Sequence[Choice], pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the whole response; `pieces`: that of each choice."""


def count_usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the `usage` object: prompts counted once for all their choices."""
    prompt = sum(len(choice.request.tokens) for choice in choices if choice.request.choice == 0)
    completion = sum(choice.completion_tokens for choice in choices)
    cached = sum(choice.cached_tokens for choice in choices if choice.request.choice == 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class OpenAIForm:
    """What completions and chat completions have in common."""

    kind = ""  # `object` of a whole response
    chunk_kind = ""  # `object` of an event

    def __init__(self, envelope: Envelope, report: Report, prompts: Prompts) -> None:
        self._envelope, self._report, self._prompts = envelope, report, prompts
        self._head = b"data: " + to_json(self._frame(self.chunk_kind))[:-1]
        self._tail = b',"usage":null}\n\n' if report.usage else b"}\n\n"

    def open_choice(self, choice: Choice) -> bytes:
        """Return the events with which a choice begins in a stream: none."""
        return b""

    def format_piece(self, choice: Choice, piece: Piece, choices: Sequence[Choice]) -> bytes:
        """Return the event of a new piece of `choice`; empty if there is nothing to say."""
        silent = not piece.text and piece.finish_reason is None
        if silent and not (piece.tokens and (self._report.logprobs or self._report.token_ids)):
            return b""
        tail = self._tail
        if self._report.continuous_usage:
            tail = b',"usage":' + to_json(count_usage(choices)) + b"}\n\n"
        return self._head + b',"choices":[' + to_json(self._chunk(choice, piece)) + b"]" + tail

    def close_stream(self, choices: Sequence[Choice]) -> bytes:
        """Return the events with which a stream ends."""
        if not self._report.usage:
            return END_OF_STREAM
        return self._head + b',"choices":[],"usage":' + to_json(count_usage(choices)) + b"}\n\n" + END_OF_STREAM

    def answer(self, choices: Sequence[Choice], pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the whole response; `pieces`: that of each choice."""
        told = [self._whole(choice, piece) for choice, piece in zip(choices, pieces, strict=True)]
        return {**self._frame(self.kind), "choices": told, "usage": count_usage(choices)}

    def _frame(self, kind: str) -> dict[str, Any]:
        """Return the fields of a response beside choices and usage."""
        told = self._envelope
        return {"id": told.id, "object": kind, "created": told.created, "model": told.model, "seed": told.seed}

    def _chunk(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return the choice of an event."""
        raise NotImplementedError

    def _whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return the choice of a whole response."""
        raise NotImplementedError

    def _ending(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return the fields on the end of a choice, and its token IDs if they are reported."""
        told: dict[str, Any] = {"finish_reason": piece.finish_reason}
        if choice.stop_reason is not None:
            told["stop_reason"] = choice.stop_reason
        if self._report.token_ids:
            told["token_ids"] = [token.result.token for token in piece.tokens]
        return told

    def _alternatives(self, token: PlacedToken) -> dict[int, float]:
        """Return the log-probabilities of the most likely tokens, most likely first."""
        return {number: max(value, LEAST_LOGPROB) for number, value in token.result.top}


class CompletionForm(OpenAIForm):
    """Responses of `/v1/completions`."""

    kind = chunk_kind = "text_completion"

    def _chunk(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return the choice of an event."""
        logprobs = self._logprobs(piece.tokens) if self._report.logprobs else None
        return {"index": choice.index, "text": piece.text, "logprobs": logprobs, **self._ending(choice, piece)}

    _whole = _chunk

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> dict[str, Any]:
        """Return the `logprobs` object: a list for each kind of value, one entry a token."""
        return {
            "text_offset": [token.offset for token in tokens],
            "token_logprobs": [_finite(token.result.logprob) for token in tokens],
            "tokens": [self._prompts.token_text(token.result.token) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
        }

    def _top(self, token: PlacedToken) -> dict[str, float] | None:
        """Return the most likely tokens and the token itself, by text; the likelier of two with the same text."""
        result = token.result
        if result.logprob is None:
            return None
        told: dict[str, float] = {}
        for number, value in {**self._alternatives(token), result.token: max(result.logprob, LEAST_LOGPROB)}.items():
            told.setdefault(self._prompts.token_text(number), value)
        return told


class ChatForm(OpenAIForm):
    """Responses of `/v1/chat/completions`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def open_choice(self, choice: Choice) -> bytes:
        """Return the event that tells the role of a choice."""
        told = {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return self._head + b',"choices":[' + to_json(told) + b"]" + self._tail

    def _chunk(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return the choice of an event."""
        delta = {"content": piece.text} if piece.text else {}
        return {
            "index": choice.index,
            "delta": delta,
            "logprobs": self._logprobs(piece.tokens),
            **self._ending(choice, piece),
        }

    def _whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return the choice of a whole response."""
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs(piece.tokens),
            **self._ending(choice, piece),
        }

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> dict[str, Any] | None:
        """Return the `logprobs` object: one entry a token; None if they are not reported."""
        if not self._report.logprobs:
            return None
        return {
            "content": [
                {
                    **describe_token(self._prompts, token.result.token, token.result.logprob),
                    "top_logprobs": [
                        describe_token(self._prompts, number, value)
                        for number, value in self._alternatives(token).items()
                    ],
                }
                for token in tokens
            ],
            "refusal": None,
        }


def describe_token(prompts: Prompts, token: int, logprob: float | None) -> dict[str, Any]:
    """Return the text, bytes and log-probability of a token, as chat completions tell them."""
    return {
        "token": prompts.token_text(token),
        "logprob": _finite(logprob),
        "bytes": list(prompts.token_bytes(token)),
    }


def _finite(logprob: float | None) -> float | None:
    """Return a log-probability that JSON can hold."""
    return None if logprob is None else max(logprob, LEAST_LOGPROB)
