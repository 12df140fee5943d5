"""Rendezvous of the ranks of a job: by torchrun's or Kubernetes' environment, SLURM's, tcp:// or file://.

Free of torch until `initialise_process_group` is called.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from meshwright.emulation.scheduler import is_emulated_rank
from meshwright.errors import RankLost, UserError
from meshwright.launcher.daemon_thread import run_in_daemon_thread
from meshwright.layout import Layout

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


LAUNCHER = "the launcher"
"""`RendezvousInfo.started_by` of the ranks that Meshwright starts itself."""


@dataclass(frozen=True, slots=True)
class RendezvousInfo:
    """Rank, world size and rendezvous of this process, as its launcher (torchrun, Kubernetes, SLURM or Meshwright) set
    them.

    Attributes:
        rank: Global rank.
        ranks: World size.
        local_rank: Rank on its host, from 0; None if unknown.
        method: URL of the rendezvous, at which the ranks meet: env://, tcp:// or file://.
        started_by: Text that names the launcher or its environment variables, for error messages.
        host_ranks: Number of ranks on each host; None if unknown or unequal.
    """

    rank: int
    ranks: int
    local_rank: int | None
    method: str
    started_by: str
    host_ranks: int | None = None


LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID")
"""Environment variables by which a process knows that another launcher started it as one of several ranks."""


STOPS_ONCE = "MESHWRIGHT_STOPS_ONCE"
"""Environment variable of a run that another process of Meshwright stops: a scheduler may send SIGTERM to both, and the
second one that arrives here is then no request to stop without a checkpoint."""


def is_started_by_others(environment: Mapping[str, str] | None = None) -> bool:
    """Return True if torchrun, Kubernetes or SLURM started this process as one of several ranks, so that this process
    must join the other ranks. environment: variables; None: this process's.

    False in a SLURM job of one task: there Meshwright's launcher starts the ranks.
    """
    environment = os.environ if environment is None else environment
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return True
    return "SLURM_PROCID" in environment and environment.get("SLURM_NTASKS", "1") != "1"


def read_rendezvous_info(rendezvous: str | None = None, environment: Mapping[str, str] | None = None) -> RendezvousInfo:
    """Read this process's rank and rendezvous from the environment variables of torchrun, Kubernetes or SLURM.

    rendezvous: rendezvous URL from the recipe (tcp://HOST:PORT or file:///PATH); None: the URL from the environment
    variables. environment: variables; None: this process's. `UserError` names the variable that is missing or wrong."""
    environment = os.environ if environment is None else environment
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, ranks = _read_int(environment, "RANK"), _read_int(environment, "WORLD_SIZE")
        started_by = f"RANK={rank} WORLD_SIZE={ranks}"
        method = rendezvous or "env://"
        if method == "env://":
            for name in ("MASTER_ADDR", "MASTER_PORT"):
                if name not in environment:
                    raise UserError(f"{started_by} but no {name}: start with torchrun, set it, or set run.rendezvous")
    else:
        rank, ranks = _read_int(environment, "SLURM_PROCID"), _read_int(environment, "SLURM_NTASKS")
        started_by = f"SLURM_PROCID={rank} SLURM_NTASKS={ranks}"
        method = rendezvous or _make_slurm_url(environment)
    if not 0 <= rank < ranks:
        raise UserError(f"{started_by}: ranks count from 0 to {ranks - 1}")
    local_rank = _read_local_rank(environment, rank, ranks)
    return RendezvousInfo(rank, ranks, local_rank, method, started_by, _read_host_ranks(environment, ranks))


_LOCAL_RANKS = (
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # Intel MPI
)


def _read_local_rank(environment: Mapping[str, str], rank: int, ranks: int) -> int | None:
    """Return this process's rank on its host from the environment variables of torchrun, SLURM or MPI; None if unknown.
    rank, ranks: global rank and world size of this process. The local rank from MPI or SLURM is used only if the global
    rank and world size from MPI or SLURM equal `rank` and `ranks`."""
    if "LOCAL_RANK" in environment:
        return _read_int(environment, "LOCAL_RANK")
    for own, all_of_them, local in _LOCAL_RANKS:
        # Valid only if SLURM or MPI started every rank: it may have started one script on each machine.
        if (environment.get(own), environment.get(all_of_them)) == (str(rank), str(ranks)) and local in environment:
            return _read_int(environment, local)
    return 0 if ranks == 1 else None


def _read_host_ranks(environment: Mapping[str, str], ranks: int) -> int | None:
    """Return the number of ranks on each host as torchrun or SLURM reports it; None if unknown or not equal on all
    hosts. environment: environment variables. ranks: world size."""
    count = environment.get("LOCAL_WORLD_SIZE", "")
    if not count and environment.get("SLURM_NTASKS") == str(ranks):
        tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or ""
        count = re.sub(r"\(x[0-9]+\)$", "", tasks)  # 8(x2): eight on each of two
    return int(count) if count.isdecimal() and int(count) and ranks % int(count) == 0 else None


def warn_of_tensor_across_hosts(layout: Layout, host_ranks: int) -> str | None:
    """Return a warning line for the user if a tensor-parallel group of the layout spans several hosts, else None.
    host_ranks: number of consecutive ranks on each host."""
    if all(group[0] // host_ranks == group[-1] // host_ranks for group in layout.groups("tp")):
        return None
    inside = math.gcd(host_ranks, layout.tp)
    would = f"tp{inside} would not" if inside > 1 else "without tp it would not"
    return (
        f'layout "{layout}": {host_ranks} rank{"s" if host_ranks > 1 else ""} per host: groups of tp{layout.tp} span '
        f"several hosts, and every layer's all-reduce crosses the network; {would}"
    )


def check_world_size(info: RendezvousInfo, layout: Layout) -> None:
    """Raise `UserError` unless the number of started ranks, `info.ranks`, equals the number of ranks of the layout."""
    if info.ranks != layout.world_size:
        raise UserError(
            f'layout "{layout}" needs {layout.world_size} rank{"s" if layout.world_size > 1 else ""}, but '
            f"{info.ranks} {'were' if info.ranks > 1 else 'was'} started ({info.started_by}); change one of the two"
        )


def parse_first_host(nodes: str) -> str:
    """Return the first host of the SLURM node list `nodes`: `gpu[007-010,12],login1` -> `gpu007`."""
    match = re.match(r"(?:[^,\[\]]|\[[0-9][^\]]*\])+", nodes.strip())
    if match is None:
        raise UserError(f'SLURM_JOB_NODELIST "{nodes}" names no host; set run.rendezvous = "tcp://HOST:PORT"')
    return re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", match[0])


def _make_slurm_url(environment: Mapping[str, str]) -> str:
    """Return the rendezvous URL tcp://HOST:PORT for the tasks of a SLURM job: its first host, and a port derived from
    job and step id. environment: environment variables of the job."""
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    host = environment.get("MASTER_ADDR") or (parse_first_host(nodes) if nodes else None)
    if host is None:
        raise UserError('SLURM_PROCID but no SLURM_JOB_NODELIST; set run.rendezvous = "tcp://HOST:PORT"')
    # All tasks of a job must derive the same port, and jobs on the same node different ones.
    job = re.sub(r"\D", "", environment.get("SLURM_JOB_ID", "")) or "0"
    step = re.sub(r"\D", "", environment.get("SLURM_STEP_ID", "")) or "0"
    port = environment.get("MASTER_PORT") or str(20000 + (int(job) * 7 + int(step)) % 12000)
    return f"tcp://{host}:{port}"


def _read_int(environment: Mapping[str, str], name: str) -> int:
    """Return the environment variable `name` as an int; `UserError` if the variable is missing or no integer."""
    try:
        return int(environment[name])
    except KeyError:
        raise UserError(f"the environment variable {name} is missing") from None
    except ValueError:
        raise UserError(f'{name} should be a whole number, not "{environment[name]}"') from None


def connect_to_store(info: RendezvousInfo, timeout_seconds: float) -> Store:
    """Connect this rank to the torch.distributed store (key-value server or file) that all ranks share; return the
    store. info: this rank and its rendezvous. Raises `UserError` if the store cannot be reached within
    `timeout_seconds`."""
    with _convert_rendezvous_errors(info, timeout_seconds):
        return _connect_store(info, timedelta(seconds=timeout_seconds))


def initialise_process_group(info: RendezvousInfo, store: Store, device: str, timeout_seconds: float) -> None:
    """Initialise torch.distributed on this rank: NCCL (and gloo for host tensors) if `device` is "cuda:N", gloo if
    `device` is "cpu".

    info: rank and world size. store: key-value store at which the ranks meet. timeout_seconds: time limit of the
    rendezvous and of every collective call. Raises `UserError` if the rendezvous fails or exceeds this limit;
    `RankLost` instead if Meshwright's launcher made the rendezvous file, because then only the loss of a rank explains
    the failure.
    """
    import torch.distributed as dist

    from meshwright.comm.backend import compute_backend_timeout

    timeout = compute_backend_timeout(device, timeout_seconds)
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    options: dict[str, Any] = {}
    if device.startswith("cuda"):
        import torch

        options["device_id"] = torch.device(device)
    with _convert_rendezvous_errors(info, timeout_seconds):
        dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.ranks, timeout=timeout, **options)


@contextmanager
def _convert_rendezvous_errors(info: RendezvousInfo, timeout_seconds: float) -> Iterator[None]:
    """Context manager that turns every exception of torch's rendezvous into an exception with a message of one line:
    `RankLost` if Meshwright's launcher made the rendezvous file, else `UserError`. info: this rank and its rendezvous.
    timeout_seconds: limit of the rendezvous, for the message."""
    import torch.distributed as dist

    try:
        yield
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        if "EADDRINUSE" in str(error):  # in torch's text alone
            raise UserError(format_busy_port_error(info.method)) from error
        reason = " ".join(str(error).split())[:300]
        line = (
            f"rank {info.rank} of {info.ranks} could not meet the others at {info.method} within "
            f"{timeout_seconds:g} s ({reason})"
        )
        if info.started_by == LAUNCHER and info.method.startswith("file://"):
            raise RankLost(line) from error  # a file of this host: a rank must have been lost
        raise UserError(f"{line}; were all ranks started, and can they reach it?") from error


def format_busy_port_error(method: str) -> str:
    """Return the error message for a rendezvous URL (`method`) whose TCP port another program uses."""
    port = parse_host_and_port(method)[1]
    where = "MASTER_PORT" if method == "env://" else "run.rendezvous"
    return (
        f"{where}: port {port}, where the ranks are to meet ({method}), is in use by another program on rank 0's host; "
        "end that program or choose a free port"
    )


def check_port_free(method: str) -> None:
    """Raise `UserError` if the port of a rendezvous URL `method`, tcp://HOST:PORT, is taken on this host, where rank 0
    will listen."""
    if not method.startswith("tcp://"):
        return
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with suppress(PermissionError), socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does, to ignore closed connections
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            listener.bind(("", parse_host_and_port(method)[1]))
            listener.listen()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UserError(format_busy_port_error(method)) from None
            raise


def parse_host_and_port(method: str) -> tuple[str, int]:
    """Return (host, port) of the rendezvous URL `method`: HOST and PORT of tcp://HOST:PORT; for env:// the values of
    MASTER_ADDR and MASTER_PORT."""
    if method == "env://":
        return os.environ["MASTER_ADDR"], _read_int(os.environ, "MASTER_PORT")
    host, _, port = method.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)  # an IPv6 address is in brackets


