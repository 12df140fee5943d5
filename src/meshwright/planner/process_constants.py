"""Process memory beyond tensors, measured once per machine in a separate process and kept in the store of
`planner/machine_profile.py`. Free of torch."""

from __future__ import annotations

import math
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from meshwright import __version__
from meshwright.planner.machine_profile import (
    measurement_file,
    processor_name,
    read_measurement,
    torch_version,
    write_measurement,
)

KIND = "memory"
LIMIT_SECONDS = 120.0
"""Time limit of a measurement: many times the duration on an idle machine."""


@dataclass(frozen=True, slots=True)
class ProcessConstants:
    """Measured memory of a rank's process on this machine, in addition to its tensors.

    first_use_bytes: library code and workspaces loaded by the first steps. heap_overhead_fraction: growth of malloc's
    heap as a fraction of the live tensors below its mmap threshold. kernel_bytes: size of each cached oneDNN kernel.
    compiler_resident_bytes: held by torch.compile permanently; compiler_transient_bytes: in addition while it compiles.
    """

    first_use_bytes: int
    heap_overhead_fraction: float
    kernel_bytes: int
    compiler_resident_bytes: int
    compiler_transient_bytes: int


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
        found = read_measurement(KIND, self._document())
        try:
            return None if found is None else _constants(found)
        except (KeyError, TypeError, ValueError):
            return None

    def write(self, constants: ProcessConstants) -> None:
        """Store a measurement under this key. `OSError` if the directory is not writable."""
        write_measurement(KIND, self._document(), asdict(constants))


def measure_process_memory(key: ProcessKey, log: Callable[[str], None]) -> ProcessConstants:
    """Measure process memory beyond tensors under the conditions of `key` (precision, threads, compiled), in a separate
    process started like a rank. log: called with each line for the user. Raises as
    `meshwright.launcher.launcher.launch`: `RankLost` after `LIMIT_SECONDS`, `Terminated`."""
    from meshwright.launcher.launcher import LaunchSpec, launch

    command = (sys.executable, "-P", "-m", "meshwright.training.process_memory_probe")
    with tempfile.TemporaryDirectory(prefix="meshwright-probe-") as place:
        spec = LaunchSpec(
            asdict(key), 1, Path(place), threads=key.threads, command=command, trains=False, log=log,
            limit_seconds=LIMIT_SECONDS,
        )  # fmt: skip
        return _constants(launch(spec))


def _constants(table: Mapping[str, Any]) -> ProcessConstants:
    """Parse a JSON dict with one number per field of `ProcessConstants`; `KeyError`, `TypeError` or `ValueError` if it
    is damaged."""
    values = {field.name: table[field.name] for field in fields(ProcessConstants)}
    if not all(isinstance(value, (int, float)) and 0 <= value < math.inf for value in values.values()):
        raise ValueError(table)
    return ProcessConstants(**values)
