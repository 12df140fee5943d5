"""Weight gradients of linear layers: added straight to the accumulation buffer, or queued by a split backward pass.

The backward of y = x Wᵀ needs dy W immediately, but dyᵀ x only before the optimizer step (zero bubble: Qi et al. 2024,
arXiv:2401.10241, section 1). While a queue collects, dyᵀ x is deferred: x and dy are saved until `run`. All other
parameters (norms, biases, embedding, head) are differentiated in the first half. The deferred product accumulates
into the sum over micro-batches itself, which saves one pass over the memory of every weight.

A compiled backward cannot write to a queue. So a compiled linear layer gets two tensors, its taps, whose gradients it
declares to be dy and x; the backward of the taps' creator puts them into the queue.

Shapes: N tokens, X and Y input and output size, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.model.axis_operations import Overlap
from meshwright.model.grouped_product import grouped_product, sum_bias_gradients

Multiply = Callable[..., Tensor]

WAITING = "waiting"
"""Key of the queue of the one computation that waits for a collective call to be in flight."""


class GradientBuffers(Protocol):
    """Interface of the accumulation buffers of parameter gradients, to which deferred weight gradients are added."""

    def accumulate(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add `gradient`, of the parameter's shape, to the parameter's buffer."""

    def accumulate_product(self, parameter: nn.Parameter, dy_NY: Tensor, x_NX: Tensor) -> None:
        """Add dyᵀ x, the gradient of the weight `parameter` [Y, X], to the parameter's buffer, for output gradient
        `dy_NY` and input `x_NX` of N tokens."""


class _DeferredGradient(NamedTuple):
    """Deferred computation of the gradient of `parameter`: `multiply(*operands)`. If `multiply` is None, the gradient
    is dyᵀ x, and `operands` are (dy, x).
    """

    parameter: nn.Parameter
    multiply: Multiply | None
    operands: tuple[Tensor, ...]


class WeightGradients:
    """Queues of deferred weight-gradient computations for split backward passes, which compute input gradients first
    and weight gradients later. Each pass has a queue, identified by a key such as (stage, replica, micro-batch).
    `run(key)` executes the computations and adds the gradients to the accumulation buffers `sums`."""

    def __init__(self, sums: GradientBuffers) -> None:
        self._sums = sums
        self._queues: dict[Hashable, deque[_DeferredGradient]] = {}
        self._collects: deque[_DeferredGradient] | None = None
        self.overlapped: Collection[nn.Parameter] = ()
        """Parameters whose computations, outside of `collecting`, wait for the next of these or for `run_waiting`."""

    @contextmanager
    def collecting(self, key: Hashable) -> Iterator[None]:
        """Context manager around the backward pass identified by `key`: inside it, weight-gradient computations passed
        to `submit` are queued until `run(key)`. Outside of it, `submit` executes them immediately."""
        assert self._collects is None and key not in self._queues, key
        self._collects = self._queues[key] = deque()
        try:
            yield
        finally:
            self._collects = None

    def submit(self, parameter: nn.Parameter, multiply: Multiply | None, *operands: Tensor) -> None:
        """Add a gradient of `parameter` to the accumulation buffers: immediately or, inside `collecting`, when `run` is
        called.

        `multiply`: function of the operands that returns the gradient, in any shape with the parameter's number of
        elements; None: the gradient is dyᵀ x, with the operands dy [..., output] and x [..., input].
        """
        product = _DeferredGradient(parameter, multiply, operands)
        if self._collects is not None:
            self._collects.append(product)
        elif parameter in self.overlapped:
            self.run_waiting()
            self._queues[WAITING] = deque([product])
        else:
            self._accumulate(product)

    @contextmanager
    def overlapping(self, communicator: Any) -> Iterator[None]:
        """Context manager around the passes of a step, in which the `communicator` runs the waiting computation while a
        collective call of backward is in flight."""
        communicator.meanwhile = self.run_waiting
        try:
            yield
        finally:
            communicator.meanwhile = None
            self._queues.pop(WAITING, None)  # left only by an error

    def run_waiting(self) -> None:
        """Execute the computation that waits, if there is one: while a collective call is in flight, or at the end of a
        backward pass."""
        if WAITING in self._queues:
            self.run(WAITING)

    def _accumulate(self, product: _DeferredGradient) -> None:
        """Execute one deferred computation, `product`, and add its gradient to the accumulation buffers."""
        parameter, multiply, operands = product
        if multiply is None:
            self._sums.accumulate_product(parameter, *operands)
        else:
            self._sums.accumulate(parameter, multiply(*operands).view(parameter.shape))

    def parameters(self, key: Hashable) -> list[nn.Parameter]:
        """Return the parameters whose gradient computations are queued under `key`, in the order in which `run`
        executes the computations. `key`: identifies a backward pass; the value that was passed to `collecting`."""
        return [product.parameter for product in self._queues[key]]

    def run(self, key: Hashable) -> None:
        """Execute the computations queued under `key`: add each gradient to the accumulation buffers and free its
        operands. `key`: identifies a backward pass; the value that was passed to `collecting`."""
        queue = self._queues.pop(key)
        with torch.no_grad():
            while queue:
                self._accumulate(queue.popleft())


