"""Mixture-of-experts layers: a router sends each token to a few of many MLPs; dispatch is dropless.

Without ep and etp, experts are split over tp by columns, like all MLPs, and every tp rank computes all tokens. With ep
or etp each rank routes its own tokens; tp ranks that share a sequence route a slice of it each.

Shapes: B sequences of S tokens, T = B x S, H hidden, E experts, K experts of a token, N = T x K assignments (sorted
by expert), F an expert's width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.model.axis_operations import SINGLE_DEVICE, AxisOperations, Meanwhile, Recompute, TokenAxis, do_nothing
from meshwright.model.layers import FeedForward, Linear, activate
from meshwright.model.permutation import Permuted, invert_permutation
from meshwright.model.precision import at_least_float32
from meshwright.model.weight_gradients import grouped_linear
from meshwright.spec.config import ModelConfig


class Mixture(nn.Module):
    """Mixture-of-experts layer. Its output for a token x is the sum over the token's experts of weight * expert(x),
    plus the output of the shared expert (Shazeer et al. 2017, arXiv:1701.06538, eq. 1; Dai et al. 2024,
    arXiv:2401.06066, eq. 9).

    `config`: model configuration; `axes`: communication of the mesh axes; `options`: `device` and `dtype` of the
    parameters.
    """

    def __init__(self, config: ModelConfig, axes: AxisOperations, **options: Any) -> None:
        super().__init__()
        self.tensor = axes.tensor
        self.context = axes.context
        self.expert_parallel = axes.dispatcher is not None
        self.router = Router(config, **options)
        self.experts = Experts(config, axes, **options)
        width = config.shared_intermediate // axes.tensor.size
        # Its partial sums are added to those of the routed experts: one reduction over tp covers both. Under expert
        # parallelism it has its own calls, with which its products overlap. If a gate multiplies its output, this is
        # not discarded, because the gate's backward reads it.
        of_shared = axes if self.expert_parallel else SINGLE_DEVICE
        of_shared = replace(of_shared, recompute=Recompute()) if config.shared_gate else of_shared
        self.shared = FeedForward(config, of_shared, width, **options) if width else None
        self.shared_gate = Linear(config.hidden, 1, bias=False, **options) if config.shared_gate else None
        self.discard = (Recompute() if config.post_norms else axes.recompute).discard  # a post-norm reads the output

    def forward(self, x_BSH: Tensor, counted_B: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output [B, S, H] for the hidden states `x_BSH`, and its load-balancing loss (scalar;
        None without `counted_B`).

        `counted_B`: number of target tokens of each sequence, by which the sequence's load-balancing loss is
        weighted."""
        if self.expert_parallel:
            return self._forward_expert_parallel(x_BSH, counted_B)
        x_BSH = self.tensor.enter(x_BSH, "mlp.input")
        y_BSH, loss = self._forward_routed(x_BSH, counted_B)
        if self.shared is not None:
            y_BSH = y_BSH + self._forward_shared(x_BSH)
        if loss is not None:  # every tp rank computes the loss of the same tokens
            loss = loss / self.tensor.size
        return self.discard(self.tensor.leave(y_BSH, "mlp.output")), loss

    def _forward_expert_parallel(self, x_BSH: Tensor, counted_B: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Run the layer on hidden states `x_BSH` with expert parallelism: the routed experts are distributed over ep
        ranks, the shared expert is split over tp. Return the output [B, S, H] and the load-balancing loss (None without
        `counted_B`). `counted_B`: number of target tokens of each sequence."""
        slices = self.tensor.sequence_parallel
        own_BSH = x_BSH if slices else self.tensor.split_tokens(x_BSH, "experts.input")
        shared: list[Tensor] = []

        def compute_shared() -> None:
            """Compute the output of the shared expert, if there is one, while the dispatched tokens are in flight."""
            if self.shared is not None:
                shared.append(self._forward_shared(x_BSH))

        y_BSH, loss = self._forward_routed(own_BSH, counted_B, compute_shared)
        if not slices:
            y_BSH = self.tensor.join_tokens(y_BSH, "experts.output")
        if self.shared is not None:
            y_BSH = y_BSH + shared[0]
        return y_BSH, loss

    def _forward_routed(
        self, x_BSH: Tensor, counted_B: Tensor | None, meanwhile: Meanwhile = do_nothing
    ) -> tuple[Tensor, Tensor | None]:
        """Run the routed experts on hidden states `x_BSH`: route each token to its experts and sum their weighted
        outputs. Return the output [B, S, H] and the load-balancing loss (None without `counted_B`, the number of target
        tokens of each sequence). `meanwhile`: called while dispatched tokens are in flight."""
        x_TH = x_BSH.flatten(0, 1)
        scores_TE = self.router.scores(x_TH)
        weights_TK, chosen_TK = self.router.choose(scores_TE)
        y_TH = self.experts(x_TH, weights_TK.to(x_TH.dtype), chosen_TK, meanwhile)
        loss = None
        if counted_B is not None:
            parts = (self.context, self.tensor) if self.expert_parallel else (self.context,)
            loss = self.router.balance_loss(scores_TE, chosen_TK, counted_B, *parts)
        return y_TH.view_as(x_BSH), loss

    def _forward_shared(self, x_BSH: Tensor) -> Tensor:
        """Return the output [B, S, H] of the shared expert for `x_BSH`, times its sigmoid gate if it has one. With
        tensor parallelism, but not expert parallelism, the result is this rank's partial sum."""
        assert self.shared is not None
        y_BSH = self.shared(x_BSH)
        return self.discard(y_BSH) if self.shared_gate is None else F.sigmoid(self.shared_gate(x_BSH)) * y_BSH


class Router(nn.Module):
    """Top-K router: chooses the K experts of each token and their weights. `config`: model configuration; `options`:
    `device` and `dtype` of the parameters.

    The score of an expert is the softmax over all experts (Mixtral, Qwen) or the sigmoid (DeepSeek-V3,
    arXiv:2412.19437, section 2.1.2) of its logit; the K highest are chosen. In DeepSeek-V3 a bias that balances the
    load is added for the choice, but not for the weights (Wang et al. 2024, arXiv:2408.15664, eq. 3). In gpt-oss the
    bias is part of the linear layer."""

    def __init__(self, config: ModelConfig, **options: Any) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden, **options))
        biased = config.router_bias or config.mlp_bias
        self.bias = nn.Parameter(torch.empty(config.experts, **options)) if biased else None

    def scores(self, x_TH: Tensor, product: Callable[..., Tensor] = F.linear) -> Tensor:
        """Return the router score of each of E experts for each of T tokens `x_TH`, [T, E], in float32 or float64: the
        softmax or sigmoid of the logits. For models with `config.routed_input` (Llama 4) return the logits themselves,
        because the sigmoids of large logits all round to 1 and could not be ranked.

        `product`: function (x, W, b) -> x Wᵀ + b that computes the logits; b may be left out."""
        wide = at_least_float32(x_TH.dtype)
        if self.config.router == "sigmoid":
            logits_TE = product(x_TH.to(wide), self.weight.to(wide))
            return logits_TE if self.config.routed_input else logits_TE.sigmoid()
        bias = (self.bias,) if self.config.mlp_bias else ()
        return product(x_TH, self.weight, *bias).to(wide).softmax(dim=-1)

    def choose(self, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the K experts of each token by their scores. Return (weights of these experts' outputs [T, K], indices
        of these experts [T, K]).

        `scores_TE`: score of each of E experts for each of T tokens, from `scores`.
        """
        ranking_TE = scores_TE.detach()
        if self.config.router_bias and self.bias is not None:
            ranking_TE = ranking_TE + self.bias.detach()
        if self.config.expert_groups > 1:
            ranking_TE = self._keep_groups(ranking_TE)
        chosen_TK = ranking_TE.topk(self.config.experts_per_token, dim=-1).indices
        weights_TK = (scores_TE.sigmoid() if self.config.routed_input else scores_TE).gather(1, chosen_TK)
        if self.config.normalise_choice:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
        return weights_TK * self.config.routed_scale, chosen_TK

    def _keep_groups(self, ranking_TE: Tensor) -> Tensor:
        """Return `ranking_TE` [T, E], the values by which experts are chosen, with -inf for experts outside of each
        token's best groups (group-limited routing). A group's value is the highest of its experts (arXiv:2405.04434,
        section 2.2.2) or, with sigmoid scores, the sum of the two highest (arXiv:2412.19437, section 2.1.2).
        """
        config = self.config
        grouped_TGE = ranking_TE.unflatten(1, (config.expert_groups, -1))
        best = grouped_TGE.topk(2 if config.router == "sigmoid" else 1, dim=-1).values.sum(dim=-1)
        kept_TG = torch.zeros_like(best, dtype=torch.bool)
        kept_TG = kept_TG.scatter(1, best.topk(config.groups_per_token, dim=-1).indices, True)
        return grouped_TGE.masked_fill(kept_TG.logical_not()[..., None], float("-inf")).flatten(1)

    def balance_loss(self, scores_TE: Tensor, chosen_TK: Tensor, counted_B: Tensor, *parts: TokenAxis) -> Tensor:
        """Return the layer's load-balancing loss (scalar), weighted so that it can be added to the summed token losses.

        `scores_TE`: scores of all E experts for T tokens; `chosen_TK`: indices of each token's K experts; `counted_B`:
        number of target tokens of each of B sequences of S tokens; `parts`: parallel axes whose ranks hold different
        tokens of a sequence, over which expert loads are all-reduced.

        The loss of a sequence is E times the sum over experts of (assignments of the expert / S) x (mean score of the
        expert): Fedus et al. 2021 (arXiv:2101.03961, eq. 4 to 6), scaled as in transformers. This loss is averaged over
        layers and weighted by the sequence's number of target tokens. The caller divides the summed loss by the target
        tokens of the whole step, so that the split into micro-batches and ranks does not change the result. For a
        router with a bias that balances the load, a further term of value 0 sets the bias's gradient: the expert's load
        minus the mean load, whose sign the optimizer follows.
        """
        config = self.config
        rows = len(counted_B)
        chosen_BN = chosen_TK.view(rows, -1)
        load_BE = scores_TE.new_zeros(rows, config.experts)
        load_BE = load_BE.scatter_add(1, chosen_BN, torch.ones_like(chosen_BN, dtype=scores_TE.dtype))
        total = scores_TE.new_zeros(())
        if config.router_loss:
            row_load_BE = load_BE
            tokens = chosen_BN.shape[1] // config.experts_per_token
            for axis in parts:
                row_load_BE = axis.reduce(row_load_BE, f"router.load.{axis.name}")
                tokens *= axis.size
            scores_BE = scores_TE.view(rows, -1, config.experts).sum(dim=1) / tokens
            losses_B = config.experts / tokens * (row_load_BE * scores_BE).sum(dim=1)
            total = total + config.router_loss / config.expert_layers * (losses_B * counted_B).sum()
        if config.router_bias and self.bias is not None:
            load_E = load_BE.sum(dim=0)
            total = total + ((self.bias - self.bias.detach()) * (load_E - load_E.mean())).sum()
        return total


class Experts(nn.Module):
    """MLPs of the routed experts on this rank, stacked. E: number of experts on this rank; F: their intermediate size
    on this rank; H: hidden size. `up.weight` is [E x 2F, H]: for each expert the rows of the gate projection, then the
    rows of the up projection (in some families alternating). `down.weight` is [E x H, F]. If several ranks split an
    expert's width, each rank holds and adds one slice of the bias of the down projection, [E x H / ranks].

    `config`: model configuration; `axes`: communication of the mesh axes; `options`: `device` and `dtype` of the
    parameters.
    """

    def __init__(self, config: ModelConfig, axes: AxisOperations, **options: Any) -> None:
        super().__init__()
        self.config = config
        self.experts = config.experts
        self.dispatcher = dispatcher = axes.dispatcher  # without it tp ranks split the width of each expert
        self.held = config.experts if dispatcher is None else config.experts // dispatcher.expert_ranks
        ranks = axes.tensor.size if dispatcher is None else dispatcher.width_ranks
        width = config.expert_intermediate // ranks
        bias_size = config.hidden // ranks
        self.first = bias_size * (axes.tensor.rank if dispatcher is None else dispatcher.width_rank)
        self.up = Linear(config.hidden, self.held * 2 * width, bias=config.mlp_bias, **options)
        self.down = Linear(width, self.held * config.hidden, bias=False, **options)
        if config.mlp_bias:
            self.down.bias = nn.Parameter(torch.empty(self.held * bias_size, **options))

    def forward(self, x_TH: Tensor, weights_TK: Tensor, chosen_TK: Tensor, meanwhile: Meanwhile = do_nothing) -> Tensor:
        """Return for each of T tokens the weighted sum of the outputs of its K experts, [T, H].

        `x_TH`: hidden states; `weights_TK`: factors on the experts' outputs or, with `config.routed_input`, on the
        experts' inputs; `chosen_TK`: indices of the experts; `meanwhile`: called while a dispatcher's tokens are in
        flight."""
        tokens, chosen = chosen_TK.shape
        order_N, _, ends_E = sort_copies(chosen_TK, self.experts)
        inverse_N = invert_permutation(order_N)

        sorted_NH = Permuted.apply(x_TH, order_N, inverse_N, chosen)
        if self.config.routed_input:
            sorted_NH = sorted_NH * Permuted.apply(weights_TK.view(-1, 1), order_N, inverse_N, None)
        if self.dispatcher is None:
            y_NH = self._apply_experts(sorted_NH, ends_E)
        else:
            received_RH, ends_L, routes = self.dispatcher.dispatch(sorted_NH, ends_E, meanwhile)
            y_NH = self.dispatcher.combine(self._apply_experts(received_RH, ends_L), routes)
        y_TKH = Permuted.apply(y_NH, inverse_N, order_N, None).view(tokens, chosen, -1)
        return y_TKH.sum(dim=1) if self.config.routed_input else (y_TKH * weights_TK[..., None]).sum(dim=1)

    def _apply_experts(self, x_NH: Tensor, ends_E: Tensor) -> Tensor:
        """Return the outputs [N, H] of this rank's expert MLPs for N token copies `x_NH` (one for each of a token's
        experts), sorted by expert. Where several ranks split an expert's width, the outputs are this rank's partial
        sums.

        `ends_E`: exclusive end index of each expert's copies."""
        return grouped_linear(self.activate(grouped_linear(x_NH, self.up, ends_E)), self.down, ends_E, self.first)

    def activate(self, up_NX: Tensor) -> Tensor:
        """Return the activations [N, F] of N token copies (one for each of a token's experts), the input of the down
        projection: activation(gate) * up, or its clamped variant (gpt-oss). `up_NX`: gate and up projections of the
        copies, [N, 2F]."""
        config = self.config
        if config.swiglu_limit is not None:
            return ClampedSwiGLU.apply(up_NX, config.swiglu_limit, config.swiglu_alpha, config.experts_interleaved)
        gate_NF, up_NF = split_gate(up_NX, config.experts_interleaved)
        return activate(gate_NF, config.activation) * up_NF


