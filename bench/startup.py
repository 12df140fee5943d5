"""Response time of the command line: `meshwright --help` and each command's `--help`, fresh processes.

python bench/startup.py [--repeats 15]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from common import write_result


def seconds(command: list[str], repeats: int) -> list[float]:
    """Wall seconds of each of `repeats` runs, after one that warms the file cache."""
    times = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - begun)
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    from meshwright.cli.main import COMMANDS

    python = seconds([sys.executable, "-c", "pass"], repeats)
    results = {}
    for words in ([], *([name] for name in COMMANDS)):
        times = seconds([sys.executable, "-m", "meshwright", *words, "--help"], repeats)
        results[" ".join(["meshwright", *words, "--help"])] = {
            "median_seconds": round(statistics.median(times), 4),
            "slowest_seconds": round(max(times), 4),
        }
    write_result("startup", {"python_alone_seconds": round(statistics.median(python), 4), "commands": results})


if __name__ == "__main__":
    main()
