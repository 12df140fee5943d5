"""Generations: the answers to offline prompts, put together from an engine's outputs. Free of torch."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from meshwright.documents import to_json_dict
from meshwright.serving.prompts import Prompts
from meshwright.serving.request import Output, Request
from meshwright.serving.text import AnswerText


class GenerationOptions(TypedDict, total=False):
    """Options of `Model.generate` and `Model.stream`.

    Attributes:
        max_tokens: New tokens of each prompt, at most; 256 unless given.
        temperature: Divisor of the logits; 0, the default, takes the most likely token each time.
        top_k: Draw among the k most likely tokens; 0: among all.
        top_p: Draw among the most likely tokens that together reach this probability.
        min_p: Draw among tokens with at least this fraction of the highest probability.
        repetition_penalty: Divides the logits of tokens in prompt and answer; 1: off.
        presence_penalty: Subtracted from the logits of tokens in the answer.
        frequency_penalty: The same for each occurrence.
        seed: Seed of the draws, the same for each prompt.
        chat: The prompt is a user's turn and the text the answer, by the chat template of the directory.
        ignore_eos: End tokens do not end the text.
    """

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    chat: bool
    ignore_eos: bool


@dataclass(slots=True)
class Generation:
    """Continuation of a prompt.

    Attributes:
        prompt: Text that was continued.
        text: New text, without the prompt.
        tokens: IDs of the new tokens.
        stopped: `"end"` (the model ended the text), `"length"` (max_tokens), or `"context"` (no more positions).
        prompt_tokens: Tokens of the prompt, with the start token.
        seconds_to_first_token: Time to first token (TTFT), other prompts of the same call included.
        tokens_per_second: New tokens per second after the first.
        checkpoint: Directory of the model.
    """

    prompt: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    stopped: str = "length"
    prompt_tokens: int = 0
    seconds_to_first_token: float = 0.0
    tokens_per_second: float = 0.0
    checkpoint: Path | None = None

    def to_json_dict(self) -> dict[str, Any]:
        """Return the JSON object of `meshwright generate --json`; `tokens` is the number of new tokens."""
        return to_json_dict({**asdict(self), "tokens": len(self.tokens)})


class Answer:
    """The generation of one request as its outputs arrive.

    Attributes:
        generation: Text, tokens and times so far.
    """

    def __init__(self, prompts: Prompts, generation: Generation, request: Request, wanted: int) -> None:
        """`generation`: without an answer yet; `wanted`: tokens asked for, of which the model's positions may leave
        fewer to `request`."""
        self.generation = generation
        self._cut = request.sampling.max_tokens < wanted
        self._text = AnswerText(prompts.detokenizer(request.tokens))
        self._begun = self._first = time.perf_counter()
        self._count = 0

    def add(self, output: Output) -> str:
        """Add an output of the request; return the text that becomes visible."""
        generation, piece, now = self.generation, "", time.perf_counter()
        for result in output.results:
            if self._count == 0:
                self._first, generation.seconds_to_first_token = now, now - self._begun
            elif now > self._first:
                generation.tokens_per_second = self._count / (now - self._first)
            self._count += 1
            if output.finish_reason == "stop" and result is output.results[-1]:
                continue  # the end token is no part of the answer
            generation.tokens.append(result.token)
            piece += self._text.push(result.token)
        if output.finish_reason is not None:
            piece += self._text.finish()
            generation.stopped = "end" if output.finish_reason == "stop" else "context" if self._cut else "length"
        generation.text += piece
        return piece
