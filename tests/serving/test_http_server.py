"""The server's socket, its limits on connections, and its end by SIGTERM."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPResponse
from pathlib import Path

import httpx
import pytest

from bench.shared.fake_engine import FakeEngine, ServedApp, make_prompts, wait_until
from meshwright.errors import UserError
from meshwright.launcher.signals import StopSignals
from meshwright.serving import gate, http_server
from meshwright.serving.gate import HttpSettings
from meshwright.serving.http import HttpApp
from meshwright.serving.http_server import open_socket
from meshwright.serving.serve import raise_open_file_limit
from meshwright.serving.waiting_line import Refusal

PROGRAM = """
import asyncio, sys
from pathlib import Path
from meshwright.launcher.signals import StopSignals
from meshwright.serving.gate import HttpSettings
from meshwright.serving.http import HttpApp
from meshwright.serving import http_server
from meshwright.serving.http_server import open_socket, serve_http
from bench.shared.fake_engine import FakeEngine, make_prompts

http_server.READ_SECONDS = 0.3  # shorter than the requests in flight
prompts = make_prompts(Path(sys.argv[1]))
engine = FakeEngine(prompts)
engine.step_seconds = 0.02
listener = open_socket("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
with StopSignals() as signals:
    unfinished = asyncio.run(serve_http(HttpApp(engine, prompts, HttpSettings("m")), listener, engine, signals))
print(*signals.received, unfinished, len(engine.running))
"""


LIMIT = 6
"""Connections of the server."""


@pytest.fixture
def engine(tmp_path: Path) -> FakeEngine:
    return FakeEngine(make_prompts(tmp_path))


@pytest.fixture
def served(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedApp]:
    monkeypatch.setattr(http_server, "HEADER_SECONDS", 0.5)
    monkeypatch.setattr(http_server, "HEADER_BYTES", 2000)
    monkeypatch.setattr(http_server, "LINGER_SECONDS", 0.5)
    with ServedApp(HttpApp(engine, engine.prompts, HttpSettings("m", connections=LIMIT))) as app:
        yield app


@pytest.fixture
def address(served: ServedApp) -> tuple[str, int]:
    return served.address


def post(body: bytes, size: int | None = None, *headers: str) -> bytes:
    """A request for text; `size`: its Content-Length, if not that of `body`."""
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {len(body) if size is None else size}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


def read_all(connection: socket.socket) -> bytes:
    """All data until the connection is closed or reset."""
    received = b""
    connection.settimeout(60)
    try:
        while part := connection.recv(1 << 16):
            received += part
    except ConnectionResetError:
        pass
    return received


def read_status(connection: socket.socket) -> int:
    """Read one response; return its status."""
    connection.settimeout(60)
    response = HTTPResponse(connection)
    response.begin()
    response.read()
    return response.status


def test_port_in_use_is_one_line():
    with open_socket("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of 127.0.0.1 is in use; give another --port, or 0"):
            open_socket("127.0.0.1", port)


@pytest.mark.parametrize(("host", "port"), [("no.such.host.invalid", 0), ("203.0.113.1", 0), ("127.0.0.1", 70000)])
def test_unusable_address_is_one_error_line(host: str, port: int):
    with pytest.raises(UserError, match=f"cannot listen on {host} port {port}"):
        open_socket(host, port)


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_header_timeout_ends_connection(address: tuple[str, int], sent: bytes):
    with socket.create_connection(address) as connection:
        connection.sendall(sent)
        assert read_all(connection) == b""


@pytest.mark.parametrize(
    ("parts", "status", "code"),
    [
        ([b"x: y\r\n" * 60 + b"\r\n"], 431, "headers_too_large"),
        ([b"x: " + b"a" * 1000, b"a" * 1500], 431, "headers_too_large"),
        ([b"content-length: x\r\n\r\n"], 400, "invalid_http"),
    ],
)
def test_unreadable_request_gets_openai_error(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch, parts: list[bytes], status: int, code: str
):
    monkeypatch.setattr(http_server, "HEADER_SECONDS", 60)
    with socket.create_connection(address) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_status(connection) == 200
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        for part in parts:
            time.sleep(0.05)
            connection.sendall(part)
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d" % status) and b"connection: close" in head
    assert json.loads(body)["error"]["code"] == code


@pytest.mark.parametrize("stream", [False, True])
def test_empty_lines_after_request_do_not_disturb_its_response(
    address: tuple[str, int], engine: FakeEngine, stream: bool
):
    """They are no part of a request, and more than the limit on bytes that are not parsed."""
    engine.step_seconds = 0.1
    with socket.create_connection(address) as connection:
        connection.sendall(post(json.dumps({"prompt": "x", "max_tokens": 3, "stream": stream}).encode()))
        wait_until(lambda: len(engine.running) == 1)
        connection.sendall(b"\r\n" * 1500)
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1 200") == 1 == answer.count(b"HTTP/1.1")
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}")


def test_invalid_rest_of_answered_request_gets_no_second_response(address: tuple[str, int]):
    with socket.create_connection(address) as connection:
        connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert read_status(connection) == 404
        connection.sendall(b"no size\r\n")
        assert read_all(connection) == b""


def test_client_that_does_not_read_is_disconnected(served: ServedApp, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_server, "KEEP_ALIVE_SECONDS", 0.3)
    body = json.dumps({"tokens": [299] * 1_000_000}).encode()  # more text than the buffers of the sockets hold
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(served.address)
        connection.sendall(post(body).replace(b"v1/completions", b"detokenize"))
        wait_until(lambda: served.connections == 0)
        received = read_all(connection)
    assert received.startswith(b"HTTP/1.1 200") and not received.endswith(b'"}')


def test_silent_refused_connection_is_closed_soon(
    address: tuple[str, int], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http_server, "REFUSED_SECONDS", 0.1)
    monkeypatch.setattr(http_server, "HEADER_SECONDS", 60)
    engine.step_seconds = None
    with ExitStack() as stack:
        for _ in range(LIMIT):
            connection = stack.enter_context(socket.create_connection(address))
            connection.sendall(post(b'{"prompt": "x", "max_tokens": 5}'))
        wait_until(lambda: len(engine.running) == LIMIT)
        with socket.create_connection(address) as refused:
            assert read_all(refused) == b""
    engine.step_seconds = 0.0
    wait_until(lambda: not engine.running)


def test_idle_connection_survives_header_timeout(address: tuple[str, int]):
    """Between requests the longer keep-alive time applies instead of the time for headers."""
    with httpx.Client(base_url=f"http://{address[0]}:{address[1]}") as client:
        first = client.get("/health").extensions["network_stream"]
        time.sleep(0.8)
        assert client.get("/health").extensions["network_stream"] is first


def test_connections_beyond_limit_get_429_and_others_are_served(address: tuple[str, int], engine: FakeEngine):
    engine.step_seconds, body = None, b'{"prompt": "x", "max_tokens": 5}'
    with ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(address)) for _ in range(LIMIT)]
        for connection in connections:
            connection.sendall(post(body))
        wait_until(lambda: len(engine.running) == LIMIT)
        for _ in range(3):
            with socket.create_connection(address) as refused:
                refused.sendall(post(body))
                head, _, error = read_all(refused).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 429 Too Many Requests\r\n") and b"connection: close" in head
            assert b"retry-after: 1\r\n" in head and b"retry-after-ms: 1000" in head
            assert json.loads(error)["error"]["code"] == "queue_connections"
        assert httpx.get(f"http://{address[0]}:{address[1]}/health").status_code == 200  # else a probe would end it
    engine.step_seconds = 0.0
    wait_until(lambda: not engine.running)
    with httpx.Client(base_url=f"http://{address[0]}:{address[1]}") as client:
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        assert 'reason="connections"} 3.0' in client.get("/metrics").text


def test_connections_beyond_twice_the_limit_wait_for_an_answer(served: ServedApp, monkeypatch: pytest.MonkeyPatch):
    """None of them is reset, though most arrive while the server accepts none."""
    monkeypatch.setattr(http_server, "CROWDED_SECONDS", 60)
    request = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    with ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(served.address)) for _ in range(10 * LIMIT)]
        for _ in range(20):
            assert served.connections <= 2 * LIMIT + http_server.ACCEPTS
            time.sleep(0.002)
        for connection in connections:
            connection.sendall(request)
        answers = []
        for connection in connections:
            answers.append(read_status(connection))
            connection.close()
    assert set(answers) <= {200, 429} and answers.count(200) >= LIMIT


def test_health_check_is_answered_at_twice_the_connection_limit(
    address: tuple[str, int], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    for name in ("REFUSED_SECONDS", "HEADER_SECONDS"):
        monkeypatch.setattr(http_server, name, 60)
    engine.step_seconds = None
    with ExitStack() as stack:
        for number in range(5 * LIMIT):
            connection = stack.enter_context(socket.create_connection(address))
            connection.sendall(post(b'{"prompt": "x"}') if number < LIMIT else b"GET /health HT" if number % 2 else b"")
            wait_until(lambda: len(engine.running) == min(number + 1, LIMIT))  # noqa: B023
        assert httpx.get(f"http://{address[0]}:{address[1]}/health", timeout=20).status_code == 200
        assert len(engine.running) == LIMIT


def test_pipelined_request_closes_connection_after_response(address: tuple[str, int], engine: FakeEngine):
    body = b'{"prompt": "x", "max_tokens": 3}'
    with socket.create_connection(address) as connection:
        connection.sendall(3 * post(body))
        assert read_all(connection).count(b"HTTP/1.1 200") == 1 == len(engine.requests)


def test_disconnect_after_pipelined_request_cancels_first(address: tuple[str, int], engine: FakeEngine):
    engine.step_seconds = None
    with socket.create_connection(address) as connection:
        connection.sendall(post(b'{"prompt": "x"}'))
        wait_until(lambda: len(engine.running) == 1)
        connection.sendall(2 * post(b'{"prompt": "x"}'))
        time.sleep(0.05)
    wait_until(lambda: not engine.running)
    assert len(engine.requests) == 1


def test_body_after_upgrade_request_is_not_parsed_as_request(address: tuple[str, int]):
    """The HTTP parser passes on all data after such headers; Java's client requests h2c with each first request."""
    with socket.create_connection(address) as connection:
        connection.sendall(post(b"", 40, "Connection: Upgrade\r\nUpgrade: h2c"))
        time.sleep(0.05)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1") == 2 and answer.startswith(b"HTTP/1.1 400") and b"Upgrade header" in answer


def test_early_response_to_expect_continue_closes_connection(address: tuple[str, int], engine: FakeEngine):
    engine.refusal, body = Refusal("requests", 2.5), b'{"prompt": "x"}'
    with socket.create_connection(address) as connection:
        connection.sendall(post(b"", 1 << 20, "Expect: 100-continue"))
        head = read_all(connection).lower()
    assert head.startswith(b"http/1.1 429") and b"connection: close" in head
    engine.refusal = None
    with socket.create_connection(address) as connection:
        connection.sendall(post(b"", len(body), "Expect: 100-continue"))
        connection.settimeout(60)
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert read_all(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("header", ["Connection: keep-alive", "Expect: 100-continue"])
@pytest.mark.parametrize("stream", [True, False])
def test_response_to_http_1_0_has_no_chunks_and_ends_with_the_connection(
    address: tuple[str, int], stream: bool, header: str
):
    """Nor has it interim responses. Old proxies and `ab` send HTTP/1.0."""
    body = json.dumps({"prompt": "x", "max_tokens": 3, "seed": 1, "stream": stream}).encode()
    with socket.create_connection(address) as connection:
        connection.sendall(post(body, None, header, "X-Request-Id: r").replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, content = read_all(connection).partition(b"\r\n\r\n")
    fields = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:])
    assert head.split()[1] == b"200" and fields[b"connection"] == b"close" and b"transfer-encoding" not in fields
    assert fields.get(b"content-length") == (None if stream else str(len(content)).encode())
    modern = httpx.post(f"http://{address[0]}:{address[1]}/v1/completions", content=body, headers={"x-request-id": "r"})
    assert (modern.headers.get("transfer-encoding") == "chunked") is stream
    assert without_times(content) == without_times(modern.content)


def without_times(content: bytes) -> bytes:
    return re.sub(rb'"created":\d+', b"", content)


def test_low_limit_on_open_files_is_reported(monkeypatch: pytest.MonkeyPatch):
    limits, lines = [(512, 1000)], list[str]()
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, each: limits.append(each))
    assert raise_open_file_limit(300, lines.append) == 300 and not lines
    assert raise_open_file_limit(1024, lines.append) == 372 and limits[-1] == (1000, 1000)
    assert len(lines) == 1 and "open files (ulimit -n) of 1000" in lines[0]


