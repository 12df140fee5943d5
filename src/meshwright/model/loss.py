"""Chunked cross-entropy of the output head: the logits of all tokens are never in memory together.

The gradient of a chunk's logits overwrites them in the forward pass, so that the head's product is not recomputed;
where backward does not follow immediately, or each token's loss has its own gradient, backward recomputes the logits.
With tensor parallelism each rank holds a vocabulary slice (Shoeybi et al. 2019, arXiv:1909.08053, section 3): maxima,
sums and the target's logit are all-reduced.

Shapes: T tokens, C tokens of a chunk, H hidden, V vocabulary (of this rank).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from meshwright.model.axis_operations import TensorOperations
from meshwright.model.precision import adds_in_float32, at_least_float32
from meshwright.spec.chunks import split_loss_chunks
from meshwright.spec.policy import SLICE_LOGITS

IGNORED = -100  # target of ignored tokens


def linear_cross_entropy(hidden_TH: Tensor, targets_T: Tensor, head: OutputHead, keep: bool = True) -> Tensor:
    """Return the cross-entropy loss summed over T tokens: -log softmax(hidden weightᵀ + bias)[target] (nats, scalar,
    float32 or float64).

    `hidden_TH`: input of the output head; `targets_T`: target token IDs; -100 for tokens that do not count; `head`:
    weight and bias of the output head.

    `keep`: True: compute the gradients in the forward pass and save them, which takes memory of the weight's size;
    False: backward recomputes the logits. Both values give bitwise equal gradients. In both cases, tensor parallelism
    communicates only in the forward pass.
    """
    gradients: Literal["save", "recompute"] = "save" if keep else "recompute"
    mode = _Mode(gradients if torch.is_grad_enabled() else "none", of_tokens=False)
    return _CrossEntropy.apply(hidden_TH, head.weight_VH, head.bias_V, targets_T, head, mode)


def token_cross_entropy(hidden_TH: Tensor, targets_T: Tensor, head: OutputHead) -> Tensor:
    """Return each token's cross-entropy -log softmax(hidden weightᵀ + bias)[target] (nats), [T], float32 or float64.

    `hidden_TH`: input of the output head for T tokens; `targets_T`: target token IDs; -100 for tokens that get a loss
    of 0; `head`: weight and bias of the output head.

    Backward recomputes the logits from `hidden_TH` and two saved numbers per token."""
    mode = _Mode("recompute" if torch.is_grad_enabled() else "none", of_tokens=True)
    return _CrossEntropy.apply(hidden_TH, head.weight_VH, head.bias_V, targets_T, head, mode)


class OutputHead(NamedTuple):
    """Output head of a model for the loss functions: weight, bias and settings; with tensor parallelism, of this rank's
    vocabulary slice.

    `weight_VH`, `bias_V`: weight and bias of the V token IDs that start at `first_token`. `tensor`: communication over
    tp. `widest`: largest V of any tp rank (default: this rank's V). `compile_backend`: torch.compile backend that fuses
    the elementwise operations of the loss; None: these operations run eagerly. `softcap`: cap c that turns logits x
    into c tanh(x / c) (Gemma 2); 0: none. `teacher`: for distillation, the teacher's targets
    (`training.teacher_targets.TeacherTargets`), whose method `make_chunk` builds the chunks of the loss; None: the loss
    is the cross-entropy."""

    weight_VH: Tensor
    tensor: TensorOperations
    bias_V: Tensor | None = None
    first_token: int = 0
    widest: int | None = None
    compile_backend: Any = None
    softcap: float = 0.0
    teacher: Any = None


class _Mode(NamedTuple):
    """Options of a cross-entropy computation.

    gradients: "save": forward computes the gradients and saves them; "recompute": backward recomputes the logits;
    "none": there will be no backward. of_tokens: True: return the loss of each token, [T]; False: return their sum.
    """

    gradients: Literal["none", "save", "recompute"]
    of_tokens: bool


class _CrossEntropy(torch.autograd.Function):
    """Autograd function of the output head's cross-entropy, computed over chunks of tokens; for `linear_cross_entropy`
    (sum over tokens) and `token_cross_entropy` (loss of each token)."""

    @staticmethod
    def forward(
        context: Any, hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, targets_T: Tensor,
        head: OutputHead, mode: _Mode,
    ) -> Tensor:  # fmt: skip
        """Return the cross-entropy (nats): the sum over tokens, a scalar, or with `mode.of_tokens` the loss of each
        token, [T].

        `hidden_TH`: input of the output head; `weight_VH`, `bias_V`: weight and bias of `head`, passed as separate
        inputs so that autograd sees them; `targets_T`: token IDs, -100 for ignored tokens; `head`: vocabulary slice and
        communication; `mode`: sum or token losses, and how backward gets the gradients."""
        wanted = tuple(mode.gradients != "none" and needed for needed in context.needs_input_grad[:3])
        total = torch.zeros((), dtype=at_least_float32(hidden_TH.dtype), device=hidden_TH.device)
        sums = _Gradients(hidden_TH, head, *wanted) if any(wanted) and mode.gradients == "save" else None
        losses = []
        known = []
        for chunk in _iterate_logit_chunks(hidden_TH, targets_T, head):
            if mode.of_tokens:
                losses.append(chunk.losses_C)
            else:
                total += chunk.losses_C.sum()
            if sums is not None:
                sums.add(chunk)
            elif any(wanted):
                known.append(torch.stack(chunk.known))
        context.dtype, context.head = weight_VH.dtype, head if known else None  # None: the gradients are known
        # As saved tensors, autograd frees gradients right after this backward, and not after that of all layers.
        if known:
            context.save_for_backward(hidden_TH, weight_VH, bias_V, targets_T, torch.cat(known, dim=1))
        elif sums is not None:
            context.save_for_backward(*sums.collect())
        return torch.cat(losses) if mode.of_tokens else total

    @staticmethod
    def backward(context: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias; None for the other inputs. `d_loss`: gradient of the
        loss: scalar, or [T] for the loss of each token."""
        factor = d_loss
        factors_T = None
        if d_loss.ndim:
            # Relative to the largest one, so that a 16-bit type neither underflows nor overflows.
            factor = d_loss.abs().amax().clamp(min=torch.finfo(d_loss.dtype).tiny)
            factors_T = d_loss / factor
        found = context.saved_tensors if context.head is None else _recompute_gradients(context, factors_T)
        d_hidden_TH, d_weight_VH, d_bias_V = found
        if d_hidden_TH is not None:
            # The factor (1 / targets of the step) stays in its wide type: rounding it would scale all gradients.
            d_hidden_TH = d_hidden_TH.to(factor.dtype, copy=True).mul_(factor).to(d_hidden_TH.dtype)
        if d_weight_VH is not None:
            d_weight_VH = torch.mul(d_weight_VH, factor, out=torch.empty_like(d_weight_VH, dtype=context.dtype))
        if d_bias_V is not None:
            d_bias_V = (d_bias_V * factor).to(context.dtype)
        return d_hidden_TH, d_weight_VH, d_bias_V, None, None, None


class _Gradients:
    """Accumulator of the gradients of the loss with respect to hidden states, head weight and head bias, over chunks of
    tokens. `hidden_TH`: hidden states of all T tokens; `head`: weight and bias of the output head. `of_hidden`,
    `of_weight`, `of_bias`: True to compute the gradient of this tensor; False: its gradient stays None."""

    def __init__(self, hidden_TH: Tensor, head: OutputHead, of_hidden: bool, of_weight: bool, of_bias: bool) -> None:
        self._inputs = hidden_TH, head.weight_VH
        self._of_weight = of_weight
        self.hidden_TH = torch.empty_like(hidden_TH) if of_hidden else None
        self.weight_VH: Tensor | None = None
        self._wide = at_least_float32(hidden_TH.dtype)
        self.bias_V = torch.zeros_like(head.bias_V, dtype=self._wide) if of_bias and head.bias_V is not None else None

    def collect(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the accumulated gradients of hidden states, weight and bias; None where not required."""
        return self.hidden_TH, self.weight_VH, self.bias_V

    def add(self, chunk: Chunk, factors_T: Tensor | None = None) -> None:
        """Add the gradients of one chunk of tokens; its logits are overwritten. `factors_T`: factors on the losses of
        all T tokens; None: 1."""
        hidden_TH, weight_VH = self._inputs
        d_logits_CV = chunk.differentiate(None if factors_T is None else factors_T[chunk.tokens])
        if self.hidden_TH is not None:
            torch.mm(d_logits_CV, weight_VH, out=self.hidden_TH[chunk.tokens])
        if self._of_weight:
            self._add_weight_gradient(d_logits_CV.T, hidden_TH[chunk.tokens])
        if self.bias_V is not None:
            for part in chunk._token_slices():  # a sum in a wider type makes a copy on a CPU
                self.bias_V += d_logits_CV[part].sum(dim=0, dtype=self.bias_V.dtype)

    def _add_weight_gradient(self, d_logits_VC: Tensor, x_CH: Tensor) -> None:
        """Add the weight gradient of a chunk of tokens, the product of the logits' gradients and the hidden states. The
        sum over several chunks is at least float32; on CUDA the products add to it without rounding."""
        total = self.weight_VH
        if adds_in_float32(x_CH) and len(x_CH) < len(self._inputs[0]):
            beta = 0 if total is None else 1
            if total is None:
                total = self.weight_VH = torch.empty_like(self._inputs[1], dtype=self._wide)
            torch.addmm(total, d_logits_VC, x_CH, beta=beta, out=total, out_dtype=self._wide)
        else:
            product = d_logits_VC @ x_CH
            self.weight_VH = product if total is None else total.to(self._wide).add_(product)


def _recompute_gradients(
    context: Any, factors_T: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Recompute the logits and return the gradients of hidden states, weight and bias (None where not required).

    `context`: autograd context with the tensors that forward saved; `factors_T`: a factor on the loss of each token;
    None: 1."""
    hidden_TH, weight_VH, bias_V, targets_T, known_2T = context.saved_tensors
    head = context.head._replace(weight_VH=weight_VH, bias_V=bias_V)
    sums = _Gradients(hidden_TH, head, *context.needs_input_grad[:3])
    for chunk in _iterate_logit_chunks(hidden_TH, targets_T, head, known_2T):
        sums.add(chunk, factors_T)
    return sums.collect()


class Chunk:
    """Logits and losses (nats) of one chunk of C tokens, from which `differentiate` computes the logits' gradients.

    `tokens`: slice that selects the chunk from all T tokens; `logits_CV`: logits of this rank's V token IDs, later
    overwritten; `targets_C`: target token IDs, -100 for ignored tokens; `head`: vocabulary slice and communication.
    `known_2C`: [2, C], log-sum-exp and target logit of each token from the forward pass; None: the constructor computes
    them, with all-reduces over tp.
    """

    def __init__(
        self, tokens: slice, logits_CV: Tensor, targets_C: Tensor, head: OutputHead, known_2C: Tensor | None = None
    ) -> None:
        self.tokens = tokens
        self._logits_CV = logits_CV
        self._softcap = head.softcap
        self._compiled = head.compile_backend is not None
        self._statistics, self._to_gradient_ = _get_elementwise_functions(head.compile_backend)
        wide = at_least_float32(logits_CV.dtype)
        self._counted_C = (targets_C != IGNORED).to(wide)
        indices_C = targets_C.clamp(min=0) - head.first_token
        self._here_C = (indices_C >= 0) & (indices_C < logits_CV.shape[1])
        # Indexing, because gather and scatter touch the whole chunk on a CPU.
        tokens_C = torch.arange(len(indices_C), device=indices_C.device)
        self._targets = tokens_C, torch.where(self._here_C, indices_C, 0)

        self.known = list(self._reduce_softmax_statistics(head.tensor) if known_2C is None else known_2C)
        self.log_sum_C, self.target_C = self.known
        self.losses_C = (self.log_sum_C - self.target_C) * self._counted_C

    def _reduce_softmax_statistics(self, tensor: TensorOperations) -> tuple[Tensor, Tensor]:
        """Return each token's log-sum-exp over the whole vocabulary and the logit of its target, [C] each. `tensor`:
        communication by which both are all-reduced over tp."""
        logits_CV = self._logits_CV
        parts = [self._statistics(logits_CV[part]) for part in self._token_slices()]
        maximum_C, sum_C = (torch.cat(values) for values in zip(*parts, strict=True))
        target_C = logits_CV[self._targets].to(self._counted_C.dtype) * self._here_C
        tensor.all_reduce(target_C, "loss.target_logit")
        highest_C = maximum_C.clone()
        tensor.all_reduce(highest_C, "loss.maximum", op="max")
        sum_C = sum_C * (maximum_C - highest_C).exp()
        tensor.all_reduce(sum_C, "loss.sum")
        return highest_C + sum_C.log(), target_C

    def differentiate(self, factors_C: Tensor | None = None) -> Tensor:
        """Overwrite the chunk's logits with their gradients, (softmax - one-hot) times the factor on the token's loss,
        and return them, [C, V]. `factors_C`: factor on each token's loss; None: 1. Ignored tokens get 0."""
        counted_C = self._counted_C if factors_C is None else self._counted_C * factors_C
        for part in self._token_slices():
            self._to_gradient_(self._logits_CV[part], self.log_sum_C[part], counted_C[part], self._softcap)
        at_target_C = ((self.target_C - self.log_sum_C).exp() - 1) * counted_C
        if self._softcap:
            at_target_C *= 1 - (self.target_C / self._softcap).square()
        elsewhere_C = self._logits_CV[self._targets]
        self._logits_CV[self._targets] = torch.where(self._here_C, at_target_C.to(elsewhere_C.dtype), elsewhere_C)
        return self._logits_CV

    def _token_slices(self) -> Iterator[slice]:
        """Yield slices of the chunk's tokens for elementwise operations. On a CPU the logits of a slice fit in the
        caches; on other devices, and with compiled (fused) kernels, one slice holds all tokens."""
        tokens, vocabulary = self._logits_CV.shape
        fused = self._compiled or self._logits_CV.device.type != "cpu"
        at_once = tokens if fused else max(1, SLICE_LOGITS // vocabulary)
        for start in range(0, tokens, at_once):
            yield slice(start, min(tokens, start + at_once))


def _statistics(logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum of each token's logits, and the sum of exp(logit - maximum), over this rank's vocabulary, [C]
    each. `logits_CV`: logits of C tokens."""
    wide = at_least_float32(logits_CV.dtype)
    maximum_C = logits_CV.amax(dim=1).to(wide)
    return maximum_C, (logits_CV.to(wide) - maximum_C[:, None]).exp().sum(dim=1)


def _to_gradient_(logits_CV: Tensor, log_sum_C: Tensor, counted_C: Tensor, softcap: float) -> None:
    """Overwrite the logits of C tokens, `logits_CV`, with the softmax term of their gradient: softmax(logits) times
    `counted_C` times the derivative of the softcap. `log_sum_C`: log-sum-exp of each token's logits; `counted_C`:
    factor on each token's loss, 0 for ignored tokens; `softcap`: cap of the logits; 0: none.
    """
    slope_CV = 1 - (logits_CV.to(log_sum_C.dtype) / softcap).square() if softcap else None
    logits_CV.copy_((logits_CV.to(log_sum_C.dtype) - log_sum_C[:, None]).exp() * counted_C[:, None])
    if slope_CV is not None:
        logits_CV.mul_(slope_CV)


@functools.cache
def _get_elementwise_functions(backend: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions (`_statistics`, `_to_gradient_`), compiled with the torch.compile backend `backend` (None:
    not compiled)."""
    if backend is None:
        return _statistics, _to_gradient_
    options = {"dynamic": False, "backend": backend}
    return torch.compile(_statistics, **options), torch.compile(_to_gradient_, **options)


def cap_logits_(logits: Tensor, softcap: float) -> Tensor:
    """Replace logits x (any shape) by c tanh(x / c), c = `softcap`, in place, and return them (Gemma 2:
    arXiv:2408.00118, section 2)."""
    return logits.div_(softcap).tanh_().mul_(softcap)


def _iterate_logit_chunks(
    hidden_TH: Tensor, targets_T: Tensor, head: OutputHead, known_2T: Tensor | None = None
) -> Iterator[Chunk]:
    """Compute the logits of the output head for the hidden states `hidden_TH`, one chunk of tokens after the other;
    yield each `Chunk`.

    All chunks share one logit buffer, so a chunk must be used before the next one is requested. Chunks have nearly
    equal numbers of tokens. All tp ranks cut the tokens into the same chunks, because they communicate in every chunk.
    `targets_T`: target token IDs. `known_2T`: log-sum-exp and target logit of each token from the forward pass; None:
    each chunk computes them.
    """
    chunks = split_loss_chunks(len(hidden_TH), head.widest or len(head.weight_VH), hidden_TH.device.type)
    buffer = hidden_TH.new_empty(max(chunks, default=0), len(head.weight_VH))
    start = 0
    for tokens in chunks:
        part = slice(start, start + tokens)
        logits_CV = torch.mm(hidden_TH[part], head.weight_VH.T, out=buffer[:tokens])
        if head.bias_V is not None:
            logits_CV += head.bias_V
        if head.softcap:
            cap_logits_(logits_CV, head.softcap)
        known_2C = None if known_2T is None else known_2T[:, part]
        make_chunk = head.teacher.make_chunk if head.teacher else Chunk
        yield make_chunk(part, logits_CV, targets_T[part], head, known_2C)
        start += tokens
