"""Preference losses (DPO, IPO, SimPO, ORPO) on the log-probabilities of response pairs.

Shapes: B sequences, P maximum pairs of a sequence, D = 2 P responses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from meshwright.model.pairs import Pairs
from meshwright.recipe import Recipe


class PreferenceLoss(NamedTuple):
    """Preference loss and metrics of a batch. `loss`: summed over pairs. `figures` (float64 [3], detached): sum of the
    rewards of chosen responses, sum of those of rejected ones, and number of pairs whose chosen response has the higher
    reward."""

    loss: torch.Tensor
    figures: torch.Tensor


@dataclass(frozen=True, slots=True)
class Preference:
    """Preference loss of a pair of responses y. With h the chosen response's score minus the rejected one's:

    - "dpo": score log p / p_ref; loss -log sigmoid(beta h) (Rafailov et al. 2023, arXiv:2305.18290, eq. 7); with
      `label_smoothing` e, the assumed probability of a swapped label, (1 - e) times that plus e times -log
      sigmoid(-beta h) (conservative DPO: Mitchell 2023, "A note on DPO with noisy preferences", eq. 3);
    - "ipo": the same score; loss (h - 1 / (2 beta))² (Azar et al. 2023, arXiv:2310.12036, eq. 17; beta is its tau);
    - "simpo": score (log p) / |y|; loss -log sigmoid(beta h - `margin`) (Meng et al. 2024, arXiv:2405.14734, eq. 6);
    - "orpo": score log odds of P = exp((log p) / |y|), odds P / (1 - P); loss -(log p) / |y| of the chosen response
      minus beta log sigmoid h (Hong et al. 2024, arXiv:2403.07691, eqs. 3, 6, 7; beta is its lambda).

    |y|: target tokens of the response. A response's reward is beta times its score, for "orpo" beta times log P.
    """

    objective: str = "dpo"
    beta: float = 0.1
    label_smoothing: float = 0.0
    margin: float = 0.0

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares the policy with a reference policy."""
        return self.objective in ("dpo", "ipo")

    def __call__(self, log_probabilities_BD: torch.Tensor, pairs: Pairs) -> PreferenceLoss:
        """Return the metrics and the loss summed over the `pairs` of a batch, in the dtype of `log_probabilities_BD`:
        the log-probabilities (nats) of the D responses of each of B sequences, chosen and rejected alternating."""
        counted_BP = pairs.counted_BP
        scores_BD = log_probabilities_BD - pairs.reference_BD
        if not self.needs_reference:
            scores_BD = log_probabilities_BD / pairs.lengths_BD.clamp(min=1)
        chosen_BP, rejected_BP = scores_BD.unflatten(1, (-1, 2)).unbind(dim=2)
        h_BP = chosen_BP - rejected_BP
        if self.objective == "ipo":
            losses_BP = (h_BP - 1 / (2 * self.beta)).square()
        elif self.objective == "orpo":
            # Padding, and a response that is certain, have the score 0, whose odds are infinite.
            odds = [x - torch.log(-torch.expm1(x)) for x in (x.clamp(max=-1e-12) for x in (chosen_BP, rejected_BP))]
            losses_BP = -chosen_BP - self.beta * F.logsigmoid(odds[0] - odds[1])
        else:
            meant, other = (-F.logsigmoid(sign * (self.beta * h_BP - self.margin)) for sign in (1, -1))
            losses_BP = (1 - self.label_smoothing) * meant + self.label_smoothing * other
        with torch.no_grad():
            rewards_2 = self.beta * torch.stack([chosen_BP, rejected_BP]).mul(counted_BP).sum(dim=(1, 2))
            right = ((h_BP > 0) & counted_BP).sum()
        return PreferenceLoss((losses_BP * counted_BP).sum(), torch.cat([rewards_2, right[None].to(rewards_2.dtype)]))


def make_preference(recipe: Recipe) -> Preference | None:
    """Build the preference loss that a recipe (the settings of a run) selects; None for next-token training."""
    train = recipe.train
    if recipe.objective == "next-token":
        return None
    return Preference(recipe.objective, recipe.preference_beta, train.preference_smoothing, recipe.preference_margin)
