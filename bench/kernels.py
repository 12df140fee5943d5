"""The matrix product of the serving kernels: share of the memory's read stream with one row, and speed against
torch.nn.functional.linear with 1 to 512 rows.

    python bench/kernels.py [--turns 7] [--threads 2] [--rows 1 8 32 128 512]

Shapes are the layers of SmolLM-135M and TinyLlama-1.1B. Where there are few rows a product runs over as many copies of
its weight as exceed the last-level cache, as a decoding step does. The read stream reads the same bytes with plain
vector loads, as many threads. Everybody takes turns. Times are wall-clock; with one thread they are processor time,
which other work on the machine disturbs less. Writes bench/results/kernels.json.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import paired_ratio, write_result
from meshwright.kernels.build import find_compiler
from meshwright.kernels.choice import load_kernels
from meshwright.kernels.library import Kernels
from meshwright.kernels.operations import Linear
from meshwright.kernels.structures import Step

SHAPES = {  # [n, k]
    "SmolLM-135M": {
        "qkv": (960, 576),
        "output": (576, 576),
        "up": (3072, 576),
        "down": (576, 1536),
        "head": (49152, 576),
    },
    "TinyLlama-1.1B": {"qkv": (2560, 2048), "output": (2048, 2048), "up": (11264, 2048), "down": (2048, 5632)},
}
CACHE_BYTES = 96 << 20  # weights larger than a last-level cache
STREAM = r"""
#include <immintrin.h>
extern "C" long read_stream(const char* from, long bytes) {
    __m256i sums[8] = {};
    for (long at = 0; at < bytes; at += 256)
        for (int i = 0; i < 8; ++i)
            sums[i] = _mm256_xor_si256(sums[i], _mm256_load_si256((const __m256i*)(from + at + 32 * i)));
    for (int i = 1; i < 8; ++i) sums[0] = _mm256_xor_si256(sums[0], sums[i]);
    return _mm256_extract_epi64(sums[0], 0);
}
"""


def compile_read_stream() -> Any:
    """A function of (address, bytes) that reads them."""
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory) / "stream.cpp", Path(directory) / "stream.so"
        source.write_text(STREAM)
        compiler = find_compiler()
        assert compiler
        subprocess.run([compiler, "-O3", "-mavx2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        function = ctypes.CDLL(str(library)).read_stream
    function.argtypes = [ctypes.c_void_p, ctypes.c_long]
    return function


def measure(arguments: Any, contenders: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Seconds of each, in turns, the first turn left out."""
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(arguments.turns + 1):
        for name, function in contenders.items():
            start = clock()
            function()
            if turn:
                seconds[name].append(clock() - start)
    return seconds


def race(kernels: Kernels, shape: tuple[int, int], dtype: str, rows: int, arguments: Any) -> dict[str, Any]:
    """Ours, torch's and, with one row, the read stream, on one shape."""
    n, k = shape
    weight, x = np.random.default_rng(0).standard_normal((n, k), np.float32), np.ones((rows, k), np.float32)
    size = kernels.pack(weight, dtype).buffer.nbytes
    copies = max(1, -(-CACHE_BYTES // size)) if rows <= 8 else 1
    packed = [kernels.pack(weight, dtype) for _ in range(copies)]
    out, ops = np.empty((rows, n), np.float32), kernels.create_op_list()
    for matrix in packed:
        ops.append(Linear(out, x, matrix))
    theirs = torch.from_numpy(weight).to(getattr(torch, dtype))
    weights, inputs = [theirs.clone() for _ in packed], torch.from_numpy(x).to(theirs.dtype)
    step = Step(token_count=rows)
    contenders: dict[str, Callable[[], object]] = {
        "ours": lambda: kernels.execute(ops.array, 0, len(ops), step),
        "torch": lambda: [torch.nn.functional.linear(inputs, w) for w in weights],
    }
    with ThreadPoolExecutor(arguments.threads) as threads:
        if rows == 1:
            read, half = compile_read_stream(), size // arguments.threads // 256 * 256
            whole = [m.buffer.ctypes.data for m in packed]

            def stream(part: int) -> None:
                for address in whole:
                    read(address + part * half, half)

            run = map if arguments.threads == 1 else threads.map
            contenders["stream"] = lambda: list(run(stream, range(arguments.threads)))
        seconds = measure(arguments, contenders)
    best = min(seconds["ours"]) / copies
    result = {
        "microseconds": round(1e6 * statistics.median(seconds["ours"]) / copies, 1),
        "least_microseconds": round(1e6 * best, 1),
        "gflops": round(2e-9 * n * k * rows / best, 1),
        "times_torch": paired_ratio(seconds["ours"], seconds["torch"]),
        "times_torch_best": round(min(seconds["torch"]) / min(seconds["ours"]), 3),
    }
    if rows == 1:
        result["gigabytes_per_second"] = round(size / best / 1e9, 1)
        result["share_of_read_stream"] = paired_ratio(seconds["ours"], seconds["stream"])
        result["share_of_read_stream_best"] = round(min(seconds["stream"]) / min(seconds["ours"]), 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    kernels = load_kernels()
    if kernels is None:
        raise SystemExit("no compiler")
    kernels.set_threads(arguments.threads)
    results: dict[str, Any] = {}
    for model, shapes in SHAPES.items():
        for layer, shape in shapes.items():
            for dtype in ("bfloat16", "float32"):
                for rows in arguments.rows:
                    name = f"{model} {layer} {dtype} {rows}"
                    results[name] = race(kernels, shape, dtype, rows, arguments)
                    print(name, results[name], file=sys.stderr, flush=True)
    write_result(
        "kernels",
        {"instruction_set": kernels.instruction_set, "threads": arguments.threads, "products": results},
        quiet=True,
    )


if __name__ == "__main__":
    main()
