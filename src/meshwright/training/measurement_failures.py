"""Records of measurements of this machine that failed, the lines about them for the user, and which of them this start
has logged. Free of torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from meshwright.machine import measurement_file, parse_measurement, write_measurement

BUSY_SHARE = 0.25
"""Share of a machine's CPU time used by other programs above which a measurement that other programs disturbed, or
that failed, is not repeated."""
LOGGED_VARIABLE = "MESHWRIGHT_LOGGED_FAILURES"
"""Environment variable with the files of the failed measurements that this start has logged, joined by ":". Ranks
inherit it from the launcher."""


@dataclass(frozen=True, slots=True)
class FailedMeasurement:
    """Record of a failed measurement. file: name of the file that the measurement would have written. line: text of the
    error. busy: fraction of the machine's CPU time that other programs used right after the failure."""

    file: str
    line: str
    busy: float

    @classmethod
    def read(cls, measurement: Path) -> FailedMeasurement | None:
        """Return the stored record for the measurement whose file is `measurement`; None if there is none."""
        key = {"file": measurement.name}
        return parse_measurement(
            "failed", key, lambda found: cls(key["file"], str(found["line"]), float(found["busy"]))
        )

    @property
    def path(self) -> Path:
        """Path of the record's file."""
        return measurement_file("failed", {"file": self.file})

    def write(self) -> None:
        """Store the record. Raises `OSError` if the directory is not writable."""
        write_measurement("failed", {"file": self.file}, asdict(self))


def describe_failure(failed: FailedMeasurement, when: str = "") -> str:
    """Return a line about a failed measurement: the error, then the condition under which the measurement is repeated,
    such as "after PATH is deleted, the next start measures again". when: put after the error, such as " (at an earlier
    start)".
    """
    if failed.busy > BUSY_SHARE:
        again = f"the next start while other programs use less than {BUSY_SHARE:.0%} of the cores measures again"
    else:
        again = f"after {failed.path} is deleted, the next start measures again"
    return f"{failed.line}{when}; {again}"


def log_failed(failed: FailedMeasurement, log: Callable[[str], None], when: str = "") -> None:
    """Log a line about a failed measurement (the error, and when the measurement is repeated), and note that this start
    has logged it. log: called with the line. when: text put after the error, such as " (at an earlier start)"."""
    log(describe_failure(failed, when))
    known = os.environ.get(LOGGED_VARIABLE, "").split(os.pathsep)
    os.environ[LOGGED_VARIABLE] = os.pathsep.join({*filter(None, known), failed.file})


def was_logged(failed: FailedMeasurement) -> bool:
    """Return True if this start, in this process or in the launcher, has logged the line about the measurement
    `failed`."""
    return failed.file in os.environ.get(LOGGED_VARIABLE, "").split(os.pathsep)
