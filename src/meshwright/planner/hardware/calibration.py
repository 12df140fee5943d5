"""Calibration of a machine's predictions by its finished runs: factor on predicted seconds with its spread, and
unexplained fraction of memory. It is stored as a table of the machine's cluster file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshwright.errors import UserError
from meshwright.names import refuse_unknown
from meshwright.planner.hardware.values import read_count, read_finite_number, read_number

FIELDS = ("time_factor", "time_low", "time_high", "runs", "unexplained_share", "unexplained_runs")


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


def read_calibration(table: Any, where: str) -> Calibration:
    """Parse the `calibration` table of a cluster file. where: path of the file, with which the text of an error begins.
    Raises `UserError` for an invalid table."""
    where = f"{where}: calibration"
    readers = {"runs": read_count, "unexplained_runs": read_count, "unexplained_share": read_finite_number}
    try:
        if not isinstance(table, Mapping):
            raise UserError(f"{where} should be a table, not {table!r}")
        refuse_unknown(table, FIELDS, where)
        if missing := [key for key in FIELDS[:4] if key not in table]:
            raise UserError(f"{where}: {missing[0]} is missing")
        values: dict[str, Any] = {
            key: readers.get(key, read_number)(value, f"{where}: {key}") for key, value in table.items()
        }
        found = Calibration(**values)
        if not found.time_low <= found.time_factor <= found.time_high:
            raise UserError(f"{where}: time_factor {found.time_factor:g} is not between time_low and time_high")
    except UserError as error:
        raise UserError(f"{error}; remove the table, or rewrite it with `meshwright plan --calibrate`") from None
    return found
