"""Compiled blocks with adapters compute what uncompiled ones do, dropped elements and packed weights included."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from meshwright.adapters.attach import attach_adapters
from meshwright.adapters.dropout import sample_keys
from meshwright.model.documents import Documents
from meshwright.model.initialise import initialise
from meshwright.model.transformer import Transformer
from meshwright.quantization.packing import QuantizedFormat
from meshwright.spec.adapter_config import AdapterConfig
from meshwright.spec.parameters import parameter_table
from tests.adapters.adapter_cases import batch, small
from tests.conftest import exhaustive


@pytest.mark.parametrize("settings", [{"dropout": 0.3}, *exhaustive(({"kind": "dora"},), ({"packed": "nf4"},))])
def test_compiled_blocks_with_adapter_match_uncompiled_ones(settings: dict[str, Any]):
    config = dataclasses.replace(small(layers=1), hidden=64, head_dim=16, intermediate=128)
    config = dataclasses.replace(config, adapter=AdapterConfig(**{"rank": 3, "random_constants": True} | settings))
    table, (tokens, targets) = parameter_table(config), batch(config)
    model = Transformer(config, dtype=torch.float32)
    attach_adapters(model, table, dtype=torch.float32)
    initialise(model, table, seed=4)
    for layer in (each for each in model.modules() if getattr(each, "packed", None) is not None):
        records = QuantizedFormat("nf4").pack(layer.weight.detach().flatten())
        layer.weight = torch.nn.Parameter(records, requires_grad=False)

    def gradients() -> dict[str, torch.Tensor]:
        for parameter in model.parameters():
            parameter.grad = None
        for number in (0, 1):  # two micro-batches with other masks in one graph
            documents = Documents(samples_B=sample_keys(1, torch.arange(2) + 2 * number))
            model.token_keys.set(documents, tokens.shape[1])
            model(tokens, targets, documents).backward()
        return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    expected = gradients()
    assert expected and all(".adapter." in name for name in expected)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.compile_blocks(backend="aot_eager")
    found = gradients()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert not torch._dynamo.utils.counters["graph_break"]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
