"""The time that processes compute, whatever else the machine does meanwhile."""

from __future__ import annotations

import resource


def of_ended_processes() -> float:
    """Processor seconds of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
