"""Character classes of a text, counted from its UTF-8 at the speed of a byte count."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

KINDS = (
    "letters a to z",
    "digits",
    "white space",
    "ASCII signs",
    "control",
    "Latin beyond a to z",
    "Greek, Cyrillic",
    "Hebrew, Arabic",
    "South and Southeast Asian",
    "Chinese, Japanese, Korean",
    "other signs and scripts",
)
_CONTINUATION = len(KINDS)


def _classify_lead_byte(byte: int) -> int:
    """Return the character kind, as an index in `KINDS` ("digits", "Greek, Cyrillic" ...), of the characters whose
    UTF-8 encoding begins with `byte` (0 to 255); len(KINDS) for a continuation byte, with which no character begins.
    """
    if byte < 0x80:
        character = chr(byte)
        if character.isalpha():
            return 0
        if character.isdigit():
            return 1
        if character in "\t\n\f\r ":
            return 2
        return 4 if byte < 0x20 or byte == 0x7F else 3
    if byte < 0xC0:
        return _CONTINUATION
    for first, last, kind in (
        (0xC3, 0xCB, 5),  # U+00C0 to U+02FF
        (0xCD, 0xD4, 6),  # U+0340 to U+053F
        (0xD6, 0xDB, 7),  # U+0580 to U+06FF
        (0xE0, 0xE0, 8),  # U+0800 to U+0FFF
        (0xE3, 0xED, 9),  # U+3000 to U+DFFF
    ):
        if first <= byte <= last:
            return kind
    return 10


_KIND_OF = np.array([_classify_lead_byte(byte) for byte in range(256)])


def count_character_kinds(content: bytes) -> NDArray[np.uint32]:
    """Count the characters of a UTF-8 text by kind ("digits", "Greek, Cyrillic" ...); return uint32 [kinds], in the
    order of `KINDS`. content: the text as bytes.
    """
    bytes_of = np.bincount(np.frombuffer(content, np.uint8), minlength=256)
    return np.bincount(_KIND_OF, weights=bytes_of, minlength=_CONTINUATION + 1)[:_CONTINUATION].astype(np.uint32)
