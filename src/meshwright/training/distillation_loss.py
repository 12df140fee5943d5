"""Distillation losses of a token: divergence of the student's next-token distribution from the teacher's.

Shapes: ... any leading dims, O outcomes (token IDs, or the teacher's K most probable ones and all others together).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from meshwright.recipe import Recipe
from meshwright.spec.distillation import map_layers


@dataclass(frozen=True, slots=True)
class DistillationLoss:
    """Distillation loss of a target token: a H + (1 - a) T² D(p, q) (Hinton et al. 2015, arXiv:1503.02531, section 2).
    H: cross-entropy of the text; p = softmax(teacher logits / T) and q = softmax(student logits / T): next-token
    distributions of teacher and student; T² keeps the size of the gradients. D is the field `divergence`:

    - "forward_kl": KL(p ‖ q);
    - "reverse_kl": KL(q ‖ p) (Gu et al. 2023, arXiv:2306.08543);
    - "jsd": b KL(p ‖ m) + (1 - b) KL(q ‖ m), m = b p + (1 - b) q, b = `beta` (Agarwal et al. 2023, arXiv:2306.13649,
      eq. 2).

    mixing: a. temperature: T. layer_map: pairs (layer of the student, layer of the teacher), counted from 0, whose
    outputs are compared. The student's output goes through a learned projection first. The squared difference, averaged
    over pairs and features, is multiplied by `hidden_weight` and added to the token's loss (Romero et al. 2014,
    arXiv:1412.6550; Jiao et al. 2019, arXiv:1909.10351, eq. 8).
    """

    divergence: str = "forward_kl"
    temperature: float = 1.0
    mixing: float = 0.5
    beta: float = 0.5
    hidden_weight: float = 0.0
    layer_map: tuple[tuple[int, int], ...] = ()

    def terms(self, log_p: torch.Tensor, log_q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two tensors [..., O] for O outcomes (tokens): each outcome's term of the divergence D; and a = q
        dD/dq, where q is the student's probability and dD/dq may lack an additive constant. The gradient of D with
        respect to the student's logits / T is a - q Σ a; the constant cancels in it. log_p, log_q: log-probabilities
        (natural logarithms) of the outcomes under teacher and student, [..., O]."""
        if self.divergence == "forward_kl":
            p = log_p.exp()
            return p * (log_p - log_q), -p
        q = log_q.exp()
        if self.divergence == "reverse_kl":
            both = q * (log_q - log_p)
            return both, both
        log_m = torch.logaddexp(log_p + math.log(self.beta), log_q + math.log1p(-self.beta))
        of_student = (1 - self.beta) * q * (log_q - log_m)
        return self.beta * log_p.exp() * (log_p - log_m) + of_student, of_student


def make_distillation(recipe: Recipe, layers: int) -> DistillationLoss | None:
    """Build the loss that the [distill] table of a recipe describes; None without a teacher. layers: number of layers
    of the student, each of which may be compared with a layer of the teacher."""
    given = recipe.distill
    if given.teacher is None:
        return None
    weight = given.hidden_weight if given.hidden else 0.0
    pairs = map_layers(recipe, layers)
    return DistillationLoss(given.loss, given.temperature, given.mixing, given.beta, weight, pairs)
