"""The transformer as a whole: names, documents, units, recomputation, compilation."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from bench.shared.key_value_cache import KeyValueCache
from meshwright.model.axis_operations import AxisOperations
from meshwright.model.documents import Documents
from meshwright.model.initialise import initialise
from meshwright.model.layers import Embedding
from meshwright.model.transformer import Transformer
from meshwright.parallel.recompute import ActivationCheckpointing
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from tests.conftest import exhaustive

FAMILIES = [
    *("llama-tiny", "mistral-tiny", "qwen2-tiny", "qwen3-tiny", "gpt2-tiny"),
    *("mixtral-tiny", "qwen2-moe-tiny", "qwen3-moe-tiny"),
]
IDS = torch.tensor([[0] * 9 + [1] * 11, [0] * 20, [0, 1] + [2] * 18])


def odd(name: str, **changes: Any) -> ModelConfig:
    """Five layers, 499 token IDs; windows shorter than the tests' sequences."""
    config = preset(name)
    window = 5 if config.sliding_window else None
    changes["router_loss"] = 0.0  # load balancing does not affect logits
    return dataclasses.replace(config, layers=5, vocabulary=499, sliding_window=window, **changes)


def recomputing(kind: str) -> AxisOperations:
    return AxisOperations(recompute=ActivationCheckpointing(kind))


def build(config: ModelConfig, dtype: torch.dtype = torch.float64, **options: Any) -> Transformer:
    model = Transformer(config, dtype=dtype, **options)
    initialise(model, parameter_table(config), seed=1)
    with torch.no_grad():  # norms and biases not at their neutral values
        generator = torch.Generator().manual_seed(2)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(dtype))
    return model


def batch(rows: int = 3, sequence: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 499, (rows, sequence + 1), generator=torch.Generator().manual_seed(3))
    targets = tokens[:, 1:].clone()
    targets[0, 8] = -100
    return tokens[:, :-1], targets


