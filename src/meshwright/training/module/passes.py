"""Forward and backward of a foreign module on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import nn

from meshwright.errors import UserError
from meshwright.parallel.module.prefetch import ModulePrefetcher
from meshwright.parallel.pipeline import Compute
from meshwright.parallel.zero_engine import ZeroEngine
from meshwright.schedules.library import program_of
from meshwright.training.module.data import draw_from, seed_for
from meshwright.training.module.spec import ModuleSpec


class Batch(NamedTuple):
    """A micro-batch: the number of its first sample, what `collate` made, and how many items its loss is over."""

    number: int
    content: Any
    items: int


class ModulePasses:
    """Forward and backward of a step, as `parallel.step.ForwardBackward` does it for a transformer. `mark`: told of
    each part of the work that has ended. `seed`: of what the module draws (dropout)."""

    def __init__(
        self,
        module: nn.Module,
        spec: ModuleSpec,
        parallel: ZeroEngine,
        seed: int,
        mark: Callable[[str], None] = lambda part: None,
    ) -> None:
        self.module, self.parallel, self.mark = module, parallel, mark
        self._spec, self.seed = spec, seed
        self.program = program_of(parallel.mesh.layout)
        self.watched: Callable[[Compute], Compute] | None = None
        """While a profile is taken: what stands around the compute steps of a training step."""
        (self.stage,) = parallel.partition.stages
        prefetcher = self.prefetcher = cast(ModulePrefetcher, parallel.prefetchers[self.stage.index])
        parallel.gradients.on_complete, parallel.gradients.on_reduce = prefetcher.on_complete, prefetcher.on_reduce

    def train(self, micro_batches: Sequence[Batch], targets: float) -> torch.Tensor:
        """`parallel.shards` have the true gradients afterwards. targets: what the sum of losses is divided by. Returns
        this rank's loss (float64)."""
        self.parallel.begin_step(len(micro_batches))
        compute = _ModuleCompute(self, micro_batches, targets)
        watched: Compute = compute if self.watched is None else self.watched(compute)
        for number in range(len(micro_batches)):
            watched.forward(0, 0, number, None)
            watched.backward(0, 0, number, None)
        self.parallel.finish()
        self.mark("reduce")
        return compute.total

    def loss_sum(self, batch: Batch) -> torch.Tensor:
        """The sum of the batch's losses, in float32 at least."""
        loss = self._spec.loss(self.module, batch.content)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            shape = f"shape {tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, torch.Tensor) else repr(type(loss))
            raise UserError(f"the loss should be a tensor of one real number, and is {shape}")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise UserError("the loss depends on no parameter that is trained: nothing in it requires a gradient")
        loss = loss.reshape(()).to(torch.promote_types(loss.dtype, torch.float32))
        return loss * batch.items if self._spec.reduction == "mean" else loss

    def evaluate(self, batch: Batch) -> list[torch.Tensor | float]:
        """The sum of the batch's losses, its items, and the sums of what is measured beside, without gradients."""
        with torch.no_grad(), self.prefetcher.forward(self.parallel.mesh.shard, backward_follows=False):
            loss = self.loss_sum(batch)
            measured = [measure(self.module, batch.content) for measure in self._spec.measures.values()]
        self.prefetcher.reshard()
        return [loss, batch.items, *measured]


class _ModuleCompute:
    """The `Compute` (parallel/pipeline.py) of one step: the whole module is its only stage."""

    def __init__(self, passes: ModulePasses, micro_batches: Sequence[Batch], targets: float) -> None:
        self._passes, self._micro_batches, self._targets = passes, micro_batches, targets
        self.total = torch.zeros((), dtype=torch.float64, device=passes.parallel.mesh.device)
        self._loss: torch.Tensor | None = None

    def forward(self, stage: int, replica: int, micro_batch: int, x: torch.Tensor | None) -> None:
        passes, batch = self._passes, self._micro_batches[micro_batch]
        draw_from(seed_for(passes.seed, "forward", batch.number), passes.parallel.mesh.device)
        self._loss = None
        with passes.prefetcher.forward(passes.parallel.mesh.shard):
            if batch.items:
                self._loss = passes.loss_sum(batch) / self._targets
                self.total += self._loss.detach()
        passes.mark("forward")

    def backward(self, stage: int, replica: int, micro_batch: int, d_out: torch.Tensor | None) -> None:
        passes, parallel = self._passes, self._passes.parallel
        parallel.start_pass(passes.stage)
        with passes.prefetcher.backward(parallel.gradients):
            if self._loss is not None:
                self._loss.backward()  # type: ignore[no-untyped-call]
        self._loss = None
        parallel.end_pass(passes.stage)
        passes.mark("backward")

    def input_gradient(self, stage: int, replica: int, micro_batch: int, d_out: torch.Tensor | None) -> NoReturn:
        raise AssertionError("no backward is split")

    def weight_gradient(self, stage: int, replica: int, micro_batch: int) -> NoReturn:
        raise AssertionError("no backward is split")

    def buffer(self, stage: int, replica: int, micro_batch: int) -> NoReturn:
        raise AssertionError("nothing comes from another stage")
