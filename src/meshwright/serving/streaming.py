"""Execution of jobs (HTTP requests that generate text): submits their requests, watches for disconnects, and writes
responses whole or as a stream. Free of torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from meshwright.data.tokenizers.library import convert_panics
from meshwright.serving.choices import Choice, Piece
from meshwright.serving.gate import HttpSettings
from meshwright.serving.metrics import ServingMetrics
from meshwright.serving.protocol.answers import END_OF_STREAM
from meshwright.serving.protocol.errors import FAILED_ENDS, ApiError, make_refusal_error, to_api_error
from meshwright.serving.protocol.jobs import Job
from meshwright.serving.replicas import Replicas, cancel_tasks
from meshwright.serving.request import Output, Request
from meshwright.serving.waiting_line import Ticket

ABORT = "meshwright.abort"  # key of the ASGI scope: function that drops the connection
PieceCallback = Callable[[Choice, Piece], None]


class ClientLeft(Exception):
    """Error: the connection was closed before the response was complete: by the client, or because it reads its event
    stream so slowly that more bytes wait than `HttpSettings.stream_bytes` allows."""


class JobRunner:
    """Runner of jobs (parsed HTTP requests that generate text) on the engine `client`. `metrics`: records the jobs'
    metrics. settings: settings of the HTTP API."""

    def __init__(self, client: Replicas, metrics: ServingMetrics, settings: HttpSettings) -> None:
        """Store engine client, metrics and settings."""
        self.settings = settings
        self._client, self._metrics = client, metrics

    async def collect(self, job: Job, receive: Receive) -> dict[str, Any]:
        """Run a job (parsed HTTP request) to its end and return the JSON object of its response. receive: ASGI's
        receive function, which reports a disconnect. Raises ApiError if the request is refused or fails. If the client
        disconnects, the job is cancelled, and ClientLeft is raised."""
        pieces: list[list[Piece]] = [[] for _ in job.choices]
        run = self.start(job, lambda choice, piece: pieces[choice.index].append(piece))
        left = asyncio.create_task(_wait_until_left(receive))
        try:
            await asyncio.wait((run, left), return_when=asyncio.FIRST_COMPLETED)
            if not run.done():
                raise ClientLeft
            run.result()
        finally:
            await cancel_tasks(run, left)
        return job.formatter.format_answer(job.choices, [Piece.join(each) for each in pieces])

    def check_queue(self, requests: Sequence[Request], ticket: Ticket) -> None:
        """Raise ApiError if the engine's queue refuses `requests` (none: even the shortest request), and count the
        refusal. ticket: identity of the HTTP request."""
        if (refusal := self._client.admit(requests, ticket)) is not None:
            self._metrics.refuse(refusal.reason)
            raise make_refusal_error(refusal, ticket.longest)

    def start(self, job: Job, on_piece: PieceCallback) -> asyncio.Future[None]:
        """Submit all requests of a job to the engine. Return a future that is done when all choices have finished; an
        error of the engine or of `on_piece` becomes its exception. When it is done or cancelled, unfinished requests
        are cancelled.

        on_piece: called with (choice, piece) for each new piece of text. Raises ApiError if the requests are refused,
        with status 400 if they are more than an idle engine runs and queues."""
        if len(job.choices) > (most := self._client.max_requests):
            message = f"n: prompts x n should be at most {most}, the requests that this server runs and queues"
            raise ApiError(400, message, param="n")
        self.check_queue([choice.request for choice in job.choices], job.ticket)
        run: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        run.add_done_callback(lambda _: self._cancel_unfinished(job))
        for choice in job.choices:
            self._client.submit(choice.request, partial(self._receive, job, choice, on_piece, run))
        return run

    def _cancel_unfinished(self, job: Job) -> None:
        """Cancel on the engine the requests of a job that have not finished."""
        for choice in job.choices:
            self._client.cancel(choice.request.id)
            if choice.finish_reason is None:
                self._metrics.finish(choice, "abort")

    def _receive(
        self, job: Job, choice: Choice, on_piece: PieceCallback, run: asyncio.Future[None], output: Output | Exception
    ) -> None:
        """Handle an `output` of the engine, or its error, for a choice of `job`: call `on_piece` with the choice and
        its new piece of text, and end `run`, the job's future, after the last choice or an error."""
        if run.done():
            return
        try:
            if isinstance(output, Exception):
                raise output
            if output.finish_reason in FAILED_ENDS:
                status, message, code = FAILED_ENDS[output.finish_reason]
                raise ApiError(status, message, code=code)
            known, before = choice.completion_tokens, choice.last_token
            with convert_panics():  # of the tokenizer, which events with log-probabilities use too
                piece = choice.push(output)
                self._metrics.observe(choice, piece, known, before)
                on_piece(choice, piece)
        except Exception as error:
            run.set_exception(error)
            return
        if piece.finish_reason is not None:
            self._client.cancel(choice.request.id)  # the engine does not know that a stop string has ended it
            if all(each.finish_reason is not None for each in job.choices):
                run.set_result(None)


