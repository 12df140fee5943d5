"""Functions that the ranks of test_context.py run."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from bench.shared.flash_kernels import flash_kernels_on_cpu
from meshwright.comm.faults import KINDS, Fault
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.model import tiled_attention as tiles
from meshwright.model.documents import Documents
from meshwright.model.scaled_dot_product import MaskForm
from meshwright.model.tiled_attention import ScoreSettings
from meshwright.parallel.context import list_local_positions, make_context_operations

CPU = torch.device("cpu")
Case = tuple[tuple[int, int, int, int, int], bool | list[list[int]], int | None, int]
"""Shape, documents (or where those of each sequence start), window, queries of a tile."""


def inputs(shape: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    """Queries, keys, values and an output gradient; sizes: sequences, tokens, N, K, D."""
    rows, tokens, queries, keys, size = shape
    generator = torch.Generator().manual_seed(seed)
    heads = (queries, keys, keys, queries)
    return [torch.randn(rows, count, tokens, size, dtype=torch.float64, generator=generator) for count in heads]


def ids_of(shape: tuple[int, ...], documents: bool | list[list[int]]) -> torch.Tensor:
    """Document IDs with boundaries that differ per sequence and are off those of chunks; the last is one document."""
    rows, tokens = shape[:2]
    if isinstance(documents, list):
        starts = [torch.tensor(each, dtype=torch.int64) for each in documents]
        return torch.stack([torch.searchsorted(each, torch.arange(tokens), right=True) for each in starts])
    ids = torch.stack([torch.arange(tokens) // (tokens // 3 + 5 * row + 1) for row in range(rows)])
    ids[-1] = 0
    return ids if documents else torch.zeros_like(ids)


def by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor, window: int | None, how: ScoreSettings | None
) -> Any:
    """Softmax over an explicit mask, of scores with scale and softcap `how`."""
    places = torch.arange(ids.shape[1])
    distance = places[:, None] - places
    allowed = (ids[:, :, None] == ids[:, None, :]) & (distance >= 0) & (distance < (window or len(places)))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if how is not None:
        scores = how.scale * (q @ k.mT)
        scores = how.softcap * torch.tanh(scores / how.softcap) if how.softcap else scores
        if how.sinks is not None:
            one_more = how.sinks[:, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores.masked_fill(~allowed[:, None], float("-inf")), one_more], dim=-1)
            return torch.softmax(scores, dim=-1)[..., :-1] @ v
    return torch.softmax(scores.masked_fill(~allowed[:, None], float("-inf")), dim=-1) @ v


def attention(
    mesh: Mesh,
    case: Case,
    dtype: torch.dtype,
    seed: int = 0,
    how: ScoreSettings | None = None,
    flash: bool = False,
    with_sinks: bool = False,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's result and gradients of queries, keys and values, each with its float64 reference; and the sum over
    the ranks of the gradients of sinks, if heads have them."""
    shape, documents, window, tiles.TILE_QUERIES = case
    ids, layout = ids_of(shape, documents), mesh.layout
    places = list_local_positions(layout, mesh.cp.rank, shape[1])
    *whole, direction = inputs(shape, seed)
    whole = [x.requires_grad_() for x in whole]
    sinks = [torch.linspace(-2, 3, shape[2], dtype=torch.float64, requires_grad=True)] if with_sinks else []
    how = how._replace(sinks=sinks[0]) if how and sinks else how
    wanted = by_definition(*whole, ids, window, how)
    want = [wanted.detach(), *torch.autograd.grad(wanted, [*whole, *sinks], direction)]
    mine = [x.detach()[:, :, places].to(dtype).requires_grad_() for x in whole]
    operations = make_context_operations(mesh)
    form: MaskForm = "varlen" if flash else "first"
    visible = operations.make_attention_mask(
        Documents.from_ids(ids).select_tokens(places), len(places), window, CPU, form
    )
    how = how._replace(sinks=sinks[0].to(dtype)) if how and sinks else how
    found = operations.attend(*mine, visible, how)
    gradients = torch.autograd.grad(found, [*mine, *sinks], direction[:, :, places].to(dtype))
    for each in gradients[3:]:
        dist.all_reduce(each)
    pairs = list(zip([found.detach(), *gradients[:3]], [x[:, :, places] for x in want[:4]], strict=True))
    return [*pairs, *zip(gradients[3:], want[4:], strict=True)]


def errors(
    method: str, cases: list[Case], dtype: torch.dtype = torch.float64, how: ScoreSettings | None = None,
    flash: bool = False, with_sinks: bool = False,
) -> list[float]:  # fmt: skip
    """The largest absolute error of each case over result and gradients on this rank. flash: by flash kernels."""
    mesh = Mesh.create(Layout(cp=dist.get_world_size(), cp_method=method))
    worst = []
    for case in cases:
        worst.append(_largest(attention(mesh, case, dtype, how=how, flash=flash, with_sinks=with_sinks)))
    mesh.close()
    return worst


def flash_errors(
    cases: list[Case], dtype: torch.dtype, how: ScoreSettings | None = None, with_sinks: bool = False
) -> list[float]:
    """The same with PyTorch's flash kernels, replaced by their definition."""
    with flash_kernels_on_cpu() as calls:
        found = errors("ring", cases, dtype, how, flash=True, with_sinks=with_sinks)
    assert calls
    return found


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
    operations = make_context_operations(mesh)
    visible = operations.make_attention_mask(Documents(), 16, None, CPU)
    wanted = operations.attend(q, k, v.requires_grad_(), visible)
    with torch.no_grad():
        same = torch.equal(operations.attend(q, k, v, visible), wanted)
    mesh.close()
    return same


def operators(method: str) -> None:
    """Check the operators against their declarations to torch.compile."""
    mesh = Mesh.create(Layout(cp=dist.get_world_size(), cp_method=method))
    q, k, v, direction = inputs((2, 16, 4, 2, 8), mesh.cp.rank)
    ring, key = torch.ops.meshwright, mesh.cp.key
    if method == "ring":
        documents = Documents.from_ids((torch.arange(32) > 9)[None].expand(2, -1))
        mask = make_context_operations(mesh).make_attention_mask(documents, 16, None, CPU, "varlen")
        with flash_kernels_on_cpu():
            _check_operators("flash_ring_attention", (q, k, v, mask.tensors, [0.0, 0.3], key, None), direction)
        first, sinks = torch.arange(16).clamp(max=5)[None], torch.ones(4, dtype=torch.float64)
        for numbers, each in (([0.3, 0.7], None), ([0.3, 0.0], sinks)):
            _check_operators("ring_attention", (q, k, v, [first], numbers, key, each), direction)
    else:
        torch.library.opcheck(ring.all_to_all.default, (q.requires_grad_(), key, "test", 1, 2))
    mesh.close()


def _check_operators(name: str, arguments: tuple[Any, ...], direction: torch.Tensor) -> None:
    """Check the operator `name` and that of its gradients. direction: gradient of the output."""
    (q, k, v), mask = arguments[:3], arguments[3:]
    forward, backward = (getattr(torch.ops.meshwright, each) for each in (name, f"{name}_backward"))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(forward.default, (*leaves, *mask))
    saved = [q, k, v, *forward(q, k, v, *mask)]
    checks = "test_schema", "test_faketensor"  # it has no autograd formula
    torch.library.opcheck(backward.default, (direction, saved, *mask), test_utils=checks)
