"""Adapters of routed experts: gradients of PEFT's, which loads the directories, and merged and extracted weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.adapters.attach import adapters_off
from meshwright.adapters.merging import extract_adapter, merge_adapter, write_adapter
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.model.huggingface import load_huggingface
from meshwright.model.initialise import extract_entry
from meshwright.spec.adapter_config import AdapterConfig
from meshwright.spec.parameters import parameter_table
from meshwright.spec.refuse import refuse
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
        ({"targets": ("w1",), "kind": "dora"}, "without DoRA"),
        ({"targets": ("w1",), "dropout": 0.1}, "without dropout"),
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


def test_layout_that_splits_adapted_experts_is_refused():
    config = dataclasses.replace(small("mixtral-8x7b-v0.1"), intermediate=36, expert_intermediate=36)
    split = dataclasses.replace(config, adapter=AdapterConfig(rank=2, targets=("w2",)))
    layout = Layout.parse("tp2 ep1:etp2")
    refuse(layout, dataclasses.replace(config, adapter=AdapterConfig(rank=2)), 2)
    with pytest.raises(UserError, match="etp2 splits the width of experts"):
        refuse(layout, split, 2)


def test_all_linear_leaves_routed_experts_out():
    config = dataclasses.replace(small("mixtral-8x7b-v0.1"), adapter=AdapterConfig(rank=2))
    assert all(entry.expert is None for entry in parameter_table(config).trained.entries)
