"""Reads many spoiled inputs with every parser of tests/fuzz: how many each refused, in what time, and faults found.

python bench/fuzz.py [--inputs 100000] [--again] [PARSER ...]

Each parser is one pytest process. Parsers that the result has with as many inputs and no faults are left out, so that
an interrupted run goes on; --again reads them all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from common import RESULTS, write_result

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))


def fuzz_parser(name: str, inputs: int) -> dict[str, Any]:
    """Inputs read, refused, faults found and processor seconds of one parser."""
    test = f"tests/fuzz/test_parsers.py::test_many_corrupted_inputs_are_read_or_refused[{name}]"
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "--fuzz", "-m", "fuzz", "-q", "-n", "0", test]
        command += ["-o", "junit_family=xunit1", f"--junitxml={report.name}"]
        subprocess.run(command, cwd=REPOSITORY, env={**os.environ, "MESHWRIGHT_FUZZ": f"0:{inputs}"}, check=False)
        properties = ElementTree.parse(report.name).iter("property")
        return next(json.loads(each.attrib["value"]) for each in properties if each.attrib["name"] == "found")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("parsers", nargs="*", help="names from tests.fuzz.parsers.PARSERS (default: all)")
    options = parser.parse_args()
    from tests.fuzz.parsers import PARSERS

    path = RESULTS / "fuzz.json"
    done = json.loads(path.read_text())["parsers"] if path.exists() and not options.again else {}
    for name in options.parsers or PARSERS:
        if done.get(name, {}).get("inputs") != options.inputs or done[name]["faults"]:
            done[name] = fuzz_parser(name, options.inputs)
            write_result("fuzz", {"parsers": done}, quiet=True)
            print(name, json.dumps(done[name]), flush=True)


if __name__ == "__main__":
    main()
