"""Simulated CUDA streams on emulated ranks: the engine's step is correct, and planted faults in waits and buffers are
detected."""

from __future__ import annotations

import inspect
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed._symmetric_memory  # defines the operators that `fused_products` replaces

from meshwright.checkpoint.checkpointer import Checkpointer
from meshwright.checkpoint.snapshot import Snapshot, SnapshotBuffers
from meshwright.collectives.communicators import list_communicators
from meshwright.comm import backend, collectives, mesh, operators, products, transport
from meshwright.comm.mesh import Mesh, _axes
from meshwright.emulation.ranks import EmulatedRanks
from meshwright.emulation.scheduler import EmulationFailed
from meshwright.flight_recorder.call_log import RankCalls
from meshwright.flight_recorder.call_ring import get_process_writer
from meshwright.flight_recorder.circular_wait import find_circular_wait
from meshwright.layout import Layout
from meshwright.model.experts import Mixture
from meshwright.model.weight_gradients import WAITING
from meshwright.parallel import context, pipeline, zero
from meshwright.parallel import step as parallel_step
from meshwright.parallel.flat_buffers import TensorSlice
from meshwright.parallel.step import TARGET_SITE
from meshwright.schedules.library import generate_for_layout
from meshwright.spec.adapter_config import AdapterConfig
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table
from meshwright.spec.partition import Partition
from meshwright.spec.presets import preset
from meshwright.training import language_model, trainer
from meshwright.training.cuda_graphs import GRAPH_SITE, GraphedForwardBackward
from meshwright.verification.cases import CaseBuilder
from meshwright.verification.grid import GRID
from meshwright.verification.problem import Problem
from meshwright.verification.ranks import RankResult, _VerificationRun, run_rank
from tests.conftest import exhaustive
from tests.emulation.streams import ComputeStream, StreamFault, StreamRanks
from tests.training.recorded_graph import Capture, CapturedCalls, RecordedGraph

LAYOUTS = (  # every axis, ZeRO stage and kind of activation checkpointing, and each kind of schedule
    *("cp3 ac:full", "dp4 zero2 hs2 mb2", "dp2 zero1 cp2:ulysses", "dp2 zero3 tp2 ac:selective"),
    *("dp2 tp2 ep2 ac:selective", "dp2 zero3 pp2:zb-v mb4", "pp2:dualpipe mb4 tp2:nosp"),
)


def make_problem(layout: Layout, overlap: bool = False, config: ModelConfig | None = None) -> Problem:
    """Return a problem of two steps of a small model: `config` or, if it is None, one with experts under expert
    parallelism, else with a tied head."""
    config = config or preset("qwen1.5-moe-a2.7b" if layout.expert_parallel else "qwen3-0.6b")
    return replace(CaseBuilder(layout, config, overlap=overlap).make_sgd_problem(2), steps=2)


def train(
    ranks: EmulatedRanks, layout: Layout, overlap: bool = False, config: ModelConfig | None = None
) -> list[RankResult]:
    """Train on a layout; return the results, [rank]. overlap: True if tensor-parallel products overlap with their
    collectives. config: see `make_problem`."""
    return [result for (result,) in ranks.run(run_rank, make_problem(layout, overlap, config), str(layout))]


@cache
def train_plain(text: str, config: ModelConfig | None = None) -> list[RankResult]:
    """Train on a layout with blocking calls; return the results, [rank]. config: see `make_problem`."""
    layout = Layout.parse(text)
    with EmulatedRanks(layout.world_size) as ranks:
        return train(ranks, layout, config=config)


def find_difference(left: list[RankResult], right: list[RankResult], tolerance: float = 0.0) -> str | None:
    """Return the first result that is not bitwise equal in two runs, None if all are. tolerance: if not 0, values of
    tensors may differ by this fraction of the tensor's largest."""
    for rank, (one, other) in enumerate(zip(left, right, strict=True)):
        for step, mine in one.steps.items():
            theirs = other.steps[step]
            if not tolerance and (mine.loss, mine.norm) != (theirs.loss, theirs.norm):
                return f"rank {rank}, step {step}: loss or norm"
            slices = zip(mine.gradients + mine.weights, theirs.gradients + theirs.weights, strict=True)
            for here, there in slices:
                close = tolerance and (here.tensor - there.tensor).abs().max() <= tolerance * there.tensor.abs().max()
                if not close and not torch.equal(here.tensor, there.tensor):
                    return f"rank {rank}, step {step}: {here.kind} of {here.name}"
        if abs(one.final_loss - other.final_loss) > tolerance * abs(other.final_loss):
            return f"rank {rank}: validation"
    return None


def read_calls(ranks: EmulatedRanks) -> list[RankCalls]:
    """Return the recorded calls, [rank]."""
    return [replace(each, rank=rank) for rank, each in enumerate(ranks.run(lambda: get_process_writer().read()))]


def check(text: str, seed: int) -> None:
    """Assert that a layout on simulated streams gives bitwise the results of blocking calls, without circular wait."""
    layout, plain = Layout.parse(text), train_plain(text)
    with StreamRanks(layout.world_size, seed=seed) as ranks:
        assert find_difference(plain, train(ranks, layout)) is None, text
        calls = read_calls(ranks)
    assert find_circular_wait(calls) is None
    assert layout.world_size == 1 or all(len(each.calls) > 10 for each in calls)


@pytest.mark.parametrize("text", [*LAYOUTS[::2], *exhaustive(*LAYOUTS[1::2])])
def test_step_on_streams_equals_blocking_step(text: str):
    check(text, seed=LAYOUTS.index(text))


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_step_on_streams_equals_blocking_step_for_the_whole_grid():
    for seed, layout in enumerate(GRID):
        check(str(layout), seed)


# --- planted faults

