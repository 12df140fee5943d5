"""Reading and writing PyTorch's CSV, and its errors, without PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.errors import UserError
from meshwright.program.check_pipeline import check_pipeline
from meshwright.program.order import ProgramError
from meshwright.program.pipeline import COMPUTING, PipelineProgram
from meshwright.schedules.asynchronous import pipedream
from meshwright.schedules.gems import gems
from meshwright.schedules.interleaved import interleaved, interleaved_zero_bubble, looped_bfs
from meshwright.schedules.pytorch_csv import from_csv, to_csv
from meshwright.schedules.synchronous import gpipe, one_f_one_b
from meshwright.schedules.transfers import with_transfers
from meshwright.schedules.zb_v import zb_v
from meshwright.schedules.zero_bubble import zb_h1, zb_h2

each_program = pytest.mark.parametrize(
    "program",
    [
        *(gpipe(4, 3), one_f_one_b(1, 2), one_f_one_b(4, 8), zb_h1(4, 8), zb_h2(3, 7)),
        *(interleaved(4, 9, 3), looped_bfs(2, 4), interleaved_zero_bubble(4, 8), zb_v(4, 8)),
    ],
    ids=lambda program: f"{program.name}-{program.ranks}",
)


@each_program
def test_csv_round_trips(program: PipelineProgram):
    read = from_csv(to_csv(program))
    assert read.steps == program.steps
    assert (read.ranks, read.micro_batches, read.placement) == (
        program.ranks,
        program.micro_batches,
        program.placement,
    )


@each_program
def test_csv_with_transfers_executes_with_blocking_transfers(program: PipelineProgram):
    """A CSV has no groups, so transfers that were posted together run in sequence."""
    read = from_csv(to_csv(with_transfers(program)))
    check_pipeline(read)
    assert len(read.steps.group_rank) == len(read.steps)
    computing = read.steps.has_kind(COMPUTING)
    for column in ("rank", "kind", "stage", "micro_batch"):
        assert np.array_equal(getattr(read.steps, column)[computing], getattr(program.steps, column))


def test_csv_transfers_gather_stage_first_and_reduce_last():
    assert to_csv(with_transfers(one_f_one_b(2, 1))).splitlines() == [
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD",
        "1RECV_F0,1UNSHARD,1F0,1B0,1REDUCE_GRAD,1RESHARD,1SEND_B0",
    ]


def test_an_overlapped_pair_is_one_cell():
    text = "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1F1,(1F2;1B0)OVERLAP_F_B,1B1,1B2\n"
    program = from_csv(text)
    assert program.steps.group[program.steps.of_rank(1)].tolist() == [0, 1, 2, 2, 3, 4]
    assert to_csv(program) == text


def test_empty_and_sharded_parameter_cells_are_ignored():
    bare = "0F0,0B0\n1F0,1B0\n"
    assert to_csv(from_csv("0UNSHARD,0F0,,,0B0,0REDUCE_GRAD,0RESHARD\r\n,1F0, 1B0\r\n\r\n")) == bare


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", 'pp.csv, row 2, cell 2: "1X0" is no step'),
        ("0F,0B0\n", 'row 1, cell 1: "0F" is no step'),
        ("(0F0;0U0)OVERLAP_F_B\n", 'row 1, cell 1: "0U0" is no step'),
        ("0F0\n0B0\n", "stage 0 is computed on rank 0 and on rank 1"),
        ("0F0,2F0\n", "no rank computes stage 1 of 3"),
        ("0F0,1F0\n2F0\n", "ranks hold 2, 1 stages; all ranks must hold equally many"),
        ("0SEND_F0\n", "no rank computes anything"),
        (",,\n\n", "no rank computes anything"),
        ("", "no rank computes anything"),
        ('"0F0\n', "not a CSV of a schedule"),
        ("999999999F0\n", "no rank computes stage 0"),
    ],
)
def test_csv_without_schedule_is_refused(text: str, message: str):
    with pytest.raises(UserError) as caught:
        from_csv(text, "pp.csv")
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (pipedream(2, 4), "pipedream cannot be written as PyTorch's CSV: its weight updates are asynchronous"),
        (gems(2, 4), "gems cannot be written as PyTorch's CSV: it has 2 replicas"),
    ],
    ids=["pipedream", "gems"],
)
def test_programs_beyond_pytorch_csv_are_refused_with_reason(program: PipelineProgram, message: str):
    with pytest.raises(UserError) as caught:
        to_csv(program)
    assert message in str(caught.value)


def test_check_finds_off_by_one_in_pytorch_1f1b_listing():
    """As `get_schedule_ops("1F1B", 2, 3)` of PyTorch 2.13 lists it: the last rank starts at micro-batch 1."""
    text = "0F0,,,0F1,0B0,0F2,0B1,,0B2\n,1F1,1B0,1F2,1B1,1F3,1B2\n"
    with pytest.raises(ProgramError) as caught:
        check_pipeline(from_csv(text))
    assert str(caught.value) == ("rank 1, step 4 (1F3): there is no micro-batch 3; micro-batches are 0 to 2")
