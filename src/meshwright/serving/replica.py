"""State of one replica, and of its unfinished requests, in the front (the HTTP server's process). Free of
torch."""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, cycle, islice
from typing import Any

from meshwright.processes import STOPPED
from meshwright.serving.admission import AnswerLengthRatio
from meshwright.serving.request import Output, Request
from meshwright.serving.speed import StepTimes, Work
from meshwright.spec.block_tables import BLOCK_TOKENS

COUNTERS = ("pauses", "prefix_queries", "prefix_hits", "kernel_seconds")
"""Figures of a step's report that are totals since the start of the replica's ranks."""
PREDICTION_SECONDS, PREDICTION_SHARE = 0.02, 0.02
"""Age up to which a prediction of ends is reused; if longer, the age at which predictions take this share of time."""
MAX_PREDICTED = 256
"""Number of ends that are predicted one by one; the time of more is proportional to their number."""

TIMES_PREDICTED = 10.0
"""Multiple of its predicted time up to which a step does not count as hanging."""
FIRST_STEP_SECONDS = 60.0
"""Least time limit of a step while no step has been measured."""
MAX_DOUBLINGS = 4
"""How often the time limit of a step may be doubled, so that a rank that hangs is found."""
SLEEP_SECONDS = 1.2
"""Seconds for which a rank may be stopped, or all ranks of a replica with requests may sleep; with an interval between
two looks before it less than 2 s."""


OutputCallback = Callable[[Output | Exception], None]
"""Function that is called with each output of a request, on the event loop's thread, or with the error because of which
the request cannot be finished. An output with a finish reason, or an error, is the last call. It must not raise."""


class Stream:
    """An unfinished request, its tokens so far and the callback for its outputs.

    Attributes:
        request: The request.
        on_output: Called with each output or an error.
        tokens: IDs of the tokens generated so far.
        losses: Number of times that a rank was lost while the request ran; 0 again after each new token.
        replica: Replica (data-parallel copy of the model) that runs the request; None while no replica is ready.
        deadline: Timer that cancels the request; None without a deadline.
    """

    def __init__(self, request: Request, on_output: OutputCallback) -> None:
        """Start without tokens; arguments: the attributes of the same names."""
        self.request, self.on_output = request, on_output
        self.tokens: list[int] = []
        self.losses = 0
        self.replica: Replica | None = None
        self.deadline: asyncio.TimerHandle | None = None

    def put(self, output: Output) -> None:
        """Store the tokens of an output of the engine, and pass it on to the callback."""
        if output.results:
            self.tokens += [result.token for result in output.results]
            self.losses = 0
        self.on_output(output)


