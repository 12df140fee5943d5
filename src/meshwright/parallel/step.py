"""Forward and backward of a training step, and forward of an evaluation: every rank runs its part of a pipeline program
(each rank's order of forwards, backwards and transfers)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
from torch import nn

from meshwright.comm.collectives import all_reduce
from meshwright.comm.mesh import Mesh
from meshwright.model.documents import MicroBatch
from meshwright.model.layers import ColumnParallelLinear
from meshwright.model.pairs import Pairs, PreferenceLoss
from meshwright.model.transformer import Transformer
from meshwright.model.weight_gradients import WeightGradients, defer_weight_gradients
from meshwright.parallel.pipeline import Compute, Key, Pipeline
from meshwright.parallel.stage_compute import BackwardOrder, Divisor, Objective, StageCompute
from meshwright.parallel.zero_engine import ZeroEngine
from meshwright.program.pipeline import COMPUTING, Kind, PipelineProgram
from meshwright.spec.policy import FUSED_ACCUMULATION_MIN_NUMEL, PREFERENCE_METRICS

TARGET_SITE = "data.targets"
TermCount = Callable[[], int | torch.Tensor]
"""Function that returns the number of a step's loss terms (target tokens or preference pairs); on a GPU an integer
scalar tensor, so that the host does not wait for it. It waits for the all-reduce of the count: call it when the loss is
divided, because on a GPU that all-reduce may be queued behind the all-gathers of the parameters."""


class ForwardBackward:
    """Runner of the forwards and backwards of a step, or of an evaluation, on this rank, in the order of a pipeline
    program; the optimizer step is not included.

    `model`: the rank's stages; `engine`: ZeRO engine that owns their parameters. `fused_accumulation_min_numel`: for
    weights with at least this number of elements, the matrix product that computes the gradient also adds it to the
    gradient buffer (fused gradient accumulation). `preference`: loss of preference pairs; None: next-token loss."""

    def __init__(
        self, model: Transformer, engine: ZeroEngine, program: PipelineProgram,
        fused_accumulation_min_numel: int = FUSED_ACCUMULATION_MIN_NUMEL,
        preference: Callable[[torch.Tensor, Pairs], PreferenceLoss] | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.engine = engine
        self.program = program
        self.preference = preference
        # Called with each phase's name when it ends: "pipeline" (wait for a stage), "forward", "backward", "reduce".
        self.mark: Callable[[str], None] = lambda part: None
        self.metric_sums = torch.zeros(PREFERENCE_METRICS, dtype=torch.float64, device=engine.mesh.device)
        """`PreferenceLoss.metric_sums` of the last call, summed over the responses whose last stage was here."""
        self.watched: Callable[[Compute], Compute] | None = None
        """Wrapper of the compute steps of a training step while a profile is taken."""
        self._pipeline = Pipeline(program, engine.mesh.pp)
        self._passes, at_once, split = _analyse_compute_steps(program, engine.mesh.pp.rank)
        self._queue = queue = WeightGradients(engine.gradients)
        queue.overlapped = find_overlapped_weights(model, engine.mesh)
        self._order = BackwardOrder(at_once, queue)
        if split:
            defer_weight_gradients(model, queue)
        elif not model.compiled:  # taps would hold the operands of all weight gradients together
            defer_weight_gradients(model, queue, fused_accumulation_min_numel)

    def train(self, micro_batches: Sequence[MicroBatch], divisor: Divisor) -> torch.Tensor:
        """Run forward and backward of this rank's `micro_batches`, and reduce the gradients into `engine.shards`.
        Return the loss of the micro-batches whose last stage is on this rank (float64 scalar; 0 if there are none).
        Ranks along tp compute the same loss and each return the full value, which `loss_share` divides before a sum
        over ranks.

        `divisor`: number by which the summed loss is divided, or a function that returns it: the number of target
        tokens (or pairs) of the whole step, divided by the loss scale."""
        self.engine.begin_step(self._passes)
        objective = self._make_objective(micro_batches)
        compute = StageCompute(self.model, self.engine, micro_batches, divisor, self._order, self.mark, objective)
        with self._queue.overlapping(self.engine.mesh.communicator):
            self._pipeline.run(compute if self.watched is None else self.watched(compute))
        self.engine.finish()
        self.mark("reduce")
        return compute.loss

    def evaluate(self, micro_batches: Sequence[MicroBatch], divisor: int = 1) -> torch.Tensor:
        """Run the forwards without gradients; return the summed loss divided by `divisor` (float64 scalar), or 0 if the
        last stage is on another rank. `micro_batches`: this rank's micro-batches, at most as many as a training step
        has."""
        return self._run_forwards(micro_batches, divisor, self._make_objective(micro_batches))

    def log_probabilities(self, micro_batches: Sequence[MicroBatch]) -> dict[int, torch.Tensor]:
        """Run the forwards of preference micro-batches. Return {micro-batch index: log-probabilities in nats [B, D]},
        for B sequences with D responses each; the dict has only micro-batches whose last stage is on this rank.

        `micro_batches`: this rank's micro-batches, at most as many as a training step has."""
        found: dict[int, torch.Tensor] = {}

        def keep(micro_batch: int, log_probabilities_BD: torch.Tensor) -> torch.Tensor:
            """Store the responses' log-probabilities of micro-batch number `micro_batch` in the result; return 0 as its
            loss, since no loss is wanted."""
            found[micro_batch] = log_probabilities_BD
            return log_probabilities_BD.new_zeros(())

        self._run_forwards(micro_batches, 1, keep)
        return found

    def _run_forwards(
        self, micro_batches: Sequence[MicroBatch], divisor: int, objective: Objective | None
    ) -> torch.Tensor:
        """Run the forwards of `micro_batches` without gradients. Return the summed loss divided by `divisor` (float64
        scalar), or 0 if the last stage is on another rank.

        `objective`: function (index of a micro-batch, response log-probabilities) -> summed preference loss; None:
        next-token loss."""
        with torch.no_grad():
            compute = StageCompute(self.model, self.engine, micro_batches, divisor, objective=objective)
            self._pipeline.run_forwards(compute, len(micro_batches))
        return compute.loss

    def _make_objective(self, micro_batches: Sequence[MicroBatch]) -> Objective | None:
        """Build the loss function of preference training; None for next-token training. The function maps (index of a
        micro-batch, log-probabilities [B, D]) to the summed loss, for B sequences with D responses each. As a side
        effect, the function adds the micro-batch's metrics to the attribute `metric_sums`.

        `micro_batches`: micro-batches of this rank, to which the index refers."""
        preference = self.preference
        if preference is None:
            return None
        self.metric_sums.zero_()

        def compute_loss(micro_batch: int, log_probabilities_BD: torch.Tensor) -> torch.Tensor:
            """Return the summed preference loss of micro-batch number `micro_batch`, given the log-probabilities [B, D]
            of its responses, and add its metrics to `metric_sums`."""
            pairs = micro_batches[micro_batch].documents.pairs
            assert pairs is not None, "documents without pairs"
            found = preference(log_probabilities_BD, pairs)
            self.metric_sums.add_(found.metric_sums)
            return found.loss

        return compute_loss


