"""Memory of this machine or of the control group that limits this process (versions 1 and 2). Free of torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GPU = "GPU"
"""`HostMemory.source` of a GPU's memory."""
_UNLIMITED = 2**60  # version 1 writes the largest multiple of a page for no limit
# For each version: mount point, files of limit and usage, and key in memory.stat of the reclaimable page cache.
_VERSION_1 = ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory in bytes that processes of this machine, or of one of its GPUs, can use.

    Attributes:
        total: The machine's memory without swap, or the limit of the control group if that is lower; for a GPU, the
            memory of the GPU.
        available: Memory that can be allocated now without swapping or being killed.
        source: Origin of `total`: "control group", "machine" or `GPU`.
    """

    total: int
    available: int
    source: str

    @classmethod
    def read(cls, root: Path = Path("/")) -> HostMemory:
        """Return the memory that processes of this machine or control group can use now. root: directory that contains
        `proc` and `sys`, "/" outside tests."""
        total, available = _read_machine(root)
        source = "machine"
        for directory, (_, limit_name, usage_name, reclaimable) in _iterate_control_groups(root):
            with suppress(OSError, ValueError):
                limit = int((directory / limit_name).read_text())
                if limit >= min(total, _UNLIMITED):
                    continue
                used = int((directory / usage_name).read_text())
                for line in (directory / "memory.stat").read_text().splitlines():
                    if line.startswith(f"{reclaimable} "):
                        used -= int(line.split()[1])
                total, source = limit, "control group"
                available = min(available, max(0, limit - used))
        return cls(total, available, source)


def read_machine_memory() -> int:
    """Return the memory that processes on this machine can use, in bytes: the machine's memory without swap, or the
    limit of the control group if that is lower."""
    return HostMemory.read().total


def _read_machine(root: Path) -> tuple[int, int]:
    """Return (total, available) memory of the machine in bytes, from /proc/meminfo. root: directory that contains
    `proc`."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {"MemTotal": total, "MemAvailable": total}
    with suppress(OSError, ValueError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in found:
                found[name] = int(value.split()[0]) * 1024
    return found["MemTotal"], found["MemAvailable"]


def _iterate_control_groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str, str]]]:
    """Iterate over the Linux memory control groups (cgroup v1 or v2) that limit this process: first the process's own
    group, then each parent up to the mount point. Yield (directory, names) for each group. A directory may not exist,
    because in a container the mount point itself can be the process's own group.

    names: (mount point below `root`, file of the limit, file of the usage, key in memory.stat of the reclaimable page
    cache). root: directory with `proc` and `sys`.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            files = _VERSION_1 if controllers else _VERSION_2
            mount = root / files[0]
            directory = mount / path.lstrip("/")
            while directory != mount:
                yield directory, files
                directory = directory.parent
            yield mount, files
