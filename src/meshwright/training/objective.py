"""Training objectives of a language model: the loss sum that a step minimises and the number of terms it is divided by.

`NextToken` covers pretraining and supervised fine-tuning: data preparation sets the target -100 for tokens outside the
responses. `PreferencePairs` (training/preference.py) covers DPO and IPO.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.comm.mesh import Mesh
from meshwright.data import TokenBatch
from meshwright.model.documents import Documents
from meshwright.model.preference import Preference
from meshwright.monitoring.records import Metrics
from meshwright.parallel.stage_compute import MicroBatch
from meshwright.parallel.step import count_targets, loss_share
from meshwright.parallel.zero_engine import ZeroEngine
from meshwright.training.task import RunStart


class Policy(Protocol):
    """The model being trained, as an objective uses it before the first step. identity: sha256 of data and model, and
    the precision."""

    mesh: Mesh
    parallel: ZeroEngine

    @property
    def identity(self) -> Mapping[str, str]:
        """The sha256 of data and model, and the precision."""

    def score_responses(self, split: str, sequences: int) -> Iterator[tuple[int, list[tuple[int, torch.Tensor]]]]:
        """Compute response log-probabilities for the first `sequences` sequences of a split. Yields, for each forward
        pass, (number of sequences done on all ranks, [(sequence, log-probabilities [responses])] of those whose last
        stage is here)."""


class Objective(Protocol):
    """A loss of a language model.

    pair_loss: the loss of a pair of responses, None for a loss per token. metric_sums: number of sums over the terms
    from which metrics are computed; metric_names: their names in `report`. most_pairs: maximum pairs of responses in a
    sequence.
    """

    pair_loss: Preference | None
    metric_sums: int
    metric_names: Sequence[str]
    most_pairs: int

    def annotate(self, documents: Documents, batch: TokenBatch, split: str, rows: NDArray[np.int64]) -> Documents:
        """Return `documents`, the boundaries in the sequences of a batch, with the extra inputs of the loss (pairs,
        reference log-probabilities). split: "train" or "validation"; rows: indices of the sequences in it.
        """

    def count_terms(self, micro_batches: Sequence[MicroBatch], mesh: Mesh) -> int:
        """Return the number of terms of a step's loss (target tokens or pairs) over all ranks, at least 1.
        Collective."""

    def terms_share(self, micro_batches: Sequence[MicroBatch], mesh: Mesh) -> torch.Tensor | float:
        """Return this rank's share of the number of terms in its micro-batches; the shares of all ranks add up to the
        count."""

    def loss_share(self, sums: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        """Return this rank's share of the sums over terms of the loss, which add up over the ranks to the total.
        sums: loss and metric sums of its micro-batches.
        """

    def report(self, means: Sequence[float]) -> Metrics:
        """Return named metrics. means: the metric sums divided by the number of terms, in the order of
        `metric_names`.
        """

    def prepare(self, policy: Policy, start: RunStart) -> None:
        """Compute or load the inputs of the loss before the first step (reference log-probabilities). Collective."""

    def state(self) -> dict[str, Any]:
        """Return the objective's entries of `state.json`."""


class NextToken:
    """Cross-entropy of the next token, a mean over the target tokens (those that are not -100)."""

    pair_loss: Preference | None = None
    metric_sums = 0
    metric_names: Sequence[str] = ()
    most_pairs = 0

    def annotate(self, documents: Documents, batch: TokenBatch, split: str, rows: NDArray[np.int64]) -> Documents:
        """Return the documents unchanged."""
        return documents

    def count_terms(self, micro_batches: Sequence[MicroBatch], mesh: Mesh) -> int:
        """Return the number of target tokens over all ranks."""
        return count_targets((targets for _, targets, _ in micro_batches), mesh)

    def terms_share(self, micro_batches: Sequence[MicroBatch], mesh: Mesh) -> torch.Tensor | float:
        """Return this rank's target tokens divided by the tp x pp ranks that hold the same ones."""
        return sum((targets != -100).sum() for _, targets, _ in micro_batches) / (mesh.tp.size * mesh.pp.size)

    def loss_share(self, sums: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        """Return the sums divided by the tp ranks that compute the same ones."""
        return loss_share(sums, mesh)

    def report(self, means: Sequence[float]) -> Metrics:
        """Return no metrics."""
        return Metrics()

    def prepare(self, policy: Policy, start: RunStart) -> None:
        """Do nothing: the loss needs only tokens and targets."""

    def state(self) -> dict[str, Any]:
        """Return an empty dict."""
        return {}
