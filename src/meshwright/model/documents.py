"""Document boundaries in packed sequences, and from them position IDs and attention masks.

Shapes: B sequences, S tokens of a sequence, C of them on this rank (all, without context parallelism).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from meshwright.model.pairs import Pairs
from meshwright.spec.chunks import padded_documents


@dataclass(frozen=True, slots=True)
class Documents:
    """Document boundaries in the packed sequences of a batch. Tokens attend only within their document, and position
    IDs restart at 0 in each document.

    `starts_BS`: for each token the index, in the unsharded sequence, at which its document begins; None: every sequence
    is one document. `indices_C`: with context parallelism, the index in the unsharded sequence of each token of this
    rank; otherwise None. `pairs`: for preference training, the pairs of chosen and rejected responses. `cu_seqlens`,
    `max_seqlen`: on GPUs, the same boundaries for variable-length kernels (fields of `VarlenMask`); otherwise None."""

    starts_BS: torch.Tensor | None = None
    indices_C: torch.Tensor | None = None
    pairs: Pairs | None = None
    cu_seqlens: torch.Tensor | None = None
    max_seqlen: torch.Tensor | None = None

    @classmethod
    def from_ids(cls, ids_BS: torch.Tensor | np.ndarray) -> Documents:
        """Build the document boundaries of packed sequences from `ids_BS`, a document number for each token: a new
        document begins wherever the number differs from that of the previous token."""
        ids = torch.as_tensor(ids_BS)
        changes = ids[:, 1:] != ids[:, :-1]
        if not bool(changes.any()):
            return cls(None)
        begins = torch.arange(1, ids.shape[1], device=ids.device) * changes
        first = torch.zeros_like(begins[:, :1])
        return cls(torch.cummax(torch.cat([first, begins], dim=1), dim=1).values)

    def with_lengths(self) -> Documents:
        """Return a copy with `cu_seqlens` and `max_seqlen`, found on the host; itself without packed documents."""
        if self.starts_BS is None:
            return self
        is_first_BS = self.starts_BS.cpu() == torch.arange(self.starts_BS.shape[1])
        begins_L = is_first_BS.flatten().nonzero().flatten()
        cu_seqlens = torch.full((padded_documents(len(begins_L)) + 1,), is_first_BS.numel(), dtype=torch.int32)
        cu_seqlens[: len(begins_L)] = begins_L
        return replace(self, cu_seqlens=cu_seqlens, max_seqlen=cu_seqlens.diff().max().to(torch.int64))

    def to(self, device: torch.device | str) -> Documents:
        """Return a copy on `device`, copied without waiting for a GPU; `max_seqlen` stays on the CPU. On a GPU the copy
        has the boundaries for variable-length kernels."""
        on_gpu = torch.device(device).type == "cuda"
        whole = self.with_lengths() if on_gpu and self.cu_seqlens is None else self

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            """Return a tensor on the device."""
            return (tensor.pin_memory() if on_gpu and not tensor.is_cuda else tensor).to(device, non_blocking=on_gpu)

        tensors = whole.starts_BS, whole.indices_C, whole.cu_seqlens
        starts_BS, indices_C, cu_seqlens = (None if each is None else moved(each) for each in tensors)
        pairs = None if whole.pairs is None else whole.pairs.map(moved)
        return Documents(starts_BS, indices_C, pairs, cu_seqlens, whole.max_seqlen)

    def select_tokens(self, indices_C: torch.Tensor) -> Documents:
        """Return a copy for the context-parallel rank that holds the C tokens at the indices `indices_C` of each
        unsharded sequence."""
        pairs = None if self.pairs is None else self.pairs.select_tokens(indices_C)
        return replace(self, indices_C=indices_C, pairs=pairs)

    def positions_BS(self) -> torch.Tensor | None:
        """Return the position ID, within its document, of each of the C tokens of each sequence on this rank,
        [B or 1, C]; None if the position IDs are 0, 1, 2 ... in every sequence."""
        indices_C = self.indices_C
        if self.starts_BS is None:
            return None if indices_C is None else indices_C[None]
        if indices_C is None:
            return torch.arange(self.starts_BS.shape[1], device=self.starts_BS.device) - self.starts_BS
        return indices_C - self.starts_BS[:, indices_C]

    def first_visible_BS(self, sequence: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Return for each token the index of the first token in the sequence that it may attend to, [B or 1, S]; None
        if that is 0 for all tokens. (Attention is causal: the last one is the token itself.)

        `window`: sliding window; a token attends to itself and the `window` - 1 tokens before it; None: no sliding
        window. `sequence`: number of tokens of an unsharded sequence."""
        if window is None or window >= sequence:
            return self.starts_BS
        oldest_S = (torch.arange(sequence, device=device) - (window - 1)).clamp(min=0)
        return oldest_S[None] if self.starts_BS is None else torch.maximum(self.starts_BS, oldest_S)


ONE_DOCUMENT = Documents()
"""Every sequence is one document."""
