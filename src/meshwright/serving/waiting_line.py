"""Virtual line of refused clients: admission to the bounded queue in the order of the first refusals. Free of torch.

A refused request keeps a place without a connection, known by a digest of its bytes, and its client is told when to
come again. A newcomer waits behind all places whose clients are expected to return; only room that they leave admits it
at once. Nobody is refused while the engine could run it.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from meshwright.serving.engine_client import Refusal, Ticket

MOST_PLACES = 4096
"""Beyond it the client that is late the longest loses its place to a new one; if none is late, the new one has none."""
MARGIN, SHORTEST_SECONDS, LONGEST_SECONDS = 1.25, 0.01, 60.0
"""Told wait / predicted wait, as a client that comes too early meets a full queue; the shortest; the longest: openai's
client ignores longer ones, and one that comes early keeps its place."""
GRACE_SECONDS, GRACE_SHARE = 2.0, 0.25
"""A place expires when its client is later than both, in seconds and of the told wait."""
LATE_SECONDS = 0.1
"""Newcomers no longer wait for a client that is so late, though it keeps its place."""
EARLY_SECONDS = 0.01
"""By which a client may be early: its timer may be coarse."""
LEARNING = 1 / 32
"""Weight of one client in the moving average of those that return."""
GUARD = 4
"""1 / share of the queue that is left to clients with a place, as long as there are so many."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits on the queue of all replicas. requests: waiting requests. tokens: prompt tokens of requests that have no
    token yet. seconds: predicted wait of a new request."""

    requests: int = 512
    tokens: int = 1_000_000
    seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class Queue:
    """Present state of the queue with the asked requests at its end.

    Attributes:
        waiting: Number of requests that would wait, the asked ones included; 0 or less: nobody would.
        prompts: Returns the prompt tokens of each queued request, from the head, without the asked ones.
        tokens: Prompt tokens of all, the asked ones included.
        predict: Returns the predicted seconds until so many requests are admitted from the head.
        delay: Seconds by which the engine is later than predicted; it may last as long again, for which clients are
            told to wait, but which is no predicted wait of a request (`QueueLimits.seconds`).
    """

    waiting: int
    prompts: Callable[[], Iterable[int]]
    tokens: int
    predict: Callable[[int], float]
    delay: float = 0.0


@dataclass(slots=True, eq=False)
class _Place:
    """Place of one refused request in the line.

    Attributes:
        key: Digest of the request. Identical requests have places of their own under one digest.
        number: Order of the places.
        requests: Number of the engine's requests that it makes (choices).
        tokens: Prompt tokens of all of them.
        due: Time from which on any room in the queue admits it, in seconds of the line's clock.
        expires: Time at which the place is given up.
        watched: Earliest time at which the line looks at the place again.
        returned: True if its client has come when it was told, which counts when it would have been late: else clients
            that come would be counted earlier than those that do not.
    """

    key: bytes
    number: int
    requests: int
    tokens: int
    due: float = math.inf
    expires: float = math.inf
    watched: float = math.inf
    returned: bool = False


class WaitingLine:
    """Admission to the queue within its limits, and the places of those that were refused.

    Attributes:
        returning: Moving average of the share of clients that return when they were told; 1 before any was expected.
        admitted: Number of places whose clients were admitted, since the start.
        expired: Number of places that were given up, since the start.
    """

    def __init__(self, limits: QueueLimits, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: returns seconds."""
        self.returning, self.admitted, self.expired = 1.0, 0, 0
        self._limits, self._clock, self._counter = limits, clock, itertools.count()
        self._places: dict[bytes, list[_Place]] = {}
        self._expected, self._late = set[_Place](), dict[_Place, None]()  # late the longest first; newcomers pass those
        self._numbers: list[int] = []  # of the expected places, ascending, once for each of a place's requests
        self._tokens = 0  # of all expected places
        self._ends: list[tuple[float, int, _Place]] = []  # heap of times, the number of each entry, and its place

    @property
    def outstanding(self) -> int:
        """Number of places that have not expired."""
        self._expire(self._clock())
        return self._count_places()

    def _count_places(self) -> int:
        """Return the number of places, those included that have expired since `_expire`."""
        return len(self._expected) + len(self._late)

    def admit(self, ticket: Ticket, requests: int, tokens: int, queue: Queue) -> Refusal | None:
        """Return None if the queue takes a request now, which uses up its place; else the refusal, after which it has a
        place. requests: number of the engine's requests that it makes; 0: only ask, and keep the place. tokens: of its
        prompts, or an estimate."""
        now = self._clock()
        self._expire(now)
        same = self._places.get(ticket.key, ())
        # At a first try a place whose time has come may be its own all the same: some clients do not count.
        place = next((each for each in same if not ticket.first or now >= each.due - EARLY_SECONDS), None)
        due = place is not None and now >= place.due - EARLY_SECONDS
        reason, seconds = self._find_limit(queue, 0.0 if due else self._expect_before(place))
        if due and reason:  # the engine is slower than predicted: those before it, in the same position, come first
            _, seconds = self._find_limit(queue, self._expect_before(place))
        if place is not None and due and (reason or requests):
            place.returned = True
        if not reason:
            if place is not None and requests:
                self._remove(place, admitted=True)
            return None
        wait = max(MARGIN * max(seconds, queue.delay), SHORTEST_SECONDS)
        if place is None and ticket.key and self._count_places() >= MOST_PLACES and self._late:
            self._remove(next(iter(self._late)))
        if place is None and ticket.key and self._count_places() < MOST_PLACES:
            place = _Place(ticket.key, next(self._counter), max(1, requests), tokens)
            self._places.setdefault(ticket.key, []).append(place)
        if place is not None:
            place.due = now + wait if due else min(place.due, now + wait)
            wait = max(place.due - now, SHORTEST_SECONDS)
            self._watch(place, place.due + LATE_SECONDS)
            place.expires = place.due + max(GRACE_SECONDS, GRACE_SHARE * wait)
            self._late.pop(place, None)
            if requests:  # only now they are known: a place is made before its request is parsed
                self._expect(place, False)
                place.requests, place.tokens = requests, tokens
            self._expect(place, True)
        return Refusal(reason, min(wait, LONGEST_SECONDS))

    def _find_limit(self, queue: Queue, ahead: float) -> tuple[str, float]:
        """Return the limit that the queue would exceed, "" if none, and the predicted seconds until it would not.
        ahead: expected number of requests that come before the asked one and are not in the queue yet."""
        if queue.waiting <= 0:
            return "", 0.0
        over = math.ceil(queue.waiting + ahead) - self._limits.requests
        reason = "requests" if over > 0 else ""
        excess = queue.tokens + ahead * self._tokens / max(1, len(self._numbers)) - self._limits.tokens
        if excess > 0:
            reason = reason or "tokens"
            freed = itertools.accumulate(queue.prompts())
            over = max(over, 1 + sum(1 for _ in itertools.takewhile(lambda each: each < excess, freed)))
        if reason:
            return reason, queue.predict(over)
        seconds = queue.predict(math.ceil(queue.waiting + ahead)) - self._limits.seconds
        return ("seconds", seconds) if seconds > 0 else ("", 0.0)

    def _expect_before(self, place: _Place | None) -> float:
        """Return the expected number of requests that return to the places before `place`, None: a newcomer's.

        A part of the queue is left to them even if hardly any returned so far: clients change their ways sooner than
        that is known.
        """
        count = len(self._numbers) if place is None else bisect_left(self._numbers, place.number)
        return max(self.returning * count, min(count, self._limits.requests // GUARD))

    def _expect(self, place: _Place, expected: bool) -> None:
        """Let newcomers wait behind `place`, or no longer."""
        if (place in self._expected) is not expected:
            at = bisect_left(self._numbers, place.number)
            if expected:
                self._numbers[at:at] = [place.number] * place.requests
            else:
                del self._numbers[at : at + place.requests]
            self._tokens += place.tokens if expected else -place.tokens
            self._expected ^= {place}

    def _expire(self, now: float) -> None:
        """Remove the places that have expired; expect no longer the clients that are late."""
        while self._ends and self._ends[0][0] <= now:
            when, _, place = heapq.heappop(self._ends)
            if place.returned:
                self.returning += LEARNING * (1 - self.returning)
                place.returned = False
            if place in self._expected and place.due + LATE_SECONDS <= now:
                self.returning -= LEARNING * self.returning
                self._expect(place, False)
                self._late[place] = None
            if place in self._late and place.expires <= now:
                self._remove(place)
            elif when == place.watched and (place in self._expected or place in self._late):
                place.watched = math.inf
                self._watch(place, place.expires if place in self._late else place.due + LATE_SECONDS)

    def _watch(self, place: _Place, when: float) -> None:
        """Look at `place` at the time `when`, unless that is done earlier anyway."""
        if when < place.watched:
            place.watched = when
            heapq.heappush(self._ends, (when, next(self._counter), place))

    def _remove(self, place: _Place, admitted: bool = False) -> None:
        """Remove a place, and count it as admitted or expired."""
        self.admitted += admitted
        self.expired += not admitted
        self._expect(place, False)
        self._late.pop(place, None)
        self._places[place.key].remove(place)
        if not self._places[place.key]:
            del self._places[place.key]