def gradients(model: Transformer, *inputs: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(*inputs).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_have_the_names_and_shapes_of_the_table(name: str, tied: bool):
    config = odd(name, tied=tied)
    model = Transformer(config, device="meta")
    assert {tensor.name: tensor.shape for tensor in parameter_table(config).tensors} == {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_logits_agree(name: str, tied: bool):
    model = build(odd(name, tied=tied))
    tokens, targets = batch()
    logits = model.logits(tokens)
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    torch.testing.assert_close(model(tokens, targets), want.sum(), rtol=1e-12, atol=0)
    expected = torch.autograd.grad(want.sum(), list(model.parameters()))
    for (name, mine), theirs in zip(gradients(model, tokens, targets).items(), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_documents_match_separate_documents(name: str):
    model = build(odd(name))
    tokens, targets = batch()
    documents = Documents.from_ids(IDS)
    logits = model.logits(tokens, documents)
    alone = 0.0
    for row, start, stop in [(0, 0, 9), (0, 9, 20), (1, 0, 20), (2, 0, 1), (2, 1, 2), (2, 2, 20)]:
        part = tokens[row : row + 1, start:stop]
        torch.testing.assert_close(logits[row, start:stop], model.logits(part)[0], rtol=0, atol=1e-12)
        alone = alone + model(part, targets[row : row + 1, start:stop])
    torch.testing.assert_close(model(tokens, targets, documents), alone, rtol=1e-12, atol=0)
    names = [name for name, _ in model.named_parameters()]
    together = gradients(model, tokens, targets, documents)
    for name, separate in zip(names, torch.autograd.grad(alone, list(model.parameters())), strict=True):
        torch.testing.assert_close(together[name], separate, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", FAMILIES)
def test_token_influences_only_later_tokens_within_its_window(name: str):
    config = odd(name)
    model = build(config)
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 7] += 1
    differs = (model.logits(tokens) != model.logits(changed)).any(dim=-1).all(dim=0)
    reach = 20 if config.sliding_window is None else 7 + config.layers * (config.sliding_window - 1) + 1
    assert differs.tolist() == [7 <= place < reach for place in range(20)]


@pytest.mark.parametrize("pieces", [[1] * 20, [7, 1, 1, 11], [20]], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_cached_decoding_gives_same_logits(name: str, pieces: list[int]):
    config = odd(name)
    model = build(config)
    tokens, _ = batch()
    cache = KeyValueCache(config, rows=3, capacity=2)
    with torch.no_grad():
        parts = [model.logits(part, cache=cache) for part in tokens.split(pieces, dim=1)]
        assert cache.length == 20
        torch.testing.assert_close(torch.cat(parts, dim=1), model.logits(tokens), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["llama-tiny", "gpt2-tiny"])
def test_positions_can_be_given(name: str):
    model = build(odd(name))
    tokens, _ = batch()
    positions = torch.arange(20).expand(3, 20)
    torch.testing.assert_close(model.logits(tokens, positions=positions), model.logits(tokens), rtol=0, atol=1e-13)
    moved = model.logits(tokens, positions=positions + 9)
    # Rotary positions are relative, learned ones are not.
    assert torch.allclose(moved, model.logits(tokens), atol=1e-9) == (name == "llama-tiny")


class Recorder:
    """Units that record entries and exits in forward and backward."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def enter(self, unit: str, x: Any) -> Any:
        return self._pass(f"enter {unit}", x)

    def leave(self, unit: str, x: Any) -> Any:
        return self._pass(f"leave {unit}", x)

    def _pass(self, call: str, x: Any) -> Any:
        self.calls.append(call)
        if x is None or not x.requires_grad:
            return x
        x = x.view_as(x)
        x.register_hook(lambda gradient: self.calls.append(f"back through {call}"))
        return x


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_units_are_gathered_and_freed_around_each_block(recompute: str):
    model = build(odd("llama-tiny"), axes=recomputing(recompute))
    units = Recorder()
    blocks = [f"layers.{layer}" for layer in range(5)]
    for layer, block in enumerate(model.layers):
        block.mlp.register_forward_pre_hook(lambda *_, layer=layer: units.calls.append(f"run layers.{layer}"))
    loss = model(*batch(), None, units)
    forward = ["enter embedding", "leave embedding"]
    for unit in blocks:
        forward += [f"enter {unit}", f"run {unit}", f"leave {unit}"]
    assert units.calls == [*forward, "enter head", "leave head"]
    units.calls.clear()
    loss.backward()
    backward = ["back through leave head", "back through enter head"]
    for unit in reversed(blocks):
        again = [] if recompute == "none" else [f"run {unit}"]
        backward += [f"back through leave {unit}", *again, f"back through enter {unit}"]
    assert units.calls == [*backward, "back through leave embedding"]


@functools.cache
def packed_gradients(name: str, recompute: str) -> dict[str, torch.Tensor]:
    """Gradients of a batch of packed documents."""
    return gradients(build(odd(name), axes=recomputing(recompute)), *batch(), Documents.from_ids(IDS))


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", FAMILIES)
def test_recomputation_changes_no_bit(name: str, recompute: str):
    want = packed_gradients(name, "none")
    torch.use_deterministic_algorithms(True)  # fills tensors without values, such as discarded results, with NaN
    try:
        mine = packed_gradients(name, recompute)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(mine[name], want[name]) for name in want)


def kept_bytes(model: Transformer) -> int:
    """Bytes that autograd saves for backward, without parameters."""
    sizes: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(*batch())
    del loss
    return sum(sizes.values())


def test_recomputation_saves_fewer_activations():
    config = odd("llama-tiny")
    none, full = (kept_bytes(build(config, axes=recomputing(kind))) for kind in ("none", "full"))
    assert full < none / 5


class Counter(TorchDispatchMode):
    """Counts executed operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.calls[str(operator)] = self.calls.get(str(operator), 0) + 1
        return operator(*arguments, **(options or {}))


def test_selective_recomputation_repeats_attention_and_activations_but_no_product():
    counts = {}
    for recompute in ("none", "selective", "full"):
        loss = build(odd("llama-tiny"), axes=recomputing(recompute))(*batch())
        with Counter() as counter:
            loss.backward()
        names = ("aten.mm.default", "meshwright.tiled_attention.default", "aten.silu.default")
        counts[recompute] = tuple(counter.calls.get(name, 0) for name in names)
    products = counts["none"][0]  # two in the backward pass of each
    assert counts == {"none": (products, 0, 0), "selective": (products, 5, 5), "full": (products + 15, 5, 5)}


def test_bfloat16_follows_float64():
    config = odd("llama-tiny")
    inputs = batch()
    exact, rough = build(config), build(config, torch.bfloat16)
    want, mine = gradients(exact, *inputs), gradients(rough, *inputs)
    assert rough(*inputs).dtype == torch.float32
    assert exact(*inputs).dtype == torch.float64
    torch.testing.assert_close(rough(*inputs).double(), exact(*inputs), rtol=2e-3, atol=0)
    for name in want:
        assert mine[name].dtype == torch.bfloat16
        assert (mine[name].double() - want[name]).norm() < 0.05 * want[name].norm(), name


def test_gradient_of_a_frequent_token_is_summed_in_float32():
    """Ten thousand small contributions: a bfloat16 sum would stall at 256 of them."""
    embedding = Embedding(3, 4, None, dtype=torch.bfloat16)
    numbers = torch.zeros(100, 100, dtype=torch.int64)
    embedding(numbers).backward(torch.ones(100, 100, 4, dtype=torch.bfloat16))
    assert embedding.weight.grad.tolist() == [[10_000 // 64 * 64] * 4, [0.0] * 4, [0.0] * 4]


def test_validation_saves_no_activations():
    model = build(odd("qwen3-tiny"), axes=recomputing("full"))
    with torch.no_grad():
        assert not model(*batch()).requires_grad


# No code generation: the tested graphs are made before it.
@pytest.mark.parametrize(
    ("recompute", "windows", "backend"),
    [
        ("selective", True, "aot_eager"),
        *exhaustive(("none", True, "aot_eager"), ("full", True, "aot_eager"), ("none", False, "inductor")),
    ],
)
def test_equal_blocks_share_one_compiled_graph(recompute: str, windows: bool, backend: str):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = odd("qwen2-tiny")
    if windows:
        config = dataclasses.replace(config, sliding_window=5, windowed_layers=(False, True, False, True, True))
    model = build(config, axes=recomputing(recompute))
    inputs = batch()
    want, loss = gradients(model, *inputs), model(*inputs)
    model.compile_blocks(backend=backend)
    torch.testing.assert_close(model(*inputs), loss, rtol=1e-13, atol=0)
    mine = gradients(model, *inputs)
    for name in want:
        torch.testing.assert_close(mine[name], want[name], rtol=1e-9, atol=1e-12, msg=name)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # Blocks with and without a window, the final norm, and the two functions of the loss.
    assert graphs == (2 if windows else 1) + 1 + 2
    for number in range(2):  # other values, the same graphs
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1e-3 * number)
        gradients(model, *inputs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert not torch._dynamo.utils.counters["graph_break"]