def test_second_signal_ends_unfinished_requests_immediately(engine: FakeEngine):
    engine.step_seconds = None
    listener = open_socket("127.0.0.1", 0)
    times: list[float] = []

    def interrupt() -> None:
        with socket.create_connection(listener.getsockname()) as connection:
            connection.sendall(post(b'{"prompt": "x"}'))
            wait_until(lambda: bool(engine.running))
            for pause in (0.1, 0.0):
                times.append(time.monotonic())
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(pause)
            assert read_all(connection) == b""

    with StopSignals() as signals:
        thread = threading.Thread(target=interrupt)
        thread.start()
        app = HttpApp(engine, engine.prompts, HttpSettings("m"))
        unfinished = asyncio.run(http_server.serve_http(app, listener, engine, signals))
        thread.join()
    assert unfinished == 1 and len(signals.received) == 2 and not engine.running
    assert time.monotonic() - times[1] < 30


def test_client_that_does_not_read_delays_the_end_only_until_the_limit_for_reading(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    """Its answer is complete, but larger than the buffers of its connection."""
    monkeypatch.setattr(http_server, "READ_SECONDS", 0.1)
    listener = open_socket("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    answer = {"prompt": "x", "max_tokens": 150, "ignore_eos": True, "logprobs": 20, "stream": True}
    app = HttpApp(engine, engine.prompts, HttpSettings("m", stream_bytes=1 << 30))
    ended = threading.Event()

    def stop() -> None:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(listener.getsockname())
            connection.sendall(post(json.dumps(answer).encode()))
            wait_until(lambda: bool(engine.requests) and not engine.running)
            os.kill(os.getpid(), signal.SIGTERM)
            if not ended.wait(30):
                os.kill(os.getpid(), signal.SIGTERM)

    with StopSignals() as signals:
        thread = threading.Thread(target=stop)
        thread.start()
        assert asyncio.run(http_server.serve_http(app, listener, engine, signals, drain_seconds=3600)) == 1
        ended.set()
        thread.join()
    assert len(signals.received) == 1


def test_client_that_does_not_send_its_body_delays_the_end_only_until_the_limit_for_reading(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    """Its connection is closed, without another wait that ends in an internal error."""
    monkeypatch.setattr(http_server, "READ_SECONDS", 0.1)
    listener = open_socket("127.0.0.1", 0)
    app, received = HttpApp(engine, engine.prompts, HttpSettings("m")), list[bytes]()

    def stop() -> None:
        with socket.create_connection(listener.getsockname()) as connection:
            connection.sendall(post(b"{", size=100) + b" ")
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)
            received.append(read_all(connection))

    with StopSignals() as signals:
        thread = threading.Thread(target=stop)
        thread.start()
        assert asyncio.run(http_server.serve_http(app, listener, engine, signals, drain_seconds=3600)) == 1
        thread.join()
    assert received == [b""]


def test_full_queue_refuses_large_body_unread_and_keeps_connection(
    address: tuple[str, int], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gate, "LINE_BYTES", 10)
    engine.refusal = Refusal("requests", 2.5)
    with socket.create_connection(address) as connection:
        connection.sendall(post(b'{"pro', 16))
        assert read_status(connection) == 429
        engine.refusal = None
        connection.sendall(b'mpt": "x"} ')
        time.sleep(0.8)  # beyond the time for the rest of the body
        connection.sendall(post(b'{"prompt": "x"}'))
        assert read_status(connection) == 200
        engine.refusal = Refusal("requests", 2.5)
        connection.sendall(post(b'{"pro', 16))
        assert read_status(connection) == 429
        assert read_all(connection) == b""  # the rest does not come


@pytest.mark.parametrize("broken", [True, False])
def test_response_arrives_while_client_still_sends(address: tuple[str, int], engine: FakeEngine, broken: bool):
    """The connection is closed after the answer, but not reset: a reset would discard what the client has not read."""
    engine.refusal, large = Refusal("requests", 2.5), b"x" * (8 << 20)
    with socket.create_connection(address) as connection:
        connection.settimeout(60)
        connection.sendall(large if broken else post(large, None, "Connection: close"))
        assert read_all(connection).startswith(b"HTTP/1.1 400" if broken else b"HTTP/1.1 429")


def test_sigterm_finishes_requests_in_flight_and_refuses_new_ones(tmp_path: Path, repository: Path):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=repository
    )
    assert process.stdout is not None
    url = f"http://127.0.0.1:{process.stdout.readline().strip()}/v1/completions"
    body = {"prompt": "x", "max_tokens": 30, "ignore_eos": True, "stream": True}
    refused: list[httpx.Response] = []
    lines: list[str] = []
    with httpx.stream("POST", url, json=body, timeout=20) as stream:
        for line in stream.iter_lines():
            lines.append(line)
            if len(lines) == 1:
                process.send_signal(signal.SIGTERM)
            if len(lines) == 20:
                thread = threading.Thread(target=lambda: refused.append(httpx.post(url, json=body)))
                thread.start()
    thread.join()
    streamed = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert streamed[-1]["choices"][0]["finish_reason"] == "length" and "data: [DONE]" in lines
    assert refused[0].status_code == 503 and refused[0].json()["error"]["code"] == "draining"
    assert process.stdout.read().split() == [str(int(signal.SIGTERM)), "0", "0"]
    process.stdout.close()
    assert process.wait(10) == 0
