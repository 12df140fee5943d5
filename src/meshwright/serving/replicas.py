"""Replicas of a server: dispatch of requests to them, and recovery after a lost rank.

Each replica is a group of rank processes (`ranks.py`). When one ends or a step hangs, all of them are started again and
replay the tokens of unfinished requests, which gives the same state bit for bit. Free of torch."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import TypeAdapter
from pydantic_core import from_json

from meshwright.errors import MeshwrightError, RankLost, UserError
from meshwright.layout import Layout
from meshwright.processes import read_sleep
from meshwright.serving import messages
from meshwright.serving.blocks import HashChain
from meshwright.serving.messages import Message
from meshwright.serving.rank_starter import JoinedStarter, LocalStarter, RankPlan
from meshwright.serving.replica import OutputCallback, Replica, Stream
from meshwright.serving.request import Output, Request
from meshwright.serving.waiting_line import QueueForecast, QueueLimits, Refusal, Ticket, WaitingLine
from meshwright.spec.block_tables import BLOCK_TOKENS

State = Literal["starting", "ready", "recovering", "draining", "failed"]

LOSSES_OF_REQUEST = 3
"""Losses of a rank, without a new token in between, after which a running request fails, as it may be the cause."""
LOSSES_OF_REPLICA = 5
"""Consecutive losses of a replica, without a token in between, after which the server ends."""
FIRST_DELAY, LONGEST_DELAY = 0.1, 10.0
"""Delay in seconds of a restart after two consecutive losses, doubled for each further one; largest delay."""
SAME_ON_ALL_RANKS = ("instruction_set", "kernels")
"""Properties that must be equal on all ranks, since answers depend on them."""
STEADY_SECONDS = 60.0
"""Seconds of being ready after which a loss does not count as consecutive."""
STOP_SECONDS = 2.0
"""Seconds that ranks get to exit by themselves when the server ends."""
LOOK_SECONDS = 0.4
"""Interval in seconds between checks for ranks that are stopped and steps that hang."""


@dataclass(frozen=True, slots=True)
class _RankMessage:
    """Message of a replica's first rank. ready: figures of its idle engine, once it has started. outputs, step: the new
    outputs of one step, and its figures."""

    ready: dict[str, Any] | None = None
    outputs: list[Output] = field(default_factory=list)
    step: dict[str, Any] = field(default_factory=dict)


_RANK_MESSAGES = TypeAdapter(_RankMessage)


class Replicas:
    """All replicas (data-parallel copies of the model) of a server, in the front (the HTTP server's process): runs its
    requests, starts the rank processes, and restarts lost ones. Methods are called on the event loop's thread.

    plan: settings of the ranks. starter: starts the ranks of a replica. limits: limits on the queue. host: address of
    this machine at which ranks of other machines reach it; "": all ranks are on this machine. log: called with one line
    for each loss and restart."""

    def __init__(
        self, plan: RankPlan, starter: LocalStarter | JoinedStarter, *, limits: QueueLimits | None = None,
        host: str = "", log: Callable[[str], None] = lambda line: None,
    ) -> None:  # fmt: skip
        """Create the replicas of the plan's layout, without starting their ranks; arguments: see the class."""
        layout = Layout.parse(plan.layout)
        self.plan, self._host = plan, host
        self.hellos: dict[tuple[int, int], dict[str, Any]] = {}  # first message of each rank, by (replica, rank)
        self.failure: MeshwrightError | None = None
        self._starter, self._limits, self._log = starter, limits or QueueLimits(), log
        self._line = WaitingLine(self._limits)
        self._replicas = [Replica(index, layout.pp) for index in range(layout.dp)]
        self._streams: dict[str, Stream] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._server: asyncio.Server | None = None
        self._state: State = "starting"
        self._changed = asyncio.Event()

    # --- for the HTTP server

    @property
    def state(self) -> State:
        """State of the engine: "starting", "ready", "recovering" (a replica is not ready), "draining" or "failed"."""
        if self._state == "ready" and not all(replica.ready for replica in self._replicas):
            return "recovering"
        return self._state

    @property
    def properties(self) -> Mapping[str, Any]:
        """Properties of the engine as JSON: layout, dtype, threads, sizes, instruction set and kernel version (or the
        reason why plain torch is used instead), rank processes."""
        plan, sizes, first = self.plan, self.plan.sizes, next(iter(self.hellos.values()), {})
        return {
            "layout": plan.layout.replace(":nosp", ""),  # a step's tokens are never split over tp
            "dtype": sizes.dtype, "threads": sizes.threads, "kv_blocks": sizes.blocks, "max_length": sizes.max_length,
            "max_sequences": sizes.max_sequences, "token_budget": sizes.token_budget,
            "ranks": [{name: hello[name] for name in ("replica", "rank", "pid")} for hello in self.hellos.values()],
            **{name: first.get(name) for name in SAME_ON_ALL_RANKS}, "plain_torch": plan.plain_torch or None,
        }  # fmt: skip

    @property
    def max_requests(self) -> int:
        """Maximum number of unfinished requests at a time, in the queue and on all replicas together."""
        return self._limits.requests + len(self._replicas) * self.plan.sizes.max_sequences

    @property
    def idle(self) -> bool:
        """True if no request waits or runs."""
        return not self._streams

    def admit(self, requests: Sequence[Request], ticket: Ticket) -> Refusal | None:
        """Return None if the queue has room for all of `requests`, else the refusal with the time to retry. Queues
        nothing: the caller must `submit` before its next await. ticket: identity of the HTTP request, by which its
        retry is recognized. Without `requests`: find out whether even the shortest request would be refused."""
        if self._state in ("starting", "draining", "failed"):
            return Refusal(self._state, 1.0)
        ready = [replica for replica in self._replicas if replica.ready]
        waiting = len(self._streams) + max(1, len(requests)) - sum(replica.report["places"] for replica in ready)
        asked = sum(len(request.tokens) for request in requests)
        prompts = [len(stream.request.tokens) for stream in self._streams.values() if not stream.tokens]

        now = time.monotonic()
        began = max((replica.last_message for replica in ready if replica.streams), default=now)
        ends: list[float] = []  # sorted when they are needed

        def predict(count: int) -> float:
            """Return the predicted seconds until `count` requests have ended; 1 if none runs on a ready replica."""
            if not ends:
                ends.extend(sorted(end for replica in ready for end in replica.predict_ends()) or [now + 1.0])
            return (ends[min(count, len(ends)) - 1] - began) * max(1.0, count / len(ends))

        queue = QueueForecast(waiting, prompts, sum(prompts) + max(1, asked), predict, now - began)
        return self._line.admit(ticket, len(requests), asked or ticket.tokens, queue)

    def submit(self, request: Request, on_output: OutputCallback) -> None:
        """Queue a request. on_output: called with each of its outputs, of which the last has a finish reason, or with
        the error that ends it; it must not raise."""
        assert request.id not in self._streams, request.id
        stream = self._streams[request.id] = Stream(request, on_output)
        if request.deadline is not None:
            left = max(0.0, request.deadline - time.time())
            stream.deadline = asyncio.get_running_loop().call_later(left, self._time_out, stream)
        self._dispatch(stream)

    def cancel(self, request_id: str) -> None:
        """Cancel the request with the ID `request_id`, whose callback is not called again. Unknown and finished
        requests are ignored."""
        if (stream := self._streams.get(request_id)) is not None:
            if stream.replica is not None:
                self._send_message(stream.replica, {"cancel": request_id})
            self._remove_request(stream)

    def _time_out(self, stream: Stream) -> None:
        """Cancel the request of `stream`, whose deadline has passed."""
        self.cancel(stream.request.id)
        stream.put(Output(stream.request.id, [], "timeout"))

    def drain(self) -> None:
        """Accept no further requests from now on; requests that wait or run are still finished."""
        if self._state == "ready":
            self._state = "draining"

    def stats(self) -> list[Mapping[str, float]]:
        """Return one mapping of figures per replica: numbers of sequences and KV blocks by state now, and totals since
        the start (`Replica.stats` lists them); the first also has figures of the waiting line."""
        line = {name: getattr(self._line, name) for name in ("outstanding", "admitted", "expired")}
        return [replica.stats() | (line if replica.index == 0 else {}) for replica in self._replicas]

    # --- start and end

    async def start(self) -> None:
        """Start all ranks and wait until every replica is ready. If a replica cannot start, raises its error, such as
        `UserError`; call `close` in that case, too."""
        listener = messages.Listener(self._host, self.plan.secret)
        self._server = await listener.serve(self._listen_to_rank)
        self.plan = replace(self.plan, front=listener.address)
        self._tasks = [*map(asyncio.create_task, (*map(self._supervise, self._replicas), self._watch_steps()))]
        await self._wait_for_state(lambda: all(replica.ready for replica in self._replicas))
        if self.failure is not None:
            raise self.failure
        self._state = "ready"

    async def wait_for_failure(self) -> MeshwrightError:
        """Wait until the engine has failed and will not restart; return the error."""
        await self._wait_for_state(lambda: False)
        assert self.failure is not None
        return self.failure

    async def close(self) -> None:
        """End all rank processes and stop listening; unfinished streams fail. A running step may finish within
        `STOP_SECONDS`."""
        self._state = "failed"
        for replica in self._replicas:
            self._send_message(replica, {"stop": True})
        if any(replica.ready for replica in self._replicas):
            await asyncio.wait(self._tasks[:-1], timeout=STOP_SECONDS)
        await cancel_tasks(*self._tasks)
        self._mark_failed(self.failure or RankLost("the server has ended"))
        if self._server is not None:
            self._server.close()

    async def _wait_for_state(self, reached: Callable[[], bool]) -> None:
        """Wait until `reached()` is true or the engine has failed."""
        while not reached() and self.failure is None:
            self._changed.clear()
            await self._changed.wait()

    # --- supervision

    async def _supervise(self, replica: Replica) -> None:
        """Start a replica's ranks, and restart them whenever they end, until the engine has failed: if ranks end during
        the server's start or because of a UserError, or end `LOSSES_OF_REPLICA` times in a row. The count begins anew
        if the replica generated a token or was ready for `STEADY_SECONDS`."""
        losses = 0
        while True:
            error = await self._run_once(replica)
            if self._state == "failed":
                return
            losses = 1 if replica.has_served or time.monotonic() - replica.ready_since > STEADY_SECONDS else losses + 1
            started, streams = self._state != "starting", len(replica.streams)
            self._recover_replica(replica)
            if not started or not self._starter.restarts or losses >= LOSSES_OF_REPLICA or isinstance(error, UserError):
                self._mark_failed(error)
                return
            delay = min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** (losses - 1)) if losses > 1 else 0.0
            again = f"restarting it in {delay:g} s" if delay else "restarting it"
            self._log(f"replica {replica.index} was lost: {error}; {again}, {streams} requests continue")
            replica.totals["restarts"] += 1
            await asyncio.sleep(delay)

    async def _run_once(self, replica: Replica) -> MeshwrightError:
        """Start a replica's ranks and wait until one of them has ended or the replica is marked as lost; then end the
        other ranks and return the reason."""
        replica.lost = asyncio.get_running_loop().create_future()
        ranks = asyncio.create_task(self._starter.run(replica.index, replace(self.plan, start=replica.starts)))
        try:
            ends: set[asyncio.Future[Any]] = {ranks, replica.lost}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not ranks.done():
                # A rank's own error, if it follows soon, is more informative than its closed connection.
                await asyncio.wait({ranks}, timeout=0.0 if replica.has_served else 0.1)
            if ranks.done():
                ranks.result()
        except MeshwrightError as error:
            return error
        except Exception as error:  # of a rank
            self._log("".join(traceback.format_exception(error)))
            return RankLost(f"{type(error).__name__}: {error}")
        finally:
            await cancel_tasks(ranks)
            replica.starts += 1
        return RankLost(replica.lost.result() if replica.lost.done() else "its ranks have ended")

    def _recover_replica(self, replica: Replica) -> None:
        """Reset a lost replica, and send its unfinished requests to other replicas, or keep them until one is ready. A
        request fails if its replica was lost `LOSSES_OF_REQUEST` times while it ran, without a new token in between."""
        for stream in replica.reset():
            stream.losses += 1
            if stream.losses >= LOSSES_OF_REQUEST:
                self._remove_request(stream)
                reason = f"the request was running {stream.losses} times when a rank was lost, without progress"
                stream.on_output(RankLost(reason))
            else:
                self._dispatch(stream)

    async def _watch_steps(self) -> None:
        """Mark each replica as lost of which a rank, on this machine, is stopped or all ranks sleep in a step
        (`Replica.find_hang`), or whose step takes longer than `Replica.compute_step_limit` and the plan's
        `step_seconds`. Never returns."""
        seconds, budget = self.plan.step_seconds, self.plan.sizes.token_budget
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for each in filter(lambda each: each.ready, self._replicas):
                each.silent += LOOK_SECONDS if each.streams else 0.0  # without the time that this process was stopped
                pids = {} if self._host else {rank: self.hellos[each.index, rank]["pid"] for rank in each.peers}
                sleeps = {rank: read_sleep(pid, main_only=not each.streams) for rank, pid in pids.items()}
                if reason := each.find_hang(sleeps, LOOK_SECONDS):
                    each.mark_lost(reason)
                elif each.silent > seconds and each.silent > each.compute_step_limit(seconds, budget):
                    each.hangs += 1
                    each.mark_lost(f"no step within {each.silent:.3g} s")

    # --- messages of the ranks

    async def _listen_to_rank(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle the messages of one rank's connection (its streams `reader` and `writer`) until it is closed, at which
        the replica counts as lost."""
        if (first := await messages.receive(reader)) is None:
            return
        hello = from_json(first)["hello"]
        replica, start = self._replicas[hello["replica"]], hello["start"]
        try:
            if replica.starts == start:
                self._register_rank(replica, hello, writer)
            while (data := await messages.receive(reader)) is not None and replica.starts == start:
                message = _RANK_MESSAGES.validate_json(data)
                if message.ready is not None:
                    self._make_ready(replica, message.ready)
                else:
                    self._take_step(replica, message)
        finally:
            if replica.starts == start:
                replica.mark_lost(f"rank {hello['rank']} has ended")

    def _register_rank(self, replica: Replica, hello: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """Register a rank that has connected. hello: its first message. writer: its connection. If the rank's kernels
        differ from the other ranks' kernels, fail the server, since answers would depend on the replica."""
        first = next(iter(self.hellos.values()), hello)
        mine, others = (" ".join(str(each[name]) for name in SAME_ON_ALL_RANKS) for each in (hello, first))
        if mine != others:
            who, whom = (f"rank {each['rank']} of replica {each['replica']}" for each in (hello, first))
            text = f"{who} computes with {mine}, {whom} with {others}: answers would depend on the replica"
            self._mark_failed(UserError(f"{text}; run all ranks on the same kind of processor with the same version"))
            return
        self.hellos[replica.index, hello["rank"]] = hello
        replica.peers[hello["rank"]] = writer

    def _make_ready(self, replica: Replica, report: dict[str, Any]) -> None:
        """Mark `replica` as ready, and send it the requests that waited. report: figures of its idle engine."""
        replica.ready, replica.ready_since, replica.report = True, time.monotonic(), report
        if replica.starts:
            self._log(f"replica {replica.index} is ready again, {replica.ready_since - replica.lost_since:.2f} s later")
        for stream in self._streams.values():
            if stream.replica is None:
                self._dispatch(stream)
        self._changed.set()

    def _take_step(self, replica: Replica, message: _RankMessage) -> None:
        """Handle a message of `replica` about one step: pass its outputs to the streams of their requests, and store
        its figures."""
        replica.take_report(message.step)
        replica.has_served |= bool(message.outputs)
        for output in message.outputs:
            if (stream := replica.streams.get(output.request_id)) is None:
                continue  # it was cancelled
            if output.finish_reason is not None:
                self._remove_request(stream)
                if answered := len(stream.tokens) + len(output.results):
                    replica.answer_lengths.observe(answered, stream.request.sampling.max_tokens)
            stream.put(output)

    # --- requests

    def _dispatch(self, stream: Stream) -> None:
        """Send the request of `stream` to the ready replica with the least remaining work minus expected prefix-cache
        hits of the request. If no replica is ready, keep the request until one is."""
        request = stream.request  # tokens generated so far are recomputed like prompt tokens, and not sampled again
        if stream.tokens:
            request = replace(request, replayed=tuple(stream.tokens))
        ready = [replica for replica in self._replicas if replica.ready]
        if not ready:
            stream.replica = None
            return
        hashes = HashChain(request.tokens, request.cache_salt).hashes if len(self._replicas) > 1 else []
        replica = min(ready, key=lambda each: each.pending_tokens - BLOCK_TOKENS * each.count_cached_blocks(hashes))
        replica.remember(hashes, self.plan.sizes.blocks // self.hellos[replica.index, 0]["block_tables"])
        if not replica.streams:
            replica.last_message = time.monotonic()
        stream.replica = replica
        replica.streams[request.id] = stream
        self._send_message(replica, {"add": request})

    def _send_message(self, replica: Replica, message: Message) -> None:
        """Send a message to a replica's first rank, which forwards it to the other ranks."""
        if (writer := replica.peers.get(0)) is not None and not writer.is_closing():
            writer.write(messages.encode(message))

    def _remove_request(self, stream: Stream) -> None:
        """Remove all references to the request of `stream`, which has ended, and cancel its deadline timer."""
        self._streams.pop(stream.request.id, None)
        if stream.replica is not None:
            stream.replica.streams.pop(stream.request.id, None)
            stream.replica.removed[-1].append(stream)
        if stream.deadline is not None:
            stream.deadline.cancel()

    def _mark_failed(self, error: MeshwrightError) -> None:
        """Mark the engine as failed for good, with `error` as the reason, and end all streams with it."""
        self.failure, self._state = error, "failed"
        for stream in list(self._streams.values()):
            self._remove_request(stream)
            stream.on_output(RankLost(str(error)))
        self._changed.set()


async def cancel_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks and wait until they have ended; their exceptions are ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
