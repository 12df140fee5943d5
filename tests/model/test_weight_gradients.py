"""Split backward: the gradients of a full backward pass, in two passes with disjoint work."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from meshwright.model.axis_operations import AxisOperations
from meshwright.model.initialise import initialise
from meshwright.model.layers import Linear
from meshwright.model.transformer import Transformer
from meshwright.model.weight_gradients import WeightGradients, defer_weight_gradients, grouped_linear, linear
from meshwright.parallel.recompute import ActivationCheckpointing
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset

FAMILIES = ["llama-tiny", "gpt2-tiny", "qwen2-tiny", "qwen2-moe-tiny"]
ROWS, SEQUENCE = 2, 12


def build(name: str, dtype: torch.dtype = torch.float64, recompute: str = "none") -> Transformer:
    config = dataclasses.replace(preset(name), layers=2, vocabulary=97)
    model = Transformer(config, dtype=dtype, axes=AxisOperations(recompute=ActivationCheckpointing(recompute)))
    initialise(model, parameter_table(config), seed=1)
    return model


def batch(number: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    make = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, vocabulary, (ROWS, SEQUENCE + 1), generator=make)
    return tokens[:, :-1], tokens[:, 1:]


class Grads:
    """Accumulates gradients in each parameter's `grad`; `come`: parameters in the order of accumulation."""

    def __init__(self) -> None:
        self.come: list[torch.nn.Parameter] = []

    def accumulate(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        self.come.append(parameter)
        assert gradient.shape == parameter.shape and gradient.dtype == parameter.dtype
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def accumulate_product(self, parameter: torch.nn.Parameter, dy_NY: torch.Tensor, x_NX: torch.Tensor) -> None:
        self.accumulate(parameter, dy_NY.T @ x_NX)


def split(model: Transformer, queue: WeightGradients, sums: Grads, batches: list[Any]) -> dict[str, torch.Tensor]:
    """Gradients by name: all input gradients first, then all weight gradients."""
    model.zero_grad()
    for number, each in enumerate(batches):
        loss = model(*each)
        with queue.collecting(number):
            loss.backward()
    names = {parameter: name for name, parameter in model.named_parameters()}
    for number in range(len(batches)):
        sums.come.clear()
        coming = queue.parameters(number)
        queue.run(number)
        assert [names[p] for p in sums.come] == [names[p] for p in coming]
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def deferred_names(model: Transformer) -> set[str]:
    """Weights of all matrix products in layers, without routers, which are small."""
    return {
        name
        for name, parameter in model.named_parameters()
        if name.startswith("layers.") and parameter.dim() == 2 and "router" not in name
    }


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", FAMILIES)
def test_input_and_weight_gradient_passes_equal_full_backward(name: str, recompute: str) -> None:
    model, sums = build(name, recompute=recompute), Grads()
    queue = WeightGradients(sums)
    batches = [batch(number, model.config.vocabulary) for number in range(2)]
    for each in batches:
        model(*each).backward()
    whole = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    defer_weight_gradients(model, queue)
    loss = model(*batches[0])
    with queue.collecting("a look"):
        loss.backward()
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert {names[parameter] for parameter in queue.parameters("a look")} == deferred_names(model)
    queue.run("a look")
    gradients = split(model, queue, sums, batches)
    for parameter, expected in whole.items():
        torch.testing.assert_close(gradients[parameter], expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-moe-tiny"])
def test_split_bfloat16_backward_matches_autograd(name: str) -> None:
    model, sums = build(name, torch.bfloat16), Grads()
    queue = WeightGradients(sums)
    batches = [batch(0, model.config.vocabulary)]
    model(*batches[0]).backward()
    whole = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    defer_weight_gradients(model, queue)
    for parameter, gradient in split(model, queue, sums, batches).items():
        error = (gradient - whole[parameter]).double().norm() / whole[parameter].double().norm()
        assert error < 2**-8, parameter


def test_backward_is_unsplit_outside_of_collecting_context() -> None:
    model, queue = build("qwen2-moe-tiny"), WeightGradients(Grads())
    each = batch(0, model.config.vocabulary)
    model(*each).backward()
    whole = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    defer_weight_gradients(model, queue)
    model.zero_grad()
    model(*each).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name], rtol=1e-11, atol=1e-13)


def flops(function: Any) -> int:
    counter = FlopCounterMode(display=False)
    with counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_split_passes_compute_disjoint_matrix_products(recompute: str) -> None:
    """Recompute ends before a block's last product, whose result backward does not read, as without a queue."""
    model, queue = build("llama-tiny", recompute=recompute), WeightGradients(Grads())
    each = batch(0, model.config.vocabulary)
    loss = model(*each)
    whole = flops(loss.backward)
    defer_weight_gradients(model, queue)
    loss = model(*each)
    with queue.collecting(0):
        first = flops(loss.backward)
    second = flops(lambda: queue.run(0))
    assert first + second == whole
    parameters = dict(model.named_parameters())
    assert second == sum(2 * ROWS * SEQUENCE * parameters[name].numel() for name in deferred_names(model))


