"""LoRA and DoRA adapters of routed experts: matrices A and B for each adapted matrix of each expert, on one rank's
experts.

Shapes: N token copies sorted by expert, E experts on this rank, X inputs and Y outputs of an expert's layer on this
rank, R rank of the adapter, M adapted matrices of an expert in the layer (gate and up are one layer), Z their outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.adapters.dora import SumOverRanks, compute_row_norms, fill_factors
from meshwright.adapters.dropout import Dropout, TokenKeys, copy_keys
from meshwright.adapters.low_rank import Rows
from meshwright.comm.custom_operator import custom_operator
from meshwright.model.axis_operations import Meanwhile, TensorOperations, TokenDispatcher, do_nothing
from meshwright.model.experts import Experts, sort_copies
from meshwright.model.grouped_product import sum_bias_gradients
from meshwright.model.layers import Linear
from meshwright.model.weight_gradients import grouped_linear


class Copies(NamedTuple):
    """Token copies sorted by expert, where a copy is a token sent to one of its experts.

    ends_E: exclusive end index of the copies of each of E experts. keys_N: random-number key of each of N copies, from
    which the adapter's dropout mask is derived; None: nothing is dropped."""

    ends_E: torch.Tensor
    keys_N: torch.Tensor | None = None


class ExpertLowRank(nn.Module):
    """LoRA adapters of one linear layer of E routed experts on this rank. The output of the layer is y + s x Aᵀ Bᵀ,
    with the A and B of each token copy's expert (Hu et al. 2021, arXiv:2106.09685, eq. 3). An expert has M adapted
    matrices in the layer, such as gate and up, with Z output features together.

    Parameters, both uninitialised and stacked by expert: `a` [E x M x R, X] and `b` [E x Z, R]. Attributes: `enabled`:
    False to return y, the output without adapter; `dropout`: dropout of the input x; None: no dropout.

    rows: range of an expert's output features for each of its M adapted matrices, in ascending order. experts: E.
    inputs: X, number of input features. rank: R. scale: s. options: `device` and `dtype` of the parameters."""

    dropout: Dropout | None = None

    def __init__(
        self, rows: Sequence[Rows], experts: int, inputs: int, rank: int, scale: float, **options: Any
    ) -> None:
        super().__init__()
        self.rows, self.experts, self.rank, self.scale, self.enabled = tuple(rows), experts, rank, scale, True
        self.a = nn.Parameter(torch.empty(experts * len(rows) * rank, inputs, **options))
        self.b = nn.Parameter(torch.empty(experts * sum(each.size for each in rows), rank, **options))

    def forward(self, x_NX: torch.Tensor, y_NY: torch.Tensor, copies: Copies, layer: Linear) -> torch.Tensor:
        """Return y + s x Aᵀ Bᵀ, [N, Y], the output of the adapted layer for N token copies sorted by expert.

        x_NX: inputs of the copies, with X input features. y_NY: outputs of the experts without adapter, with Y output
        features; partial sums where several ranks split an expert's width. copies: experts and random-number keys of
        the copies. layer: the experts' linear layer; unused here (DoRA reads its weight)."""
        if not self.enabled:
            return y_NY
        keys_N = copies.keys_N if self.dropout is not None else None
        return _add_low_rank_terms(x_NX, y_NY, self.a, self.b, copies.ends_E, (self, keys_N))

    def split(self, low_NL: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Split tensors by adapted matrix. Yield for each of the M adapted matrices of an expert (its range of output
        features, its columns of `low_NL` [N, R], its rows of `b` [E, size, R]), where `size` is the number of output
        features.

        low_NL: x Aᵀ for N token copies and all adapted matrices, L = M x R. b: the parameter `b` [all output features
        of E experts, R], or its gradient."""
        stacked = b.unflatten(0, (self.experts, -1)).split([each.size for each in self.rows], dim=1)
        for each, low_NR, b_EYR in zip(self.rows, low_NL.split(self.rank, dim=1), stacked, strict=True):
            yield slice(each.start, each.start + each.size), low_NR, b_EYR


class ExpertWeightDecomposed(ExpertLowRank):
    """DoRA adapters of one linear layer, without bias, of each routed expert (Liu et al. 2024, arXiv:2402.09353, eq.
    5). Each output feature of the adapted layer is multiplied by a trained magnitude, and divided by the norm of the
    feature's row of W + s B A. The norm is a constant in backward.

    Parameters: `a` and `b`, the stacked matrices A and B of all experts; `magnitude` [experts x adapted output
    features], the magnitudes of one expert after another.

    rows: range of an expert's output features for each of its M adapted matrices, in ascending order. experts: number
    of experts E. inputs: number of input features. rank: rank of A and B. scale: s. options: `device` and `dtype` of
    the parameters. sums: function that sums a tensor over the ranks that split the input features of the layer; None:
    this rank holds all input features."""

    def __init__(
        self, rows: Sequence[Rows], experts: int, inputs: int, rank: int, scale: float,
        sums: SumOverRanks | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(rows, experts, inputs, rank, scale, **options)
        self.sums = sums
        self.magnitude = nn.Parameter(torch.empty(self.b.shape[0], **options))

    def forward(self, x_NX: torch.Tensor, y_NY: torch.Tensor, copies: Copies, layer: Linear) -> torch.Tensor:
        """Return the output of the adapted layer, [N, Y], for N token copies sorted by expert.

        x_NX: inputs of the copies, with X input features. y_NY: outputs of the experts without adapter, with Y output
        features. copies: experts of the copies. layer: the experts' linear layer, without bias and not quantized, whose
        weights enter the row norms."""
        if not self.enabled:
            return y_NY
        assert layer.bias is None, "the factors would scale the bias, too"
        assert layer.packed is None, "the norms need the weight itself"
        weight_EYX = layer.weight.unflatten(0, (self.experts, -1))
        a_EMRX, b_EZR = (each.unflatten(0, (self.experts, -1)) for each in (self.a, self.b))
        pairs = zip(a_EMRX.split(self.rank, dim=1), b_EZR.split([each.size for each in self.rows], dim=1), strict=True)
        matrices = (
            (weight_EYX[:, each.start : each.start + each.size], *pair)
            for each, pair in zip(self.rows, pairs, strict=True)
        )
        factors_EZ = self.magnitude.view(self.experts, -1) / compute_row_norms(matrices, self.scale, self.sums)
        factors_EY = fill_factors(factors_EZ, self.rows, y_NY.shape[1])
        unscaled_NY = super().forward(x_NX, y_NY, copies, layer)
        return _scale_copies(unscaled_NY, factors_EY, copies.ends_E)


class _ScaleCopies(torch.autograd.Function):
    """Autograd function that multiplies the expert output of each token copy by a factor per output feature, which
    belongs to the copy's expert."""

    @staticmethod
    def forward(context: Any, y_NY: torch.Tensor, factors_EY: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Return the outputs `y_NY` of N token copies, each multiplied elementwise by the row of `factors_EY` that
        belongs to the copy's expert: [N, Y].

        factors_EY: one factor per expert and output feature. ends_E: exclusive end index of each expert's copies, which
        are sorted by expert. context: autograd context."""
        context.save_for_backward(y_NY, factors_EY, ends_E)
        return _repeat_rows(factors_EY, ends_E, len(y_NY)).mul_(y_NY)

    @staticmethod
    def backward(context: Any, dy_NY: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Return (gradient of the unscaled outputs [N, Y], gradient of the factors [E, Y], None), for N token copies
        and E experts. dy_NY: gradient of the scaled outputs. context: autograd context."""
        y_NY, factors_EY, ends_E = context.saved_tensors
        d_factors_EY = sum_bias_gradients(dy_NY * y_NY, ends_E)
        return _repeat_rows(factors_EY, ends_E, len(y_NY)).mul_(dy_NY), d_factors_EY, None


_scale_copies: Callable[..., torch.Tensor] = _ScaleCopies.apply


def _repeat_rows(rows_EY: torch.Tensor, ends_E: torch.Tensor, copies: int) -> torch.Tensor:
    """Repeat the row of each expert once per token copy of that expert; return [N, Y] for N copies. rows_EY: one row
    per expert. ends_E: exclusive end index of each expert's copies, which are sorted by expert. copies: N."""
    copies_E = ends_E.long().diff(prepend=ends_E.new_zeros(1, dtype=torch.long))
    return rows_EY.repeat_interleave(copies_E, dim=0, output_size=copies)


@custom_operator("meshwright::add_expert_low_rank")
def _add_expert_low_rank(
    y_NY: torch.Tensor, low_NL: torch.Tensor, b_EZR: torch.Tensor, ends_E: torch.Tensor, starts: Sequence[int],
    sizes: Sequence[int],
) -> torch.Tensor:  # fmt: skip
    """Return y + low Bᵀ, [N, Y], without autograd, for N token copies sorted by expert. One operator, so that
    activation checkpointing can save its result instead of `y_NY`, the outputs without adapter, which nothing else
    reads.

    low_NL: s x Aᵀ of all adapted matrices, L = M x R. b_EZR: matrices B of each expert. ends_E: exclusive end index of
    each expert's copies. starts, sizes: an expert's output features of each adapted matrix, in ascending order."""
    out, end = torch.empty_like(y_NY), 0
    parts = zip(starts, sizes, low_NL.split(b_EZR.shape[2], dim=1), b_EZR.split(sizes, dim=1), strict=True)
    for start, size, low_NR, b_EYR in parts:
        out[:, end:start] = y_NY[:, end:start]
        end = start + size
        product = torch.ops.meshwright.grouped_product(low_NR.contiguous(), b_EYR, ends_E, None, 0)
        torch.add(y_NY[:, start:end], product, out=out[:, start:end])
        del product
    out[:, end:] = y_NY[:, end:]
    return out


_add_expert_low_rank.register_fake(lambda y, low, b, ends, starts, sizes: torch.empty_like(y))


class _AddLowRankTerms(torch.autograd.Function):
    """Autograd function that adds s x Aᵀ Bᵀ to the outputs of the routed experts. The adapted matrices of a layer (such
    as gate and up) are processed one after another, to save memory."""

    @staticmethod
    def forward(
        context: Any,
        x_NX: torch.Tensor,
        y_NY: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        ends_E: torch.Tensor,
        layer: tuple[ExpertLowRank, torch.Tensor | None],
    ) -> torch.Tensor:
        """Return y + s x Aᵀ Bᵀ, [N, Y], for N token copies sorted by expert.

        x_NX: inputs of the copies, with X input features. y_NY: outputs of the experts without adapter. a, b: stacked
        matrices A and B of all experts. ends_E: exclusive end index of each expert's copies. layer: (the adapter,
        random-number keys of the copies for dropout; None: nothing is dropped). context: autograd context."""
        adapter, keys_N = layer
        multiply, dropout = torch.ops.meshwright.grouped_product, adapter.dropout
        given = x_NX if keys_N is None or dropout is None else dropout.apply(x_NX, dropout.mask(keys_N))
        low = multiply(given, a.unflatten(0, (adapter.experts, -1)), ends_E, None, 0) * adapter.scale
        context.save_for_backward(x_NX, a, b, ends_E, low, keys_N)
        context.adapter = adapter
        starts, sizes = zip(*adapter.rows, strict=True)
        b_EZR = b.unflatten(0, (adapter.experts, -1))
        sum_NY: torch.Tensor = torch.ops.meshwright.add_expert_low_rank(y_NY, low, b_EZR, ends_E, starts, sizes)
        return sum_NY

    @staticmethod
    def backward(context: Any, dy_NY: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, y, A and B, in this order, then None for the other inputs. dy_NY: output gradient,
        for N token copies and Y output features. context: autograd context."""
        x_NX, a, b, ends_E, low, keys_N = context.saved_tensors
        adapter, operators = context.adapter, torch.ops.meshwright
        d_low, d_b, dx_NX = torch.empty_like(low), torch.empty_like(b), None
        pairs = zip(adapter.split(low, b), adapter.split(d_low, d_b), strict=True)
        for (columns, low_NR, b_EYR), (_, d_low_NR, d_b_EYR) in pairs:
            d_low_NR.copy_(operators.grouped_product_input(dy_NY[:, columns], b_EYR, ends_E))
            d_b_EYR.copy_(operators.grouped_product_weight(dy_NY[:, columns], low_NR.contiguous(), ends_E))
        d_low *= adapter.scale
        dropout = None if keys_N is None else adapter.dropout
        mask = x_NX.new_empty(0) if dropout is None else dropout.mask(keys_N)
        d_a = operators.grouped_product_weight(d_low, x_NX if dropout is None else dropout.apply(x_NX, mask), ends_E)
        if context.needs_input_grad[0]:
            dx_NX = operators.grouped_product_input(d_low, a.unflatten(0, (adapter.experts, -1)), ends_E)
            dx_NX = dx_NX if dropout is None else dx_NX.masked_fill_(~mask, 0.0).mul_(dropout.scale)
        return dx_NX, dy_NY, d_a.flatten(0, 1), d_b, None, None


_add_low_rank_terms: Callable[..., torch.Tensor] = _AddLowRankTerms.apply


class AdaptedExperts(Experts):
    """Routed experts with adapters on some of their linear layers. The attribute `adapter` of such a layer is an
    `ExpertLowRank`.

    tokens: random-number keys of the tokens, for dropout; None: nothing is dropped. tensor: communication of tensor
    parallelism; under sequence parallelism the tensor-parallel rank determines which tokens this rank routes. keys_N:
    keys of the N token copies, set during a forward without token dispatcher; else None."""

    tokens: TokenKeys | None
    tensor: TensorOperations | None
    keys_N: torch.Tensor | None = None

    def forward(
        self, x_TH: torch.Tensor, weights_TK: torch.Tensor, chosen_TK: torch.Tensor,
        meanwhile: Meanwhile = do_nothing,
    ) -> torch.Tensor:  # fmt: skip
        """Return the weighted sum of the outputs of each token's experts, [T, H] for T tokens of hidden size H.

        x_TH: hidden states. weights_TK: weights of the K chosen experts of each token. chosen_TK: indices of these
        experts. meanwhile: called while a dispatcher's tokens are in flight."""
        holder: AdaptedExperts | _KeyDispatcher = (
            self.dispatcher if isinstance(self.dispatcher, _KeyDispatcher) else self
        )
        holder.keys_N = self._make_copy_keys(chosen_TK)
        y_TH = super().forward(x_TH, weights_TK, chosen_TK, meanwhile)
        holder.keys_N = None  # backward has its own reference
        return y_TH

    def _make_copy_keys(self, chosen_TK: torch.Tensor) -> torch.Tensor | None:
        """Return the random-number keys, from which dropout masks are computed, of the N (token, expert) pairs that
        this rank's router has chosen: int32 [N], sorted by expert; None without dropout. chosen_TK: indices of the K
        experts of each of T tokens."""
        if self.tokens is None or self.tokens.keys_BC is None or not torch.is_grad_enabled():
            return None
        keys_BC, (tokens, chosen) = self.tokens.keys_BC, chosen_TK.shape
        if (parts := keys_BC.numel() // tokens) > 1:  # this tp rank routes a slice of the tokens
            assert self.tensor is not None and parts == self.tensor.size
            keys_BC = keys_BC.chunk(parts, dim=1)[self.tensor.rank]
        order_N, expert_N, _ = sort_copies(chosen_TK, self.experts)
        return copy_keys(keys_BC.flatten()[order_N // chosen], expert_N)

    def _apply_experts(self, x_NH: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Return the outputs [N, H] of this rank's adapted experts for N token copies of hidden size H. Where several
        ranks split an expert's width, the outputs are this rank's partial sums.

        x_NH: inputs of the copies, sorted by expert. ends_E: exclusive end index of each expert's copies."""
        copies = Copies(ends_E, self.dispatcher.keys_N if isinstance(self.dispatcher, _KeyDispatcher) else self.keys_N)
        hidden_NF = self.activate(_multiply(x_NH, self.up, copies))
        return _multiply(hidden_NF, self.down, copies, self.first)


class _KeyDispatcher:
    """Token dispatcher that also sends the random-number key of each token copy. A dispatch replaces the attribute
    `keys_N` (keys of this rank's N copies; None: none) by the keys of the received copies. dispatcher: dispatcher that
    sends the token copies themselves."""

    keys_N: torch.Tensor | None = None

    def __init__(self, dispatcher: TokenDispatcher) -> None:
        self._dispatcher, self.combine, self.dispatch_keys = dispatcher, dispatcher.combine, dispatcher.dispatch_keys
        self.expert_ranks, self.width_ranks = dispatcher.expert_ranks, dispatcher.width_ranks
        self.width_rank = dispatcher.width_rank

    def dispatch(
        self, x_NH: torch.Tensor, ends_E: torch.Tensor, meanwhile: Meanwhile
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Dispatch N token copies `x_NH`, sorted by expert, and their random-number keys to the ranks of the experts.
        ends_E: exclusive end index of each expert's copies. meanwhile: called while the copies are in flight. Returns
        the result of `TokenDispatcher.dispatch`: (received copies, exclusive end index of each of this rank's experts,
        state for the combine)."""
        found = self._dispatcher.dispatch(x_NH, ends_E, meanwhile)
        if self.keys_N is not None:
            self.keys_N = self.dispatch_keys(self.keys_N, found[2])
        return found


def _multiply(x_NX: torch.Tensor, layer: Linear, copies: Copies, first: int = 0) -> torch.Tensor:
    """Return the outputs [N, Y] of one linear layer of the routed experts on this rank, for N token copies (a copy is a
    token sent to one of its experts). If the layer has adapters, the adapters' terms are included.

    x_NX: inputs of the copies, sorted by expert. layer: the experts' linear layer. copies: end index of each expert's
    copies, and random-number key of each copy for the adapters' dropout. first: index of the first output feature on
    this rank to which the layer's bias is added (the bias of a row-parallel layer may cover only some of the Y output
    features)."""
    y_NY = grouped_linear(x_NX, layer, copies.ends_E, first)
    if layer.adapter is None:
        return y_NY
    adapted_NY: torch.Tensor = layer.adapter(x_NX, y_NY, copies, layer)
    return adapted_NY


def attach_to_experts(
    module: Experts, layer: str, adapter: ExpertLowRank, tokens: TokenKeys, tensor: TensorOperations | None
) -> None:
    """Attach `adapter`, which has matrices A and B for each expert, to the linear layer `layer` ("up" or "down") of the
    routed experts `module`, in place.

    tokens: random-number keys of the tokens, which dropout needs. tensor: communication of tensor parallelism; None: no
    tensor parallelism."""
    module.__class__ = AdaptedExperts
    adapted: Any = module
    adapted.tensor, adapted.tokens = tensor, tokens if adapter.dropout is not None else None
    dispatcher = module.dispatcher
    if adapter.dropout is not None and dispatcher is not None and not isinstance(dispatcher, _KeyDispatcher):
        module.dispatcher = _KeyDispatcher(dispatcher)
    getattr(module, layer).adapter = adapter
