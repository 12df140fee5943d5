"""Time to generate, check and simulate large programs on one core, and response time of the commands.

    python bench/programs.py [--repeats 5]

Claims: 1F1B with 64 stages and 512 micro-batches in under 3 s, ring all-reduce on 512 ranks in under 10 s, small cases
of both commands in under 0.5 s.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import write_result
from meshwright.collectives.library import generate as generate_collective
from meshwright.collectives.topologies import parse_topology
from meshwright.program.check_collective import check_collective
from meshwright.program.check_pipeline import check_pipeline
from meshwright.program.simulate_collective import simulate_collective
from meshwright.program.simulate_pipeline import Durations, simulate_pipeline
from meshwright.schedules.library import generate as generate_schedule
from meshwright.schedules.transfers import with_transfers

COMMANDS = {
    "schedule": ["schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--text"],
    "collective": ["collective", "all-reduce", "ring", "--ranks", "8", "--bytes", "1MiB"],
    "collective auto": ["collective", "all-reduce", "auto", "--ranks", "8", "--bytes", "1MiB"],
}


def pipeline(name: str, ranks: int, micro_batches: int) -> tuple[int, dict[str, float]]:
    """Seconds of each part, and how many steps there are in the end."""
    seconds: dict[str, float] = {}
    program = timed(seconds, "generate", lambda: generate_schedule(name, ranks, micro_batches))
    timed(seconds, "check", lambda: check_pipeline(program))
    durations = Durations.per_rank(program)
    timed(seconds, "simulate", lambda: simulate_pipeline(program, durations))
    complete = timed(seconds, "add transfers", lambda: with_transfers(program, durations))
    timed(seconds, "check with transfers", lambda: check_pipeline(complete))
    return len(complete.steps), seconds


def collective(algorithm: str, ranks: int) -> tuple[int, dict[str, float]]:
    """The same for an all-reduce of 1 GiB on a switch."""
    seconds: dict[str, float] = {}
    program = timed(seconds, "generate", lambda: generate_collective("all-reduce", algorithm, ranks))
    checked = timed(seconds, "check", lambda: check_collective(program))
    network = parse_topology("switch", ranks)
    timed(seconds, "simulate", lambda: simulate_collective(checked, network, 2**30))
    return len(program.steps), seconds


def timed(seconds: dict[str, float], part: str, call: Callable[[], Any]) -> Any:
    begun = time.perf_counter()
    result = call()
    seconds[part] = time.perf_counter() - begun
    return result


def medians(run: Callable[[], tuple[int, dict[str, float]]], repeats: int) -> dict[str, Any]:
    runs = [run() for _ in range(repeats)]
    parts = {part: round(statistics.median(seconds[part] for _, seconds in runs), 4) for part in runs[0][1]}
    total = statistics.median(sum(seconds.values()) for _, seconds in runs)
    return {"steps": runs[0][0], "seconds": round(total, 4), "of which": parts}


def answer(arguments: list[str]) -> float:
    """Wall time of a command in a process of its own."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-m", "meshwright", *arguments], check=True, capture_output=True)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    os.sched_setaffinity(0, {0})
    programs = {
        "1f1b, 64 stages, 512 micro-batches": medians(lambda: pipeline("1f1b", 64, 512), repeats),
        "zb-v, 64 stages, 512 micro-batches": medians(lambda: pipeline("zb-v", 64, 512), repeats),
        "ring all-reduce, 512 ranks": medians(lambda: collective("ring", 512), repeats),
        "rabenseifner all-reduce, 512 ranks": medians(lambda: collective("rabenseifner", 512), repeats),
        "2d-torus all-reduce, 256 ranks": medians(lambda: collective("2d-torus", 256), repeats),
    }
    commands = {
        name: round(statistics.median(answer(words) for _ in range(repeats)), 3) for name, words in COMMANDS.items()
    }
    write_result("programs", {"one_core": True, "programs": programs, "command_seconds": commands})


if __name__ == "__main__":
    main()
