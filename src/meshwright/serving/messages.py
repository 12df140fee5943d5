"""Messages between the front and the rank processes of a server: JSON objects behind a 4-byte big-endian length.

They travel over Unix sockets on one machine and over TCP between machines; whoever connects proves that it knows a
shared secret. The Unix sockets are in Linux's abstract namespace: they need no file, and end with their process. As no
file permissions protect them, connections of other users are closed. Free of torch.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, closing, suppress
from typing import Any, cast

from pydantic_core import from_json, to_json

from meshwright.errors import RankLost, UserError

_LENGTH_BYTES = 4
MAX_MESSAGE_BYTES = 2**28
"""Largest size of one message in bytes: above any accepted request, and far below what a corrupted length could be."""
_NONCE_BYTES = _PROOF_BYTES = 32
CONNECT_SECONDS = 60.0
"""Time limit for a connection and for the proof that its peer knows the secret."""
PROOF_SECONDS = 5.0
"""Time limit for the proof where no other connection is accepted meanwhile."""

Message = dict[str, Any]


def encode(message: Mapping[str, Any]) -> bytes:
    """Encode a message as the bytes that are sent: a 4-byte big-endian length, then JSON. Values may be dataclasses,
    named tuples and sets, which pydantic decodes."""
    content = to_json(message)
    return len(content).to_bytes(_LENGTH_BYTES, "big") + content


def _sign_nonce(secret: str, nonce: bytes) -> bytes:
    """Return the HMAC-SHA256 of the listener's random `nonce` under the shared secret, by which a connecting process
    proves that it knows the secret."""
    return hmac.new(secret.encode(), nonce, hashlib.sha256).digest()


def _is_of_other_user(connection: socket.socket) -> bool:
    """Return True if the peer of a Unix socket is a process of another user; False for a TCP connection."""
    if connection.family != socket.AF_UNIX:
        return False
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))  # struct ucred
    return bool(user != os.geteuid())


class Channel:
    """Blocking connection of a rank process to the front (the process of the HTTP server) or to another rank. All
    methods raise `RankLost` if the other process has closed the connection. connection: connected socket."""

    def __init__(self, connection: socket.socket) -> None:
        """Wrap a connected socket."""
        connection.setblocking(True)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection

    @classmethod
    def connect(cls, address: str, secret: str) -> Channel:
        """Connect to the listener at `address`, `unix:NAME` or `tcp:HOST:PORT`, and prove knowledge of `secret`. Raises
        RankLost if nothing listens there."""
        kind, _, place = address.partition(":")
        host, _, port = place.rpartition(":")
        with ExitStack() as stack:  # closes the socket if anything fails
            try:
                if kind == "unix":
                    connection = stack.enter_context(socket.socket(socket.AF_UNIX))
                    connection.connect(f"\0{place}")
                else:
                    connection = stack.enter_context(socket.create_connection((host, int(port)), CONNECT_SECONDS))
            except OSError as error:
                raise RankLost(f"nothing listens at {address}: {error}") from error
            channel = cls(connection)
            channel.send(_sign_nonce(secret, channel._read_exactly(_NONCE_BYTES)))
            stack.pop_all()
        return channel

    @property
    def own_address(self) -> str:
        """IP address of this machine on the connection, at which other ranks can reach it; "" for a Unix socket."""
        return "" if self._socket.family == socket.AF_UNIX else str(self._socket.getsockname()[0])

    def send(self, data: bytes) -> None:
        """Send `data`, such as a message as encoded by `encode`, which is separate so that one encoding can be sent to
        several ranks."""
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise RankLost(f"the peer has closed the connection: {error}") from error

    def receive(self) -> Message:
        """Wait for the next message and return it."""
        return cast(Message, from_json(self._read_exactly(_parse_size(self._read_exactly(_LENGTH_BYTES)))))

    def receive_ready(self, wait: bool) -> list[Message]:
        """Return all messages that have arrived, in order. If only a part of a message has arrived, wait for the whole
        message. wait: what to do if no message has arrived: True: block until a message arrives; False: return []."""
        found = [self.receive()] if wait else []
        while select.select([self._socket], [], [], 0.0)[0]:
            found.append(self.receive())
        return found

    def _read_exactly(self, size: int) -> bytes:
        """Read and return exactly `size` bytes, blocking until they have arrived."""
        data = b""
        while len(data) < size:  # a stop signal ends a call early
            try:
                part = self._socket.recv(size - len(data), socket.MSG_WAITALL)
            except OSError as error:
                raise RankLost(f"the peer has closed the connection: {error}") from error
            if not part:
                raise RankLost("the peer has closed the connection")
            data += part
        return data


class Listener:
    """Listening socket of the front (the process of the HTTP server), or of a replica's first rank, to which the
    replica's other ranks connect. Attribute `address`, for `Channel.connect`: `unix:NAME` or `tcp:HOST:PORT`.

    host: name or address of this machine on which to listen, on a free TCP port; "": a Unix socket, which accepts only
    processes of this user in the same network namespace. secret: shared secret that each connecting process must prove
    to know. Raises UserError if this machine does not have the address `host`.
    """

    def __init__(self, host: str, secret: str) -> None:
        """Open the listening socket; arguments: see the class."""
        self._secret = secret
        if not host:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind("")  # Linux chooses a free name
            self._socket.listen()
            self.address = f"unix:{self._socket.getsockname()[1:].decode()}"
            return
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise UserError(f"cannot listen on {host}, where ranks are to meet: {error}") from None
        self.address = f"tcp:{host}:{self._socket.getsockname()[1]}"

    async def serve(
        self, answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
    ) -> asyncio.Server:
        """Start an asyncio server that calls `answer` for each connection whose peer proves knowledge of the secret;
        the connection is closed when `answer` returns."""

        async def check(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Call `answer` for one connection if its peer proves knowledge of the secret; close the connection
            afterwards."""
            nonce = secrets.token_bytes(_NONCE_BYTES)
            with closing(writer), suppress(asyncio.IncompleteReadError, OSError):
                if not _is_of_other_user(writer.get_extra_info("socket")):
                    writer.write(nonce)
                    proof = await asyncio.wait_for(reader.readexactly(_PROOF_BYTES), CONNECT_SECONDS)
                    if hmac.compare_digest(proof, _sign_nonce(self._secret, nonce)):
                        await answer(reader, writer)

        start = asyncio.start_unix_server if self._socket.family == socket.AF_UNIX else asyncio.start_server
        return await start(check, sock=self._socket, limit=2**24)

    def accept(self, seconds: float) -> Channel:
        """Wait for the next connection whose peer proves knowledge of the secret, and return it. Raises RankLost after
        `seconds` without such a connection."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left)
            with suppress(OSError), ExitStack() as stack:
                connection = stack.enter_context(self._socket.accept()[0])  # closed unless it is returned
                connection.settimeout(min(left, PROOF_SECONDS))
                if not _is_of_other_user(connection):
                    nonce = secrets.token_bytes(_NONCE_BYTES)
                    connection.sendall(nonce)
                    proof = connection.recv(_PROOF_BYTES, socket.MSG_WAITALL)
                    if hmac.compare_digest(proof, _sign_nonce(self._secret, nonce)):
                        stack.pop_all()
                        return Channel(connection)
        raise RankLost(f"no rank connected within {seconds:g} s")

    def close(self) -> None:
        """Close the listening socket; accepted connections stay open."""
        self._socket.close()


async def receive(reader: asyncio.StreamReader) -> bytes | None:
    """Read the next message from the stream `reader` and return its JSON; None if the connection was closed. Raises
    RankLost for a message that is too large."""
    try:
        return await reader.readexactly(_parse_size(await reader.readexactly(_LENGTH_BYTES)))
    except (asyncio.IncompleteReadError, OSError):
        return None


def _parse_size(header: bytes) -> int:
    """Parse the 4-byte header of a message; return the number of bytes that follow. Raises RankLost above
    `MAX_MESSAGE_BYTES`."""
    size = int.from_bytes(header, "big")
    if size > MAX_MESSAGE_BYTES:
        raise RankLost(f"a message of {size:,} bytes on a connection of the server: at most {MAX_MESSAGE_BYTES:,}")
    return size