def defer_weight_gradients(model: nn.Module, queue: WeightGradients | None, smallest: int = 0) -> None:
    """Make the linear layers of `model` with at least `smallest` parameter elements defer the computation of their
    weight gradients to `queue` in backward. Autograd computes the weight gradients of smaller layers or, if `queue` is
    None, of all layers."""
    for module in model.modules():
        if hasattr(type(module), "weight_gradients"):
            elements = sum(parameter.numel() for parameter in module.parameters(recurse=False))
            module.weight_gradients = queue if elements >= smallest else None  # type: ignore[assignment]


class Taps(NamedTuple):
    """Two dummy inputs, zeros of stride 0 without memory, that a linear layer y = x Wᵀ takes in a compiled graph.
    Backward of the graph returns as gradients of these inputs: for the field `dy` [..., Y] the layer's output gradient,
    for the field `x` [..., X] the layer's input."""

    dy: Tensor
    x: Tensor


def linear(
    x: Tensor, weight: nn.Parameter, bias: Tensor | None, queue: WeightGradients | None, taps: Taps | None = None,
    overlap: Overlap | None = None, ends_recompute: bool = False,
) -> Tensor:  # fmt: skip
    """Return x Wᵀ + b, [..., Y], for x [..., X], weight W [Y, X] and `bias` b (None: 0).

    `queue`: backward defers the computation of the weight gradient to it; None: autograd computes the weight gradient.
    `taps`: dummy inputs whose gradients carry dy and x out of a compiled backward to the queue; None: a layer with a
    queue runs outside of compiled graphs. `overlap`: overlap of the products with their collective calls; if
    `overlap.forward` is "gather", x is this rank's token slice; if it is "scatter", the result is. None: nothing is
    communicated. `ends_recompute`: True for the last product of a block under full activation checkpointing:
    recomputation stops before it."""
    queued = queue is not None and torch.is_grad_enabled() and weight.requires_grad
    if overlap is None and not queued:
        return F.linear(x, weight, bias)
    if taps is not None and queued and torch.compiler.is_compiling():
        return _Linear.apply(x, weight, bias, None, overlap, None, *taps)
    ends_recompute = ends_recompute and not torch.compiler.is_compiling()
    saved = _apply_uncompiled(SaveOperands, x, weight).grad_fn if ends_recompute else None
    return (_apply_uncompiled if queued else apply_function)(_Linear, x, weight, bias, queue, overlap, saved)


class SaveOperands(torch.autograd.Function):
    """Autograd function that saves the operands of a linear layer before its product is computed: a recomputation by
    activation checkpointing ends with the last tensor that backward needs, and so without a block's last product."""

    @staticmethod
    def forward(context: Any, *operands: Tensor) -> Tensor:
        """Return an empty tensor, whose `grad_fn` has the saved `operands`; no backward pass runs through it."""
        context.save_for_backward(*operands)
        return operands[0].new_empty(0)


