"""Preference objective: losses of pairs of responses, or of single labelled ones; those of DPO, IPO and KTO are
relative to the initial policy (the reference)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from meshwright.comm import collectives
from meshwright.comm.mesh import Mesh
from meshwright.data import PackedExamples, TokenBatch
from meshwright.data.packing.packed import NO_TARGET
from meshwright.data.packing.packed_examples import MismatchedRows
from meshwright.data.packing.shards import limit_rate
from meshwright.errors import UserError
from meshwright.model.documents import Documents, MicroBatch
from meshwright.model.pairs import Pairs
from meshwright.monitoring.records import Metrics
from meshwright.parallel.step import TermCount, loss_share, sum_over_data
from meshwright.spec.policy import PREFERENCE_METRICS
from meshwright.spec.teacher import TeacherWork
from meshwright.training.objective import Policy
from meshwright.training.preference_loss import Preference
from meshwright.training.reference import (
    FILE,
    Reference,
    ResponseLogProbabilities,
    all_reduce_responses,
    compute_weights_checksum,
    load_or_compute_reference,
    read_reference,
)
from meshwright.training.task import RunStart

REWARDS = ("reward_margin", "reward_accuracy", "chosen_reward", "rejected_reward")
"""Metric names of the figures of responses; KTO has one more, `KL`."""
KL = "kl"
KL_SITE = "loss.kl"
MISMATCHED = " mismatched"
"""Ending of the name of a split whose responses are those of other examples."""


class Rewards(NamedTuple):
    """Mean rewards of a step or validation; `Preference` defines the reward of a response.

    `chosen`, `rejected`: mean reward of the chosen and of the rejected responses (KTO: of the desirable and of the
    undesirable responses), NaN without such responses. `accuracy`: fraction of pairs whose chosen response has the
    higher reward; for KTO the fraction of desirable responses with a score above the KL estimate and undesirable
    responses with a score below it."""

    chosen: float
    rejected: float
    accuracy: float

    @property
    def margin(self) -> float:
        """Mean reward of the chosen responses minus mean reward of the rejected responses."""
        return self.chosen - self.rejected

    def to_metrics(self) -> dict[str, float]:
        """Return {name: value} for the metrics in `REWARDS`: margin, accuracy, and mean rewards of chosen and rejected
        responses. Metrics of responses that the step does not have are left out.
        """
        values = zip(REWARDS, (self.margin, self.accuracy, self.chosen, self.rejected), strict=True)
        return {name: value for name, value in values if not math.isnan(value)}


class Preferences:
    """Objective of preference training: a loss of pairs of responses or of single labelled responses (KTO), averaged
    over the pairs or responses, with rewards as metrics.

    pair_loss: the loss. splits: {split: examples}, with the splits "train" and "validation"; for KTO also "train
    mismatched" and "validation mismatched", in which each prompt is followed by the response of another example.

    Attributes: `reference`: log-probabilities of the responses under the reference policy (the initial weights), set by
    `prepare` before the first step; `kl`: KTO's estimate of the KL divergence in nats, set by `begin` before each step.
    `metric_sums` and `teacher_work` of the interface `Objective` are None.
    """

    metric_count = PREFERENCE_METRICS
    metric_sums: torch.Tensor | None = None  # the forward passes add them up
    teacher_work: TeacherWork | None = None

    def __init__(self, pair_loss: Preference, splits: Mapping[str, PackedExamples | MismatchedRows]) -> None:
        """Count the loss terms of every sequence in the splits. `reference`, the reference log-probabilities, is None
        until `prepare`."""
        self.pair_loss: Preference | None = pair_loss
        self.metric_names: Sequence[str] = REWARDS if pair_loss.responses == 2 else (*REWARDS, KL)
        self.reference: Reference | None = None
        self.estimates = pair_loss.responses == 1
        self.kl = 0.0
        self._splits, self._of = splits, pair_loss.responses
        self.max_terms = max((int(each.examples_by_row.max(initial=1)) for each in splits.values()), default=0)

    def annotate(self, documents: Documents, batch: TokenBatch, split: str, rows: NDArray[np.int64]) -> Documents:
        """Add the responses in the sequences of `batch` to `documents` (document boundaries): the responses' lengths,
        labels and, once `prepare` has set them, reference log-probabilities. Return the result.

        split: data split of the sequences, such as "train"; rows: indices of the sequences in this split."""
        pairs = Pairs.from_ids(torch.from_numpy(batch.document_ids), self.max_terms, self._of)
        targets_BS = torch.from_numpy(batch.targets) != NO_TARGET
        pairs = replace(pairs, lengths_BD=pairs.log_probabilities(-targets_BS.double()))  # summed by response
        if self._of == 1:  # every example has a target, and padding has none
            pairs = replace(pairs, counted_BP=pairs.lengths_BD > 0, kl_B=torch.full_like(pairs.kl_B, self.kl))
        if batch.undesirable is not None:
            marked_BS = targets_BS & torch.from_numpy(batch.undesirable)
            pairs = replace(pairs, undesirable_BD=pairs.log_probabilities(-marked_BS.double()) > 0)
        if self.reference is not None:
            reference_BD = self.reference.splits[split].select_sequences(rows, self._of * self.max_terms)
            pairs = replace(pairs, reference_BD=reference_BD)
        return replace(documents, pairs=pairs)

    def count_terms(self, micro_batches: Sequence[MicroBatch], mesh: Mesh) -> TermCount:
        """Start to count the pairs (or single responses) of a step: their number in this rank's `micro_batches`, summed
        over all ranks of `mesh`. Return a function that waits for this sum and returns it (1 if it is 0). Collective.
        """
        return sum_over_data((pairs.count for pairs in _list_pairs(micro_batches)), mesh, copies=mesh.cp.size)

    def terms_share(self, micro_batches: Sequence[MicroBatch], mesh: Mesh) -> torch.Tensor | float:
        """Return the number of pairs (or single responses) in this rank's `micro_batches`, divided by the number of
        ranks of `mesh` that hold the same pairs (cp x tp x pp)."""
        pairs = sum(pairs.count / mesh.cp.size for pairs in _list_pairs(micro_batches))
        return pairs / (mesh.tp.size * mesh.pp.size)

    def loss_share(self, sums: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        """Return this rank's share of the loss and metric sums: `sums` divided by cp x tp, the number of ranks of
        `mesh` that compute the same values. sums [1 + metrics]: the loss, then the metric sums, over this rank's
        micro-batches.
        """
        return loss_share(sums, mesh, of_pairs=True)

    def report(self, means: Sequence[float]) -> Metrics:
        """Return the mean rewards of the chosen and rejected responses, their margin, and the fraction of pairs whose
        chosen response has the higher reward; for KTO also the KL estimate.

        means: the metric sums divided by the number of terms."""
        chosen, rejected, accuracy, chosen_share, rejected_share = means
        rewards = Rewards(*(
            value / share if share else math.nan
            for value, share in ((chosen, chosen_share), (rejected, rejected_share), (accuracy, 1.0))
        ))  # fmt: skip
        text = f"  margin {rewards.margin:.3f}  accuracy {rewards.accuracy:.0%}"
        return Metrics(rewards.to_metrics() | ({KL: self.kl} if self._of == 1 else {}), text)

    @torch.no_grad()
    def begin(self, policy: Policy, split: str, passes: Iterable[Sequence[NDArray[np.int64]]]) -> None:
        """Compute KTO's KL estimate and store it in the attribute `kl`: the mean of log p / p_ref over the mismatched
        responses of a step or validation, at least 0 (arXiv:2402.01306, section 4.1). Do nothing for other losses.

        policy: the model being trained; split: "train" or "validation"; passes: for each forward pass of the step, this
        rank's micro-batches as arrays of sequence indices. Collective.
        """
        if self._of == 2 or self.reference is None:
            return
        split += MISMATCHED
        mesh, reference, counts = policy.mesh, self.reference.splits[split], self._splits[split].examples_by_row
        sums_2 = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        for scored in policy.score_responses(split, passes, len(counts)):
            if mesh.tp.rank == mesh.cp.rank == 0:  # other ranks have the same values
                for row, values_D in scored:
                    known_D = reference.select_sequences(np.array([row]), len(values_D))[0].to(values_D)
                    sums_2[0] += (values_D - known_D)[: counts[row]].sum()
                    sums_2[1] += int(counts[row])
        collectives.all_reduce(sums_2, mesh.world, KL_SITE)
        total, count = sums_2.tolist()
        mean = total / max(1.0, count)
        self.kl = 0.0 if mean < 0 else mean  # NaN stays NaN, and the step is skipped

    def prepare(self, policy: Policy, start: RunStart) -> None:
        """Set the attribute `reference`: load the reference log-probabilities from the run directory, or compute them
        with the initial weights and store them there; do nothing for a loss without a reference.

        policy: the model being trained; start: run directory and resumed state. `UserError` if the file of a resumed
        run is missing, damaged or from another run. Collective."""
        assert self.pair_loss is not None
        if not self.pair_loss.needs_reference:
            return
        path = start.directory / FILE
        if start.saved is not None and start.saved["step"] and not policy.recomputes_reference:
            self.reference = self._read_for_resume(path, start)
            return
        identity = {
            **policy.identity,
            "rows": " ".join(sequences.rows_sha256 for sequences in self._splits.values()),
            "weights": compute_weights_checksum(policy.reference_slices(), policy.mesh),
        }
        begun, sequences = time.perf_counter(), sum(map(len, self._responses.values()))

        def compute() -> Reference:
            """Compute the reference log-probabilities and log the progress."""
            log = limit_rate(lambda done: start.log(f"reference: {done:,} of {sequences:,} sequences"))
            with policy.reference_weights():
                return self.compute_reference(policy, identity, log)

        leader = policy.mesh.rank == 0
        self.reference, earlier = load_or_compute_reference(
            path, self._responses, identity, compute, start.agreement, leader
        )
        responses = sum(len(each.values) for each in self.reference.splits.values())
        how = "loaded from" if earlier else f"computed in {time.perf_counter() - begun:.1f} s, stored in"
        start.log(f"reference: log-probabilities of {responses:,} responses, {how} {path}")

    def compute_reference(
        self, policy: Policy, identity: Mapping[str, str], progress: Callable[[int], None]
    ) -> Reference:
        """Compute the log-probabilities of all responses of all splits with the current weights of `policy`.

        identity: {name: value} of the inputs (checksums of data and weights, precision), which are stored with the
        result. progress: called with the number of sequences done. Collective."""
        splits = {name: ResponseLogProbabilities.zeros(counts) for name, counts in self._responses.items()}
        mesh, done = policy.mesh, 0
        for name, responses in splits.items():
            passes = list(policy.split_sequences(responses.sequences, padding_index=responses.sequences))
            for rows, scored in zip(passes, policy.score_responses(name, passes, responses.sequences), strict=True):
                if mesh.tp.rank == mesh.cp.rank == 0:  # other ranks have the same values
                    for row, values_D in scored:
                        responses.store(row, values_D)
                progress(done := done + mesh.dp.size * sum(map(len, rows)))
            all_reduce_responses(responses, mesh)
        return Reference(splits, identity)

    def complete(
        self, policy: Policy, micro_batches: Sequence[MicroBatch], rows: Sequence[NDArray[np.int64]], step: int | None
    ) -> list[MicroBatch]:
        """Return `micro_batches` unchanged, as a list: the loss has no teacher. policy, rows, step: ignored."""
        return list(micro_batches)

    def state(self) -> dict[str, Any]:
        """Return the objective's entry of `state.json`, the checksum of the reference log-probabilities. A run resumes
        only if it is unchanged."""
        return {} if self.reference is None else {"reference_sha256": self.reference.sha256}

    @property
    def _responses(self) -> dict[str, NDArray[np.int64]]:
        """Number of responses in each sequence, {split name: int64 [sequences]}."""
        return {name: self._of * sequences.examples_by_row for name, sequences in self._splits.items()}

    def _read_for_resume(self, path: Path, start: RunStart) -> Reference:
        """Read the reference log-probabilities of a resumed run from the file `path` and compare their checksum with
        the checksum in the checkpoint (`start.saved`). If reading or comparison fails on any rank, every rank raises
        `UserError`. Collective."""
        assert start.saved is not None
        problem, found = None, None
        try:
            found = read_reference(path, self._responses)
            if found.sha256 != start.saved.get("reference_sha256"):
                problem = f"{path} belongs to another run"
        except UserError as error:
            problem = str(error)
        if (first := start.agreement.broadcast_first_text(problem)) is not None:
            raise UserError(
                f"{first[1]}: it holds the log-probabilities under the initial weights, which a resumed run cannot "
                "compute again; restore the file, or start a new run with another run.name"
            )
        assert found is not None
        return found


def _list_pairs(micro_batches: Sequence[MicroBatch]) -> list[Pairs]:
    """Return the responses that `Preferences.annotate` has added to each of the `micro_batches`."""
    found = [batch.documents.pairs for batch in micro_batches]
    assert None not in found, "every micro-batch of preference data has pairs"
    return found  # type: ignore[return-value]
