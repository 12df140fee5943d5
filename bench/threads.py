"""Step time by number of OpenMP threads and by their waiting policy, on an idle and on a busy machine.

One process trains a Llama shape (float32, not compiled) with one thread, and with two under each waiting policy of
libgomp: its default (spin for 300,000 rounds, then sleep), passive (sleep at once), and shorter spins. Contenders stay
alive and take turns, so that the machine's noise hits all alike. Busy: meanwhile one process on each core does
nothing but count. `ranks`: the same with two processes (dp2) that share the cores.

    python bench/threads.py [--ranks 2] [--only "1 M" ...] [--seconds 0.5] [--rounds 5]

Writes bench/results/threads.json; cases that are not run keep their figures. Run it where nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import RESULTS, paired_ratio, write_result
from peers import SHAPE

SHAPES: dict[str, dict[str, int]] = {
    "0.04 M": {"layers": 2, "hidden": 40, "heads": 4, "kv_heads": 4, "intermediate": 112, "vocabulary": 64},
    "0.26 M": {"layers": 2, "hidden": 96, "heads": 4, "kv_heads": 4, "intermediate": 272, "vocabulary": 256},
    "1 M": {"layers": 3, "hidden": 160, "heads": 5, "kv_heads": 5, "intermediate": 432, "vocabulary": 512},
    "5 M": {"layers": 4, "hidden": 320, "heads": 5, "kv_heads": 5, "intermediate": 864, "vocabulary": 1024},
    "30 M": {key: value for key, value in SHAPE.items() if key not in ("sequence", "batch")},
}
TOKENS = {"256 tokens": {"sequence": 256, "batch": 1}, "2048 tokens": {"sequence": 256, "batch": 8}}
CASES = {f"{size}, {tokens}": SHAPES[size] | TOKENS[tokens] for size in SHAPES for tokens in TOKENS}
POLICIES: dict[str, dict[str, str]] = {
    "default": {"GOMP_SPINCOUNT": "300000"},  # set explicitly, to override the ranks' policy
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "spin 1000": {"GOMP_SPINCOUNT": "1000"},
    "spin 10000": {"GOMP_SPINCOUNT": "10000"},
}
CONTENDERS = {"1 thread": (1, POLICIES["passive"])} | {f"2 threads, {name}": (2, POLICIES[name]) for name in POLICIES}
WARM = 3
BURNER = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(10**6): pass"


class BenchmarkWorker:
    """Subprocess that runs training steps with a given thread count and waiting policy on request."""

    def __init__(self, threads: int, policy: dict[str, str], ranks: int) -> None:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
        command = [sys.executable, __file__, "--contender", str(threads), "--ranks", str(ranks)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=clean | policy, **pipes)

    def run(self, case: str, seconds: float) -> float:
        """The mean time of a step over about so many seconds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([case, seconds]) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


@contextmanager
def background_load(count: int) -> Iterator[None]:
    """Run `count` busy-loop processes inside the context."""
    burning = [subprocess.Popen([sys.executable, "-c", BURNER, str(os.getpid())]) for _ in range(count)]
    try:
        time.sleep(0.2)
        yield
    finally:
        for process in burning:
            process.kill()
            process.wait()


def busy_cores(seconds: float = 1.0) -> float:
    """Return the number of cores that other programs use while the contenders wait for their turn."""

    def used() -> float:
        user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
        return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")

    before = used()
    time.sleep(seconds)
    return round((used() - before) / seconds, 2)


def measure(workers: dict[str, BenchmarkWorker], case: str, seconds: float, rounds: int) -> dict[str, Any]:
    """Milliseconds a step of every contender, quiet and busy."""
    found: dict[str, Any] = {}
    for worker in workers.values():
        worker.run(case, 0.0)  # build and warm-up
    for load, burners in (("quiet", 0), ("busy", os.cpu_count() or 1)):
        times: dict[str, list[float]] = {name: [] for name in workers}
        busy = [busy_cores()]
        with background_load(burners):
            for turn in range(rounds):
                for name in sorted(workers, reverse=turn % 2 == 1):
                    times[name].append(workers[name].run(case, seconds))
        busy.append(busy_cores())
        found[load] = {
            "cores_busy_before_and_after": busy,
            "milliseconds_a_step": {name: round(statistics.median(some) * 1e3, 2) for name, some in times.items()},
            "speed_ratio_of_one_thread_to": {
                name: paired_ratio(times["1 thread"], some) for name, some in times.items() if name != "1 thread"
            },
        }
        line = ", ".join(f"{name} {value:g}" for name, value in found[load]["milliseconds_a_step"].items())
        print(f"{case}, {load}: {line} ms per step; busy cores {busy}", file=sys.stderr, flush=True)
    return found


