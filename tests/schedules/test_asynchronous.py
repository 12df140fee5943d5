"""PipeDream and PipeDream-2BW: versions of weights, staleness, and no bubble once the pipeline is full."""

from __future__ import annotations

import numpy as np
import pytest

from meshwright.errors import UserError
from meshwright.program.check_pipeline import check_pipeline
from meshwright.program.pipeline import Kind, PipelineProgram
from meshwright.program.simulate_pipeline import Durations, simulate_pipeline
from meshwright.schedules.asynchronous import pipedream, pipedream_2bw
from meshwright.schedules.synchronous import one_f_one_b

each_number_of_ranks = pytest.mark.parametrize("p", [1, 2, 3, 4, 8])


def versions(program: PipelineProgram, rank: int) -> list[int]:
    """Return, by micro-batch, the last micro-batch whose gradients are in the weights of its forward; -1: none."""
    s = program.steps
    found, newest = [-1] * program.micro_batches, -1
    for step in s.of_rank(rank):
        if s.kind[step] == Kind.UPDATE:
            newest = int(s.micro_batch[step])
        elif s.kind[step] == Kind.FORWARD:
            found[s.micro_batch[step]] = newest
    return found


@each_number_of_ranks
@pytest.mark.parametrize("generator", [pipedream, pipedream_2bw])
def test_pipedream_schedules_are_valid_in_1f1b_order(generator, p: int):
    for m in (p, p + 1, 2 * p, 5 * p + 3):
        program = generator(p, m)
        check_pipeline(program)
        kept = program.steps.kind != Kind.UPDATE
        for column in ("rank", "kind", "stage", "micro_batch"):
            assert np.array_equal(
                getattr(program.steps, column)[kept], getattr(one_f_one_b(p, m).steps, column), column
            )


@each_number_of_ranks
@pytest.mark.parametrize("generator", [pipedream, pipedream_2bw])
def test_no_rank_is_idle_once_the_pipeline_is_full(generator, p: int):
    for F, B in ((1, 2), (1, 1)):
        program = generator(p, 6 * p)
        timing = simulate_pipeline(program, Durations.per_rank(program, F, B / 2, B / 2))
        assert timing.steady_bubble_fraction == pytest.approx(0)


@each_number_of_ranks
def test_pipedream_rank_r_stashes_p_minus_r_versions(p: int):
    program = pipedream(p, 3 * p)
    timing = simulate_pipeline(program, Durations.per_rank(program))
    assert timing.weight_copies.tolist() == [p - r for r in range(p)]
    assert timing.peak_activations.tolist() == [p - r for r in range(p)]


@each_number_of_ranks
def test_pipedream_gradients_are_late_by_remaining_stages(p: int):
    for rank in range(p):
        late = p - 1 - rank
        assert versions(pipedream(p, 3 * p), rank) == [max(m - 1 - late, -1) for m in range(3 * p)]


@each_number_of_ranks
def test_pipedream_2bw_holds_two_versions_on_every_rank(p: int):
    for m in (2 * p, 3 * p, 5 * p + 1):
        program = pipedream_2bw(p, m)
        assert simulate_pipeline(program, Durations.per_rank(program)).weight_copies.tolist() == [2] * p


@each_number_of_ranks
def test_pipedream_2bw_uses_version_of_batch_before_last(p: int):
    """The paper's rule: micro-batch k, counted from 1, uses version max(floor((k - 1) / m') - 1, 0)."""
    batch = p
    expected = [max(k // batch - 1, 0) * batch - 1 for k in range(5 * batch)]
    for rank in range(p):
        assert versions(pipedream_2bw(p, 5 * batch), rank) == expected


def test_pipedream_2bw_refuses_fewer_micro_batches_than_ranks():
    with pytest.raises(UserError, match="pipedream-2bw on 4 ranks needs at least 4 micro-batches, not 3"):
        pipedream_2bw(4, 3)
