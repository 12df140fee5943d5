"""Refused clients of a server in virtual time: the front (`Replicas`, its waiting line and step-time model) and the
scheduler of each replica are the real ones, on steps of a + b * tokens + c * keys seconds with noise. As in the part
`retries` of bench/serving_load.py, arrivals fall from ten to 0.8 times the capacity. Of the clients refused from then
on, most return once after `Retry-After`, and one in `PROBING` asks again and again to measure the real wait.

    python bench/retry_simulation.py [--samples 20]    # writes bench/results/retry_simulation.json
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

from pydantic_core import from_json

from meshwright.planner.serving.ledger import ServingSizes
from meshwright.serving.rank_starter import LocalStarter, RankPlan
from meshwright.serving.replica import Replica
from meshwright.serving.replicas import Replicas, _RankMessage
from meshwright.serving.request import Output, Request
from meshwright.serving.sampling import Sampling, TokenResult
from meshwright.serving.scheduler import Scheduler, StepBatch
from meshwright.serving.waiting_line import SHORTEST_SECONDS, QueueLimits, Ticket, WaitingLine

sys.path.insert(0, str(Path(__file__).parent))
from common import write_result

STEP_SECONDS, TOKEN_SECONDS, KEY_SECONDS = 0.01, 3e-4, 2e-7
"""Seconds of a step, of each of its tokens, and of each key that they attend to: about a model of 135M parameters on
two cores."""
NOISE = 0.1
"""Standard deviation of the logarithm of a step's time."""
PROBING = 4
"""One of this many refused clients retries continuously."""
QUEUE = 64
"""Limit on waiting requests."""
OVERLOAD, FALL = 6, 32
"""Arrivals of an overload, in multiples of the requests that run and wait, and least number of those after it. The
first overload is five times as long, at least 15 s: that clients stay away is learnt."""
SAMPLES, MOST_CYCLES = 20, 48
"""Probing clients of a case that are enough, and largest number of its cycles."""
RESOLUTIONS = {"retry-after": 1.0, "retry-after-ms": SHORTEST_SECONDS}
"""Shortest wait in seconds that each header of a refusal can say: a server cannot promise shorter ones truthfully."""
PROBE_SECONDS = 0.002
"""Shortest time between two attempts of a probing client."""


@dataclass(frozen=True)
class Case:
    """A setting. prompt, answer: tokens of each request. layout: such as "dp2" or "pp2". returning: share of the
    clients refused in the overload that return once."""

    prompt: int = 64
    answer: int = 32
    layout: str = "dp1"
    returning: float = 0.0


CASES = [
    *itertools.starmap(Case, itertools.product((16, 128, 1000), (16, 128), ("dp1", "dp2", "pp2"))),
    *(Case(returning=share) for share in (0.0, 0.5, 1.0)),
]


@dataclass
class Found:
    """Results about clients refused after the fall. capacity: answers per second. retried: for each client that
    returned once, True if it was admitted then. waits: (promised, actual) seconds of each probing client."""

    capacity: float = 0.0
    retried: list[bool] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)

    def summarise(self) -> dict[str, Any]:
        ratios = [promised / actual for promised, actual in self.waits]
        median = statistics.median(each for _, each in self.waits) if ratios else None
        coarse = [name for name, shortest in RESOLUTIONS.items() if median is not None and median < shortest]
        return {
            "capacity_requests_per_second": round(self.capacity, 2),
            "clients_that_returned": len(self.retried),
            "share_that_succeed_at_first_retry": round(statistics.fmean(self.retried), 3) if self.retried else None,
            "clients_that_probed": len(self.waits),
            "actual_seconds_median": None if median is None else round(median, 3),
            "headers_that_cannot_say_this_median": coarse,
            "promised_over_actual_quartiles": [round(each, 2) for each in statistics.quantiles(ratios)]
            if len(ratios) > 1
            else None,
        }


class Rank:
    """First rank of a replica: takes the front's messages at the start of a step, and reports the step at its end. It
    also stands for the front's connection to it (`is_closing`, `write`)."""

    def __init__(self, server: Server, replica: Replica, sizes: ServingSizes) -> None:
        self._server, self._replica, self._stages = server, replica, replica.groups
        self._scheduler = Scheduler(sizes, groups=self._stages)
        self._inbox: list[dict[str, Any]] = []
        self._batches: dict[int, StepBatch | None] = {}  # by slot, those in the pipeline
        self._busy, self._slot = False, 0
        replica.report = self._scheduler.stats

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self._inbox.append(from_json(data[4:])["add"])
        if not self._busy:
            self._begin_step()

    def _begin_step(self) -> None:
        for asked in self._inbox:
            self._scheduler.add(self._server.make_request(asked["id"], asked["tokens"]))
        self._inbox.clear()
        self._busy = not self._scheduler.idle or any(self._batches.values())
        if not self._busy:
            return
        batch = self._batches[self._slot] = self._scheduler.schedule(self._slot % self._stages)
        sizes = [(len(each.tokens), each.keys) for each in self._batches.values() if each is not None]
        longest = max((tokens * TOKEN_SECONDS + keys * KEY_SECONDS for tokens, keys in sizes), default=0.0)
        seconds = (STEP_SECONDS + longest) / self._stages * self._server.draw.lognormvariate(0, NOISE)
        figures = {} if batch is None else {"tokens": len(batch.tokens), "context": batch.keys}
        self._server.at(seconds, lambda: self._end_step(figures | {"seconds": seconds}))

    def _end_step(self, figures: dict[str, Any]) -> None:
        batch = self._batches.pop(self._slot - self._stages + 1, None)
        self._slot += 1
        outputs: list[Output] = []
        if batch is not None:
            outputs = self._scheduler.record_results(batch, [TokenResult(1)] * len(batch.output_rows))
        report = figures | self._scheduler.stats
        self._server.front._take_step(self._replica, _RankMessage(outputs=outputs, step=report))
        self._begin_step()


