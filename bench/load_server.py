"""The served engine's own figures, for the parts of bench/serving_load.py: /metrics, KV blocks, `Retry-After`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from serving_client import Client, RequestFailed, Response, wait_until

PROMPT, ANSWER = 64, 32
"""Tokens of the requests of overload."""


def promised_wait(response: Response) -> float | None:
    """Seconds of `retry-after-ms`, else of `Retry-After`."""
    headers = response.headers()
    if "retry-after-ms" in headers:
        return float(headers["retry-after-ms"]) / 1000
    return float(headers["retry-after"]) if "retry-after" in headers else None


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
