"""The waiting line of refused clients, in virtual time: order of admission, and accuracy of `Retry-After`."""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable

import pytest

from meshwright.serving import waiting_line
from meshwright.serving.waiting_line import QueueForecast, QueueLimits, Refusal, Ticket, WaitingLine

LIMIT, PLACES, ANSWER, ADMITTED = 64, 64, 32, 8
"""Requests of the queue, sequences that run, tokens of an answer, sequences that a step admits."""


class Engine:
    """A server in virtual time: steps of noisy length, and clients that retry once, exactly after `Retry-After`.

    Attributes:
        retried: Per refused client that returned: True if it was admitted then.
        waits: For each refused client that kept asking: (`Retry-After`, real) seconds until it was admitted.
        idle: Sequences that could have run in all steps while a client was refused.
    """

    def __init__(self, seed: int, step: float, with_line: bool) -> None:
        self.draw, self.step, self.with_line = random.Random(seed), step, with_line
        self.now, self.step_began, self.step_ends = 0.0, 0.0, 0.0
        self.line = WaitingLine(QueueLimits(LIMIT), lambda: self.now)
        self.running: list[int] = []
        self.queued = 0
        self.retried: list[bool] = []
        self.waits: list[tuple[float, float]] = []
        self.idle = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def ask(self, key: bytes, choices: int = 1) -> Refusal | None:
        """Ask for a request, first before its choices are known as the server does; they are queued unless it is
        refused."""
        refusal = self._admit(key, 0) or self._admit(key, choices)
        self.queued += choices * (refusal is None)
        self.idle += refusal is not None and len(self.running) + self.queued < PLACES
        return refusal

    def _admit(self, key: bytes, choices: int) -> Refusal | None:
        """Refusal of a request of `choices` choices; 0: of any."""
        asked = max(1, choices)
        waiting = self.queued + asked - (PLACES - len(self.running))
        if self.with_line:
            queue = QueueForecast(waiting, [64] * self.queued, 64 * (self.queued + asked), self.predict)
            return self.line.admit(Ticket(key), choices, 64 * asked, queue)
        return Refusal("requests", self.predict(waiting - LIMIT)) if waiting > LIMIT else None

    def predict(self, count: int) -> float:
        """Seconds until `count` running sequences have ended, by the mean step."""
        ends, (rounds, index) = sorted(self.running), divmod(count - 1, PLACES)
        steps = (ends[index] if index < len(ends) else ANSWER) + rounds * ANSWER
        return max(0.0, steps * self.step - (self.now - self.step_began))

    def at(self, when: float, event: Callable[[], None]) -> None:
        """Let `event` happen at a time."""
        heapq.heappush(self._events, (when, len(self._events) + self.draw.getrandbits(40), event))

    def arrive(self, load: float, seconds: float, returning: bool) -> None:
        """Poisson arrivals at `load` times the capacity; then let time pass until all have returned."""
        rate, when, ends = load * PLACES / (ANSWER * self.step), self.now, self.now + seconds
        while when < ends:
            self.at(when, lambda: self._come(returning))
            when += self.draw.expovariate(rate)
        self.run(ends)

    def _come(self, returning: bool) -> None:
        key = self.draw.randbytes(8)
        refusal = self.ask(key)
        if refusal is None or not returning:
            return
        wait, now = refusal.retry_after_seconds, self.now
        if self.draw.random() < 0.1:
            self.at(now + max(0.005, wait / 20), lambda: self._probe(key, wait, now))
        else:
            late = self.draw.random() * 0.002
            self.at(now + wait + late, lambda: self.retried.append(self.ask(key) is None))

    def _probe(self, key: bytes, wait: float, refused: float) -> None:
        """Keep asking until the request, refused at the time `refused`, is admitted."""
        if self.ask(key) is None:
            self.waits.append((wait, self.now - refused))
        else:
            self.at(self.now + max(0.005, wait / 20), lambda: self._probe(key, wait, refused))

    def run(self, until: float) -> None:
        """Let time pass."""
        while (now := min(self.step_ends, self._events[0][0] if self._events else until)) < until:
            self.now = now
            if self._events and self._events[0][0] <= self.step_ends:
                heapq.heappop(self._events)[2]()
                continue
            self.running = [left - 1 for left in self.running if left > 1]
            admitted = min(ADMITTED, PLACES - len(self.running), self.queued)
            self.queued -= admitted
            self.running += [ANSWER] * admitted
            self.step_began, self.step_ends = now, now + self.step * self.draw.lognormvariate(0, 0.1)
        self.now = until


