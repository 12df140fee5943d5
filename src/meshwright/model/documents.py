"""Which tokens of a packed row belong together, and from it the positions and what each token may see.

Shapes: B rows, S tokens in a row, C of them on this rank (all, without context parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from meshwright.model.pairs import Pairs


@dataclass(frozen=True, slots=True)
class Documents:
    """Where documents begin in the rows of a batch. Documents of one row do not see each other; positions restart.

    `starts_BS`: for each token the place in its row where its document begins. None: every row is one document, and
    attention takes its fast path (plain causal). `places_C`: where in the row the tokens are that this rank has, if
    it does not have all; everything else is said of whole rows. `pairs`: which documents are a chosen and a rejected
    response to the same prompt, where that is what is learnt from.
    """

    starts_BS: torch.Tensor | None = None
    places_C: torch.Tensor | None = None
    pairs: Pairs | None = None

    @classmethod
    def from_ids(cls, ids_BS: torch.Tensor | np.ndarray) -> Documents:
        """From a number per token; a document goes on as long as its number repeats."""
        ids = torch.as_tensor(ids_BS)
        changes = ids[:, 1:] != ids[:, :-1]
        if not bool(changes.any()):
            return cls(None)
        begins = torch.arange(1, ids.shape[1], device=ids.device) * changes
        first = torch.zeros_like(begins[:, :1])
        return cls(torch.cummax(torch.cat([first, begins], dim=1), dim=1).values)

    @classmethod
    def from_starts(cls, starts: Sequence[Sequence[int]], sequence: int) -> Documents:
        """From the places where documents begin, one ascending list per row; a row always begins one at 0."""
        ids = torch.zeros(len(starts), sequence, dtype=torch.int64)
        for row, places in enumerate(starts):
            assert all(0 <= place < sequence for place in places), (row, places, sequence)
            ids[row, [place for place in places if place]] = 1
        return cls.from_ids(ids.cumsum(dim=1))

    def to(self, device: torch.device | str) -> Documents:
        """The same on another device."""
        if self.starts_BS is None and self.places_C is None and self.pairs is None:
            return self
        starts_BS, places_C = (None if each is None else each.to(device) for each in (self.starts_BS, self.places_C))
        pairs = None if self.pairs is None else self.pairs.map(lambda tensor: tensor.to(device))
        return Documents(starts_BS, places_C, pairs)

    def at(self, places_C: torch.Tensor) -> Documents:
        """The same rows for a rank that has the tokens at these places of each."""
        return Documents(self.starts_BS, places_C, None if self.pairs is None else self.pairs.at(places_C))

    def in_pairs(self, pairs: Pairs) -> Documents:
        """The same documents, of which two and two belong together."""
        return replace(self, pairs=pairs)

    def positions_BS(self) -> torch.Tensor | None:
        """The position in its document of each token that is here, [B or 1, C]; None: 0, 1, 2 ... in every row."""
        places_C = self.places_C
        if self.starts_BS is None:
            return None if places_C is None else places_C[None]
        if places_C is None:
            return torch.arange(self.starts_BS.shape[1], device=self.starts_BS.device) - self.starts_BS
        return places_C - self.starts_BS[:, places_C]

    def first_visible_BS(self, sequence: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        """The first place in its row that each token of whole rows may attend to (the last is itself), [B or 1, S].

        A sliding `window` lets a token see itself and the `window` - 1 tokens before it. None: everything before it,
        in every row.
        """
        if window is None or window >= sequence:
            return self.starts_BS
        oldest_S = (torch.arange(sequence, device=device) - (window - 1)).clamp(min=0)
        return oldest_S[None] if self.starts_BS is None else torch.maximum(self.starts_BS, oldest_S)


ONE_DOCUMENT = Documents()
"""Every row is one document."""
