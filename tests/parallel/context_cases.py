"""Functions that the ranks of test_context.py run."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from meshwright.comm.faults import KINDS, Fault
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.model import attention_spans
from meshwright.model import tiled_attention as tiles
from meshwright.model.documents import Documents
from meshwright.model.tiled_attention import Scores
from meshwright.parallel.context import context_operations, local_positions

CPU = torch.device("cpu")
Case = tuple[tuple[int, int, int, int, int], bool, int | None, int]  # shape, documents, window, queries of a tile


def inputs(shape: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    """Queries, keys, values and an output gradient; sizes: sequences, tokens, N, K, D."""
    rows, tokens, queries, keys, size = shape
    generator = torch.Generator().manual_seed(seed)
    heads = (queries, keys, keys, queries)
    return [torch.randn(rows, count, tokens, size, dtype=torch.float64, generator=generator) for count in heads]


def ids_of(shape: tuple[int, ...], documents: bool) -> torch.Tensor:
    """Document IDs with boundaries that differ per sequence and are off those of chunks; the last is one document."""
    rows, tokens = shape[:2]
    ids = torch.stack([torch.arange(tokens) // (tokens // 3 + 5 * row + 1) for row in range(rows)])
    ids[-1] = 0
    return ids if documents else torch.zeros_like(ids)


def by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor, window: int | None, how: Scores | None
) -> Any:
    """Softmax over an explicit mask, of scores with scale and softcap `how`."""
    places = torch.arange(ids.shape[1])
    distance = places[:, None] - places
    allowed = (ids[:, :, None] == ids[:, None, :]) & (distance >= 0) & (distance < (window or len(places)))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if how is not None:
        scores = how.softcap * torch.tanh(how.scale * (q @ k.mT) / how.softcap)
    return torch.softmax(scores.masked_fill(~allowed[:, None], float("-inf")), dim=-1) @ v


def attention(
    mesh: Mesh, case: Case, dtype: torch.dtype, seed: int = 0, how: Scores | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's result and gradients of queries, keys and values, each with its float64 reference."""
    shape, documents, window, tiles.TILE_QUERIES = case
    ids, layout = ids_of(shape, documents), mesh.layout
    places = local_positions(layout, mesh.cp.rank, shape[1])
    *whole, direction = inputs(shape, seed)
    whole = [x.requires_grad_() for x in whole]
    wanted = by_definition(*whole, ids, window, how)
    want = [wanted.detach(), *torch.autograd.grad(wanted, whole, direction)]
    mine = [x.detach()[:, :, places].to(dtype).requires_grad_() for x in whole]
    operations = context_operations(mesh)
    visible = operations.visibility(Documents.from_ids(ids).select_tokens(places), len(places), window, CPU)
    found = operations.attend(*mine, visible, how)
    gradients = torch.autograd.grad(found, mine, direction[:, :, places].to(dtype))
    return list(zip([found.detach(), *gradients], [x[:, :, places] for x in want], strict=True))


def errors(
    method: str, cases: list[Case], dtype: torch.dtype = torch.float64, how: Scores | None = None
) -> list[float]:
    """The largest absolute error of each case over result and gradients on this rank."""
    mesh = Mesh.create(Layout(cp=dist.get_world_size(), cp_method=method))
    worst = []
    for case in cases:
        worst.append(_largest(attention(mesh, case, dtype, how=how)))
    mesh.close()
    return worst


def fused_errors(cases: list[Case], dtype: torch.dtype) -> list[float]:
    """The same with PyTorch's CPU flash attention for cases without a mask."""
    right = attention_spans.uses_flash_attention
    attention_spans.uses_flash_attention = lambda q, first, how: first is None
    try:
        return errors("ring", cases, dtype)
    finally:
        attention_spans.uses_flash_attention = right


def spoilt(method: str, case: Case) -> dict[str, float]:
    """The largest error on this rank under each injected fault, by its name."""
    mesh = Mesh.create(Layout(cp=dist.get_world_size(), cp_method=method))
    attention(mesh, case, torch.float64)
    found = {}
    for call in mesh.record.table():
        for kind in KINDS:
            if kind == "wrong group":
                continue  # there is only one group; verify injects it where there are several
            fault = Fault(str(call["site"]), str(call["operation"]), kind)
            mesh.faults.inject(fault)
            attention(mesh, case, torch.float64, seed=0)  # the call whose result is delivered again
            found[str(fault)] = _largest(attention(mesh, case, torch.float64, seed=1))
    mesh.close()
    return found


def _largest(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    return max(float((found.double() - want).abs().max()) for found, want in pairs)


def without_gradients(method: str) -> bool:
    """Return True if the result without gradients is bitwise equal."""
    mesh = Mesh.create(Layout(cp=dist.get_world_size(), cp_method=method))
    q, k, v, _ = inputs((2, 16, 4, 2, 8), mesh.cp.rank)
    operations = context_operations(mesh)
    wanted = operations.attend(q, k, v.requires_grad_(), None)
    with torch.no_grad():
        same = torch.equal(operations.attend(q, k, v, None), wanted)
    mesh.close()
    return same


def operators(method: str) -> None:
    """Check the operators against their declarations to torch.compile."""
    mesh = Mesh.create(Layout(cp=dist.get_world_size(), cp_method=method))
    q, k, v, direction = inputs((2, 16, 4, 2, 8), mesh.cp.rank)
    first = torch.arange(16).clamp(max=5)[None]
    ring, key = torch.ops.meshwright, mesh.cp.key
    if method == "ring":
        leaves = [x.requires_grad_() for x in (q, k, v)]
        torch.library.opcheck(ring.ring_attention.default, (*leaves, first, key, 0.3, 0.7))
        q, k, v = (x.detach() for x in leaves)
        out, log_sum = ring.ring_attention(q, k, v, first, key, 0.3, 0.7)
        arguments = (direction, [q, k, v, out, log_sum], first, key, 0.3, 0.7)
        checks = "test_schema", "test_faketensor"  # it has no autograd formula
        torch.library.opcheck(ring.ring_attention_backward.default, arguments, test_utils=checks)
    else:
        torch.library.opcheck(ring.all_to_all.default, (q.requires_grad_(), key, "test", 1, 2))
    mesh.close()
