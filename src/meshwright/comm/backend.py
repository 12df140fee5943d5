"""Backends of torch.distributed that carry a process group's calls, and the stream on which a rank computes."""

from __future__ import annotations

import torch
import torch.distributed as dist


def group_backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return device type -> name of the torch.distributed backend, such as {"cpu": "gloo", "cuda": "nccl"}.

    group: process group; None for the world. (`torch.distributed.get_backend` returns one combined text for several
        backends.)
    """
    return dict(entry.split(":", 1) for entry in dist.get_backend_config(group).split(","))


def current_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Return the stream on which this rank computes, None on a device without streams. The simulator of streams
    (emulation/streams.py) replaces this function."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
