"""Backends of torch.distributed that carry a process group's calls, their time limits, and the stream on which a rank
computes."""

from __future__ import annotations

import re
from datetime import timedelta

import torch
import torch.distributed as dist


def get_group_backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return {device type: backend name} of a process group, such as {"cpu": "gloo", "cuda": "nccl"};
    `torch.distributed.get_backend` returns one combined text instead.

    group: process group; None for the world.
    """
    return dict(entry.split(":", 1) for entry in dist.get_backend_config(group).split(","))


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the current CUDA stream of `device`; None on a device without streams. The simulator of streams
    (tests/emulation/streams.py) replaces this function."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def compute_backend_timeout(device: torch.device | str, seconds: float) -> timedelta:
    """Return the timeout to pass to torch.distributed for calls on tensors of `device` that may take `seconds`.

    On CUDA it is twice `seconds`: NCCL's watchdog counts from the time at which a call was queued, and aborts the
    process. The project's own watchdog (`flight_recorder.device_calls`) thus acts first and reports the hang.
    """
    return timedelta(seconds=2 * seconds if torch.device(device).type == "cuda" else seconds)


def format_backend_error(error: Exception) -> str:
    """Return the text of an error of the torch.distributed backend as one line. gloo's texts begin with a location in
    its source code, which is left out."""
    return re.sub(r"^\[[^\]]*\] ", "", " ".join(str(error).split()))
