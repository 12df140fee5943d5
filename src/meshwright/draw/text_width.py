"""Estimates of text widths without a font, so that labels neither overlap nor are cut off."""

from __future__ import annotations

import unicodedata

# Character widths as multiples of the font size, for DejaVu Sans, one of the widest sans-serif fonts of browsers.
_NARROW = dict.fromkeys("ijlI.,:;'|![]()t f/\\\" -", 0.36)
_WIDE = dict.fromkeys("mMwW@%—→", 0.9)


def estimate_text_width(text: str, size: float = 12.0, monospace: bool = False) -> float:
    """Estimate the width of `text` in pixels at a font size of `size` pixels, for labels in charts. monospace: True for
    a font whose characters are all equally wide."""
    return size * sum(0.61 if monospace and ord(one) < 128 else _estimate_character_width(one) for one in text)


def _estimate_character_width(one: str) -> float:
    """Estimate the width of the single character `one` in a sans-serif font, in multiples of the font size."""
    if unicodedata.east_asian_width(one) in ("W", "F"):
        return 1.0
    if unicodedata.combining(one):
        return 0.0
    return _NARROW.get(one) or _WIDE.get(one) or (0.7 if one.isupper() else 0.63)
