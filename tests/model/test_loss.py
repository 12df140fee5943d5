"""The chunked loss against torch's own cross-entropy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.model import loss as losses
from meshwright.model.axis_operations import SINGLE_DEVICE
from meshwright.model.loss import OutputHead, linear_cross_entropy
from meshwright.spec import chunks
from meshwright.spec.chunks import keeps_head_gradient

TENSOR = SINGLE_DEVICE.tensor
TOKENS, HIDDEN, VOCABULARY = 50, 12, 31


@pytest.fixture(params=[1 << 23, 16 * VOCABULARY, VOCABULARY], ids=["one chunk", "four chunks", "a token a chunk"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setattr(losses, "SLICE_LOGITS", 5 * VOCABULARY)
    monkeypatch.setitem(chunks.CHUNK_LOGITS, "cpu", request.param)


def problem(dtype: torch.dtype = torch.float64, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = (scale * torch.randn(TOKENS, HIDDEN, dtype=dtype, generator=generator)).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=dtype, generator=generator).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    targets[3:9] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("scale", [1.0, 300.0], ids=["usual", "huge logits"])
def test_loss_and_gradients_equal_cross_entropy(scale: float, chunk: None):
    hidden, weight, targets = problem(scale=scale)
    ours = linear_cross_entropy(hidden, targets, OutputHead(weight, TENSOR)) / 44
    want = F.cross_entropy(hidden @ weight.T, targets, reduction="sum") / 44
    torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (ours, want)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12 * scale)


def test_only_required_gradients_are_computed(chunk: None):
    hidden, weight, targets = problem()
    want = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, targets, reduction="sum"), (hidden, weight))
    (mine,) = torch.autograd.grad(linear_cross_entropy(hidden.detach(), targets, OutputHead(weight, TENSOR)), (weight,))
    torch.testing.assert_close(mine, want[1], rtol=1e-12, atol=1e-12)
    (mine,) = torch.autograd.grad(linear_cross_entropy(hidden, targets, OutputHead(weight.detach(), TENSOR)), (hidden,))
    torch.testing.assert_close(mine, want[0], rtol=1e-12, atol=1e-12)


def test_without_gradients_no_gradient_work_is_done(monkeypatch: pytest.MonkeyPatch):
    hidden, weight, targets = problem()
    monkeypatch.setattr(losses.Chunk, "differentiate", lambda self: pytest.fail("gradient work"))
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, targets, OutputHead(weight, TENSOR))
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.T, targets, reduction="sum").detach())


def test_logits_of_all_tokens_are_never_in_memory_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunks, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setitem(chunks.CHUNK_LOGITS, "cpu", 8 * VOCABULARY)
    hidden, weight, targets = problem()
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = operator(*arguments, **(options or {}))
            if isinstance(result, torch.Tensor) and result.shape[1:] == (VOCABULARY,) and len(result) != HIDDEN:
                largest = max(largest, result.numel())
            return result

    with Watch():
        linear_cross_entropy(hidden, targets, OutputHead(weight, TENSOR)).backward()
    assert 0 < largest <= 8 * VOCABULARY


def test_bfloat16_sums_in_float32(chunk: None):
    hidden, weight, targets = problem(torch.bfloat16)
    ours = linear_cross_entropy(hidden, targets, OutputHead(weight, TENSOR))
    assert ours.dtype == torch.float32
    exact = F.cross_entropy(hidden.double() @ weight.double().T, targets, reduction="sum")
    torch.testing.assert_close(ours.double(), exact, rtol=3e-3, atol=0)
    gradients = torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(exact, (hidden, weight))
    for mine, theirs in zip(*gradients, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - theirs.double()).norm() < 0.01 * theirs.double().norm()


def test_loss_without_targets_is_zero_without_gradient(chunk: None):
    hidden, weight, targets = problem()
    loss = linear_cross_entropy(hidden, torch.full_like(targets, -100), OutputHead(weight, TENSOR))
    assert loss.item() == 0
    for gradient in torch.autograd.grad(loss, (hidden, weight)):
        assert not gradient.any()


def test_loss_can_be_differentiated_twice(chunk: None):
    hidden, weight, targets = problem()
    loss = linear_cross_entropy(hidden, targets, OutputHead(weight, TENSOR))
    once = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(3 * loss, (hidden, weight))
    for a, b in zip(once, again, strict=True):
        torch.testing.assert_close(3 * a, b)


def test_fused_loss_matches_plain_loss():
    hidden, weight, targets = problem()
    fused = linear_cross_entropy(hidden, targets, OutputHead(weight, TENSOR, compile_backend="inductor"))
    plain = linear_cross_entropy(hidden, targets, OutputHead(weight, TENSOR))
    torch.testing.assert_close(fused, plain, rtol=1e-13, atol=0)
    for mine, theirs in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (fused, plain)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gradients_recomputed_in_backward_are_bitwise_equal(dtype: torch.dtype, chunk: None):
    hidden, weight, targets = problem(dtype)
    kept, later = (
        linear_cross_entropy(hidden, targets, OutputHead(weight, TENSOR), keep=keep) for keep in (True, False)
    )
    assert torch.equal(kept, later)
    for _ in range(2):  # a second time, too
        pairs = [torch.autograd.grad(each / 44, (hidden, weight), retain_graph=True) for each in (kept, later)]
        for mine, theirs in zip(*pairs, strict=True):
            assert theirs.any() and torch.equal(mine, theirs)


@pytest.mark.parametrize("keep", [True, False])
def test_loss_with_deferred_backward_saves_nothing_of_weight_size(keep: bool, chunk: None):
    hidden, weight, targets = problem()
    size, made = weight.numel(), []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
            result = operator(*arguments, **(options or {}))
            if isinstance(result, torch.Tensor) and result.numel() == size and result.device.type == "cpu":
                made.append(StorageWeakRef(result.untyped_storage()))
            return result

    with Watch():
        losses_kept = [linear_cross_entropy(hidden, targets, OutputHead(weight, TENSOR), keep=keep) for _ in range(4)]
    weights = StorageWeakRef(weight.untyped_storage()).cdata
    live = {reference.cdata for reference in made if not reference.expired()} - {weights}
    assert len(live) == (4 if keep else 0)
    sum(losses_kept).backward()


def test_head_gradients_are_saved_when_smaller_than_saved_activations() -> None:
    # 8B on 8 stages, 8,192 tokens: 128,256 against 8 x 8,192 x 4; short sequences; full recomputation.
    assert keeps_head_gradient(8192, 128_256, 4, "none", at_once=False)
    assert keeps_head_gradient(8192, 128_256, 4, "selective", at_once=False)
    assert not keeps_head_gradient(512, 128_256, 4, "none", at_once=False)
    assert not keeps_head_gradient(8192, 128_256, 4, "full", at_once=False)
    assert keeps_head_gradient(1, 128_256, 1, "full", at_once=True)


def test_head_gradient_on_a_gpu_is_summed_in_float32_by_the_products(monkeypatch: pytest.MonkeyPatch):
    """Over several chunks of 16-bit logits: no product is rounded or stored before it is added."""
    monkeypatch.setattr(chunks, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setitem(chunks.CHUNK_LOGITS, "cpu", 16 * VOCABULARY)
    hidden, weight, targets = (tensor.detach() for tensor in problem(torch.bfloat16))
    betas, exact = list[int](), torch.zeros(VOCABULARY, HIDDEN, dtype=torch.float64)
    multiply_add = torch.addmm

    def add_wide_product(
        total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: int, out: torch.Tensor, out_dtype: torch.dtype
    ) -> torch.Tensor:
        assert out is total and total.dtype == out_dtype == torch.float32 and a.dtype == b.dtype == torch.bfloat16
        betas.append(beta)
        exact.add_(a.double() @ b.double())
        before = torch.zeros_like(total) if beta == 0 else total.clone()  # which a factor of 0 does not read
        return multiply_add(before, a.float(), b.float(), beta=beta, out=out)

    monkeypatch.setattr(torch, "addmm", add_wide_product)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    sums = losses._Gradients(hidden, OutputHead(weight, TENSOR), False, True, False)
    for each in losses._iterate_logit_chunks(hidden, targets, OutputHead(weight, TENSOR)):
        sums.add(each)
    assert betas == [0, 1, 1, 1] and sums.weight_VH is not None and sums.weight_VH.dtype == torch.float32
    torch.testing.assert_close(sums.weight_VH.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("keep", [True, False])
def test_gradients_of_head_are_freed_before_backward_of_layers(
    keep: bool, chunk: None, monkeypatch: pytest.MonkeyPatch
):
    made: list[StorageWeakRef] = []
    collect = losses._Gradients.collect

    def watch(sums: losses._Gradients) -> tuple[torch.Tensor | None, ...]:
        found = collect(sums)
        made.extend(StorageWeakRef(each.untyped_storage()) for each in found if each is not None)
        return found

    monkeypatch.setattr(losses._Gradients, "collect", watch)
    hidden, weight, targets = problem()
    layer = hidden * 2
    freed: list[bool] = []
    layer.register_hook(lambda _: freed.extend(each.expired() for each in made))
    linear_cross_entropy(layer, targets, OutputHead(weight, TENSOR), keep=keep).backward()
    assert freed == [True, True]
