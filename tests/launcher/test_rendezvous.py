"""Externally started ranks meet: by the environment of torchrun or SLURM, a TCP address or a file."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from meshwright.errors import UserError
from meshwright.launcher import device
from meshwright.launcher.rendezvous import (
    RendezvousInfo,
    check_world_size,
    connect_to_store,
    is_started_by_others,
    parse_first_host,
    read_rendezvous_info,
)  # fmt: skip
from meshwright.layout import Layout
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.recipe.tables import RunRecipe
from meshwright.training import worker
from tests.forked_commands import ForkedCommand

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29400"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "123"}


def test_externally_started_processes_are_detected_by_environment():
    assert not is_started_by_others({})
    assert is_started_by_others(TORCHRUN)
    assert is_started_by_others(SLURM)
    assert not is_started_by_others(SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"})  # an interactive job
    assert is_started_by_others({"RANK": "0", "WORLD_SIZE": "1"})


def test_torchrun_environment_gives_rank_and_rendezvous():
    assert read_rendezvous_info(None, TORCHRUN) == RendezvousInfo(3, 4, 1, "env://", "RANK=3 WORLD_SIZE=4")
    assert read_rendezvous_info("tcp://a:1", TORCHRUN).method == "tcp://a:1"  # the recipe's takes precedence
    assert read_rendezvous_info("file:///x", {"RANK": "0", "WORLD_SIZE": "2"}).method == "file:///x"


def test_local_rank_comes_from_starting_program_or_is_unknown():
    started = {"RANK": "3", "WORLD_SIZE": "4"}
    srun = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}
    mpirun = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    intel = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"}

    def local(environment):
        return read_rendezvous_info("file:///x", environment).local_rank

    assert [local(started | by) for by in (srun, mpirun, intel, {"LOCAL_RANK": "2"} | srun)] == [1, 1, 1, 2]
    assert local(started) is None  # not 0: all ranks would take the first GPU
    assert local(started | srun | {"SLURM_NTASKS": "2"}) is None  # a script for each of two machines
    assert local(started | srun | {"SLURM_PROCID": "1"}) is None
    assert local({"RANK": "0", "WORLD_SIZE": "1"}) == 0


def test_slurm_environment_gives_rank_and_first_host_as_rendezvous():
    found = read_rendezvous_info(None, SLURM | {"SLURM_JOB_NODELIST": "gpu[007-010,12],login1"})
    assert (found.rank, found.ranks, found.local_rank) == (5, 8, 1)
    host, port = found.method.removeprefix("tcp://").split(":")
    assert host == "gpu007" and 20000 <= int(port) < 32768  # below the ports that systems hand out
    assert read_rendezvous_info(None, SLURM | {"SLURM_JOB_NODELIST": "gpu1"}).method == f"tcp://gpu1:{port}"
    other = read_rendezvous_info(None, SLURM | {"SLURM_JOB_NODELIST": "gpu1", "SLURM_JOB_ID": "124"})
    assert other.method != f"tcp://gpu1:{port}"  # two jobs on one node do not meet


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[1-4]", "node1"),
        ("node[001-004,9]", "node001"),
        ("node[3,5-7],other", "node3"),
        ("a-b[07-08]-ib", "a-b07-ib"),
        ("rack[2-3]node[05-06]", "rack2node05"),
        ("login,node[1-4]", "login"),
        ("node1.example.org,node2.example.org", "node1.example.org"),
    ],
)
def test_first_host_of_node_list(nodes, host):
    assert parse_first_host(nodes) == host


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK=0 WORLD_SIZE=2 but no MASTER_ADDR"),
        (TORCHRUN | {"RANK": "x"}, 'RANK should be a whole number, not "x"'),
        (TORCHRUN | {"RANK": "4"}, "ranks count from 0 to 3"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "no SLURM_JOB_NODELIST"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "[1-2"}, "names no host"),
    ],
)
def test_wrong_environment_variable_is_named(environment, reason):
    with pytest.raises(UserError, match=reason.replace("[", r"\[")):
        read_rendezvous_info(None, environment)


def test_layout_of_another_world_size_is_refused():
    check_world_size(read_rendezvous_info(None, TORCHRUN), Layout(dp=4))
    with pytest.raises(UserError, match=r'layout "dp2" needs 2 ranks, but 4 were started \(RANK=3 WORLD_SIZE=4\)'):
        check_world_size(read_rendezvous_info(None, TORCHRUN), Layout(dp=2))


def test_run_directory_in_use_is_reported_to_every_rank(tmp_path):
    from torch.distributed import HashStore

    with RunDirectory(tmp_path) as first:
        store = HashStore()
        for rank in range(2):
            with pytest.raises(UserError, match=f"{tmp_path} is in use by process {os.getpid()}"):
                worker._lock_run_directory(RunDirectory(tmp_path), RendezvousInfo(rank, 2, rank, "env://", ""), store)
        first.unlock()
        store, directory = HashStore(), RunDirectory(tmp_path)
        for rank in range(2):
            worker._lock_run_directory(directory, RendezvousInfo(rank, 2, rank, "env://", ""), store)
        assert directory.lock_descriptor


def test_missing_device_is_one_error_line():
    import torch

    assert device.choose_device("cpu", 3) == "cpu"
    count = torch.cuda.device_count()
    with pytest.raises(UserError, match=rf'device "cuda": this machine has .* and rank {count} on it needs its own'):
        device.choose_device("cuda", count)
    assert device.choose_device("auto", 0) == ("cuda:0" if count else "cpu")


GPUS = ("GPU-a", "GPU-b")


@pytest.mark.parametrize(
    ("seats", "devices"),
    [
        ([("one", None, GPUS), ("two", None, GPUS), ("one", None, GPUS), ("two", None, GPUS)], [0, 0, 1, 1]),
        ([("one", 1, GPUS), ("one", 0, GPUS)], [1, 0]),
        ([("one", 0, GPUS), ("one", 0, GPUS)], [0, 1]),  # numbered by two scripts, each for itself
        ([("one", None, GPUS), ("one", 0, GPUS)], [0, 1]),
        ([("one", 0, ("GPU-a",)), ("one", 1, ("GPU-b",))], [0, 0]),  # each bound to its own
        ([("one", None, ("GPU-a",)), ("two", None, ("GPU-a",))], [0, 0]),
    ],
)
def test_every_rank_gets_its_own_gpu(seats, devices):
    assigned = device.assign_devices("auto", [device.RankDevices(*seat) for seat in seats])
    assert assigned == [f"cuda:{index}" for index in devices]


@pytest.mark.parametrize(
    ("wanted", "seats", "reason"),
    [
        ("auto", [("one", None, ("GPU-a",)), ("one", None, ("GPU-a",))], "ranks 0 and 1 on one would share one GPU"),
        ("auto", [("one", 0, GPUS), ("one", 1, ("GPU-a",))], "ranks 0 and 1 on one would share one GPU"),
        ("auto", [("one", None, GPUS)] * 3, "one has 2 CUDA devices, and rank 2, number 2 there, needs its own"),
        (
            "auto",
            [("one", 0, GPUS), ("two", 0, ())],
            "two has no CUDA device, and rank 1, number 0 there, needs its own",
        ),
        ("cuda", [("one", 0, ()), ("one", 1, ())], "one has no CUDA device"),
    ],
)
def test_ranks_without_own_gpu_are_refused_in_one_line(wanted, seats, reason):
    with pytest.raises(UserError, match=f'device "{wanted}": {reason}') as error:
        device.assign_devices(wanted, [device.RankDevices(*seat) for seat in seats])
    assert "\n" not in str(error.value)


def test_auto_device_is_cpu_without_gpus_on_any_host():
    assert device.assign_devices("auto", [device.RankDevices("one", None, ()), device.RankDevices("two", 0, ())]) == [
        "cpu",
        "cpu",
    ]


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_ranks_agree_on_devices_at_every_store(kind, tmp_path, monkeypatch):
    """Two ranks of one host without local ranks: assigned in order of rank; with one GPU both get the same error."""
    from torch.distributed import FileStore, TCPStore

    def clients(name):
        if kind == "file":
            return [FileStore(str(tmp_path / name), 2) for _ in range(2)]
        master = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        return [master, TCPStore("127.0.0.1", master.port, None, False, wait_for_workers=False)]

    def both(name):
        def agreed(rank, store):
            try:
                return device.agree_on_device("auto", RendezvousInfo(rank, 2, None, "", ""), store)
            except UserError as error:
                return str(error)

        stores = clients(name)  # kept until the end, as the first one is the server
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(agreed, range(2), stores))

    monkeypatch.setattr(device, "_list_visible_devices", lambda: list(GPUS))
    assert both("two") == ["cuda:0", "cuda:1"]
    monkeypatch.setattr(device, "_list_visible_devices", lambda: list(GPUS[:1]))
    first, second = both("one")
    assert first == second and "ranks 0 and 1 on " in first
    monkeypatch.setattr(device, "_list_visible_devices", list)
    assert both("none") == ["cpu", "cpu"]


RANK = """
import json, os, sys
import torch, torch.distributed as dist
from meshwright.launcher.rendezvous import RendezvousInfo, read_rendezvous_info
from meshwright.launcher.rendezvous import connect_to_store, initialise_process_group
sums = {}
for name, rendezvous, environment in json.loads(sys.argv[1]):
    environment = {key: value for key, value in {**os.environ, **environment}.items() if value is not None}
    here = read_rendezvous_info(rendezvous, environment)
    initialise_process_group(here, connect_to_store(here, 60.0), "cpu", 60.0)
    value = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(value)
    dist.barrier()
    sums[name] = float(value)
    dist.destroy_process_group()