class EventStream(Response):
    """HTTP response that streams one job (a parsed HTTP request that generates text) as server-sent events; all events
    that wait are sent in one write. Construction submits the job's requests to the engine of `runner`, and raises
    ApiError if they are refused."""

    media_type = "text/event-stream"

    def __init__(self, runner: JobRunner, job: Job) -> None:
        """Submit the job's requests; arguments: see the class."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._job, self._settings = job, runner.settings
        self._waiting = [job.formatter.open_choice(choice) for choice in job.choices]
        self._bytes = 0  # of the events that wait
        self._news = asyncio.Event()
        self._drop: Callable[[], None] = lambda: None
        self._run = runner.start(job, self._take)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events as they come until the job ends, the client leaves, or the client reads too slowly. scope,
        receive, send: arguments of an ASGI application."""
        run, left = self._run, asyncio.create_task(_wait_until_left(receive))
        timers: list[asyncio.TimerHandle] = []

        def drop() -> None:
            """Close the connection, and send nothing more."""
            scope.get(ABORT, left.cancel)()
            left.cancel()

        def limit_drain(_: object) -> None:
            """Give the client `HttpSettings.drain_seconds` after the last token to read the rest of its stream."""
            self._news.set()
            timers.append(run.get_loop().call_later(self._settings.drain_seconds, drop))

        self._drop = drop
        run.add_done_callback(limit_drain)
        left.add_done_callback(lambda _: self._news.set())
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while not left.done():
                last = run.done()
                if last:
                    self._waiting.append(self._format_end(run))
                body, self._bytes = b"".join(self._waiting), 0
                self._waiting.clear()
                if body or last:
                    await send({"type": "http.response.body", "body": body, "more_body": not last})
                if last:
                    return
                await self._news.wait()
                self._news.clear()
        finally:
            await cancel_tasks(run, left)
            for timer in timers:
                timer.cancel()

    def _take(self, choice: Choice, piece: Piece) -> None:
        """Append the event of a new piece of `choice` to the events that wait to be sent. Closes the connection, and
        raises ClientLeft, if too many bytes wait."""
        event = self._job.formatter.format_piece(choice, piece, self._job.choices)
        if not event:
            return
        if self._bytes > self._settings.stream_bytes * len(self._job.choices):
            self._drop()
            raise ClientLeft
        self._bytes += len(event)  # one event may be larger: it holds a whole prompt's log-probabilities
        self._waiting.append(event)
        self._news.set()

    def _format_end(self, run: asyncio.Future[None]) -> bytes:
        """Return the last events of the stream as bytes: the last events of the request's API (OpenAI or llama.cpp), or
        an error event if `run`, the future of the finished job, has an exception."""
        if isinstance(error := run.exception(), Exception):
            return b"data: " + to_api_error(error).to_json() + b"\n\n" + END_OF_STREAM
        return self._job.formatter.close_stream(self._job.choices)


async def _wait_until_left(receive: Receive) -> None:
    """Wait until the client has closed the connection. receive: ASGI's receive function."""
    while (await receive())["type"] != "http.disconnect":
        pass
