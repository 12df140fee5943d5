"""Distillation losses and their gradients equal plain float64 formulas under autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from meshwright.model.axis_operations import SINGLE_DEVICE
from meshwright.model.loss import OutputHead, linear_cross_entropy
from meshwright.training import teacher_targets
from meshwright.training.distillation_loss import DistillationLoss
from meshwright.training.teacher_targets import TeacherTargets, top_log_probabilities

TOKENS, VOCABULARY, HIDDEN, TEACHER = 13, 31, 7, 5


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def expected(loss: DistillationLoss, logits: torch.Tensor, wanted: torch.Tensor, targets: torch.Tensor, k: int) -> Any:
    """Return the summed loss by its definition, on whole distributions or on the teacher's `k` most probable tokens.
    The divergence is that of the token IDs of the teacher, `wanted`, which may be fewer than those of the student."""
    total = logits.new_zeros(())
    for row, target in enumerate(targets.tolist()):
        if target < 0:
            continue
        p, q = (torch.softmax(each[row] / loss.temperature, dim=0) for each in (wanted, logits[:, : wanted.shape[1]]))
        if k:
            top = p.argsort(descending=True)[:k]
            p, q = (torch.cat([each[top], 1 - each[top].sum(dim=0, keepdim=True)]) for each in (p, q))
        if loss.divergence == "forward_kl":
            divergence = (p * (p / q).log()).sum()
        elif loss.divergence == "reverse_kl":
            divergence = (q * (q / p).log()).sum()
        else:
            m = loss.beta * p + (1 - loss.beta) * q
            divergence = loss.beta * (p * (p / m).log()).sum() + (1 - loss.beta) * (q * (q / m).log()).sum()
        hard = -(torch.softmax(logits[row], dim=0)[target]).log()
        total = total + loss.mixing * hard + (1 - loss.mixing) * loss.temperature**2 * divergence
    return total


LOSSES = [
    DistillationLoss("forward_kl", 1.0, 0.0),
    DistillationLoss("forward_kl", 2.5, 0.3),
    DistillationLoss("reverse_kl", 0.7, 0.5),
    DistillationLoss("jsd", 1.7, 0.2, beta=0.3),
]


@pytest.mark.parametrize("k, common", [(0, None), (6, None), (0, 25), (6, 25)])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.divergence)
def test_loss_and_gradients_equal_their_definition(
    loss: DistillationLoss, softcap: float, k: int, common: int | None, monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(3)
    monkeypatch.setattr("meshwright.model.loss.split_loss_chunks", lambda tokens, *_: [5, 5, 3])
    hidden, weight, states, teacher = (draw(TOKENS, HIDDEN), draw(VOCABULARY, HIDDEN), draw(TOKENS, TEACHER),
                                       draw(VOCABULARY, TEACHER))  # fmt: skip
    targets = torch.randint(0, VOCABULARY, (TOKENS,))
    targets[::4] = -100
    cap = (lambda x: softcap * torch.tanh(x / softcap)) if softcap else (lambda x: x)
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    wanted = expected(loss, cap(leaves[0] @ leaves[1].T), cap(states @ teacher[:common].T), targets, k)
    (3 * wanted).backward()
    metric_sums = torch.zeros(3, dtype=torch.float64)
    found = TeacherTargets(loss, metric_sums, states, OutputHead(teacher, SINGLE_DEVICE.tensor, softcap=softcap))
    found.vocabulary = common
    if k:
        cut = OutputHead(teacher[:common], SINGLE_DEVICE.tensor, softcap=softcap)
        found.top_ids_TK, found.top_log_p_TO = top_log_probabilities(states, cut, loss.temperature, k)
    for keep in (True, False):
        metric_sums.zero_()
        ours = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        head = OutputHead(ours[1], SINGLE_DEVICE.tensor, softcap=softcap, teacher=found)
        value = linear_cross_entropy(ours[0], targets, head, keep)
        (3 * value).backward()
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)
        for mine, theirs in zip(ours, leaves, strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-10, atol=1e-12)
        mixed = loss.mixing * metric_sums[0] + (1 - loss.mixing) * loss.temperature**2 * metric_sums[1]
        assert float(mixed) == pytest.approx(float(wanted), rel=1e-12)


def test_all_tokens_in_the_cache_give_the_loss_of_the_running_teacher():
    torch.manual_seed(4)
    loss = DistillationLoss("jsd", 2.0, 0.1, beta=0.7)
    hidden, weight, targets = draw(TOKENS, HIDDEN), draw(VOCABULARY, HIDDEN), torch.randint(0, VOCABULARY, (TOKENS,))
    states, teacher = draw(TOKENS, TEACHER), draw(VOCABULARY, TEACHER)
    cached = top_log_probabilities(states, OutputHead(teacher, SINGLE_DEVICE.tensor), loss.temperature, VOCABULARY)
    running = TeacherTargets(loss, torch.zeros(3), states, OutputHead(teacher, SINGLE_DEVICE.tensor))
    stored = TeacherTargets(loss, torch.zeros(3), top_ids_TK=cached[0], top_log_p_TO=cached[1])
    values = [
        linear_cross_entropy(hidden, targets, OutputHead(weight, SINGLE_DEVICE.tensor, teacher=each))
        for each in (running, stored)
    ]
    torch.testing.assert_close(values[0], values[1], rtol=1e-12, atol=0)


def test_cached_logits_of_a_teacher_are_computed_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(6)
    states, weight, chunks = draw(TOKENS, TEACHER), draw(VOCABULARY, TEACHER), list[int]()
    multiply = torch.Tensor.__matmul__
    monkeypatch.setattr("meshwright.training.teacher_targets.split_loss_chunks", lambda tokens, *_: [5, 5, 3])
    monkeypatch.setitem(teacher_targets._WIDE_LOGITS, "cpu", 2 * VOCABULARY)
    monkeypatch.setattr(
        torch.Tensor,
        "__matmul__",
        lambda a, b: chunks.append(len(a)) or multiply(a, b),  # type: ignore[func-returns-value]
    )
    ids, values = top_log_probabilities(states, OutputHead(weight, SINGLE_DEVICE.tensor, softcap=1.5), 0.7, 4)
    monkeypatch.undo()
    assert chunks == [5, 5, 3]
    p = torch.softmax(1.5 * torch.tanh(states @ weight.T / 1.5) / 0.7, dim=1)
    best = p.topk(4, dim=1)
    assert torch.equal(ids, best.indices)
    together = torch.cat([best.values, 1 - best.values.sum(dim=1, keepdim=True)], dim=1)
    torch.testing.assert_close(values.exp(), together, rtol=1e-12, atol=1e-14)


def test_small_rest_of_a_certain_student_is_exact_in_float32():
    """Its probability outside the teacher's tokens, e^-20, is far below float32's distance of 1 to its neighbour."""
    logits = torch.cat([torch.full((2,), 20.0), torch.zeros(4)]).double()
    top = torch.tensor([[0.4, 0.3, 0.3]], dtype=torch.float64).log()
    values = []
    for dtype in (torch.float64, torch.float32):
        weight = logits[:, None].to(dtype).requires_grad_()
        loss = DistillationLoss("forward_kl", 1.0, 0.0)
        cached = TeacherTargets(loss, torch.zeros(3), top_ids_TK=torch.tensor([[0, 1]]), top_log_p_TO=top)
        head = OutputHead(weight, SINGLE_DEVICE.tensor, teacher=cached)
        value = linear_cross_entropy(torch.ones(1, 1, dtype=dtype), torch.tensor([0]), head)
        value.backward()
        values.append((value.detach().double(), weight.grad.double()))
    q_rest = 4 / (2 * math.exp(20) + 4)
    definition = sum(p * math.log(p / q) for p, q in ((0.4, (1 - q_rest) / 2), (0.3, (1 - q_rest) / 2), (0.3, q_rest)))
    assert float(values[0][0]) == pytest.approx(definition, rel=1e-12)
    for exact, rounded in zip(*values, strict=True):
        torch.testing.assert_close(rounded, exact, rtol=1e-5, atol=1e-6)


def test_a_student_that_equals_its_teacher_has_no_divergence():
    torch.manual_seed(5)
    hidden, weight = draw(TOKENS, HIDDEN), draw(VOCABULARY, HIDDEN)
    targets = torch.randint(0, VOCABULARY, (TOKENS,))
    for loss in LOSSES:
        metric_sums = torch.zeros(3, dtype=torch.float64)
        teacher = TeacherTargets(loss, metric_sums, hidden, OutputHead(weight, SINGLE_DEVICE.tensor))
        linear_cross_entropy(hidden, targets, OutputHead(weight, SINGLE_DEVICE.tensor, teacher=teacher))
        assert abs(float(metric_sums[1])) < 1e-13 < math.log(2)
