"""Backends of process groups, and calls over a group of one rank."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from meshwright.collectives.communicators import REDUCTION_AXES, list_communicators
from meshwright.comm import collectives, transport
from meshwright.comm.backend import compute_backend_timeout, get_group_backends
from meshwright.comm.device_thread import start_thread
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import AXIS_NAMES, EXPERT_AXES, Axis, CommunicationState, Mesh
from meshwright.layout import Layout
from meshwright.training.deterministic import deterministic


def test_backend_of_a_group_is_named_by_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    assert get_group_backends(None) == {"cpu": "gloo", "cuda": "nccl"}


def test_backend_timeout_is_longer_than_device_watch():
    assert compute_backend_timeout("cpu", 30.0).total_seconds() == 30
    assert compute_backend_timeout(torch.device("cuda", 1), 30.0).total_seconds() == 60


def make_mesh_of_512(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, config: str, device: str, bound: bool = True
) -> tuple[Mesh, Any, Any]:
    """Return rank 9's mesh on a backend that is not there, and the mocks of `new_group` and `split_group`. bound: the
    ranks' GPUs were named when the world was initialised."""
    world = SimpleNamespace(bound_device_id=torch.device("cuda", 1) if bound else None)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    new_group, split_group = mock.Mock(), mock.create_autospec(dist.split_group, side_effect=lambda *_, **__: object())
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    monkeypatch.setattr(dist, "get_world_size", lambda: 512)
    monkeypatch.setattr(dist, "get_rank", lambda: 9)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "split_group", split_group)
    monkeypatch.setattr(dist, "barrier", mock.Mock())
    return Mesh.create(layout, device), new_group, split_group


@pytest.mark.parametrize(("config", "device"), [("cpu:gloo", "cpu"), ("cpu:gloo,cuda:nccl", "cuda")])
def test_groups_are_made_one_by_one_unless_the_world_is_bound_to_gpus(
    monkeypatch: pytest.MonkeyPatch, config: str, device: str
):
    """As those of servers, which torch refuses to split. Only the world has gloo, which connects all pairs of ranks."""
    mesh, new_group, split_group = make_mesh_of_512(monkeypatch, Layout(dp=64, tp=8), config, device, bound=False)
    assert new_group.call_count == 64 + 8 and not split_group.called
    assert {call.args[2] for call in new_group.call_args_list} == {"nccl" if device == "cuda" else None}
    assert mesh.tp.ranks == tuple(range(8, 16)) and mesh.data.ranks == tuple(range(1, 512, 8))


LAYOUTS_OF_512 = {  # layout: axes whose groups are made, each by one call of all ranks
    "dp64 zero1 tp8": ["tp", "data"],
    "dp512 zero2": [],
    "dp512 zero3": ["reduction"],
    "dp64 zero3 tp8 hs8": ["tp", "data", "shard", "reduction", "replica"],
    "dp8 zero1 tp8 pp8:zb-v mb16": ["tp", "pp", "data"],
    "dp512 zero1 hs8 ep8": ["ep", "shard", "replica"],
    "cp8 dp64 zero2": ["cp"],
}


@pytest.mark.parametrize("text", LAYOUTS_OF_512)
def test_nccl_groups_of_an_axis_are_split_off_the_world_in_one_call(monkeypatch: pytest.MonkeyPatch, text: str):
    layout = Layout.parse(text)
    _, new_group, split_group = make_mesh_of_512(monkeypatch, layout, "cpu:gloo,cuda:nccl", "cuda")
    calls = split_group.call_args_list
    assert not new_group.called and all(call.kwargs["backend"] == "nccl" for call in calls)
    made = [{tuple(ranks) for ranks in call.args[1]} for call in calls]
    assert made == [set(layout.groups(REDUCTION_AXES.get(name, name))) for name in LAYOUTS_OF_512[text]]
    assert all(sorted(rank for ranks in groups for rank in ranks) == list(range(512)) for groups in made)


def make_mesh_of_rank_1(monkeypatch: pytest.MonkeyPatch, text: str, config: str, device: str) -> Mesh:
    """Return rank 1's mesh of a layout on a backend that is not there."""
    layout = Layout.parse(text)
    with monkeypatch.context() as patch:
        patch.setattr(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=None)))
        patch.setattr(dist, "get_world_size", lambda: layout.world_size)
        patch.setattr(dist, "get_rank", lambda: 1)
        patch.setattr(dist, "get_backend_config", lambda group: config)
        for name in ("new_group", "barrier"):
            patch.setattr(dist, name, lambda *_: object())
        return Mesh.create(layout, device)


