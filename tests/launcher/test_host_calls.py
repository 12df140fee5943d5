"""Recorder files of externally started ranks that were killed, as by NCCL's watchdog."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from meshwright.errors import RankLost
from meshwright.flight_recorder import call_ring
from meshwright.flight_recorder.call_ring import CallWriter, create_named_file
from meshwright.launcher.host_calls import HostCalls
from meshwright.launcher.rendezvous import RendezvousInfo
from meshwright.monitoring.run_directory import RunDirectory

PLACE = RendezvousInfo(0, 2, 0, "env://", "torchrun", 2)


def leave(path: Path, rank: int, calls: int) -> None:
    """The recorder file of a killed rank that has queued calls without waiting for one, as on CUDA."""
    descriptor = create_named_file(path / f"rank-{rank:05d}", rank, 2)
    writer = CallWriter(descriptor)
    for _ in range(calls):
        number = writer.post(writer.register_group((0, 1)), "data.gradients", "all_reduce", "data", 4, "float32", (4,))
        writer.wait(number)
        writer.done(number)
    with subprocess.Popen(["true"]) as ended:
        pass
    os.pwrite(descriptor, struct.pack("<Q", ended.pid), 24)
    os.close(descriptor)


@pytest.mark.parametrize("calls, blamed", [((7, 5), True), ((5, 5), False)])
def test_next_start_reports_rank_behind_and_cleans_up(tmp_path, capfd, monkeypatch, calls, blamed):
    monkeypatch.setattr(call_ring, "_of_process", [])
    directory = RunDirectory(tmp_path)
    first = HostCalls(directory, PLACE, "first")
    for rank in (0, 1):
        leave(first._path, rank, calls[rank])
    second = HostCalls(directory, PLACE, "second")
    other = HostCalls(directory, RendezvousInfo(1, 2, 1, "env://", "torchrun", 2), "second")  # starts after the report
    output = capfd.readouterr().err
    line = (
        "in the start before this one: rank 1 has not entered call 6 of ranks 0,1 (all_reduce data.gradients over data)"
    )
    assert output.count(line) == blamed and second.report_path.exists() == blamed
    if blamed:
        text = second.report_path.read_text()
        assert text.startswith(line) and "> rank 1 (process" in text
        assert output.endswith(f"full report: {second.report_path}\n") and output.count("\n") == 2
    second.close()
    other.close()
    assert not list(first._path.parent.glob(f"*{first._path.name.removesuffix('first')}*"))


def test_only_one_rank_reports_when_all_time_out_at_once(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(call_ring, "_of_process", [])
    directory = RunDirectory(tmp_path)
    ranks = [HostCalls(directory, RendezvousInfo(rank, 2, rank, "env://", "torchrun", 2), "run") for rank in (0, 1)]
    for rank in (0, 1):
        leave(ranks[0]._path, rank, (7, 5)[rank])
    errors = [RankLost(f"rank {rank} had no answer") for rank in (0, 1)]
    second = []

    def remove_slowly(path: Path, **options: object) -> None:
        """Remove a directory of recorder files but the one of rank 1; then rank 1 times out too."""
        for file in path.iterdir():
            if file.name != "rank-00001":
                file.unlink()
        monkeypatch.undo()
        second.append(ranks[1].report(errors[1]))
        shutil.rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", remove_slowly)
    first = ranks[0].report(errors[0])
    assert "rank 1 has not entered call 6 of ranks 0,1" in str(first) and second == [errors[1]]
    assert capfd.readouterr().err == f"full report: {ranks[0].report_path}\n"
    assert "rank 1 has not entered" in ranks[0].report_path.read_text()
