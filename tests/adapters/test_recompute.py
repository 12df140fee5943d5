"""Activation checkpointing of layers with adapters."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.adapters.attach import attach_adapters
from meshwright.model.axis_operations import SINGLE_DEVICE
from meshwright.model.initialise import initialise
from meshwright.model.transformer import Transformer
from meshwright.parallel.recompute import ActivationCheckpointing
from meshwright.spec.adapter_config import AdapterConfig
from meshwright.spec.parameters import parameter_table
from tests.adapters.adapter_cases import batch, small

EXPERTS = {"targets": ("w1", "w2", "w3", "q_proj")}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama-3-8b", {}), ("llama-3-8b", {"kind": "dora"}), ("gpt2", {}), ("gemma-2-2b", {"targets": ("down_proj",)}),
    ("mixtral-8x7b-v0.1", EXPERTS), ("mixtral-8x7b-v0.1", EXPERTS | {"kind": "dora"}), ("qwen1.5-moe-a2.7b", {}),
]  # fmt: skip


class Operators(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.names.append(operator.name())
        return operator(*arguments, **(options or {}))


def differentiate(name: str, settings: dict[str, Any], kind: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the gradients of a model with an adapter, and the operators of its backward. Discarded results are NaN."""
    config = dataclasses.replace(small(name), adapter=AdapterConfig(**{"rank": 3, "random_constants": True} | settings))
    table, (tokens, targets) = parameter_table(config), batch(config)
    axes = dataclasses.replace(SINGLE_DEVICE, recompute=ActivationCheckpointing(kind))
    model = Transformer(config, axes=axes, dtype=torch.float64)
    attach_adapters(model, table, dtype=torch.float64)
    initialise(model, table, seed=4)
    torch.use_deterministic_algorithms(True)
    try:
        loss = model(tokens, targets)
        with Operators() as operators:
            loss.backward()
    finally:
        torch.use_deterministic_algorithms(False)
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert gradients and all(".adapter." in name for name in gradients)
    return gradients, operators.names


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_selective_recomputation_changes_no_bit_and_repeats_no_sum_of_base_and_adapter(
    name: str, settings: dict[str, Any]
):
    want, _ = differentiate(name, settings, "none")
    found, operators = differentiate(name, settings, "selective")
    assert want.keys() == found.keys() and all(torch.equal(found[name], want[name]) for name in want)
    assert not [each for each in operators if each.endswith("_low_rank")]
