"""An OpenAI-compatible server in this process that can fail in the usual ways."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = "str | dict[str, Any] | tuple[int, dict[str, str], bytes]"


def completion(text: str, finish_reason: str = "stop", usage: bool = True) -> dict[str, Any]:
    """The body of an answer, as the API documents it."""
    body: dict[str, Any] = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": finish_reason,
                "logprobs": None,
            }
        ],
    }
    if usage:
        body["usage"] = {"prompt_tokens": 10, "completion_tokens": len(text.split()), "total_tokens": 10}
    return body


class Served:
    """Requests in order of arrival, with their paths."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.answered: list[str] = []  # bodies whose answer was sent whole
        self.paths: list[str] = []
        self.at_once = self.most_at_once = 0


@contextmanager
def served(reply: Callable[[dict[str, Any], int], Any]) -> Iterator[Served]:
    """Serves `reply(body, number of the request)`: a text, a whole body, or (status, headers, bytes)."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            body = json.loads(raw)
            with lock:
                number = len(state.requests)
                state.requests.append(body)
                state.headers.append(dict(self.headers))
                state.paths.append(self.path)
                state.at_once += 1
                state.most_at_once = max(state.most_at_once, state.at_once)
            said = reply(body, number)
            with lock:
                state.at_once -= 1
            status, headers, data = said if isinstance(said, tuple) else (200, {}, said)
            if isinstance(data, str):
                data = completion(data)
            if isinstance(data, dict):
                data = json.dumps(data).encode()
            try:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
                self.wfile.flush()
                if int(headers.get("Content-Length", len(data))) > len(data):
                    self.close_connection = True
                elif status == 200:
                    with lock:
                        state.answered.append(raw.decode())
            except OSError:  # the client has disconnected
                self.close_connection = True

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state = Served(f"http://127.0.0.1:{server.server_address[1]}/v1")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
