"""Replicas: requests reach ranks, lost ranks are restarted, and answers continue token for token."""

from __future__ import annotations

import asyncio
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from meshwright.comm.local import PRELOADED_TO_SERVE, start_server
from meshwright.errors import MeshwrightError, RankLost, UserError
from meshwright.planner.serving.ledger import ServingSizes
from meshwright.processes import STOPPED, read_sleep
from meshwright.serving import messages
from meshwright.serving import replicas as replicas_module
from meshwright.serving.rank_starter import LocalStarter, RankPlan
from meshwright.serving.replica import Replica, Stream
from meshwright.serving.replicas import Replicas
from meshwright.serving.request import Output, Request
from meshwright.serving.sampling import Sampling
from meshwright.serving.waiting_line import QueueLimits, Ticket
from tests.serving import fake_ranks
from tests.serving.fake_ranks import HANG, KILL, KILL_ALWAYS, answer

start_server(PRELOADED_TO_SERVE)


def make_replicas(
    directory: Path, layout: str = "", engine: str = "build", log: Callable[[str], None] = print,
    limits: QueueLimits | None = None, step_seconds: float = 30.0, max_sequences: int = 8, host: str = "",
) -> Replicas:  # fmt: skip
    plan = RankPlan(
        checkpoint=str(directory), layout=layout.replace("tp2", "tp2:nosp") or "dp1",
        sizes=ServingSizes(64, max_sequences, 128, blocks=64), step_seconds=step_seconds,
        engine=f"{fake_ranks.__name__}:{engine}",
    )  # fmt: skip
    return Replicas(plan, LocalStarter(), limits=limits, host=host, log=log)


@asynccontextmanager
async def running(directory: Path, layout: str = "", **options: object) -> AsyncIterator[Replicas]:
    """Replicas of fake engines, started; no rank is left at the end."""
    replicas = make_replicas(directory, layout, **options)  # type: ignore[arg-type]
    await replicas.start()
    pids = [hello["pid"] for hello in replicas.hellos.values()]
    try:
        yield replicas
    finally:
        pids += [hello["pid"] for hello in replicas.hellos.values()]
        await replicas.close()
        await wait_until(lambda: not any(map(is_alive, pids)))


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
    except OSError:
        return False


def make_request(name: str, *prompt: int, tokens: int = 20, **options: object) -> Request:
    return Request(name, prompt or (1, 2, 3), Sampling(max_tokens=tokens), **options)  # type: ignore[arg-type]


class Reply:
    """Outputs of a request that is submitted at once; an error of the engine is raised by `wait`."""

    def __init__(self, replicas: Replicas, request: Request) -> None:
        self.outputs: list[Output] = []
        self._ended = asyncio.get_running_loop().create_future()
        replicas.submit(request, self._take)

    @property
    def tokens(self) -> list[int]:
        return [result.token for output in self.outputs for result in output.results]

    def _take(self, output: Output | Exception) -> None:
        if isinstance(output, Exception):
            self._ended.set_exception(output)
        else:
            self.outputs.append(output)
            if output.finish_reason is not None:
                self._ended.set_result(None)

    async def wait(self) -> list[int]:
        """Wait for the end of the request; return its tokens."""
        await self._ended
        return self.tokens


async def collect_all(replicas: Replicas, requests: Iterable[Request]) -> None:
    """Submit requests and check that every answer is the one of the request alone."""
    requests = list(requests)
    found = await asyncio.gather(*(Reply(replicas, request).wait() for request in requests))
    assert found == [answer(request) for request in requests]