FAULTS = {  # layout, owner, function, text, replacement
    "ring attention computes with a KV block that has not arrived": (
        *("cp2", context, "_pass_kv", "handle.wait()", "pass"),
    ),
    "ring attention receives into the KV block that it sends": (
        *("cp3", context, "_pass_kv", "spare[distance % 2]", "spare[0]"),
    ),
    "ZeRO-3 computes before the all-gather has ended": (
        *("dp2 zero3", zero.FsdpUnit, "unshard", "self.pending_all_gather.wait()", "pass"),
    ),
    "ZeRO-3 frees the next unit during its all-gather": (
        *("dp2 zero3", zero.ParameterPrefetcher, "leave", "unit.reshard(self._list_next_units(name, self._next))"),
        "[u.parameters.untyped_storage().resize_(0) for u in self._sharded[self._next.get(name, name)]]",
    ),
    "ZeRO-3 all-gathers the next unit into the memory of the one that computes": (
        *("dp2 zero3", zero.ParameterPrefetcher, "_unshard", "for unit in self._needs[name]:"),
        "for one, other in zip(self._sharded[name], self._sharded.get(prefetched, ())):\n"
        "        if one._bytes == other._bytes: one._storage._swap_data_ptr_(other._storage)\n"
        "    for unit in self._needs[name]:",
    ),
    "ZeRO-2 reuses a gradient buffer that is being sent": (
        *("dp2 zero2", zero.GradientReducer, "_start", "output = unit.gradient if first"),
        "self._pool.release(buffer); output = unit.gradient if first",
    ),
    "gradients are read before their reduce-scatter has ended": (
        *("dp2 zero1", zero.GradientReducer, "_wait_for_oldest", "handle.wait()", "pass"),
    ),
    "ZeRO-3 reads gradients before their reduce-scatter has ended, although later all-gathers have": (
        *("dp2 zero3 mb2", zero.GradientReducer, "_wait_for_oldest", "handle.wait()", "pass"),
    ),
    "replicas' sums are not waited for": (
        *("dp4 zero2 hs2", zero.GradientReducer, "finish"),
        *("self._replica_sums.pop(0).wait()", "self._replica_sums.pop(0)"),
    ),
    "tied embedding's sum is not waited for": (
        *("pp2 mb2", zero.GradientReducer, "finish", "for handle in tied:", "for handle in ():"),
    ),
    "forward begins before the all-gather of parameters has ended": (
        *("dp2 zero1", zero.ParameterPrefetcher, "_unshard", "unit.unshard()", "pass"),
    ),
    "optimizer updates parameters during their all-gather": (
        *("dp2 zero1", trainer.Trainer, "_update", "self.optimizer.step("),
        "self.parallel.all_gather_parameters(); self.optimizer.step(",
    ),
    "pipeline overwrites the activation that it sends": (
        *("pp2 mb2", pipeline._PipelineExecution, "step", "made.detach()"),
        "self.__dict__.setdefault('buffer', torch.empty_like(made)).copy_(made.detach())",
    ),
    "pipeline computes with an activation that has not arrived": (
        *("pp2 mb2", pipeline._PipelineExecution, "read", "handle.wait()", "pass"),
    ),
    "blocking call returns without a wait": (
        *("tp2", collectives, "_post_call", "handle.wait()", "pass"),
    ),
}  # fmt: skip
OVERLAP_FAULTS = {  # function of `products`, text, replacement
    "gathered chunk is multiplied before it has arrived": ("multiply_gathered", "handle.wait()", "pass"),
    "chunks are received into one buffer": (
        *("multiply_gathered", "x_GBsX[sources[distance]]", "x_GBsX[sources[1]]"),
    ),
    "tokens change while they are sent": (
        *("multiply_gathered", "torch.mm(", "x_GBsX[axis.rank].mul_(2); torch.mm("),
    ),
    "products are summed before they have arrived": ("multiply_and_scatter", "handle.wait()", "pass"),
    "product is written into the buffer that is sent": (
        *("multiply_and_scatter", "sent = torch.empty_like("),
        "sent = in_flight[0][1] if in_flight else torch.empty_like(",
    ),
    "one rank sends in another order": (
        *("multiply_and_scatter", "range(1, axis.size):", "range(1, axis.size)[:: 1 if axis.rank else -1]:"),
    ),
    "results are read before their all-reduce has ended": ("multiply_and_reduce", "handle.wait()", "pass"),
    "products are written into a chunk that is being all-reduced": (
        *("multiply_and_reduce", "matrices_XY, y_NY)", "matrices_XY, y_BSY.flatten(0, 1)[: len(y_NY)])"),
    ),
    "one rank sums in another order": (
        *("multiply_and_reduce", "in products]", "in list(products)[:: 1 if axis.rank else -1]]"),
    ),
}  # fmt: skip


