"""Sampling of one token from logits, as a function of one sequence alone: options, draws and log-probabilities.

Shapes: V vocabulary. Definitions of the options follow vLLM's `SamplingParams`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from meshwright.errors import MeshwrightError, UserError
from meshwright.limits import shorten_repr
from meshwright.serving.logit_rows import Draw, LogitRow, Logits, compute_softmax_weights, find_quantile

GREEDY_TEMPERATURE = 1e-5  # lower temperatures count as 0, as in vLLM
_FIRST_LOOK = (256, 1024, 4096)  # most likely tokens among which top-p is looked for before all are sorted


class InvalidLogits(MeshwrightError):
    """Error: a model computed NaN or infinite logits, because of damaged weights or a fault of the engine."""


# Ranges of the options, for engine and API. In strict mode pydantic takes no integers of NumPy.
AcceptNumpy = BeforeValidator(lambda value: int(value) if isinstance(value, np.integer) else value)
Integer = Annotated[int, AcceptNumpy]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]  # without conversion, as bodies have many in their prompts
TokenCount = Annotated[Integer, Field(ge=0, le=2**30)]
Temperature = Annotated[float, Field(ge=0, le=100, description="0: the most likely token")]
TopP = Annotated[float, Field(gt=0, le=1, description="1: off")]
TopK = Annotated[Integer, Field(ge=-1, le=2**31 - 1, description="0 or -1: off")]
MinP = Annotated[float, Field(ge=0, le=1, description="0: off")]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100, description="1: off")]
AdditivePenalty = Annotated[float, Field(ge=-2, le=2, description="0: off")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Seed = Annotated[Integer, Field(ge=-(2**63), le=2**63 - 1)]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options of one request, in the order in which they apply.

    Attributes:
        min_tokens: Minimum number of tokens of the answer, before which stop tokens have probability 0.
        logit_bias: Added to the logit of a token ID; -100 to 100.
        repetition_penalty: Logits of tokens in the prompt or the answer are divided by it where positive and multiplied
            where negative; 1: off.
        frequency_penalty: Subtracted from a token's logit for each occurrence in the answer; -2 to 2.
        presence_penalty: Subtracted once from the logit of each token in the answer; -2 to 2.
        temperature: Divides the logits; 0: the most likely token, the lowest token ID among equals (greedy).
        min_p: Keeps tokens whose probability is at least this fraction of the highest; 0: off.
        top_k: Keeps the k most likely tokens; 0 or -1: all.
        top_p: Keeps the most likely tokens that reach this probability together, at least one (nucleus sampling:
            arXiv:1904.09751, section 3.1); 1: off.
        seed: Seed of the draws, a signed 64-bit integer.
        max_tokens: Maximum number of tokens of the answer; 0 computes the prompt alone.
        stop_tokens: Token IDs that end the answer; the token that ended it is the last result. A request with
            `ignore_eos` leaves the model's end tokens out.
        logprobs: Number of most likely tokens reported for each token of the answer; 0: that token's log-probability
            alone; None: no log-probabilities.
        prompt_logprobs: Number of most likely tokens reported for each token of the prompt; 0 and None as for
            `logprobs`.
    """

    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    presence_penalty: AdditivePenalty = 0.0
    frequency_penalty: AdditivePenalty = 0.0
    logit_bias: Mapping[Annotated[TokenId, AcceptNumpy], Bias] = field(default_factory=dict)
    seed: Seed = 0
    min_tokens: TokenCount = 0
    max_tokens: TokenCount = 256
    stop_tokens: frozenset[Annotated[TokenId, AcceptNumpy]] = frozenset()
    logprobs: TokenCount | None = None
    prompt_logprobs: TokenCount | None = None

    def __post_init__(self) -> None:
        """Check the type and range of each option; raises UserError that names it."""
        try:
            checked = _make_options_model().model_validate({name: getattr(self, name) for name in self.__slots__})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(map(str, first["loc"])).removesuffix(".[key]")
            raise UserError(f"{name} {shorten_repr(first['input'])}: {first['msg'].removeprefix('Input ')}") from None
        for name, value in checked:  # with Python's integers in place of NumPy's
            object.__setattr__(self, name, value)
        if self.min_tokens > self.max_tokens:
            raise UserError(f"min_tokens {self.min_tokens}: should be 0 to max_tokens")

    def check_vocabulary(self, size: int) -> None:
        """Raise UserError if `logit_bias` or `stop_tokens` (the API's `stop_token_ids`) have a token ID outside a
        vocabulary of `size` tokens."""
        for name, tokens in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_tokens)):
            if (highest := max(tokens, default=0)) >= size:
                raise UserError(f"{name}: token ID {highest} should be less than {size}, the model's vocabulary")

    @property
    def penalizes(self) -> bool:
        """True if a repetition, presence or frequency penalty is set, for which `sample` needs token counts."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@cache
def _make_options_model() -> type[BaseModel]:
    """Return the pydantic model that checks the options of `Sampling`."""
    fields: dict[str, Any] = {name: (kind, ...) for name, kind in get_type_hints(Sampling, include_extras=True).items()}
    return create_model("Options", __config__=ConfigDict(strict=True), **fields)


class TokenResult(NamedTuple):
    """One token with its log-probability; in JSON the list [token, logprob, top].

    Attributes:
        token: Token ID; -1 where the logits are NaN or infinite, which ends the request with an error.
        logprob: Natural logarithm of the token's probability under the unmodified logits (temperature 1, no option
            applied); None if no log-probabilities are requested.
        top: (token ID, log-probability) of the most likely tokens, most likely first, the lower token ID first among
            equals; as many as requested.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class TokenCounts:
    """Token IDs that occur in a sequence, and how often each occurs in the answer. The repetition, frequency and
    presence penalties are computed from them. prompt: token IDs of the prompt. answer: token IDs of the answer so far.
    """

    def __init__(self, prompt: Iterable[int], answer: Iterable[int] = ()) -> None:
        """Count the tokens of `prompt` and `answer`."""
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._tokens = np.fromiter(self._places, np.int64, len(self._places))
        self._counts = np.zeros(len(self._places), np.float32)
        for token in answer:
            self.add(token)

    def add(self, token: int) -> None:
        """Count `token`, the ID of one more token of the answer."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._tokens[place] = token
        self._counts[place] += 1

    def penalize(self, logits_V: Logits, sampling: Sampling) -> None:
        """Apply the repetition, frequency and presence penalties of `sampling` to `logits_V`, float32 [V], in place."""
        tokens, counts = self._tokens[: len(self._places)], self._counts[: len(self._places)]
        values = logits_V[tokens]
        penalty = np.float32(sampling.repetition_penalty)
        values = np.where(values > 0, values / penalty, values * penalty)
        values -= np.float32(sampling.frequency_penalty) * counts
        values -= np.float32(sampling.presence_penalty) * (counts > 0)
        logits_V[tokens] = values


def sample(
    row: LogitRow, sampling: Sampling, *, choice: int = 0, position: int = 0, counts: TokenCounts | None = None
) -> TokenResult:
    """Sample the token at `position` of an answer (0: its first) from the logits of a row. The result depends on
    nothing but the arguments, among them the seed in `sampling`.

    `choice`: index among several answers to the prompt. `counts`: token counts, required if `sampling.penalizes`.
    Raises InvalidLogits if logits are NaN or infinite.
    """
    _check_logits(row)
    adjusted = _adjust(row, sampling, position, counts) if _is_adjusted(sampling, position) else row
    if sampling.temperature < GREEDY_TEMPERATURE:
        token = adjusted.best
    else:
        token = _find_token(adjusted, sampling, draw_uniform(sampling.seed, choice, position))
    return TokenResult(token) if sampling.logprobs is None else score_token(row, token, sampling.logprobs)


def prepare_draw(sampling: Sampling, *, choice: int = 0, position: int = 0) -> Draw:
    """Return the sampling inputs (`Draw`) of the token at `position` of an answer (0: its first). With these inputs a
    GPU samples the token itself, or summarizes the logits for a later call of `sample` with the same arguments. choice:
    index among several answers to the prompt."""
    ranked = 0 if sampling.logprobs is None else sampling.logprobs
    adjusted = _is_adjusted(sampling, position)  # then all logits are read
    if adjusted or sampling.temperature < GREEDY_TEMPERATURE:
        return Draw(ranked=ranked, decides=not adjusted)
    if sampling.top_k > 0:
        ranked = max(ranked, sampling.top_k)
    elif sampling.top_p < 1 or sampling.min_p > 0:
        ranked = max(ranked, _FIRST_LOOK[1])
    return Draw(sampling.temperature, draw_uniform(sampling.seed, choice, position), 0, ranked, decides=True)


def score_token(row: LogitRow, token: int, alternatives: int) -> TokenResult:
    """Return the token ID `token` and the `alternatives` most likely tokens, each with its log-probability, from a
    log-softmax of the row's logits (absolute error up to 1e-6). Raises InvalidLogits if logits are NaN or infinite."""
    _check_logits(row)
    normalizer = float(row.highest) + math.log(row.softmax_denominator(1.0))
    best = min(alternatives, row.size)
    top = [(each, row.logit(each) - normalizer) for each in row.most_likely(best)] if best else []
    return TokenResult(token, row.logit(token) - normalizer, tuple(top))


