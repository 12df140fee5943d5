"""A load generator for OpenAI-compatible servers on the machine that is measured: HTTP/1.1 over asyncio with little
work per token. Bytes are stored with their time of arrival and parsed when the clock no longer runs.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar, cast

T = TypeVar("T")


@dataclass(slots=True)
class Response:
    """One response: its bytes as they arrived, with times of `time.perf_counter` in seconds."""

    sent: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    lost: bool = False
    """True if the connection ended before the response."""

    @property
    def ended(self) -> float:
        return self.pieces[-1][0] if self.pieces else self.sent

    @property
    def status(self) -> int:
        return int(self.raw()[9:12] or 0)

    def raw(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)

    def headers(self) -> dict[str, str]:
        """Names in lower case."""
        lines = self.raw().partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def body(self) -> bytes:
        """The body without the framing of chunks."""
        body = self.raw().partition(b"\r\n\r\n")[2]
        if self.headers().get("transfer-encoding") != "chunked":
            return body
        whole = bytearray()
        while body:
            size, _, rest = body.partition(b"\r\n")
            length = int(size or b"0", 16)
            whole += rest[:length]
            body = rest[length + 2 :]
        return bytes(whole)

    def json(self) -> Any:
        return json.loads(self.body())

    def events(self) -> list[dict[str, Any]]:
        """The server-sent events without the last, `[DONE]`."""
        lines = self.body().split(b"\n")
        return [
            json.loads(line[5:])
            for line in lines
            if line.startswith(b"data:") and not line.endswith(b"[DONE]") and line[5:].strip().endswith(b"}")
        ]

    def arrivals(self) -> list[float]:
        """Seconds from sending to the arrival of each event with a choice; events of one piece have one time."""
        times, raw, end = [], self.raw(), 0
        begins = [match.start() for match in re.finditer(rb'data: \{[^\n]*"choices": ?\[\{', raw)]
        for when, piece in self.pieces:
            end += len(piece)
            while len(times) < len(begins) and begins[len(times)] < end:
                times.append(when - self.sent)
        return times


class Connection(asyncio.Protocol):
    """A connection that carries one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._response = Response(0.0)
        self._left: int | None = None
        self._done: asyncio.Future[Response] | None = None
        self._abort_after = 0
        self._closes = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    async def send(self, request: bytes, abort_after: int = 0) -> Response:
        """Send a request and wait for its response; with `abort_after`, close after so many pieces of it."""
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._left, self._abort_after = None, abort_after
        self._response = Response(time.perf_counter())
        self._transport.write(request)
        return await self._done

    def data_received(self, data: bytes) -> None:
        pieces = self._response.pieces
        pieces.append((time.perf_counter(), data))
        if self._left is None and (head := self._response.raw() if len(pieces) > 1 else data).find(b"\r\n\r\n") >= 0:
            self._left = self._remaining(head)
        elif self._left is not None and self._left > 0:
            self._left -= len(data)
        if self._left == 0 or (self._left == -1 and self._ends_chunks(data)):
            self._finish(lost=False)
        elif self._abort_after and len(pieces) >= self._abort_after:
            self.abort()

    def _remaining(self, head: bytes) -> int:
        """Bytes of the body that have not arrived; -1: chunked."""
        names, _, body = head.partition(b"\r\n\r\n")
        lines = names.lower().split(b"\r\n")
        self._closes = b"connection: close" in lines
        for line in lines:
            if line.startswith(b"content-length:"):
                return int(line.partition(b":")[2]) - len(body)
        return -1

    def _ends_chunks(self, data: bytes) -> bool:
        end = b"\r\n0\r\n\r\n"  # a head may end in "0\r\n\r\n", too
        return (data if len(data) >= len(end) else self._response.raw()).endswith(end)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._finish(lost=True)

    def abort(self) -> None:
        """Close without saying goodbye (TCP reset if data are unread)."""
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_open(self) -> bool:
        """True if it can carry another request."""
        return self._transport is not None and not self._transport.is_closing() and not self._closes

    def _finish(self, lost: bool) -> None:
        if self._done is not None and not self._done.done():
            self._response.lost = lost
            self._done.set_result(self._response)


class Client:
    """Connections to one server, kept open and reused."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._host, self._port = host, port
        self._idle: list[Connection] = []

    async def get(self, path: str) -> Response:
        return await self._send(f"GET {path} HTTP/1.1\r\nHost: {self._host}\r\n\r\n".encode())

    async def post(self, path: str, body: dict[str, Any], abort_after: int = 0, abort_seconds: float = 0) -> Response:
        """POST JSON; the client disconnects after `abort_after` pieces or `abort_seconds` of the response, if given."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        return await self._send(
            f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data, abort_after, abort_seconds
        )

    async def _send(self, request: bytes, abort_after: int = 0, abort_seconds: float = 0) -> Response:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                break
        else:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(Connection, self._host, self._port)
        timer = asyncio.get_running_loop().call_later(abort_seconds, connection.abort) if abort_seconds else None
        try:
            response = await connection.send(request, abort_after)
        except asyncio.CancelledError:
            connection.abort()
            raise
        if timer is not None:
            timer.cancel()
        if connection.is_open and not response.lost:
            self._idle.append(connection)
        return response

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()


