"""Plain records from which a run is reported: the run, each of its steps, its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Metrics(NamedTuple):
    """Means that are reported beside a loss. values: by their keys in metrics.jsonl; text: appended to the loss on the
    console."""

    values: Mapping[str, float] = {}
    text: str = ""


class Validation(NamedTuple):
    """Validation loss (nats per target token or per pair of responses, or the mean of a script's loss) and the metrics
    beside it."""

    loss: float
    metrics: Metrics = Metrics()

    def to_json_dict(self) -> dict[str, float]:
        """Keys and values as in metrics.jsonl."""
        values = {f"validation_{name}": value for name, value in self.metrics.values.items()}
        return {"validation_loss": self.loss, **values}


@dataclass(frozen=True, slots=True)
class RunDescription:
    """Facts about a run that are known before its first step.

    model, data: for the console, a few words each; notes: further lines about the data. parameters: number of trained
    elements. unit: what a rate counts ("tokens", "samples"); units_per_step: of all ranks. flops_per_unit: of training,
    None where they are unknown, and then there is no MFU; peak_flops: dense FLOP/s of one device. metric_names: metrics
    beside loss and validation loss, by their keys in metrics.jsonl.
    """

    model: str
    data: str
    parameters: int
    unit: str
    units_per_step: int
    notes: Sequence[str] = ()
    metric_names: Sequence[str] = ()
    flops_per_unit: float | None = None
    peak_flops: float | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One training step, as the journal reports it.

    step: its number, from 1. finite: loss and gradient norm were, so that the update took place. skipped_steps: of the
    run so far. loss_scale: of this step, None where it is not dynamic; next_loss_scale: of the next step. seconds: in
    all, without validation; seconds_by_part: by phase; waiting_seconds: of the host in collective calls. rank_seconds:
    each rank's own work. profiled: a profile was taken, which makes a step longer.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    finite: bool
    skipped_steps: int
    metrics: Metrics
    validation: Validation | None
    seconds: float
    seconds_by_part: Mapping[str, float]
    waiting_seconds: float
    rank_seconds: Sequence[float]
    loss_scale: float | None = None
    next_loss_scale: float | None = None
    profiled: bool = False


@dataclass(frozen=True, slots=True)
class RunEnd:
    """State of a run at its last step: counters, and bytes of model states and of a step's traffic on this rank."""

    step: int
    skipped_steps: int
    layout: str
    state_bytes: Mapping[str, int]
    predicted_state_bytes: Mapping[str, int]
    predicted_sent_bytes: Mapping[str, int]
