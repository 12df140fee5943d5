"""Responses of llama.cpp's `/completion`. Free of torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json

from meshwright.serving.choices import Choice, Piece
from meshwright.serving.protocol.answers import AnswerFormatter


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
        first = choice.first_token or now
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


def _describe_rate(name: str, tokens: int, seconds: float) -> dict[str, float]:
    """Return llama.cpp's timings of `tokens` tokens that took `seconds`, with the keys `name` + "_n" (tokens), "_ms",
    "_per_token_ms" and "_per_second"."""
    return {
        f"{name}_n": tokens, f"{name}_ms": seconds * 1000, f"{name}_per_token_ms": seconds * 1000 / max(tokens, 1),
        f"{name}_per_second": tokens / max(seconds, 1e-9),
    }  # fmt: skip
