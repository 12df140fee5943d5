"""Sampling of one token from logits, as a function of one sequence alone: options, draws and log-probabilities.

Shapes: V vocabulary. Everything is computed row by row, in a fixed order, so that a result never depends on what else
the step computes. Definitions of the options follow vLLM's `SamplingParams`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.errors import UserError


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options of one request, in the order in which they apply.

    Attributes:
        min_tokens: Stop tokens have probability 0 until the answer has so many tokens.
        logit_bias: Added to the logit of a token ID; -100 to 100.
        repetition_penalty: Logits of tokens in the prompt or the answer are divided by it where positive and multiplied
            where negative; 1: off.
        frequency_penalty: Subtracted from a token's logit for each occurrence in the answer; -2 to 2.
        presence_penalty: Subtracted once from the logit of each token in the answer; -2 to 2.
        temperature: Divides the logits; 0: the most likely token, the lowest token ID among equals (greedy).
        min_p: Keeps tokens whose probability is at least this fraction of the highest; 0: off.
        top_k: Keeps the k most likely tokens; 0: all.
        top_p: Keeps the most likely tokens that reach this probability together, at least one (nucleus sampling:
            arXiv:1904.09751, section 3.1); 1: off.
        seed: Seed of the draws, a signed 64-bit integer.
        max_tokens: Most tokens of the answer; 0 computes the prompt alone.
        stop_tokens: Token IDs that end the answer; the last result is then that token. A request with `ignore_eos`
            leaves the model's end tokens out.
        logprobs: Number of most likely tokens reported beside each token of the answer; 0: that token's
            log-probability alone; None: no log-probabilities.
        prompt_logprobs: The same for the tokens of the prompt.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    min_tokens: int = 0
    max_tokens: int = 256
    stop_tokens: frozenset[int] = frozenset()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        """Check each option; raises UserError that names it."""
        _check(0 <= self.temperature < math.inf, "temperature", self.temperature, "0 (greedy) or more")
        _check(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "more than 0 and at most 1 (off)")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "0 (off) to 1")
        _check(0 < self.repetition_penalty < math.inf, "repetition_penalty", self.repetition_penalty, "more than 0")
        _check(-2 <= self.presence_penalty <= 2, "presence_penalty", self.presence_penalty, "-2 to 2")
        _check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", self.frequency_penalty, "-2 to 2")
        for token, bias in self.logit_bias.items():
            _check(token >= 0, "logit_bias: token ID", token, "0 or more")
            _check(-100 <= bias <= 100, f"logit_bias of token {token}", bias, "-100 to 100")
        _check(-(2**63) <= self.seed < 2**63, "seed", self.seed, "a signed 64-bit integer")
        _check(self.max_tokens >= 0, "max_tokens", self.max_tokens, "0 or more")
        _check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "0 to max_tokens")
        _check(min(self.stop_tokens, default=0) >= 0, "stop_tokens", min(self.stop_tokens, default=0), "0 or more")
        _check(self.logprobs is None or self.logprobs >= 0, "logprobs", self.logprobs, "0 or more")
        _check(
            self.prompt_logprobs is None or self.prompt_logprobs >= 0,
            "prompt_logprobs",
            self.prompt_logprobs,
            "0 or more",
        )

    def check_vocabulary(self, size: int) -> None:
        """Raise UserError if `logit_bias` or `stop_tokens` name a token ID outside a vocabulary of `size` tokens."""
        for name, tokens in (("logit_bias", self.logit_bias), ("stop_tokens", self.stop_tokens)):
            if (highest := max(tokens, default=0)) >= size:
                raise UserError(f"{name}: token ID {highest} should be less than {size}, the model's vocabulary")

    @property
    def penalizes(self) -> bool:
        """True if a penalty needs the counts of tokens."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(slots=True)
class TokenResult:
    """One token with its log-probability.

    Attributes:
        token: Token ID.
        logprob: Natural log of its probability under the unmodified logits (temperature 1, no option applied); None
            if the request asked for no log-probabilities.
        top: (token ID, log-probability) of the most likely tokens, most likely first, the lower token ID first among
            equals; as many as asked for.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def _check(holds: bool, name: str, value: object, right: str) -> None:
    """Raise UserError with the option's name and its right values unless `holds`."""
    if not holds:
        raise UserError(f"{name} {value}: should be {right}")
