"""Reads many inputs with every parser of tests/fuzz, corrupted files and, a tenth as many, inputs that hypothesis
generates: how many corrupted ones each refused, in what time, and faults found.

python bench/fuzz.py [--inputs 100000] [--again] [PARSER ...]

Each parser is one pytest process. Parsers that the result has with as many inputs and no faults are left out, so that
an interrupted run goes on; --again reads them all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from common import RESULTS, write_result

REPOSITORY = Path(__file__).resolve().parent.parent
TESTS = "tests/fuzz/test_parsers.py"
PYTEST = [sys.executable, "-m", "pytest", "--fuzz", "-m", "fuzz", "-q", "-n", "0"]


def list_parsers() -> list[str]:
    """Return the names of all parsers, which identify their tests."""
    command = [*PYTEST, "--collect-only", TESTS]
    output = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    return list(dict.fromkeys(re.findall(r"inputs_are_read_or_refused\[(.+)\]$", output, re.MULTILINE)))


def fuzz_parser(name: str, inputs: int) -> dict[str, Any]:
    """Inputs read, refused, faults found and processor seconds of one parser."""
    kinds = ("corrupted", "generated")
    tests = [f"{TESTS}::test_many_{kind}_inputs_are_read_or_refused[{name}]" for kind in kinds]
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [*PYTEST, *tests, "-o", "junit_family=xunit1", f"--junitxml={report.name}"]
        ended = subprocess.run(
            command, cwd=REPOSITORY, env={**os.environ, "MESHWRIGHT_FUZZ": f"0:{inputs}"}, check=False
        )
        if not os.path.getsize(report.name):  # pytest writes it at its end
            return {"inputs": inputs, "faults": {"the process ended": f"exit status {ended.returncode}"}}
        properties = ElementTree.parse(report.name).iter("property")
        found: dict[str, Any] = next(
            json.loads(one.attrib["value"]) for one in properties if one.attrib["name"] == "found"
        )
        if ended.returncode and not found["faults"]:
            found["faults"] = {"generated inputs": "see the output of the test"}
        return {**found, "generated": inputs // 10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("parsers", nargs="*", help="names of parsers in tests/fuzz/parsers.py (default: all)")
    options = parser.parse_args()
    path = RESULTS / "fuzz.json"
    done = json.loads(path.read_text())["parsers"] if path.exists() and not options.again else {}
    for name in options.parsers or list_parsers():
        if done.get(name, {}).get("inputs") != options.inputs or done[name]["faults"]:
            done[name] = fuzz_parser(name, options.inputs)
            write_result("fuzz", {"parsers": done}, quiet=True)
            print(name, json.dumps(done[name]), flush=True)


if __name__ == "__main__":
    main()
