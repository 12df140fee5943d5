"""Many requests to a served model at once, each asked only once: a journal on disk keeps every answer."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from meshwright.data.files import canonical_json
from meshwright.errors import UserError
from meshwright.synthesis.endpoint import ChatRequest, Completion, Endpoint, RequestRefused
from meshwright.untrusted import parse_json

_SAY_EVERY = 5.0  # seconds
_HOPELESS = 10  # requests refused before one is answered: the server will refuse them all


class Journal:
    """The answers of a run, a line each, on disk as soon as they are there. A request is known by its whole content.

    A last line that a kill cut short is removed; anything else that is not a line of a journal is a `UserError`, for it
    is somebody's file.
    """

    def __init__(self, path: Path) -> None:
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
            raise UserError(f"{path}: another process is writing this journal; wait for it, or name another") from None
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    def _load(self) -> None:
        self._file.seek(0)
        whole = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                if not b'{"request": "'.startswith(line[:13]):
                    raise UserError(f"{self.path}:{number}: not a journal of requests; name another file")
                break
            try:
                said = parse_json(line)
                answer = said["answer"]
                self._answers[said["request"]] = None if answer is None else Completion(*answer)
            except (ValueError, LookupError, TypeError):
                raise UserError(f"{self.path}:{number}: not a journal of requests; name another file") from None
            whole += len(line)
        self._file.truncate(whole)

    @property
    def answered(self) -> bool:
        """Whether any request was answered, and not refused."""
        return any(answer is not None for answer in self._answers.values())

    def __contains__(self, name: str) -> bool:
        return name in self._answers

    def __getitem__(self, name: str) -> Completion | None:
        """The answer to a request; None where the server refused it."""
        return self._answers[name]

    def put(self, name: str, answer: Completion | None) -> None:
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
        self._file.close()


class Asker:
    """Asks a served model, `concurrency` requests at a time.

    As a context it holds its journal. `usage` says what was asked and what it took.
    """

    def __init__(
        self, endpoint: Endpoint, journal: Path, concurrency: int = 8, log: Callable[[str], None] = lambda line: None
    ) -> None:
        self.endpoint = endpoint
        self.journal = Journal(journal)
        self.concurrency = concurrency
        self._log = log
        self._said = time.monotonic()
        self._used: set[str] = set()
        self._refusals: dict[str, RequestRefused] = {}
        self._sent = self._retries = self._refused = self._uncounted = 0
        self._prompt_tokens = self._completion_tokens = 0
        self._count = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.journal.close()

    def ask(self, requests: Sequence[ChatRequest], doing: str = "asking") -> list[Completion | None]:
        """The answers, in order; None where the server refused the request.

        Raises what the endpoint raises where nothing more is to be had: its `NoAnswer`, and its `RequestRefused` where
        all requests, or the first ten, are refused. What came until then is in the journal.
        """
        names = [self._name(request) for request in requests]
        open_ones = {name: request for name, request in zip(names, requests, strict=True) if name not in self.journal}
        if open_ones:
            self._run(list(open_ones.items()), doing)
        for name in names:
            if name not in self._used:
                self._used.add(name)
                self._account(self.journal[name])
        return [self.journal[name] for name in names]

    def usage(self, price_in: float | None = None, price_out: float | None = None) -> dict[str, Any]:
        """`requests` that the run needed, of these `sent` now and the rest from the journal, `retries`, `refused`;
        tokens, and how many answers came `uncounted`; with prices (of a million tokens) the `cost` of all."""
        said: dict[str, Any] = {
            "requests": len(self._used),
            "sent": self._sent,
            "retries": self._retries,
            "refused": self._refused,
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "uncounted": self._uncounted,
        }
        if price_in is not None or price_out is not None:
            said["cost"] = (
                self._prompt_tokens * (price_in or 0.0) + self._completion_tokens * (price_out or 0.0)
            ) / 1e6
        return said

    def _name(self, request: ChatRequest) -> str:
        return hashlib.sha256(canonical_json(request.body(self.endpoint.model))).hexdigest()

    def _account(self, answer: Completion | None) -> None:
        if answer is None:
            self._refused += 1
            return
        self._uncounted += answer.prompt_tokens is None or answer.completion_tokens is None
        self._prompt_tokens += answer.prompt_tokens or 0
        self._completion_tokens += answer.completion_tokens or 0

    def _run(self, requests: list[tuple[str, ChatRequest]], doing: str) -> None:
        """Daemon threads work the requests off: an interrupt of this one leaves at once, with the journal whole."""
        waiting: queue.SimpleQueue[tuple[str, ChatRequest]] = queue.SimpleQueue()
        for one in requests:
            waiting.put(one)
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                try:
                    name, request = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    self._one(name, request, stop)
                    done.put(None)
                except BaseException as error:  # which the thread that waits below raises
                    done.put(error)
                    return

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self.concurrency, len(requests)))]
        for thread in threads:
            thread.start()
        try:
            for finished in range(1, len(requests) + 1):
                error = done.get()
                if error is not None:
                    raise error
                if time.monotonic() - self._said > _SAY_EVERY:
                    self._said = time.monotonic()
                    self._log(f"{doing}: {finished:,} of {len(requests):,} answers")
        finally:
            stop.set()
        for thread in threads:
            thread.join()
        if self._refusals and not self.journal.answered:
            raise next(iter(self._refusals.values()))
        for name in self._refusals:
            self.journal.put(name, None)
        self._refusals.clear()

    def _one(self, name: str, request: ChatRequest, stop: threading.Event) -> None:
        def retried(reason: str) -> None:
            with self._count:
                self._retries += 1
                first = self._retries == 1
            if first:
                self._log(f"the server is asked again: {reason}")

        def wait(seconds: float) -> None:
            stop.wait(seconds)

        with self._count:
            self._sent += 1
        try:
            answer = self.endpoint.complete(request, wait, retried)
        except RequestRefused as error:
            with self._count:
                self._refusals[name] = error
                if len(self._refusals) >= _HOPELESS and not self.journal.answered:
                    raise
            return
        self.journal.put(name, answer)