class Clock:
    """Seconds that tests set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def line(clock: Clock) -> WaitingLine:
    """A line before a queue of 8 requests and 100 tokens."""
    return WaitingLine(QueueLimits(8, 100), clock)


def ask(line: WaitingLine, key: bytes, waiting: int = 9, first: bool = False, tokens: int = 9) -> float | None:
    """Ask for a request with `waiting` waiting ones, itself included, one of which is admitted each second. Return its
    `Retry-After` in seconds, None if it was admitted."""
    queue = QueueForecast(waiting, [tokens // max(1, waiting)] * (waiting - 1), tokens, float)
    refusal = line.admit(Ticket(key, first_attempt=first), 1, tokens // max(1, waiting), queue)
    return None if refusal is None else refusal.retry_after_seconds


def retry_after_overload(step: float, with_line: bool) -> tuple[list[bool], list[float]]:
    """Ten times the capacity without retries, then 0.8 times with them: share admitted at first retry, and ratios of
    `Retry-After` to the real wait."""
    retried, ratios = [], []
    for seed in range(2):
        engine = Engine(seed, step, with_line)
        for _ in range(2):  # the second time what was learnt of the clients has to be unlearnt
            engine.arrive(10, 400 * step, returning=False)
            engine.arrive(0.8, 500 * step, returning=True)
            engine.run(engine.now + 20)
        assert not engine.idle
        retried += engine.retried
        ratios += [wait / real for wait, real in engine.waits]
    return retried, ratios


@pytest.mark.parametrize("step", [0.01, 0.1])
def test_refused_clients_succeed_at_first_retry_when_load_falls(step: float):
    retried, ratios = retry_after_overload(step, with_line=True)
    assert len(retried) > 50 and sum(retried) >= 0.95 * len(retried) and len(ratios) > 10
    assert 1 / 1.5 <= statistics.median(ratios) <= 1.5
    without, _ = retry_after_overload(step, with_line=False)
    assert sum(without) < 0.7 * len(without)


def test_all_choices_of_refused_request_are_reserved(line: WaitingLine, clock: Clock):
    """One request leaves the full queue each second, and a client without a place asks for that room."""
    queued, due = 9, 0.0
    for second in range(50):
        clock.now, queued = float(second), queued - 1
        if due <= second:
            for choices in (0, 4):  # as the server asks: before and after the request has been parsed
                queue = QueueForecast(queued + max(1, choices), [1] * queued, queued + max(1, choices), float)
                refusal = line.admit(Ticket(b"four"), choices, 4, queue)
                if refusal is not None:
                    due = second + refusal.retry_after_seconds
                    break
            else:
                break
        while ask(line, b"", waiting=queued + 1) is None:
            queued += 1
    assert 1 < second < 10 and queued <= 4


def test_delayed_step_lengthens_retry_after_but_refuses_nobody(line: WaitingLine):
    """A limit of 120 predicted seconds, and a step that takes 200 s already."""
    assert line.admit(Ticket(b"a"), 1, 9, QueueForecast(8, [1] * 7, 8, float, delay=200.0)) is None
    refusal = line.admit(Ticket(b"b"), 1, 9, QueueForecast(9, [1] * 8, 9, float, delay=20.0))
    assert refusal is not None and refusal.retry_after_seconds == 1.25 * 20.0


def test_limit_on_seconds_concerns_wait_of_the_first_choice_and_not_service(line: WaitingLine):
    """A request of 6 choices on a server that admits one sequence each 50 s, with a limit of 120 s."""

    def refuse(waiting: int) -> Refusal | None:
        queue = QueueForecast(waiting, [1] * waiting, 12, lambda count: 50.0 * count)
        return line.admit(Ticket(b"a"), 6, 6, queue)

    assert refuse(6 - 2) is None  # 2 of its choices start immediately, the last one in 200 s
    assert refuse(6 + 1) is None  # its first choice is the second in the queue, and waits for 100 s
    assert refuse(6 + 2) == Refusal("seconds", 1.25 * (3 * 50.0 - 120.0))


def test_due_client_refused_for_tokens_gets_same_retry_after(line: WaitingLine, clock: Clock):
    """Three prompts of 40 tokens must leave before one of 70 fits, and the queue is searched twice for a due client."""
    for clock.now in (0.0, 3.75):
        refusal = line.admit(Ticket(b"a"), 1, 70, QueueForecast(4, [40] * 3, 190, float))
        assert refusal == Refusal("tokens", 1.25 * 3)


def test_request_of_more_tokens_than_the_limit_waits_for_an_empty_queue(line: WaitingLine, clock: Clock):
    queue = QueueForecast(4, [40] * 2, 380, float)
    assert line.admit(Ticket(b"a"), 2, 300, queue) == Refusal("tokens", 1.25 * 2)
    clock.now = 2.5
    assert line.admit(Ticket(b"a"), 2, 300, QueueForecast(2, [40] * 0, 300, float)) is None


def test_returning_client_is_counted_when_it_would_be_late(line: WaitingLine, clock: Clock):
    """Otherwise returning clients were counted before absent ones, and the share would be overestimated."""
    ask(line, b"gone")
    clock.now = 20.0
    assert line.outstanding == 0 and (before := line.returning) < 1
    clock.now += ask(line, b"comes") or 0.0
    assert ask(line, b"comes", waiting=8) is None and line.outstanding == 0
    assert line.returning == before
    clock.now += waiting_line.LATE_SECONDS
    assert line.outstanding == 0 and line.returning > before


def test_clients_are_admitted_in_order_of_first_refusal(line: WaitingLine, clock: Clock):
    assert [ask(line, key) for key in (b"a", b"b", b"c")] == [1.25, 2.5, 3.75]
    clock.now = 1.25
    assert ask(line, b"new", waiting=8) == 3.75  # the room is that of a
    assert ask(line, b"a", waiting=8) is None
    clock.now = 2.5
    assert ask(line, b"c", waiting=8) == 1.25  # the room is that of b
    assert ask(line, b"b", waiting=8) is None
    assert (line.admitted, line.outstanding) == (2, 2)


def test_refused_retry_gets_shorter_wait_and_keeps_its_order(line: WaitingLine, clock: Clock):
    wait = [ask(line, key) for key in (b"a", b"b")]
    clock.now = 1.0
    assert ask(line, b"b") == wait[1] - 1.0  # too early: it keeps its place
    for number in range(20):
        ask(line, b"new%d" % number)
    assert ask(line, b"b") == wait[1] - 1.0
    clock.now = 2.5
    assert ask(line, b"b") == 1.25 < wait[1]  # slower than predicted: only the next room is waited for
    clock.now = 3.75
    assert ask(line, b"b", waiting=8) is None


def test_simultaneous_refused_retries_are_spread_in_order(line: WaitingLine, clock: Clock):
    assert [ask(line, key) for key in (b"a", b"b", b"c")] == [1.25, 2.5, 3.75]
    clock.now = 2.6  # a and b are due, and nobody was admitted
    assert [ask(line, key) for key in (b"a", b"b")] == pytest.approx([1.25, 2.5])


def test_nobody_is_refused_while_the_engine_could_run_it(line: WaitingLine):
    for number in range(50):
        ask(line, b"absent%d" % number)
    assert ask(line, b"new", waiting=0) is None


def test_clients_that_never_retry_lose_their_places_and_delay_nobody(line: WaitingLine, clock: Clock):
    for number in range(200):
        ask(line, b"absent%d" % number)
        clock.now += 1.0
    assert line.returning < 0.1 and line.expired > 100
    clock.now += 1000.0
    assert ask(line, b"new", waiting=8) is None
    assert (line.outstanding, line.expired) == (0, 200)


def test_identical_requests_of_counting_clients_have_separate_places(line: WaitingLine, clock: Clock):
    assert [ask(line, b"same", first=True) for _ in range(3)] == [1.25, 2.5, 3.75]
    assert ask(line, b"same") == 1.25 and line.outstanding == 3  # perhaps any of them
    clock.now = 3.0
    assert [ask(line, b"same", waiting=8) for _ in range(3)] == [None] * 3
    assert (line.admitted, line.outstanding) == (3, 0)


def test_retry_marked_as_first_attempt_takes_its_place(line: WaitingLine, clock: Clock):
    assert [ask(line, b"same", first=True), ask(line, b"other")] == [1.25, 2.5]
    clock.now = 1.25
    assert ask(line, b"same", waiting=8, first=True) is None
    assert (line.admitted, line.outstanding) == (1, 1)


def test_absence_is_noticed_earlier_after_shorter_retry_after(line: WaitingLine, clock: Clock):
    assert [ask(line, b"a", waiting=40), ask(line, b"a", waiting=9)] == [40.0, 1.25]
    clock.now = 2.0
    assert ask(line, b"new", waiting=8) is None


def test_unclaimed_places_expire_when_counted(line: WaitingLine, clock: Clock):
    ask(line, b"a")
    clock.now = 10.0
    assert (line.outstanding, line.expired) == (0, 1)


def test_retry_after_is_at_most_a_minute_and_place_lasts_longer(line: WaitingLine, clock: Clock):
    assert ask(line, b"a", waiting=88) == 60.0
    clock.now = 60.0
    assert ask(line, b"a", waiting=88) == 40.0
    clock.now = 100.0
    assert ask(line, b"a", waiting=8) is None


def test_places_are_bounded_and_late_clients_lose_theirs_to_new_ones(
    line: WaitingLine, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(waiting_line, "MAX_PLACES", 3)
    for key in (b"a", b"b", b"c", b"none"):
        ask(line, key)
    assert line.outstanding == 3
    clock.now = 2.5  # a is late, b is due
    ask(line, b"")  # it cannot have a place
    assert (line.outstanding, line.expired) == (3, 0)
    ask(line, b"new")
    assert (line.outstanding, line.expired) == (3, 1)
    assert [ask(line, key, waiting=8) for key in (b"a", b"b")] == [1.25 * 3, None]


def test_tokens_of_those_ahead_count_towards_the_limit(line: WaitingLine, clock: Clock):
    assert ask(line, b"a", waiting=4, tokens=120) is not None  # 4 of 30: one has to leave
    assert ask(line, b"b", waiting=3, tokens=81) is not None  # with a there would be 111
    clock.now = 10.0
    assert ask(line, b"a", waiting=3, tokens=90) is None
    assert ask(line, b"b", waiting=3, tokens=81) is None
