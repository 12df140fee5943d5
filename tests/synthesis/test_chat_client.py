"""Concurrent requests: each is sent once, and the journal preserves its answer across processes."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.synthesis.chat_client import ChatClient, Journal
from meshwright.synthesis.endpoint import ChatRequest, Completion, Endpoint, NoAnswer, RequestRefused
from tests.conftest import Outcome
from tests.data.served import completion, served


def requests(count: int, seed: int = 0) -> list[ChatRequest]:
    return [ChatRequest([{"role": "user", "content": f"number {n}"}], seed=seed) for n in range(count)]


def echo(body: dict, number: int) -> str:
    return body["messages"][-1]["content"].replace("number", "answer")


def make_client(url: str, journal: Path, **options) -> ChatClient:
    given = {"backoff": 0.001, "timeout": 10.0, "tries": 3}
    endpoint = Endpoint(url, "m", **{key: options.pop(key, value) for key, value in given.items()})
    return ChatClient(endpoint, journal, **options)


def test_answers_keep_request_order_under_concurrency(tmp_path: Path):
    four = threading.Barrier(4, timeout=20)

    def reply(body: dict, number: int) -> str:
        if number < 4:
            four.wait()  # passes only with four concurrent requests
        return echo(body, number)

    with served(reply) as server, make_client(server.url, tmp_path / "j", concurrency=4) as client:
        answers = client.ask(requests(20))
    assert [answer and answer.text for answer in answers] == [f"answer {n}" for n in range(20)]
    assert server.most_at_once == 4
    assert client.summarize_usage() == {
        "requests": 20,
        "sent": 20,
        "retries": 0,
        "refused": 0,
        "prompt_tokens": 200,
        "completion_tokens": 40,
        "uncounted": 0,
    }
    assert client.summarize_usage(1.5, 3)["cost"] == pytest.approx((200 * 1.5 + 40 * 3) / 1e6)


def test_journal_key_covers_request_parameters(tmp_path: Path):
    with served(echo) as server:
        with make_client(server.url, tmp_path / "j") as client:
            first = client.ask(requests(5))
        with make_client(server.url, tmp_path / "j") as client:
            assert client.ask(requests(5)) == first
            assert client.summarize_usage()["sent"] == 0 and client.summarize_usage()["prompt_tokens"] == 50
            client.ask([*requests(5), *requests(5, seed=1), *requests(5, seed=1)])
    assert len(server.requests) == 10


def test_failure_keeps_answers_in_journal(tmp_path: Path):
    def fails(body: dict, number: int):
        return (503, {}, b"down") if number >= 6 else echo(body, number)

    with served(fails) as server, make_client(server.url, tmp_path / "j", concurrency=2) as client:
        with pytest.raises(NoAnswer, match="status 503: down"):
            client.ask(requests(10))
    assert len((tmp_path / "j").read_text().splitlines()) == 6
    with served(echo) as server, make_client(server.url, tmp_path / "j") as client:
        assert [answer and answer.text for answer in client.ask(requests(10))] == [f"answer {n}" for n in range(10)]
    assert len(server.requests) == 4


def test_answer_that_arrives_after_a_failure_is_in_journal(tmp_path: Path):
    failures = threading.Semaphore(0)

    def reply(body: dict, number: int):
        if body["messages"][0]["content"] == "number 1":
            failures.release()
            return 503, {}, b"down"
        for _ in range(3):  # all tries
            assert failures.acquire(timeout=20)
        time.sleep(0.1)
        return echo(body, number)

    with served(reply) as server, make_client(server.url, tmp_path / "j", concurrency=2) as client:
        with pytest.raises(NoAnswer, match="status 503: down"):
            client.ask(requests(2))
    with make_client("http://127.0.0.1:9/v1", tmp_path / "j") as client:
        assert client.ask(requests(1))[0].text == "answer 0"


def test_retries_end_once_another_request_has_failed(tmp_path: Path):
    both = threading.Barrier(2, timeout=20)

    def reply(body: dict, number: int):
        if number < 2:
            both.wait()
        patient = body["messages"][0]["content"] == "number 1"
        return 503, {"Retry-After": "30"} if patient else {}, b"down"

    with served(reply) as server, make_client(server.url, tmp_path / "j", concurrency=2) as client:
        with pytest.raises(NoAnswer, match="status 503: down"):
            client.ask(requests(2))
    assert Counter(body["messages"][0]["content"] for body in server.requests) == {"number 0": 3, "number 1": 1}


def test_refused_request_yields_none(tmp_path: Path):
    def refuses(body: dict, number: int):
        return (400, {}, b"no") if body["messages"][0]["content"] in ("number 0", "number 3") else echo(body, number)

    with served(refuses) as server:
        with make_client(server.url, tmp_path / "j", concurrency=1) as client:
            answers = client.ask(requests(5))
            assert [answer is None for answer in answers] == [True, False, False, True, False]
            assert client.summarize_usage()["refused"] == 2
        with make_client(server.url, tmp_path / "j") as client:
            assert client.ask(requests(5)) == answers
        assert len(server.requests) == 5


@pytest.mark.parametrize(("count", "sent"), [(5, 5), (100, 10)])
def test_server_that_refuses_all_ends_run_early(tmp_path: Path, count: int, sent: int):
    with served(lambda body, number: (400, {}, b"no such parameter")) as server:
        with make_client(server.url, tmp_path / "j", concurrency=1) as client:
            with pytest.raises(RequestRefused, match="no such parameter"):
                client.ask(requests(count))
    assert len(server.requests) == sent and (tmp_path / "j").read_bytes() == b""


def test_journal_drops_truncated_line_and_refuses_foreign_file(tmp_path: Path):
    path = tmp_path / "j"
    with served(echo) as server:
        with make_client(server.url, path) as client:
            client.ask(requests(3))
        whole = path.read_bytes()
        path.write_bytes(whole[:-7])
        with make_client(server.url, path) as client:
            client.ask(requests(3))
            assert client.summarize_usage()["sent"] == 1
    assert sorted(path.read_bytes().splitlines()) == sorted(whole.splitlines())
    for other in (b'{"instruction": "x"}\n', b"text\n", b"no line end", b'{"request": "a"}\n', b"\xff\n"):
        path.write_bytes(other)
        with pytest.raises(UserError, match="j:1: not a journal"):
            Journal(path)
        assert path.read_bytes() == other


def test_journal_is_locked_against_second_process(tmp_path: Path):
    first = Journal(tmp_path / "j")
    with pytest.raises(UserError, match="another process is writing this journal"):
        Journal(tmp_path / "j")
    first.close()
    Journal(tmp_path / "j").close()
    with pytest.raises(UserError, match="cannot write"):
        Journal(tmp_path / "nowhere" / "j")


def test_closing_waits_for_answer_being_written_and_unlocks(tmp_path: Path, monkeypatch):
    """The file description stays open in a child that inherited it, and in the kernel while a thread syncs the file."""
    path, syncing, closed = tmp_path / "j", threading.Event(), threading.Event()

    def sync(descriptor: int) -> None:
        syncing.set()
        assert not closed.wait(0.1)

    monkeypatch.setattr(os, "fsync", sync)
    journal = Journal(path)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[journal._file.fileno()]):
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(journal.put, "name", Completion("text", "stop", 1, 1))
            assert syncing.wait(20)
            journal.close()
            closed.set()
            writing.result()
        again = Journal(path)
    assert again["name"].text == "text"
    again.close()


def test_full_disk_is_one_error_line_and_keeps_earlier_answers(tmp_path: Path):
    path, limits = tmp_path / "j", resource.getrlimit(resource.RLIMIT_FSIZE)
    journal = Journal(path)
    journal.put("first", Completion("text", "stop", 1, 1))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
        with pytest.raises(UserError, match="cannot write .*j: File too large"):
            journal.put("second", Completion("text", "stop", 1, 1))
        journal.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    again = Journal(path)
    assert "first" in again and "second" not in again
    again.close()


def test_killed_run_resumes_without_repeating_requests(tmp_path: Path, command_line: Callable[..., Outcome]):
    """`meshwright data label` on 40 records, killed after some answers and restarted."""
    records = [{"instruction": f"number {n}", "output": f"out {n}"} for n in range(40)]
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    gate, killed = threading.Event(), threading.Event()
    said = '{"prompt": ["directive"], "response": ["assertive"], "should_refuse": false, "refuses": false}'

    def reply(body: dict, number: int) -> str:
        if number >= 15 and not killed.is_set():
            gate.set()
            killed.wait(20)
        return said

    with served(reply) as server:
        output = tmp_path / "labelled.jsonl"
        words = ["data", "label", str(tmp_path / "r.jsonl"), "--url", server.url, "--model", "m"]
        words += ["--concurrency", "3", "--output", str(output)]
        command = [sys.executable, "-m", "meshwright", *words]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        assert gate.wait(60)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        killed.set()
        assert not output.exists()
        journal = (tmp_path / "labelled.jsonl.journal").read_bytes()
        done = journal[: journal.rfind(b"\n") + 1].count(b"\n")
        before = len(server.requests)
        assert 12 <= done <= 15
        again = command_line(*words, "--json")
        assert again.code == 0, again.errors
    assert len(server.requests) - before == 40 - done
    asked = Counter(json.dumps(body) for body in server.requests)
    assert len(asked) == 40 and max(asked.values()) <= 2
    answer = json.loads(again.output)
    assert (answer["labelled"], answer["usage"]["sent"], answer["usage"]["requests"]) == (40, 40 - done, 40)
    labelled = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["instruction"] for row in labelled] == [record["instruction"] for record in records]


def test_answer_without_usage_is_counted(tmp_path: Path):
    with (
        served(lambda body, number: completion("x", usage=False)) as server,
        make_client(server.url, tmp_path / "j") as client,
    ):
        client.ask(requests(2))
    assert client.summarize_usage()["uncounted"] == 2 and client.summarize_usage()["prompt_tokens"] == 0
