"""Choices of a response (OpenAI API): convert the engine's tokens to text that ends at a stop string or stop token.
Free of torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.data.tokenizers.detokenizer import IncrementalDetokenizer
from meshwright.errors import UserError
from meshwright.serving.prompts import Prompts
from meshwright.serving.request import Output, Request
from meshwright.serving.sampling import TokenResult


class AnswerText:
    """Text of one answer that the client sees: detokenized tokens up to the first stop string, which is left out.

    Text that may be the beginning of a stop string is held back until later tokens decide, so that the joined pieces do
    not depend on how tokens are divided into outputs. detokenizer: converts the tokens to text. stop: stop strings,
    none of them empty. min_tokens: number of first tokens whose text is not searched for stop strings.

    Attributes:
        offsets: For each token, the index in the answer's text of the first character that the token completes; may lie
            beyond the visible text for tokens of a stop string.
        characters: Length of the text of all tokens so far, hidden text included.
        stopped_by: Stop string that ended the text; None if no stop string has ended it.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        """Start with empty text; arguments: see the class."""
        assert all(stop), "an empty stop string ends every text before it begins"
        self.offsets: list[int] = []
        self.stopped_by: str | None = None
        self._detokenizer, self._stop, self._min_tokens = detokenizer, tuple(stop), min_tokens
        self._held = ""  # text not yet visible: the longest end of it that begins a stop string
        self.characters = 0

    def push(self, token: int) -> str:
        """Append a token; return the text that becomes visible, perhaps empty. If the token completes a stop string,
        `stopped_by` is set, and no token may follow."""
        assert self.stopped_by is None
        self.offsets.append(self.characters)
        return self._append_text(self._detokenizer.push(token), searched=len(self.offsets) > self._min_tokens)

    def finish(self) -> str:
        """Return the text held back so far, at the end of an answer; empty if a stop string ended it."""
        if self.stopped_by is not None:
            return ""
        return self._append_text(self._detokenizer.flush(), searched=True) + self._held

    def _append_text(self, piece: str, searched: bool) -> str:
        """Append the text `piece`, and return the text that becomes visible. A suffix that may be the beginning of a
        stop string is held back; text from a complete stop string on is dropped. searched: False: do not search for
        stop strings and return all text."""
        self.characters += len(piece)
        text = self._held + piece
        if not searched or not self._stop:
            return text
        found = [(at, len(stop), stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            end, _, self.stopped_by = min(found)
        else:
            longest = min(max(map(len, self._stop)) - 1, len(text))
            lengths = (n for n in range(longest, 0, -1) if any(each.startswith(text[-n:]) for each in self._stop))
            end = len(text) - next(lengths, 0)
        self._held = "" if found else text[end:]
        return text[:end]


class StopRule(NamedTuple):
    """Rule by which an answer ends at a stop string.

    strings: stop strings, any of which ends the answer. include: True to keep the stop string or stop token at the end
    of the returned text."""

    strings: Sequence[str] = ()
    include: bool = False

    @classmethod
    def parse(cls, stop: object, include: bool = False) -> StopRule:
        """Parse the API's option `stop`, a text or a sequence of texts, to a rule. include: True: the returned text
        keeps the stop string or stop token at its end. Raises UserError for another type of `stop`, and for an empty
        text."""
        strings = [stop] if isinstance(stop, str) else stop
        if not isinstance(strings, Sequence) or not all(each and isinstance(each, str) for each in strings):
            raise UserError("stop: should be a text that is not empty, or several")
        return cls(strings, include)


class PlacedToken(NamedTuple):
    """Token of a choice (an answer in the OpenAI API) and its position in the choice's text. result: token ID and
    log-probability. offset: index of the token's first character in the text, which includes an echoed prompt."""

    result: TokenResult
    offset: int


class Piece(NamedTuple):
    """Part of a choice (one answer in the OpenAI API): the text and tokens that are new since the previous piece. In a
    response without streaming, one piece holds the whole choice.

    Attributes:
        text: New text, whole characters.
        tokens: New tokens; the text of the last tokens may come in a later piece.
        finish_reason: `"stop"` or `"length"`; None while the choice goes on.
    """

    text: str
    tokens: Sequence[PlacedToken]
    finish_reason: str | None

    @classmethod
    def join(cls, pieces: Sequence[Piece]) -> Piece:
        """Concatenate consecutive `pieces` of a choice to one piece, with the finish reason of the last piece."""
        tokens = [token for piece in pieces for token in piece.tokens]
        return cls("".join(piece.text for piece in pieces), tokens, pieces[-1].finish_reason)


class Choice:
    """One answer to one prompt (a choice of the OpenAI API), built from the engine's outputs.

    prompts: converts between text and tokens. stop: stop strings of the request. echo: text of the prompt, to put
    before the answer; None: the answer alone.

    Attributes:
        index: Index in the response's `choices`.
        request: Request that the engine runs.
        cached_tokens: Number of prompt tokens found in the prefix cache.
        prompt_results: Log-probabilities of the prompt's tokens, None for the first token; empty if not requested.
        completion_tokens: Number of tokens generated so far, a stop token included.
        finish_reason: `"stop"`, `"length"`, `"cancelled"`, `"timeout"` or `"error"`; None while the choice goes on.
        stop_reason: Stop string, or ID of the stop token, that ended the answer; None if it has not ended or ended
            otherwise, such as by one of the model's own end tokens.
        prefill_seconds: Time from the request's admission by the engine to its first token.
        created: Time of creation in seconds of `time.perf_counter`.
        first_token, last_token: Times at which the first and the newest token came, in seconds of `time.perf_counter`;
            equal to `created` before the first token.
    """

    def __init__(self, index: int, request: Request, prompts: Prompts, stop: StopRule, echo: str | None = None) -> None:
        """Start an answer without tokens; arguments: see the class."""
        self.index, self.request = index, request
        self.cached_tokens = self.completion_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.created = self.first_token = self.last_token = time.perf_counter()
        self.prefill_seconds = 0.0
        self.prompt_results: Sequence[TokenResult | None] = ()
        self._prompts, self._stop = prompts, stop
        detokenizer = IncrementalDetokenizer(prompts.tokenizer, request.tokens)
        self._answer = AnswerText(detokenizer, stop.strings, request.sampling.min_tokens)
        self._unsent_echo, self._echoed = echo, len(echo or "")

    def push(self, output: Output) -> Piece:
        """Append an engine output to the choice, and return the piece of text and tokens that is new. Tokens after a
        stop string are dropped."""
        self.cached_tokens = output.cached_tokens or self.cached_tokens
        text, tokens = self._convert_output(output)
        if tokens:
            self.last_token = time.perf_counter()
            self.first_token = self.first_token if self.completion_tokens else self.last_token
        self.prefill_seconds = output.prefill_seconds or self.prefill_seconds
        self.completion_tokens += len(tokens)
        self.prompt_results = output.prompt_results or self.prompt_results
        if self._unsent_echo is not None:
            text = self._unsent_echo + text
            tokens = self._place_prompt() + tokens
            self._unsent_echo = None
        return Piece(text, tokens, self.finish_reason)

    def _convert_output(self, output: Output) -> tuple[str, list[PlacedToken]]:
        """Convert an engine output to (new text, new tokens with their offsets in the choice's text). Text and tokens
        after a stop string are left out. Set `finish_reason` and `stop_reason` if the output ends the choice."""
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
            end = self._echoed + answer.characters
            tokens += [PlacedToken(result, end) for result in hidden]
        if answer.stopped_by is not None:
            self.finish_reason, self.stop_reason = "stop", answer.stopped_by
            text += answer.stopped_by if self._stop.include else ""
        return text, tokens

    def _place_prompt(self) -> list[PlacedToken]:
        """List the prompt's tokens with their log-probabilities and the character offset of each in the echoed prompt;
        empty if no prompt log-probabilities were requested."""
        detokenizer, placed, characters = IncrementalDetokenizer(self._prompts.tokenizer, ()), [], 0
        for token, result in zip(self.request.tokens, self.prompt_results, strict=False):
            placed.append(PlacedToken(result or TokenResult(token), characters))
            characters += len(detokenizer.push(token))
        return placed
