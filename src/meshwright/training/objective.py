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
from meshwright.model.documents import Documents, MicroBatch
from meshwright.model.transformer import Transformer
from meshwright.monitoring.records import Metrics
from meshwright.parallel.flat_buffers import TensorSlice
from meshwright.parallel.step import TermCount, count_targets, loss_share
from meshwright.parallel.zero_engine import ZeroEngine
from meshwright.spec.config import ModelConfig
from meshwright.spec.teacher import TeacherWork
from meshwright.training.preference_loss import Preference
from meshwright.training.task import RunStart


class Policy(Protocol):
    """Interface of the model being trained (in DPO's terms the policy), on one rank, as training objectives see it.

    mesh: device mesh of this rank. parallel: ZeRO engine that owns the parameters. model: the modules of this rank's
    pipeline stages. config: architecture. layout: parallel layout and precision. data: tokenized splits."""

    mesh: Mesh
    parallel: ZeroEngine
    model: Transformer
    config: ModelConfig
    layout: Layout
    data: PreparedData

    @property
    def identity(self) -> Mapping[str, str]:
        """Inputs of the reference log-probabilities except the weights, {name: value}: SHA-256 of the data, SHA-256 of
        the model configuration, and the precision. Stored log-probabilities are reused only if all values are equal.
        """

    @property
    def recomputes_reference(self) -> bool:
        """True if the reference model is the base model without its adapter, which can be run at any step; False if it
        is the initial model, which training overwrites.
        """

    def reference_weights(self) -> AbstractContextManager[None]:
        """Return a context manager in which forward passes compute the reference model (of DPO): the base model without
        its adapter or, without an adapter, the model as it is."""

    def reference_slices(self) -> list[TensorSlice]:
        """Return the weights of the reference model (of DPO) as slices of checkpoint tensors. Over all ranks, each
        element is in exactly one slice."""

    def split_sequences(self, count: int, padding_index: int) -> Iterator[list[NDArray[np.int64]]]:
        """Split the sequences with the indices 0 to `count` - 1 of a data split over the dp ranks. Yield, for each
        forward pass, the list of this rank's micro-batches, each an array of sequence indices. The last arrays are
        padded with `padding_index`."""

    def score_responses(
        self, split: str, passes: Iterable[Sequence[NDArray[np.int64]]], sequences: int
    ) -> Iterator[list[tuple[int, torch.Tensor]]]:
        """Compute the log-probabilities of the responses in the sequences of a split such as "train".

        passes: for each forward pass, this rank's micro-batches as arrays of sequence indices; sequences: number of
        sequences of the split; indices from this number on are padding.

        Yields after each forward pass a list of (sequence index, log-probabilities of the sequence's responses in
        nats); the list is empty on ranks that do not hold the last pipeline stage. Collective.
        """


