"""Execution of collective programs: every algorithm of the library, exact on whole numbers, on several ranks."""

from __future__ import annotations

import os
import re
import signal
from functools import cache

import pytest
import torch

from meshwright.collectives import cutting
from meshwright.collectives.library import ALGORITHMS, generate
from meshwright.comm.local import LocalRanks
from meshwright.comm.measure_program import combine_answers, measure
from meshwright.comm.programs import Executable
from meshwright.errors import CheckFailed, RankLost, UserError
from meshwright.program.check_collective import CheckedCollective, check_collective
from tests.conftest import exhaustive

EVERY = [(operation, algorithm) for operation, named in ALGORITHMS.items() for algorithm in named]


def values(rank: int, numel: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Input of a rank: small whole numbers, so that sums are exact in every dtype."""
    return torch.randint(-9, 10, (numel,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def expected(operation: str, rank: int, ranks: int, root: int, everybody: torch.Tensor) -> tuple[slice, torch.Tensor]:
    """The slice of a rank's vector that the operation defines, and its values by definition, in one process.
    everybody: [ranks, numel]."""
    numel = everybody.shape[1]
    share = numel // ranks
    mine, whole = slice(rank * share, (rank + 1) * share), slice(0, numel)
    parts = everybody.view(ranks, ranks, -1) if numel % ranks == 0 else None
    match operation:
        case "all-reduce":
            return whole, everybody.sum(0)
        case "reduce":
            return (whole, everybody.sum(0)) if rank == root else (slice(0), everybody[0, :0])
        case "reduce-scatter":
            return mine, everybody.sum(0)[mine]
        case "all-gather":
            return whole, parts[range(ranks), range(ranks)].reshape(-1)
        case "gather":
            got = parts[range(ranks), range(ranks)].reshape(-1)
            return (whole, got) if rank == root else (slice(0), got[:0])
        case "broadcast":
            return whole, everybody[root]
        case "scatter":
            return mine, everybody[root, mine]
        case "all-to-all":
            return whole, parts[:, rank].reshape(-1)
        case "send-receive":
            receiver = ranks - 1 if root != ranks - 1 else 0
            return (whole, everybody[root]) if rank == receiver else (slice(0), everybody[0, :0])
    raise AssertionError(operation)


def run_and_compare(checked: CheckedCollective, numel: int, dtype: torch.dtype, runs: int = 1) -> None:
    """Run a program and compare with the definition; all-reduce results must be bitwise equal on all ranks."""
    program = checked.program
    executable = Executable(checked, timeout_seconds=20)
    if program.operation == "barrier":
        executable.run(None)
        return
    ranks, rank = program.ranks, executable.rank
    for turn in range(runs):
        everybody = torch.stack([values(100 * turn + r, numel, dtype) for r in range(ranks)])
        vector = everybody[rank].clone()
        output = torch.empty_like(vector) if program.has_output else None
        executable.run(vector, output)
        place, wanted = expected(program.operation, rank, ranks, program.root, everybody)
        found = (vector if output is None else output)[place]
        assert torch.equal(found, wanted), (executable.name, numel, dtype, rank, found[:9], wanted[:9])


def run_all(cases: list[tuple[str, str, int, int, str]]) -> int:
    """operation, algorithm, root, numel, dtype"""
    world = torch.distributed.get_world_size()
    done = 0
    for operation, algorithm, root, numel, dtype in cases:
        checked = program_of(operation, algorithm, world, root)
        if checked is not None:
            run_and_compare(checked, numel, getattr(torch, dtype))
            done += 1
    return done


@cache
def program_of(operation: str, algorithm: str, ranks: int, root: int = 0) -> CheckedCollective | None:
    """The program; None if the algorithm does not support this number of ranks."""
    try:
        return check_collective(generate(operation, algorithm, ranks, root=root))
    except UserError:
        return None


def run_in_small_segments(cases: list[tuple[str, str, int, int, str]]) -> int:
    usual = cutting.SEGMENT_BYTES, cutting.CHUNK_BYTES
    cutting.SEGMENT_BYTES, cutting.CHUNK_BYTES = 2**12, 2**9
    try:
        return run_all(cases)
    finally:
        cutting.SEGMENT_BYTES, cutting.CHUNK_BYTES = usual


@pytest.mark.parametrize("ranks", [2, 3, 4, *exhaustive(5)])
def test_every_algorithm_of_the_library_is_exact(ranks: int):
    cases = [(*which, 0, 840 * ranks, "int64") for which in EVERY]
    uneven = [(*which, ranks - 1, 13 * ranks, "bfloat16") for which in EVERY]
    uneven += [(*which, 0, 7 * ranks + 1, "int64") for which in EVERY if which[0] not in cutting.OWNED]
    with LocalRanks(ranks) as started:
        assert started.run(run_all, uneven)[0] > len(EVERY) / 2
        assert started.run(run_in_small_segments, cases)[0] > len(EVERY) / 2


# --- comparison with torch.distributed


def test_measuring_compares_every_operation_with_torch_distributed():
    with LocalRanks(4) as world:
        for operation, algorithm in dict(reversed(EVERY)).items():
            checked = program_of(operation, algorithm, 4)
            if checked is not None:
                found = measure(checked, 4 * 5040, repeats=1, world=world)
                assert found["exact"]
                assert found["bytes_sent"] == checked.bytes_sent(found["total_bytes"]).tolist()


def test_a_result_that_differs_is_a_failed_check():
    checked = program_of("all-reduce", "ring", 2)
    assert checked is not None
    answer = {"exact": True, "native": "all_reduce", "ours": [1.0], "theirs": [1.0], "bytes_sent": 4, "backend": "gloo"}
    assert combine_answers(checked, 8, [answer, answer])["ratio"] == 1
    with pytest.raises(
        CheckFailed, match="all-reduce ring: the result of rank 1 differs from that of torch.distributed's all_reduce"
    ):
        combine_answers(checked, 8, [answer, answer | {"exact": False}])


@pytest.mark.parametrize(
    ("ranks", "size", "said"),
    [
        (17, 1024, "17 ranks: this machine runs a program on at most 16 processes; use fewer ranks"),
        (16, 1e13, "16 ranks with 10,000,000,000,000 bytes each need about .* GiB, and this machine has"),
        (2, -4, "bytes must be at least 0, not -4"),
    ],
)
def test_excessive_process_count_is_refused(ranks: int, size: float, said: str):
    checked = program_of("all-reduce", "ring", ranks)
    assert checked is not None
    with pytest.raises(UserError, match=said):
        measure(checked, size)


# --- missing peers


def stopped(checked: CheckedCollective, which: int) -> None:
    executable = Executable(checked, timeout_seconds=0.4)
    executable.run(torch.ones(600))
    if executable.rank == which:
        os.kill(os.getpid(), signal.SIGSTOP)
    executable.run(torch.ones(600))


def test_stalled_rank_is_named_by_waiting_ranks():
    checked = program_of("all-reduce", "ring", 3)
    with LocalRanks(3) as ranks, pytest.raises(RankLost) as error:
        ranks.run(stopped, checked, 1, timeout=20)
    assert re.match(
        r"rank (2 waits for rank 1|0 waits for rank [12]): step \d \((reduce|receive|send) data\[\d\] (from|to) \d\) "
        "of all-reduce ring: ",
        str(error.value),
    )


def ended(checked: CheckedCollective, which: int) -> None:
    executable = Executable(checked, timeout_seconds=10)
    if executable.rank == which:
        os._exit(1)
    executable.run(torch.ones(600))


def test_exited_rank_is_named():
    checked = program_of("all-reduce", "ring", 3)
    with LocalRanks(3) as ranks, pytest.raises(RankLost, match="local rank 1 died in"):
        ranks.run(ended, checked, 1, timeout=20)
