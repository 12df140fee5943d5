"""Comparison of pipeline schedules and of all-reduce algorithms by simulation.

python examples/programs.py
"""

import meshwright as mw

print("8 ranks, 32 micro-batches, F = I = W = 1")
for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe"):
    timing = mw.schedule(name, stages=8, micro_batches=32).timing
    print(f"{name:12} bubble {timing.bubble_fraction:6.1%}  peak activations {max(timing.peak_activations):g}")

print("\nall-reduce on 16 GPUs in 2 nodes, milliseconds")
for size in ("64KiB", "1MiB", "64MiB"):
    report = mw.collective("all-reduce", "auto", ranks=16, bytes=size, topology="nodes:2x8,rails", crossovers=False)
    ring = mw.collective("all-reduce", "ring", ranks=16, bytes=size, topology="nodes:2x8,rails", crossovers=False)
    best = report.choice.best
    print(f"{size:6} {best.algorithm:20} {best.seconds * 1e3:7.3f}   ring {ring.timing.seconds * 1e3:7.3f}")
