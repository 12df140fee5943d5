"""Claim: what the parameter table, the layout and the shapes predict that a training step puts on the wire is what
`comm/` records, exactly, and what the network interfaces of the hosts count, within 3%.

Two hosts made of network namespaces on cables of their own (bench/namespaces.py), with jumbo frames; of each layout a
few steps of real training, the counters read before and after. With one rank a host everything that a rank sends
leaves its host; with two, what goes over the axes that cross. Needs root and the commands ip and tc.

    python bench/traffic.py             # writes bench/results/traffic.json
    python bench/traffic.py --quick     # three layouts, nothing written
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from common import write_result
from meshwright.comm.mesh import Mesh
from meshwright.data import prepare
from meshwright.layout import Layout
from meshwright.recipe import Recipe
from meshwright.training.language_model import LanguageModelTask
from meshwright.training.model_config import resolve_model_config
from meshwright.training.trainer import Trainer
from namespaces import MTU, NETWORK, hosts, sent_by_hosts

STEPS = 3
ONE_RANK_A_HOST = ("dp2", "dp2 zero3 mb2 bf16", "tp2", "tp2:nosp", "cp2", "cp2:ulysses", "pp2 mb4", "pp2:zb-v mb4")
TWO_RANKS_A_HOST = ("dp2 zero1 tp2", "tp2 pp2 mb4", "dp4 zero3 hs2")
QUICK = ("dp2 zero1", "tp2", "pp2 mb4")


def recipe(layout: str, place: Path) -> Recipe:
    """A small Llama on two modules of the standard library."""
    sources = [str(Path(sysconfig.get_path("stdlib"), name)) for name in ("argparse.py", "inspect.py")]
    return Recipe.from_tables(
        {
            "layout": layout,
            "run": {"directory": str(place / "run"), "device": "cpu"},
            "model": {"family": "llama", "layers": 4, "hidden": 256, "heads": 8, "intermediate": 512, "tied": False},
            "data": {"source": sources, "tokenizer": "bytes", "sequence": 128, "cache": str(place / "cache")},
            "train": {"steps": 1000, "batch": 8, "learning_rate": 1e-3},
        }
    )


def rank_main(connection: Connection, rank: int, host: int, wanted: Recipe) -> None:
    """A rank's process: enter its host, meet the others, train as many steps as ordered."""
    with open(f"/run/netns/mw{host}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0x40000000):  # CLONE_NEWNET of setns(2)
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    layout = wanted.parsed_layout
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{NETWORK}.1:29622",
        rank=rank,
        world_size=layout.world_size,
        timeout=timedelta(seconds=300),
    )
    data = prepare(wanted.data, wanted.run.seed)
    mesh = Mesh.create(layout)
    trainer = Trainer(LanguageModelTask(wanted, layout, resolve_model_config(wanted, data), data, mesh))
    predicted = trainer.task.predicted_traffic()
    while True:
        steps = connection.recv()
        mesh.record.clear()
        for _ in range(steps):
            trainer.step()
        axes = {str(line["site"]): str(line["axis"]) for line in mesh.record.table()}
        connection.send((predicted, mesh.record.sent_by_site(), axes))


@contextmanager
def ranks_on(per_host: int, wanted: Recipe) -> Iterator[list[Connection]]:
    context = get_context("fork")
    connections, processes = [], []
    for rank in range(2 * per_host):
        ours, theirs = context.Pipe()
        process = context.Process(target=rank_main, args=(theirs, rank, rank // per_host, wanted), daemon=True)
        process.start()
        theirs.close()
        connections.append(ours)
        processes.append(process)
    try:
        yield connections
    finally:
        for process in processes:
            process.kill()
            process.join()


def order(ranks: list[Connection], steps: int) -> list[tuple[dict[str, int], dict[str, int], dict[str, str]]]:
    for connection in ranks:
        connection.send(steps)
    return [connection.recv() for connection in ranks]


def crosses(layout: Layout, axis: str, rank: int, per_host: int) -> bool:
    """Return True if each rank of an axis is on a host of its own, so that all its messages leave the host."""
    name = axis.partition("[")[0].partition("/")[0]
    group = next(group for group in layout.groups(name) if rank in group)
    return len(group) == 2 and group[0] // per_host != group[1] // per_host


def study(text: str, per_host: int, place: Path) -> dict[str, Any]:
    """Train on two hosts; a row of the result."""
    wanted = recipe(text, place)
    layout = wanted.parsed_layout
    with hosts(2, "1gbit"), ranks_on(per_host, wanted) as ranks:
        order(ranks, 2)  # warm-up: connections, and one-time work of a program
        time.sleep(0.5)
        before = sent_by_hosts(2)
        answers = order(ranks, STEPS)
        time.sleep(0.5)  # acknowledgements
        counted = [after - first for first, after in zip(before, sent_by_hosts(2), strict=True)]
    leaving = [0, 0]
    for rank, (predicted, recorded, axes) in enumerate(answers):
        exact = {site: STEPS * size for site, size in predicted.items()}
        if recorded != exact:
            raise SystemExit(f"{text}, rank {rank}: recorded {recorded}, predicted {exact}")
        for site, size in exact.items():
            leaving[rank // per_host] += size if crosses(layout, axes[site], rank, per_host) else 0
    ratios = [there / here for there, here in zip(counted, leaving, strict=True)]
    print(f"{text:24} {leaving[0] / STEPS:>12,.0f} B a step, counted / predicted {ratios[0]:.4f} {ratios[1]:.4f}")
    return {
        "layout": text,
        "ranks_per_host": per_host,
        "predicted_bytes_per_step": [size / STEPS for size in leaving],
        "recorded_equals_predicted": True,
        "counted_bytes_per_step": [size / STEPS for size in counted],
        "counted_over_predicted": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise SystemExit("network namespaces need root and the commands ip and tc (Debian: iproute2)")
    cases = [(text, 1) for text in (QUICK if arguments.quick else ONE_RANK_A_HOST)]
    cases += [] if arguments.quick else [(text, 2) for text in TWO_RANKS_A_HOST]
    with tempfile.TemporaryDirectory() as place:
        rows = [study(text, per_host, Path(place)) for text, per_host in cases]
    worst = max(abs(ratio - 1) for row in rows for ratio in row["counted_over_predicted"])
    print(f"largest difference {worst:.2%}")
    if not arguments.quick:
        write_result("traffic", {"mtu": MTU, "steps": STEPS, "largest_difference": worst, "rows": rows})
    if worst > 0.03:
        raise SystemExit("difference above 3%")


if __name__ == "__main__":
    main()
