"""Masks over personal data and secrets: e-mail addresses, telephone numbers, keys, IP addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from meshwright.data.cleaning.finders.email_addresses import find_email_addresses
from meshwright.data.cleaning.finders.ip_addresses import find_ip_addresses
from meshwright.data.cleaning.finders.keys import find_secret_keys
from meshwright.data.cleaning.finders.phone_numbers import find_phone_numbers

MASKS: dict[str, Callable[[str], Iterator[tuple[int, int]]]] = {
    "key": find_secret_keys,
    "email": find_email_addresses,
    "phone": find_phone_numbers,
    "ip": find_ip_addresses,
}
"""Kind of personal data -> generator of the (start, end) of each in a text. Of spans that overlap, that of the earlier
kind counts."""

MASKS_VERSION = 2
"""Version of the finders' rules, part of the key of prepared data that have masks: increase it when a rule changes."""


class Span(NamedTuple):
    """Personal data of one kind in a text: the characters `start` to `end`, exclusive."""

    start: int
    end: int
    kind: str


def find_personal_data(text: str, kinds: Sequence[str]) -> list[Span]:
    """Return the spans of personal data in a text, in order, without overlaps. kinds: kinds of data to find, of
    "email", "phone", "key" and "ip"."""
    spans: list[Span] = []
    covered = bytearray(len(text))
    for kind, find in MASKS.items():
        for start, end in find(text) if kind in kinds else ():
            if covered.find(1, start, end) < 0:
                covered[start:end] = b"\1" * (end - start)
                spans.append(Span(start, end, kind))
    return sorted(spans)


def mask_personal_data(text: str, kinds: Sequence[str]) -> tuple[str, dict[str, int]]:
    """Replace personal data in a text by `<email>`, `<phone>`, `<key>` or `<ip>`; returns (masked text, {kind: number
    of replacements}). kinds: kinds of data to replace, of "email", "phone", "key" and "ip"."""
    counts = {kind: 0 for kind in MASKS if kind in kinds}
    parts, end = [], 0
    for span in find_personal_data(text, kinds):
        parts += [text[end : span.start], f"<{span.kind}>"]
        counts[span.kind] += 1
        end = span.end
    return ("".join([*parts, text[end:]]) if parts else text), counts
