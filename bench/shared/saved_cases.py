"""Functions that ranks run in tests of saved activations: one forward of a stage is recorded."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from bench.shared.packed_documents import documents_from_starts
from meshwright.adapters.attach import attach_adapters
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.model.documents import Documents
from meshwright.model.pairs import Pairs
from meshwright.model.rope import RotaryTable
from meshwright.model.transformer import Transformer
from meshwright.model.weight_gradients import WeightGradients, defer_weight_gradients
from meshwright.parallel.context import shard_sequences
from meshwright.parallel.expert import AllToAllTokenDispatcher
from meshwright.parallel.parallelize import build_axes
from meshwright.parallel.stage_compute import BackwardOrder, StageCompute
from meshwright.parallel.zero_engine import ZeroEngine
from meshwright.planner.cost.engines import choose_run_engine
from meshwright.planner.cost.micro_batch import MicroBatch, Routed
from meshwright.planner.memory.saved import saved_activations
from meshwright.planner.memory.snapshot import Allocation
from meshwright.program.pipeline import Kind
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table
from meshwright.spec.partition import Partition
from meshwright.spec.stages import cut_into_stages
from meshwright.training.preference_loss import Preference


class Case(NamedTuple):
    """A forward to watch: of `stage` of as many `stages`, all of which this rank holds. `starts`: where documents begin
    in each row; None: one document a row. `backend`: of torch.compile; None: not compiled."""

    config: ModelConfig
    layout: str = "dp1"
    rows: int = 2
    sequence: int = 16
    dtype: str = "float32"
    stages: int = 1
    stage: int = 0
    at_once: bool = True
    starts: Sequence[Sequence[int]] | None = None
    device: str = "cpu"
    pairs: bool = False  # the documents of each row, by two
    backend: str | None = None
    queued: bool = False  # weight gradients of compiled blocks
    overlap: str = "off"  # of tensor-parallel products with their collectives


class Watched(NamedTuple):
    """Storages by size and name of what made them: those that live from the forward on, those that
    `saved_tensors_hooks` were given; and what the ledger says."""

    alive: list[tuple[int, str]]
    packed: list[tuple[int, str]]
    predicted: list[Allocation]


class Storages(TorchDispatchMode):
    """Record of all storages that operators allocate on a device."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self._device = device
        self._made: dict[int, tuple[StorageWeakRef, int, str]] = {}
        self._before: dict[int, Any] = {}  # existing storages

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in list_tensors([*args, *(kwargs or {}).values()]):
            storage = value.untyped_storage()
            if not self._knows(storage):
                self._before[storage._cdata] = storage
        result = function(*args, **(kwargs or {}))
        for value in (each for each in list_tensors([result]) if each.device.type == self._device):
            storage = value.untyped_storage()
            if storage._cdata not in self._before and not self._knows(storage):
                name = f"{function.name()} {tuple(value.shape)} {value.dtype}"
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes(), name
        return result

    def _knows(self, storage: Any) -> bool:
        known = self._made.get(storage._cdata)
        return known is not None and not known[0].expired()

    def alive(self) -> dict[int, tuple[int, str]]:
        """Return the live storages by address."""
        return {at: (size, name) for at, (storage, size, name) in self._made.items() if size and not storage.expired()}


def list_tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in `values`, an iterable of arguments or results, and in the lists and tuples of it."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from list_tensors(value)


BOUNDARIES = "starts_BS", "indices_C", "host_starts_BS"  # tensors of `Documents`