class _Linear(torch.autograd.Function):
    """Autograd function of a linear layer. Its backward computes the gradients of input and bias, but only hands dy and
    x to a queue, which computes the weight gradient dyᵀ x immediately or later.

    In a compiled graph backward cannot write to a queue. There it returns dy and x as the gradients of two extra
    inputs, the taps. Outside of the graph, the backward of the function that made the taps receives them and queues the
    computation. Without queue and taps backward returns the weight gradient."""

    @staticmethod
    def forward(
        context: Any, x: Tensor, weight_YX: nn.Parameter, bias: Tensor | None, queue: WeightGradients | None,
        overlap: Overlap | None, saved: Any, *taps: Tensor,
    ) -> Tensor:  # fmt: skip
        """Return x Wᵀ + b, [..., Y], for x [..., X], W (`weight_YX`) and b [Y] (`bias`; None: 0). `queue`: receives dy
        and x in backward. `overlap`: see `linear`. `saved`: context of `SaveOperands` that has x and W; None: they are
        saved here. `taps`: none, or those of dy [..., Y] and x [..., X], which are not read."""
        if overlap is None or not overlap.forward:
            y = F.linear(x, weight_YX, bias)
        else:
            assert bias is None, "it is added to the sum"
            x, y = multiply_overlapped(x, weight_YX.T, overlap, overlap.forward, overlap.site)
        context.operands = saved
        context.save_for_backward(*((x, weight_YX) if saved is None else ()))
        context.weight = weight_YX
        context.queue = queue
        context.overlap = overlap
        context.tapped = len(taps) > 0
        return y

    @staticmethod
    def backward(context: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `x` and `bias`, and of the weight or the taps; or hand (dy, x) to the queue, which
        computes the weight gradient."""
        # Read once, as activation checkpointing allows.
        x, weight_YX = (context.operands or context).saved_tensors
        context.operands = None  # frees them
        needs_x, needs_weight, needs_bias = context.needs_input_grad[:3]
        overlap, dx = context.overlap, None
        if overlap is not None and overlap.backward:
            dy, dx = multiply_overlapped(dy, weight_YX, overlap, overlap.backward, overlap.site + ".backward")
            if overlap.forward == "gather" and not overlap.saves_gathered:
                x = torch.ops.meshwright.gather_from(x, overlap.axis, overlap.site, 1)
        dy_NY = dy.flatten(0, -2)
        if dx is None and needs_x:
            dx = (dy_NY @ weight_YX).view(x.shape)
        d_bias = dy_NY.sum(dim=0) if needs_bias else None
        if context.tapped:
            return dx, None, d_bias, None, None, None, dy, x
        x_NX, d_weight = x.detach().flatten(0, -2), None  # detached: a queue must not hold the graph
        if needs_weight and context.queue is not None:
            context.queue.submit(context.weight, None, dy_NY, x_NX)
        elif needs_weight:
            d_weight = dy_NY.T @ x_NX
        return dx, d_weight, d_bias, None, None, None


def multiply_overlapped(
    x: Tensor, matrix: Tensor, overlap: Overlap, call: str, site: str, low: tuple[Tensor, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Multiply `x` by `matrix`, overlapped with the collective `call`: "gather", "scatter" or "reduce". Return (the
    operand of the weight gradient: `x`, gathered unless backward gathers it again; the product). `site`: label of the
    calls in traces. `low`: operand and matrix of a further product, which "scatter" and "reduce" add; or ()."""
    if call != "gather":
        return x, torch.ops.meshwright.product_sum([x, *low[:1]], [matrix, *low[1:]], overlap.axis, site, call)
    saves_gathered = overlap.saves_gathered or overlap.forward != "gather"
    y, gathered = torch.ops.meshwright.gather_product(x, matrix, overlap.axis, site, saves_gathered)
    return gathered if saves_gathered else x, y


class _MakeTaps(torch.autograd.Function):
    """Autograd function that makes the two taps of a linear layer: dummy inputs of a compiled graph, whose gradients
    are the layer's dy and x. Its backward runs outside of the graph and queues the computation of the weight gradient
    dyᵀ x."""

    @staticmethod
    def forward(
        context: Any, weight_YX: nn.Parameter, queue: WeightGradients, rows: tuple[int, ...]
    ) -> tuple[Tensor, ...]:
        """Return the taps of a linear layer with the weight `weight_YX` and inputs [*rows, X]: zeros [*rows, Y] and
        [*rows, X] that use no memory (stride 0). `queue`: receives the operands dy and x in backward.
        """
        context.weight = weight_YX
        context.queue = queue
        return tuple(weight_YX.new_zeros(()).expand(*rows, size) for size in weight_YX.shape)

    @staticmethod
    def backward(context: Any, dy: Tensor, x: Tensor) -> tuple[None, ...]:
        """Put the computation of the weight gradient dyᵀ x into the queue. `dy` and `x` arrive as the gradients of the
        taps."""
        context.queue.submit(context.weight, None, dy.flatten(0, -2), x.flatten(0, -2))
        return None, None, None


class LinearLayer(Protocol):
    """Interface of a linear layer y = x weightᵀ + bias that can defer its weight gradient to a queue, also in a
    compiled graph.

    weight: [Y, X], Y outputs and X inputs; those of E experts are stacked, [E x Y, X]. bias: [Y], for experts [E x Z]
    with Z <= Y; None: none. weight_gradients: the queue; None: autograd computes the weight gradient. taps: set only
    during a call of a compiled graph: two dummy inputs, whose gradients in the compiled backward are dy and x, the
    operands that the queue needs; otherwise None."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    weight_gradients: WeightGradients | None
    taps: Taps | None


@contextmanager
def attach_taps(layers: Collection[LinearLayer], rows: tuple[int, ...]) -> Iterator[None]:
    """Context manager around a compiled call. Inside it, those of the linear `layers` that have a queue of deferred
    weight gradients also have taps. Taps are dummy inputs whose gradients carry dy and x to the queue. `rows`: shape of
    the layers' inputs without the last dim, such as (batch, tokens)."""
    for layer in layers if torch.is_grad_enabled() else ():
        if layer.weight_gradients and layer.weight.requires_grad:
            layer.taps = Taps(*_MakeTaps.apply(layer.weight, layer.weight_gradients, rows))
    try:
        yield
    finally:
        for layer in layers:
            if layer.taps is not None:  # otherwise a new attribute would cause another compilation
                layer.taps = None


def grouped_linear(x_NX: Tensor, layer: LinearLayer, ends_E: Tensor, first: int = 0) -> Tensor:
    """Return x Wᵀ + b, [N, Y], for N token copies `x_NX` sorted by expert. (A token has one copy for each of its
    experts.) Each copy is multiplied by the W, and gets the b, of its expert. In backward, the computation of the
    weight gradient is deferred to the layer's queue; without a queue autograd computes it.

    `layer`: weights and biases of E experts; `ends_E`: exclusive end index of each expert's copies; `first`: index of
    the first output to which b, which may be shorter than Y, is added.
    """
    queue = layer.weight_gradients
    if queue is None or not torch.is_grad_enabled() or not layer.weight.requires_grad:
        return _multiply_experts(x_NX, layer.weight, layer.bias, ends_E, first)
    return _apply_uncompiled(_GroupedLinear, x_NX, layer.weight, layer.bias, ends_E, first, queue)


def _multiply_experts(x_NX: Tensor, weight: Tensor, bias: Tensor | None, ends_E: Tensor, first: int) -> Tensor:
    """Return the grouped product of `x_NX` with weights and biases that are stacked by expert; arguments and result are
    those of `grouped_linear`."""
    bias_EZ = None if bias is None else _unstack_experts(bias, ends_E)
    return grouped_product(x_NX, _unstack_experts(weight, ends_E), ends_E, bias_EZ, first)


def _unstack_experts(stacked: Tensor, ends_E: Tensor) -> Tensor:
    """View the weights or biases of E experts, stacked along dim 0 as [E x Y, ...], as [E, Y, ...]. `ends_E`: tensor of
    length E, of which only the length is read."""
    return stacked.unflatten(0, (len(ends_E), -1))


class _GroupedLinear(torch.autograd.Function):
    """Autograd function of a grouped linear layer (one weight matrix for each expert's group of token copies). Its
    backward computes the input gradient and hands the operands of the weight gradient to a queue, which computes it
    immediately or later."""

    @staticmethod
    def forward(
        context: Any, x_NX: Tensor, weight: nn.Parameter, bias: Tensor | None, ends_E: Tensor,
        first: int, queue: WeightGradients,
    ) -> Tensor:  # fmt: skip
        """Return x Wᵀ + b, [N, Y], for N token copies `x_NX` (one for each of a token's experts), sorted by expert.

        `weight`, `bias`: weights and biases of all E experts, stacked; `ends_E`: exclusive end index of each expert's
        copies; `first`: index of the first output to which b is added; `queue`: receives the operands of the weight
        gradient in backward."""
        context.save_for_backward(x_NX, weight, ends_E)
        context.weight = weight
        context.queue = queue
        context.biased = None if bias is None else slice(first, first + len(bias) // len(ends_E))
        return _multiply_experts(x_NX, weight, bias, ends_E, first)

    @staticmethod
    def backward(context: Any, dy_NY: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `x_NX` and the bias, given the output gradient `dy_NY`, and None for the other
        inputs. Put the operands of the weight gradient into the queue that was passed to `forward`."""
        x_NX, weight, ends_E = context.saved_tensors
        needs_x, needs_weight, needs_bias = context.needs_input_grad[:3]
        operators = torch.ops.meshwright
        dx_NX = d_bias = None
        if needs_x:
            dx_NX = operators.grouped_product_input(dy_NY, _unstack_experts(weight, ends_E), ends_E)
        if needs_weight:
            context.queue.submit(context.weight, operators.grouped_product_weight, dy_NY, x_NX.detach(), ends_E)
        if needs_bias:
            d_bias = sum_bias_gradients(dy_NY[:, context.biased], ends_E).flatten()
        return dx_NX, None, d_bias, None, None, None


def apply_function(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Call the autograd function `function` on `arguments` and return its output tensor."""
    return function.apply(*arguments)


_apply_uncompiled = apply_function
"""Outside of compiled graphs, once `exclude_from_compiled_graphs` was called."""


def exclude_from_compiled_graphs() -> None:
    """Exclude linear layers that have a queue of weight gradients but no taps from all graphs compiled later. (A
    compiled backward cannot write to a queue; taps are dummy inputs whose gradients carry the operands out of the
    graph.) Call this function right before the first compilation: it imports torch's compiler, which takes over a
    second.
    """
    global _apply_uncompiled
    if _apply_uncompiled is apply_function:
        _apply_uncompiled = torch.compiler.disable(apply_function)
