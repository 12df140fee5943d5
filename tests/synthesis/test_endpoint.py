"""The endpoint client: requests, retries, final errors, and where the API key is sent."""

from __future__ import annotations

import email.utils
import json
import threading
import time

import pytest

from meshwright.errors import UserError
from meshwright.synthesis.endpoint import ChatRequest, Completion, Endpoint, NoAnswer, RequestRefused, read_key
from tests.data.served import completion, served

HELLO = ChatRequest([{"role": "user", "content": "Hello? 😀"}], 0.5, 0.9, 64, 7)
KEY = "sk-0123456789secret"


def endpoint(url: str, **options) -> Endpoint:
    return Endpoint(url, "m", **{"backoff": 0.001, "timeout": 5.0, "tries": 3, **options})


def test_request_body_matches_api():
    with served(lambda body, number: "Hi there") as server:
        answer = endpoint(server.url, key=KEY).complete(HELLO)
    assert answer == Completion("Hi there", "stop", 10, 2)
    assert server.paths == ["/v1/chat/completions"]
    assert server.requests == [
        {
            "model": "m",
            "messages": [{"role": "user", "content": "Hello? 😀"}],
            "temperature": 0.5,
            "top_p": 0.9,
            "max_tokens": 64,
            "seed": 7,
        }
    ]
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert server.headers[0]["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("http://h:1", "http://h:1/v1/chat/completions"),
        ("http://h:1/v1/", "http://h:1/v1/chat/completions"),
        ("https://h/api/v3", "https://h/api/v3/chat/completions"),
        ("https://h/v1/chat/completions", "https://h/v1/chat/completions"),
    ],
)
def test_address_accepts_host_version_or_full_url(given: str, asked: str):
    assert endpoint(given).address == asked


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://h/v1", "http://", "http://user:pw@h/v1"])
def test_invalid_server_address_is_refused(url: str):
    with pytest.raises(UserError, match="address of"):
        endpoint(url)


def broken(kind: str):
    """Return an invalid reply of this kind."""
    good = json.dumps(completion("Hi")).encode()
    return {
        "503": (503, {}, b"busy"),
        "429": (429, {"Retry-After": "0"}, b'{"error": {"message": "slow down"}}'),
        "not JSON": (200, {}, b"<html>"),
        "JSON that is no completion": (200, {}, b'{"choices": []}'),
        "null": (200, {}, b"null"),
        "content that is no text": (200, {}, b'{"choices": [{"message": {"content": [1]}}]}'),
        "cut in the middle": (200, {"Content-Length": str(len(good))}, good[:20]),
    }[kind]


KINDS = ("503", "429", "not JSON", "JSON that is no completion", "null", "content that is no text", "cut in the middle")


@pytest.mark.parametrize("kind", KINDS)
def test_transient_errors_are_retried(kind: str):
    reasons: list[str] = []
    with served(lambda body, number: broken(kind) if number < 2 else "Hi") as server:
        assert endpoint(server.url).complete(HELLO, retried=reasons.append).text == "Hi"
    assert len(server.requests) == 3 and len(reasons) == 2
    assert (reasons[0] == "the connection ended in the middle of an answer") == (kind == "cut in the middle")


@pytest.mark.parametrize("kind", KINDS)
def test_persistent_errors_end_in_one_line(kind: str):
    with served(lambda body, number: broken(kind)) as server:
        with pytest.raises(NoAnswer, match="did not answer in 3 tries: ") as caught:
            endpoint(server.url).complete(HELLO)
    assert len(server.requests) == 3 and "\n" not in str(caught.value)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
@pytest.mark.parametrize(
    "said",
    [
        b'{"error": {"message": "no such\\nmodel", "type": "invalid_request_error"}}',
        b'{"error": "no such model"}',
        b'{"detail": "no such model"}',
        b"no such model",
    ],
)
def test_refused_request_is_not_retried_and_reason_is_shown(status: int, said: bytes):
    with served(lambda body, number: (status, {}, said)) as server:
        with pytest.raises(RequestRefused, match=rf"status {status}: no such model") as caught:
            endpoint(server.url).complete(HELLO)
    assert len(server.requests) == 1
    assert ("is the key right?" in str(caught.value)) == (status in (401, 403))