@contextmanager
def fused_products() -> Iterator[None]:
    """Context manager in which products overlap by operators like those of symmetric memory: a call over the group, for
    which the stream waits, and one product."""

    def find_group(name: str) -> Any:
        axes = (axis for same in _axes.values() for axis in same)
        return next(axis.group for axis in axes if axis.group is not None and axis.group.group_name == name)

    def gather(
        x_BsX: torch.Tensor, matrices: list[torch.Tensor], dim: int, name: str, return_A: bool
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        group = find_group(name)
        x_GBsX = x_BsX.new_empty(group.size(), *x_BsX.shape)
        transport.native_all_gather(x_GBsX.view(-1), x_BsX.reshape(-1), group=group)
        x_BSX = x_GBsX.movedim(0, dim).flatten(dim, dim + 1)
        return x_BSX if return_A else None, [x_BSX @ each for each in matrices]

    def scatter(x_BSX: torch.Tensor, matrix_XY: torch.Tensor, op: str, dim: int, name: str) -> torch.Tensor:
        assert op == "sum"
        group = find_group(name)
        y_GBsY = (x_BSX @ matrix_XY).unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous()
        mine_BsY = torch.empty_like(y_GBsY[0])
        transport.native_reduce_scatter(mine_BsY.view(-1), y_GBsY.view(-1), group=group)
        return mine_BsY

    fused = torch.ops.symm_mem
    with (
        mock.patch.object(fused, "fused_all_gather_matmul", gather, create=True),
        mock.patch.object(fused, "fused_matmul_reduce_scatter", scatter, create=True),
        mock.patch.object(language_model, "choose_product_overlap", lambda setting, axis, may_fuse: "symmetric"),
    ):
        yield


@contextmanager
def edited(owner: Any, name: str, old: str, new: str) -> Iterator[None]:
    """Context manager in which `owner.name` has the code of its source with `old` replaced by `new`, also where an
    operator refers to the function."""
    function = vars(owner)[name]
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{name} has changed: plant the fault anew"
    made: dict[str, Any] = {}
    exec(compile(source.replace(old, new), f"edited {name}", "exec", dont_inherit=True), function.__globals__, made)
    before, function.__code__ = function.__code__, made[name].__code__
    try:
        yield
    finally:
        function.__code__ = before


def run_with_fault(fault: str, text: str, overlap: bool = False) -> str | None:
    """Return what reveals a planted fault on a layout; None if nothing does."""
    _, owner, name, old, new = FAULTS[fault]
    plain = train_plain(text)
    with StreamRanks(Layout.parse(text).world_size) as ranks, edited(owner, name, old, new):
        try:
            return find_difference(plain, train(ranks, Layout.parse(text), overlap), 1e-9 * overlap)
        except StreamFault as error:
            return str(error)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught_on_streams(fault: str):
    assert run_with_fault(fault, FAULTS[fault][0]) is not None


OVERLAPS = {"chunks": nullcontext, "symmetric": fused_products}
SOME = "ZeRO-3 computes before the all-gather has ended", "blocking call returns without a wait"


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("fault", [*SOME, *exhaustive(*(fault for fault in FAULTS if fault not in SOME))])
def test_planted_fault_is_caught_on_streams_beside_overlapped_products(fault: str, overlap: str):
    text = " ".join(dict.fromkeys([*FAULTS[fault][0].split(), "tp2"]))
    with OVERLAPS[overlap]():
        assert run_with_fault(fault, text, overlap=True) is not None


@pytest.mark.parametrize("text", ["tp2", *exhaustive("tp3", "dp2 zero3 tp2 ac:selective", "tp2 pp2:zb-h1 mb2")])
def test_fused_products_on_streams_equal_blocking_step(text: str):
    layout = Layout.parse(text)
    with fused_products(), StreamRanks(layout.world_size, seed=4) as ranks:
        found = train(ranks, layout, overlap=True)
        calls = read_calls(ranks)
    assert find_difference(found, train_plain(text), 1e-12) is None
    assert find_circular_wait(calls) is None
    for each in calls:
        operations = {call.operation for call in each.calls if call.site.startswith(("attention", "mlp"))}
        assert operations == {"all_gather", "reduce_scatter"}  # in one kernel, not in chunks


@pytest.mark.parametrize("fault", OVERLAP_FAULTS)
def test_planted_fault_in_overlapped_products_is_caught_on_streams(fault: str):
    text = "tp3:nosp" if OVERLAP_FAULTS[fault][0] == "multiply_and_reduce" else "tp3"
    layout, plain = Layout.parse(text), train_plain(text)
    with StreamRanks(3) as ranks, edited(products, *OVERLAP_FAULTS[fault]):
        try:
            found = find_difference(train(ranks, layout, overlap=True), plain, 1e-12)
            found = found or find_circular_wait(read_calls(ranks))
        except EmulationFailed as error:
            found = str(error)
    assert found is not None


@pytest.mark.parametrize(
    "text",
    [
        *("tp3", "tp2:nosp", "tp2 pp2:zb-h1 mb2 ac:selective"),
        *exhaustive("tp8", "tp4", "dp2 zero3 tp2 ac:selective", "cp2 tp2", "dp2 tp2 ep2 ac:full", "tp3:nosp ac:full"),
        *exhaustive("dp2 zero2 tp2 mb2", "pp2:dualpipe mb4 tp2", "tp2 pp2:zb-h1 mb2 ac:full"),
    ],
)
def test_products_that_overlap_with_collectives_on_streams_equal_blocking_step(text: str):
    layout = Layout.parse(text)
    with EmulatedRanks(layout.world_size) as ranks:
        overlapped = train(ranks, layout, overlap=True)
    # Sums of two ranks do not depend on their order; of more, or over pp and dp, sums are those of other products, and
    # products of the few tokens of a rank under ep may be.
    exact = layout.tp == 2 and not layout.expert_parallel
    assert find_difference(overlapped, train_plain(text), 0.0 if exact else 1e-12) is None
    with StreamRanks(layout.world_size, seed=4) as ranks:
        assert find_difference(overlapped, train(ranks, layout, overlap=True)) is None
        calls = read_calls(ranks)
    assert find_circular_wait(calls) is None
    for each in calls:
        operation, parts = ("rotate", layout.tp - 1) if layout.tensor_sequence_parallel else ("all_reduce", layout.tp)
        of_layers = [call for call in each.calls if call.axis == "tp" and call.site.startswith(("attention.", "mlp."))]
        chunks = [call for call in of_layers if call.operation.startswith(operation)]
        if operation == "all_reduce":
            chunks = [call for call in chunks if not call.site.endswith(".backward")]  # overlap with weight gradients
        together = sum(later.posted < sooner.waited for sooner, later in pairwise(chunks))
        assert chunks and together == len(chunks) * (parts - 1) // parts  # those of one product


ADAPTED = replace(preset("qwen3-0.6b"), adapter=AdapterConfig("lora", 3, 6.0, random_constants=True))
UNGATED, GATED = preset("dots1-tiny"), preset("qwen2-moe-tiny")
"""Models whose shared expert has no gate, and a sigmoid gate."""


@pytest.mark.parametrize(
    ("text", "config"),
    [
        *(("tp2 ac:full", ADAPTED), ("tp2 ep2 ac:selective", GATED)),
        *exhaustive(("tp2 ep2", UNGATED), ("tp2 ep2 ac:selective", UNGATED)),
        *exhaustive(("tp3", ADAPTED), ("tp3:nosp", ADAPTED), ("tp2 ac:selective", ADAPTED), ("dp2 tp2 ep2", UNGATED)),
        *exhaustive(("dp2 tp2:nosp ep2 ac:selective", UNGATED), ("tp2 ep2 ac:full", UNGATED)),
        *exhaustive(("tp2:nosp ep2", GATED), ("dp2 tp2:nosp ep2 ac:full", GATED), ("dp2 tp2 ep4", GATED)),
    ],
)
def test_products_of_adapters_and_of_shared_experts_overlap_with_collectives_too(text: str, config: ModelConfig):
    layout = Layout.parse(text)
    with StreamRanks(layout.world_size, seed=4) as ranks:
        found = train(ranks, layout, True, config)
        calls = read_calls(ranks)
    assert find_difference(found, train_plain(text, config), 1e-12) is None
    assert find_circular_wait(calls) is None
    whole = ("mlp.input", "attention.input") * ("selective" in text)  # gathered again
    for each in calls if layout.tensor_sequence_parallel else ():
        of_layers = [call for call in each.calls if call.axis == "tp" and call.site.startswith(("attention.", "mlp."))]
        sites = {call.site.removesuffix(".backward") for call in of_layers if not call.operation.startswith("rotate")}
        assert of_layers and sites == set(whole)


@pytest.mark.parametrize("config", [GATED, *exhaustive(UNGATED)])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("multiply_and_scatter", "tp2 ep2"),
        *exhaustive(("multiply_gathered", "tp2 ep2"), ("multiply_and_reduce", "tp2:nosp ep2")),
    ],
)
def test_missing_wait_in_products_of_shared_experts_is_caught_on_streams(name: str, text: str, config: ModelConfig):
    plain, wait = train_plain(text, config), "handle.wait()"
    with StreamRanks(2) as ranks, edited(products, name, wait, f'site.startswith("attention") and {wait}'):
        try:
            found = find_difference(train(ranks, Layout.parse(text), True, config), plain, 1e-12)
        except StreamFault as error:
            found = str(error)
    assert found is not None