def completion(model: str, prompt: Sequence[int], tokens: int, **fields: Any) -> dict[str, Any]:
    """Body of a greedy streamed completion of exactly `tokens` tokens."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


@dataclass(slots=True)
class Wave:
    """Measurements of requests that were sent at once: seconds since then, in the order of the prompts."""

    seconds: float
    tokens: int
    first: list[float]
    """Time to the first token of each request."""
    ended: list[float]
    gaps: list[float] = field(default_factory=list)
    """Times between events of one request; empty where the contender does not report them."""
    texts: list[Any] = field(default_factory=list)
    """Answers: text or token IDs."""
    client_seconds: float = 0.0
    """Processor time of the client."""
    others: float = 0.0
    """Share of the processors' time that other processes took."""

    def figures(self) -> dict[str, Any]:
        """Output tokens/s of all requests; where the contender reports each token, and the client was not so late that
        all came at once, TTFT and ITL in seconds and tokens/s of one request after its first token."""
        per_request = self.tokens / len(self.first)
        found = {
            "seconds": round(self.seconds, 4),
            "tokens_per_second": round(self.tokens / self.seconds, 2),
            "client_us_per_token": round(self.client_seconds / self.tokens * 1e6, 1),
            "others": self.others,
        }
        if len(self.gaps) > 1 and all(end > first for first, end in zip(self.first, self.ended, strict=True)):
            decode = [(per_request - 1) / (end - first) for first, end in zip(self.first, self.ended, strict=True)]
            found |= {"ttft": round(statistics.median(self.first), 4), "ttft_max": round(max(self.first), 4)}
            found["decode_tokens_per_second"] = round(statistics.median(decode), 2)
            cuts = statistics.quantiles(self.gaps, n=100, method="inclusive")
            found |= {"itl_p50": round(cuts[49], 5), "itl_p99": round(cuts[98], 5)}
        return found


class RequestFailed(Exception):
    """A response that is no complete stream of the wanted length."""


def check_stream(response: Response, tokens: int | None) -> tuple[str, int]:
    """Text and number of tokens of a streamed completion; RequestFailed says what is wrong with it."""
    if response.lost or response.status != 200:
        raise RequestFailed(f"status {response.status}, lost {response.lost}: {response.body()[:300]!r}")
    events = response.events()
    text = "".join(choice.get("text") or "" for event in events for choice in event.get("choices", ()))
    usage = next((event["usage"] for event in reversed(events) if event.get("usage")), None)
    if usage is None:
        raise RequestFailed(f"no usage in the stream; the last event: {events[-1:]}")
    if tokens is not None and usage["completion_tokens"] != tokens:
        raise RequestFailed(f"{usage['completion_tokens']} tokens instead of {tokens}")
    return text, usage["completion_tokens"]


async def run_wave(client: Client, model: str, prompts: Sequence[Sequence[int]], tokens: int, **fields: Any) -> Wave:
    """Send all prompts at once and wait for all answers."""
    bodies = [completion(model, prompt, tokens, **fields) for prompt in prompts]
    begun, processor = time.perf_counter(), time.process_time()
    responses = await asyncio.gather(*(client.post("/v1/completions", body) for body in bodies))
    seconds = time.perf_counter() - begun
    spent = time.process_time() - processor
    wave = Wave(seconds, 0, [], [], client_seconds=spent)
    for response in responses:
        text, count = check_stream(response, tokens)
        arrivals = response.arrivals()
        wave.tokens += count
        wave.texts.append(text)
        wave.first.append(response.sent - begun + arrivals[0])
        wave.ended.append(response.ended - begun)
        wave.gaps += [after - before for before, after in pairwise(arrivals)]
    return wave


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine, by uvloop (of Meshwright's `serve` extra) where it is installed: half the time per token."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


async def wait_until(condition: Callable[[], Awaitable[bool]], seconds: float, interval: float = 0.05) -> bool:
    """Wait for the condition; return True if it held within `seconds`."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if await condition():
            return True
        await asyncio.sleep(interval)
    return False


async def is_answered(client: Client, path: str) -> bool:
    """Return True if the server answers 200 at `path`."""
    try:
        return (await client.get(path)).status == 200
    except OSError:
        return False
