"""Cross-entropy of a linear head, chunk by chunk: the logits of all tokens never exist at once.

The gradient of a chunk's logits takes their place while they are there, so that the head's product is not repeated in
the backward pass; where that is not to follow at once, or each token's loss has a gradient of its own that is known
only then, it makes the logits again, and nothing of a weight's size is kept until then. With tensor parallelism each
rank holds a slice of the vocabulary (Shoeybi et al. 2019, arXiv:1909.08053, section 3): maxima, sums and the target's
logit are combined over the ranks.

Shapes: T tokens, C tokens of a chunk, H hidden, V vocabulary (of this rank).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from meshwright.model.axis_operations import SINGLE_DEVICE, TensorOperations
from meshwright.model.precision import at_least_float32
from meshwright.spec.chunks import loss_chunks

IGNORED = -100  # the target of a token that does not count
SLICE_LOGITS = 1 << 19  # logits that are worked on at once on a CPU, so that intermediate values stay in the caches


def linear_cross_entropy(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_T: torch.Tensor,
    tensor: TensorOperations,
    *,
    first_token: int = 0,
    widest: int | None = None,
    compiled: bool = False,
    keep: bool = True,
    bias_V: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum over tokens of -log softmax(hidden weightᵀ + bias)[target] (nats); targets of -100 do not count.

    The sum, and that of the weight's gradient over chunks, are formed in float32 at least. With tensor parallelism the
    rows of `weight_VH` are those of the tokens from `first_token` on; ranks may hold different numbers of them, at most
    `widest`. `compiled` fuses what is done to each logit with torch.compile. `keep`: form the gradients now and keep
    them, one of the weight's size among them; without it the backward pass makes the logits a second time. Both give
    the same gradients, bit for bit, and meet other ranks in the forward pass alone.
    """
    head = _Head(weight_VH, bias_V, first_token, tensor, compiled, widest or len(weight_VH))
    return _LinearCrossEntropy.apply(hidden_TH, weight_VH, bias_V, targets_T, head, torch.is_grad_enabled(), keep)


def token_cross_entropy(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_T: torch.Tensor,
    tensor: TensorOperations,
    *,
    first_token: int = 0,
    widest: int | None = None,
    compiled: bool = False,
) -> torch.Tensor:
    """Each token's -log softmax(hidden weightᵀ)[target] (nats), [T], in float32 at least; 0 where the target is -100.

    As `linear_cross_entropy` without `keep`: the backward pass, in which every token has a gradient of its own, makes
    the logits a second time; kept until then are `hidden_TH` and two numbers a token.
    """
    head = _Head(weight_VH, None, first_token, tensor, compiled, widest or len(weight_VH))
    return _TokenCrossEntropy.apply(hidden_TH, weight_VH, targets_T, head, torch.is_grad_enabled())


class _Head(NamedTuple):
    """This rank's part of the head, and how to work with it."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None
    first_token: int
    tensor: TensorOperations
    compiled: bool
    widest: int


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        hidden_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_T: torch.Tensor,
        head: _Head,
        differentiable: bool,  # needs_input_grad says nothing of torch.no_grad
        keep: bool,
    ) -> torch.Tensor:
        wanted = tuple(differentiable and needed for needed in context.needs_input_grad[:3])
        total = torch.zeros((), dtype=at_least_float32(hidden_TH.dtype), device=hidden_TH.device)
        sums = _Gradients(hidden_TH, head, *wanted) if any(wanted) and keep else None
        known = []
        for chunk in _chunks(hidden_TH, targets_T, head):
            total += chunk.losses_C.sum()
            if sums is not None:
                sums.add(chunk)
            elif any(wanted):
                known.append(torch.stack([chunk.log_sum_C, chunk.target_C]))
        context.gradients = None if sums is None else sums.found()
        context.dtype = weight_VH.dtype
        if known:
            context.save_for_backward(hidden_TH, weight_VH, bias_V, targets_T, torch.cat(known, dim=1))
            context.head = head
        return total

    @staticmethod
    def backward(context: Any, d_total: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_hidden_TH, d_weight_VH, d_bias_V = _again(context) if context.gradients is None else context.gradients
        gradients = _times(d_total, d_hidden_TH, d_weight_VH, d_bias_V, context.dtype)
        return *gradients, None, None, None, None


class _TokenCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        hidden_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        targets_T: torch.Tensor,
        head: _Head,
        differentiable: bool,
    ) -> torch.Tensor:
        losses, known = [], []
        for chunk in _chunks(hidden_TH, targets_T, head):
            losses.append(chunk.losses_C)
            if differentiable:
                known.append(torch.stack([chunk.log_sum_C, chunk.target_C]))
        if known:
            context.save_for_backward(hidden_TH, weight_VH, None, targets_T, torch.cat(known, dim=1))
            context.head = head
        return torch.cat(losses)

    @staticmethod
    def backward(context: Any, d_losses_T: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Relative to the largest of them, so that a narrow type neither loses the small ones nor overflows.
        largest = d_losses_T.abs().amax().clamp(min=torch.finfo(d_losses_T.dtype).tiny)
        gradients = _times(largest, *_again(context, d_losses_T / largest), context.saved_tensors[1].dtype)
        return *gradients[:2], None, None, None


def _times(
    factor: torch.Tensor,
    d_hidden_TH: torch.Tensor | None,
    d_weight_VH: torch.Tensor | None,
    d_bias_V: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients times `factor`, those of weight and bias in `dtype`."""
    if d_hidden_TH is not None:
        # One over the step's targets is not rounded to the narrow type: all gradients below would be off by that.
        d_hidden_TH = (d_hidden_TH.to(factor.dtype) * factor).to(d_hidden_TH.dtype)
    if d_weight_VH is not None:
        d_weight_VH = torch.mul(d_weight_VH, factor, out=torch.empty_like(d_weight_VH, dtype=dtype))
    if d_bias_V is not None:
        d_bias_V = (d_bias_V * factor).to(dtype)
    return d_hidden_TH, d_weight_VH, d_bias_V


