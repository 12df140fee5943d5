"""Process memory beyond tensors, measured once per machine in a separate process and kept in the store of
`planner/hardware/machine_profile.py`. Free of torch."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from meshwright import __version__
from meshwright.planner.hardware.machine_profile import (
    measurement_file,
    parse_measurement,
    processor_name,
    torch_version,
    write_measurement,
)

KIND = "memory"


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
        return measurement_file(KIND, self._document())

    def _document(self) -> dict[str, Any]:
        """Return the key as a JSON dict: its fields, the versions of meshwright, torch and libc, and the processor's
        name."""
        versions = {"meshwright": __version__, "torch": torch_version(), "libc": " ".join(platform.libc_ver())}
        return {**asdict(self), **versions, "processor": processor_name()}

    def read(self) -> ProcessConstants | None:
        """Return the stored measurement for this key; None if there is none or the file is damaged."""
        return parse_measurement(KIND, self._document(), parse_constants)

    def write(self, constants: ProcessConstants) -> None:
        """Store the measured constants under this key. Raises `OSError` if the directory is not writable."""
        write_measurement(KIND, self._document(), asdict(constants))


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
