"""Interface between the HTTP server and whatever runs its requests. Free of torch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from meshwright.errors import MeshwrightError
from meshwright.serving.request import Output, Request

State = Literal["starting", "ready", "recovering", "draining", "failed"]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Refusal of requests before they are queued.

    Attributes:
        reason: Limit that is reached, a label of the metrics: `"requests"`, `"tokens"`, `"seconds"` (of the queue),
            `"connections"`; or `"starting"`, `"recovering"`, `"draining"`, `"failed"`: the server takes no request now.
        retry_after_seconds: Predicted time until a request of this size is admitted.
    """

    reason: str
    retry_after_seconds: float


class EngineClient(Protocol):
    """Engine as the HTTP server sees it; all methods are called on the event loop's thread."""

    @property
    def state(self) -> State:
        """State of the engine: it computes in `"ready"` and `"draining"`."""

    @property
    def properties(self) -> Mapping[str, Any]:
        """JSON object of facts about the engine (layout, dtype, instruction set, KV blocks ...), shown in `/props`."""

    def admit(self, requests: Sequence[Request]) -> Refusal | None:
        """Return None if the queue takes all of `requests`, which are then submitted at once, without an await in
        between; a refusal if it does not take one of them. Of no requests: the refusal of any, however short."""

    def submit(self, request: Request) -> AsyncIterator[Output]:
        """Queue a request (at the call, not at the first item); the iterator ends after an output with a finish reason.

        Outputs wait until they are read. It raises `meshwright.errors.RankLost` if the request cannot be finished.
        """

    def cancel(self, request_id: str) -> None:
        """End a request by the next step and free its blocks; unknown and finished requests are ignored."""

    async def wait_for_failure(self) -> MeshwrightError:
        """Wait until the engine has failed for good; return the reason."""

    def drain(self) -> None:
        """Admit no further requests; those admitted are finished."""

    def stats(self) -> Sequence[Mapping[str, float]]:
        """Return one mapping per replica; what is missing in it counts as 0.

        Keys: `running`, `waiting`, `paused` sequences; `free`, `cached`, `held` KV blocks; totals since the start:
        `steps`, `step_seconds` (measured, from one schedule to the next), `kernel_seconds` (of it, inside kernels),
        `predicted_seconds` (of the same steps), `pauses`, `prefix_queries` and
        `prefix_hits` (prompt tokens looked up and found in the prefix cache), `restarts` (after a lost rank).
        """
