"""Closed forms of the V-shaped and bidirectional schedules against simulation. p ranks, m micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from meshwright.errors import UserError
from meshwright.program.check_pipeline import check_pipeline
from meshwright.program.pipeline import PipelineProgram, build_program
from meshwright.program.simulate_pipeline import Durations, PipelineTiming, simulate_pipeline
from meshwright.schedules.chimera import chimera
from meshwright.schedules.dualpipe import dualpipe
from meshwright.schedules.dualpipe_v import dualpipe_v
from meshwright.schedules.gems import gems
from meshwright.schedules.synchronous import one_f_one_b
from meshwright.schedules.v_shape import v_half, v_min
from meshwright.schedules.zb_v import zb_v


def timed(
    program: PipelineProgram, f: float = 1, i: float = 1, w: float = 1, overlapped: float | None = None
) -> PipelineTiming:
    return simulate_pipeline(program, Durations.per_rank(program, f, i, w, overlapped=overlapped))


def bubble(timing: PipelineTiming) -> float:
    """Return the idle time of the makespan of the rank that computes least."""
    return float(timing.makespan - timing.busy.min())


@pytest.mark.parametrize("generator", [zb_v, v_half, v_min])
def test_v_schedules_are_valid_for_any_size(generator: Callable[..., PipelineProgram]):
    for p in (1, 2, 3, 4, 5, 6, 7, 9):
        for m in (1, 2, 3, 5, 8, 13, 20):
            program = generator(p, m)
            check_pipeline(program)
            timing = timed(program)
            assert np.allclose(timing.busy, 3 * m)
            assert timing.weight_copies.tolist() == [1] * p


@pytest.mark.parametrize("generator", [dualpipe, chimera, gems])
def test_bidirectional_schedules_are_valid_for_supported_sizes(generator: Callable[..., PipelineProgram]):
    for p in (2, 4, 6, 8) if generator is not gems else (1, 2, 3, 4, 7):
        for m in (2 * p, 2 * p + 2, 5 * p + p % 2) if generator is dualpipe else (2, 4, p + p % 2, 2 * p + 2, 4 * p):
            program = generator(p, m)
            check_pipeline(program)
            timing = timed(program)
            assert np.allclose(timing.busy, 3 * m)
            assert timing.weight_copies.tolist() == [2] * p


def test_dualpipe_v_is_valid_with_one_copy_of_weights():
    for p in (1, 2, 3, 4, 5):
        for m in (2 * p, 2 * p + 1, 4 * p):
            program = dualpipe_v(p, m)
            check_pipeline(program)
            assert timed(program).weight_copies.tolist() == [1] * p


def test_v_schedules_send_twice_1f1b_and_bidirectional_no_more():
    p, m = 4, 8
    once = timed(one_f_one_b(p, m)).messages_sent.sum()
    for generator in (zb_v, v_half, v_min, dualpipe_v):
        assert timed(generator(p, m)).messages_sent.sum() == 2 * once
    for generator in (dualpipe, chimera, gems):
        assert timed(generator(p, m)).messages_sent.sum() == once


@pytest.mark.parametrize("p", [2, 3, 4, 5, 8])
def test_zb_v_idles_only_at_start_with_1f1b_memory(p: int):
    for m in (2 * p, 3 * p + 1):
        timing = timed(zb_v(p, m))
        assert bubble(timing) == (p - 1) / 2
        assert timing.idle.tolist() == [0] * p
        assert timing.peak_activations.tolist() == [p] * p


@pytest.mark.parametrize("p", [2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 17, 24])
def test_v_half_activations_and_bubble_are_half_of_1f1b(p: int):
    expected = 0.5 if p == 2 else (3 * p - (4 if p % 2 else 7)) / 2
    assert expected <= 3 * (p - 1) / 2
    for m in (p, p + 1, 3 * p):
        timing = timed(v_half(p, m))
        assert bubble(timing) == expected
        assert timing.peak_activations.max() == (p + 2) // 2


@pytest.mark.parametrize("p", [2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 17, 24])
def test_v_min_activations_and_bubble_match_paper(p: int):
    expected = 1 if p == 2 else 2 * p - (2.5 if p % 3 else 3.5)
    assert expected <= 2 * (p - 1)
    for m in (2 * p, 2 * p + 1, 3 * p):
        timing = timed(v_min(p, m))
        assert bubble(timing) == expected
        assert timing.peak_activations.max() == (p + 4) // 3


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1.2, 0.5), (1, 1, 0), (1, 1.5, 1), (1.5, 1, 1), (1, 1.3, 0.6)])
def test_v_half_has_no_steady_state_bubble(f: float, i: float, w: float):
    assert w + 2 * i >= 2 * f and w + 2 * f >= 2 * i
    for p in (4, 5, 8):
        short, long = (bubble(timed(v_half(p, m), f, i, w)) for m in (4 * p, 8 * p))
        assert long == pytest.approx(short)


def test_v_half_has_bubble_where_its_paper_claims():
    f, i, w = 1, 1.6, 0.4
    assert w + 2 * f < 2 * i
    short, long = (bubble(timed(v_half(8, m), f, i, w)) for m in (32, 64))
    assert long > short + 1


@pytest.mark.parametrize("p", [2, 4, 6, 8, 10])
def test_dualpipe_bubble_matches_published_one(p: int):
    """(p/2 - 1)(F&B + B - 3W), exact where forward = input gradient >= weight gradient."""
    for m in (2 * p, 2 * p + 4):
        for f, w in ((1, 1), (1, 0.5), (2, 1.5)):
            backward = f + w
            for overlapped in (2 * f, backward + f / 2 + w / 2, f + backward):
                timing = timed(dualpipe(p, m), f, f, w, overlapped)
                assert bubble(timing) == pytest.approx((p / 2 - 1) * (overlapped + backward - 3 * w))
                assert timing.peak_activations.tolist() == [p + 1] * p


@pytest.mark.parametrize("p", [2, 3, 4, 5])
def test_dualpipe_v_is_dualpipe_on_half_the_ranks(p: int):
    for m in (2 * p, 2 * p + 3):
        for f, w, overlapped in ((1, 1, 2.5), (1, 0.5, 2), (1, 1, 3)):
            timing = timed(dualpipe_v(p, m), 2 * f, 2 * f, 2 * w, 2 * overlapped)  # a rank holds two stages
            twice = timed(dualpipe(2 * p, 2 * m), f, f, w, overlapped)
            assert timing.makespan == pytest.approx(twice.makespan)
            assert timing.busy.tolist() == pytest.approx(twice.busy[:p].tolist())
            assert timing.peak_activations.tolist() == [p + 0.5] * p


def one_after_the_other(program: PipelineProgram) -> PipelineProgram:
    """Return the same order with every step in a separate group."""
    s = program.steps
    columns = (s.rank, np.arange(len(s)), s.kind, s.stage, s.replica, s.micro_batch, s.component)
    return build_program(
        program.name, program.ranks, program.micro_batches, program.placement, np.stack(columns, axis=1)
    )


@pytest.mark.parametrize("p", [2, 4, 8])
def test_dualpipe_v_bubble_halves_when_forward_is_sent_first(p: int):
    program = dualpipe_v(p, 3 * p)
    assert bubble(timed(program)) == p - 1
    assert bubble(timed(one_after_the_other(program))) == (p - 1) / 2


@pytest.mark.parametrize("d", [2, 4, 6, 8])
def test_chimera_has_the_figures_of_its_table_2(d: int):
    """D ranks, N micro-batches, a backward as long as a forward; more micro-batches than ranks in whole units."""
    for n in (d, 2 * d, 4 * d):
        timing = timed(chimera(d, n), 1, 0.5, 0.5)
        assert timing.bubble_fraction == pytest.approx((d - 2) / (2 * n + d - 2))
        expected = [d / 2 + 1 + min(rank, d - 1 - rank) for rank in range(d)]
        assert timing.peak_activations.tolist() == expected
        assert min(expected) == d / 2 + 1 and max(expected) == d


@pytest.mark.parametrize("d", [2, 4, 6, 8])
def test_chimera_unit_bubble_for_double_backward_matches_closed_form(d: int):
    assert timed(chimera(d, d)).bubble_fraction == pytest.approx((d - 2) / (1.5 * d + d - 2))


@pytest.mark.parametrize("d", [2, 4, 6, 8])
def test_chimera_with_forward_doubling_has_no_bubble_between_units(d: int):
    for n in (2 * d, 4 * d, 8 * d):
        program = chimera(d, n, forward_doubling=True)
        check_pipeline(program)
        timing = timed(program)
        assert timing.bubble_fraction == pytest.approx((d - 2) / (2 * n + d - 2))
        assert timing.peak_activations.min() == 1.5 * d + 1 and timing.peak_activations.max() == 2 * d
        assert d == 2 or timing.makespan < timed(chimera(d, n)).makespan


@pytest.mark.parametrize("d", [2, 3, 4, 8])
def test_gems_has_the_figures_of_chimeras_table_2(d: int):
    n = 400
    timing = timed(gems(d, n))
    assert timing.bubble_fraction == pytest.approx((d - 1) / (d + 0.5), abs=0.01)
    assert timed(gems(d, n), 1, 0.5, 0.5).bubble_fraction == pytest.approx((d - 1) / (d + 1), abs=0.01)
    assert timing.peak_activations.tolist() == [1] * d


def test_gems_has_at_most_two_micro_batches_in_flight():
    program = gems(4, 12)
    timing = timed(program)
    s = program.steps
    spans = [(timing.start[s.micro_batch == m].min(), timing.end[s.micro_batch == m].max()) for m in range(12)]
    assert max(sum(start <= at < end for start, end in spans) for at, _ in spans) == 2


@pytest.mark.parametrize(
    ("make", "ranks", "micro_batches", "right"),
    [
        (chimera, 3, 6, "the number of ranks must be even"),
        (chimera, 4, 5, "the number must be even"),
        (gems, 4, 5, "the number must be even"),
    ],
)
def test_numbers_that_cannot_be_halved_are_refused(make, ranks: int, micro_batches: int, right: str):
    with pytest.raises(UserError, match=right):
        make(ranks, micro_batches)
