"""Functions that ranks run in tests of the ledger: a few training steps, of which the last is recorded by PyTorch's
allocator."""

from __future__ import annotations

import dataclasses
import gc
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from bench.shared.packed_documents import documents_from_starts
from meshwright.adapters.dropout import sample_keys
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.model.documents import Documents
from meshwright.model.pairs import Pairs
from meshwright.parallel.context import shard_sequences
from meshwright.parallel.expert import AllToAllTokenDispatcher
from meshwright.parallel.parallelize import parallelize
from meshwright.parallel.step import ForwardBackward, count_targets, sum_over_data
from meshwright.planner.cost.engines import choose_run_engine
from meshwright.planner.cost.micro_batch import Routed
from meshwright.planner.memory.ledger import Ledger, ledger
from meshwright.recipe import TrainRecipe
from meshwright.spec.config import ModelConfig
from meshwright.spec.teacher import TeacherWork
from meshwright.training.distillation import Distillation
from meshwright.training.distillation_loss import DistillationLoss
from meshwright.training.optimizer import Optimizer
from meshwright.training.preference_loss import Preference
from meshwright.training.teacher import Teacher

WATCHED = 5
"""Steps that are watched where there are several ranks; one step of a single rank is like another."""
SMALL = 20_000
"""Bytes of a step that the ledger leaves out at these sizes: vectors of a number a token, counters, the loss."""


class Step(NamedTuple):
    """Step to measure. batch: global number of sequences."""

    config: ModelConfig
    layout: str
    batch: int = 4
    sequence: int = 64
    optimizer: str = "adamw"
    momentum: float = 0.0
    dtype: str = "float32"
    pairs: bool = False  # preference pairs, one per sequence
    compiled: bool = False
    starts: tuple[tuple[int, ...], ...] | None = None
    """Where documents begin in the rows of each micro-batch; None: every row is one."""
    known_documents: bool = True  # True if the ledger is given their boundaries
    teacher: TeacherWork | None = None  # of distillation
    overlap: bool = False  # True if tensor-parallel products overlap with their collectives, in chunks


class Measured(NamedTuple):
    """Bytes: at most in the step, before it, by kind of state; and what the ledger says."""

    peak: int
    before: int
    states: dict[str, int]
    predicted: Ledger
    where: str


def measure(step: Step) -> Measured:
    """Measure steps of a run after the first, which allocates persistent memory."""
    if not torch.distributed.is_initialized():
        return _measure(step)
    rank = torch.distributed.get_rank()
    place = (
        Path(tempfile.gettempdir()) / f"meshwright-inductor-{rank}"
    )  # no rank writes to the directory while another loads
    with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": str(place)}):
        return _measure(step)


