"""This machine: its processor and torch, and the store of what was measured once on it. Free of torch."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

Parsed = TypeVar("Parsed")

VERSION = 3
"""Version of the profile files' format and of the measurements; a machine with a file of another version is measured
again."""

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""CPU flags of bf16 multiplication: two of x86, one of Arm."""

PROBE_VARIABLE = "MESHWRIGHT_PROBE"
"""Environment variable: "0" disables measurements at the start of runs, as --no-probe does for one run."""


def may_measure(probe: bool = True) -> bool:
    """Return True if speeds of this machine may be measured: `probe` is True, and the environment variable
    MESHWRIGHT_PROBE is not "0"."""
    return probe and os.environ.get(PROBE_VARIABLE) != "0"


def profile_directory() -> Path:
    """Return the directory of measurements: $XDG_CACHE_HOME/meshwright/machines, else in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "meshwright" / "machines"


def measurement_file(kind: str, key: Mapping[str, Any]) -> Path:
    """Return the path of the file of a measurement, which may not exist yet. kind: what is measured, such as "cpu";
    key: conditions on which the result depends, as a JSON object."""
    text = json.dumps([VERSION, dict(key)], sort_keys=True)
    return profile_directory() / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"


def parse_measurement(kind: str, key: Mapping[str, Any], parse: Callable[[dict[str, Any]], Parsed]) -> Parsed | None:
    """Return parse(figures) of a stored measurement. None if there is none, if its file is damaged or of another
    version or key, or if `parse` raises `KeyError`, `TypeError` or `ValueError`. kind: what was measured, such as
    "cpu"; key: conditions on which the result depends."""
    with suppress(*DAMAGED):
        found, tables = read_measurement_file(measurement_file(kind, key))
        return parse(tables) if found == dict(key) else None
    return None


def write_measurement(kind: str, key: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
    """Write the file of a measurement atomically. kind: what was measured, such as "cpu"; key: conditions on which the
    result depends; tables: the measured figures, as JSON types. Raises `OSError` if the directory is not writable."""
    path = measurement_file(kind, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"version": VERSION, "key": dict(key), "tables": dict(tables)}
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


DAMAGED = (OSError, ValueError, KeyError, TypeError)
"""Errors of `read_measurement_file` for a file that is missing, damaged or of another version, and of parsing its
figures."""


def read_measurement_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (key, figures) of a measurement's file, both as written by `write_measurement`. Raises `DAMAGED`."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["version"] != VERSION:
        raise ValueError(found["version"])
    return dict(found["key"]), dict(found["tables"])


def processor_name() -> str:
    """Return the processor's name, such as "AMD EPYC 9654", as the kernel reports it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def has_bf16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return True if the processor has instructions that multiply bf16; False if unknown. cpuinfo: the kernel's file
    that lists the processor's flags."""
    with suppress(OSError):
        lines = (line.partition(":") for line in cpuinfo.read_text().splitlines())
        flags = next((value.split() for name, _, value in lines if name.strip().lower() in ("flags", "features")), [])
        return not BF16_FLAGS.isdisjoint(flags)
    return False


@cache
def torch_version() -> str:
    """Return the version of the installed torch without importing it; "none" if missing."""
    from importlib import metadata  # takes longer to load than most plans to compute

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "none"
