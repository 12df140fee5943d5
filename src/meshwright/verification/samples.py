"""Synthetic training data with the interface of `PreparedData`: sequences of one or many documents in which all tokens,
few or none are targets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from meshwright.data import TokenBatch
from meshwright.data.order import SampleOrder
from meshwright.training.preference import MISMATCHED
from meshwright.training.reference import Reference as ResponseReference
from meshwright.training.reference import ResponseLogProbabilities
from meshwright.verification.problem import VALIDATION_SEQUENCES, Problem

IGNORED = -100
MAX_PAIRS = 2  # preference pairs per sequence; twice as many single responses


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch of B sequences of S tokens of synthetic training data.

    Attributes:
        tokens, targets, document_ids: int64 [B, S]: token IDs, target IDs (-100: ignored), and the number, from 0, of
            the document that holds each token.
        reference: For preference training, the reference policy's log-probability of each response in nats, float64 [B,
            2 x MAX_PAIRS]; else None.
        undesirable: For single labelled responses (KTO), True where a response is undesirable, bool [B, 2 x MAX_PAIRS].
        kl: KTO's estimate of the KL divergence in nats; None until it has been computed.
        mismatched: Other random sequences, from which `kl` is computed. In real data these are prompts with responses
            to other prompts.
    """

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    document_ids: NDArray[np.int64]
    reference: NDArray[np.float64] | None = None
    undesirable: NDArray[np.bool_] | None = None
    kl: float | None = None
    mismatched: Batch | None = None

    def slice_sequences(self, start: int, stop: int) -> Batch:
        """Return the sequences [start, stop) of the batch as a new batch."""
        here = slice(start, stop)
        reference = None if self.reference is None else self.reference[here]
        undesirable = None if self.undesirable is None else self.undesirable[here]
        return Batch(self.tokens[here], self.targets[here], self.document_ids[here], reference, undesirable, self.kl)


def make_sequences(problem: Problem, numbers: Sequence[int], mismatched: bool = False) -> Batch:
    """Generate the sequences with the given numbers as a batch. A sequence depends only on the problem's seed and on
    its number. The training split has the numbers from 0 on, the validation split the numbers after these. problem:
    gives seed, sequence length, vocabulary and loss. mismatched: True for other random sequences with as many
    responses, from which KTO estimates the KL divergence."""
    if problem.preference is None:
        made = [_make_sequence(problem, number) for number in numbers]
    else:
        made = [_make_pairs(problem, number, mismatched) for number in numbers]
    tokens, targets, ids, references = (np.stack(part) for part in zip(*made, strict=True))
    if problem.preference is None:
        return Batch(tokens, targets, ids)
    labels = [np.random.default_rng([problem.seed, number, 2]).random(2 * MAX_PAIRS) < 0.5 for number in numbers]
    if problem.preference.responses == 2:
        return Batch(tokens, targets, ids, references)
    others = None if mismatched else make_sequences(problem, numbers, mismatched=True)
    return Batch(tokens, targets, ids, references, np.stack(labels), mismatched=others)


