"""Overload and retries, parts of bench/serving_load.py: arrivals beyond the capacity."""

from __future__ import annotations

import argparse
import asyncio
import collections
import math
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from load_server import ANSWER, PROMPT, all_blocks, promised_wait, settled
from serving_client import Client, RequestFailed, Response, check_stream, completion
from serving_models import VOCABULARY
from serving_peers import Server, session_memory

PROBING = 4
"""One of this many refused clients retries continuously."""
MOST_SECONDS = 60.0
"""After which a probing client gives up."""
QUEUE = 64
"""Limit on waiting requests of the server (`--queue-requests`)."""
ENOUGH_PROBED, ENOUGH_RETURNED = 20, 60
"""Samples that a result about retries needs: probing clients, and clients that returned once."""


class Arrivals:
    """Open-loop clients: Poisson arrivals at a rate, each sends one short request; results are counted. refused: number
    of clients of earlier arrivals that came back after a refusal."""

    def __init__(self, client: Client, seed: int, refused: int = 0) -> None:
        self.client = client
        self.draw = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.retried: list[bool] = []
        self.waits: list[tuple[float, float]] = []  # probing clients: predicted seconds, seconds until admission
        self._refused = refused  # returning clients
        self.first_token: list[float] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, rate: float, seconds: float, retry: bool = False) -> None:
        """Arrivals at `rate` (per second) for `seconds`; with `retry`, refused clients come back once, after the
        `Retry-After` of their refusal, and one in `PROBING` again and again."""
        ends = at = time.monotonic()
        ends += seconds
        while at < ends:
            await asyncio.sleep(max(at - time.monotonic(), 0))
            task = asyncio.create_task(self._ask(retry))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            at += self.draw.expovariate(rate)

    async def finish(self, seconds: float = 120) -> None:
        """Wait for all answers; those that do not come are counted as `unanswered`."""
        if self._tasks:
            _, pending = await asyncio.wait(self._tasks, timeout=seconds)
            self.counts["unanswered"] += len(pending)
            for task in pending:
                task.cancel()

    async def _ask(self, retry: bool) -> None:
        body = completion("m", [self.draw.randrange(259, VOCABULARY) for _ in range(PROMPT)], ANSWER)
        body["stream"] = stream = self.draw.random() < 0.5
        if not stream:
            del body["stream_options"]
        response = await self._post(body)
        if response is None or self._is_done(response):
            return
        wait = promised_wait(response)
        if wait is None or not retry:
            return
        self._refused += 1
        if self._refused % PROBING == 1:
            await self._probe(body, response.ended, wait)
        else:
            await asyncio.sleep(wait)
            again = await self._post(body)
            self.retried.append(again is not None and self._is_done(again))

    async def _probe(self, body: dict[str, Any], refused: float, promised: float) -> None:
        """Measure how long a request that was refused at the time `refused` really had to wait: it is asked again
        twenty times in the promised seconds, until it is admitted."""
        asked = refused
        while asked - refused < MOST_SECONDS:
            await asyncio.sleep(max(0.005, promised / 20))
            response = await self._post(body)
            asked = time.perf_counter() if response is None else response.sent
            if response is not None and self._is_done(response):
                break
        self.waits.append((promised, asked - refused))

    async def _post(self, body: dict[str, Any]) -> Response | None:
        try:
            return await self.client.post("/v1/completions", body)
        except OSError as error:
            self._note("connection", repr(error))
            return None

    def _is_done(self, response: Response) -> bool:
        """Count a response; True if the request was admitted."""
        status = 0 if response.lost else response.status
        self.counts[str(status)] += 1
        if status == 200:
            try:
                if b"text/event-stream" in response.raw()[:1000]:
                    check_stream(response, ANSWER)
                    self.first_token.append(response.arrivals()[0])
                elif response.json()["usage"]["completion_tokens"] != ANSWER:
                    raise RequestFailed("wrong length")
            except (RequestFailed, KeyError, ValueError, IndexError) as error:
                self._note("incomplete", repr(error))
            return True
        if status != 429:
            self._note("other", f"{status} {response.body()[:200]!r}")
        elif promised_wait(response) is None:
            self._note("no_retry_after", repr(response.headers()))
        return False

    def _note(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        if len(self.wrong) < 20:
            self.wrong.append(f"{kind}: {what[:300]}")


async def capacity(client: Client, seconds: float = 20, concurrency: int = 48) -> float:
    """Requests per second of a closed loop, over `seconds` or longer: until there are as many answers as clients. All
    clients send requests until then; answers that come later do not count."""
    begun, done, taken = time.monotonic(), 0, 0.0
    draw = random.Random(1)

    async def loop() -> None:
        nonlocal done, taken
        while not taken:
            body = completion("m", [draw.randrange(259, VOCABULARY) for _ in range(PROMPT)], ANSWER)
            check_stream(await client.post("/v1/completions", body), ANSWER)
            if not taken:
                done += 1
                now = time.monotonic() - begun
                taken = now if done >= concurrency and now >= seconds else 0.0

    await asyncio.gather(*(loop() for _ in range(concurrency)))
    return done / taken


async def overload(server: Server, client: Client, options: argparse.Namespace) -> dict[str, Any]:
    """Ten times the capacity for some minutes."""
    every = await all_blocks(client)
    rate = await capacity(client)
    arrivals = Arrivals(client, seed=2)
    memory: list[tuple[float, int, int]] = []  # seconds, bytes of the front process, bytes of all processes
    begun = time.monotonic()

    async def watch() -> None:
        while True:
            # Without file pages, whose share per process depends on other programs that map the same libraries.
            taken = await asyncio.to_thread(session_memory, server.process.pid, ("Pss_Anon", "Pss_Shmem"))
            memory.append((time.monotonic() - begun, taken.get(server.process.pid, 0), sum(taken.values())))
            await asyncio.sleep(2)

    watching = asyncio.create_task(watch())
    await arrivals.run(10 * rate, 60 * options.minutes)
    watching.cancel()
    await arrivals.finish()
    tenth = max(len(memory) // 10, 1)
    # The first tenth is warm-up of kernel, allocator and prefix caches.
    early = statistics.median(taken for *_, taken in memory[tenth : 2 * tenth] or memory)
    late = statistics.median(taken for *_, taken in memory[-tenth:])
    growth = late / early - 1
    admitted = arrivals.counts["200"]
    bad = {
        kind: arrivals.counts[kind] for kind in ("unanswered", "incomplete", "other", "connection", "no_retry_after")
    }
    return {
        "capacity_requests_per_second": round(rate, 2),
        "minutes": options.minutes,
        "counts": dict(arrivals.counts),
        "wrong": arrivals.wrong,
        "admitted_per_second": round(admitted / (60 * options.minutes), 2),
        "ttft_of_admitted_median": round(statistics.median(arrivals.first_token or [math.nan]), 3),
        "memory_mib_second_tenth": round(early / 2**20, 1),
        "memory_mib_last_tenth": round(late / 2**20, 1),
        "memory_growth_percent": round(100 * growth, 3),
        "memory_mib": [
            {"seconds": round(at), "front": round(front / 2**20, 1), "ranks": round((taken - front) / 2**20, 1)}
            for at, front, taken in memory[:: max(len(memory) // 20, 1)]
        ],
        "after": await settled(client, every),
        "passed": growth < 0.01 and admitted > 0 and not any(bad.values()),
    }


async def retries(server: Server, client: Client, options: argparse.Namespace) -> dict[str, Any]:
    """Cycles of ten times the capacity, then 0.8 times it, when refused clients come back: at least `--cycles`, until
    there are enough samples or, after them, until `--minutes` have passed."""
    rate = await capacity(client, 15)
    retried: list[bool] = []
    waits: list[tuple[float, float]] = []
    wrong: list[str] = []
    begun, cycles = time.monotonic(), 0
    while cycles < options.cycles or (
        (len(waits) < ENOUGH_PROBED or len(retried) < ENOUGH_RETURNED)
        and time.monotonic() - begun < 60 * options.minutes
    ):
        arrivals = Arrivals(client, seed=10 + cycles, refused=len(retried) + len(waits))
        cycles += 1
        await arrivals.run(10 * rate, max(15, 3 * QUEUE / rate))  # several waits: that clients stay away is learnt
        await arrivals.run(0.8 * rate, max(10, 3 * QUEUE / rate), retry=True)  # refusals come while the queue is full
        await arrivals.finish()
        retried += arrivals.retried
        waits += arrivals.waits
        wrong += arrivals.wrong
    return {
        "capacity_requests_per_second": round(rate, 2),
        "cycles": cycles,
        "refused_after_the_fall": len(retried) + len(waits),
        "wrong": wrong,
        **judge_retries(retried, waits),
    }


def judge_retries(retried: list[bool], waits: list[tuple[float, float]]) -> dict[str, Any]:
    """Figures of refused clients and the verdict. retried: for each client that returned once, True if it was admitted
    then. waits: (promised, actual) seconds of each probing client."""
    share = sum(retried) / len(retried) if retried else math.nan
    ratios = sorted(promised / actual for promised, actual in waits)
    ratio = statistics.median(ratios) if ratios else math.nan
    few = [
        f"{len(found)} clients {did}, {needed} needed"
        for found, did, needed in ((waits, "probed", ENOUGH_PROBED), (retried, "returned", ENOUGH_RETURNED))
        if len(found) < needed
    ]
    verdict = "share and ratio as asked" if share >= 0.9 and 1 / 1.5 <= ratio <= 1.5 else "share or ratio missed"
    return {
        "clients_that_returned": len(retried),
        "clients_that_probed": len(waits),
        "share_that_succeed_at_first_retry": round(share, 4) if retried else None,
        "promised_seconds_median": round(statistics.median(each for each, _ in waits), 3) if waits else None,
        "actual_seconds_median": round(statistics.median(each for _, each in waits), 3) if waits else None,
        "promised_over_actual_median": round(ratio, 3) if waits else None,
        "promised_over_actual_quartiles": [round(ratios[len(ratios) * part // 4], 3) for part in (1, 3) if ratios],
        "verdict": f"too few samples: {', '.join(few)}" if few else verdict,
        "passed": not few and verdict == "share and ratio as asked",
    }
