"""Linear layers, norms, the MLP and the embedding.

Shapes: B sequences, S tokens of a sequence, H hidden, F intermediate, V vocabulary; X and Y input and output size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.model.axis_operations import AxisOperations, Overlap, Recompute, TensorOperations
from meshwright.model.precision import at_least_float32
from meshwright.model.weight_gradients import Taps, WeightGradients, linear
from meshwright.quantization.packing import QuantizedMatmul
from meshwright.spec.config import ModelConfig


class Linear(nn.Module):
    """Linear layer y = x Wᵀ + b with W [y, x]; parameters are uninitialised. `x`, `y`: input and output size; `bias`:
    True for a layer with b; `options`: `device` and `dtype` of the parameters.

    Attributes: `weight_gradients`: queue to which backward defers the computation of the weight gradient; None:
    autograd computes it. `packed`: function that multiplies by a quantized weight; None: the weight is not quantized.
    `adapter`: LoRA adapter; None: the layer has no adapter. `taps`: two dummy inputs, set only during a call of a
    compiled graph. Their gradients carry dy and x from the compiled backward to the queue.
    `ends_recompute`: True for the last product of a block of which backward recomputes all. `discard`: function that
    the output passes before a bias is added to it: `Recompute.discard` if only sums read the output.
    """

    weight_gradients: WeightGradients | None = None  # None: autograd computes them
    packed: QuantizedMatmul | None = None  # the product with a packed weight
    adapter: Any  # `adapters.low_rank.LowRank`, which computes the product in place of `base_product`
    taps: Taps | None = None  # set during a compiled call
    ends_recompute = False
    discard: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)

    def __init__(self, x: int, y: int, bias: bool, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(y, x, **options))
        self.bias = nn.Parameter(torch.empty(y, **options)) if bias else None
        self.adapter = None  # no class attribute: it would hide the submodule

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b, [..., Y], for `x` [..., X], where W is [Y, X]; with a LoRA adapter of matrices A, B and
        scale s, x (W + s B A)ᵀ + b."""
        if self.adapter is None and self.packed is None:
            return self.discard(self.base_product(x, self.bias))
        return self._add_bias(self._product(x))

    def _add_bias(self, y: Tensor) -> Tensor:
        """Return y + b for the layer's output `y` [..., Y] without bias b."""
        y = self.discard(y)
        return y if self.bias is None else y + self.bias

    def _product(self, x: Tensor, overlap: Overlap | None = None) -> Tensor:
        """Return x Wᵀ [..., Y] for `x` [..., X], with the output of a LoRA adapter added if the layer has one, but
        without bias. `overlap`: see `weight_gradients.linear`."""
        if self.adapter is None:
            return self.base_product(x, overlap=overlap)
        return self.adapter.adapted_product(x, self, overlap)

    def base_product(self, x: Tensor, bias: Tensor | None = None, overlap: Overlap | None = None) -> Tensor:
        """Return x Wᵀ + `bias`, [..., Y], for `x` [..., X], without the output of a LoRA adapter. A quantized W takes
        neither bias nor `overlap` (None); with an overlap there is no bias."""
        if self.packed is not None:
            return self.packed(x, self.weight)
        return linear(x, self.weight, bias, self.weight_gradients, self.taps, overlap, self.ends_recompute)


class ParallelLinear(Linear):
    """Base class of linear layers that tensor parallelism splits.

    `x`, `y`: input and output size on this rank; `bias`: True for a layer with bias; `tensor`: communication of tensor
    parallelism; `site`: label of the layer's calls in traces; `options`: `device` and `dtype` of the parameters."""

    def __init__(self, x: int, y: int, bias: bool, tensor: TensorOperations, site: str, **options: Any) -> None:
        super().__init__(x, y, bias, **options)
        self.tensor = tensor
        self.site = site

    def can_overlap(self, column: bool) -> bool:
        """Return True if the layer's products can overlap with their collective calls: its weight is not packed, or its
        adapter computes both products in one autograd function. `column`: True for a column-parallel layer."""
        return self.packed is None if self.adapter is None else self.adapter.can_overlap(self, column)

    def find_overlap(self, column: bool) -> Overlap | None:
        """Return the overlap of the layer's products with their collective calls; None: there is none. `column`: True
        for a column-parallel layer."""
        return self.tensor.overlap(column, self.site) if self.can_overlap(column) else None


