"""Split backward: a backward pass that computes the gradients of inputs alone and queues those of weights for later.

A linear map y = x Wᵀ needs dy W on the way back, for whoever waits for dx, and dyᵀ x, for which nobody waits before the
optimizer's step (Qi et al. 2024, arXiv 2401.10241, section 1). While a queue collects, the second product is not
computed: x and dy are kept until it is. Everything else of a backward pass (norms, biases, embedding, head) is done in
the first half.

Shapes: N rows, X and Y sizes in and out, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.model.grouped_product import grouped_product

Collect = Callable[[nn.Parameter, torch.Tensor], None]
"""Takes a parameter's gradient, as autograd's hook does."""


@dataclass(frozen=True, slots=True)
class _Product:
    """A weight gradient to be computed: of `parameter`, by `multiply(dy, x, *rest)`."""

    parameter: nn.Parameter
    multiply: Callable[..., torch.Tensor]
    operands: tuple[torch.Tensor, ...]


class WeightGradients:
    """What input gradients have left to do, by backward pass (a key: stage, replica and micro-batch)."""

    def __init__(self) -> None:
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

    @property
    def open(self) -> bool:
        """Whether a backward pass should leave its weight gradients here now."""
        return self._collects is not None

    def put(self, parameter: nn.Parameter, multiply: Callable[..., torch.Tensor], *operands: torch.Tensor) -> None:
        """Queue `multiply(*operands)`, which gives the parameter's gradient in any shape of as many elements."""
        assert self._collects is not None
        self._collects.append(_Product(parameter, multiply, operands))

    def parameters(self, key: Hashable) -> list[nn.Parameter]:
        """Whose gradients are still to come, in the order in which `run` gives them: that of the backward pass."""
        return [product.parameter for product in self._queues[key]]

    def run(self, key: Hashable, collect: Collect) -> None:
        """Compute what was queued and hand each gradient on; its operands are freed before the next."""
        queue = self._queues.pop(key)
        with torch.no_grad():
            while queue:
                product = queue.popleft()
                gradient = product.multiply(*product.operands).view(product.parameter.shape)
                parameter = product.parameter
                del product
                collect(parameter, gradient)
                del gradient


def defer_weight_gradients(model: nn.Module, queue: WeightGradients | None) -> None:
    """Have the model's products leave their weight gradients to `queue` whenever it collects; None: never again."""
    for module in model.modules():
        if hasattr(type(module), "weight_gradients"):
            module.weight_gradients = queue  # type: ignore[assignment]


def linear(
    x: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None, queue: WeightGradients | None
) -> torch.Tensor:
    """x Wᵀ + b for x [..., X] and W [Y, X]."""
    if queue is None or not torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    return _uncompiled(_Linear.apply, x, weight, bias, queue)


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
        d_weight_YX = None
        if needs_weight and context.queue.open:
            context.queue.put(context.weight, _transposed_product, dy_NY, x.flatten(0, -2))
        elif needs_weight:
            d_weight_YX = _transposed_product(dy_NY, x.flatten(0, -2))
        return dx, d_weight_YX, dy_NY.sum(dim=0) if needs_bias else None, None


def _transposed_product(dy_NY: torch.Tensor, x_NX: torch.Tensor) -> torch.Tensor:
    """dyᵀ x: [Y, X]."""
    return dy_NY.T @ x_NX


def grouped_linear(
    x_NX: torch.Tensor, weight: nn.Parameter, ends_E: torch.Tensor, queue: WeightGradients | None
) -> torch.Tensor:
    """x Wᵀ of each row with its expert's W, of which `weight` [E x Y, X] is a stack (model/grouped_product.py)."""
    if queue is None or not torch.is_grad_enabled():
        return grouped_product(x_NX, _stack(weight, ends_E), ends_E)
    return _uncompiled(_GroupedLinear.apply, x_NX, weight, ends_E, queue)


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
        d_weight = None
        if needs_weight and context.queue.open:
            context.queue.put(context.weight, operators.grouped_product_weight, dy_NY, x_NX, ends_E)
        elif needs_weight:
            d_weight = operators.grouped_product_weight(dy_NY, x_NX, ends_E).view(weight.shape)
        return dx_NX, d_weight, None, None


@torch.compiler.disable
def _uncompiled(function: Any, *arguments: Any) -> torch.Tensor:
    """What a compiled graph leaves out: a compiled backward pass could not put anything into a queue."""
    return function(*arguments)  # type: ignore[no-any-return]
