"""Client of an OpenAI-compatible /v1/chat/completions server, with retries."""

from __future__ import annotations

import email.utils
import json
import os
import random
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, NamedTuple

from meshwright.data.files import to_canonical_json
from meshwright.errors import UserError

_MAX_ANSWER_BYTES = 64 << 20  # bytes
_MAX_WAIT_SECONDS = 300.0  # seconds; a longer pause that a server asks for is cut to it
_RETRY_STATUS = {408, 409, 425, 429}  # and all from 500 on


class Completion(NamedTuple):
    """One answer of the model. text: content of the message. finish_reason: "stop", or "length" if it was cut at
    max_tokens. prompt_tokens, completion_tokens: number of tokens; None if the server does not report it.
    """

    text: str
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One chat completion request without the model name, with OpenAI's fields. messages: dicts of "role" and
    "content". temperature (0: greedy), top_p (1: off) and seed are sampling settings. max_tokens: maximum tokens of the
    answer.
    """

    messages: Sequence[Mapping[str, str]]
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 1024
    seed: int = 0

    def to_json(self, model: str) -> dict[str, Any]:
        """Return the JSON body of the request to the model named `model`."""
        return {
            "model": model,
            "messages": [dict(message) for message in self.messages],
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings for a run of many requests.

    temperature: divisor of the logits; 0: greedy. max_tokens: maximum tokens of an answer. seed: random seed of the
    run, from which each request's seed is derived.
    """

    temperature: float = 1.0
    max_tokens: int = 1024
    seed: int = 0

    def make_request(self, prompt: str, seed: int) -> ChatRequest:
        """Return a chat request with the one user message `prompt` and these settings. seed: sampling seed of this
        request.
        """
        return ChatRequest(make_user_message(prompt), self.temperature, max_tokens=self.max_tokens, seed=seed)


def make_user_message(text: str) -> list[dict[str, str]]:
    """Return the messages of a conversation that has one user message with the given text."""
    return [{"role": "user", "content": text}]


class RequestRefused(UserError):
    """Error: the server permanently refuses a request; a retry would not help."""


class NoAnswer(UserError):
    """Error: the server did not answer a request in any of the attempts."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of a served model, and limits for requests to it.

    url: server's URL with version, "http://127.0.0.1:8000/v1"; "/v1" is appended to a URL without path. model: name of
    the model on the server. key: bearer token, sent to this address alone (redirects are not followed) and never
    printed. timeout: seconds for a complete answer. tries: maximum number of attempts for a request. backoff: pause
    before the second attempt in seconds; each further pause is about twice as long. A Retry-After header of the server
    replaces the pause.
    """

    url: str
    model: str
    key: str | None = field(default=None, repr=False)
    timeout: float = 120.0
    tries: int = 6
    backoff: float = 1.0

    def __post_init__(self) -> None:
        """Raise `UserError` if `url` is no HTTP address or contains a user name or password."""
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f'"{self.url}" is not the address of a server, as in http://127.0.0.1:8000/v1')
        if parts.username or parts.password:
            raise UserError("the address of the server contains a password; pass a key in an environment variable")

    @property
    def address(self) -> str:
        """URL of the chat completions endpoint."""
        url = self.url.rstrip("/")
        if url.endswith("/chat/completions"):
            return url
        return f"{url}/chat/completions" if urllib.parse.urlsplit(url).path else f"{url}/v1/chat/completions"

    def complete(
        self,
        request: ChatRequest,
        wait: Callable[[float], None] = time.sleep,
        retried: Callable[[str], None] = lambda reason: None,
    ) -> Completion:
        """Send a request, with retries, and return the model's answer.

        wait: function that sleeps for a number of seconds, between attempts. retried: called with the reason of each
        retry. Raises `RequestRefused` for a permanent HTTP error (status 400, 401, 404 ...). Raises `NoAnswer` if all
        attempts fail by a temporary HTTP error (408, 409, 425, 429, 5xx), a time-out, a broken connection or an invalid
        answer.
        """
        body = to_canonical_json(request.to_json(self.model))
        reason = ""
        for attempt in range(self.tries):
            try:
                return self._send_once(body)
            except _TryAgainError as error:
                reason = str(error)
                if attempt + 1 < self.tries:
                    retried(reason)
                    pause = self.backoff * 2**attempt * random.uniform(1, 1.25)  # clients must not retry in lockstep
                    wait(min(pause if error.after is None else error.after, _MAX_WAIT_SECONDS))
        raise NoAnswer(f"{self.address} did not answer in {self.tries} tries: {self._mask_and_shorten(reason)}")

    def _send_once(self, body: bytes) -> Completion:
        """Send a request once, without retries, and return the model's answer. body: JSON. Raises `_TryAgainError` for
        errors after which a retry may succeed, else `RequestRefused`."""
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(self.address, body, headers, method="POST")
        until = time.monotonic() + self.timeout
        try:
            with _OPENER.open(request, timeout=self.timeout) as answer:
                return _parse_completion(_read_body(answer, until))
        except urllib.error.HTTPError as error:
            with error:
                message = _read_error_message(error, until)
            if error.code in _RETRY_STATUS or error.code >= 500:
                raise _TryAgainError(f"status {error.code}: {message}", _parse_retry_after(error.headers)) from None
            hint = {401: "; is the key right?", 403: "; is the key right?", 404: "; are address and model right?"}
            raise RequestRefused(
                f"{self.address}: status {error.code}: {self._mask_and_shorten(message)}{hint.get(error.code, '')}"
            ) from None
        except urllib.error.URLError as error:
            raise _TryAgainError(str(getattr(error.reason, "strerror", None) or error.reason)) from None
        except TimeoutError:
            raise _TryAgainError(f"no complete answer in {self.timeout:g} seconds") from None
        except (OSError, HTTPException) as error:
            raise _TryAgainError(str(error) or type(error).__name__) from None

    def _mask_and_shorten(self, text: str) -> str:
        """Return the error text `text` cut to 300 characters and with the API key masked."""
        return (text.replace(self.key, "<key>") if self.key else text)[:300]


