"""Responses of the endpoints that generate text, whole and as server-sent events. Free of torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from meshwright.serving.choices import Choice, Piece, PlacedToken
from meshwright.serving.prompts import Prompts
from meshwright.serving.protocol.bodies import GenerationBody
from meshwright.serving.sampling import TokenResult

MIN_LOGPROB = -9999.0  # what OpenAI's API writes for a probability of 0, since JSON has no infinity
END_OF_STREAM = b"data: [DONE]\n\n"


class AnswerFormatter:
    """Base class of the formatters of one API's responses (OpenAI's or llama.cpp's), whole or as server-sent events.

    body: body of the request. prompts: tokenizer. names: fields of the response: `id` of the request, `model`, and
    `seed` of the random draws.
    """

    def __init__(self, body: GenerationBody, prompts: Prompts, names: Mapping[str, Any]) -> None:
        """Store the arguments; see the class."""
        self._body: Any = body  # the form's own kind
        self._prompts, self._names = prompts, names

    def open_choice(self, choice: Choice) -> bytes:
        """Return the event, as bytes, that announces a choice in a streamed response; empty bytes if the API has no
        such event."""
        return b""

    def close_stream(self, choices: Sequence[Choice]) -> bytes:
        """Return the last events (usage, end marker), as bytes, of a streamed response; empty bytes if the API has
        none. choices: all choices of the response."""
        return b""

    def describe_token(self, token: int, logprob: float | None) -> dict[str, Any]:
        """Return {"token": text, "logprob", "bytes"} of a token ID. logprob: its log-probability, or None."""
        data = list(self._prompts.token_bytes[token])
        return {"token": self.show_token(token), "logprob": _clamp_logprob(logprob), "bytes": data}

    def describe_result(self, result: TokenResult, count: int) -> dict[str, Any]:
        """Return the JSON object of a token (`result`) with its text, log-probability and bytes, and under
        `top_logprobs` such objects for the `count` most likely tokens."""
        top = [self.describe_token(token, logprob) for token, logprob in result.top[:count]]
        return {**self.describe_token(result.token, result.logprob), "top_logprobs": top}

    def show_token(self, token: int) -> str:
        """Return a token's text as it is shown in log-probabilities."""
        return self._prompts.get_token_text(token)


