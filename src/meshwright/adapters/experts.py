"""LoRA and DoRA adapters of routed experts: matrices A and B for each adapted matrix of each expert, on one rank's
experts.

Shapes: N token copies sorted by expert, E experts on this rank, X inputs and Y outputs of an expert's layer on this
rank, R rank of the adapter, M adapted matrices of an expert in the layer (gate and up are one layer), Z their outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.adapters.dora import SumOverRanks, compute_row_norms, fill_factors
from meshwright.adapters.dropout import Dropout, TokenKeys, copy_keys
from meshwright.adapters.low_rank import Rows
from meshwright.model.axis_operations import TensorOperations, TokenDispatcher
from meshwright.model.experts import Experts, sort_copies
from meshwright.model.grouped_product import sum_bias_gradients
from meshwright.model.layers import Linear
from meshwright.model.weight_gradients import grouped_linear


class Copies(NamedTuple):
    """Token copies sorted by expert. ends_E: exclusive end index of each expert's copies; keys_N: random key of each
    copy, from which the mask of the adapter's dropout follows; None: nothing is dropped."""

    ends_E: torch.Tensor
    keys_N: torch.Tensor | None = None


class ExpertLowRank(nn.Module):
    """LoRA adapters of one linear layer of each of E routed experts on this rank: y + s x Aᵀ Bᵀ with the A and B of
    each token copy's expert (Hu et al. 2021, arXiv:2106.09685, eq. 3). Parameters, both uninitialised and stacked by
    expert: `a` [E x M x R, X] and `b` [E x Z, R].

    rows: range of an expert's output features of each of its adapted matrices, in ascending order; experts: E; inputs:
    X; rank: R; scale: s; options: `device` and `dtype` of the parameters. Attributes: `enabled`: False to return y;
    `dropout`: dropout of the input x; None: no dropout."""

    dropout: Dropout | None = None

    def __init__(
        self, rows: Sequence[Rows], experts: int, inputs: int, rank: int, scale: float, **options: Any
    ) -> None:
        super().__init__()
        self.rows, self.experts, self.rank, self.scale, self.enabled = tuple(rows), experts, rank, scale, True
        self.a = nn.Parameter(torch.empty(experts * len(rows) * rank, inputs, **options))
        self.b = nn.Parameter(torch.empty(experts * sum(each.size for each in rows), rank, **options))

    def forward(self, x_NX: torch.Tensor, y_NY: torch.Tensor, copies: Copies, layer: Linear) -> torch.Tensor:
        """Return y + s x Aᵀ Bᵀ, [N, Y], for token copies `x_NX` and the experts' outputs `y_NY`, which are partial sums
        where several ranks split an expert's width. `copies`: experts and keys of the token copies; `layer`: the
        experts' linear layer; unused here (DoRA reads its weight)."""
        if not self.enabled:
            return y_NY
        keys_N = copies.keys_N if self.dropout is not None else None
        return _AddLowRankTerms.apply(x_NX, y_NY, self.a, self.b, copies.ends_E, (self, keys_N))  # type: ignore[no-untyped-call, no-any-return]

    def split(self, low_NL: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Yield (slice of output features, slice of `low_NL` [N, R], view of `b` [E, size, R]) for each of the M
        adapted matrices of an expert.

        low_NL: x Aᵀ of all adapted matrices, L = M x R. b: the parameter `b`, or its gradient.
        """
        stacked = b.unflatten(0, (self.experts, -1)).split([each.size for each in self.rows], dim=1)
        for each, low_NR, b_EYR in zip(self.rows, low_NL.split(self.rank, dim=1), stacked, strict=True):
            yield slice(each.start, each.start + each.size), low_NR, b_EYR


class ExpertWeightDecomposed(ExpertLowRank):
    """DoRA adapters of one linear layer of each routed expert: each output feature of an expert's adapted layer is
    multiplied by a trained magnitude over the norm of the feature's row (Liu et al. 2024, arXiv:2402.09353, eq. 5), a
    constant in backward. Parameters: `a` and `b` as in `ExpertLowRank`, and `magnitude` [E x Z], of one expert after
    another.

    rows, experts, inputs, rank, scale, options: see `ExpertLowRank`. sums: sums over the ranks that split the inputs of
    the experts' layer; None: this rank holds all."""

    def __init__(
        self, rows: Sequence[Rows], experts: int, inputs: int, rank: int, scale: float,
        sums: SumOverRanks | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(rows, experts, inputs, rank, scale, **options)
        self.sums = sums
        self.magnitude = nn.Parameter(torch.empty(self.b.shape[0], **options))

    def forward(self, x_NX: torch.Tensor, y_NY: torch.Tensor, copies: Copies, layer: Linear) -> torch.Tensor:
        """Return the outputs of the adapted layer, [N, Y], for token copies `x_NX` and the experts' outputs `y_NY`
        without adapter. `copies`: experts of the token copies; `layer`: the experts' linear layer, whose weights the
        norms need."""
        if not self.enabled:
            return y_NY
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
        return _ScaleCopies.apply(unscaled_NY, factors_EY, copies.ends_E)  # type: ignore[no-untyped-call, no-any-return]


class _ScaleCopies(torch.autograd.Function):
    """Autograd function that multiplies the outputs of token copies by the factors of their experts."""

    @staticmethod
    def forward(context: Any, y_NY: torch.Tensor, factors_EY: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Return `y_NY` [N, Y] times the row of `factors_EY` of each copy's expert. ends_E: exclusive end index of each
        expert's copies. context: autograd context."""
        context.save_for_backward(y_NY, factors_EY, ends_E)
        return _repeat_rows(factors_EY, ends_E, len(y_NY)).mul_(y_NY)

    @staticmethod
    def backward(context: Any, dy_NY: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Return the gradients of the unscaled outputs and of the factors, given `dy_NY`, that of the product; None for
        `ends_E`. context: autograd context."""
        y_NY, factors_EY, ends_E = context.saved_tensors
        d_factors_EY = sum_bias_gradients(dy_NY * y_NY, ends_E)
        return _repeat_rows(factors_EY, ends_E, len(y_NY)).mul_(dy_NY), d_factors_EY, None


def _repeat_rows(rows_EY: torch.Tensor, ends_E: torch.Tensor, copies: int) -> torch.Tensor:
    """Return the row of `rows_EY` [E, Y] of each token copy's expert, [N, Y]. ends_E: exclusive end index of each
    expert's copies; copies: N."""
    copies_E = ends_E.long().diff(prepend=ends_E.new_zeros(1, dtype=torch.long))
    return rows_EY.repeat_interleave(copies_E, dim=0, output_size=copies)


class _AddLowRankTerms(torch.autograd.Function):
    """Autograd function that adds s x Aᵀ Bᵀ to the outputs of the routed experts, one adapted matrix (such as gate,
    then up) after another to save memory.
    """

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
        """Return y + s x Aᵀ Bᵀ, [N, Y]. x_NX, y_NY: those of `ExpertLowRank.forward`; a, b: its parameters; ends_E:
        exclusive end index of each expert's copies; layer: the adapter, and the keys of the copies (None: nothing is
        dropped)."""
        adapter, keys_N = layer
        multiply, dropout = torch.ops.meshwright.grouped_product, adapter.dropout
        given = x_NX if keys_N is None or dropout is None else dropout.apply(x_NX, dropout.mask(keys_N))
        low = multiply(given, a.unflatten(0, (adapter.experts, -1)), ends_E, None, 0) * adapter.scale
        out, end = torch.empty_like(y_NY), 0
        for columns, low_NR, b_EYR in adapter.split(low, b):
            out[:, end : columns.start] = y_NY[:, end : columns.start]
            product = multiply(low_NR.contiguous(), b_EYR, ends_E, None, 0)
            torch.add(y_NY[:, columns], product, out=out[:, columns])
            end, product = columns.stop, None
        out[:, end:] = y_NY[:, end:]
        context.save_for_backward(x_NX, a, b, ends_E, low, keys_N)
        context.adapter = adapter
        return out

    @staticmethod
    def backward(context: Any, dy_NY: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, y, A and B, given `dy_NY`, that of the sum; None for the other inputs."""
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


class AdaptedExperts(Experts):
    """Routed experts of which some linear layers have adapters: their attribute `adapter` is an `ExpertLowRank`.

    tokens: random keys of the tokens, for dropout; None: nothing is dropped. tensor: communication of tensor
    parallelism, whose rank shows which tokens are routed here if tp ranks route slices of them. keys_N: during a
    forward without dispatcher, the random keys of the token copies."""

    tokens: TokenKeys | None
    tensor: TensorOperations | None
    keys_N: torch.Tensor | None = None

    def forward(self, x_TH: torch.Tensor, weights_TK: torch.Tensor, chosen_TK: torch.Tensor) -> torch.Tensor:
        """Return for each token the weighted sum of the outputs of its experts; arguments and result: those of
        `Experts.forward`."""
        holder: AdaptedExperts | _KeyDispatcher = (
            self.dispatcher if isinstance(self.dispatcher, _KeyDispatcher) else self
        )
        holder.keys_N = self._make_copy_keys(chosen_TK)
        y_TH = super().forward(x_TH, weights_TK, chosen_TK)
        holder.keys_N = None  # backward has its own reference
        return y_TH

    def _make_copy_keys(self, chosen_TK: torch.Tensor) -> torch.Tensor | None:
        """Return the random keys of this rank's token copies, int32 [N], sorted by expert; None if nothing is dropped.
        chosen_TK: indices of the experts of each token."""
        if self.tokens is None or self.tokens.keys_BC is None or not torch.is_grad_enabled():
            return None
        keys_BC, (tokens, chosen) = self.tokens.keys_BC, chosen_TK.shape
        if (parts := keys_BC.numel() // tokens) > 1:  # this tp rank routes a slice of the tokens
            assert self.tensor is not None and parts == self.tensor.size
            keys_BC = keys_BC.chunk(parts, dim=1)[self.tensor.rank]
        order_N, expert_N, _ = sort_copies(chosen_TK, self.experts)
        return copy_keys(keys_BC.flatten()[order_N // chosen], expert_N)

    def _apply_experts(self, x_NH: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Return the outputs [N, H] of this rank's adapted experts for token copies `x_NH` sorted by expert. Where
        several ranks split an expert's width, they are this rank's partial sums. ends_E: exclusive end index of each
        expert's copies."""
        copies = Copies(ends_E, self.dispatcher.keys_N if isinstance(self.dispatcher, _KeyDispatcher) else self.keys_N)
        hidden_NF = self.activate(_multiply(x_NH, self.up, copies))
        return _multiply(hidden_NF, self.down, copies, self.first)


class _KeyDispatcher:
    """Token dispatcher that also sends the random keys of token copies (`keys_N`, None: none), which are replaced by
    those of the received copies. dispatcher: the dispatcher of the tokens."""

    keys_N: torch.Tensor | None = None

    def __init__(self, dispatcher: TokenDispatcher) -> None:
        self._dispatcher, self.combine, self.dispatch_keys = dispatcher, dispatcher.combine, dispatcher.dispatch_keys
        self.expert_ranks, self.width_ranks = dispatcher.expert_ranks, dispatcher.width_ranks
        self.width_rank = dispatcher.width_rank

    def dispatch(self, x_NH: torch.Tensor, ends_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Dispatch token copies `x_NH` and their keys; arguments and result: those of `TokenDispatcher.dispatch`."""
        found = self._dispatcher.dispatch(x_NH, ends_E)
        if self.keys_N is not None:
            self.keys_N = self.dispatch_keys(self.keys_N, found[2])
        return found


def _multiply(x_NX: torch.Tensor, layer: Linear, copies: Copies, first: int = 0) -> torch.Tensor:
    """Return the outputs [N, Y] of a linear layer of the experts for token copies `x_NX`, with those of its adapters if
    it has any. copies: experts and keys of the token copies; first: index of the first output with a bias."""
    y_NY = grouped_linear(x_NX, layer, copies.ends_E, first)
    if layer.adapter is None:
        return y_NY
    adapted_NY: torch.Tensor = layer.adapter(x_NX, y_NY, copies, layer)
    return adapted_NY


def attach_to_experts(
    module: Experts, layer: str, adapter: ExpertLowRank, tokens: TokenKeys, tensor: TensorOperations | None
) -> None:
    """Attach `adapter`, a low-rank pair for each expert, to the linear layer `layer` ("up" or "down") of the routed
    experts `module`. tokens: random keys of the tokens, which its dropout needs; tensor: communication of tensor
    parallelism."""
    module.__class__ = AdaptedExperts
    adapted: Any = module
    adapted.tensor, adapted.tokens = tensor, tokens if adapter.dropout is not None else None
    dispatcher = module.dispatcher
    if adapter.dropout is not None and dispatcher is not None and not isinstance(dispatcher, _KeyDispatcher):
        module.dispatcher = _KeyDispatcher(dispatcher)
    getattr(module, layer).adapter = adapter
