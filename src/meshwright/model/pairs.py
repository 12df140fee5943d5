"""Documents that come in pairs: to each prompt a chosen and a rejected response, and how probable both are.

Shapes: B rows, S tokens in a row, C of them on this rank, T = B x C, P the most pairs of a row, D = 2 P responses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

RESPONSES_SITE = "loss.responses"


@dataclass(frozen=True, slots=True)
class Pairs:
    """Of a batch whose documents 2 k and 2 k + 1 are a prompt with the chosen and with the rejected response.

    `response_BC`: of each token that is here the number of its document, D where it belongs to no pair. `counted_BP`:
    whether a row has so many pairs. `reference_BD`: log-probabilities of the responses under the policy that training
    began with (nats, float64); zeros while nobody has computed them yet.
    """

    response_BC: torch.Tensor
    counted_BP: torch.Tensor
    reference_BD: torch.Tensor

    @classmethod
    def from_ids(cls, ids_BS: torch.Tensor, most: int | None = None) -> Pairs:
        """From a number per token: of a row that begins 0, 0, 1, 2, 3, 3, 4 the first two documents are a pair, so are
        the next two, and the last one is padding. `most`: P, if other batches have rows with more pairs."""
        pairs_B = (ids_BS.amax(dim=1) + 1) // 2
        most = max(1, int(pairs_B.max())) if most is None else most
        counted_BP = torch.arange(most, device=ids_BS.device) < pairs_B[:, None]
        response_BS = torch.where(ids_BS < 2 * pairs_B[:, None], ids_BS, 2 * most).long()
        return cls(response_BS, counted_BP, torch.zeros(len(ids_BS), 2 * most, dtype=torch.float64))

    def known_from(self, reference_BD: torch.Tensor) -> Pairs:
        """The same with log-probabilities under the reference."""
        assert reference_BD.shape == self.reference_BD.shape, (reference_BD.shape, self.reference_BD.shape)
        return replace(self, reference_BD=reference_BD)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Pairs:
        """The same with every tensor changed: brought to another device, cut to some rows."""
        return Pairs(change(self.response_BC), change(self.counted_BP), change(self.reference_BD))

    def at(self, places_C: torch.Tensor) -> Pairs:
        """For a rank that has the tokens at these places of each row."""
        return replace(self, response_BC=self.response_BC[:, places_C])

    @property
    def count(self) -> torch.Tensor:
        """How many pairs there are."""
        return self.counted_BP.sum()

    def log_probabilities(self, losses_T: torch.Tensor) -> torch.Tensor:
        """Of each response, [B, D]: the sum over its tokens of log p(token | those before it), in float64.

        `losses_T`: minus that of each token. With context parallelism the sum over this rank's tokens of a response. A
        row's last responses are 0 where it has fewer."""
        rows, responses = self.reference_BD.shape
        sums = torch.zeros(rows, responses + 1, dtype=torch.float64, device=losses_T.device)
        sums = sums.scatter_add(1, self.response_BC, -losses_T.double().view_as(self.response_BC))
        return sums[:, :responses].contiguous()
