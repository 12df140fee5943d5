"""Seconds of one micro-batch on one rank, in pieces that add up to any stage: a layer of each kind, the embedding, the
head with its loss; and what ZeRO-2 and 3 wait for in it."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import numpy as np

from meshwright.layout import Layout
from meshwright.planner.cost.communication import calls, group_of
from meshwright.planner.cost.engines import Engine
from meshwright.planner.cost.operations import operations
from meshwright.planner.cost.rates import Collectives, Rates, attention_kernel
from meshwright.program.durations import Floats
from meshwright.spec.chunks import keeps_head_gradient
from meshwright.spec.config import ModelConfig
from meshwright.spec.stages import Stage

MICRO_BATCH_PARTS = ("compute", "tensor", "context", "expert", "data")
PHASES = ("forward", "input", "weight")
"""Forward; the way back for inputs, with what is repeated; the gradients of weights."""

AS_ADDED = np.ones(len(MICRO_BATCH_PARTS))
"""Each part takes what its pieces take together."""

ITEMSIZE = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2}

LayerKind = tuple[int | None, bool]
"""A layer's window and whether it has experts: layers of a kind take equally long."""

_PART = {part: number for number, part in enumerate(MICRO_BATCH_PARTS)}
_PHASE = {"forward": 0, "again": 1, "input": 1, "weight": 2}


def layer_kinds(config: ModelConfig, stage: Stage) -> Counter[LayerKind]:
    """Return the number of layers of each kind in a stage. Kind: (attention window in tokens or None, True for a
    mixture of experts)."""
    return Counter((config.layer_window(layer), config.has_experts(layer)) for layer in stage.layers)


@lru_cache(maxsize=64)
def layer_examples(config: ModelConfig) -> dict[LayerKind, int]:
    """Return the index of the first layer of each kind. Kind: (attention window in tokens or None, True for a mixture
    of experts)."""
    return {(config.layer_window(at), config.has_experts(at)): at for at in reversed(range(config.layers))}


