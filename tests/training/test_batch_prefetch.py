"""Batches that are loaded a step in advance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from meshwright.comm import backend
from meshwright.model.documents import Documents
from meshwright.training.batch_prefetch import BatchPrefetcher, list_tensors
from meshwright.training.distillation import Distillation
from meshwright.training.language_model import LanguageModelTask
from meshwright.training.objective import NextToken

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class LateStream:
    """Stream whose copies are made only when another stream waits for an event after them."""

    def __init__(self, *_: Any) -> None:
        self.copies: list[Callable[[], object]] = []

    def record_event(self) -> list[Callable[[], object]]:
        return list(self.copies)

    def wait_event(self, event: list[Callable[[], object]]) -> None:
        for copy in event:
            copy()


class OnGpu(torch.Tensor):
    """Tensor in host memory that says it is on a GPU, and notes the streams that read it."""

    is_cuda = True
    readers: list[Any]

    def record_stream(self, stream: Any) -> None:
        self.readers.append(stream)


def test_prefetched_batch_is_the_one_that_is_loaded():
    loaded: list[int] = []

    def load(step: int) -> list[torch.Tensor]:
        loaded.append(step)
        return [torch.full((2,), step)]

    batches = BatchPrefetcher(load, CPU)
    assert batches.take(0)[0].tolist() == [0, 0]
    batches.prefetch(1)
    assert loaded == [0, 1] and batches.take(1)[0].tolist() == [1, 1] and loaded == [0, 1]
    batches.prefetch(2)
    assert batches.take(7)[0].tolist() == [7, 7]  # as after a checkpoint was loaded: the batch of step 2 is dropped
    assert batches.take(2)[0].tolist() == [2, 2] and loaded == [0, 1, 2, 7, 2]


def test_gpu_reads_a_prefetched_batch_after_its_copies_which_do_not_queue_behind_the_step(
    monkeypatch: pytest.MonkeyPatch,
):
    current = [compute := LateStream()]

    @contextmanager
    def run_on(stream: LateStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def load(step: int) -> list[tuple[torch.Tensor, Documents]]:
        tokens, starts = (torch.full((3,), -1).as_subclass(OnGpu) for _ in range(2))
        for tensor in (tokens, starts):
            tensor.readers = []
            current[-1].copies.append(lambda tensor=tensor: tensor.fill_(step))
        return [(tokens, Documents(starts, host_starts_BS=torch.zeros(3)))]

    monkeypatch.setattr(torch.cuda, "Stream", LateStream)
    monkeypatch.setattr(torch.cuda, "stream", run_on)
    monkeypatch.setattr(backend, "current_stream", lambda device: current[-1])
    batches = BatchPrefetcher(load, CUDA)
    batches.prefetch(5)
    assert not compute.copies
    ((tokens, documents),) = batches.take(5)
    assert tokens.tolist() == [5, 5, 5] and documents.starts_BS is not None
    for tensor in (tokens, documents.starts_BS):
        assert isinstance(tensor, OnGpu) and tensor.tolist() == [5, 5, 5]
        assert tensor.readers == [compute]  # else the next copy could overwrite what this step still reads


def test_tensors_of_nested_batches_are_listed():
    a, b, c = (torch.tensor(number) for number in range(3))
    assert [int(each) for each in list_tensors([(a, Documents(b, teacher="none")), [c]])] == [0, 1, 2]


@pytest.mark.parametrize(("objective", "prefetched"), [(NextToken, [1, 2]), (Distillation, [])])
def test_batches_are_loaded_in_advance_unless_a_teacher_or_the_parameters_make_them(
    objective: type[NextToken], prefetched: list[int]
):
    """A teacher's forward would run on the copy stream, and on-policy samples need the updated parameters."""
    task: Any = mock.Mock()
    task.objective = objective.__new__(objective)
    task.recipe.train.steps = 3
    for step in range(1, 5):
        LanguageModelTask.prefetch_step(task, step)
    assert [call.args[0] for call in task._batches.prefetch.call_args_list] == prefetched