@pytest.mark.parametrize("text, apart", [("cp8 zero1", "cp"), ("dp8 zero2 ep8", "ep"), ("dp4 zero3 ep2:etp2", None)])
def test_layers_do_not_share_the_communicator_of_gradients(
    monkeypatch: pytest.MonkeyPatch, text: str, apart: str | None
):
    """A ring step or a dispatch on it would wait for the reductions and all-gathers that it should overlap with."""
    for config, device in (("cpu:gloo,cuda:nccl", "cuda"), ("cpu:gloo", "cpu")):
        mesh = make_mesh_of_rank_1(monkeypatch, text, config, device)
        states = [axis.group for axis in (mesh.data, mesh.shard, mesh.expert_shard) if axis.size > 1]
        for axis in (mesh.cp, mesh.ep, mesh.etp):
            alike = [group for group in states if group is axis.group and axis.size > 1]
            assert bool(alike) == (axis.name == apart and device == "cpu"), axis.name


COMMUNICATORS = {  # layout: how many a rank has under NCCL, and of these for reductions alone
    "dp64 zero1 tp8": (3, 0), "dp8 zero2": (1, 0), "dp8 zero3": (2, 1), "dp64 zero3 tp8": (4, 1),
    "dp16 zero2 hs8": (3, 0), "dp16 zero3 hs8": (4, 1), "dp8 zero1 tp8 pp8 mb16": (4, 0), "dp8 zero3 ep8": (3, 1),
    "dp8 zero3 tp8 pp8 mb16": (5, 1), "dp16 zero3 ep8": (5, 2), "dp8 zero3 tp2 ep4": (7, 2),
}  # fmt: skip


@pytest.mark.parametrize("text", [*COMMUNICATORS, "dp4 cp2 tp2 zero3", "cp4:ulysses dp2", "dp4 tp2 ep4 hs2 zero3"])
def test_mesh_has_the_communicators_that_the_planner_counts(monkeypatch: pytest.MonkeyPatch, text: str):
    """Those of reductions under ZeRO-3 among them; gloo, which runs the calls of a group at once, has none."""
    layout = Layout.parse(text)
    names = [*AXIS_NAMES, *(EXPERT_AXES if layout.expert_parallel else ())]
    for config, device in (("cpu:gloo,cuda:nccl", "cuda"), ("cpu:gloo", "cpu")):
        mesh = make_mesh_of_rank_1(monkeypatch, text, config, device)
        groups: dict[int, set[str]] = {}
        for name in names:
            axis: Axis = getattr(mesh, name)
            if axis.size > 1:
                groups.setdefault(id(axis.group), set()).add(name)
        apart = [axes for axes in groups.values() if axes <= REDUCTION_AXES.keys()]
        if device == "cpu":
            assert not apart and not any(getattr(mesh, name).purpose for name in names)
            continue
        assert sorted(map(sorted, groups.values())) == sorted(map(sorted, list_communicators(layout).values()))
        assert text not in COMMUNICATORS or (len(groups), len(apart)) == COMMUNICATORS[text]
        assert (mesh.reduction.recorder_group == mesh.shard.recorder_group) == (not apart)


def test_close_destroys_every_group_that_the_mesh_made_once(monkeypatch: pytest.MonkeyPatch):
    mesh = make_mesh_of_rank_1(monkeypatch, "dp8 zero3 tp2 ep4", "cpu:gloo,cuda:nccl", "cuda")
    axes: list[Axis] = [getattr(mesh, name) for name in (*AXIS_NAMES, *EXPERT_AXES)]
    made = {id(axis.group) for axis in axes if axis.size > 1} - {id(mesh.world.group)}
    assert len(made) == 6
    closed: list[object] = []
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=mesh.world.group))
    monkeypatch.setattr(dist, "destroy_process_group", closed.append)
    mesh.close()
    assert sorted(map(id, closed)) == sorted(made)


def connect_late() -> tuple[float, float]:
    """Return the times at which this rank's last group was connected (rank 0 delays this) and its mesh was ready, in
    seconds of the monotonic clock."""
    connected, new_group = list[float](), dist.new_group

    def create(ranks: list[int], *args: Any) -> Any:
        group = new_group(ranks, *args)
        if dist.get_rank() in ranks:
            time.sleep(0.3 * (dist.get_rank() == 0))
            connected.append(time.monotonic())
        return group

    with mock.patch.object(dist, "new_group", create):
        mesh = Mesh.create(Layout(tp=2, dp=2))
    ready = time.monotonic()
    mesh.close()
    return connected[-1], ready


def test_no_rank_can_close_a_group_while_another_still_connects_to_it(four: LocalRanks):
    """gloo reports the closed connection as the loss of a rank."""
    (connected, _), *_, (_, ready_of_rank_2), _ = four.run(connect_late)
    assert connected < ready_of_rank_2  # the last group of ranks 0 and 2 is that of data parallelism


def test_threads_use_the_device_of_the_thread_that_starts_them(monkeypatch: pytest.MonkeyPatch):
    done: list[tuple[Any, int]] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append((device, threading.get_ident())))
    for cuda in (True, False):
        thread = start_thread(lambda: done.append(("run", threading.get_ident())), "test", cuda)
        thread.join()
    assert [what for what, _ in done] == [3, "run", "run"] and done[0][1] == done[1][1] != threading.get_ident()


