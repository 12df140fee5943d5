"""Calibration of a machine's cluster file from the predicted and measured figures of finished runs.

calibration_of([read_run("runs/a"), read_run("runs/b")])
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.planner.hardware.calibration import Calibration, read_calibration
from meshwright.planner.hardware.cluster import cluster
from meshwright.planner.hardware.values import read_number
from meshwright.toml import format_toml, format_toml_value, parse_toml
from meshwright.untrusted import read_file, read_json

RESULT, METRICS = "result.json", "metrics.jsonl"
"""Names of files in a run directory."""

LEAST_PEAK = 2**28
"""Bytes: runs with a smaller predicted peak are left out of the unexplained fraction of memory."""


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Predicted and measured step seconds and peak bytes of one finished run.

    Attributes:
        run: Path of the run's directory.
        device: Name of the device that the prediction was for.
        layout: Layout of the run, in layout notation.
        predicted_seconds: Predicted seconds of a step, without calibration.
        measured_seconds: Measured seconds of a step.
        predicted_peak_bytes: Predicted memory peak. None if memory was not predicted, or the peak is below `LEAST_PEAK`
            bytes.
        unexplained_bytes: Measured minus predicted peak (CPU: process RSS; CUDA: allocator). None if
            `predicted_peak_bytes` is None.
    """

    run: str
    device: str
    layout: str
    predicted_seconds: float
    measured_seconds: float
    predicted_peak_bytes: int | None
    unexplained_bytes: int | None

    @property
    def ratio(self) -> float:
        """Measured seconds divided by predicted seconds."""
        return self.measured_seconds / self.predicted_seconds

    def document(self) -> dict[str, Any]:
        """Return the JSON entry that `plan --calibrate --json` prints for this run."""
        return asdict(self) | {"ratio": self.ratio}


def read_run(run: str | Path) -> RunFigures:
    """Return the predicted and measured figures of a finished run. run: its directory, with result.json and
    metrics.jsonl. Raises `UserError` with the reason if figures are missing or damaged."""
    path = Path(run)
    if not path.is_dir():
        raise UserError(f"--calibrate {run}: {'not a directory' if path.exists() else 'there is no such directory'}")
    where, result = f"--calibrate {run}", path / RESULT
    try:
        found = read_json(result)
    except FileNotFoundError:
        if (path / METRICS).exists():
            raise UserError(f"{where}: the run has not ended: it has no {RESULT} yet") from None
        raise UserError(f"{where} is not a run: it has no {RESULT}") from None
    except OSError as error:
        raise UserError(f"{where}: {RESULT} cannot be read: {(error.strerror or str(error)).lower()}") from None
    except ValueError:
        raise UserError(f"{where}: {RESULT} is damaged: not JSON") from None
    if not isinstance(found, Mapping):
        raise UserError(f"{where}: {RESULT} is damaged: not a JSON object")
    predicted, measured = found.get("predicted"), found.get("measured")
    if not isinstance(predicted, Mapping) or not isinstance(measured, Mapping):
        raise UserError(f"{where}: {RESULT} is damaged: predicted or measured is missing")
    if predicted.get("step_seconds") is None:
        raise UserError(
            f"{where}: the run did not predict the time of its steps; run `meshwright probe`, then train again"
        )
    if measured.get("step_seconds") is None:
        raise UserError(f"{where}: no step was timed (the first two do not count); train for more steps")
    seconds = read_number(predicted["step_seconds"], f"{where}: {RESULT}: predicted.step_seconds")
    before = predicted.get("calibration")
    if before is not None:  # so that a factor is not found again on top of itself
        seconds /= read_calibration(before, f"{where}: {RESULT}: predicted").time_factor
    device = predicted.get("device")
    if not isinstance(device, str):
        raise UserError(f"{where}: {RESULT} is damaged: predicted.device is missing")
    peak, unexplained = _memory(predicted, measured)
    return RunFigures(
        str(run), device, str(found.get("layout")), seconds,
        read_number(measured["step_seconds"], f"{where}: {RESULT}: measured.step_seconds"), peak, unexplained,
    )  # fmt: skip


def _memory(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return (predicted peak bytes, measured minus predicted peak bytes) of a run. Return (None, None) if either peak
    is missing, if the predicted peak is below `LEAST_PEAK`, or if the run compiled its blocks on CUDA.

    predicted, measured: objects "predicted" and "measured" of the run's result.json."""
    said, seen = predicted.get("memory_bytes"), measured.get("memory_bytes")
    if isinstance(said, Mapping) and isinstance(seen, Mapping):
        on_cuda, unexplained = seen.get("allocator_peak"), seen.get("unexplained")
        peak = on_cuda or seen.get("process_peak")
        plain = on_cuda and predicted.get("compile")  # of compiled blocks, which the ledger may have priced as plain
        if isinstance(peak, int) and isinstance(unexplained, int) and peak - unexplained >= LEAST_PEAK and not plain:
            return peak - unexplained, unexplained
    return None, None


def calibration_of(runs: Sequence[RunFigures]) -> Calibration:
    """Compute the calibration of a machine's predictions from finished runs.

    Step seconds: median, minimum and maximum of measured / predicted. Memory: sum of (measured - predicted peak bytes)
    / sum of predicted peak bytes, over the runs with a predicted peak.
    """
    ratios = [run.ratio for run in runs]
    known = [run for run in runs if run.predicted_peak_bytes is not None]
    peaks = sum(run.predicted_peak_bytes or 0 for run in known)
    share = sum(run.unexplained_bytes or 0 for run in known) / peaks if known else None
    return Calibration(statistics.median(ratios), min(ratios), max(ratios), len(runs), share, len(known))


def cluster_file_with(path: Path, runs: Sequence[RunFigures]) -> tuple[str, Calibration]:
    """Return (new text of the cluster file at `path`, its new calibration). The calibration is computed from `runs` and
    replaces the one in the file. The file itself is not changed.

    Raises `UserError` if `path` is not a cluster file, or if the runs were predicted for another device."""
    if not path.exists():
        raise UserError(f"--calibrate: there is no cluster file {path}; run `meshwright probe` first")
    machine = cluster(str(path.absolute()))
    for run in runs:
        if run.device != machine.device.name:
            raise UserError(
                f"--calibrate {run.run}: the run was predicted for {run.device}, {path} is for {machine.device.name}"
            )
    found = calibration_of(runs)
    text = read_file(path, "recipe_bytes").decode("utf-8-sig")
    tables = {**parse_toml(text, str(path)), "calibration": found.table()}
    rest = re.sub(r"^\[calibration\][^\n]*\n(?:(?!\[)[^\n]*\n?)*", "", text, flags=re.MULTILINE).rstrip("\n")
    lines = [f"{key} = {format_toml_value(value)}" for key, value in found.table().items()]
    whole = "\n".join([rest, "", "[calibration]", *lines]) + "\n"
    try:
        same = parse_toml(whole, str(path)) == tables
    except UserError:
        same = False
    return (whole if same else format_toml(tables)), found  # a table that stands elsewhere: all written anew
