"""Local ranks: what a caller sees when a rank raises, dies, hangs, and that nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from meshwright.comm.local import LocalRanks
from meshwright.errors import RankLost, UserError


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


def gone(pid: int, within: float = 5.0) -> bool:
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


def test_each_rank_answers_with_its_own_result(ranks):
    assert ranks.run(add, 1, 2) == [3, 4]
    assert ranks.run("tests.comm.test_local:add", 10, 20) == [30, 31]


def test_an_exception_comes_back_with_the_ranks_traceback(ranks):
    with pytest.raises(UserError, match="layout is wrong") as error:
        ranks.run(fail_on_one)
    assert "on rank 1" in str(error.value.__cause__) and "fail_on_one" in str(error.value.__cause__)
    assert ranks.run(add, 1, 2) == [3, 4], "and the next call finds working ranks"


def test_a_rank_that_dies_is_named(ranks):
    with pytest.raises(RankLost, match=r"local rank 1 died in .*die_on_one"):
        ranks.run(die_on_one)
    assert ranks.run(add, 1, 2) == [3, 4]


def test_a_rank_that_does_not_answer_is_named(ranks):
    with pytest.raises(RankLost, match=r"local rank 1 did not answer within 0.5 s"):
        ranks.run(hang_on_one, timeout=0.5)
    assert ranks.run(add, 1, 2) == [3, 4]


def test_no_process_stays_behind_when_the_starter_is_killed():
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
