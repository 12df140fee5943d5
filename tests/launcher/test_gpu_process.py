"""Settings of processes that compute on a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshwright.launcher import gpu_process
from meshwright.launcher.gpu_process import bind_to_gpu_cores, parse_cores, prepare_gpu_process, read_gpu_cores


@pytest.mark.parametrize(("cores", "host_ranks", "workers"), [(192, 8, 24), (64, 1, 32), (4, 8, 1)])
def test_compile_workers_of_a_hosts_ranks_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, host_ranks: int, workers: int
):
    monkeypatch.setattr(gpu_process, "count_available_cores", lambda: cores)
    environment: dict[str, str] = {}
    prepare_gpu_process(host_ranks, environment)
    assert environment == {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True", "TORCHINDUCTOR_COMPILE_THREADS": str(workers),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_settings_of_the_user_stay(name: str):
    chosen = {name: "max_split_size_mb:512", "TORCHINDUCTOR_COMPILE_THREADS": "3"}
    environment = dict(chosen)
    prepare_gpu_process(1, environment)
    assert environment == chosen


def make_system(directory: Path, node: int, cores: str) -> Path:
    """Write what Linux' /sys says of a GPU on a NUMA node."""
    device, of_node = directory / "bus/pci/devices/0000:1b:00.0", directory / f"devices/system/node/node{node}"
    for each in (device, of_node):
        each.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    (of_node / "cpulist").write_text(f"{cores}\n")
    return directory


def test_rank_runs_on_cores_of_its_gpus_node_that_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    system, bound = make_system(tmp_path, 1, "4-7,12-15"), list[set[int]]()
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: bound.append(set(cores)), raising=False)

    def bind(available: set[int], address: str = "0000:1b:00.0") -> set[int] | None:
        """Bind a process that may run on the cores `available`."""
        monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(available), raising=False)
        return bind_to_gpu_cores(address, system)

    assert bind(set(range(16))) == {4, 5, 6, 7, 12, 13, 14, 15}
    assert bind({2, 3, 4, 5}) == {4, 5}  # the job's launcher has given the rank four cores
    assert len(bound) == 2
    assert bind({4, 5}) is None  # bound already
    assert bind({0, 1}) is None  # bound to another node on purpose
    assert bind({0, 1, 2, 3, 4, 8, 9, 10}) is None  # one near core for all threads of the rank
    assert bind(set(range(16)), "0000:ff:00.0") is None  # no such device
    assert len(bound) == 2


def test_gpu_without_numa_node_has_no_cores(tmp_path: Path):
    assert read_gpu_cores("0000:1b:00.0", make_system(tmp_path, -1, "0-3")) == set()


def test_lists_of_cores_are_parsed():
    assert parse_cores("0-2,8\n") == {0, 1, 2, 8} and parse_cores("\n") == set()