class ColumnParallelLinear(ParallelLinear):
    """Column-parallel linear layer: each rank computes some of the output features, for the tokens of all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's output features [B, S, Y] of x Wᵀ + b. `x`: input [B, S, X]; with sequence parallelism
        this rank's token slice of it."""
        overlap = self.find_overlap(column=True)
        if overlap is None:
            return super().forward(self.tensor.enter(x, self.site))
        return self._add_bias(self._product(x, overlap))


class RowParallelLinear(ParallelLinear):
    """Row-parallel linear layer: the ranks' partial products are summed over tensor parallelism before the bias is
    added."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b, [..., Y], with x Wᵀ summed over the tp ranks. `x`: this rank's slice [..., X] of the input
        features. With sequence parallelism, only this rank's token slice of the sum is returned.
        """
        if self.tensor.trivial:
            return super().forward(x)
        overlap = self.find_overlap(column=False)
        y = self._product(x, overlap)
        return self._add_bias(self.tensor.leave(y, self.site) if overlap is None else y)


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension, of `size` elements: x / root mean square(x) * weight (Zhang & Sennrich 2019,
    arXiv:1910.07467, eq. 4).

    `epsilon`: added to the mean square. `centre`: added to the weight; 1 for models that store the weight minus 1
    (Gemma), else 0. `tensor`: communication of tensor parallelism, given if the tp ranks hold slices of the dimension
    that is normalised; None: this rank holds the whole dimension. `options`: `device` and `dtype` of the parameters.
    """

    def __init__(
        self, size: int, epsilon: float, centre: float = 0.0, tensor: TensorOperations | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, **options))
        self.epsilon = epsilon
        self.centre = centre
        self.tensor = tensor

    def factors(self) -> Tensor:
        """Return the factors of the normalised elements, [size]: the weight, or 1 + weight if it is stored as the
        difference from 1 (then in at least float32).
        """
        return self.weight.to(at_least_float32(self.weight.dtype)) + self.centre if self.centre else self.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised `x`, same shape and dtype; computed in float32 or float64."""
        wide = x.to(at_least_float32(x.dtype))
        square = wide.square().mean(-1, keepdim=True)
        if self.tensor is not None:
            square = self.tensor.average(square, "norm.mean_square")
        return (wide * torch.rsqrt(square + self.epsilon) * self.factors()).to(x.dtype)


def normalise(x: Tensor, epsilon: float) -> Tensor:
    """Return `x` divided by its root mean square over the last dimension, same shape and dtype; computed in float32 or
    float64. `epsilon`: added to the mean square."""
    wide = x.to(at_least_float32(x.dtype))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def make_norm(config: ModelConfig, wanted: bool = True, **options: Any) -> Any:
    """Build the norm over the hidden dimension that `config.norm` selects: RMSNorm, or LayerNorm (Ba et al. 2016,
    arXiv:1607.06450), whose kernels sum in at least float32. wanted: False if the model family does not have this norm;
    return None then. options: `device` and `dtype` of its parameters.
    """
    if not wanted:
        return None
    if config.norm == "rmsnorm":
        return RMSNorm(config.hidden, config.norm_epsilon, float(config.zero_centred_norms), **options)
    return nn.LayerNorm(config.hidden, config.norm_epsilon, bias=config.norm_bias, **options)


