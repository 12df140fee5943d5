"""Cost of recording a call in the ring buffer: post, wait and done, five frames below the caller.

python bench/call_ring.py [--repeats 30]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from common import write_result
from meshwright.flight_recorder.call_ring import CallWriter, create_memory_file, read_calls

CALLS = 10_000


def microseconds(work: Callable[[], object], repeats: int) -> dict[str, float]:
    """Processor time of a call, over repeats of `CALLS`."""
    times = []
    for _ in range(repeats):
        begun = time.process_time()
        for _ in range(CALLS):
            work()
        times.append((time.process_time() - begun) / CALLS * 1e6)
    return {"median": round(statistics.median(times), 3), "fastest": round(min(times), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args().repeats
    descriptor = create_memory_file(0, 8)
    writer, tensor = CallWriter(descriptor), torch.zeros(3, 4)
    group = writer.register_group(range(8))

    def call(depth: int = 5) -> None:
        if depth:
            call(depth - 1)
            return
        number = writer.post(group, "data.gradients", "all_reduce", "data", 48, tensor.dtype, tensor.shape)
        writer.wait(number)
        writer.done(number)

    def nothing(depth: int = 5) -> None:
        if depth:
            nothing(depth - 1)

    result = {
        "microseconds_a_call": microseconds(call, repeats),
        "of_which_calling_functions": microseconds(nothing, repeats),
    }
    begun = time.process_time()
    calls = read_calls(descriptor)
    assert calls is not None
    write_result(
        "call_ring",
        {**result, "calls_read": len(calls.calls), "seconds_to_read": round(time.process_time() - begun, 4)},
    )


if __name__ == "__main__":
    main()
