"""Run the HTTP application under uvicorn: listening socket, connection limits, shutdown by signals. Free of torch."""

from __future__ import annotations

import asyncio
import errno
import math
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import uvicorn
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from meshwright.errors import RankLost, UserError
from meshwright.launcher.signals import StopSignals
from meshwright.serving.gate import OPEN_PATHS
from meshwright.serving.http import HttpApp
from meshwright.serving.protocol.errors import ApiError
from meshwright.serving.replicas import Replicas
from meshwright.serving.streaming import ABORT

HEADER_BYTES = 64 << 10  # limit on path and headers of a request, and on received bytes that are not parsed yet
HEADER_OVERHEAD = 32  # bytes that are added for each header
HEADER_SECONDS = 30  # from the connection, or a request's first byte, to the end of its headers
BACKLOG = 4096  # length of the kernel's accept queue; Linux's default limit
ACCEPTS = 8  # connections accepted per iteration of the event loop
PAUSE_SECONDS = 0.05  # between attempts to accept a connection while there is no room
KEEP_ALIVE_SECONDS = 65  # that an idle connection stays open; longer than the usual 60 of proxies
PROBES = tuple(f"GET {path}".encode() for path in OPEN_PATHS)  # answered under any load
REFUSED_SECONDS = 2  # that a refused connection has to send a request
CROWDED_SECONDS = 0.1  # the same while other connections, perhaps health checks, wait
READ_SECONDS = 5  # that clients have to read the rest of their responses when the server ends, after the last token
LINGER_SECONDS = 5  # for which the data of a closed connection are still read


def open_socket(host: str, port: int) -> socket.socket:
    """Open a TCP socket that listens on `host`, a name or address. port: 0: any free port. Raises UserError if the
    address is in use or invalid."""
    try:
        if not 0 <= port < 2**16:
            raise OverflowError("should be 0 to 65535")
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listener = socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except (OSError, OverflowError, UnicodeError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise UserError(f"port {port} of {host} is in use; give another --port, or 0 for any free one") from None
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]  # attempting to bind ...
        raise UserError(f"cannot listen on {host} port {port}: {reason}") from None
    listener.setblocking(False)
    return listener


class _LingeringTransport:
    """Wrapper of an asyncio transport that closes a connection without a TCP reset, because a reset could lose the
    response.

    `close` shuts down the sending side only if the client is still sending (attribute `unread`); data that then arrive
    are read and discarded for up to `LINGER_SECONDS`."""

    def __init__(self, transport: asyncio.Transport) -> None:
        """Wrap `transport`, an asyncio transport."""
        self._transport = transport
        self.unread = self._lingers = False

    def __getattr__(self, name: str) -> Any:
        """Return the attribute `name` of the wrapped transport."""
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send `data`, unless `close` has been called."""
        if not self._lingers:
            self._transport.write(data)

    def is_closing(self) -> bool:
        """Return True once `close` has been called, also while the client's remaining data are still read."""
        return self._lingers or self._transport.is_closing()

    def close(self) -> None:
        """Close the connection after all data have been sent. If the client is still sending, wait for its end of data,
        at most `LINGER_SECONDS`."""
        if not self.unread:
            self._transport.close()
        elif not self.is_closing():
            self._lingers = True
            self._transport.write_eof()
            self._transport.resume_reading()
            asyncio.get_running_loop().call_later(LINGER_SECONDS, self._transport.abort)


class _UnchunkedCycle(RequestResponseCycle):
    """uvicorn's state of an HTTP/1.0 request, whose response has no chunks: its body ends with the connection."""

    async def send(self, message: Any) -> None:
        """Send the response's headers, or the next part of its body, as the ASGI `message` says."""
        self.chunked_encoding, self.expected_content_length = False, len(message.get("body", b""))
        await super().send(message)


_Connections = dict["_LimitedProtocol", float]  # with their start times, the oldest first


