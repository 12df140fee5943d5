"""Vectorized makespans are bitwise equal to those of the simulator."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.errors import UserError
from meshwright.names import SCHEDULE_CHUNKS
from meshwright.program import makespan
from meshwright.program.durations import Durations
from meshwright.program.makespan import MakespanCache, compute_makespans
from meshwright.program.order import ProgramError
from meshwright.program.pipeline import Builder, PipelineProgram, place_cyclically
from meshwright.program.simulate_pipeline import simulate_pipeline
from meshwright.schedules.library import generate
from meshwright.schedules.named import SCHEDULES
from meshwright.schedules.transfers import with_transfers

RANDOM = np.random.default_rng(5)


def some(program: PipelineProgram, count: int) -> list[Durations]:
    """Return durations that differ for all stages and stage boundaries."""
    replicas, stages = program.replicas, program.stages
    return [
        Durations(
            *(RANDOM.random((replicas, stages)) for _ in range(3)),
            RANDOM.random((replicas, stages - 1)), RANDOM.random(), RANDOM.random(stages) if number % 2 else None,
        )
        for number in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 9), (4, 8), (6, 30)])
def test_wave_by_wave_is_rank_after_rank(name: str, ranks: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(makespan, "SERIAL_LIMIT", 0)
    if SCHEDULE_CHUNKS[name][0] == 2 or micro_batches % 2 == 0:
        program = generate(name, ranks, micro_batches + micro_batches % 2)
        durations = some(program, 3)
        alone = [simulate_pipeline(program, each).makespan for each in durations]
        assert compute_makespans(program, durations).tolist() == alone
        assert compute_makespans(program, durations[:1]).tolist() == alone[:1]


def test_cached_and_direct_makespans_are_equal(monkeypatch: pytest.MonkeyPatch):
    program = generate("zb-v", 4, 8)
    durations = some(program, 2)
    few = compute_makespans(program, durations).tolist()
    written = compute_makespans(with_transfers(program), durations).tolist()
    monkeypatch.setattr(makespan, "SERIAL_LIMIT", 0)
    assert few == compute_makespans(program, durations).tolist() == written


def test_known_makespan_is_not_recomputed(monkeypatch: pytest.MonkeyPatch):
    program = generate("1f1b", 4, 8)
    first, second = some(program, 2)
    known = MakespanCache()
    known.compute(program, [first, second])
    monkeypatch.setattr(makespan, "compute_makespans", lambda *_: pytest.fail("asked again"))
    assert known.get(generate("1f1b", 4, 8), second) == simulate_pipeline(program, second).makespan
    assert known.get(program, first) == simulate_pipeline(program, first).makespan


def test_ranks_that_wait_in_a_circle_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(makespan, "SERIAL_LIMIT", 0)
    builder = Builder("stuck", 2, 2, (place_cyclically(2),))
    for rank, order in zip(builder.ranks, ((0, 1), (1, 0)), strict=True):
        for m in order if rank.rank == 0 else order[:1]:
            rank.forward(m)
            rank.backward(m)
        for m in order[1:] if rank.rank else ():
            rank.forward(m)
            rank.backward(m)
    with pytest.raises(ProgramError, match="deadlock"):
        compute_makespans(builder.build(), [Durations(1.0, 1.0, 1.0)])


def test_times_beyond_all_numbers_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(makespan, "SERIAL_LIMIT", 0)
    with pytest.raises(UserError, match="use a larger unit of time"):
        compute_makespans(generate("1f1b", 4, 8), [Durations(1e308, 1e308, 1e308)])
