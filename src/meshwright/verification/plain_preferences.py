"""Reference losses of preferences in plain float64 tensor operations, from the log-probabilities of responses."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from meshwright.training.preference_loss import Preference
from meshwright.verification.samples import IGNORED, Batch


def compute_single_response_loss(
    preference: Preference, sums: list[list[torch.Tensor]], counted_B: torch.Tensor, batch: Batch
) -> torch.Tensor:
    """Return the loss of KTO (arXiv:2402.01306, eq. 8) summed over responses, a scalar. preference: settings of the
    loss. batch: holds reference log-probabilities, labels and the KL estimate. sums: log-probability of each response
    in nats, [sequence][response]. counted_B: number of responses of each sequence."""
    assert batch.reference is not None and batch.undesirable is not None and batch.kl is not None
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(counted_B)):
        for document, log_probability in enumerate(sums[row]):
            ahead = log_probability - float(batch.reference[row, document]) - batch.kl
            if batch.undesirable[row, document]:
                total = total + preference.weights[1] * (1 - 1 / (1 + torch.exp(preference.beta * ahead)))
            else:
                total = total + preference.weights[0] * (1 - 1 / (1 + torch.exp(-preference.beta * ahead)))
    return total


def compute_preference_loss(
    preference: Preference, chosen_BS: torch.Tensor, ids_BS: torch.Tensor, pairs_B: torch.Tensor, batch: Batch
) -> torch.Tensor:
    """Return the preference loss summed over pairs, a scalar: DPO (arXiv:2305.18290, eq. 7), IPO (arXiv:2310.12036, eq.
    17), SimPO (arXiv:2405.14734, eq. 6) or ORPO (arXiv:2403.07691, eqs. 3, 6, 7).

    chosen_BS: the policy's log-probability of every target token of both responses; 0 where the target is ignored.
    ids_BS: document number of each token: document 2 i of a sequence is the preferred response of pair i, document 2 i
    + 1 the rejected one. pairs_B: number of pairs in each sequence. batch: holds the reference log-probabilities.
    """
    assert batch.reference is not None
    total = chosen_BS.new_zeros(())
    for row in range(len(ids_BS)):
        for pair in range(int(pairs_B[row])):
            documents = (2 * pair, 2 * pair + 1)
            sums = [chosen_BS[row][ids_BS[row] == document].sum() for document in documents]
            beta, smoothing = preference.beta, preference.label_smoothing
            if preference.objective in ("simpo", "orpo"):
                targets = torch.from_numpy(batch.targets[row]) != IGNORED
                means = [
                    total_of / int((targets & (ids_BS[row] == document)).sum())
                    for total_of, document in zip(sums, documents, strict=True)
                ]
                if preference.objective == "simpo":
                    total = total - F.logsigmoid(beta * (means[0] - means[1]) - preference.margin)
                else:
                    odds = [mean.exp() / (1 - mean.exp()) for mean in means]
                    total = total - means[0] - beta * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1])))
                continue
            margins = [
                total_of - float(batch.reference[row, document])
                for total_of, document in zip(sums, documents, strict=True)
            ]
            h = margins[0] - margins[1]
            if preference.objective == "ipo":
                total = total + (h - 1 / (2 * beta)) ** 2
            else:
                total = total - (1 - smoothing) * F.logsigmoid(beta * h) - smoothing * F.logsigmoid(-beta * h)
    return total
