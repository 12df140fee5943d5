"""Responses of `/v1/completions` and `/v1/chat/completions`, whole and as server-sent events. Free of torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from meshwright.serving.choices import Choice, Piece, PlacedToken
from meshwright.serving.prompts import Prompts
from meshwright.serving.protocol.bodies import GenerationBody
from meshwright.serving.sampling import TokenResult

LEAST_LOGPROB = -9999.0  # what OpenAI's API writes for a probability of 0, since JSON has no infinity
END_OF_STREAM = b"data: [DONE]\n\n"


class AnswerForm:
    """Form of the responses of one endpoint."""

    def __init__(self, body: GenerationBody, prompts: Prompts, names: Mapping[str, Any]) -> None:
        """`names`: `id` of the request, `model`, and `seed` of the draws."""
        self._body: Any = body  # the form's own kind
        self._prompts, self._names = prompts, names

    def open_choice(self, choice: Choice) -> bytes:
        """Return the events with which a choice begins in a stream."""
        return b""

    def format_piece(self, choice: Choice, piece: Piece, choices: Sequence[Choice]) -> bytes:
        """Return the event of a new piece of `choice`; empty if there is nothing to say."""
        raise NotImplementedError

    def close_stream(self, choices: Sequence[Choice]) -> bytes:
        """Return the events with which a stream ends."""
        return b""

    def answer(self, choices: Sequence[Choice], pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the whole response; `pieces`: that of each choice."""
        raise NotImplementedError

    def describe_token(self, token: int, logprob: float | None) -> dict[str, Any]:
        """Return the text, log-probability and bytes of a token."""
        data = list(self._prompts.token_bytes(token))
        return {"token": self.show_token(token), "logprob": _finite(logprob), "bytes": data}

    def show_token(self, token: int) -> str:
        """Return the text of a token in log-probabilities."""
        return self._prompts.token_text(token)


