"""Variable-length attention equals dense masks in float64, with PyTorch's CUDA kernels replaced by their definition."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bench.shared.flash_kernels import flash_kernels_on_cpu
from bench.shared.packed_documents import documents_from_starts
from meshwright.model import attention_inputs
from meshwright.model.axis_operations import AxisOperations
from meshwright.model.documents import Documents
from meshwright.model.initialise import initialise
from meshwright.model.scaled_dot_product import attend, make_attention_mask
from meshwright.model.tiled_attention import ScoreSettings
from meshwright.model.transformer import Transformer
from meshwright.model.varlen_attention import VarlenMask, make_varlen_mask, supports_flash_attention
from meshwright.parallel.recompute import ActivationCheckpointing
from meshwright.spec.chunks import pad_document_count
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset

CPU = torch.device("cpu")
STARTS = [[0, 1, 7, 8, 20], [0], [0, 23]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Replace the CUDA kernels by their definition, and use them on the CPU; list what they were called with."""
    monkeypatch.setattr(attention_inputs, "choose_mask_form", lambda *_: "varlen")
    with flash_kernels_on_cpu() as found:
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
    for form in ("varlen", "first"):
        mask = make_attention_mask(documents, tokens, window, CPU, form)
        assert isinstance(mask, VarlenMask) == (form == "varlen" and (starts is not None or window == 4))
        out = attend(*heads, mask)
        assert out.transpose(1, 2).is_contiguous()
        (gradient,) = torch.autograd.grad((out * torch.arange(8)).sum(), x)
        found.append((out, gradient))
    torch.testing.assert_close(found[0], found[1])
    assert len(calls) == (starts is not None or window == 4)


def test_boundaries_are_padded_and_the_longest_document_is_known():
    mask = make_varlen_mask(documents_from_starts(STARTS, 24), 7, CPU)
    assert mask.cu_seqlens is not None and mask.lengths is not None and mask.window == 7
    assert mask.cu_seqlens.tolist() == [[0, 1, 7, 8, 20, 24, 48, 71, *[72] * 9]]
    assert mask.cu_seqlens.dtype == torch.int32 and mask.lengths.tolist() == [24, 0, 1, 0, 24, 0, 23]
    assert make_varlen_mask(Documents(), None, CPU) == (None, None, 0)
    assert [pad_document_count(count) for count in (1, 16, 17, 32, 1000)] == [16, 16, 32, 32, 1024]


def test_boundaries_of_chunks_cut_documents():
    """Chunks 1 and 2 of four of six tokens: pieces, and the document of each chunk's first token."""
    mask = make_varlen_mask(documents_from_starts(STARTS, 24), None, CPU, held=(1, 2), chunks=4)
    assert mask.cu_seqlens is not None and mask.lengths is not None
    assert mask.cu_seqlens.tolist() == [[0, 1, 2, 6, 12, *[18] * 12], [0, 6, 12, *[18] * 14]]
    assert mask.lengths.tolist() == [6, 1, 1, 8, 6, 0, 6, 0, 6, 0, 6, 0, 6]


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
@pytest.mark.parametrize(("name", "change"), [("llama-tiny", {}), ("mistral-tiny", {"sliding_window": 5})])
def test_model_with_varlen_attention_has_the_same_loss_and_gradients(
    calls, monkeypatch: pytest.MonkeyPatch, name: str, change: Any, kind: str
):
    config = dataclasses.replace(preset(name), layers=2, **change)
    axes = AxisOperations(recompute=ActivationCheckpointing(kind))
    model = Transformer(config, axes=axes, dtype=torch.float64)
    initialise(model, parameter_table(config), 0)
    generator = torch.Generator().manual_seed(2)
    tokens, targets = (torch.randint(0, config.vocabulary, (3, 24), generator=generator) for _ in range(2))
    documents = documents_from_starts(STARTS, 24)
    found = []
    for form in ("varlen", "first"):
        monkeypatch.setattr(attention_inputs, "choose_mask_form", lambda *_, form=form: form)
        model.zero_grad()
        loss = model(tokens, targets, documents)
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
        model(tokens, targets, documents_from_starts(starts, 24)).backward()
        counts.append(len(graphs))
    assert counts[0] == counts[1] == counts[2] > 0
    assert [each["longest"][0] for each in calls[::2]] == [24, 24, 23]


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
    mask = make_varlen_mask(documents_from_starts(STARTS, 24), None, CPU)
    q = torch.randn(3, 24, 4, 8, dtype=torch.float32).transpose(1, 2).requires_grad_()
    operators = torch.ops.meshwright
    for sinks in (None, torch.randn(4, requires_grad=True)):
        arguments = (q, q[:, :2], q[:, :2], mask.tensors, 0, 0.3, sinks)
        torch.library.opcheck(operators.varlen_attention.default, arguments)


@pytest.mark.parametrize("starts", [STARTS, None], ids=["packed", "one document"])
def test_sinks_of_flash_attention_equal_those_of_tiles(calls, starts: Any):
    documents = Documents() if starts is None else documents_from_starts(starts, 24)
    x = torch.randn(3, 24, 8, 8, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    heads, found = [each.transpose(1, 2) for each in x.split([4, 2, 2], dim=2)], []
    for form in ("varlen", "first"):
        mask = make_attention_mask(documents, 24, 7, CPU, form)
        out = attend(*heads, mask, ScoreSettings(0.4, 0.0, sinks))
        found.append((out, *torch.autograd.grad((out * torch.arange(8)).sum(), (x, sinks))))
    torch.testing.assert_close(found[0], found[1])
    assert len(calls) == 1
