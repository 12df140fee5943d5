"""Serving on two cores: output tokens per second, time to first token and inter-token latency at concurrency 1, 8 and
32, against vLLM, OpenVINO GenAI, llama.cpp and the continuous batching of transformers.

Every contender gets the same token IDs (128 in, 128 out, greedy, the end token ignored, no prompt seen twice), in turns
within each round; contenders without a turn are stopped, or ended where the memory does not hold all of them: then a
contender takes all its turns of a round in succession. Meshwright, vLLM and llama.cpp get requests over HTTP, the
others and Meshwright's engine alone (`engine`) run in a process of their own. Also measured: decode's share of the
memory's read stream, the cost of HTTP, seconds until ready with a pool of 4 GiB, whether an answer is the same alone
and among others. The read stream is measured before and after each decode of a single request, over as many bytes as
the weights and with as many threads; a share above 1 is an invalid measurement, which is repeated. So is a turn, with
other prompts, during which other processes took more than `MOST_OTHERS` of the processors' time; that share of each
turn is recorded. A contender that fails is recorded with the end of its output, and the race goes on. A race is one
model and dtype; the result keeps races that are not run again, each with its date, if they are of the same machine and
versions, so that they can be run one by one.

    python bench/serving_peers.py                     # installs the peers, once
    python bench/serving.py --minutes 20              # writes bench/results/serving.json
    python bench/serving.py --dtypes bf16 --minutes 8 # the same in two parts
    python bench/serving.py --dtypes fp32 --minutes 8
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import machine, paired_ratio, read_stored, write_result
from serving_client import Wave
from serving_models import CACHE, SHAPES, model_directory, random_prompts, weights_read_per_token
from serving_peers import (
    NICE,
    STARTS,
    THREADS,
    Contender,
    ContenderFailed,
    prioritise_session,
    start_meshwright,
)
from serving_race import OURS, TOKENS, WAVE_SECONDS, Race, ReadStream, describe_command, run_rounds, summarise_shares

CONCURRENCY = (1, 8, 32)
BYTES = {"bf16": 2, "fp32": 4}
MEMORY_GIB = 1.8
"""Resident memory of a contender in addition to twice its weights, on average (`resident_mib` of the results)."""


def summarise(waves: list[Wave]) -> dict[str, Any]:
    """Medians over the rounds, with the figures of each."""
    rounds = [wave.figures() for wave in waves]
    keys = [key for key in rounds[0] if all(key in figures for figures in rounds)]
    return {key: round(statistics.median(figures[key] for figures in rounds), 5) for key in keys} | {"rounds": rounds}


def compare(by_name: dict[str, list[Wave]]) -> dict[str, Any]:
    """Meshwright against the peer with the most tokens per second, and against the one with the lowest time to first
    token (TTFT): the peer's seconds over Meshwright's, so that above 1 Meshwright is faster."""
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


def same_answers(race: Race, deadline: float, prompts: int = 4) -> dict[str, str]:
    """How many of some prompts get the same answer alone and among 31 others, by contender."""
    others = random_prompts(32, TOKENS, seed=77)
    found = {}
    for name in list(race.names):
        if time.monotonic() > deadline:
            break

        def count_equal(contender: Contender, _: int) -> int:
            among = contender.generate(others, 64, WAVE_SECONDS).texts
            alone = [contender.generate([prompt], 64, WAVE_SECONDS).texts[0] for prompt in others[:prompts]]
            return sum(one == other for one, other in zip(alone, among, strict=False))

        equal = race.turn(name, count_equal)
        if equal is not None:
            found[name] = f"{equal} of {prompts}"
    return found


def seconds_until_ready(model: str, dtype: str, pool: int = 4 << 30) -> dict[str, Any]:
    """A second start of the server whose memory is chosen so that the pool has at least `pool` bytes, with the seconds
    of its phases."""
    work = CACHE / "scratch"
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
    restart = len(names) * (2 * read / 2**30 + MEMORY_GIB) > 0.8 * machine()["memory_gib"]
    race = Race(model, dtype, names, restart)
    try:
        waves, shares = run_rounds(race, options.rounds, options.concurrency, deadline, read)
        same = same_answers(race, deadline)
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
        "share_of_steps_outside_kernels": race.outside,
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
        found["ready_warm"] = {"failure": describe_command(str(failure))}
    return found


def store_race(name: str, model: str, dtype: str, found: dict[str, Any]) -> None:
    """Write a race into the result `name`, which keeps those of other models and dtypes."""
    models = read_stored(name).get("models", {})
    models.setdefault(model, {})[dtype] = found
    settings = {"threads": THREADS, "prompt_tokens": TOKENS, "output_tokens": TOKENS}
    write_result(name, {**settings, "models": models}, quiet=True)


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
    stream = round(ReadStream(1 << 30).measure() / 1e9, 2)
    for index, (model, dtype) in enumerate(races):
        model_directory(model)
        start = time.monotonic()
        deadline = begun + 60 * options.minutes * (index + 1) / len(races)
        print(f"{model}, {dtype}", flush=True)
        try:
            found = race_model(model, dtype, options, deadline)
        except Exception:  # continue with the other comparisons
            found = {"failure": traceback.format_exc()}
            print(found["failure"], flush=True)
        minutes = round((time.monotonic() - start) / 60, 1)
        run = {"date": datetime.date.today().isoformat(), "minutes": minutes, "nice": NICE}
        found = {**run, "read_stream_gib_gb_per_second": stream, **found}
        store_race(options.name, model, dtype, found)
        print(json.dumps(found, indent=1), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
    main()