STORE_TIMEOUT_SECONDS, STORE_TIMEOUT_SECONDS_PER_RANK = 3.0, 0.025
"""Time limit for the answer of rank 0's store, a thread without the interpreter's lock, once its port accepts
connections, and more of it for each rank that connects at the same time; torch would wait for ever."""


def _connect_within(info: RendezvousInfo, connect: Callable[[timedelta], Store], timeout: timedelta) -> Store:
    """Connect this rank to the key-value store within time limits; return the store. Rank 0 calls `connect(timeout)` at
    once; every other rank first waits, up to `timeout`, until rank 0 listens at its port, then calls `connect` with a
    limit that grows with the number of ranks. Raises `RuntimeError` if a limit passes.

    info: this rank and its rendezvous. connect: function that connects within the given time limit.
    """
    if info.rank == 0:
        return connect(timeout)
    host, port = parse_host_and_port(info.method)
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection((host, port), timeout.total_seconds()).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing listens at {host}:{port}: {error}") from error
            time.sleep(0.05)
    seconds = min(timeout.total_seconds(), STORE_TIMEOUT_SECONDS + STORE_TIMEOUT_SECONDS_PER_RANK * info.ranks)
    try:
        # In a thread, as torch may wait without limit.
        store = run_in_daemon_thread(lambda: connect(timedelta(seconds=seconds)), "store").result(seconds)
    except TimeoutError:
        raise RuntimeError(
            f"{host}:{port} accepts connections but is not rank 0's store (no answer within {seconds:g} s); "
            "another program may own the port"
        ) from None
    store.set_timeout(timeout)
    return store


