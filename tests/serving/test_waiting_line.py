"""The waiting line of refused clients, in virtual time: order of admission, and accuracy of `Retry-After`."""

from __future__ import annotations

import importlib
import statistics

import pytest

from meshwright.serving import waiting_line
from meshwright.serving.waiting_line import QueueForecast, QueueLimits, Refusal, Ticket, WaitingLine
from tests.conftest import REPOSITORY


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


def test_refused_clients_succeed_at_first_retry_when_load_falls(monkeypatch: pytest.MonkeyPatch):
    """The front, waiting line and scheduler of a server whose steps take virtual time. The load falls from ten to 0.8
    times the capacity, and only clients refused after that come back."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "bench"))
    simulation = importlib.import_module("retry_simulation")
    found = simulation.simulate(simulation.Case(), samples=6)
    assert len(found.retried) >= 18 and sum(found.retried) >= 0.9 * len(found.retried)
    assert 1 / 1.5 <= statistics.median(promised / actual for promised, actual in found.waits) <= 1.5


def test_fewer_returning_clients_than_expected_leave_room_before_later_places(line: WaitingLine, clock: Clock):
    """Forty clients that are expected to retry get places, one after the other. Then half of them are known to stay
    away: a new client takes the room of one of these, and need not wait for the twenty others."""
    for number in range(40):
        ask(line, b"absent%d" % number)
    line.returning = 0.5
    assert (ask(line, b"new") or 0.0) < 10 * 1.2


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
    assert line.admit(Ticket(b"a"), 1, 9, QueueForecast(8, [1] * 7, 8, float, elapsed=200.0)) is None
    refusal = line.admit(Ticket(b"b"), 1, 9, QueueForecast(9, [1] * 8, 9, float, elapsed=20.0))
    assert refusal is not None and refusal.retry_after_seconds == pytest.approx(0.2 * 20.0)


def test_wait_is_counted_from_the_end_of_the_last_step(line: WaitingLine):
    """The room is made by the end of a step, whose predicted time has an error however little of it is left."""
    refusal = line.admit(Ticket(b"a"), 1, 9, QueueForecast(9, [1] * 8, 9, lambda count: 10.0, elapsed=9.0))
    assert refusal is not None and refusal.retry_after_seconds == pytest.approx(3.0)


def test_limit_on_seconds_concerns_wait_of_the_first_choice_and_not_service(line: WaitingLine):
    """A request of 6 choices on a server that admits one sequence each 50 s, with a limit of 120 s."""

    def refuse(waiting: int) -> Refusal | None:
        queue = QueueForecast(waiting, [1] * waiting, 12, lambda count: 50.0 * count)
        return line.admit(Ticket(b"a"), 6, 6, queue)

    assert refuse(6 - 2) is None  # 2 of its choices start immediately, the last one in 200 s
    assert refuse(6 + 1) is None  # its first choice is the second in the queue, and waits for 100 s
    assert refuse(6 + 2) == Refusal("seconds", 1.2 * (3 * 50.0 - 120.0))


def test_due_client_refused_for_tokens_gets_same_retry_after(line: WaitingLine, clock: Clock):
    """Three prompts of 40 tokens must leave before one of 70 fits, and the queue is searched twice for a due client."""
    for clock.now in (0.0, 3.6):
        refusal = line.admit(Ticket(b"a"), 1, 70, QueueForecast(4, [40] * 3, 190, float))
        assert refusal == Refusal("tokens", pytest.approx(1.2 * 3))


def test_request_of_more_tokens_than_the_limit_waits_for_an_empty_queue(line: WaitingLine, clock: Clock):
    queue = QueueForecast(4, [40] * 2, 380, float)
    assert line.admit(Ticket(b"a"), 2, 300, queue) == Refusal("tokens", 1.2 * 2)
    clock.now = 2.4
    assert line.admit(Ticket(b"a"), 2, 300, QueueForecast(2, [40] * 0, 300, float)) is None


def test_clients_are_admitted_in_order_of_first_refusal(line: WaitingLine, clock: Clock):
    assert [ask(line, key) for key in (b"a", b"b", b"c")] == pytest.approx([1.2, 2.4, 3.6])
    clock.now = 1.2
    assert ask(line, b"new", waiting=8) == pytest.approx(3.6)  # the room is that of a
    assert ask(line, b"a", waiting=8) is None
    clock.now = 2.4
    assert ask(line, b"c", waiting=8) == pytest.approx(1.2)  # the room is that of b
    assert ask(line, b"b", waiting=8) is None
    assert (line.admitted, line.outstanding) == (2, 2)


def test_refused_retry_gets_shorter_wait_and_keeps_its_order(line: WaitingLine, clock: Clock):
    wait = [ask(line, key) for key in (b"a", b"b")]
    clock.now = 1.0
    assert ask(line, b"b") == wait[1] - 1.0  # too early: it keeps its place
    for number in range(20):
        ask(line, b"new%d" % number)
    assert ask(line, b"b") == wait[1] - 1.0
    clock.now = 2.4
    assert (
        ask(line, b"b") == pytest.approx(1.2) and wait[1] > 2
    )  # slower than predicted: only the next room is waited for
    clock.now = 3.6
    assert ask(line, b"b", waiting=8) is None


def test_waits_of_a_client_grow_while_the_engine_is_slower_than_predicted(line: WaitingLine, clock: Clock):
    """Room is always predicted in 10 ms, and comes after 30 s: a client that retries five times has not given up."""
    assert ask(line, b"a", waiting=18) == pytest.approx(12.0)
    clock.now, retries = 12.0, 0
    while clock.now < 30.0:
        refusal = line.admit(Ticket(b"a"), 1, 1, QueueForecast(9, [1] * 8, 9, lambda count: 0.01))
        assert refusal is not None
        clock.now, retries = clock.now + refusal.retry_after_seconds, retries + 1
    assert retries <= 6 and ask(line, b"a", waiting=8) is None


def test_simultaneous_refused_retries_are_spread_in_order(line: WaitingLine, clock: Clock):
    assert [ask(line, key) for key in (b"a", b"b", b"c")] == pytest.approx([1.2, 2.4, 3.6])
    clock.now = 2.6  # a and b are due, and nobody was admitted
    assert [ask(line, key) for key in (b"a", b"b")] == pytest.approx([1.2, 2.4])


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


def test_returns_and_absences_are_learnt_at_the_same_delay(line: WaitingLine, clock: Clock):
    """A client counts as one that returns when it would count as late: else the share would be too high at first."""
    assert [ask(line, key, waiting=9) for key in (b"a", b"b")] == pytest.approx([1.2, 2.4])
    line.returning, clock.now = 0.5, 1.2
    assert ask(line, b"a", waiting=8) is None and line.returning == 0.5
    clock.now = 1.2 + waiting_line.LATE_SECONDS
    assert line.outstanding == 1 and line.returning > 0.5


@pytest.mark.parametrize("retry", [0.5, 1.2])
def test_client_that_stays_away_after_a_refused_retry_is_not_learnt_as_absent(
    line: WaitingLine, clock: Clock, retry: float
):
    """It came back, early or when due, and the queue was full: other clients will come back too."""
    assert ask(line, b"a") == 1.2
    line.returning, clock.now = 0.5, retry
    assert ask(line, b"a") is not None
    clock.now = 10.0
    assert (line.outstanding, line.expired) == (0, 1) and line.returning > 0.5


def test_identical_requests_of_counting_clients_have_separate_places(line: WaitingLine, clock: Clock):
    assert [ask(line, b"same", first=True) for _ in range(3)] == pytest.approx([1.2, 2.4, 3.6])
    assert ask(line, b"same") == 1.2 and line.outstanding == 3  # perhaps any of them
    clock.now = 3.0
    assert [ask(line, b"same", waiting=8) for _ in range(3)] == [None] * 3
    assert (line.admitted, line.outstanding) == (3, 0)


def test_retry_marked_as_first_attempt_takes_its_place(line: WaitingLine, clock: Clock):
    assert [ask(line, b"same", first=True), ask(line, b"other")] == [1.2, 2.4]
    clock.now = 1.2
    assert ask(line, b"same", waiting=8, first=True) is None
    assert (line.admitted, line.outstanding) == (1, 1)


def test_absence_is_noticed_earlier_after_shorter_retry_after(line: WaitingLine, clock: Clock):
    assert [ask(line, b"a", waiting=40), ask(line, b"a", waiting=9)] == pytest.approx([38.4, 1.2])
    clock.now = 2.0
    assert ask(line, b"new", waiting=8) is None


def test_unclaimed_places_expire_when_counted(line: WaitingLine, clock: Clock):
    ask(line, b"a")
    clock.now = 10.0
    assert (line.outstanding, line.expired) == (0, 1)


def test_long_wait_is_promised_whole_and_early_retries_keep_their_place(line: WaitingLine, clock: Clock):
    assert ask(line, b"a", waiting=88) == pytest.approx(96.0)
    clock.now = 60.0
    assert ask(line, b"a", waiting=88) == pytest.approx(36.0)
    clock.now = 96.0
    assert ask(line, b"a", waiting=8) is None


def test_places_are_bounded_and_late_clients_lose_theirs_to_new_ones(
    line: WaitingLine, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(waiting_line, "MAX_PLACES", 3)
    for key in (b"a", b"b", b"c", b"none"):
        ask(line, key)
    assert line.outstanding == 3
    clock.now = 2.4  # a is late, b is due
    ask(line, b"")  # it cannot have a place
    assert (line.outstanding, line.expired) == (3, 0)
    ask(line, b"new")
    assert (line.outstanding, line.expired) == (3, 1)
    assert [ask(line, key, waiting=8) for key in (b"a", b"b")] == [1.2 * 3, None]


def test_tokens_of_those_ahead_count_towards_the_limit(line: WaitingLine, clock: Clock):
    assert ask(line, b"a", waiting=4, tokens=120) is not None  # 4 of 30: one has to leave
    assert ask(line, b"b", waiting=3, tokens=81) is not None  # with a there would be 111
    clock.now = 10.0
    assert ask(line, b"a", waiting=3, tokens=90) is None
    assert ask(line, b"b", waiting=3, tokens=81) is None