def watch(case: Case) -> Watched:
    """Record a forward of a stage. Rotary tables, which it computes and keeps for all later ones, are left out."""
    layout, dtype, device = Layout.parse(case.layout), getattr(torch, case.dtype), case.device
    mesh, table = Mesh.create(layout, device), parameter_table(case.config)
    mesh.communicator.product_overlap = case.overlap
    stages = cut_into_stages(case.config, case.stages, case.sequence)
    partition = Partition(table, stages, ((0,) * case.stages,))
    axes = build_axes(mesh)
    model = Transformer(case.config, axes=axes, device="meta", dtype=dtype)
    attach_adapters(model, table, layout, axes.tensor, device="meta", dtype=dtype)
    master = torch.float64 if dtype == torch.float64 else torch.float32
    parallel = ZeroEngine(
        model, table, mesh, seed=3 if device == "cpu" else None,  # tensors without memory have no values
        parameter_dtype=dtype, master_dtype=master, partition=partition,
    )  # fmt: skip
    queue = WeightGradients(parallel.gradients)
    if case.backend is None or case.queued:
        defer_weight_gradients(model, queue)
    if case.backend is not None:
        torch._dynamo.reset()
        model.compile_blocks(backend=case.backend)
    make = torch.Generator().manual_seed(5 + mesh.dp.rank)
    numbers = torch.randint(0, case.config.vocabulary, (case.rows, case.sequence + 1), generator=make)
    documents = Documents() if case.starts is None else documents_from_starts(case.starts, case.sequence)
    if case.pairs and case.starts is not None:
        ids = torch.zeros(case.rows, case.sequence, dtype=torch.int64)
        for row, starts in enumerate(case.starts):
            ids[row, list(starts)[1:]] = 1
        documents = dataclasses.replace(documents, pairs=Pairs.from_ids(ids.cumsum(dim=1)))
    numbers, documents = numbers.to(device), documents.to(device)
    batch = shard_sequences(numbers[:, :-1].contiguous(), numbers[:, 1:].contiguous(), documents, mesh)
    of_batch = (*batch[:2], *(getattr(batch[2], name) for name in BOUNDARIES))
    if (pairs := batch[2].pairs) is not None:
        of_batch = (*of_batch, pairs.response_BC, pairs.counted_BP, pairs.reference_BD)
    given = {each.untyped_storage()._cdata for each in of_batch if each is not None}
    at_once = {(case.stage, 0, 0)} if case.at_once else ()

    def forward() -> tuple[Any, Storages, dict[int, tuple[torch.Tensor, int]], list[Routed]]:
        objective = None
        if pairs is not None:
            objective = lambda number, values: Preference()(values, pairs).loss  # noqa: E731
        compute = StageCompute(model, parallel, [batch], 100.0, BackwardOrder(at_once, queue), objective=objective)
        parallel.begin_step({case.stage: 1})
        storages, packed, counted = Storages(case.device), dict[int, tuple[torch.Tensor, int]](), list[Routed]()
        agree = AllToAllTokenDispatcher._agree_on_routes

        def noted(dispatcher: AllToAllTokenDispatcher, ends_E: torch.Tensor) -> Any:
            routes = agree(dispatcher, ends_E)
            counted.append(Routed(sum(routes.received), sum(routes.shared)))
            return routes

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            packed[tensor.untyped_storage()._cdata] = tensor, tensor.untyped_storage().nbytes()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        watching = storages if case.backend is None else nullcontext()  # it does not see operators of compiled graphs
        with mock.patch.object(AllToAllTokenDispatcher, "_agree_on_routes", noted), watching, hooks:
            x = None
            if case.stage:
                x = compute.buffer((case.stage, 0, 0))
                x.copy_(torch.randn(x.shape, generator=make))
            compute.run(Kind.FORWARD, (case.stage, 0, 0), x)
        return compute, storages, packed, counted

    if case.config.adapter is not None and case.config.adapter.packed:
        forward()  # tables of the packed format stay in the process
    compute, storages, packed, counted = forward()
    time.sleep(0.02 if mesh.world_size > 1 else 0)  # gloo's threads release sent tensors a little later
    alive = storages.alive()
    assert compute._kept
    rotary = [each for each in model.attention_inputs.tables.values() if isinstance(each, RotaryTable)]
    tables = [table for each in rotary for pair in each._tables.values() for table in pair]
    stayed = {table.untyped_storage()._cdata for table in tables}
    own = {unit.parameters.untyped_storage()._cdata for unit in parallel._units.values()}
    seen = {micro_batch: (size, str(tuple(tensor.shape))) for micro_batch, (tensor, size) in packed.items() if size}
    mixtures = [layer for layer in stages[case.stage].layers if case.config.has_experts(layer)]
    micro_batch = MicroBatch.of(
        case.config, layout, case.rows, case.sequence, packed=case.starts or False, dtype=case.dtype,
        device=device, responses=int(case.pairs), routed=dict(zip(mixtures, counted, strict=True)) if counted else {},
        engine=choose_run_engine(case.overlap, device, case.backend is not None),
    )  # fmt: skip
    predicted = saved_activations(
        micro_batch, stages[case.stage], at_once=case.at_once, tp_rank=mesh.tp.rank, compiled=case.backend is not None
    )
    mesh.close()
    return Watched(
        [each for micro_batch, each in alive.items() if micro_batch not in own | stayed],
        [each for micro_batch, each in seen.items() if micro_batch not in own | given | stayed],
        predicted,
    )


def difference(found: Watched) -> tuple[list[tuple[int, str]], list[Allocation]]:
    """What lives that was not predicted, and what was predicted and does not live, by size."""
    live, predicted = sorted(found.alive), sorted(found.predicted, key=lambda each: (each.bytes, each.name))
    predicted = [each for each in predicted if each.bytes]
    extra = []
    for size, name in live:
        match = next((each for each in predicted if each.bytes == size), None)
        if match is None:
            extra.append((size, name))
        else:
            predicted.remove(match)
    return extra, predicted