def meet_others() -> list[tuple[float, float]]:
    """Return the simulated times of this rank's host before and after each of four barriers."""
    world = Mesh.create(Layout.parse("dp3")).world
    stream: Any = backend.current_stream(torch.device("cpu"))
    times = []
    for _ in range(4):
        before = stream.host
        collectives.barrier(world, "test")
        times.append((before, stream.host))
    return times


@pytest.mark.parametrize("planted", [False, True])
def test_barrier_blocks_the_host_and_not_only_the_stream(planted: bool):
    fault = edited(collectives, "barrier", "stream.synchronize()", "pass") if planted else nullcontext()
    with StreamRanks(3) as ranks, fault:
        barriers = list(zip(*ranks.run(meet_others), strict=True))
    early = [min(after for _, after in each) < max(before for before, _ in each) for each in barriers]
    assert any(early) == planted


def save_and_update() -> list[float]:
    """Return the values that a checkpoint of eight weights would write while the next step changes them."""
    weights = torch.arange(8.0)
    snapshot = SnapshotBuffers().take([TensorSlice("master", "weights", 0, 8, weights)])
    snapshot.wait_on_stream()
    weights.zero_()
    snapshot.wait()
    return snapshot.slices[0].tensor.tolist()


@pytest.mark.parametrize(
    ("owner", "name", "old", "new"),
    [
        (Snapshot, "wait", "return", "return"),
        (Snapshot, "wait", "self.ready.synchronize()", "pass"),
        (Snapshot, "wait_on_stream", "self.stream.wait_event(self.ready)", "pass"),
        (SnapshotBuffers, "take", "self._copies.record_event()", "stream.record_event()"),
        (SnapshotBuffers, "_start_copies", "self._copies.wait_stream(stream)", "pass"),
    ],
    ids=["right", "no wait", "no wait on the stream", "event of another stream", "copies begin too early"],
)
def test_snapshot_is_copied_before_the_next_update_and_read_after_the_copies(owner: Any, name: str, old: str, new: str):
    with StreamRanks(1) as ranks, edited(owner, name, old, new) if old != new else nullcontext():
        try:
            (written,) = ranks.run(save_and_update)
        except StreamFault:
            written = []
    assert (written == list(range(8))) == (old == new)


def save_and_train(problem: Problem, text: str) -> bool:
    """Take a snapshot of the state after a step, train another, and return True if the snapshot is of its time."""
    layout = Layout.parse(text)
    mesh = Mesh.create(layout)
    this = _VerificationRun(problem, layout, mesh, None)._make_trainer()
    this.step()
    slices = this.slices(owned=True)
    state = {item.name: item.tensor.clone() for item in slices}
    snapshot = SnapshotBuffers().take(slices)
    this.before_update = snapshot.wait_on_stream
    this.step()
    snapshot.wait()
    mesh.close()
    return all(torch.equal(item.tensor, state[item.name]) for item in snapshot.slices)


def save_and_compute(seconds: float) -> list[float | None]:
    """Take a snapshot, which takes a second, and compute for a time before the update. Return the wait for the copies:
    read before the update, after it, when the host has reached it, and from the times of the stream itself."""
    stream: Any = backend.current_stream(torch.device("cpu"))
    weights = torch.arange(8.0)
    snapshot = SnapshotBuffers().take([TensorSlice("master", "weights", 0, 8, weights)])
    found = [snapshot.read_wait()]
    stream.device += seconds
    before = stream.device
    snapshot.wait_on_stream()
    found.append(snapshot.read_wait())
    waited = stream.device - before
    stream.device += 5  # another step
    snapshot.wait_on_stream()  # nothing is left to wait for
    stream.host = before + waited
    return [*found, snapshot.read_wait(), waited]


@pytest.mark.parametrize(("computing", "waiting"), [(0.25, 0.75), (3.0, 0.0)])
def test_wait_of_update_for_copies_is_timed_without_a_wait_of_the_host(computing: float, waiting: float):
    with StreamRanks(1) as ranks:
        ((early, unreached, read, waited),) = ranks.run(save_and_compute, computing)
    assert early is None and (unreached is None or not waiting)
    assert read == pytest.approx(waiting) and waited == pytest.approx(waiting)


