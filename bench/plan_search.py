"""Speed of the planner on one core: layouts priced per second, whole searches, single layouts of many micro-batches,
a whole command.

python bench/plan_search.py [--turns 5]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import write_result
from meshwright.layout import Layout
from meshwright.planner.hardware.cluster import cluster
from meshwright.planner.problem import Problem
from meshwright.planner.search.estimate import estimate_layout
from meshwright.planner.search.screen import screen
from meshwright.planner.search.search import search
from meshwright.spec.presets import preset

PROBLEMS = {
    "llama-3.1-405b on 16384xh100-sxm": Problem(preset("llama-3.1-405b"), cluster("16384xh100-sxm"), 8192, 2048),
    "llama-3-8b on 64xh100-sxm": Problem(preset("llama-3-8b"), cluster("64xh100-sxm"), 8192, 512),
    "mixtral-8x7b-v0.1 on 128xa100-80": Problem(preset("mixtral-8x7b-v0.1"), cluster("128xa100-80"), 4096, 1024),
}
LONG = Problem(preset("llama-3-70b"), cluster("256xh100-sxm"), 4096, 4096)
LONG_LAYOUTS = [f"dp2 tp8 pp16{schedule} mb2048 bf16" for schedule in ("", ":interleaved:2", ":zb-h1", ":zb-v")]
COMMAND = ["plan", "llama-3-8b", "--cluster", "64xh100-sxm", "--sequence", "8192", "--batch", "512", "--layout"]


def seconds(call: Callable[[], Any], turns: int) -> tuple[float, Any]:
    """The median of several turns, none of which finds what an earlier one has kept; and what the last returned."""
    times, found = [], None
    for _ in range(turns):
        forget()
        begun = time.perf_counter()
        found = call()
        times.append(time.perf_counter() - begun)
    return statistics.median(times), found


def forget() -> None:
    """Empty every cache of the planner and of what it asks."""
    packages = tuple(f"meshwright.{package}." for package in ("planner", "program", "schedules", "spec"))
    for name, module in list(sys.modules.items()):
        if name.startswith(packages):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    searches = {}
    for name, problem in PROBLEMS.items():
        screening, every = seconds(lambda problem=problem: screen(problem), turns)
        whole, found = seconds(lambda problem=problem: search(problem), turns)
        searches[name] = {
            "layouts": len(every.candidate),
            "priced_per_second": round(len(every.candidate) / screening),
            "search_seconds": round(whole, 3),
            "best": str(found.best[0].layout),
            "largest_difference_of_closed_forms": round(max(map(abs, found.differences[:20])), 4),
        }
        print(name, searches[name], file=sys.stderr)
    long = {}
    for text in LONG_LAYOUTS:
        layout = Layout.parse(text)
        alone, _ = seconds(lambda layout=layout: estimate_layout(LONG, layout), turns)
        long[text] = round(alone, 3)
    print(long, file=sys.stderr)
    command = [sys.executable, "-m", "meshwright", *COMMAND, "dp8 zero1 tp8", "--json"]
    one, _ = seconds(lambda: subprocess.run(command, check=True, capture_output=True), turns)
    figures = {"searches": searches, "long_layouts_seconds": long, "command_with_a_layout_seconds": round(one, 3)}
    write_result("plan_search", figures)


if __name__ == "__main__":
    main()
