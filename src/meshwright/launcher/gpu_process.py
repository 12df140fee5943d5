"""Settings of a process that computes on a GPU: PyTorch's allocator, Inductor's workers, processor cores near the GPU.
Free of torch. What the user or the job's launcher has set stays."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

from meshwright.threads import count_available_cores

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables of PyTorch's allocator settings: the present name and the older one."""

INDUCTOR_WORKERS = "TORCHINDUCTOR_COMPILE_THREADS"
MOST_WORKERS = 32  # Inductor's own limit in each process

SYSTEM_DEVICES = Path("/sys")
"""Directory in which Linux describes PCI devices and NUMA nodes."""


def prepare_gpu_process(host_ranks: int, environment: MutableMapping[str, str] | None = None) -> None:
    """Set PyTorch's environment variables for a rank that computes on a GPU. Call it before the first CUDA call and
    before Inductor is imported.

    The allocator's segments become expandable: blocks of unequal sizes, such as all-gathered FSDP units, then share
    memory instead of leaving gaps. Inductor compiles in as many worker processes as the rank has cores: its default, 32
    a rank, starts 256 Python processes on a host of eight.

    host_ranks: number of ranks on this host. environment: environment variables to change in place; default os.environ.
    """
    environment = os.environ if environment is None else environment
    if not any(name in environment for name in ALLOCATOR_VARIABLES):
        environment[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    workers = max(1, min(MOST_WORKERS, count_available_cores() // host_ranks))
    environment.setdefault(INDUCTOR_WORKERS, str(workers))


def bind_to_gpu_cores(pci_address: str, system: Path = SYSTEM_DEVICES) -> set[int] | None:
    """Restrict this thread, and all threads that it starts later, to those of its cores that are on the GPU's NUMA
    node, so that host memory of transfers is near the GPU. Return the cores; None if nothing was changed, because the
    node is unknown or has less than a quarter of the cores that are available to this process.

    pci_address: address of the GPU on the PCI bus, such as "0000:1b:00.0". system: Linux' /sys.
    """
    available = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    near = available & read_gpu_cores(pci_address, system)
    if len(near) < max(1, len(available) / 4) or near == available:  # few cores would slow down the rank's threads
        return None
    os.sched_setaffinity(0, near)
    return near


def read_gpu_cores(pci_address: str, system: Path = SYSTEM_DEVICES) -> set[int]:
    """Return the processor cores of the NUMA node to which a GPU is connected; an empty set if it is unknown.
    Arguments: as of `bind_to_gpu_cores`."""
    with suppress(OSError, ValueError):
        node = int((system / "bus/pci/devices" / pci_address / "numa_node").read_text())
        if node >= 0:  # -1: the machine has one node, or a virtual machine hides them
            return parse_cores((system / f"devices/system/node/node{node}/cpulist").read_text())
    return set()


def parse_cores(text: str) -> set[int]:
    """Parse a list of processor cores in Linux' notation: "0-2,8" gives {0, 1, 2, 8}. Raises ValueError."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores
