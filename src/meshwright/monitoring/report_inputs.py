"""What the report reads of a run's files, each value checked: a run directory may be a stranger's, or damaged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshwright.errors import UserError
from meshwright.monitoring.metrics import read_metrics
from meshwright.untrusted import read_file, read_json

_Number = Annotated[float, Field(ge=-1e300, le=1e300)]
_NotNegative = Annotated[float, Field(ge=0, le=1e300)]
_Whole = Annotated[int, Field(ge=0, le=2**63)]


class _Checked(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Step(_Checked):
    step: Annotated[int, Field(ge=0, le=2**53)]
    loss: _Number | None
    memory_gib: _NotNegative
    validation_loss: _Number | None = None
    tokens_per_second: _NotNegative | None = None
    samples_per_second: _NotNegative | None = None
    seconds_by_part: dict[str, _NotNegative] = {}


class _Side(_Checked):
    step_seconds: _Number | None = None
    step_seconds_low: _Number | None = None
    step_seconds_high: _Number | None = None
    seconds_by_part: dict[str, _Number | None] | None = None
    seconds_by_kind: dict[str, _Number] | None = None
    memory_bytes: dict[str, _Number | None] | None = None
    sent_bytes_by_axis: dict[str, _Number | None] | None = None


class _Result(_Checked):
    parameters: _Whole | None = None
    layout: str | None = None
    mfu: _Number | None = None
    peak_flops_per_device: _Number | None = None
    flops_convention: str | None = None
    skipped_steps: _Whole | None = None
    predicted: _Side | None = None
    measured: _Side | None = None


class _Evaluation(_Checked):
    loss: _Number
    perplexity: _Number
    bits_per_byte: _Number | None
    tokens: _Whole
    xz_bits_per_byte: _Number | None = None


class _Sample(_Checked):
    prompt: str
    text: str


def read_recipe(path: Path) -> str:
    """The text of a run's recipe, with U+FFFD for what is not UTF-8. `UserError`: it cannot be read."""
    try:
        return read_file(path, "recipe_bytes").decode(errors="replace")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The lines of steps of a metrics file. `UserError`: it cannot be read, holds none, or a value of one is wrong."""
    try:
        lines = [line for line in read_metrics(path) if "loss" in line]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    if not lines:
        raise UserError(f"{path} holds no step yet")
    rate = "tokens_per_second" if "tokens_per_second" in lines[0] else "samples_per_second"
    for number, line in enumerate(lines, 1):
        _check(_Step, line, f"{path}: step {number} of it")
        if line.get(rate) is None:
            raise UserError(f"{path}: step {number} of it: {rate} is missing")
    return lines


def read_result(path: Path) -> dict[str, Any]:
    """The result of a run; empty where it has not ended. `UserError`: it cannot be read or a value of it is wrong."""
    try:
        found = read_json(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged: not JSON: {error}") from None
    return _check(_Result, found, str(path))


def check_evaluation(document: Mapping[str, Any]) -> None:
    """`UserError` where a document is not what `evaluate` returns."""
    _check(_Evaluation, document, "the evaluation")


def check_sample(document: Mapping[str, Any]) -> None:
    """`UserError` where a document is not what `generate --json` prints."""
    _check(_Sample, document, "the sample")


def _check(kind: type[_Checked], value: Any, where: str) -> dict[str, Any]:
    try:
        kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"{where} is damaged: {f'{key}: ' if key else ''}{first['msg'].lower()}") from None
    found: dict[str, Any] = value
    return found
