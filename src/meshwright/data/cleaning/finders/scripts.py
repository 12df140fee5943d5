r"""Character classes of regular expressions, by script: `\w` joins "是" and "8" into one word where Chinese has none.

Each is the inside of a character class. Combining marks are included, which `\w` leaves out.
"""

from __future__ import annotations

LATIN = "A-Za-z0-9\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0300-\u036f\u1e00-\u1eff"
"""Letters of Latin script, and ASCII digits."""

SPACED = (
    "\u0370-\u037d\u037f-\u0386\u0388-\u0588\u0591-\u05bd\u05bf-\u05f2\u0610-\u061a\u0620-\u06d3\u06d5-\u0963"
    "\u0966-\u0dff\u0f00-\u0fff\u10a0-\u135f\u13a0-\u16ff\u1f00-\u1fff"
)
"""Letters of other scripts that separate words by spaces: Greek, Cyrillic, Hebrew, Arabic, those of India ..."""

UNSPACED = (
    "\u0e00-\u0e7f\u1000-\u109f\u1780-\u17d3\u3005-\u3007\u3040-\u30fa\u30fc-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7a3\uf900-\ufaff"
)
"""Letters of scripts in which a word of another script follows without a space: Chinese, Japanese, Korean, Thai ..."""
