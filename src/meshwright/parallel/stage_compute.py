"""Forward and backward of one micro-batch through one stage: the compute steps of a pipeline program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch

from meshwright.model.documents import MicroBatch
from meshwright.model.transformer import Transformer
from meshwright.model.weight_gradients import WeightGradients
from meshwright.parallel.gradient_accumulation import BackwardPass
from meshwright.parallel.pipeline import Key
from meshwright.parallel.zero_engine import ZeroEngine
from meshwright.program.pipeline import Kind
from meshwright.spec.stages import Stage

Divisor = float | torch.Tensor | Callable[[], float | torch.Tensor]
"""Number by which a step's summed loss is divided, or a function that returns it once the first loss is there."""

Objective = Callable[[int, torch.Tensor], torch.Tensor]
"""Function (index of a micro-batch, log-probabilities [B, D] of its paired responses) -> summed loss."""


class BackwardOrder(NamedTuple):
    """Order of this rank's backwards relative to its forwards in the pipeline program.

    `at_once`: keys (stage, replica (model copy), micro-batch) of the forwards that are immediately followed by their
    backward. For these, the last stage computes the gradient of the logits together with the loss, so that backward
    need not recompute the logits. `queue`: queue of the weight gradients that split backward passes defer; None if only
    forwards run."""

    at_once: Collection[Key] = ()
    queue: WeightGradients | None = None


_FORWARD_ONLY = BackwardOrder()


