"""Sizes, times and rates as people write them: `64MiB`, `5us`, `25GB/s`, `100Mbit/s`."""

from __future__ import annotations

import re
from decimal import Decimal

from meshwright.errors import UserError

_DECIMAL = {"": Decimal(1), "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12)}
_BINARY = {"Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40)}
BYTES = {"": Decimal(1), **{f"{prefix}B": factor for prefix, factor in {**_DECIMAL, **_BINARY}.items()}}
SECONDS = {unit: Decimal(f"1e{power}") for unit, power in (("s", 0), ("ms", -3), ("us", -6), ("µs", -6), ("ns", -9))}
BYTES_PER_SECOND = {
    **{f"{prefix}B/s": factor for prefix, factor in {**_DECIMAL, **_BINARY}.items()},
    **{f"{prefix}bit/s": factor / 8 for prefix, factor in _DECIMAL.items()},
}


def parse_bytes(text: str, where: str = "bytes") -> int:
    """`4096`, `64MiB` (2^20 bytes each), `1GB` (10^9). Raises UserError."""
    value = _parse(text, BYTES, where, "a size such as 4096, 64MiB or 1GB")
    if value != int(value):
        raise UserError(f"{where}: {text} is not a whole number of bytes")
    return int(value)


def parse_seconds(text: str, where: str = "latency") -> float:
    """`5us`, `0.1ms`, `0s`. Raises UserError."""
    return _parse(text, SECONDS, where, "a time such as 5us, 0.1ms or 2s")


def parse_rate(text: str, where: str = "bandwidth") -> float:
    """`25GB/s` (bytes), `100Mbit/s` (bits): bytes a second, above 0. Raises UserError."""
    value = _parse(text, BYTES_PER_SECOND, where, "a rate such as 25GB/s or 100Mbit/s")
    if value == 0:
        raise UserError(f"{where}: {text} would never end; a rate is above 0")
    return value


def is_rate(text: str) -> bool:
    """Whether a quantity is meant as a rate, not as a time."""
    return "/" in text


def _parse(text: str, units: dict[str, Decimal], where: str, right: str) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]{1,3})?\s*([^0-9\s.]*)", text.strip())
    unit = found[3] if found else ""
    if units is BYTES:  # without bits, case says nothing
        unit = {name.lower(): name for name in units}.get(unit.lower(), unit)
    if found is None or unit not in units:
        raise UserError(f'{where}: "{text}" is not {right}')
    value = float(Decimal(found[1] + (found[2] or "")) * units[unit])
    if not value < 1e300:
        raise UserError(f"{where}: {text} is too large")
    return value


def show_bytes(value: float) -> str:
    """`64 MiB`: in the largest binary unit of which there is at least one."""
    return _show(value, {"bytes": Decimal(1), **{f"{prefix}B": factor for prefix, factor in _BINARY.items()}})


def show_seconds(value: float) -> str:
    """`1.23 ms`."""
    return _show(value, {unit: SECONDS[unit] for unit in ("ns", "µs", "ms", "s")}) if value else "0 s"


def show_rate(value: float) -> str:
    """`25 GB/s`."""
    return _show(value, {f"{prefix}B/s": factor for prefix, factor in _DECIMAL.items()})


def _show(value: float, units: dict[str, Decimal]) -> str:
    """Three digits, in the largest of ascending units of which there is at least one; whole from a thousand of it up
    to a million."""
    unit, factor = [pair for place, pair in enumerate(units.items()) if place == 0 or value >= pair[1]][-1]
    scaled = value / float(factor)
    return f"{scaled:,.0f} {unit}" if 1000 <= scaled < 1e6 else f"{scaled:.3g} {unit}"


def exact_rate(value: float) -> str:
    """`25GB/s`: parsed back to the same number."""
    return _exact(value, {f"{prefix}B/s": factor for prefix, factor in _DECIMAL.items()})


def exact_seconds(value: float) -> str:
    """`5us`: parsed back to the same number."""
    return _exact(value, {unit: SECONDS[unit] for unit in ("s", "ms", "us", "ns")})


def _exact(value: float, units: dict[str, Decimal]) -> str:
    """In the unit that needs the fewest characters."""
    number = Decimal(repr(value))
    return min((f"{(number / factor).normalize():f}{unit}" for unit, factor in units.items()), key=len)
