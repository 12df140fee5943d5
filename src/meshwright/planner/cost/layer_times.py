"""Seconds of one micro-batch on one rank, for many candidate layouts at once: of a layer of each kind, the embedding,
and the head with its loss, whose sum gives the time of any stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np

from meshwright.layout import Layout
from meshwright.planner.cost import blocks, communication
from meshwright.planner.cost.micro_batch import DTYPES, ITEM_BYTES, MicroBatch, layer_examples, layer_kinds, structure
from meshwright.planner.cost.operators import CollectiveCall, Operation, Operator, Phase, sum_parameters
from meshwright.planner.cost.rates import Collectives, Rates, attention_kernel
from meshwright.planner.problem import Problem, StageCandidate
from meshwright.program.durations import Floats
from meshwright.spec.chunks import keeps_head_gradient
from meshwright.spec.config import ModelConfig
from meshwright.spec.stages import Stage

MICRO_BATCH_PARTS: tuple[str, ...] = ("compute", "tensor", "context", "expert", "data")
PHASES = ("forward", "input", "weight")
"""Forward; gradients of inputs, with recompute; gradients of weights."""

UNCORRECTED: Floats = np.ones(len(MICRO_BATCH_PARTS))
"""Factors of 1: each part of a micro-batch takes as long as its operations timed alone."""

_PART = {part: number for number, part in enumerate(MICRO_BATCH_PARTS)}
_PHASE = {"forward": 0, "recompute": 1, "input": 1, "weight": 2}


def group_by_structure(
    config: ModelConfig, candidates: Sequence[StageCandidate], recompute: bool = False
) -> Iterator[communication.Array]:
    """Group candidate layouts whose costs can be computed together: the same axes are larger than 1. Yield one array of
    indices into `candidates` for each group. recompute: True to group layouts with the same recompute."""
    layouts = {id(one.layout): one.layout for one in candidates}  # the same object in candidates with different rows
    keys = {number: (recompute and each.recompute, *structure(each, config)) for number, each in layouts.items()}
    distinct, which = communication.find_distinct(keys[id(one.layout)] for one in candidates)
    yield from (np.flatnonzero(which == number) for number in range(len(distinct)))


def micro_batch_of(problem: Problem, candidates: Sequence[StageCandidate], **options: Any) -> MicroBatch:
    """Return one `MicroBatch` for many candidate layouts at once, whose sizes are arrays [candidates], or for a single
    one, whose sizes are numbers. The same axes must be larger than 1 in all layouts.
    options: further fields of `MicroBatch`."""
    layouts = [one.layout for one in candidates]
    columns = {axis: [getattr(layout, axis) for layout in layouts] for axis in ("tp", "cp", "ep", "etp", "recompute")}
    columns["rows"] = [one.rows for one in candidates]
    fields: dict[str, Any] = {
        **{name: np.array(each) if len(layouts) > 1 else each[0] for name, each in columns.items()},
        "dtype": DTYPES[problem.precision], "engine": problem.engine, "documents": problem.documents,
        "kernel": attention_kernel(problem.engine, problem.cluster, problem.config),
        "eight_bit": problem.precision == "fp8", "responses": int(problem.pairs),
    }  # fmt: skip
    return MicroBatch(problem.config, layouts[0], sequence=problem.sequence, **(fields | options))


def micro_batch_of_layout(problem: Problem, layout: Layout) -> MicroBatch:
    """Return the micro-batch of a planning problem under one layout."""
    return micro_batch_of(problem, [StageCandidate(layout, problem.batch // (layout.dp * layout.micro_batches))])


class LayerTimes:
    """Predicted seconds of one micro-batch on one rank in a layer of each kind, in the embedding and in the head, under
    many candidate layouts.

    Dimensions of the arrays: kinds of layers; phases (forward; input gradients with recompute; weight gradients); parts
    (compute; exposed communication of tp, cp, ep and dp); candidates.

    Attributes:
        kinds: Kinds of layers.
        layer: Seconds of a layer of each kind [kinds, phases, parts, candidates].
        first: Seconds of the embedding [phases, parts, candidates].
        last: Seconds of final norm, head and loss [2, phases, parts, candidates]; first dimension: the head's gradients
            are computed in the backward (0) or already in the forward (1).
        message: Bytes of a micro-batch's activations that a rank sends to the next stage [candidates].
        parameters: Numbers of a rank's dense and expert-parallel parameters before ZeRO's sharding: in a layer of each
            kind, in the embedding, in the head, and in both of these [kinds + 3, 2, candidates].
    """

    def __init__(
        self, problem: Problem, candidates: Sequence[StageCandidate], step_factors: Floats = UNCORRECTED
    ) -> None:
        """Predict the times of all candidates. step_factors [parts]: factor by which each part takes longer in a step
        than its operations timed alone."""
        self.problem, self.candidates = problem, list(candidates)
        self.dtype, engine = DTYPES[problem.precision], problem.engine
        self.itemsize = ITEM_BYTES[self.dtype]
        self.gradient_bytes = engine.gradient_bytes if self.itemsize == 2 else 4
        self.collectives = Collectives(problem.cluster)
        self.rates = Rates.of(problem.cluster, problem.precision, problem.engine.fusion)
        self.examples = layer_examples(problem.config)
        self.kinds = list(self.examples)
        of_layers = layer_kinds(problem.config)
        equal = np.array([[each == kind for kind in self.kinds] for each in of_layers], dtype=np.int64)
        self._kinds_before = np.concatenate([np.zeros((1, len(self.kinds)), dtype=np.int64), equal.cumsum(axis=0)])
        shape = len(PHASES), len(MICRO_BATCH_PARTS), len(self.candidates)
        self.layer = np.zeros((len(self.kinds), *shape))
        self.first, self.last = np.zeros(shape), np.zeros((2, *shape))
        self.parameters = np.zeros((len(self.kinds) + 3, 2, len(self.candidates)))
        layouts = [one.layout for one in self.candidates]
        self.rows = np.array([one.rows for one in self.candidates])
        self.tp, self.cp = (np.array([getattr(layout, axis) for layout in layouts]) for axis in ("tp", "cp"))
        self.experts = np.array([layout.ep * layout.etp for layout in layouts])
        self.full = np.array([layout.recompute == "full" for layout in layouts])
        self.message = np.zeros(len(self.candidates))
        sizes = [(layout.tp, layout.cp, layout.ep, layout.etp) for layout in layouts]
        distinct, self.mesh = communication.find_distinct(sizes)
        """Index into `meshes`: layouts with different sizes of tp, cp, ep, etp."""
        self.meshes = [layouts[sizes.index(each)] for each in distinct]
        # Adapters' products overlap with collectives or not, depending on recompute.
        for which in group_by_structure(problem.config, self.candidates, problem.config.adapter is not None):
            self._price(which)
        for each in (self.layer, self.first, self.last):
            each *= step_factors[:, None]

    def sum_parts(self) -> LayerTimes:
        """Return a copy in which times are summed over the parts (compute and communication); this dimension has length
        1."""
        found = copy(self)
        for name in ("layer", "first", "last"):
            setattr(found, name, getattr(self, name).sum(axis=-2, keepdims=True))
        return found

    def layer_counts(self, stages: Sequence[Stage]) -> communication.Array:
        """Return the numbers of layers of each kind in pipeline stages: [stages, kinds]."""
        start, stop = np.array([(stage.layers.start, stage.layers.stop) for stage in stages]).T
        return np.asarray(self._kinds_before[stop] - self._kinds_before[start])

    def keeps_gradient(self, index: communication.Array, layers: int, at_once: bool) -> communication.Array:
        """Return an array of bool, one for each candidate in `index` (array of indices): True if the forward of the
        last stage computes and saves the head's gradients. layers: number of layers in that stage; at_once: its
        backward directly follows its forward."""
        if self.problem.pairs:
            return np.zeros(len(index), dtype=bool)
        tokens = self.rows[index] * self.problem.sequence // self.cp[index]
        vocabulary: Any = -(-self.problem.config.vocabulary // self.tp[index])
        return np.where(self.full[index], at_once, keeps_head_gradient(tokens, vocabulary, layers, "none", at_once))

    def _price(self, indices: communication.Array) -> None:
        """Compute and store the times of the candidates with the given indices. In all their layouts the same axes are
        larger than 1."""
        batch = micro_batch_of(self.problem, [self.candidates[number] for number in indices])
        self.message[indices] = batch.stream_bytes
        numbers, mesh = np.unique(self.mesh[indices], return_inverse=True)
        groups = communication.ProcessGroups(self.collectives, [self.meshes[number] for number in numbers], mesh)
        price, host = _TimeModel(batch, self.rates, groups), self.problem.engine.host_seconds
        for number, layer in enumerate(self.examples.values()):
            operators, kernels = blocks.layer_operators(batch, layer), blocks.layer_operations(batch, layer)
            self.layer[number][..., indices] = price.seconds(operators, kernels, host)
        self.first[..., indices] = price.seconds(blocks.embedding_operators(batch))
        for kept in (False, True):
            keeps = kept or self.problem.engine.name != "meshwright"
            self.last[int(kept)][..., indices] = price.seconds(blocks.head_operators(batch, keeps))
            if module := blocks.prediction_operators(batch):
                self.last[int(kept)][..., indices] += price.seconds(module, blocks.prediction_operations(batch, keeps))
        listed = [blocks.layer_operators(batch, layer) for layer in self.examples.values()]
        listed += [blocks.embedding_operators(batch), blocks.head_operators(batch, True)]
        listed.append(communication.list_shared_operators(batch))
        for number, each in enumerate(listed):
            for part, numel in enumerate(sum_parameters(each)):
                self.parameters[number, part, indices] = numel


class _TimeModel(NamedTuple):
    """Time model of a micro-batch. batch: sizes; rates: speeds from which seconds of kernels are predicted; groups:
    process groups, from which seconds of collectives are predicted."""

    batch: MicroBatch
    rates: Rates
    groups: communication.ProcessGroups

    def seconds(
        self, operators: Sequence[Operator], kernels: Iterable[Operation] | None = None, host: float = 0.0
    ) -> Floats:
        """Return the seconds of kernels, and the exposed seconds of collectives (not hidden by kernels): an array
        [phases, parts, candidates].

        operators: operators whose collectives are counted; kernels: their kernels, None: without recomputation; host:
        seconds in which the CPU launches one kernel or collective; 0: the CPU is never the bottleneck."""
        found = np.zeros((len(PHASES), len(MICRO_BATCH_PARTS), len(self.groups.which)))
        issued = np.zeros((len(PHASES), len(self.groups.which)))
        covers: dict[tuple[str, Phase], Any] = defaultdict(float)  # seconds of kernels that may hide calls
        for one in blocks.list_kernels(operators) if kernels is None else kernels:
            taken = self.rates.seconds(one, self.batch.kernel)
            found[_PHASE[one.phase], 0] += taken
            core = one.name.startswith(blocks.ATTENTION_CORE)
            # One launch for all rows and heads, and for all experts.
            merged = core or one.name.startswith("mlp.experts")
            issued[_PHASE[one.phase]] += np.minimum(1.0, one.count) if merged else one.count
            kind = "attention" if core else "weight" if one.phase == "weight" else one.kind
            for cover in (kind, *(["shared"] if one.name.startswith("mlp.shared") else [])):
                covers[cover, one.phase] = covers[cover, one.phase] + taken
        overlapped: dict[tuple[str, Phase, str], Any] = defaultdict(float)  # by cover, phase and part
        dispatched: dict[int, Any] = defaultdict(float)  # seconds of dispatch and combine in each phase
        for call in communication.timed_calls(operators):
            taken = call.count * self.groups.seconds(call.operation, call.axis, self.sent(call))
            number = _PHASE[call.phase]
            issued[number] += call.count
            if call.axis == "ep" and self.batch.engine.overlap_processors is not None:
                dispatched[number] = dispatched[number] + taken
            elif call.overlaps is None:
                found[number, _PART[call.part]] += taken
            else:
                phase = "input" if call.overlaps == "weight" else call.phase
                key = call.overlaps, phase, call.part
                overlapped[key] = overlapped[key] + taken
        for (cover, phase, part), taken in overlapped.items():
            if cover == "product":
                # In as many slices as ranks: the first that is gathered, or the last that is reduced, is exposed.
                slices = self.batch.tp
                exposed = np.maximum(taken / slices, taken - covers[cover, phase] * (slices - 1) / slices)
            else:
                # In a ring all but the last KV block's attention overlap with a message.
                covered = covers[cover, "weight" if cover == "weight" else phase]
                covered = covered * ((self.batch.cp - 1) / self.batch.cp if part == "context" else 1)
                exposed = np.maximum(0.0, taken - covered)
            slowdown = self.groups.overlap_slowdown({"context": "cp", "expert": "ep"}.get(part, "tp"))
            found[_PHASE[phase], _PART[part]] += exposed + slowdown * (taken - exposed)
        # Another micro-batch computes meanwhile, on the processors that are left.
        total, computing = sum(dispatched.values()), found[:, 0].sum(axis=0)
        for number, taken in dispatched.items():
            exposed = np.maximum(self.batch.engine.overlap_processors * total, total - computing)
            found[number, _PART["expert"]] += exposed * taken / total
        if self.groups.collectives.cluster.kind != "cpu":
            for phases in (slice(0, 1), slice(1, None)):
                waited = host * issued[phases].sum(axis=0) - found[phases].sum(axis=(0, 1))
                found[phases.start, 0] += np.maximum(0.0, waited)
        return found

    def sent(self, collective: CollectiveCall) -> Any:
        """Return the bytes of one call of a collective. For the dispatch of tokens they are fewer if the engine sends a
        token once to each node, and not once to each expert."""
        if collective.operation != "all-to-all" or collective.axis != "ep" or not self.batch.engine.dispatches_by_node:
            return collective.size
        config = self.batch.config
        groups = config.groups_per_token, config.expert_groups
        return collective.size * self.groups.distinct_places("ep", config.experts_per_token, groups)
