"""Batches that are loaded a step in advance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.comm import backend
from meshwright.comm.mesh import CommunicationState, Mesh
from meshwright.layout import Layout
from meshwright.model.documents import Documents, MicroBatch
from meshwright.parallel.context import shard_sequences
from meshwright.training.batch_prefetch import BatchPrefetcher, list_tensors
from meshwright.training.distillation import Distillation, _read_cache
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


class CopiesToGpu(TorchDispatchMode):
    """Copies from host memory to a GPU. non_blocking: of each, whether the host does not wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.non_blocking: list[bool] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        if operator is torch.ops.aten._to_copy.default and args[0].device == CPU and result.device == CUDA:
            self.non_blocking.append((kwargs or {}).get("non_blocking", False))
        return result


def test_host_waits_for_no_copy_of_a_batch_to_a_gpu():
    """Neither for positions of context parallelism, nor for keys of dropout, nor for a teacher's cached tokens."""
    task: Any = mock.Mock(mesh=mock.Mock(device=CUDA), layout=mock.Mock(micro_batches=1))
    task.samples_of_step = task._sample_numbers = lambda step: np.arange(2)
    task.recipe.run.seed = 1
    cache: Any = mock.Mock(read=lambda split, rows: [np.zeros((2, 8, 3), np.int64), np.zeros((2, 8, 4))])
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
    ):
        tokens: Any = mock.MagicMock(device=CUDA, shape=(2, 8))
        batch = MicroBatch(tokens, tokens, Documents())
        task.objective.complete = lambda *_: [batch]
        mesh = Mesh(Layout.parse("cp2"), 0, CUDA, CommunicationState(CUDA), lambda *_: None)
        for copies, load in (
            (1, lambda: shard_sequences(*batch, mesh)),
            (1, lambda: LanguageModelTask._load_step(task, 0)),
            (2, lambda: _read_cache(cache, batch, np.arange(2), "train", mock.Mock())),
        ):
            with CopiesToGpu() as made:
                load()
            assert made.non_blocking == [True] * copies
