"""Kernels and host synchronisations of one training step on a GPU.

    python bench/gpu/profile_step.py [--layout bf16] [--eager] [--rows 60]

The Llama of 1 B parameters of `one_gpu.py`: after four steps, one step under `torch.profiler`. Prints the operators and
kernels by device time, the calls that make the host wait for the device, and how long the device was idle in between.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
from one_gpu import LLAMA_1B

from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from synthetic import synthetic_trainer

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpyAsync", "cudaMemcpy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="bf16")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--rows", type=int, default=60)
    options = parser.parse_args()
    mesh = Mesh.single(Layout.parse(options.layout), "cuda")
    trainer = synthetic_trainer(LLAMA_1B, options.layout, compile_blocks=not options.eager, mesh=mesh)
    for _ in range(4):
        trainer.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        begun = time.perf_counter()
        trainer.step()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    table = found.key_averages()
    print(table.table(sort_by="self_device_time_total", row_limit=options.rows, max_name_column_width=90))
    calls = Counter({event.key: event.count for event in table})
    print("calls of the host:", {name: calls[name] for name in WAITS if calls[name]})
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == DeviceType.CUDA
    )
    busy, end = 0.0, 0.0
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    print(f"step {seconds:.4f} s, device busy {busy / 1e6:.4f} s, {len(spans)} kernels and copies")


if __name__ == "__main__":
    main()
