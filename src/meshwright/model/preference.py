"""Preference losses (DPO, IPO) on the log-probabilities of response pairs under policy and reference.

Shapes: B sequences, P maximum pairs of a sequence, D = 2 P responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from meshwright.model.pairs import Pairs
from meshwright.recipe import Recipe

REWARDS = ("reward_margin", "reward_accuracy", "chosen_reward", "rejected_reward")
"""Metric names of the figures of pairs."""


class PreferenceLoss(NamedTuple):
    """Preference loss and metrics of a batch. `loss`: summed over pairs. `figures` (float64 [3], detached): sum of the
    rewards of chosen responses, sum of those of rejected ones, and number of pairs whose chosen response has the higher
    reward."""

    loss: torch.Tensor
    figures: torch.Tensor


class Rewards(NamedTuple):
    """Reward metrics, means over preference pairs; a response's reward is beta times log p / p_ref. `chosen`,
    `rejected`: reward of the chosen and of the rejected response; `accuracy`: fraction of pairs whose chosen response
    has the higher reward."""

    chosen: float
    rejected: float
    accuracy: float

    @property
    def margin(self) -> float:
        """Mean reward of the chosen minus that of the rejected responses."""
        return self.chosen - self.rejected

    def to_metrics(self) -> dict[str, float]:
        """Return the four metrics named in `REWARDS` (margin, accuracy, chosen, rejected) as {name: value}."""
        return dict(zip(REWARDS, (self.margin, self.accuracy, self.chosen, self.rejected), strict=True))


@dataclass(frozen=True, slots=True)
class Preference:
    """Preference loss of a pair, with h = log p(chosen) / p_ref(chosen) - log p(rejected) / p_ref(rejected):

    - "dpo": -log sigmoid(beta h) (Rafailov et al. 2023, arXiv:2305.18290, eq. 7); with `label_smoothing` e, the assumed
      probability of a swapped label, (1 - e) times that plus e times -log sigmoid(-beta h) (conservative DPO: Mitchell
      2023, "A note on DPO with noisy preferences", eq. 3);
    - "ipo": (h - 1 / (2 beta))² (Azar et al. 2023, arXiv:2310.12036, eq. 17; beta is its tau).

    A response's reward is beta log p / p_ref (arXiv:2305.18290, section 4).
    """

    objective: str = "dpo"
    beta: float = 0.1
    label_smoothing: float = 0.0

    def __call__(self, log_probabilities_BD: torch.Tensor, pairs: Pairs) -> PreferenceLoss:
        """Return the metrics and the loss summed over the `pairs` of a batch, in the dtype of `log_probabilities_BD`:
        the log-probabilities (nats) of the D responses of each of B sequences, chosen and rejected alternating."""
        ratios_BP2 = (log_probabilities_BD - pairs.reference_BD).unflatten(1, (-1, 2))
        chosen_BP, rejected_BP = ratios_BP2.unbind(dim=2)
        h_BP = chosen_BP - rejected_BP
        if self.objective == "ipo":
            losses_BP = (h_BP - 1 / (2 * self.beta)).square()
        else:
            meant, other = (-F.logsigmoid(sign * self.beta * h_BP) for sign in (1, -1))
            losses_BP = (1 - self.label_smoothing) * meant + self.label_smoothing * other
        counted_BP = pairs.counted_BP
        with torch.no_grad():
            rewards_2 = self.beta * torch.stack([chosen_BP, rejected_BP]).mul(counted_BP).sum(dim=(1, 2))
            right = ((h_BP > 0) & counted_BP).sum()
        return PreferenceLoss((losses_BP * counted_BP).sum(), torch.cat([rewards_2, right[None].to(rewards_2.dtype)]))


def make_preference(recipe: Recipe) -> Preference | None:
    """Build the preference loss that a recipe (the settings of a run) selects; None for next-token training."""
    train = recipe.train
    if recipe.objective == "next-token":
        return None
    return Preference(recipe.objective, train.preference_beta, train.preference_smoothing)
