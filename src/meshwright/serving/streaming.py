"""Runs jobs: submits their requests, follows the client, and writes responses whole or as a stream. Free of torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from meshwright.errors import RankLost
from meshwright.serving.choices import Choice, Piece
from meshwright.serving.engine_client import EngineClient
from meshwright.serving.metrics import ServingMetrics
from meshwright.serving.protocol.answers import END_OF_STREAM
from meshwright.serving.protocol.errors import ApiError, refusal_error, to_api_error
from meshwright.serving.protocol.jobs import Job
from meshwright.serving.request import Output

ABORT = "meshwright.abort"  # key of the scope: drops the connection at once


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Limits on a client that reads slowly; beyond them its connection is dropped and its requests are cancelled.

    Attributes:
        buffer_bytes: Events that wait for it beside the buffers of its socket, for each choice of its response.
        drain_seconds: From the last token until it has read them all.
    """

    buffer_bytes: int = 256 << 10
    drain_seconds: float = 60.0


class SlowReader(Exception):
    """Error: events wait for a client beyond `StreamLimits`."""


class ClientLeft(Exception):
    """The client closed its connection before the response was complete."""


class JobRunner:
    """Runs the jobs of a server through its engine."""

    def __init__(self, client: EngineClient, metrics: ServingMetrics, limits: StreamLimits) -> None:
        self.limits = limits
        self._client, self._metrics = client, metrics

    def start(self, job: Job) -> list[AsyncIterator[Output]]:
        """Submit all requests of a job, or none and raise ApiError if the queue does not take them."""
        refusal = self._client.admit(job.requests)
        if refusal is not None:
            self._metrics.refuse(refusal.reason)
            raise refusal_error(refusal)
        return [self._client.submit(request) for request in job.requests]

    async def collect(self, job: Job, receive: Receive) -> bytes:
        """Return the body of the whole response. Raises ApiError, ClientLeft."""
        pieces: dict[int, list[Piece]] = {choice.index: [] for choice in job.choices}
        outputs = self.start(job)
        run = asyncio.create_task(self.run(job, outputs, lambda choice, piece: pieces[choice.index].append(piece)))
        left = asyncio.create_task(_wait_until_left(receive))
        try:
            await asyncio.wait((run, left), return_when=asyncio.FIRST_COMPLETED)
            if not run.done():
                raise ClientLeft
            run.result()
        finally:
            await _stop(run, left)
        return to_json(job.form.answer(job.choices, [Piece.join(pieces[choice.index]) for choice in job.choices]))

    async def run(
        self, job: Job, outputs: Sequence[AsyncIterator[Output]], take: Callable[[Choice, Piece], None]
    ) -> None:
        """Follow all choices of a job to their ends and give each piece to `take`. Raises ApiError."""
        try:
            async with asyncio.timeout(job.timeout), asyncio.TaskGroup() as tasks:
                for choice, iterator in zip(job.choices, outputs, strict=True):
                    tasks.create_task(self._follow(choice, iterator, take))
        except TimeoutError:
            raise ApiError(408, f"not finished within the timeout of {job.timeout:g} s", code="timeout") from None
        except ExceptionGroup as group:
            error = group.exceptions[0]
            if isinstance(error, RankLost):
                raise ApiError(503, "the engine lost this request", code="rank_lost") from None
            raise error from None
        finally:
            for choice in job.choices:
                if choice.finish_reason is None:
                    self._metrics.finish(choice, "abort")
                self._client.cancel(choice.request.id)

    async def _follow(
        self, choice: Choice, outputs: AsyncIterator[Output], take: Callable[[Choice, Piece], None]
    ) -> None:
        """Give the pieces of one choice to `take` until it ends."""
        async for output in outputs:
            before = choice.last
            if output.finish_reason == "error":
                raise ApiError(500, "the model computed NaN or infinite logits for this prompt", code="invalid_logits")
            piece = choice.push(output)
            self._metrics.observe(choice, piece, before)
            take(choice, piece)
            if piece.finish_reason is not None:
                return
        raise RankLost("the engine ended a request without a reason")

    def stream(self, job: Job) -> EventStream:
        """Submit the requests of a job and return the response that streams them. Raises ApiError."""
        return EventStream(self, job, self.start(job))


class EventStream(Response):
    """Response of server-sent events, one write for all that waits."""

    media_type = "text/event-stream"

    def __init__(self, runner: JobRunner, job: Job, outputs: Sequence[AsyncIterator[Output]]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._runner, self._job, self._outputs = runner, job, outputs
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: list[bytes] = []
        self._bytes = 0
        self._news = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come until the job ends, or the client leaves or reads too slowly."""
        run = asyncio.create_task(self._runner.run(self._job, self._outputs, self._take))
        left = asyncio.create_task(_wait_until_left(receive))
        drop: Callable[[], None] = scope.get(ABORT, left.cancel)
        run.add_done_callback(lambda _: self._limit_drain(run, drop))
        left.add_done_callback(lambda _: self._news.set())
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            for choice in self._job.choices:
                self._put(self._job.form.open_choice(choice))
            while not left.done():
                await self._news.wait()
                self._news.clear()
                last = run.done()
                if last:
                    self._waiting.append(self._ending(run))
                body, self._bytes = b"".join(self._waiting), 0
                self._waiting.clear()
                await send({"type": "http.response.body", "body": body, "more_body": not last})
                if last:
                    return
        except SlowReader:
            drop()
        finally:
            await _stop(run, left)
            if self._timer is not None:
                self._timer.cancel()

    def _limit_drain(self, run: asyncio.Task[None], drop: Callable[[], None]) -> None:
        """Drop the connection some time after the last token, at once if the client is too slow."""
        self._news.set()
        slow = not run.cancelled() and isinstance(run.exception(), SlowReader)
        seconds = 0 if slow else self._runner.limits.drain_seconds
        self._timer = asyncio.get_running_loop().call_later(seconds, drop)

    def _take(self, choice: Choice, piece: Piece) -> None:
        """Queue the event of a piece. Raises SlowReader."""
        self._put(self._job.form.format_piece(choice, piece, self._job.choices))

    def _put(self, event: bytes) -> None:
        """Queue an event. Raises SlowReader if too many wait."""
        if not event:
            return
        if self._bytes > self._runner.limits.buffer_bytes * len(self._job.choices):
            raise SlowReader
        self._bytes += len(event)  # one event may be larger: it holds a whole prompt's log-probabilities
        self._waiting.append(event)
        self._news.set()

    def _ending(self, run: asyncio.Task[None]) -> bytes:
        """Return the last events: those of the form, or an error. Raises SlowReader."""
        try:
            run.result()
        except SlowReader:
            raise
        except Exception as error:
            return b"data: " + to_json(to_api_error(error).to_json()) + b"\n\n" + END_OF_STREAM
        return self._job.form.close_stream(self._job.choices)


async def _wait_until_left(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stop(*tasks: asyncio.Task[None]) -> None:
    """Cancel tasks and wait until they have ended, whatever they raise."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
