"""Cost of batch invariance, and of everything outside kernels, in steps of the serving engine.

    python bench/batch_invariance.py [DIRECTORY] [--turns 15] [--threads 2] [--context 256]

The default model has the shape of SmolLM-135M and random weights (`bench/serving_models.py`). For
decode steps of 1, 8 and 32 sequences and prefill steps of 128 and 512 tokens, in float32 and bfloat16, in turns:

- `step`: the engine's whole step: schedule, run, sample, record_results;
- `runner`: the kernels' list of operations, one call;
- `ours`: only the matrix products of that list, one call;
- `torch`: the same products by torch.nn.functional.linear (oneDNN), which may choose another order of operations for
  each number of rows; its inputs are in the weights' dtype already.

The cost of invariance is what the runner would save with torch's products: runner / (runner - ours + torch) - 1. The
engine's overhead is the share of a step that is not spent inside the runner. Medians over the turns. Writes
bench/results/batch_invariance.json, or `--name`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import write_result
from meshwright.comm.mesh import Mesh
from meshwright.kernels.choice import load_kernels
from meshwright.kernels.operations import Linear
from meshwright.planner.serving.ledger import ServingSizes
from meshwright.serving.engine import Engine, build_scheduler
from meshwright.serving.native_runner import NativeRunner
from meshwright.serving.request import Request
from meshwright.serving.sampling import Sampling
from meshwright.serving.scheduler import sample_batch
from meshwright.serving.weights import RankWeights
from serving_models import model_directory

CASES = {"decode 1": (1, 1), "decode 8": (8, 1), "decode 32": (32, 1), "prefill 128": (1, 128), "prefill 512": (1, 512)}
"""By name: sequences, and tokens of each in a step."""


def unpack(linear: Linear) -> torch.Tensor:
    """Return the weight [n, k] of an operation, as the kernels read it."""
    packed = linear.weight
    words = packed.words[0].transpose(0, 2, 3, 1)
    rows = np.ascontiguousarray(words).reshape(32 * len(words), -1)
    if packed.bfloat16:
        return torch.from_numpy(rows.view(np.int16)[: packed.n, : packed.k].copy()).view(torch.bfloat16)
    return torch.from_numpy(rows.view(np.float32)[: packed.n, : packed.k].copy())


def multiply_all(inputs: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    """Multiply each input [rows, k] by its weight [n, k]."""
    for x, weight in zip(inputs, weights, strict=True):
        torch.nn.functional.linear(x, weight)


def measure_case(engine: Engine, kernels: Any, case: str, arguments: Any) -> dict[str, Any]:
    """Return medians in milliseconds, and the two shares, of one case."""
    sequences, tokens = CASES[case]
    runner, scheduler = engine.runner, engine.scheduler
    assert isinstance(runner, NativeRunner)
    random = np.random.default_rng(list(CASES).index(case))  # no prompt shares a prefix with one of another case
    vocabulary, sampling = runner.config.vocabulary, Sampling(max_tokens=4 * arguments.turns + 64)
    linears = [each for each in runner._ops._held if isinstance(each, Linear)]
    weights = [unpack(each) for each in linears]
    seconds: dict[str, list[float]] = {name: [] for name in ("step", "runner", "ours", "torch")}
    outside: list[float] = []  # share of each step

    def timed(name: str, function: Callable[[], object]) -> None:
        """Append the seconds of a call, when torch's threads no longer spin."""
        time.sleep(0.02)
        begun = time.perf_counter()
        function()
        seconds[name].append(time.perf_counter() - begun)

    def add(number: int) -> None:
        """Add requests with new prompts."""
        length = tokens if tokens > 1 else arguments.context
        for each in range(sequences):
            prompt = tuple(random.integers(0, vocabulary, length).tolist())
            engine.add(Request(f"{number} {each}", prompt, sampling))

    if tokens == 1:
        add(0)
        while engine.scheduler.stats["waiting"] or engine.report().get("tokens") != sequences:
            engine.step()
    for turn in range(arguments.turns):
        if tokens > 1:
            add(turn)
        inside = -engine.report()["kernel_seconds"]
        timed("step", engine.step)
        inside += engine.report()["kernel_seconds"]
        outside.append(1 - inside / seconds["step"][-1])
        if tokens > 1:
            engine.cancel(f"{turn} 0")
            add(turn + arguments.turns)
        batch = scheduler.schedule()
        assert batch is not None and len(batch.tokens) == sequences * tokens, (case, turn)
        count = {"tokens": len(batch.tokens), "outputs": len(batch.output_rows)}
        products = kernels.create_op_list()
        for each in linears:
            products.append(replace(each, out=np.zeros_like(each.out), accumulate=False))
        inputs = [torch.zeros(count[op.rows], op.weight.k, dtype=weights[0].dtype) for op in linears]
        products.run(batch)
        for _ in range(2):
            timed("runner", partial(runner.run, batch))
            timed("ours", partial(products.run, batch))
            timed("torch", partial(multiply_all, inputs, weights))
        found = runner.run(batch)
        scheduler.record_results(batch, sample_batch(batch, found))
        if tokens > 1:
            engine.cancel(f"{turn + arguments.turns} 0")
    for request in list(scheduler._requests):
        engine.cancel(request)
    middle = {name: statistics.median(each) for name, each in seconds.items()}
    other = middle["runner"] - middle["ours"] + middle["torch"]
    return {
        **{f"{name}_ms": round(1e3 * each, 3) for name, each in middle.items()},
        "cost_of_invariance": round(middle["runner"] / other - 1, 4),
        "outside_kernels": round(statistics.median(outside), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", help="model directory; default: SmolLM-135M's shape")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=256, help="tokens before those of a decode step")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--name", default="batch_invariance", help="name of the file in bench/results")
    arguments = parser.parse_args()
    directory = arguments.directory or model_directory("smollm-135m")
    torch.set_num_threads(arguments.threads)
    torch.set_grad_enabled(False)
    results: dict[str, Any] = {}
    for dtype in arguments.dtypes:
        kernels = load_kernels()
        if kernels is None:
            raise SystemExit("no compiler")
        kernels.set_threads(arguments.threads)
        # 32 tokens of a step are reserved for decoding.
        sizes = ServingSizes(544, 32, 1024, blocks=2048, scored_rows=0)
        mesh = Mesh.single(device="cpu")
        runner = NativeRunner(kernels, RankWeights(directory, mesh), mesh, dtype, sizes)
        engine = Engine(runner, build_scheduler(runner.config, sizes))
        for case in CASES:
            results[f"{dtype} {case}"] = measure_case(engine, kernels, case, arguments)
            print(dtype, case, results[f"{dtype} {case}"], file=sys.stderr, flush=True)
    model = directory.name
    write_result(arguments.name, {"model": model, "threads": arguments.threads, "steps": results}, quiet=True)


if __name__ == "__main__":
    main()