def gather_and_scatter_natively() -> None:
    """Outputs with another number of dims than inputs: gloo's native calls compare shapes, on CUDA tensors too."""
    mesh = Mesh.create(Layout(dp=2))
    part = torch.arange(6.0).view(2, 3) + 10 * mesh.rank
    whole, total = torch.empty(2, 2, 3), torch.empty(2, 3)
    with mock.patch.object(transport, "uses_native_calls", lambda axis, tensor: True):
        collectives.all_gather(whole, part, mesh.data, "gather").wait()
        collectives.reduce_scatter(total, whole.clone(), mesh.data, "scatter").wait()
    assert torch.equal(whole[1] - whole[0], torch.full((2, 3), 10.0)) and torch.equal(total, 2 * whole[mesh.rank])
    mesh.close()


def test_native_calls_get_flat_tensors(two: LocalRanks):
    two.run(gather_and_scatter_natively)


def test_receive_on_a_device_copies_nothing_to_the_host():
    """On the device "meta", from which nothing can be copied, as on a GPU nothing need be: gloo writes the buffer."""
    group, received = mock.Mock(), torch.empty(3, device="meta")
    axis: Any = SimpleNamespace(group=group, backends={"meta": "gloo", "cpu": "gloo"}, ranks=(0, 1))
    ((_, finish),) = transport.transfer([transport.Message(received, 1, True, "stage", "hidden")], axis)
    ((buffer,), peer, _), _ = group.recv.call_args
    assert (buffer.device.type, buffer.shape, buffer.dtype, peer) == ("cpu", (3,), torch.float32, 1)
    assert finish is not None
    on_host = torch.empty(3)
    ((_, finish),) = transport.transfer([transport.Message(on_host, 1, True, "stage", "hidden")], axis)
    ((buffer,), *_), _ = group.recv.call_args
    assert buffer is on_host and finish is None


def test_barrier_on_a_device_holds_the_host():
    order: list[str] = []
    axis = Axis("world", (0, 1), 0, None, CommunicationState("cuda"))
    cuda = torch.device("cuda", 0)
    queued, nothing = mock.Mock(), mock.Mock(is_cuda=True, device=cuda, dtype=torch.float32, shape=(1,))
    queued.wait.side_effect = lambda *_: order.append("stream waits")
    stream = mock.Mock(**{"synchronize.side_effect": lambda: order.append("host waits")})
    with (
        mock.patch.object(torch, "zeros", lambda *_, device: nothing),
        mock.patch.object(transport, "all_reduce", lambda *_: ([queued], None)),
        mock.patch.object(torch.cuda, "current_stream", lambda device: stream),
    ):
        collectives.barrier(axis, "probe")
    assert order == ["stream waits", "host waits"]


def call_with_one_rank(trivial_calls: bool) -> tuple[list[str], list[torch.Tensor], str]:
    mesh = Mesh.create(Layout())
    mesh.communicator.trivial_calls = trivial_calls
    axis = mesh.data
    calls = len(mesh.record.sites)
    total, whole, part = torch.arange(6.0), torch.empty(2, 3), torch.empty(2, 3)
    collectives.all_reduce(total, axis, "sum")
    collectives.all_gather(whole, torch.arange(6.0).view(2, 3), axis, "gather")
    collectives.reduce_scatter(part, torch.arange(6.0).view(2, 3), axis, "scatter")
    assert calls == 0
    return sorted(site for site, _, _ in mesh.record.sites), [total, whole, part], axis.backends["cpu"]


def test_trivial_calls_reach_the_backend_of_one_rank():
    with LocalRanks(1) as ranks:
        for trivial_calls, sites in ((False, []), (True, ["gather", "scatter", "sum"])):
            found, results, backend = ranks.run(call_with_one_rank, trivial_calls)[0]
            assert found == sites and backend == "gloo"
            assert all(torch.equal(each.view(-1), torch.arange(6.0)) for each in results)


def test_deterministic_runs_have_inductor_choose_kernels_by_rule_and_restore_every_setting():
    from torch._inductor import config

    filled = torch.utils.deterministic.fill_uninitialized_memory

    def read_on_other_thread() -> bool:
        """Read the setting as the thread does on which autograd compiles the backward of CUDA tensors."""
        with ThreadPoolExecutor(1) as threads:
            return bool(threads.submit(lambda: config.deterministic).result())

    with deterministic(True, compiled=True):
        assert config.deterministic and torch.are_deterministic_algorithms_enabled()
        assert read_on_other_thread()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not config.deterministic and not torch.are_deterministic_algorithms_enabled()
    assert not read_on_other_thread()
    assert torch.utils.deterministic.fill_uninitialized_memory == filled
