"""Training objectives of a language model: the loss sum that a step minimises and the number of terms it is divided by.

`NextToken` covers pretraining and supervised fine-tuning: data preparation sets the target -100 for tokens outside the
responses. `Preferences` (training/preference.py) covers pairs of responses and single labelled ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.comm.mesh import Mesh
from meshwright.data import PreparedData, TokenBatch
from meshwright.layout import Layout
from meshwright.model.documents import Documents
from meshwright.model.transformer import Transformer
from meshwright.monitoring.records import Metrics
from meshwright.parallel.flat_buffers import TensorSlice
from meshwright.parallel.stage_compute import MicroBatch
from meshwright.parallel.step import TermCount, count_targets, loss_share
from meshwright.parallel.zero_engine import ZeroEngine
from meshwright.planner.cost.teacher import TeacherWork
from meshwright.spec.config import ModelConfig
from meshwright.training.preference_loss import Preference
from meshwright.training.task import RunStart


class Policy(Protocol):
    """Interface of the model being trained (the policy of DPO), as objectives see it. They use it to compute the
    log-probabilities of responses before the first step."""

    mesh: Mesh
    parallel: ZeroEngine
    model: Transformer
    config: ModelConfig
    layout: Layout
    data: PreparedData

    @property
    def identity(self) -> Mapping[str, str]:
        """Inputs of the reference log-probabilities other than the weights, as {name: value}: the SHA-256 of the data,
        the SHA-256 of the model configuration, and the precision. Stored log-probabilities are reused only if all are
        equal."""

    @property
    def recomputes_reference(self) -> bool:
        """True if the reference model can be computed at any step: the base model without its adapter."""

    def reference_weights(self) -> AbstractContextManager[None]:
        """Return a context manager in which forward passes compute the reference model (of DPO): the base model without
        its adapter or, without an adapter, the model as it is."""

    def reference_slices(self) -> list[TensorSlice]:
        """Return the weights of the reference model (of DPO) as tensor slices that cover each element on exactly one
        rank."""

    def split_sequences(self, count: int, beyond: int) -> Iterator[list[NDArray[np.int64]]]:
        """Split the sequences with the indices 0 to `count` - 1 of a data split over the dp ranks; yield, for each
        forward pass, the list of this rank's micro-batches, each an array of sequence indices. Padding has the index
        `beyond`."""

    def score_responses(
        self, split: str, passes: Iterable[Sequence[NDArray[np.int64]]], sequences: int
    ) -> Iterator[list[tuple[int, torch.Tensor]]]:
        """Compute the log-probabilities of the responses of a split such as "train". passes: this rank's micro-batches
        of each forward pass, as arrays of sequence indices; those from `sequences` on are padding.

        Yields after each forward pass [(sequence index, log-probabilities in nats [responses])]; the list is empty on
        ranks that do not hold the last pipeline stage. Collective."""


class Objective(Protocol):
    """Interface of the training objective of a language model: a loss that is averaged over terms. A term is a target
    token, a preference pair, or a single labelled response.

    pair_loss: the loss of pairs or single responses; None for a loss per token. metric_sums: number of metrics that are
    summed over the terms besides the loss. metric_names: names of the metrics that `report` returns. most_terms:
    maximum number of response pairs, or of single labelled responses, in a sequence. figures: metric sums of the last
    forward passes, if the objective itself computes them; else None. teacher_work: work of a teacher model, from which
    the planner predicts its cost; None without a teacher."""

    pair_loss: Preference | None
    metric_sums: int
    metric_names: Sequence[str]
    most_terms: int
    figures: torch.Tensor | None
    teacher_work: TeacherWork | None

    def annotate(self, documents: Documents, batch: TokenBatch, split: str, rows: NDArray[np.int64]) -> Documents:
        """Add to `documents` what the loss needs besides tokens and targets (for a preference loss, the response pairs
        and their reference log-probabilities) and return the result. documents: document boundaries in the sequences of
        `batch`; split: the data split that the sequences come from, "train" or "validation"; rows: their indices in
        this split."""

    def count_terms(self, micro_batches: Sequence[MicroBatch], mesh: Mesh) -> TermCount:
        """Return the number of loss terms (target tokens or pairs) in a step's micro-batches, summed over all ranks, at
        least 1. Collective."""

    def terms_share(self, micro_batches: Sequence[MicroBatch], mesh: Mesh) -> torch.Tensor | float:
        """Return this rank's share of the number of loss terms: the number in its micro-batches divided by the number
        of ranks that hold the same terms. The shares of all ranks sum to the number of all terms."""

    def loss_share(self, sums: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        """Return this rank's share of the loss and the metrics: `sums` divided by the number of ranks that compute the
        same values. The shares of all ranks sum to the totals. sums [1 + metrics]: the loss, then the metric sums, over
        this rank's micro-batches."""

    def report(self, means: Sequence[float]) -> Metrics:
        """Return the step's metrics by name. means: the metric sums divided by the number of loss terms (tokens or
        pairs)."""

    def prepare(self, policy: Policy, start: RunStart) -> None:
        """Compute or load, before the first step, the inputs of the loss that are not in the batches (reference
        log-probabilities). policy: the model being trained; start: run directory, resumed state and log. Collective."""

    def begin(self, policy: Policy, split: str, passes: Iterable[Sequence[NDArray[np.int64]]]) -> None:
        """Compute, before the forward passes of a step or a validation, those inputs of the loss that depend on all its
        samples, such as KTO's KL estimate. policy: the model being trained; split: "train" or "validation"; passes:
        this rank's micro-batches of each forward pass, as arrays of sequence indices. Collective."""

    def complete(
        self, policy: Policy, micro_batches: Sequence[MicroBatch], rows: Sequence[NDArray[np.int64]], step: int | None
    ) -> list[MicroBatch]:
        """Return this rank's micro-batches with what models compute for them: a teacher's targets, the student's own
        samples. policy: the model being trained; rows: indices of the sequences of each micro-batch, in the training
        split for the step with index `step`, in the validation split if that is None. Collective."""

    def state(self) -> dict[str, Any]:
        """Return the objective's entries of a checkpoint's `state.json`: checksums that identify its inputs."""


