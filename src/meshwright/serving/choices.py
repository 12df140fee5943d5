"""Choices of a response: tokens from the engine to text that ends at a stop string or stop token. Free of torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.serving.prompts import Prompts
from meshwright.serving.request import Output, Request
from meshwright.serving.sampling import TokenResult
from meshwright.serving.text import AnswerText


class StopRule(NamedTuple):
    """Stop strings of a request; `include`: the text keeps the stop string or stop token at its end."""

    strings: Sequence[str] = ()
    include: bool = False


class PlacedToken(NamedTuple):
    """Result of one token, with the number of characters of the choice's text before it."""

    result: TokenResult
    offset: int


class Piece(NamedTuple):
    """New part of a choice, or all of it.

    Attributes:
        text: Text that the tokens complete.
        tokens: New tokens; their text may come in a later piece.
        finish_reason: `"stop"`, `"length"`, `"cancelled"`, or None while the choice goes on.
    """

    text: str
    tokens: Sequence[PlacedToken]
    finish_reason: str | None

    @classmethod
    def join(cls, pieces: Sequence[Piece]) -> Piece:
        """Join the consecutive pieces of a choice."""
        tokens = [token for piece in pieces for token in piece.tokens]
        return cls("".join(piece.text for piece in pieces), tokens, pieces[-1].finish_reason)


class Choice:
    """One answer to one prompt, as it arrives from the engine.

    Attributes:
        index: Number in the response.
        request: Request that the engine runs.
        cached_tokens: Prompt tokens found in the prefix cache.
        prompt_results: Results of the prompt's tokens, if they are scored; None for the first.
        completion_tokens: Tokens of the answer so far, a stop token included.
        finish_reason: As in `Piece`.
        stop_reason: Stop string, or stop token ID that is no end token of the model, that ended the answer; else None.
        begun: Time of its creation, seconds of `time.perf_counter`.
        first, last: Times of its first and newest tokens; None before.
    """

    def __init__(self, index: int, request: Request, prompts: Prompts, stop: StopRule, echo: str | None = None) -> None:
        """`echo`: text of the prompt, with which the first piece begins; None: it does not."""
        self.index, self.request = index, request
        self.cached_tokens = self.completion_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.begun = time.perf_counter()
        self.first: float | None = None
        self.last: float | None = None
        self.prompt_results: Sequence[TokenResult | None] = ()
        self._prompts, self._stop = prompts, stop
        self._answer = AnswerText(prompts.detokenizer(request.tokens), stop.strings, request.sampling.min_tokens)
        self._unsent_echo = echo
        self._echoed = len(echo or "")
        self._characters = 0  # of the answer's text so far

    def push(self, output: Output) -> Piece:
        """Append what the engine generated; what follows a stop string is dropped."""
        self.cached_tokens = output.cached_tokens or self.cached_tokens
        text, tokens = self._extend(output)
        if tokens:
            self.last = time.perf_counter()
            self.first = self.first or self.last
        self._characters += len(text)
        self.completion_tokens += len(tokens)
        if output.prompt_results is not None:
            self.prompt_results = output.prompt_results
        if self._unsent_echo is not None:
            text = self._unsent_echo + text
            tokens = self._place_prompt() + tokens
            self._unsent_echo = None
        return Piece(text, tokens, self.finish_reason)

    def _extend(self, output: Output) -> tuple[str, list[PlacedToken]]:
        """Return the new text and tokens of the answer, and note how it ended."""
        answer, text, tokens = self._answer, "", []
        hidden = output.results[-1:] if output.finish_reason == "stop" and not self._stop.include else []
        for result in output.results[: len(output.results) - len(hidden)]:
            text += answer.push(result.token)
            tokens.append(PlacedToken(result, self._echoed + answer.offsets[-1]))
            if answer.stopped_by is not None:
                break
        else:
            self.finish_reason = output.finish_reason
            if output.finish_reason is not None:
                text += answer.finish()
            if output.finish_reason == "stop" and output.results[-1].token not in self._prompts.chat_ends:
                self.stop_reason = output.results[-1].token
            end = self._echoed + self._characters + len(text)
            tokens += [PlacedToken(result, end) for result in hidden]
        if answer.stopped_by is not None:
            self.finish_reason, self.stop_reason = "stop", answer.stopped_by
            text += answer.stopped_by if self._stop.include else ""
        return text, tokens

    def _place_prompt(self) -> list[PlacedToken]:
        """Return the tokens of the prompt with their places in its text; empty without results."""
        detokenizer, placed, characters = self._prompts.detokenizer(()), [], 0
        for token, result in zip(self.request.tokens, self.prompt_results, strict=False):
            placed.append(PlacedToken(result or TokenResult(token), characters))
            characters += len(detokenizer.push(token))
        return placed
