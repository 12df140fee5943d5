"""Context parallelism: which tokens of a row each rank of cp has.

The ring (model/ring_attention.py) cuts a row into 2 cp pieces and gives rank c the pieces c and 2 cp - 1 - c, so that
all have equal work under a causal mask; Ulysses (model/attention.py) into cp, in their order. Attention alone sees the
other ranks' tokens; every gradient is then a sum over `data`, which is dp x cp.
"""

from __future__ import annotations

import torch

from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.model.documents import Documents
from meshwright.model.ring_attention import held_pieces


def places_of(layout: Layout, rank: int, sequence: int) -> torch.Tensor:
    """The places in a row of `sequence` tokens of those that the rank at place `rank` of cp has, in their order there.
    `model.refuse` sees to it that pieces are equal."""
    ring = layout.cp_method == "ring"
    pieces, held = (2 * layout.cp, held_pieces(rank, layout.cp)) if ring else (layout.cp, (rank,))
    assert sequence % pieces == 0, f"{sequence} tokens in {pieces} pieces"
    return torch.cat([piece for index, piece in enumerate(torch.arange(sequence).chunk(pieces)) if index in held])


def part_of_rows(
    tokens_BS: torch.Tensor, targets_BS: torch.Tensor, documents: Documents, mesh: Mesh
) -> tuple[torch.Tensor, torch.Tensor, Documents]:
    """Of whole rows what this rank has: tokens and targets [B, S / cp], and the documents, which know where they are.
    Without context parallelism everything, as it is."""
    if mesh.cp.trivial:
        return tokens_BS, targets_BS, documents
    places_C = places_of(mesh.layout, mesh.cp.rank, tokens_BS.shape[1]).to(tokens_BS.device)
    return tokens_BS[:, places_C], targets_BS[:, places_C], documents.at(places_C)
