"""All-reduce programs run on gloo, four processes of one machine, 64 KiB to 64 MiB, against gloo's own all-reduce.

All take turns within one start, in an order that changes from turn to turn; a time is that of the slowest rank, one
thread a process, float32. The ratio is the median of paired ratios, above 1: the program is faster. Before any figure
counts, the results of a program and of gloo are compared on whole numbers.

    python bench/collective_programs.py [--repeats 15] [--ranks 4]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from common import paired_ratio, write_result
from meshwright.collectives.library import generate
from meshwright.comm.local import LocalRanks
from meshwright.comm.programs import Executable, ScratchBuffers
from meshwright.program.check_collective import check_collective

SIZES = {"64 KiB": 2**16, "256 KiB": 2**18, "1 MiB": 2**20, "4 MiB": 2**22, "16 MiB": 2**24, "64 MiB": 2**26}
ALGORITHMS = ("all-pairs", "ring", "rabenseifner", "butterfly", "double-binary-tree", "hierarchical")
LARGE = 2**20  # from this size on, the best program should reach 0.9 of gloo's speed


def measure(algorithms: tuple[str, ...], size: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat on this rank, by name."""
    vector = torch.empty(size // 4)
    runs: dict[str, Callable[[], Any]] = {"gloo": lambda: dist.all_reduce(vector)}
    buffers = ScratchBuffers()
    for name in algorithms:
        checked = check_collective(generate("all-reduce", name, dist.get_world_size()))
        executable = Executable(checked, buffers=buffers)
        runs[name] = lambda executable=executable: executable.run(vector)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    shuffle = random.Random(0)
    for repeat in range(repeats + 2):
        shuffle.shuffle(order)
        for name in order:
            vector.copy_(torch.arange(size // 4) % 31 + dist.get_rank() if repeat == 0 else torch.ones(size // 4))
            dist.barrier()
            begun = time.perf_counter()
            runs[name]()
            if repeat >= 2:
                seconds[name].append(time.perf_counter() - begun)
            if repeat == 0:
                ranks = dist.get_world_size()
                assert torch.equal(vector, (torch.arange(size // 4) % 31) * ranks + ranks * (ranks - 1) / 2), name
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    sizes: dict[str, Any] = {}
    with LocalRanks(options.ranks) as ranks:
        for name, size in SIZES.items():
            answers = ranks.run("collective_programs:measure", ALGORITHMS, size, options.repeats, timeout=600)
            slowest = {
                which: [max(times) for times in zip(*(a[which] for a in answers), strict=True)] for which in answers[0]
            }
            ratios = {which: paired_ratio(slowest[which], slowest["gloo"]) for which in ALGORITHMS}
            best = max(ratios, key=lambda which: ratios[which]["median"])
            sizes[name] = {
                "milliseconds": {which: round(1e3 * statistics.median(times), 3) for which, times in slowest.items()},
                "gloo over program": ratios,
                "best": best,
                "ratio": ratios[best],
            }
            print(name, best, ratios[best], file=sys.stderr, flush=True)
    large = [sizes[name]["ratio"]["median"] for name, size in SIZES.items() if size >= LARGE]
    write_result(
        "collective_programs",
        {"ranks": options.ranks, "sizes": sizes, "least ratio of the best program from 1 MiB": min(large)},
    )


if __name__ == "__main__":
    main()
