"""CPU time of child processes, independent of other load."""

from __future__ import annotations

import resource


def of_ended_processes() -> float:
    """Return the CPU seconds of all ended child processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
