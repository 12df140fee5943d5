"""Runs the HTTP application: the listening socket, limits on connections, and the end by a signal. Free of torch."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import time
from contextlib import AbstractContextManager, nullcontext

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from meshwright.errors import UserError
from meshwright.serving.engine_client import EngineClient
from meshwright.serving.streaming import ABORT

HEADER_BYTES = 64 << 10  # of one request: path and headers
HEADER_SECONDS = 30  # from the connection, or a request's first byte, to the end of its headers
SIGNALS = (signal.SIGTERM, signal.SIGINT)  # that end the server
ACCEPTS = 8  # connections that an iteration of the loop takes: libuv accepts one for each listening descriptor
KEEP_ALIVE_SECONDS = 65  # of a connection without a request; longer than the usual 60 of proxies


def open_socket(host: str, port: int) -> socket.socket:
    """Open the listening socket; port 0: any free one. Raises UserError if the address cannot be used."""
    try:
        if not 0 <= port < 2**16:
            raise OverflowError("should be 0 to 65535")
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)  # fails here, not later, if another server listens there
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} of {host} is in use; give another --port, or 0 for any free one") from None
        raise UserError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener


class _LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on the headers of a request and on clients that read nothing, and a way to drop
    the connection."""

    _unsent_bytes = 0  # of responses, at the last look
    _header_bytes = 0
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_watching()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Wait for the end of the headers."""
        super().on_message_begin()
        self._header_bytes = 0
        self._watch_headers()

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
        self._stop_watching()
        super().on_headers_complete()
        self.scope[ABORT] = self.transport.abort  # type: ignore[literal-required]

    def on_response_complete(self) -> None:
        """Wait for the next request, or until the client has read the last response."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._await_reader()

    def timeout_keep_alive_handler(self) -> None:
        """Drop the connection unless the client still reads a response."""
        unsent, before = self.transport.get_write_buffer_size(), self._unsent_bytes
        self._unsent_bytes = unsent
        if unsent in (0, before):
            self.transport.abort()
        else:
            self._await_reader()

    def _await_reader(self) -> None:
        """Look at the connection later."""
        self.timeout_keep_alive_task = self.loop.call_later(KEEP_ALIVE_SECONDS, self.timeout_keep_alive_handler)

    def _count(self, size: int) -> None:
        """Drop the connection if the headers are too large."""
        self._header_bytes += size
        if self._header_bytes > HEADER_BYTES:
            self.transport.abort()

    def _watch_headers(self) -> None:
        """Drop the connection unless the headers of a request are complete in time."""
        self._stop_watching()
        self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _stop_watching(self) -> None:
        """Forget the time limit."""
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves signals to `serve_http`."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Return a context that does nothing."""
        return nullcontext()


def make_server(app: FastAPI) -> uvicorn.Server:
    """Return the server of an application; its `serve([listener])` runs until its `should_exit` is set."""
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=_LimitedProtocol,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=5,
    )
    return _Server(config)


async def serve_http(app: FastAPI, listener: socket.socket, client: EngineClient, drain_seconds: float = 60.0) -> int:
    """Serve until SIGTERM or SIGINT; return the signal's number.

    From the signal on, new requests get 503 and those in flight are finished, for at most `drain_seconds`; a second
    signal ends them at once.
    """
    server, loop = make_server(app), asyncio.get_running_loop()
    received: asyncio.Queue[int] = asyncio.Queue()
    for each in SIGNALS:
        loop.add_signal_handler(each, received.put_nowait, int(each))
    listeners = [listener, *(listener.dup() for _ in range(ACCEPTS - 1))]
    serving, signalled = asyncio.create_task(server.serve(listeners)), asyncio.create_task(received.get())
    try:
        await asyncio.wait((serving, signalled), return_when=asyncio.FIRST_COMPLETED)
        assert signalled.done(), "the HTTP server ended without a signal"
        client.drain()
        deadline = time.monotonic() + drain_seconds
        while server.server_state.tasks and received.empty() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return signalled.result()
    finally:
        signalled.cancel()
        server.should_exit = True
        await serving
        for each in SIGNALS:
            loop.remove_signal_handler(each)
