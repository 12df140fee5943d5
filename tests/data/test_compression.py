"""The xz baseline for bits per byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshwright.data import measure_xz_bits_per_byte


def test_xz_baseline_matches_xz_program(tmp_path: Path):
    import lzma

    texts = ["def f():\n    return 1\n" * 20, "größer ", "世界"]
    whole = "".join(texts).encode()
    packed = measure_xz_bits_per_byte(texts) * len(whole) / 8
    assert packed == pytest.approx(len(lzma.compress(whole, preset=9)))
    assert np.isnan(measure_xz_bits_per_byte([]))
