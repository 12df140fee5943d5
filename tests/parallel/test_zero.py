"""Data parallelism against plain autograd, torch's DDP and fully_shard, and the closed forms of bytes and memory."""

from __future__ import annotations

import copy
import gc
import weakref
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from bench.shared.backward_pass import run_backward
from meshwright.comm.local import LocalRanks
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.model.documents import Documents
from meshwright.model.initialise import initial_value, initialise
from meshwright.model.transformer import Transformer
from meshwright.parallel.parallelize import build_axes
from meshwright.parallel.step import count_targets
from meshwright.parallel.zero_engine import ZeroEngine
from meshwright.spec.parameter_entries import compute_padded_numel
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from meshwright.verification.problem import Problem, scale_down_config
from tests.batches import make_batch, share_of
from tests.conftest import covering, list_axes

LLAMA, GPT2 = scale_down_config(preset("llama-3-8b")), scale_down_config(preset("gpt2"))
TABLE = parameter_table(LLAMA)
PROBLEM = Problem(LLAMA, batch=8)


def loss_of(model: Any, batch: Any, **units: Any) -> torch.Tensor:
    documents = Documents.from_ids(batch.document_ids)
    return model(torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets), documents, **units)


def whole_gradient(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Gradient of the whole batch on one device, by model parameter."""
    model = Transformer(LLAMA, dtype=dtype)
    initialise(model, TABLE, PROBLEM.seed)
    batch = make_batch(PROBLEM, 0)
    (loss_of(model, batch) / int((batch.targets != -100).sum())).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assembled(pieces: list, table: Any = TABLE) -> dict[str, torch.Tensor]:
    """The rows that the slices cover completely."""
    entries: dict[str, torch.Tensor] = {}
    for piece in pieces:
        entry = table.entry(piece.name)
        entries.setdefault(piece.name, torch.full((entry.numel,), float("nan"), dtype=torch.float64))
        entries[piece.name][piece.start : piece.stop] = piece.tensor.double()
    return entries


def one_step(
    layout_text: str, parameter_dtype: torch.dtype, master_dtype: torch.dtype, backend: str | None = None
) -> list:
    """Slices of this rank's reduced gradient of the whole batch."""
    layout = Layout.parse(layout_text)
    mesh = Mesh.create(layout)
    model = Transformer(LLAMA, axes=build_axes(mesh), dtype=parameter_dtype)
    parallel = ZeroEngine(
        model, TABLE, mesh, seed=PROBLEM.seed, parameter_dtype=parameter_dtype, master_dtype=master_dtype
    )
    if backend is not None:
        model.compile_blocks(backend=backend)
        model._compiled = False  # otherwise inductor would compile the loss for a minute
    batches = share_of(make_batch(PROBLEM, 0), mesh.data.rank, mesh.data.size, layout.micro_batches)
    for _ in range(2):  # the second step overwrites the first
        targets = count_targets([torch.from_numpy(batch.targets) for batch in batches], mesh)()
        parallel.begin_step(len(batches))
        for batch in batches:
            run_backward(parallel, loss_of(model, batch, units=parallel.prefetchers[0]) / targets)
        parallel.finish()
    assert all(parameter.grad is None for parameter in model.parameters()), "no second copy of a gradient"
    mesh.close()
    return parallel.slices_like("gradient", [shard.gradient for shard in parallel.shards], owned=False)


class Watch:
    """Wrapper of an engine's units that records at each call which units are unsharded."""

    def __init__(self, parallel: ZeroEngine) -> None:
        self.parallel = parallel
        self.seen: list[set[str]] = []

    def note(self) -> set[str]:
        there = {name for name, unit in self.parallel._units.items() if unit.parameters.untyped_storage().nbytes() > 0}
        self.seen.append(there)
        return there

    def enter(self, unit: str, x: Any) -> Any:
        result = self.parallel.prefetchers[0].enter(unit, x)
        assert unit in self.note()
        return result

    def leave(self, unit: str, x: Any) -> Any:
        result = self.parallel.prefetchers[0].leave(unit, x)
        self.note()
        return result


def memory_of_zero3(tied: bool) -> None:
    config = GPT2 if tied else LLAMA
    table = parameter_table(config)
    mesh = Mesh.create(Layout(dp=2, zero=3))
    model = Transformer(config, axes=build_axes(mesh))
    parallel = ZeroEngine(model, table, mesh, seed=1, parameter_dtype=torch.float32)
    watch = Watch(parallel)
    assert watch.note() == set(), "nothing is gathered before it is needed"
    batch = make_batch(Problem(config, batch=4), 0)
    parallel.begin_step(1)
    loss = loss_of(model, batch, units=watch)
    held = {"head", "embedding"} if tied else {"head"}
    assert watch.note() == held, "only the first unit of backward stays unsharded"
    run_backward(parallel, loss)
    assert watch.note() == set()
    parallel.finish()
    assert max(len(there - held) for there in watch.seen) <= 2, "a unit and the next one"
    with torch.no_grad():
        loss_of(model, batch, units=watch)
    assert watch.note() == set(), "evaluation leaves no unit unsharded"
    for unit in parallel._units.values():
        unit.start_all_gather()
    for unit in parallel._units.values():
        unit.unshard()
    for tensor in table.tensors:
        for entry in tensor.entries:
            value = model.get_parameter(tensor.name)[entry.offset : entry.offset + entry.model_shape[0]]
            expected = initial_value(entry, 1)
            assert torch.equal(value, expected.T if entry.transposed else expected)
    parallel.prefetchers[0].reshard()
    assert watch.note() == set()
    mesh.close()


def bytes_of_a_step(layout_text: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Number of calls and bytes sent in one step, by site and operation."""
    layout = Layout.parse(layout_text)
    mesh = Mesh.create(layout)
    model = Transformer(LLAMA, axes=build_axes(mesh), dtype=torch.bfloat16)
    parallel = ZeroEngine(model, TABLE, mesh, seed=1, parameter_dtype=torch.bfloat16)
    batches = share_of(make_batch(PROBLEM, 0), mesh.data.rank, mesh.data.size, layout.micro_batches)
    mesh.record.clear()
    parallel.begin_step(len(batches))
    for batch in batches:
        run_backward(parallel, loss_of(model, batch, units=parallel.prefetchers[0]))
    parallel.finish()
    parallel.all_gather_parameters()
    mesh.close()
    assert parallel.memory() == parallel.predicted_bytes()
    return {(e["site"], e["operation"]): (e["calls"], e["sent_bytes"]) for e in mesh.record.table()}


def owned_by_rank(layout_text: str) -> list[tuple[str, int, int]]:
    mesh = Mesh.create(Layout.parse(layout_text))
    model = Transformer(LLAMA, axes=build_axes(mesh))
    parallel = ZeroEngine(model, TABLE, mesh, seed=1, parameter_dtype=torch.float32)
    for piece in parallel.master_slices(owned=False):
        entry = TABLE.entry(piece.name)
        expected = initial_value(entry, 1)
        flat = (expected.T if entry.transposed else expected).reshape(-1)
        assert torch.equal(piece.tensor, flat[piece.start : piece.stop])
    for shard in parallel.shards:
        assert shard.master.shape == shard.gradient.shape == (shard.stop - shard.start,)
    mesh.close()
    return [(piece.name, piece.start, piece.stop) for piece in parallel.master_slices(owned=True)]


def torch_gradients(engine: str) -> dict[str, torch.Tensor]:
    """Gradients of torch's DistributedDataParallel or fully_shard, times the ranks, because both average."""
    size, rank = dist.get_world_size(), dist.get_rank()
    model = Transformer(LLAMA, dtype=torch.float64)
    initialise(model, TABLE, PROBLEM.seed)
    batch = make_batch(PROBLEM, 0)
    targets = int((batch.targets != -100).sum())
    (mine,) = share_of(batch, rank, size, 1)
    if engine == "ddp":
        wrapped: Any = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        for block in model.layers:
            fully_shard(block)
        wrapped = fully_shard(model)
    (loss_of(wrapped, mine) / targets).backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        gradients[name] = (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).detach() * size
    return gradients


@pytest.fixture(scope="module")
def ranks():
    with LocalRanks(4) as started:
        yield started


@pytest.fixture(scope="module")
def truth():
    return whole_gradient()


def check(results: list, truth: dict[str, torch.Tensor], tolerance: float, copies: int) -> None:
    """Check every copy of every gradient, within `tolerance` of its norm."""
    per_copy = len(results) // copies
    for first in range(0, len(results), per_copy):
        entries = assembled([piece for pieces in results[first : first + per_copy] for piece in pieces])
        for tensor in TABLE.tensors:
            got = torch.cat([entries[entry.name] for entry in tensor.entries]).view(tensor.shape)
            error = (got - truth[tensor.name]).norm() / truth[tensor.name].norm()
            assert error < tolerance, (tensor.name, float(error))


@pytest.mark.parametrize(
    ("copies", "layout"),
    covering(
        [
            *((4, layout) for layout in ("dp4", "dp4 mb2")),
            *((1, f"dp4 zero{stage}{mb}") for stage in (1, 2, 3) for mb in ("", " mb2")),
            *((1, layout) for layout in ("dp4 zero3 mb2 ac:full", "dp4 zero3 ac:selective")),
            *((2, layout) for layout in ("dp4 zero1 hs2", "dp4 zero2 hs2 mb2", "dp4 zero3 hs2 mb2")),
        ],
        lambda copies, layout: {*combinations(sorted(list_axes(layout)), 2)},
    ),
)
def test_every_stage_sums_the_gradient_of_the_whole_batch(ranks, truth, layout, copies):
    check(ranks.run(one_step, layout, torch.float64, torch.float64), truth, 1e-12, copies)


@pytest.mark.parametrize("layout", ["dp4 mb2", "dp4 zero1", "dp4 zero2 mb2", "dp4 zero3 mb2"])
def test_bf16_parameters_keep_float32_gradients(ranks, truth, layout):
    results = ranks.run(one_step, layout, torch.bfloat16, torch.float32)
    assert all(piece.tensor.dtype == torch.float32 for piece in results[0])
    check(results, truth, 0.06, 4 if layout == "dp4 mb2" else 1)


@pytest.mark.parametrize("layout", ["dp2 zero3 ac:full", pytest.param("dp2 zero3", marks=pytest.mark.exhaustive)])
def test_compiled_blocks_find_gathered_parameters(truth, layout):
    """ZeRO-3 parameters under compiled blocks, with recomputation."""
    with LocalRanks(2) as pair:
        check(pair.run(one_step, layout, torch.float64, torch.float64, "aot_eager"), truth, 1e-12, 1)


@pytest.mark.parametrize("engine", ["ddp", "fully_shard"])
def test_gradients_match_ddp_and_fully_shard(ranks, truth, engine):
    for gradients in ranks.run(torch_gradients, engine):
        for name, gradient in gradients.items():
            assert (gradient - truth[name]).norm() <= 1e-12 * truth[name].norm(), name


@pytest.mark.parametrize("tied", [False, True])
def test_zero3_holds_two_units_at_a_time(tied):
    with LocalRanks(2) as pair:
        pair.run(memory_of_zero3, tied)


def test_bytes_on_the_wire_are_the_closed_forms(ranks):
    sizes = [compute_padded_numel(TABLE.unit_numel(name), 4) for name in TABLE.units]
    exact = sum(compute_padded_numel(TABLE.unit_numel(name), 1) for name in TABLE.units)
    whole, layers = sum(sizes), sum(sizes[1:-1])
    units = len(sizes)
    reduce = ("data.gradients", "reduce_scatter")
    gather = ("data.parameters", "all_gather")

    (calls, *_) = ranks.run(bytes_of_a_step, "dp4 mb2")
    assert calls == {("data.gradients", "all_reduce"): (units, 2 * 3 * exact * 4 // 4)}
    (calls, *_) = ranks.run(bytes_of_a_step, "dp4 zero1 mb2")
    assert calls == {reduce: (units, whole * 4 * 3 // 4), gather: (units, whole * 2 * 3 // 4)}
    (calls, *_) = ranks.run(bytes_of_a_step, "dp4 zero2 mb2")
    assert calls == {reduce: (2 * units, 2 * whole * 4 * 3 // 4), gather: (units, whole * 2 * 3 // 4)}
    (calls, *_) = ranks.run(bytes_of_a_step, "dp4 zero3")
    # Layers are gathered for the forward and again for the backward pass, embedding and head once.
    assert calls == {
        reduce: (units, whole * 4 * 3 // 4),
        gather: (2 * units - 2, (whole + layers) * 2 * 3 // 4),
    }
    (calls, *_) = ranks.run(bytes_of_a_step, "dp4 zero2 hs2 mb2")
    halves = sum(compute_padded_numel(TABLE.unit_numel(name), 2) for name in TABLE.units)
    assert calls[reduce] == (2 * units, 2 * halves * 4 // 2)
    assert calls[("data.gradients.replicas", "all_reduce")] == (units, halves // 2 * 4)


@pytest.mark.parametrize("layout", ["dp4", "dp4 zero1", "dp4 zero3 hs2"])
def test_ranks_write_every_element_once_and_start_from_seed(ranks, layout):
    seen = {entry.name: torch.zeros(entry.numel, dtype=torch.int64) for entry in TABLE.entries}
    for pieces in ranks.run(owned_by_rank, layout):
        assert pieces, "every rank writes something"
        for name, start, stop in pieces:
            seen[name][start:stop] += 1
    assert all(bool((count == 1).all()) for count in seen.values())


def test_single_device_makes_no_call_and_copies_no_parameter(truth):
    mesh = Mesh.single()
    model = Transformer(LLAMA, axes=build_axes(mesh), dtype=torch.float64)
    parallel = ZeroEngine(
        model, TABLE, mesh, seed=PROBLEM.seed, parameter_dtype=torch.float64, master_dtype=torch.float64
    )
    batch = make_batch(PROBLEM, 0)
    parallel.begin_step(1)
    run_backward(parallel, loss_of(model, batch, units=parallel.prefetchers[0]) / int((batch.targets != -100).sum()))
    parallel.finish()
    assert mesh.record.table() == []
    entries = assembled(parallel.slices_like("gradient", [shard.gradient for shard in parallel.shards], owned=True))
    for tensor in TABLE.tensors:
        got = torch.cat([entries[entry.name] for entry in tensor.entries]).view(tensor.shape)
        assert torch.equal(got, truth[tensor.name])
    for shard in parallel.shards:
        shard.master.fill_(0.5)  # the master is the parameters' own memory
    assert all(bool((parameter == 0.5).all()) for parameter in model.parameters())
    assert parallel.memory() == parallel.predicted_bytes()
    assert parallel.memory()["masters"] == 0
    norm = torch.linalg.vector_norm(torch.cat([gradient.reshape(-1) for gradient in truth.values()]))
    assert parallel.squared_norm_share().sqrt().item() == pytest.approx(norm.item(), rel=1e-12)


def test_gradient_norm_on_a_gpu_takes_few_kernels_for_all_units(monkeypatch: pytest.MonkeyPatch):
    mesh, calls = Mesh.single(), list[str]()
    parallel = ZeroEngine(Transformer(LLAMA), TABLE, mesh, seed=None, parameter_dtype=torch.float32)
    for number, shard in enumerate(parallel.shards):
        shard.gradient.normal_(generator=torch.Generator().manual_seed(number))
    one_by_one = parallel.squared_norm_share()

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(function))
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(mesh, "device", torch.device("cuda"))
    with Operators():
        together = parallel.squared_norm_share()
    assert len(calls) < 8 < len(parallel.shards) * 3, calls
    assert together.dtype == torch.float64 and together.item() == pytest.approx(one_by_one.item(), rel=1e-7)
    parallel.shards[1].gradient[3] = float("inf")
    assert not parallel.squared_norm_share().isfinite()


def test_without_a_seed_model_values_are_kept():
    model = Transformer(LLAMA)
    initialise(model, TABLE, 3)
    before = copy.deepcopy(model.state_dict())
    ZeroEngine(model, TABLE, Mesh.single(), seed=None, parameter_dtype=torch.float32)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_unused_parameter_has_zero_gradient():
    model = Transformer(LLAMA)
    parallel = ZeroEngine(model, TABLE, Mesh.single(), seed=3, parameter_dtype=torch.float32)
    for shard in parallel.shards:
        shard.gradient.fill_(7.0)
    parallel.begin_step(1)
    run_backward(parallel, model.layers[0].mlp.down.weight.sum())
    parallel.finish()
    entries = assembled(parallel.slices_like("gradient", [shard.gradient for shard in parallel.shards], owned=True))
    assert {name for name, value in entries.items() if bool((value != 0).any())} == {
        "model.layers.0.mlp.down_proj.weight"
    }


def test_discarded_engine_is_garbage_collected():
    """Its memory and, on a mesh, the connections of its groups."""
    model = Transformer(LLAMA)
    parallel = ZeroEngine(model, TABLE, Mesh.single(), seed=3, parameter_dtype=torch.float32)
    parallel.begin_step(1)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    run_backward(parallel, model(tokens, tokens, units=parallel.prefetchers[0]))
    parallel.finish()
    left = [weakref.ref(parallel), weakref.ref(parallel.gradients), weakref.ref(parallel.shards[0].gradient)]
    del model, parallel, tokens
    gc.collect()
    assert [each() for each in left] == [None] * 3


def test_gradient_norm_over_millions_stays_accurate():
    from meshwright.parallel.zero_engine import _sum_squares

    values = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    truth = values.double().square().sum()
    assert abs(_sum_squares(values) - truth) < 1e-7 * truth
    values[1234] = float("nan")
    assert not torch.isfinite(_sum_squares(values))


def test_targets_are_counted_over_micro_batches():
    targets = [torch.tensor([[1, -100, 3]]), torch.tensor([[-100, -100, 5]])]
    assert count_targets(targets, Mesh.single())() == 3
    assert count_targets([torch.full((2, 2), -100)], Mesh.single())() == 1, "never divide by none"