def draw_uniform(seed: int, choice: int, position: int) -> float:
    """Return the pseudo-random number in [0, 1) for the token at `position` (from 0) of an answer: 53 bits of a BLAKE2b
    hash of (seed, choice, position)."""
    digest = hashlib.blake2b(b"%d %d %d" % (seed, choice, position), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _check_logits(row: LogitRow) -> None:
    """Raise InvalidLogits if the highest logit of `row` is NaN or infinite, which is the case if any logit is NaN or
    +inf or all are -inf."""
    if not math.isfinite(row.highest):
        raise InvalidLogits(f"the model computed {row.highest} as a logit: damaged weights, or a fault of the engine")


def _is_adjusted(sampling: Sampling, position: int) -> bool:
    """Return True if options of `sampling` change the logits before the temperature: minimum length, bias or penalties.
    `position`: index of the token in the answer."""
    forbid = position < sampling.min_tokens and bool(sampling.stop_tokens)
    return forbid or bool(sampling.logit_bias) or sampling.penalizes


def _adjust(row: LogitRow, sampling: Sampling, position: int, counts: TokenCounts | None) -> LogitRow:
    """Return the row with the minimum length, bias and penalties of `sampling` applied to a copy of its logits, in
    vLLM's order. `position`: index of the token in the answer. `counts`: token counts; None only if no penalty is set.
    """
    adjusted_V = row.on_host().copy()
    if position < sampling.min_tokens and sampling.stop_tokens:
        adjusted_V[list(sampling.stop_tokens)] = -np.inf
    if sampling.logit_bias:
        adjusted_V[list(sampling.logit_bias)] += np.array(list(sampling.logit_bias.values()), np.float32)
    if sampling.penalizes:
        assert counts is not None, "penalties need the counts of tokens"
        counts.penalize(adjusted_V, sampling)
    return LogitRow(adjusted_V)


def _find_token(row: LogitRow, sampling: Sampling, uniform: float) -> int:
    """Sample a token from the tokens of `row` that the options top-k, top-p and min-p keep; return its ID. The sampled
    token is the kept token at quantile `uniform`, in [0, 1) (inverse-CDF sampling). If all tokens are kept, they are
    ordered by token ID; else by descending probability, equal ones by token ID. Raises InvalidLogits if the highest
    logit is NaN or +inf.

    sampling: the options. The kept tokens are always the most likely tokens, so only these are sorted."""
    highest, temperature = row.highest, sampling.temperature
    if highest == -np.inf:  # every token is a stop token before `min_tokens`
        return 0
    if not highest < np.inf:
        raise InvalidLogits(f"options turn a logit into {highest}: repetition_penalty {sampling.repetition_penalty}")
    kept = row.size
    if sampling.min_p > 0:
        kept = row.count_at_least(highest + np.float32(temperature * math.log(sampling.min_p)))
    if sampling.top_k > 0:
        kept = min(kept, sampling.top_k)
    if kept == row.size and sampling.top_p == 1:
        return row.draw(temperature, uniform)
    if kept < row.size:
        values = row.highest_logits(kept)
        weights = compute_softmax_weights(values, highest, temperature)
        if sampling.top_p < 1:
            weights = _cut_to_nucleus(weights, sampling.top_p * weights.sum(dtype=np.float64))
    else:
        mass = sampling.top_p * row.softmax_denominator(temperature)
        for count in (*_FIRST_LOOK, row.size):
            values = row.highest_logits(min(count, row.size))
            weights = _cut_to_nucleus(compute_softmax_weights(values, highest, temperature), mass)
            if len(weights) < len(values):
                break
    return row.token_at(find_quantile(weights, uniform), values)


def _cut_to_nucleus(weights: Logits, mass: float) -> Logits:
    """Return the shortest prefix of `weights` (unnormalized probabilities in descending order) whose sum reaches
    `mass`, at least one weight: the nucleus of top-p sampling."""
    return weights[: int(np.cumsum(weights, dtype=np.float64).searchsorted(mass)) + 1]