class _Gradients:
    """The gradients of the summed loss, chunk by chunk; None for one that is not wanted."""

    def __init__(self, hidden_TH: torch.Tensor, head: _Head, of_hidden: bool, of_weight: bool, of_bias: bool) -> None:
        self._inputs, self._of_weight = (hidden_TH, head.weight_VH), of_weight
        self.hidden_TH = torch.empty_like(hidden_TH) if of_hidden else None
        self.weight_VH: torch.Tensor | None = None
        wide = at_least_float32(hidden_TH.dtype)
        self.bias_V = torch.zeros_like(head.bias_V, dtype=wide) if of_bias and head.bias_V is not None else None

    def found(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Of hidden states, weight and bias."""
        return self.hidden_TH, self.weight_VH, self.bias_V

    def add(self, chunk: _Chunk, factors_T: torch.Tensor | None = None) -> None:
        hidden_TH, weight_VH = self._inputs
        d_logits_CV = chunk.differentiate(None if factors_T is None else factors_T[chunk.tokens])
        if self.hidden_TH is not None:
            torch.mm(d_logits_CV, weight_VH, out=self.hidden_TH[chunk.tokens])
        if self._of_weight:
            product_VH, sum_VH = d_logits_CV.T @ hidden_TH[chunk.tokens], self.weight_VH
            wide = at_least_float32(hidden_TH.dtype)
            self.weight_VH = product_VH if sum_VH is None else sum_VH.to(wide).add_(product_VH)
        if self.bias_V is not None:
            for part in chunk._slices():  # a sum in a wider type makes a copy on a CPU
                self.bias_V += d_logits_CV[part].sum(dim=0, dtype=self.bias_V.dtype)


def _again(
    context: Any, factors_T: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients from logits that are made a second time; `factors_T`: of the losses' weighted sum."""
    hidden_TH, weight_VH, bias_V, targets_T, known_2T = context.saved_tensors
    head = context.head._replace(weight_VH=weight_VH, bias_V=bias_V)
    sums = _Gradients(hidden_TH, head, *context.needs_input_grad[:3])
    for chunk in _chunks(hidden_TH, targets_T, head, known_2T):
        sums.add(chunk, factors_T)
    return sums.found()


class _Chunk:
    """Some tokens' logits, their losses, and (once asked for) the gradient in the logits' place. `known_2C`: what an
    earlier look at the same logits found, `log_sum_C` and `target_C`; the ranks of tp need not meet again."""

    def __init__(
        self,
        tokens: slice,
        logits_CV: torch.Tensor,
        targets_C: torch.Tensor,
        head: _Head,
        known_2C: torch.Tensor | None = None,
    ) -> None:
        self.tokens, self._logits_CV = tokens, logits_CV
        self._compiled = head.compiled
        functions: tuple[Callable[..., Any], ...] = _fused() if head.compiled else (_statistics, _to_gradient_)
        self._statistics, self._to_gradient_ = functions
        wide = at_least_float32(logits_CV.dtype)
        self._counted_C = (targets_C != IGNORED).to(wide)
        places_C = targets_C.clamp(min=0) - head.first_token
        self._here_C = (places_C >= 0) & (places_C < logits_CV.shape[1])
        # Indexed, not gathered and scattered: those touch the whole chunk on a CPU.
        self._targets = (torch.arange(len(places_C), device=places_C.device), torch.where(self._here_C, places_C, 0))

        self.log_sum_C, self.target_C = self._found(head.tensor) if known_2C is None else (known_2C[0], known_2C[1])
        self.losses_C = (self.log_sum_C - self.target_C) * self._counted_C

    def _found(self, tensor: TensorOperations) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token's log of the sum of exponentials, and its target's logit, over the whole vocabulary."""
        logits_CV = self._logits_CV
        parts = [self._statistics(logits_CV[part]) for part in self._slices()]
        maximum_C, sum_C = (torch.cat(values) for values in zip(*parts, strict=True))
        target_C = logits_CV[self._targets].to(self._counted_C.dtype) * self._here_C
        tensor.all_reduce(target_C, "loss.target_logit")
        highest_C = maximum_C.clone()
        tensor.all_reduce(highest_C, "loss.maximum", op="max")
        sum_C = sum_C * (maximum_C - highest_C).exp()
        tensor.all_reduce(sum_C, "loss.sum")
        return highest_C + sum_C.log(), target_C

    def differentiate(self, factors_C: torch.Tensor | None = None) -> torch.Tensor:
        """Turn the logits into the gradient of this chunk's summed loss, softmax - one-hot (of each token times its
        factor, if they are given); they are gone then."""
        counted_C = self._counted_C if factors_C is None else self._counted_C * factors_C
        for part in self._slices():
            self._to_gradient_(self._logits_CV[part], self.log_sum_C[part], counted_C[part])
        at_target_C = ((self.target_C - self.log_sum_C).exp() - 1) * counted_C
        elsewhere_C = self._logits_CV[self._targets]
        self._logits_CV[self._targets] = torch.where(self._here_C, at_target_C.to(elsewhere_C.dtype), elsewhere_C)
        return self._logits_CV

    def _slices(self) -> Iterator[slice]:
        """Tokens that are worked on together: few enough for the caches of a CPU, all where the work is fused."""
        tokens, vocabulary = self._logits_CV.shape
        fused = self._compiled or self._logits_CV.device.type != "cpu"
        at_once = tokens if fused else max(1, SLICE_LOGITS // vocabulary)
        for start in range(0, tokens, at_once):
            yield slice(start, min(tokens, start + at_once))


def _statistics(logits_CV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's highest logit, and the sum of exponentials relative to it."""
    wide = at_least_float32(logits_CV.dtype)
    maximum_C = logits_CV.amax(dim=1).to(wide)
    return maximum_C, (logits_CV.to(wide) - maximum_C[:, None]).exp().sum(dim=1)


