"""Pictures of the documentation, by file name: `docs/pictures/` holds them as `scripts/write_pages.py` writes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from meshwright.draw.markup import Markup
from meshwright.gallery.charts import draw_ring_all_reduce, draw_schedules, draw_zero_memory
from meshwright.gallery.diagrams import draw_data_flow, draw_layout_axes, draw_tensor_sequence

PICTURES: dict[str, Callable[[], Markup]] = {
    "ring-all-reduce": draw_ring_all_reduce,
    "zero-memory": draw_zero_memory,
    "schedules-gpipe": partial(draw_schedules, "gpipe"),
    "schedules-1f1b": partial(draw_schedules, "1f1b", "interleaved"),
    "schedules-zero-bubble": partial(draw_schedules, "zb-h1", "zb-v"),
    "schedules-dualpipe": partial(draw_schedules, "dualpipe"),
    "tensor-sequence": draw_tensor_sequence,
    "layout-axes": draw_layout_axes,
    "data-flow": draw_data_flow,
}
"""File name without `.svg` -> function that draws the picture as an SVG file."""