def _make_sequence(problem: Problem, number: int) -> tuple[NDArray[Any], ...]:
    """Generate sequence number `number` for next-token training; return (tokens [S], targets [S], document numbers [S],
    empty array). The empty array replaces the log-probabilities that `_make_pairs` returns for preference training.

    The sequence is random but depends only on the problem's seed and `number`. The number of documents and the share of
    ignored targets (-100) vary with `number`; in every eighth sequence all targets are ignored.
    """
    random = np.random.default_rng([problem.seed, number])
    sequence, kind, turn = problem.sequence, number % 4, number // 4
    tokens = random.integers(0, problem.config.vocabulary, sequence + 1)
    ids = np.zeros(sequence + 1, dtype=np.int64)
    most = (0, 1, 5, max(5, sequence // 10))[kind]
    if most:
        begins = int(random.integers(1 + most // 2, most + 1))
        ids[random.choice(np.arange(1, sequence), size=begins, replace=False)] = 1
    ids = ids.cumsum()
    targets = np.where(ids[1:] == ids[:-1], tokens[1:], IGNORED)
    targets[random.random(sequence) < (0.0, 0.2, 0.9, 0.5)[(kind + turn) % 4]] = IGNORED
    if number % 8 == 2:
        targets[:] = IGNORED
    return tokens[:-1].copy(), targets, ids[:-1].copy(), np.zeros(0)


def _make_pairs(problem: Problem, number: int, mismatched: bool = False) -> tuple[NDArray[Any], ...]:
    """Generate sequence number `number` of `problem` for preference training; return (tokens [S], targets [S], document
    numbers [S], reference log-probabilities in nats [2 x MAX_PAIRS]). The sequence has zero to two pairs of a preferred
    and a rejected response (for KTO, zero to four single responses). Each response is a document that begins with a
    prompt. Prompt tokens, the last token of a document and padding have target -100. mismatched: True for another
    random sequence with as many responses, from which KTO estimates the KL divergence."""
    random = np.random.default_rng([problem.seed, number, *[1] * mismatched])
    sequence, pairs = problem.sequence, _count_pairs(number)
    tokens = random.integers(0, problem.config.vocabulary, sequence + 1)
    ids = np.zeros(sequence, dtype=np.int64)
    targets = np.full(sequence, IGNORED)
    # The last document has at least three tokens: even without its last one, one of them is a target.
    inner = np.sort(random.choice(np.arange(1, sequence // 2 - 1), size=max(0, 2 * pairs - 1), replace=False)) * 2
    bounds = [0, *inner.tolist(), sequence if number % 3 == 0 else sequence - 1][: 2 * pairs + 1]
    for document, (begin, end) in enumerate(itertools.pairwise(bounds)):
        ids[begin:] = document
        prompt = begin + int(random.integers(0, max(1, (end - begin) // 2)))
        targets[prompt : end - 1] = tokens[prompt + 1 : end]
        ids[end:] = document + 1
    trained = np.array([((ids == document) & (targets != IGNORED)).sum() for document in range(2 * MAX_PAIRS)])
    noise = random.uniform(-1, 1, len(trained)) * (trained > 0)
    return tokens[:-1].copy(), targets, ids, -math.log(problem.config.vocabulary) * trained + noise


def _count_pairs(number: int) -> int:
    """Return the number of preference pairs, 0 to 2, in sequence number `number`. The fifth validation sequence, which
    can be all that the second rank reads of that split, has pairs if `Problem.batch` is even: its number is 3 mod 4."""
    return (1, 2, 0, 2)[number % 4]


class SyntheticSplit:
    """Data split of generated sequences, with the interface of `PackedDataset`.

    problem: problem whose data are generated. first: number of the split's first sequence, counted over both splits of
    the problem. sequences: number of sequences. is_mismatched: True to generate other random sequences for the same
    numbers (KTO estimates the KL divergence from them).
    """

    def __init__(self, problem: Problem, first: int, sequences: int, is_mismatched: bool = False) -> None:
        """Define the split; sequences are generated when read. Arguments: see the class."""
        self.problem, self.first, self.sequences, self.rows = problem, first, sequences, sequences
        self.is_mismatched = is_mismatched

    @property
    def mismatched(self) -> SyntheticSplit:
        """Split with other random sequences, as many as this split has, from which KTO estimates the KL divergence."""
        return SyntheticSplit(self.problem, self.first, self.sequences, is_mismatched=True)

    def read_batch(self, numbers: ArrayLike, *, padded: bool = False) -> TokenBatch:
        """Return the sequences with the indices `numbers` [B] in the split. padded: True to allow indices beyond the
        end, for which sequences without targets are returned."""
        rows = np.asarray(numbers, dtype=np.int64)
        assert padded or rows.max() < self.sequences, (rows, self.sequences)
        places: list[int] = (self.first + np.minimum(rows, self.sequences - 1)).tolist()
        found = make_sequences(self.problem, places, self.is_mismatched)
        found.targets[rows >= self.sequences] = IGNORED
        if self.problem.preference is not None:  # padding has no pairs
            found.document_ids[rows >= self.sequences] = 0
        undesirable: NDArray[np.bool_] | None = None
        if found.undesirable is not None:  # of the response that each token belongs to
            labels = np.pad(found.undesirable, ((0, 0), (0, 1)))
            undesirable = np.take_along_axis(labels, found.document_ids, axis=1)
        return TokenBatch(found.tokens, found.targets, found.document_ids.astype(np.int32), undesirable)

    @property
    def examples_by_row(self) -> NDArray[np.int64]:
        """Number of preference pairs, or of single responses, in each sequence: int64 [sequences]."""
        of = 1 if self.problem.preference is None else 2 // self.problem.preference.responses
        return np.array([of * _count_pairs(self.first + row) for row in range(self.sequences)])

    def responses(self) -> ResponseLogProbabilities:
        """Return the reference policy's log-probability (as in DPO) of each response in the split, summed over its
        tokens, in nats. The values are generated, not computed by a model."""
        assert self.problem.preference is not None
        counts = self.problem.preference.responses * self.examples_by_row
        found = ResponseLogProbabilities.zeros(counts)
        numbers = range(self.first, self.first + self.sequences)
        known = make_sequences(self.problem, numbers, self.is_mismatched).reference
        assert known is not None
        for row, count in enumerate(counts):
            found.values[found.bounds[row] : found.bounds[row + 1]] = known[row, :count]
        return found


class SyntheticData:
    """Generated training and validation splits of a verification problem (`problem`), with the interface of
    `PreparedData`."""

    sha256 = "synthetic"

    def __init__(self, problem: Problem) -> None:
        """Define the training split and, after it, the validation split."""
        self.problem = problem
        self._splits = {
            "train": SyntheticSplit(problem, 0, problem.train_sequences),
            "validation": SyntheticSplit(problem, problem.train_sequences, VALIDATION_SEQUENCES),
        }

    def split(self, name: str) -> SyntheticSplit:
        """Return the split called `name`, "train" or "validation"."""
        return self._splits[name]

    def make_sample_order(self) -> SampleOrder:
        """Return the order in which training sequences are read: a new permutation for each epoch."""
        return SampleOrder(self.problem.seed, self.problem.train_sequences)

    def response_reference(self) -> ResponseReference:
        """Return the reference log-probabilities (as in DPO) of the responses in both splits, in the type that
        preference training uses. The values are generated, not computed by a model."""
        splits = dict(self._splits)
        if self.problem.preference is not None and self.problem.preference.responses == 1:
            splits |= {name + MISMATCHED: split.mismatched for name, split in self._splits.items()}
        return ResponseReference({name: rows.responses() for name, rows in splits.items()}, {})
