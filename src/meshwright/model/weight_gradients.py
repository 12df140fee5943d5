"""Where the weight gradients of products go: straight into the buffer in which they are summed, or, in a split backward
pass, into a queue for later.

A linear map y = x Wᵀ needs dy W on the way back, for whoever waits for dx, and dyᵀ x, for which nobody waits before the
optimizer's step (Qi et al. 2024, arXiv 2401.10241, section 1). While a queue collects, the second product is not
computed: x and dy are kept until it is. Everything else of a backward pass (norms, biases, embedding, head) is done in
the first half. When it is computed, it is added to the sum over micro-batches by the product itself, which saves a pass
over the memory of every weight.

A compiled backward pass can put nothing into a queue: it has results. So a compiled product is given two tensors of its
own, its taps, whose gradients it says are dy and x; who made the taps puts these two into the queue.

Shapes: N rows, X and Y sizes in and out, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.model.grouped_product import grouped_product

Multiply = Callable[..., torch.Tensor]


class Sums(Protocol):
    """Where gradients are summed."""

    def accumulate(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Add a gradient of the parameter's shape."""

    def accumulate_product(self, parameter: nn.Parameter, dy_NY: torch.Tensor, x_NX: torch.Tensor) -> None:
        """Add dyᵀ x, the gradient of a parameter [Y, X]."""


@dataclass(frozen=True, slots=True)
class _Product:
    """A weight gradient to be computed: of `parameter`, by `multiply(dy, x, *rest)`; None: dyᵀ x."""

    parameter: nn.Parameter
    multiply: Multiply | None
    operands: tuple[torch.Tensor, ...]

    def add_to(self, sums: Sums) -> None:
        if self.multiply is None:
            sums.accumulate_product(self.parameter, *self.operands)
        else:
            sums.accumulate(self.parameter, self.multiply(*self.operands).view(self.parameter.shape))


class WeightGradients:
    """The weight gradients of a model's products on their way to `sums`, and what input gradients have left to do, by
    backward pass (a key: stage, replica and micro-batch)."""

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        self._queues: dict[Hashable, deque[_Product]] = {}
        self._collects: deque[_Product] | None = None

    @contextmanager
    def collecting(self, key: Hashable) -> Iterator[None]:
        """Backward passes inside leave their weight gradients to `run(key)`; outside they compute them."""
        assert self._collects is None and key not in self._queues, key
        self._collects = self._queues[key] = deque()
        try:
            yield
        finally:
            self._collects = None

    def put(self, parameter: nn.Parameter, multiply: Multiply | None, *operands: torch.Tensor) -> None:
        """The parameter's gradient is `multiply(*operands)`, in any shape of as many elements; None: dyᵀ x."""
        product = _Product(parameter, multiply, operands)
        if self._collects is None:
            product.add_to(self._sums)
        else:
            self._collects.append(product)

    def parameters(self, key: Hashable) -> list[nn.Parameter]:
        """Whose gradients are still to come, in the order in which `run` gives them: that of the backward pass."""
        return [product.parameter for product in self._queues[key]]

    def run(self, key: Hashable) -> None:
        """Compute what was queued; operands are freed as they have been used."""
        queue = self._queues.pop(key)
        with torch.no_grad():
            while queue:
                queue.popleft().add_to(self._sums)


def take_weight_gradients(model: nn.Module, queue: WeightGradients | None, smallest: int = 0) -> None:
    """Have the model's products give their weight gradients to `queue`, those of at least `smallest` elements; None: to
    autograd, as at first."""
    for module in model.modules():
        if hasattr(type(module), "weight_gradients"):
            elements = sum(parameter.numel() for parameter in module.parameters(recurse=False))
            module.weight_gradients = queue if elements >= smallest else None  # type: ignore[assignment]


class Taps(NamedTuple):
    """Zeros without memory whose gradients are those of a product's result [..., Y], and its input [..., X]."""

    dy: torch.Tensor
    x: torch.Tensor


