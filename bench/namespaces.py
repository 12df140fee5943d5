"""Simulated against measured: all-reduce programs on hosts made of network namespaces with shaped links.

Every host is a network namespace with one virtual cable to a bridge; both ends of each cable are shaped to one rate, so
the hosts hang on a switch with full-duplex ports. What a message costs is measured first (beta: long
messages between neighbours; alpha: what one more round of tiny ones adds; gap: tiny messages to all others at once; how
fast ranks reduce), then each program is simulated with these figures and run over gloo. The
interfaces' own counters say what was really sent.

Needs Linux, root, and Debian's iproute2. Eight processes on two cores: rates are low, so that links limit, not cores.

    python bench/namespaces.py [--hosts 4] [--ranks-per-host 1] [--rate 100mbit] [--repeats 5] [--quick]
    python bench/namespaces.py --all      # 4 and 8 hosts of one rank, 2 of 4; writes bench/results/namespaces.json
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
from common import write_result
from meshwright.collectives import cutting
from meshwright.collectives.library import generate
from meshwright.collectives.topologies import parse_topology
from meshwright.comm.programs import Executable
from meshwright.program.check_collective import CheckedCollective, check_collective
from meshwright.program.collective import Builder, Kind
from meshwright.program.order import find_posting_order, match_transfers
from meshwright.program.simulate_collective import simulate_collective

NETWORK = "10.77.0"
BRIDGE = "mw-bridge"
SIZES = [2**16, 2**18, 2**20, 2**22, 2**24, 2**26]
PROGRAMS = ("ring", "rabenseifner", "butterfly", "all-pairs", "binomial-tree", "double-binary-tree", "hierarchical")
MTU = 9000  # headers are then 0.7% of the bytes on a link
PROBE = (2**18, 2**22)  # message bytes to measure bandwidth
ROUNDS = 17
CHUNKS = 9  # of the patterns that show what a message costs: one is sent, each of the others is a place for one
BURST = 10_000  # token-bucket burst in bytes: little more than one packet, else short messages would take no time


def ip(*words: str) -> None:
    """Run an iproute2 command."""
    done = subprocess.run([*words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()}")


@contextmanager
def hosts(count: int, rate: str) -> Iterator[None]:
    """So many namespaces mw0, mw1 ... on one bridge, each behind a cable of `rate` in both directions."""
    remove(count)
    try:
        ip("ip", "link", "add", BRIDGE, "mtu", str(MTU), "type", "bridge")
        ip("ip", "link", "set", BRIDGE, "up")
        for host in range(count):
            name, outside = f"mw{host}", f"mw-host{host}"
            ip("ip", "netns", "add", name)
            ip("ip", "link", "add", outside, "mtu", str(MTU), "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("ip", "link", "set", outside, "master", BRIDGE, "up")
            inside = ("ip", "netns", "exec", name)
            ip(*inside, "ip", "link", "set", "eth0", "mtu", str(MTU), "up")
            ip(*inside, "ip", "link", "set", "lo", "up")
            ip(*inside, "ip", "address", "add", f"{NETWORK}.{host + 1}/24", "dev", "eth0")
            shape = ("root", "tbf", "rate", rate, "burst", str(BURST), "limit", "8mb")
            ip(*inside, "tc", "qdisc", "add", "dev", "eth0", *shape)
            ip("tc", "qdisc", "add", "dev", outside, *shape)
        yield
    finally:
        remove(count)


def remove(count: int) -> None:
    for host in range(count):
        subprocess.run(["ip", "netns", "del", f"mw{host}"], capture_output=True)
        subprocess.run(["ip", "link", "del", f"mw-host{host}"], capture_output=True)
    subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)


def sent_by_hosts(count: int) -> list[int]:
    """Bytes that each host has put on its cable, by the counter of the cable's other end."""
    return [int(Path(f"/sys/class/net/mw-host{host}/statistics/rx_bytes").read_text()) for host in range(count)]


# --- ranks


def rank_main(connection: Connection, rank: int, world_size: int, host: int) -> None:
    """A rank's process: enter the host, join the others, run what is ordered at the time that is ordered."""
    with open(f"/run/netns/mw{host}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0x40000000):  # CLONE_NEWNET of setns(2)
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    address = f"tcp://{NETWORK}.1:29611"
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=world_size, timeout=timedelta(seconds=300)
    )
    connection.send("ready")
    cutting.SEGMENT_BYTES = 2**40  # the program unchanged, the vector in one piece
    together = Executable(check_collective(generate("barrier", "dissemination", world_size)), timeout_seconds=120)
    kept: dict[str, Executable] = {}
    while True:
        checked, numel = connection.recv()
        if checked is None:
            connection.send(reduction_rate(together))
            continue
        name = f"{checked.program.operation} {checked.program.algorithm}"
        if name not in kept:
            kept[name] = Executable(checked, timeout_seconds=120)
        vector = torch.full((numel,), float(rank + 1))
        together.run(None)
        begun = time.monotonic()  # one clock: all ranks are on one machine
        kept[name].run(vector)
        ended = time.monotonic()
        right = checked.program.operation != "all-reduce" or bool((vector == world_size * (world_size + 1) / 2).all())
        connection.send((begun, ended, right))


