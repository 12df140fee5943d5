"""Adapters compute what PEFT's do, gradients included, and each library reads the other's directories."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from meshwright.adapters.merging import open_weights, write_adapter
from meshwright.adapters.peft_directory import open_adapter, with_adapter_of
from meshwright.model.initialise import extract_entry
from meshwright.spec.config_json import config_from_path
from meshwright.spec.parameters import parameter_table
from tests.adapters.adapter_cases import adapted, backward_of_peft, batch, small, write_base

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama-3-8b", {"targets": ("q_proj", "v_proj", "down_proj")}),
    "rslora, all layers, query and key norms": ("qwen3-0.6b", {"kind": "rslora"}),
    "dora": ("llama-3-8b", {"kind": "dora"}),
    "lora, transposed weights and biases": ("gpt2", {}),
    "dora, transposed weights and biases": ("gpt2", {"kind": "dora"}),
}


@pytest.fixture(autouse=True)
def peft() -> Any:
    """PEFT, which takes seconds to import: every worker imports this module, one of them runs its tests."""
    return pytest.importorskip("peft")


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_merged_weights_match_peft(case: str, tmp_path: Path, wide: Callable[[], Any]):
    name, settings = CASES[case]
    config = small(name)
    base = write_base(tmp_path / "base", config)
    model, values = adapted(config, base, **settings, base=str(tmp_path / "base"))
    write_adapter(tmp_path / "adapter", model.config, values)
    tokens, targets = batch(config)
    loss = model(tokens, targets)
    loss.backward()

    with wide():
        theirs, expected = backward_of_peft(tmp_path, tokens, targets)
    assert loss.item() == pytest.approx(expected, rel=1e-10)
    gradients = {
        key.replace(".default", "").replace("_vector.weight", "_vector"): value.grad
        for key, value in theirs.named_parameters()
        if value.grad is not None
    }
    table, parameters = parameter_table(model.config), dict(model.named_parameters())
    assert {entry.name for entry in table.trained.entries} == set(gradients)
    for entry in table.trained.entries:
        mine = extract_entry(parameters[entry.tensor].grad, entry)
        assert (mine - gradients[entry.name]).norm() <= 1e-10 * gradients[entry.name].norm(), entry.name
    assert not any(parameter.grad is not None for key, parameter in model.named_parameters() if ".adapter." not in key)

    with wide():
        merged = theirs.merge_and_unload().state_dict()
    files = open_weights(tmp_path / "adapter")
    for key in files.names:
        torch.testing.assert_close(files.read(key), merged[key], rtol=1e-11, atol=1e-12)


def test_directory_written_by_peft_is_read(tmp_path: Path, peft: Any):
    write_base(tmp_path / "base", small())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    settings = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["k_proj", "up_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(theirs, settings).save_pretrained(tmp_path / "adapter")
    files, adapter = open_adapter(tmp_path / "adapter")
    assert (adapter.kind, adapter.rank, adapter.alpha) == ("lora", 2, 3.0)
    config = with_adapter_of(files, adapter, config_from_path(tmp_path / "base"))
    assert len(parameter_table(config).trained.entries) == 2 * 2 * 2
    written = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert set(written["target_modules"]) == {"k_proj", "up_proj"}