def read_key(variable: str | None) -> str | None:
    """Return the server's API key from the environment variable named `variable`; None if `variable` is None. Raises
    `UserError` if the variable is unset or holds no key.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(f"the environment variable {variable} is not set; it should hold the server's key")
    if not re.fullmatch(r"[\x21-\x7e]+", key):
        raise UserError(
            f"the environment variable {variable} does not hold a key: keys are plain characters, no spaces"
        )
    return key


class _TryAgainError(Exception):
    """Error: one attempt failed, and a retry may succeed. reason: text for the log. after: seconds to wait before the
    retry, from the server's Retry-After header; None: not given."""

    def __init__(self, reason: str, after: float | None = None) -> None:
        """Create the error; arguments: see the class."""
        super().__init__(" ".join(reason.split()))
        self.after = after


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """urllib handler that refuses redirects, which would send the API key to another address."""

    def redirect_request(self, *_: Any) -> None:
        """Return None, so that urllib raises an HTTP error for the redirect."""


_OPENER = urllib.request.build_opener(_NoRedirect)


def _read_body(answer: Any, until: float) -> bytes:
    """Read the whole body of the HTTP response `answer` in bounded time and memory. until: deadline in seconds of
    `time.monotonic`. Raises `_TryAgainError` if the body is too large or truncated, `TimeoutError` at the deadline.
    """
    parts: list[bytes] = []
    size = 0
    while part := answer.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if size > _MAX_ANSWER_BYTES:
            raise _TryAgainError(f"an answer of more than {_MAX_ANSWER_BYTES >> 20} MiB")
        if time.monotonic() > until:
            raise TimeoutError
    if answer.length:  # bytes that were announced and did not arrive
        raise _TryAgainError("the connection ended in the middle of an answer")
    return b"".join(parts)


def _parse_completion(body: bytes) -> Completion:
    """Parse the JSON body of a chat completion. Raises `_TryAgainError` if it is invalid."""
    try:
        value = json.loads(body)
        choice = value["choices"][0]
        message = choice["message"]
        text = message["content"] if message.get("content") is not None else message.get("refusal") or ""
        reason = choice.get("finish_reason")
        usage = value.get("usage") or {}
        counts = [usage.get(key) for key in ("prompt_tokens", "completion_tokens")]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        shown = body[:80].decode(errors="replace")
        raise _TryAgainError(f'the answer is not a chat completion: "{shown}"') from None
    if not isinstance(text, str):
        raise _TryAgainError("the answer's content is not text")
    prompt, completion = (count if type(count) is int and count >= 0 else None for count in counts)
    return Completion(text, reason if isinstance(reason, str) else None, prompt, completion)


def _read_error_message(error: urllib.error.HTTPError, until: float) -> str:
    """Return the message in an HTTP error response: the message in its JSON body, else the beginning of the body.
    until: deadline in seconds of `time.monotonic`.
    """
    try:
        body = _read_body(error, until)
    except (OSError, HTTPException, _TryAgainError):
        return error.reason or "no reason given"
    try:
        message = json.loads(body)
        message = message.get("error", message)
        message = message.get("message", message.get("detail", message)) if isinstance(message, dict) else message
    except (ValueError, AttributeError, RecursionError):
        message = body.decode(errors="replace")
    return " ".join(str(message).split())[:400] or error.reason or "no reason given"


def _parse_retry_after(headers: Any) -> float | None:
    """Parse the Retry-After header in `headers`, a number of seconds or a date (RFC 9110, section 10.2.3); returns
    seconds from now, or None if it is missing or invalid.
    """
    value = (headers.get("Retry-After") or "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError):
        return None
