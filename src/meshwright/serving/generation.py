"""Generations: the answers to offline prompts, put together from an engine's outputs. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from meshwright.documents import to_json_dict
from meshwright.serving.choices import Choice, StopRule
from meshwright.serving.prompts import Prompts
from meshwright.serving.request import Output, Request
from meshwright.serving.sampling import TokenResult


class GenerationOptions(TypedDict, total=False):
    """Options of `Model.generate` and `Model.stream`; all may be left out.

    Attributes:
        max_tokens: Maximum number of new tokens for each prompt; default 256.
        temperature: Divisor of the logits; 0, the default: greedy.
        top_k: Sample from the k most likely tokens; 0, the default: from all.
        top_p: Sample from the most likely tokens that together reach this probability (nucleus); default 1: off.
        min_p: Sample from tokens with at least this fraction of the highest probability; default 0: off.
        repetition_penalty: Divides positive logits, and multiplies negative logits, of tokens in prompt and answer;
            default 1: off.
        presence_penalty: Subtracted from the logits of tokens that are in the answer; default 0: off.
        frequency_penalty: Subtracted from the logits of tokens for each time they are in the answer; default 0: off.
        logit_bias: {token ID: number from -100 to 100 that is added to its logit}; default: none.
        min_tokens: Minimum number of new tokens, before which no end token or stop string ends the text; default 0.
        stop: A text, or several texts; the generated text ends before the first occurrence of one of these texts.
            Default: none.
        logprobs: Number of most likely tokens that `Generation.logprobs` reports beside each token, 0: only the token's
            log-probability; default None: no log-probabilities.
        n: Answers to each prompt, which differ in their draws; default 1. Only `generate` takes more.
        seed: Seed of sampling, the same for each prompt.
        chat: The prompt is a user message, put into the chat template, and the text is the assistant's answer.
        ignore_eos: Generate up to `max_tokens`; end tokens do not end the text.
    """

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    min_tokens: int
    stop: str | Sequence[str]
    logprobs: int | None
    n: int
    seed: int
    chat: bool
    ignore_eos: bool


@dataclass(slots=True)
class Generation:
    """Result of generation for one prompt.

    Attributes:
        prompt: Text of the prompt.
        text: Generated text, without the prompt.
        tokens: IDs of the generated tokens.
        stopped: Reason why generation ended: `"end"` (end token), `"stop"` (stop string), `"length"` (`max_tokens`) or
            `"context"` (the model has no more positions).
        prompt_tokens: Number of prompt tokens, start token included.
        seconds_to_first_token: Time to first token (TTFT) from the call on, which may include other prompts' work.
        tokens_per_second: Generated tokens per second after the first token.
        checkpoint: Directory of the model.
        logprobs: Each of `tokens` with its log-probability, and the most likely tokens with theirs; empty unless the
            option `logprobs` is given.
        others: The further answers to the prompt, if `n` is more than 1.
    """

    prompt: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    stopped: str = "length"
    prompt_tokens: int = 0
    seconds_to_first_token: float = 0.0
    tokens_per_second: float = 0.0
    checkpoint: Path | None = None
    logprobs: list[TokenResult] = field(default_factory=list)
    others: list[Generation] = field(default_factory=list)

    def to_json_dict(self) -> dict[str, Any]:
        """Return the JSON object of `meshwright generate --json`; `tokens` is the number of new tokens."""
        others = [each.to_json_dict() for each in self.others]
        return to_json_dict({**asdict(self), "tokens": len(self.tokens), "others": others})


class Answer:
    """Builder of the `Generation` of one request from the engine's outputs.

    prompts: tokenizer. generation: object to fill. request: request that the engine runs. wanted: maximum number of new
    tokens that the caller asked for; the limit in `request` is lower if the model has too few positions left. stop:
    stop strings.

    Attributes:
        generation: Text, token IDs and times so far."""

    def __init__(self, prompts: Prompts, generation: Generation, request: Request, wanted: int, stop: StopRule) -> None:
        """Start with no output; arguments: see the class."""
        self.generation = generation
        self._cut = request.sampling.max_tokens < wanted
        self._choice = Choice(0, request, prompts, stop)

    @property
    def ended(self) -> bool:
        """True if the answer is complete: the engine has ended the request, or a stop string was found."""
        return self._choice.finish_reason is not None

    def add(self, output: Output) -> str:
        """Add an output of the engine to the generation; return the new text, whole characters only, perhaps empty.
        Outputs after the end are ignored."""
        generation, choice = self.generation, self._choice
        if self.ended:
            return ""
        piece = choice.push(output)
        by_string = isinstance(choice.stop_reason, str)
        by_token = piece.finish_reason == "stop" and not by_string  # the end token is no part of the answer
        results = [each.result for each in piece.tokens[: len(piece.tokens) - by_token]]
        generation.text += piece.text
        generation.tokens += [result.token for result in results]
        generation.logprobs += [result for result in results if result.logprob is not None]
        if choice.first_token is not None and choice.last_token is not None:
            generation.seconds_to_first_token = choice.first_token - choice.created
            if choice.last_token > choice.first_token:
                generation.tokens_per_second = (choice.completion_tokens - 1) / (choice.last_token - choice.first_token)
        if piece.finish_reason is not None:
            if by_string:
                generation.stopped = "stop"
            elif by_token:
                generation.stopped = "end"
            else:
                generation.stopped = "context" if self._cut else "length"
        return piece.text
