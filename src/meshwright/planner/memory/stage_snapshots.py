"""Memory snapshots of a stage's forward and backward at which memory may peak, in closed form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate

from meshwright.planner.cost.dimensions import layer_dimensions
from meshwright.planner.cost.micro_batch import MicroBatch, Number, layer_kind
from meshwright.planner.memory import temporaries
from meshwright.planner.memory.compiled_blocks import (
    COLLECTED,
    GRADIENT,
    INPUT,
    Backward,
    CompiledBlock,
    can_predict_compiled,
    compiled_block,
    list_mixture_backward,
)
from meshwright.planner.memory.snapshot import (
    Allocation,
    NamedSnapshot,
    Snapshot,
    activation,
    count_bytes,
    gradient,
    message,
    workspace,
)  # fmt: skip
from meshwright.planner.memory.states import BackwardState, Buffers, Flat, Reduction
from meshwright.spec.parameter_entries import REDUCTIONS_IN_FLIGHT
from meshwright.spec.stages import LOOKED_UP, Stage

OF_HEAD = ("head.", "final_norm.", "transform.", "transform_norm.", "pooler.", "classifier.", "loss")
"""Prefixes of the names of activations that the head's FSDP unit saves."""


def queued_bytes(batch: MicroBatch, unrecomputed: Sequence[Allocation], layer: int, attention: bool = True) -> Number:
    """Return the bytes that a layer's queued weight gradients keep allocated: the inputs and the output gradients of
    its linear layers. unrecomputed: activations that the stage saves without recompute; attention: False to leave out
    attention's linear layers."""
    sizes = layer_dimensions(batch, layer)
    names = ("qkv.input", "output.input", "up.input", "down.input") if attention else ("up.input", "down.input")
    found: Number = sizes["mlp_outputs x"] + (sizes["attention_outputs x"] if attention else 0)
    for each in unrecomputed:
        if each.name.startswith(f"layers.{layer}.") and each.name.endswith(names):
            found = found + each.bytes
    return found


