"""Emulated ranks: torch.distributed on threads of one process, in a deterministic order."""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.comm.local import LocalRanks
from meshwright.emulation import scheduler
from meshwright.emulation.exercise import compare_ranks
from meshwright.emulation.ranks import EmulatedRanks
from meshwright.emulation.scheduler import EmulationFailed
from meshwright.layout import Layout
from meshwright.spec.presets import preset
from meshwright.verification.cases import CaseBuilder
from meshwright.verification.compare import compare
from meshwright.verification.ranks import run_rank
from meshwright.verification.reference import Reference
from tests.test_api import run_examples


@pytest.fixture
def emulated() -> Iterator[EmulatedRanks]:
    with mw.emulate(4) as ranks:
        yield ranks


def call_collectives() -> list[object]:
    """Call every collective of torch.distributed on one rank and return the results."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(8.0, dtype=torch.float64) + 10 * rank
    found: list[object] = []

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        dist.all_reduce(y := x.clone(), op)
        found.append(y.tolist())
    dist.broadcast(y := x.clone(), src=2)
    found.append(y.tolist())
    dist.reduce(y := x.clone(), dst=1)
    found.append(y.tolist() if rank == 1 else None)
    dist.all_gather(parts := [torch.empty_like(x) for _ in range(size)], x)
    found.append([part.tolist() for part in parts])
    dist.all_gather_single(y := x.new_empty(8 * size), x)
    found.append(y.tolist())
    dist.reduce_scatter(y := x.new_empty(2), list(x.chunk(size)))
    found.append(y.tolist())
    dist.reduce_scatter_single(y := x.new_empty(2), x)
    found.append(y.tolist())
    dist.all_to_all_single(y := x.new_empty(8), x)
    found.append(y.tolist())
    sizes = [1, 2, 2, 3]  # elements sent to each rank
    dist.all_to_all_single(y := x.new_empty(sizes[rank] * size), x, [sizes[rank]] * size, sizes)
    found.append(y.tolist())
    dist.scatter(y := x.new_empty(2), list(x.chunk(size)) if rank == 3 else None, src=3)
    found.append(y.tolist())
    dist.gather(x, parts if rank == 0 else None, dst=0)
    found.append([part.tolist() for part in parts])
    with dist._coalescing_manager():
        dist.all_reduce(y := x.clone())
        dist.all_reduce(z := x + 1)
    found.append([y.tolist(), z.tolist()])
    dist.all_gather_object(objects := [None] * size, {"rank": rank})
    dist.broadcast_object_list(named := ["here" if rank == 1 else None], src=1)
    return [*found, objects, named]


def call_messages_and_groups() -> list[object]:
    """Exchange messages and use subgroups on one rank; return the results."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.tensor([float(rank)])
    arrived = [torch.zeros(1), torch.zeros(1)]
    ops = [dist.P2POp(dist.isend, x + 10 * n, (rank + 1) % size) for n in range(2)]
    ops += [dist.P2POp(dist.irecv, each, (rank - 1) % size) for each in arrived]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    dist.all_reduce(y := x.clone(), group=halves[rank % 2])
    if rank == 3:
        dist.send(x, dst=0)
    source = dist.recv(x, src=None) if rank == 0 else -1
    work = dist.all_reduce(z := x.clone(), async_op=True)
    work.wait()
    dist.barrier()
    for group in halves:
        if dist.get_group_rank(dist.group.WORLD, rank) % 2 == halves.index(group):
            dist.destroy_process_group(group)
    return [[each.item() for each in arrived], y.item(), source, z.item()]


def test_calls_return_what_gloo_processes_return(emulated: EmulatedRanks, four: LocalRanks):
    assert emulated.run(call_collectives) == four.run(call_collectives)
    assert emulated.run(call_messages_and_groups) == four.run(call_messages_and_groups)


