"""Online model of step times: predicted seconds of a step and of the ends of requests, fitted to measured steps."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

FORGETTING = 0.98  # weight of a step relative to the next one: about the last 50 count
TYPICAL_ERRORS = 2.0  # larger multiples of the typical relative error are down-weighted in proportion (Huber)
SWEEPS = 8  # of coordinate descent for each step


class Work(NamedTuple):
    """Remaining work of one unfinished request, in tokens.

    Attributes:
        prompt: Prompt tokens that are still to be computed (prefill).
        answer: Expected number of answer tokens that are still to be generated (decode).
        context: Tokens of the request that are in the KV cache.
    """

    prompt: int
    answer: int
    context: int = 0


class StepTimes:
    """Model of the time of a step, learnt online: seconds = a + b * tokens + c * keys, with a, b, c >= 0. `tokens`:
    number of tokens of the step; `keys`: number of keys that they attend to, summed over tokens. The prediction is 0
    until the first step is observed.

    Recursive least squares of relative errors with exponential forgetting; coordinate descent keeps the coefficients
    non-negative. An outlier (a step that the machine interrupted) counts little; a lasting change is learnt within some
    fifty steps."""

    def __init__(self) -> None:
        """Start without observations."""
        self.coefficients = 0.0, 0.0, 0.0
        self._products = [0.0] * 6  # weighted sums of products of features: 1 1, 1 t, 1 k, t t, t k, k k
        self._targets = [0.0] * 3  # weighted sums of features times seconds
        self._typical_error = 1.0  # relative; moving average

    def predict(self, tokens: float, keys: float) -> float:
        """Return the predicted seconds of a step of `tokens` tokens. keys: number of keys that the tokens attend to,
        summed over tokens (position + 1 each)."""
        a, b, c = self.coefficients
        return a + b * tokens + c * keys

    def observe(self, seconds: float, tokens: int, keys: int) -> None:
        """Update the model by a step of `tokens` tokens that took `seconds`. keys: number of keys that the tokens
        attend to, summed over tokens."""
        expected = self.predict(tokens, keys) or seconds
        if seconds <= 0 or expected <= 0:
            return
        error = abs(seconds / expected - 1)
        limit = TYPICAL_ERRORS * self._typical_error
        weight = min(1.0, limit / error) / expected**2 if error else 1 / expected**2
        self._typical_error += 0.1 * (min(error, 2 * limit) - self._typical_error)
        self._typical_error = max(self._typical_error, 0.01)
        new = (1.0, tokens, keys, tokens * tokens, tokens * keys, keys * keys)
        self._products = [FORGETTING * old + weight * each for old, each in zip(self._products, new, strict=True)]
        pairs = zip(self._targets, new, strict=False)
        self._targets = [FORGETTING * old + weight * each * seconds for old, each in pairs]
        (ones, ab, ac, bb, bc, cc), (target_a, target_b, target_c) = self._products, self._targets
        a, b, c = self.coefficients
        for _ in range(SWEEPS):  # unrolled, because it runs after every step
            a = max(0.0, (target_a - ab * b - ac * c) / ones)
            b = max(0.0, (target_b - ab * a - bc * c) / bb) if bb else b
            c = max(0.0, (target_c - ac * a - bc * b) / cc) if cc else c
        self.coefficients = a, b, c

    def predict_ends(self, requests: Iterable[Work], places: int, prompt_tokens: int, groups: int = 1) -> list[float]:
        """Return the predicted seconds until requests end, ascending.

        The prediction assumes that each running sequence decodes one token in every `groups` steps, that prompts are
        computed one after the other with the decoding sequences, and that a sequence that ends lets the next request
        start. requests: remaining work of the requests, those that decode already first. places: maximum number of
        sequences that run at a time. prompt_tokens: maximum number of prompt tokens of a step. groups: number of groups
        (pipeline stages) among which the sequences are divided evenly; a step computes one group, the next step the
        next group.
        """
        a, b, c = self.coefficients
        running, ends, free = list[float](), list[float](), 0.0  # in rounds of `groups` steps; `running` is a heap
        changes: list[tuple[float, float]] = []  # (round, change of the seconds of a round)
        for prompt, answer, context in requests:
            new = len(running) < max(1, places)
            begin = (1 + len(running) % groups) / groups - 1 if new else heapq.heappop(running)
            if prompt:
                start, free = max(begin, free), max(begin, free) + prompt / (prompt_tokens * groups)
                cost = prompt_tokens * groups * (b + c * (context + prompt / 2))
                changes += (start, cost), (free, -cost)
                # The last step of the prompt samples the first token.
                begin, answer = math.ceil(free * groups) / groups, answer - 1
            cost = b + c * (context + prompt + answer / 2)
            changes += (begin, cost), (begin + answer, -cost)
            ends.append(begin + answer)
            heapq.heappush(running, begin + answer)
        rounds, costs = np.array(sorted(changes)).T
        seconds = np.append(0.0, np.cumsum((groups * a + np.cumsum(costs)[:-1]) * np.diff(rounds)))
        return (np.interp(sorted(ends), rounds, seconds) - np.interp(0.0, rounds, seconds)).tolist()