class Server:
    """A server in virtual time, and its clients."""

    def __init__(self, case: Case) -> None:
        self.case, self.draw, self.now, self.fell = case, random.Random(0), 0.0, 0.0
        sizes = ServingSizes(max_length=4096, blocks=64 * 80)
        limits = QueueLimits(QUEUE)
        self.front = Replicas(RankPlan("", case.layout, sizes), LocalStarter(), limits=limits)
        self.front._line, self.front._state = WaitingLine(limits, lambda: self.now), "ready"
        for replica in self.front._replicas:
            replica.peers[0], replica.ready = cast("Any", Rank(self, replica, sizes)), True
            self.front.hellos[replica.index, 0] = {"block_tables": 1}
        self.room = sizes.max_sequences * len(self.front._replicas) + QUEUE
        self.found = Found()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order, self._refused, self._absent = itertools.count(), 0, 0

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        """Let `event` happen in `seconds`."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        ends = self.now + seconds
        with mock.patch("time.monotonic", lambda: self.now):
            while self._events and self._events[0][0] <= ends:
                self.now, _, event = heapq.heappop(self._events)
                event()
        self.now = ends

    def drain(self) -> None:
        """Let time pass until all clients are gone."""
        while self._events:
            self.run(1.0)

    def make_request(self, name: str, tokens: list[int]) -> Request:
        return Request(name, tuple(tokens), Sampling(max_tokens=self.case.answer))

    def draw_request(self) -> Request:
        tokens = self.draw.choices(range(1, 30_000), k=self.case.prompt)
        return self.make_request(str(next(self._order)), tokens)

    def ask(self, request: Request, ended: Callable[[], None] = lambda: None) -> float | None:
        """Ask as the HTTP server does, before and after the body has been parsed. Return `Retry-After` if refused."""
        ticket = Ticket(request.id.encode(), 4 * len(request.tokens))
        refusal = self.front.admit((), ticket) or self.front.admit([request], ticket)
        if refusal is not None:
            return refusal.retry_after_seconds
        self.front.submit(request, lambda output: ended() if cast("Output", output).finish_reason else None)
        return None

    def measure_capacity(self, answers: int) -> float:
        """Answers per second of a closed loop that keeps all sequences and a part of the queue busy, over the second
        half of `answers` answers."""
        times: list[float] = []

        def start() -> None:
            self.at(0.0, lambda: self.ask(self.draw_request(), end) and None)

        def end() -> None:
            times.append(self.now)
            if len(times) < answers:
                start()

        for _ in range(self.room - 3 * QUEUE // 4):
            start()
        self.drain()
        half = answers // 2
        self.found.capacity = (answers - half) / (times[answers - 1] - times[half - 1])
        return self.found.capacity

    def arrive(self, rate: float, count: float, returning: float) -> None:
        """Poisson arrivals at `rate` per second, about `count` of them. returning: share of refused clients that come
        back."""
        when = self.draw.expovariate(rate)
        while when < count / rate:
            self.at(when, lambda: self._come(self.draw.random() < returning))
            when += self.draw.expovariate(rate)
        self.run(count / rate)

    def fall(self, rate: float) -> None:
        """Let arrivals fall to `rate` per second, until all refused clients have come back."""
        self.fell = self.now
        self.arrive(rate, FALL, returning=1.0)
        while self._absent:
            self.arrive(rate, FALL // 4, returning=1.0)

    def _come(self, returning: bool) -> None:
        request = self.draw_request()
        wait, refused = self.ask(request), self.now
        if wait is None or not returning:
            return
        self._refused += 1
        self._absent += 1
        if self._refused % PROBING == 0:
            self.at(max(PROBE_SECONDS, wait / 20), lambda: self._probe(request, wait, refused))
        else:
            self.at(wait + 0.003 * self.draw.random(), lambda: self._retry(request, refused))

    def _retry(self, request: Request, refused: float) -> None:
        admitted, self._absent = self.ask(request) is None, self._absent - 1
        if refused >= self.fell:
            self.found.retried.append(admitted)

    def _probe(self, request: Request, promised: float, refused: float) -> None:
        if self.ask(request) is not None:
            self.at(max(PROBE_SECONDS, promised / 20), lambda: self._probe(request, promised, refused))
            return
        self._absent -= 1
        if refused >= self.fell:
            self.found.waits.append((promised, self.now - refused))


def simulate(case: Case, samples: int = SAMPLES) -> Found:
    """Simulate cycles of ten times the capacity, then 0.8 times it, until `samples` clients have probed, or
    `MOST_CYCLES` of them."""
    server = Server(case)
    capacity = server.measure_capacity(3 * server.room)
    for cycle in range(MOST_CYCLES):
        count = OVERLOAD * server.room if cycle else max(5 * OVERLOAD * server.room, 150 * capacity)
        server.arrive(10 * capacity, count, case.returning)
        server.fall(0.8 * capacity)
        if len(server.found.waits) >= samples:
            break
    return server.found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="probing clients of a case that are enough")
    options = parser.parse_args()
    rows = []
    with ProcessPoolExecutor() as pool:
        for case, found in zip(CASES, pool.map(partial(simulate, samples=options.samples), CASES), strict=True):
            rows.append({**asdict(case), **found.summarise()})
            print(*rows[-1].values(), flush=True)
    write_result("retry_simulation", {"samples": options.samples, "cases": rows}, quiet=True)


if __name__ == "__main__":
    main()
