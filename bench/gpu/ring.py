"""Ring attention of packed documents on one device, by flash kernels and by tiles: the ranks compute one after the
other, without communication. Cases of `one_gpu.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from cases import step_seconds

from bench.shared.flash_kernels import flash_kernels_on_cpu
from bench.shared.packed_documents import documents_from_starts
from meshwright.comm import collectives
from meshwright.comm.handle import DONE, Handle
from meshwright.comm.mesh import Axis
from meshwright.layout import Layout
from meshwright.model.documents import Documents
from meshwright.model.scaled_dot_product import AttentionMask, MaskForm
from meshwright.parallel import context

LAYOUT = Layout(cp=2)
AXES = [Axis("cp", tuple(range(LAYOUT.cp)), rank) for rank in range(LAYOUT.cp)]
Heads = tuple[torch.Tensor, ...]


def make_masks(heads: Heads, documents: Documents, window: int | None, flash: bool) -> list[AttentionMask]:
    """The attention mask of each rank."""
    tokens, device = heads[0].shape[2] // LAYOUT.cp, heads[0].device
    form: MaskForm = "varlen" if flash else "first"
    return [context.RingAttention(axis).make_attention_mask(documents, tokens, window, device, form) for axis in AXES]


def attend(heads: Heads, d_out: torch.Tensor, masks: list[AttentionMask]) -> list[torch.Tensor]:
    """Output and gradients of queries, keys and values of all ranks, forward and backward."""
    tokens = d_out.shape[2]
    places = [context.list_local_positions(LAYOUT, axis.rank, tokens).to(d_out.device) for axis in AXES]
    shards = [[x.transpose(1, 2)[:, held].contiguous().transpose(1, 2) for held in places] for x in (*heads, d_out)]
    blocks = [torch.stack(block) for block in zip(*shards[1:3], strict=True)]
    d_blocks = [torch.zeros_like(block, dtype=torch.float32) for block in blocks]
    sources = []

    def pass_blocks(k: Any, v: Any, axis: Axis, site: str) -> Iterator[tuple[int, torch.Tensor]]:
        for distance in range(axis.size):
            sources.append((axis.rank - distance) % axis.size)
            yield sources[-1], blocks[sources[-1]]

    def add_gradients(output: torch.Tensor, source: torch.Tensor, *_: Any, **options: Any) -> Handle:
        d_blocks[sources[-1]] += source
        output.zero_()
        return DONE

    outs, of_queries = list[torch.Tensor](), list[torch.Tensor]()
    with (
        mock.patch.object(context, "_pass_kv", pass_blocks),
        mock.patch.object(collectives, "rotate", add_gradients),
    ):
        for axis, mask, (q, k, v, d_o) in zip(AXES, masks, zip(*shards, strict=True), strict=True):
            with mock.patch.object(context, "find_axis", lambda _, axis=axis: axis):
                out = context.RingAttention(axis).attend(q.requires_grad_(), k, v, mask)
                of_queries += torch.autograd.grad(out, q, d_o)
                outs.append(out.detach())
    order = torch.cat(places).argsort()
    of_keys, of_values = zip(*d_blocks, strict=True)
    return [torch.cat(parts, dim=2)[:, :, order] for parts in (outs, of_queries, [*of_keys], [*of_values])]


def attend_dense(heads: Heads, d_out: torch.Tensor, documents: Documents, window: int | None) -> list[torch.Tensor]:
    """The same in float64 by softmax over a mask of all pairs of tokens."""
    q, k, v = (x.double().requires_grad_() for x in heads)
    tokens, groups = q.shape[2], q.shape[1] // k.shape[1]
    first_BS = documents.first_visible_BS(tokens, window, q.device)
    assert first_BS is not None
    places = torch.arange(tokens, device=q.device)
    shown = (places >= first_BS[..., None]) & (places <= places[:, None])
    scores = q @ k.repeat_interleave(groups, dim=1).mT / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~shown[:, None], float("-inf"))
    out = scores.softmax(dim=-1) @ v.repeat_interleave(groups, dim=1)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), d_out.double())]


def make_case(device: str, shape: dict[str, int], rows: int, tokens: int) -> tuple[Heads, torch.Tensor, Documents]:
    """Heads, an output gradient and packed documents: of one token, over several chunks, ending at chunk borders."""
    size, make = shape["hidden"] // shape["heads"], torch.Generator(device).manual_seed(5)
    options: Any = {"device": device, "dtype": torch.bfloat16, "generator": make}
    counts = [shape[name] for name in ("heads", "kv_heads", "kv_heads")]
    heads = tuple(torch.randn(rows, count, tokens, size, **options) for count in counts)
    chunk = tokens // (2 * LAYOUT.cp)
    starts = [[0, 1, chunk // 2, chunk // 2 + 2 * chunk + 1], [0, chunk, 2 * chunk, tokens - 1]]
    documents = documents_from_starts([starts[row % 2] for row in range(rows)], tokens).to(device)
    return heads, torch.randn(heads[0].shape, **options), documents


def ring_errors(device: str, shape: dict[str, int], window: int | None) -> dict[str, float]:
    """Largest error of output and gradients relative to the norm of each, against float64, by kernels."""
    heads, d_out, documents = make_case(device, shape, 2, min(shape["sequence"], 2048))
    reference = attend_dense(heads, d_out, documents, window)
    found = {}
    for name, flash in (("flash", True), ("tiles", False)):
        with flash_kernels_on_cpu() if device == "cpu" else nullcontext():
            results = attend(heads, d_out, make_masks(heads, documents, window, flash))
        found[name] = max(float((a.double() - b).norm() / b.norm()) for a, b in zip(results, reference, strict=True))
    return found


def ring_seconds(device: str, shape: dict[str, int], window: int | None) -> dict[str, float]:
    """Median seconds of forward and backward over four sequence lengths, by flash kernels and by tiles, and their
    ratio."""
    heads, d_out, documents = make_case(device, shape, 1, 4 * shape["sequence"])
    found = {}
    for name, flash in (("flash", True), ("tiles", False)):
        masks = make_masks(heads, documents, window, flash)
        found[name] = step_seconds(partial(attend, heads, d_out, masks), 1, 4, True)
    return {**found, "tiles_to_flash": found["tiles"] / found["flash"]}
