"""The contenders of bench/serving.py in turns: which of them run, the rounds of measurements, and decode of a single
request against the memory's read stream.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from meshwright.kernels.memory_pages import map_huge_pages
from processor_load import OtherLoad
from serving_client import Wave
from serving_models import CACHE, random_prompts
from serving_peers import STARTS, THREADS, Contender, ContenderFailed, Server, installed_version

TOKENS = 128
WAVE_SECONDS = 150
OURS = ("meshwright", "engine")
STREAM_SECONDS = 0.3
"""Seconds of a measurement of the read stream, at least; three reads at least."""
MOST_ATTEMPTS = 4
"""Measurements of a decode whose share of the read stream is above 1."""
MOST_OTHERS, MOST_DISTURBED = 0.1, 4
"""Largest share of the processors' time that other processes may take during a turn; attempts at a turn, of which the
least disturbed counts."""


class ReadStream:
    """Reads a buffer of `size` bytes with `THREADS` threads: in huge pages, as the server's weights, because torch
    reads small pages more slowly."""

    def __init__(self, size: int) -> None:
        import torch

        torch.set_num_threads(THREADS)
        self._buffer = torch.from_numpy(map_huge_pages(size // 4 * 4).view(np.float32)).fill_(1)

    def measure(self) -> float:
        """Bytes per second: the median of several sums."""
        seconds = list[float]()
        while len(seconds) < 3 or sum(seconds) < STREAM_SECONDS:
            begun = time.perf_counter()
            self._buffer.sum()
            seconds.append(time.perf_counter() - begun)
        return self._buffer.nbytes / statistics.median(seconds)


@dataclass
class DecodeShare:
    """Decode of a single request in one round, against the read stream. stream, decode: bytes per second. attempts:
    shares of all measurements, of which the last counts."""

    stream: float
    decode: float
    attempts: list[float]

    @property
    def valid(self) -> bool:
        return self.attempts[-1] <= 1

    def figures(self) -> dict[str, Any]:
        rates = {"read_stream": self.stream, "decode": self.decode}
        found = {f"{name}_gb_per_second": round(rate / 1e9, 2) for name, rate in rates.items()}
        return {"share": self.attempts[-1], "valid": self.valid, "attempts": self.attempts, **found}


def summarise_shares(shares: Sequence[DecodeShare]) -> dict[str, Any]:
    """Median of the valid rounds, None if there are none, with the figures of each round."""
    valid = [share.attempts[-1] for share in shares if share.valid]
    return {"median": statistics.median(valid) if valid else None, "rounds": [share.figures() for share in shares]}


def describe_command(text: str) -> str:
    """The command, or output with it, as a user would type it in the repository: without the paths of this machine."""
    root = Path(__file__).resolve().parent.parent
    places = {sys.executable: "python", str(CACHE): "~/.cache/meshwright-bench", str(root): ".", str(Path.home()): "~"}
    for place, name in places.items():
        text = text.replace(place, name)
    return text


def read_outside_kernels(contender: Contender) -> float | None:
    """Return the share of all steps' time that our server spent outside kernels; None if it does not report them."""
    url = f"http://127.0.0.1:{cast(Server, contender).port}/metrics"
    page = urllib.request.urlopen(url, timeout=30).read().decode()
    kernels, steps = (
        sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"meshwright:engine_{name}_total"))
        for name in ("kernel_seconds", "step_seconds")
    )
    return round(1 - kernels / steps, 4) if kernels else None