def activate(x: Tensor, activation: str) -> Tensor:
    """Apply the activation function named `activation` ("silu", "relu", "gelu" or "gelu_tanh") to `x` elementwise and
    return the result."""
    if activation == "silu":
        return F.silu(x)
    return F.relu(x) if activation == "relu" else F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class FeedForward(nn.Module):
    """MLP down(activation(gate) * up) (SwiGLU and variants: Shazeer 2020, arXiv:2002.05202), or, if `config.gated` is
    False, down(activation(up)).

    Gate and up projections are fused: `up.weight` is [2F, H], gate first. `axes`: communication of the mesh axes;
    `width`: intermediate size F on this rank; None: the configuration's F divided by the number of tp ranks; `options`:
    `device` and `dtype` of the parameters."""

    def __init__(self, config: ModelConfig, axes: AxisOperations, width: int | None = None, **options: Any) -> None:
        super().__init__()
        self.gated = config.gated
        self.activation = config.activation
        width = config.intermediate // axes.tensor.size if width is None else width
        outputs = width * (2 if config.gated else 1)
        self.up = ColumnParallelLinear(config.hidden, outputs, config.mlp_bias, axes.tensor, "mlp.input", **options)
        self.down = RowParallelLinear(width, config.hidden, config.mlp_bias, axes.tensor, "mlp.output", **options)
        self.down.ends_recompute = axes.recompute.kind == "full"
        # A post-norm reads the output.
        self.down.discard = (Recompute() if config.post_norms else axes.recompute).discard

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Return the MLP output [B, S, H] for the hidden states `x_BSH` (with sequence parallelism, input and output
        are this rank's token slices)."""
        up = self.up(x_BSH)
        if not self.gated:
            return self.down(activate(up, self.activation))
        gate_BSF, up_BSF = up.chunk(2, dim=-1)
        return self.down(activate(gate_BSF, self.activation) * up_BSF)


class Embedding(nn.Module):
    """Embedding table [rows, hidden] on this rank, with one row for each ID; its gradient is summed in float32 or
    float64.

    `tensor`: communication of tensor parallelism; if given, the table is vocabulary-parallel: each tp rank holds a
    slice of the rows and returns zeros for other IDs; None: the table is unsharded. `options`: `device` and `dtype` of
    the parameters."""

    def __init__(self, rows: int, hidden: int, tensor: TensorOperations | None, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden, **options))
        self.tensor = tensor

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Return the embeddings [B, S, H] of the token or position IDs `ids_BS` [B, S]."""
        if self.tensor is None or self.tensor.trivial:
            return _Lookup.apply(self.weight, ids_BS)
        places_BS = ids_BS - self.tensor.rank * self.weight.shape[0]
        elsewhere_BS = (places_BS < 0) | (places_BS >= self.weight.shape[0])
        rows_BSH = _Lookup.apply(self.weight, places_BS.masked_fill(elsewhere_BS, 0))
        return rows_BSH.masked_fill(elsewhere_BS[..., None], 0.0)


def scale_embedding(x_BSH: Tensor, factor: float) -> Tensor:
    """Return the embeddings `x_BSH` times `factor`, which is first rounded to their dtype, as in Gemma."""
    return x_BSH if factor == 1 else x_BSH * _round_number(factor, x_BSH.dtype)


@cache
def _round_number(number: float, dtype: torch.dtype) -> float:
    """Return `number` rounded to `dtype`."""
    return torch.tensor(number, dtype=dtype).item()


class _Lookup(torch.autograd.Function):
    """Embedding lookup whose weight gradient is summed in float32 or float64."""

    @staticmethod
    def forward(context: Any, weight_VH: Tensor, ids_BS: Tensor) -> Tensor:
        """Return the rows [B, S, H] of the embedding table `weight_VH` for the IDs `ids_BS`."""
        context.save_for_backward(ids_BS)
        context.rows = weight_VH.shape[0]
        context.dtype = weight_VH.dtype
        return F.embedding(ids_BS, weight_VH)

    @staticmethod
    def backward(context: Any, gradient_BSH: Tensor) -> tuple[Tensor, None]:
        """Return the gradient [V, H] of the embedding table, given the gradient `gradient_BSH` of the looked-up rows,
        and None for the IDs."""
        (ids_BS,) = context.saved_tensors
        wide_BSH = gradient_BSH.to(at_least_float32(context.dtype))
        wide_VH = torch.ops.aten.embedding_dense_backward(wide_BSH, ids_BS, context.rows, -1, False)
        return wide_VH.to(context.dtype), None
