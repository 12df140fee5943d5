"""A checkpoint is a Hugging Face directory: its files against safetensors and transformers."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from meshwright.checkpoint import Checkpointer, SaveOptions, loading, verify_checkpoint
from meshwright.checkpoint.manifest import BLOCK_BYTES, distribute_hashing, hash_blocks, hash_file
from meshwright.checkpoint.model_files import plan_model_files, split_disk_runs
from meshwright.checkpoint.snapshot import SnapshotBuffers
from meshwright.comm.mesh import Mesh
from meshwright.spec.parameters import parameter_table
from tests.training.checkpoint_cases import entry_values, state_pieces, tiny

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2")


def save(directory: Path, config, **options) -> Path:
    checkpointer = Checkpointer(directory, Mesh.single(), config, SaveOptions(background=False, **options))
    checkpointer.save(7, state_pieces(config, 0, 1), {"note": "x"})
    assert checkpointer.failed() is None
    return directory / "step-000007"


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_weights_of_every_family(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = tiny(family)
    path = save(tmp_path, config)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values()), report  # nothing missing, unexpected or of another shape
    found = model.state_dict()
    for entry in parameter_table(config).entries:
        values = entry_values("master", entry).view(entry.model_shape)
        assert torch.equal(found[entry.name], values.T if entry.transposed else values), entry.name


def test_weights_are_saved_in_checkpoint_dtype(tmp_path):
    config = tiny("gpt2")
    path = save(tmp_path, config, dtype="bfloat16")
    for entry in parameter_table(config).entries:
        values = entry_values("master", entry).view(entry.model_shape).bfloat16()
        assert torch.equal(load_file(path / "model.safetensors")[entry.name], values.T if entry.transposed else values)
    assert json.loads((path / "config.json").read_text())["dtype"] == "bfloat16"


def test_large_model_is_sharded_into_files_with_index(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = tiny("llama")
    path = save(tmp_path, config, shard_bytes=40_000)
    files = sorted(path.glob("model-*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * parameter_table(config).numel
    for name, file in index["weight_map"].items():
        with safe_open(path / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    entry = parameter_table(config).entry("model.layers.2.mlp.down_proj.weight")
    assert torch.equal(model.state_dict()[entry.name], entry_values("master", entry).view(entry.shape))
    assert verify_checkpoint(path) == []


def test_checkpoint_includes_tokenizer_and_generation_config(tmp_path, monkeypatch):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text('{"a": 1}')
    (tokenizer / "tokenizer_config.json").write_text("{}")
    (tokenizer / "something-else").write_text("not for others")
    config = tiny("llama")
    path = save(tmp_path / "checkpoints", config, tokenizer_directory=tokenizer)
    names = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert names == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors",
        "manifest.json", "training/state.json", "training/index.json", "training/rank-00000-of-00001.safetensors",
    }  # fmt: skip
    assert (path / "tokenizer.json").read_text() == '{"a": 1}'


def test_training_slices_are_plain_safetensors(tmp_path):
    config = tiny("gpt2")
    path = save(tmp_path, config)
    entry = parameter_table(config).entry("transformer.h.1.mlp.c_fc.weight")
    with safe_open(path / "training/rank-00000-of-00001.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor(f"exp_avg:{entry.name}[0:{entry.numel}]"), entry_values("exp_avg", entry))


def test_threads_that_load_into_a_gpu_select_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A new thread uses the first GPU, on which its first CUDA call would open a context."""
    config = tiny("llama")
    path, selected, copying = save(tmp_path, config), dict[int, torch.device](), set[int]()
    copy: Any = loading.copy_intersection

    def watch(*arguments: object) -> None:
        copying.add(threading.get_ident())
        copy(*arguments)

    def select(device: torch.device) -> None:
        selected[threading.get_ident()] = device

    monkeypatch.setattr(torch.cuda, "set_device", select)
    monkeypatch.setattr(loading, "copy_intersection", watch)
    wanted = state_pieces(config, 0, 1)
    loading.load_slices(path, wanted, 0, 1)
    assert not selected and copying
    copying.clear()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    loading.load_slices(path, wanted, 0, 1)
    assert copying and copying <= set(selected) and threading.get_ident() not in selected
    assert set(selected.values()) == {wanted[0].tensor.device}


