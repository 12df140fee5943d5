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
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.model.grouped_product import grouped_product

Multiply = Callable[..., torch.Tensor]


class GradientSums(Protocol):
    """Accumulation buffers of parameter gradients."""

    def accumulate(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Add `gradient`, of the parameter's shape, to the parameter's buffer."""

    def accumulate_product(self, parameter: nn.Parameter, dy_NY: torch.Tensor, x_NX: torch.Tensor) -> None:
        """Add dyᵀ x, the gradient of a weight [Y, X], to the parameter's buffer."""


class _Product(NamedTuple):
    """Deferred weight gradient of `parameter`: `multiply(*operands)`, or dyᵀ x of the operands (dy, x) if `multiply` is
    None."""

    parameter: nn.Parameter
    multiply: Multiply | None
    operands: tuple[torch.Tensor, ...]


class WeightGradients:
    """Queues of deferred weight gradients, one for each backward pass (key: stage, replica and micro-batch); `run`
    computes them and adds them to the accumulation buffers `sums`."""

    def __init__(self, sums: GradientSums) -> None:
        self._sums = sums
        self._queues: dict[Hashable, deque[_Product]] = {}
        self._collects: deque[_Product] | None = None

    @contextmanager
    def collecting(self, key: Hashable) -> Iterator[None]:
        """Context manager inside which backward queues its weight gradients under `key`, a name of the pass, until
        `run(key)`. Outside of it backward computes them at once."""
        assert self._collects is None and key not in self._queues, key
        self._collects = self._queues[key] = deque()
        try:
            yield
        finally:
            self._collects = None

    def put(self, parameter: nn.Parameter, multiply: Multiply | None, *operands: torch.Tensor) -> None:
        """Add a parameter's gradient to the accumulation buffers, at once or, inside `collecting`, when `run` is
        called. The gradient is `multiply(*operands)`, reshaped to the parameter; multiply=None: dyᵀ x of the two
        operands (dy, x)."""
        product = _Product(parameter, multiply, operands)
        if self._collects is None:
            self._accumulate(product)
        else:
            self._collects.append(product)

    def _accumulate(self, product: _Product) -> None:
        """Compute a gradient and add it to the accumulation buffers."""
        parameter, multiply, operands = product
        if multiply is None:
            self._sums.accumulate_product(parameter, *operands)
        else:
            self._sums.accumulate(parameter, multiply(*operands).view(parameter.shape))

    def parameters(self, key: Hashable) -> list[nn.Parameter]:
        """Return the parameters whose gradients are queued under `key`, in the order in which `run` computes them.
        `key`: that given to `collecting`."""
        return [product.parameter for product in self._queues[key]]

    def run(self, key: Hashable) -> None:
        """Compute the gradients queued under `key`, add them to the accumulation buffers, and free the operands one by
        one. `key`: that given to `collecting`."""
        queue = self._queues.pop(key)
        with torch.no_grad():
            while queue:
                self._accumulate(queue.popleft())


def take_weight_gradients(model: nn.Module, queue: WeightGradients | None, smallest: int = 0) -> None:
    """Make all linear layers of `model` with at least `smallest` weight elements hand their weight gradients to `queue`
    in backward; for smaller ones, and for queue=None, autograd computes them."""
    for module in model.modules():
        if hasattr(type(module), "weight_gradients"):
            elements = sum(parameter.numel() for parameter in module.parameters(recurse=False))
            module.weight_gradients = queue if elements >= smallest else None  # type: ignore[assignment]


class Taps(NamedTuple):
    """Dummy inputs (zero-stride zeros) of a linear layer in a compiled graph; `dy` [..., Y] gets the layer's output
    gradient as its gradient in backward, `x` [..., X] the layer's input.
    """

    dy: torch.Tensor
    x: torch.Tensor


def linear(
    x: torch.Tensor,
    weight: nn.Parameter,
    bias: torch.Tensor | None,
    queue: WeightGradients | None,
    taps: Taps | None = None,
) -> torch.Tensor:
    """Return x Wᵀ + b, [..., Y], for x [..., X] and weight W [Y, X]. `queue`: gets the weight gradient in backward;
    None: autograd computes it. `taps`: in a compiled graph, two dummy inputs through whose gradients dy and x reach the
    queue; None: the layer runs outside of the graph."""
    if queue is None or not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    if not torch.compiler.is_compiling():
        return _apply_function(_Linear, x, weight, bias, queue)
    if taps is None:
        return _uncompiled(_Linear, x, weight, bias, queue)
    return _apply_function(_TappedLinear, x, weight, bias, taps.dy, taps.x)


class _Linear(torch.autograd.Function):
    """Linear layer whose backward puts the weight gradient into a queue."""

    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, weight_YX: nn.Parameter, bias: torch.Tensor | None, queue: WeightGradients
    ) -> torch.Tensor:
        """Return x Wᵀ + b, [..., Y], for x [..., X]. `queue`: gets the weight gradient in backward."""
        context.save_for_backward(x, weight_YX)
        context.weight, context.queue = weight_YX, queue
        return F.linear(x, weight_YX, bias)

    @staticmethod
    def backward(context: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of `x` and `bias`; put the weight gradient into the queue."""
        x, weight_YX = context.saved_tensors
        needs_x, needs_weight, needs_bias, _ = context.needs_input_grad
        dy_NY = dy.flatten(0, -2)
        dx = (dy_NY @ weight_YX).view(x.shape) if needs_x else None
        if needs_weight:
            context.queue.put(
                context.weight, None, dy_NY, x.detach().flatten(0, -2)
            )  # detached: a queue must not hold the graph
        return dx, None, dy_NY.sum(dim=0) if needs_bias else None, None


class _TappedLinear(torch.autograd.Function):
    """Linear layer for compiled graphs whose backward hands dy and x out as the gradients of two extra inputs (taps),
    so that the caller can queue the weight gradient dyᵀ x.
    """

    @staticmethod
    def forward(
        context: Any,
        x: torch.Tensor,
        weight_YX: nn.Parameter,
        bias: torch.Tensor | None,
        dy_tap: torch.Tensor,
        x_tap: torch.Tensor,
    ) -> torch.Tensor:
        """Return x Wᵀ + b, [..., Y], for x [..., X]. `dy_tap` [..., Y] and `x_tap` [..., X] are not read: in backward
        they get dy and x as their gradients.
        """
        context.save_for_backward(x, weight_YX)
        return F.linear(x, weight_YX, bias)

    @staticmethod
    def backward(context: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of `x` and `bias`, and dy and x as those of the taps."""
        x, weight_YX = context.saved_tensors
        needs_x, _, needs_bias = context.needs_input_grad[:3]
        dx = (dy.flatten(0, -2) @ weight_YX).view(x.shape) if needs_x else None
        return dx, None, dy.flatten(0, -2).sum(dim=0) if needs_bias else None, dy, x


class _MakeTaps(torch.autograd.Function):
    """Creates the two taps of a linear layer in a compiled graph: dummy inputs whose gradients are the layer's dy and
    x; its backward puts the weight gradient dyᵀ x into a queue.
    """

    @staticmethod
    def forward(
        context: Any, weight_YX: nn.Parameter, queue: WeightGradients, rows: tuple[int, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Return two zero-stride tensors of zeros, [*rows, Y] and [*rows, X], for a linear layer of weight [Y, X]
        with input [*rows, X]. `queue`: gets the weight gradient in backward.
        """
        context.weight, context.queue = weight_YX, queue
        return tuple(weight_YX.new_zeros(()).expand(*rows, size) for size in weight_YX.shape)

    @staticmethod
    def backward(context: Any, dy: torch.Tensor, x: torch.Tensor) -> tuple[None, ...]:
        """Put the weight gradient dyᵀ x into the queue; dy and x arrive as gradients of the taps."""
        context.queue.put(context.weight, None, dy.flatten(0, -2), x.flatten(0, -2))
        return None, None, None


class Tapped(Protocol):
    """Linear layer that can hand its weight gradient to a queue when compiled. weight: [Y, X]. weight_gradients: the
    queue, None for autograd. taps: dummy inputs of the running call whose gradients are dy and x; None outside of a
    compiled call.
    """

    weight: nn.Parameter
    weight_gradients: WeightGradients | None
    taps: Taps | None


@contextmanager
def tapping(products: Sequence[Tapped], rows: tuple[int, ...]) -> Iterator[None]:
    """Context manager that gives the linear layers `products` their taps, so that a compiled call inside it hands their
    weight gradients to their queues. `rows`: shape of their inputs [*rows, X] without the last dim, such as (batch,
    tokens)."""
    products = [each for each in products if each.weight_gradients is not None] if torch.is_grad_enabled() else []
    for each in products:
        each.taps = Taps(*_MakeTaps.apply(each.weight, each.weight_gradients, rows))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for each in products:
            each.taps = None


def grouped_linear(
    x_NX: torch.Tensor, weight: nn.Parameter, ends_E: torch.Tensor, queue: WeightGradients | None
) -> torch.Tensor:
    """Return x Wᵀ, [N, Y], for token copies `x_NX` sorted by expert, each with its expert's W. `weight` [E x Y, X]: the
    W of all experts stacked; `ends_E`: exclusive end index of each expert's copies; `queue`: gets the weight gradient
    in backward; None: autograd computes it."""
    if queue is None or not torch.is_grad_enabled():
        return grouped_product(x_NX, _unstack_experts(weight, ends_E), ends_E)
    apply = _uncompiled if torch.compiler.is_compiling() else _apply_function
    return apply(_GroupedLinear, x_NX, weight, ends_E, queue)


def _unstack_experts(weight: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """View the E experts' weights stacked along dim 0, [E x Y, X], as [E, Y, X]. `ends_E`: any tensor of length E."""
    return weight.view(len(ends_E), -1, weight.shape[1])


class _GroupedLinear(torch.autograd.Function):
    """Grouped linear layer whose backward puts the weight gradient into a queue."""

    @staticmethod
    def forward(
        context: Any, x_NX: torch.Tensor, weight: nn.Parameter, ends_E: torch.Tensor, queue: WeightGradients
    ) -> torch.Tensor:
        """Return x Wᵀ, [N, Y], as `grouped_linear`. `queue`: gets the weight gradient in backward."""
        context.save_for_backward(x_NX, weight, ends_E)
        context.weight, context.queue = weight, queue
        return torch.ops.meshwright.grouped_product(x_NX, _unstack_experts(weight, ends_E), ends_E)  # type: ignore[no-any-return]

    @staticmethod
    def backward(context: Any, dy_NY: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of `x_NX`; put that of the stacked experts' weight into the queue of `forward`."""
        x_NX, weight, ends_E = context.saved_tensors
        needs_x, needs_weight = context.needs_input_grad[:2]
        operators = torch.ops.meshwright
        dx_NX = operators.grouped_product_input(dy_NY, _unstack_experts(weight, ends_E), ends_E) if needs_x else None
        if needs_weight:
            context.queue.put(context.weight, operators.grouped_product_weight, dy_NY, x_NX.detach(), ends_E)
        return dx_NX, None, None, None


def _apply_function(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    """Call `function.apply` on `arguments` and return its output tensor; typed, as torch's own `apply` is not."""
    return function.apply(*arguments)  # type: ignore[no-any-return]


_uncompiled = _apply_function


def exclude_from_compiled_graphs() -> None:
    """Make linear layers with a queue but without taps run outside of compiled graphs from now on, since a compiled
    backward cannot write to a queue. Call it right before the first compilation: it imports the compiler, which takes
    over a second.
    """
    global _uncompiled
    if _uncompiled is _apply_function:
        _uncompiled = torch.compiler.disable(_apply_function)