class _LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol for one connection, with limits on header bytes and on the time that a client may neither
    send nor read.

    given: arguments of uvicorn's protocol. crowded: True to close the connection after each response, because many
    connections are open. refuse: None to accept the connection; otherwise a function that returns the response with
    which any request but a health check is refused. group: the server's open connections of the same kind (accepted or
    refused), to which the connection adds itself.

    Attributes:
        deadline: Time in seconds of `time.monotonic` at which `_Server` calls `expire`.
        write_deadline: Time in seconds of `time.monotonic` at which `_Server` aborts the connection of a slow reader.
    """

    deadline = write_deadline = math.inf
    _unsent_bytes = _header_bytes = _unparsed_bytes = 0  # of responses; of the request; since its last complete part

    def __init__(self, *given: Any, crowded: bool, refuse: Callable[[], Response] | None, group: _Connections) -> None:
        """Start without a connection; arguments: see the class."""
        super().__init__(*given)
        self._crowded, self._refuse, self._group = crowded, refuse, group

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to serve a new connection, given by its `transport`. Called by asyncio. Set the connection's first
        deadline: the client must send complete headers within `HEADER_SECONDS`; on a connection that is to be refused,
        any request within `REFUSED_SECONDS`."""
        self._lingering = _LingeringTransport(transport)
        super().connection_made(cast(asyncio.Transport, self._lingering))
        self._mark_newest()
        self._set_deadline(HEADER_SECONDS if self._refuse is None else REFUSED_SECONDS)

    def _mark_newest(self) -> None:
        """Move the connection to the end of its group (accepted or refused connections), which is kept in order of last
        activity. When new connections wait, `_Server` aborts the first refused connection of that order."""
        self._group.pop(self, None)
        self._group[self] = time.monotonic()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection, which has closed, from its group (accepted or refused connections). exc: error that
        closed it, or None. Called by asyncio."""
        self._group.pop(self, None)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Give the client `KEEP_ALIVE_SECONDS` to read; called by asyncio when the write buffer is full."""
        super().pause_writing()
        self.write_deadline = time.monotonic() + KEEP_ALIVE_SECONDS

    def resume_writing(self) -> None:
        """Remove the client's deadline for reading; called by asyncio when it has read most of what was sent."""
        super().resume_writing()
        self.write_deadline = math.inf

    def data_received(self, data: bytes) -> None:
        """Parse received data. On a refused connection, send the refusal and close instead, unless the data are a
        health check. Data are ignored once the connection is closing."""
        if data.startswith(PROBES):
            self._refuse = None
            self._mark_newest()
        if self.transport.is_closing():
            pass
        elif self._refuse is None:
            self._unparsed_bytes += len(data)
            super().data_received(data)
            if self._unparsed_bytes > HEADER_BYTES and not self.transport.is_closing():
                self._header_bytes = self._unparsed_bytes
                self.send_400_response("")
        else:
            self._mark_newest()  # gives the client time to read the response
            self._answer_unread(self._refuse())

    def send_400_response(self, msg: str) -> None:
        """Answer data that are not valid HTTP with status 400 and text `msg`, or headers that are too large with status
        431.

        Data after a complete request, or after the response to an incomplete one, get no answer: it would disturb that
        request's response, after which the connection closes."""
        cycle, self._lingering.unread = self.cycle, True
        error = ApiError(400, msg, code="invalid_http")
        if self._header_bytes > HEADER_BYTES:
            error = ApiError(431, f"path and headers are larger than {HEADER_BYTES:,} bytes", code="headers_too_large")
        if cycle is not None and cycle.scope is self.scope and (cycle.response_started or not cycle.more_body):
            self.shutdown()  # after the response
        else:
            self._answer_unread(error.to_response())

    def _answer_unread(self, answer: Response) -> None:
        """Send `answer` to a request that is not read to its end, and close the connection."""
        self._lingering.unread = True
        headers = [b"%s: %s\r\n" % each for each in (*answer.raw_headers, (b"connection", b"close"))]
        self.transport.write(STATUS_LINE[answer.status_code] + b"".join(headers) + b"\r\n" + bytes(answer.body))
        self.transport.close()

    def on_message_begin(self) -> None:
        """Start a request: reset the count of header bytes, and set the deadline for its headers, `HEADER_SECONDS` from
        now.

        A request that comes before the response to the previous request (HTTP pipelining) is not read, and the
        connection closes after that response. So requests do not pile up, and a disconnect is noticed."""
        if self.cycle is not None and not self.cycle.response_complete:
            raise ValueError("pipelined request")  # ends the parsing
        super().on_message_begin()
        self._header_bytes, self._lingering.unread = 0, True
        self._set_deadline(HEADER_SECONDS)

    def on_url(self, url: bytes) -> None:
        """Count the bytes of `url`, the request's path, as header bytes. Called by the HTTP parser."""
        self._count_header_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the bytes of one header, `name` and `value`, towards the limit on header bytes. Called by the HTTP
        parser."""
        self._count_header_bytes(len(name) + len(value) + HEADER_OVERHEAD)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start to handle the request, which has no deadline from now on.

        The connection closes after the response in four cases: many connections are open; HTTP/1.0; the client sent
        `Expect: 100-continue` (after an early response it may or may not send the body); or it asks for another
        protocol (its body would be parsed as the next request)."""
        self._unparsed_bytes = 0
        super().on_headers_complete()
        self._set_deadline(math.inf)
        self.cycle.keep_alive &= not (self._crowded or self.expect_100_continue or self.parser.should_upgrade())
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__, self.cycle.waiting_for_100_continue = _UnchunkedCycle, False
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]

    def on_body(self, body: bytes) -> None:
        """Pass `body`, the next part of the request's body, to the application. Called by the HTTP parser."""
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Record that the request's body is complete. If the response was sent already, the client has
        `KEEP_ALIVE_SECONDS` to start the next request."""
        self._unparsed_bytes = 0
        super().on_message_complete()
        self._lingering.unread = self.parser.should_upgrade()
        if self.cycle.response_complete:
            self._set_deadline(KEEP_ALIVE_SECONDS)

    def on_response_complete(self) -> None:
        """Set the deadline after a response: `HEADER_SECONDS` for the unread part of the body, else
        `KEEP_ALIVE_SECONDS` for the next request."""
        super().on_response_complete()
        self._unset_keepalive_if_required()  # uvicorn's timer would keep a connection that was reset for a minute
        if self.cycle.response_complete:
            self._set_deadline(HEADER_SECONDS if self._lingering.unread else KEEP_ALIVE_SECONDS)

    def expire(self) -> None:
        """Handle the connection's deadline. If the client has read a part of a response since the last deadline, the
        deadline is extended by `KEEP_ALIVE_SECONDS`; otherwise the connection is aborted."""
        before, self._unsent_bytes = self._unsent_bytes, self.transport.get_write_buffer_size()
        if self._unsent_bytes in (0, before):
            self.transport.abort()
        self._set_deadline(KEEP_ALIVE_SECONDS)

    def _count_header_bytes(self, size: int) -> None:
        """Add `size` to the request's header bytes. Raises ValueError above `HEADER_BYTES`, which ends the parsing."""
        self._header_bytes += size
        if self._header_bytes > HEADER_BYTES:
            raise ValueError("headers are too large")

    def _set_deadline(self, seconds: float) -> None:
        """Set the connection's deadline, at which the server calls `expire`, to `seconds` from now."""
        self.deadline = time.monotonic() + seconds


