"""Memory that processes may use, from synthetic trees of /proc and /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.launcher.host_memory import HostMemory, read_machine_memory

GIB = 2**30


def make_tree(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """A machine of 64 GiB with 40 available, and files of control groups."""
    meminfo = f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {40 * 2**20} kB\n"
    for name, text in {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {}, (64 * GIB, 40 * GIB, "machine")),
        ("0::/\n", {f"{V2}/memory.max": "max\n"}, (64 * GIB, 40 * GIB, "machine")),
        (
            "0::/service/server\n",
            {
                f"{V2}/service/server/memory.max": "max\n",
                f"{V2}/service/memory.max": str(8 * GIB),
                f"{V2}/service/memory.current": str(5 * GIB),
                f"{V2}/service/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
            },
            (8 * GIB, 5 * GIB, "control group"),
        ),
        (
            "5:cpu:/x\n4:memory:/jobs/7\n0::/\n",
            {
                f"{V1}/jobs/7/memory.limit_in_bytes": str(10 * GIB),
                f"{V1}/jobs/7/memory.usage_in_bytes": str(4 * GIB),
                f"{V1}/jobs/7/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\n",
                f"{V1}/memory.limit_in_bytes": "9223372036854771712",
            },
            (10 * GIB, 7 * GIB, "control group"),
        ),
        (  # a container: the path is the host's
            "4:memory:/docker/abc\n",
            {
                f"{V1}/memory.limit_in_bytes": str(6 * GIB),
                f"{V1}/memory.usage_in_bytes": str(GIB),
                f"{V1}/memory.stat": "total_inactive_file 0\n",
            },
            (6 * GIB, 5 * GIB, "control group"),
        ),
        (  # a limit above the machine's memory has no effect
            "0::/\n",
            {f"{V2}/memory.max": str(100 * GIB), f"{V2}/memory.current": "0", f"{V2}/memory.stat": ""},
            (64 * GIB, 40 * GIB, "machine"),
        ),
    ],
)
def test_limit_is_the_lowest_of_machine_and_control_groups(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: tuple[int, int, str]
):
    found = HostMemory.read(make_tree(tmp_path, cgroup, files))
    assert (found.total, found.available, found.source) == expected


def test_memory_of_this_machine_is_plausible():
    found = HostMemory.read()
    assert 0 < found.available <= found.total == read_machine_memory()
    assert found.total <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
