"""Validation of the report's inputs: the files of a run directory may be untrusted or damaged."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshwright.errors import UserError, error_reason
from meshwright.monitoring.metrics import read_metrics
from meshwright.untrusted import read_file, read_json

_Number = Annotated[float, Field(ge=-1e300, le=1e300)]
_NotNegative = Annotated[float, Field(ge=0, le=1e300)]
_Whole = Annotated[int, Field(ge=0, le=2**63)]


class _Document(BaseModel):
    """Base class of the pydantic schemas of JSON documents: strict types, unknown keys allowed."""

    model_config = ConfigDict(extra="allow", strict=True)


class _StepLine(_Document):
    """Schema (pydantic) of a line of metrics.jsonl about a step, with the keys that the report reads. memory_gib: peak
    memory so far in GiB. seconds_by_part: {phase: seconds}. A field is None if the line does not have the key, or has
    null for a number that is not finite."""

    step: Annotated[int, Field(ge=0, le=2**53)]
    loss: _Number | None
    memory_gib: _NotNegative
    gradient_norm: _Number | None = None
    learning_rate: _Number | None = None
    validation_loss: _Number | None = None
    tokens_per_second: _NotNegative | None = None
    samples_per_second: _NotNegative | None = None
    seconds_by_part: dict[str, _NotNegative] = {}


class _FullestRank(_Document):
    """Schema (pydantic) of the entry `fullest_rank` of a result document: the number of the rank with the largest peak
    memory, and {category: bytes} of this rank (None if unknown)."""

    rank: _Whole
    memory_bytes: dict[str, _Number | None] | None = None


class _Figures(_Document):
    """Schema (pydantic) of the entries `predicted` and `measured` of a result document, with the keys that the report
    reads.

    Attributes:
        step_seconds_low, step_seconds_high: Lower and upper bound of the predicted seconds of a step.
        seconds_by_part: {phase: seconds}.
        seconds_by_kind: {"working", "waiting": seconds of a step}.
        memory_bytes: {category: bytes}.
        fullest_rank: Rank with the largest peak memory.
        sent_bytes_by_axis: {mesh axis: bytes sent in a step}.
    """

    step_seconds: _Number | None = None
    step_seconds_low: _Number | None = None
    step_seconds_high: _Number | None = None
    seconds_by_part: dict[str, _Number | None] | None = None
    seconds_by_kind: dict[str, _Number] | None = None
    memory_bytes: dict[str, _Number | None] | None = None
    fullest_rank: _FullestRank | None = None
    sent_bytes_by_axis: dict[str, _Number | None] | None = None


class _Result(_Document):
    """Schema (pydantic) of the result document of a run, with the keys that the report reads; None for missing keys.
    parameters: parameter count. mfu: model FLOP utilisation, 0 to 1. predicted, measured: figures of a step."""

    parameters: _Whole | None = None
    layout: str | None = None
    mfu: _Number | None = None
    peak_flops_per_device: _Number | None = None
    flops_convention: str | None = None
    skipped_steps: _Whole | None = None
    predicted: _Figures | None = None
    measured: _Figures | None = None


class _Evaluation(_Document):
    """Schema (pydantic) of the document returned by `evaluate`: loss in nats per token, its exponential (perplexity),
    bits per byte of text (None if unknown; `xz`: of the compressor xz), number of tokens."""

    loss: _Number
    perplexity: _Number
    bits_per_byte: _Number | None
    tokens: _Whole
    xz_bits_per_byte: _Number | None = None


class _Sample(_Document):
    """Schema (pydantic) of the document printed by `generate --json`: prompt, generated text, and checkpoint directory
    (None if not given)."""

    prompt: str
    text: str
    checkpoint: str | None = None


def read_recipe(path: Path) -> str:
    """Read the TOML text of a run's recipe, with U+FFFD for bytes that are not UTF-8. `UserError` if the file cannot be
    read."""
    try:
        return read_file(path, "recipe_bytes").decode(errors="replace")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error_reason(error)}") from None


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics file that describe steps, as dicts. `UserError` if the file cannot be read, has no
    step, or has an invalid value."""
    try:
        lines = [line for line in read_metrics(path) if "loss" in line]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error_reason(error)}") from None
    if not lines:
        raise UserError(f"{path} has no step yet")
    rate = "tokens_per_second" if "tokens_per_second" in lines[0] else "samples_per_second"
    for number, line in enumerate(lines, 1):
        _validate(_StepLine, line, f"{path}: line of step {number}")
        if line.get(rate) is None:
            raise UserError(f"{path}: line of step {number}: {rate} is missing")
    return lines


def read_result(path: Path) -> dict[str, Any]:
    """Read the result document of a run as a dict; empty if the run has not ended. `UserError` if the file cannot be
    read or has an invalid value."""
    try:
        found = read_json(path)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error_reason(error)}") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged: not JSON: {error}") from None
    return _validate(_Result, found, str(path))


def check_evaluation(document: Mapping[str, Any]) -> None:
    """Raise `UserError` if `document` is not a valid result of `evaluate` (loss, perplexity ...)."""
    _validate(_Evaluation, document, "the evaluation")


def check_sample(document: Mapping[str, Any]) -> None:
    """Raise `UserError` if `document` is not a valid sample (prompt and generated text) as `generate --json` prints
    it."""
    _validate(_Sample, document, "the sample")


def _validate(kind: type[_Document], value: Any, where: str) -> dict[str, Any]:
    """Validate the parsed JSON `value` against the pydantic schema `kind`; return the value unchanged. where: name of
    the file or document. Raises `UserError` that names `where` and the first invalid key."""
    try:
        kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"{where} is damaged: {f'{key}: ' if key else ''}{first['msg'].lower()}") from None
    found: dict[str, Any] = value
    return found
