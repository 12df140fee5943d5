"""Processes of a run's ranks, read from its directory."""

from __future__ import annotations

import json
from pathlib import Path


def read_ranks(run: Path) -> dict[int, int]:
    """Return the process ids, by rank, of the last run started in a directory."""
    return {int(rank): process for rank, process in json.loads((run / "ranks.json").read_text()).items()}