def save_and_step(directory: str, steps: int) -> tuple[list[tuple[int, float]], float, float]:
    """Save the state of a model and train further steps. Return the stalls that are reported, with their steps; how
    long the call of `save` took; the wait of the first update, from the times of the stream itself."""
    layout, waits = Layout.parse("dp1"), [0.0]
    stream: Any = backend.current_stream(torch.device("cpu"))
    mesh = Mesh.create(layout)
    this = _VerificationRun(make_problem(layout), layout, mesh, None)._make_trainer()
    saver, reported = Checkpointer(Path(directory), mesh, this.task.config), list[tuple[int, float]]()
    saver.on_stall = lambda step, stall: reported.append((step, stall))

    def wait() -> None:
        before = stream.device
        saver.wait_on_stream()
        waits.append(stream.device - before)

    this.before_update = wait
    saver.save(1, this.slices(owned=True), {})
    saving = saver.stall_seconds
    assert not reported
    for number in range(steps):
        this.step()
        assert len(reported) == (number > 0), "one step late"
        stream.host = max(stream.host, stream.device)
    saver.wait()
    mesh.close()
    return reported, saving, max(waits)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_reported_stall_has_the_wait_of_the_next_update(steps: int, tmp_path: Path):
    with StreamRanks(1) as ranks:
        ((reported, saving, waited),) = ranks.run(save_and_step, str(tmp_path), steps)
    assert reported == [(1, pytest.approx(saving + waited))]
    assert (waited > 0) == (steps > 0)


@pytest.mark.parametrize("planted", [False, True])
def test_step_computes_beside_a_snapshot_until_the_update(planted: bool):
    fault = edited(trainer.Trainer, "_update", "self.before_update()", "pass") if planted else nullcontext()
    with StreamRanks(2) as ranks, fault, pytest.raises(StreamFault) if planted else nullcontext():
        assert all(ranks.run(save_and_train, make_problem(Layout.parse("dp2 zero1")), "dp2 zero1"))


def test_reordered_calls_of_one_rank_are_a_circular_wait_although_results_are_right():
    text, reducer = "dp4 zero2 hs2", zero.GradientReducer
    plain = train_plain(text)
    late = (
        "if last and unit.axes.data.rank == 0: self.__dict__.setdefault('late', []).append(unit)\n"
        "    elif last and not unit.axes.replica.trivial:"
    )
    post = (
        "self._replica_sums += [all_reduce(unit.gradient, unit.axes.replica, REPLICA_SITE, async_op=True)"
        " for unit in self.__dict__.pop('late', [])]\n    while self._replica_sums:"
    )
    with (
        StreamRanks(4) as ranks,
        edited(reducer, "_add_to_shard", "if last and not unit.axes.replica.trivial:", late),
        edited(reducer, "finish", "while self._replica_sums:", post),
    ):
        assert find_difference(plain, train(ranks, Layout.parse(text))) is None
        found = find_circular_wait(read_calls(ranks))
    assert found is not None and found.startswith("circular wait: rank 0 in call")
    assert "data.gradients over shard" in found and "data.gradients.replicas over replica" in found


def test_target_count_is_waited_for_after_the_all_gathers_of_parameters():
    with StreamRanks(2) as ranks:
        train(ranks, Layout.parse("dp2 zero1"))
        for each in read_calls(ranks):
            first, second = [call for call in each.calls if call.site == TARGET_SITE]
            gathers = [call for call in each.calls if call.site == zero.PARAMETER_SITE and call.number < second.number]
            assert [call for call in gathers if call.number > first.number], "no all-gather between the two steps"
            assert all(call.waited < second.waited for call in gathers)


def test_all_gathers_of_parameters_overlap_the_next_forward():
    """As the planner prices them: when a layer's forward begins, only those that its parameters need are complete."""
    in_flight: dict[int, list[int]] = {}
    enter = zero.ParameterPrefetcher.enter

    def watch(prefetcher: zero.ParameterPrefetcher, name: str, x: Any) -> Any:
        entered = enter(prefetcher, name, x)
        gathers = {id(unit) for needed in prefetcher._needs.values() for unit in needed if unit.pending_all_gather}
        in_flight.setdefault(id(prefetcher), []).append(len(gathers))
        return entered

    with StreamRanks(2) as ranks, mock.patch.object(zero.ParameterPrefetcher, "enter", watch):
        train(ranks, Layout.parse("dp2 zero1"))
    assert len(in_flight) == 2
    for counts in in_flight.values():
        units = counts[0] + 1
        assert units >= 4 and len(counts) >= 2 * units
        assert counts[: 2 * units] == 2 * [*reversed(range(units))]


@pytest.mark.parametrize(
    "text",
    ["tp2", "dp2 zero3 tp2 ac:selective", *exhaustive("dp2 zero1 tp2 mb2 ac:full", "dp2 ep2", "dp2 tp2 ep2")],
)
def test_weight_gradients_are_computed_while_calls_of_backward_are_in_flight(text: str):
    layout, plain, overlapped = Layout.parse(text), train_plain(text), list[str]()
    post, find_on_gpu = collectives._post_call, parallel_step.find_overlapped_weights

    def find(model: Any, mesh: Mesh) -> Any:
        with mock.patch.object(mesh, "device", torch.device("cuda")):
            return find_on_gpu(model, mesh)

    def watch(posted: Any, call: Any, *rest: Any, **options: Any) -> Any:
        run = call.axis.communicator.meanwhile

        def meanwhile() -> None:
            overlapped.extend([call.site] if WAITING in run.__self__._queues else [])
            run()

        if run is None:
            return post(posted, call, *rest, **options)
        with mock.patch.object(call.axis.communicator, "meanwhile", meanwhile):
            return post(posted, call, *rest, **options)

    with (
        StreamRanks(layout.world_size) as ranks,
        mock.patch.object(parallel_step, "find_overlapped_weights", find),
        mock.patch.object(collectives, "_post_call", watch),
    ):
        assert find_difference(plain, train(ranks, layout)) is None
        assert find_circular_wait(read_calls(ranks)) is None
    problem = make_problem(layout)
    assert len(overlapped) >= layout.world_size * problem.steps * problem.config.layers * layout.micro_batches
    assert all(site.endswith(".backward") for site in overlapped)


def test_weight_gradient_that_waits_for_a_call_is_added_at_the_end_of_its_pass():
    """Here no call of backward follows, so that each computation waits for the next, and the last for the end."""
    text, plain = "dp2 zero2 mb2", train_plain("dp2 zero2 mb2")
    with (
        StreamRanks(2) as ranks,
        mock.patch.object(parallel_step, "find_overlapped_weights", lambda model, mesh: set(model.parameters())),
    ):
        assert find_difference(plain, train(ranks, Layout.parse(text))) is None


# --- the outcome of a step


