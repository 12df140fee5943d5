"""Hardware profiles measured at a run's first start, cached per CPU, core count, torch version, rank and thread count.

`train/first_start.py` writes them; predictions read them where no file of `meshwright probe` fits. Free of torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

VERSION = 1
"""Of the file's form, and of what is measured: files of other versions are measured again."""


PROBE_VARIABLE = "MESHWRIGHT_PROBE"
"""An environment variable: "0" has no start measure anything, as --no-probe does for one."""


def may_measure(probe: bool = True) -> bool:
    """Whether a start may measure this machine: `probe` says so, and the environment does not forbid it."""
    return probe and os.environ.get(PROBE_VARIABLE) != "0"


@dataclass(frozen=True, slots=True)
class HardwareProfileKey:
    """What a measurement holds for. `torch`: its version; `threads`: of each rank."""

    processor: str
    cores: int
    torch: str
    device: str
    ranks: int
    threads: int

    @classmethod
    def here(cls, cores: int, ranks: int, threads: int) -> HardwareProfileKey:
        """That of this machine's processors."""
        return cls(processor_name(), cores, _torch_version(), "cpu", ranks, threads)

    @property
    def path(self) -> Path:
        """The file; whether there is one or not."""
        text = json.dumps([VERSION, asdict(self)], sort_keys=True)
        name = f"{self.device}-{self.ranks}x{self.threads}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
        return profile_directory() / name


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """precisions, axes (of tp and cp): what was measured; default: the precision of layouts that name none, where that
    was asked; cluster: the tables of a cluster file."""

    precisions: tuple[str, ...]
    axes: tuple[str, ...]
    default: str | None
    cluster: Mapping[str, Any]

    def covers(self, precision: str | None, axes: Sequence[str]) -> bool:
        """Whether it can price a layout of this precision (None: the machine's own) with these axes."""
        return (precision or self.default) in self.precisions and set(axes) <= set(self.axes)


def profile_directory() -> Path:
    """$XDG_CACHE_HOME/meshwright/machines, else that of ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "meshwright" / "machines"


def read_profile(key: HardwareProfileKey) -> HardwareProfile | None:
    """What was kept; None where there is none, or where the file is damaged, of another version or another machine."""
    found = _read(key.path)
    return found[1] if found is not None and found[0] == asdict(key) else None


def write_profile(key: HardwareProfileKey, profile: HardwareProfile) -> None:
    """Keep it: under another name first, so that readers see the old file or the new one. `OSError` where the directory
    takes no file."""
    path = key.path
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"version": VERSION, "key": asdict(key), **asdict(profile)}
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def largest_profile() -> Mapping[str, Any] | None:
    """The cluster tables of this machine's profile with the most ranks, of several the newest; None without any."""
    here = {"processor": processor_name(), "torch": _torch_version()}
    found = []
    with suppress(OSError):
        for path in profile_directory().glob("cpu-*.json"):
            read = _read(path)
            if read is not None and here.items() <= read[0].items():
                found.append((read[0]["ranks"], path.stat().st_mtime, read[1].cluster))
    return max(found, key=lambda each: each[:2])[2] if found else None


@contextmanager
def measurement_lock(key: HardwareProfileKey) -> Iterator[None]:
    """Hold an exclusive file lock for this key, so that only one process measures. `OSError` where the directory
    takes no file."""
    import fcntl

    path = key.path.with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def processor_name() -> str:
    """The processor's name, as the kernel says it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "none"


def _read(path: Path) -> tuple[dict[str, Any], HardwareProfile] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["version"] != VERSION:
            return None
        precisions, axes = (tuple(map(str, found[name])) for name in ("precisions", "axes"))
        return dict(found["key"]), HardwareProfile(precisions, axes, found["default"], dict(found["cluster"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
