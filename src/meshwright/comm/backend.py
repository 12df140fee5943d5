"""The backends of torch.distributed that carry a process group's calls."""

from __future__ import annotations

import torch.distributed as dist


def group_backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Return the torch.distributed backend of `group` (None: the world) by device type: {"cpu": "gloo", "cuda":
    "nccl"}.

    `torch.distributed.get_backend` joins several backends in one string, which equals none of their names.
    """
    return dict(entry.split(":", 1) for entry in dist.get_backend_config(group).split(","))
