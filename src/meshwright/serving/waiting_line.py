"""Waiting line of refused requests: clients that retry are admitted to the engine's queue in the order of their first
refusals. Free of torch.

A refused request (HTTP 429) keeps a place in the line without an open connection: the place is found again by a digest
of the request, and `Retry-After` says when to retry. A new request waits behind all places whose clients are expected
to return; it is admitted immediately only if the queue has room beyond them. No request is refused while the engine
could run it immediately.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAX_PLACES = 4096
"""Maximum number of places. Beyond it a new client replaces the one that is late the longest; if none is late, it gets
no place."""
MARGIN, SHORTEST_SECONDS = 1.2, 0.01
"""Time of a retry / predicted time, both counted from the end of the last step; above 1, as a client that retries too
early meets a full queue. Shortest `Retry-After`: clients have coarser timers."""
GRACE_SECONDS, GRACE_SHARE = 2.0, 0.25
"""A place expires when its client is later than both: seconds, and share of its `Retry-After`."""
LATE_SECONDS = 0.1
"""Lateness after which new requests no longer wait for a client, though it keeps its place."""
EARLY_SECONDS = 0.01
"""Tolerance for clients that retry early, as their timers may be coarse."""
LEARNING = 1 / 32
"""Weight of one client in the moving average of the share that returns."""
GUARD = 2
"""1 / `GUARD` of the queue is reserved for clients with a place, if there are that many."""


class Refusal(NamedTuple):
    """Refusal of a request because the engine's queue is full or the engine is not ready, with the time after which to
    retry.

    Attributes:
        reason: Label for the metrics. The limit that is reached: `"requests"` (number of waiting requests), `"tokens"`
            (prompt tokens of waiting requests), `"seconds"` (predicted wait) or `"connections"`. Or the state of an
            engine that accepts no requests: `"starting"`, `"recovering"`, `"draining"` or `"failed"`.
        retry_after_seconds: Predicted time until a request of this size would be queued."""

    reason: str
    retry_after_seconds: float


class Ticket(NamedTuple):
    """Identity of an HTTP request, by which its retry after a refusal (429) is recognised and keeps its place in the
    waiting line (`WaitingLine`).

    Attributes:
        key: Keyed digest of the API key, the path and the body; empty: no place is kept.
        tokens: Estimated number of tokens of the prompts.
        first_attempt: True if the client marks this as its first attempt. An identical request that already waits in
            the line is then assumed to be another client's.
        longest: Longest `Retry-After` in seconds that the client follows.
    """

    key: bytes = b""
    tokens: int = 1
    first_attempt: bool = False
    longest: float = math.inf


class QueueLimits(NamedTuple):
    """Limits on the requests that wait in the queues of all replicas together. requests: maximum number of waiting
    requests. tokens: maximum number of prompt tokens of requests that have no generated token yet. seconds: longest
    predicted wait of a new HTTP request until the first of its sequences is admitted."""

    requests: int = 512
    tokens: int = 1_000_000
    seconds: float = 120.0


class QueueForecast(NamedTuple):
    """State of the engine's queue as it would be after appending a new HTTP request.

    Attributes:
        waiting: Number of engine requests that would wait, the requests of the new HTTP request included; 0 or less if
            all could run at once.
        prompts: Number of prompt tokens of each queued request, from the head, without the new request.
        tokens: Number of prompt tokens of all queued requests, the new request included.
        predict: Function (count) -> predicted seconds from the end of the engine's last step until `count` requests
            have ended, each of which makes room for another one.
        elapsed: Seconds since the end of the engine's last step.
    """

    waiting: int
    prompts: Sequence[int]
    tokens: int
    predict: Callable[[int], float]
    elapsed: float = 0.0


@dataclass(slots=True, eq=False)
class _Place:
    """Place of one refused HTTP request in the waiting line, kept until its client retries or the place expires.

    Attributes:
        key: Digest of the request. Identical requests have the same digest but separate places.
        requests: Number of engine requests (choices) of the HTTP request.
        tokens: Number of prompt tokens of these requests together.
        since: Time of the first refusal, in seconds of the line's clock.
        room: Time at which the queue is predicted to have room for the request: the order of the line.
        due: Time at which the client is expected to retry, in seconds of the line's clock. A retry at this time or
            later is not refused in favour of other places.
        expires: Time at which the place is removed if the client has not retried.
        watched: Time of the earliest scheduled check of this place.
        expected: True if the client is expected to retry, False if it is late.
        retried: True if the client has retried, early or when due. If it is refused again and then stays away, this
            does not lower `WaitingLine.returning`: predicted waits that are too short would become even shorter.
        returned: True from a retry until the next check of the place, which includes the retry in
            `WaitingLine.returning`: with the same delay as for absent clients, whose share would else be too low.
    """

    key: bytes
    requests: int
    tokens: int
    since: float
    room: float = math.inf
    due: float = math.inf
    expires: float = math.inf
    watched: float = math.inf
    expected: bool = False
    retried: bool = False
    returned: bool = False


class WaitingLine:
    """Admission of HTTP requests to the engine's queue within its limits. A refused request gets a place in the waiting
    line, so that clients that retry are admitted in the order of their first refusals. clock: function that returns the
    time in seconds.

    Attributes:
        returning: Moving average of the share of refused clients that retry; 1 at first.
        admitted: Number of places whose clients were admitted, since the start.
        expired: Number of places that were given up, since the start.
    """

    def __init__(self, limits: QueueLimits, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with an empty line. limits: limits of the engine's queue; clock: function that returns the time in
        seconds."""
        self.returning, self.admitted, self.expired = 1.0, 0, 0
        self._limits, self._clock, self._counter = limits, clock, itertools.count()
        self._places: dict[bytes, list[_Place]] = {}
        self._expected = list[_Place]()  # by `room`
        self._late = dict[_Place, None]()  # longest delay first; new requests pass these
        self._requests = self._tokens = 0  # of all expected places
        self._ends: list[tuple[float, int, _Place]] = []  # heap of times, the number of each entry, and its place

    @property
    def outstanding(self) -> int:
        """Number of places in the line that have not expired."""
        self._run_due_checks(self._clock())
        return len(self._expected) + len(self._late)

    def admit(self, ticket: Ticket, requests: int, tokens: int, queue: QueueForecast) -> Refusal | None:
        """Admit an HTTP request to the engine's queue, or refuse it. If it is admitted, its place in the waiting line
        is removed (if it had one), and None is returned. If it is refused, the refusal is returned; the request keeps
        its place, or gets a place if `ticket` has a key and the line is not full.

        ticket: identity of the request. requests: number of the engine's requests (choices) that the HTTP request
        makes; 0: only check whether it would be refused, without removing its place. tokens: number of prompt tokens of
        these requests, or an estimate. queue: state of the queue if the request were appended."""
        now = self._clock()
        self._run_due_checks(now)
        same = self._places.get(ticket.key, ())
        # A place that is due may be its own even at a first attempt: some clients do not count attempts.
        place = next((each for each in same if not ticket.first_attempt or now >= each.due - EARLY_SECONDS), None)
        due = place is not None and now >= place.due - EARLY_SECONDS
        count = max(1, requests)
        reason, seconds = self._find_limit(queue, count, tokens, 0.0) if due else ("", 0.0)
        if reason or not due:  # if due, the engine is slower than predicted: places before it come first
            reason, seconds = self._find_room(queue, count, tokens, math.inf if place is None else place.room)
        if place is not None and (reason or requests):
            place.returned = place.retried = True
            if not reason:
                self._remove_place(place, admitted=True)
        if not reason:
            return None
        wait = max(MARGIN * max(seconds, queue.elapsed) - queue.elapsed, SHORTEST_SECONDS)
        if place is not None and due:  # the error of a prediction is in proportion to it, and clients retry a few times
            wait = max(wait, (MARGIN - 1) * (now - place.since))
        if place is None and ticket.key and self.outstanding >= MAX_PLACES and self._late:
            self._remove_place(next(iter(self._late)))
        if place is None and ticket.key and self.outstanding < MAX_PLACES:
            place = _Place(ticket.key, count, tokens, now)
            self._places.setdefault(ticket.key, []).append(place)
        if place is not None:
            self._set_expected(place, False)
            place.room = min(place.room, now - queue.elapsed + seconds)
            place.due = now + wait if due else min(place.due, now + wait)
            wait = max(place.due - now, SHORTEST_SECONDS)
            self._schedule_check(place, place.due + LATE_SECONDS)
            place.expires = place.due + max(GRACE_SECONDS, GRACE_SHARE * wait)
            self._late.pop(place, None)
            if requests:  # known only now: a place is created before its request is parsed
                place.requests, place.tokens = requests, tokens
            self._set_expected(place, True)
        return Refusal(reason, wait)

    def _find_limit(self, queue: QueueForecast, requests: int, tokens: int, ahead: float) -> tuple[str, float]:
        """Find the limit in `QueueLimits` that the queue would exceed with a new HTTP request. Return (name of the
        limit, predicted seconds from the end of the last step until the request could be queued); ("", 0.0) if no limit
        would be exceeded. A request with more tokens than the limit is queued if no other request waits. The limit on
        seconds concerns the wait of the first of its engine requests: how long the others take is no reason to refuse
        it.

        queue: state of the queue with the new HTTP request. requests, tokens: its engine requests and prompt tokens.
        ahead: expected number of engine requests of clients in the waiting line that come before it."""
        if queue.waiting <= 0:
            return "", 0.0
        over = math.ceil(queue.waiting + ahead) - self._limits.requests
        reason = "requests" if over > 0 else ""
        excess = queue.tokens + ahead * self._tokens / max(1, self._requests) - max(tokens, self._limits.tokens)
        if excess > 0:
            reason = reason or "tokens"
            over = max(over, 1 + bisect_left(list(itertools.accumulate(queue.prompts)), excess))
        if reason:
            return reason, queue.predict(over)
        first = math.ceil(queue.waiting + ahead) - requests + 1
        seconds = queue.predict(first) - self._limits.seconds if first > 0 else 0.0
        return ("seconds", seconds) if seconds > queue.elapsed else ("", 0.0)

    def _find_room(self, queue: QueueForecast, requests: int, tokens: int, room: float) -> tuple[str, float]:
        """Return the result of `_find_limit` behind the clients in the waiting line who come before this one. room: the
        attribute of its place; infinity without one.

        Those come before it who need room before there is room behind them: a later place is kept, but holds no room
        that will be free again by then. Of n engine requests of clients that are expected to retry, those that will be
        sent are n times the average share of clients that do retry, but at least the smaller of n and 1 / `GUARD` of
        the limit on waiting requests, because the average adapts slowly."""
        places, began, found = self._expected, self._clock() - queue.elapsed + EARLY_SECONDS, ("", 0.0)
        before, count = bisect_left(places, room, key=lambda each: each.room), -1
        while before != count:
            count = before
            sent = count * self._requests / max(1, len(places))
            ahead = max(self.returning * sent, min(sent, self._limits.requests // GUARD))
            found = self._find_limit(queue, requests, tokens, ahead)
            before = bisect_right(places, began + found[1], hi=count, key=lambda each: each.room)
        return found

    def _set_expected(self, place: _Place, expected: bool) -> None:
        """Mark the client of `place` as expected to retry (`expected` True) or not (False). A new request is refused if
        it would take room in the queue that an expected client needs."""
        if place.expected is not expected:
            place.expected, sign = expected, 1 if expected else -1
            self._requests += sign * place.requests
            self._tokens += sign * place.tokens
            if expected:
                insort(self._expected, place, key=lambda each: each.room)
            else:
                self._expected.remove(place)

    def _run_due_checks(self, now: float) -> None:
        """Run the checks of places that are scheduled up to the time `now`, in seconds of the line's clock.

        A check updates `returning`, the average share of clients that retry. If the client is late, no room in
        the queue is kept for it any longer. An expired place is removed."""
        while self._ends and self._ends[0][0] <= now:
            when, _, place = heapq.heappop(self._ends)
            if place.returned:
                self.returning += LEARNING * (1 - self.returning)
                place.returned = False
            if place.expected and place.due + LATE_SECONDS <= now:
                self.returning -= 0.0 if place.retried else LEARNING * self.returning
                self._set_expected(place, False)
                self._late[place] = None
            if place in self._late and place.expires <= now:
                self._remove_place(place)
            elif when == place.watched and (place.expected or place in self._late):
                place.watched = math.inf
                self._schedule_check(place, place.expires if place in self._late else place.due + LATE_SECONDS)

    def _schedule_check(self, place: _Place, when: float) -> None:
        """Schedule a check of `place` at the time `when`, in seconds of the line's clock, unless an earlier check is
        scheduled."""
        if when < place.watched:
            place.watched = when
            heapq.heappush(self._ends, (when, next(self._counter), place))

    def _remove_place(self, place: _Place, admitted: bool = False) -> None:
        """Remove a place from the line, and count it as admitted or, unless `admitted`, as expired."""
        self.admitted += admitted
        self.expired += not admitted
        self._set_expected(place, False)
        self._late.pop(place, None)
        self._places[place.key].remove(place)
        if not self._places[place.key]:
            del self._places[place.key]
