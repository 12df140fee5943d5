"""MXFP4 weights of gpt-oss are read as those into which transformers converts them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from meshwright.checkpoint.model_directory import save_huggingface
from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.model.huggingface import load_huggingface
from meshwright.model.initialise import initialise
from meshwright.model.transformer import Transformer
from meshwright.quantization import mxfp4
from meshwright.serving.weights import RankWeights
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset

DOWN = "model.layers.1.mlp.experts.down_proj"


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A directory as OpenAI publishes it, experts in MXFP4, and its tensors as transformers converts them."""
    config = dataclasses.replace(preset("gpt-oss-tiny"), vocabulary=499, layers=2, windowed_layers=(True, False))
    model = Transformer(config, dtype=torch.bfloat16)
    initialise(model, parameter_table(config), seed=1)
    save_huggingface(model, tmp_path)
    tensors, generator = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(2)
    expected = dict(tensors)
    for name, value in list(tensors.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, inputs, outputs = value.shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 124, blocks.shape[:-1], dtype=torch.uint8, generator=generator)
        del tensors[name]
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        expected[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    describe(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})
    return tmp_path, expected


def describe(directory: Path, quantization: dict[str, object] | None) -> None:
    data = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(data | {"quantization_config": quantization}))


def test_every_code_and_scale_is_the_value_of_transformers():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 250, -1, -1).contiguous()
    scales = torch.arange(2, 252, dtype=torch.uint8).view(1, 250, 1).expand(-1, -1, 16).contiguous()
    found = mxfp4.dequantize(blocks, scales)
    expected = convert_moe_packed_tensors(blocks, scales)
    assert found.shape == mxfp4.compute_dequantized_shape(tuple(blocks.shape)) == expected.shape
    assert torch.equal(found, expected.float()) and len(found.unique()) > 1000


def test_loaded_and_served_weights_are_those_of_transformers(
    packed: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
):
    directory, expected = packed
    model, _ = load_huggingface(directory, torch.bfloat16)
    save_huggingface(model, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == expected.keys()
    assert all(torch.equal(again[name], value) for name, value in expected.items())
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    weights = RankWeights(directory, Mesh.single())
    for name, parameter in model.named_parameters():
        assert torch.equal(weights.read(name, torch.bfloat16).reshape(-1), parameter.reshape(-1)), name
        assert weights.is_bfloat16(name) == (".experts." not in name or "bias" in name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{DOWN}_scales": None}, f"tensor {DOWN}_scales is missing"),
        ({f"{DOWN}_blocks": None}, f"tensor {DOWN}_blocks is missing"),
        ({f"{DOWN}_blocks": None, f"{DOWN}_scales": None}, rf"tensor {DOWN} \[5, 96, 64\] is missing"),
        ({f"{DOWN}_scales": torch.ones(5, 64, 2, dtype=torch.uint8)}, r"\[5, 64, 3, 16\] and .* \[5, 64, 2\]; MXFP4"),
        ({f"{DOWN}_scales": torch.ones(5, 64, 3)}, "is of type F32; MXFP4 is in U8"),
        ({f"{DOWN}_scales": torch.full((5, 64, 3), 255, dtype=torch.uint8)}, "values that are NaN or infinite"),
        (
            {f"{DOWN}_{part}": torch.ones(5, 32, 3, *size, dtype=torch.uint8) for part, size in
             (("blocks", (16,)), ("scales", ()))},
            r"is \[5, 96, 32\], by config.json \[5, 96, 64\]",
        ),
    ],
)  # fmt: skip
def test_blocks_that_do_not_fit_are_named(
    changes: dict[str, torch.Tensor | None], words: str, packed: tuple[Path, dict[str, torch.Tensor]]
):
    directory, _ = packed
    tensors = {**load_file(directory / "model.safetensors"), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, directory / "model.safetensors")
    with pytest.raises(UserError, match=words) as caught:
        load_huggingface(directory)
    assert "\n" not in str(caught.value)


def test_blocks_without_a_described_format_are_refused(packed: tuple[Path, dict[str, torch.Tensor]]):
    directory, _ = packed
    describe(directory, None)
    with pytest.raises(UserError, match='_blocks is U8, but config.json has no "quantization_config" of MxFp4'):
        load_huggingface(directory)