def find_overlapped_weights(model: Transformer, mesh: Mesh) -> set[nn.Parameter]:
    """Return the weights whose gradients are computed while the next collective call of backward is in flight: on GPUs
    those of the layers whose input gradients are communicated next, over tp or ep, unless that call overlaps with the
    product of the input gradient itself."""
    names = (".experts.up.weight",) if mesh.tp.trivial else (".qkv.weight", ".up.weight")
    overlaps = mesh.device.type == "cuda" and not (mesh.tp.trivial and mesh.ep.trivial)
    columns = (each for each in model.modules() if isinstance(each, ColumnParallelLinear))
    busy = {each.weight for each in columns if each.find_overlap(column=True) is not None}
    return {each for name, each in model.named_parameters() if overlaps and name.endswith(names)} - busy


def count_targets(targets: Iterable[torch.Tensor], mesh: Mesh) -> TermCount:
    """Start to count the target tokens of the whole step, summed over all ranks of `mesh`. Return a function that waits
    for the sum and returns it (1 if it is 0). Collective.

    `targets`: target tokens of each of this rank's micro-batches, [B, S] for B sequences of S tokens; -100 is not
    counted."""
    return sum_over_data(((micro_batch != -100).sum() for micro_batch in targets), mesh)


def sum_over_data(counts: Iterable[torch.Tensor], mesh: Mesh, copies: int = 1) -> TermCount:
    """Start an all-reduce that sums `counts` over micro-batches and over the ranks of the mesh axis `data` (dp x cp).
    Return a function that waits for the sum and returns it divided by `copies` (at least 1). Collective.

    `counts`: integer scalars, one per micro-batch of this rank; `copies`: number of ranks that hold the same counts,
    such as cp ranks with the same pairs."""
    total = sum(counts, torch.zeros((), dtype=torch.int64, device=mesh.device))
    handle = all_reduce(total, mesh.data, TARGET_SITE, async_op=True)

    @cache
    def wait_for_count() -> int | torch.Tensor:
        """Return the number of loss terms; see `TermCount`."""
        handle.wait()
        return (total // copies).clamp(min=1) if total.is_cuda else max(1, int(total) // copies)

    return wait_for_count


def loss_share(loss: torch.Tensor, mesh: Mesh, of_pairs: bool = False) -> torch.Tensor:
    """Return this rank's share of the step's loss, so that the shares of all ranks sum to the loss. The share is `loss`
    divided by the number of ranks of `mesh` that compute the same loss.

    `loss`: loss of this rank's micro-batches. `of_pairs`: True for a preference loss, which all ranks along tp and cp
    compute alike; False for a next-token loss, which only ranks along tp compute alike."""
    return loss / (mesh.tp.size * (mesh.cp.size if of_pairs else 1))


def _analyse_compute_steps(program: PipelineProgram, rank: int) -> tuple[dict[int, int], frozenset[Key], bool]:
    """Analyse the compute steps of `program` on pipeline rank `rank`. Return three values: {stage: number of backward
    passes}; keys (stage, replica (model copy), micro-batch) of the forwards that are immediately followed by their own
    backward; True if any backward is split into I (input-gradient) and W (weight-gradient) passes.
    """
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
