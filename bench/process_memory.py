"""Process memory of a rank as predicted by `meshwright train` before the first step, against the measured peak.

Runs the real command, `meshwright train`, on the demo (recipes/quickstart.toml, with fewer steps) and on runs that
nothing was chosen by: 0.1 to 30 M parameters, four families, every axis of two ranks, compiled or not. Predicted and
measured are those of each run's own `result.json`; both are the process's highest resident set (VmHWM), framework
included. The machine's constants are measured once, into a cache of the benchmark's own, by the first run that needs
them.

    python bench/process_memory.py [--only NAME ...] [--steps 8] [--keep DIRECTORY]

Writes bench/results/process_memory.json.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import write_result

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.toml"
LIMIT = 0.10


def _sizes(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int) -> str:
    fields = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "intermediate": intermediate}
    return " ".join(f"model.{name}={value}" for name, value in fields.items())


S01 = _sizes(2, 40, 2, 1, 112)
S03 = _sizes(3, 80, 4, 2, 224)
S1 = _sizes(4, 128, 4, 2, 384)
S3 = _sizes(6, 192, 6, 2, 576)
S5 = _sizes(6, 256, 8, 4, 704)
S10 = _sizes(8, 320, 8, 4, 896)
S30 = _sizes(12, 448, 8, 4, 1216)
MOE = "model.family=qwen3_moe model.experts=4 model.experts_per_token=2 model.expert_intermediate=192"

CASES = {
    "demo": "",
    "llama-0.1M": f"layout='dp1 fp32' {S01} data.sequence=64 train.batch=8",
    "llama-0.3M-dp2": f"layout='dp2 fp32' {S03} data.sequence=128 train.batch=16",
    "llama-0.3M-wide-rows": f"layout='dp1 bf16' {S03} data.sequence=512 train.batch=16",
    "gpt2-1M": f"layout='dp1 bf16' model.family=gpt2 {S1} model.kv_heads=4 data.sequence=128 train.batch=16",
    "gpt2-1M-zero1": f"layout='dp2 zero1 fp32' model.family=gpt2 {S1} model.kv_heads=4 data.sequence=256",
    "qwen3-1M-tp2": f"layout='tp2 bf16' model.family=qwen3 {S1} data.sequence=128 train.batch=32",
    "llama-1M-many-rows": f"layout='dp1 fp32' {S1} data.sequence=512 train.batch=16 train.optimizer=sgd",
    "llama-3M-pp2": f"layout='pp2 mb4 fp32' {S3} data.sequence=256 train.batch=8",
    "llama-3M-zero3": f"layout='dp2 zero3 bf16' {S3} data.sequence=256 train.batch=8",
    "llama-3M-cp2": f"layout='cp2 fp32' {S3} data.sequence=512 train.batch=4",
    "llama-3M-foreground-save": f"layout='dp1 fp32' {S3} data.sequence=128 train.batch=8 checkpoint.background=false",
    "llama-5M-mb2": f"layout='dp1 mb2 bf16' {S5} data.sequence=256 train.batch=8",
    "gpt2-5M-recompute": f"layout='dp2 zero1 ac:full bf16' model.family=gpt2 {S5} model.kv_heads=8 train.batch=8",
    "llama-10M-sgd": f"layout='dp1 fp32' {S10} data.sequence=256 train.batch=4 train.optimizer=sgd",
    "llama-10M-tp2": f"layout='tp2 fp32' {S10} data.sequence=256 train.batch=4",
    "gpt2-10M-pp2": f"layout='pp2 mb4 bf16' model.family=gpt2 {S10} model.kv_heads=8 data.sequence=256 train.batch=8",
    "llama-30M": f"layout='dp1 fp32' {S30} data.sequence=128 train.batch=4 train.validation_sequences=8",
    "llama-30M-zero3": f"layout='dp2 zero3 bf16' {S30} data.sequence=256 train.batch=4 train.validation_sequences=8",
    "qwen3-30M-tp2": f"layout='tp2 fp32' model.family=qwen3 {S30} data.sequence=128 train.batch=4"
    " train.validation_sequences=8",
    "llama-30M-pp2": f"layout='pp2 mb4 fp32' {S30} data.sequence=128 train.batch=4 train.validation_sequences=8",
    "moe-1M": f"layout='dp1 fp32' {MOE} {S1} data.sequence=128 train.batch=8",
    "moe-2M-ep2": f"layout='dp2 ep2 bf16' {MOE} {S3} data.sequence=128 train.batch=8",
    "gpt2-0.1M-compiled": f"layout='dp1 fp32' model.family=gpt2 {S01} model.kv_heads=2 data.sequence=64 train.batch=8"
    " train.compile=true",
    "llama-1M-compiled-bf16": f"layout='dp1 bf16' {S1} data.sequence=256 train.batch=8 train.compile=true",
    "qwen3-3M-compiled": f"layout='dp1 fp32' model.family=qwen3 {S3} data.sequence=256 train.batch=8"
    " train.compile=true",
    "llama-5M-zero1-compiled": f"layout='dp2 zero1 fp32' {S5} data.sequence=256 train.batch=8 train.compile=true",
    "llama-10M-tp2-compiled": f"layout='tp2 fp32' {S10} data.sequence=128 train.batch=4 train.compile=true",
    "llama-30M-compiled": f"layout='dp1 bf16' {S30} data.sequence=128 train.batch=4 train.compile=true"
    " train.validation_sequences=8",
    "moe-1M-compiled": f"layout='dp1 fp32' {MOE} {S1} data.sequence=128 train.batch=8 train.compile=true",
}


@cache
def commit() -> str:
    """What the repository holds: its commit, and whether it was changed since."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    return subprocess.run(command, cwd=RECIPE.parent, capture_output=True, text=True, check=True).stdout.strip()


