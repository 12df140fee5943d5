"""Cost of context parallelism: ring attention and Ulysses against tiled attention on one device.

Forward and backward of one attention layer, on 2 and 4 processes of one thread each. In every turn the ring, Ulysses
and one device (rank 0 alone, with whole rows) compute the same, in rotating order within the same processes. The
processor time of all ranks together against that of one device is what splitting, merging and transfers cost; ring
against Ulysses is wall time. Results must agree. With `--device cuda` the ranks share one GPU over gloo, whose
transfers go through the host: then the agreement is what counts (fused kernels without documents in bf16, tiles else).

    python bench/context.py [--turns 10] [--only cp2-fp32] [--tokens 4096] [--device cuda]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from common import paired_ratio, write_result
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.model.axis_operations import ContextOperations
from meshwright.model.documents import Documents
from meshwright.monitoring.memory import keep_freed_memory
from meshwright.parallel.context import list_local_positions, make_context_operations

ROWS, HEADS, KV_HEADS, SIZE, TOKENS = 1, 8, 4, 64, 4096
WARM = 2
SIDES = ("ring", "ulysses", "one device")


class Race(NamedTuple):
    """Ranks, the type of queries, keys and values, and whether rows hold documents (of 700 tokens)."""

    ranks: int
    precision: str
    documents: bool = False


RACES = {
    "cp2-fp32": Race(2, "fp32"),
    "cp2-bf16": Race(2, "bf16"),
    "cp2-fp32-documents": Race(2, "fp32", documents=True),
    "cp4-fp32": Race(4, "fp32"),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Side:
    """One way of computing attention, on this rank: `step` goes forward and backward."""

    def __init__(self, name: str, ranks: int, documents: Documents, inputs: list[torch.Tensor], tokens: int) -> None:
        self.name, method, device = name, "ulysses" if name == "ulysses" else "ring", inputs[0].device
        self.mesh = Mesh.create(Layout(cp=ranks, cp_method=method), device)
        places = list_local_positions(self.mesh.layout, self.mesh.cp.rank, tokens)
        if name == "one device":
            places = torch.arange(tokens)
        places = places.to(device)
        *self.leaves, self.direction = (x[:, :, places].contiguous() for x in inputs)
        for leaf in self.leaves:
            leaf.requires_grad_()
        self.operations = ContextOperations() if name == "one device" else make_context_operations(self.mesh)
        self.visible = self.operations.make_attention_mask(documents.select_tokens(places), len(places), None, device)

    def step(self) -> torch.Tensor | None:
        """The result, or None on a rank that has nothing to do."""
        if self.name == "one device" and self.mesh.rank > 0:
            return None
        out = self.operations.attend(*self.leaves, self.visible)
        torch.autograd.grad(out, self.leaves, self.direction)
        if out.is_cuda:
            torch.cuda.synchronize()
        return out.detach()


def race(precision: str, documents: bool, tokens: int, turns: int, device: str) -> dict[str, Any]:
    """On one rank: of every turn the seconds of each side, wall and of this process; and how far results differ."""
    keep_freed_memory()
    ranks, generator = dist.get_world_size(), torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(ROWS, heads, tokens, SIZE, generator=generator).to(device, DTYPES[precision])
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    ids = torch.arange(tokens)[None] // (700 if documents else tokens)
    sides = [Side(name, ranks, Documents.from_ids(ids.to(device)), inputs, tokens) for name in SIDES]
    for _ in range(WARM):
        results = {side.name: side.step() for side in sides}
    wall: dict[str, list[float]] = {side.name: [] for side in sides}
    processor: dict[str, list[float]] = {side.name: [] for side in sides}
    for turn in range(turns):
        for side in sides[turn % len(sides) :] + sides[: turn % len(sides)]:
            dist.barrier()
            begun, busy = time.perf_counter(), time.process_time()
            side.step()
            processor[side.name].append(time.process_time() - busy)
            dist.barrier()
            wall[side.name].append(time.perf_counter() - begun)
    difference = 0.0
    if (whole := results["one device"]) is not None:
        for side in sides[:2]:
            part = whole[:, :, list_local_positions(side.mesh.layout, 0, tokens).to(device)]
            difference = max(difference, float((results[side.name].double() - part.double()).abs().max()))
    return {"wall": wall, "processor": processor, "difference": difference}


def compare(name: str, tokens: int, turns: int, device: str) -> dict[str, Any]:
    """Run one race and say what splitting costs."""
    ranks, precision, documents = RACES[name]
    with LocalRanks(ranks, threads=1, timeout=3600) as started:
        every = started.run("context:race", precision, documents, tokens, turns, device)
    wall = every[0]["wall"]
    processor = {side: [sum(rank["processor"][side][turn] for rank in every) for turn in range(turns)] for side in wall}
    difference = every[0]["difference"]
    assert difference < {"fp32": 1e-4, "bf16": 5e-2}[precision], (name, difference)
    result = {
        "processes": ranks,
        "precision": precision,
        "documents": documents,
        "wall_seconds": {side: round(statistics.median(times), 4) for side, times in wall.items()},
        "processor_seconds": {side: round(statistics.median(times), 4) for side, times in processor.items()},
        "processor_ratio_one_device_to_ring": paired_ratio(processor["ring"], processor["one device"]),
        "processor_ratio_one_device_to_ulysses": paired_ratio(processor["ulysses"], processor["one device"]),
        "wall_ratio_ulysses_to_ring": paired_ratio(wall["ring"], wall["ulysses"]),
        "largest_difference": difference,
    }
    print(name, result, file=sys.stderr)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--only", choices=RACES)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    names = [arguments.only] if arguments.only else list(RACES)
    results = {name: compare(name, arguments.tokens, arguments.turns, arguments.device) for name in names}
    if not arguments.only:
        shape = {"rows": ROWS, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": SIZE, "tokens": arguments.tokens}
        write_result(
            "context" if arguments.device == "cpu" else "gpu_context", {"threads": 1, "shape": shape, "races": results}
        )


if __name__ == "__main__":
    main()