class Objective(Protocol):
    """Interface of the training objective of a language model: a loss that is averaged over terms. A term is a target
    token, a pair of responses, or a single labelled response (KTO).

    pair_loss: loss of pairs or single responses; None for a loss per token. metric_count: number of metrics that are
    summed over the terms besides the loss. metric_names: names of the metrics that `report` returns. max_terms: maximum
    number of pairs (or single labelled responses) in a sequence. metric_sums: sums of the metrics over the last forward
    passes, if the objective itself computes them; else None. teacher_work: work of a teacher model, from which the
    planner predicts its cost; None without a teacher. estimates: True if `begin` computes a figure that `report`
    returns."""

    pair_loss: Preference | None
    metric_count: int
    metric_names: Sequence[str]
    max_terms: int
    metric_sums: torch.Tensor | None
    teacher_work: TeacherWork | None
    estimates: bool

    def annotate(self, documents: Documents, batch: TokenBatch, split: str, rows: NDArray[np.int64]) -> Documents:
        """Add the further inputs of the loss to `documents` (document boundaries in the sequences of `batch`) and
        return the result; for a preference loss these are the responses and their reference log-probabilities.

        split: data split of the sequences, "train" or "validation"; rows: indices of the sequences in this split."""

    def count_terms(self, micro_batches: Sequence[MicroBatch], mesh: Mesh) -> TermCount:
        """Start to count the loss terms (target tokens, pairs or single responses) of a step: their number in this
        rank's `micro_batches`, summed over all ranks of `mesh`. Return a function that waits for this sum and returns
        it (1 if it is 0). Collective."""

    def terms_share(self, micro_batches: Sequence[MicroBatch], mesh: Mesh) -> torch.Tensor | float:
        """Return this rank's share of the step's number of loss terms: the number in its `micro_batches`, divided by
        the number of ranks of `mesh` that hold the same terms. The shares of all ranks sum to the total.
        """

    def loss_share(self, sums: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        """Return this rank's share of the step's loss and metric sums: `sums` divided by the number of ranks of `mesh`
        that compute the same values. The shares of all ranks sum to the totals.

        sums [1 + metrics]: the loss, then the metric sums, over this rank's micro-batches.
        """

    def report(self, means: Sequence[float]) -> Metrics:
        """Return the step's metrics by name. means: the metric sums divided by the number of loss terms (tokens or
        pairs)."""

    def prepare(self, policy: Policy, start: RunStart) -> None:
        """Compute or load the inputs of the loss that are fixed during training, such as reference log-probabilities;
        called once, before the first step.

        policy: the model being trained; start: run directory, resumed state and log. Collective.
        """

    def begin(self, policy: Policy, split: str, passes: Iterable[Sequence[NDArray[np.int64]]]) -> None:
        """Compute the inputs of the loss that depend on all samples of a step or validation, and store them in this
        object; called before the step's forward passes. An example is KTO's KL estimate, the attribute `kl` of
        `Preferences`.

        policy: the model being trained; split: "train" or "validation"; passes: for each forward pass of the step, this
        rank's micro-batches as arrays of sequence indices. Collective.
        """

    def complete(
        self, policy: Policy, micro_batches: Sequence[MicroBatch], rows: Sequence[NDArray[np.int64]], step: int | None
    ) -> list[MicroBatch]:
        """Return this rank's `micro_batches` with the further inputs of the loss that models compute in every step. For
        distillation these are the teacher's targets; in on-policy distillation, the texts are also replaced by the
        student's samples.

        policy: the model being trained. rows: indices of the sequences of each micro-batch in the training split. step:
        index of the training step; None: validation, where `rows` are indices in the validation split. Collective.
        """

    def state(self) -> dict[str, Any]:
        """Return the objective's entries of a checkpoint's `state.json`: checksums of its inputs. A run resumes only if
        they are unchanged."""


class NextToken:
    """Objective of next-token prediction: cross-entropy, averaged over the target tokens (targets other than -100).
    Implements `Objective`. It has no pair loss, no metrics and no teacher: `pair_loss`, `metric_sums` and
    `teacher_work` are None, and `metric_names` is empty."""

    pair_loss: Preference | None = None
    metric_count = 0
    metric_names: Sequence[str] = ()
    max_terms = 0
    metric_sums: torch.Tensor | None = None
    teacher_work: TeacherWork | None = None
    estimates = False

    def annotate(self, documents: Documents, batch: TokenBatch, split: str, rows: NDArray[np.int64]) -> Documents:
        """Return `documents` unchanged: the loss needs only tokens and targets. batch, split, rows: ignored."""
        return documents

    def count_terms(self, micro_batches: Sequence[MicroBatch], mesh: Mesh) -> TermCount:
        """Start to count the target tokens of a step: their number in this rank's `micro_batches`, summed over all
        ranks of `mesh`. Return a function that waits for this sum and returns it (1 if it is 0). Collective."""
        return count_targets((batch.targets_BS for batch in micro_batches), mesh)

    def terms_share(self, micro_batches: Sequence[MicroBatch], mesh: Mesh) -> torch.Tensor | float:
        """Return the number of target tokens in this rank's `micro_batches`, divided by the number of ranks of `mesh`
        that hold the same tokens (tp x pp)."""
        # Divided in float64: integers divided by an integer become float32, whose rounding shows for tp3 or pp3.
        targets_here = sum((batch.targets_BS != -100).sum().double() for batch in micro_batches)
        return targets_here / (mesh.tp.size * mesh.pp.size)

    def loss_share(self, sums: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        """Return `sums` divided by the number of tp ranks of `mesh`, which all compute the same loss. sums: float64
        [1], the loss summed over this rank's micro-batches."""
        return loss_share(sums, mesh)

    def report(self, means: Sequence[float]) -> Metrics:
        """Return no metrics: the loss alone is reported. means: ignored."""
        return Metrics()

    def prepare(self, policy: Policy, start: RunStart) -> None:
        """Do nothing: the loss needs no other inputs than tokens and targets. policy, start: ignored."""

    def begin(self, policy: Policy, split: str, passes: Iterable[Sequence[NDArray[np.int64]]]) -> None:
        """Do nothing: the loss needs no other inputs than tokens and targets. policy, split, passes: ignored."""

    def complete(
        self, policy: Policy, micro_batches: Sequence[MicroBatch], rows: Sequence[NDArray[np.int64]], step: int | None
    ) -> list[MicroBatch]:
        """Return `micro_batches` unchanged, as a list: the loss has no teacher. policy, rows, step: ignored."""
        return list(micro_batches)

    def state(self) -> dict[str, Any]:
        """Return an empty dict: this objective has no entry in `state.json`."""
        return {}
