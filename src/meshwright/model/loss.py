"""Cross-entropy of a linear head, chunk by chunk: the logits of all tokens never exist at once.

The gradient of a chunk's logits takes their place while they are there, so that the head's product is not repeated in
the backward pass. With tensor parallelism each rank holds a slice of the vocabulary (Shoeybi et al. 2019,
arXiv:1909.08053, section 3): maxima, sums and the target's logit are combined over the ranks.

Shapes: T tokens, C tokens of a chunk, H hidden, V vocabulary (of this rank).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from meshwright.comm import collectives
from meshwright.comm.mesh import Axes
from meshwright.model.chunks import loss_chunks
from meshwright.model.precision import at_least_float32

IGNORED = -100  # the target of a token that does not count
SLICE_LOGITS = 1 << 19  # logits that are worked on at once on a CPU, so that intermediate values stay in the caches


def linear_cross_entropy(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_T: torch.Tensor,
    axes: Axes,
    *,
    first_token: int = 0,
    widest: int | None = None,
    compiled: bool = False,
) -> torch.Tensor:
    """Sum over tokens of -log softmax(hidden weightᵀ)[target] (nats); targets of -100 do not count.

    The sum, and that of the weight's gradient over chunks, are formed in float32 at least. With tensor parallelism the
    rows of `weight_VH` are those of the tokens from `first_token` on; ranks may hold different numbers of them, at most
    `widest`. `compiled` fuses what is done to each logit with torch.compile.
    """
    head = _Head(weight_VH, first_token, axes, compiled, widest or len(weight_VH))
    return _LinearCrossEntropy.apply(hidden_TH, weight_VH, targets_T, head, torch.is_grad_enabled())


def token_losses(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_T: torch.Tensor,
    axes: Axes,
    *,
    first_token: int = 0,
    widest: int | None = None,
    compiled: bool = False,
) -> torch.Tensor:
    """Each token's loss (nats, float32 at least), 0 where the target is -100; without gradients."""
    with torch.no_grad():
        head = _Head(weight_VH, first_token, axes, compiled, widest or len(weight_VH))
        return torch.cat([chunk.losses_C for chunk in _chunks(hidden_TH, targets_T, head)])


class _Head(NamedTuple):
    """This rank's part of the head, and how to work with it."""

    weight_VH: torch.Tensor
    first_token: int
    axes: Axes
    compiled: bool
    widest: int


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        hidden_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        targets_T: torch.Tensor,
        head: _Head,
        differentiable: bool,  # needs_input_grad says nothing of torch.no_grad
    ) -> torch.Tensor:
        wants_hidden, wants_weight = (differentiable and needed for needed in context.needs_input_grad[:2])
        wide = at_least_float32(hidden_TH.dtype)
        total = torch.zeros((), dtype=wide, device=hidden_TH.device)
        d_hidden_TH = torch.empty_like(hidden_TH) if wants_hidden else None
        d_weight_VH: torch.Tensor | None = None
        for chunk in _chunks(hidden_TH, targets_T, head):
            total += chunk.losses_C.sum()
            if not (wants_hidden or wants_weight):
                continue
            d_logits_CV = chunk.differentiate()
            if d_hidden_TH is not None:
                torch.mm(d_logits_CV, weight_VH, out=d_hidden_TH[chunk.tokens])
            if wants_weight:
                product_VH = d_logits_CV.T @ hidden_TH[chunk.tokens]
                d_weight_VH = product_VH if d_weight_VH is None else d_weight_VH.to(wide).add_(product_VH)
        context.gradients = (d_hidden_TH, d_weight_VH)
        context.dtype = weight_VH.dtype
        return total

    @staticmethod
    def backward(context: Any, d_total: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_hidden_TH, d_weight_VH = context.gradients
        if d_hidden_TH is not None:
            # One over the step's targets is not rounded to the narrow type: all gradients below would be off by that.
            d_hidden_TH = (d_hidden_TH.to(d_total.dtype) * d_total).to(d_hidden_TH.dtype)
        if d_weight_VH is not None:
            d_weight_VH = torch.mul(d_weight_VH, d_total, out=torch.empty_like(d_weight_VH, dtype=context.dtype))
        return d_hidden_TH, d_weight_VH, None, None, None


class _Chunk:
    """Some tokens' logits, their losses, and (once asked for) the gradient in the logits' place."""

    def __init__(self, tokens: slice, logits_CV: torch.Tensor, targets_C: torch.Tensor, head: _Head) -> None:
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

        parts = [self._statistics(logits_CV[part]) for part in self._slices()]
        maximum_C, sum_C = (torch.cat(values) for values in zip(*parts, strict=True))
        target_C = logits_CV[self._targets].to(wide) * self._here_C
        collectives.all_reduce(target_C, head.axes.tp, "loss.target_logit")
        highest_C = maximum_C.clone()
        collectives.all_reduce(highest_C, head.axes.tp, "loss.maximum", op="max")
        sum_C = sum_C * (maximum_C - highest_C).exp()
        collectives.all_reduce(sum_C, head.axes.tp, "loss.sum")
        self._log_sum_C, self._target_C = highest_C + sum_C.log(), target_C
        self.losses_C = (self._log_sum_C - target_C) * self._counted_C

    def differentiate(self) -> torch.Tensor:
        """Turn the logits into the gradient of this chunk's summed loss, softmax - one-hot; they are gone then."""
        for part in self._slices():
            self._to_gradient_(self._logits_CV[part], self._log_sum_C[part], self._counted_C[part])
        at_target_C = ((self._target_C - self._log_sum_C).exp() - 1) * self._counted_C
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


@functools.cache
def _fused() -> tuple[Callable[..., Any], Callable[..., Any]]:
    return torch.compile(_statistics, dynamic=False), torch.compile(_to_gradient_, dynamic=False)


def _chunks(hidden_TH: torch.Tensor, targets_T: torch.Tensor, head: _Head) -> Iterator[_Chunk]:
    """Chunks of about equal size. They share one buffer of logits: each is gone when the next is asked for.

    All ranks of tp cut alike, though they hold different numbers of rows: they meet in every chunk.
    """
    chunks = loss_chunks(len(hidden_TH), head.widest, hidden_TH.device.type)
    buffer = hidden_TH.new_empty(max(chunks, default=0), len(head.weight_VH))
    start = 0
    for tokens in chunks:
        part = slice(start, start + tokens)
        logits_CV = torch.mm(hidden_TH[part], head.weight_VH.T, out=buffer[:tokens])
        yield _Chunk(part, logits_CV, targets_T[part], head)
        start += tokens
