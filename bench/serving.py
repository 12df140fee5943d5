"""Serving on two cores: output tokens per second, time to first token and inter-token latency at concurrency 1, 8 and
32, against vLLM, OpenVINO GenAI, llama.cpp and the continuous batching of transformers.

Every contender gets the same token IDs (128 in, 128 out, greedy, the end token ignored, no prompt seen twice), in turns
within each round; contenders without a turn are stopped. Meshwright, vLLM and llama.cpp get requests over HTTP, the
others and Meshwright's engine alone (`engine`) run in a process of their own. Also measured: decode's share of the
memory's read stream, the cost of HTTP, seconds until ready with a pool of 4 GiB, whether an answer is the same alone
and among others. The read stream is measured before and after each decode of a single request, over as many bytes as
the weights and with as many threads; a share above 1 is an invalid measurement, which is repeated. So is a turn, with
other prompts, during which other processes took more than `MOST_OTHERS` of the processors' time; that share of each
turn is recorded. A contender that fails is recorded with the end of its output, and the race goes on.

    python bench/serving_peers.py                     # installs the peers, once
    python bench/serving.py --minutes 20              # writes bench/results/serving.json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parent))
from common import machine, paired_ratio, write_result
from processor_load import OtherLoad
from serving_client import Wave
from serving_models import CACHE, SHAPES, model_directory, random_prompts, weights_read_per_token
from serving_peers import (
    NICE,
    STARTS,
    THREADS,
    Contender,
    ContenderFailed,
    Server,
    installed_version,
    prioritise_session,
    start_meshwright,
)  # fmt: skip

CONCURRENCY = (1, 8, 32)
TOKENS = 128
WAVE_SECONDS = 150
BYTES = {"bf16": 2, "fp32": 4}
OURS = ("meshwright", "engine")
STREAM_SECONDS = 0.3
"""Seconds of a measurement of the read stream, at least; three reads at least."""
MOST_ATTEMPTS = 4
"""Measurements of a decode whose share of the read stream is above 1."""
MOST_OTHERS, MOST_DISTURBED = 0.1, 4
"""Largest share of the processors' time that other processes may take during a turn; attempts at a turn, of which the
least disturbed counts."""


class ReadStream:
    """Reads a buffer of `size` bytes with `THREADS` threads."""

    def __init__(self, size: int) -> None:
        import torch

        torch.set_num_threads(THREADS)
        self._buffer = torch.ones(size // 4)

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
    """Decode of a single request in one round, beside the read stream. stream, decode: bytes per second. attempts:
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


def describe_command(command: Sequence[str]) -> str:
    """The command as a user would type it in the repository: without the paths of this machine."""
    places = {sys.executable: "python", str(Path(__file__).resolve().parent.parent): ".", str(Path.home()): "~"}
    text = " ".join(command)
    for place, name in places.items():
        text = text.replace(place, name)
    return text


class Race:
    """The contenders of one model and dtype, alive and stopped between turns, or started for each turn (`restart`)."""

    def __init__(self, model: str, dtype: str, names: Sequence[str], restart: bool) -> None:
        self.model, self.dtype, self.restart = model, dtype, restart
        self.work = CACHE / "work" / f"{model}-{dtype}"
        self.work.mkdir(parents=True, exist_ok=True)
        for log in self.work.glob("*.log"):
            log.unlink()
        self.names = list(names)
        self.failures: dict[str, list[str]] = {}
        self.about: dict[str, dict[str, Any]] = {}
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
        except ContenderFailed as failure:
            print(f"  {name} failed: {str(failure)[:300]}", flush=True)
            self.failures.setdefault(name, []).append(str(failure))
            self._close(name)
            if len(self.failures[name]) > 1 or name not in self.about:
                self.names.remove(name)
            return None
        finally:
            if self.restart:
                self._close(name)

    def _start(self, name: str) -> Contender:
        contender = STARTS[name](self.model, self.dtype, self.work)
        self._alive[name] = contender
        for count in (1, 32):  # warm-up: compiles, fills caches
            contender.generate(random_prompts(count, TOKENS, seed=10_000 + count), 16, WAVE_SECONDS)
        self.about.setdefault(
            name,
            {
                "precision": contender.precision,
                **({"instruction_set": contender.instruction_set} if name in OURS else {}),
                "version": installed_version(name),
                "command": describe_command(contender.command),
                "ready_seconds": round(contender.ready_seconds, 2),
                "resident_mib": contender.resident_bytes() >> 20,
            },
        )
        print(f"  {name} is ready: {self.about[name]}", flush=True)
        return contender

    def _close(self, name: str) -> None:
        contender = self._alive.pop(name, None)
        if contender is not None:
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