def _connect_store(info: RendezvousInfo, timeout: timedelta) -> Store:
    """Connect this rank to the key-value store at its rendezvous URL (`info.method`); return the store. timeout: time
    limit of the connection, and of each wait for a key."""
    from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import rendezvous  # type: ignore[attr-defined]

    if is_emulated_rank():
        return _isolate_store_keys(next(rendezvous("env://"))[0], info, timeout.total_seconds())
    if info.method == "env://":
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = _connect_within(
            info, lambda limit: next(rendezvous("env://", info.rank, info.ranks, timeout=limit))[0], timeout
        )
        return _isolate_store_keys(store, info, timeout.total_seconds()) if agents and info.ranks > 1 else store
    if info.method.startswith("file://"):
        path = info.method.removeprefix("file://")
        _remove_stale_file(path)
        store = FileStore(path, info.ranks)
        store.set_timeout(timeout)
        return store
    host, port = parse_host_and_port(info.method)
    return _connect_within(
        info, lambda limit: TCPStore(host, port, info.ranks, is_master=info.rank == 0, timeout=limit), timeout
    )


def _isolate_store_keys(store: Store, info: RendezvousInfo, timeout_seconds: float) -> Store:
    """Return a view of torchrun's key-value store with a random prefix on every key, equal on all ranks and new at each
    start, so that restarted ranks do not read keys of killed ranks. Collective: every rank calls it.

    info: this rank's number and the number of ranks. Rank 0 chooses the prefix and sends it to each other rank under a
    random key that the other rank has chosen. (torchrun's restart counter cannot be the prefix: the counters of hosts
    may differ.) `RuntimeError` if a rank does not join within `timeout_seconds`.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    mine = secrets.token_hex(8)
    if info.rank:
        store.set(f"meshwright/meet/{info.rank}", mine)
        name = store.get(f"meshwright/meet/{mine}").decode()
        store.set(f"meshwright/met/{name}/{info.rank}", "here")
        return PrefixStore(f"meshwright/{name}", store)
    answered, missing = set(), set(range(1, info.ranks))
    deadline = time.monotonic() + timeout_seconds
    while missing:
        for rank in sorted(missing):
            if store.check([f"meshwright/met/{mine}/{rank}"]):
                missing.discard(rank)
            elif store.check([f"meshwright/meet/{rank}"]):
                word = store.get(f"meshwright/meet/{rank}").decode()
                if word not in answered:  # the key of a killed rank is replaced later
                    answered.add(word)
                    store.set(f"meshwright/meet/{word}", mine)
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"rank {min(missing)} did not join")
        time.sleep(0.01)
    return PrefixStore(f"meshwright/{mine}", store)


_held: list[int] = []  # descriptors that stay open as long as the process


def _remove_stale_file(path: str) -> None:
    """Remove the rendezvous file at `path` if killed ranks have left it behind, and lock it for this process. If
    another process holds a lock on PATH.lock, the file is in use and is not removed. This process takes a shared lock
    on PATH.lock and holds it until the process ends."""
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(FileNotFoundError):
            os.unlink(path)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    _held.append(descriptor)
