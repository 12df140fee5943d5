"""Explicit transfers: programs end even if sends block, and no step runs later than without them."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import UserError
from meshwright.program.check_pipeline import check_pipeline
from meshwright.program.order import ProgramError
from meshwright.program.pipeline import ARRIVING, COMPUTING, SENDING, Kind, PipelineProgram
from meshwright.program.pipeline_text import parse_pipeline
from meshwright.program.simulate_pipeline import Durations, simulate_pipeline
from meshwright.schedules.library import generate
from meshwright.schedules.named import SCHEDULES
from meshwright.schedules.transfers import with_transfers
from tests.program.pipeline_interpreter import random_program, rows_of, with_rows

GRID = [(1, 3), (2, 2), (3, 7), (4, 8), (5, 9)]


def programs(name: str) -> list[PipelineProgram]:
    """Return the schedule for all tested sizes that it accepts."""
    found = []
    for ranks, micro_batches in GRID:
        try:
            found.append(generate(name, ranks, micro_batches))
        except UserError:
            continue
    assert found
    return found


def uneven(program: PipelineProgram, seed: int, transfer: float) -> Durations:
    """Return random durations per stage and, up to `transfer`, per boundary."""
    numbers = np.random.default_rng(seed)
    forward, inputs, weights = numbers.uniform(0.1, 2, (3, program.stages))
    return Durations(forward, inputs, weights, numbers.uniform(0, transfer, program.stages - 1))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_completes_with_blocking_sends_at_same_time(name: str) -> None:
    for program in programs(name):
        peaks = check_pipeline(program).peak_activations.tolist()
        for durations in (Durations.per_rank(program), uneven(program, 1, 1), Durations(1, 0, 0, transfer=2)):
            written = with_transfers(program, durations)
            assert check_pipeline(written).peak_activations.tolist() == peaks
            before, after = simulate_pipeline(program, durations), simulate_pipeline(written, durations)
            assert after.makespan == before.makespan
            assert after.messages_sent.tolist() == before.messages_sent.tolist()


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.floats(0, 3))
def test_added_transfers_delay_no_step(seed: int, transfer: float) -> None:
    program = random_program(random.Random(seed))
    durations = uneven(program, seed, transfer)
    written = with_transfers(program, durations)
    check_pipeline(written)
    computes = written.steps.has_kind(COMPUTING)
    before, after = simulate_pipeline(program, durations), simulate_pipeline(written, durations)
    assert after.start[computes].tolist() == before.start.tolist()


@pytest.mark.parametrize("name", SCHEDULES)
def test_removing_transfers_restores_program(name: str) -> None:
    program = generate(name, 4, 8)
    written = with_transfers(program)
    kept = [row for row in rows_of(written) if row[2] <= Kind.UPDATE]
    assert with_rows(written, kept) == program
    s = written.steps
    assert int(s.has_kind(SENDING).sum()) == int(s.has_kind(ARRIVING).sum()) == simulated_messages(program)


def simulated_messages(program: PipelineProgram) -> int:
    """Return the number of messages by the placement: forward and backward at every boundary between two ranks."""
    s = program.steps
    run = [{int(m) for m in s.micro_batch[s.replica == replica]} for replica in range(program.replicas)]
    borders = [sum(a != b for a, b in pairwise(stages)) for stages in program.placement]
    return sum(2 * len(m) * b for m, b in zip(run, borders, strict=True))


def test_message_is_sent_when_produced() -> None:
    program = generate("zb-v", 4, 8)
    durations = uneven(program, 0, 0.3)
    written = with_transfers(program, durations)
    timing = simulate_pipeline(written, durations)
    s = written.steps
    made = {
        (int(s.kind[i] != Kind.FORWARD), int(s.stage[i]), int(s.micro_batch[i])): timing.end[i]
        for i in np.flatnonzero(s.has_kind((Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT)))
    }
    for send in np.flatnonzero(s.has_kind(SENDING)):
        key = (int(s.kind[send] == Kind.SEND_BACKWARD), int(s.stage[send]), int(s.micro_batch[send]))
        assert timing.start[send] == made[key]


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "dualpipe", "zb-h2"])
def test_early_posted_receive_does_not_delay_rank(name: str) -> None:
    """Even if receives block, the next computation starts no earlier than the value arrives."""
    program = generate(name, 4, 8)
    durations = uneven(program, 3, 0)
    timing = simulate_pipeline(with_transfers(program, durations), durations)
    s = timing.program.steps
    for receive in np.flatnonzero(s.has_kind(ARRIVING)):
        rest = np.flatnonzero((s.rank == s.rank[receive]) & (s.group > s.group[receive]) & s.has_kind(COMPUTING))
        assert timing.start[rest].min() >= timing.end[receive]


def test_transfers_without_computation_between_them_are_grouped() -> None:
    for name in ("1f1b", "dualpipe", "interleaved"):
        s = with_transfers(generate(name, 4, 8)).steps
        transfer = s.kind >= Kind.SEND_FORWARD
        next_to = (s.rank[1:] == s.rank[:-1]) & transfer[1:] & transfer[:-1]
        assert (s.group_index[1:][next_to] == s.group_index[:-1][next_to]).all()


def test_transfers_are_added_once() -> None:
    written = with_transfers(generate("1f1b", 4, 8))
    assert with_transfers(written) is written


def test_a_program_that_cannot_run_is_refused() -> None:
    cycle = parse_pipeline(
        "pipeline x\nranks 2\nmicro-batches 2\nplacement 0 1\nrank 0\n0F0\n0B0\n0F1\n0B1\nrank 1\n1F1\n1F0\n1B0\n1B1\n"
    )
    with pytest.raises(ProgramError, match="deadlock"):
        with_transfers(cycle)