class _Server(uvicorn.Server):
    """uvicorn server with a limit on connections; signals are left to `serve_http`.

    config: uvicorn's settings. limit: number of connections that are served at once. refuse: returns the response (429)
    for a connection beyond `limit`. A new connection is treated by the number of open ones. From `limit` / 2 on: it is
    closed after each response (no keep-alive). Beyond `limit`: it is refused. From 2 * `limit` on: it waits in the
    kernel's backlog, and refused connections that were silent for `CROWDED_SECONDS` are aborted."""

    def __init__(self, config: uvicorn.Config, limit: int, refuse: Callable[[], Response]) -> None:
        """Create the server without starting it; arguments: see the class."""
        super().__init__(config)
        self._limit, self._refuse = limit, refuse
        self._accepting: list[asyncio.Task[None]] = []
        self._accepted, self._refused = _Connections(), _Connections()

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Return a context manager that sets no signal handlers, unlike uvicorn's: `serve_http` handles signals."""
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections on `sockets`."""
        await super().startup(sockets=[])
        listeners = [each.dup() for each in sockets or () for _ in range(ACCEPTS)]
        self._accepting = [asyncio.create_task(self._accept(each)) for each in listeners]

    async def on_tick(self, counter: int) -> bool:
        """Call `expire` on each connection whose deadline has passed, and abort each whose client reads too slowly.
        Return uvicorn's decision: True if the server should stop. Called by uvicorn several times a second. counter:
        number of the call."""
        now = time.monotonic()
        for each in cast("set[_LimitedProtocol]", self.server_state.connections.copy()):
            if each.write_deadline < now:
                each.transport.abort()
            elif each.deadline < now:
                each.expire()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections and close all connections. sockets: passed on to uvicorn, which closes them."""
        for task in self._accepting:
            task.cancel()
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket) -> None:
        """Accept connections on `listener` in a loop. While 2 * `limit` connections are open, abort the refused
        connection that has been silent longest, or wait."""
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    while len(self.server_state.connections) >= 2 * self._limit:
                        oldest, since = next(iter(self._refused.items()), (None, math.inf))
                        if oldest is not None and time.monotonic() - since > CROWDED_SECONDS:
                            del self._refused[oldest]
                            oldest.transport.abort()
                            await asyncio.sleep(0)
                        else:
                            await asyncio.sleep(PAUSE_SECONDS)
                    connection, _ = await loop.sock_accept(listener)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    await loop.connect_accepted_socket(self._make_protocol, connection)
                except OSError:  # the client has gone, or too many files are open
                    await asyncio.sleep(PAUSE_SECONDS)

    def _make_protocol(self) -> asyncio.Protocol:
        """Return the protocol object for a new connection. If the server already serves its maximum number of
        connections, the object refuses all requests but health checks."""
        count, place = len(self._accepted), (self.config, self.server_state, self.lifespan.state)
        refuse, group = (self._refuse, self._refused) if count >= self._limit else (None, self._accepted)
        return _LimitedProtocol(*place, crowded=2 * count >= self._limit, refuse=refuse, group=group)


