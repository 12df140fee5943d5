"""Bytes that a rank keeps of one micro-batch, in the pieces that `micro_batch` times, and of each parameter: in closed
form for a search. Of a layout that is looked at, the ledger says it tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.layout import Layout
from meshwright.planner.cost.micro_batch import LayerKind, layer_examples
from meshwright.planner.cost.rates import attention_kernel
from meshwright.planner.memory import compiled_split
from meshwright.planner.memory.compiled_blocks import known
from meshwright.planner.memory.compiled_moments import passing_bytes
from meshwright.planner.memory.moments import SLICE_LOGITS, queued_bytes
from meshwright.planner.memory.published import PUBLISHED, LayerShape, StateBytes
from meshwright.planner.memory.saved import Saved, local_sizes, saved_activations
from meshwright.planner.memory.states import optimizer_kinds
from meshwright.planner.search.space import Problem, Way
from meshwright.program.durations import Floats
from meshwright.spec.chunks import loss_chunks
from meshwright.spec.stages import Stage
from meshwright.spec.work import count_predictions

DTYPES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes of saved activations of one micro-batch on a rank.

    Attributes:
        layers: Of a layer, by kind (attention window, has experts).
        split: Of a layer whose weight gradients are queued and whose input gradients are done, by kind.
        first: Of the first stage outside its layers.
        last: Of the last stage outside its layers.
        head: Gradient of the head's weight, saved for each micro-batch unless its backward directly follows its
            forward.
        passing: Temporaries while a layer or the loss is computed.
    """

    layers: dict[LayerKind, float]
    split: dict[LayerKind, float]
    first: float
    last: float
    head: float
    passing: float