def work(case: str) -> dict[str, Any]:
    """What the case is: its parameters and tokens, and the FLOPs of one layer, by which `choose_threads` decides."""
    from meshwright.spec.config_from_recipe import config_from_recipe
    from meshwright.spec.flops import training_flops_per_token
    from meshwright.spec.parameters import parameter_table
    from synthetic import synthetic_recipe

    shape = CASES[case]
    config = config_from_recipe(synthetic_recipe(shape, "dp1", False).model, shape["sequence"], shape["vocabulary"])
    tokens = shape["sequence"] * shape["batch"]
    flops = training_flops_per_token(config, shape["sequence"]) * tokens / config.layers
    return {"parameters": parameter_table(config).numel, "tokens": tokens, "layer_flops": round(flops), "shape": shape}


# --- in a contender


class Steps:
    """The trainers of all cases so far, in this process."""

    def __init__(self) -> None:
        self._trainers: dict[str, Any] = {}

    def run(self, case: str, seconds: float, layout: str = "fp32", mesh: Any = None) -> float:
        """The mean time of a step over about `seconds`; the first call only warms up."""
        from synthetic import synthetic_trainer

        if case not in self._trainers:
            self._trainers[case] = synthetic_trainer(CASES[case], layout, compile_blocks=False, mesh=mesh)
            begun = time.perf_counter()
            for _ in range(WARM):
                self._trainers[case].step()
            self._seconds = (time.perf_counter() - begun) / WARM
        trainer = self._trainers[case]
        count = max(1, math.ceil(seconds / max(self._seconds, 1e-4)))
        begun = time.perf_counter()
        for _ in range(count):
            trainer.step()
        self._seconds = (time.perf_counter() - begun) / count
        return self._seconds


_steps = Steps()


def on_rank(case: str, steps: int) -> float:
    """One of several ranks: the mean time of so many steps."""
    from meshwright.comm.mesh import Mesh
    from meshwright.layout import Layout
    from synthetic import synthetic_trainer

    trainers = _steps._trainers
    if case not in trainers:
        layout = "dp2 fp32"
        trainers[case] = synthetic_trainer(
            CASES[case], layout, compile_blocks=False, mesh=Mesh.create(Layout.parse(layout))
        )
    begun = time.perf_counter()
    for _ in range(steps):
        trainers[case].step()
    return (time.perf_counter() - begun) / steps


def contend(threads: int, ranks: int) -> None:
    """A contender: reads cases, answers with seconds a step."""
    if ranks == 1:
        import torch

        from meshwright.monitoring.memory import keep_freed_memory

        keep_freed_memory()
        torch.set_num_threads(threads)
        for line in sys.stdin:
            print(_steps.run(*json.loads(line)), flush=True)
        return
    from meshwright.comm.local import LocalRanks

    last: dict[str, float] = {}
    with LocalRanks(ranks, threads=threads) as local:
        for line in sys.stdin:
            case, seconds = json.loads(line)
            count = max(2, math.ceil(seconds / last[case])) if case in last else WARM
            last[case] = max(local.run("threads:on_rank", case, count))
            print(last[case], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", metavar="WORDS", help="run only cases whose name begins with this text, such as '1 M'"
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--contender", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender is not None:
        contend(options.contender, options.ranks)
        return
    cases = [case for case in CASES if not options.only or case.startswith(tuple(options.only))]
    path = RESULTS / "threads.json"
    kept = json.loads(path.read_text()).get("cases", {}) if path.exists() else {}
    with ExitStack() as stack:
        workers = {name: BenchmarkWorker(*each, options.ranks) for name, each in CONTENDERS.items()}
        for worker in workers.values():
            stack.callback(worker.close)
        for case in cases:
            found = work(case) | measure(workers, case, options.seconds, options.rounds)
            kept[case if options.ranks == 1 else f"{case}, {options.ranks} ranks"] = {"ranks": options.ranks, **found}
            write_result("threads", {"cases": kept})


if __name__ == "__main__":
    main()
