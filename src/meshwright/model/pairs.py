"""Preference pairs, a chosen and a rejected response to each prompt, or single labelled responses; their
log-probabilities.

Shapes: B sequences, S tokens of a sequence, C of them on this rank, T = B x C, P maximum pairs of a sequence, D = 2 P
responses. Single responses (KTO) take the place of pairs: D = P.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

RESPONSES_SITE = "loss.responses"


@dataclass(frozen=True, slots=True)
class Pairs:
    """Responses of a batch of B sequences, for preference training: at most P pairs and D = 2 P responses in each
    sequence. Documents 2k and 2k + 1 of a sequence are a pair: a prompt with its chosen response, and the prompt again
    with its rejected response. For KTO, single labelled responses take the place of pairs, and D = P.

    `response_BC`: document number of each of the C tokens on this rank; D for tokens outside any pair. `counted_BP`:
    True for a pair, False for padding in sequences with fewer than P pairs. `reference_BD`: log-probabilities of the
    responses under the reference policy (nats, float64); zeros until they are computed. `lengths_BD`: number of target
    tokens of each response (float64); zeros until they are counted.

    Only for KTO: `undesirable_BD`: True for a response labelled undesirable; `kl_B`: estimate of the KL divergence
    between policy and reference (nats, float64), equal for all sequences."""

    response_BC: Tensor
    counted_BP: Tensor
    reference_BD: Tensor
    lengths_BD: Tensor
    undesirable_BD: Tensor
    kl_B: Tensor

    @classmethod
    def from_ids(cls, ids_BS: Tensor, max_pairs: int | None = None, responses: int = 2) -> Pairs:
        """Build the pairs of a batch from `ids_BS`, the document number of each token in its sequence, counted from 0:
        documents 2k and 2k + 1 are a pair. A last document without a partner is padding: 0, 0, 1, 2, 3, 3, 4 are two
        pairs and one token of padding.

        `max_pairs`: P, the number of pairs per sequence for which tensors are allocated; None: the largest number in
        the batch. `responses`: 2 for pairs; 1 for single labelled responses (KTO), where each document, padding
        included, is one response.
        """
        pairs_B = (ids_BS.amax(dim=1) + 1) // 2 if responses == 2 else ids_BS.amax(dim=1) + 1
        most = max(1, int(pairs_B.max())) if max_pairs is None else max_pairs
        counted_BP = torch.arange(most, device=ids_BS.device) < pairs_B[:, None]
        response_BS = torch.where(ids_BS < responses * pairs_B[:, None], ids_BS, responses * most)
        response_BS = response_BS.long().clamp(max=responses * most)
        none_BD = torch.zeros(len(ids_BS), responses * most, dtype=torch.float64)
        return cls(response_BS, counted_BP, none_BD, none_BD, none_BD.bool(), none_BD[:, 0])

    def map(self, change: Callable[[Tensor], Tensor]) -> Pairs:
        """Return a copy with `change` applied to every tensor, for example to move it to a device or to select
        sequences."""
        return Pairs(*(change(getattr(self, name)) for name in self.__slots__))

    def select_tokens(self, indices_C: Tensor) -> Pairs:
        """Return a copy for the context-parallel rank that holds the C tokens at the indices `indices_C` of each
        unsharded sequence."""
        return replace(self, response_BC=self.response_BC[:, indices_C])

    @property
    def count(self) -> Tensor:
        """Number of pairs in the batch (scalar tensor)."""
        return self.counted_BP.sum()

    def log_probabilities(self, losses_T: Tensor) -> Tensor:
        """Return the log-probability of each of the D responses of each of B sequences, [B, D] (nats, float64): the sum
        over the response's tokens of log p(token | prefix), 0 for a missing response.

        `losses_T`: cross-entropy of each token of this rank, all sequences concatenated. With context parallelism the
        sum covers only this rank's tokens."""
        rows, responses = self.reference_BD.shape
        sums = torch.zeros(rows, responses + 1, dtype=torch.float64, device=losses_T.device)
        sums = sums.scatter_add(1, self.response_BC, -losses_T.double().view_as(self.response_BC))
        return sums[:, :responses].contiguous()


class PreferenceLoss(NamedTuple):
    """Preference loss and metrics of a batch. `loss`: summed over pairs (for KTO, over single labelled responses).

    `metric_sums`: float64 [5], detached. Elements 0 and 1: sums of the rewards of the chosen and of the rejected
    responses. Element 2: number of pairs whose chosen response has the higher reward. Elements 3 and 4: numbers of
    chosen and of rejected responses. For KTO, "chosen" means desirable and "rejected" undesirable; element 2 counts
    desirable responses with a score above the KL estimate and undesirable responses with a score below it.
    """

    loss: Tensor
    metric_sums: Tensor
