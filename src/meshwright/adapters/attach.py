"""Attaches adapters to the linear layers of a model, or of one rank's part of it, and freezes the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.adapters.dora import SumOverRanks, WeightDecomposed
from meshwright.adapters.dropout import Dropout, TokenKeys
from meshwright.adapters.experts import ExpertLowRank, ExpertWeightDecomposed, attach_to_experts
from meshwright.adapters.low_rank import LowRank, Rows
from meshwright.comm.operators import reduce_from
from meshwright.layout import Layout
from meshwright.model.axis_operations import TensorOperations
from meshwright.model.initialise import initial_value
from meshwright.model.layers import Linear
from meshwright.quantization.formats import round_trip
from meshwright.quantization.packing import QuantizedFormat, QuantizedMatmul
from meshwright.spec.adapter_config import AdapterConfig
from meshwright.spec.adapter_entries import ADAPTER_PARTS, PEFT_PREFIX
from meshwright.spec.parameters import ModelParameter, ParameterEntry, ParameterTable

_MAGNITUDE = f".{ADAPTER_PARTS['magnitude']}"


def attach_adapters(
    model: nn.Module,
    table: ParameterTable,
    layout: Layout | None = None,
    tensor: TensorOperations | None = None,
    **options: Any,
) -> None:
    """Add to `model`, in place, the LoRA adapter and the distillation projections that its attribute `config` asks for.
    With an adapter, all other parameters are frozen. Projections are linear layers that map hidden states to the hidden
    size of a distillation teacher.

    table: parameter table of the model, which lists the adapted layers. layout: parallel layout of which `model` is one
    rank's part; None: one device. tensor: communication of tensor parallelism, by which DoRA sums squared norms; None:
    no tensor parallelism. options: `device` and `dtype` of the added parameters."""
    config: Any = model.config
    adapter = config.adapter
    if adapter is not None:
        _attach_low_rank(model, adapter, table, layout or Layout(), tensor, **options)
    if config.projections:
        model.projections = nn.ModuleDict(
            {str(layer): nn.Linear(config.hidden, width, bias=False, **options) for layer, width in config.projections}
        )


def _attach_low_rank(
    model: nn.Module,
    adapter: AdapterConfig,
    table: ParameterTable,
    layout: Layout,
    tensor: TensorOperations | None,
    **options: Any,
) -> None:
    """Add the matrices A and B of `adapter` to the linear layers of `model`, in place, and freeze all other parameters.

    table: parameter table of the model, which lists the adapted layers. layout: parallel layout of which `model` is one
    rank's part. tensor: communication of tensor parallelism, by which DoRA sums squared norms; None: no tensor
    parallelism. options: `device` and `dtype` of the adapter's parameters.
    """
    model.requires_grad_(False)
    transformer: Any = model
    transformer.token_keys = tokens = TokenKeys()
    tensors = {parameter.name: parameter for parameter in table.tensors}
    modules: dict[str, Any] = dict(model.named_modules())
    for parameter in table.tensors:
        layer = parameter.name.removesuffix(".weight")
        if (packed := parameter.entries[0].packed) and layer in modules:
            modules[layer].packed = QuantizedMatmul(QuantizedFormat(packed), parameter.local_shape(layout))
    for name, first in tensors.items():
        layer, _, part = name.rpartition(".adapter.")
        if part != "a" or not isinstance(modules.get(layer), Linear):  # of another pipeline stage
            continue
        second, weight = tensors[f"{layer}.adapter.b"], tensors[f"{layer}.weight"]
        rows, inputs = list(_list_rows(weight, second, layout)), first.local_shape(layout)[1]
        settings = adapter.rank, adapter.scale
        dispatcher = transformer.axes.dispatcher if weight.entries[0].expert_parallel(layout) else None
        sums = _make_sums(tensor, dispatcher) if weight.entries[0].split.get("tp") == 1 else None
        dropout = None
        if adapter.dropout:
            at = {"tp": tensor.rank if tensor else 0, "etp": dispatcher.width_rank if dispatcher else 0}
            features = _list_features(table, first.entries[0], layout, at)
            dropout = Dropout(adapter.dropout, layer, features, tokens)
        made: Any
        if weight.entries[0].expert is not None:
            experts, _, part = layer.rpartition(".")
            held = modules[experts].held
            of_one = rows[: len(rows) // held]  # rows of the first expert
            if adapter.kind == "dora":
                made = ExpertWeightDecomposed(of_one, held, inputs, *settings, sums, **options)
            else:
                made = ExpertLowRank(of_one, held, inputs, *settings, **options)
            made.dropout = dropout
            attach_to_experts(modules[experts], part, made, tokens, tensor)
        else:
            if adapter.kind == "dora":
                made = WeightDecomposed(rows, inputs, *settings, sums, **options)
            else:
                made = LowRank(rows, inputs, *settings, **options)
            made.dropout, modules[layer].adapter = dropout, made


def _make_sums(tensor: TensorOperations | None, dispatcher: Any) -> SumOverRanks | None:
    """Return the function that sums a tensor over the ranks that split the input features of a row-parallel layer; None
    if no ranks split them.

    tensor: communication of tensor parallelism (axis tp), for a dense layer. dispatcher: token dispatcher of an expert
    layer under expert parallelism; the layer's input features are then split over axis etp. None for dense layers."""
    if dispatcher is not None:
        return lambda x, site: reduce_from(x, dispatcher.etp, site)
    return None if tensor is None else tensor.reduce


