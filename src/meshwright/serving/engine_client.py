"""Interface between the HTTP server and the engine that runs its requests. Free of torch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from meshwright.errors import MeshwrightError
from meshwright.serving.request import Output, Request

State = Literal["starting", "ready", "recovering", "draining", "failed"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal of a request because the engine's queue is full or the engine is not ready, with the time after which to
    retry.

    Attributes:
        reason: Label for the metrics. If a limit is reached: `"requests"` or `"tokens"` (waiting requests, their prompt
            tokens), `"seconds"` (predicted wait) or `"connections"`. If no request is accepted, the state of the
            engine: `"starting"`, `"recovering"`, `"draining"` or `"failed"`.
        retry_after_seconds: Predicted time until a request of this size would be queued."""

    reason: str
    retry_after_seconds: float


@dataclass(frozen=True, slots=True)
class Ticket:
    """Identity of an HTTP request, by which its retry after a refusal (429) is recognised and keeps its place in the
    waiting line (`waiting_line.WaitingLine`).

    Attributes:
        key: Keyed digest of the API key, the path and the body; empty: no place is kept.
        tokens: Estimated number of tokens of the prompts.
        first_attempt: True if the client marks this as its first attempt. An identical request that already waits in
            the line is then assumed to be another client's.
    """

    key: bytes = b""
    tokens: int = 1
    first_attempt: bool = False


class EngineClient(Protocol):
    """Interface of the engine (all replicas) for the HTTP server; its methods are called on the event loop's thread."""

    @property
    def state(self) -> State:
        """State of the engine: "starting", "ready", "recovering" (restarting lost ranks), "draining" or "failed"."""

    @property
    def properties(self) -> Mapping[str, Any]:
        """JSON object that describes the engine (layout, dtype, instruction set, KV blocks ...), shown in `/props`."""

    def admit(self, requests: Sequence[Request], ticket: Ticket) -> Refusal | None:
        """Check whether the queue has room for all of `requests`; return None if so, else the refusal. Nothing is
        queued by this call. The caller must `submit` the requests before its next await, because other requests could
        take the room meanwhile.

        ticket: identity of the HTTP request, by which its retry is recognised. With empty `requests`, the result is the
        refusal that even the shortest request with this ticket would get, or None."""

    def submit(self, request: Request) -> AsyncIterator[Output]:
        """Queue a request at once and return the iterator over its outputs. The iterator ends after the output with a
        finish reason. The reason is `"timeout"` if the request's deadline has passed, so that the HTTP server needs no
        timer.

        Outputs that have not been read are merged into one. The iterator raises `meshwright.errors.RankLost` if the
        request cannot be finished."""

    def cancel(self, request_id: str) -> None:
        """Cancel the request with the ID `request_id`: it ends by the next step and its KV blocks are freed. IDs of
        unknown or finished requests are ignored."""

    async def wait_for_failure(self) -> MeshwrightError:
        """Wait until the engine has failed and will not restart; return the error."""

    def drain(self) -> None:
        """Accept no further requests from now on; those that wait or run are still finished."""

    def stats(self) -> Sequence[Mapping[str, float]]:
        """Return one mapping of figures per replica; a missing key counts as 0.

        Numbers of sequences now: `running`, `waiting`, `paused` (it keeps its KV blocks and waits for more). Numbers of
        KV blocks now: `free`, `cached`, `held`.

        Totals since the start:
        - `steps`; `step_seconds`: their measured time, from one schedule to the next; `kernel_seconds`: the part of it
        in
          the runner's forward passes; `predicted_seconds`: predicted time of the same steps
        - `pauses` of sequences; `restarts` after a lost rank
        - `prefix_queries` and `prefix_hits`: prompt tokens looked up and found in the prefix cache

        The first mapping also has figures of the waiting line, in which refused requests keep a place until their
        clients retry: the number of places now (`outstanding`), and since the start those whose clients were admitted
        (`admitted`) or did not return in time (`expired`)."""
