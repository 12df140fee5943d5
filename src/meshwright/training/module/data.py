"""Sampling and batching of the data of a user's module: each rank's samples of a step, and their collation.

The order is a function of (seed, global sample number) alone (`data/order.py`), and so are the random numbers that a
data set draws: a run resumes bitwise, on another layout too.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from meshwright.data.order import SampleOrder
from meshwright.errors import UserError

Collate = Callable[[list[Any]], Any]


class Samples(Protocol):
    """Interface of a map-style data set: anything with a length and integer indexing, such as a list, or a data set of
    torch or Hugging Face."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int) -> Any:
        """Return the sample at an index, 0 ... len - 1."""


def check_samples(data: Any, what: str) -> int:
    """Check a data set and return its number of samples. `UserError` if `data` has no length or indexing, or is empty.
    what: its name in errors, such as "data"."""
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise UserError(
            f"{what} is a {type(data).__name__}: a list or a map-style data set with len() and integer indices is "
            "needed, so that ranks read their own samples and a run can resume"
        )
    if not len(data):
        raise UserError(f"{what} has no samples")
    return len(data)


def derive_seed(seed: int, *what: object) -> int:
    """Derive a 63-bit random seed for one purpose from the run's `seed`, by a hash. what: values that identify the
    purpose, such as "sample", 17.
    """
    text = "meshwright " + " ".join(map(str, (seed, *what)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the global random generators of torch, numpy and Python, and the generator of `device`, with `seed`."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def move_to_device(batch: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Return the batch (a nested structure) with all its tensors moved to `device`. Floating-point tensors are also
    cast to `dtype`, but only if `dtype` is narrower than float32."""
    narrow = dtype if dtype.itemsize < 4 else None

    def move(value: Any) -> Any:
        """Move one leaf of the batch; values that are not tensors are returned as they are."""
        if not isinstance(value, torch.Tensor):
            return value
        to = narrow if value.is_floating_point() else None
        return value.to(device, dtype=to or value.dtype, non_blocking=True)

    return tree_map(move, batch)


@dataclass(frozen=True, slots=True)
class BatchShare:
    """Samples of every global batch that one data-parallel (dp) rank reads: a block of consecutive samples, of equal
    size on all dp ranks.

    batch: number of samples of a step over all dp ranks. ranks: number of dp ranks. rank: index of this dp rank, from
    0. micro_batches: number of micro-batches into which this rank's samples are split.
    """

    batch: int
    ranks: int
    rank: int
    micro_batches: int

    @property
    def size(self) -> int:
        """Number of samples that this rank reads in a step."""
        return self.batch // self.ranks

    def sample_numbers(self, step: int) -> NDArray[np.int64]:
        """Return the global numbers of the samples that this rank reads in a step, ascending: int64 [size]. Samples are
        numbered from 0 over all steps of the run. step: index of the step, from 0."""
        return step * self.batch + self.rank * self.size + np.arange(self.size)


class TrainingSamples:
    """Loader of this rank's micro-batches for a user's module.

    data: map-style data set. seed: seed of the sample order. share: which samples of a step this rank reads. collate:
    function from a list of samples to a batch. workers: number of `DataLoader` processes; 0: load in this process.
    """

    def __init__(self, data: Samples, seed: int, share: BatchShare, collate: Collate, workers: int) -> None:
        """Set up the loader; no sample is read yet. Arguments: see the class."""
        self._data, self._seed, self._share, self._collate, self._workers = data, seed, share, collate, workers
        self._order = SampleOrder(seed, len(data))
        self._loaded: Iterator[Any] | None = None
        self._next = 0

    def load_step(self, step: int) -> Iterator[tuple[int, int, Any]]:
        """Load the micro-batches of the step with index `step` (from 0); yield each as (global number of its first
        sample, number of samples, collated batch). Consecutive steps reuse one `DataLoader`."""
        if self._loaded is None or step != self._next:
            numbered = _SeededSamples(self._data, self._seed)
            loader: DataLoader[Any] = DataLoader(
                numbered,  # type: ignore[arg-type]
                batch_sampler=_EndlessBatches(self._numbered_samples, step),  # type: ignore[arg-type]
                num_workers=self._workers,
                collate_fn=self._collate,
                pin_memory=torch.cuda.is_available(),
            )
            self._loaded = iter(loader)
        self._next = step + 1
        for part in self._numbered_samples(step):
            yield part[0][0], len(part), next(self._loaded)

    def _numbered_samples(self, step: int) -> list[list[tuple[int, int]]]:
        """Return this rank's micro-batches of the step with index `step` (from 0), each as a list of its samples:
        (global sample number over all steps, index in the data set)."""
        numbers = self._share.sample_numbers(step)
        samples = self._order.sample(numbers)
        pairs = list(zip(numbers.tolist(), samples.tolist(), strict=True))
        size = self._share.size // self._share.micro_batches
        return [pairs[first : first + size] for first in range(0, len(pairs), size)]


class _EndlessBatches:
    """Batch sampler for `DataLoader`: yields the micro-batches of step number `step` (from 0) and of all later steps,
    without end.

    numbers: function (step) -> the step's micro-batches, each a list of pairs (global sample number, index in the data
    set), which are the keys of the data set `_SeededSamples`.
    """

    def __init__(self, numbers: Callable[[int], Sequence[Any]], step: int) -> None:
        """Begin with step number `step`. Arguments: see the class."""
        self._numbered_samples, self._step = numbers, step

    def __iter__(self) -> Iterator[Any]:
        """Yield the keys of one micro-batch at a time, without end."""
        step = self._step
        while True:
            yield from self._numbered_samples(step)
            step += 1


class _SeededSamples:
    """Wrapper of the data set `data` that seeds the random generators (torch, numpy, Python) before it reads a sample.
    Random augmentation then depends only on `seed`, the run's seed, and the sample's global number. Its keys are pairs
    (global sample number, index in `data`).
    """

    def __init__(self, data: Samples, seed: int) -> None:
        """Wrap the data set `data`. seed: seed of the run."""
        self._data, self._seed = data, seed

    def __getitem__(self, place: tuple[int, int]) -> Any:
        """Return the sample `place` = (global sample number, index in the data set), read with random generators that
        are seeded by the global number."""
        number, sample = place
        seed_generators(derive_seed(self._seed, "sample", number), torch.device("cpu"))
        return self._data[sample]

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._data)