class KeptBytes:
    """Predictor of the saved-activation bytes of a micro-batch under candidate layouts, scaled from those of one
    sequence. problem: model, cluster, sequence length and training engine."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.dtype = DTYPES[problem.precision]
        self.x = 4 if self.dtype == "float32" else 2
        self.examples = layer_examples(problem.config)
        self.device = problem.cluster.kind
        self.ours = problem.engine.name == "meshwright"
        self._rows: dict[Layout, Kept] = {}

    def of(self, way: Way) -> Kept:
        """Return the saved-activation bytes of a micro-batch on a rank. way: layout of a stage, and number of sequences
        of the micro-batch."""
        if way.layout not in self._rows:
            self._rows[way.layout] = self._row(way.layout)
        row, rows = self._rows[way.layout], way.rows
        layers, split = ({kind: rows * size for kind, size in each.items()} for each in (row.layers, row.split))
        # Of ours both may be there at once; of other engines the loss is through when a layer is computed again.
        logits = self.logits(way)
        passing = rows * row.passing + logits if self.ours else max(rows * row.passing, logits)
        head = self.head(way.layout, way.rows) if self.ours else 0.0
        return Kept(layers, split, rows * row.first, rows * row.last, head, passing)

    def _row(self, layout: Layout) -> Kept:
        """Return the saved-activation bytes of a micro-batch of one sequence on a rank; `head` and `logits` are not
        included. layout: of a stage."""
        sequence, config = self.problem.sequence, self.problem.config
        stream = float(sequence // layout.cp * config.hidden * self.x)
        stream /= layout.tp if layout.tensor_sequence_parallel else 1
        if not self.ours:
            engine = self.problem.engine
            flash = attention_kernel(engine, self.problem.cluster) != "scores"
            published = PUBLISHED.get(engine.name, PUBLISHED["megatron"])

            def kept(kind: LayerKind, of: Layout) -> float:
                """Return the bytes that a layer of a kind saves under layout `of`, by the engine's published closed
                form."""
                shape = LayerShape(1, sequence, config, of, flash, engine.dropout, kind[1])
                return sum(size for _, size in published.kept(shape)) * self.x / 2

            every = {kind: kept(kind, layout) for kind in self.examples}
            again = max(kept(kind, layout.with_(recompute="none")) - every[kind] for kind in self.examples)
            return Kept(every, every, 0.0, stream, 0.0, again + 2 * stream)
        masked = self.problem.documents > 1
        sizes = local_sizes(config, layout, 1, sequence, masked, self.dtype, self.device)

        def tensors(of: Layout, stage: Stage) -> list[Saved]:
            """Return the activations that a stage saves of one sequence under layout `of`."""
            return saved_activations(
                config, of, 1, sequence, stage=stage, parameter_dtype=self.dtype, device=self.device, documents=masked,
                compiled=self.problem.compile,
            )  # fmt: skip

        def saved(of: Layout, stage: Stage) -> float:
            """Return the bytes of the activations that a stage saves of one sequence under layout `of`."""
            return sum(each.bytes for each in tensors(of, stage))

        empty = saved(layout, Stage(1, range(0), first=False, last=False))
        layers, split, most = {}, {}, 0.0
        for kind, at in self.examples.items():
            one = Stage(1, range(at, at + 1), first=False, last=False)
            if self.problem.compile and known(sizes, at):
                layers[kind] = saved(layout, one) - empty + stream
                if config.has_experts(at):
                    every_one = tensors(layout.with_(recompute="none"), one)
                    split[kind] = float(queued_bytes(sizes, every_one, at, self.x))
                else:
                    split[kind] = float(compiled_split.queued_bytes(sizes, at, self.x))
                most = max(most, passing_bytes(sizes, at, self.x) - 4 * stream)
                if sizes.spread and config.has_experts(at):  # its mixture is not compiled
                    most = max(most, saved(layout.with_(recompute="none"), one) - empty + stream - layers[kind])
                continue
            layers[kind] = saved(layout, one) - empty + (stream if layout.recompute != "none" else 0)
            every_one = tensors(layout.with_(recompute="none"), one)
            split[kind] = float(queued_bytes(sizes, every_one, at, self.x))
            whole = sum(each.bytes for each in every_one) - empty
            most = max(most, whole - layers[kind] if layout.recompute != "none" else 0.0)
        first = saved(layout, Stage(0, range(0), first=True, last=False))
        last = saved(layout, Stage(1, range(0), first=False, last=True)) - empty - self.head(layout)
        return Kept(layers, split, first, last, 0.0, most + 4 * stream)

    def head(self, layout: Layout, rows: int = 1) -> float:
        """Return the bytes of the gradient of the head's weight. layout: of a stage; rows: sequences of the
        micro-batch; with several chunks of the loss, the gradient is summed in float32."""
        config = self.problem.config
        if config.head not in ("next", "masked"):
            return 0.0
        tokens = count_predictions(config, rows, self.problem.sequence) // layout.cp
        width = -(-config.vocabulary // layout.tp)
        chunks = loss_chunks(tokens, min(width, config.vocabulary), self.device)
        return float(width * config.hidden * (self.x if len(chunks) == 1 else 4))

    def logits(self, way: Way) -> float:
        """Return the peak bytes of logits and of the head's gradient while the loss is computed. way: layout of a
        stage, and number of sequences of a micro-batch."""
        config, layout = self.problem.config, way.layout
        tokens = count_predictions(config, way.rows, self.problem.sequence) // layout.cp
        if config.head not in ("next", "masked"):
            return 0.0
        width = -(-config.vocabulary // layout.tp)
        if not self.ours:
            return tokens * width * (self.x + self.problem.engine.loss_holds)
        longest = max(loss_chunks(tokens, min(width, config.vocabulary), self.device))
        at_once = longest if self.device != "cpu" else min(longest, max(1, SLICE_LOGITS // width))
        return longest * width * self.x + 2 * at_once * width * 4 + self.head(layout, way.rows)


class KeptOfWays:
    """Saved-activation bytes of many candidates, (stage layout, sequences of a micro-batch), as arrays: `layer` and
    `queued_layer` (only weight gradients left) [candidates, kinds of layers]; `first`, `last`, `head` and `passing`
    [candidates]: see `Kept`.

    ways: the candidates; kinds: kinds of layers, (attention window, has experts).
    """

    def __init__(self, problem: Problem, ways: Sequence[Way], kinds: Sequence[LayerKind]) -> None:
        of = KeptBytes(problem)
        memory = [of.of(way) for way in ways]
        self.layer = np.array([[each.layers[kind] for kind in kinds] for each in memory])
        self.queued_layer = np.array([[each.split[kind] for kind in kinds] for each in memory])
        self.first = np.array([each.first for each in memory])
        self.last = np.array([each.last for each in memory])
        self.head, self.passing = (np.array([getattr(each, name) for each in memory]) for name in ("head", "passing"))


def bytes_each(problem: Problem) -> StateBytes:
    """Return the bytes of weight, gradient and optimizer state (with fp32 master weight) of one parameter,
    unsharded."""
    narrow = problem.precision not in ("fp32", "tf32")
    gradients = problem.engine.gradient_bytes if narrow else 4  # ours sums in float32
    masters = 4.0 if narrow else 0.0
    if problem.engine.wide_parameters and narrow:
        return StateBytes(4.0, gradients, 4.0 * len(optimizer_kinds(problem.optimizer)))
    return StateBytes(2.0 if narrow else 4.0, gradients, 4.0 * len(optimizer_kinds(problem.optimizer)) + masters)


def state_sizes(problem: Problem, zero: int, numel: Floats, shards: Floats | int) -> Floats:
    """Return the total bytes of parameters, gradients and optimizer state on a rank. numel: number of parameters,
    unsharded; zero: ZeRO stage; shards: number of ranks over which ZeRO shards."""
    each = bytes_each(problem)
    return (
        numel * each.weights / (shards if zero == 3 else 1)
        + numel * each.gradients / (shards if zero >= 2 else 1)
        + numel * each.optimizer / (shards if zero >= 1 else 1)
    )
