"""Gate of the HTTP server: request IDs, API keys, and limits on the bodies of requests. Free of torch."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshwright.errors import UserError
from meshwright.serving.engine_client import Ticket
from meshwright.serving.protocol.errors import ApiError, retry_headers
from meshwright.untrusted import read_file

OPEN_PATHS = ("/health", "/ready", "/metrics")  # need no API key: probes and scrapers have none
LINE_BYTES = 256 << 10
"""Largest body by which a refused request is known again; while the queue is full, larger ones are not read."""
BYTES_PER_TOKEN = 4  # of a body, roughly, whether it has text or token IDs
_GOOD_ID = re.compile(r"[!-~]{1,128}")  # printable ASCII without spaces


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Settings of the HTTP API. A client that reads too slowly is disconnected, and its requests are cancelled.

    Attributes:
        model: Name of the served model.
        api_keys: API keys, one of which each request must have; empty: no key is needed.
        cors_origins: Origins whose web pages may call the API, `"*"` for all; empty: no CORS headers.
        body_bytes: Most bytes of one request body.
        all_body_bytes: Most bytes of all bodies that are being read or parsed at a time.
        body_seconds: Most seconds from the first to the last byte of a body.
        stream_bytes: Most bytes of unsent events per choice of a streamed response, beyond the socket's own buffers.
        drain_seconds: Most seconds from the last token until a client has read its stream.
        connections: Most connections served at once, if the limit on open files allows it; each takes some 10 KB.
    """

    model: str
    api_keys: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    body_bytes: int = 16 << 20
    all_body_bytes: int = 256 << 20
    body_seconds: float = 60.0
    stream_bytes: int = 256 << 10
    drain_seconds: float = 60.0
    connections: int = 1024


def read_api_keys(path: Path) -> tuple[str, ...]:
    """Read API keys from a file, one per line; blank lines and lines that begin with # are skipped. Raises UserError if
    it cannot be read or has no key."""
    try:
        lines = read_file(path, "config_bytes", pipe=True).decode().splitlines()
    except OSError as error:
        raise UserError(f"API keys: {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"API keys: {path}: byte {error.start} is not UTF-8 text") from None
    keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
    if not keys:
        raise UserError(f"API keys: {path} holds no key; write one a line")
    return keys


class Gate:
    """ASGI middleware in front of all endpoints: assigns each request its ID (`X-Request-Id`, the client's own if it
    sent one), checks its API key, and refuses it before a large body is read while the engine accepts none."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], refuse: Callable[[str, bool], ApiError | None]) -> None:
        """`api_keys`: any of them admits; none: no key is needed. `refuse`: returns the refusal of a POST to a path,
        before its body is read; its second argument: the body is larger than `LINE_BYTES`, or of unknown size."""
        self._app, self._refuse = app, refuse
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401 or pass the request on."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        name = given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = name

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).append("x-request-id", name)
            await send(message)

        error: ApiError | None
        if self._digests and scope["path"] not in OPEN_PATHS and not self._admits(headers.get(b"authorization", b"")):
            message = "the API key is missing or wrong; send the header Authorization: Bearer KEY"
            error = ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        else:
            size = headers.get(b"content-length", b"")
            large = not size.isdigit() or len(size) > 12 or int(size) > LINE_BYTES
            error = self._refuse(scope["path"], large) if scope["method"] == "POST" else None
        return await (self._app if error is None else error.to_response())(scope, receive, send_named)

    def _admits(self, authorization: bytes) -> bool:
        """Return True if the Authorization header contains one of the API keys, compared in constant time."""
        kind, _, key = authorization.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return kind.lower() == b"bearer" and any(matches)


class BodyReader:
    """Reader of request bodies within the limits of `HttpSettings` on size, total memory and time."""

    def __init__(self, settings: HttpSettings) -> None:
        self._settings, self._secret = settings, secrets.token_bytes(32)
        self._bytes = 0  # of all bodies now in memory

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Context manager that reads and yields the whole body of a request; it counts towards `all_body_bytes` until
        the context exits. Raises ApiError if a limit is exceeded, starlette's ClientDisconnect if the client is gone.
        """
        settings, body = self._settings, bytearray()
        too_large = f"the body is larger than {settings.body_bytes:,} bytes"
        declared = request.headers.get("content-length", "0")
        if not declared.isdecimal() or len(declared) > 12 or int(declared) > settings.body_bytes:
            raise ApiError(413, too_large, code="body_too_large")
        try:
            async with asyncio.timeout(settings.body_seconds):
                async for part in request.stream():
                    self._bytes += len(part)
                    body += part
                    if len(body) > settings.body_bytes:
                        raise ApiError(413, too_large, code="body_too_large")
                    if self._bytes > settings.all_body_bytes:
                        message, wait = "the bodies of all requests are too large together", retry_headers(1.0)
                        raise ApiError(429, message, code="body_bytes", headers=wait)
            yield bytes(body)
        except TimeoutError:
            message = f"the body did not arrive within {settings.body_seconds:g} s"
            raise ApiError(408, message, code="timeout") from None
        finally:
            self._bytes -= len(body)

    def identify(self, request: Request, body: bytes) -> Ticket:
        """Return the ticket of a request by its API key, path and body; without a key above `LINE_BYTES`."""
        if len(body) > LINE_BYTES:
            return Ticket()
        digest = hashlib.blake2b(request.headers.get("authorization", "").encode(), key=self._secret, digest_size=16)
        digest.update(b"\0" + request.scope["path"].encode() + b"\0" + body)
        again = request.headers.get("x-stainless-retry-count")  # OpenAI's clients count
        return Ticket(digest.digest(), max(1, len(body) // BYTES_PER_TOKEN), first=again == "0")