def linear(
    x: torch.Tensor,
    weight: nn.Parameter,
    bias: torch.Tensor | None,
    queue: WeightGradients | None,
    taps: Taps | None = None,
) -> torch.Tensor:
    """x Wᵀ + b for x [..., X] and W [Y, X]. taps: of compiled products, those of this call."""
    if queue is None or not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    if not torch.compiler.is_compiling():
        return _apply(_Linear, x, weight, bias, queue)
    if taps is None:
        return _uncompiled(_Linear, x, weight, bias, queue)
    return _apply(_TappedLinear, x, weight, bias, taps.dy, taps.x)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, weight_YX: nn.Parameter, bias: torch.Tensor | None, queue: WeightGradients
    ) -> torch.Tensor:
        context.save_for_backward(x, weight_YX)
        context.weight, context.queue = weight_YX, queue
        return F.linear(x, weight_YX, bias)

    @staticmethod
    def backward(context: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_YX = context.saved_tensors
        needs_x, needs_weight, needs_bias, _ = context.needs_input_grad
        dy_NY = dy.flatten(0, -2)
        dx = (dy_NY @ weight_YX).view(x.shape) if needs_x else None
        if needs_weight:
            context.queue.put(context.weight, None, dy_NY, x.detach().flatten(0, -2))  # a queue holds no history
        return dx, None, dy_NY.sum(dim=0) if needs_bias else None, None


class _TappedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        x: torch.Tensor,
        weight_YX: nn.Parameter,
        bias: torch.Tensor | None,
        dy_tap: torch.Tensor,
        x_tap: torch.Tensor,
    ) -> torch.Tensor:
        context.save_for_backward(x, weight_YX)
        return F.linear(x, weight_YX, bias)

    @staticmethod
    def backward(context: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_YX = context.saved_tensors
        needs_x, _, needs_bias = context.needs_input_grad[:3]
        dx = (dy.flatten(0, -2) @ weight_YX).view(x.shape) if needs_x else None
        return dx, None, dy.flatten(0, -2).sum(dim=0) if needs_bias else None, dy, x


class _MakeTaps(torch.autograd.Function):
    """The taps of a product of x [*rows, X]; what they find goes into the queue."""

    @staticmethod
    def forward(
        context: Any, weight_YX: nn.Parameter, queue: WeightGradients, rows: tuple[int, ...]
    ) -> tuple[torch.Tensor, ...]:
        context.weight, context.queue = weight_YX, queue
        return tuple(weight_YX.new_zeros(()).expand(*rows, size) for size in weight_YX.shape)

    @staticmethod
    def backward(context: Any, dy: torch.Tensor, x: torch.Tensor) -> tuple[None, ...]:
        context.queue.put(context.weight, None, dy.flatten(0, -2), x.flatten(0, -2))
        return None, None, None


class Tapped(Protocol):
    """A product that takes its weight gradient from taps, where it is compiled."""

    weight: nn.Parameter
    weight_gradients: WeightGradients | None
    taps: Taps | None


@contextmanager
def tapping(products: Sequence[Tapped], rows: tuple[int, ...]) -> Iterator[None]:
    """A compiled forward inside gives the weight gradients of its products, of [*rows, X] each, to their queues."""
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
    """x Wᵀ of each row with its expert's W, of which `weight` [E x Y, X] is a stack (model/grouped_product.py)."""
    if queue is None or not torch.is_grad_enabled():
        return grouped_product(x_NX, _stack(weight, ends_E), ends_E)
    apply = _uncompiled if torch.compiler.is_compiling() else _apply
    return apply(_GroupedLinear, x_NX, weight, ends_E, queue)


def _stack(weight: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    return weight.view(len(ends_E), -1, weight.shape[1])


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x_NX: torch.Tensor, weight: nn.Parameter, ends_E: torch.Tensor, queue: WeightGradients
    ) -> torch.Tensor:
        context.save_for_backward(x_NX, weight, ends_E)
        context.weight, context.queue = weight, queue
        return torch.ops.meshwright.grouped_product(x_NX, _stack(weight, ends_E), ends_E)  # type: ignore[no-any-return]

    @staticmethod
    def backward(context: Any, dy_NY: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_NX, weight, ends_E = context.saved_tensors
        needs_x, needs_weight = context.needs_input_grad[:2]
        operators = torch.ops.meshwright
        dx_NX = operators.grouped_product_input(dy_NY, _stack(weight, ends_E), ends_E) if needs_x else None
        if needs_weight:
            context.queue.put(context.weight, operators.grouped_product_weight, dy_NY, x_NX.detach(), ends_E)
        return dx_NX, None, None, None


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    return function.apply(*arguments)  # type: ignore[no-any-return]


_uncompiled = _apply


def stay_out_of_graphs() -> None:
    """Have compiled graphs leave out products without taps that put something into a queue, which a compiled backward
    pass could not. To be called before anything is compiled, and not sooner: it loads the compiler, over a second."""
    global _uncompiled
    if _uncompiled is _apply:
        _uncompiled = torch.compiler.disable(_apply)
