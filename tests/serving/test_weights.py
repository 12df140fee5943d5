"""A rank's weights, read one model parameter at a time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.model.huggingface import load_huggingface
from meshwright.serving import weights as weights_module
from meshwright.serving.weights import RankWeights
from tests.serving.small_models import FAMILIES, small_config, write_model


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_the_models_parameters(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    directory = write_model(tmp_path, small_config(name))
    read_entry, sizes = weights_module.read_entry, list[int]()

    def count(*arguments: Any) -> torch.Tensor:
        value = read_entry(*arguments)
        sizes.append(value.nbytes)
        return value

    monkeypatch.setattr(weights_module, "read_entry", count)
    weights = RankWeights(directory, Mesh.single())
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        model, _ = load_huggingface(directory, dtype)
        parameters = {name: parameter.view(-1) for name, parameter in model.named_parameters()}
        assert set(weights) == set(parameters)
        for tensor in weights:
            assert torch.equal(weights.read(tensor, dtype).reshape(-1), parameters[tensor]), tensor
    assert sum(sizes) == 3 * 4 * sum(each.numel() for each in parameters.values())  # each tensor once


def test_every_expert_is_computed_by_one_tensor_parallel_rank(tmp_path: Path):
    directory, layout = write_model(tmp_path, small_config("mixtral-tiny", experts=4)), Layout.parse("tp4:nosp ep2")
    meshes = [SimpleNamespace(layout=layout, rank=rank, pp=SimpleNamespace(size=1, rank=0)) for rank in range(4)]
    assert [RankWeights(directory, cast(Mesh, mesh)).first_expert for mesh in meshes] == [0, 2, 4, 4]


def test_pages_of_the_file_are_dropped_after_use(tmp_path: Path):
    directory = write_model(tmp_path, small_config("llama-tiny", layers=4, intermediate=1 << 14))

    def count_mapped_bytes() -> int:
        """Resident bytes of the file's mapping."""
        found, inside = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.split(" ")[0]:
                inside = line.endswith("model.safetensors")
            elif inside and line.startswith("Rss:"):
                found += int(line.split()[1]) << 10
        return found

    weights = RankWeights(directory, Mesh.single())
    most = 0
    for tensor in weights:
        weights.read(tensor, torch.float32)
        most = max(most, count_mapped_bytes())
    size = (directory / "model.safetensors").stat().st_size
    assert size > 50e6 and most < 0.4 * size


def test_missing_weights_are_named(tmp_path: Path):
    directory = write_model(tmp_path, small_config("llama-tiny"))
    (directory / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"no model.safetensors"):
        RankWeights(directory, Mesh.single())


def test_all_padding_vocabulary_shard_is_zero(tmp_path: Path):
    directory = write_model(tmp_path, small_config("llama-tiny", vocabulary=5))
    whole = RankWeights(directory, Mesh.single()).read("embedding.weight", torch.float32).clone()
    slices = []
    for rank in range(4):
        mesh = SimpleNamespace(layout=Layout.parse("tp4"), rank=rank, pp=SimpleNamespace(size=1, rank=0))
        slices.append(RankWeights(directory, cast(Mesh, mesh)).read("embedding.weight", torch.float32).clone())
    assert torch.equal(torch.cat(slices)[:5], whole) and not torch.cat(slices)[5:].any()