class StageSnapshots:
    """Generator of the memory snapshots of a stage's forward and backward on one rank.

    saved: activations that the forward saves; unrecomputed: activations that it would save without recompute; compiled:
    True if layers, norm and loss are compiled; queues: True if split backwards queue weight gradients."""

    def __init__(
        self, batch: MicroBatch, stage: Stage, buffers: Buffers, saved: Sequence[Allocation],
        unrecomputed: Sequence[Allocation], *, compiled: bool = False, queues: bool = False,
    ) -> None:  # fmt: skip
        self.batch, self.stage, self.saved, self.whole, self.buffers = batch, stage, saved, unrecomputed, buffers
        self.compiled, self.queues, self.units = compiled, queues, buffers.units
        # Products add their weight gradients to the sums; those of grouped experts have no float32 output.
        self.fused = not batch.narrow or (batch.device == "cuda" and not batch.config.experts)
        self._layer = {unit: int(unit.split(".")[1]) for unit in self.units if unit.startswith("layers.")}
        self._saved_of, self._whole_of = self._by_unit(saved), self._by_unit(unrecomputed)
        self._saved_until = list(accumulate(map(count_bytes, self._saved_of.values())))
        self.saved_bytes = self._saved_until[-1]
        self.stream = batch.stream_bytes
        self.both_ends = buffers.tied and stage.first and stage.last  # one matrix is embedding and head
        self.queue = sum(map(self._queue_of, self._layer)) if queues else 0
        self._backwards: dict[tuple[object, ...], list[NamedSnapshot]] = {}

    def _by_unit(self, saved: Sequence[Allocation]) -> dict[str, list[Allocation]]:
        """Return {FSDP unit (layer, embedding or head): its saved activations}, in order. The key "" has the
        activations that belong to no unit, which are freed only at the end of the backward."""
        found: dict[str, list[Allocation]] = {unit: [] for unit in ("", *self.units)}
        for each in saved:
            unit = "head" if each.name.startswith(OF_HEAD) else ".".join(each.name.split(".")[:2])
            found[unit if unit in found else ""].append(each)
        return found

    def _list_saved(self, units: int) -> list[Allocation]:
        """Return the saved activations of the first `units` units and those that belong to no unit."""
        return [each for unit in ("", *self.units[:units]) for each in self._saved_of[unit]]

    def _snapshot(self, name: str, units: int, tensors: Sequence[Allocation]) -> Snapshot:
        """Return a memory snapshot. name: its name; units: number of the stage's first units whose saved activations
        are allocated; tensors: all other tensors."""
        listed = partial(self._list_saved, units)
        return Snapshot(name, self._saved_until[units], tuple(tensors), self.stage.index, listed)

    def forward(self) -> Iterator[Snapshot]:
        """Yield the memory snapshots of the forward of one micro-batch."""
        for place, unit in enumerate(self.units):
            for name, extras in self._unit_forward(unit):
                yield self._snapshot(f"{unit}{name}: forward", place, (*self._gathered(place, +1), *extras))
        if not self.stage.last:
            yield self._snapshot("end of forward", len(self.units), [message("output", self.stream)])

    def _unit_forward(self, unit: str) -> Iterator[NamedSnapshot]:
        """Yield (snapshot name, temporaries) for the forward of a unit, such as "layers.3" or "embedding"."""
        at = self.batch
        if unit == "head":
            yield from self._loss(False).snapshots("loss")
        elif unit not in self._layer:
            yield "", [workspace(f"{unit} rows", at.all_tokens * at.config.hidden * at.itemsize)]
        elif self._compiled(unit) and not self._expert_parallel(unit):
            yield "", self._block(unit).forward.snapshot(unit)[1]
        else:
            layer, whole = self._layer[unit], self._whole_of[unit]
            # While a weight is unpacked, what follows it is not saved yet.
            following = sum(each.bytes for each in whole if ".mlp." in each.name)
            sizes = temporaries.adapter_sizes(at, layer) | {
                "being_computed": max(map(count_bytes, (whole, self._saved_of[unit]))),
                "unpacked": max(0, temporaries.count_unpacked_bytes(at, layer) - following),
            }
            computed = temporaries.Pass(layer_dimensions(at, layer, sizes), whole, f"{unit}.")
            yield from computed.snapshots("layer_forward")

    def _loss(self, again: bool) -> temporaries.Pass:
        """Return the sizes of a pass through the loss. again: see `loss_pass`."""
        known = {"compiled_loss": self.compiled, "both_ends": self.both_ends}
        return temporaries.loss_pass(self.batch, self.saved, again, **known)

    def backward(self, split: bool, state: BackwardState) -> Iterator[Snapshot]:
        """Yield the memory snapshots of one micro-batch's backward in order. split: True for a backward that computes
        only input gradients; state: state of the stage when the backward begins, such as gradient reductions in flight.
        """
        config, frozen = self.batch.config, self.batch.config.adapter is not None
        matrix = self.batch.vocabulary * config.hidden * self.batch.itemsize
        queue = 0  # of a split backward: what weight gradients need
        for place in reversed(range(len(self.units))):
            unit = self.units[place]
            at_end = self._compiled(unit) and not self._expert_parallel(unit)  # gradient buffers come at its end
            at_end |= unit in LOOKED_UP or (unit == "head" and config.head in ("next", "masked"))
            posted = state.before if split else [*state.before, *self.started_reductions(state, after=place)]
            opened = [] if split else self._unsharded_gradients(place)
            around = [*self._gathered(place, -1), *self.in_flight(posted), *([] if at_end else opened)]
            if self.both_ends and unit != "head" and not frozen:
                # Autograd holds it until the gradient of the lookup is computed too.
                around.append(gradient("head's part of the embedding's gradient", matrix))
            elif split and self.stage.last and unit != "head" and config.head == "next" and not frozen:
                around.append(gradient("head weight gradient, held", matrix))
            if queue:
                around.append(activation("queue of weight gradients", queue))
            if place < len(self.units) - 1 and not self.stage.last and not split:  # else the queue has it
                around.append(message("gradient from the next stage", self.stream))
            for name, extras in self._unit_backward(place, split):
                tensors = *around, *(opened if at_end and name == f".{COLLECTED}" else []), *extras
                yield self._snapshot(f"{unit}{name}: backward", place + 1, tensors)
            if split and unit in self._layer:
                queue += self._queue_of(unit)
        if split:  # units without products are complete: until now their gradients were held beside the sums
            complete = (place for place, unit in enumerate(self.units) if unit not in self._layer)
            ends = [each for place in complete for each in self._unsharded_gradients(place)]
            waiting = activation("queue of weight gradients", queue)
            yield self._snapshot("input gradients", 0, (waiting, *ends, *self.in_flight(state.before)))

    def weight_gradients(self, state: BackwardState) -> Iterator[Snapshot]:
        """Yield the memory snapshots of the pass that computes queued weight gradients. state: state of the stage when
        the pass begins."""
        sizes = layer_dimensions(self.batch, 0)
        largest = max(sizes["qkv hidden x"], sizes["up hidden x"])
        extras = [] if self.fused else [workspace("weight gradient", largest)]
        around = [
            *self.in_flight([*state.before, *self.started_reductions(state, True)]),
            *self._unsharded_gradients(0),
        ]
        yield Snapshot("weight gradients", 0, (*extras, *around))

    def _unit_backward(self, unit_index: int, split: bool) -> Iterator[NamedSnapshot]:
        """Yield (snapshot name, temporaries) for the backward of the unit with index `unit_index`. split: True if only
        input gradients are computed."""
        unit = self.units[unit_index]
        if unit == "head":
            if self.batch.config.encoder:
                yield ".rows", [activation("gradient of the last layer's output", self.stream)]
            if self.batch.config.head not in ("next", "masked"):
                return
            loss = self._loss(True)
            yield from loss.snapshots("loss_backward")
            if "keeps_hidden" not in loss.dimensions.true:
                yield from loss.snapshots("loss")
        elif self._compiled(unit):
            ends = {GRADIENT: self.units[-1]} | ({} if self.stage.first else {INPUT: self.units[0]})
            arrived = frozenset(name for name, end in ends.items() if end == unit)
            if self._expert_parallel(unit):
                saved = self._whole_of[unit], self._saved_of[unit]
                yield from list_mixture_backward(self._block(unit), self._layer[unit], saved, Backward(arrived))
            else:
                state = Backward(arrived, self.queues, self.queues and not split)
                yield from (held.snapshot(unit) for held in self._block(unit).backward(state))
        elif unit in self._layer:
            again = count_bytes(self._whole_of[unit]) - count_bytes(self._saved_of[unit])
            config = self.batch.config  # in a 16-bit type this norm saves a copy of the input
            copies = self.batch.narrow and config.pre_norms and config.norm == "rmsnorm"
            if copies and self.batch.layout.recompute != "none":
                again += sum(each.bytes for each in self._saved_of[unit] if each.name == f"{unit}.input")
            more = [activation("recomputed", again)] if again > 0 else []
            layer = self._layer[unit]
            alike = layer if layer in self.batch.routed else layer_kind(self.batch.config, layer)
            key = alike, split, unit == self.units[-1]
            if key not in self._backwards:  # equal layers have equal temporaries
                self._backwards[key] = list(self._layer_backward(unit, split))
            for name, extras in self._backwards[key]:
                yield name, [*more, *extras]
        elif unit in LOOKED_UP and self.batch.config.adapter is None:
            yield from temporaries.embedding_pass(self.batch, unit).snapshots("embedding")

    def _layer_backward(self, unit: str, split: bool) -> Iterator[NamedSnapshot]:
        """Yield (snapshot name, temporaries) for the backward of an uncompiled layer. unit: name of the layer, such as
        "layers.3"; split: True if only input gradients are computed."""
        at, config, number, saved = self.batch, self.batch.config, self._layer[unit], self._whole_of[unit]
        kind = layer_kind(config, number)
        sizes = temporaries.adapter_sizes(at, number) | {"split": int(split)}
        layer = temporaries.Pass(layer_dimensions(at, number, sizes, {"split": split}), saved, f"{unit}.")
        yield from layer.snapshots("mixture" if kind.mixed else "mlp")
        yield from layer.snapshots("mlp_norm")
        around: list[Allocation] = []  # the MLP's tensors are freed by now, except operands of queued weight gradients
        if split:
            around = [activation("queue of the MLP's weight gradients", queued_bytes(at, saved, number, False))]
        elif unit == self.units[-1]:  # of a stage that is not the last one
            around = [message("gradient from the next stage", self.stream)]
        for name, extras in layer.snapshots("attention"):
            inside = temporaries.attention_workspaces(at, kind) if name == ".attention" else ()
            yield name, [*around, *extras, *inside]

    def _queue_of(self, unit: str) -> int:
        """Return the bytes that the queued weight gradients of a layer keep allocated. unit: its name, such as
        "layers.3"."""
        if self._compiled(unit):
            return self._block(unit).queued_bytes
        return int(queued_bytes(self.batch, self._whole_of[unit], self._layer[unit]))

    def _compiled(self, unit: str) -> bool:
        """Return True if a unit such as "layers.3" is a compiled layer whose memory can be predicted."""
        return self.compiled and unit in self._layer and can_predict_compiled(self.batch)

    def _block(self, unit: str) -> CompiledBlock:
        """Return the compiled layer that a unit such as "layers.3" is."""
        return compiled_block(self.batch, layer_kind(self.batch.config, self._layer[unit]))

    def _expert_parallel(self, unit: str) -> bool:
        """Return True if a unit such as "layers.3" is a layer whose experts are expert-parallel."""
        mixed = unit in self._layer and self.batch.config.has_experts(self._layer[unit])
        return mixed and self.batch.layout.expert_parallel

    # --- parameters and gradients

    def _gathered(self, unit_index: int, step: int) -> list[Allocation]:
        """Return the full parameters that ZeRO-3 holds during a pass of the unit with index `unit_index`: those of this
        unit, and of the prefetched next unit. step: 1 in the forward, -1 in the backward (the next unit is `unit_index`
        + step)."""
        names = {self.units[at] for at in (unit_index, unit_index + step) if 0 <= at < len(self.units)}
        if step < 0:
            names -= set(LOOKED_UP)
        if self.buffers.tied and ("head" in names or (step > 0 and self.both_ends)):
            names.add("embedding")
        return [
            message(f"{flat.name} gathered", flat.held_bytes(flat.padded, self.batch.itemsize))
            for name in sorted(names)
            for flat in self.buffers.flats.get(name, ())
            if flat.zero == 3
        ]

    def _unsharded_gradients(self, unit_index: int) -> list[Allocation]:
        """Return the unsharded gradient buffers that the backward of the unit with index `unit_index` allocates."""
        opened = self.buffers.flats.get(self.units[unit_index], ()) if self.units else ()
        return [each for flat in opened for each in self._unsharded(flat)]

    def _unsharded(self, flat: Flat) -> list[Allocation]:
        """Return, as a list, the unsharded gradient buffer that the flat parameter buffer `flat` allocates under ZeRO-2
        and 3; empty if it uses a buffer shared by layers, which is counted elsewhere."""
        if flat.zero < 2 or flat.padded in self.buffers.reused:
            return []
        return [gradient(f"{flat.name} unsharded gradient", flat.padded * self.batch.wide)]

    def in_flight(self, posted: Sequence[Reduction]) -> list[Allocation]:
        """Return the tensors of the gradient reductions in flight. posted: all reductions started so far; only the last
        few of them are in flight."""
        found = []
        for flat, later in [each for each in posted if each.flat.zero][-REDUCTIONS_IN_FLIGHT:]:
            shard = flat.padded // flat.shards * self.batch.wide
            if flat.zero >= 2 and later:
                found.append(message(f"{flat.name} shard of a later micro-batch", shard))
            if self.batch.device == "cpu":  # gloo sends to each rank alone
                found.append(message(f"{flat.name} parts of other ranks", shard * (flat.shards - 1)))
            found += self._unsharded(flat)
        return found

    def started_reductions(self, state: BackwardState, weights: bool | None = None, after: int = -1) -> list[Reduction]:
        """Return, in order, the gradient reductions that a backward starts. state: state of the stage when the backward
        begins. weights: True for a weight-gradient pass, which completes the gradients of layers; False for an
        input-gradient pass; None for an unsplit backward. after: index of a unit; only reductions of later units."""
        units = [unit for unit in self.units[after + 1 :] if weights is None or (unit in self._layer) == weights]
        flats = (flat for unit in reversed(units) for flat in self.buffers.flats.get(unit, ()))
        return [Reduction(flat, state.later) for flat in flats if flat.zero >= 2 or state.last]
