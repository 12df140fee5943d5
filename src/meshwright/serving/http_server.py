"""Runs the HTTP application: the listening socket, limits on connections, and the end by a signal. Free of torch."""

from __future__ import annotations

import asyncio
import errno
import math
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from meshwright.errors import RankLost, UserError
from meshwright.serving.engine_client import EngineClient
from meshwright.serving.gate import OPEN_PATHS
from meshwright.serving.streaming import ABORT

HEADER_BYTES = 64 << 10  # of one request: path and headers
HEADER_SECONDS = 30  # from the connection, or a request's first byte, to the end of its headers
SIGNALS = (signal.SIGTERM, signal.SIGINT)  # that end the server
OTHER_FILES = 256  # open files that are no connections of clients
BACKLOG = 4096  # connections that wait in the kernel to be accepted; Linux allows so many
ACCEPTS = 8  # connections that an iteration of the loop takes
PAUSE_SECONDS = 0.05  # before the next look whether a connection can be accepted
KEEP_ALIVE_SECONDS = 65  # of a connection without a request; longer than the usual 60 of proxies
PROBES = tuple(f"GET {path}".encode() for path in OPEN_PATHS)  # answered whatever the load: it is no reason to restart
LINGER_SECONDS = 5  # for which a closed connection is still read


def open_socket(host: str, port: int) -> socket.socket:
    """Open the listening socket; port 0: any free one. Raises UserError if the address cannot be used."""
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
    """Transport that closes a connection without a reset. A socket that is closed with unread bytes resets the
    connection, and the client loses the answer: while `unread`, only the sending side is closed at first, and what the
    client still sends is read, for `LINGER_SECONDS`."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.unread = self._lingers = False

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the transport."""
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Return True from the first `close` on."""
        return self._lingers or self._transport.is_closing()

    def close(self) -> None:
        """Close the connection once all is sent, and the client has read it if it is still sending."""
        if not self.unread:
            self._transport.close()
        elif not self.is_closing():
            self._lingers = True
            self._transport.write_eof()
            self._transport.resume_reading()
            asyncio.get_running_loop().call_later(LINGER_SECONDS, self._transport.abort)


class _LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on the headers of a request and on clients that send or read nothing, and a way to
    drop the connection.

    `crowded`: each response ends the connection, so that there is room for other clients. `refuse`: returns the answer
    to the first bytes of a connection for which there is no room, unless it asks for the server's health.

    Attributes:
        deadline: Monotonic time at which `expire` is to be called.
    """

    deadline = math.inf
    _unsent_bytes = _header_bytes = 0  # of responses, at the last look; of the request

    def __init__(self, *arguments: Any, crowded: bool, refuse: Callable[[], Response] | None) -> None:
        super().__init__(*arguments)
        self._crowded, self._refuse = crowded, refuse

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        self._lingering = _LingeringTransport(transport)
        super().connection_made(cast(asyncio.Transport, self._lingering))
        self._wait(HEADER_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived, or refuse the connection; skip what arrives while it is closing."""
        if data.startswith(PROBES):
            self._refuse = None
        if self.transport.is_closing():
            pass
        elif self._refuse is None:
            super().data_received(data)
        else:
            self._lingering.unread = True
            answer = self._refuse()
            headers = [b"%s: %s\r\n" % each for each in (*answer.raw_headers, (b"connection", b"close"))]
            self.transport.write(STATUS_LINE[answer.status_code] + b"".join(headers) + b"\r\n" + bytes(answer.body))
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP."""
        self._lingering.unread = True
        super().send_400_response(msg)

    def on_message_begin(self) -> None:
        """Wait for the end of the headers."""
        super().on_message_begin()
        self._header_bytes, self._lingering.unread = 0, True
        self._wait(HEADER_SECONDS)

    def on_url(self, url: bytes) -> None:
        """Count the path."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request."""
        super().on_headers_complete()
        self._wait(math.inf)
        self.cycle.keep_alive &= not self._crowded
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]

    def on_message_complete(self) -> None:
        """Wait for the next request if this one has been answered."""
        super().on_message_complete()
        self._lingering.unread = False
        if self.cycle.response_complete:
            self._wait(KEEP_ALIVE_SECONDS)

    def on_response_complete(self) -> None:
        """Wait for the rest of a body that was not read, or for the next request, or until the client has read all."""
        super().on_response_complete()
        self._unset_keepalive_if_required()  # uvicorn's timer would keep a connection that was reset for a minute
        if self.cycle.response_complete:
            self._wait(HEADER_SECONDS if self._lingering.unread else KEEP_ALIVE_SECONDS)

    def expire(self) -> None:
        """Drop the connection unless the client still reads a response."""
        unsent, before = self.transport.get_write_buffer_size(), self._unsent_bytes
        self._unsent_bytes = unsent
        if unsent in (0, before):
            self.transport.abort()
        self._wait(KEEP_ALIVE_SECONDS)

    def _count(self, size: int) -> None:
        """Drop the connection if the headers are too large."""
        self._header_bytes += size
        if self._header_bytes > HEADER_BYTES:
            self.transport.abort()

    def _wait(self, seconds: float) -> None:
        """Set the deadline."""
        self.deadline = time.monotonic() + seconds