class OpenAIForm(AnswerForm):
    """Response form that completions and chat completions share."""

    prefix = ""  # of the response's ID
    kind = chunk_kind = ""  # `object` of a whole response and of an event

    def __init__(self, body: GenerationBody, prompts: Prompts, names: Mapping[str, Any]) -> None:
        super().__init__(body, prompts, names)
        self._alternatives, options = body.alternatives, self._body.stream_options
        self._continuous = options.continuous_usage_stats
        self._usage = options.include_usage or self._continuous
        self._frame = {"created": int(time.time()), **names, "id": f"{self.prefix}-{names['id']}"}
        self._head = b"data: " + to_json({**self._frame, "object": self.chunk_kind})[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self._usage else b"]}\n\n"

    def format_piece(self, choice: Choice, piece: Piece, choices: Sequence[Choice]) -> bytes:
        """Return the event of a new piece of `choice`; empty if there is nothing to say."""
        silent = not piece.text and piece.finish_reason is None
        if silent and not (piece.tokens and (self._alternatives is not None or self._body.return_token_ids)):
            return b""
        return self._format_event(self._describe(choice, piece, whole=False), choices)

    def _format_event(self, described: dict[str, Any] | None, choices: Sequence[Choice]) -> bytes:
        """Return an event with a choice, or none; with the usage if it is reported there."""
        inner = b"" if described is None else to_json(described)
        if described is not None and not self._continuous:
            return self._head + inner + self._tail
        return self._head + inner + b'],"usage":' + to_json(count_usage(choices)) + b"}\n\n"

    def close_stream(self, choices: Sequence[Choice]) -> bytes:
        """Return the events with which a stream ends."""
        return (self._format_event(None, choices) if self._usage else b"") + END_OF_STREAM

    def answer(self, choices: Sequence[Choice], pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the whole response; `pieces`: that of each choice."""
        described = []
        for choice, piece in zip(choices, pieces, strict=True):
            described.append(self._describe(choice, piece, whole=True))
            if (count := self._body.prompt_logprobs) is not None:
                described[-1]["prompt_logprobs"] = [
                    None if result is None else self._describe_prompt_token(result, count)
                    for result in choice.prompt_results
                ]
        return {**self._frame, "object": self.kind, "choices": described, "usage": count_usage(choices)}

    def _describe_prompt_token(self, result: TokenResult, count: int) -> dict[str, Any]:
        """Return vLLM's object from token ID to log-probability: the token itself, and the `count` most likely."""
        top, text = result.top[:count], self._prompts.token_text
        ranks = {token: rank for rank, (token, _) in enumerate(top, 1)}
        return {
            str(token): {"logprob": _finite(logprob), "rank": ranks.get(token), "decoded_token": text(token)}
            for token, logprob in {result.token: result.logprob, **dict(top)}.items()
        }

    def describe_text(self, text: str, whole: bool) -> dict[str, Any]:
        """Return the fields of a choice that hold the text of a `whole` response or an event."""
        raise NotImplementedError

    def describe_logprobs(self, tokens: Sequence[PlacedToken], count: int) -> dict[str, Any]:
        """Return the `logprobs` object, with `count` alternatives for each token."""
        raise NotImplementedError

    def _describe(self, choice: Choice, piece: Piece, whole: bool) -> dict[str, Any]:
        """Return a choice of a `whole` response or an event."""
        count = self._alternatives
        logprobs = None if count is None else self.describe_logprobs(piece.tokens, count)
        about = {"logprobs": logprobs, "finish_reason": piece.finish_reason}
        described = {"index": choice.index, **self.describe_text(piece.text, whole), **about}
        if choice.stop_reason is not None:
            described["stop_reason"] = choice.stop_reason
        if self._body.return_token_ids:
            described["token_ids"] = [token.result.token for token in piece.tokens]
        return described

    def show_token(self, token: int) -> str:
        """Return the text of a token in log-probabilities."""
        return f"token_id:{token}" if self._body.return_tokens_as_token_ids else self._prompts.token_text(token)


class CompletionForm(OpenAIForm):
    """Responses of `/v1/completions`."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def describe_text(self, text: str, whole: bool) -> dict[str, Any]:
        """Return the fields of a choice that hold the text of a `whole` response or an event."""
        return {"text": text}

    def describe_logprobs(self, tokens: Sequence[PlacedToken], count: int) -> dict[str, Any]:
        """Return the `logprobs` object: a list for each kind of value, one entry a token."""
        return {
            "text_offset": [token.offset for token in tokens],
            "token_logprobs": [_finite(token.result.logprob) for token in tokens],
            "tokens": [self.show_token(token.result.token) for token in tokens],
            "top_logprobs": [self._describe_top(token.result, count) for token in tokens],
        }

    def _describe_top(self, result: TokenResult, count: int) -> dict[str, float | None] | None:
        """Return the most likely tokens and the token itself, by text; the likelier of two with the same text."""
        if result.logprob is None:
            return None
        described: dict[str, float | None] = {}
        for token, logprob in (*result.top[:count], (result.token, result.logprob)):
            described.setdefault(self.show_token(token), _finite(logprob))
        return described


class ChatForm(OpenAIForm):
    """Responses of `/v1/chat/completions`."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def open_choice(self, choice: Choice) -> bytes:
        """Return the event that tells the role of a choice."""
        delta = {"role": "assistant", "content": ""}
        return self._head + to_json({"index": choice.index, "delta": delta, "finish_reason": None}) + self._tail

    def describe_text(self, text: str, whole: bool) -> dict[str, Any]:
        """Return the fields of a choice that hold the text of a `whole` response or an event."""
        if whole:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"delta": {"content": text} if text else {}}

    def describe_logprobs(self, tokens: Sequence[PlacedToken], count: int) -> dict[str, Any]:
        """Return the `logprobs` object: one entry a token."""
        content = [
            self.describe_token(result.token, result.logprob)
            | {"top_logprobs": [self.describe_token(token, logprob) for token, logprob in result.top[:count]]}
            for result, _ in tokens
        ]
        return {"content": content, "refusal": None}


def count_usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the `usage` object: prompts counted once for all their choices."""
    prompt = sum(len(choice.request.tokens) for choice in choices if choice.request.choice == 0)
    completion = sum(choice.completion_tokens for choice in choices)
    cached = sum(choice.cached_tokens for choice in choices if choice.request.choice == 0)
    return {
        "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip


def _finite(logprob: float | None) -> float | None:
    """Return a log-probability that JSON can hold."""
    return None if logprob is None else max(logprob, LEAST_LOGPROB)