class MicroBatch:
    """Predictor of the seconds of one micro-batch of `rows` sequences on a rank, for a layer, the embedding or the
    head; their sum is the time of any pipeline stage.

    Results are arrays [3 phases, 5 parts]. Phases: forward, input gradients (with recompute), weight gradients. Parts:
    compute, and exposed communication of tp (tensor), cp (context), ep (expert) and dp (data).
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        collectives: Collectives,
        rates: Rates,
        rows: int,
        sequence: int,
        engine: Engine,
        itemsize: int,
        documents: float,
        in_place: Floats = AS_ADDED,
        pairs: bool = False,
    ) -> None:
        """Prepare the predictions for a layout.

        rows, sequence: sequences of the micro-batch, tokens of each; collectives, rates: speeds of communication and
        computation; itemsize: bytes of an activation's element; documents: average number packed into a sequence;
        in_place [parts]: factor by which each part takes longer in a step than operations timed alone; pairs: training
        on response pairs.
        """
        self.in_place, self.pairs = in_place, pairs
        self.config, self.layout, self.collectives, self.rates = config, layout, collectives, rates
        self.rows, self.sequence, self.engine = rows, sequence, engine
        self.itemsize, self.documents = itemsize, documents
        self.kernel = attention_kernel(engine, collectives.cluster)
        self._pieces: dict[tuple[LayerKind | str, bool], Floats] = {}

    def layer(self, kind: LayerKind) -> Floats:
        """Return the seconds of one layer as an array [phases (forward, input gradients, weight gradients), parts
        (compute, tensor, context, expert, data)]. kind: (attention window or None, True for a mixture of experts)."""
        at = layer_examples(self.config)[kind]
        return self._piece(kind, Stage(0, range(at, at + 1), first=False, last=False))

    def first(self) -> Floats:
        """Return the seconds of the embedding, in the first stage, as an array [phases (forward, input gradients,
        weight gradients), parts (compute, tensor, context, expert, data)]."""
        return self._piece("first", Stage(0, range(0), first=True, last=False))

    def last(self, kept: bool) -> Floats:
        """Return the seconds of final norm, head and loss, in the last stage, as an array [phases (forward, input
        gradients, weight gradients), parts (compute, tensor, context, expert, data)]. kept: True if the head's
        gradients are computed in the forward and saved; else the logits are recomputed in the backward."""
        return self._piece("last", Stage(0, range(0), first=False, last=True), kept)

    def keeps(self, stage: Stage, at_once: bool) -> bool:
        """Return True if the last stage computes its head's gradients in the forward and saves them. at_once: the
        stage's backward directly follows its forward."""
        config, layout = self.config, self.layout
        widest = min(-(-config.vocabulary // layout.tp), config.vocabulary)
        tokens = self.rows * self.sequence // layout.cp
        return not self.pairs and keeps_head_gradient(tokens, widest, len(stage.layers), layout.recompute, at_once)

    def stage(self, stage: Stage, at_once: bool) -> Floats:
        """Return the seconds of a micro-batch in a whole stage as an array [phases (forward, input gradients, weight
        gradients), parts (compute, tensor, context, expert, data)]. at_once: the stage's backward directly follows its
        forward."""
        found = np.zeros((len(PHASES), len(MICRO_BATCH_PARTS)))
        for kind, count in layer_kinds(self.config, stage).items():
            found += count * self.layer(kind)
        if stage.first:
            found += self.first()
        if stage.last:
            found += self.last(self.keeps(stage, at_once))
        return found

    def _piece(self, name: LayerKind | str, stage: Stage, at_once: bool = True) -> Floats:
        """Return the seconds of a layer, the embedding or the head, cached, as an array [phases, parts] (see `stage`).
        name: layer kind, "first" (embedding) or "last" (head); stage: a stage with only that; at_once: the head's
        gradients are computed in the forward."""
        key = name, at_once
        if key not in self._pieces:
            self._pieces[key] = self._priced(stage, at_once)
        return self._pieces[key]

    def _priced(self, stage: Stage, at_once: bool) -> Floats:
        """Return the seconds of a micro-batch in a stage, exposed communication included, as an array [phases, parts]
        (see `stage`). at_once: the stage's backward directly follows its forward."""
        found = np.zeros((len(PHASES), len(MICRO_BATCH_PARTS)))
        arguments = self.config, self.layout, self.rows, self.sequence, stage, self.engine
        # Seconds of attention in each phase, of weight gradients, and of products.
        beside: dict[str, float] = dict.fromkeys(("forward", "again", "input", "weight"), 0.0)
        products = dict(beside)
        options = {"itemsize": self.itemsize, "documents": self.documents, "at_once": at_once}
        options["eight_bit"] = self.rates.eight_bit
        for one in operations(*arguments, attention=self.kernel, **options):  # type: ignore[arg-type]
            seconds = self.rates.seconds(one, self.kernel)
            found[_PHASE[one.phase], 0] += seconds
            if one.phase == "weight" or one.name.startswith(("attention.core", "attention.scores", "attention.values")):
                beside[one.phase] += seconds
            elif one.kind == "product":
                products[one.phase] += seconds
        hidden: dict[tuple[str, str], float] = {}
        in_pieces: dict[tuple[str, str], float] = {}
        for call in calls(*arguments, self.collectives.cluster, self.itemsize):
            seconds = call.seconds(self.collectives)
            if call.beside is None:
                found[_PHASE[call.phase], _PART[call.axis]] += seconds
            elif call.beside == "product":
                in_pieces[call.phase, call.axis] = in_pieces.get((call.phase, call.axis), 0.0) + seconds
            else:
                key = ("weight" if call.beside == "weight" else call.phase, call.axis)
                hidden[key] = hidden.get(key, 0.0) + seconds
        for (phase, axis), seconds in in_pieces.items():
            # In as many pieces as ranks: the first that is gathered, or the last that is summed, is waited for.
            pieces, group = self.layout.tp, group_of(self.layout, "tp", self.collectives.cluster)
            waited = max(seconds / pieces, seconds - products[phase] * (pieces - 1) / pieces)
            found[_PHASE[phase], _PART[axis]] += waited + self.collectives.tax(group) * (seconds - waited)
        for (cover, axis), seconds in hidden.items():
            # In a ring all but the last piece's attention have a message beside them.
            covered = beside[cover] * ((self.layout.cp - 1) / self.layout.cp if axis == "context" else 1)
            group = group_of(self.layout, "cp" if axis == "context" else "tp", self.collectives.cluster)
            waited = max(0.0, seconds - covered)
            phase = "input" if cover == "weight" else cover
            found[_PHASE[phase], _PART[axis]] += waited + self.collectives.tax(group) * (seconds - waited)
        return found * self.in_place


def zero_waits(
    gather: Floats | float,
    scatter: Floats | float,
    layers: Floats | int,
    forward: Floats,
    back: Floats,
    share: Floats | float,
) -> tuple[Floats, Floats]:
    """Return the exposed seconds of (forward, backward) that ZeRO-2 and 3 add to a stage's micro-batch, with prefetch
    of one layer: the first all-gather, and what the others exceed a layer's computation by.

    gather, scatter: seconds of a layer's all-gather and reduce-scatter; layers: number in the stage; forward, back:
    seconds of the stage's computation; share: slow-down of overlapped computation, as a fraction of the communication's
    seconds.
    """
    waited = gather + (layers - 1) * np.maximum(0.0, gather - forward / layers)
    both = gather + scatter
    waited_back = scatter + (layers - 1) * np.maximum(0.0, both - back / layers)
    taken = share * (layers * gather - waited), share * np.maximum(0.0, layers * both - waited_back)
    return waited + taken[0], waited_back + taken[1]
