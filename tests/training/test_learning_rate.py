"""The learning rate of every schedule at its corners and in between, against its closed form."""

from __future__ import annotations

import math

import pytest

from meshwright.recipe import TrainRecipe
from meshwright.training.learning_rate import learning_rate

PEAK = 2e-3


def rates(schedule: str, steps: int = 101, **changes) -> list[float]:
    train = TrainRecipe(steps=steps, batch=1, learning_rate=PEAK, schedule=schedule, **changes)
    return [learning_rate(step, train) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_warm_up_rises_linearly_to_peak(schedule):
    found = rates(schedule, warmup=10)
    assert found[:11] == pytest.approx([PEAK * part / 11 for part in range(1, 12)])
    assert found[10] == max(found) == PEAK
    assert found[9] < PEAK


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_last_step_has_the_minimum(schedule):
    assert rates(schedule)[-1] == pytest.approx(PEAK * 0.1)
    assert rates(schedule, minimum_learning_rate=0.0)[-1] == pytest.approx(0.0, abs=1e-18)
    assert rates(schedule, minimum_learning_rate=1.0) == pytest.approx([PEAK] * 101)


def test_cosine_follows_half_a_wave():
    found = rates("cosine", minimum_learning_rate=0.0)
    assert found == pytest.approx([PEAK * math.cos(math.pi * step / 200) ** 2 for step in range(101)], abs=1e-15)
    shifted = rates("cosine", steps=121, warmup=20, minimum_learning_rate=0.0)
    assert shifted[20:] == pytest.approx(found)


def test_linear_schedule_decreases_in_equal_steps():
    found = rates("linear", minimum_learning_rate=0.2)
    assert found == pytest.approx([PEAK * (1 - 0.8 * step / 100) for step in range(101)])


def test_wsd_stays_and_falls_over_its_last_decay_steps():
    found = rates("wsd", warmup=5, decay=20, minimum_learning_rate=0.0)
    assert found[5:81] == [PEAK] * 76
    assert found[81:] == pytest.approx([PEAK * (1 - part / 20) for part in range(1, 21)], abs=1e-15)
    assert rates("wsd", decay=1)[-2:] == pytest.approx([PEAK, PEAK * 0.1])
    assert rates("wsd", steps=4, decay=4, minimum_learning_rate=0.0) == pytest.approx(
        [PEAK * 0.75, PEAK * 0.5, PEAK * 0.25, 0.0], abs=1e-15
    )


def test_constant_learning_rate_does_not_change():
    assert rates("constant") == [PEAK] * 101


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_one_step_and_all_warm_up_runs_work(schedule):
    assert rates(schedule, steps=1) == [PEAK]
    assert rates(schedule, steps=3, warmup=3) == pytest.approx([PEAK / 4, PEAK / 2, PEAK * 3 / 4])


def test_learning_rate_stays_at_minimum_after_last_step():
    train = TrainRecipe(steps=10, batch=1, learning_rate=PEAK)
    assert learning_rate(50, train) == pytest.approx(PEAK * 0.1)
