"""Runs name the layers whose products do not overlap with collectives although the recipe asks for it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from meshwright.adapters.attach import attach_adapters
from meshwright.comm.mesh import CommunicationState, Mesh
from meshwright.layout import Layout
from meshwright.model.transformer import Transformer
from meshwright.parallel.parallelize import build_axes
from meshwright.planner.cost.dimensions import layer_dimensions
from meshwright.planner.cost.engines import ENGINES
from meshwright.planner.cost.micro_batch import MicroBatch
from meshwright.spec.adapter_config import AdapterConfig
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from meshwright.training.exposed_layers import format_exposed_layers


def list_exposed(config: ModelConfig, layout: str, compiled: bool = False) -> list[str]:
    """Return the console lines of a run of `config` on CPUs, with products that overlap in chunks."""
    mesh = Mesh(Layout.parse(layout), 0, torch.device("cpu"), CommunicationState(torch.device("cpu")), lambda *_: None)
    mesh.communicator.product_overlap = "chunks"
    axes = build_axes(mesh)
    model = Transformer(config, axes=axes, device="meta")
    attach_adapters(model, parameter_table(config), mesh.layout, axes.tensor, device="meta")
    return format_exposed_layers(model, mesh, compiled)


def list_priced_as_exposed(config: ModelConfig, layout: str, compiled: bool = False) -> list[str]:
    """Return the layers of a dense block whose products the planner prices as not overlapped, sorted by name."""
    engine = ENGINES["meshwright"].compiled() if compiled else ENGINES["meshwright"]
    batch = MicroBatch.of(config, Layout.parse(layout), 1, 64, engine=engine.overlapped("chunks", "cpu"))
    properties = layer_dimensions(batch, 0).true
    layers = ("attention.output", "attention.qkv", "mlp.down", "mlp.up")
    return [layer for layer in layers if f"chunked_{layer.split('.')[1]}" not in properties]


@pytest.mark.parametrize(
    ("adapter", "compiled", "named"),
    [
        (AdapterConfig("dora", 2, targets=("o_proj", "down_proj")), False, "attention.output, mlp.down"),
        (AdapterConfig("lora", 2, targets=("q_proj", "down_proj"), dropout=0.1), False, "attention.qkv"),
        (AdapterConfig("lora", 2, targets=("down_proj",)), True, "mlp.down"),
        (AdapterConfig("lora", 2, targets=("q_proj",), packed="nf4"), False, "attention.output, mlp.down, mlp.up"),
        (AdapterConfig("lora", 2), False, ""),
    ],
)
def test_run_names_layers_that_the_planner_prices_as_exposed(adapter: AdapterConfig, compiled: bool, named: str):
    config = dataclasses.replace(preset("llama-tiny"), adapter=adapter)
    line = f"train.tensor_overlap: products of {named} do not overlap with their collectives"
    assert list_exposed(config, "tp2", compiled) == ([line] if named else [])
    assert ", ".join(list_priced_as_exposed(config, "tp2", compiled)) == named


def test_run_names_experts_that_are_split_over_tensor_parallelism():
    """Under ep they have no calls over tp, and those of the shared expert overlap."""
    config = dataclasses.replace(preset("qwen2-moe-tiny"), experts=4)
    (line,) = list_exposed(config, "tp2")
    assert "products of mlp.experts, mlp.shared.down, mlp.shared.up do not" in line
    assert list_exposed(config, "tp2 ep2") == []
