"""Step orders equal those of PyTorch's generators, and CSVs are exchanged with its runtime in both directions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    _get_1f1b_rank_ops,
    _PipelineScheduleRuntime,
    _simulate_comms_compute,
)

from meshwright.program.check_pipeline import check_pipeline
from meshwright.program.order import ProgramError
from meshwright.program.pipeline import PipelineProgram
from meshwright.schedules.interleaved import interleaved, interleaved_zero_bubble, looped_bfs, split_into_rounds
from meshwright.schedules.pytorch_csv import from_csv, to_csv
from meshwright.schedules.synchronous import gpipe, one_f_one_b
from meshwright.schedules.zero_bubble import zb_h1, zb_h2
from tests.conftest import exhaustive

each_number_of_ranks = pytest.mark.parametrize("ranks", [2, 3, 4, 8])


def rows(program: PipelineProgram) -> list[list[str]]:
    """Return our steps, rank by rank, in PyTorch's notation."""
    return [[program.describe(step) for step in program.steps.of_rank(rank)] for rank in range(program.ranks)]


def torch_rows(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> list[list[str]]:
    """Return PyTorch's steps without idle slots and reductions of gradients."""
    listed = get_schedule_ops(name, ranks, micro_batches, num_stages_per_rank=chunks)
    return [[str(step) for step in row if step and "REDUCE" not in str(step)] for row in listed]


@each_number_of_ranks
def test_gpipe_is_pytorchs(ranks: int):
    for m in (1, 2, 5, 16):
        assert rows(gpipe(ranks, m)) == torch_rows("GPipe", ranks, m)


@each_number_of_ranks
def test_1f1b_matches_pytorch_except_its_last_rank(ranks: int):
    for m in (ranks, ranks + 1, 2 * ranks, 16):
        ours, theirs = rows(one_f_one_b(ranks, m)), torch_rows("1F1B", ranks, m)
        assert theirs[:-1] == ours[:-1]
        last = ranks - 1
        assert theirs[-1] == [step if "B" in step else f"{last}F{int(step.partition('F')[2]) + 1}" for step in ours[-1]]


@each_number_of_ranks
@pytest.mark.parametrize(
    ("chunks", "micro_batches"),
    [(2, (1, 3, 4, 8, 10, 16)), (3, (1, 3, 4, 8, 10)), *exhaustive((3, (16,)), (4, (1, 3, 4, 8, 10, 16)))],
)
@pytest.mark.parametrize(
    ("name", "generator"),
    [("Interleaved1F1B", interleaved), ("InterleavedZeroBubble", interleaved_zero_bubble), ("LoopedBFS", looped_bfs)],
)
def test_schedules_with_chunks_are_pytorchs(
    ranks: int, name: str, generator: Callable[..., PipelineProgram], chunks: int, micro_batches: tuple[int, ...]
):
    for m in micro_batches:
        if name == "LoopedBFS" or len({len(taken) for taken in split_into_rounds(ranks, m)}) == 1:
            assert rows(generator(ranks, m, chunks)) == torch_rows(name, ranks, m, chunks)


def test_interleaved_takes_numbers_of_micro_batches_that_pytorch_refuses():
    with pytest.raises(ValueError, match="multiple of the number of rounds"):
        torch_rows("Interleaved1F1B", 4, 9)
    assert [len(taken) for taken in split_into_rounds(4, 9)] == [5, 4]
    assert interleaved(4, 9).micro_batches == 9


@each_number_of_ranks
def test_zb_h1_matches_pytorch_interleaved_zero_bubble_one_chunk(ranks: int):
    """PyTorch's class requires two stages per rank; with one, its function generates ZB-H1."""
    for m in (ranks, 2 * ranks + 1):
        for rank, ours in enumerate(rows(zb_h1(ranks, m))):
            warm_up = ranks - 1 - rank
            stage = partial(lambda rank, _: rank, rank)
            theirs = _get_1f1b_rank_ops(1, ranks, warm_up, m - warm_up, warm_up, rank, stage, stage, rank, True)
            assert ours == [str(step) for step in theirs if step]


# --- the CSV


def runtime(program: PipelineProgram) -> Any:
    """Return PyTorch's runtime with stages that compute nothing."""
    stage = SimpleNamespace(group_rank=0, group_size=program.ranks, submod=None, num_stages=program.stages)
    return _PipelineScheduleRuntime([stage] * program.chunks, program.micro_batches)


@pytest.mark.parametrize(
    "program",
    [
        *(gpipe(4, 8), one_f_one_b(3, 5), interleaved(4, 9, 3), looped_bfs(2, 4), interleaved_zero_bubble(4, 8)),
        *(zb_h1(4, 8), zb_h2(4, 9)),
    ],
    ids=lambda program: program.name,
)
def test_pytorch_loads_and_simulates_our_csv(program: PipelineProgram, tmp_path: Path):
    (tmp_path / "schedule.csv").write_text(to_csv(program))
    loaded = runtime(program)
    loaded._load_csv(str(tmp_path / "schedule.csv"))
    assert [[str(step) for step in loaded.pipeline_order[rank]] for rank in range(program.ranks)] == rows(program)
    lowered = {
        rank: [step for step in row if "SHARD" not in str(step) and "REDUCE" not in str(step)]
        for rank, row in loaded.pipeline_order_with_comms.items()
    }
    clocked = _simulate_comms_compute(lowered, lambda stage: program.placement[0][stage], program.stages)
    assert [[step for step in row if step] for row in clocked.values()] == list(lowered.values())


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(ScheduleInterleaved1F1B, interleaved(4, 8)), (ScheduleLoopedBFS, looped_bfs(4, 8))],
    ids=["interleaved", "looped-bfs"],
)
def test_pytorch_csv_is_parsed(theirs: Any, ours: PipelineProgram, tmp_path: Path):
    stage = SimpleNamespace(group_rank=0, group_size=ours.ranks, submod=None, num_stages=ours.stages)
    schedule = theirs([stage] * ours.chunks, ours.micro_batches)
    path = tmp_path / "schedule.csv"
    schedule._dump_csv(str(path), format="compute_only")
    read = from_csv(path.read_text())
    assert (read.placement, read.micro_batches) == (ours.placement, ours.micro_batches)
    assert read.steps == ours.steps
    schedule._dump_csv(str(path), format="compute_comms")
    with_transfers = from_csv(path.read_text())
    assert with_transfers.has_transfers
    computing = [[step for step in row if "_" not in step] for row in rows(with_transfers)]
    assert computing == rows(ours)
    theirs_with = [[str(step) for step in schedule.pipeline_order_with_comms[rank]] for rank in range(ours.ranks)]
    kept = [[step for step in row if "SHARD" not in step and "REDUCE" not in step] for row in theirs_with]
    assert rows(with_transfers) == kept


@each_number_of_ranks
def test_check_reports_nonexistent_micro_batch_in_pytorch_1f1b_listing(ranks: int):
    m = ranks + 2
    text = "\n".join(",".join(row) for row in torch_rows("1F1B", ranks, m))
    with pytest.raises(ProgramError, match=rf"rank {ranks - 1}, .*there is no micro-batch {m}"):
        check_pipeline(from_csv(text))
