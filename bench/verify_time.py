"""Wall time of `meshwright verify --layout L`, alone and with `--mutate`, and what became of the planted faults.

python bench/verify_time.py [--mode verify|mutate] [--again] [LAYOUT ...]

Each layout and mode is one run of the real command, interpreter start included, with the seconds for which the
machine's cores were busy meanwhile. Runs that the result has, of the same version of the package and the same machine,
are left out, so that an interrupted benchmark goes on; --again repeats them.
Prints each result when it is known; exit code 1 if a run fails, does not catch a fault or exceeds its time limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from common import busy_core_seconds, read_stored, write_result

LAYOUTS = (
    *("dp2", "dp2 zero3", "tp2", "cp2", "pp2:zb-v mb4", "dp2 ep2"),
    *("dp2 tp2", "dp4 zero3 hs2", "tp2 pp2"),
    *("dp2 tp2 pp2", "dp4 zero1 hs2 tp2 mb2", "dp2 zero3 tp2 pp2:zb-v mb2", "dp8 zero2 ep4:etp2"),
)
MUTATED = ("dp2 tp2", "dp2 ep2", "dp2 tp2 pp2")
"""Layouts whose faults are planted by default: of 4 ranks, a mixture of experts, of 8 ranks."""
LIMITS = {"verify": 15.0, "mutate": 300.0}
"""Documented wall seconds of each mode, on two quiet cores."""


def measure_run(layout: str, mode: str) -> dict[str, Any]:
    """Run the command; return its wall seconds and its numbers of faults by outcome. layout: notation. mode: "verify"
    or "mutate"."""
    command = [sys.executable, "-m", "meshwright", "verify", "--layout", layout, "--json"]
    start, before = time.perf_counter(), busy_core_seconds()
    ran = subprocess.run([*command, *["--mutate"] * (mode == "mutate")], capture_output=True, text=True, check=False)
    run = {
        "layout": layout,
        "mode": mode,
        "seconds": round(time.perf_counter() - start, 1),
        "busy_core_seconds": round(busy_core_seconds() - before, 1),
        "exit_code": ran.returncode,
    }
    if not ran.stdout:
        return run | {"passed": False, "error": ran.stderr.strip().splitlines()[-1:]}
    document = json.loads(ran.stdout)
    run |= {"passed": document["passed"], "worst": document["worst"]["relative_error"]}
    if faults := document["mutations"]:
        run |= {name: faults[name] for name in ("planted", "caught", "neutral", "missed")}
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=list(LIMITS), help="default: both")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help="default: 13 of 2 to 8 ranks; in mode mutate 3")
    options = parser.parse_args()
    done = {(run["layout"], run["mode"]): run for run in read_stored("verify_time").get("runs", [])}
    wanted = [
        (layout, mode)
        for mode in ([options.mode] if options.mode else LIMITS)
        for layout in options.layouts or (MUTATED if mode == "mutate" else LAYOUTS)
    ]
    for layout, mode in wanted:
        if options.again or not done.get((layout, mode), {}).get("passed"):
            done[layout, mode] = measure_run(layout, mode)
            write_result("verify_time", {"limit_seconds": LIMITS, "runs": list(done.values())}, quiet=True)
            print(json.dumps(done[layout, mode]), flush=True)
    late = [key for key in wanted if done[key]["seconds"] > LIMITS[key[1]]]
    failed = [key for key in wanted if not done[key]["passed"]]
    for what, runs in (("over the limit", late), ("failed", failed)):
        print(f"{what}: {', '.join(f'{layout} ({mode})' for layout, mode in runs) or 'none'}")
    raise SystemExit(bool(late or failed))


if __name__ == "__main__":
    main()
