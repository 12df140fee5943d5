"""Speedup of the schedules found by `auto` over the best named one that fits, on uneven times, and the duration of
the search. Simulated times: the unit is forward of one micro-batch on a rank. One process, no torch."""

from __future__ import annotations

import time
from typing import Any

from common import write_result
from meshwright.names import SCHEDULE_CHUNKS
from meshwright.program.check_pipeline import check_pipeline
from meshwright.program.durations import Durations
from meshwright.schedules.auto import search_schedule
from meshwright.schedules.transfers import with_transfers


def cases(ranks: int) -> dict[str, Durations]:
    """Times by rank that the named schedules were not made for."""
    ends = [1.2, *[1.0] * (ranks - 2), 1.5]
    slow = [1.4 if rank == ranks // 3 else 1.0 for rank in range(ranks)]
    return {
        "even": Durations(1.0, 1.0, 1.0),
        "I = 2W, transfers 0.1": Durations(1.0, 1.2, 0.6, 0.1),
        "embedding 1.2, loss 1.5": Durations(ends, ends, 1.0),
        "one rank 1.4, transfers 0.05": Durations(slow, slow, slow, 0.05),
        "W = I / 7": Durations(1.0, 1.4, 0.2),
    }


def measure(ranks: int, micro_batches: int, case: str, memory: float | None) -> dict[str, Any]:
    """One search, checked."""
    started = time.process_time()
    found = search_schedule(ranks, micro_batches, cases(ranks)[case], memory)
    seconds = time.process_time() - started
    check_pipeline(with_transfers(found.program))
    named = [one for one in found.candidates if one.fits and one.name in SCHEDULE_CHUNKS]
    row = {
        "ranks": ranks,
        "micro_batches": micro_batches,
        "times": case,
        "memory": memory,
        "best_named": named[0].name if named else None,
        "named_makespan": round(named[0].makespan, 4) if named else None,
        "auto": found.winner.name,
        "makespan": round(found.makespan, 4),
        "times_as_fast": round(named[0].makespan / found.makespan, 4) if named else None,
        "peak": max(found.winner.peak),
        "lower_bound": round(found.lower_bound or 0.0, 4),
        "cpu_seconds": round(seconds, 2),
    }
    print(*row.values(), sep=" | ", flush=True)
    return row


def main() -> None:
    rows = []
    for ranks, micro_batches in ((4, 8), (8, 32), (16, 64)):
        limits = (None, ranks, ranks * 3 // 4, ranks // 2) if ranks < 16 else (None, ranks // 2)
        for case in cases(ranks):
            rows += [measure(ranks, micro_batches, case, memory) for memory in limits]
    write_result("schedule_search", {"unit": "forward of one micro-batch on a rank", "rows": rows})


if __name__ == "__main__":
    main()
