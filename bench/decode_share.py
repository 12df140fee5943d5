"""Decode of one sequence: the share of the memory's read stream that the kernels reach, and the time of a step outside
them, on a model directory such as SmolLM-135M's shape (`bench/serving_models.py`).

    python bench/decode_share.py DIRECTORY [--seconds 40] [--threads 2] [--context 192] [--dtype bfloat16]

The list of operations of a step is cut into segments of three layers; in each round all are timed, inside the compiled
library, then plain reads of as many bytes as the weights of each. The share is the sum of the least read times over the
sum of the least segment times: other processes on the machine interrupt a whole step often and a segment rarely, so
that the minima of many short rounds stay comparable there. The plain reads are of huge pages, as the weights are: of
small pages torch reads up to 40 % slower. Outside the kernels is the least time of an engine's step, over its rounds,
that is not spent in the compiled library: scheduling, the call, sampling and recording, with the caches as a step over
all weights leaves them.
Writes bench/results/decode_share.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import write_result
from meshwright.comm.mesh import Mesh
from meshwright.kernels.choice import open_kernels
from meshwright.kernels.library import Kernels
from meshwright.kernels.operations import Linear
from meshwright.planner.serving.ledger import ServingSizes
from meshwright.serving.engine import Engine, build_scheduler
from meshwright.serving.native_runner import NativeRunner
from meshwright.serving.request import Request
from meshwright.serving.sampling import Sampling
from meshwright.serving.scheduler import sample_batch
from meshwright.serving.weights import RankWeights

LAYERS = 3  # of a segment


def time_once(function: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def time_library(kernels: Kernels) -> list[float]:
    """Return a list with one number, the seconds spent in the compiled library, to which every later call adds."""
    execute, inside = kernels._library.kernels_run, [0.0]

    def run(*arguments: Any) -> None:
        inside[0] += time_once(lambda: execute(*arguments))

    kernels._library = type("Timed", (), {"kernels_run": staticmethod(run)})()
    return inside


def measure_outside(engine: Engine, inside: list[float], steps: int) -> list[float]:
    """Return the seconds of each of several decode steps that are not spent in the compiled library. inside: from
    `time_library`."""
    found = list[float]()
    for _ in range(steps):
        inside[0] = 0.0
        found.append(time_once(engine.step) - inside[0])
    return found


def measure_segments(
    runner: NativeRunner, batch: Any, kernels: Kernels, inside: list[float], seconds: float
) -> dict[str, Any]:
    """Return the sums of the least times of segments of the step `batch`, and of plain reads of as many bytes."""
    held = runner._ops._held
    per_layer = next(n for n in range(1, len(held)) if (len(held) - 1) // n == runner.config.layers)
    cuts = [0, *range(1 + LAYERS * per_layer, len(held), LAYERS * per_layer), len(held)]
    segments, buffers = [], []
    for begin, end in pairwise(cuts):
        segments.append(kernels.create_op_list())
        for op in held[begin:end]:
            segments[-1].append(op)
        size = sum(op.weight.buffer.nbytes for op in held[begin:end] if isinstance(op, Linear))
        buffers.append(torch.from_numpy(kernels.allocate((max(1, size // 4),), np.float32)).fill_(1))
    runner.run(batch)
    runs, reads = [partial(each.run, batch) for each in segments], [each.sum for each in buffers]
    least = {"kernels": [1e9] * len(segments), "read": [1e9] * len(segments)}
    end, rounds = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        rounds += 1
        time.sleep(0.02)  # torch's threads no longer spin
        for name, functions in (("kernels", runs), ("read", reads)):
            for number, function in enumerate(functions):
                inside[0] = 0.0
                whole = time_once(function)
                least[name][number] = min(least[name][number], inside[0] if name == "kernels" else whole)
    read, ours = sum(least["read"]), sum(least["kernels"])
    size = sum(buffer.nbytes for buffer in buffers)
    return {
        "rounds": rounds,
        "kernels_ms": round(1e3 * ours, 3),
        "read_ms": round(1e3 * read, 3),
        "read_gb_per_second": round(size / read / 1e9, 1),
        "share_of_read_stream": round(read / ours, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kernels, mesh = open_kernels(), Mesh.single(device="cpu")
    kernels.set_threads(arguments.threads)
    sizes = ServingSizes(512, 8, 2048, blocks=256, scored_rows=0)
    runner = NativeRunner(kernels, RankWeights(arguments.directory, mesh), mesh, arguments.dtype, sizes)
    if runner.config.experts or runner.config.latent:
        parser.error(f"{arguments.directory}: a dense model without latent attention is needed")
    engine = Engine(runner, build_scheduler(runner.config, sizes))
    prompt = np.random.default_rng(0).integers(0, runner.config.vocabulary, arguments.context).tolist()
    engine.add(Request("0", tuple(prompt), Sampling(max_tokens=1024)))
    for _ in range(3):
        engine.step()
    batch = engine.scheduler.schedule()
    assert batch is not None
    inside = time_library(kernels)
    figures = measure_segments(runner, batch, kernels, inside, arguments.seconds)
    engine.scheduler.record_results(batch, sample_batch(batch, runner.run(batch)))
    outside = measure_outside(engine, inside, 200)
    figures["outside_ms"] = round(1e3 * min(outside), 3)
    figures["outside_ms_median"] = round(1e3 * statistics.median(outside), 3)
    figures["outside_share"] = round(figures["outside_ms"] / (figures["outside_ms"] + figures["kernels_ms"]), 4)
    about = {"model": arguments.directory.name, "dtype": arguments.dtype, "threads": arguments.threads}
    about |= {"context": arguments.context, "instruction_set": kernels.instruction_set}
    write_result("decode_share", {**about, **figures})


if __name__ == "__main__":
    main()
