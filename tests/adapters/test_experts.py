"""Adapters of routed experts: gradients of PEFT's, which loads the directories, of merged weights (DoRA) and masked
inputs (dropout), and merged and extracted weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.func import functional_call

from meshwright.adapters.attach import adapters_off
from meshwright.adapters.dropout import Dropout, TokenKeys, copy_keys
from meshwright.adapters.experts import Copies, ExpertLowRank
from meshwright.adapters.low_rank import Rows
from meshwright.adapters.merging import extract_adapter, merge_adapter, write_adapter
from meshwright.errors import UserError
from meshwright.model.huggingface import load_huggingface
from meshwright.model.initialise import extract_entry, initialise
from meshwright.model.layers import Linear
from meshwright.model.transformer import Transformer
from meshwright.spec.adapter_config import AdapterConfig
from meshwright.spec.parameters import parameter_table
from meshwright.verification.adapted_weights import merge_adapter_weights
from tests.adapters.adapter_cases import adapted, backward_of_peft, batch, small, write_base

RANK = 3


def test_gradients_match_peft(tmp_path: Path, wide: Callable[[], Any]):
    pytest.importorskip("peft")
    config = dataclasses.replace(small("mixtral-8x7b-v0.1"), router_loss=0.0)
    base = write_base(tmp_path / "base", config)
    model, values = adapted(config, base, targets=("v_proj", "w1", "w2", "w3"), base=str(tmp_path / "base"))
    write_adapter(tmp_path / "adapter", model.config, values)
    tokens, targets = batch(config)
    loss = model(tokens, targets)
    loss.backward()
    with wide():
        theirs, expected = backward_of_peft(tmp_path, tokens, targets, experts_implementation="eager")
    assert loss.item() == pytest.approx(expected, rel=1e-10)
    gradients = {key: value.grad for key, value in theirs.named_parameters() if value.grad is not None}
    table, parameters, checked = parameter_table(model.config), dict(model.named_parameters()), 0
    for entry in table.trained.entries:
        if entry.expert is None:
            continue
        mine = extract_entry(parameters[entry.tensor].grad, entry)
        other = find_gradient(gradients, entry.name, config.experts, config.expert_intermediate)
        assert (mine - other).norm() <= 1e-10 * other.norm() and other.norm() > 0, entry.name
        checked += 1
    assert checked == 2 * config.layers * config.experts * 3


def find_gradient(gradients: dict[str, torch.Tensor], name: str, experts: int, width: int) -> torch.Tensor:
    """Return PEFT's gradient of the tensor `name` of one matrix of an expert. PEFT fuses w1 and w3: matrices A stacked,
    matrices B on a block diagonal."""
    layer, _, rest = name.removeprefix("base_model.model.").partition(".block_sparse_moe.experts.")
    expert, matrix, part, _ = rest.split(".")
    shapes = {"w1": RANK * 2, "w3": RANK * 2, "w2": RANK}
    found = next(
        value
        for key, value in gradients.items()
        if f"{layer}.mlp.experts." in key and part in key
        and (value.shape[0 if part == "lora_A" else 1] == shapes[matrix] * experts)
    )  # fmt: skip
    low = slice(RANK, 2 * RANK) if matrix == "w3" else slice(0, RANK)
    if part == "lora_A":
        return found.unflatten(0, (experts, -1))[int(expert), low]
    rows = {"w1": slice(0, width), "w3": slice(width, 2 * width), "w2": slice(None)}[matrix]
    return found.unflatten(1, (-1, experts))[rows, low, int(expert)]


def test_gradients_of_dora_match_merged_weights():
    """Reference: the weights of each expert are m (W + s B A) / ||W + s B A||, the norm a constant (eq. 5 and 11)."""
    config = dataclasses.replace(small("mixtral-8x7b-v0.1"), router_loss=0.0)
    base = Transformer(config, dtype=torch.float64)
    initialise(base, parameter_table(config), seed=3)
    model, values = adapted(config, base, kind="dora", targets=("w2", "w3"))
    tokens, targets = batch(config)
    loss = model(tokens, targets)
    loss.backward()
    table = parameter_table(config)
    leaves = {name: value.requires_grad_() for name, value in values.items()}
    merged = merge_adapter_weights(
        parameter_table(model.config), model.config.adapter, {name: each.flatten() for name, each in leaves.items()}
        | {entry.name: extract_entry(base.get_parameter(entry.tensor).detach(), entry).flatten()
           for entry in table.entries},
    )  # fmt: skip
    stacked = {
        tensor.name: torch.cat([merged[entry.name] for entry in tensor.entries]).view(tensor.shape)
        for tensor in table.tensors
    }
    expected = functional_call(base, stacked, (tokens, targets))
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    parameters = dict(model.named_parameters())
    for entry in parameter_table(model.config).trained.entries:
        mine, other = extract_entry(parameters[entry.tensor].grad, entry), leaves[entry.name].grad
        assert (mine - other).norm() <= 1e-10 * other.norm() and other.norm() > 0, entry.name
    with adapters_off(model):
        assert model(tokens, targets).item() == base(tokens, targets).item()


def test_dropout_is_that_of_each_experts_input():
    """Reference: the same mask on the input of each copy, by autograd."""
    torch.manual_seed(0)
    keys, ends = torch.arange(7, dtype=torch.int32) * 1_000_003, torch.tensor([3, 3, 7], dtype=torch.int32)
    adapter = ExpertLowRank([Rows(1, 2), Rows(4, 3)], 3, 16, 2, 1.5, dtype=torch.float64)
    adapter.dropout = Dropout(0.4, "layers.0.mlp.experts.up", torch.arange(16), TokenKeys())
    for parameter in adapter.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(7, 16, dtype=torch.float64, requires_grad=True)
    y = torch.randn(7, 8, dtype=torch.float64)
    mask = adapter.dropout.mask(keys)
    assert 0.3 < mask.double().mean() < 0.9 and len({tuple(row) for row in mask.tolist()}) == 7
    found = adapter(x, y, Copies(ends, keys), Linear(16, 8, bias=False))
    a, b = adapter.a.view(3, 2, 2, 16), adapter.b.view(3, 5, 2)
    rows = []
    for copy, expert in enumerate([0, 0, 0, 2, 2, 2, 2]):
        given = x[copy] * mask[copy] / 0.6
        first, second = (
            1.5 * matrix @ (low @ given) for low, matrix in zip(a[expert], b[expert].split([2, 3]), strict=True)
        )
        rows.append(torch.cat([y[copy, :1], y[copy, 1:3] + first, y[copy, 3:4], y[copy, 4:7] + second, y[copy, 7:]]))
    torch.testing.assert_close(found, torch.stack(rows))
    leaves = [x, *adapter.parameters()]
    gradients = zip(
        *(torch.autograd.grad(each.square().sum(), leaves) for each in (found, torch.stack(rows))), strict=True
    )
    for mine, other in gradients:
        assert (mine - other).norm() <= 1e-12 * other.norm()


def test_experts_of_a_token_drop_different_elements():
    keys = torch.arange(100, dtype=torch.int32)
    found = torch.cat([copy_keys(keys, torch.full((100,), expert)) for expert in range(8)])
    assert found.dtype == torch.int32 and len(found.unique()) == 800


def test_merged_and_extracted_weights_are_those_of_the_adapter(tmp_path: Path):
    config = small("qwen1.5-moe-a2.7b")
    base = write_base(tmp_path / "base", config)
    mine, values = adapted(config, base, targets=("*.experts.*.up_proj", "*.experts.*.down_proj"))
    write_adapter(tmp_path / "adapter", mine.config, values)
    merge_adapter(tmp_path / "adapter", tmp_path / "base", tmp_path / "merged")
    merged, _ = load_huggingface(tmp_path / "merged", torch.float64)
    tokens, targets = batch(config)
    assert merged(tokens, targets).item() == pytest.approx(mine(tokens, targets).item(), rel=1e-12)
    with adapters_off(mine):
        assert mine(tokens, targets).item() == base(tokens, targets).item() != merged(tokens, targets).item()
    # An expert that was not tuned gets an adapter of zeros, since all experts of a layer have one.
    tensors, before = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "base"))
    same = "model.layers.1.mlp.experts.0.up_proj.weight"
    save_file(tensors | {same: before[same]}, tmp_path / "merged/model.safetensors", {"format": "pt"})
    found = extract_adapter(tmp_path / "merged", tmp_path / "base", tmp_path / "extracted", rank=RANK)
    assert found["kept"] == pytest.approx(1.0) and not found["not_extracted"]
    merge_adapter(tmp_path / "extracted", tmp_path / "base", tmp_path / "again")
    again = load_file(tmp_path / "again/model.safetensors")
    assert all((again[key] - value).abs().max() < 1e-6 for key, value in tensors.items() if key != same)
    assert torch.equal(again[same], before[same])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"targets": ("experts.0.w1",)}, "other experts of its layer are"),
        ({"targets": ("gate",)}, "router"),
    ],
)
def test_adapter_that_experts_cannot_have_is_refused(settings: dict[str, Any], expected: str):
    config = dataclasses.replace(small("mixtral-8x7b-v0.1"), adapter=AdapterConfig(rank=2, **settings))
    with pytest.raises(UserError, match=expected):
        parameter_table(config)


def test_experts_that_are_stored_in_one_tensor_take_no_adapter():
    config = dataclasses.replace(small("gpt-oss-20b"), adapter=AdapterConfig(rank=2, targets=("experts.down_proj",)))
    with pytest.raises(UserError, match="stored with others in one tensor"):
        parameter_table(config)


def test_all_linear_leaves_routed_experts_out():
    config = dataclasses.replace(small("mixtral-8x7b-v0.1"), adapter=AdapterConfig(rank=2))
    assert all(entry.expert is None for entry in parameter_table(config).trained.entries)
