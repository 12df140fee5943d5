"""Preference losses against the papers' formulas and transformers' Llama."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshwright.model import loss as losses
from meshwright.model.axis_operations import SINGLE_DEVICE
from meshwright.model.documents import Documents
from meshwright.model.initialise import initial_value
from meshwright.model.loss import OutputHead, linear_cross_entropy, token_cross_entropy
from meshwright.model.pairs import Pairs
from meshwright.model.transformer import Transformer
from meshwright.spec import chunks
from meshwright.spec.config_json import config_to_huggingface
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from meshwright.training.preference_loss import Preference
from meshwright.verification.compare import compute_relative_errors
from meshwright.verification.problem import scale_down_config
from tests.model.transformers_names import entry_in_transformers

TENSOR = SINGLE_DEVICE.tensor
TOKENS, HIDDEN, VOCABULARY = 50, 12, 31


@pytest.fixture(params=[1 << 23, 16 * VOCABULARY, VOCABULARY], ids=["one chunk", "four chunks", "a token a chunk"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setattr(losses, "SLICE_LOGITS", 5 * VOCABULARY)
    monkeypatch.setitem(chunks.CHUNK_LOGITS, "cpu", request.param)


def problem(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=dtype, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=dtype, generator=generator).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    targets[3:9] = -100
    upstream = torch.randn(TOKENS, dtype=torch.float64, generator=generator) * torch.logspace(-12, 3, TOKENS)
    return hidden, weight, targets, upstream


# --- the loss of each token


def test_token_losses_and_their_gradients_equal_cross_entropy(chunk: None):
    hidden, weight, targets, upstream = problem()
    ours = token_cross_entropy(hidden, targets, OutputHead(weight, TENSOR))
    want = F.cross_entropy(hidden @ weight.T, targets, reduction="none")
    torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-12)
    both = [torch.autograd.grad(x @ upstream, (hidden, weight)) for x in (ours, want)]
    for mine, theirs in zip(*both, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13 * float(theirs.abs().max()))
    (alone,) = torch.autograd.grad(
        token_cross_entropy(hidden, targets, OutputHead(weight.detach(), TENSOR)) @ upstream, (hidden,)
    )
    assert torch.equal(alone, both[0][0])


def test_sum_of_token_losses_equals_summed_loss_bitwise():
    hidden, weight, targets, _ = problem()
    both = (
        token_cross_entropy(hidden, targets, OutputHead(weight, TENSOR)).sum(),
        linear_cross_entropy(hidden, targets, OutputHead(weight, TENSOR)),
    )
    assert torch.equal(*both)
    for mine, theirs in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in both), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tiny_and_huge_token_loss_gradients_survive_narrow_dtype(dtype: torch.dtype, chunk: None):
    hidden, weight, targets, upstream = problem(dtype)
    wide = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    for scale in (1e-6, 1e4):
        found = token_cross_entropy(hidden, targets, OutputHead(weight, TENSOR))
        assert found.dtype == torch.float32
        flat = scale * upstream.sign()
        (mine,) = torch.autograd.grad(found @ flat.float(), (hidden,))
        exact = F.cross_entropy(wide[0] @ wide[1].T, targets, reduction="none")
        (theirs,) = torch.autograd.grad(exact @ flat, (wide[0],))
        assert (mine.double() - theirs).norm() < 0.02 * theirs.norm()


def test_logits_of_all_token_losses_are_never_in_memory_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chunks, "MIN_CHUNK_TOKENS", 1)
    monkeypatch.setitem(chunks.CHUNK_LOGITS, "cpu", 8 * VOCABULARY)
    hidden, weight, targets, upstream = problem()
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = operator(*arguments, **(options or {}))
            if isinstance(result, torch.Tensor) and result.shape[1:] == (VOCABULARY,) and len(result) != HIDDEN:
                largest = max(largest, result.numel())
            return result

    with Watch():
        (token_cross_entropy(hidden, targets, OutputHead(weight, TENSOR)) @ upstream).backward()
    assert 0 < largest <= 8 * VOCABULARY


# --- the losses of pairs

IDS = torch.tensor([[0] * 4 + [1] * 3 + [2] * 2 + [3] * 3, [0] * 5 + [1] * 5 + [2] * 2, [0] * 12])


def test_pairs_follow_document_ids_and_exclude_padding():
    pairs = Pairs.from_ids(IDS)
    assert pairs.counted_BP.tolist() == [[True, True], [True, False], [False, False]]
    assert pairs.response_BC[0].tolist() == IDS[0].tolist()
    assert pairs.response_BC[1].tolist() == [0] * 5 + [1] * 5 + [4] * 2 and set(pairs.response_BC[2].tolist()) == {4}
    assert int(pairs.count) == 3 and pairs.reference_BD.shape == (3, 4)
    assert Pairs.from_ids(IDS, max_pairs=3).response_BC[2].tolist() == [6] * 12
    assert Pairs.from_ids(IDS[2:]).counted_BP.tolist() == [[False]], (
        "a batch of padding has room for a pair, and no pair"
    )


@pytest.mark.parametrize(
    "preference",
    [
        Preference(),
        Preference("dpo", 0.7, 0.2),
        Preference("ipo", 0.3),
        Preference("simpo", 2.0, margin=0.6),
        Preference("orpo", 0.2),
    ],
    ids=["dpo", "conservative dpo", "ipo", "simpo", "orpo"],
)
def test_losses_and_rewards_match_the_papers(preference: Preference):
    generator = torch.Generator().manual_seed(1)
    pairs = Pairs.from_ids(IDS)
    reference = -10 * torch.rand(3, 4, dtype=torch.float64, generator=generator)
    values = -10 * torch.rand(3, 4, dtype=torch.float64, generator=generator)
    lengths = torch.tensor([[3.0, 5.0, 1.0, 2.0], [4.0, 9.0, 0.0, 0.0], [0.0] * 4], dtype=torch.float64)
    values[~pairs.counted_BP.repeat_interleave(2, dim=1)] = reference[~pairs.counted_BP.repeat_interleave(2, 1)] = 0.0
    found = preference(values, replace(pairs, reference_BD=reference, lengths_BD=lengths))
    total, rewards, right, beta, smoothing = 0.0, [0.0, 0.0], 0, preference.beta, preference.label_smoothing
    for row, pair in ((0, 0), (0, 1), (1, 0)):
        places = (2 * pair, 2 * pair + 1)
        if preference.objective in ("simpo", "orpo"):
            chosen, rejected = (float(values[row, place] / lengths[row, place]) for place in places)
        else:
            chosen, rejected = (float(values[row, place] - reference[row, place]) for place in places)
        sigmoid = 1 / (1 + math.exp(-beta * (chosen - rejected)))
        if preference.objective == "ipo":
            total += (chosen - rejected - 1 / (2 * beta)) ** 2
        elif preference.objective == "simpo":
            total += -math.log(1 / (1 + math.exp(-(beta * (chosen - rejected) - preference.margin))))
        elif preference.objective == "orpo":
            odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in (chosen, rejected)]
            total += -chosen - beta * math.log(odds[0] / (odds[0] + odds[1]))
        else:
            total += -(1 - smoothing) * math.log(sigmoid) - smoothing * math.log(1 - sigmoid)
        rewards = [rewards[0] + beta * chosen, rewards[1] + beta * rejected]
        right += chosen > rejected
    assert float(found.loss) == pytest.approx(total, rel=1e-12)
    assert found.metric_sums.tolist() == pytest.approx([*rewards, right, 3, 3], rel=1e-12)


def test_kto_matches_the_paper():
    """Eq. 8 of arXiv:2402.01306, a response at a time; three documents, four, and padding alone."""
    generator = torch.Generator().manual_seed(2)
    reference, values = (-10 * torch.rand(3, 5, dtype=torch.float64, generator=generator) for _ in range(2))
    lengths = torch.tensor([[3.0, 5, 1, 0, 0], [4, 9, 2, 1, 0], [0] * 5], dtype=torch.float64)
    undesirable = torch.tensor([[1, 0, 0, 1, 1], [0, 1, 1, 0, 0], [1, 0, 0, 1, 0]]).bool()
    pairs = Pairs.from_ids(torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 0, 0]]), max_pairs=5, responses=1)
    pairs = replace(pairs, counted_BP=lengths > 0, reference_BD=reference, undesirable_BD=undesirable)
    for kl, weights in ((0.0, (1.0, 1.0)), (0.7, (1.5, 0.4))):
        values.requires_grad_().grad = None
        judged = replace(pairs, kl_B=torch.full((3,), kl, dtype=torch.float64))
        found = Preference("kto", 0.3, weights=weights)(values, judged)
        found.loss.backward()
        loss, rewards, right, counts = 0.0, [0.0, 0.0], 0, [0, 0]
        for row, place in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)):
            score, bad = float(values[row, place].detach() - reference[row, place]), bool(undesirable[row, place])
            value = 1 / (1 + math.exp(-0.3 * (kl - score if bad else score - kl)))
            loss += weights[bad] * (1 - value)
            rewards[bad] += 0.3 * score
            right += score < kl if bad else score > kl
            counts[bad] += 1
            slope = weights[bad] * 0.3 * value * (1 - value) * (1 if bad else -1)
            assert float(values.grad[row, place]) == pytest.approx(slope, rel=1e-12)
        assert float(found.loss.detach()) == pytest.approx(loss, rel=1e-12)
        assert found.metric_sums.tolist() == pytest.approx([*rewards, right, *counts], rel=1e-12)
        assert not values.grad[lengths == 0].any()


def test_orpo_of_a_certain_response_is_finite():
    pairs = Pairs.from_ids(IDS)
    for row in ([0.0, -1.0], [0.0, 0.0], [-1.0, 0.0]):
        values = torch.tensor([row * 2] * 3, dtype=torch.float64, requires_grad=True)
        loss = Preference("orpo", 0.1)(values, replace(pairs, lengths_BD=torch.ones(3, 4, dtype=torch.float64))).loss
        loss.backward()
        assert loss.isfinite() and values.grad is not None and values.grad.isfinite().all()


def test_loss_and_every_gradient_match_transformers(wide: Callable[[], Any]):
    """The formula in float64 on transformers' Llama, one response at a time, against our packed sequences."""
    import transformers

    config = scale_down_config(preset("llama-3-8b"))
    table, beta = parameter_table(config), 0.4
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(config.vocabulary, (3, 13), generator=generator)
    targets = torch.where(torch.rand(3, 12, generator=generator) < 0.3, -100, tokens[:, 1:])
    ends = torch.cat([IDS[:, 1:] != IDS[:, :-1], torch.zeros(3, 1, dtype=torch.bool)], dim=1)
    targets[ends] = -100
    reference = -40 * torch.rand(3, 4, dtype=torch.float64, generator=generator)

    ours = Transformer(config, dtype=torch.float64)
    for tensor in table.tensors:
        entries = [initial_value(entry, 5).view(entry.model_shape) for entry in tensor.entries]
        ours.get_parameter(tensor.name).data.copy_(torch.cat(entries))
    pairs = replace(Pairs.from_ids(IDS), reference_BD=reference)
    values = ours(tokens[:, :-1], targets, replace(Documents.from_ids(IDS), pairs=pairs))
    loss = Preference("dpo", beta)(values, pairs).loss / 3
    loss.backward()

    with wide():
        huggingface = transformers.AutoConfig.for_model(**dict(config_to_huggingface(config)))
        model = transformers.AutoModelForCausalLM.from_config(huggingface, attn_implementation="eager").double()
    parameters = {name: values.detach().fill_(math.nan) for name, values in model.named_parameters()}
    for entry in table.entries:
        entry_in_transformers(parameters, entry.name).copy_(initial_value(entry, 5))
    total = torch.zeros((), dtype=torch.float64)
    with wide():
        for row, pair in ((0, 0), (0, 1), (1, 0)):
            ratios = []
            for number in (2 * pair, 2 * pair + 1):
                here = IDS[row] == number
                scores = model(tokens[row, :-1][here][None]).logits[0].log_softmax(dim=1)
                goals = targets[row][here]
                counted = goals != -100
                ratios.append(scores[counted].gather(1, goals[counted, None]).sum() - reference[row, number])
            total = total - torch.log(torch.sigmoid(beta * (ratios[0] - ratios[1])))
        (total / 3).backward()
    assert loss.item() == pytest.approx(total.item() / 3, rel=1e-12)
    theirs, mine = {}, {}
    gradients = {name: values.grad for name, values in model.named_parameters()}
    for tensor in table.tensors:
        for entry in tensor.entries:
            gradient = entry_in_transformers(gradients, entry.name)
            theirs[entry.name] = (gradient.T if entry.transposed else gradient).reshape(-1)
            mine[entry.name] = ours.get_parameter(tensor.name).grad[entry.offset :][: entry.model_shape[0]].reshape(-1)
    assert max(compute_relative_errors(mine, theirs).values()) < 1e-10
