"""Predicted against measured peak memory and step time on one GPU.

    python bench/gpu/plan_on_gpu.py [--device cuda] [--small]

The GPU is probed first (one rank). Then a Llama of 0.4 B parameters trains under each way to recompute, with
micro-batches, in bf16 and float32, eager and compiled; the ledger's peak is compared with `max_memory_allocated` (limit
3%, compiled 5%), the predicted time, from the probe and from the catalogue, against the median step. `--small`
shrinks the model so that the script itself can be tried on a CPU, where no memory is measured. Writes
`bench/results/gpu_plan.json`; exit code 1 when a peak is beyond its limit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
from cases import Cases, step_seconds

from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.planner.api import plan
from meshwright.planner.hardware.cluster import Cluster, cluster
from meshwright.planner.hardware.devices import find_device
from meshwright.probe.ranks import probe
from meshwright.probe.report import format_cluster_file, make_cluster_tables
from synthetic import synthetic_trainer

SHAPE = {
    "vocabulary": 32000, "hidden": 1024, "layers": 24, "heads": 16, "kv_heads": 8, "intermediate": 2816,
    "sequence": 2048, "batch": 8,
}  # fmt: skip
SMALL = {**SHAPE, "vocabulary": 512, "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 128}
SMALL |= {"sequence": 128, "batch": 4}
CASES = [
    ("bf16", False), ("ac:selective bf16", False), ("ac:full bf16", False), ("mb4 bf16", False), ("mb4 fp32", False),
    ("bf16", True), ("ac:selective bf16", True),
]  # fmt: skip
LIMITS = {False: 0.03, True: 0.05}
"""Largest accepted relative error of the peak; keys: True for compiled blocks."""
WARM, STEPS = 4, 12


def probed(device: str) -> Cluster:
    """This device, measured now by one rank."""
    found = probe(1, "cuda" if device.startswith("cuda") else "cpu", log=lambda line: print(line, file=sys.stderr))
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "cluster.toml"
        path.write_text(format_cluster_file(make_cluster_tables(found, found["kind"]), ["Written by plan_on_gpu.py."]))
        return cluster(str(path))


def run(layout: str, compiled: bool, shape: dict[str, int], device: str, where: dict[str, Cluster]) -> dict[str, Any]:
    """Predicted and measured, of one layout."""
    cuda = device.startswith("cuda")
    trainer: Any = synthetic_trainer(
        shape, layout, compile_blocks=compiled, mesh=Mesh.single(Layout.parse(layout), device)
    )
    took = step_seconds(trainer.step, WARM, STEPS, cuda)
    peak = torch.cuda.max_memory_allocated() if cuda else None
    line: dict[str, Any] = {"layout": layout, "compiled": compiled, "seconds": round(took, 5), "peak_bytes": peak}
    for name, each in where.items():
        estimate = plan(
            trainer.task.config, each, layout, sequence=shape["sequence"], batch=shape["batch"], compile=compiled
        ).best
        line[f"seconds_by_{name}"] = round(estimate.time.seconds, 5)
        line[f"time_error_by_{name}"] = round(estimate.time.seconds / took - 1, 4)
        line["predicted_peak_bytes"] = estimate.memory.peak_bytes
    if peak is not None:
        line["peak_error"] = round(line["predicted_peak_bytes"] / peak - 1, 4)
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    where = {"probe": probed(options.device)}
    if options.device.startswith("cuda") and (known := find_device(torch.cuda.get_device_name())) is not None:
        where["catalogue"] = cluster(f"1x{known.name}")
    cuda = options.device.startswith("cuda")
    header = {"device": options.device, "limits": {"eager": LIMITS[False], "compiled": LIMITS[True]}}
    cases = Cases("gpu_plan" if cuda and not options.small else None, header)
    for layout, compiled in CASES:
        cases.run(
            "runs",
            f"{layout}{' compiled' * compiled}",
            partial(run, layout, compiled, SMALL if options.small else SHAPE, options.device, where),
            lambda line: abs(line.get("peak_error", 0.0)) <= LIMITS[line["compiled"]],
        )
    return cases.end()


if __name__ == "__main__":
    raise SystemExit(main())