def test_transposed_entry_ranges_map_to_disk_runs():
    entry = parameter_table(tiny("gpt2", hidden=12, heads=2, intermediate=48)).entry("transformer.h.0.mlp.c_fc.weight")
    outputs, inputs = entry.model_shape
    engine = np.arange(outputs * inputs, dtype=np.int32)
    truth = engine.reshape(outputs, inputs).T.reshape(-1)
    generator = np.random.default_rng(0)
    ranges = [(0, engine.size), (0, 1), (5, 6), (3, inputs), (inputs - 1, inputs + 1), (inputs, 3 * inputs)]
    ranges += [tuple(sorted(generator.choice(engine.size + 1, 2, replace=False))) for _ in range(200)]
    for start, stop in ranges:
        disk = np.full(engine.size, -1, dtype=np.int32)
        for first, run in split_disk_runs(entry, start, engine[start:stop]):
            assert (disk[first : first + len(run)] == -1).all()
            disk[first : first + len(run)] = run
        assert (disk == np.where((truth >= start) & (truth < stop), truth, -1)).all(), (start, stop)


def test_header_is_a_function_of_the_table():
    files = plan_model_files(parameter_table(tiny("qwen3")), "bfloat16", 30_000)
    again = plan_model_files(parameter_table(tiny("qwen3")), "bfloat16", 30_000)
    assert files.files == again.files and files.places == again.places


def test_hashing_is_distributed_without_repetition(tmp_path):
    sizes = {"a": 5 * BLOCK_BYTES + 1, "b": 100, "c": 2 * BLOCK_BYTES, "d": 0}
    plan = distribute_hashing(sizes, 3)
    whole = [name for part in plan for name, (wanted, _) in part.items() if wanted]
    blocks = [(name, block) for part in plan for name, (_, wanted) in part.items() for block in wanted]
    assert sorted(whole) == ["a", "b", "c", "d"]
    assert sorted(blocks) == sorted([*(("a", n) for n in range(6)), ("b", 0), ("c", 0), ("c", 1)])
    work = [
        sum(sizes[name] * wanted + len(mine) * BLOCK_BYTES for name, (wanted, mine) in part.items()) for part in plan
    ]
    assert max(work) < 2 * min(work)


def test_file_is_hashed_whole_and_by_block(tmp_path, monkeypatch):
    import hashlib

    from meshwright.checkpoint import manifest

    monkeypatch.setattr(manifest, "BLOCK_BYTES", 1000)
    data = np.random.default_rng(1).bytes(2500)
    (tmp_path / "f").write_bytes(data)
    record = hash_file(tmp_path / "f")
    assert record.size == 2500 and record.sha256 == hashlib.sha256(data).hexdigest()
    parts = [hashlib.sha256(data[at : at + 1000]).hexdigest() for at in (0, 1000, 2000)]
    assert list(record.blocks) == parts
    assert hash_blocks(tmp_path / "f", False, [2]) == (None, {2: parts[2]})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_background_save_uses_the_gpu_of_its_rank(device, tmp_path):
    """Its thread would otherwise copy from the first GPU, where its first call opens a context."""
    mesh = Mesh.single()
    checkpointer = Checkpointer(tmp_path, mesh, tiny("llama"))
    mesh.device = torch.device(device)
    snapshot = mock.Mock(**{"read_wait.return_value": None})
    with (
        mock.patch.object(SnapshotBuffers, "take", lambda buffers, slices: snapshot),
        mock.patch("meshwright.checkpoint.checkpointer.start_thread") as start,
    ):
        checkpointer.save(1, [], {})
    (_, name, cuda), _ = start.call_args
    assert (name, cuda) == ("checkpoint 1", device == "cuda")