class Operators(TorchDispatchMode):
    """Counts calls of operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[function.name()] += 1
        return function(*args, **(kwargs or {}))


def test_expert_weight_gradients_are_deferred_too() -> None:
    model, queue = build("qwen2-moe-tiny"), WeightGradients(Grads())
    defer_weight_gradients(model, queue)
    loss = model(*batch(0, model.config.vocabulary))
    with queue.collecting(0), Operators() as first:
        loss.backward()
    with Operators() as second:
        queue.run(0)
    products = 2 * model.config.expert_layers
    for operators, inputs, weights in ((first, products, 0), (second, 0, products)):
        assert operators.calls["meshwright::grouped_product_input"] == inputs
        assert operators.calls["meshwright::grouped_product_weight"] == weights


class Storages(TorchDispatchMode):
    """Records the storages that operators create."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[StorageWeakRef, int, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                self.made.append((StorageWeakRef(storage), storage.data_ptr(), storage.nbytes()))
        return result

    def alive(self) -> dict[int, int]:
        return {pointer: size for storage, pointer, size in self.made if not storage.expired()}


def held_bytes(queue: WeightGradients) -> int:
    """Bytes of the storages that the queues hold, each counted once."""
    products = [product for waiting in queue._queues.values() for product in waiting]
    storages = [operand.untyped_storage() for product in products for operand in product.operands]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_memory_between_split_backwards_is_that_of_the_queue(recompute: str) -> None:
    model, queue = build("llama-tiny", recompute=recompute), WeightGradients(Grads())
    defer_weight_gradients(model, queue)
    each = batch(0, model.config.vocabulary)
    model.zero_grad(set_to_none=True)
    with Storages() as storages:
        loss = model(*each)
        with queue.collecting(0):
            loss.backward()
        del loss
    gradients = {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive = {pointer: size for pointer, size in storages.alive().items() if pointer not in gradients | own}
    tables = {2 * (SEQUENCE * model.config.head_dim * 4)}  # persistent rotary tables
    kept = sum(size for size in alive.values())
    held = held_bytes(queue)
    assert held <= kept <= held + max(tables) * 8
    config = model.config
    sizes: dict[str, int] = defaultdict(int)
    for name in deferred_names(model):
        rows, columns = dict(model.named_parameters())[name].shape
        sizes[name] = 8 * ROWS * SEQUENCE * (rows + columns)  # dy and x
    # The gradient of a block's two residual branches is one tensor: attention.output and mlp.down of neighbours share.
    assert held <= sum(sizes.values())
    assert held >= sum(sizes.values()) - config.layers * 2 * 8 * ROWS * SEQUENCE * config.hidden
    queue.run(0)
    assert held_bytes(queue) == 0
    assert sum(size for p, size in storages.alive().items() if p in alive) <= max(tables) * 8


@pytest.mark.parametrize(
    ("name", "recompute"),
    [("llama-tiny", "full"), *(pytest.param(name, "none", marks=pytest.mark.exhaustive) for name in FAMILIES)],
)
def test_compiled_blocks_split_their_backward(name: str, recompute: str) -> None:
    model, sums = build(name, recompute=recompute), Grads()
    queue = WeightGradients(sums)
    batches = [batch(0, model.config.vocabulary)]
    model(*batches[0]).backward()
    whole = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    defer_weight_gradients(model, queue)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.compile_blocks(backend="aot_eager")
    for parameter, gradient in split(model, queue, sums, batches).items():
        torch.testing.assert_close(gradient, whole[parameter], rtol=1e-10, atol=1e-12)
    cuts = torch._dynamo.utils.counters["graph_break"]
    assert bool(cuts) == bool(model.config.experts), cuts  # graph breaks inside a recomputed region run eagerly


def test_linear_without_queue_is_pytorch_linear() -> None:
    x, weight = torch.randn(3, 4), torch.nn.Parameter(torch.randn(5, 4))
    plain, ours = torch.nn.functional.linear(x, weight), linear(x, weight, None, None)
    assert type(ours.grad_fn) is type(plain.grad_fn)
    with torch.no_grad():
        assert linear(x, weight, None, WeightGradients(Grads())).grad_fn is None


@pytest.mark.parametrize("grouped", [False, True])
def test_queue_does_not_keep_graph_of_its_inputs(grouped: bool) -> None:
    """Otherwise a stage's input and its gradient would be held until the weight gradients are computed."""
    queue, weight = WeightGradients(Grads()), torch.nn.Parameter(torch.randn(6, 4))
    x_NX = torch.randn(8, 4, requires_grad=True)
    product = x_NX.square()
    ends_E = torch.tensor([3, 8], dtype=torch.int32)
    layer = Linear(4, 6, bias=False)
    layer.weight, layer.weight_gradients = weight, queue
    y_NY = grouped_linear(product, layer, ends_E) if grouped else layer(product)
    with queue.collecting(0):
        y_NY.sum().backward()
    assert x_NX.grad is not None
    gone = [StorageWeakRef(each.untyped_storage()) for each in (x_NX, x_NX.grad)]
    kept = StorageWeakRef(product.untyped_storage())
    del x_NX, product, y_NY
    assert all(each.expired() for each in gone) and not kept.expired()
    queue.run(0)
    assert weight.grad is not None and kept.expired()