def sort_copies(chosen_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort N = T x K token copies (one for each of a token's experts) by expert. `chosen_TK`: indices of the K experts
    of each of T tokens; `experts`: number of experts. Return three tensors: the permutation [N]; the expert of each
    sorted copy [N]; the exclusive end index of each expert's copies, int32 [experts].
    """
    expert_N, order_N = chosen_TK.flatten().sort(stable=True)
    experts_E = torch.arange(experts, device=chosen_TK.device)
    return order_N, expert_N, torch.searchsorted(expert_N, experts_E, right=True, out_int32=True)


def split_gate(up_NX: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views of the gate and up projections in `up_NX` [N, 2F], [N, F] each. `interleaved`: True if their columns
    alternate; False: gate columns come first.
    """
    if interleaved:
        return up_NX[..., ::2], up_NX[..., 1::2]
    gate_NF, up_NF = up_NX.chunk(2, dim=-1)
    return gate_NF, up_NF


class ClampedSwiGLU(torch.autograd.Function):
    """Autograd function of gpt-oss's activation (arXiv:2508.10925, section 2.2): gate * sigmoid(alpha * gate) * (up +
    1), where gate is first clamped to at most `limit`, and up to [-limit, limit]. Only the input is saved for backward.
    """

    @staticmethod
    def forward(context: Any, up_NX: Tensor, limit: float, alpha: float, interleaved: bool) -> Tensor:
        """Return the activation [N, F] for the concatenated gate and up projections `up_NX` [N, 2F].

        `limit`: limit of the clamps; `alpha`: factor in the sigmoid; `interleaved`: True if the columns of gate and up
        alternate, False if gate's come first. context: autograd context."""
        context.save_for_backward(up_NX)
        context.numbers = limit, alpha, interleaved
        gate_NF, up_NF = split_gate(up_NX, interleaved)
        gate_NF = gate_NF.clamp(max=limit)
        return torch.sigmoid(gate_NF * alpha).mul_(gate_NF).mul_(up_NF.clamp(-limit, limit).add_(1))

    @staticmethod
    def backward(context: Any, d_NF: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the input [N, 2F], given the output gradient `d_NF`, and None for the three arguments
        that need no gradient. context: autograd context."""
        (up_NX,) = context.saved_tensors
        limit, alpha, interleaved = context.numbers
        gate_NF, up_NF = split_gate(up_NX, interleaved)
        d_NX = torch.empty_like(up_NX)
        d_gate_NF, d_up_NF = split_gate(d_NX, interleaved)
        limited_NF = gate_NF.clamp(max=limit)
        share_NF = torch.sigmoid(limited_NF * alpha)
        d_up_NF.copy_(share_NF).mul_(limited_NF).mul_(up_NF.abs() <= limit).mul_(d_NF)
        # The derivative of g sigmoid(a g) is s (1 + a g (1 - s)).
        d_gate_NF.copy_(limited_NF).mul_(alpha).mul_(1 - share_NF).add_(1).mul_(share_NF)
        d_gate_NF.mul_(up_NF.clamp(-limit, limit).add_(1)).mul_(gate_NF <= limit).mul_(d_NF)
        return d_NX, None, None, None
