"""Inspection of model files matches torch and NumPy; every kind of damage gives a one-line error."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from meshwright.cli.inspect import _make_tensor_table
from meshwright.errors import UserError
from meshwright.inspection.dtypes import ELEMENT_TYPES
from meshwright.inspection.report import inspect_model
from meshwright.inspection.statistics import BLOCK, compute_statistics
from tests.forked_commands import ForkedCommand

ODD = torch.tensor([0.0, -0.0, 1.5, float("nan"), float("inf"), -float("inf"), -2.25, 3.0])
TENSORS = {
    "plain": torch.arange(24, dtype=torch.float32).reshape(2, 3, 4) / 7,
    "half": torch.linspace(-3, 3, 33).half(),
    "brain": torch.linspace(-300, 3, 35).bfloat16(),
    "double": torch.linspace(-1e200, 1e-200, 11, dtype=torch.float64),
    "e4m3": torch.linspace(-440, 440, 61).to(torch.float8_e4m3fn),
    "e5m2": torch.linspace(-5e4, 5e4, 61).to(torch.float8_e5m2),
    "long": torch.tensor([-(2**62), 5, 2**62]),
    "bytes": torch.arange(256, dtype=torch.uint8),
    "flags": torch.tensor([True, False, True]),
    "odd": ODD,
    "odd8": ODD.to(torch.float8_e5m2),
    "none": torch.zeros(0, 5),
    "one": torch.tensor(-4.0),
    "unfinished": torch.full((4,), float("nan")),
}
NAMES = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64", torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def sharded(directory: Path, tensors: dict[str, torch.Tensor] = TENSORS) -> Path:
    """Write two shards with an index; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number in (1, 2):
        part = {name: tensor for at, (name, tensor) in enumerate(tensors.items()) if at % 2 == number - 1}
        file = f"model-0000{number}-of-00002.safetensors"
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def bin_of(directory: Path) -> Path:
    """Write the same tensors with `torch.save`."""
    directory.mkdir()
    torch.save(TENSORS, directory / "pytorch_model.bin")
    return directory


@pytest.mark.parametrize("write", [sharded, bin_of])
@pytest.mark.parametrize("name", TENSORS)
def test_types_shapes_and_statistics_match_torch(tmp_path: Path, write: Callable[[Path], Path], name: str):
    [found] = inspect_model(write(tmp_path / "model"), names=[name], values=5)["tensors"]
    tensor = TENSORS[name]
    size = tensor.numel() * tensor.itemsize
    assert (found["type"], found["shape"], found["bytes"]) == (NAMES[tensor.dtype], list(tensor.shape), size)
    wide = tensor.to(torch.float64).reshape(-1)
    assert found["first"] == pytest.approx(wide[:5].tolist(), nan_ok=True)
    finite, said = wide[wide.isfinite()], found["statistics"]
    assert (said["nan"], said["infinite"]) == (int(wide.isnan().sum()), int(wide.isinf().sum()))
    assert said["zeros"] == int((wide == 0).sum())
    if len(finite):
        want = [float(value) for value in (finite.mean(), finite.std(correction=0), finite.min(), finite.max())]
        assert [said[key] for key in ("mean", "std", "min", "max")] == pytest.approx(want, rel=1e-9, abs=1e-12)
    else:
        assert [said[key] for key in ("mean", "std", "min", "max")] == [None] * 4


@pytest.mark.parametrize(("name", "dtype"), [("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)])
def test_every_8_bit_float_decodes_as_in_torch(name: str, dtype: torch.dtype):
    read = ELEMENT_TYPES[name].read
    assert read is not None
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(read(codes), torch.from_numpy(codes).view(dtype).float().numpy())


def test_blockwise_statistics_equal_whole_tensor_statistics():
    """A mean far from zero, for which a sum of squares would lose precision."""
    values = np.random.default_rng(0).normal(1e6, 1e-2, 2 * BLOCK + 77)
    found = compute_statistics(values.view(np.uint8), "F64")
    assert found is not None
    assert found["mean"] == pytest.approx(values.mean(), rel=1e-14)
    assert found["std"] == pytest.approx(values.std(), rel=1e-6)
    assert (found["min"], found["max"]) == (values.min(), values.max())


def test_a_large_tensor_is_read_in_little_memory(tmp_path: Path):
    save_file({"large": torch.ones(24 * BLOCK, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    tracemalloc.start()
    try:
        [found] = inspect_model(tmp_path / "model.safetensors")["tensors"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found["statistics"]["mean"] == 1.0
    assert peak < 32 * BLOCK < found["bytes"]  # some copies of a block in float64


def test_totals_count_all_tensors_and_globs_select_shown_ones(tmp_path: Path):
    document = inspect_model(sharded(tmp_path), names=["e?m*", "plain"])
    assert sorted(tensor["name"] for tensor in document["tensors"]) == ["e4m3", "e5m2", "plain"]
    assert document["tensors_in_all"] == len(TENSORS)
    assert document["elements"] == sum(tensor.numel() for tensor in TENSORS.values())
    assert document["bytes"] == sum(tensor.numel() * tensor.itemsize for tensor in TENSORS.values())
    assert document["bytes_by_type"]["F64"] == 88
    assert [file["tensors"] for file in document["files"]] == [7, 7]
    assert all((tmp_path / file["file"]).stat().st_size == file["bytes"] for file in document["files"])


def test_without_statistics_no_value_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from meshwright.inspection.files import TensorFiles

    monkeypatch.setattr(TensorFiles, "map_bytes", None)
    document = inspect_model(sharded(tmp_path), values=None)
    assert len(document["tensors"]) == len(TENSORS) and "statistics" not in document["tensors"][0]


def test_types_without_numbers_are_sized(tmp_path: Path):
    header = {"packed": {"dtype": "F4", "shape": [3, 4], "data_offsets": [0, 6]}}
    write_raw(tmp_path / "model.safetensors", header, b"\0" * 6)
    [found] = inspect_model(tmp_path)["tensors"]
    assert (found["bytes"], found["elements"], found["first"], found["statistics"]) == (6, 12, None, None)


def write_raw(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


class TestDamage:
    """Damage is reported in one line that names the file."""

    def refused(self, path: Path, **options: Any) -> str:
        with pytest.raises(UserError) as caught:
            inspect_model(path, **options)
        line = str(caught.value)
        assert "\n" not in line and str(path).partition("/model")[0] in line
        return line

    def test_a_file_cut_anywhere_is_named(self, tmp_path: Path):
        file = sharded(tmp_path) / "model-00002-of-00002.safetensors"
        whole = file.read_bytes()
        for size in (0, 5, 8, 20, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:size])
            line = self.refused(tmp_path)
            assert file.name in line and ("cut short" in line or "not a safetensors file" in line), (size, line)
        file.write_bytes(whole)
        inspect_model(tmp_path)

    def test_a_missing_shard_is_named(self, tmp_path: Path):
        (sharded(tmp_path) / "model-00002-of-00002.safetensors").unlink()
        assert "model-00002-of-00002.safetensors of its 2 shards is not in the directory" in self.refused(tmp_path)

    def test_tensor_only_in_index_is_named(self, tmp_path: Path):
        index = sharded(tmp_path) / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        content["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
        index.write_text(json.dumps(content))
        assert "tensor ghost is missing, though the index lists it there" in self.refused(tmp_path)
        del content["weight_map"]["ghost"], content["weight_map"]["odd"]
        index.write_text(json.dumps(content))
        assert inspect_model(tmp_path)["not_in_index"] == ["odd"]
        index.write_text("[]")
        assert "not an index" in self.refused(tmp_path)

    @pytest.mark.parametrize(
        ("header", "said"),
        [
            ({"x": {"dtype": "BF17", "shape": [1], "data_offsets": [0, 2]}}, '"BF17"; did you mean "BF16"?'),
            ({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, "needs 12 bytes, its offsets span 8"),
            ({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "not a JSON object of tensors"),
            ({"x": {"dtype": "F32", "shape": [1]}}, "not a JSON object of tensors"),
            ({"x": 3}, "not a JSON object of tensors"),
            (b"[1]", "not a JSON object of tensors"),
            (b'{"x', "not a JSON object of tensors"),
            (b"\xff\xfe", "not a JSON object of tensors"),
        ],
    )  # fmt: skip
    def test_a_wrong_header_is_named(self, tmp_path: Path, header: Any, said: str):
        write_raw(tmp_path / "model.safetensors", header, b"\0" * 16)
        assert said in self.refused(tmp_path)

    def test_path_without_model_is_refused(self, tmp_path: Path):
        assert "has no model" in self.refused(tmp_path)
        (tmp_path / "model.txt").write_text("text")
        assert "not a model file" in self.refused(tmp_path / "model.txt")
        (tmp_path / "model.safetensors").write_text("a text that somebody renamed")
        assert "not a safetensors file" in self.refused(tmp_path / "model.safetensors")
        assert "no such file or directory" in self.refused(tmp_path / "model" / "nowhere")
        (tmp_path / "step-000100").mkdir()
        assert "no such file or directory; checkpoints there: step-000100" in self.refused(tmp_path / "step-000300")

    def test_a_pickle_that_would_run_code_is_not_run(self, tmp_path: Path):
        ran = tmp_path / "ran"

        class Wicked:
            def __reduce__(self) -> Any:
                return (Path.touch, (ran,))

        torch.save({"x": Wicked()}, tmp_path / "pytorch_model.bin")
        assert "it has more than tensors" in self.refused(tmp_path)
        assert not ran.exists()

    def test_truncated_or_empty_bin_file_is_named(self, tmp_path: Path):
        file = bin_of(tmp_path / "model") / "pytorch_model.bin"
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        assert "truncated or damaged" in self.refused(tmp_path / "model")
        torch.save({"step": 3}, file)
        assert "holds no tensors" in self.refused(tmp_path / "model")

    def test_a_glob_without_a_match_names_the_nearest(self, tmp_path: Path):
        assert 'did you mean "plain"?' in self.refused(sharded(tmp_path), names=["plan"])

    def test_a_layout_needs_the_architecture(self, tmp_path: Path):
        assert "has no config.json" in self.refused(sharded(tmp_path), layout="pp2")

    def test_torch_file_whose_records_are_moved_is_refused(self, tmp_path: Path):
        """torch maps the bytes where the header before a record says, which zip directory and data contradict."""
        file = tmp_path / "pytorch_model.bin"
        torch.save({"a": torch.arange(64.0), "b": torch.arange(64.0)}, file)
        data = bytearray(file.read_bytes())
        with zipfile.ZipFile(file) as archive:
            header = next(record for record in archive.infolist() if record.filename.endswith("data/0")).header_offset
        for at, value in ((28, data[header + 28] ^ 1), (28, data[header + 28] - 16), (0, 0), (30, 65)):
            changed = data.copy()
            changed[header + at] = value
            file.write_bytes(changed)
            assert "truncated or damaged (record" in self.refused(file), at

    def test_torch_file_whose_tensor_exceeds_its_record_is_refused(self, tmp_path: Path):
        file = tmp_path / "pytorch_model.bin"
        for other in (64, 65):  # with 65, another record has the size that the pickle claims
            torch.save({"a": torch.arange(64.0), "b": torch.arange(float(other))}, file)
            data = file.read_bytes()
            assert b"K@tq" in data  # the end of a storage of 64 elements
            file.write_bytes(data.replace(b"K@tq", b"KAtq", 1))
            assert "truncated or damaged (the sizes of tensors" in self.refused(file)


def test_no_torch_is_loaded_for_safetensors(tmp_path: Path):
    program = (
        "import sys; from meshwright.cli.main import main; "
        f"code = main(['inspect', {str(sharded(tmp_path))!r}]); "
        "sys.exit(code or ('torch' in sys.modules and 'torch was loaded'))"
    )
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr


def test_names_like_markup_are_shown_verbatim_and_newlines_escaped(tmp_path: Path, command_line: Callable[..., Any]):
    save_file({"layers[0].[red]x[/blue]\ny": torch.ones(2)}, tmp_path / "model.safetensors")
    assert "layers[0].[red]x[/blue]\\ny " in command_line("inspect", tmp_path).output


def test_a_run_directory_means_its_newest_checkpoint(
    tmp_path: Path, tiny_recipe: Path, command_line: Callable[..., Any]
):
    (tmp_path / "text.txt").write_text("\n\n".join(f"The {number}th of the short lines." for number in range(400)))
    options = [f"data.source={tmp_path}/text.txt", f"data.cache={tmp_path}/cache", f"run.directory={tmp_path}/run"]
    training = ["-m", "meshwright", "train", str(tiny_recipe), *options, "train.steps=2", "checkpoint.every=1"]
    assert ForkedCommand(training, tmp_path).wait() == 0
    document = json.loads(command_line("inspect", tmp_path / "run", "--layout", "pp2 zero3 dp2", "--json").output)
    assert document["path"].endswith("step-000002") and document["family"] == "llama"
    assert document["elements"] == document["parameters_of_config"]
    assert len(document["placement"]["ranks"]) == 4
    weights = Path(document["path"]) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    failed = command_line("inspect", document["path"])
    assert failed.code == 2 and "model.safetensors" in failed.errors and failed.errors.count("\n") == 1


def test_command_shows_tensors_and_non_finite_values(tmp_path: Path, command_line: Callable[..., Any]):
    sharded(tmp_path)
    text = command_line("inspect", tmp_path).output
    assert "model-00001-of-00002.safetensors: 7 tensors" in text and "1 NaN 2 infinite" in text and "2 × 3 × 4" in text
    found = command_line("inspect", tmp_path, "--name", "odd", "--json")
    document = json.loads(found.output)
    assert found.code == 0 and document["schema"] == 1
    [tensor] = document["tensors"]
    assert tensor["statistics"]["infinite"] == 2 and tensor["first"][:3] == [0.0, 0.0, 1.5]
    assert math.isclose(tensor["statistics"]["mean"], (1.5 - 2.25 + 3) / 5)
    failed = command_line("inspect", tmp_path / "no")
    assert failed.code == 2 and failed.errors.count("\n") == 1


def test_summary_merges_layers_and_option_lists_each_tensor(tmp_path: Path, command_line: Callable[..., Any]):
    tensors = {f"layers.{at}.weight": torch.tensor([at - 1.0, at + 1.0]) for at in range(3)}
    save_file(tensors | {"norm": torch.zeros(3), "layers.0.bias": torch.ones(2)}, tmp_path / "model.safetensors")
    rows = {line.split()[0]: line.split()[1:] for line in command_line("inspect", tmp_path).output.splitlines() if line}
    mean, std, *extremes = rows["layers.*.weight"][-5:]
    assert rows["layers.*.weight"][:3] == ["F32", "2", "3"] and float(mean) == 1.0
    assert float(std) == pytest.approx(torch.cat(list(tensors.values())).std(correction=0).item(), rel=1e-3)
    assert extremes == ["-1", "3", "1"] and rows["norm"][2] == "1" and "layers.0.weight" not in rows
    for options in (["--tensors"], ["--name", "layers.*"]):
        text = command_line("inspect", tmp_path, *options).output
        assert "layers.1.weight" in text and "layers.*" not in text


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_narrow_terminals_show_fewer_columns_and_whole_names(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    name = "layers.0.self_attention.output.weight"
    save_file({name: torch.ones(300, 40), "norm": torch.ones(300)}, tmp_path / "model.safetensors")
    tensors = inspect_model(tmp_path, values=3)["tensors"]
    console = Console(width=width, file=io.StringIO())
    console.print(_make_tensor_table(tensors))
    head, *rows = console.file.getvalue().splitlines()
    assert len(rows) == 2 and max(map(len, rows)) <= width  # no name is folded
    assert rows[0].startswith(name) and "300 × 40" in rows[0] and "46.9 KiB" in rows[0]
    assert ("zeros" in head, "min" in head and "max" in head) == (width == 200, width >= 80)
