"""Bytes of saved activations of one micro-batch on a rank, and of each parameter's state, in closed form for the
search. For layouts that are predicted exactly, the ledger lists them tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.planner.cost.adapters import frozen_bytes_per_trained
from meshwright.planner.cost.communication import find_distinct
from meshwright.planner.cost.layer_times import group_by_structure, micro_batch_of
from meshwright.planner.cost.micro_batch import DTYPES, ITEM_BYTES, LayerKind, MicroBatch, Number, layer_examples
from meshwright.planner.memory.compiled_blocks import can_predict_compiled, compiled_block
from meshwright.planner.memory.published import StateBytes, loss_bytes, published_layer, saves_gathered
from meshwright.planner.memory.saved import queued_bytes, saved_activations
from meshwright.planner.memory.snapshot import count_bytes
from meshwright.planner.memory.states import optimizer_kinds
from meshwright.planner.problem import Problem, StageCandidate
from meshwright.program.durations import Floats
from meshwright.spec.stages import Stage

_NOTHING = Stage(1, range(0), first=False, last=False)
_FIRST, _LAST = Stage(0, range(0), first=True, last=False), Stage(1, range(0), first=False, last=True)


class ActivationBytes:
    """Bytes of the activations that a rank saves of one micro-batch under candidate layouts, in closed form.

    Attributes:
        layer: Bytes of one layer of each kind [kinds, candidates].
        queued_layer: Bytes of one layer of each kind after its input-gradient pass, while its weight gradients are
            queued (split backward) [kinds, candidates].
        first: Bytes that the first stage saves outside its layers [candidates].
        last: Bytes that the last stage saves outside its layers [candidates].
        head: Bytes of the gradient of the head's weight, saved for each micro-batch whose backward does not directly
            follow its forward [candidates].
        passing: Peak bytes of temporaries while a layer or the loss is computed [candidates].
    """

    def __init__(self, problem: Problem, candidates: Sequence[StageCandidate], kinds: Sequence[LayerKind]) -> None:
        self.problem, self.kinds = problem, kinds
        self.ours = problem.engine.name == "meshwright"
        self.itemsize = ITEM_BYTES[DTYPES[problem.precision]]
        distinct, which = find_distinct(one.layout for one in candidates)
        layouts = [StageCandidate(layout, 1) for layout in distinct]
        rows = np.array([one.rows for one in candidates])
        one = np.zeros((2 * len(kinds) + 3, len(layouts)))
        alone = self.ours and problem.compile
        for group in np.arange(len(layouts))[:, None] if alone else group_by_structure(problem.config, layouts, True):
            one[:, group] = self._one_sequence([layouts[at] for at in group.tolist()])
        found = one[:, which] * rows
        self.layer, self.queued_layer = found[: len(kinds)], found[len(kinds) : -3]
        self.first, self.last, passing = found[-3:]
        sizes = [
            (one.rows, one.layout.tp, one.layout.cp, saves_gathered(one.layout, problem.engine)) for one in candidates
        ]
        losses = {size: self._loss(one) for size, one in dict(zip(sizes, candidates, strict=True)).items()}
        self.head, logits = np.array([losses[size] for size in sizes]).T
        # In `meshwright` both may be allocated at once; in other engines the loss ends before a layer is recomputed.
        self.passing = passing + logits if self.ours else np.maximum(passing, logits)

    def _one_sequence(self, layouts: Sequence[StageCandidate]) -> Floats:
        """Return the bytes of a micro-batch of one sequence, [2 kinds + 3, layouts]. First dimension: one layer of each
        kind, one layer of each kind with queued weight gradients, first stage, last stage, temporaries. In all layouts
        the same axes are larger than 1, and recompute is the same."""
        problem = self.problem
        device, masked = problem.cluster.kind, problem.documents > 1
        batch = micro_batch_of(problem, layouts, device=device, masked=masked, rows=1, responses=0)
        columns = self._ours(batch, batch.stream_bytes) if self.ours else self._published(batch, batch.stream_bytes)
        return np.stack([np.broadcast_to(each, len(layouts)) for each in columns]).astype(np.float64)

    def _published(self, batch: MicroBatch, stream: Number) -> list[Number]:
        """Return the bytes of a micro-batch of one sequence by the published closed form of an engine other than
        `meshwright`. Items: those of the first dimension of `_one_sequence`. stream: bytes of the hidden states of one
        sequence on a rank."""
        saved, again = (
            [sum(published_layer(each, kind.mixed).values()) * self.itemsize / 2 for kind in self.kinds]
            for each in (batch, batch.recomputed)
        )
        recomputed = np.max([every - own for every, own in zip(again, saved, strict=True)], axis=0)
        return [*saved, *saved, 0.0, stream, recomputed + 2 * stream]

    def _ours(self, batch: MicroBatch, stream: Number) -> list[Number]:
        """Return the bytes of a micro-batch of one sequence under the engine `meshwright`. Items: those of the first
        dimension of `_one_sequence`. stream: bytes of the hidden states of one sequence on a rank."""
        compiled, recompute = self.problem.compile, batch.layout.recompute
        whole = batch if recompute == "none" else batch.recomputed

        def saved(of: MicroBatch, stage: Stage) -> Number:
            """Return the bytes of the activations that a stage saves."""
            return count_bytes(saved_activations(of, stage, compiled=compiled))

        empty = saved(batch, _NOTHING)
        layers, queued, most = [], [], np.zeros(())
        for kind, layer in layer_examples(batch.config).items():
            stage = Stage(1, range(layer, layer + 1), first=False, last=False)
            every = saved_activations(whole, stage, compiled=compiled)
            unrecomputed = count_bytes(every) - empty
            block = compiled_block(batch, kind) if compiled and can_predict_compiled(batch) else None
            own = saved(batch, stage) - empty + (stream if block is not None or recompute != "none" else 0)
            queue = queued_bytes(batch, every, layer) if block is None or kind.mixed else block.queued_bytes
            temporaries = unrecomputed - own if recompute != "none" else 0.0
            if block is not None:
                front = unrecomputed + stream - own if block.name == "front" else 0  # its mixture is not compiled
                temporaries = max(block.peak_temporaries - 4 * stream, front)
            layers.append(own)
            queued.append(queue)
            most = np.maximum(most, temporaries)
        ends = saved_activations(batch, _LAST, compiled=compiled)
        last = count_bytes(each for each in ends if each.name != "head.weight.gradient") - empty
        return [*layers, *queued, saved(batch, _FIRST), last, most + 4 * stream]

    def _loss(self, candidate: StageCandidate) -> tuple[float, float]:
        """Return (bytes of the gradient of the head's weight, peak bytes that the loss allocates, with this gradient)
        under one candidate layout."""
        problem, config = self.problem, self.problem.config
        if config.head not in ("next", "masked"):
            return 0.0, 0.0
        batch = micro_batch_of(problem, [candidate], device=problem.cluster.kind)
        if not self.ours:
            return 0.0, loss_bytes(batch)
        width, chunks = batch.vocabulary, batch.loss_chunks
        longest = max(chunks)
        head = 0.0 if config.adapter else float(width * config.hidden * (self.itemsize if len(chunks) == 1 else 4))
        return head, longest * width * self.itemsize + 2 * batch.loss_slice(longest) * width * 4 + head


def state_bytes_per_parameter(problem: Problem) -> StateBytes:
    """Return the bytes of weight, gradient and optimizer state (fp32 master weight included) per parameter, before
    sharding."""
    narrow = problem.precision not in ("fp32", "tf32")
    # Engine `meshwright` sums in float32.
    gradients = (problem.engine.held_gradient_bytes or problem.engine.gradient_bytes) if narrow else 4
    wide, element = problem.engine.wide_parameters or not narrow, problem.engine.state_bytes if narrow else 4
    states = float(element * (len(optimizer_kinds(problem.optimizer)) + (element == 4 and not wide)))
    return StateBytes(4.0 if wide else 2.0, gradients, states)


def state_sizes(problem: Problem, zero: int, numel: Floats, shards: Floats | int) -> Floats:
    """Return the bytes of parameters, gradients and optimizer state on a rank, summed. zero: ZeRO stage; numel: number
    of the rank's parameters before sharding; shards: number of ranks over which ZeRO shards them."""
    each = state_bytes_per_parameter(problem)
    each = each._replace(weights=each.weights + frozen_bytes_per_trained(problem.config, DTYPES[problem.precision]))
    return np.asarray(sum(numel * size for size in each.sharded(zero, shards)))