class Race:
    """The contenders of one model and dtype: all alive and stopped between turns, or one at a time (`restart`), which
    then takes all its turns of a round in succession."""

    def __init__(self, model: str, dtype: str, names: Sequence[str], restart: bool) -> None:
        self.model, self.dtype, self.restart = model, dtype, restart
        self.work = CACHE / "scratch" / f"{model}-{dtype}"
        self.work.mkdir(parents=True, exist_ok=True)
        for log in self.work.glob("*.log"):
            log.unlink()
        self.names = list(names)
        self.failures: dict[str, list[str]] = {}
        self.about: dict[str, dict[str, Any]] = {}
        self.outside: float | None = None
        """Share of the steps' time that our server last closed spent outside kernels."""
        self._alive: dict[str, Contender] = {}

    def turn(self, name: str, use: Callable[[Contender, int], Any], attempts: int = 1) -> Any:
        """Return the result of `use(contender, attempt)` on a running contender; None if it failed, which is recorded.
        Of several attempts that other processes disturb, the least disturbed counts; the result, a `Wave` or a tuple
        with one, records their share of the processors."""
        best, least = None, 2.0
        try:
            contender = self._alive.get(name) or self._start(name)
            load = OtherLoad(contender.process.pid)
            for attempt in range(attempts):
                with contender.turn():
                    load.begin()
                    found = use(contender, attempt)
                    share = load.end()
                if share < least:
                    best, least = found, share
                if share <= MOST_OTHERS:
                    break
            for wave in best if isinstance(best, tuple) else (best,):
                if isinstance(wave, Wave):
                    wave.others = round(least, 3)
            return best
        except (ContenderFailed, OSError) as failure:
            print(f"  {name} failed: {str(failure)[:300]}", flush=True)
            self.failures.setdefault(name, []).append(describe_command(str(failure)))
            self._close(name)
            if len(self.failures[name]) > 1 or name not in self.about:
                self.names.remove(name)
            return None

    def _start(self, name: str) -> Contender:
        if self.restart:
            self.close()
        contender = STARTS[name](self.model, self.dtype, self.work)
        self._alive[name] = contender
        for count in (1, 8 if self.restart else 32):  # warm-up: compiles, fills caches
            contender.generate(random_prompts(count, TOKENS, seed=10_000 + count), 16, WAVE_SECONDS)
        self.about.setdefault(
            name,
            {
                "precision": contender.precision,
                **({"instruction_set": contender.instruction_set} if name in OURS else {}),
                "version": installed_version(name),
                "command": describe_command(" ".join(contender.command)),
                "settings": {
                    name: describe_command(value) if isinstance(value, str) else value
                    for name, value in contender.settings.items()
                },
                "ready_seconds": round(contender.ready_seconds, 2),
                "resident_mib": contender.resident_bytes() >> 20,
            },
        )
        print(f"  {name} is ready: {self.about[name]}", flush=True)
        return contender

    def _close(self, name: str) -> None:
        contender = self._alive.pop(name, None)
        if contender is not None:
            if name == "meshwright":
                with contextlib.suppress(OSError), contender.turn():
                    self.outside = read_outside_kernels(contender)
            contender.close()

    def close(self) -> None:
        for name in list(self._alive):
            self._close(name)


def measure_decode(
    race: Race, name: str, stream: ReadStream, bytes_per_token: int, seed: int
) -> tuple[Wave | None, DecodeShare | None]:
    """One request to a contender, between two measurements of the read stream, of which the faster counts; repeated
    while decode seems to read faster than that. Return (wave, None) where the contender does not report each token."""
    attempts: list[float] = []
    while True:
        of_share = seed + 1_000_000 * len(attempts)

        def measure(contender: Contender, attempt: int, seed: int = of_share) -> tuple[float, Wave, float]:
            prompts = random_prompts(1, TOKENS, seed=seed + 100_000 * attempt)
            return stream.measure(), contender.generate(prompts, TOKENS, WAVE_SECONDS), stream.measure()

        found = race.turn(name, measure, MOST_DISTURBED)
        if found is None:
            return None, None
        before, wave, after = found
        decode = wave.figures().get("decode_tokens_per_second")
        if decode is None:
            return wave, None
        share = DecodeShare(max(before, after), decode * bytes_per_token, attempts)
        attempts.append(round(share.decode / share.stream, 3))
        if share.valid or len(attempts) == MOST_ATTEMPTS:
            return wave, share
        print(f"  {name}: decode has {attempts[-1]} of the read stream: invalid, measured again", flush=True)


Shares = dict[str, list[DecodeShare]]
"""Decode of a single request in each round, by contender."""
Waves = dict[int, dict[str, list[Wave]]]
"""Waves by concurrency and contender; those of one index are of one round."""


def order_turns(race: Race, turn: int, concurrency: Sequence[int]) -> list[tuple[int, str]]:
    """Concurrency and contender of each measurement of round number `turn`, which begins with another contender than
    the round before."""
    first = turn % max(1, len(race.names))
    names = race.names[first:] + race.names[:first]
    if race.restart:
        return [(count, name) for name in names for count in concurrency]
    return [(count, name) for count in concurrency for name in names]


def run_rounds(
    race: Race, rounds: int, concurrency: Sequence[int], deadline: float, bytes_per_token: int
) -> tuple[Waves, Shares]:
    """Alternating rounds; a contender that fails in a round has no wave in that and the following ones."""
    stream = ReadStream(bytes_per_token)
    shares: Shares = {name: [] for name in race.names}
    waves: Waves = {count: {name: [] for name in race.names} for count in concurrency}
    for turn in range(rounds):
        for count, name in order_turns(race, turn, concurrency):
            if time.monotonic() > deadline:
                return waves, shares
            if len(waves[count][name]) < turn or name not in race.names:
                continue

            def generate(contender: Contender, attempt: int, count: int = count, seed: int = 100 * turn) -> Wave:
                prompts = random_prompts(count, TOKENS, seed=seed + count + 100_000 * attempt)
                return contender.generate(prompts, TOKENS, WAVE_SECONDS)

            if count == 1:
                wave, share = measure_decode(race, name, stream, bytes_per_token, seed=100 * turn + count)
                shares[name] += [share] if share is not None else []
            else:
                wave = race.turn(name, generate, MOST_DISTURBED)
            if wave is not None:
                waves[count][name].append(wave)
                print(f"  round {turn}, {count} requests, {name}: {wave.figures()}", flush=True)
    return waves, shares
