"""Local ranks: errors for a rank that raises, dies or hangs; no process outlives its starter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright.comm import collectives
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.errors import RankLost, UserError
from meshwright.layout import Layout


def add(a: int, b: int) -> int:
    return a + b + dist.get_rank()


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise UserError("layout is wrong")
    dist.barrier()  # left alone


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def count_gloo_threads() -> tuple[int, int]:
    """Return the numbers of process groups and of gloo's device threads in this process."""
    mesh = Mesh.create(Layout.parse("dp2 zero3"))
    groups = [mesh.world.group, *(dist.new_group([0, 1]) for _ in range(3))]
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    for group in groups[1:]:
        dist.destroy_process_group(group)
    mesh.close()
    return len(groups), names.count("gloo_tcp_loop")


def stay_away() -> None:
    mesh = Mesh.create(Layout(dp=2), timeout_seconds=60.0)
    collectives.all_reduce(torch.zeros(3), mesh.data, "test.first")
    if dist.get_rank() == 0:
        collectives.all_reduce(torch.zeros(5), mesh.data, "test.lonely")
    time.sleep(60)


def give_up() -> None:
    mesh = Mesh.create(Layout(dp=2), timeout_seconds=60.0)
    collectives.all_reduce(torch.zeros(3), mesh.data, "test.first")
    if dist.get_rank() == 1:
        mesh.communicator.timeout_seconds = 0.5
        collectives.all_reduce(torch.zeros(5), mesh.data, "test.lonely")
    time.sleep(60)


def gone(pid: int, within: float = 60.0) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def ranks():
    with LocalRanks(2) as started:
        yield started


def test_each_rank_returns_its_own_result(ranks):
    assert ranks.run(add, 1, 2) == [3, 4]
    assert ranks.run("tests.comm.test_local:add", 10, 20) == [30, 31]


def test_exception_is_raised_with_traceback_of_rank(ranks):
    with pytest.raises(UserError, match="layout is wrong") as error:
        ranks.run(fail_on_one)
    assert "on rank 1" in str(error.value.__cause__) and "fail_on_one" in str(error.value.__cause__)
    assert ranks.run(add, 1, 2) == [3, 4], "the next call has working ranks"


def test_a_rank_that_dies_is_named(ranks):
    with pytest.raises(RankLost, match=r"local rank 1 died in .*die_on_one"):
        ranks.run(die_on_one)
    assert ranks.run(add, 1, 2) == [3, 4]


def test_unresponsive_rank_is_named(ranks):
    with pytest.raises(RankLost, match=r"local rank 1 did not answer within 1.5 s"):
        ranks.run(hang_on_one, timeout=1.5)
    assert ranks.run(add, 1, 2) == [3, 4]


def test_hang_report_names_call_and_missing_rank(ranks):
    parted = (
        r"rank 1 has not entered call \d+ of ranks 0,1 \(all_reduce test\.lonely over data\), where rank 0 has been "
        r"waiting for \d+\.\d s at .*test_local\.py:\d+ \(stay_away\); its last completed call was call \d+ "
        r"\(.*test.first"
    )
    with pytest.raises(RankLost, match=f"did not answer within 4 s in .*stay_away; {parted}"):
        ranks.run(stay_away, timeout=4.0)
    with pytest.raises(
        RankLost, match=r"rank 1 had no answer from rank 0 in test.lonely .*; rank 0 has not entered call"
    ):
        ranks.run(give_up)


def test_ranks_end_when_their_starter_is_killed():
    code = (
        "from meshwright.comm.local import LocalRanks, _Server\n"
        "ranks = LocalRanks(2).__enter__()\n"
        "print(*ranks.pids, _Server.running().process.pid, flush=True)\n"
        "ranks.run('time:sleep', 100)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert starter.stdout is not None
    pids = [int(word) for word in starter.stdout.readline().split()]
    assert len(pids) == 3
    starter.kill()
    starter.wait()
    starter.stdout.close()
    assert all(gone(pid) for pid in pids)


def test_long_temporary_directory_leaves_room_for_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with LocalRanks(1) as ranks:
        assert ranks.run("os:getpid") != [os.getpid()]


def test_process_groups_of_a_test_rank_share_one_gloo_thread(two: LocalRanks):
    assert two.run(count_gloo_threads) == [(4, 1)] * 2