class NextToken:
    """Objective of next-token prediction: cross-entropy, a mean over the target tokens (those that are not -100)."""

    pair_loss: Preference | None = None
    metric_sums = 0
    metric_names: Sequence[str] = ()
    most_terms = 0
    figures: torch.Tensor | None = None
    teacher_work: TeacherWork | None = None

    def annotate(self, documents: Documents, batch: TokenBatch, split: str, rows: NDArray[np.int64]) -> Documents:
        """Return `documents` unchanged: the loss needs only tokens and targets."""
        return documents

    def count_terms(self, micro_batches: Sequence[MicroBatch], mesh: Mesh) -> TermCount:
        """Return the number of target tokens in a step's micro-batches, summed over all ranks, at least 1.
        Collective."""
        return count_targets((targets for _, targets, _ in micro_batches), mesh)

    def terms_share(self, micro_batches: Sequence[MicroBatch], mesh: Mesh) -> torch.Tensor | float:
        """Count the target tokens in this rank's micro-batches and divide the count by tp x pp, the number of ranks
        that hold the same tokens."""
        # Divided in float64: integers divided by an integer become float32, whose rounding shows for tp3 or pp3.
        targets_here = sum((targets != -100).sum().double() for _, targets, _ in micro_batches)
        return targets_here / (mesh.tp.size * mesh.pp.size)

    def loss_share(self, sums: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        """Divide `sums` by the number of tp ranks, which all compute the same loss. sums: float64 [1], the loss summed
        over this rank's micro-batches."""
        return loss_share(sums, mesh)

    def report(self, means: Sequence[float]) -> Metrics:
        """Return no metrics: only the loss is reported."""
        return Metrics()

    def prepare(self, policy: Policy, start: RunStart) -> None:
        """Do nothing before the first step: the loss needs only tokens and targets. Both arguments are ignored."""

    def begin(self, policy: Policy, split: str, passes: Iterable[Sequence[NDArray[np.int64]]]) -> None:
        """Do nothing before a step: the loss needs only tokens and targets. The arguments are ignored."""

    def complete(
        self, policy: Policy, micro_batches: Sequence[MicroBatch], rows: Sequence[NDArray[np.int64]], step: int | None
    ) -> list[MicroBatch]:
        """Return the micro-batches unchanged: the loss has no teacher. The other arguments are ignored."""
        return list(micro_batches)

    def state(self) -> dict[str, Any]:
        """Return an empty dict: no inputs except the data need an entry in `state.json`."""
        return {}
