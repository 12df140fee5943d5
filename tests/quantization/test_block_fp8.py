"""Models with float8 weights in blocks are read as the products of values and scales."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.quantizers import quantizer_finegrained_fp8

from meshwright.checkpoint.model_directory import save_huggingface
from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.inspection.dtypes import ELEMENT_TYPES
from meshwright.model.huggingface import load_huggingface
from meshwright.model.initialise import initialise
from meshwright.model.transformer import Transformer
from meshwright.serving.weights import RankWeights
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset

PARTIAL = (16, 32)  # rows and columns of a block, which do not divide the matrices
KEPT = ("embed_tokens", "lm_head", "norm", "mlp.gate.")


@pytest.fixture
def quantized(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, dict[str, torch.Tensor]]:
    """A directory with matrices in float8, and their values as products, computed element by element in float64."""
    block = getattr(request, "param", PARTIAL)
    config = dataclasses.replace(preset("deepseek-v3-tiny"), vocabulary=499, layers=2, hidden=72, intermediate=90)
    model = Transformer(config)
    initialise(model, parameter_table(config), seed=1)
    save_huggingface(model, tmp_path)
    tensors, expected = load_file(tmp_path / "model.safetensors"), dict[str, torch.Tensor]()
    for name, value in list(tensors.items()):
        expected[name] = value.double()
        if value.dim() < 2 or any(part in name for part in KEPT):
            continue
        rows, columns = value.shape
        scales = torch.rand(-(-rows // block[0]), -(-columns // block[1])) * 1e-3 + 1e-4
        row, column = np.arange(rows) // block[0], np.arange(columns) // block[1]
        of_elements = scales.numpy().astype(np.float64)[row[:, None], column[None, :]]
        codes = (value.double() / torch.from_numpy(of_elements)).to(torch.float8_e4m3fn)
        tensors[name], tensors[f"{name}_scale_inv"] = codes, scales
        read = ELEMENT_TYPES["F8_E4M3"].read
        assert read is not None
        wide = read(codes.view(torch.uint8).numpy().reshape(-1)).astype(np.float64).reshape(rows, columns)
        expected[name] = torch.from_numpy(wide * of_elements)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    data = json.loads((tmp_path / "config.json").read_text())
    data["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block), "activation_scheme": "dynamic",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(data))
    return tmp_path, expected


def edit(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of the file; None removes one."""
    tensors = {**load_file(directory / "model.safetensors"), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, directory / "model.safetensors")


def test_loaded_weights_are_values_times_scales(quantized: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path):
    directory, expected = quantized
    model, _ = load_huggingface(directory, torch.float32)
    save_huggingface(model, tmp_path / "again")
    for name, value in load_file(tmp_path / "again" / "model.safetensors").items():
        torch.testing.assert_close(value.double(), expected[name], rtol=2e-7, atol=0, msg=name)
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())


def test_served_weights_are_those_of_the_loaded_model(quantized: tuple[Path, dict[str, torch.Tensor]]):
    directory, _ = quantized
    weights = RankWeights(directory, Mesh.single())
    model, _ = load_huggingface(directory, torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert torch.equal(weights.read(name, torch.bfloat16).reshape(-1), parameter.reshape(-1)), name
        assert not (weights.is_bfloat16(name) and parameter.dim() > 1)


@pytest.mark.parametrize("quantized", [(2, 2)], indirect=True)  # transformers takes no partial blocks
def test_logits_match_transformers_with_dequantized_weights(
    quantized: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
):
    directory, _ = quantized
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)  # for device maps alone
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, quantization_config=transformers.FineGrainedFP8Config(dequantize=True)
    )
    model, _ = load_huggingface(directory, torch.float32)
    tokens = torch.arange(20)[None] * 7
    with torch.no_grad():
        torch.testing.assert_close(model.logits(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


NAME = "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{NAME}_scale_inv": None}, rf"tensor {NAME} is of type F8_E4M3; weights are F64, .* float8 in blocks"),
        ({f"{NAME}_scale_inv": torch.ones(2, 2)}, r"is F32 \[2, 2\]; scales of \[72, 64\] are F32 \[5, 2\]"),
        ({f"{NAME}_scale_inv": torch.full((5, 2), torch.inf)}, rf"{NAME} holds .* values that are NaN or infinite"),
        ({"other.weight_scale_inv": torch.ones(1)}, "tensor other.weight_scale_inv has no place"),
    ],
)  # fmt: skip
def test_scales_that_do_not_fit_are_named(
    changes: dict[str, torch.Tensor | None], words: str, quantized: tuple[Path, dict[str, torch.Tensor]]
):
    directory, _ = quantized
    edit(directory, **changes)
    with pytest.raises(UserError, match=words) as caught:
        load_huggingface(directory)
    assert "\n" not in str(caught.value)


def test_float8_without_a_described_format_is_refused(quantized: tuple[Path, dict[str, torch.Tensor]]):
    directory, _ = quantized
    data = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(data | {"quantization_config": None}))
    with pytest.raises(UserError, match='is F8_E4M3, but config.json has no "quantization_config"'):
        load_huggingface(directory)


def test_module_of_multi_token_prediction_is_left_out(quantized: tuple[Path, dict[str, torch.Tensor]]):
    directory, _ = quantized
    edit(directory, **{f"model.layers.2.{part}": torch.ones(2) for part in ("eh_proj.weight", "mlp.gate.weight")})
    load_huggingface(directory)
    edit(directory, **{"model.layers.12.mlp.gate.weight": torch.ones(2)})
    with pytest.raises(UserError, match="tensor model.layers.12.mlp.gate.weight has no place"):
        load_huggingface(directory)