async def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> float:
    """Wait until a condition holds; return how long that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds
        await asyncio.sleep(0.005)
    return time.monotonic() - began


def refusal_of(replicas: Replicas, request: Request) -> str | None:
    """Why a request would be refused."""
    refusal = replicas.admit([request], Ticket())
    return None if refusal is None else refusal.reason


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """The event loop of the tests that share a server."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def shared(loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """A server of 2 sequences with a queue of 3 requests and 40 tokens, for tests that leave its state unchanged."""
    limits = QueueLimits(requests=3, tokens=40)
    server = running(tmp_path_factory.mktemp("shared"), "tp2", max_sequences=2, limits=limits)
    yield loop.run(server.__aenter__())
    loop.run(server.__aexit__(None, None, None))


def test_batched_answers_equal_isolated_requests(loop: asyncio.Runner, shared: Replicas):
    assert shared.state == "ready"
    before = shared.stats()[0].get("steps", 0)
    loop.run(collect_all(shared, [make_request(f"r{n}", n + 1, n) for n in range(8)]))
    assert shared.stats()[0]["steps"] >= before + 20


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_whoever_connects_without_the_secret_is_no_rank(tmp_path: Path, host: str):
    """Two process groups over Unix sockets, and over TCP, whose leaders listen on the address by which they reach the
    front."""

    async def run() -> None:
        async with running(tmp_path, "tp2 dp2", host=host) as replicas:
            assert replicas.plan.front.startswith(f"tcp:{host}:" if host else "unix:")
            await collect_all(replicas, [make_request(f"r{n}", n + 1, n) for n in range(8)])
            channel = await asyncio.to_thread(messages.Channel.connect, replicas.plan.front, "wrong")
            with pytest.raises(RankLost):
                await asyncio.to_thread(channel.receive)
            channel._socket.close()
            await collect_all(replicas, [make_request("last")])
            replicas.drain()
            assert refusal_of(replicas, make_request("late")) == "draining"

    asyncio.run(run())


@pytest.mark.parametrize("layout", ["", "tp2"])
def test_killed_rank_is_restarted_and_running_answers_continue(tmp_path: Path, layout: str):
    """The request that ends a rank, others that run, and some that arrive meanwhile."""

    async def run() -> None:
        lines: list[str] = []
        # It is noticed by its closed connection, without waiting for the limit of a step.
        async with running(tmp_path, layout, log=lines.append, engine="build_slow", step_seconds=3600.0) as replicas:
            first = [make_request("kill", KILL)] + [make_request(f"r{n}", n + 1) for n in range(5)]
            found = asyncio.create_task(collect_all(replicas, first))
            await wait_until(lambda: (tmp_path / f"done-{KILL}").exists())
            await wait_until(lambda: replicas.state == "recovering")
            await wait_until(lambda: replicas.state == "ready")
            assert [stats["free"] for stats in replicas.stats()] == [replicas.plan.sizes.blocks]  # before any step
            await collect_all(replicas, [make_request(f"s{n}", n + 1, 7) for n in range(3)])
            await found
            assert replicas.state == "ready"
            assert [stats["restarts"] for stats in replicas.stats()] == [1]
            lost, again = lines
            assert lost.startswith("replica 0 was lost: ") and lost.endswith("; restarting it, 6 requests continue")
            assert re.fullmatch(r"replica 0 is ready again, \d+\.\d\d s later", again)

    asyncio.run(run())


def test_hanging_step_counts_as_a_lost_rank(tmp_path: Path):
    async def run() -> None:
        lines: list[str] = []
        async with running(tmp_path, step_seconds=0.6, log=lines.append) as replicas:
            found = asyncio.create_task(collect_all(replicas, [make_request("hang", HANG), make_request("other")]))
            await wait_until(lambda: (tmp_path / f"done-{HANG}").exists())
            await wait_until(lambda: replicas.state == "recovering")
            await found
            late = re.match(r"replica 0 was lost: no step within (\S+) s; ", lines[0])
            assert late is not None and float(late[1]) >= 0.6

    asyncio.run(run())


@pytest.mark.parametrize("layout, steps", [("", 0), ("tp2", 3)])
def test_stopped_rank_is_lost_also_without_requests(layout: str, steps: int, tmp_path: Path):
    """Whatever the limit of a step, and in a replica whose other rank waits for it."""

    async def run() -> None:
        lines: list[str] = []
        async with running(tmp_path, layout, step_seconds=1e6, engine="build_slow", log=lines.append) as replicas:
            found = asyncio.create_task(collect_all(replicas, [make_request("r")] if steps else []))
            await wait_until(lambda: replicas.stats()[0].get("steps", 0) >= steps)
            last = max(replicas.properties["ranks"], key=lambda rank: rank["rank"])
            os.kill(last["pid"], signal.SIGSTOP)
            await wait_until(lambda: replicas.state == "recovering")
            await asyncio.gather(found, collect_all(replicas, [make_request("more")]))
            assert lines[0].startswith(f"replica 0 was lost: rank {last['rank']} was stopped for 1.2 s; restarting it")

    asyncio.run(run())


def test_ranks_hang_if_one_is_stopped_or_all_sleep_in_a_step():
    """Four looks, of which each but the first sees whether a rank has run meanwhile."""

    def look(*texts: tuple[str, str], requests: bool) -> list[str]:
        replica = Replica(0)
        replica.streams = {"r": Stream(make_request("r"), print)} if requests else {}
        return [replica.find_hang(dict(enumerate(each)), 0.4) for each in texts]

    stopped, sleeping, running = ("S 1", "T 7"), ("S 1", "S 7"), ("S 1", "")
    for requests in (False, True):
        assert look(*4 * [stopped], requests=requests) == ["", "", "", "rank 1 was stopped for 1.2 s"]
        assert not any(look(*3 * [stopped], sleeping, *3 * [("S 1", "t 7")], requests=requests))  # it was continued
    assert look(*4 * [sleeping], requests=True)[3] == "all of its ranks slept for 1.2 s in a step"
    assert not any(look(*8 * [sleeping], requests=False))
    assert not any(look(*3 * [sleeping], ("S 2", "S 7"), *2 * [sleeping], requests=True))
    assert not any(look(*8 * [running], requests=True))


def test_process_sleeps_if_no_thread_computes_and_no_child_runs():
    commands = {
        "sleeps": ["sh", "-c", "echo; exec cat"],
        "computes": ["sh", "-c", "echo; while :; do :; done"],
        "a thread computes": run_thread("pass"),
        "waits for a child": ["sh", "-c", "echo; cat; echo"],
        "sends": run_thread("os.write(file, bytes(9))", "gloo_tcp_loop"),
    }
    with ExitStack() as stack:
        processes = {}
        for name, command in commands.items():
            processes[name] = process = stack.enter_context(subprocess.Popen(command, stdin=PIPE, stdout=PIPE))
            stack.callback(process.kill)
        for process in processes.values():
            assert process.stdout is not None and process.stdout.readline() == b"\n"
        pids = {name: process.pid for name, process in processes.items()}
        assert await_sleep(pids["sleeps"]) == read_sleep(pids["sleeps"]) != ""
        time.sleep(0.1)  # the main thread reaches its wait, the child starts
        assert {read_sleep(pids[name]) for name in list(commands)[1:4] for _ in range(10)} == {""}
        sent = read_sleep(pids["sends"])
        assert sent and any(time.sleep(0.05) or read_sleep(pids["sends"]) != sent for _ in range(100))
        for name in ("computes", "waits for a child"):
            os.kill(pids[name], signal.SIGSTOP)
            assert await_sleep(pids[name]) == read_sleep(pids[name]) and read_sleep(pids[name]).startswith(STOPPED)
            assert read_sleep(pids[name]) == read_sleep(pids[name], main_only=True)
        processes["sleeps"].kill()
        processes["sleeps"].wait()
        assert read_sleep(pids["sleeps"]) == ""


def run_thread(step: str, name: str = "thread") -> list[str]:
    """Command of a process whose main thread reads, while a thread called `name` runs `step` without end."""
    begin = f"file = os.open(os.devnull, os.O_WRONLY); ctypes.CDLL(None).prctl(15, b'{name}'); print(flush=True)"
    thread = f"threading.Thread(target=exec, args=({begin + chr(10) + 'while 1: ' + step!r}, globals()))"
    return [sys.executable, "-c", f"import ctypes, os, threading; {thread}.start(); input()"]


def await_sleep(pid: int) -> str:
    """Wait until a process sleeps; return the text that says since when."""
    while not (found := read_sleep(pid)):
        time.sleep(0.01)
    return found


def test_long_steps_do_not_count_as_lost_ranks(tmp_path: Path):
    """Not even the first, of whose time nothing is known."""

    async def run() -> None:
        async with running(tmp_path, step_seconds=0.3, engine="build_long") as replicas:
            await collect_all(replicas, [make_request("first", tokens=1)])
            await collect_all(replicas, [make_request("second", *range(8), tokens=2)])
            assert "restarts" not in replicas.stats()[0]

    asyncio.run(run())


def test_time_in_which_the_whole_server_was_stopped_does_not_count(tmp_path: Path):
    """As by a paused container: the ranks have had no time to compute the step."""

    async def run() -> None:
        async with running(tmp_path, step_seconds=0.9, engine="build_slow") as replicas:
            found = asyncio.create_task(collect_all(replicas, [make_request("r", tokens=20)]))
            await wait_until(lambda: replicas.stats()[0].get("steps", 0) > 2)
            (rank,) = replicas.properties["ranks"]
            os.kill(rank["pid"], signal.SIGSTOP)
            time.sleep(1.3)  # the event loop is stopped, too
            os.kill(rank["pid"], signal.SIGCONT)
            await found
            assert "restarts" not in replicas.stats()[0]

    asyncio.run(run())


def test_limit_of_a_step_follows_its_predicted_time():
    replica = Replica(0)
    replica.streams = {"r": Stream(make_request("r", *range(40), tokens=5), print)}
    assert replica.compute_step_limit(90.0, 512) == 90.0
    assert replica.compute_step_limit(2.0, 512) == 60.0  # no step has been measured
    replica.hangs = 2
    assert replica.compute_step_limit(60.0, 512) == 240.0
    for _ in range(3):
        replica.take_report({"seconds": 8.0, "tokens": 1, "context": 1})
    assert replica.compute_step_limit(60.0, 512) == pytest.approx(40 * 8)  # nothing is known of steps of several tokens
    assert replica.compute_step_limit(60.0, 16) == pytest.approx(16 * 8)
    assert replica.compute_step_limit(60.0, 4) == pytest.approx(10 * 8)


def test_limit_of_a_step_counts_what_it_may_compute():
    """One token of a request that decodes; the whole prompt of a request that has been cancelled, until the step that
    may compute it has ended."""

    def report(seconds: float, tokens: int, keys: int) -> dict[str, Any]:
        return {"seconds": seconds, "tokens": tokens, "context": keys}

    front = Replicas(RankPlan("nowhere", "dp1", ServingSizes(64, 8, 128, blocks=64)), LocalStarter())
    replica, budget = Replica(0), 64
    decoding, leaving = (Stream(make_request(name, *range(40), tokens=50), print) for name in ("decoding", "leaving"))
    for _ in range(20):  # 0.02 s + 0.0005 s a token, so that 64 tokens one by one take longer than ten times their step
        replica.take_report(report(0.040, 40, 820))
        replica.take_report(report(0.021, 2, 41))
    replica.streams = {stream.request.id: stream for stream in (decoding, leaving)}
    for stream in replica.streams.values():
        stream.replica = replica
    prefill, decode = 64 * replica.step_times.predict(1, 40), 10 * replica.step_times.predict(1, 40)
    assert replica.compute_step_limit(0.01, budget) == pytest.approx(prefill)
    decoding.tokens.append(7)
    decoding.losses = 1  # it computes all tokens again
    assert replica.compute_step_limit(0.01, budget) == pytest.approx(prefill)
    decoding.losses = 0
    front._remove_request(leaving)
    assert replica.compute_step_limit(0.01, 41) == pytest.approx(41 * replica.step_times.predict(1, 41))
    assert replica.compute_step_limit(0.01, 10) == pytest.approx(10 * replica.step_times.predict(10, 10 * 41))
    replica.take_report(report(0.040, 40, 820))
    # The message to cancel may have come too late for a step.
    assert replica.compute_step_limit(0.01, 41) > 1.5 * decode
    replica.take_report(report(0.021, 2, 41))
    assert replica.compute_step_limit(0.01, budget) == pytest.approx(decode, rel=0.1)
    assert replica.compute_step_limit(2.0, budget) == 2.0


def test_limit_of_a_prompt_does_not_trust_a_model_that_has_forgotten_prompts():
    """Steps of up to 37 tokens take 0.6 s, the time to read the weights, so that decode steps show no time a token."""
    replica, numbers = Replica(0), random.Random(1)

    def run_step(tokens: int) -> float:
        seconds, keys = max(0.6, 0.016 * tokens), tokens * numbers.randint(100, 1000)
        replica.take_report({"seconds": numbers.uniform(0.9, 1.1) * seconds, "tokens": tokens, "context": keys})
        return seconds

    for _ in range(20):
        slowest = run_step(512)
    for number in range(1000):
        run_step(numbers.randint(1, 8))
        if number % 100 == 0 or number == 999:
            replica.streams = {"r": Stream(make_request("r", *range(512), tokens=5), print)}
            assert replica.compute_step_limit(2.0, 512) > 4 * slowest
    replica.streams["r"].tokens.append(1)
    assert replica.compute_step_limit(2.0, 512) < 10  # a decode step


def test_requests_of_a_lost_replica_continue_on_another(tmp_path: Path):
    async def run() -> None:
        async with running(tmp_path, "dp2", engine="build_slow") as replicas:
            requests = [make_request(f"r{n}", n + 1) for n in range(6)]
            found = asyncio.create_task(collect_all(replicas, requests))
            await wait_until(lambda: all(stats.get("steps", 0) > 2 for stats in replicas.stats()))
            os.kill(replicas.hellos[1, 0]["pid"], signal.SIGKILL)
            await found
            await wait_until(lambda: replicas.state == "ready")

    asyncio.run(run())


def test_request_that_repeatedly_kills_its_rank_fails_alone(tmp_path: Path):
    async def run() -> None:
        async with running(tmp_path) as replicas:
            reply = Reply(replicas, make_request("bad", KILL_ALWAYS))
            with pytest.raises(RankLost, match="3 times"):
                await reply.wait()
            await collect_all(replicas, [make_request("good")])

    asyncio.run(run())


def test_answers_survive_any_number_of_lost_ranks(tmp_path: Path):
    async def run() -> None:
        async with running(tmp_path, engine="build_slow") as replicas:
            found = asyncio.create_task(
                collect_all(replicas, [make_request(f"r{n}", n + 1, tokens=16) for n in range(3)])
            )
            for losses in range(6):
                steps = replicas.stats()[0]["steps"] if losses else 0
                await wait_until(lambda: replicas.stats()[0].get("steps", 0) > steps + 1)  # noqa: B023
                os.kill(replicas.hellos[0, 0]["pid"], signal.SIGKILL)
                await wait_until(lambda: replicas.state == "recovering")
            await found
            assert [stats["restarts"] for stats in replicas.stats()] == [6]

    asyncio.run(run())


def test_server_ends_after_consecutive_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def run() -> None:
        monkeypatch.setattr(replicas_module, "FIRST_DELAY", 0.01)
        async with running(tmp_path, engine="build_once") as replicas:
            replies = [Reply(replicas, make_request(name, KILL)) for name in ("first", "second")]
            await replicas.wait_for_failure()
            assert replicas.state == "failed"
            assert refusal_of(replicas, make_request("late")) == "failed"
            assert [stats["restarts"] for stats in replicas.stats()] == [replicas_module.LOSSES_OF_REPLICA - 1]
            for each in replies:
                with pytest.raises(RankLost):
                    await each.wait()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("engine", "layout", "error", "reason"),
    [
        ("refuse", "", UserError, "damaged"),
        ("die", "", RankLost, "died"),
        ("fail", "", RankLost, "ValueError: unforeseen"),
        ("build_unlike", "dp2", UserError, "computes with none .* same kind of processor"),
    ],
)
def test_ranks_that_cannot_start_raise_their_error(
    tmp_path: Path, engine: str, layout: str, error: type[MeshwrightError], reason: str
):
    async def run() -> None:
        replicas = make_replicas(tmp_path, layout, engine)
        with pytest.raises(error, match=reason):
            await replicas.start()
        await replicas.close()

    asyncio.run(run())


def test_cancelled_request_ends_and_frees_its_slot(loop: asyncio.Runner, shared: Replicas):
    async def run() -> None:
        long = [Reply(shared, make_request(name, tokens=10_000)) for name in ("long", "longer")]
        await wait_until(lambda: all(each.tokens for each in long))
        late = Reply(shared, make_request("late", tokens=10_000, deadline=time.time() + 0.05))
        await late.wait()
        assert [output.finish_reason for output in late.outputs] == ["timeout"]
        shared.cancel("long")
        taken = len(long[0].outputs)
        await collect_all(shared, [make_request("next")])
        assert len(long[0].outputs) == taken < len(long[1].outputs), "a cancelled request gets no further outputs"
        shared.cancel("long")
        shared.cancel("longer")
        await wait_until(lambda: not shared.stats()[0]["running"])

    loop.run(run())


def test_queue_refuses_requests_beyond_its_limits(loop: asyncio.Runner, shared: Replicas):
    async def run() -> None:
        replies = []
        for number in range(5):
            request = make_request(f"r{number}", tokens=10_000)
            assert shared.admit([request], Ticket()) is None
            replies.append(Reply(shared, request))
        assert refusal_of(shared, make_request("more")) == "requests"
        assert (refusal := shared.admit((), Ticket())) is not None and refusal.reason == "requests"  # of any request
        shared.cancel("r4")
        await wait_until(lambda: refusal_of(shared, make_request("fits")) is None)
        assert shared.admit((), Ticket()) is None
        assert refusal_of(shared, make_request("long", *range(50))) == "tokens"
        await wait_until(lambda: all(reply.tokens for reply in replies[:2]))
        for number in range(4):
            shared.cancel(f"r{number}")

    loop.run(run())


def test_replica_with_the_longest_cached_prefix_is_chosen(tmp_path: Path):
    """The first of two idle replicas is chosen, except for prompts whose prefix the other one has cached."""

    async def run() -> None:
        async with running(tmp_path, "dp2") as replicas:
            prompt = [secrets.randbelow(800) for _ in range(64)]
            replicas.submit(make_request("long", tokens=10_000), print)
            await collect_all(replicas, [make_request("first", *prompt, tokens=2)])
            replicas.cancel("long")
            for number in range(6):
                await collect_all(replicas, [make_request(f"r{number}", *prompt, number, tokens=2)])
            other = replicas.stats()[1]["steps"]
            assert other >= 7
            await collect_all(replicas, [make_request("else", *reversed(prompt), tokens=2)])
            assert replicas.stats()[1]["steps"] == other

    asyncio.run(run())


def test_idle_ranks_wait_without_polling(loop: asyncio.Runner, shared: Replicas):
    async def run() -> None:
        await collect_all(shared, [make_request("r")])
        pids = [hello["pid"] for hello in shared.hellos.values()]
        for _ in range(5):  # the end of the request may still take time
            before = [cpu_seconds(pid) for pid in pids]
            await asyncio.sleep(0.3)
            used = [cpu_seconds(pid) - start for pid, start in zip(pids, before, strict=True)]
            if max(used) < 0.1:  # a polling rank takes 0.3 s; a timer tick counts 0.01 s
                break
        else:
            pytest.fail(f"processor seconds while nothing is asked: {used}")

    loop.run(run())


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