def run(name: str, overrides: str, steps: int, place: Path) -> dict[str, Any]:
    """Train in a process of its own; the result document, the console's lines about predictions, the command's seconds.
    A run of this commit that `place` has already is read."""
    directory, kept = place / name, place / f"{name}.json"
    if kept.exists():
        found: dict[str, Any] = json.loads(kept.read_text())
        if found.get("commit") == commit():
            return found
        shutil.rmtree(directory, ignore_errors=True)
    half = steps // 2
    command = [
        sys.executable, "-m", "meshwright", "train", str(RECIPE), f"run.directory={directory}",
        f"run.name={name}", f"train.steps={steps}",
        "train.warmup=2", f"train.validate_every={half}", f"checkpoint.every={half}", *shlex.split(overrides),
    ]  # fmt: skip
    begun = time.perf_counter()
    environment = {**os.environ, "XDG_CACHE_HOME": str(place / "cache"), "XDG_CONFIG_HOME": str(place / "config")}
    environment.pop("MESHWRIGHT_PROBE", None)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{name}: {' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    result: dict[str, Any] = json.loads((directory / "result.json").read_text())
    lines = [line for line in done.stderr.splitlines() if line.startswith(("predicted: ", "measured: "))]
    found = {"result": result, "lines": lines, "seconds": time.perf_counter() - begun, "commit": commit()}
    kept.write_text(json.dumps(found))
    return found


def row(name: str, overrides: str, ran: dict[str, Any]) -> dict[str, Any]:
    """A run's line of the result: bytes and the relative error of the process's peak."""
    result = ran["result"]
    predicted, measured = result["predicted"], result["measured"]
    said, seen = predicted["memory_bytes"]["process_peak"], measured["memory_bytes"]["process_peak"]
    return {
        "run": name, "parameters": result["parameters"], "layout": result["layout"], "compile": predicted["compile"],
        "predicted_process_peak": said, "measured_process_peak": seen, "error": round(said / seen - 1, 4),
        "predicted_allocator_peak": predicted["memory_bytes"]["allocator_peak"],
        "items": predicted["process_memory_bytes"], "console": ran["lines"], "overrides": overrides,
    }  # fmt: skip


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), metavar="NAME")
    arguments.add_argument("--steps", type=int, default=8)
    arguments.add_argument(
        "--keep", type=Path, help="directory of the runs, in which finished ones are reused (default: a temporary one)"
    )
    said = arguments.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as temporary:
        place = said.keep or Path(temporary)
        for name in said.only:
            rows.append(row(name, CASES[name], run(name, CASES[name], said.steps, place)))
            one = rows[-1]
            print(
                f"{name:<26} {one['predicted_process_peak'] / 2**20:7.0f} MiB predicted "
                f"{one['measured_process_peak'] / 2**20:7.0f} measured {one['error']:+7.1%}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        files = (place / "cache/meshwright/machines").glob("memory-*.json")
        constants = [json.loads(file.read_text()) for file in sorted(files)]
    errors = [abs(one["error"]) for one in rows]
    write_result(
        "process_memory",
        {
            "steps": said.steps, "limit": LIMIT, "within_limit": sum(error <= LIMIT for error in errors),
            "runs_measured": len(rows), "of_runs": len(CASES),
            "worst": max(errors), "median": statistics.median(errors),
            "constants": constants, "runs": rows,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
