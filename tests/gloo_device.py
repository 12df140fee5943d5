"""Gloo process groups of one process on one device. By default each group has a device with a thread that wakes a
hundred times a second, also while the group is idle: in a run of all tests on two cores, 543 of these threads took two
fifths of the CPU time."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo, distributed_c10d


@cache
def _get_device(process: int) -> Any:
    """Return the device of the process with this ID; a forked process has none of the threads of its parent."""
    return ProcessGroupGloo.create_default_device()


class SharedDeviceGloo(ProcessGroupGloo):
    """Gloo process group on the device of its process; arguments as those of `ProcessGroupGloo`."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [_get_device(os.getpid())], timeout
        super().__init__(store, rank, size, options)


def install() -> None:
    """Let `torch.distributed` create such groups in this process and in those that it forks."""
    distributed_c10d.ProcessGroupGloo = SharedDeviceGloo
