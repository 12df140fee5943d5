"""Claims on the choice of the instruction set: measured once for each processor and version, stored, overridable."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.errors import UserError
from meshwright.kernels import build, choice
from meshwright.kernels.build import KernelsUnavailable
from meshwright.kernels.library import Kernels
from meshwright.layout import Layout
from meshwright.machine import profile_directory


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The candidates of each measurement; AVX-512 wins it. The cache is empty, and nothing is compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(choice.INSTRUCTION_SET_VARIABLE, raising=False)
    monkeypatch.setenv("MESHWRIGHT_PROBE", "1")
    monkeypatch.setattr(build, "list_supported_instruction_sets", lambda: ("amx", "avx512", "avx2"))
    monkeypatch.setattr(build, "compute_version", lambda compiler, name: f"version of {name}")
    monkeypatch.setattr(build, "find_compiler", lambda: "g++")
    monkeypatch.setattr(choice, "_open_library", lambda name, log, count: name)
    calls: list[tuple[str, ...]] = []

    def measure(candidates: Mapping[str, object]) -> dict[str, dict[str, float]]:
        calls.append(tuple(candidates))
        return {name: {"decode": 1.0, "prefill": 0.5 if name == "avx512" else 0.8} for name in candidates}

    monkeypatch.setattr(choice, "measure_kernels", measure)
    return calls


def test_fastest_instruction_set_is_measured_once_and_stored(measured: list):
    assert choice.choose_instruction_set() == choice.choose_instruction_set() == "avx512"
    assert measured == [("amx", "avx512", "avx2")]


def test_measurement_says_how_long_it_took_and_whether_the_next_start_repeats_it(measured: list):
    lines = list[str]()
    choice.choose_instruction_set(lines.append)
    shutil.rmtree(profile_directory())
    profile_directory().write_text("a file")
    for _ in range(2):
        assert choice.choose_instruction_set(lines.append) == "avx512"
    assert len(measured) == len(lines) == 3 and lines[1] == lines[2]
    begin = r"measured the kernels for AMX, AVX512, AVX2 in 0\.\d s, "
    assert re.fullmatch(begin + "once for this version", lines[0])
    reason = r"again at each start, as the result cannot be stored \((Not a directory|File exists)\)"
    assert re.fullmatch(begin + reason, lines[1])


def cannot_open(*missing: str) -> Callable[..., object]:
    """Replacement of `_open_library` for a machine on which some kernels cannot be built."""

    def open_library(name: str, log: object, count: tuple[int, int] = (1, 1)) -> str:
        if name in missing:
            raise KernelsUnavailable(f"no {name} here")
        return name

    return open_library


@pytest.mark.parametrize("change", ["processor", "version", "damage"])
def test_another_processor_or_version_or_a_damaged_file_is_measured_again(
    measured: list, monkeypatch: pytest.MonkeyPatch, change: str
):
    choice.choose_instruction_set()
    if change == "processor":
        monkeypatch.setattr(choice, "describe_processor", lambda: {"model": "another"})
    elif change == "version":
        monkeypatch.setattr(build, "compute_version", lambda compiler, name: "another")
    else:
        (path,) = profile_directory().iterdir()
        path.write_text("{}")
    assert choice.choose_instruction_set() == "avx512" and len(measured) == 2


def test_instruction_set_that_cannot_be_built_is_no_candidate(measured: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(choice, "_open_library", cannot_open("avx512"))
    assert choice.choose_instruction_set() == "amx" and measured == [("amx", "avx2")]


def test_environment_names_the_instruction_set_in_place_of_the_measurement(
    measured: list, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(choice.INSTRUCTION_SET_VARIABLE, "avx2")
    assert choice.choose_instruction_set() == "avx2" and not measured
    monkeypatch.setenv(choice.INSTRUCTION_SET_VARIABLE, "avx512_bf16")
    with pytest.raises(UserError, match="=avx512_bf16: this processor runs amx, avx512, avx2"):
        choice.choose_instruction_set()


@pytest.mark.parametrize(
    ("probe", "compiled"),
    [
        ("1", ["AMX (1 of 2)", "AMX", "AVX2 (2 of 2)", "AVX2"]),
        ("0", ["AMX", "AMX"]),
    ],
    ids=["measured", "only the most capable"],
)
def test_lines_before_and_after_each_compilation_number_the_libraries_that_the_cache_lacks(
    measured: list, monkeypatch: pytest.MonkeyPatch, probe: str, compiled: list[str]
):
    def compile_library(compiler: str, name: str, library: Path) -> None:
        library.write_text(name)
        library.with_suffix(".sha256").write_text(hashlib.sha256(name.encode()).hexdigest())
        library.chmod(0o700)

    monkeypatch.setenv("MESHWRIGHT_PROBE", probe)
    monkeypatch.setattr(build, "_compile", compile_library)
    monkeypatch.setattr(choice, "_open_library", lambda name, log, count: build.build(name, log, count) and name)
    lines = list[str]()
    build.build("avx512")
    choice.choose_instruction_set(lines.append)
    assert [line.startswith("measured the kernels for AMX, AVX512, AVX2 in ") for line in lines[len(compiled) :]] == (
        [True] if probe == "1" else []
    )
    begins, ends = lines[: len(compiled) : 2], lines[1 : len(compiled) : 2]
    assert begins == [f"compiling CPU kernels for {name}, once for this version ..." for name in compiled[::2]]
    assert [re.sub(r"\d+\.\d s$", "#", line) for line in ends] == [
        f"compiled CPU kernels for {name} in #" for name in compiled[1::2]
    ]
    count = len(lines)
    choice.choose_instruction_set(lines.append)
    assert len(lines) == count


def test_named_instruction_set_that_cannot_be_built_is_refused(measured: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(choice.INSTRUCTION_SET_VARIABLE, "avx2")
    monkeypatch.setattr(choice, "_open_library", cannot_open("avx2"))
    with pytest.raises(
        UserError, match="MESHWRIGHT_INSTRUCTION_SET=avx2: these kernels cannot be built .*no avx2 here"
    ):
        choice.load_kernels()


def test_most_capable_instruction_set_is_taken_where_measuring_is_off(measured: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MESHWRIGHT_PROBE", "0")
    monkeypatch.setattr(choice, "_open_library", cannot_open("amx"))
    assert choice.choose_instruction_set() == "avx512" and not measured


def test_no_measurement_without_a_choice(measured: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "list_supported_instruction_sets", lambda: ("avx2",))
    assert choice.choose_instruction_set() == "avx2" and not measured


@pytest.mark.parametrize("probe", ["0", "1"])
def test_reason_is_given_where_no_kernels_can_be_built(measured: list, monkeypatch: pytest.MonkeyPatch, probe: str):
    monkeypatch.setenv("MESHWRIGHT_PROBE", probe)
    monkeypatch.setattr(choice, "_open_library", cannot_open("amx", "avx512", "avx2"))
    with pytest.raises(KernelsUnavailable, match="no avx2 here"):
        choice.choose_instruction_set()
    monkeypatch.setattr(build, "list_supported_instruction_sets", tuple)
    with pytest.raises(KernelsUnavailable, match="no x86-64 with AVX2"):
        choice.choose_instruction_set()


def test_preparation_falls_back_to_plain_torch_with_one_line(measured: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "list_supported_instruction_sets", lambda: ("avx2",))
    monkeypatch.setattr(choice, "_open_library", lambda name, log: SimpleNamespace(instruction_set=name))
    experts = Layout(tp=2, ep=2, tensor_sequence_parallel=False)
    lines = list[str]()
    assert choice.prepare_kernels("bfloat16", experts, lines.append) == ("avx2", "") and not lines
    reason = "there are no kernels for float16, only for float32 and bfloat16"
    assert choice.prepare_kernels("float16", Layout(), lines.append) == (
        choice.PLAIN_TORCH,
        reason,
    )
    monkeypatch.setattr(choice, "_open_library", cannot_open("avx2"))
    assert choice.prepare_kernels("float32", Layout(), lines.append) == (
        choice.PLAIN_TORCH,
        "no avx2 here",
    )
    warning = "warning: computing in plain torch, many times slower than with the compiled kernels: "
    assert lines == [warning + reason, warning + "no avx2 here"]
    with pytest.raises(UserError, match="ep2 needs the compiled kernels, and no avx2 here"):
        choice.prepare_kernels("float32", experts, lines.append)
    assert len(lines) == 2


def test_measurement_times_products_and_attention_of_every_candidate(kernels: Kernels):
    seconds = choice.measure_kernels({"one": kernels, "two": kernels})
    names = {f"{what} {tokens}" for what in ("product", "attention") for tokens in (1, 8, 128)}
    assert set(seconds) == {"one", "two"} and all(set(cases) == names for cases in seconds.values())
    assert all(0 < each < 1 for cases in seconds.values() for each in cases.values())
    assert seconds["one"]["product 128"] > seconds["one"]["product 1"]
