"""One replica and one request as the front sees them. Free of torch."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from meshwright.errors import RankLost
from meshwright.serving.admission import AnswerShare
from meshwright.serving.blocks import BLOCK_TOKENS
from meshwright.serving.request import Output, Request
from meshwright.serving.speed import StepTimes, Work

COUNTERS = {
    "pauses": "pauses",
    "prefix_queries": "prompt_tokens",
    "prefix_hits": "prefix_hit_tokens",
    "kernel_seconds": "kernel_seconds",
}
"""Figures of a replica that count from the start of its ranks, by their names in a step's report."""
PREDICTION_SECONDS = 0.1
"""For which a predicted wait holds: a long queue takes milliseconds to predict, and many ask."""


class Stream(AsyncIterator[Output]):
    """One admitted request and the outputs that its reader has not taken; they are merged, so that a slow reader costs
    at most one request's tokens.

    Attributes:
        request: The request.
        tokens: Tokens of the answer so far.
        losses: How often a rank was lost while it ran, since its last token.
        replica: Where it runs.
        deadline: Timer that cancels it.
        ended: No further output comes.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.losses = 0
        self.replica: Replica | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self.ended = False
        self._has_prompt_results = False
        self._unread: Output | None = None
        self._error: RankLost | None = None
        self._changed = asyncio.Event()

    def put(self, output: Output) -> None:
        """Append an output of the ranks, less what a replay has repeated."""
        self.tokens += [result.token for result in output.results]
        self.losses = 0 if output.results else self.losses
        if self._has_prompt_results:
            output.prompt_results = None
        self._has_prompt_results |= output.prompt_results is not None
        if self._unread is None:
            self._unread = output
        else:
            self._unread.results += output.results
            self._unread.finish_reason = output.finish_reason
            self._unread.prompt_results = output.prompt_results or self._unread.prompt_results
        self.ended = output.finish_reason is not None
        self._changed.set()

    def fail(self, error: RankLost) -> None:
        """End the stream with an error."""
        self._error, self.ended = error, True
        self._changed.set()

    def resumed(self) -> Request:
        """Return the request with all tokens generated so far, to be computed again."""
        return replace(self.request, replayed=tuple(self.tokens)) if self.tokens else self.request

    async def __anext__(self) -> Output:
        """Return the outputs since the last call, as one."""
        while self._unread is None:
            if self._error is not None:
                raise self._error
            if self.ended:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        output, self._unread = self._unread, None
        return output


class Replica:
    """One replica as the front sees it.

    Attributes:
        index: Number of the replica.
        places: Most sequences that run at once.
        groups: Pipeline groups, one of which a step computes.
        streams: Its requests by ID.
        peers: Connections by rank.
        leader: Address at which the other ranks reach its first one.
        ready: It takes requests.
        has_served: It has computed a token since its ranks were started.
        heard: Monotonic time of its last message.
        sent: Requests sent to it that `report` does not count yet.
        report: Figures of its last step.
        totals: Figures since the server's start, of ranks that are gone for those that `report` has.
        known: Hashes of blocks that it has probably cached, oldest first.
        speed: Model of its step times.
        answers: How long its answers are.
        starts: How often its ranks were started and have ended.
        ready_since: Monotonic time at which they became ready.
        lost: Resolved with the reason when the replica cannot go on.
    """

    def __init__(self, index: int, places: int, groups: int = 1) -> None:
        """A replica whose ranks have not been started."""
        self.index, self.places, self.groups, self.starts = index, places, groups, 0
        self.totals: defaultdict[str, float] = defaultdict(float)
        self.speed, self.answers = StepTimes(), AnswerShare()
        self._clear()

    def _clear(self) -> None:
        """Set all that belongs to one start of the ranks."""
        self.streams: dict[str, Stream] = {}
        self.peers: dict[int, asyncio.StreamWriter] = {}
        self.known: OrderedDict[bytes, None] = OrderedDict()
        self.report: dict[str, Any] = {}
        self.leader: str | None = None
        self.lost: asyncio.Future[str] | None = None
        self.ready, self.has_served, self.ready_since = False, False, math.inf
        self.heard, self.sent = 0.0, 0
        self._predicted, self._waits = 0.0, dict[tuple[int, int | None], float]()  # waits predicted since `_predicted`

    def lose(self, reason: str) -> None:
        """Mark the replica as lost; `reason` is a line for the log."""
        self.ready = False
        if self.lost is not None and not self.lost.done():
            self.lost.set_result(reason)

    def forget(self) -> list[Stream]:
        """Forget all that its ranks knew, when they are gone; return its requests."""
        for writer in self.peers.values():
            writer.close()
        for name, source in COUNTERS.items():
            self.totals[name] += self.report.get(source, 0)
        streams = list(self.streams.values())
        self._clear()
        return streams

    def take_report(self, report: dict[str, Any]) -> None:
        """Learn from the report of a step."""
        self.heard, self.report, self.sent = time.monotonic(), report, self.sent - report["added"]
        if self.heard - self._predicted > PREDICTION_SECONDS:
            self._predicted, self._waits = self.heard, {}
        seconds, tokens, keys = report["seconds"], report.get("tokens", 0), report.get("context", 0)
        if seconds and tokens:
            self.totals["steps"] += 1
            self.totals["step_seconds"] += seconds
            self.totals["predicted_seconds"] += self.speed.predict(tokens, keys)
            self.speed.observe(seconds, tokens, keys)

    def stats(self) -> dict[str, float]:
        """Return its figures, as `EngineClient.stats` describes them."""
        now = {name: self.report.get(name, 0) for name in ("running", "waiting", "paused", "free", "cached", "held")}
        since = {name: self.totals[name] + self.report.get(source, 0) for name, source in COUNTERS.items()}
        return {**self.totals, **now, **since}

    @property
    def room(self) -> int:
        """Sequences that it would compute at once beside those that it has; negative: requests that wait."""
        running, waiting = self.report.get("running", 0) + self.report.get("paused", 0), self.report.get("waiting", 0)
        return (0 if waiting else self.places - running) - waiting - self.sent

    @property
    def work(self) -> int:
        """Tokens that it computes before the first one of a new request: prompts, and a block's worth for each answer
        that grows meanwhile."""
        return sum(BLOCK_TOKENS if each.tokens else len(each.request.tokens) for each in self.streams.values())

    def predict_wait(self, more: Sequence[Request], first: int | None = None) -> float:
        """Return the predicted seconds until its queue and `more` have been admitted, or only the `first` of them."""
        key = len(more), first
        if key not in self._waits:
            running = [self._work_left(each) for each in self.streams.values() if each.tokens]
            queued = [each.request for each in self.streams.values() if not each.tokens]
            waiting = [Work(len(each.tokens), self._expect(each, 0)) for each in (*queued, *more)]
            places = self.places
            if self.report.get("waiting", 0):
                places = max(1, self.report["running"] + self.report["paused"])
            self._waits[key] = self.speed.predict_wait(running, waiting[:first], places, self.groups)
        return self._waits[key]

    def _work_left(self, stream: Stream) -> Work:
        """Return what a request that decodes still needs."""
        done = len(stream.tokens)
        return Work(0, self._expect(stream.request, done) - done, len(stream.request.tokens) + done)

    def _expect(self, request: Request, tokens: int) -> int:
        """Return the expected length of an answer that has `tokens` tokens."""
        return self.answers.expect(tokens, request.sampling.max_tokens) if request.sampling.max_tokens else 0

    def cached_blocks(self, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of a prompt the replica has probably cached."""
        return next((count for count, each in enumerate(hashes) if each not in self.known), len(hashes))

    def remember(self, hashes: Sequence[bytes], limit: int) -> None:
        """Note that the replica computes the blocks of a prompt; `limit`: blocks that it can hold."""
        for each in hashes:
            self.known[each] = None
            self.known.move_to_end(each)
        while len(self.known) > limit:
            self.known.popitem(last=False)
