"""Claims on the choice of the instruction set: measured once for each processor and version, stored, overridable."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.kernels import build, choice
from meshwright.kernels.library import Kernels
from meshwright.planner.machine_profile import profile_directory


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The candidates of each measurement; AVX-512 wins it. The cache is empty, and nothing is compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(choice.INSTRUCTION_SET_VARIABLE, raising=False)
    monkeypatch.setenv("MESHWRIGHT_PROBE", "1")
    monkeypatch.setattr(build, "supported_instruction_sets", lambda: ("amx", "avx512", "avx2"))
    monkeypatch.setattr(build, "compute_version", lambda compiler, name: f"version of {name}")
    monkeypatch.setattr(build, "find_compiler", lambda: "g++")
    monkeypatch.setattr(choice, "_open_library", lambda name: name)
    calls: list[tuple[str, ...]] = []

    def measure(candidates: Mapping[str, object]) -> dict[str, dict[str, float]]:
        calls.append(tuple(candidates))
        return {name: {"decode": 1.0, "prefill": 0.5 if name == "avx512" else 0.8} for name in candidates}

    monkeypatch.setattr(choice, "measure_kernels", measure)
    return calls


def test_fastest_instruction_set_is_measured_once_and_stored(measured: list):
    assert choice.choose_instruction_set() == choice.choose_instruction_set() == "avx512"
    assert measured == [("amx", "avx512", "avx2")]


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
    monkeypatch.setattr(choice, "_open_library", lambda name: None if name == "avx512" else name)
    assert choice.choose_instruction_set() == "amx" and measured == [("amx", "avx2")]


def test_environment_names_the_instruction_set_in_place_of_the_measurement(
    measured: list, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(choice.INSTRUCTION_SET_VARIABLE, "avx2")
    assert choice.choose_instruction_set() == "avx2" and not measured
    monkeypatch.setenv(choice.INSTRUCTION_SET_VARIABLE, "avx512_bf16")
    with pytest.raises(UserError, match="=avx512_bf16: this processor runs amx, avx512, avx2"):
        choice.choose_instruction_set()


def test_named_instruction_set_that_cannot_be_built_is_refused(measured: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(choice.INSTRUCTION_SET_VARIABLE, "avx2")
    monkeypatch.setattr(choice, "_open_library", lambda name: None)
    with pytest.raises(UserError, match="MESHWRIGHT_INSTRUCTION_SET=avx2: these kernels cannot be built"):
        choice.load_kernels()


def test_most_capable_instruction_set_is_taken_where_measuring_is_off(measured: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MESHWRIGHT_PROBE", "0")
    monkeypatch.setattr(choice, "_open_library", lambda name: None if name == "amx" else name)
    assert choice.choose_instruction_set() == "avx512" and not measured


def test_no_measurement_without_a_choice(measured: list, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "supported_instruction_sets", lambda: ("avx2",))
    assert choice.choose_instruction_set() == "avx2" and not measured
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    assert choice.choose_instruction_set() is None


def test_measurement_times_products_and_attention_of_every_candidate(kernels: Kernels):
    seconds = choice.measure_kernels({"one": kernels, "two": kernels})
    names = {f"{what} {tokens}" for what in ("product", "attention") for tokens in (1, 8, 128)}
    assert set(seconds) == {"one", "two"} and all(set(cases) == names for cases in seconds.values())
    assert all(0 < each < 1 for cases in seconds.values() for each in cases.values())
    assert seconds["one"]["product 128"] > seconds["one"]["product 1"]
