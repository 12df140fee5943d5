"""Logits of one output row (a token whose logits are wanted), as sampling reads them: in host memory, or on a GPU.

Shapes: V vocabulary. Everything is computed row by row, in a fixed order, so that a result never depends on what else
the step computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
_SUM_BLOCK = 256  # logits


class Draw(NamedTuple):
    """Sampling inputs of one output row (a token whose logits are wanted). These inputs are known before the logits, so
    that a GPU can sample from the row or summarize it without copying the logits to the host.

    Attributes:
        temperature: Divisor of the logits; 0: no token is drawn.
        uniform: Random number in [0, 1): quantile of the softmax at which a token is drawn.
        target: Token ID whose log-probability is wanted (the prompt's next token); 0 if none is.
        ranked: Number of most likely tokens whose logits the host may read, such as k of top-k sampling; 0: only the
            most likely token.
        decides: True if a token is sampled and no bias, penalty or minimum length changes its logits. The GPU then
            samples the token itself if `ranked` is 0.
    """

    temperature: float = 0.0
    uniform: float = 0.0
    target: int = 0
    ranked: int = 0
    decides: bool = False


class LogitRow:
    """Logits [V] of one output row (a token whose logits are wanted) in host memory; those of a GPU are a subclass.
    logits_V: float32 [V], V vocabulary; must not change while the object is in use.

    Attributes:
        size: Size of the vocabulary, V.
        best: ID of the most likely token, the lowest among equals; undefined if a logit is NaN.
        highest: Largest logit; NaN if any logit is NaN, and then the methods must not be called.
    """

    def __init__(self, logits_V: Logits) -> None:
        """Find the highest logit; arguments: see the class."""
        self._logits, self.size = logits_V, len(logits_V)
        self.best = int(logits_V.argmax())  # the first NaN, if there is one
        self.highest: np.float32 = logits_V[self.best]

    def on_host(self) -> Logits:
        """Return the logits [V] in host memory; must not be modified."""
        return self._logits

    def logit(self, token: int) -> float:
        """Return the logit of a token ID."""
        return float(self.on_host()[token])

    def softmax_denominator(self, temperature: float) -> float:
        """Return the sum over the vocabulary of exp((logit - highest) / temperature), the softmax denominator, with a
        relative error of about 1e-7; highest: the row's largest logit. temperature: more than 0."""
        return float(compute_softmax_weights(self.on_host(), self.highest, temperature).sum(dtype=np.float64))

    def draw(self, temperature: float, uniform: float) -> int:
        """Return the ID of the token at quantile `uniform`, in [0, 1), of the softmax of logits / temperature, tokens
        ordered by ID (inverse-CDF sampling). temperature: more than 0."""
        return find_quantile(compute_softmax_weights(self.on_host(), self.highest, temperature), uniform)

    def count_at_least(self, least: np.float32) -> int:
        """Return the number of logits that are at least `least`."""
        return int(np.count_nonzero(self.on_host() >= least))

    def highest_logits(self, count: int) -> Logits:
        """Return the `count` highest logits in descending order."""
        logits_V = self.on_host()
        return np.sort(logits_V if count == self.size else np.partition(logits_V, -count)[-count:])[::-1]

    def most_likely(self, count: int) -> list[int]:
        """Return the IDs of the `count` most likely tokens, most likely first, the lower ID first among equals."""
        logits_V = self.on_host()
        likely = np.flatnonzero(logits_V >= np.partition(logits_V, -count)[-count])
        return [int(each) for each in likely[np.argsort(-logits_V[likely], kind="stable")][:count]]

    def token_at(self, rank: int, values: Logits) -> int:
        """Return the ID of the token at index `rank` (0: the most likely) when tokens are sorted by descending logit,
        equal logits by ascending ID. values: result of `highest_logits` for more than `rank` logits."""
        value = values[rank]
        return int(np.flatnonzero(self.on_host() == value)[rank - int((values > value).sum())])


StepOutput = npt.NDArray[np.float32] | Iterable[LogitRow]
"""Result of a runner: logits [R, V] of R output rows or hidden states [T, H] in host memory, or the output rows."""


def compute_softmax_weights(logits: Logits, highest: np.float32, temperature: float) -> Logits:
    """Return the numerators of the softmax, exp((logit - highest) / temperature), of each of the `logits`. highest: the
    largest logit. temperature: more than 0. Computed in float32, with a relative error of about 1e-7, since float64
    takes three times as long and this step dominates the time of sampling."""
    weights = logits - highest
    if temperature != 1:
        weights /= np.float32(temperature)
    return np.exp(weights, out=weights)


def find_quantile(weights: Logits, uniform: float) -> int:
    """Return the first index at which the cumulative sum of `weights` (not negative) exceeds the fraction `uniform`, in
    [0, 1), of their total. The weight at this index is above 0."""
    block_sums = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _SUM_BLOCK)), dtype=np.float64)
    reach = uniform * block_sums[-1]
    block = _find_first_above(block_sums, reach)
    below = block_sums[block - 1] if block else 0.0
    sums = below + np.cumsum(weights[block * _SUM_BLOCK : (block + 1) * _SUM_BLOCK], dtype=np.float64)
    return block * _SUM_BLOCK + _find_first_above(sums, reach)


def _find_first_above(sums: npt.NDArray[np.float64], reach: float) -> int:
    """Return the first index at which a cumulative sum `sums` (ascending) exceeds the value `reach`. If there is none
    because of rounding, return the first index at which the sum equals the total."""
    return min(int(sums.searchsorted(reach, side="right")), int(sums.searchsorted(sums[-1])))
