"""Measurements of an encoder: saved activations of a forward, FLOPs of forward and backward, peak of a step."""

from __future__ import annotations

import dataclasses
import gc
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from bench.shared.backward_pass import run_backward
from bench.shared.ledger_cases import Measured, highest, live_bytes
from bench.shared.packed_documents import documents_from_starts
from bench.shared.saved_cases import Storages, Watched
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.model.documents import Documents
from meshwright.model.encoder import Encoder
from meshwright.model.initialise import initialise
from meshwright.model.weight_gradients import WeightGradients, defer_weight_gradients
from meshwright.parallel.recompute import ActivationCheckpointing
from meshwright.parallel.zero_engine import ZeroEngine
from meshwright.planner.cost.micro_batch import MicroBatch
from meshwright.planner.memory.ledger import ledger
from meshwright.planner.memory.saved import saved_activations
from meshwright.recipe import TrainRecipe
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset
from meshwright.spec.stages import whole_model
from meshwright.spec.work import count_predictions
from meshwright.training.optimizer import Optimizer


class EncoderCase(NamedTuple):
    """Batch to measure. starts: document boundaries of each sequence; None: one document per sequence."""

    head: str = "masked"
    recompute: str = "none"
    rows: int = 4
    sequence: int = 30
    dtype: str = "float32"
    starts: tuple[tuple[int, ...], ...] | None = None
    backend: str | None = None  # backend of torch.compile; None: not compiled


def small(head: str = "masked", **changes: Any) -> ModelConfig:
    """Return a model with three layers, 97 tokens and, for classifiers, three classes."""
    labels = ("no", "maybe", "yes") if head == "classes" else ()
    return dataclasses.replace(preset("bert-tiny"), layers=3, vocabulary=97, head=head, labels=labels, **changes)


def inputs(config: ModelConfig, case: EncoderCase) -> tuple[torch.Tensor, torch.Tensor, Documents]:
    """Return (tokens, targets for as many tokens as the planner assumes to be masked, documents)."""
    make = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, config.vocabulary, (case.rows, case.sequence), generator=make)
    documents = Documents() if case.starts is None else documents_from_starts(case.starts, case.sequence)
    if config.head != "masked":
        return tokens, torch.randint(0, len(config.labels) or 1, (case.rows,), generator=make), documents
    chosen = torch.randperm(tokens.numel(), generator=make)[: count_predictions(config, case.rows, case.sequence)]
    targets = torch.full((tokens.numel(),), -100)
    targets[chosen] = tokens.flatten()[chosen]
    return tokens, targets.view_as(tokens), documents


def build(config: ModelConfig, case: EncoderCase) -> Encoder:
    model = Encoder(config, dtype=getattr(torch, case.dtype), recompute=ActivationCheckpointing(case.recompute))
    initialise(model, parameter_table(config), seed=1)
    return model


def loss_of(model: Encoder, batch: tuple[torch.Tensor, torch.Tensor, Documents]) -> torch.Tensor:
    """Return the loss; for head "none", the output of the pooler."""
    if model.config.head == "none":
        return model.pooled(model.hidden(batch[0], batch[2]), batch[2])
    return model(*batch)


def watch(case: EncoderCase) -> Watched:
    """Return the storages alive after a forward, those given to `saved_tensors_hooks`, and the prediction."""
    config = small(case.head)
    model, batch = build(config, case), inputs(config, case)
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    given = {
        each.untyped_storage()._cdata for each in (*batch[:2], batch[2].starts_BS) if each is not None
    }  # fmt: skip
    packed: dict[int, tuple[torch.Tensor, int]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed[tensor.untyped_storage()._cdata] = tensor, tensor.untyped_storage().nbytes()
        return tensor

    storages = Storages()
    watching = storages if case.backend is None else nullcontext()  # it does not see operators of compiled graphs
    if case.backend is not None:
        torch._dynamo.reset()
        model.compile_blocks(backend=case.backend)
    with watching, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model, batch)
    micro_batch = MicroBatch.of(
        config, Layout(recompute=case.recompute), case.rows, case.sequence, packed=case.starts is not None,
        dtype=case.dtype,
    )  # fmt: skip
    predicted = saved_activations(micro_batch, whole_model(config), compiled=case.backend is not None)
    alive = storages.alive()
    assert loss.requires_grad
    return Watched(
        [each for micro_batch, each in alive.items() if micro_batch not in own],
        [
            (size, str(tuple(tensor.shape)))
            for micro_batch, (tensor, size) in packed.items()
            if size and micro_batch not in own | given
        ],
        predicted,
    )


