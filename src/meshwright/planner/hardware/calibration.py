"""Calibration of a machine's predictions by its finished runs: factor on predicted seconds with its spread, and
unexplained fraction of memory. It is stored as a table of the machine's cluster file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import UserError
from meshwright.limits import is_finite_number, shorten_repr
from meshwright.names import refuse_unknown

FIELDS = ("time_factor", "time_low", "time_high", "runs", "unexplained_share", "unexplained_runs")
_COUNTS = ("runs", "unexplained_runs")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Ratios of measured to predicted time and memory over finished runs on a machine, which correct later predictions.

    Attributes:
        time_factor: Median of measured / predicted step seconds.
        time_low, time_high: Minimum and maximum of measured / predicted step seconds.
        runs: Number of runs compared.
        unexplained_share: Sum of (measured - predicted peak bytes) / sum of predicted peak bytes, over the runs (CPU:
            process RSS; CUDA: allocator); None if unknown.
        unexplained_runs: Number of runs in `unexplained_share`.
    """

    time_factor: float
    time_low: float
    time_high: float
    runs: int
    unexplained_share: float | None = None
    unexplained_runs: int = 0

    def table(self) -> dict[str, float | int]:
        """Return {field: number}, the `calibration` table of a cluster file. Memory fields are omitted if unknown."""
        known = FIELDS if self.unexplained_share is not None else FIELDS[:4]
        return {name: getattr(self, name) for name in known}

    @property
    def line(self) -> str:
        """Description in one line of text, such as `calibrated by 3 runs: times x 1.12 (1.05 to 1.2)`."""
        runs = f"{self.runs} run{'s' if self.runs > 1 else ''}"
        spread = f" ({self.time_low:.3g} to {self.time_high:.3g})" if self.runs > 1 else ""
        return f"calibrated by {runs}: times x {self.time_factor:.3g}{spread}"

    def bounds(self, seconds: float, low: float, high: float) -> tuple[float, float, float]:
        """Return calibrated (expected, low, high) seconds of a step. The bounds include the ratios of all runs and are
        never narrower than without calibration.

        seconds: predicted seconds without calibration; low, high: bounds without calibration, as factors on `seconds`,
        such as 0.8 and 1.3."""
        return (
            seconds * self.time_factor,
            seconds * min(self.time_factor * low, self.time_low),
            seconds * max(self.time_factor * high, self.time_high),
        )


def read(table: Any, where: str) -> Calibration:
    """Parse the `calibration` table of a cluster file. where: path of the file, with which the text of an error begins.
    Raises `UserError` for an invalid table."""
    where = f"{where}: calibration"
    again = "; remove the table, or rewrite it with `meshwright plan --calibrate`"
    if not isinstance(table, Mapping):
        raise UserError(f"{where} should be a table, not {table!r}{again}")
    refuse_unknown(table, FIELDS, where)
    for key in FIELDS[:4]:
        if key not in table:
            raise UserError(f"{where}: {key} is missing{again}")
    for key, value in table.items():
        whole, positive = key in _COUNTS, key != "unexplained_share"
        if not is_finite_number(value) or (whole and not isinstance(value, int)) or (positive and value <= 0):
            kind = f"{'a whole number' if whole else 'a number'}{' above 0' * positive}"
            raise UserError(f"{where}: {key} takes {kind}, not {shorten_repr(value)}{again}")
    low, factor, high = (float(table[f"time_{name}"]) for name in ("low", "factor", "high"))
    if not low <= factor <= high:
        raise UserError(f"{where}: time_factor {factor:g} is not between time_low and time_high{again}")
    values: dict[str, Any] = {key: value if key in _COUNTS else float(value) for key, value in table.items()}
    return Calibration(**values)
