"""Memory snapshots of a stage's forward and backward at which memory may peak, in closed form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, groupby
from typing import Any

from meshwright.planner.cost.cached import cached_method
from meshwright.planner.cost.dimensions import layer_dimensions
from meshwright.planner.cost.micro_batch import MicroBatch, Number, layer_kind
from meshwright.planner.memory import compiled_blocks
from meshwright.planner.memory.attention_tiles import attention_workspaces
from meshwright.planner.memory.compiled_blocks import Backward, CompiledBlock
from meshwright.planner.memory.saved import saved_activations
from meshwright.planner.memory.snapshot import Allocation, NamedSnapshot, Snapshot, activation, count_bytes, message
from meshwright.planner.memory.states import Flat, PassState, Reduction, gradient_buffers
from meshwright.planner.memory.teacher import TeacherMemory
from meshwright.planner.memory.temporaries import Pass, adapter_sizes, count_unpacked_bytes
from meshwright.program.pipeline import Kind
from meshwright.spec.parameter_entries import REDUCTIONS_IN_FLIGHT
from meshwright.spec.stages import LOOKED_UP, Stage

OF_HEAD = ("head.", "final_norm.", "transform.", "transform_norm.", "pooler.", "classifier.", "loss")
"""Prefixes of the names of activations that the head's FSDP unit saves."""

_NEIGHBOURS = 4 + REDUCTIONS_IN_FLIGHT
"""Length of the window of units, from the one before a unit, on which the unit's memory depends: it and its neighbours,
whose parameters ZeRO-3 prefetches, and those after it, whose gradient reductions may still be in flight."""


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


@dataclass(frozen=True)
class RankStep:
    """Training step of a rank, of which memory snapshots are computed.

    Attributes:
        batch: Sizes of a micro-batch.
        flats: Flat parameter buffers of the rank.
        tied: True if head and embedding share their weight.
        tp_rank: Rank along tp.
        compiled: True if layers, norm and loss are compiled.
        queues: True if split backwards queue weight gradients.
        teacher: Teacher of distillation; None: none.
    """

    batch: MicroBatch
    flats: Sequence[Flat]
    tied: bool
    tp_rank: int
    compiled: bool
    queues: bool
    teacher: TeacherMemory | None

    @cached_property
    def flats_by_unit(self) -> dict[str, list[Flat]]:
        """{FSDP unit: its flat parameter buffers}."""
        return {unit: list(flats) for unit, flats in groupby(self.flats, key=lambda flat: flat.unit)}

    @cached_property
    def reused(self) -> dict[int, int]:
        """{number of elements: number of buffers} of the unsharded gradient buffers that layers share."""
        return gradient_buffers(self.flats)

    @cached_method
    def likeness(self, unit: str) -> object:
        """Return a value that is equal for units whose tensors have equal sizes."""
        if not unit.startswith("layers."):
            return unit
        layer, config = int(unit.split(".")[1]), self.batch.config
        kind = layer if layer in self.batch.routed else (layer_kind(config, layer), config.layer_rotation(layer))
        return kind, *(flat._replace(unit="") for flat in self.list_flats([unit]))

    def list_flats(self, units: Iterable[str]) -> list[Flat]:
        """Return the flat parameter buffers of units."""
        return [flat for unit in units for flat in self.flats_by_unit.get(unit, ())]

    def start_reductions(self, kind: int, state: PassState, units: Sequence[str]) -> tuple[Reduction, ...]:
        """Return the gradient reductions in flight after a pass through units, given in forward order. kind: kind of
        the pass; an input-gradient pass completes the gradients of other units than layers, a weight-gradient pass
        those of layers. state: state of the stage when it begins."""
        completed = {Kind.FORWARD: (), Kind.INPUT_GRADIENT: (False,), Kind.WEIGHT_GRADIENT: (True,)}
        of = completed.get(Kind(kind), (False, True))
        flats = self.list_flats(unit for unit in reversed(units) if unit.startswith("layers.") in of)
        return *state.before, *(Reduction(flat, state.later) for flat in flats if flat.zero >= 2 or state.last)