class Replica:
    """State of one replica (data-parallel copy of the model on a group of ranks) in the front, the process of the HTTP
    server. At first its ranks have not been started.

    Attributes:
        index: Number of the replica, from 0.
        groups: Number of pipeline groups of its sequences; a step computes one of them.
        streams: {request ID: stream} of its unfinished requests.
        peers: {rank: connection} of its ranks.
        ready: True if it accepts requests.
        has_served: True if it has generated a token since its ranks were started.
        removed: Streams that have ended, one list for each of the last steps; a step in progress may still compute
            them.
        last_message: Time of the last message from its ranks, in seconds of `time.monotonic`.
        silent: Seconds since then in which it had requests and this process ran.
        report: Figures of its last step, from `Engine.report`.
        totals: {name: sum since the server's start}. Figures that `report` counts too (`COUNTERS`), such as
            prefix-cache hits, are summed here over earlier starts of the ranks only; `stats` adds the count of the
            present start.
        cached_hashes: Hashes of KV blocks that its prefix cache probably holds, the least recently used first (keys;
            values None).
        step_times: Predictor of step times.
        answer_lengths: Predictor of answer lengths.
        starts: Number of starts of its ranks that have ended.
        hangs: Number of times that a step exceeded its time limit since the last completed step.
        lost_since: Time of its last loss, in seconds of `time.monotonic`; inf before.
        ready_since: Time at which it became ready, in seconds of `time.monotonic`; inf before.
        lost: Future that gets the reason when the replica is lost; None before its first start.
    """

    def __init__(self, index: int, groups: int = 1) -> None:
        """Create a replica whose ranks have not been started; arguments: the attributes of the same names."""
        self.index, self.groups, self.starts, self.hangs = index, groups, 0, 0
        self.totals: defaultdict[str, float] = defaultdict(float)
        self.step_times, self.answer_lengths, self.lost_since = StepTimes(), AnswerLengthRatio(), math.inf
        self._reset_start()

    def _reset_start(self) -> None:
        """Set the attributes that concern the present rank processes, such as connections and streams, to their initial
        values: no rank process has been started."""
        self.streams: dict[str, Stream] = {}
        self.removed = deque[list[Stream]](([] for _ in range(self.groups + 1)), self.groups + 1)
        self.peers: dict[int, asyncio.StreamWriter] = {}
        self.cached_hashes: OrderedDict[bytes, None] = OrderedDict()
        self.report: dict[str, Any] = {}
        self.lost: asyncio.Future[str] | None = None
        self.ready, self.has_served, self.ready_since = False, False, math.inf
        self.last_message = self.silent = 0.0
        self._sleeps: dict[tuple[int, str], float] = {}  # of each rank when last looked at: seconds without change
        self._valid = -math.inf  # end of the time in which a prediction is reused
        self._ends = list[float]()  # the prediction

    def mark_lost(self, reason: str) -> None:
        """Mark the replica as lost, so that its ranks are ended and restarted. reason: one line for the log."""
        self.ready = False
        if self.lost is not None and not self.lost.done():
            self.lost.set_result(reason)

    def reset(self) -> list[Stream]:
        """Reset the replica after its ranks have ended: close connections, and add its counters to `totals`. Return the
        streams of its unfinished requests."""
        for writer in self.peers.values():
            writer.close()
        for name in COUNTERS:
            self.totals[name] += self.report.get(name, 0)
        streams, self.lost_since = list(self.streams.values()), time.monotonic()
        self._reset_start()
        return streams

    def take_report(self, report: dict[str, Any]) -> None:
        """Store the figures of a step and update the model of step times. report: dictionary of `Engine.report`,
        extended by `seconds`, the duration of the step."""
        self.last_message, self.silent, self.report = time.monotonic(), 0.0, report
        self.removed.append([])
        seconds, tokens, keys = report["seconds"], report.get("tokens", 0), report.get("context", 0)
        if seconds and tokens:
            self.hangs = 0
            self.totals["steps"] += 1
            self.totals["step_seconds"] += seconds
            self.totals["predicted_seconds"] += self.step_times.predict(tokens, keys)
            self.step_times.observe(seconds, tokens, keys)

    def find_hang(self, sleeps: Mapping[int, str], seconds: float) -> str:
        """Return why the replica hangs, as one line for the log: a rank has been stopped for `SLEEP_SECONDS`, also
        while the replica has no request, or all ranks have slept for as long while it has one; "" otherwise. To be
        called every `seconds`, so that time for which this process was stopped does not count. sleeps: {rank: result of
        `read_sleep`}, empty if the ranks cannot be looked at."""
        before, self._sleeps = self._sleeps, {}
        for rank, text in sleeps.items():
            counts = text and (self.streams or text.startswith(STOPPED))
            since = before.get((rank, text), -seconds) + seconds if counts else -seconds
            self._sleeps[rank, text] = since
            if since >= SLEEP_SECONDS and text.startswith(STOPPED):
                return f"rank {rank} was stopped for {since:.3g} s"
        asleep = min(self._sleeps.values(), default=0.0)
        return f"all of its ranks slept for {asleep:.3g} s in a step" if asleep >= SLEEP_SECONDS else ""

    def stats(self) -> dict[str, float]:
        """Return the replica's figures by name; a missing key counts as 0.

        Numbers of sequences now: `running`, `waiting`, `paused` (it keeps its KV blocks and waits for more). Numbers of
        KV blocks now: `free`, `cached`, `held`. Totals since the server's start:
        - `steps`; `step_seconds`: their measured time, from one schedule to the next; `kernel_seconds`: the part of it
          in the runner's forward passes; `predicted_seconds`: predicted time of the same steps
        - `pauses` of sequences; `restarts` after a lost rank
        - `prefix_queries` and `prefix_hits`: prompt tokens looked up and found in the prefix cache
        """
        now = {name: self.report.get(name, 0) for name in ("running", "waiting", "paused", "free", "cached", "held")}
        return {**self.totals, **now, **{name: self.totals[name] + self.report.get(name, 0) for name in COUNTERS}}

    @property
    def pending_tokens(self) -> int:
        """Estimated number of tokens that the replica will compute before a new request gets its first token. Used to
        balance load over replicas. A request without a generated token counts with the length of its prompt, every
        other request with `BLOCK_TOKENS`."""
        return sum(BLOCK_TOKENS if each.tokens else len(each.request.tokens) for each in self.streams.values())

    def predict_ends(self) -> list[float]:
        """Return the predicted times, in seconds of `time.monotonic`, at which requests end, ascending: as many as
        there are unfinished requests, at most `MAX_PREDICTED`. The queue is assumed to continue with requests like the
        unfinished ones."""
        now, places = time.monotonic(), self.report["places"]
        # Those that have passed leave those of the requests that go on.
        self._ends = self._ends[bisect_left(self._ends, self.last_message) :] if self.streams else []
        if self.streams and (now > self._valid or not self._ends):
            streams = sorted(self.streams.values(), key=lambda each: not each.tokens)  # those that run come first
            streams = streams[: places + MAX_PREDICTED]  # later ones begin after the last end that is predicted
            works = [self._estimate_work(each, len(each.tokens)) for each in streams]
            works += islice(cycle([self._estimate_work(each, 0) for each in streams]), places)
            ends = self.step_times.predict_ends(works, places, self.report["prompt_tokens"], self.groups)
            # The state is the last step's.
            self._ends = [self.last_message + each for each in ends[: min(len(streams), MAX_PREDICTED)]]
            self._valid = now + max(PREDICTION_SECONDS, (time.monotonic() - now) / PREDICTION_SHARE)
        return self._ends

    def compute_step_limit(self, seconds: float, budget: int) -> float:
        """Return the time limit of the present step in seconds, above which the replica counts as hanging even if its
        ranks compute. The limit is the largest of three times: (1) `seconds` (`FIRST_STEP_SECONDS` if that is longer
        and no step has been measured), doubled for each hang since the last completed step, at most `MAX_DOUBLINGS`
        times; (2) ten times the predicted time of the longest step that the requests may need now: a token of each that
        decodes, and the prompts of the others; (3) the predicted time of computing the same tokens in steps of one
        token, because prediction (2) is wrong while no step of as many tokens is remembered. budget: maximum number of
        tokens of a step."""
        streams = [*self.streams.values(), *chain(*self.removed)]
        known = [(each, len(each.request.tokens) + len(each.tokens)) for each in streams]
        # Of a request that does not decode yet, all tokens may be still to be computed.
        tokens = min(budget, sum(1 if each.tokens and not each.losses else count for each, count in known))
        longest = max((count for _, count in known), default=0)
        alone = self.step_times.predict(1, longest)
        return max(
            (seconds if alone else max(seconds, FIRST_STEP_SECONDS)) * 2.0 ** min(self.hangs, MAX_DOUBLINGS),
            TIMES_PREDICTED * self.step_times.predict(tokens, tokens * longest),
            tokens * alone,
        )

    def _estimate_work(self, stream: Stream, done: int) -> Work:
        """Return the predicted remaining work of the request of `stream` when `done` tokens of its answer have been
        generated; 0: its prompt is still to be computed."""
        prompt, most = len(stream.request.tokens), stream.request.sampling.max_tokens
        answer = self.answer_lengths.predict_length(done, most) - done
        return Work(0, answer, prompt + done) if done else Work(prompt, answer)

    def count_cached_blocks(self, hashes: Sequence[bytes]) -> int:
        """Return the number of a prompt's first KV blocks that the replica's prefix cache probably has. hashes: hash of
        each full block of the prompt, in order."""
        return next((count for count, each in enumerate(hashes) if each not in self.cached_hashes), len(hashes))

    def remember(self, hashes: Sequence[bytes], limit: int) -> None:
        """Record that the replica's prefix cache gets the KV blocks with the hashes `hashes`. Keep at most `limit`
        hashes, the number of blocks in its pool, by dropping the least recently used hashes."""
        for each in hashes:
            self.cached_hashes[each] = None
            self.cached_hashes.move_to_end(each)
        while len(self.cached_hashes) > limit:
            self.cached_hashes.popitem(last=False)
