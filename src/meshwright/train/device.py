"""Which device one process computes on. Asks torch only where the answer depends on the machine."""

from __future__ import annotations

from meshwright.errors import UserError
from meshwright.names import DEVICES, unknown


def one_device(wanted: str) -> str:
    """ "cpu" or "cuda" for one of the names `DEVICES`; "auto": the GPU where there is one. `UserError` when there is no
    such name or no such device. CUDA_VISIBLE_DEVICES says which GPU is the first."""
    if wanted not in DEVICES:
        raise UserError(unknown("device", wanted, DEVICES))
    if wanted == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise UserError('device "cuda": this machine has no CUDA device; "cpu" computes the same, more slowly')
    return "cpu"
