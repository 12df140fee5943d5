"""A fake machine and fake runs on it, for the tests of calibration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshwright.probe.report import format_cluster_file
from tests.planner.hardware.test_measured import example

MIB = 2**20
DEVICE = "Example CPU"


def cluster_file(place: Path, **more: Any) -> Path:
    """Write the cluster file of a machine of two ranks in the format of `meshwright probe`; return its path."""
    tables = {
        "name": "host: 2 x Example CPU", "devices": 2, "devices_per_node": 2, "inside_gb_per_second": 2.0,
        "inside_latency_seconds": 3e-5,
        "device": {
            "name": DEVICE, "memory_bytes": 8 * 2**30, "memory_gb_per_second": 10.0,
            "peaks": {"fp32": 0.1, "bf16": 0.2},
        },
        "measured": replace(example(), copies=()).tables(), **more,
    }  # fmt: skip
    path = place / "meshwright" / "cluster.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(format_cluster_file(tables, ["Measured by nobody."]))
    return path


def made_up_run(
    place: Path, predicted: float, measured: float | None, *, peak: int = 512 * MIB, unexplained: int = 64 * MIB,
    **more: Any,
) -> Path:  # fmt: skip
    """Create the directory of a finished run; return it. more: further entries of its prediction."""
    place.mkdir(parents=True, exist_ok=True)
    result = {
        "step": 9, "layout": "dp2 fp32",
        "predicted": {
            "step_seconds": predicted, "device": DEVICE, "calibration": None, "compile": False,
            "memory_bytes": {"peak": peak // 3, "process_peak": peak}, **more,
        },
        "measured": {
            "step_seconds": measured,
            "memory_bytes": {
                "peak": peak // 2, "allocator_peak": None, "process_peak": peak + unexplained,
                "unexplained": unexplained,
            },
        },
    }  # fmt: skip
    (place / "result.json").write_text(json.dumps(result))
    return place
