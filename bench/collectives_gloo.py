"""Implementations of reduce-scatter, all-gather and all-reduce on gloo, between processes of one machine.

`comm/transport.py` was written by these figures: sends and receives between the final buffers for the first
two, gloo's own ring for the last. One thread a process; seconds are medians on rank 0.

    python bench/collectives_gloo.py [--repeats 15]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from common import write_result
from meshwright.comm import collectives
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout

SIZES = {"64 KiB": 2**16, "1 MiB": 2**20, "8 MiB": 2**23, "64 MiB": 2**26}


def measure(size: int, repeats: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of every variant, by operation, for a whole vector of `size` bytes (float32)."""
    mesh = Mesh.create(Layout(dp=dist.get_world_size()))
    axis, ranks = mesh.data, mesh.world_size
    whole = torch.randn(size // 4)
    part = torch.empty(whole.numel() // ranks)
    arrived, repeated = torch.empty(ranks, part.numel()), torch.empty_like(whole)

    def by_exchange() -> None:
        dist.all_to_all_single(arrived.view(-1), whole)
        torch.sum(arrived, dim=0, out=part)

    def gather_by_exchange() -> None:
        repeated.view(ranks, -1).copy_(part)
        dist.all_to_all_single(whole, repeated)

    def gather_by_broadcasts() -> None:
        whole.view(ranks, -1)[axis.rank].copy_(part)
        works = [dist.broadcast(p, src=i, async_op=True) for i, p in enumerate(whole.view(ranks, -1))]
        for work in works:
            work.wait()

    def scatter_then_gather() -> None:
        collectives.reduce_scatter(part, whole, axis, "bench")
        collectives.all_gather(whole, part, axis, "bench")

    variants: dict[str, dict[str, Callable[[], object]]] = {
        "reduce_scatter": {
            "gloo": lambda: dist.reduce_scatter_single(part, whole),
            "all_to_all and sum": by_exchange,
            "ours": lambda: collectives.reduce_scatter(part, whole, axis, "bench"),
        },
        "all_gather": {
            "gloo": lambda: dist.all_gather_single(whole, part),
            "all_to_all of copies": gather_by_exchange,
            "a broadcast each": gather_by_broadcasts,
            "ours": lambda: collectives.all_gather(whole, part, axis, "bench"),
        },
        "all_reduce": {
            "ours (gloo)": lambda: collectives.all_reduce(whole, axis, "bench"),
            "our reduce_scatter and all_gather": scatter_then_gather,
        },
    }
    seconds: dict[tuple[str, str], list[float]] = {}
    for repeat in range(repeats + 1):
        for operation, named in variants.items():
            for name, run in named.items():
                whole.fill_(1.0)
                dist.barrier()
                begun = time.perf_counter()
                run()
                if repeat:
                    seconds.setdefault((operation, name), []).append(time.perf_counter() - begun)
    mesh.close()
    return {
        operation: {name: round(1e3 * statistics.median(seconds[operation, name]), 3) for name in named}
        for operation, named in variants.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    results: dict[str, dict[str, dict]] = {}
    for world_size in (2, 4):
        with LocalRanks(world_size) as ranks:
            results[f"{world_size} ranks"] = {
                name: ranks.run("collectives_gloo:measure", size, repeats if size < 2**26 else max(3, repeats // 3))[0]
                for name, size in SIZES.items()
            }
    write_result("collectives_gloo", {"milliseconds": results})


if __name__ == "__main__":
    main()
