"""Concurrent requests to a served model, with a journal of answers on disk so that no request is sent twice."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from meshwright.data.files import to_canonical_json
from meshwright.errors import UserError
from meshwright.synthesis.endpoint import ChatRequest, Completion, Endpoint, NoAnswer, RequestRefused
from meshwright.untrusted import parse_json

_LOG_SECONDS = 5.0  # seconds
_MAX_REFUSALS = 10  # refusals without a single answer after which the run ends


class Journal:
    """Append-only file of the model's answers, so that a restarted run sends no request twice. Each answer is one JSON
    line, with the SHA-256 of the request as key, and is flushed to disk immediately.

    A truncated last line is removed. Raises `UserError` for a file that is not a journal or is in use.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the journal file `path`, lock it and read its answers."""
        self.path = path
        self._answers: dict[str, Completion | None] = {}
        self._lock = threading.Lock()
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UserError(
                f"{path}: another process is writing this journal; wait for it, or use another file"
            ) from None
        try:
            self._load_answers()
        except BaseException:
            self.close()
            raise

    def _load_answers(self) -> None:
        """Read the answers in the file and remove a truncated last line. Raises `UserError` if it is not a journal."""
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                if not b'{"request": "'.startswith(line[:13]):
                    raise UserError(f"{self.path}:{number}: not a journal of requests; use another file")
                break
            try:
                record = parse_json(line)
                answer = record["answer"]
                self._answers[record["request"]] = None if answer is None else Completion(*answer)
            except (ValueError, LookupError, TypeError):
                raise UserError(f"{self.path}:{number}: not a journal of requests; use another file") from None
            whole += len(line)
        self._file.truncate(whole)

    @property
    def answered(self) -> bool:
        """True if the file has an answer to at least one request that the server did not refuse."""
        return any(answer is not None for answer in self._answers.values())

    def __contains__(self, name: str) -> bool:
        """Return True if the journal has an answer or refusal for the request with the key `name`."""
        return name in self._answers

    def __getitem__(self, name: str) -> Completion | None:
        """Return the answer to the request with the key `name`, None if the server refused it. Raises `KeyError` if it
        is not in the journal.
        """
        return self._answers[name]

    def put(self, name: str, answer: Completion | None) -> None:
        """Append an answer and flush it to disk. name: key of its request. answer: the model's answer; None if the
        server refused the request. Raises `UserError` if the file cannot be written.
        """
        line = json.dumps({"request": name, "answer": answer}).encode() + b"\n"
        with self._lock:
            try:
                self._file.write(line)
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                raise UserError(f"cannot write {self.path}: {error.strerror or error}") from None
            self._answers[name] = answer

    def close(self) -> None:
        """Wait for an answer that another thread is writing, release the lock and close the file."""
        with self._lock, suppress(OSError):  # of an answer that cannot be written, for which `put` has raised
            if not self._file.closed:  # the kernel keeps the lock of a closed file until an fsync in progress has ended
                try:
                    self._file.flush()
                finally:
                    fcntl.flock(self._file, fcntl.LOCK_UN)  # else processes that inherited the file would keep it
                    self._file.close()


class ChatClient:
    """Client of a served model that sends up to `concurrency` requests at a time. It stores the answers in a journal
    file, from which a restarted run reads them. As a context manager it closes that file at the end."""

    def __init__(
        self, endpoint: Endpoint, journal: Path, concurrency: int = 8, log: Callable[[str], None] = lambda line: None
    ) -> None:
        """Open the journal; no request is sent yet. endpoint: the served model. journal: path of the journal file.
        concurrency: maximum number of requests at a time. log: receives progress lines.
        """
        self.endpoint = endpoint
        self.journal = Journal(journal)
        self.concurrency = concurrency
        self._log = log
        self._last_log = time.monotonic()
        self._used: set[str] = set()
        self._refusals: dict[str, RequestRefused] = {}
        self._sent = self._retries = self._refused = self._uncounted = 0
        self._prompt_tokens = self._completion_tokens = 0
        self._count = threading.Lock()

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the journal."""
        self.journal.close()

    def ask(self, requests: Sequence[ChatRequest], doing: str = "asking") -> list[Completion | None]:
        """Send requests to the model, several at a time; return the answers in the order of the requests, None for a
        refused request. A request whose answer is already in the journal file is not sent again.

        doing: verb that begins the progress line, such as "labelling". Raises `NoAnswer` if the server stops answering,
        and `RequestRefused` if it refuses all or the first ten requests; answers received until then are in the
        journal.
        """
        names = [self._compute_request_key(request) for request in requests]
        pending = {name: request for name, request in zip(names, requests, strict=True) if name not in self.journal}
        if pending:
            self._send_all(list(pending.items()), doing)
        for name in names:
            if name not in self._used:
                self._used.add(name)
                self._count_usage(self.journal[name])
        return [self.journal[name] for name in names]

    def summarize_usage(self, price_in: float | None = None, price_out: float | None = None) -> dict[str, Any]:
        """Return counts of the run as JSON. `requests`: distinct requests. `sent`: requests that were not in the
        journal. `retries`, `refused`: numbers of retries and of refused requests. `prompt_tokens`, `completion_tokens`:
        sums. `uncounted`: answers without token counts. `cost`: only if a price is given. Tokens and cost include
        answers read from the journal.

        price_in, price_out: price of a million prompt tokens and of a million completion tokens, in any currency.
        """
        summary: dict[str, Any] = {
            "requests": len(self._used),
            "sent": self._sent,
            "retries": self._retries,
            "refused": self._refused,
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "uncounted": self._uncounted,
        }
        if price_in is not None or price_out is not None:
            summary["cost"] = (
                self._prompt_tokens * (price_in or 0.0) + self._completion_tokens * (price_out or 0.0)
            ) / 1e6
        return summary

    def _compute_request_key(self, request: ChatRequest) -> str:
        """Return the key of a request in the journal: the hex SHA-256 of its JSON."""
        return hashlib.sha256(to_canonical_json(request.to_json(self.endpoint.model))).hexdigest()

    def _count_usage(self, answer: Completion | None) -> None:
        """Add one answer (None: the server refused the request) to the counts that `summarize_usage` returns."""
        if answer is None:
            self._refused += 1
            return
        self._uncounted += answer.prompt_tokens is None or answer.completion_tokens is None
        self._prompt_tokens += answer.prompt_tokens or 0
        self._completion_tokens += answer.completion_tokens or 0

    def _send_all(self, requests: list[tuple[str, ChatRequest]], doing: str) -> None:
        """Send requests from `concurrency` daemon threads and wait for all answers. An interrupt of the main thread
        ends the process immediately with the journal intact. requests: (key in the journal, request). doing: verb that
        begins the progress line, such as "labelling"."""
        waiting: queue.SimpleQueue[tuple[str, ChatRequest]] = queue.SimpleQueue()
        for one in requests:
            waiting.put(one)
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        stop = threading.Event()

        def send_waiting() -> None:
            """Thread body: send requests from the queue until it is empty or `stop` is set; puts None, or an error,
            into `done` for each.
            """
            while not stop.is_set():
                try:
                    name, request = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    self._send_one(name, request, stop)
                    done.put(None)
                except BaseException as error:  # raised again by the thread that waits below
                    done.put(error)
                    return

        threads = [
            threading.Thread(target=send_waiting, daemon=True) for _ in range(min(self.concurrency, len(requests)))
        ]
        error: BaseException | None = None
        for thread in threads:
            thread.start()
        try:
            for finished in range(1, len(requests) + 1):
                error = done.get()
                if error is not None:
                    break
                if time.monotonic() - self._last_log > _LOG_SECONDS:
                    self._last_log = time.monotonic()
                    self._log(f"{doing}: {finished:,} of {len(requests):,} answers")
        finally:
            stop.set()
        for thread in threads:
            thread.join()  # the journal gets the answers to requests in progress
        if error is not None:
            raise error
        if self._refusals and not self.journal.answered:
            raise next(iter(self._refusals.values()))
        for name in self._refusals:
            self.journal.put(name, None)
        self._refusals.clear()

    def _send_one(self, name: str, request: ChatRequest, stop: threading.Event) -> None:
        """Send one request and store its answer or refusal in the journal. name: key of the request in the journal.
        stop: event that ends the retries."""

        def count_retry(reason: str) -> None:
            """Count a retry, and log the reason of the first one."""
            with self._count:
                self._retries += 1
                first = self._retries == 1
            if first:
                self._log(f"retrying: {reason}")

        def wait(seconds: float) -> None:
            """Pause between retries for `seconds`. Raises `NoAnswer` if `stop` is set."""
            if stop.wait(seconds):
                raise NoAnswer("another request has failed")

        with self._count:
            self._sent += 1
        try:
            answer = self.endpoint.complete(request, wait, count_retry)
        except RequestRefused as error:
            with self._count:
                self._refusals[name] = error
                if len(self._refusals) >= _MAX_REFUSALS and not self.journal.answered:
                    raise
            return
        self.journal.put(name, answer)
