"""Measured idle time (bubbles) of pipeline ranks against the simulation of the same program.

    python bench/pipeline_idle.py [--ranks 4 8] [--milliseconds 100] [--repeats 3]
    chrt --fifo 1 python bench/pipeline_idle.py      # on a busy machine: sleeping ranks wake immediately

Steps sleep instead of computing, so that cores do not limit the ranks: on a rank a forward, an input gradient and a
weight gradient of one micro-batch last `--milliseconds` each (a stage of two chunks half of it). Messages are real,
over gloo. Claim: for every synchronous schedule the measured idle share is within 10 % (relative) or 1 percentage point
of the simulated one, of each rank's own first to last step (mean over ranks) and of the whole step (bubble fraction).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from common import write_result
from meshwright.comm.collectives import barrier
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.parallel.pipeline import Pipeline
from meshwright.program.pipeline import PipelineProgram
from meshwright.program.simulate_pipeline import Durations, PipelineTiming, simulate_pipeline
from meshwright.schedules.library import generate
from meshwright.schedules.named import SCHEDULES

MESSAGE = 16 * 1024  # elements


class Naps:
    """Steps that sleep, and when they began and ended (monotonic seconds, one clock for all processes)."""

    def __init__(self, program: PipelineProgram, seconds: float) -> None:
        self.last, self.seconds = program.stages - 1, seconds
        self.spans: list[tuple[float, float]] = []

    def nap(self, parts: int, passes_on: bool) -> torch.Tensor | None:
        begun = time.monotonic()
        out = torch.zeros(MESSAGE) if passes_on else None
        time.sleep(max(0.0, begun + parts * self.seconds - time.monotonic()))
        self.spans.append((begun, time.monotonic()))
        return out

    def forward(self, stage: int, replica: int, micro_batch: int, x: torch.Tensor | None) -> torch.Tensor | None:
        return self.nap(1, stage < self.last)

    def backward(self, stage: int, replica: int, micro_batch: int, d_out: torch.Tensor | None) -> torch.Tensor | None:
        return self.nap(2, stage > 0)

    def input_gradient(
        self, stage: int, replica: int, micro_batch: int, d_out: torch.Tensor | None
    ) -> torch.Tensor | None:
        return self.nap(1, stage > 0)

    def weight_gradient(self, stage: int, replica: int, micro_batch: int) -> None:
        self.nap(1, False)

    def buffer(self, stage: int, replica: int, micro_batch: int) -> torch.Tensor:
        return torch.empty(MESSAGE)


def measure(name: str, ranks: int, micro_batches: int, seconds: float) -> list[tuple[float, float]]:
    """The spans of this rank's steps."""
    mesh = Mesh.create(Layout(pp=ranks))
    program = generate(name, ranks, micro_batches)
    pipeline = Pipeline(program, mesh.pp)
    pipeline.run(Naps(program, 0.0))  # connections and buffers
    barrier(mesh.world, "bench.start")
    naps = Naps(program, seconds / program.chunks)
    pipeline.run(naps)
    mesh.close()
    return naps.spans


def idle_shares(spans: list[list[tuple[float, float]]]) -> dict[str, float]:
    """Share of own first to last step in which a rank does not compute (mean), and of the whole step."""
    busy = np.array([sum(end - start for start, end in rank) for rank in spans])
    first = np.array([rank[0][0] for rank in spans])
    last = np.array([rank[-1][1] for rank in spans])
    makespan = last.max() - first.min()
    return {"own": float(np.mean(1 - busy / (last - first))), "whole": float(1 - busy.mean() / makespan)}


def simulated(timing: PipelineTiming) -> dict[str, float]:
    own = timing.idle / (timing.idle + timing.busy)
    return {"own": float(own.mean()), "whole": timing.bubble_fraction}


def holds(measured: float, expected: float) -> bool:
    return abs(measured - expected) <= max(0.01, 0.1 * expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--micro-batches", type=int, help="default: twice the ranks")
    parser.add_argument("--milliseconds", type=float, default=100.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--schedules", nargs="+", default=[n for n in SCHEDULES if not n.startswith("pipedream")])
    parser.add_argument("--result", default="pipeline_idle")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for ranks in arguments.ranks:
        micro_batches = arguments.micro_batches or 2 * ranks
        with LocalRanks(ranks) as local:
            for name in arguments.schedules:
                try:
                    program = generate(name, ranks, micro_batches)
                except UserError as error:
                    print(error, file=sys.stderr)
                    continue
                seconds = arguments.milliseconds / 1000
                runs = [
                    idle_shares(local.run(measure, name, ranks, micro_batches, seconds))
                    for _ in range(arguments.repeats)
                ]
                expected = simulated(simulate_pipeline(program, Durations.per_rank(program)))
                row: dict[str, Any] = {"schedule": name, "ranks": ranks, "micro_batches": micro_batches}
                for what in ("own", "whole"):
                    measured = statistics.median(run[what] for run in runs)
                    row[f"{what}_measured"] = round(measured, 4)
                    row[f"{what}_simulated"] = round(expected[what], 4)
                    row[f"{what}_holds"] = holds(measured, expected[what])
                rows.append(row)
                print(row, file=sys.stderr, flush=True)
    write_result(
        arguments.result,
        {
            "milliseconds_a_step": arguments.milliseconds,
            "message_bytes": 4 * MESSAGE,
            "repeats": arguments.repeats,
            "real_time": os.sched_getscheduler(0) == os.SCHED_FIFO,
            "all_hold": all(row["own_holds"] and row["whole_holds"] for row in rows),
            "schedules": rows,
        },
    )


if __name__ == "__main__":
    # Ranks import `measure` from a module, not from the running script.
    from pipeline_idle import main as run

    run()