class CompletionFormatter(AnswerFormatter):
    """Formatter of the responses of OpenAI's `/v1/completions`, and base class of that of chat completions.

    body: body of the request. prompts: tokenizer. names: fields of the response: `id` of the request, `model`, and
    `seed` of the random draws."""

    prefix = "cmpl"  # of the response's ID
    kind = chunk_kind = "text_completion"  # `object` of a whole response and of an event

    def __init__(self, body: GenerationBody, prompts: Prompts, names: Mapping[str, Any]) -> None:
        """Store the arguments and the common fields of the response; see the class."""
        super().__init__(body, prompts, names)
        self._alternatives, options = body.alternatives, self._body.stream_options
        self._continuous = options.continuous_usage_stats
        self._usage = options.include_usage or self._continuous
        self._frame = {"created": int(time.time()), **names, "id": f"{self.prefix}-{names['id']}"}
        self._head = b"data: " + to_json({**self._frame, "object": self.chunk_kind})[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self._usage else b"]}\n\n"

    def format_piece(self, choice: Choice, piece: Piece, choices: Sequence[Choice]) -> bytes:
        """Return the event, as bytes, for a new piece of `choice` in a streamed response; empty bytes if the piece has
        no text, no finish reason and no token data that the request asked for. choices: all choices of the response,
        for its usage."""
        silent = not piece.text and piece.finish_reason is None
        if silent and not (piece.tokens and (self._alternatives is not None or self._body.return_token_ids)):
            return b""
        return self._format_event(self._describe(choice, piece, whole=False), choices)

    def _format_event(self, described: dict[str, Any] | None, choices: Sequence[Choice]) -> bytes:
        """Format a server-sent event as bytes. described: JSON object of the event's only choice; None: the event has
        no choice and reports the token usage. choices: all choices of the response, for the usage."""
        inner = b"" if described is None else to_json(described)
        if described is not None and not self._continuous:
            return self._head + inner + self._tail
        return self._head + inner + b'],"usage":' + to_json(count_usage(choices)) + b"}\n\n"

    def close_stream(self, choices: Sequence[Choice]) -> bytes:
        """Return the last events, as bytes, of a streamed response: the usage, summed over `choices`, if requested, and
        `data: [DONE]`."""
        return (self._format_event(None, choices) if self._usage else b"") + END_OF_STREAM

    def format_answer(self, choices: Sequence[Choice], pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the JSON object of a response without streaming. choices: its choices (answers). pieces: all text and
        tokens of each choice, in the same order."""
        described = []
        for choice, piece in zip(choices, pieces, strict=True):
            described.append(self._describe(choice, piece, whole=True))
            if (count := self._body.prompt_logprobs) is not None:
                shown = [each and self._describe_prompt_token(each, count) for each in choice.prompt_results]
                described[-1]["prompt_logprobs"] = shown
        return {**self._frame, "object": self.kind, "choices": described, "usage": count_usage(choices)}

    def _describe_prompt_token(self, result: TokenResult, count: int) -> dict[str, Any]:
        """Return vLLM's `prompt_logprobs` entry of one prompt token: {token ID: {logprob, rank, decoded_token}} for the
        token and the `count` most likely tokens. result: log-probabilities of the token and of the most likely tokens.
        """
        top, text = result.top[:count], self._prompts.get_token_text
        ranks = {token: rank for rank, (token, _) in enumerate(top, 1)}
        return {
            str(token): {"logprob": _clamp_logprob(logprob), "rank": ranks.get(token), "decoded_token": text(token)}
            for token, logprob in {result.token: result.logprob, **dict(top)}.items()
        }

    def _describe(self, choice: Choice, piece: Piece, whole: bool) -> dict[str, Any]:
        """Return the JSON object of a choice (an answer) with the text and tokens of `piece`. whole: True for a
        response without streaming, False for an event of a stream."""
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
        """Return a token's text as it is shown in log-probabilities, or `token_id:7` if the request asked for IDs."""
        return f"token_id:{token}" if self._body.return_tokens_as_token_ids else self._prompts.get_token_text(token)

    def describe_text(self, text: str, whole: bool) -> dict[str, Any]:
        """Return {"text": text}, the JSON field of a choice that holds its text. whole: True for a response without
        streaming, False for an event of a stream; here both have the same field."""
        return {"text": text}

    def describe_logprobs(self, tokens: Sequence[PlacedToken], count: int) -> dict[str, Any]:
        """Return the `logprobs` object of a choice: four lists (`tokens`, `token_logprobs`, `top_logprobs`,
        `text_offset`) with one entry per token. count: number of most likely alternatives per token."""
        return {
            "text_offset": [token.offset for token in tokens],
            "token_logprobs": [_clamp_logprob(token.result.logprob) for token in tokens],
            "tokens": [self.show_token(token.result.token) for token in tokens],
            "top_logprobs": [self._describe_top(token.result, count) for token in tokens],
        }

    def _describe_top(self, result: TokenResult, count: int) -> dict[str, float | None] | None:
        """Return {token text: log-probability} of the `count` most likely tokens and of the token itself; if several
        tokens have equal texts, the most likely token is kept. None if the token has no log-probability. result:
        log-probabilities of the token and of the most likely tokens."""
        if result.logprob is None:
            return None
        described: dict[str, float | None] = {}
        for token, logprob in (*result.top[:count], (result.token, result.logprob)):
            described.setdefault(self.show_token(token), _clamp_logprob(logprob))
        return described


class ChatFormatter(CompletionFormatter):
    """Formatter of the responses of OpenAI's `/v1/chat/completions`."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def open_choice(self, choice: Choice) -> bytes:
        """Return the first event, as bytes, of a choice in a streamed response: a delta with the role "assistant"."""
        delta = {"role": "assistant", "content": ""}
        return self._head + to_json({"index": choice.index, "delta": delta, "finish_reason": None}) + self._tail

    def describe_text(self, text: str, whole: bool) -> dict[str, Any]:
        """Return the JSON field of a choice that holds its text: `message` or `delta`. whole: True for a response
        without streaming (`message`), False for an event of a stream (`delta`)."""
        if whole:
            return {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"delta": {"content": text} if text else {}}

    def describe_logprobs(self, tokens: Sequence[PlacedToken], count: int) -> dict[str, Any]:
        """Return the `logprobs` object of a choice: `content`, a list with one object for each of `tokens`. count:
        number of most likely alternatives per token (`top_logprobs`)."""
        return {"content": [self.describe_result(token.result, count) for token in tokens], "refusal": None}


class LlamaFormatter(AnswerFormatter):
    """Formatter of the responses of llama.cpp's `/completion`, which have a single choice."""

    def format_piece(self, choice: Choice, piece: Piece, choices: Sequence[Choice]) -> bytes:
        """Return the event, as bytes, for a new `piece` of the streamed answer `choice`; empty bytes if the piece needs
        no event. The last event also has settings, stop reason and timings. choices: the only choice of the response,
        as a list."""
        if piece.finish_reason is not None:
            return b"data: " + to_json(self._describe_end(choice, piece)) + b"\n\n"
        if not piece.text and not self._body.logprobs:
            return b""
        return b"data: " + to_json({**self._describe(choice, piece), "stop": False}) + b"\n\n"

    def format_answer(self, choices: Sequence[Choice], pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the JSON object of a response without streaming. choices: its only choice. pieces: all text and tokens
        of this choice."""
        return self._describe_end(choices[0], pieces[0])

    def _describe(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return the JSON fields with the text and tokens of `piece`, a part of the answer `choice`, the number of
        tokens generated so far, and the number of prompt tokens."""
        tokens = [token.result for token in piece.tokens]
        described: dict[str, Any] = {
            "index": 0, "content": piece.text,
            "tokens": [result.token for result in tokens] if self._body.return_tokens else [],
            "tokens_predicted": choice.completion_tokens, "tokens_evaluated": len(choice.request.tokens),
        }  # fmt: skip
        if self._body.logprobs:
            described["completion_probabilities"] = [self.describe_result(each, len(each.top)) for each in tokens]
        return described

    def describe_token(self, token: int, logprob: float | None) -> dict[str, Any]:
        """Return {"id", "token" (text), "logprob", "bytes"} of a token ID. logprob: its log-probability, or None."""
        return {"id": token, **super().describe_token(token, logprob)}

    def _describe_end(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return the JSON object that ends the answer `choice`: the last event of a stream, or the whole response, with
        settings, stop reason and timings. piece: text and tokens of this object."""
        now, body, request = time.perf_counter(), self._body, choice.request
        first = choice.first_token if choice.completion_tokens else now
        computed = len(request.tokens) - choice.cached_tokens
        word = choice.stop_reason if isinstance(choice.stop_reason, str) else ""
        ended = "limit" if choice.finish_reason == "length" else "eos"
        return {
            **self._describe(choice, piece),
            "id_slot": -1, "stop": True, "truncated": False, "model": self._names["model"],
            "generation_settings": body.model_dump(by_alias=True, exclude={"prompt"})
            | {"seed": self._names["seed"], "n_predict": request.sampling.max_tokens},
            "prompt": body.prompt if isinstance(body.prompt, str) else self._prompts.decode(body.prompt),
            "has_new_line": "\n" in piece.text, "stopping_word": word, "tokens_cached": choice.cached_tokens,
            "stop_type": "word" if word else ended,
            "timings": {
                "cache_n": choice.cached_tokens, **_describe_rate("prompt", computed, first - choice.created),
                **_describe_rate("predicted", choice.completion_tokens, now - first),
            },
        }  # fmt: skip


def count_usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the `usage` object of a response: numbers of prompt, completion and total tokens. A prompt with several
    choices (`n`) counts once."""
    prompt = sum(len(choice.request.tokens) for choice in choices if choice.request.choice == 0)
    completion = sum(choice.completion_tokens for choice in choices)
    cached = sum(choice.cached_tokens for choice in choices if choice.request.choice == 0)
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return {**usage, "prompt_tokens_details": {"cached_tokens": cached}}


def _clamp_logprob(logprob: float | None) -> float | None:
    """Return the log-probability `logprob`, but at least `MIN_LOGPROB` (-9999), as JSON has no infinity; None stays
    None."""
    return None if logprob is None else max(logprob, MIN_LOGPROB)


def _describe_rate(name: str, tokens: int, seconds: float) -> dict[str, float]:
    """Return llama.cpp's timings of `tokens` tokens that took `seconds`, with the keys `name` + "_n" (tokens), "_ms",
    "_per_token_ms" and "_per_second"."""
    ms = seconds * 1000
    rates = {"n": tokens, "ms": ms, "per_token_ms": ms / max(tokens, 1), "per_second": tokens / max(seconds, 1e-9)}
    return {f"{name}_{key}": value for key, value in rates.items()}
