"""Collective programs as they run: every algorithm of the library, exact on whole numbers, on several ranks."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from meshwright.collectives.library import ALGORITHMS, generate
from meshwright.comm import programs
from meshwright.comm.local import LocalRanks
from meshwright.comm.programs import Executable
from meshwright.errors import UserError
from meshwright.program.check_collective import CheckedCollective, check_collective

EVERY = [(operation, algorithm) for operation, named in ALGORITHMS.items() for algorithm in named]


def values(rank: int, numel: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """What a rank puts in: small whole numbers, so that sums are exact in every dtype."""
    return torch.randint(-9, 10, (numel,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def expected(operation: str, rank: int, ranks: int, root: int, everybody: torch.Tensor) -> tuple[slice, torch.Tensor]:
    """The part of a rank's vector that the operation promises, and what stands there: by definition, in one process.
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


def run_and_compare(checked: CheckedCollective, numel: int, dtype: torch.dtype, runs: int = 2) -> None:
    """Run a program and compare with the definition; in all-reduce, all ranks must have the same bits."""
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
    """None where an algorithm does not take so many ranks."""
    try:
        return check_collective(generate(operation, algorithm, ranks, root=root))
    except UserError:
        return None


def run_in_small_segments(cases: list[tuple[str, str, int, int, str]]) -> int:
    programs.SEGMENT_BYTES, programs.CHUNK_BYTES = 2**12, 2**9
    try:
        return run_all(cases)
    finally:
        programs.SEGMENT_BYTES, programs.CHUNK_BYTES = 2**22, 2**18


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_every_algorithm_of_the_library_is_exact(ranks: int):
    lengths = (ranks, 13 * ranks * ranks, 840 * ranks)
    cases = [(*which, 0, numel, "int64") for which in EVERY for numel in lengths]
    cases += [(*which, 0, 7 * ranks + 1, "int64") for which in EVERY if which[0] not in programs.OWNED]
    cases += [(*which, ranks - 1, 60 * ranks, "bfloat16") for which in EVERY]
    with LocalRanks(ranks) as started:
        assert started.run(run_all, cases)[0] > len(EVERY)
        assert started.run(run_in_small_segments, cases)[0] > len(EVERY)
