"""The forward and backward of a training step, and the forward of an evaluation: every rank runs its part of a pipeline
program, on one rank as on many. Training and verification both come here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from meshwright.model.transformer import Transformer
from meshwright.model.weight_gradients import WeightGradients, take_weight_gradients
from meshwright.parallel.data import DataParallel
from meshwright.parallel.pipeline import Compute, Pipeline
from meshwright.parallel.stage_compute import Key, MicroBatch, StageCompute
from meshwright.program.pipeline import COMPUTING, Kind, PipelineProgram

WORTH_ADDING_AT_ONCE = 2**17
"""Elements of a weight from which a pass over its memory takes longer than to call a product that saves it."""


class ForwardBackward:
    """Runs `program` on this rank of pp. `mark`: told of each part of the work that has ended ("pipeline": waiting for
    another stage; "forward", "backward", "reduce"). `add_at_once_from`: elements of a weight from which its products
    add their gradients to the sum themselves."""

    def __init__(
        self,
        model: Transformer,
        parallel: DataParallel,
        program: PipelineProgram,
        mark: Callable[[str], None] = lambda part: None,
        add_at_once_from: int = WORTH_ADDING_AT_ONCE,
    ) -> None:
        self.model, self.parallel, self.program, self.mark = model, parallel, program, mark
        self.watched: Callable[[Compute], Compute] | None = None
        """While a profile is taken: what stands around the compute steps of a training step."""
        self._pipeline = Pipeline(program, parallel.mesh.pp)
        self._passes, self._at_once, split = _what_is_here(program, parallel.mesh.pp.rank)
        self._queue = WeightGradients(parallel.gradients)
        if split:
            take_weight_gradients(model, self._queue)
        elif not model.compiled:  # a compiled backward pass is cut where a product puts its gradient elsewhere
            take_weight_gradients(model, self._queue, add_at_once_from)

    def train(self, micro_batches: Sequence[MicroBatch], targets: float) -> torch.Tensor:
        """Forward and backward of this rank's micro-batches; `parallel.shards` have the true gradients afterwards.

        targets: what the sum of token losses is divided by: the target tokens of the whole step (`count_targets`), over
        what the loss is scaled by, if it is. Returns the loss of the micro-batches whose last
        stage is here, 0 where none is (float64; `loss_share` of it is this rank's share of the step's loss).
        """
        self.parallel.begin_step(self._passes)
        compute = StageCompute(self.model, self.parallel, micro_batches, targets, self._at_once, self._queue, self.mark)
        self._pipeline.run(compute if self.watched is None else self.watched(compute))
        self.parallel.finish()
        self.mark("reduce")
        return compute.loss

    def evaluate(self, micro_batches: Sequence[MicroBatch], targets: int = 1) -> torch.Tensor:
        """The sum of the token losses over `targets`, of as many micro-batches as a step has or fewer, without
        gradients; 0 where the last stage is not here."""
        with torch.no_grad():
            compute = StageCompute(self.model, self.parallel, micro_batches, targets)
            self._pipeline.run_forwards(compute, len(micro_batches))
        return compute.loss


def _what_is_here(program: PipelineProgram, rank: int) -> tuple[dict[int, int], frozenset[Key], bool]:
    """Of a rank: how many backward passes go through each of its stages, which forwards are followed at once by their
    own backward, and whether any backward is split."""
    s = program.steps
    here = [at for at in s.of_rank(rank) if s.kind[at] in COMPUTING]
    passes: Counter[int] = Counter()
    at_once = set()
    before: Key | None = None
    for at in here:
        key = int(s.stage[at]), int(s.replica[at]), int(s.micro_batch[at])
        if s.kind[at] in (Kind.BACKWARD, Kind.INPUT_GRADIENT):
            passes[key[0]] += 1
            if key == before:
                at_once.add(key)
        before = key if s.kind[at] == Kind.FORWARD else None
    return dict(passes), frozenset(at_once), any(s.kind[at] == Kind.INPUT_GRADIENT for at in here)
