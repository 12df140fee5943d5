"""Choices of an answer: tokens from the engine to text, which ends before a stop string. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.serving.prompts import Prompts
from meshwright.serving.request import Output, Request
from meshwright.serving.sampling import TokenResult


class StopStrings:
    """Matcher of stop strings in text that arrives in pieces, whatever their boundaries (Knuth, Morris and Pratt 1977).

    Attributes:
        matched: Stop string that was completed first, the longest of those that end at the same character; None before.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include`: the text keeps the stop string at its end."""
        self.matched: str | None = None
        self._stops = [(stop, _find_borders(stop)) for stop in stops]
        self._include = include
        self._reached = [0] * len(stops)  # characters of each stop string that the text so far ends with
        self._held = ""  # text that may be the beginning of a stop string

    def push(self, piece: str) -> str:
        """Append text; return the text that is certainly not part of a stop string, none after a match."""
        for at, letter in enumerate(piece):
            for number, (stop, borders) in enumerate(self._stops):
                reached = self._reached[number]
                while reached and stop[reached] != letter:
                    reached = borders[reached]
                reached += stop[reached] == letter
                if reached == len(stop):
                    if self.matched is None or len(stop) > len(self.matched):
                        self.matched = stop
                    reached = borders[reached]
                self._reached[number] = reached
            if self.matched is not None:
                text = self._held + piece[: at + 1]
                self._held = ""
                return text if self._include else text[: -len(self.matched)]
        text = self._held + piece
        shown = len(text) - max(self._reached, default=0)
        self._held = text[shown:]
        return text[:shown]

    def rest(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        rest, self._held = self._held, ""
        return rest


def _find_borders(text: str) -> list[int]:
    """Return for each length n the longest proper prefix of `text[:n]` that is also its suffix; [len + 1]."""
    borders, reached = [0, 0], 0
    for letter in text[1:]:
        while reached and text[reached] != letter:
            reached = borders[reached]
        reached += text[reached] == letter
        borders.append(reached)
    return borders


class PlacedToken(NamedTuple):
    """Result of one token, with the number of characters of the text before it."""

    result: TokenResult
    offset: int


class Piece(NamedTuple):
    """New part of a choice.

    Attributes:
        text: Text that the new tokens complete.
        tokens: New tokens; their text may come in a later piece.
        finish_reason: `"stop"`, `"length"`, `"cancelled"`, or None while the choice goes on.
    """

    text: str
    tokens: list[PlacedToken]
    finish_reason: str | None


class Choice:
    """One answer to one prompt, as it arrives.

    Attributes:
        index: Number in the response.
        request: What the engine was asked.
        cached_tokens: Prompt tokens found in the prefix cache.
        completion_tokens: Tokens of the answer so far, the stop token included.
        finish_reason: As in `Piece`.
        stop_reason: Stop string, or stop token ID that is no end token of the model, that ended the answer; else None.
    """

    def __init__(self, index: int, request: Request, prompts: Prompts, stops: StopStrings) -> None:
        self.index, self.request = index, request
        self.cached_tokens = self.completion_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.prompt_results: list[TokenResult | None] = []
        self._detokenizer = prompts.detokenizer(request.tokens)
        self._ends = prompts.chat_ends
        self._stops = stops
        self._characters = 0  # of the decoded text

    def push(self, output: Output, include_stop: bool = False) -> Piece:
        """Append the new tokens of the engine; nothing is appended after a stop string. `include_stop`: the text keeps
        the stop token."""
        self.cached_tokens = output.cached_tokens or self.cached_tokens
        if output.prompt_results is not None:
            self.prompt_results = output.prompt_results
        text, tokens, reason = "", [], output.finish_reason
        least = self.request.sampling.min_tokens
        for number, result in enumerate(output.results, 1):
            tokens.append(PlacedToken(result, self._characters))
            self.completion_tokens += 1
            if reason == "stop" and number == len(output.results) and not include_stop:
                break
            piece = self._detokenizer.push(result.token)
            self._characters += len(piece)
            text += self._stops.push(piece) if self.completion_tokens > least else piece
            if self._stops.matched is not None:
                self.finish_reason, self.stop_reason = "stop", self._stops.matched
                return Piece(text, tokens, "stop")
        if reason is not None:
            text += self._finish(reason, output.results)
        return Piece(text, tokens, self.finish_reason)

    def _finish(self, reason: str, results: Sequence[TokenResult]) -> str:
        """Note why the engine ended; return the text that was still held back."""
        self.finish_reason = reason
        text = self._stops.push(self._detokenizer.rest())
        if self._stops.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self._stops.matched
        elif reason == "stop" and results[-1].token not in self._ends:
            self.stop_reason = results[-1].token
        return text + self._stops.rest()
