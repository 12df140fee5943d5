"""Step-time model on synthetic steps, and the predicted wait against a simulation of every step."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import replace

import pytest

from meshwright.planner.serving.ledger import ServingSizes
from meshwright.serving.replica import Replica, Stream
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


def simulate_wait(times: StepTimes, running: list[Work], waiting: list[Work], places: int, groups: int = 1) -> float:
    """Step by step: each step decodes a token of every running sequence of a group; an admitted prompt joins the next
    one."""
    seconds, queue, slot = 0.0, list(waiting), 0
    active = [[work.prompt, work.answer, work.context, place % groups] for place, work in enumerate(running)]
    while True:
        sizes = [sum(each[3] == group for each in active) for group in range(groups)]
        while queue and len(active) < places and sizes[slot] <= min(sizes):
            active.append([*queue.pop(0), slot])
            sizes[slot] += 1
        if not queue:
            return seconds
        tokens = keys = 0
        for each in active:
            if each[3] != slot:
                continue
            count = each[0] or 1
            tokens += count
            keys += sum(range(each[2] + 1, each[2] + count + 1))
            each[2] += count
            each[1] -= each[0] == 0
            each[0] = 0
        seconds += times.predict(tokens, keys)
        active, slot = [each for each in active if each[1] > 0], (slot + 1) % groups


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_predicted_wait_is_within_20_percent_of_simulation(seed: int, groups: int):
    numbers, times = random.Random(seed), StepTimes()
    for tokens, keys in steps(numbers, 200):
        times.observe(seconds_of(tokens, keys), tokens, keys)

    def draw(prompt_done: bool) -> Work:
        prompt = numbers.randint(10, 300)
        return Work(0 if prompt_done else prompt, numbers.randint(1, 200), prompt if prompt_done else 0)

    running, waiting = [draw(True) for _ in range(16)], [draw(False) for _ in range(numbers.randint(5, 100))]
    predicted = times.predict_admissions([*running, *waiting], 16, groups)[-1]
    assert predicted == pytest.approx(simulate_wait(times, running, waiting, 16, groups), rel=0.2)


def replica_with_queue(prompt: int, running: int = 4) -> Replica:
    """A replica of known speed that runs `running` sequences and queues three prompts."""
    replica, numbers = Replica(0, running), random.Random(0)
    for tokens, keys in steps(numbers, 200):
        replica.step_times.observe(seconds_of(tokens, keys), tokens, keys)
    for number in range(running + 3):
        request = Request(str(number), (1,) * (10 if number < running else prompt), Sampling(max_tokens=40))
        stream = Stream(request, lambda output: None)
        stream.tokens = [1] * (5 * number + 1) if number < running else []
        replica.streams[str(number)] = stream
    replica.take_report({"seconds": 0.0, "added": 0, "running": running, "waiting": 3, "paused": 0, "places": running})
    return replica


def test_predicted_wait_falls_within_a_step_and_grows_with_the_queue(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    replica = replica_with_queue(100)
    waits = [replica.predict_wait(count) for count in range(1, 7)]
    assert waits == sorted(waits) and len(set(waits)) == 6  # beyond its three, too
    for passed in (0.01, 0.2):
        now = 100.0 + passed
        assert replica.predict_wait(3) == pytest.approx(waits[2] - passed)
    now = 100.0 + waits[2] + 1e-6
    step = replica.predict_wait(3)
    assert step == pytest.approx(replica.step_times.predict(0, 0))  # overdue: another step


def test_delay_of_a_stalled_step_is_no_predicted_wait(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    replica = replica_with_queue(100)
    step = replica.step_times.predict(0, 0)
    now += 10.0
    assert replica.delay == pytest.approx(10.0 - step)
    assert replica.predict_wait(3) == pytest.approx(step)
    replica.take_report({"seconds": 10.0, "added": 0, "running": 4, "waiting": 3, "paused": 0, "places": 4})
    assert replica.delay == 0


def test_predicted_wait_counts_prompts_of_the_queue_alone():
    short, long = (replica_with_queue(prompt).predict_wait(3) for prompt in (10, 3000))
    assert long - short > 2 * 2e-4 * 2990
    running = replica_with_queue(10)
    running.streams["0"].request = replace(running.streams["0"].request, tokens=(1,) * 3000)
    assert running.predict_wait(3) - short < 2e-4 * 2990


def test_sequences_that_wait_for_a_common_prefix_leave_the_free_places_open(monkeypatch: pytest.MonkeyPatch):
    """Five equal prompts on a slow server of eight places. The first prompt takes several steps, and the others wait
    for its KV blocks, not for its end."""
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    scheduler, replica = Scheduler(ServingSizes(16, 8, 500, blocks=300)), Replica(0, 8)
    for number in range(5):
        request = Request(str(number), (7,) * 100, Sampling(max_tokens=400))
        scheduler.add(request)
        replica.streams[request.id] = Stream(request, lambda output: None)
    for _ in range(2):
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.record_results(batch, [])
        step = {"tokens": len(batch.tokens), "context": batch.keys, "seconds": 2.0, "added": 0}
        replica.take_report({**scheduler.stats, **step})
    assert (replica.report["running"], replica.report["waiting"]) == (1, 4)
    assert replica.free_sequences == 3
    assert replica.predict_wait(8) < 8 * (100 / 16) * 2.0 + 2.0  # all prompts, one after the other


def test_predicted_wait_beyond_the_queue_is_that_of_similar_requests():
    """Eight running sequences that end together leave room for eight, of which one is in the queue."""
    replica = replica_with_queue(10, running=8)
    for name in ("9", "10"):
        del replica.streams[name]
    for number in range(8):
        replica.streams[str(number)].tokens = [1]
    replica.take_report({"seconds": 0.0, "added": 0, "running": 8, "waiting": 1, "paused": 0, "places": 8})
    waits = [replica.predict_wait(count) for count in range(1, 17)]
    assert waits[7] == pytest.approx(waits[0], rel=0.2) and waits[8] == pytest.approx(2 * waits[0], rel=0.3)


def test_predicted_wait_of_many_requests_takes_bounded_work(monkeypatch: pytest.MonkeyPatch):
    """The waiting line asks for as many as there are choices of refused requests: up to millions."""
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    replica, simulated = replica_with_queue(10), 0
    estimate = StepTimes.predict_admissions

    def count(times: StepTimes, requests: Iterable[Work], *rest: int) -> list[float]:
        nonlocal simulated
        works = list(requests)
        simulated += len(works)
        return estimate(times, works, *rest)

    monkeypatch.setattr(StepTimes, "predict_admissions", count)
    waits = [replica.predict_wait(many) for many in (1, 4000, 4_000_000)]
    assert simulated < 3000
    works = [replica._estimate_work(stream, 0) for stream in replica.streams.values()]
    assert waits[1] == pytest.approx(estimate(replica.step_times, works * 572, 4)[3999], rel=0.02)
    assert waits[2] == pytest.approx(1000 * waits[1], rel=0.02)
