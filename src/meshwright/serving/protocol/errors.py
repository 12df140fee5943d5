"""Errors of the HTTP API, in the shape that OpenAI's clients know. Free of torch."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Mapping

from pydantic_core import to_json
from starlette.responses import Response

from meshwright.errors import RankLost, UserError
from meshwright.serving.waiting_line import Refusal

_log = logging.getLogger("meshwright.serving")
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_UNAVAILABLE = {
    "starting": "the server is starting",
    "recovering": "the server is restarting a rank that was lost",
    "draining": "the server is shutting down",
    "failed": "the server cannot restart a rank that was lost",
}

FAILED_ENDS = {
    "error": (500, "the model computes NaN or infinite logits", "invalid_logits"),
    "timeout": (408, "not finished within its timeout", "timeout"),
    "cancelled": (503, "the engine cancelled this request", "rank_lost"),
}
"""(status, message, code) of the error response to a request that ended with one of these finish reasons."""


class ApiError(Exception):
    """Error response of the HTTP API. status: HTTP status. message: text for the user. param: name of the wrong field,
    or None. code: short name of the error for programs, such as "invalid_json". headers: HTTP headers to add to the
    response."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Create the error; arguments: see the class."""
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def to_json(self) -> bytes:
        """Return the JSON body of the error response, in OpenAI's form."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return to_json({"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}})

    def to_response(self) -> Response:
        """Return the HTTP response with the error's status, headers and JSON body."""
        return Response(self.to_json(), self.status, self.headers, "application/json")


def make_retry_headers(seconds: float) -> dict[str, str]:
    """Return the HTTP headers `retry-after` (whole seconds) and `retry-after-ms`, which tell a client to retry after
    `seconds`."""
    return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}


def make_refusal_error(refusal: Refusal, longest: float = math.inf) -> ApiError:
    """Convert the engine's refusal of a request to an ApiError: 429 if a limit of the queue is reached; 503 if the
    server is starting, recovering, draining or failed. longest: longest `Retry-After` in seconds that the client
    follows; one that retries early keeps its place in the waiting line."""
    seconds = min(max(refusal.retry_after_seconds, 0.001), 1e6)
    headers = make_retry_headers(wait := min(seconds, longest))
    if refusal.reason in _UNAVAILABLE:
        return ApiError(503, _UNAVAILABLE[refusal.reason], code=refusal.reason, headers=headers)
    what = "too many connections" if refusal.reason == "connections" else "the queue is full"
    message = f"{what}: its limit of {refusal.reason} is reached; retry after {wait:.3g} s"
    message += f", and again until {seconds:.3g} s have passed" if wait < seconds else ""
    return ApiError(429, message, code=f"queue_{refusal.reason}", headers=headers)


def to_api_error(error: Exception) -> ApiError:
    """Convert the exception `error`, of any type, to an ApiError. An unexpected exception becomes a 500 and is logged
    without its message, which may contain a prompt."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    if isinstance(error, RankLost):
        return ApiError(503, "the engine lost this request", code="rank_lost")
    _log.error("unexpected %s:\n%s", type(error).__name__, "".join(traceback.format_tb(error.__traceback__)))
    return ApiError(500, "internal error; the server's log has the traceback", code="internal_error")
