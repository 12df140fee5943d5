"""Forward and backward of one micro-batch through one stage: the compute steps of a pipeline program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch

from meshwright.model.documents import Documents
from meshwright.model.transformer import Transformer
from meshwright.model.weight_gradients import WeightGradients
from meshwright.parallel.gradient_accumulation import BackwardPass
from meshwright.parallel.zero_engine import ZeroEngine

MicroBatch = tuple[torch.Tensor, torch.Tensor, Documents]
"""Tokens [B, S], targets [B, S] (-100: none), documents."""

Key = tuple[int, int, int]  # stage, replica, micro-batch

Objective = Callable[[int, torch.Tensor], torch.Tensor]
"""The summed loss of a micro-batch (its number) whose responses, in pairs, have these log-probabilities [B, D]."""


class BackwardOrder(NamedTuple):
    """Order of the backward passes on this rank, from the pipeline program. `at_once`: (stage, replica, micro-batch) of
    forwards that are immediately followed by their own backward, so that the head may compute its gradient with the
    loss; `queue`: collects the weight gradients that split backward passes defer; None if only forwards run."""

    at_once: Collection[Key] = ()
    queue: WeightGradients | None = None


_FORWARD_ONLY = BackwardOrder()


class StageCompute:
    """Forward and backward of a model's pipeline stages (a `Compute`, parallel/pipeline.py), for one step or one
    evaluation. The methods' arguments stage, replica (model copy) and micro_batch are indices.

    `micro_batches`: those of this rank; `targets`: number by which the summed loss is divided; `order`: order of
    backward passes; `mark`: called with the name of each finished phase ("forward", "backward", ...); `objective`:
    returns the loss of preference pairs. Attribute `loss`: sum over the micro-batches whose last stage is on this rank
    (float64).
    """

    def __init__(
        self,
        model: Transformer,
        engine: ZeroEngine,
        micro_batches: Sequence[MicroBatch],
        targets: float,
        order: BackwardOrder = _FORWARD_ONLY,
        mark: Callable[[str], None] = lambda part: None,
        objective: Objective | None = None,
    ) -> None:
        self.model, self.engine, self.mark, self._objective = model, engine, mark, objective
        self.loss = torch.zeros((), dtype=torch.float64, device=engine.mesh.device)
        self._micro_batches, self._targets = micro_batches, targets
        self._at_once, self._queue = order
        self._stages = engine.partition.stages
        self._kept: dict[Key, _SavedForward] = {}
        self._paused: dict[Key, BackwardPass] = {}

    def forward(self, stage: int, replica: int, micro_batch: int, x: torch.Tensor | None) -> torch.Tensor | None:
        """Run the forward of a micro-batch through a stage (model copy `replica`), given by index: return the stage's
        output [B, S, H] for its input `x` (first stage: None); on the last stage add its loss to `loss` and return
        None."""
        self._mark_end_of_wait()
        key, part = (stage, replica, micro_batch), self._stages[stage]
        units = self.engine.prefetchers[stage]
        units.keeps_last = at_once = key in self._at_once
        if x is not None:
            x = x.detach()
            if torch.is_grad_enabled():
                x.requires_grad_()
        out, balance = self.model.run_stage(part, x, *self._micro_batches[micro_batch], units, at_once)
        if part.last:
            if self._objective is not None:
                out = self._objective(micro_batch, out)
            out = out / self._targets
            self.loss += out.detach()
        if torch.is_grad_enabled():
            root = out if part.last else _OutputRoot.apply(out)
            self._kept[key] = _SavedForward(x, root, balance)
        self.mark("forward")
        return None if part.last else out.detach()

    def backward(self, stage: int, replica: int, micro_batch: int, d_out: torch.Tensor | None) -> torch.Tensor | None:
        """Run the backward of a micro-batch through a stage (model copy `replica`), given by index: return the gradient
        of the stage's input (first stage: None), given `d_out`, that of its output (last stage: None). The engine
        accumulates the parameter gradients."""
        self._mark_end_of_wait()
        part = self._stages[stage]
        self.engine.start_pass(part)
        d_x = self._differentiate((stage, replica, micro_batch), d_out)
        self.engine.end_pass(part)
        self.mark("backward")
        return d_x

    def input_gradient(
        self, stage: int, replica: int, micro_batch: int, d_out: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Run the first half of a split backward (B pass): return the gradient of the stage's input (first stage:
        None), given `d_out`, that of its output (last stage: None); weight gradients of linear layers are queued for
        `weight_gradient`. stage, replica (model copy), micro_batch: indices."""
        self._mark_end_of_wait()
        assert self._queue is not None
        key, part = (stage, replica, micro_batch), self._stages[stage]
        self._paused[key] = self.engine.start_pass(part, split=True)
        with self._queue.collecting(key):
            d_x = self._differentiate(key, d_out)
        self.engine.pause_pass(part, self._queue.parameters(key))
        self.mark("backward")
        return d_x

    def weight_gradient(self, stage: int, replica: int, micro_batch: int) -> None:
        """Run the second half of a split backward (W pass): compute the weight gradients that `input_gradient` queued
        for this stage, model copy (`replica`) and micro-batch, given by index."""
        self._mark_end_of_wait()
        assert self._queue is not None
        key, part = (stage, replica, micro_batch), self._stages[stage]
        self.engine.gradients.resume(self._paused.pop(key))
        self._queue.run(key)
        self.engine.end_pass(part)
        self.mark("backward")

    def _mark_end_of_wait(self) -> None:
        """Call `mark("pipeline")`, the phase of waiting for another stage, if there are several pipeline ranks."""
        if self.engine.mesh.pp.size > 1:
            self.mark("pipeline")

    def buffer(self, stage: int, replica: int, micro_batch: int) -> torch.Tensor:
        """Return an uninitialised receive buffer for the input of a stage and a micro-batch (given by index): [B, S,
        H], S being this tp rank's slice with sequence parallelism."""
        tokens_BS, mesh = self._micro_batches[micro_batch][0], self.engine.mesh
        rows, sequence = tokens_BS.shape
        if mesh.layout.tensor_sequence_parallel:
            sequence //= mesh.tp.size
        shape = rows, sequence, self.model.config.hidden
        return torch.empty(shape, dtype=self.engine.parameter_dtype, device=mesh.device)

    def _differentiate(self, key: Key, d_out: torch.Tensor | None) -> torch.Tensor | None:
        """Run autograd's backward of the saved forward of `key` (stage, replica, micro-batch), given the output
        gradient `d_out` (last stage: None); return the gradient of the stage's input (first stage: None)."""
        x, root, balance = self._kept.pop(key)
        roots, gradients = [root], [None if d_out is None else _set_output_gradient(root, d_out)]
        # What this stage's mixtures add to the summed loss; nothing, where no loss and no bias balances them.
        if balance is not None and balance.requires_grad:
            roots.append(balance)
            gradients.append(torch.full_like(balance, 1 / self._targets))
        torch.autograd.backward(roots, gradients)
        return None if x is None else x.grad


class _SavedForward(NamedTuple):
    """Tensors of a forward that its backward needs. `x`: stage input, None on the first stage; `root`: autograd root
    (the loss, or a stand-in for the stage output); `balance`: load-balancing loss, None without experts."""

    x: torch.Tensor | None
    root: torch.Tensor
    balance: torch.Tensor | None


class _OutputRoot(torch.autograd.Function):
    """Autograd root of a stage's backward. It replaces the stage's output without keeping its memory, which is freed
    once sent: its value is empty, and `_set_output_gradient` sets its gradient."""

    @staticmethod
    def forward(context: Any, out: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor that stands for the stage output `out` in autograd."""
        context.gradient = None
        return out.new_empty(0)

    @staticmethod
    def backward(context: Any, *empty: torch.Tensor) -> Any:
        """Return the output gradient set by `_set_output_gradient`."""
        gradient, context.gradient = context.gradient, None
        return gradient


def _set_output_gradient(root: torch.Tensor, d_out: torch.Tensor) -> torch.Tensor:
    """Set the output gradient `d_out` on the root made by `_OutputRoot`; return the empty gradient for autograd."""
    exit_: Any = root.grad_fn
    exit_.gradient = d_out
    return torch.empty_like(root)