def reduction_rate(together: Executable) -> float:
    """Bytes a second that this rank adds up while all others do the same."""
    vector, other = torch.ones(2**20), torch.ones(2**20)
    together.run(None)
    begun = time.monotonic()
    for _ in range(50):
        torch.add(vector, other, out=vector)
    return 50 * vector.nbytes / (time.monotonic() - begun)


@dataclass
class Ranks:
    """Processes on the hosts."""

    connections: list[Connection]

    def run(self, checked: CheckedCollective, size: int) -> float:
        """Seconds from the moment when all have left a barrier until the last rank has finished."""
        answers = self._ask((checked, size // 4))
        if not all(right for *_, right in answers):
            raise SystemExit(f"{checked.program.algorithm}: wrong sum")
        return max(ended for _, ended, _ in answers) - max(begun for begun, *_ in answers)

    def reduction_rate(self) -> float:
        return statistics.median(self._ask((None, 0)))

    def _ask(self, order: tuple[Any, ...]) -> list[Any]:
        for connection in self.connections:
            connection.send(order)
        return [connection.recv() for connection in self.connections]


@contextmanager
def ranks_on(host_count: int, per_host: int) -> Iterator[Ranks]:
    context = get_context("fork")
    world_size, connections, processes = host_count * per_host, [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        process = context.Process(target=rank_main, args=(theirs, rank, world_size, rank // per_host), daemon=True)
        process.start()
        connections.append(ours)
        processes.append(process)
    try:
        for connection in connections:
            if not connection.poll(60):
                raise SystemExit("the ranks could not connect")
            connection.recv()
        yield Ranks(connections)
    finally:
        for process in processes:
            process.kill()


# --- cost of a link


def exchange(ranks: int, pairs: Sequence[tuple[int, int]], rounds: int = 1) -> CheckedCollective:
    """Rounds in which each pair's first rank sends a chunk to its second, which has a place for each: no operation, so
    only the order of its transfers is found. The vector has CHUNKS times the bytes of a message."""
    builder = Builder("send-receive", f"{rounds} x {pairs}", ranks, CHUNKS)
    arrived = dict.fromkeys(range(ranks), 0)
    for _ in range(rounds):
        with builder.round():
            for source, target in pairs:
                arrived[target] = arrived[target] % (CHUNKS - 1) + 1
                builder.transfer(source, target, chunk=0, into=arrived[target])
    program = builder.build()
    s = program.steps
    sends, receives = match_transfers(s.rank, s.peer, s.kind == Kind.SEND, s.kind == Kind.RECEIVE)
    order = find_posting_order(s.group_rank, s.group_index[sends], s.group_index[receives])
    level = np.maximum(order.level[s.group_index[sends]], order.level[s.group_index[receives]])
    return CheckedCollective(program, sends, receives, level, order)


def fit(ranks: Ranks, world_size: int, pairs: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """(alpha seconds, beta bytes a second) of a message between each pair, all pairs at once."""
    once, often = exchange(world_size, pairs), exchange(world_size, pairs, ROUNDS)
    alpha = (tiny(ranks, often) - tiny(ranks, once)) / (ROUNDS - 1)
    short, long = (statistics.median(ranks.run(once, CHUNKS * size) for _ in range(5)) for size in PROBE)
    return max(alpha, 0.0), (PROBE[1] - PROBE[0]) / (long - short)


def tiny(ranks: Ranks, pattern: CheckedCollective, repeats: int = 21) -> float:
    """Seconds of a pattern of messages of one number."""
    return statistics.median(ranks.run(pattern, 4 * CHUNKS) for _ in range(repeats))


def study(host_count: int, per_host: int, rate: str, sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    """Measure the links, then every program at every size, simulated and run."""
    world_size = host_count * per_host
    with hosts(host_count, rate), ranks_on(host_count, per_host) as ranks:
        across = [(r, (r + per_host) % world_size) for r in range(0, world_size, per_host)]
        alpha, beta = fit(ranks, world_size, across)
        shape = f"switch,{beta:.0f}B/s,{1e6 * alpha:.3f}us"
        inner = None
        if per_host > 1:
            within = [(r, r - r % per_host + (r + 1) % per_host) for r in range(world_size)]
            inner = fit(ranks, world_size, within)
            shape = (
                f"nodes:{host_count}x{per_host},inner={inner[1]:.0f}B/s,{1e6 * inner[0]:.3f}us,"
                f"outer={beta:.0f}B/s,{1e6 * alpha:.3f}us,adapters=1"
            )
        heads = range(0, world_size, per_host)
        everybody = [(a, b) for a in heads for b in heads if a != b]
        once, often = (tiny(ranks, exchange(world_size, everybody, rounds)) for rounds in (1, ROUNDS))
        apart = ((often - once) / (ROUNDS - 1) / alpha - 1) / max(1, host_count - 2)
        network = replace(parse_topology(shape, world_size), gap=max(0.0, apart))
        rate_of_reduction = ranks.reduction_rate()
        rows = []
        for name in PROGRAMS:
            if name == "hierarchical" and per_host == 1:
                continue
            groups = per_host if name == "hierarchical" else None
            checked = check_collective(generate("all-reduce", name, world_size, groups=groups))
            for size in sizes:
                predicted = simulate_collective(checked, network, size, rate_of_reduction)
                turns = repeats if size < 2**22 else 1  # one second each, for low noise
                if size == sizes[0]:
                    ranks.run(checked, size)  # connections
                before = sent_by_hosts(host_count)
                seconds = [ranks.run(checked, size) for _ in range(turns)]
                wire = [(b - a) / turns for a, b in zip(before, sent_by_hosts(host_count), strict=True)]
                leaving = crossing_bytes(checked, per_host, size)
                measured = statistics.median(seconds)
                rows.append(
                    {
                        "program": name,
                        "bytes": size,
                        "simulated_seconds": predicted.seconds,
                        "measured_seconds": measured,
                        "error": predicted.seconds / measured - 1,
                        "program_bytes": sum(leaving),
                        "counted_bytes": sum(wire),
                        "counted_over_program": sum(wire) / sum(leaving),
                    }
                )
                say(
                    f"{world_size} ranks {name:20} {size:>9} B: simulated {1e3 * predicted.seconds:9.2f} ms, measured "
                    f"{1e3 * measured:9.2f} ms ({100 * rows[-1]['error']:+.1f}%), "
                    f"wire {rows[-1]['counted_over_program']:.4f}"
                )
    errors = [abs(float(row["error"])) for row in rows]
    result = {
        "hosts": host_count,
        "ranks_per_host": per_host,
        "rate": rate,
        "topology": shape,
        "gap": network.gap,
        "reduction_bytes_per_second": rate_of_reduction,
        "median_error": statistics.median(errors),
        "largest_error": max(errors),
        "median_counted_over_program": statistics.median(row["counted_over_program"] for row in rows),
        "median_counted_over_program_from_1_mib": statistics.median(
            [row["counted_over_program"] for row in rows if row["bytes"] >= 2**20] or [float("nan")]
        ),
        "rows": rows,
    }
    say(str({key: value for key, value in result.items() if key != "rows"}))
    return result


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def crossing_bytes(checked: CheckedCollective, per_host: int, size: int) -> list[float]:
    """Bytes that each host sends to other hosts under the program."""
    s, sends = checked.program.steps, checked.sends
    source, target = s.rank[sends] // per_host, s.peer[sends] // per_host
    amount = np.where(source != target, s.count[sends], 0) * (size / checked.program.chunks)
    return np.bincount(source, amount).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="up to 4 MiB")
    parser.add_argument("--all", action="store_true")
    arguments = parser.parse_args()
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise SystemExit("network namespaces need root and the commands ip and tc (Debian: iproute2)")
    if not re.fullmatch(r"\d+mbit", arguments.rate):
        raise SystemExit(f"--rate {arguments.rate}: give a rate such as 100mbit")
    sizes = [size for size in SIZES if size <= 2**22] if arguments.quick else SIZES
    shapes = [(4, 1), (8, 1), (2, 4)] if arguments.all else [(arguments.hosts, arguments.ranks_per_host)]
    studies = [study(*shape, arguments.rate, sizes, arguments.repeats) for shape in shapes]
    if arguments.all:
        pooled = [abs(row["error"]) for one in studies for row in one["rows"]]
        write_result("namespaces", {"median_error": statistics.median(pooled), "studies": studies})


if __name__ == "__main__":
    main()