def make_server(app: HttpApp) -> uvicorn.Server:
    """Return the uvicorn server of the application `app`, which serves at most `HttpSettings.connections` connections.
    Its `serve([listener])` runs until `should_exit` is set."""
    config = uvicorn.Config(
        app, ws="none", lifespan="off", log_level="error", access_log=False, server_header=False, proxy_headers=False,
        timeout_graceful_shutdown=READ_SECONDS,
    )  # fmt: skip
    return _Server(config, app.settings.connections, app.refuse_connection)


async def wait_for_signals(signals: StopSignals, count: int = 1) -> None:
    """Wait until `count` stop signals have arrived since `signals`, which records them, was created."""
    while len(signals.received) < count:
        await asyncio.sleep(0.05)


async def serve_http(
    app: HttpApp, listener: socket.socket, client: Replicas, signals: StopSignals, drain_seconds: float = 60.0
) -> int:
    """Serve `app` over HTTP until SIGTERM or SIGINT; return the number of HTTP requests that were not finished.

    After the signal new requests get 503, and requests in flight are finished: for at most `drain_seconds`, and for at
    most `READ_SECONDS` after the last token of all requests. A second signal ends them immediately. Later signals are
    ignored. listener: listening TCP socket. client: engine. signals: signal handlers, which stay in place until the
    caller has cleaned up. Raises RankLost when the engine has failed and will not restart.
    """
    server = make_server(app)
    serving, signalled = asyncio.create_task(server.serve([listener])), asyncio.create_task(wait_for_signals(signals))
    failing = asyncio.create_task(client.wait_for_failure())
    try:
        await asyncio.wait((serving, signalled, failing), return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            await asyncio.sleep(0.2)  # for the clients to receive their errors
            raise RankLost(f"the server gives up: {failing.result()}")
        assert signalled.done(), "the HTTP server ended without a signal"
        client.drain()
        deadline = time.monotonic() + drain_seconds
        while server.server_state.tasks and len(signals.received) < 2 and time.monotonic() < deadline:
            deadline = min(deadline, time.monotonic() + (READ_SECONDS if client.idle else drain_seconds))
            await asyncio.sleep(0.02)
        return len(server.server_state.tasks)
    finally:
        again = asyncio.create_task(wait_for_signals(signals, 1 + signalled.done()))
        signalled.cancel()
        failing.cancel()
        server.should_exit, server.force_exit = True, bool(server.server_state.tasks)  # forced: no second wait
        await asyncio.wait((serving, again), return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        for connection in cast("set[_LimitedProtocol]", server.server_state.connections.copy()):
            connection.transport.abort()
        await serving
