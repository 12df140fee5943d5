"""Any number of ranks writes a checkpoint and any number reads it; a fault on one rank is handled on all."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from meshwright.checkpoint import Checkpointer, verify_checkpoint
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.spec.parameters import parameter_table
from tests.training import checkpoint_cases as cases


@pytest.fixture(scope="module")
def three():
    with LocalRanks(3) as ranks:
        yield ranks


def files_of(path: Path) -> dict[str, str]:
    files = (file for file in sorted(path.rglob("*")) if file.is_file())
    return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_two_rank_checkpoint_loads_on_one_three_four_ranks(two, three, tmp_path, family):
    config = cases.tiny(family)
    options = {"dtype": "bfloat16", "shard_bytes": 30_000}
    assert two.run(cases.save_on_ranks, str(tmp_path), config, [4], options) == [[None], [None]]
    expected = ("step-000004", True, {"rank": 0, "note": "step 4", "step": 4}, [])
    assert three.run(cases.load_on_ranks, str(tmp_path), config) == [expected] * 3
    with LocalRanks(4) as four:
        assert four.run(cases.load_on_ranks, str(tmp_path), config) == [expected] * 4
    checkpointer = Checkpointer(tmp_path, Mesh.single(), config)
    pieces = cases.empty_like(cases.state_pieces(config, 0, 1))
    path, _ = checkpointer.load_newest(pieces)
    assert path.step == 4 and cases.equal(pieces, cases.state_pieces(config, 0, 1, salt=4))
    assert verify_checkpoint(path) == []


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_model_file_is_independent_of_number_of_writing_ranks(two, three, tmp_path, family):
    config = cases.tiny(family)
    for name, ranks in (("two", two), ("three", three)):
        ranks.run(cases.save_on_ranks, str(tmp_path / name), config, [4], {})
    models = [(tmp_path / name / "step-000004/model.safetensors") for name in ("two", "three")]
    assert models[0].read_bytes() == models[1].read_bytes()
    loaded = load_file(models[0])
    for entry in parameter_table(config).entries:
        values = cases.entry_values("master", entry, salt=4).view(entry.model_shape)
        assert torch.equal(loaded[entry.name], values.T if entry.transposed else values), entry.name


def test_equal_runs_leave_equal_directories(two, tmp_path):
    config = cases.tiny("llama")
    for name in ("a", "b"):
        two.run(cases.save_on_ranks, str(tmp_path / name), config, [4, 8], {"keep": 1})
    a, b = files_of(tmp_path / "a/step-000008"), files_of(tmp_path / "b/step-000008")
    assert a == b and len(a) == 8


def test_bit_flip_on_one_rank_selects_older_checkpoint_everywhere(two, three, tmp_path):
    config = cases.tiny("llama")
    two.run(cases.save_on_ranks, str(tmp_path), config, [1, 2], {})
    cases.flip_bit(tmp_path / "step-000002/training/rank-00001-of-00002.safetensors", 0.9)
    results = three.run(cases.load_on_ranks, str(tmp_path), config)
    assert [result[:2] for result in results] == [("step-000001", True)] * 3
    lines = {line for result in results for line in result[3]}
    assert len(lines) == 1  # the same line on every rank
    line = lines.pop()
    assert "step-000002 is damaged" in line and "rank-00001-of-00002.safetensors was altered" in line


def test_bit_flip_in_unneeded_model_file_is_detected(two, tmp_path):
    config = cases.tiny("llama")
    two.run(cases.save_on_ranks, str(tmp_path), config, [1, 2], {"shard_bytes": 30_000})
    for file in sorted((tmp_path / "step-000002").glob("model-*")):
        copy = tmp_path / "copy" / "step-000002"
        shutil.copytree(tmp_path / "step-000001", tmp_path / "copy" / "step-000001")
        shutil.copytree(tmp_path / "step-000002", copy)
        cases.flip_bit(copy / file.name)
        results = two.run(cases.load_on_ranks, str(copy.parent), config)
        assert [result[:2] for result in results] == [("step-000001", True)] * 2
        assert file.name in results[0][3][0]
        shutil.rmtree(tmp_path / "copy")


@pytest.mark.parametrize("faulty", [0, 1])
def test_io_error_on_one_rank_cancels_save_on_all(two, tmp_path, faulty):
    results = two.run(cases.save_with_a_fault, str(tmp_path), cases.tiny("llama"), faulty, "io")
    for line, names in results:
        assert f"checkpoint of step 2 not written: rank {faulty} could not write" in line
        assert f"rank-0000{faulty}-of-00002.safetensors: input/output error" in line
        assert line.endswith("the newest intact checkpoint is step-000001")
        assert [name for name in names if not name.startswith(".last")] == ["step-000001"]


def test_absent_rank_is_named_after_timeout(two, tmp_path):
    (first, names), (second, _) = two.run(cases.save_with_a_fault, str(tmp_path), cases.tiny("llama"), 1, "silent")
    assert first.startswith("checkpoint of step 2 aborted: rank 1 has not written its part after 2 s")
    assert second is None and "step-000002" not in names and ".step-000002.partial" not in names


def test_unshared_checkpoint_directory_is_refused(two, tmp_path):
    directories = [str(tmp_path / "a"), str(tmp_path / "b")]
    with pytest.raises(
        UserError, match=r"rank 1 on .* does not see the checkpoint directory .* must be on a filesystem"
    ):
        two.run(cases.meet, directories, cases.tiny("llama"))
    assert two.run(cases.meet, [str(tmp_path / "a")] * 2, cases.tiny("llama")) == ["met", "met"]
    assert cases.entries(tmp_path / "a") == []  # no marker remains


def test_manifest_covers_every_file(two, tmp_path):
    two.run(cases.save_on_ranks, str(tmp_path), cases.tiny("gpt2"), [3], {})
    path = tmp_path / "step-000003"
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == 1 and manifest["block_bytes"] == 64 * 2**20
    found = files_of(path)
    del found["manifest.json"]
    assert {name: record["sha256"] for name, record in manifest["files"].items()} == found
