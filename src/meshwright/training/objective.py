"""Training objectives of a language model: the sum that a step minimises, and the terms over which it is a mean.

`NextToken` is pretraining and supervised fine-tuning alike: tokens outside the responses have the target -100, which
data preparation sets. `PreferencePairs` (training/preference.py) is DPO and its kin.
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
    """The model that is trained, as an objective sees it before the first step. identity: data and model by sha256, and
    the precision, as text."""

    mesh: Mesh
    parallel: ZeroEngine

    @property
    def identity(self) -> Mapping[str, str]: ...

    def score_responses(self, split: str, sequences: int) -> Iterator[tuple[int, list[tuple[int, torch.Tensor]]]]:
        """Run forward over the first sequences of a split. Yields, for each forward pass, the number of sequences that
        all ranks are through, and (sequence, log-probabilities [D]) of those whose last stage is on this rank."""


class Objective(Protocol):
    """A loss of a language model.

    pair_loss: the loss of a pair of responses, None where each token has its own. metric_sums: number of sums over the
    terms from which metrics are made; metric_names: what `report` names them. most_pairs: most pairs of responses in a
    sequence.
    """

    pair_loss: Preference | None
    metric_sums: int
    metric_names: Sequence[str]
    most_pairs: int

    def annotate(self, documents: Documents, batch: TokenBatch, split: str, rows: NDArray[np.int64]) -> Documents:
        """Add to the documents of the sequences `rows` what the loss needs beside tokens and targets."""

    def count_terms(self, micro_batches: Sequence[MicroBatch], mesh: Mesh) -> int:
        """Count the terms of a step's loss over all ranks, at least 1. Collective."""

    def terms_share(self, micro_batches: Sequence[MicroBatch], mesh: Mesh) -> torch.Tensor | float:
        """This rank's share of the terms of micro-batches; summed over the world, shares give their count."""

    def loss_share(self, sums: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        """This rank's share of sums over terms, given the sums over its own micro-batches."""

    def report(self, means: Sequence[float]) -> Metrics:
        """Name the means of the metric sums."""

    def prepare(self, policy: Policy, start: RunStart) -> None:
        """Compute or load what the loss needs before the first step. Collective."""

    def state(self) -> dict[str, Any]:
        """Entries of `state.json`."""


class NextToken:
    """Cross-entropy of each next token, a mean over the target tokens (those that are not -100)."""

    pair_loss: Preference | None = None
    metric_sums = 0
    metric_names: Sequence[str] = ()
    most_pairs = 0

    def annotate(self, documents: Documents, batch: TokenBatch, split: str, rows: NDArray[np.int64]) -> Documents:
        """Return the documents as they are."""
        return documents

    def count_terms(self, micro_batches: Sequence[MicroBatch], mesh: Mesh) -> int:
        """Count the target tokens of all ranks."""
        return count_targets((targets for _, targets, _ in micro_batches), mesh)

    def terms_share(self, micro_batches: Sequence[MicroBatch], mesh: Mesh) -> torch.Tensor | float:
        """Target tokens over the tp x pp ranks that have the same ones."""
        return sum((targets != -100).sum() for _, targets, _ in micro_batches) / (mesh.tp.size * mesh.pp.size)

    def loss_share(self, sums: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        """Sums over the tp ranks that compute the same ones."""
        return loss_share(sums, mesh)

    def report(self, means: Sequence[float]) -> Metrics:
        """Return no metrics."""
        return Metrics()

    def prepare(self, policy: Policy, start: RunStart) -> None:
        """Do nothing: the loss needs tokens and targets alone."""

    def state(self) -> dict[str, Any]:
        """Return no entries."""
        return {}