def run_rounds(
    race: Race, rounds: int, concurrency: Sequence[int], deadline: float, bytes_per_token: int
) -> tuple[Waves, Shares]:
    """Alternating rounds; a contender that fails in a round has no wave in that and the following ones."""
    stream = ReadStream(bytes_per_token)
    shares: Shares = {name: [] for name in race.names}
    waves: Waves = {count: {name: [] for name in race.names} for count in concurrency}
    for turn in range(rounds):
        for count in concurrency:

            def generate(contender: Contender, attempt: int, count: int = count, seed: int = 100 * turn) -> Wave:
                prompts = random_prompts(count, TOKENS, seed=seed + count + 100_000 * attempt)
                return contender.generate(prompts, TOKENS, WAVE_SECONDS)

            for name in race.names[turn % len(race.names) :] + race.names[: turn % len(race.names)]:
                if time.monotonic() > deadline:
                    return waves, shares
                if len(waves[count][name]) < turn or name not in race.names:
                    continue
                if count == 1:
                    wave, share = measure_decode(race, name, stream, bytes_per_token, seed=100 * turn + count)
                    shares[name] += [share] if share is not None else []
                else:
                    wave = race.turn(name, generate, MOST_DISTURBED)
                if wave is not None:
                    waves[count][name].append(wave)
                    print(f"  round {turn}, {count} requests, {name}: {wave.figures()}", flush=True)
    return waves, shares


def summarise_shares(shares: Sequence[DecodeShare]) -> dict[str, Any]:
    """Median of the valid rounds, None if there are none, with the figures of each round."""
    valid = [share.attempts[-1] for share in shares if share.valid]
    return {"median": statistics.median(valid) if valid else None, "rounds": [share.figures() for share in shares]}


def summarise(waves: list[Wave]) -> dict[str, Any]:
    """Medians over the rounds, with the figures of each."""
    rounds = [wave.figures() for wave in waves]
    keys = [key for key in rounds[0] if all(key in figures for figures in rounds)]
    return {key: round(statistics.median(figures[key] for figures in rounds), 5) for key in keys} | {"rounds": rounds}


def compare(by_name: dict[str, list[Wave]]) -> dict[str, Any]:
    """Meshwright against the peer with the most tokens per second, and against the one with the lowest TTFT (TTFT)."""
    ours = by_name.get("meshwright")
    peers = {name: waves for name, waves in by_name.items() if name not in OURS and waves}
    if not ours or not peers:
        return {}

    def rank(key: str) -> list[str]:
        return sorted(peers, key=lambda name: statistics.median(wave.figures()[key] for wave in peers[name]))

    found: dict[str, Any] = {}
    for key, best in (("seconds", rank("seconds")[0]), ("ttft", rank("ttft")[0])):
        pairs = list(zip(ours, peers[best], strict=False))
        mine, theirs = ([wave.figures()[key] for wave in side] for side in zip(*pairs, strict=True))
        found["throughput" if key == "seconds" else key] = {"best": best, **paired_ratio(list(mine), list(theirs))}
    return found


def same_answers(race: Race, prompts: int = 4) -> dict[str, str]:
    """How many of some prompts get the same answer alone and among 31 others, by contender."""
    others = random_prompts(32, TOKENS, seed=77)
    found = {}
    for name in list(race.names):

        def count_equal(contender: Contender, _: int) -> int:
            among = contender.generate(others, 64, WAVE_SECONDS).texts
            alone = [contender.generate([prompt], 64, WAVE_SECONDS).texts[0] for prompt in others[:prompts]]
            return sum(one == other for one, other in zip(alone, among, strict=False))

        equal = race.turn(name, count_equal)
        if equal is not None:
            found[name] = f"{equal} of {prompts}"
    return found


def outside_kernels(contender: Contender, _: int = 0) -> float | None:
    """Share of all steps' time that the server spent outside kernels; None if it does not report them."""
    page = (
        urllib.request.urlopen(f"http://127.0.0.1:{cast(Server, contender).port}/metrics", timeout=30).read().decode()
    )
    kernels, steps = (
        sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"meshwright:engine_{name}_total"))
        for name in ("kernel_seconds", "step_seconds")
    )
    return round(1 - kernels / steps, 4) if kernels else None


