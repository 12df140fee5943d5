"""Step times that the first start of `meshwright train` predicts on a machine that was never measured, against measured
ones: the demo several times, and other models and layouts once each, as the real command runs them.

Every case begins from an empty cache of measurements (the prepared data are kept), so that its prediction is made of
what its own start measured in seconds. The measured step is the median over the run; the error that of the prediction,
which is for an idle machine. `other_load` is the share of the cores that other programs and machines had during the
command: only runs without it tell errors of the prediction. Nothing is fitted to these runs.

    python bench/first_start.py [--only TEXT] [--rounds 5]

Writes bench/results/first_start.json; with --only it writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import busy_core_seconds, write_result

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.toml"
LIMIT = 0.15
SMALL = ["model.hidden=64", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.intermediate=172"]
MIDDLE = ["model.hidden=320", "model.layers=8", "model.heads=5", "model.kv_heads=5", "model.intermediate=864"]
LARGE = ["model.hidden=512", "model.layers=9", "model.heads=8", "model.kv_heads=8", "model.intermediate=1376"]
CASES: dict[str, tuple[int, list[str]]] = {
    "demo": (40, []),
    "demo, fp32": (16, ["layout=dp2 zero1 fp32"]),
    "demo, one rank": (24, ["layout=dp1"]),
    "demo, zero3": (24, ["layout=dp2 zero3"]),
    "demo, tp2": (16, ["layout=tp2"]),
    "demo, pp2": (16, ["layout=pp2 mb4"]),
    "demo, compiled": (24, ["layout=dp2", "train.compile=true"]),
    "small": (60, SMALL),
    "small, fp32, one rank": (60, [*SMALL, "layout=dp1 fp32"]),
    "middle": (12, [*MIDDLE, "layout=dp2"]),
    "large, zero3": (8, [*LARGE, "layout=dp2 zero3", "train.batch=8"]),
    "large, fp32": (6, [*LARGE, "layout=dp2 zero1 fp32", "train.batch=4"]),
}
"""By name: steps, and what differs from the demo's recipe. A layout without a precision takes the faster one of this
machine."""


def own_seconds() -> float:
    """Return the CPU seconds of the commands that this process has run and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def first_start(name: str, cache: Path) -> dict[str, Any]:
    """Run a case from an empty cache of measurements; what its result document says of time."""
    steps, overrides = CASES[name]
    shutil.rmtree(cache / "meshwright" / "machines", ignore_errors=True)
    with tempfile.TemporaryDirectory() as directory:
        command = [
            *(sys.executable, "-m", "meshwright", "train", str(RECIPE), "--json"),
            *(f"train.steps={steps}", "train.warmup=2", "train.validate_every=0", "checkpoint.every=0"),
            *(f"run.directory={directory}/run", *overrides),
        ]
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "XDG_CONFIG_HOME": f"{directory}/config"}
        begun, busy, own = time.monotonic(), busy_core_seconds(), own_seconds()
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        seconds = time.monotonic() - begun
        busy, own = busy_core_seconds() - busy, own_seconds() - own
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    result = json.loads(done.stdout)
    predicted, measured = result["predicted"]["step_seconds"], result["measured"]["step_seconds"]
    if predicted is None:
        raise SystemExit(f"{name}: no prediction\n{done.stderr[-2000:]}")
    probing = re.search(r"^measured in ([\d.]+) s", done.stderr, re.MULTILINE)
    announced = re.search(r"^measuring .*: about (\d+) s", done.stderr, re.MULTILINE)
    return {
        "case": name,
        "layout": result["layout"],
        "parameters": result["parameters"],
        "compile": result["predicted"]["compile"],
        "steps": steps,
        "predicted_seconds": round(predicted, 5),
        "measured_seconds": round(measured, 5),
        "error": round(predicted / measured - 1, 4),
        "predicted_parts": {key: round(value, 5) for key, value in result["predicted"]["seconds_by_part"].items()},
        "measured_parts": {key: round(value, 5) for key, value in result["measured"]["seconds_by_part"].items()},
        "probe_seconds": None if probing is None else float(probing[1]),
        "announced_seconds": None if announced is None else int(announced[1]),
        "command_seconds": round(seconds, 2),
        "other_load": round(max(0.0, busy - own) / seconds / (os.cpu_count() or 1), 3),
    }


def line(found: dict[str, Any]) -> str:
    """One row of the table."""
    return (
        f"{found['case']:<24} {found['parameters'] / 1e6:>6.2f} M  {found['layout']:<18} "
        f"{found['predicted_seconds']:>8.4f} s {found['measured_seconds']:>8.4f} s {found['error']:>+7.1%}  "
        f"probe {found['probe_seconds']} s ({found['announced_seconds']} announced)  "
        f"other load {found['other_load']:.0%}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run only cases whose name contains this text; write no results")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the demo")
    parser.add_argument("--cache", type=Path, help="directory in which prepared data are kept between calls")
    parser.add_argument("--part", type=Path, help="append runs to this file, and skip cases that it has")
    options = parser.parse_args()
    cache = options.cache or Path(tempfile.mkdtemp(prefix="first-start-"))
    wanted = [name for name in CASES for _ in range(options.rounds if name == "demo" else 1) if options.only in name]
    runs: list[dict[str, Any]] = []
    if options.part and options.part.exists():
        runs = json.loads(options.part.read_text())
    for run in runs:
        wanted.remove(run["case"])
    for name in wanted:
        runs.append(first_start(name, cache))
        print(line(runs[-1]), file=sys.stderr, flush=True)
        if options.part:
            options.part.write_text(json.dumps(runs))
    by_case = {name: [run for run in runs if run["case"] == name] for name in CASES}
    errors = {name: statistics.median(run["error"] for run in found) for name, found in by_case.items() if found}
    demo = [abs(run["error"]) for run in by_case["demo"]]
    if not options.only:
        write_result(
            "first_start",
            {
                "recipe": RECIPE.name, "limit": LIMIT, "demo_runs": len(demo),
                "demo_within": sum(error <= LIMIT for error in demo), "demo_worst_error": max(demo),
                "cases": len(errors), "cases_within": sum(abs(error) <= LIMIT for error in errors.values()),
                "worst_error": max(map(abs, errors.values())), "errors": errors,
                "probe_seconds": statistics.median(run["probe_seconds"] for run in runs), "runs": runs,
            },
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