class _Server(uvicorn.Server):
    """uvicorn's server with a limit on connections, which leaves signals to `serve_http`.

    With more than half of `limit` connections, each response ends its connection; beyond `limit` a connection gets a
    429; with twice as many, new ones wait in the kernel's queue.
    """

    def __init__(self, config: uvicorn.Config, limit: int, refuse: Callable[[], Response]) -> None:
        super().__init__(config)
        self._limit, self._refuse = limit, refuse
        self._accepting: list[asyncio.Task[None]] = []

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Return a context that does nothing."""
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets=[])
        listeners = [each.dup() for each in sockets or () for _ in range(ACCEPTS)]
        self._accepting = [asyncio.create_task(self._accept(each)) for each in listeners]

    async def on_tick(self, counter: int) -> bool:
        """Drop the connections whose time is over."""
        now = time.monotonic()
        for each in [each for each in self.server_state.connections if each.deadline < now]:  # type: ignore[union-attr]
            each.expire()  # type: ignore[union-attr]
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, and close the others."""
        for task in self._accepting:
            task.cancel()
        await super().shutdown(sockets)

    async def _accept(self, listener: socket.socket) -> None:
        """Accept connections, one after the other, while there is room."""
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    while len(self.server_state.connections) >= 2 * self._limit:
                        await asyncio.sleep(PAUSE_SECONDS)
                    connection, _ = await loop.sock_accept(listener)
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    await loop.connect_accepted_socket(self._make_protocol, connection)
                except OSError:  # it has ended, or too many files are open
                    await asyncio.sleep(PAUSE_SECONDS)

    def _make_protocol(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""
        count = len(self.server_state.connections)
        refuse = self._refuse if count >= self._limit else None
        place = self.config, self.server_state, self.lifespan.state
        return _LimitedProtocol(*place, crowded=2 * count >= self._limit, refuse=refuse)


def make_server(app: FastAPI) -> uvicorn.Server:
    """Return the server of an application (`create_app`); its `serve([listener])` runs until its `should_exit` is
    set."""
    config = uvicorn.Config(
        app, ws="none", lifespan="off", log_level="error", access_log=False, server_header=False, proxy_headers=False,
        timeout_graceful_shutdown=5,
    )  # fmt: skip
    wanted = 2 * app.state.settings.connections + OTHER_FILES
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < wanted:
        files = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
        wanted = files
    return _Server(config, max(1, (wanted - OTHER_FILES) // 2), app.state.refuse_connection)


@contextmanager
def restored_signals() -> Iterator[None]:
    """Restore the signal handlers at the end. Until then no signal may have its default action, which would leave the
    directory of the sockets behind; so the handlers are Python's, as those of an event loop end with the loop."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def serve_http(app: FastAPI, listener: socket.socket, client: EngineClient, drain_seconds: float = 60.0) -> int:
    """Serve until SIGTERM or SIGINT; return the signal's number.

    From the signal on, new requests get 503 and those in flight are finished, for at most `drain_seconds`; a second
    signal ends them at once. Later ones change nothing: the handlers stay, for what the caller still has to clean up.
    Raises RankLost when the engine has failed for good.
    """
    server = make_server(app)
    received: asyncio.Queue[int] = asyncio.Queue()
    for each in SIGNALS:
        signal.signal(each, lambda number, _: received.put_nowait(number))
    serving, signalled = asyncio.create_task(server.serve([listener])), asyncio.create_task(received.get())
    failing = asyncio.create_task(client.wait_for_failure())
    try:
        await asyncio.wait((serving, signalled, failing), return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            await asyncio.sleep(0.2)  # the clients get their errors
            raise RankLost(f"the server gives up: {failing.result()}")
        assert signalled.done(), "the HTTP server ended without a signal"
        client.drain()
        deadline = time.monotonic() + drain_seconds
        while server.server_state.tasks and received.empty() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return signalled.result()
    finally:
        signalled.cancel()
        failing.cancel()
        server.should_exit = True
        await serving
