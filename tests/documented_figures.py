"""Reads figures of the documentation, and the results of benchmarks that they copy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PLAN, ACCURACY, BENCHMARKS = (
    (REPOSITORY / "docs" / f"{name}.md").read_text() for name in ("plan", "plan-accuracy", "benchmarks")
)


def load_result(name: str) -> dict[str, Any]:
    """Return the document `bench/results/NAME.json`."""
    found: dict[str, Any] = json.loads((REPOSITORY / "bench" / "results" / f"{name}.json").read_text())
    return found


def cells(page: str, name: str) -> list[str]:
    """Return the cells of the one table row of a page whose first cell is `name`, without the first."""
    [row] = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


def number_text(value: int) -> str:
    """Return a number from 0 to 12 as a word."""
    words = "zero one two three four five six seven eight nine ten eleven twelve"
    return words.split()[value]
