"""Layers of a model other than attention, on a GPU, and the form of the parameters that the kernels read.

Shapes: T tokens of a step, H hidden, F width of an MLP, X and Y input and output size of a product, E experts, K
experts of a token, N = T x K rows of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from meshwright.kernels.row_order import find_row_order
from meshwright.model import layers as modules
from meshwright.model.experts import Mixture, sort_copies
from meshwright.model.transformer import Transformer
from meshwright.serving.torch_runner import OrderedTensorParallel
from meshwright.spec.config import ModelConfig


def prepare_parameters(model: Transformer, config: ModelConfig, kv_heads: int) -> None:
    """Convert the parameters of `model` in place to the form that the GPU kernels read. config: configuration of the
    model. kv_heads: key-value heads of this rank.

    Norms that multiply by 1 + weight: 1 is added to their weight. Final norm: its weight is divided by the model's
    logit divisor, in float32. Projections and norms of attention: rows in the order of `find_row_order`, for RoPE."""
    for module in model.modules():
        if isinstance(module, modules.RMSNorm) and module.centre:
            module.weight, module.centre = torch.nn.Parameter(module.factors(), requires_grad=False), 0.0
    if model.final_norm is not None and config.logit_divisor != 1:
        divided = model.final_norm.weight.float() / config.logit_divisor
        model.final_norm.weight = torch.nn.Parameter(divided, requires_grad=False)
    for name, parameter in model.named_parameters():
        order = find_row_order(config, name, len(parameter), kv_heads)
        if order is not None:
            parameter[:] = parameter[torch.from_numpy(order).to(parameter.device)]


class DeviceLayers:
    """Products, norms and mixtures of experts, by the kernels of a GPU or by torch.

    config: configuration of the model. operations: the module `device_operations`, or one with the same functions.
    tensor: communication of the tensor-parallel ranks. invariant: as `batch_invariant` of `DeviceRunner`. first_expert:
    index of the first routed expert that this rank computes.
    """

    def __init__(
        self, config: ModelConfig, operations: Any, tensor: OrderedTensorParallel, invariant: bool,
        first_expert: int = 0,
    ) -> None:  # fmt: skip
        """Store references; arguments: see the class."""
        self.config, self._operations, self._tensor, self._invariant = config, operations, tensor, invariant
        self._first_expert = first_expert

    def mix_experts(self, mixture: Mixture, x_TH: torch.Tensor) -> torch.Tensor:
        """Return the output [T, H] of the mixture-of-experts layer `mixture`, summed over the tensor-parallel ranks.
        With expert parallelism each rank computes the rows of its experts, which come first when sorted; the other rows
        are 0 in its sum. x_TH: input, the normalized hidden states of T tokens."""
        config, experts, (tokens, hidden) = self.config, mixture.experts, x_TH.shape
        weights_TK, chosen_TK = mixture.router.choose(mixture.router.scores(x_TH, self._product))
        count, held = chosen_TK.shape[1], experts.held
        if held < experts.experts:
            chosen_TK = chosen_TK - self._first_expert
            chosen_TK = chosen_TK.masked_fill((chosen_TK < 0) | (chosen_TK > held), held)
        order_N, expert_N, ends_E = sort_copies(chosen_TK, held)
        groups = expert_N.clamp(max=held - 1), ends_E
        plain = config.activation == "silu" and config.swiglu_limit is None
        activate = self._operations.swiglu if plain else experts.activate
        x_NH = x_TH.index_select(0, order_N // count)
        if config.routed_input:
            x_NH = x_NH * weights_TK.view(-1, 1)[order_N].to(x_NH.dtype)
            weights_TK = torch.ones_like(weights_TK)
        up_NX = self._grouped_product(experts.up, x_NH, groups)
        y_NH = self._grouped_product(experts.down, activate(up_NX), groups, experts.first)
        if held < experts.experts:  # rows that no kernel has written
            y_NH = y_NH.masked_fill((expert_N == held)[:, None], 0)
        y_TKH = torch.empty_like(y_NH).index_copy_(0, order_N, y_NH).view(tokens, count, hidden).float()
        total_TH = y_TKH[:, 0] * weights_TK[:, :1]  # one by one: the order of torch's sum may depend on T
        for place in range(1, count):
            total_TH = total_TH + y_TKH[:, place] * weights_TK[:, place : place + 1]
        total_TH = total_TH.to(x_TH.dtype)
        if (shared := mixture.shared) is not None:
            up_TF = self.linear(shared.up, x_TH)
            shared_TH = self._product(self.activate(up_TF, shared.activation, shared.gated), shared.down.weight)
            if mixture.shared_gate is not None:
                shared_TH = self.linear(mixture.shared_gate, x_TH).sigmoid() * shared_TH
            total_TH = total_TH + shared_TH
        return self._tensor.leave(total_TH, "mlp.output")

    def _grouped_product(self, layer: Any, x_NX: torch.Tensor, groups: Sequence[Any], first: int = 0) -> torch.Tensor:
        """Return x Wᵀ + b, [N, Y], with the weight and bias of each row's expert. x_NX: input x, one row for each
        (token, expert) pair, sorted by expert. layer: module with the stacked weights and biases of all experts.
        groups: (expert of each row, exclusive end of each expert's rows). first: first output column to which a bias is
        added."""
        experts = len(groups[1])
        weight_EYX = layer.weight.unflatten(0, (experts, -1))
        y_NY: torch.Tensor = self._operations.grouped_product(x_NX, weight_EYX, groups[1])
        if layer.bias is not None:
            bias_NZ = layer.bias.view(experts, -1)[groups[0]]
            y_NY[:, first : first + bias_NZ.shape[1]] += bias_NZ
        return y_NY

    def activate(self, up_TF: torch.Tensor, activation: str, gated: bool) -> torch.Tensor:
        """Apply the activation function `activation` ("silu" ...) to `up_TF` [T, F] of T tokens. If `gated`, the first
        F/2 columns are the gate: return activation(gate) times the last F/2 columns, [T, F/2]."""
        if not gated:
            return modules.activate(up_TF, activation)
        if activation == "silu":
            return self._operations.swiglu(up_TF)
        gate_TF, up_TF = up_TF.chunk(2, dim=-1)
        return modules.activate(gate_TF, activation) * up_TF

    def apply_norm_and_linear(
        self, norm: Any, x_TH: torch.Tensor, delta_TH: torch.Tensor | None, linear: Any, *, swiglu: bool = False,
        dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Add the residual branch `delta_TH` (None: nothing) to the hidden states `x_TH`, apply `norm` (a module, or
        None) to the sum, and apply the layer `linear` to the result. Return (output of the layer [T, Y], the sum [T,
        H]). The sum may overwrite `x_TH`, which the caller must not use afterwards. swiglu: True: the layer is an MLP's
        gate and up projection; SwiGLU of its output is returned. dtype: dtype of the output; None: the dtype of `x_TH`.
        """
        bias = getattr(linear, "bias", None)
        if self._uses_gemv(x_TH) and isinstance(norm, modules.RMSNorm) and not (swiglu and bias is not None):
            options = {"norm": (norm.weight, norm.epsilon), "delta_1X": delta_TH, "gated": swiglu}
            return self._operations.gemv(x_TH, linear.weight, bias, dtype, **options)
        y_TY = self._product(self.add_norm(norm, x_TH, delta_TH), linear.weight, bias, dtype)
        return self._operations.swiglu(y_TY) if swiglu else y_TY, x_TH

    def apply_post_norm(self, norm: Any, delta_TH: torch.Tensor) -> torch.Tensor:
        """Return a sublayer's output [T, H], ready to be added to the hidden states: `delta_TH` after the post-norm
        `norm` (a module, or None), times the model's residual scale."""
        if norm is not None:
            delta_TH = self.add_norm(norm, delta_TH, None)
        scale = self.config.residual_scale
        return delta_TH if scale == 1 else delta_TH * scale

    def _uses_gemv(self, x: torch.Tensor) -> bool:
        """Return True if the kernel `gemv` computes products of `x` [T, X] with parameters: for a single row (T = 1),
        unless the runner must be batch-invariant."""
        return len(x) == 1 and not self._invariant

    def add_norm(self, norm: Any, x_TH: torch.Tensor, delta_TH: torch.Tensor | None) -> torch.Tensor:
        """Add the residual branch `delta_TH` (None: nothing) to the hidden states `x_TH` in place; return the norm of
        the sum, [T, H]. norm: the norm's module; None: return the sum itself."""
        if norm is None:
            return x_TH if delta_TH is None else x_TH.add_(delta_TH)
        if isinstance(norm, modules.RMSNorm) and norm.tensor is not None and not norm.tensor.trivial:
            wide_TX = x_TH.float()  # a slice of what is normalised; residuals have no such norm
            sum_T1 = self._operations.product(wide_TX.square(), torch.ones_like(wide_TX[:1]))
            mean_T1 = norm.tensor.leave(sum_T1, "norm.mean_square") / (wide_TX.shape[1] * norm.tensor.size)
            return (wide_TX * torch.rsqrt(mean_T1 + norm.epsilon) * norm.weight).to(x_TH.dtype)
        if isinstance(norm, modules.RMSNorm):
            return self._operations.add_norm(x_TH, delta_TH, norm.weight, norm.epsilon)
        return norm(x_TH if delta_TH is None else x_TH.add_(delta_TH))

    def linear(self, linear: modules.Linear, x_TX: torch.Tensor) -> torch.Tensor:
        """Return the output [T, Y] of the layer `linear` for the input `x_TX` of T tokens. The output of a row-parallel
        layer is summed over the tensor-parallel ranks before the bias is added."""
        if not isinstance(linear, modules.RowParallelLinear) or linear.tensor.trivial:
            return self._product(x_TX, linear.weight, linear.bias)
        y_TY = linear.tensor.leave(self._product(x_TX, linear.weight), linear.site)
        return y_TY if linear.bias is None else y_TY + linear.bias

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return x Wᵀ + b, [T, Y] for T rows. If the runner must be batch-invariant, the kernel `product` computes it;
        else torch, or the kernel `gemv` if T is 1 and W a parameter. x: input [T, X]. weight: W [Y, X]. bias: b [Y];
        None: no bias. dtype: dtype of the result; None: the dtype of `x`."""
        if self._invariant:
            return self._operations.product(x, weight, bias, dtype)
        if self._uses_gemv(x) and isinstance(weight, torch.nn.Parameter):  # which no kernel has just written
            return self._operations.gemv(x, weight, bias, dtype)[0]
        if dtype in (None, x.dtype):
            return F.linear(x, weight, bias)
        return torch.mm(x, weight.T, out_dtype=dtype) if x.is_cuda else F.linear(x, weight, bias).to(dtype)