def test_connection_refused_is_one_line_error():
    with served(lambda body, number: "Hi") as server:
        url = server.url
    with pytest.raises(NoAnswer, match="Connection refused"):
        endpoint(url, tries=2).complete(HELLO)


def test_retry_pause_follows_retry_after_or_doubles():
    def paused(headers: dict[str, str]) -> list[float]:
        pauses: list[float] = []
        with served(lambda body, number: (429, headers, b"{}")) as server:
            with pytest.raises(NoAnswer):
                endpoint(server.url, backoff=1.0, tries=4).complete(HELLO, pauses.append)
        return pauses

    assert paused({"Retry-After": "17"}) == [17.0] * 3
    assert paused({"Retry-After": "1000000"}) == [300.0] * 3
    [first, *_] = paused({"Retry-After": email.utils.formatdate(time.time() + 100, usegmt=True)})
    assert 90 < first <= 100
    for pauses in (paused({}), paused({"Retry-After": "soon"})):
        assert [1 <= pause / 2**n <= 1.25 for n, pause in enumerate(pauses)] == [True] * 3


def test_slow_server_times_out():
    release = threading.Event()

    def silent(body, number):
        release.wait(20)
        return "late"

    with served(silent) as server:
        with pytest.raises(NoAnswer, match=r"(timed out|no complete answer in 0\.2 seconds)"):
            endpoint(server.url, timeout=0.2, tries=1).complete(HELLO)
        release.set()

    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                try:
                    for _ in range(200):
                        connection.sendall(b" ")
                        time.sleep(0.02)
                except OSError:
                    pass

        threading.Thread(target=drip, daemon=True).start()
        with pytest.raises(NoAnswer, match=r"no complete answer in 0\.3 seconds"):
            endpoint(f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=0.3, tries=1).complete(HELLO)


def test_key_is_not_sent_to_redirects_or_shown():
    with served(lambda body, number: "stolen") as other:
        moved = {"Location": other.url + "/chat/completions"}
        for status in (301, 302, 307, 308):
            with served(lambda body, number, status=status: (status, moved, b"")) as server:
                with pytest.raises(RequestRefused, match=f"status {status}"):
                    endpoint(server.url, key=KEY).complete(HELLO)
    assert other.requests == []
    for status, kind in ((401, RequestRefused), (500, NoAnswer)):
        echo = json.dumps({"error": {"message": f"bad key {KEY}"}}).encode()
        with served(lambda body, number, status=status, echo=echo: (status, {}, echo)) as server:
            with pytest.raises(kind, match="bad key <key>") as caught:
                endpoint(server.url, key=KEY, tries=1).complete(HELLO)
        assert KEY not in str(caught.value) and KEY not in repr(endpoint(server.url, key=KEY))


def test_key_is_read_from_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SERVER_KEY", f" {KEY}\n")
    assert read_key("SERVER_KEY") == KEY and read_key(None) is None
    monkeypatch.setenv("SERVER_KEY", "two words")
    with pytest.raises(UserError, match="SERVER_KEY does not hold a key") as caught:
        read_key("SERVER_KEY")
    assert "two words" not in str(caught.value)
    monkeypatch.delenv("SERVER_KEY")
    with pytest.raises(UserError, match="SERVER_KEY is not set"):
        read_key("SERVER_KEY")


def test_refusal_field_is_used_as_response_text():
    body = completion("")
    body["choices"][0]["message"] = {"role": "assistant", "content": None, "refusal": "I will not."}
    with served(lambda _, number: body) as server:
        assert endpoint(server.url).complete(HELLO).text == "I will not."
