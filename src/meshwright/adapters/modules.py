"""LoRA, rsLoRA and DoRA on the `nn.Linear` layers of any module, with the parameter names of PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.adapters.peft_directory import open_adapter
from meshwright.errors import UserError
from meshwright.model.checkpoint_files import CheckpointFiles
from meshwright.model.precision import at_least_float32
from meshwright.names import unknown
from meshwright.spec.adapter_config import ALL_LINEAR, AdapterConfig
from meshwright.spec.adapter_entries import ADAPTER_PARTS, PEFT_PREFIX, matches
from meshwright.spec.adapter_json import ADAPTER_FILE


class AdaptedLinear(nn.Linear):
    """Linear layer y = x Wᵀ + b with a low-rank adapter: y + s x Aᵀ Bᵀ (Hu et al. 2021, arXiv:2106.09685, eq. 3), with
    DoRA's output features scaled to trained magnitudes (Liu et al. 2024, arXiv:2402.09353, eq. 5). `adapt_module` turns
    an existing `nn.Linear` into an `AdaptedLinear`. Attributes: `adapter`: settings of the adapter; `lora_A`, `lora_B`:
    {"weight": A or B}; `lora_magnitude_vector`: DoRA's magnitudes, None for LoRA."""

    adapter: AdapterConfig
    lora_A: nn.ParameterDict
    lora_B: nn.ParameterDict
    lora_magnitude_vector: nn.Parameter | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the adapted layer, [..., Y], for `x` [..., X]. In training mode the adapter's input has
        dropout."""
        y, a_RX, b_YR = F.linear(x, self.weight), self.lora_A["weight"], self.lora_B["weight"]
        given = F.dropout(x, self.adapter.dropout, self.training) if self.adapter.dropout else x
        y = y + self.adapter.scale * F.linear(F.linear(given, a_RX), b_YR)
        if self.lora_magnitude_vector is not None:
            with torch.no_grad():  # section 4.3: the norms are constants in backward
                wide = at_least_float32(self.weight.dtype)
                merged = self.weight.to(wide) + self.adapter.scale * b_YR.to(wide) @ a_RX.to(wide)
                norms = torch.linalg.vector_norm(merged, dim=1).to(self.weight.dtype)
            y = y * (self.lora_magnitude_vector / norms)
        return y if self.bias is None else y + self.bias


def adapt_module(module: nn.Module, adapter: AdapterConfig) -> list[str]:
    """Freeze all parameters of `module`, in place, and add `adapter` to the linear layers that its targets select, with
    PEFT's initial values: A drawn by torch's generator, B zero, magnitudes the norms of W. Return the names of these
    layers. Raises `UserError` if a target selects no layer, or if the rank is above a layer's width."""
    module.requires_grad_(False)
    head = getattr(module, "get_output_embeddings", lambda: None)()
    known = {name: each for name, each in module.named_modules() if name and type(each) in (nn.Linear, AdaptedLinear)}
    inside = {name for name, each in module.named_modules() if isinstance(each, nn.MultiheadAttention)}
    hint = f"; {min(inside)} is an nn.MultiheadAttention, whose matrices take no adapter" if inside else ""
    selected: dict[str, Any] = {}
    for target in adapter.targets:
        found = {
            name: each
            for name, each in known.items()
            if matches(name, target) and not (target == ALL_LINEAR and each is head)
        }
        if not found and target == ALL_LINEAR:
            raise UserError(f"adapter.targets: the module has no nn.Linear module that takes an adapter{hint}")
        if not found:
            names = dict.fromkeys((*known, *(name.rpartition(".")[2] for name in known), ALL_LINEAR))
            raise UserError(f"adapter.targets: {unknown('nn.Linear module', target, tuple(names))}{hint}")
        selected |= found
    for name in (name for name in known if name in selected):
        _adapt(name, selected[name], adapter)
    _disable_fused_inference(module)
    return [name for name in known if name in selected]


def _disable_fused_inference(module: nn.Module) -> None:
    """Disable the fused inference path of torch's Transformer encoders in `module`, which reads weights directly and so
    would skip their adapters.
    """
    for each in module.modules():
        if isinstance(each, nn.TransformerEncoder | nn.TransformerEncoderLayer) and any(
            isinstance(inner, AdaptedLinear) for inner in each.modules()
        ):
            # Both are conditions of the fused function, and of the nested tensors that only it takes.
            if isinstance(each, nn.TransformerEncoder):
                each.use_nested_tensor = False
            else:
                each.activation_relu_or_gelu = 0


def _adapt(name: str, layer: Any, adapter: AdapterConfig) -> None:
    """Turn the linear layer `layer` into an `AdaptedLinear`, in place, with the settings `adapter`. name: name of the
    layer in the module."""
    if isinstance(layer, AdaptedLinear):
        raise UserError(f"adapter: {name} has an adapter already")
    outputs, inputs = layer.weight.shape
    if adapter.rank > min(outputs, inputs):
        raise UserError(
            f"adapter.rank {adapter.rank} is above the width of {name}, a matrix of {outputs} x {inputs}; at most "
            f"{min(outputs, inputs)}"
        )
    first, second = layer.weight.new_empty(adapter.rank, inputs), layer.weight.new_zeros(outputs, adapter.rank)
    nn.init.kaiming_uniform_(first, a=5**0.5)
    layer.__class__, layer.adapter, layer.lora_magnitude_vector = AdaptedLinear, adapter, None
    layer.lora_A, layer.lora_B = (nn.ParameterDict({"weight": nn.Parameter(each)}) for each in (first, second))
    if adapter.kind == "dora":
        norms = torch.linalg.vector_norm(layer.weight.detach(), dim=1)
        layer.lora_magnitude_vector = nn.Parameter(norms)


def load_module_adapter(module: nn.Module, directory: str | Path, wanted: AdapterConfig | None = None) -> None:
    """Load an adapter from a PEFT directory into `module`, in place; if the module has no adapter yet, one is added.
    wanted: settings that the directory must have; None: any. Raises `UserError` if a tensor or setting does not fit.
    """
    files, found = open_adapter(directory)
    for name in ("kind", "rank", "alpha") if wanted is not None else ():
        if getattr(wanted, name) != getattr(found, name):
            raise UserError(
                f"{directory}: holds an adapter with {name} {getattr(found, name)}, not {getattr(wanted, name)}; give "
                "[adapter] the values of the directory"
            )
    if not any(isinstance(each, AdaptedLinear) for each in module.modules()):
        adapt_module(module, found)
    copy_adapter_values(module, files)


def copy_adapter_values(module: nn.Module, files: CheckpointFiles) -> None:
    """Copy the tensors of a PEFT directory (`files`) into the adapter of `module`, in place. Raises `UserError` for the
    first tensor that is missing, unexpected, or of another shape.
    """
    ends = tuple(f".{part}" for part in ADAPTER_PARTS.values())
    state = {f"{PEFT_PREFIX}{name}": each for name, each in module.named_parameters() if f".{name}".endswith(ends)}
    place = files.directory / ADAPTER_FILE
    for name in sorted(files.names ^ state.keys()):
        what = "is missing" if name in state else "belongs to no adapter of this module"
        raise UserError(f"{place}: tensor {name} {what}")
    for name, value in state.items():
        if files.shape(name) != tuple(value.shape):
            raise UserError(f"{place}: {name} has shape {files.shape(name)}, the module's {tuple(value.shape)}")
        with torch.no_grad():
            value.copy_(files.read_weights(name))
