"""The server's socket, its limits on connections, and its end by SIGTERM."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from meshwright.errors import UserError
from meshwright.serving import http_server
from meshwright.serving.gate import HttpSettings
from meshwright.serving.http import create_app
from meshwright.serving.http_server import open_socket
from tests.serving.fake_engine import FakeEngine, ServedApp, make_prompts

PROGRAM = """
import asyncio, sys
from pathlib import Path
from meshwright.serving.gate import HttpSettings
from meshwright.serving.http import create_app
from meshwright.serving.http_server import open_socket, serve_http
from tests.serving.fake_engine import FakeEngine, make_prompts

prompts = make_prompts(Path(sys.argv[1]))
engine = FakeEngine(prompts)
engine.step_seconds = 0.02
listener = open_socket("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
print(asyncio.run(serve_http(create_app(engine, prompts, HttpSettings("m")), listener, engine)), len(engine.running))
"""


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    monkeypatch.setattr(http_server, "HEADER_SECONDS", 0.2)
    monkeypatch.setattr(http_server, "HEADER_BYTES", 2000)
    prompts = make_prompts(tmp_path)
    with ServedApp(create_app(FakeEngine(prompts), prompts, HttpSettings("m"))) as served:
        yield ("127.0.0.1", int(served.url.rpartition(":")[2]))


def read_all(connection: socket.socket) -> bytes:
    """Everything until the connection ends, however it ends."""
    received = b""
    connection.settimeout(5)
    try:
        while part := connection.recv(1 << 16):
            received += part
    except ConnectionResetError:
        pass
    return received


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


def test_headers_beyond_their_limit_end_the_connection(address: tuple[str, int]):
    with socket.create_connection(address) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n" + b"".join(b"x-%d: %s\r\n" % (n, b"y" * 90) for n in range(99)))
        assert read_all(connection) == b""


def test_idle_connection_survives_header_timeout(address: tuple[str, int]):
    """The time for headers does not count between requests, where the longer keep-alive time holds."""
    with httpx.Client(base_url=f"http://{address[0]}:{address[1]}") as client:
        first = client.get("/health").extensions["network_stream"]
        time.sleep(0.4)
        assert client.get("/health").extensions["network_stream"] is first


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
    told = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert told[-1]["choices"][0]["finish_reason"] == "length" and "data: [DONE]" in lines
    assert refused[0].status_code == 503 and refused[0].json()["error"]["code"] == "draining"
    assert process.stdout.read().split() == [str(int(signal.SIGTERM)), "0"]
    process.stdout.close()
    assert process.wait(10) == 0