class StageCompute:
    """Executor of the forwards and backwards of a rank's pipeline stages during one training step or one evaluation.
    Implements `parallel.pipeline.Compute`.

    `model`: modules of the rank's stages; `engine`: ZeRO engine that owns their parameters; `micro_batches`: all
    micro-batches of this rank; `divisor`: number by which the summed loss is divided, or a function that returns it;
    `order`: which forwards are immediately followed by their backward, and the queue of weight gradients that split
    backwards defer; default: for evaluation, where only forwards run. `mark`: called with the name of each phase when
    the phase ends ("forward", "backward", ...); `objective`: function (index of a micro-batch, response
    log-probabilities) -> summed preference loss; None: next-token loss.

    Attribute `loss`: summed loss after division, over the micro-batches whose last stage is on this rank (float64
    scalar)."""

    def __init__(
        self, model: Transformer, engine: ZeroEngine, micro_batches: Sequence[MicroBatch], divisor: Divisor,
        order: BackwardOrder = _FORWARD_ONLY, mark: Callable[[str], None] = lambda part: None,
        objective: Objective | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.engine = engine
        self.mark = mark
        self.loss = torch.zeros((), dtype=torch.float64, device=engine.mesh.device)
        self._objective = objective
        self._micro_batches = micro_batches
        self._divisor = divisor if callable(divisor) else lambda: divisor
        self._at_once, self._queue = order
        self._stages = engine.partition.stages
        self._kept: dict[Key, _SavedForward] = {}
        self._paused: dict[Key, BackwardPass] = {}

    def run(self, kind: Kind, key: Key, x: torch.Tensor | None) -> torch.Tensor | None:
        """Run one compute step of a micro-batch through a stage. `kind`: forward, backward, or the I (input-gradient)
        or W (weight-gradient) pass of a split backward; `key`: (stage, replica (model copy), micro-batch).

        `x`: the stage's input in a forward, the gradient of its output in a backward or I pass. Return the stage's
        output in a forward, the gradient of its input in a backward or I pass. `x` and the result are None at the ends
        of the pipeline and in a W pass. The last stage's forward adds its loss to the attribute `loss`; the engine
        accumulates the parameter gradients; an I pass queues the weight-gradient computations of linear layers.
        """
        if self.engine.mesh.pp.size > 1:
            self.mark("pipeline")  # the phase of waiting for another stage
        stage = self._stages[key[0]]
        # Backward recomputes with the same masks.
        if self.model.token_keys is not None and kind != Kind.WEIGHT_GRADIENT:
            batch = self._micro_batches[key[2]]
            self.model.token_keys.set(batch.documents, batch.tokens_BS.shape[1])
        if kind == Kind.FORWARD:
            out = self._forward(key, stage, x)
            self.mark("forward")
            return out
        d_x, queue = None, self._queue
        assert queue is not None
        if kind == Kind.BACKWARD:
            self.engine.start_pass(stage)
            d_x = self._differentiate(key, x)
            queue.run_waiting()
            self.engine.end_pass(stage)
        elif kind == Kind.INPUT_GRADIENT:
            self._paused[key] = self.engine.start_pass(stage, split=True)
            with queue.collecting(key):
                d_x = self._differentiate(key, x)
            self.engine.pause_pass(stage, queue.parameters(key))
        else:
            self.engine.gradients.resume(self._paused.pop(key))
            queue.run(key)
            self.engine.end_pass(stage)
        self.mark("backward")
        return d_x

    def _forward(self, key: Key, stage: Stage, x: torch.Tensor | None) -> torch.Tensor | None:
        """Run the forward of a micro-batch through `stage`. Return the stage's output [B, S, H] (B sequences of S
        tokens, hidden size H). The last stage adds its loss to the attribute `loss` instead and returns None.

        `key`: indices (stage, replica (model copy), micro-batch); `x`: the stage's input (first stage: None)."""
        batch = self._micro_batches[key[2]]
        units = self.engine.prefetchers[stage.index]
        units.keeps_last = key in self._at_once
        if x is not None:
            x = x.detach()
            if torch.is_grad_enabled():
                x.requires_grad_()
        if stage.last and batch.documents.teacher is not None:
            batch.documents.teacher.fill()
        out, balance = self.model.run_stage(stage, x, batch, units, units.keeps_last)
        if stage.last:
            if self._objective is not None:
                out = self._objective(key[2], out)
            out = out / self._divisor()
            self.loss += out.detach()
        if torch.is_grad_enabled():
            root = out if stage.last or not out.requires_grad else _OutputRoot.apply(out)
            self._kept[key] = _SavedForward(x, root, balance)
        return None if stage.last else out.detach()

    def buffer(self, key: Key) -> torch.Tensor:
        """Return an uninitialised buffer [B, S, H] for receiving a stage's input, or the input's gradient, from another
        rank: B sequences of S tokens (with sequence parallelism this tp rank's S / tp), hidden size H.

        `key`: indices (stage, replica (model copy), micro-batch)."""
        mesh = self.engine.mesh
        rows, sequence = self._micro_batches[key[2]].tokens_BS.shape
        if mesh.layout.tensor_sequence_parallel:
            sequence //= mesh.tp.size
        shape = rows, sequence, self.model.config.hidden
        return torch.empty(shape, dtype=self.engine.parameter_dtype, device=mesh.device)

    def _differentiate(self, key: Key, d_out: torch.Tensor | None) -> torch.Tensor | None:
        """Run autograd's backward through the saved forward of `key` (stage, replica, micro-batch). `d_out`: gradient
        of the stage's output (last stage: None). Return the gradient of the stage's input (first stage: None)."""
        x, root, balance = self._kept.pop(key)
        if not root.requires_grad:  # a first stage without trained parameters
            return None
        roots = [root]
        gradients = [None if d_out is None else _set_output_gradient(root, d_out)]
        # Load-balancing loss of this stage's mixtures; without router loss and bias it needs no gradient.
        if balance is not None and balance.requires_grad:
            roots.append(balance)
            gradients.append(torch.as_tensor(1 / self._divisor(), dtype=balance.dtype, device=balance.device))
        torch.autograd.backward(roots, gradients)
        return None if x is None else x.grad


class _SavedForward(NamedTuple):
    """Tensors of a forward that its backward needs.

    `x`: stage input; None on the first stage. `root`: tensor from which autograd's backward starts: the loss on the
    last stage; on other stages an empty tensor that takes the position of the stage output in the autograd graph
    (`_OutputRoot`). `balance`: load-balancing loss; None without experts."""

    x: torch.Tensor | None
    root: torch.Tensor
    balance: torch.Tensor | None


class _OutputRoot(torch.autograd.Function):
    """Autograd function that lets a stage free its output once it is sent to the next stage, while autograd can still
    run the stage's backward (as Megatron-LM's `deallocate_pipeline_outputs`). An empty tensor takes the output's
    position in the autograd graph; `_set_output_gradient` supplies the output gradient."""

    @staticmethod
    def forward(context: Any, out: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor from which autograd's backward of the stage output `out` can be started. context:
        autograd context."""
        context.gradient = None
        return out.new_empty(0)

    @staticmethod
    def backward(context: Any, *empty: torch.Tensor) -> Any:
        """Return the gradient of the stage's output, which `_set_output_gradient` has stored. context: autograd
        context. `empty`: gradient of the empty tensor; ignored."""
        gradient = context.gradient
        context.gradient = None
        return gradient


def _set_output_gradient(root: torch.Tensor, d_out: torch.Tensor) -> torch.Tensor:
    """Give autograd the gradient `d_out` of a stage output whose memory has been freed. Backward then starts from
    `root`, the empty tensor that stands for the stage output in the autograd graph. Return the empty gradient tensor to
    pass with it: `torch.autograd.backward([root], [returned])`."""
    exit_: Any = root.grad_fn
    exit_.gradient = d_out
    return torch.empty_like(root)