def _to_gradient_(logits_CV: torch.Tensor, log_sum_C: torch.Tensor, counted_C: torch.Tensor) -> None:
    """Write counted * softmax over the logits."""
    logits_CV.copy_((logits_CV.to(log_sum_C.dtype) - log_sum_C[:, None]).exp() * counted_C[:, None])


def loss_chunk_from_logits(logits_CV: torch.Tensor, targets_C: torch.Tensor) -> _Chunk:
    """Loss chunk for given logits [C, V] and targets [C], without the head matmul; used by the probe."""
    vocabulary = logits_CV.shape[1]
    head = _Head(logits_CV.new_empty(vocabulary, 0), None, 0, SINGLE_DEVICE.tensor, compiled=False, widest=vocabulary)
    return _Chunk(slice(0, len(logits_CV)), logits_CV, targets_C, head)


@functools.cache
def _fused() -> tuple[Callable[..., Any], Callable[..., Any]]:
    return torch.compile(_statistics, dynamic=False), torch.compile(_to_gradient_, dynamic=False)


def _chunks(
    hidden_TH: torch.Tensor, targets_T: torch.Tensor, head: _Head, known_2T: torch.Tensor | None = None
) -> Iterator[_Chunk]:
    """Chunks of about equal size. They share one buffer of logits: each is gone when the next is asked for.

    All ranks of tp cut alike, though they hold different numbers of rows: they meet in every chunk.
    """
    chunks = loss_chunks(len(hidden_TH), head.widest, hidden_TH.device.type)
    buffer = hidden_TH.new_empty(max(chunks, default=0), len(head.weight_VH))
    start = 0
    for tokens in chunks:
        part = slice(start, start + tokens)
        logits_CV = torch.mm(hidden_TH[part], head.weight_VH.T, out=buffer[:tokens])
        if head.bias_V is not None:
            logits_CV += head.bias_V
        yield _Chunk(part, logits_CV, targets_T[part], head, None if known_2T is None else known_2T[:, part])
        start += tokens
