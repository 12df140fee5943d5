"""Memory snapshots of a stage's forward and backward at which memory may peak, in closed form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

from meshwright.planner.cost.cached import cached_method
from meshwright.planner.cost.dimensions import layer_dimensions
from meshwright.planner.cost.micro_batch import MicroBatch, Number, layer_kind
from meshwright.planner.memory import compiled_blocks
from meshwright.planner.memory.attention_tiles import attention_workspaces
from meshwright.planner.memory.compiled_blocks import Backward, CompiledBlock
from meshwright.planner.memory.inductor import KernelMemory
from meshwright.planner.memory.saved import PREDICTION, PREDICTION_LOSS, queued_bytes, saved_activations
from meshwright.planner.memory.snapshot import Allocation, NamedSnapshot, Snapshot, activation, count_bytes, message
from meshwright.planner.memory.states import Flat, PassState, Reduction, gradient_buffers
from meshwright.planner.memory.teacher import TeacherMemory
from meshwright.planner.memory.temporaries import Pass, adapter_sizes, count_unpacked_bytes
from meshwright.program.pipeline import Kind
from meshwright.spec.parameter_entries import REDUCTIONS_IN_FLIGHT
from meshwright.spec.stages import LOOKED_UP, Stage

OF_HEAD = ("head.", "final_norm.", "transform.", "transform_norm.", "pooler.", "classifier.", "loss")
"""Prefixes of the names of activations that the head's FSDP unit saves."""

LOSSES = "head", PREDICTION_LOSS
"""Names under which a stage lists its losses."""

