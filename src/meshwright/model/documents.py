"""Document boundaries in packed sequences, and from them position IDs and attention masks.

Shapes: B sequences, S tokens of a sequence, C of them on this rank (all, without context parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshwright.model.pairs import Pairs


@dataclass(frozen=True, slots=True)
class Documents:
    """Document boundaries in the packed sequences of a batch. Tokens attend only within their document, and position
    IDs restart at 0 in each document.

    `starts_BS`: for each token the index, in the unsharded sequence, at which its document begins; None: every sequence
    is one document. `indices_C`: with context parallelism, the index in the unsharded sequence of each token of this
    rank; otherwise None. `pairs`: for preference training, the pairs of chosen and rejected responses.
    `host_starts_BS`: copy of `starts_BS` in CPU memory, if the batch is on a GPU; the host reads it without waiting for
    the GPU. `teacher`: for distillation, this rank's targets from the teacher
    (`training.teacher_targets.TeacherTargets`). `samples_B`: int64, random-number key of each sequence, from which
    dropout masks are derived; None: no dropout. `bounds`: the boundaries as `VarlenMask.tensors`, made when the
    batch was loaded; (): a forward pass makes them.
    """

    starts_BS: Tensor | None = None
    indices_C: Tensor | None = None
    pairs: Pairs | None = None
    host_starts_BS: Tensor | None = None
    teacher: Any = None
    samples_B: Tensor | None = None
    bounds: Sequence[Tensor] = ()

    @classmethod
    def from_ids(cls, ids_BS: Tensor | np.ndarray) -> Documents:
        """Build the document boundaries of packed sequences from `ids_BS`, a document number for each token: a new
        document begins wherever the number differs from the previous token's."""
        ids = torch.as_tensor(ids_BS)
        changes = ids[:, 1:] != ids[:, :-1]
        if not bool(changes.any()):
            return cls(None)
        begins = torch.arange(1, ids.shape[1], device=ids.device) * changes
        return cls(torch.cummax(torch.cat([torch.zeros_like(begins[:, :1]), begins], dim=1), dim=1).values)

    def on_host(self) -> Documents:
        """Return a copy in CPU memory with the field `starts_BS` only (document boundaries in unsharded sequences); all
        other fields are None."""
        starts_BS = self.starts_BS if self.host_starts_BS is None else self.host_starts_BS
        return Documents(None if starts_BS is None else starts_BS.cpu())

    def to(self, device: torch.device | str) -> Documents:
        """Return a copy on `device`, without a wait of the host for the GPU. The copy's `host_starts_BS` stays on the
        CPU."""
        all_three = self.starts_BS, self.indices_C, self.samples_B
        starts_BS, indices_C, samples_B = (None if each is None else move(each, device) for each in all_three)
        pairs = None if self.pairs is None else self.pairs.map(lambda tensor: move(tensor, device))
        return Documents(starts_BS, indices_C, pairs, self.on_host().starts_BS, samples_B=samples_B)

    def select_tokens(self, indices_C: Tensor) -> Documents:
        """Return a copy for the context-parallel rank that holds the C tokens at the indices `indices_C` of each
        unsharded sequence."""
        pairs = None if self.pairs is None else self.pairs.select_tokens(indices_C)
        return replace(self, indices_C=indices_C, pairs=pairs)

    def positions_BS(self) -> Tensor | None:
        """Return the position ID, within its document, of each of the C tokens of each sequence on this rank,
        [B or 1, C]; None if the position IDs are 0, 1, 2 ... in every sequence."""
        indices_C = self.indices_C
        if self.starts_BS is None:
            return None if indices_C is None else indices_C[None]
        if indices_C is None:
            return torch.arange(self.starts_BS.shape[1], device=self.starts_BS.device) - self.starts_BS
        return indices_C - self.starts_BS[:, indices_C]

    def lengths_BS(self) -> Tensor | None:
        """Return for each of the C tokens of each sequence on this rank the number of tokens of its document, [B, C];
        None if every sequence is one document."""
        starts_BS = self.starts_BS
        if starts_BS is None:
            return None
        counts_BS = torch.zeros_like(starts_BS).scatter_add_(1, starts_BS, torch.ones_like(starts_BS))
        lengths_BS = counts_BS.gather(1, starts_BS)
        return lengths_BS if self.indices_C is None else lengths_BS[:, self.indices_C]

    def cut_into_chunks(self, size: int, rows: int, sequence: int, device: torch.device) -> Documents:
        """Return the document boundaries for chunked attention, in which a token attends only within its chunk. Each
        document is cut into chunks of `size` tokens, and the chunks become the documents of the result.

        `rows`: number of sequences; `sequence`: number of tokens of an unsharded sequence; `device`: device of the
        boundaries.
        """
        if sequence <= size:
            return self

        def chunks(starts_BS: Tensor | None, where: torch.device) -> Tensor:
            """Return, for each token, the index in the sequence at which its chunk begins. `starts_BS`: index at which
            its document begins (None: 0); `where`: device of the result."""
            places_S = torch.arange(sequence, device=where)
            starts_BS = places_S.new_zeros(rows, sequence) if starts_BS is None else starts_BS
            return starts_BS + (places_S - starts_BS) // size * size

        host_BS = chunks(self.on_host().starts_BS, torch.device("cpu"))
        cut_BS = host_BS if device.type == "cpu" else chunks(self.starts_BS, device)
        return replace(self, starts_BS=cut_BS, host_starts_BS=host_BS, bounds=())

    def first_visible_BS(self, sequence: int, window: int | None, device: torch.device) -> Tensor | None:
        """Return, for each token, the index in the sequence of the first token that it may attend to, [B or 1, S]; None
        if this index is 0 for all tokens.

        `window`: sliding window; a token attends to itself and the `window` - 1 tokens before it; None: no sliding
        window. `sequence`: number of tokens of an unsharded sequence. `device`: device of the result.
        """
        if window is None or window >= sequence:
            return self.starts_BS
        oldest_S = (torch.arange(sequence, device=device) - (window - 1)).clamp(min=0)
        return oldest_S[None] if self.starts_BS is None else torch.maximum(self.starts_BS, oldest_S)


ONE_DOCUMENT = Documents()
"""Every sequence is one document."""


class MicroBatch(NamedTuple):
    """Sequences of one forward pass of training: B sequences of S tokens on this rank.

    `tokens_BS`: token IDs; `targets_BS`: target token IDs, -100 for positions without a target; `documents`: document
    boundaries, preference pairs and targets of a teacher."""

    tokens_BS: Tensor
    targets_BS: Tensor
    documents: Documents


def move(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return `tensor` on `device`. A copy to a GPU is made from pinned memory, and the host does not wait for it."""
    on_gpu = torch.device(device).type == "cuda"
    return (tensor.pin_memory() if on_gpu and not tensor.is_cuda else tensor).to(device, non_blocking=on_gpu)