def launch_steps(problem: Problem, text: str, unfinished: int) -> list[tuple[float, float, bool]]:
    """Launch steps of which `unfinished` are not finished when the next is launched. Return for each its loss, its
    gradient norm, and True if the device still computes later work when the host knows these."""
    layout = Layout.parse(text)
    mesh = Mesh.create(layout)
    this = _VerificationRun(problem, layout, mesh, None)._make_trainer()
    this.updates_early = True
    found = []

    def finish() -> None:
        outcome, stream = this.finish_step(), backend.current_stream(mesh.device)
        ahead = isinstance(stream, ComputeStream) and stream.host < stream.device
        found.append((outcome.loss, outcome.gradient_norm, ahead))

    with mock.patch.object(this.task, "prefetch_step"):
        for step in range(problem.steps):
            this.launch_step()
            if step >= unfinished:
                finish()
        for _ in range(unfinished):
            finish()
    mesh.close()
    return found


@pytest.mark.parametrize("text", ["dp2 zero1", "tp2", *exhaustive("dp2 zero3", "pp2 mb4")])
def test_outcome_of_a_step_is_read_while_the_device_computes_the_next(text: str):
    layout = Layout.parse(text)
    problem = replace(make_problem(layout), steps=4)
    with EmulatedRanks(layout.world_size) as ranks:
        plain = ranks.run(launch_steps, problem, text, 0)
    for unfinished, seed in ((0, 1), (1, 2), (1, 3)):
        with StreamRanks(layout.world_size, seed=seed) as ranks:
            found = ranks.run(launch_steps, problem, text, unfinished)
        for here, there in zip(found, plain, strict=True):
            assert [each[:2] for each in here] == [each[:2] for each in there]
            assert [ahead for *_, ahead in here[:-1]] == [unfinished == 1] * 3


def test_outcome_that_is_read_before_its_copy_has_arrived_is_detected():
    problem = replace(make_problem(Layout.parse("dp2 zero1")), steps=2)
    with StreamRanks(2) as ranks, edited(trainer.Trainer, "_copy_outcome", "event.synchronize()", "pass"):
        found = ranks.run(launch_steps, problem, "dp2 zero1", 1)
    assert all(loss != loss for loss, *_ in found[0])


# --- CUDA graphs


def run_graph(problem: Problem, text: str, graph: bool, overlap: str = "off") -> tuple[list[tuple[float, float]], Any]:
    """Return loss and gradient norm of each step, and the byte counts of the calls. graph: True if forward and backward
    are replayed from the third step on. overlap: of tensor-parallel products with their collectives."""
    layout = Layout.parse(text)
    mesh = Mesh.create(layout)
    this: Any = _VerificationRun(problem, layout, mesh, None)._make_trainer()
    this.updates_early = True
    mesh.communicator.product_overlap = overlap
    if graph:
        this.task._run_passes = GraphedForwardBackward(this.task._launch_passes, this.passes)
    with mock.patch.object(this.task, "prefetch_step"):
        outcomes = [this.step() for _ in range(problem.steps)]
    mesh.close()
    assert not graph or this.task._run_passes._captured is None, "NCCL closes no communicator that a graph uses"
    return [(outcome.loss, outcome.gradient_norm) for outcome in outcomes], mesh.record.table()


def replay_on_streams(text: str, overlap: str = "off") -> tuple[Any, Any]:
    """Train four steps, of which two are replays of a graph on simulated streams; return what `run_graph` returns, with
    and without graph, [rank]."""
    layout = Layout.parse(text)
    problem = replace(make_problem(layout), steps=4)
    with EmulatedRanks(layout.world_size) as ranks:
        plain = ranks.run(run_graph, problem, text, False, overlap)
    with (
        StreamRanks(layout.world_size, seed=3) as ranks,
        mock.patch.multiple(torch.cuda, CUDAGraph=RecordedGraph, graph=Capture),
        CapturedCalls(ranks.matcher),
    ):
        found = ranks.run(run_graph, problem, text, True, overlap)
        calls = read_calls(ranks)
    assert find_circular_wait(calls) is None
    replays = [[call for call in each.calls if call.site == GRAPH_SITE] for each in calls]
    assert {len(each) for each in replays} == {2 * (layout.tp > 1)}
    return found, plain


@pytest.mark.parametrize(
    "text",
    ["dp2 zero1", "dp2 zero1 tp2 ac:selective", *exhaustive("tp2 mb2 ac:full", "tp3:nosp", "dp2 tp2 mb2", "tp4")],
)
def test_replays_of_a_graph_with_calls_to_other_ranks_equal_launched_steps(text: str):
    """Losses, gradient norms and counted bytes."""
    found, plain = replay_on_streams(text)
    assert found == plain
    assert all(len({loss for loss, _ in steps}) == 4 for steps, _ in found)


@pytest.mark.parametrize(
    ("text", "name", "old", "new"),
    [
        ("dp2 zero1", "__call__", "for reduce in captured.reductions:", "for reduce in captured.reductions[:-2]:"),
        ("tp2", "__call__", "for reduce in captured.reductions:", "for reduce in captured.reductions[:-1]:"),
        ("tp2", "_replay", "for each in captured.record.sites.values():", "for each in ():"),
    ],
    ids=["reductions are not waited for", "norms' gradients are not summed over tp", "bytes are not counted"],
)
def test_planted_fault_in_calls_of_a_graph_is_caught(text: str, name: str, old: str, new: str):
    with edited(GraphedForwardBackward, name, old, new):
        try:
            found, plain = replay_on_streams(text)
        except (StreamFault, AssertionError):
            return
    assert found != plain


# --- gathered parameters


class Gathered(NamedTuple):
    """Units of one kind on one rank: how many had memory for gathered parameters at once at most, the number of
    different sizes, of all-gathers in passes, and of those for which memory was allocated."""

    at_once: int
    sizes: int
    all_gathers: int
    allocations: int