_NEIGHBOURS = 4 + REDUCTIONS_IN_FLIGHT
"""Length of the window of units, from the one before a unit, on which the unit's memory depends: it and its neighbours,
whose parameters ZeRO-3 prefetches, and those after it, whose gradient reductions may still be in flight."""


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
        self.step, self.batch, self.stage = step, step.batch, stage
        predicts = stage.last and self.batch.config.prediction_layers
        # The module of multi-token prediction is part of the last FSDP unit, the head, and is computed after it.
        self.units, self._last = [*units, PREDICTION, PREDICTION_LOSS] if predicts else units, len(units) - 1
        options: dict[str, Any] = {"at_once": at_once, "tp_rank": step.tp_rank, "compiled": step.compiled}
        self.saved = whole = saved_activations(self.batch, stage, **options)
        if self.batch.layout.recompute != "none":
            whole = saved_activations(self.batch.recomputed, stage, **options)
        # Products add their weight gradients to the sums; those of grouped experts have no float32 output.
        self.fused = not self.batch.narrow or (self.batch.device == "cuda" and not self.batch.config.experts)
        self._layer = {unit: int(unit.split(".")[1]) for unit in self.units if unit.startswith("layers.")}
        self._layer |= {PREDICTION: self.batch.config.layers} if predicts else {}
        self._saved_of, self._whole_of = self._by_unit(self.saved), self._by_unit(whole)
        self._saved_until = list(accumulate(map(count_bytes, self._saved_of.values())))
        self.both_ends = step.tied and stage.first and stage.last  # one matrix is embedding and head
        self.queue = sum(map(self._queue_of, self.units)) if step.queues else 0
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
        return max(snapshots, key=self.count_bytes)

    def _by_unit(self, saved: Sequence[Allocation]) -> dict[str, list[Allocation]]:
        """Return {FSDP unit (layer, embedding or head): its saved activations}, in order. The key "" has the
        activations that belong to no unit, which are freed only at the end of the backward."""
        found: dict[str, list[Allocation]] = {unit: [] for unit in ("", *self.units)}
        for each in saved:
            unit = "head" if each.name.startswith(OF_HEAD) else ".".join(each.name.split(".")[:2])
            found[unit if unit in found else ""].append(each)
        return found

    def count_bytes(self, snapshot: Snapshot) -> Number:
        """Return the total bytes of a memory snapshot of this stage."""
        saved = 0 if snapshot.units is None else self._saved_until[snapshot.units]
        return saved + count_bytes(snapshot.temporaries)

    def list_items(self, snapshot: Snapshot) -> Iterator[Allocation]:
        """Yield the ledger items of a memory snapshot: saved activations, then temporaries."""
        stage = None if snapshot.units is None else self.stage.index
        for unit in () if snapshot.units is None else ("", *self.units[: snapshot.units]):
            yield from (each._replace(stage=stage) for each in self._saved_of[unit])
        for each in snapshot.temporaries:
            yield each._replace(stage=stage, first=snapshot.name, last=snapshot.name)

    def _forward(self, state: PassState) -> Iterator[Snapshot]:
        """Yield the memory snapshots of the forward of one micro-batch. state: state of the stage when it begins."""
        around, teacher = self._in_flight(state.before), self.step.teacher
        if teacher is not None and self.batch.layout.pp == 1:
            for _, computed in teacher.list_snapshots("teacher_forward"):
                yield Snapshot("teacher: forward", (*around, *computed))
            around += teacher.list_states()
        for place in self._peak_places:
            unit = self.units[place]
            held = [*around, *self._gathered(place, +1)]
            held += self._held("held_in_forward", unit) if place > self._last else []
            for name, extras in self._unit_forward(unit):
                yield Snapshot(f"{unit}{name}: forward", (*held, *extras), place)
        if not self.stage.last:
            tensors = *around, message("output", self.batch.stream_bytes)
            yield Snapshot("end of forward", tensors, len(self.units))

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
        elif unit in LOSSES:
            yield from self._loss(unit, False).snapshots("loss")
        else:
            yield from Pass(layer_dimensions(at, 0), (), f"{unit}.").snapshots("lookup")

    def _loss(self, unit: str, again: bool) -> Pass:
        """Return a pass through a loss. unit: "head", or the loss of multi-token prediction; again: True for the
        backward of a loss whose forward saved no gradient, so that the loss is computed again."""
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
        return Pass(layer_dimensions(at, 0, sizes, flags), self._saved_of[unit], "" if unit == "head" else f"{unit}.")

    def _backward(self, split: bool, state: PassState) -> Iterator[Snapshot]:
        """Yield the memory snapshots of one micro-batch's backward in order. split: True for a backward that computes
        only input gradients; state: state of the stage when the backward begins, such as gradient reductions in flight.
        """
        queue = 0  # of a split backward: what weight gradients need
        for place in reversed(range(len(self.units))):
            unit = self.units[place]
            if split or place in self._peak_places:
                yield from self._backward_of(place, split, queue, state.before)
            if split:
                queue += self._queue_of(unit)
            else:
                state = state._replace(before=self.step.start_reductions(Kind.BACKWARD, state, [unit]))
        if split:  # units without products are complete: until now their gradients were held in addition to the sums
            ends = self.step.list_flats(unit for unit in self.units if unit not in self._layer)
            waiting = activation("queue of weight gradients", queue)
            yield Snapshot("input gradients", (waiting, *self._in_flight(state.before, ends)), 0)

    def _backward_of(self, place: int, split: bool, queue: int, posted: Sequence[Reduction]) -> Iterator[Snapshot]:
        """Yield the memory snapshots of the backward of the unit with index `place`. split: True if only input
        gradients are computed; queue: bytes of the operands of queued weight gradients; posted: gradient reductions
        started before."""
        unit = self.units[place]
        block = self._block(unit)
        at_end = block is not None and block.name != "front"  # gradient buffers come at its end
        begins = place == len(self.units) - 1 and unit in LOSSES and self.batch.config.head in ("next", "masked")
        at_end |= unit in LOOKED_UP or begins
        opened = [] if split else self.step.list_flats([self.units[min(place, self._last)]])
        around = [*self._gathered(place, -1), *self._held("held_in_backward", unit, split, queue)]
        early, late = self._in_flight(posted), self._in_flight(posted, opened)
        for name, extras in self._unit_backward(unit, split):
            at_end &= name != f".{compiled_blocks.COLLECTED}"
            yield Snapshot(f"{unit}{name}: backward", (*around, *(early if at_end else late), *extras), place + 1)

    @cached_property
    def _peak_places(self) -> list[int]:
        """Indices of the units at which memory may peak in a forward or in a backward that is not split: of units that
        are alike, with alike neighbours, only the last, as it runs with the most saved activations."""
        alike = [None, *map(self.step.likeness, self.units)]
        return list({tuple(alike[at : at + _NEIGHBOURS]): at for at in range(len(self.units))}.values())

    @cached_method
    def _held(self, section: str, unit: str, split: bool = False, queue: int = 0) -> list[Allocation]:
        """Return the tensors that stay allocated during all of a unit's forward or backward, in addition to those of
        ZeRO. section: of `tensors.toml`; split: True if only input gradients are computed; queue: bytes of the operands
        of queued weight gradients."""
        flags = {
            "split": split, "queued": queue, "last": self.stage.last, "both_ends": self.both_ends,
            "arrived": unit == self.units[-1], "of_head": unit in (*LOSSES, PREDICTION),
            "predicts": PREDICTION in self._layer, "in_block": unit == PREDICTION,
            "in_prediction": unit in (PREDICTION, PREDICTION_LOSS),
        }  # fmt: skip
        sizes = layer_dimensions(self.batch, 0, {"queue": queue}, flags)
        return [each for _, tensors in Pass(sizes).snapshots(section) for each in tensors]

    def _weight_gradients(self, state: PassState) -> Iterator[Snapshot]:
        """Yield the memory snapshots of the pass that computes queued weight gradients. state: state of the stage when
        the pass begins."""
        sizes = layer_dimensions(self.batch, 0)
        largest = max(sizes["qkv hidden x"], sizes["up hidden x"])
        extras = [] if self.fused else [Allocation("workspace", "weight gradient", bytes=largest)]
        for unit in reversed([unit for unit in self.units if unit in self._layer]):
            reduced = self._in_flight(state.before, self.step.list_flats([unit]))
            yield Snapshot("weight gradients", (*extras, *reduced))
            state = state._replace(before=self.step.start_reductions(Kind.WEIGHT_GRADIENT, state, [unit]))

    @cached_method
    def _unit_backward(self, unit: str, split: bool) -> Iterator[NamedSnapshot]:
        """Yield (snapshot name, temporaries) for the backward of a unit. split: True if only input gradients are
        computed."""
        block, config = self._block(unit), self.batch.config
        if unit in LOSSES:
            loss = self._loss(unit, True)
            if "keeps_hidden" not in loss.dimensions.true:
                yield from loss.snapshots("loss")
            yield from loss.snapshots("loss_backward")
        elif block is not None:
            ends = {compiled_blocks.GRADIENT: self.units[-1]}
            ends |= {} if self.stage.first else {compiled_blocks.INPUT: self.units[0]}
            arrived = frozenset(name for name, end in ends.items() if end == unit)
            if block.name == "front":
                yield from self._mixture_backward(unit, block.backward(Backward(arrived)), block)
            else:
                state = Backward(arrived, self.step.queues, self.step.queues and not split)
                yield from (held.snapshot(unit) for held in block.backward(state))
        elif unit in self._layer:
            again = count_bytes(self._whole_of[unit]) - count_bytes(self._saved_of[unit])
            # In a 16-bit type this norm saves a copy of the input.
            copies = self.batch.narrow and config.pre_norms and config.norm == "rmsnorm"
            if copies and self.batch.layout.recompute != "none":
                again += sum(each.bytes for each in self._saved_of[unit] if each.name == f"{unit}.input")
            more = [activation("recomputed", again)] if again > 0 else []
            example = self._examples.setdefault(self.step.likeness(unit), unit)  # equal layers have equal temporaries
            for name, extras in self._layer_backward(example, split, unit == self.units[-1]):
                yield name, [*more, *extras]
        elif unit in LOOKED_UP and config.adapter is None:
            tables = {"positions": config.max_positions, "token_types": config.token_types}
            sizes = layer_dimensions(self.batch, 0, {"table": tables.get(unit) or self.batch.vocabulary})
            yield from Pass(sizes).snapshots("embedding")

    def _mixture_backward(self, unit: str, front: list[KernelMemory], block: CompiledBlock) -> Iterator[NamedSnapshot]:
        """Yield (snapshot name, temporaries) for the backward of a layer that is compiled except for its
        expert-parallel mixture. front: memory at the snapshots of the compiled part's backward; block: this part."""
        whole, own = (
            count_bytes(each for each in saved[unit] if each.name.startswith(f"{unit}.mlp."))
            for saved in (self._whole_of, self._saved_of)
        )
        again, snapshots = whole - own, [held.snapshot(unit) for held in front]
        if block.recomputes:
            yield snapshots.pop(0)
            again += sum(map(block.bytes, block.saved))
        mixture = Pass(layer_dimensions(self.batch, self._layer[unit]), self._whole_of[unit], f"{unit}.")
        for name, extras in mixture.snapshots("mixture"):
            yield name, [activation("recomputed", again), *extras]
        for name, extras in snapshots:
            yield name, [*extras, activation(f"{unit}.mlp: freed", -own)]

    @cached_method
    def _layer_backward(self, unit: str, split: bool, arrived: bool) -> list[NamedSnapshot]:
        """Return (snapshot name, temporaries) for the backward of an uncompiled layer. unit: name of the layer, such as
        "layers.3"; split: True if only input gradients are computed; arrived: True if another stage sent the gradient
        of the layer's output."""
        at, number, saved = self.batch, self._layer[unit], self._whole_of[unit]
        kind, queue = layer_kind(at.config, number), int(queued_bytes(at, saved, number, False)) if split else 0
        sizes = adapter_sizes(at, number) | {"split": int(split), "mlp_queue": queue}
        layer = Pass(layer_dimensions(at, number, sizes, {"split": split, "arrived": arrived}), saved, f"{unit}.")
        return [
            (name, [*extras, *(attention_workspaces(at, kind) if name == ".attention" else ())])
            for section in ("mixture" if kind.mixed else "mlp", "mlp_norm", "attention")
            for name, extras in layer.snapshots(section)
        ]

    @cached_method
    def _queue_of(self, unit: str) -> int:
        """Return the bytes that the queued weight gradients of a unit, such as "layers.3", keep allocated."""
        predicts, config, block = PREDICTION in self._layer, self.batch.config, self._block(unit)
        if unit == "head" and predicts and not config.tied and config.adapter is None:
            # The gradient of the head's weight waits for those of the prediction, which are in the same FSDP unit.
            return int(layer_dimensions(self.batch, 0)["vocabulary hidden x"])
        # Of the prediction's projection: the input, twice as wide as the stream, and the gradient of the output.
        projection = 3 * int(self.batch.stream_bytes) if unit == PREDICTION else 0
        if block is not None:
            return projection + block.queued_bytes
        layer = self._layer.get(unit)
        return 0 if layer is None else projection + int(queued_bytes(self.batch, self._whole_of[unit], layer))

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
        place = min(unit_index, self._last)
        names = {self.units[at] for at in (place, place + step) if 0 <= at <= self._last}
        if step < 0:
            names -= set(LOOKED_UP)
        if self.step.tied and ("head" in names or (step > 0 and self.both_ends)):
            names.add("embedding")
        flats = (flat for flat in self.step.list_flats(sorted(names)) if flat.zero == 3)
        return [message(f"{flat.name} gathered", flat.held_bytes(flat.padded, self.batch.itemsize)) for flat in flats]

    def _in_flight(self, posted: Sequence[Reduction], opened: Sequence[Flat] = ()) -> list[Allocation]:
        """Return the tensors of the gradient reductions in flight, and the unsharded gradients that do not fit into the
        buffers that layers share, which are counted elsewhere. posted: all reductions started so far; only the last few
        are in flight; opened: flat parameter buffers whose gradients are being accumulated."""
        wide, found = self.batch.wide, list[Allocation]()
        flying = [each for each in posted if each.flat.zero][-REDUCTIONS_IN_FLIGHT:]
        for flat, later in flying:
            shard = flat.padded // flat.shards * wide
            if flat.zero >= 2 and later:
                found.append(message(f"{flat.name} shard of a later micro-batch", shard))
            if self.batch.device == "cpu":  # gloo sends to each rank alone
                found.append(message(f"{flat.name} parts of other ranks", shard * (flat.shards - 1)))
        shared = Counter(self.step.reused)
        for flat in (each for each in (*(reduction.flat for reduction in flying), *opened) if each.zero >= 2):
            shared[flat.padded] -= 1
            if shared[flat.padded] < 0:
                found.append(Allocation("gradients", f"{flat.name} unsharded gradient", bytes=flat.padded * wide))
        return found
