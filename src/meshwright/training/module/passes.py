"""Forward and backward of a user's module on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import nn

from meshwright.errors import UserError
from meshwright.parallel.module.prefetch import ModulePrefetcher
from meshwright.parallel.pipeline import Compute, Key
from meshwright.parallel.stage_compute import Divisor
from meshwright.parallel.zero_engine import ZeroEngine
from meshwright.program.pipeline import Kind
from meshwright.schedules.library import generate_for_layout
from meshwright.training.module.data import derive_seed, seed_generators
from meshwright.training.module.spec import ModuleSpec


class Batch(NamedTuple):
    """Micro-batch of a user's module. number: global number of its first sample; content: the collated batch; items:
    number of items over which its loss averages."""

    number: int
    content: Any
    items: int


class ModulePasses:
    """Forward and backward passes of a user's own torch module under ZeRO.

    module: the module, whose parameters are sharded. spec: arguments of `fit`, such as the loss. parallel: the ZeRO
    engine. seed: seed of the module's random draws (dropout)."""

    def __init__(self, module: nn.Module, spec: ModuleSpec, parallel: ZeroEngine, seed: int) -> None:
        """Connect two sets of hooks on the module: the prefetcher all-gathers parameters before use, and the ZeRO
        engine collects gradients. Arguments: see the class."""
        self.module, self.parallel, self._spec, self.seed = module, parallel, spec, seed
        # Called with each phase's name when it ends: "forward", "backward", "reduce".
        self.mark: Callable[[str], None] = lambda part: None
        self.program = generate_for_layout(parallel.mesh.layout)
        self.watched: Callable[[Compute], Compute] | None = None
        """While a profile is recorded: a wrapper of the `Compute` of a training step; None otherwise."""
        (self.stage,) = parallel.partition.stages
        prefetcher = self.prefetcher = cast(ModulePrefetcher, parallel.prefetchers[self.stage.index])
        parallel.gradients.on_complete, parallel.gradients.on_reduce = prefetcher.on_complete, prefetcher.on_reduce

    def train(self, micro_batches: Sequence[Batch], divisor: Divisor) -> torch.Tensor:
        """Run forward and backward of this rank's `micro_batches` of a step, and reduce the gradients into the shards
        of the ZeRO engine.

        divisor: number by which the summed loss is divided (the number of items on all ranks, divided by the loss
        scale), or a function that returns it. Returns this rank's contribution to the divided loss, a float64 scalar;
        the contributions of all ranks sum to the loss.
        """
        self.parallel.begin_step(len(micro_batches))
        compute = _ModuleCompute(self, micro_batches, divisor)
        watched: Compute = compute if self.watched is None else self.watched(compute)
        for number in range(len(micro_batches)):
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                watched.run(kind, (0, 0, number), None)
        self.parallel.finish()
        self.mark("reduce")
        return compute.total

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """Return the loss summed over the batch's items, in float32 or wider. `UserError` if the script's loss is not a
        scalar that requires a gradient."""
        loss = self._spec.loss(self.module, batch.content)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            shape = f"shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, torch.Tensor) else repr(type(loss))
            raise UserError(f"the loss must be a floating-point scalar tensor, and is {shape}")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise UserError("the loss depends on no trained parameter: it does not require a gradient")
        loss = loss.reshape(()).to(torch.promote_types(loss.dtype, torch.float32))
        return loss * batch.items if self._spec.reduction == "mean" else loss

    def evaluate(self, batch: Batch) -> list[torch.Tensor | float]:
        """Compute loss and metrics of a batch without gradients. Return [loss sum, number of items, sum of each of the
        user's metric functions (`FitOptions.measures`) over the items, in their order]. Collective under ZeRO-3."""
        with torch.no_grad(), self.prefetcher.forward(self.parallel.mesh.shard, backward_follows=False):
            loss = self.loss_sum(batch)
            measured = [measure(self.module, batch.content) for measure in self._spec.measures.values()]
        self.prefetcher.reshard()
        return [loss, batch.items, *measured]


class _ModuleCompute:
    """Executor of the forwards and backwards of a user's module in one step (implements `parallel.pipeline.Compute`
    with the module as the only stage).

    passes: module, loss and ZeRO engine. micro_batches: this rank's micro-batches of the step. divisor: number by which
    the summed loss is divided, or a function that returns it. Attribute `total`: divided loss of the forwards so
    far."""

    def __init__(self, passes: ModulePasses, micro_batches: Sequence[Batch], divisor: Divisor) -> None:
        """Start a step with zero loss. The arguments are those of the class."""
        self._passes, self._micro_batches = passes, micro_batches
        self._divisor = divisor if callable(divisor) else lambda: divisor
        self.total = torch.zeros((), dtype=torch.float64, device=passes.parallel.mesh.device)
        self._loss: torch.Tensor | None = None

    def run(self, kind: Kind, key: Key, x: torch.Tensor | None) -> None:
        """Run the forward or the backward pass of one micro-batch, according to `kind`. key: (stage, replica,
        micro-batch); stage and replica are always 0. x: ignored, since no other stage sends activations."""
        assert kind in (Kind.FORWARD, Kind.BACKWARD), "a single stage has no split backward"
        (self._forward if kind == Kind.FORWARD else self._backward)(self._micro_batches[key[2]])

    def _forward(self, batch: Batch) -> None:
        """Run the forward of a micro-batch; keep its loss for backward and add it to `total`."""
        passes = self._passes
        seed_generators(derive_seed(passes.seed, "forward", batch.number), passes.parallel.mesh.device)
        self._loss = None
        with passes.prefetcher.forward(passes.parallel.mesh.shard):
            if batch.items:
                self._loss = passes.loss_sum(batch) / self._divisor()
                self.total += self._loss.detach()
        passes.mark("forward")

    def _backward(self, batch: Batch) -> None:
        """Run the backward of a micro-batch from the loss that `_forward` stored."""
        passes, parallel = self._passes, self._passes.parallel
        parallel.start_pass(passes.stage)
        with passes.prefetcher.backward(parallel.gradients):
            if self._loss is not None:
                self._loss.backward()  # type: ignore[no-untyped-call]
        self._loss = None
        parallel.end_pass(passes.stage)
        passes.mark("backward")

    def buffer(self, key: Key) -> NoReturn:
        """Raise `AssertionError`: a pipeline with a single stage receives no activations. key: ignored."""
        raise AssertionError("a single stage receives nothing")