def find_gathered(text: str) -> dict[str, list[Gathered]]:
    """Train on a layout with ZeRO-3 on simulated streams. Return what is held of each kind of FSDP unit ("layers",
    "embedding", "head"), by rank."""
    units: dict[int, list[zero.FsdpUnit]] = {}
    gathers: Counter[tuple[int, str]] = Counter()
    allocations: Counter[tuple[int, str]] = Counter()
    most: dict[tuple[int, str], int] = {}
    start, reshard = zero.FsdpUnit.start_all_gather, zero.FsdpUnit.reshard
    unshard = zero.ParameterPrefetcher._unshard

    def count(unit: zero.FsdpUnit) -> None:
        of_rank = units.setdefault(id(unit.axes.shard.communicator), [])
        if unit not in of_rank:
            of_rank.append(unit)
        held = [each for each in of_rank if each.parameters.untyped_storage().nbytes()]
        for kind in {each.flat.name.split(".")[0] for each in held}:
            here = sum(each.flat.name.split(".")[0] == kind for each in held)
            key = id(unit.axes.shard.communicator), kind
            most[key] = max(most.get(key, 0), here)

    def unshard_counted(prefetcher: zero.ParameterPrefetcher, *names: str) -> None:
        for unit in (unit for name in names if name for unit in prefetcher._sharded[name]):
            if not unit.is_unsharded and unit.pending_all_gather is None:
                key = id(unit.axes.shard.communicator), unit.flat.name.split(".")[0]
                gathers[key] += 1
                allocations[key] += not unit.parameters.untyped_storage().nbytes()
        unshard(prefetcher, *names)

    def start_counted(unit: zero.FsdpUnit) -> None:
        start(unit)
        count(unit)

    def reshard_counted(unit: zero.FsdpUnit, *next_units: Any) -> None:
        reshard(unit, *next_units)
        count(unit)

    layout = Layout.parse(text)
    problem = make_problem(layout)
    problem = replace(problem, config=replace(problem.config, layers=8))
    with (
        StreamRanks(layout.world_size, seed=5) as ranks,
        mock.patch.object(zero.FsdpUnit, "start_all_gather", start_counted),
        mock.patch.object(zero.FsdpUnit, "reshard", reshard_counted),
        mock.patch.object(zero.ParameterPrefetcher, "_unshard", unshard_counted),
    ):
        ranks.run(run_rank, problem, text)
    found: dict[str, list[Gathered]] = {}
    for key, counted in most.items():
        rank, kind = key
        sizes = {each._bytes for each in units[rank] if each.flat.name.split(".")[0] == kind}
        found.setdefault(kind, []).append(Gathered(counted, len(sizes), gathers[key], allocations[key]))
    return found


@pytest.mark.parametrize(
    "text",
    [
        *("dp2 zero3", "dp2 zero3 mb2 ac:full", "dp2 zero3 pp2:zb-v mb4"),
        *exhaustive("dp2 zero3 tp2 ac:selective", "dp4 zero3 hs2 mb2", "dp2 zero3 pp2 mb4"),
    ],
)
def test_zero_3_gathers_the_layers_of_a_pass_into_two_buffers(text: str):
    layout, found = Layout.parse(text), find_gathered(text)
    assert len(found["layers"]) == layout.world_size
    assert {each[:2] for each in found["layers"]} == {(2, 1)}, found
    for kind in ("embedding", "head"):
        assert {each.at_once for each in found[kind]} == {1}
    for each in found["layers"] if layout.pp == 1 else ():
        assert each.all_gathers % 8 == 0
        assert each.allocations == 2 * each.all_gathers // 8, found


@pytest.mark.parametrize(
    ("owner", "name", "old"),
    [
        (zero.ParameterPrefetcher, "leave", "unit.reshard(self._list_next_units(name, self._next))"),
        (zero.ParameterPrefetcher, "_leave_backward", "unit.reshard(self._list_next_units(name, self._previous))"),
    ],
)
def test_layer_that_stays_gathered_is_counted(owner: Any, name: str, old: str):
    with edited(owner, name, old, "pass"):
        assert max(each.at_once for each in find_gathered("dp2 zero3")["layers"]) > 2


# --- overlap of reductions of gradients with all-gathers of parameters


def list_in_flight(ranks: StreamRanks, operation: str, axis: Any = None) -> list[Any]:
    """Return the running rank's kernels of an operation, such as "all_gather", that have been posted and not ended.
    axis: only those on the communicator of this mesh axis; None: all."""
    rank = ranks.scheduler.current().index
    found = list[Any]()
    for (owner, group), queue in ranks.matcher._queues.items():
        if owner == rank and (axis is None or group == axis.group.key):
            found += [kernel for kernel in queue if kernel.name.startswith(operation)]
    return found


def watch_all_gathers(text: str, purposes: Any = mesh.list_purposes) -> Counter[str]:
    """Train on a layout, with kernels that end only when they are waited for. Return numbers of all-gathers of
    parameters: "overlapping", posted while reductions of gradients are in flight; "queued", posted on a communicator
    behind one; "overtaking", ended before one that was posted earlier. purposes: replaces `list_purposes`."""
    layout, plain, found = Layout.parse(text), train_plain(text), Counter[str]()
    start, unshard = zero.FsdpUnit.start_all_gather, zero.FsdpUnit.unshard
    earlier: dict[zero.FsdpUnit, list[Any]] = {}

    def watch_start(unit: zero.FsdpUnit) -> None:
        if not unit.is_unsharded and unit.pending_all_gather is None:
            earlier[unit] = list_in_flight(ranks, "reduce_scatter")
            found["overlapping"] += bool(earlier[unit])
            found["queued"] += bool(list_in_flight(ranks, "reduce_scatter", unit.axes.shard))
        start(unit)

    def watch_end(unit: zero.FsdpUnit) -> None:
        unshard(unit)
        found["overtaking"] += any(not kernel.done for kernel in earlier.pop(unit, ()))

    with (
        StreamRanks(layout.world_size, early=0.0) as ranks,
        mock.patch.object(mesh, "list_purposes", purposes),
        mock.patch.object(zero.FsdpUnit, "start_all_gather", watch_start),
        mock.patch.object(zero.FsdpUnit, "unshard", watch_end),
    ):
        assert find_difference(plain, train(ranks, layout)) is None
        assert find_circular_wait(read_calls(ranks)) is None
    return found


@pytest.mark.parametrize("text", ["dp2 zero3", *exhaustive("dp4 zero3 hs2", "dp2 zero3 pp2:zb-v mb4", "dp4 zero3 ep2")])
def test_all_gather_ends_while_an_earlier_reduction_is_late(text: str):
    found = watch_all_gathers(text)
    assert found["overlapping"] and not found["queued"]
    # A layer with experts has two reductions, for which the stream waits before the next two begin.
    assert found["overtaking"] or "ep" in text


