"""Variable-length attention equals dense masks in float64, with PyTorch's CUDA kernels replaced by their definition."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshwright.model import transformer, varlen_attention
from meshwright.model.axis_operations import AxisOperations
from meshwright.model.documents import Documents
from meshwright.model.initialise import initialise
from meshwright.model.scaled_dot_product import attend, visibility
from meshwright.model.transformer import Transformer
from meshwright.model.varlen_attention import VarlenMask, supports_flash_attention
from meshwright.parallel.recompute import ActivationCheckpointing
from meshwright.spec.chunks import padded_documents
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from tests.packed_documents import documents_from_starts

CPU = torch.device("cpu")
STARTS = [[0, 1, 7, 8, 20], [0], [0, 23]]


def probabilities(q_TND: torch.Tensor, k_TKD: torch.Tensor, bounds: tuple[int, int], before: int | None) -> Any:
    """Attention probabilities and log-sum-exps of one document, [N, tokens, tokens] and [N, tokens], and its keys with
    one head for each query head. bounds: where the document begins and ends; before: keys before its own a query
    sees."""
    document = slice(*bounds)
    q, k = q_TND[document].transpose(0, 1), k_TKD[document].transpose(0, 1)
    k = k.repeat_interleave(len(q) // len(k), dim=0)
    at = torch.arange(q.shape[1])
    hidden = at > at[:, None]
    if before is not None:
        hidden |= at < at[:, None] - before
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, float("-inf"))
    return scores.softmax(dim=-1), scores.logsumexp(dim=-1), k


def by_document(cu_seqlens: torch.Tensor) -> list[tuple[int, int]]:
    """Where each document begins and ends."""
    return list(itertools.pairwise(cu_seqlens.tolist()))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Replace the CUDA kernels by their definition, and use them on the CPU; list what they were called with."""
    found: list[dict[str, Any]] = []

    def forward(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int, *rest: Any, **window: Any) -> Any:
        assert cu_q is cu_k and cu_q.dtype == torch.int32 and max_q == max_k == int(cu_q.diff().max())
        assert rest == (0.0, True, False) and window["window_size_right"] in (None, 0)
        found.append({"cu_seqlens": cu_q.tolist(), "longest": max_q, "window": window["window_size_left"]})
        out, sums = torch.zeros_like(q), q.new_zeros(q.shape[1], len(q))
        for start, end in by_document(cu_q):
            p, sums[:, start:end], _ = probabilities(q, k, (start, end), window["window_size_left"])
            values = v[start:end].transpose(0, 1).repeat_interleave(q.shape[1] // v.shape[1], dim=0)
            out[start:end] = (p @ values).transpose(0, 1)
        return out, sums, None, None, None

    def backward(
        d_out: Any, q: Any, k: Any, v: Any, out: Any, log_sum: Any, cu_q: Any, cu_k: Any, *rest: Any, **window: Any
    ) -> Any:
        """The derivative of softmax written out: kernels of custom operators run without autograd."""
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        groups, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
        for start, end in by_document(cu_q):
            p, sums, keys = probabilities(q, k, (start, end), window["window_size_left"])
            torch.testing.assert_close(sums, log_sum[:, start:end])
            d_o, o, queries = (x[start:end].transpose(0, 1) for x in (d_out, out, q))
            values = v[start:end].transpose(0, 1).repeat_interleave(groups, dim=0)
            ds = p * (d_o @ values.mT - (d_o * o).sum(dim=-1, keepdim=True)) * scale
            dq[start:end] = (ds @ keys).transpose(0, 1)
            for into, gradient in ((dk, ds.mT @ queries), (dv, p.mT @ d_o)):
                into[start:end] = gradient.unflatten(0, (-1, groups)).sum(dim=1).transpose(0, 1)
        return dq, dk, dv

    monkeypatch.setattr(varlen_attention, "_flash_forward", forward)
    monkeypatch.setattr(varlen_attention, "_flash_backward", backward)
    monkeypatch.setattr(transformer, "supports_flash_attention", lambda *_: True)
    yield found


@pytest.mark.parametrize("window", [None, 4, 100])
@pytest.mark.parametrize("starts", [STARTS, None], ids=["packed", "one document"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_varlen_attention_equals_dense_mask(calls, window: int | None, starts: Any, kv_heads: int):
    rows, tokens = 3, 24
    documents = Documents() if starts is None else documents_from_starts(starts, tokens)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, tokens, 4 + 2 * kv_heads, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    heads = [each.transpose(1, 2) for each in x.split([4, kv_heads, kv_heads], dim=2)]
    found = []
    for flash, whole in ((True, documents.with_lengths()), (False, documents)):
        mask = visibility(whole, tokens, window, CPU, flash)
        assert isinstance(mask, VarlenMask) == (flash and (starts is not None or window == 4))
        out = attend(*heads, mask)
        assert out.transpose(1, 2).is_contiguous()
        (gradient,) = torch.autograd.grad((out * torch.arange(8)).sum(), x)
        found.append((out, gradient))
    torch.testing.assert_close(found[0], found[1])
    assert len(calls) == (starts is not None or window == 4)


def test_boundaries_are_padded_and_the_longest_document_is_known():
    documents = documents_from_starts(STARTS, 24).with_lengths()
    assert documents.cu_seqlens is not None and documents.max_seqlen is not None
    assert documents.cu_seqlens.tolist() == [0, 1, 7, 8, 20, 24, 48, 71, *[72] * 9]
    assert documents.cu_seqlens.dtype == torch.int32 and int(documents.max_seqlen) == 24
    assert Documents().with_lengths().cu_seqlens is None
    assert [padded_documents(count) for count in (1, 16, 17, 32, 1000)] == [16, 16, 32, 32, 1024]


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
@pytest.mark.parametrize(("name", "change"), [("llama-tiny", {}), ("mistral-tiny", {"sliding_window": 5})])
def test_model_with_varlen_attention_has_the_same_loss_and_gradients(calls, name: str, change: Any, kind: str):
    config = dataclasses.replace(preset(name), layers=2, **change)
    axes = AxisOperations(recompute=ActivationCheckpointing(kind))
    model = Transformer(config, axes=axes, dtype=torch.float64)
    initialise(model, parameter_table(config), 0)
    generator = torch.Generator().manual_seed(2)
    tokens, targets = (torch.randint(0, config.vocabulary, (3, 24), generator=generator) for _ in range(2))
    documents = documents_from_starts(STARTS, 24)
    found = []
    for whole in (documents.with_lengths(), documents):
        model.zero_grad()
        loss = model(tokens, targets, whole)
        loss.backward()
        found.append([loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)])
    torch.testing.assert_close(found[0], found[1])
    assert len(calls) == (2 if kind == "none" else 4)


def test_batches_with_different_documents_share_one_compiled_graph(calls):
    config = dataclasses.replace(preset("llama-tiny"), layers=2)
    model = Transformer(config, dtype=torch.float64)
    initialise(model, parameter_table(config), 0)
    torch._dynamo.reset()
    graphs = []
    model.compile_blocks(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    generator = torch.Generator().manual_seed(2)
    counts = []
    for starts in (STARTS, [[0, 3], [0, 5, 6, 7], [0]], [[0, 23], [0, 1], [0, 2]]):
        tokens, targets = (torch.randint(0, config.vocabulary, (3, 24), generator=generator) for _ in range(2))
        model(tokens, targets, documents_from_starts(starts, 24).with_lengths()).backward()
        counts.append(len(graphs))
    assert counts[0] == counts[1] == counts[2] > 0
    assert [each["longest"] for each in calls[::2]] == [24, 24, 23]


@pytest.mark.parametrize(
    ("device", "dtype", "size", "expected"),
    [
        ("cuda", torch.bfloat16, 128, True), ("cuda", torch.float16, 256, True), ("cpu", torch.bfloat16, 128, False),
        ("cuda", torch.float32, 128, False), ("cuda", torch.bfloat16, 264, False), ("cuda", torch.bfloat16, 60, False),
    ],
)  # fmt: skip
def test_flash_attention_takes_narrow_types_and_head_sizes(device: str, dtype: torch.dtype, size: int, expected: bool):
    assert supports_flash_attention(torch.device(device), dtype, size) is expected


def test_varlen_operators_declare_what_they_return(calls):
    documents = documents_from_starts(STARTS, 24).with_lengths()
    q = torch.randn(3, 24, 4, 8, dtype=torch.float32).transpose(1, 2).requires_grad_()
    operators = torch.ops.meshwright
    arguments = (q, q[:, :2], q[:, :2], documents.cu_seqlens, documents.max_seqlen, 0)
    torch.library.opcheck(operators.varlen_attention.default, arguments)
