"""Settings of the HTTP API, API keys, and limits on the bodies of requests. Free of torch."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request

from meshwright.errors import UserError
from meshwright.serving.protocol.errors import ApiError, make_retry_headers
from meshwright.serving.waiting_line import Ticket
from meshwright.untrusted import read_file

OPEN_PATHS = ("/health", "/ready", "/metrics")  # need no API key: probes and scrapers have none
LINE_BYTES = 256 << 10
"""Largest body by which the retry of a refused request is recognised; larger ones are not read if the queue is full."""
LONGEST_SECONDS = 60.0
"""Longest `Retry-After` for OpenAI's clients, which ignore a longer one and retry at once."""
BYTES_PER_TOKEN = 4  # of a body, roughly, for text and for token IDs


class HttpSettings(NamedTuple):
    """Settings of the HTTP API. A client that reads too slowly is disconnected, and its requests are cancelled.

    Attributes:
        model: Name of the served model.
        api_keys: API keys; each request must have one of them; empty: no key is needed.
        cors_origins: Origins whose web pages may call the API, `"*"` for all; empty: no CORS headers.
        body_bytes: Maximum number of bytes of one request body.
        all_body_bytes: Maximum number of bytes of all bodies that are being read or parsed at a time.
        body_seconds: Maximum seconds from the first to the last byte of a body.
        stream_bytes: Maximum number of bytes of a streamed response that wait to be sent, for each choice (answer) of
            the response. Bytes in the socket's own buffers are not counted.
        drain_seconds: Maximum seconds that a client may take, after the last token, to read the rest of its stream.
        connections: Maximum number of connections served at once, if the limit on open files allows it; each takes some
            10 KB.
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
    """Read API keys from the file `path`, one per line; blank lines and lines that begin with # are skipped. Raises
    UserError if the file cannot be read or has no key."""
    try:
        lines = read_file(path, "config_bytes", pipe=True).decode().splitlines()
    except OSError as error:
        raise UserError(f"API keys: {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"API keys: {path}: byte {error.start} is not UTF-8 text") from None
    keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
    if not keys:
        raise UserError(f"API keys: {path} has no key; write one per line")
    return keys


def check_origins(origins: Sequence[str]) -> Sequence[str]:
    """Check the setting `HttpSettings.cors_origins` and return it unchanged. Each origin must be "*", or a scheme and
    host such as "https://example.org:8443". Raises UserError for any other form, which no browser sends and which would
    never match."""
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+", origin):
            raise UserError(f'--cors-origin {origin}: should be an origin such as https://example.org:8443, or "*"')
    return origins


class Gate:
    """Checks of requests before their bodies are parsed: API keys, which are stored as SHA-256 hashes, and limits on
    the bodies. settings: settings of the HTTP API."""

    def __init__(self, settings: HttpSettings) -> None:
        """Start without bodies in memory; arguments: see the class."""
        self._settings, self._secret = settings, secrets.token_bytes(32)
        self._digests = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]
        self._bytes = 0  # of all bodies now in memory

    def check_key(self, request: Request) -> None:
        """Raise ApiError (401) if the Authorization header of a request has none of the server's API keys. The paths
        `OPEN_PATHS` (health checks and metrics) need no key. Keys are compared in constant time."""
        if not self._digests or request.scope["path"] in OPEN_PATHS:
            return
        kind, _, key = request.headers.get("authorization", "").encode("latin-1").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if kind.lower() != b"bearer" or not any(matches):
            message = "the API key is missing or wrong; send the header Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    def is_large(self, request: Request) -> bool:
        """Return True if a request's body may be larger than `LINE_BYTES` (256 KiB): its Content-Length is larger or
        missing. The engine's queue is checked before such a body is read. Raises ApiError (413) if the Content-Length
        is invalid or above `HttpSettings.body_bytes`."""
        size = request.headers.get("content-length")
        if size is not None and not (size.isdecimal() and len(size) <= 12 and int(size) <= self._settings.body_bytes):
            raise self._make_too_large_error()
        return size is None or int(size) > LINE_BYTES

    def _make_too_large_error(self) -> ApiError:
        """Create the error (HTTP 413) for a body that is larger than `HttpSettings.body_bytes`."""
        return ApiError(413, f"the body is larger than {self._settings.body_bytes:,} bytes", code="body_too_large")

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytearray]:
        """Read the whole body of a request, for use inside `async with`; until its end the bytes count towards
        `HttpSettings.all_body_bytes`, the limit on all bodies in memory. Raises ApiError if a limit on size or time is
        exceeded, for an Upgrade header and for a compressed body; starlette's ClientDisconnect if the client is
        gone."""
        settings, body = self._settings, bytearray()
        if "upgrade" in request.headers and "upgrade" in request.headers.get("connection", "").lower():
            # The HTTP parser would treat the body as data of the other protocol.
            raise ApiError(400, "only HTTP/1.1 is supported: do not send an Upgrade header", code="upgrade")
        if (encoding := request.headers.get("content-encoding", "").strip().lower()) not in ("", "identity"):
            message = f"Content-Encoding {encoding[:100]!r} is not supported: send the body without compression"
            raise ApiError(415, message, code="content_encoding")
        try:
            try:
                async with asyncio.timeout(settings.body_seconds):
                    async for part in request.stream():
                        self._bytes += len(part)
                        body += part
                        if len(body) > settings.body_bytes:
                            raise self._make_too_large_error()
                        if self._bytes > settings.all_body_bytes:
                            message, wait = "the bodies of all requests are too large together", make_retry_headers(1.0)
                            raise ApiError(429, message, code="body_bytes", headers=wait)
            except TimeoutError:
                raise ApiError(408, f"the body took longer than {settings.body_seconds:g} s", code="timeout") from None
            yield body
        finally:
            self._bytes -= len(body)

    def identify(self, request: Request, body: bytearray | None) -> Ticket:
        """Create the ticket of an HTTP request, by which a refused request keeps its place in the waiting line. The
        ticket contains a digest of API key, path and body. A body above `LINE_BYTES` (256 KiB), or one that has not
        been read (None), gets a ticket without digest, and therefore no place."""
        again = request.headers.get("x-stainless-retry-count")  # OpenAI's clients count
        longest = math.inf if again is None else LONGEST_SECONDS
        if body is None or len(body) > LINE_BYTES:
            return Ticket(longest=longest)
        digest = hashlib.blake2b(request.headers.get("authorization", "").encode(), key=self._secret, digest_size=16)
        digest.update(b"\0" + request.scope["path"].encode() + b"\0" + body)
        return Ticket(digest.digest(), max(1, len(body) // BYTES_PER_TOKEN), again == "0", longest)
