"""Shared by all benchmarks: facts about the machine, paired medians with intervals, alternating contenders, JSON."""

from __future__ import annotations

import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Processor with its family and model, cores, memory and the versions that matter."""
    cpu = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    flags: list[str] = []
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        named = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in reversed(lines))}
        cpu = named.get("model name", cpu)
        if "cpu family" in named:  # a virtual machine may hide the generation: "AMD EPYC"
            cpu += f", family {named['cpu family']} model {named['model']}"
        words = named.get("flags", "").split()
        flags = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in words]
    versions = {}
    for package in ("meshwright", "torch", "transformers", "accelerate", "peft", "bitsandbytes", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "flags": flags,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "versions": versions,
    }


def paired_ratio(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Median of theirs/ours over paired times (above 1: ours is faster), with its 95% bootstrap interval."""
    ratios = [other / mine for mine, other in zip(ours, theirs, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(4000))
    return {
        "median": round(statistics.median(ratios), 4),
        "low": round(medians[100], 4),
        "high": round(medians[3899], 4),
        "pairs": len(ratios),
    }


def race_layers(steps: dict[str, Callable[[], Any]], gradient: Callable[[], Any], turns: int) -> dict[str, Any]:
    """Check that the forward and backward steps of layers agree with the first one, ours, and time them in alternation.

    steps: contender -> function that runs a step and returns the output. gradient: returns the input's gradient after a
    step. Returns medians in seconds, the fastest of the others, and our speed relative to it and to each.
    """
    import torch

    ours, *others = steps
    found = {}
    for name, step in steps.items():
        found[name] = step(), gradient().clone()
        for mine, theirs in zip(found[ours], found[name], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns + 3):
        for name in (*steps,) if turn % 2 else (*reversed(steps),):
            begun = time.perf_counter()
            steps[name]()
            if turn >= 3:  # the first ones are warm-up
                seconds[name].append(time.perf_counter() - begun)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    fastest = min(others, key=medians.__getitem__)
    return {
        "median_seconds": {name: round(value, 5) for name, value in medians.items()},
        "fastest_of_transformers": fastest,
        "ratio": paired_ratio(seconds[ours], seconds[fastest]),
        "ratios": {name: paired_ratio(seconds[ours], seconds[name]) for name in others},
    }


class Contender:
    """A process that stays alive between turns: it reads `{"run": k}` lines and answers with one JSON line each.

    Contenders take turns on the same machine within seconds of each other, so that its noise hits all alike.
    """

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = self._answer()  # a contender reports once after warm-up

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"contender {self.name} ended with {self._process.wait()}")

    def run(self, steps: int) -> dict[str, Any]:
        """Let it run `steps` steps."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"run": steps}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def serve_turns(step: Any, report: Any, warm: int) -> None:
    """The contender's side: warm up, then run steps on request; `report()` adds figures to each answer."""
    import time

    for _ in range(warm):
        step()
    forget_peak()
    print(json.dumps({"ready": True, **report()}), flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(json.loads(line)["run"]):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        print(json.dumps({"seconds": seconds, **report()}), flush=True)


def forget_peak() -> None:
    """Begin the highest resident set anew: compiling took memory that training does not need (Linux, proc(5))."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_resident_bytes() -> int:
    """Highest resident set of this process since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def busy_core_seconds() -> float:
    """Return the seconds so far for which this machine's cores were busy, whatever the program, or taken by other
    virtual machines."""
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def read_stored(name: str) -> dict[str, Any]:
    """Return the document `bench/results/NAME.json`, of which a later run keeps parts; empty if there is none of this
    machine and these versions."""
    path = RESULTS / f"{name}.json"
    stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return stored if stored.get("machine") == machine() else {}


def write_result(name: str, result: dict[str, Any], quiet: bool = False) -> None:
    """Write `bench/results/NAME.json` and print it, unless `quiet`."""
    RESULTS.mkdir(exist_ok=True)
    document = {"benchmark": name, "date": datetime.date.today().isoformat(), "machine": machine(), **result}
    (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    if not quiet:
        print(json.dumps(document, indent=1))
