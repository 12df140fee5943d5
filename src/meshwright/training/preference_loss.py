"""Preference losses on the log-probabilities of response pairs (DPO, IPO, SimPO, ORPO) or of single responses (KTO).

Shapes: B sequences, P maximum pairs of a sequence, D = 2 P responses; for KTO D = P.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from meshwright.model.pairs import Pairs, PreferenceLoss
from meshwright.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Preference:
    """Preference loss, by the field `objective`. For a pair of responses y, with h the chosen response's score minus
    the rejected response's score:

    - "dpo": score log p / p_ref; loss -log sigmoid(beta h) (Rafailov et al. 2023, arXiv:2305.18290, eq. 7). With
      `label_smoothing` e, the assumed probability of a swapped label, the loss is -(1 - e) log sigmoid(beta h) - e log
      sigmoid(-beta h) (conservative DPO: Mitchell 2023, "A note on DPO with noisy preferences", eq. 3);
    - "ipo": score log p / p_ref; loss (h - 1 / (2 beta))² (Azar et al. 2023, arXiv:2310.12036, eq. 17; beta is its
      tau);
    - "simpo": score (log p) / |y|; loss -log sigmoid(beta h - `margin`) (Meng et al. 2024, arXiv:2405.14734, eq. 6);
    - "orpo": score log odds of P = exp((log p) / |y|), odds P / (1 - P); loss -(log p) / |y| of the chosen response
      minus beta log sigmoid h (Hong et al. 2024, arXiv:2403.07691, eqs. 3, 6, 7; beta is its lambda).

    For a single labelled response with the score s = log p / p_ref and the KL estimate z:

    - "kto": loss w_d (1 - sigmoid(beta (s - z))) if it is desirable, else w_u (1 - sigmoid(beta (z - s))) (Ethayarajh
      et al. 2024, arXiv:2402.01306, eq. 8; `weights` are w_d and w_u, its lambdas). z is the mean of log p / p_ref over
      mismatched responses to the prompts of the whole step, at least 0, without gradient.

    |y|: number of target tokens of the response. A response's reward is beta times its score, for "orpo" beta times log
    P.
    """

    objective: str = "dpo"
    beta: float = 0.1
    label_smoothing: float = 0.0
    margin: float = 0.0
    weights: tuple[float, float] = (1.0, 1.0)

    @property
    def needs_reference(self) -> bool:
        """True if the loss compares the policy with a reference policy ("dpo", "ipo", "kto")."""
        return self.objective in ("dpo", "ipo", "kto")

    @property
    def responses(self) -> int:
        """Number of responses that one loss term compares: 2 for a pair, 1 for a single response (KTO)."""
        return 1 if self.objective == "kto" else 2

    def __call__(self, log_probabilities_BD: torch.Tensor, pairs: Pairs) -> PreferenceLoss:
        """Compute the loss and the reward metrics summed over the `pairs` of a batch, in the dtype of
        `log_probabilities_BD`: the log-probabilities (nats) of the D responses in each of B sequences; of a pair the
        chosen comes first."""
        if self.responses == 1:
            return self._single_response_loss(log_probabilities_BD - pairs.reference_BD, pairs)
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
            right, count = ((h_BP > 0) & counted_BP).sum(), counted_BP.sum()
            metric_sums = torch.cat([rewards_2, torch.stack([right, count, count]).to(rewards_2.dtype)])
        return PreferenceLoss((losses_BP * counted_BP).sum(), metric_sums)

    def _single_response_loss(self, scores_BD: torch.Tensor, pairs: Pairs) -> PreferenceLoss:
        """Return loss and metrics of single labelled responses (KTO). scores_BD: log p / p_ref of each response. pairs:
        labels, lengths and KL estimate of the responses."""
        kinds_2BD = pairs.counted_BP & torch.stack([~pairs.undesirable_BD, pairs.undesirable_BD])
        ahead_BD = scores_BD - pairs.kl_B[:, None]
        losses_BD = [
            w * torch.sigmoid(-by * ahead_BD) for w, by in zip(self.weights, (self.beta, -self.beta), strict=True)
        ]
        with torch.no_grad():
            rewards_2 = (self.beta * scores_BD * kinds_2BD).sum(dim=(1, 2))
            right = (torch.stack([ahead_BD > 0, ahead_BD < 0]) & kinds_2BD).sum()
            metric_sums = torch.cat([rewards_2, right[None], kinds_2BD.sum(dim=(1, 2))]).to(rewards_2.dtype)
        return PreferenceLoss((torch.stack(losses_BD) * kinds_2BD).sum(), metric_sums)


def make_preference(recipe: Recipe) -> Preference | None:
    """Build the preference loss that a recipe (the settings of a run) selects; None for next-token training."""
    train = recipe.train
    if recipe.objective in ("next-token", "distillation"):
        return None
    smoothing, weights = train.preference_smoothing, (train.desirable_weight, train.undesirable_weight)
    return Preference(recipe.objective, recipe.preference_beta, smoothing, recipe.preference_margin, weights)