def add_random_numbers(size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Sum random vectors of one rank by each reducing call of torch.distributed; return the results."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)
    dist.all_reduce(total := x.clone())
    dist.reduce(at_root := x.clone(), dst=1)
    with dist._coalescing_manager():
        dist.all_reduce(first := x.clone())
        dist.all_reduce(second := x[: size // 2].clone())
    found = [total, first, second, *([at_root] if rank == 1 else [])]
    if size % ranks == 0:
        dist.reduce_scatter_single(whole := x.new_empty(size // ranks), x)
        dist.reduce_scatter(parts := x.new_empty(size // ranks), list(x.chunk(ranks)))
        found += [whole, parts]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_have_the_bits_of_gloo(dtype: torch.dtype, emulated: EmulatedRanks, four: LocalRanks):
    for size in (1, 5, 96, 1001, 2**20 + 4):  # the last is cut into more segments than two for each rank
        found, right = (ranks.run(add_random_numbers, size, dtype) for ranks in (emulated, four))
        for rank in range(4):
            assert all(map(torch.equal, found[rank], right[rank])), (size, rank)


def test_order_of_events_repeats():
    orders = []
    for _ in range(2):
        with mw.emulate(4) as ranks:
            ranks.run(call_messages_and_groups)
            orders.append(ranks.events)
    assert orders[0] == orders[1] and {event.rank for event in orders[0]} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("layout", "model"),
    [("dp2 tp2 pp2", "qwen3-0.6b"), ("dp2 zero3", "gpt2"), ("cp2", "qwen3-0.6b"), ("dp2 ep2", "qwen1.5-moe-a2.7b")],
)
def test_layout_on_emulated_ranks_matches_one_device(layout: str, model: str):
    """The real trainer's steps, compared as in `meshwright verify`."""
    parsed = Layout.parse(layout)
    problem = replace(CaseBuilder(parsed, preset(model)).make_sgd_problem(), steps=2)
    with mw.emulate(parsed.world_size) as ranks:
        results = [result for (result,) in ranks.run(run_rank, problem, layout)]
    found = compare(Reference(problem), results, parsed)
    assert found.failure is None and found.worst_error < 1e-10


def draw_numbers() -> list[float]:
    """Draw numbers from this rank's generators, interleaved with other ranks' draws."""
    drawn = []
    for _ in range(3):
        drawn += [float(np.random.randn()), torch.randn(1).item(), random.random()]
        dist.barrier()
    return drawn


def test_each_rank_has_its_own_random_states(emulated: EmulatedRanks):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for rank, drawn in enumerate(emulated.run(draw_numbers)):
        numbers, generator = np.random.RandomState(rank), torch.Generator().manual_seed(67280421310721)
        python = random.Random(rank)
        right = [
            f()
            for _ in range(3)
            for f in (numbers.randn, lambda g=generator: torch.randn(1, generator=g).item(), python.random)
        ]
        assert drawn == right
    assert torch.equal(torch.get_rng_state(), before)


def test_ranks_have_their_own_environments_that_end_with_them():
    read = ctypes.CDLL(None).getenv  # the environment that child processes inherit
    read.restype = ctypes.c_char_p

    def name_rank() -> tuple[str, str]:
        os.environ["OWN"] = os.environ["RANK"]
        dist.init_process_group("nccl", init_method="env://")
        dist.barrier()
        assert read(b"OWN") == read(b"RANK") == os.environ["RANK"].encode()
        return os.environ["OWN"], os.environ["WORLD_SIZE"]

    before, world = dict(os.environ), dist.distributed_c10d._world
    with mw.emulate(3, initialized=False) as ranks:
        assert ranks.run(name_rank) == [("0", "3"), ("1", "3"), ("2", "3")]
    assert read(b"OWN") is None
    assert dict(os.environ) == before and dist.distributed_c10d._world is world and not dist.is_initialized()


def train_with_ddp() -> list[float]:
    """Return the gradients of a model under DistributedDataParallel."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    x = torch.arange(8.0, dtype=torch.float64).view(2, 4) * (dist.get_rank() + 1)
    torch.compile(wrapped)(x).square().mean().backward()
    return [value for p in model.parameters() for value in p.grad.view(-1).tolist()]


def test_distributed_data_parallel_averages_gradients(emulated: EmulatedRanks, capsys):
    ranks = emulated.run(train_with_ddp)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    x = torch.cat([torch.arange(8.0, dtype=torch.float64).view(2, 4) * (rank + 1) for rank in range(4)])
    model(x).square().mean().backward()
    right = [value for p in model.parameters() for value in p.grad.view(-1).tolist()]
    assert all(rank == ranks[0] for rank in ranks) and ranks[0] == pytest.approx(right, rel=1e-12)
    assert capsys.readouterr().err.count("runs uncompiled") <= 1


def test_missing_wait_leaves_output_unchanged_on_every_rank(emulated: EmulatedRanks):
    def omit_wait() -> list[float]:
        x = torch.ones(2)
        work = dist.all_reduce(x, async_op=True)
        dist.barrier()
        before = x.tolist()
        work.wait()
        return before + x.tolist()

    assert emulated.run(omit_wait) == [[1.0, 1.0, 4.0, 4.0]] * 4


# --- errors


def test_deadlock_names_who_waits_for_whom_and_where(emulated: EmulatedRanks):
    def wait() -> None:
        rank = dist.get_rank()
        if rank < 2:
            dist.recv(torch.zeros(3), src=1 - rank)
        elif rank == 2:
            dist.all_reduce(torch.zeros(3))

    with pytest.raises(EmulationFailed) as caught:
        emulated.run(wait)
    lines = str(caught.value).splitlines()
    assert lines[0] == "deadlock: no rank can continue" and len(lines) == 5
    assert "rank 0 waits in recv from rank 1 (its call" in lines[1] and "test_emulation.py:" in lines[1]
    assert "rank 1 waits in recv from rank 0" in lines[2]
    assert "rank 2 waits in all_reduce over ranks 0-3" in lines[3]
    assert lines[3].endswith("ranks 0, 1, 3 have not called it") and lines[4] == "  rank 3 has ended"


def test_blocking_sends_on_both_ranks_deadlock():
    def send_first() -> None:
        dist.send(torch.zeros(3), dst=1 - dist.get_rank())
        dist.recv(torch.zeros(3), src=1 - dist.get_rank())

    with mw.emulate(2) as ranks, pytest.raises(EmulationFailed, match=r"rank 0 waits in send to rank 1"):
        ranks.run(send_first)


@pytest.mark.parametrize(
    ("sizes", "message"), [((3, 4), r"rank 0 all_reduce SUM float32\[3\].*rank 1 all_reduce SUM float32\[4\]")]
)
def test_mismatched_calls_are_named(sizes: tuple[int, int], message: str):
    with mw.emulate(2) as ranks, pytest.raises(EmulationFailed, match=message):
        ranks.run(lambda: dist.all_reduce(torch.zeros(sizes[dist.get_rank()])))


def test_error_of_one_rank_ends_the_others():
    ended = []

    def fail() -> None:
        try:
            if dist.get_rank() == 1:
                raise KeyError("lost")
            dist.barrier()
        finally:
            ended.append(dist.get_rank())

    with mw.emulate(3) as ranks:
        with pytest.raises(KeyError, match="lost"):
            ranks.run(fail)
        assert ranks.failure is not None and ranks.failure.rank == 1
        assert ended == [1, 0]  # rank 2 had not started
        assert 'raise KeyError("lost")' in ranks.failure.text and "scheduler.py" not in ranks.failure.text


def test_polling_rank_lets_others_run(emulated: EmulatedRanks):
    arrived = threading.Event()

    def poll() -> int:
        rounds = 0
        if dist.get_rank() == 3:
            arrived.set()
        while not arrived.wait(0.001) and rounds < 100:
            rounds += 1
            time.sleep(0.001)
        return rounds

    assert max(emulated.run(poll)) <= 1


def test_polling_for_message_of_ended_rank_is_a_deadlock(emulated: EmulatedRanks, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scheduler, "MAX_POLLS", 50)

    def poll() -> None:
        if dist.get_rank() < 2:
            work = dist.irecv(torch.zeros(3), src=3)
            while not work.is_completed():
                pass

    with pytest.raises(EmulationFailed, match=r"rank 0 polls recv from rank 3 .*(\n.*)*rank 2 has ended"):
        emulated.run(poll)


class LoadedState:
    """Fake process state that records which state was loaded last."""

    last = ""

    def __init__(self, name: str) -> None:
        self.name = name

    def save(self) -> None: ...

    def load(self) -> None:
        LoadedState.last = self.name


def test_rank_that_computes_after_an_interrupt_does_not_change_process_state(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scheduler, "GRACE", 0.01)
    go_on = threading.Event()

    def compute() -> None:
        time.sleep(0.2)  # until the main thread waits: a signal just before its lock call would not wake it
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        go_on.wait()

    ranks = scheduler.Scheduler([LoadedState("rank 0"), LoadedState("rank 1")], LoadedState("program"))
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # the test process may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            ranks.run([compute, compute])
    finally:
        signal.signal(signal.SIGINT, handler)
        go_on.set()
    ranks.close()
    for rank in ranks.ranks:
        assert rank.thread is not None
        rank.thread.join(10)
        assert not rank.thread.is_alive()
    assert LoadedState.last == "program"


def test_second_emulation_inside_one_is_refused(emulated: EmulatedRanks):
    with pytest.raises(mw.UserError, match="one emulation at a time"), mw.emulate(2):
        pass
    with pytest.raises(mw.UserError, match="give 1 to 512"):
        mw.emulate(0)
    with pytest.raises(mw.UserError, match="cannot emulate '4' ranks"):
        mw.emulate("4")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("truth", "returned", "message"),
    [
        ({}, {}, "one_device() returns no tensor"),
        (None, {}, "one_device() returns None: return a dictionary"),
        ({"w": torch.ones(4)}, None, "distributed() returns on rank 0 None: return a dictionary"),
        ({"w": torch.ones(4)}, {"w": 1.0}, 'distributed() returns on rank 0 1.0 for "w"'),
        ({"w": torch.ones(4)}, {"w": (torch.ones(1), 7)}, 'on rank 0 an index for "w" that does not fit shape [4]'),
    ],
)
def test_exercise_without_tensors_is_refused(truth: Any, returned: Any, message: str):
    with pytest.raises(mw.UserError, match=re.escape(message)):
        compare_ranks(truth, [returned])


def test_docstring_example_runs(repository: Path):
    run_examples(mw.emulate)
