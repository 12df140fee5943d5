"""Step-time model on synthetic steps, and the predicted wait against a simulation of every step."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from meshwright.planner.serving.ledger import ServingSizes
from meshwright.serving.replica import PREDICTION_SECONDS, Replica, Stream
from meshwright.serving.request import Request
from meshwright.serving.sampling import Sampling
from meshwright.serving.scheduler import Scheduler
from meshwright.serving.speed import StepTimes, Work


def steps(numbers: random.Random, count: int) -> list[tuple[int, int]]:
    """(tokens, keys) of a server under changing load: decoding sequences, now and then with a chunk of a prompt."""
    made = []
    for _ in range(count):
        sequences, chunk = numbers.randint(1, 32), numbers.choice([0, 0, 0, 128, 480])
        made.append((sequences + chunk, sequences * numbers.randint(50, 800) + chunk * numbers.randint(64, 1000)))
    return made


def seconds_of(tokens: int, keys: int, slowdown: float = 1.0) -> float:
    return slowdown * (0.02 + 2e-4 * tokens + 4e-8 * keys)


def relative_error(times: StepTimes, slowdown: float, numbers: random.Random) -> float:
    """Median over steps."""
    errors = [abs(times.predict(*each) / seconds_of(*each, slowdown) - 1) for each in steps(numbers, 200)]
    return sorted(errors)[100]


@pytest.mark.parametrize("seed", range(4))
def test_noise_and_outliers_leave_the_prediction_within_a_tenth(seed: int):
    numbers, times = random.Random(seed), StepTimes()
    for tokens, keys in steps(numbers, 300):
        disturbed = 50 if numbers.random() < 0.03 else numbers.lognormvariate(0, 0.1)
        times.observe(seconds_of(tokens, keys) * disturbed, tokens, keys)
        assert min(times.coefficients) >= 0
    assert relative_error(times, 1.0, numbers) < 0.1


@pytest.mark.parametrize("slowdown", [3.0, 0.3])
def test_lasting_speed_change_is_learnt_within_150_steps(slowdown: float):
    numbers, times = random.Random(1), StepTimes()
    for factor, count in ((1.0, 200), (slowdown, 150)):
        for tokens, keys in steps(numbers, count):
            times.observe(seconds_of(tokens, keys, factor) * numbers.lognormvariate(0, 0.1), tokens, keys)
    assert relative_error(times, slowdown, numbers) < 0.15


def test_the_first_step_already_gives_a_prediction():
    times = StepTimes()
    assert times.predict(1, 100) == 0
    times.observe(0.03, 4, 400)
    assert times.predict(4, 400) == pytest.approx(0.03)


def simulate_ends(times: StepTimes, works: list[Work], places: int, budget: int, groups: int) -> list[float]:
    """Step by step: each step decodes a token of every running sequence of a group whose prompt is computed, and
    computes `budget` tokens of the group's prompts, the oldest first."""
    seconds, queue, slot, ends = 0.0, list(works), 0, list[float]()
    active: list[list[int]] = []
    while queue or active:
        sizes = [sum(each[3] == group for each in active) for group in range(groups)]
        while queue and len(active) < places and sizes[slot] <= min(sizes):
            active.append([*queue.pop(0), slot])
            sizes[slot] += 1
        tokens = keys = 0
        left = budget
        for each in (each for each in active if each[3] == slot):
            count = min(each[0], left) if each[0] else 1
            left -= count if each[0] else 0
            tokens += count
            keys += sum(range(each[2] + 1, each[2] + count + 1))
            each[2] += count
            each[1] -= each[0] <= count and count > 0
            each[0] -= min(each[0], count)
        seconds += times.predict(tokens, keys)
        ends += [seconds for each in active if each[1] <= 0]
        active, slot = [each for each in active if each[1] > 0], (slot + 1) % groups
    return ends


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("longest", [40, 300, 3000])
def test_predicted_ends_are_within_20_percent_of_simulation(longest: int, groups: int):
    """Long prompts take all tokens of the steps, so that places are full of sequences that wait for their prompts."""
    numbers, times = random.Random(longest), StepTimes()
    for tokens, keys in steps(numbers, 200):
        times.observe(seconds_of(tokens, keys), tokens, keys)

    def draw(prompt_done: bool) -> Work:
        prompt = numbers.randint(10, longest)
        return Work(0 if prompt_done else prompt, numbers.randint(1, 200), prompt if prompt_done else 0)

    works = [draw(number < 10) for number in range(16 + numbers.randint(5, 100))]
    predicted = times.predict_ends(works, 16, 512, groups)
    simulated = simulate_ends(times, works, 16, 512, groups)
    assert len(predicted) == len(simulated) == len(works)
    for place in (3, 10, len(works) // 2, -1):
        assert predicted[place] == pytest.approx(simulated[place], rel=0.2)


def test_prompts_beyond_the_budget_of_a_step_delay_no_end_of_decoding_sequences():
    """Two sequences decode, and two prompts of six steps each are computed meanwhile; the first ends in two steps."""
    times = StepTimes()
    times.observe(1.0, 1, 1)  # each step takes a second
    assert times.predict_ends([Work(0, 2), Work(0, 9), Work(600, 4), Work(600, 4)], 4, 100) == pytest.approx(
        [2, 9, 9, 15]
    )


def test_each_step_of_a_pipeline_ends_sequences_of_one_group():
    """Three stages, steps of a second: six sequences with one token left end two a step, not all with the third."""
    times = StepTimes()
    times.observe(1.0, 1, 1)
    assert times.predict_ends([Work(0, 1)] * 6, 8, 100, groups=3) == pytest.approx([1, 1, 2, 2, 3, 3])


def replica_with_queue(prompt: int, running: int = 4, queued: int = 3) -> Replica:
    """A replica of known speed that runs `running` sequences and queues `queued` prompts."""
    replica, numbers = Replica(0), random.Random(0)
    for tokens, keys in steps(numbers, 200):
        replica.step_times.observe(seconds_of(tokens, keys), tokens, keys)
    for number in range(running + queued):
        request = Request(str(number), (1,) * (10 if number < running else prompt), Sampling(max_tokens=40))
        stream = Stream(request, lambda output: None)
        stream.tokens = [1] * (5 * number + 1) if number < running else []
        replica.streams[str(number)] = stream
    replica.take_report({"seconds": 0.0, "places": running, "prompt_tokens": 512})
    return replica


def test_predicted_ends_are_those_of_unfinished_requests_and_reused_for_a_while(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    replica = replica_with_queue(100)
    ends = list(replica.predict_ends())
    assert ends == sorted(ends) and len(set(ends)) == len(ends) == 7 and ends[0] > 100
    now += PREDICTION_SECONDS / 2
    del replica.streams["6"]
    assert replica.predict_ends() == ends
    now += PREDICTION_SECONDS
    assert len(replica.predict_ends()) == 6
    replica.streams.clear()
    assert replica.predict_ends() == []


def test_only_the_first_ends_of_a_long_queue_are_predicted(monkeypatch: pytest.MonkeyPatch):
    """Those are the same as without the limit, whose prediction takes longer."""
    found = []
    for limit in (10, 10_000):
        monkeypatch.setattr("meshwright.serving.replica.MAX_PREDICTED", limit)
        found.append(replica_with_queue(100, queued=200).predict_ends()[:20])
    assert (len(found[0]), len(found[1])) == (10, 20)
    assert [each - found[0][0] for each in found[0]] == pytest.approx([each - found[1][0] for each in found[1][:10]])


def test_predictions_take_a_fiftieth_of_the_time(monkeypatch: pytest.MonkeyPatch):
    """A prediction takes a second, and the front asks for one every tenth of a second."""
    replica, now = replica_with_queue(100), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    predict = replica.step_times.predict_ends
    predicted = []

    def predict_slowly(*arguments: Any) -> list[float]:
        nonlocal now
        now += 1.0
        predicted.append(now)
        return predict(*arguments)

    monkeypatch.setattr(replica.step_times, "predict_ends", predict_slowly)
    for _ in range(900):
        now += 0.1
        replica.predict_ends()
    assert len(predicted) == 2


def test_ends_that_have_passed_are_not_predicted_again(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    replica = replica_with_queue(100)
    ends = list(replica.predict_ends())
    replica.last_message = (ends[1] + ends[2]) / 2
    assert replica.predict_ends() == ends[2:]


def test_predicted_ends_depend_on_prompts_of_the_queue():
    short, long = (replica_with_queue(prompt) for prompt in (10, 3000))
    waits = [each.predict_ends()[-1] - each.last_message for each in (short, long)]
    assert waits[1] - waits[0] > 2 * 2e-4 * 2990


def test_sequences_that_wait_for_a_common_prefix_leave_the_free_places_open(monkeypatch: pytest.MonkeyPatch):
    """Five equal prompts on a slow server of eight places. The first prompt takes several steps, and the others wait
    for its KV blocks, not for its end."""
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    scheduler, replica = Scheduler(ServingSizes(16, 8, 500, blocks=300)), Replica(0)
    for number in range(5):
        request = Request(str(number), (7,) * 100, Sampling(max_tokens=400))
        scheduler.add(request)
        replica.streams[request.id] = Stream(request, lambda output: None)
    for _ in range(2):
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.record_results(batch, [])
        step = {"tokens": len(batch.tokens), "context": batch.keys, "seconds": 2.0}
        replica.take_report({**scheduler.stats, **step})
    assert (replica.report["running"], replica.report["waiting"]) == (1, 4)
    assert replica.report["places"] - len(replica.streams) == 3
