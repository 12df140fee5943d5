"""Check and measure `meshwright serve` on one GPU over HTTP, in about two minutes.

    python bench/gpu/server_on_gpu.py [--model tinyllama-1.1b] [--device cuda] [--rounds 3]

On random weights in bf16 of that shape, 128 tokens in and out. Measured: time until ready; tokens per second and time
to first token of 1, 8 and 32 clients at once. Checked, on a second server with `--batch-invariant`: answers alone and
among 31 others; streams and their log-probabilities across `kill -9` of the rank, and no leaked KV blocks after it; 200
clients most of which leave; SIGTERM ends the server with code 143. Writes `bench/results/gpu_server.json`; exit code 1
when a check does not hold.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
from cases import Cases

from load_faults import disconnects, kills
from serving_client import Client, run, run_wave
from serving_models import model_directory, random_prompts
from serving_peers import Server, start_meshwright

CLIENTS = (1, 8, 32)
TOKENS = 128
"""Tokens of each prompt, and of each answer."""


def start(model: str, device: str, work: Path, *arguments: str) -> Server:
    """Start the server."""
    return start_meshwright(model, "bf16", work, "--device", device, *arguments)


def measure(server: Server, rounds: int, **fields: Any) -> dict[str, Any]:
    """Medians of the rounds by number of clients; prompts are new in each round, so that no prefix is cached."""
    found = {}
    for clients in CLIENTS:
        waves = []
        for turn in range(rounds + 1):
            prompts = random_prompts(clients, TOKENS, seed=100 * clients + turn)
            waves.append(run(wave_of(server, prompts, **fields)).figures())
        names = ("tokens_per_second", "ttft", "decode_tokens_per_second", "itl_p50", "itl_p99")
        found[f"{clients} clients"] = {
            name: round(statistics.median(wave[name] for wave in waves[1:]), 5) for name in names if name in waves[-1]
        }
    return found


async def wave_of(server: Server, prompts: list[list[int]], **fields: Any) -> Any:
    """Send prompts at once; return the wave."""
    client = Client(server.port)
    try:
        return await run_wave(client, "m", prompts, TOKENS, **fields)
    finally:
        client.close()


def alone_and_together(server: Server) -> dict[str, int]:
    """Answers of 6 prompts that differ alone and among 32; greedy and drawn ones. None finds a prefix in the cache."""
    prompts, differing = random_prompts(32, TOKENS, seed=3), 0
    for number, fields in enumerate(({}, {"temperature": 1.0, "seed": 5})):
        together = run(wave_of(server, prompts, cache_salt=f"together {number}", **fields)).texts
        for at in range(6):
            alone = run(wave_of(server, [prompts[at]], cache_salt=f"alone {number}", **fields)).texts[0]
            differing += alone != together[at]
    return {"differing": differing, "of": 12}


def part(work: Callable[..., Awaitable[dict[str, Any]]], server: Server, **options: int) -> dict[str, Any]:
    """A part of bench/serving_load.py."""

    async def whole() -> dict[str, Any]:
        client = Client(server.port)
        try:
            return await work(server, client, argparse.Namespace(**options))
        finally:
            client.close()

    return run(whole())


def stop(server: Server) -> int:
    """SIGTERM; the exit code."""
    server.process.terminate()
    return server.process.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tinyllama-1.1b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    cuda = options.device == "cuda"
    header = {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "model": options.model,
        "prompt_and_answer_tokens": TOKENS,
    }
    cases = Cases("gpu_server" if cuda else None, header)
    model_directory(options.model)
    for invariant in (False, True) if cuda else (False,):
        title = "batch-invariant" if invariant else "plain"
        with tempfile.TemporaryDirectory() as work:
            begun = time.perf_counter()
            server = start(options.model, options.device, Path(work), *["--batch-invariant"] * invariant)
            cases.document[f"{title}: seconds until ready"] = round(time.perf_counter() - begun, 2)
            try:
                cases.run("greedy", title, partial(measure, server, options.rounds))
                if not invariant:
                    sampled = {"temperature": 0.8, "top_k": 50, "seed": 1}
                    cases.run("temperature 0.8, top-k 50", title, partial(measure, server, 1, **sampled))
                if invariant or not cuda:
                    same = partial(alone_and_together, server)
                    cases.run("checks", "alone and among 31", same, lambda found: not found["differing"])
                    for name, work_, sizes in (
                        ("kills", kills, {"kills": 3}),
                        ("disconnects", disconnects, {"disconnects": 200}),
                    ):
                        cases.run("checks", name, partial(part, work_, server, **sizes), lambda found: found["passed"])
                    cases.run("checks", "exit code", partial(stop, server), lambda found: found == 143)
            finally:
                print(Path(work, "meshwright.log").read_text()[:3000], file=sys.stderr)
                server.close()
    return cases.end()


if __name__ == "__main__":
    raise SystemExit(main())
