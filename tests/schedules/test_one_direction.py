"""Closed forms of the one-direction schedules against simulation. p ranks, m micro-batches, v chunks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from meshwright.program.check_pipeline import check_pipeline
from meshwright.program.pipeline import PipelineProgram
from meshwright.program.simulate_pipeline import Durations, PipelineTiming, simulate_pipeline
from meshwright.schedules.interleaved import interleaved, interleaved_zero_bubble, looped_bfs, split_into_rounds
from meshwright.schedules.synchronous import gpipe, one_f_one_b
from meshwright.schedules.zero_bubble import zb_h1, zb_h2

each_number_of_ranks = pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
ONE_STAGE = (gpipe, one_f_one_b, zb_h1, zb_h2)
CHUNKED = (interleaved, looped_bfs, interleaved_zero_bubble)
TIMES = [(1, 1, 1), (1, 1.5, 0.5), (2, 2.25, 1.5), (1, 1.25, 1)]  # forward f, input gradient i, weight gradient w


def timed(program: PipelineProgram, f: float = 1, i: float = 1, w: float = 1) -> PipelineTiming:
    return simulate_pipeline(program, Durations.per_rank(program, f, i, w))


@pytest.mark.parametrize("generator", [*ONE_STAGE, *CHUNKED])
def test_every_schedule_is_valid_for_any_size(generator: Callable[..., PipelineProgram]):
    for p in (1, 2, 3, 4, 7):
        for m in (1, 2, 3, 5, 8, 13):
            for chunks in (2, 3) if generator in CHUNKED else (1,):
                program = generator(p, m, chunks) if generator in CHUNKED else generator(p, m)
                check_pipeline(program)
                assert np.allclose(timed(program).busy, 3 * m)


@each_number_of_ranks
def test_gpipe_and_1f1b_bubble_matches_closed_form(p: int):
    for m in (1, 2, 3, p, 2 * p + 1):
        for f, i, w in TIMES:
            for generator in (gpipe, one_f_one_b):
                timing = timed(generator(p, m), f, i, w)
                assert timing.makespan == pytest.approx((m + p - 1) * (f + i + w))
                assert timing.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
                assert timing.bubble_to_ideal == pytest.approx((p - 1) / m)


@each_number_of_ranks
def test_gpipe_stores_all_micro_batches_and_1f1b_remaining_stages(p: int):
    for m in (1, 2, p, 2 * p + 1):
        assert timed(gpipe(p, m)).peak_activations.tolist() == [m] * p
        assert timed(one_f_one_b(p, m)).peak_activations.tolist() == [min(m, p - r) for r in range(p)]


@each_number_of_ranks
def test_micro_batch_crosses_each_boundary_twice_per_chunk(p: int):
    m, v = 4, 3
    for generator in ONE_STAGE:
        assert timed(generator(p, m)).messages_sent.sum() == 2 * m * (p - 1)
    for generator in CHUNKED:
        assert timed(generator(p, m, v)).messages_sent.sum() == (2 * m * (v * p - 1) if p > 1 else 0)


@each_number_of_ranks
@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaved_and_looped_bfs_bubble_is_divided_by_chunks(p: int, v: int):
    for m in (p, p + 1, 2 * p - 1, 2 * p, 3 * p + 2):  # also where p does not divide m
        for f, i, w in TIMES:
            for generator in (interleaved, looped_bfs):
                makespan = timed(generator(p, m, v), f, i, w).makespan
                assert makespan == pytest.approx(m * (f + i + w) + (p - 1) * (f + i + w) / v)


@each_number_of_ranks
@pytest.mark.parametrize("v", [2, 3, 4])
def test_peak_of_interleaved(p: int, v: int):
    for m in (p, p + 1, 2 * p, 4 * p):
        g = len(split_into_rounds(p, m)[0])
        peak = timed(interleaved(p, m, v)).peak_activations
        assert peak[0] == pytest.approx(min(m, g - (g + 1 - 2 * p) / v))
        if m % p == 0:
            assert peak == pytest.approx([min(m, p + (p - 1 - 2 * r) / v) for r in range(p)])
            assert peak[0] == pytest.approx(min(m, p * (1 + (p - 1) / (p * v))))  # as Megatron-LM's report has it
        assert timed(looped_bfs(p, m, v)).peak_activations.tolist() == [m] * p


@each_number_of_ranks
@pytest.mark.parametrize("v", [2, 3, 4])
def test_interleaved_zero_bubble_divides_zb_h1_bubble_by_chunks(p: int, v: int):
    for m in (p, p + 1, 2 * p - 1, 2 * p, 3 * p + 2):
        timing, g = timed(interleaved_zero_bubble(p, m, v)), len(split_into_rounds(p, m)[0])
        assert timing.makespan == pytest.approx(3 * m + (p - 1) / v)
        assert timing.peak_activations == pytest.approx([g - (g - p) / v] * p)


@each_number_of_ranks
def test_bubble_of_zb_h1_for_the_memory_of_1f1b(p: int):
    for m in (p, p + 1, 2 * p, 3 * p + 2):
        for f, i, w in TIMES:
            timing = timed(zb_h1(p, m), f, i, w)
            assert timing.makespan == pytest.approx(m * (f + i + w) + (p - 1) * (f + i - w))
            assert timing.peak_activations.tolist() == [p] * p


@each_number_of_ranks
def test_zb_h2_ranks_are_never_idle_between_ends(p: int):
    for m in (2 * p - 1, 2 * p, 3 * p + 2):
        program = zb_h2(p, m)
        timing = timed(program)
        assert timing.idle.tolist() == [0] * p
        first = [timing.start[program.steps.of_rank(rank)[0]] for rank in range(p)]
        last = [timing.end[program.steps.of_rank(rank)[-1]] for rank in range(p)]
        assert first == list(range(p))
        assert last == [3 * m + rank for rank in range(p)]
        assert timing.peak_activations.tolist() == [2 * p - 1] * p


@each_number_of_ranks
def test_zb_h2_idle_time_for_unequal_durations_matches_paper(p: int):
    for m in (2 * p - 1, 2 * p, 3 * p + 2):
        for f, i, w in TIMES:
            timing = timed(zb_h2(p, m), f, i, w)
            assert timing.idle == pytest.approx([(p - 1 - rank) * (f + i - 2 * w) for rank in range(p)])
            assert timing.makespan == pytest.approx(m * (f + i + w) + (p - 1) * max(f, f + i - 2 * w))


@each_number_of_ranks
def test_later_zero_bubble_schedules_are_no_worse(p: int):
    for m in range(1, 2 * p):
        f1b1, h1, h2 = (timed(generator(p, m)) for generator in (one_f_one_b, zb_h1, zb_h2))
        assert h2.makespan <= h1.makespan <= f1b1.makespan
        assert (h1.peak_activations <= min(m, p)).all() and (h2.peak_activations <= min(m, 2 * p - 1)).all()
