"""Servers for the tests of stores: S3 (moto) and plain HTTP; both can inject failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


@dataclass
class Server:
    """A running server. `failing(path, number)` returns the failure to inject into read `number` (from 1) of a path:
    None (it does not), "half" (half of the body, then the connection is closed), or a status such as "503"."""

    url: str = ""
    failing: Callable[[str, int], str | None] = lambda path, number: None
    refusing: str | None = None  # status of every response
    reads: dict[str, int] = field(default_factory=dict)
    ranges: list[str] = field(default_factory=list)

    def put(self, path: str, data: bytes) -> None:
        """Write an object, as its owner."""
        bucket, _, key = path.partition("/")
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].put_object(bucket, key, data)

    def delete(self, path: str) -> None:
        bucket, _, key = path.partition("/")
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].delete_object(bucket, key)

    def answer(self, application: Any, environment: dict[str, Any], start: Any) -> Iterable[bytes]:
        path = environment["PATH_INFO"].strip("/")
        if self.refusing:
            return _refused(self.refusing, start)
        if environment["REQUEST_METHOD"] != "GET" or "list-type" in environment["QUERY_STRING"]:
            return application(environment, start)
        self.reads[path] = self.reads.get(path, 0) + 1
        self.ranges.append(environment.get("HTTP_RANGE", "all"))
        how = self.failing(path, self.reads[path])
        if how == "half":
            body = b"".join(application(environment, start))
            return _cut(body)
        if how:
            return _refused(how, start)
        return application(environment, start)


def _refused(status: str, start: Any) -> Iterable[bytes]:
    start(f"{status} Refused", [("Content-Type", "text/plain")])
    return [b"<Error><Code>Refused</Code><Message>not now</Message></Error>"]


def _cut(body: bytes) -> Iterator[bytes]:
    yield body[: len(body) // 2]
    raise ConnectionAbortedError  # the connection closes before Content-Length bytes were sent


class _Silent(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        pass

    def run_wsgi(self) -> None:
        try:
            super().run_wsgi()
        except ConnectionError:
            self.close_connection = True


@contextmanager
def running(application: Any) -> Iterator[Server]:
    """Serve the WSGI application with fault injection on a free local port."""
    server = Server()
    listening = make_server(
        "127.0.0.1", 0, lambda *request: server.answer(application, *request), threaded=True, request_handler=_Silent
    )
    server.url = f"http://127.0.0.1:{listening.server_port}"
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


def s3_application() -> Any:
    return DomainDispatcherApplication(create_backend_app)


def plain_files(files: dict[str, bytes], ranges: bool) -> Any:
    """A WSGI application that serves `files`, with or without HTTP ranges."""

    def application(environment: dict[str, Any], start: Any) -> list[bytes]:
        path = environment["PATH_INFO"].strip("/")
        if path not in files:
            start("404 Not Found", [("Content-Length", "0")])
            return [b""]
        data, headers = files[path], [("ETag", f'"{hash(files[path])}"')]
        asked, status = environment.get("HTTP_RANGE"), "200 OK"
        if ranges and asked:
            begin, _, end = asked.removeprefix("bytes=").partition("-")
            stop = min(len(data), int(end) + 1)
            headers.append(("Content-Range", f"bytes {begin}-{stop - 1}/{len(data)}"))
            data, status = data[int(begin) : stop], "206 Partial Content"
        start(status, [*headers, ("Content-Length", str(len(data)))])
        return [b""] if environment["REQUEST_METHOD"] == "HEAD" else [data]

    return application
