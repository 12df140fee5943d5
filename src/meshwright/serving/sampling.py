"""Token sampling from logits: greedy, or random after temperature, top-k and top-p."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright.errors import UserError


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options. `temperature`: 0 is greedy (ties: the lowest token ID).

    `top_k`: sample among the k most likely tokens (0: all). `top_p`: sample among the most likely tokens whose
    probabilities reach p together, at least one (nucleus sampling: Holtzman et al. 2019, arXiv:1904.09751, section
    3.1). `seed`: of the random draws.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UserError(f"temperature {self.temperature:g}: should be 0 (the most likely token) or more")
        if self.top_k < 0:
            raise UserError(f"top-k {self.top_k}: should be 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p {self.top_p:g}: should be more than 0 and at most 1 (off)")


class Sampler:
    """Samples tokens from logits; random draws depend on `sampling.seed` alone."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def choose(self, logits_V: torch.Tensor) -> int:
        """Sample a token ID from logits [V]."""
        if self.sampling.temperature == 0:
            return int(logits_V.argmax())
        probabilities_V = distribution(logits_V, self.sampling)
        return int(torch.multinomial(probabilities_V, 1, generator=self._generator))


def distribution(logits_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the sampling probabilities [V] (float64, on the CPU) after temperature, then top-k, then top-p."""
    wide_V = logits_V.detach().to("cpu", torch.float64)
    # Relative to the highest logit, so that a tiny temperature gives zeros and a one instead of overflowing.
    probabilities_V = torch.softmax((wide_V - wide_V.max()) / sampling.temperature, dim=0)
    ordered_V, numbers_V = probabilities_V.sort(descending=True, stable=True)
    keep_V = torch.ones_like(ordered_V, dtype=torch.bool)
    if sampling.top_k:
        keep_V[sampling.top_k :] = False
    if sampling.top_p < 1:
        within_V = ordered_V * keep_V
        within_V /= within_V.sum()
        # A token stays while those before it have not reached p, so the one that crosses p stays too.
        keep_V &= within_V.cumsum(0) - within_V < sampling.top_p
    kept_V = torch.zeros_like(probabilities_V)
    kept_V[numbers_V[keep_V]] = ordered_V[keep_V]
    return kept_V / kept_V.sum()
