"""An engine for tests of the HTTP server: generates a given text, token by token, and records its requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from meshwright.data.records.template_sources import _load_own_source
from meshwright.data.tokenizers.tokenizer import load_tokenizer, write_tokenizer
from meshwright.errors import MeshwrightError
from meshwright.serving.http import HttpApp
from meshwright.serving.http_server import make_server, open_socket
from meshwright.serving.prompts import Prompts
from meshwright.serving.replica import OutputCallback
from meshwright.serving.replicas import State
from meshwright.serving.request import FinishReason, Output, Request
from meshwright.serving.sampling import TokenResult
from meshwright.serving.waiting_line import Refusal, Ticket

SAMPLE = "The quick brown fox jumps over the lazy dog. naïve façade, 日本語, emoji 👩🏽‍🚀 and plain words.\n"
MAX_LENGTH = 512


def make_prompts(directory: Path, max_length: int = MAX_LENGTH) -> Prompts:
    """Prompts of a byte-level BPE tokenizer with the template "instruction"."""
    write_tokenizer(directory, "bpe", 300, None, iter([SAMPLE * 20]), _load_own_source("instruction"))
    tokenizer = load_tokenizer(directory)
    return Prompts(
        tokenizer.tokenizer,
        start=tokenizer.start,
        ends=[tokenizer.end],
        vocabulary=tokenizer.vocabulary,
        max_length=max_length,
        directory=directory,
    )


def logprob(token: int) -> float:
    """The log-probability that the engine reports for a token."""
    return -1.0 - token / 1000


class FakeEngine:
    """Stands in for `Replicas`. Every choice generates `text` and its end token, repeatedly if that does not end it.

    Attributes:
        step_seconds: Time of a token; None: none ever comes.
        refusal: Answer of `admit`.
        max_requests: Requests that run and wait, at most.
        running: Requests that were submitted and have neither ended nor been cancelled.
        tickets: Those that were refused, with a key.
        requests: All requests ever submitted, in order.
        error: Raised after the first token.
        prefill_seconds: Time from the admission of each request to its first token, as its outputs report it.
    """

    def __init__(self, prompts: Prompts, text: str = "The quick brown fox") -> None:
        self.state: State = "ready"
        self.properties: Mapping[str, Any] = {"layout": "dp1", "instruction_set": "none"}
        self.step_seconds: float | None = 0.0
        self.refusal: Refusal | None = None
        self.max_requests = 576
        self.running: set[str] = set()
        self.requests: list[Request] = []
        self.tickets: list[Ticket] = []
        self.error: Exception | None = None
        self.prefill_seconds = 0.0
        self.prompts = prompts
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.say(text)

    @property
    def idle(self) -> bool:
        return not self.running

    def say(self, text: str) -> None:
        """Set the text of the answers."""
        self.tokens = [*self.prompts.encode(text, add_start=False), *sorted(self.prompts.ends)]

    def admit(self, requests: Sequence[Request], ticket: Ticket) -> Refusal | None:
        if self.refusal is not None and ticket.key:
            self.tickets.append(ticket)
        return Refusal(self.state, 1.0) if self.state in ("starting", "draining", "failed") else self.refusal

    def submit(self, request: Request, on_output: OutputCallback) -> None:
        self.running.add(request.id)
        self.requests.append(request)
        outputs = self._generate(request)
        if request.deadline is not None:
            outputs = self._generate_until(request, request.deadline)
        self._tasks[request.id] = asyncio.create_task(self._deliver(outputs, on_output))

    async def _deliver(self, outputs: AsyncIterator[Output], on_output: OutputCallback) -> None:
        """Pass the outputs of a request on to its callback."""
        try:
            async for output in outputs:
                on_output(output)
        except Exception as error:
            on_output(error)

    async def _generate_until(self, request: Request, deadline: float) -> AsyncIterator[Output]:
        """The outputs of a request that ends at its deadline."""
        outputs = self._generate(request)
        try:
            while True:
                async with asyncio.timeout(max(0.0, deadline - time.time())):
                    output = await anext(outputs)
                yield output
        except TimeoutError:
            self.running.discard(request.id)
            yield Output(request.id, [], "timeout")
        except StopAsyncIteration:
            pass

    def cancel(self, request_id: str) -> None:
        self.running.discard(request_id)
        if (task := self._tasks.pop(request_id, None)) is not None and task is not asyncio.current_task():
            task.cancel()

    async def wait_for_failure(self) -> MeshwrightError:
        await asyncio.Event().wait()
        raise AssertionError

    def drain(self) -> None:
        self.state = "draining"

    def stats(self) -> Sequence[Mapping[str, float]]:
        held = len(self.running)
        return [{"running": held, "free": 90 - held, "held": held, "cached": 10, "steps": 7, "step_seconds": 0.5}]

    async def _generate(self, request: Request) -> AsyncIterator[Output]:
        sampling = request.sampling
        prompt = None
        if sampling.prompt_logprobs is not None:
            results = [self._result(token, sampling.prompt_logprobs) for token in request.tokens]
            prompt = [None, *results[1:]]
        for number in range(max(sampling.max_tokens, 1)):
            if self.step_seconds is None:
                await asyncio.Event().wait()
            await asyncio.sleep(self.step_seconds or 0)
            if self.error is not None and number == 1:
                raise self.error
            if request.id not in self.running:
                yield Output(request.id, [], "cancelled")
                return
            reason: FinishReason | None = None
            results = []
            if sampling.max_tokens > 0:
                token = self.tokens[number % len(self.tokens)]
                results = [self._result(token, sampling.logprobs)]
                reason = "stop" if token in sampling.stop_tokens else None
            if reason is None and number + 1 >= sampling.max_tokens:
                reason = "length"
            if reason is not None:
                self.running.discard(request.id)
            yield Output(request.id, results, reason, 0, prompt, 0.0 if number else self.prefill_seconds)
            prompt = None
            if reason is not None:
                return

    def _result(self, token: int, alternatives: int | None) -> TokenResult:
        if alternatives is None:
            return TokenResult(token)
        top = tuple((number, logprob(token) - 0.5 * place) for place, number in enumerate(range(alternatives)))
        return TokenResult(token, logprob(token), top)


class ServedApp:
    """A real HTTP server of an application in a thread, on a free port; `url` is its address."""

    def __init__(self, app: HttpApp) -> None:
        listener = open_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = make_server(app)
        self._thread = threading.Thread(target=lambda: uvloop.run(self._server.serve([listener])))

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.url.rpartition(":")[2])

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._server.server_state.connections)

    def __enter__(self) -> ServedApp:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> float:
    """Wait until `holds` is true; return how long it took. Fails after `seconds`."""
    begun = time.monotonic()
    while not holds():
        assert time.monotonic() - begun < seconds, "still not so"
        time.sleep(0.005)
    return time.monotonic() - begun
