"""Disconnects and kills, parts of bench/serving_load.py: clients that leave, rank processes that die."""

from __future__ import annotations

import argparse
import asyncio
import collections
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from load_server import ANSWER, PROMPT, all_blocks, engine_properties, promised_wait, settled
from serving_client import Client, RequestFailed, Response, check_stream, completion, is_answered, run_wave, wait_until
from serving_models import random_prompts
from serving_peers import Server


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
    # Within a few steps, long before answers of 200 tokens would be complete.
    after = await settled(client, every, seconds=3)
    again = (await run_wave(client, "m", prompts, ANSWER)).texts
    return {
        "clients": dict(left),
        "after": after,
        "answers_as_before": again == before,
        "passed": after["no_block_leaked"] and again == before and left["left"] > options.disconnects // 2,
    }


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
    """SIGKILL of a random rank at random moments; the streams are those that an undisturbed server answered. No request
    runs through three kills: the server ends such a one, as it may be the cause."""
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
            wrong.append("a stream from two kills ago does not end")
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
