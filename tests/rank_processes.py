"""The processes of a run's ranks, as its directory names them."""

from __future__ import annotations

import json
from pathlib import Path


def read_ranks(run: Path) -> dict[int, int]:
    """Process ids by rank of the last run started in a directory."""
    return {int(rank): process for rank, process in json.loads((run / "ranks.json").read_text()).items()}
