"""Parsing and formatting of sizes, times and rates: `64MiB`, `5us`, `25GB/s`, `100Mbit/s`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

from meshwright.errors import UserError

GIB = 2.0**30
_DECIMAL = {"": Decimal(1), "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12)}
_BINARY = {"Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40)}
BYTES = {"": Decimal(1), **{f"{prefix}B": factor for prefix, factor in {**_DECIMAL, **_BINARY}.items()}}
SECONDS = {unit: Decimal(f"1e{power}") for unit, power in (("s", 0), ("ms", -3), ("us", -6), ("µs", -6), ("ns", -9))}
BYTES_PER_SECOND = {
    **{f"{prefix}B/s": factor for prefix, factor in {**_DECIMAL, **_BINARY}.items()},
    **{f"{prefix}bit/s": factor / 8 for prefix, factor in _DECIMAL.items()},
}


def parse_bytes(text: str, where: str = "bytes") -> int:
    """Parse a size such as `4096`, `64MiB` (2^20 bytes each) or `1GB` (10^9) and return the bytes, rounded down
    (12.3GiB are no whole number). where: prefix of error messages.

    Raises UserError for invalid text, and for a fraction of single bytes.
    """
    value = _parse_quantity(text, BYTES, where, "a size such as 4096, 64MiB or 1GB")
    if value != int(value) and not re.search("[kmgt]i?b$", text.strip().lower()):
        raise UserError(f"{where}: {text} is not a whole number of bytes")
    return int(value)


def parse_seconds(text: str, where: str = "latency") -> float:
    """Parse a time such as `5us`, `0.1ms` or `0s` and return the seconds. where: prefix of error messages.

    Raises UserError for invalid text.
    """
    return _parse_quantity(text, SECONDS, where, "a time such as 5us, 0.1ms or 2s")


def parse_rate(text: str, where: str = "bandwidth") -> float:
    """Parse a rate above 0 such as `25GB/s` (bytes) or `100Mbit/s` (bits) and return the bytes per second.

    where: prefix of error messages. Raises UserError for invalid text.
    """
    value = _parse_quantity(text, BYTES_PER_SECOND, where, "a rate such as 25GB/s or 100Mbit/s")
    if value == 0:
        raise UserError(f"{where}: {text}: a rate must be above 0")
    return value


def is_rate(text: str) -> bool:
    """Return True if the text of a quantity is written as a rate (`25GB/s`), False for a time (`5us`)."""
    return "/" in text


def _parse_quantity(text: str, units: dict[str, Decimal], where: str, right: str) -> float:
    """Parse a number with a unit, such as `64MiB`; return the number multiplied by the unit's factor.

    units: unit name -> factor, such as {"MiB": 2**20}. where: prefix of error messages. right: description of valid
    text, for error messages. Raises UserError for text that is not a number with one of these units, and for numbers
    from 1e300 on.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]{1,3})?\s*([^0-9\s.]*)", text.strip())
    unit = found[3] if found else ""
    if units is BYTES:  # no bits, so the case of letters does not matter
        unit = {name.lower(): name for name in units}.get(unit.lower(), unit)
    if found is None or unit not in units:
        raise UserError(f'{where}: "{text}" is not {right}')
    value = float(Decimal(found[1] + (found[2] or "")) * units[unit])
    if not value < 1e300:
        raise UserError(f"{where}: {text} is too large")
    return value


@dataclass(frozen=True, slots=True)
class ByteUnit:
    """Unit in which several sizes in bytes are printed together. name: such as "GiB"; bytes: bytes of one unit."""

    name: str
    bytes: float

    @classmethod
    def find(cls, largest: float) -> ByteUnit:
        """Return the largest unit, from KiB to GiB, in which `largest` bytes are at least 1; KiB for less."""
        units = (cls("GiB", GIB), cls("MiB", 2.0**20), cls("KiB", 2.0**10))
        return next((unit for unit in units if largest >= unit.bytes), units[-1])

    def number(self, size: float) -> str:
        """Format a size in bytes in this unit, without the unit's name."""
        return f"{size / self.bytes:,.2f}"


def format_size(size: float) -> str:
    """Format a size in bytes in the unit that `ByteUnit` chooses, with one decimal place, such as `1.5 GiB`."""
    unit = ByteUnit.find(size)
    return f"{size / unit.bytes:,.1f} {unit.name}"


def format_bytes(value: float) -> str:
    """Return `value`, a number of bytes, as text in the largest binary unit that does not exceed the value, such as `64
    MiB`."""
    return _format_scaled(value, {"bytes": Decimal(1), **{f"{prefix}B": factor for prefix, factor in _BINARY.items()}})


def format_seconds(value: float) -> str:
    """Return `value`, a time in seconds, as text in the largest unit that does not exceed the value, such as `1.23
    ms`."""
    return _format_scaled(value, {unit: SECONDS[unit] for unit in ("ns", "µs", "ms", "s")}) if value else "0 s"


def _format_scaled(value: float, units: dict[str, Decimal]) -> str:
    """Return `value` as text in the largest unit that does not exceed the value, with three significant digits. Values
    of 1,000 to a million units become integers such as `1,234`. units: unit name -> factor, ascending, such as {"ms":
    0.001, "s": 1}."""
    unit, factor = [pair for place, pair in enumerate(units.items()) if place == 0 or abs(value) >= pair[1]][-1]
    scaled = value / float(factor)
    return f"{scaled:,.0f} {unit}" if 1000 <= abs(scaled) < 1e6 else f"{scaled:.3g} {unit}"


def format_exact_rate(value: float) -> str:
    """Return `value`, a rate in bytes per second, as text that `parse_rate` parses to exactly the same number, such as
    `25GB/s`."""
    return _format_exact(value, {f"{prefix}B/s": factor for prefix, factor in _DECIMAL.items()})


def format_exact_seconds(value: float) -> str:
    """Return `value`, a time in seconds, as text that `parse_seconds` parses to exactly the same number, such as
    `5us`."""
    return _format_exact(value, {unit: SECONDS[unit] for unit in ("s", "ms", "us", "ns")})


def _format_exact(value: float, units: dict[str, Decimal]) -> str:
    """Return `value` as text without rounding, in the unit that takes the fewest characters. units: unit name ->
    factor, such as {"ms": 0.001}."""
    number = Decimal(repr(value))
    return min((f"{(number / factor).normalize():f}{unit}" for unit, factor in units.items()), key=len)
