"""Ranks that others started find each other: by torchrun's environment, SLURM's, a TCP address or a file."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.train import worker
from meshwright.train.rendezvous import Place, check_world_size, first_host, join_if_started_by_others, place
from meshwright.train.run_directory import RunDirectory

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29400"}
SLURM = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "123"}


def test_who_started_this_process():
    assert not join_if_started_by_others({})
    assert join_if_started_by_others(TORCHRUN)
    assert join_if_started_by_others(SLURM)
    assert not join_if_started_by_others(SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"})  # an interactive job
    assert join_if_started_by_others({"RANK": "0", "WORLD_SIZE": "1"})


def test_torchruns_environment_says_the_place():
    assert place(None, TORCHRUN) == Place(3, 4, 1, "env://", "RANK=3 WORLD_SIZE=4")
    assert place("tcp://a:1", TORCHRUN).method == "tcp://a:1"  # the recipe says where
    assert place("file:///x", {"RANK": "0", "WORLD_SIZE": "2"}).method == "file:///x"


def test_slurms_environment_says_the_place_and_the_first_host_is_where_to_meet():
    found = place(None, SLURM | {"SLURM_JOB_NODELIST": "gpu[007-010,12],login1"})
    assert (found.rank, found.ranks, found.local_rank) == (5, 8, 1)
    host, port = found.method.removeprefix("tcp://").split(":")
    assert host == "gpu007" and 20000 <= int(port) < 32768  # below the ports that systems hand out
    assert place(None, SLURM | {"SLURM_JOB_NODELIST": "gpu1"}).method == f"tcp://gpu1:{port}"
    other = place(None, SLURM | {"SLURM_JOB_NODELIST": "gpu1", "SLURM_JOB_ID": "124"})
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
def test_the_first_host_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


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
def test_a_wrong_environment_is_named(environment, reason):
    with pytest.raises(UserError, match=reason.replace("[", r"\[")):
        place(None, environment)


def test_a_layout_for_another_number_of_ranks_is_refused():
    check_world_size(place(None, TORCHRUN), Layout(dp=4))
    with pytest.raises(UserError, match=r'layout "dp2" needs 2 ranks, but 4 were started \(RANK=3 WORLD_SIZE=4\)'):
        check_world_size(place(None, TORCHRUN), Layout(dp=2))


def test_a_run_directory_in_use_is_told_to_every_rank_that_joined(tmp_path):
    from torch.distributed import HashStore

    with RunDirectory(tmp_path) as first:
        store = HashStore()
        for rank in range(2):
            with pytest.raises(UserError, match=f"{tmp_path} is in use by process {os.getpid()}"):
                worker._lock_for_all(RunDirectory(tmp_path), Place(rank, 2, rank, "env://", ""), store)
        first.unlock()
        store, directory = HashStore(), RunDirectory(tmp_path)
        for rank in range(2):
            worker._lock_for_all(directory, Place(rank, 2, rank, "env://", ""), store)
        assert directory.lock_descriptor


def test_a_device_that_is_not_there_is_a_line():
    import torch

    assert worker.choose_device("cpu", 3) == "cpu"
    count = torch.cuda.device_count()
    with pytest.raises(UserError, match=rf'run.device = "cuda": this machine has .* and rank {count} on it needs one'):
        worker.choose_device("cuda", count)
    assert worker.choose_device("auto", 0) == ("cuda:0" if count else "cpu")


RANK = """
import json, os, sys
import torch, torch.distributed as dist
from meshwright.train.rendezvous import Place, initialise, place
sums = {}
for name, rendezvous, environment in json.loads(sys.argv[1]):
    environment = {key: value for key, value in {**os.environ, **environment}.items() if value is not None}
    initialise(place(rendezvous, environment), "cpu", 60.0)
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
        ("SLURM", None, {"RANK": None, "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "localhost,b", "MASTER_ADDR": None}),
        ("tcp", f"tcp://127.0.0.1:{free_port()}", {}),
        ("file", f"file://{tmp_path}/meeting", {}),
        ("a file from before", f"file://{tmp_path}/stale", {}),
    ]
    port, started = free_port(), []
    for rank in range(2):
        environment = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment |= {"OMP_NUM_THREADS": "1", "SLURM_PROCID": str(rank)}
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", RANK, json.dumps(methods)],
                env=os.environ | environment,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [json.loads(output) for output in outputs] == [{name: 3.0 for name, *_ in methods}] * 2
