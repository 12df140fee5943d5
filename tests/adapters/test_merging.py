"""Merged weights compute what the adapter does; extraction inverts merging; damaged input is refused in one line."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.adapters.attach import adapters_off
from meshwright.adapters.merging import extract_adapter, find_format, merge_adapter, unmerge_adapter, write_adapter
from meshwright.cli.main import main
from meshwright.errors import UserError
from meshwright.model.huggingface import load_huggingface
from meshwright.quantization.formats import round_trip
from meshwright.spec.config_json import config_from_path
from tests.adapters.adapter_cases import adapted, batch, small, write_base


@pytest.mark.parametrize(("model", "kind"), [("llama-3-8b", "lora"), ("gpt2", "dora")])
def test_merged_model_computes_what_the_adapted_one_does(model: str, kind: str, tmp_path: Path):
    config = small(model)
    base = write_base(tmp_path / "base", config)
    mine, values = adapted(config, base, kind=kind)
    write_adapter(tmp_path / "adapter", mine.config, values)
    found = merge_adapter(tmp_path / "adapter", tmp_path / "base", tmp_path / "merged")
    merged, _ = load_huggingface(tmp_path / "merged", torch.float64)
    tokens, targets = batch(config)
    assert merged(tokens, targets).item() == pytest.approx(mine(tokens, targets).item(), rel=1e-12)
    with adapters_off(mine):
        assert mine(tokens, targets).item() == base(tokens, targets).item() != merged(tokens, targets).item()
    assert found["rounding"] == 0.0


def test_unmerge_restores_the_base_and_extract_finds_the_adapter(tmp_path: Path):
    config = small()
    base = write_base(tmp_path / "base", config)
    mine, values = adapted(config, base, targets=("o_proj", "gate_proj"))
    write_adapter(tmp_path / "adapter", mine.config, values)
    merge_adapter(tmp_path / "adapter", tmp_path / "base", tmp_path / "merged")
    unmerge_adapter(tmp_path / "adapter", tmp_path / "merged", tmp_path / "restored")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "restored"))
    assert all((after[key] - before[key]).abs().max() < 1e-14 for key in before)
    found = extract_adapter(tmp_path / "merged", tmp_path / "base", tmp_path / "extracted", rank=3)
    assert found["layers"] == 4 and found["kept"] == pytest.approx(1.0) and not found["not_extracted"]
    found = extract_adapter(tmp_path / "merged", tmp_path / "base", tmp_path / "smaller", rank=1)
    assert 0.3 < found["kept"] < 0.95
    merge_adapter(tmp_path / "extracted", tmp_path / "base", tmp_path / "again")
    again, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "merged"))
    assert all((again[key] - merged[key]).abs().max() < 1e-7 for key in merged)  # the adapter is stored in float32


def test_unmerging_from_a_packed_base_reports_what_packing_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = dataclasses.replace(small(), hidden=128, heads=4, kv_heads=2, head_dim=32, intermediate=192)
    base = write_base(tmp_path / "base", config)
    mine, values = adapted(config, base, targets=("o_proj", "gate_proj"), base=str(tmp_path / "base"))
    write_adapter(tmp_path / "adapter", mine.config, values)
    (tmp_path / "adapter/training").mkdir()
    recipe = '[adapter]\nbase = "nf4"\ndouble_quantization = true\n'
    (tmp_path / "adapter/training/state.json").write_text(json.dumps({"recipe": recipe}))
    arguments = [str(tmp_path / name) for name in ("adapter", "merged", "restored")]
    assert main(["adapter", "merge", *arguments[:2]]) == 0
    capsys.readouterr()
    assert main(["adapter", "unmerge", *arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "restored"))
    names = [key for key in before if key.endswith(("o_proj.weight", "gate_proj.weight"))]
    assert all((after[key] - round_trip("nf4-double", before[key])).abs().max() < 1e-14 for key in names)
    difference = torch.cat([(after[key] - before[key]).flatten() for key in names]).norm()
    lost = float(difference / torch.cat([before[key].flatten() for key in names]).norm())
    assert document["quantized"] == "nf4-double" and document["quantization"] == pytest.approx(lost, rel=1e-9)
    assert lost > 0.05
    shutil.rmtree(tmp_path / "base")
    shutil.rmtree(tmp_path / "restored")
    assert main(["adapter", "unmerge", *arguments]) == 0
    assert "those of the dequantized nf4-double base: what packing it lost is lost" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["[adapter]\nbase = [1]", '[adapter]\nbase = "fp2"', "adapter = 3", "[adapter]"])
def test_state_file_without_a_known_format_names_none(recipe: str, tmp_path: Path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training/state.json").write_text(json.dumps({"recipe": recipe}))
    assert find_format(tmp_path) is None


def test_extract_reports_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any):
    write_base(tmp_path / "base", small())
    write_base(tmp_path / "tuned", small())
    tensors = load_file(tmp_path / "tuned/model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] += torch.eye(*tensors["model.layers.1.mlp.up_proj.weight"].shape)
    save_file(tensors, tmp_path / "tuned/model.safetensors", {"format": "pt"})
    monkeypatch.setattr("meshwright.cli.adapter.PROGRESS_SECONDS", -1.0)
    assert (
        main(["adapter", "extract", *(str(tmp_path / name) for name in ("tuned", "base", "new")), "--rank", "2"]) == 0
    )
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == f"extracting: 0/{len(tensors)} tensors" and lines[-1].startswith(f"extracting: {len(tensors)}/")


def test_extract_reports_tensors_that_take_no_adapter(tmp_path: Path):
    write_base(tmp_path / "base", small())
    write_base(tmp_path / "tuned", small())
    tensors = load_file(tmp_path / "tuned/model.safetensors")
    tensors["model.norm.weight"] += 1
    tensors["model.layers.1.mlp.up_proj.weight"] += torch.eye(*tensors["model.layers.1.mlp.up_proj.weight"].shape)
    save_file(tensors, tmp_path / "tuned/model.safetensors", {"format": "pt"})
    found = extract_adapter(tmp_path / "tuned", tmp_path / "base", tmp_path / "adapter", rank=2)
    assert found["not_extracted"] == ["model.norm.weight"] and found["layers"] == 1
    assert found["kept"] == pytest.approx(2 / 24)  # two of 24 equal singular values


def test_adapter_of_another_model_is_refused_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    base = write_base(tmp_path / "base", small())
    mine, values = adapted(small(), base)
    write_adapter(tmp_path / "adapter", mine.config, values)
    write_base(tmp_path / "other", small("qwen3-0.6b", layers=1))
    arguments = ["adapter", "merge", str(tmp_path / "adapter"), str(tmp_path / "out")]
    assert main([*arguments, "--base", str(tmp_path / "other")]) == 2
    error = capsys.readouterr().err
    assert "adapter_model.safetensors" in error or "another model" in error
    assert error.count("\n") == 1 and not (tmp_path / "out").exists()
    assert main(arguments) == 2
    assert "--base" in capsys.readouterr().err and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [("peft_type", "IA3", "LORA"), ("r", 0, "whole number"), ("lora_alpha", None, "positive"), ("bias", "all", "bias")],
)
def test_adapter_config_that_cannot_be_used_is_refused(key: str, value: object, expected: str, tmp_path: Path):
    base = write_base(tmp_path / "base", small())
    mine, values = adapted(small(), base)
    write_adapter(tmp_path / "adapter", mine.config, values)
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(UserError, match=expected):
        merge_adapter(tmp_path / "adapter", tmp_path / "base", tmp_path / "out")


@pytest.mark.parametrize(
    ("config", "base"),
    [
        ('{"base_model_name_or_path": "runs/moved"}', "runs/moved"),
        (json.dumps({"base_model_name_or_path": "x" * 300}), "x" * 300),  # longer than a file name may be
        ('{"base_model_name_or_path": 7}', r"\(none that can be read\)"),
        ("{", r"\(none that can be read\)"),
    ],
)
def test_missing_base_of_an_adapter_is_named(tmp_path: Path, config: str, base: str):
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(UserError, match=rf"adapter_config.json: the base model {base} is not a directory here"):
        config_from_path(tmp_path)
