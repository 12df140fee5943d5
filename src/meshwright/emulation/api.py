"""`meshwright.emulate`: ranks as threads of this process. Free of torch until ranks are made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.errors import UserError
from meshwright.limits import shorten_repr

if TYPE_CHECKING:
    from meshwright.emulation.ranks import EmulatedRanks

MAX_RANKS = 512


def emulate(ranks: int, *, initialized: bool = True) -> EmulatedRanks:
    """Return `ranks` emulated ranks: threads of this process, of which one runs at a time, in an order that depends on
    the program alone. Use it as a context manager.

    Each rank has its own torch.distributed world, environment variables and random state. A rank runs until it waits
    for another rank; if all ranks wait, `run` raises `EmulationFailed`, which reports the call in which each rank
    waits. `torch.compile` returns its argument uncompiled, and only the CPU is visible.

    Args:
        ranks: Number of ranks.
        initialized: Initialize torch.distributed on each rank; False leaves that to the functions.

    Returns:
        The ranks: `run(function, *arguments)` calls a function on each and returns the results by rank; `events` lists
        the communication calls in order.

    Raises:
        UserError: The number of ranks is out of range.

    Examples:
        >>> import torch, torch.distributed as dist
        >>> import meshwright as mw
        >>> def total():
        ...     x = torch.tensor([dist.get_rank() + 1.0])
        ...     dist.all_reduce(x)
        ...     return x.item()
        >>> with mw.emulate(4) as ranks:
        ...     ranks.run(total)
        [10.0, 10.0, 10.0, 10.0]
    """
    if not isinstance(ranks, int) or isinstance(ranks, bool):
        raise UserError(f"cannot emulate {shorten_repr(ranks)} ranks: give an integer")
    if not 1 <= ranks <= MAX_RANKS:
        raise UserError(f"cannot emulate {ranks} ranks: give 1 to {MAX_RANKS}")
    from meshwright.emulation.ranks import EmulatedRanks

    return EmulatedRanks(ranks, initialized=initialized)