CPU_FLASH = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda d, q, k, v, *_, **__: (
        sdpa_backward_flop_count(d, q, k, v)
    ),
}
"""torch has the formulas but does not register them for this kernel."""


def count(case: EncoderCase) -> tuple[int, int]:
    """Return the FLOPs of a forward and of its backward. The loss computes gradients of the head in the forward."""
    config = small(case.head)
    model, batch = build(config, case), inputs(config, case)
    with FlopCounterMode(display=False, custom_mapping=CPU_FLASH) as forward:
        loss = loss_of(model, batch)
    with FlopCounterMode(display=False, custom_mapping=CPU_FLASH) as backward:
        loss.backward(torch.ones_like(loss))
    return forward.get_total_flops(), backward.get_total_flops()


class EncoderStep(NamedTuple):
    """Step to measure. batch: global number of sequences."""

    config: ModelConfig
    layout: str = "dp1"
    batch: int = 4
    sequence: int = 64
    dtype: str = "float32"
    starts: tuple[tuple[int, ...], ...] | None = None
    compiled: bool = False


def measure(step: EncoderStep) -> Measured:
    """Measure a data-parallel step by PyTorch's record of its allocator, after two warm-up steps."""
    gc.collect()
    gc.freeze()  # what is here now is neither looked through nor counted
    layout, dtype, table = Layout.parse(step.layout), getattr(torch, step.dtype), parameter_table(step.config)
    mesh = Mesh.create(layout)
    model = Encoder(step.config, device="meta", dtype=dtype, recompute=ActivationCheckpointing(layout.recompute))
    master = torch.float64 if dtype == torch.float64 else torch.float32
    parallel = ZeroEngine(model, table, mesh, seed=3, parameter_dtype=dtype, master_dtype=master)
    optimizer = Optimizer(parallel.shards, TrainRecipe(steps=3, batch=step.batch, learning_rate=1e-3))
    rows = step.batch // (layout.dp * layout.micro_batches)
    case = EncoderCase(step.config.head, rows=rows, sequence=step.sequence, starts=step.starts)
    micro_batches = [inputs(step.config, case) for _ in range(layout.micro_batches)]
    if step.compiled:
        torch._dynamo.reset()
        model.compile_blocks()
    else:
        defer_weight_gradients(model, WeightGradients(parallel.gradients))

    def once() -> None:
        parallel.begin_step(layout.micro_batches)
        for tokens, targets, documents in micro_batches:
            run_backward(parallel, model(tokens, targets, documents, parallel.prefetchers[0]) / 10)
        parallel.finish()
        optimizer.step(1e-3)
        parallel.all_gather_parameters()
        parallel.begin_step(0)

    for _ in range(2):
        once()
    gc.collect()
    before = live_bytes()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        once()
    peak, where = highest(profile)
    tensors = [tensor for kind in optimizer.state_tensors().values() for tensor in kind]
    states = parallel.memory() | {"optimizer": sum(tensor.nbytes for tensor in tensors)}
    mesh.close()
    predicted = ledger(
        step.config, layout, batch=step.batch, sequence=step.sequence, parameter_dtype=step.dtype, rank=mesh.rank,
        documents=step.starts or False, compile=step.compiled,
    )  # fmt: skip
    return Measured(before + peak, before, states, predicted, where)
