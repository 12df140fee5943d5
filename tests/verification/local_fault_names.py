"""Local faults that have no effect on one rank, and layouts of two ranks on which they have one."""

from __future__ import annotations

NORM = "gradient clipping uses the local norm"
GATHER = "parameters not all-gathered after the update"
SAMPLES = "all ranks read rank 0's samples"
RING = "ring attention drops a KV block"

NEEDS_RANKS = {NORM, GATHER, SAMPLES, RING}
BY_LAYOUT = {"dp2 zero1": {NORM, GATHER, SAMPLES}, "cp2": {NORM, RING}}
