"""Measurements of this machine that the planner reads from their store (`machine.py`): speeds (hardware profiles), the
fastest precision, and the memory of a rank's process beyond tensors. Free of torch."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from meshwright import __version__
from meshwright.machine import (
    DAMAGED,
    measurement_file,
    parse_measurement,
    processor_name,
    profile_directory,
    read_measurement_file,
    torch_version,
    write_measurement,
)
from meshwright.threads import count_available_cores


@dataclass(frozen=True, slots=True)
class HardwareProfileKey:
    """Conditions that a hardware profile (measured speeds of this machine) depends on.

    processor: name of the processor; cores: number of available cores; torch: version of torch; device: "cpu"; ranks:
    processes that compute together; threads: OpenMP threads of each process."""

    processor: str
    cores: int
    torch: str
    device: str
    ranks: int
    threads: int

    @classmethod
    def here(cls, cores: int, ranks: int, threads: int) -> HardwareProfileKey:
        """Return the key for this machine's CPU. cores: number of available cores; ranks: processes that compute
        together; threads: OpenMP threads of each process."""
        return cls(processor_name(), cores, torch_version(), "cpu", ranks, threads)

    @property
    def path(self) -> Path:
        """Path of the profile's file, which need not exist."""
        return measurement_file(self.device, asdict(self))


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """Measured speeds of this machine. precisions: measured precisions, such as "bf16"; axes: "tp" and "cp" if their
    communication was measured; cluster: content of a cluster file with the speeds."""

    precisions: tuple[str, ...]
    axes: tuple[str, ...]
    cluster: Mapping[str, Any]

    def covers(self, precisions: Sequence[str], axes: Sequence[str]) -> bool:
        """Return True if the profile has all measurements that layouts need which use these precisions (such as "bf16")
        and axes ("tp", "cp")."""
        return set(precisions) <= set(self.precisions) and set(axes) <= set(self.axes)


def read_profile(key: HardwareProfileKey) -> HardwareProfile | None:
    """Return the stored hardware profile (measured speeds) for a key; None if missing or damaged."""
    return parse_measurement(key.device, asdict(key), _profile)


def write_profile(key: HardwareProfileKey, profile: HardwareProfile) -> None:
    """Write a hardware profile to the file of its key. Raises `OSError` if the directory is not writable."""
    write_measurement(key.device, asdict(key), asdict(profile))


def profiles_here() -> list[tuple[Path, Mapping[str, Any]]]:
    """Return (file, content of a cluster file) for each hardware profile of this machine. Profiles with more ranks come
    first, then newer ones; profiles with more threads than cores come last."""
    cores = count_available_cores()
    here = {"processor": processor_name(), "torch": torch_version(), "cores": cores}
    found = []
    for path in profile_directory().glob("cpu-*.json"):
        with suppress(*DAMAGED):
            key, tables = read_measurement_file(path)
            if here.items() <= key.items():
                order = (key["ranks"] * key["threads"] <= cores, key["ranks"], path.stat().st_mtime)
                found.append((order, path, _profile(tables).cluster))
    return [(path, tables) for _, path, tables in sorted(found, key=lambda each: each[0], reverse=True)]


def _profile(tables: Mapping[str, Any]) -> HardwareProfile:
    """Build a hardware profile from `tables`, the figures in a measurement's file."""
    precisions, axes = (tuple(map(str, tables[name])) for name in ("precisions", "axes"))
    return HardwareProfile(precisions, axes, dict(tables["cluster"]))


def read_fastest_precision(threads: int) -> str | None:
    """Return the faster precision on this machine's CPU, "bf16" or "fp32", as measured and stored; layouts that name no
    precision use it. None if it was not measured. threads: threads of a rank."""
    fastest = parse_measurement("precision", _precision_key(threads), lambda found: str(found["fastest"]))
    return fastest if fastest in ("bf16", "fp32") else None


def write_fastest_precision(threads: int, precision: str) -> None:
    """Store the faster precision on this machine's CPU, which `read_fastest_precision` returns. threads: threads of a
    rank; precision: "bf16" or "fp32". Raises `OSError` if the directory is not writable."""
    write_measurement("precision", _precision_key(threads), {"fastest": precision})


def _precision_key(threads: int) -> dict[str, Any]:
    """Return the conditions on which the fastest precision depends, as a JSON object: processor, torch version and
    threads per rank."""
    return {"processor": processor_name(), "torch": torch_version(), "threads": threads}


@dataclass(frozen=True, slots=True)
class ProcessConstants:
    """Measured memory of a rank's process on this machine, in addition to its tensors.

    first_use_bytes: library code and workspaces loaded by the first steps. heap_overhead_fraction: growth of malloc's
    heap, as a fraction of the live tensors below malloc's mmap threshold. kernel_bytes: size of each cached oneDNN
    kernel. compiler_resident_bytes: bytes that torch.compile holds permanently. compiler_transient_bytes: further bytes
    while it compiles. base_bytes: RSS with interpreter and libraries loaded, before the first tensor of a model."""

    first_use_bytes: int
    heap_overhead_fraction: float
    kernel_bytes: int
    compiler_resident_bytes: int
    compiler_transient_bytes: int
    base_bytes: int


@dataclass(frozen=True, slots=True)
class ProcessKey:
    """Conditions under which process memory was measured. precision: such as "bf16"; threads: per rank; compiled: True
    if blocks run under torch.compile."""

    precision: str
    threads: int
    compiled: bool

    @property
    def path(self) -> Path:
        """Path of the file in which the constants are stored; it may not exist yet."""
        return measurement_file("memory", self._document())

    def _document(self) -> dict[str, Any]:
        """Return the key as a JSON dict: its fields, the versions of meshwright, torch and libc, and the processor's
        name."""
        versions = {"meshwright": __version__, "torch": torch_version(), "libc": " ".join(platform.libc_ver())}
        return {**asdict(self), **versions, "processor": processor_name()}

    def read(self) -> ProcessConstants | None:
        """Return the stored measurement for this key; None if there is none or the file is damaged."""
        return parse_measurement("memory", self._document(), parse_constants)

    def write(self, constants: ProcessConstants) -> None:
        """Store the measured constants under this key. Raises `OSError` if the directory is not writable."""
        write_measurement("memory", self._document(), asdict(constants))


def find_process_items(precision: str, processor: str, threads: int, compiled: bool) -> tuple[tuple[str, int], ...]:
    """Return (name, bytes) of the memory that a rank's process on this machine holds in addition to tensors, as
    measured and stored; empty if it was not measured, or if `processor` is not this machine's.

    precision: such as "bf16"; processor: processor name of the planned cluster; threads: threads of a rank; compiled:
    True if blocks run under torch.compile.
    """
    found = ProcessKey(precision, threads, compiled).read() if processor == processor_name() else None
    if found is None:
        return ()
    items = {
        "interpreter and libraries": found.base_bytes,
        "library workspaces": found.first_use_bytes,
        "compiled code": found.compiler_resident_bytes if compiled else 0,
    }
    return tuple((name, round(size)) for name, size in items.items() if size)


def parse_constants(table: Mapping[str, Any]) -> ProcessConstants:
    """Parse a JSON dict with one number per field of `ProcessConstants`. Raises `KeyError`, `TypeError` or `ValueError`
    if it is damaged."""
    values = {field.name: table[field.name] for field in fields(ProcessConstants)}
    if not all(isinstance(value, (int, float)) and 0 <= value < math.inf for value in values.values()):
        raise ValueError(table)
    return ProcessConstants(**values)
