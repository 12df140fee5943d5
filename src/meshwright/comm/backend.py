"""The backends of torch.distributed that carry a process group's calls."""

from __future__ import annotations

import torch.distributed as dist


def group_backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """The backend of `group` (None: the world) by type of device: {"cpu": "gloo", "cuda": "nccl"}.

    `torch.distributed.get_backend` answers for a group with several backends with all of them in one string, which
    equals none of their names.
    """
    return dict(entry.split(":", 1) for entry in dist.get_backend_config(group).split(","))