def _measure(step: Step) -> Measured:
    torch.manual_seed(0)
    gc.collect()
    gc.freeze()  # what is here now is neither looked through nor counted
    layout, dtype = Layout.parse(step.layout), getattr(torch, step.dtype)
    mesh = Mesh.create(layout)
    mesh.communicator.product_overlap = "chunks" if step.overlap else "off"
    master = torch.float64 if dtype == torch.float64 else torch.float32
    model, engine, program = parallelize(
        step.config, mesh, step.sequence, seed=3, parameter_dtype=dtype, master_dtype=master
    )
    train = TrainRecipe(steps=3, batch=step.batch, learning_rate=1e-3, optimizer=step.optimizer, momentum=step.momentum)
    optimizer = Optimizer(engine.shards, train)
    if step.compiled:
        torch._dynamo.reset()
        model.compile_blocks()
    passes = ForwardBackward(model, engine, program, preference=Preference() if step.pairs else None)
    rows = step.batch // (layout.dp * layout.micro_batches)
    micro_batches: list[Any] = []
    for _ in range(layout.micro_batches):
        numbers = torch.randint(0, step.config.vocabulary, (rows, step.sequence + 1))
        parts = numbers[:, :-1].contiguous(), numbers[:, 1:].contiguous()
        documents = Documents() if step.starts is None else documents_from_starts(step.starts, step.sequence)
        if step.pairs:
            ids = torch.arange(step.sequence).expand(rows, -1) // (step.sequence // 2)
            documents = dataclasses.replace(Documents.from_ids(ids), pairs=Pairs.from_ids(ids))
        if step.config.adapter and step.config.adapter.dropout:
            documents = dataclasses.replace(documents, samples_B=sample_keys(1, torch.arange(rows)))
        micro_batches.append(shard_sequences(*parts, documents, mesh))
    del numbers, parts
    teacher = None
    if step.teacher is not None:
        given = step.teacher.held, step.sequence
        teacher = Teacher(step.teacher.config, mesh, given, dtype, range(step.teacher.projected), seed=1)
        model.layer_outputs = dict.fromkeys(range(step.teacher.projected))
        loss = DistillationLoss(
            step.teacher.divergence, layer_map=tuple((layer, layer) for layer in range(step.teacher.projected))
        )
        recipe: Any = SimpleNamespace(distill=None)
        objective, policy = Distillation(recipe, loss), cast(Any, SimpleNamespace(model=model, mesh=mesh))
        objective.teacher = teacher
        rows_of = [np.zeros(rows, np.int64)] * len(micro_batches)

    def once() -> None:
        given = micro_batches if teacher is None else objective.complete(policy, micro_batches, rows_of, None)
        if step.pairs:
            terms = sum_over_data([documents.pairs.count for _, _, documents in micro_batches], mesh, mesh.cp.size)
        else:
            terms = count_targets((targets for _, targets, _ in micro_batches), mesh)
        passes.train(given, terms)
        del given
        optimizer.step(1e-3)
        engine.all_gather_parameters()
        engine.begin_step(0)

    once()
    gc.collect()
    pauses = (0.0, 0.01, 0.02, 0.05) if mesh.world_size > 1 else (0.0,)  # a single rank sends nothing
    before = min(map(live_bytes_after, pauses))
    routed: list[Routed] = []
    agree = AllToAllTokenDispatcher._agree_on_routes

    def noted(dispatcher: AllToAllTokenDispatcher, ends_E: torch.Tensor) -> Any:
        routes = agree(dispatcher, ends_E)
        routed.append(Routed(sum(routes.received), sum(routes.shared)))
        return routes

    def watched() -> tuple[int, str, dict[int, Routed]]:
        """At most how much, where, and how many tokens came to the experts of each layer of a single forward."""
        routed.clear()
        activities = [torch.profiler.ProfilerActivity.CPU]
        with (
            mock.patch.object(AllToAllTokenDispatcher, "_agree_on_routes", noted),
            torch.profiler.profile(activities=activities, profile_memory=True) as profile,
        ):
            once()
            for unit in engine._units.values():
                if (
                    unit.pending_all_gather is not None
                ):  # a call that ends after the profile corrupts the heap (torch 2.13)
                    unit.unshard()
        layers = [
            at for part in engine.partition.stages_on(mesh.pp.rank) for at in part.layers if step.config.has_experts(at)
        ]
        came = dict(zip(layers, routed, strict=False)) if layout.micro_batches == 1 else {}
        return *highest(profile), came

    def predict(came: dict[int, Routed]) -> Ledger:
        halves = ((0, step.sequence // 2),) * rows if step.pairs else None
        known = step.starts or halves or False
        kind = step.optimizer if step.optimizer != "sgd" or not step.momentum else "momentum"
        return ledger(
            step.config, layout, batch=step.batch, sequence=step.sequence, optimizer=kind, parameter_dtype=step.dtype,
            rank=mesh.rank, routed=came, documents=known if step.known_documents else bool(known), pairs=step.pairs,
            compile=step.compiled, teacher=step.teacher,
            engine=choose_run_engine("chunks" if step.overlap else "off", "cpu", step.compiled),
        )  # fmt: skip

    # A thread of gloo lets go of a message that has arrived when it next runs: the lowest is what the step needs. When
    # all ranks have seen theirs twice, it is the lowest.
    found = [watched()]
    while mesh.world_size > 1 and len(found) < WATCHED:
        found.append(watched())
        peaks = [each[0] for each in found]
        again = torch.tensor(peaks.count(min(peaks)) > 1)
        torch.distributed.all_reduce(again, torch.distributed.ReduceOp.BAND)
        if again:
            break
    peak, where, came = min(found, key=lambda each: each[0])
    tensors = [tensor for kind in optimizer.state_tensors().values() for tensor in kind]
    states = engine.memory() | {"optimizer": sum(tensor.nbytes for tensor in tensors)}
    mesh.close()
    return Measured(before + peak, before, states, predict(came), where)


def check_states(found: Measured) -> None:
    predicted = {"parameters": 0, "masters": 0, "gradients": 0, "gradient_buffers": 0, "optimizer": 0}
    for item in found.predicted.items:
        kind = item.name.rpartition(".")[2]
        if item.name.startswith("teacher."):
            continue
        if item.name.startswith("gradient_buffer."):
            predicted["gradient_buffers"] += item.bytes
        elif item.first == "start" and item.category in ("parameters", "gradients"):
            predicted[item.category] += item.bytes
        elif item.category == "optimizer":
            predicted["masters" if kind == "master" else "optimizer"] += item.bytes
    assert predicted == found.states
    assert abs(found.predicted.between_steps - found.before) < SMALL


def live_bytes_after(seconds: float) -> int:
    """Return `live_bytes` after a pause, in which a thread of gloo lets go of messages that have arrived."""
    time.sleep(seconds)
    return live_bytes()


def live_bytes() -> int:
    """Return the bytes of all tensors since `gc.freeze`, each storage once, without fake tensors."""
    storages = {}
    for each in gc.get_objects():
        if not issubclass(type(each), torch.Tensor) or isinstance(each, FakeTensor | FunctionalTensor):
            continue
        if torch._is_functional_tensor(each):
            assert isinstance(torch._from_functional_tensor(each), FakeTensor)
        elif each.device.type == "cpu":
            storage = each.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def highest(profile: Any) -> tuple[int, str]:
    """Return the peak bytes above the start, and the operators around the peak."""
    events = [(each.name(), each.start_ns(), each) for each in profile.profiler.kineto_results.events()]
    changes = sorted((begin, each.nbytes()) for name, begin, each in events if name == "[memory]")
    now = highest = 0
    when = 0
    for at, size in changes:
        now += size
        if now > highest:
            highest, when = now, at
    around = (
        name
        for name, begin, each in events
        if begin <= when and name != "[memory]" and when <= begin + each.duration_ns()
    )
    return highest, " > ".join(around)