def _list_features(
    table: ParameterTable, first: ParameterEntry, layout: Layout, position: Mapping[str, int]
) -> torch.Tensor:
    """Return the indices of this rank's input features of an adapted layer, counted in the unsharded layer: int64
    [inputs of the rank].

    table: parameter table of the model. first: parameter entry of one of the layer's adapter matrices A. layout:
    parallel layout. position: this rank's index on the axes "tp" and "etp", {axis: index}."""
    coordinates = {**dict.fromkeys(("cp", "dp", "pp", "ep"), 0), **position}
    boxes = table.local_slices(first, layout, coordinates)
    return torch.cat([torch.arange(box.start[1], box.start[1] + box.shape[1]) for box in boxes])


def _list_rows(weight: ModelParameter, second: ModelParameter, layout: Layout) -> Iterator[Rows]:
    """Yield, for each adapted matrix of a layer, the range of this rank's rows (output features) of the layer's weight
    that belong to the matrix, such as the query rows of a fused qkv.

    weight: the layer's weight, which may fuse several matrices. second: parameter that stacks the matrices B of the
    layer's adapters. layout: parallel layout."""
    adapted = {each.name: each for each in second.entries}
    for entry in weight.entries:
        if entry.ep_rank(layout) not in (None, 0):  # the same rows on every rank
            continue
        found = adapted.get(f"{PEFT_PREFIX}{entry.name.removesuffix('.weight')}.{ADAPTER_PARTS['b']}")
        if found is not None:
            yield Rows(weight.local_offset(entry, layout), found.local_shape(layout)[0])


def make_initial_values(
    table: ParameterTable, read_base: Callable[[ParameterEntry], torch.Tensor], seed: int, dtype: torch.dtype
) -> Callable[[ParameterEntry], torch.Tensor]:
    """Return a function (adapter's parameter entry) -> its initial value. A is random and B is zero; DoRA's magnitudes
    are the norms of the base weight's rows, as the run holds them: quantized and in its dtype. The adapted model then
    computes what the base model of the run computes.

    table: parameter table of the model with its adapter. read_base: function (entry of the base model) -> its value, in
    the shape that the checkpoint stores. seed: seed of the random values. dtype: of the run's parameters."""

    def value_of(entry: ParameterEntry) -> torch.Tensor:
        """Return the initial value of a parameter entry of the adapter (one of its checkpoint tensors), in its shape on
        disk."""
        if not entry.name.endswith(_MAGNITUDE):
            return initial_value(entry, seed)
        weight = table.entry(f"{entry.name.removeprefix(PEFT_PREFIX).removesuffix(_MAGNITUDE)}.weight")
        value = read_base(weight)
        rows = value.T.contiguous() if weight.transposed else value
        if weight.packed is not None:
            rows = round_trip(weight.packed, rows)
        return torch.linalg.vector_norm(rows.to(dtype).double(), dim=1)

    return value_of


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Context manager that disables the adapters of `model`, so that the model computes what its base model computes
    (the reference policy in preference training)."""
    found = [module for module in model.modules() if isinstance(module, LowRank | ExpertLowRank)]
    for module in found:
        module.enabled = False
    try:
        yield
    finally:
        for module in found:
            module.enabled = True


def make_zeros(entry: ParameterEntry) -> torch.Tensor:
    """Return zeros in an entry's shape on disk, for values that a checkpoint replaces: DoRA's initial values would take
    long, as they quantize the base once more."""
    return torch.zeros(entry.disk_shape)
