"""Policy constants of the training engine: sizes of the tiles and slices in which it computes. The engine uses them,
and the planner predicts with them. Those of the chunked loss are in `chunks`, those of gradient buffers in
`parameter_entries`."""

from __future__ import annotations

TILE_QUERIES = 128
"""Queries of a tile of attention on a CPU (`model/tiled_attention.py`)."""

TILE_SCORES = 1 << 20
"""Most scores of a tile on a CPU: 4 MiB in float32, which fits in a core's caches."""

ACCELERATOR_TILE = 1024, 1 << 27
"""Queries and most scores of a tile of attention on an accelerator."""

SLICE_LOGITS = 1 << 19
"""Logits that the loss processes together on a CPU, so that intermediate values stay in the caches
(`model/loss.py`)."""

FUSED_ACCUMULATION_MIN_NUMEL = 1 << 17
"""Elements of a weight from which its gradient is added to the sum by the matrix product (`parallel/step.py`); smaller
ones are added by autograd, whose overhead is lower."""

PREFERENCE_METRICS = 5
DISTILLATION_METRICS = 3
"""Numbers that ranks add up of the responses of a step, in addition to its loss (`training/preference.py`)."""

UNPACKED_AT_ONCE = {"cpu": 1 << 11, "cuda": 1 << 18}
"""Blocks of a packed weight that are unpacked at once, by device: those of a CPU stay in its cache."""
