"""Plain records about a run for its reports: its description, each of its steps, its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Metrics(NamedTuple):
    """Mean metrics of a step other than the loss, such as accuracy. values: {key of metrics.jsonl: value}; text: the
    same values formatted for the console."""

    values: Mapping[str, float] = {}
    text: str = ""


class Validation(NamedTuple):
    """Result of a validation. loss: mean loss, in nats per target token or per pair of responses; for a user's script
    in the unit of its loss function. metrics: further mean values."""

    loss: float
    metrics: Metrics = Metrics()

    def to_json_dict(self) -> dict[str, float]:
        """Return the loss as "validation_loss" and each metric as "validation_NAME", as in metrics.jsonl."""
        values = {f"validation_{name}": value for name, value in self.metrics.values.items()}
        return {"validation_loss": self.loss, **values}


@dataclass(frozen=True, slots=True)
class RunDescription:
    """Properties of a run that are known before its first step.

    Attributes:
        model, data: Short descriptions for the console.
        notes: Further console lines.
        parameters: Number of trained elements.
        unit: Unit of throughput ("tokens", "samples").
        units_per_step: Number of tokens or samples in a step, over all ranks.
        flops_per_unit: Training FLOPs of one token or sample; None: unknown, so MFU is not reported.
        peak_flops: Dense FLOP/s of one device.
        metric_names: Keys in metrics.jsonl of the metrics other than the losses."""

    model: str
    data: str
    parameters: int
    unit: str
    units_per_step: int
    notes: Sequence[str] = ()
    metric_names: Sequence[str] = ()
    flops_per_unit: float | None = None
    peak_flops: float | None = None


@dataclass(slots=True)
class StepOutcome:
    """Results of the forward and backward of a step, all-reduced and so equal on all ranks.

    loss: mean over the step's terms (target tokens, pairs or items); gradient_norm: global L2 norm before clipping. The
    loss scale is divided out of both. finite: True if both are finite, so that the update takes place. stop: True if
    some rank received SIGTERM or an interrupt. save_failed: True if some rank could not save a checkpoint.
    rank_seconds: working time of each rank in seconds, without waiting for other ranks. loss_scale: loss scale of this
    step. metrics: further means that the task reports."""

    loss: float
    gradient_norm: float
    finite: bool
    stop: bool
    save_failed: bool
    rank_seconds: Sequence[float]
    loss_scale: float = 1.0
    metrics: Metrics = field(default_factory=Metrics)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Results and times of one training step, for the journal.

    Attributes:
        step: Number of the step, from 1.
        outcome: Loss, gradient norm and further results.
        learning_rate: Rate of this step.
        skipped_steps: Number of skipped steps in the run so far.
        validation: Result of a validation after the step, None without one.
        seconds: Duration of the step without validation.
        seconds_by_part: {phase: seconds}.
        waiting_seconds: Time that the host waited in collective calls.
        next_loss_scale: Loss scale of the next step; None without a dynamic loss scale.
        profiled: True if the profiler recorded the step, which makes it slower.
    """

    step: int
    outcome: StepOutcome
    learning_rate: float
    skipped_steps: int
    validation: Validation | None
    seconds: float
    seconds_by_part: Mapping[str, float]
    waiting_seconds: float
    next_loss_scale: float | None = None
    profiled: bool = False


@dataclass(frozen=True, slots=True)
class RunEnd:
    """Figures of a finished or stopped run on this rank, for the result document.

    Attributes:
        step: Number of steps done, of which `skipped_steps` were skipped.
        layout: Notation such as "dp2 zero1".
        state_bytes, predicted_state_bytes: Measured and predicted bytes of model states by kind ("parameters",
            "optimizer" ...).
        predicted_sent_bytes: Predicted bytes sent in a step, by call site (label of a collective call in the code).
    """

    step: int
    skipped_steps: int
    layout: str
    state_bytes: Mapping[str, int]
    predicted_state_bytes: Mapping[str, int]
    predicted_sent_bytes: Mapping[str, int]