class StageSnapshots:
    """Generator of the memory snapshots of a stage's passes on one rank.

    step: the rank's training step; stage: the stage; units: its FSDP units, each a layer, the embedding or the head;
    at_once: True if each backward directly follows its forward. Attribute `saved`: activations that a forward saves."""

    def __init__(self, step: RankStep, stage: Stage, units: Sequence[str], at_once: bool) -> None:
        self.step, self.batch, self.stage, self.units = step, step.batch, stage, units
        options: dict[str, Any] = {"at_once": at_once, "tp_rank": step.tp_rank, "compiled": step.compiled}
        self.saved = whole = saved_activations(self.batch, stage, **options)
        if self.batch.layout.recompute != "none":
            whole = saved_activations(self.batch.recomputed, stage, **options)
        # Products add their weight gradients to the sums; those of grouped experts have no float32 output.
        self.fused = not self.batch.narrow or (self.batch.device == "cuda" and not self.batch.config.experts)
        self._layer = {unit: int(unit.split(".")[1]) for unit in self.units if unit.startswith("layers.")}
        self._saved_of, self._whole_of = self._by_unit(self.saved), self._by_unit(whole)
        self._saved_until = list(accumulate(map(count_bytes, self._saved_of.values())))
        self.saved_bytes = self._saved_until[-1]
        self.stream = self.batch.stream_bytes
        self.both_ends = step.tied and stage.first and stage.last  # one matrix is embedding and head
        self.queue = sum(map(self._queue_of, self._layer)) if step.queues else 0
        self._examples: dict[object, str] = {}

    @cached_method
    def find_peak(self, kind: int, state: PassState) -> Snapshot:
        """Return the memory snapshot at the peak of one pass of the stage. kind: forward, backward, input-gradient or
        weight-gradient pass; state: state of the stage when the pass begins."""
        if kind == Kind.FORWARD:
            snapshots = self._forward(state)
        elif kind == Kind.WEIGHT_GRADIENT:
            snapshots = self._weight_gradients(state)
        else:
            snapshots = self._backward(kind == Kind.INPUT_GRADIENT, state)
        return max(snapshots, key=lambda snapshot: snapshot.bytes)

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

    def _forward(self, state: PassState) -> Iterator[Snapshot]:
        """Yield the memory snapshots of the forward of one micro-batch. state: state of the stage when it begins."""
        around, teacher = self._in_flight(state.before), self.step.teacher
        if teacher is not None and self.batch.layout.pp == 1:
            for _, computed in teacher.list_snapshots("teacher_forward"):
                yield Snapshot("teacher: forward", 0, (*around, *computed))
            around += teacher.list_states()
        for place in self._peak_places:
            unit = self.units[place]
            for name, extras in self._unit_forward(unit):
                yield self._snapshot(f"{unit}{name}: forward", place, [*around, *self._gathered(place, +1), *extras])
        if not self.stage.last:
            yield self._snapshot("end of forward", len(self.units), [*around, message("output", self.stream)])

    @cached_method
    def _unit_forward(self, unit: str) -> Iterator[NamedSnapshot]:
        """Yield (snapshot name, temporaries) for the forward of a unit, such as "layers.3" or "embedding"."""
        at, block = self.batch, self._block(unit)
        if block is not None and block.name != "front":
            yield "", block.forward.snapshot(unit)[1]
        elif unit in self._layer:
            layer, whole = self._layer[unit], self._whole_of[unit]
            # While a weight is unpacked, what follows it is not saved yet.
            following = sum(each.bytes for each in whole if ".mlp." in each.name)
            sizes = adapter_sizes(at, layer) | {
                "being_computed": max(map(count_bytes, (whole, self._saved_of[unit]))),
                "unpacked": max(0, count_unpacked_bytes(at, layer) - following),
            }
            computed = Pass(layer_dimensions(at, layer, sizes), whole, f"{unit}.")
            yield from computed.snapshots("layer_forward")
        elif unit == "head":
            yield from self._loss(False).snapshots("loss")
        else:
            yield from Pass(layer_dimensions(at, 0), (), f"{unit}.").snapshots("lookup")

    def _loss(self, again: bool) -> Pass:
        """Return a pass through the loss. again: True for the backward of a loss whose forward saved no gradient, so
        that the loss is computed again."""
        at, config, teacher = self.batch, self.batch.config, self.step.teacher
        chunks = at.loss_chunks if config.head in ("next", "masked") else []
        longest = max(chunks, default=0)
        kept = {each.name: each.bytes for each in self.saved}
        sizes: dict[str, Number] = {
            "longest": longest, "head_width": at.vocabulary, "sliced": at.loss_slice(longest),
            "kept_weight": kept.get("head.weight.gradient", 0), **(teacher.loss_sizes if teacher else {}),
        }  # fmt: skip
        flags = {
            "again": again, "several_chunks": len(chunks) > 1, "compiled_loss": self.step.compiled,
            "both_ends": self.both_ends, "taught": teacher, "cached": teacher and teacher.teacher.top_k,
            "sums_wide": len(chunks) > 2 or (at.narrow and at.device == "cuda"),
            "keeps_hidden": "head.hidden.gradient" in kept, "keeps_weight": "head.weight.gradient" in kept,
            "computes_weight": (again and config.adapter is None) or "head.weight.gradient" in kept,
        }  # fmt: skip
        return Pass(layer_dimensions(at, 0, sizes, flags), self.saved)

    def _backward(self, split: bool, state: PassState) -> Iterator[Snapshot]:
        """Yield the memory snapshots of one micro-batch's backward in order. split: True for a backward that computes
        only input gradients; state: state of the stage when the backward begins, such as gradient reductions in flight.
        """
        queue = 0  # of a split backward: what weight gradients need
        for place in reversed(range(len(self.units))):
            unit = self.units[place]
            if split or place in self._peak_places:
                yield from self._backward_of(place, split, queue, state.before)
            if split and unit in self._layer:
                queue += self._queue_of(unit)
            elif not split:
                state = state._replace(before=self.step.start_reductions(Kind.BACKWARD, state, [unit]))
        if split:  # units without products are complete: until now their gradients were held in addition to the sums
            ends = self._unsharded(self.step.list_flats(unit for unit in self.units if unit not in self._layer))
            waiting = activation("queue of weight gradients", queue)
            yield self._snapshot("input gradients", 0, (waiting, *ends, *self._in_flight(state.before)))

    def _backward_of(self, place: int, split: bool, queue: int, posted: Sequence[Reduction]) -> Iterator[Snapshot]:
        """Yield the memory snapshots of the backward of the unit with index `place`. split: True if only input
        gradients are computed; queue: bytes of the operands of queued weight gradients; posted: gradient reductions
        started before."""
        unit = self.units[place]
        block, is_head = self._block(unit), unit == "head"
        at_end = block is not None and block.name != "front"  # gradient buffers come at its end
        at_end |= unit in LOOKED_UP or (is_head and self.batch.config.head in ("next", "masked"))
        opened = [] if split else self._unsharded(self.step.list_flats([unit]))
        around = [*self._gathered(place, -1), *self._in_flight(posted)]
        around += self._held_throughout(split, is_head, place == len(self.units) - 1, queue) + (not at_end) * opened
        for name, extras in self._unit_backward(place, split):
            tensors = *around, *(opened if at_end and name == f".{compiled_blocks.COLLECTED}" else []), *extras
            yield self._snapshot(f"{unit}{name}: backward", place + 1, tensors)

    @cached_property
    def _peak_places(self) -> list[int]:
        """Indices of the units at which memory may peak in a forward or in a backward that is not split: of units that
        are alike, with alike neighbours, only the last, as it runs with the most saved activations."""
        alike = [None, *map(self.step.likeness, self.units)]
        return list({tuple(alike[at : at + _NEIGHBOURS]): at for at in range(len(self.units))}.values())

    @cached_method
    def _held_throughout(self, split: bool, is_head: bool, arrived: bool, queue: int) -> list[Allocation]:
        """Return the tensors that stay allocated during the backward of a unit, in addition to those of ZeRO. split:
        True if only input gradients are computed; is_head: True for the head; arrived: True for the stage's last unit;
        queue: bytes of the operands of queued weight gradients."""
        flags = {"split": split, "of_head": is_head, "arrived": arrived, "queued": queue, "last": self.stage.last}
        sizes = layer_dimensions(self.batch, 0, {"queue": queue}, flags | {"both_ends": self.both_ends})
        return [each for _, tensors in Pass(sizes).snapshots("held_in_backward") for each in tensors]

    def _weight_gradients(self, state: PassState) -> Iterator[Snapshot]:
        """Yield the memory snapshots of the pass that computes queued weight gradients. state: state of the stage when
        the pass begins."""
        sizes = layer_dimensions(self.batch, 0)
        largest = max(sizes["qkv hidden x"], sizes["up hidden x"])
        extras = [] if self.fused else [Allocation("workspace", "weight gradient", bytes=largest)]
        posted = self.step.start_reductions(Kind.WEIGHT_GRADIENT, state, self.units)
        opened = self._unsharded(self.step.list_flats(self.units[:1]))
        yield Snapshot("weight gradients", 0, (*extras, *self._in_flight(posted), *opened))

    @cached_method
    def _unit_backward(self, unit_index: int, split: bool) -> Iterator[NamedSnapshot]:
        """Yield (snapshot name, temporaries) for the backward of the unit with index `unit_index`. split: True if only
        input gradients are computed."""
        unit = self.units[unit_index]
        block = self._block(unit)
        if unit == "head":
            if self.batch.config.encoder:
                yield ".rows", [activation("gradient of the last layer's output", self.stream)]
            if self.batch.config.head not in ("next", "masked"):
                return
            loss = self._loss(True)
            yield from loss.snapshots("loss_backward")
            if "keeps_hidden" not in loss.dimensions.true:
                yield from loss.snapshots("loss")
        elif block is not None:
            ends = {compiled_blocks.GRADIENT: self.units[-1]}
            ends |= {} if self.stage.first else {compiled_blocks.INPUT: self.units[0]}
            arrived = frozenset(name for name, end in ends.items() if end == unit)
            if block.name == "front":
                saved = self._whole_of[unit], self._saved_of[unit]
                yield from compiled_blocks.list_mixture_backward(block, self._layer[unit], saved, Backward(arrived))
            else:
                state = Backward(arrived, self.step.queues, self.step.queues and not split)
                yield from (held.snapshot(unit) for held in block.backward(state))
        elif unit in self._layer:
            again = count_bytes(self._whole_of[unit]) - count_bytes(self._saved_of[unit])
            config = self.batch.config  # in a 16-bit type this norm saves a copy of the input
            copies = self.batch.narrow and config.pre_norms and config.norm == "rmsnorm"
            if copies and self.batch.layout.recompute != "none":
                again += sum(each.bytes for each in self._saved_of[unit] if each.name == f"{unit}.input")
            more = [activation("recomputed", again)] if again > 0 else []
            example = self._examples.setdefault(self.step.likeness(unit), unit)  # equal layers have equal temporaries
            for name, extras in self._layer_backward(example, split, unit == self.units[-1]):
                yield name, [*more, *extras]
        elif unit in LOOKED_UP and self.batch.config.adapter is None:
            config = self.batch.config
            tables = {"positions": config.max_positions, "token_types": config.token_types}
            sizes = layer_dimensions(self.batch, 0, {"table": tables.get(unit) or self.batch.vocabulary})
            yield from Pass(sizes).snapshots("embedding")

    @cached_method
    def _layer_backward(self, unit: str, split: bool, arrived: bool) -> list[NamedSnapshot]:
        """Return (snapshot name, temporaries) for the backward of an uncompiled layer. unit: name of the layer, such as
        "layers.3"; split: True if only input gradients are computed; arrived: True if another stage sent the gradient
        of the layer's output."""
        at, number, saved = self.batch, self._layer[unit], self._whole_of[unit]
        kind, queue = layer_kind(at.config, number), int(queued_bytes(at, saved, number, False)) if split else 0
        sizes = adapter_sizes(at, number) | {"split": int(split), "mlp_queue": queue}
        flags = {"split": split, "arrived": arrived}
        layer = Pass(layer_dimensions(at, number, sizes, flags), saved, f"{unit}.")
        return [
            (name, [*extras, *(attention_workspaces(at, kind) if name == ".attention" else ())])
            for section in ("mixture" if kind.mixed else "mlp", "mlp_norm", "attention")
            for name, extras in layer.snapshots(section)
        ]

    @cached_method
    def _queue_of(self, unit: str) -> int:
        """Return the bytes that the queued weight gradients of a layer keep allocated. unit: its name, such as
        "layers.3"."""
        if (block := self._block(unit)) is not None:
            return block.queued_bytes
        return int(queued_bytes(self.batch, self._whole_of[unit], self._layer[unit]))

    @cached_method
    def _block(self, unit: str) -> CompiledBlock | None:
        """Return the compiled layer that a unit such as "layers.3" is; None for other units, and for a layer whose
        memory cannot be predicted as compiled."""
        if not self.step.compiled or unit not in self._layer or not compiled_blocks.can_predict_compiled(self.batch):
            return None
        return compiled_blocks.compiled_block(self.batch, layer_kind(self.batch.config, self._layer[unit]))

    # --- parameters and gradients

    def _gathered(self, unit_index: int, step: int) -> list[Allocation]:
        """Return the full parameters that ZeRO-3 holds during a pass of the unit with index `unit_index`: those of this
        unit, and of the prefetched next unit. step: 1 in the forward, -1 in the backward (the next unit is `unit_index`
        + step)."""
        names = {self.units[at] for at in (unit_index, unit_index + step) if 0 <= at < len(self.units)}
        if step < 0:
            names -= set(LOOKED_UP)
        if self.step.tied and ("head" in names or (step > 0 and self.both_ends)):
            names.add("embedding")
        flats = (flat for flat in self.step.list_flats(sorted(names)) if flat.zero == 3)
        itemsize = self.batch.itemsize
        return [message(f"{flat.name} gathered", flat.held_bytes(flat.padded, itemsize)) for flat in flats]

    def _unsharded(self, flats: Iterable[Flat]) -> list[Allocation]:
        """Return the unsharded gradient buffers that flat parameter buffers allocate in a backward under ZeRO-2 and 3,
        without those shared by layers, which are counted elsewhere."""
        alone = (flat for flat in flats if flat.zero >= 2 and flat.padded not in self.step.reused)
        wide = self.batch.wide
        return [Allocation("gradients", f"{each.name} unsharded gradient", bytes=each.padded * wide) for each in alone]

    def _in_flight(self, posted: Sequence[Reduction]) -> list[Allocation]:
        """Return the tensors of the gradient reductions in flight. posted: all reductions started so far; only the last
        few of them are in flight."""
        found = []
        for flat, later in [each for each in posted if each.flat.zero][-REDUCTIONS_IN_FLIGHT:]:
            shard = flat.padded // flat.shards * self.batch.wide
            if flat.zero >= 2 and later:
                found.append(message(f"{flat.name} shard of a later micro-batch", shard))
            if self.batch.device == "cpu":  # gloo sends to each rank alone
                found.append(message(f"{flat.name} parts of other ranks", shard * (flat.shards - 1)))
            found += self._unsharded([flat])
        return found
