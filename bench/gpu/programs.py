"""Collective programs on CUDA tensors: gloo ranks that share one GPU, and NCCL with as many ranks as there are GPUs.

    python bench/gpu/programs.py [--device cuda] [--ranks 3]

Checks, on whole numbers and so exactly: one algorithm after another of every operation against torch.distributed's own
call; calls of a mesh whose axes programs serve, several in flight at a time. With one GPU, NCCL has one rank: its
programs have no transfers, and what is shown is that streams, buffers and handles work. `--device cpu` runs the same on
gloo alone. Writes `bench/results/gpu_programs.json` on CUDA; exit code 1 when a check does not hold.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
from cases import Cases

from meshwright.collectives.library import ALGORITHMS, generate
from meshwright.collectives.named import load_named_programs
from meshwright.comm import collectives
from meshwright.comm.measure_program import count_elements, measure_rank
from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.program.check_collective import check_collective
from meshwright.recipe import CollectivesRecipe

SIZE = 2**20 + 4  # bytes
SERVED = CollectivesRecipe(all_reduce="ring", reduce_scatter="all-pairs", all_gather="bruck")


def every_algorithm(device: str) -> dict[str, dict[str, Any]]:
    """operation algorithm -> exact, and median milliseconds of the program and of torch.distributed."""
    ranks, found = dist.get_world_size(), {}
    for operation, named in ALGORITHMS.items():
        if ranks == 1 and operation == "send-receive":
            continue  # torch.distributed refuses messages to the own rank
        for name in named:
            try:
                checked = check_collective(generate(operation, name, ranks))
            except UserError:
                continue  # does not accept this number of ranks
            answer = measure_rank(checked, count_elements(checked, SIZE), 5, device)
            ours, theirs = (1e3 * sorted(answer[which])[2] for which in ("ours", "theirs"))
            found[f"{operation} {name}"] = {
                "exact": answer["exact"],
                "ms": round(ours, 3),
                "native_ms": round(theirs, 3),
            }
    return found


def served_axes(device: str) -> bool:
    """Calls that run on while this rank computes, and are waited for in another order."""
    ranks = dist.get_world_size()
    layout = Layout(dp=ranks)
    mesh = Mesh.create(layout, device, programs=load_named_programs(SERVED, layout))
    axis, right = mesh.data, True
    for turn in range(4):
        total = torch.full((300_001,), turn + axis.rank + 1.0, device=device)
        whole = torch.empty(1000 * ranks, device=device)
        part = torch.empty(1000, device=device)
        source = torch.full((1000 * ranks,), float(turn), device=device)
        handles = [
            collectives.all_reduce(total, axis, "check", async_op=True),
            collectives.all_gather(whole, torch.full((1000,), float(axis.rank), device=device), axis, "check", True),
            collectives.reduce_scatter(part, source, axis, "check", async_op=True),
        ]
        busy = torch.randn(256, 256, device=device) @ torch.randn(256, 256, device=device)
        for handle in reversed(handles):
            handle.wait()
        right &= bool((total == ranks * turn + ranks * (ranks + 1) / 2).all()) and bool(busy.isfinite().all())
        right &= torch.equal(whole, torch.arange(float(ranks), device=device).repeat_interleave(1000))
        right &= bool((part == ranks * turn).all())
    mesh.close()
    return right


def rank_main(rank: int, ranks: int, backend: str, device: str, directory: str) -> None:
    if device != "cpu":
        device = f"cuda:{rank if backend == 'nccl' else 0}"
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{directory}/{backend}", rank=rank, world_size=ranks)
    begun = time.perf_counter()
    answer = {"algorithms": every_algorithm(device), "axes": served_axes(device)}
    answer["seconds"] = round(time.perf_counter() - begun, 1)
    torch.save(answer, f"{directory}/{backend}-{rank}.pt")
    dist.destroy_process_group()


def run(backend: str, ranks: int, device: str) -> dict[str, Any]:
    """What all ranks of a backend found."""
    with tempfile.TemporaryDirectory() as directory:
        spawn(rank_main, (ranks, backend, device, directory), nprocs=ranks)
        answers = [torch.load(f"{directory}/{backend}-{rank}.pt") for rank in range(ranks)]
    exact = all(found["exact"] for answer in answers for found in answer["algorithms"].values())
    held = {"every algorithm is exact": exact, "axes are served": all(answer["axes"] for answer in answers)}
    return {"ranks": ranks, "checks": held, **answers[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", type=int, default=3, help="number of gloo ranks")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    cases = Cases("gpu_programs" if cuda else None, {"gpu": torch.cuda.get_device_name() if cuda else "cpu"})
    backends = {"gloo": options.ranks, **({"nccl": torch.cuda.device_count()} if cuda else {})}
    for backend, ranks in backends.items():
        cases.run(
            "backends",
            backend,
            partial(run, backend, ranks, options.device),
            lambda found: all(found["checks"].values()),
        )
    return cases.end()


if __name__ == "__main__":
    raise SystemExit(main())