print(json.dumps(sums))
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_ranks_meet_by_every_method(tmp_path):
    (tmp_path / "stale").write_bytes(b"left by ranks that were killed")
    methods = [
        ("environment", None, {}),
        # A new port for each: an early rank would find the server of the previous rendezvous.
        (
            "SLURM",
            None,
            {"RANK": None, "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "localhost,b", "MASTER_ADDR": None}
            | {"MASTER_PORT": str(free_port())},
        ),
        ("tcp", f"tcp://127.0.0.1:{free_port()}", {}),
        ("file", f"file://{tmp_path}/meeting", {}),
        ("a file from before", f"file://{tmp_path}/stale", {}),
    ]
    port, started = free_port(), []
    for rank in range(2):
        environment = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment |= {"OMP_NUM_THREADS": "1", "SLURM_PROCID": str(rank)}
        started.append(ForkedCommand(["-c", RANK, json.dumps(methods)], tmp_path, os.environ | environment))
    try:
        outputs = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [json.loads(output) for output in outputs] == [{name: 3.0 for name, *_ in methods}] * 2


def test_busy_port_ends_every_rank_with_one_line(monkeypatch):
    """Another program listens there and never answers: rank 0 cannot listen, rank 1 is not left waiting for ever."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        busy = f"port {port}, where the ranks are to meet"
        for variable, method in (("MASTER_PORT", None), ("run.rendezvous", f"tcp://127.0.0.1:{port}")):
            for rank, line in (
                (0, f"^{variable}: {busy}"),
                (1, f"127.0.0.1:{port} accepts connections but is not rank"),
            ):
                place = read_rendezvous_info(method, os.environ | {"RANK": str(rank), "WORLD_SIZE": "2"})
                begun = time.monotonic()
                with pytest.raises(UserError, match=line):
                    connect_to_store(place, RunRecipe().collective_timeout if method else 1.0)
                assert time.monotonic() - begun < 5
    for thread in threading.enumerate():  # torch's connections end with the other program
        if thread.name == "store":
            thread.join()