def seconds_until_ready(model: str, dtype: str, pool: int = 4 << 30) -> dict[str, Any]:
    """A second start of the server whose memory is chosen so that the pool has at least `pool` bytes, with the seconds
    of its phases."""
    work = CACHE / "work"
    weights = weights_read_per_token(model) * BYTES[dtype]
    memory = f"{(pool + 2 * weights + (1 << 30)) / 2**30:.1f}GiB"
    for _ in range(2):
        server = start_meshwright(model, dtype, work, "--memory", memory, "--max-length", "2048")
        found = {"seconds": round(server.ready_seconds, 2), "phases": server.phases(), "memory": memory}
        server.close()
    return found


def race_model(model: str, dtype: str, options: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """All figures of one model and dtype."""
    names = ["meshwright", "engine", *options.peers]
    read = weights_read_per_token(model) * BYTES[dtype]
    restart = 4 * read * len(names) > 0.5 * machine()["memory_gib"] * 2**30
    race = Race(model, dtype, names, restart)
    try:
        waves, shares = run_rounds(race, options.rounds, options.concurrency, deadline, read)
        outside = race.turn("meshwright", outside_kernels) if "meshwright" in race.names else None
        same = same_answers(race) if time.monotonic() < deadline else {}
    finally:
        race.close()
    found: dict[str, Any] = {
        "contenders": race.about,
        "failures": race.failures,
        "concurrency": {
            count: {name: summarise(each) for name, each in by_name.items() if each} for count, by_name in waves.items()
        },
        "against_best": {count: compare(by_name) for count, by_name in waves.items()},
        "same_answer_alone_and_among_31": same,
        "decode_share_of_read_stream": {name: summarise_shares(each) for name, each in shares.items() if each},
        "share_of_steps_outside_kernels": outside,
        "weight_bytes_per_token": read,
    }
    most = waves[max(waves)]
    if most.get("meshwright") and most.get("engine"):
        pairs = list(zip(most["engine"], most["meshwright"], strict=False))
        engine, http = ([wave.seconds for wave in side] for side in zip(*pairs, strict=True))
        found["http_over_engine"] = paired_ratio(engine, http)
    try:
        found["ready_warm"] = seconds_until_ready(model, dtype)
    except ContenderFailed as failure:
        found["ready_warm"] = {"failure": str(failure)}
    return found


def names(text: str, known: Sequence[str]) -> list[str]:
    found = [name for name in text.split(",") if name]
    unknown = set(found) - set(known)
    if unknown:
        raise argparse.ArgumentTypeError(f"{sorted(unknown)}: known are {', '.join(known)}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers = [name for name in STARTS if name not in OURS]
    parser.add_argument("--models", type=lambda text: names(text, list(SHAPES)), default=["smollm-135m"])
    parser.add_argument("--dtypes", type=lambda text: names(text, list(BYTES)), default=list(BYTES))
    parser.add_argument("--peers", type=lambda text: names(text, peers), default=peers)
    parser.add_argument("--concurrency", type=int, nargs="+", default=list(CONCURRENCY))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=20, help="minutes of all rounds, shared by models and dtypes")
    parser.add_argument("--name", default="serving", help="name of the file in bench/results")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # end the contenders
    prioritise_session(os.getpid(), NICE)
    begun, races = time.monotonic(), [(model, dtype) for model in options.models for dtype in options.dtypes]
    result: dict[str, Any] = {
        "threads": THREADS,
        "nice": NICE,
        "prompt_tokens": TOKENS,
        "output_tokens": TOKENS,
        "read_stream_gib_gb_per_second": round(ReadStream(1 << 30).measure() / 1e9, 2),
        "models": {},
    }
    for index, (model, dtype) in enumerate(races):
        model_directory(model)
        deadline = begun + 60 * options.minutes * (index + 1) / len(races)
        print(f"{model}, {dtype}", flush=True)
        try:
            found = race_model(model, dtype, options, deadline)
        except Exception:  # continue with the other comparisons
            found = {"failure": traceback.format_exc()}
            print(found["failure"], flush=True)
        result["models"].setdefault(model, {})[dtype] = found
        result["minutes"] = round((time.monotonic() - begun) / 60, 1)
        write_result(options.name, result, quiet=True)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
    main()
