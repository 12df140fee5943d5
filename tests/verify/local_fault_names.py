"""Local faults that change nothing on one rank, and layouts of two that have each of them."""

from __future__ import annotations

NORM = "gradients are clipped by the norm of one rank"
GATHER = "parameters are not gathered after the update"
SAMPLES = "every rank reads the samples of the first"
RING = "a ring step leaves keys out"

NEEDS_RANKS = {NORM, GATHER, SAMPLES, RING}
BY_LAYOUT = {"dp2 zero1": {NORM, GATHER, SAMPLES}, "cp2": {NORM, RING}}