def test_reductions_on_the_communicator_of_all_gathers_hold_these_up():
    found = watch_all_gathers("dp2 zero3", lambda layout: {})
    assert found["queued"] == found["overlapping"] > 0 and not found["overtaking"]


GEMS = ["dp2 zero2 pp2:gems mb4"]
"""A rank reduces gradients of one copy of its model before it waits for the all-gathers of the other."""


@pytest.mark.parametrize(
    "text", ["dp2 zero1", *exhaustive("dp2 zero2 mb2", "dp2 zero1 pp2:dualpipe mb4", *GEMS, "dp2 zero2 pp2:zb-v mb4")]
)
def test_no_all_gather_below_zero_3_is_posted_while_reductions_are_in_flight(text: str):
    """So that they lose nothing by one communicator."""
    start, start_all_gather, together = zero.GradientReducer._start, zero.FsdpUnit.start_all_gather, list[bool]()

    def start_watched(*arguments: Any) -> None:
        if text not in GEMS:
            together.append(bool(list_in_flight(ranks, "all_gather")))
        start(*arguments)

    def gather_watched(unit: zero.FsdpUnit) -> None:
        if not unit.is_unsharded and unit.pending_all_gather is None:
            together.append(bool(list_in_flight(ranks, "reduce_scatter")))
        start_all_gather(unit)

    layout = Layout.parse(text)
    with (
        StreamRanks(layout.world_size, early=0.0) as ranks,
        mock.patch.object(zero.GradientReducer, "_start", start_watched),
        mock.patch.object(zero.FsdpUnit, "start_all_gather", gather_watched),
    ):
        train(ranks, layout)
    assert len(together) > 10 and not any(together)


def test_reduction_that_one_rank_posts_after_the_next_all_gather_is_a_circular_wait():
    """Although results are right: over two communicators, devices may wait for each other."""
    text, reducer, late = "dp2 zero3", zero.GradientReducer, "self.__dict__.setdefault('late', [])"
    post = f"while {late}: {late}.pop()()\n    "
    keep = f"(self.launch if self._units[name].axes.data.rank else {late}.append)(partial("
    with (
        StreamRanks(2) as ranks,
        edited(reducer, "reduce", "self.launch(partial(", post + keep),
        edited(reducer, "finish", "while self._in_flight:", f"{post}while self._in_flight:"),
    ):
        assert find_difference(train_plain(text), train(ranks, Layout.parse(text))) is None
        found = find_circular_wait(read_calls(ranks))
    assert found is not None and found.startswith("circular wait: rank 0 in call")
    assert "data.gradients over shard) of ranks 0,1:reductions" in found and "data.parameters over shard" in found


# --- communicators


@pytest.mark.parametrize(
    ("text", "sub_axes"),
    [
        *(("pp3 mb3", {"pp[0,2]"}), ("pp2 tp3 mb2", {"pp[0,1]", "tp/3"}), ("dp2 cp2 zero3", set())),
        *exhaustive(("pp4:dualpipe mb8", {"pp[0,3]", "pp[1,2]"}), ("tp8:nosp", {"tp/8", "tp/4"})),
    ],
)
def test_ranks_use_the_communicators_that_the_planner_counts(text: str, sub_axes: set[str]):
    """Those of tied embeddings, of both copies of a model and of shared key-value heads among them."""
    layout = Layout.parse(text)
    config = make_problem(layout).config
    table = parameter_table(config)
    partition = Partition.of(generate_for_layout(layout), config, table, 64)
    with StreamRanks(layout.world_size) as ranks:
        train(ranks, layout)
        calls = read_calls(ranks)
    named = set[str]()
    for each in calls:
        found = partition.list_sub_axes(layout, layout.coordinates(each.rank)["pp"])
        used = {(group.ranks, group.purpose) for group in each.counts if len(group.ranks) > 1}
        assert len(used) == len(list_communicators(layout, found)), each.rank
        named |= found.keys()
    assert named == sub_axes


# --- dispatch of tokens and the shared expert


@pytest.mark.parametrize("text", ["dp2 ep2", *exhaustive("dp2 tp2 ep2", "dp2 ep2 mb2 ac:full")])
def test_shared_expert_is_computed_while_dispatched_tokens_are_in_flight(text: str):
    """In forward and in backward."""
    layout, plain = Layout.parse(text), train_plain(text)
    in_flight: dict[str, list[bool]] = {"forward": [], "backward": []}
    forward_shared = Mixture._forward_shared

    def watch(mixture: Mixture, x_BSH: torch.Tensor) -> torch.Tensor:
        launched = mixture.experts.dispatcher.ep.communicator.launched_rows
        in_flight["forward"].append(bool(launched))
        y_BSH = forward_shared(mixture, x_BSH)
        if y_BSH.requires_grad:
            y_BSH.register_hook(lambda _: in_flight["backward"].append(bool(launched)))
        in_flight["forward"].append(bool(launched))
        return y_BSH

    with StreamRanks(layout.world_size, seed=7) as ranks, mock.patch.object(Mixture, "_forward_shared", watch):
        assert find_difference(plain, train(ranks, layout)) is None
        assert find_circular_wait(read_calls(ranks)) is None
    for found in in_flight.values():
        assert len(found) >= layout.world_size * make_problem(layout).steps and all(found)


def launch_twice() -> str:
    """Launch rows over an axis on which others are in flight; return the error."""
    axis = Mesh.create(Layout.parse("dp2")).data
    operators.launch_rows(torch.zeros(2, 3), axis, "first", [1, 1], [1, 1])
    with pytest.raises(AssertionError) as error:
        operators.launch_rows(torch.zeros(2, 3), axis, "second", [1, 1], [1, 1])
    operators.wait_for_rows(torch.empty(0), axis, "first", [1, 1], 3, [1, 1])
    return str(error.value)


def test_rows_cannot_be_launched_while_others_are_in_flight():
    with EmulatedRanks(2) as ranks:
        assert ranks.run(launch_twice) == ["second: another call over the axis is in flight"] * 2
