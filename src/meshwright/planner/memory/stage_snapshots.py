"""Memory snapshots of a stage's forward and backward at which the peak may be, in closed form, as autograd frees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from meshwright.planner.cost.micro_batch import ITEM_BYTES, MicroBatch, Number, layer_kind
from meshwright.planner.memory import compiled_peaks
from meshwright.planner.memory.compiled_blocks import GRADIENT, INPUT, known
from meshwright.planner.memory.compiled_peaks import (
    COLLECTED,
    Backward,
    backward_extras,
    forward_extras,
    mixture_backward_extras,
)
from meshwright.planner.memory.snapshot import (
    FIRST_AND_LAST,
    BackwardState,
    Buffers,
    NamedSnapshot,
    Reduction,
    Saved,
    Snapshot,
    Temporary,
    activation,
    message,
    workspace,
)
from meshwright.planner.memory.states import Flat
from meshwright.planner.memory.temporaries import (
    attention_backward,
    loss_backward,
    loss_snapshots,
    mixture_backward,
    table_backward,
)
from meshwright.spec.parameter_entries import REDUCTIONS_IN_FLIGHT
from meshwright.spec.policy import FUSED_ACCUMULATION_MIN_NUMEL
from meshwright.spec.stages import LOOKED_UP, Stage

OF_HEAD = ("head.", "final_norm.", "transform.", "transform_norm.", "pooler.", "classifier.", "loss")
"""How the names of what the head's unit keeps begin."""


def queued_bytes(at: MicroBatch, whole: Sequence[Saved], layer: int, attention: bool = True) -> Number:
    """Return the bytes that a layer's queued weight gradients keep: its products' inputs and output gradients.

    whole: saved activations without recompute; attention: include its products.
    """
    config, x = at.config, at.itemsize
    names = ("qkv.input", "output.input", "up.input", "down.input") if attention else ("up.input", "down.input")
    found: Number = 0
    for each in whole:
        if each.name.startswith(f"layers.{layer}.") and each.name.endswith(names):
            found = found + each.bytes
    hidden, tokens = config.hidden, at.all_tokens
    if attention:
        found = found + tokens * (hidden + at.qkv_width) * x
    if config.has_experts(layer):
        found = found + at.copies * (at.etp if at.spread else 1) * (hidden + 2 * at.expert_width) * x
        if config.shared_intermediate:
            found = found + tokens * (hidden + 2 * config.shared_intermediate // at.tp) * x
    else:
        width = config.intermediate // at.tp * (2 if config.gated else 1)
        found = found + tokens * (hidden + width) * x
    return found


class StageSnapshots:
    """Generator of the memory snapshots of a stage's forward and backward on one rank.

    saved: saved activations of the forward; whole: the same without recompute; compiled: blocks, norm and loss are
    compiled; queued: split backwards queue weight gradients.
    """

    def __init__(
        self,
        at: MicroBatch,
        stage: Stage,
        buffers: Buffers,
        saved: Sequence[Saved],
        whole: Sequence[Saved],
        *,
        compiled: bool = False,
        queued: bool = False,
    ) -> None:
        self.compiled, self.queued, self.tapped = compiled, queued, compiled and queued
        self.at, self.stage, self.saved, self.whole = at, stage, saved, whole
        self.units, self.flats, self.reused, self.tied = buffers
        units = buffers.units
        self.x, self.master = at.itemsize, ITEM_BYTES[at.sum_dtype]
        self.wide = max(4, self.x)
        self.fused = self.x == self.master  # products add their weight gradients to the sums themselves
        self._by_units: dict[str, list[Saved]] = {}
        self._unit = {unit: number for number, unit in enumerate(units)}
        self.of_unit, self.of_whole = self._by_unit(saved), self._by_unit(whole)
        self.of_loss = sum(each.bytes for each in saved if _of_loss(each))
        self.saved_bytes = sum(each.bytes for each in saved)
        self.stream = at.rows * at.slice * at.config.hidden * self.x
        self.tokens = at.rows * at.tokens
        layers = [unit for unit in units if unit.startswith("layers.")] if queued else []
        self.queue = sum(map(self._queue_of, layers))

    def _place(self, saved: Saved) -> int:
        """Return the index of the unit that saved an activation; -1 if none did, and it stays until the end."""
        if saved.name.startswith(OF_HEAD):
            return self._unit["head"]
        return self._unit.get(".".join(saved.name.split(".")[:2]), -1)

    def _by_unit(self, saved: Sequence[Saved]) -> list[int]:
        """Return the saved bytes by index of the unit; the last entry is of activations that belong to no unit."""
        found = [0] * (len(self.units) + 1)
        for each in saved:
            found[self._place(each)] += each.bytes
        return found

    def saved_at(self, place: int, back: bool) -> list[Saved]:
        """Return the saved activations in memory when the forward (`back`: the backward) is at unit `place`: the index
        of a layer, the embedding or the head."""
        return [
            each for each in self.saved if self._place(each) < place + back or (back and _of_loss(each))
        ]  # what the loss keeps stays until the whole backward is over

    def forward(self) -> Iterator[Snapshot]:
        """Yield the memory snapshots of the forward of one micro-batch."""
        before = self.of_unit[-1]
        for place, unit in enumerate(self.units):
            gathered = self._gathered(place, +1)
            if unit == "head":
                found = loss_snapshots(self.at, self.saved, self.compiled, False)
            else:
                found = [("", list(self._layer_forward(place)))]
            for what, extras in found:
                yield self._snapshot(f"{unit}{what}: forward", before, (*gathered, *extras), place, False)
            before += self.of_unit[place]
        if not self.stage.last:
            out = (message("output", self.stream),)
            yield self._snapshot("end of forward", before, out, len(self.units), False)

    def _layer_forward(self, place: int) -> Iterator[Temporary]:
        """Yield the tensors in memory during the forward of the unit with index `place`, a layer or an embedding."""
        unit = self.units[place]
        if not unit.startswith("layers."):
            yield workspace(f"{unit} rows", self.tokens * self.at.config.hidden * self.x)
            return
        if self._known(unit) and not self._spread(unit):
            yield from forward_extras(self.at, int(unit.split(".")[1]))
            return
        yield activation(f"{unit} being computed", max(self.of_whole[place], self.of_unit[place]))
        yield workspace(f"{unit} product and sums", 2 * self.stream)
        if self.at.config.has_experts(int(unit.split(".")[1])):  # what is sent, what comes back, and that times weights
            copies = self.at.routed_tokens * self.at.config.experts_per_token * self.at.config.hidden * self.x
            yield activation(f"{unit} copies of tokens", (2 + self.at.spread) * copies)

    def backward(self, split: bool = False, state: BackwardState = FIRST_AND_LAST) -> Iterator[Snapshot]:
        """Yield the snapshots of a backward that begins in state `state`. split: it computes only input gradients."""
        left = self.saved_bytes
        queue = 0  # of a split backward: what weight gradients need
        for place in reversed(range(len(self.units))):
            unit = self.units[place]
            whole = self._known(unit) and not self._spread(unit)
            around = [*self._gathered(place, -1), *self._reductions(place, state, split, whole)]
            opened = self._opened(place) if whole and not split else []
            if self.tied and unit != "head" and self.stage.first and self.stage.last:
                # Autograd holds it until what looking up rows adds is there too.
                table = -(-self.at.config.vocabulary // self.at.layout.tp) * self.at.config.hidden
                around.append(Temporary("gradients", "head's part of the embedding's gradient", table * self.x))
            elif split and self.stage.last and unit != "head" and self.at.config.head == "next":
                weight = -(-self.at.config.vocabulary // self.at.layout.tp) * self.at.config.hidden
                around.append(Temporary("gradients", "head weight gradient, held", weight * self.x))
            if queue:
                around.append(activation("queue of weight gradients", queue))
            if place < len(self.units) - 1 and not self.stage.last and not split:  # else the queue has it
                around.append(message("gradient from the next stage", self.stream))
            for name, extras in self._unit_backward(place, split):
                more = opened if name == COLLECTED else []
                yield self._snapshot(f"{unit}{name}: backward", left, (*around, *more, *extras), place, True)
            if split and unit.startswith("layers."):
                queue += self._queue_of(unit)
            left -= self.of_unit[place] - (self.of_loss if unit == "head" else 0)
        if split:  # units without products are complete: until now their gradients were held beside the sums
            ends = [each for place in range(len(self.units)) if not self._waits(place) for each in self._opened(place)]
            waiting = activation("queue of weight gradients", queue)
            tensors = waiting, *ends, *self.in_flight(state.before)
            yield self._snapshot("input gradients", left, tensors, -1, True)

    def _snapshot(self, name: str, saved: int, temporaries: Sequence[Temporary], place: int, back: bool) -> Snapshot:
        """Return a snapshot of the forward (`back`: the backward) at unit `place`. saved: bytes of the saved
        activations in memory."""
        return Snapshot(name, saved, tuple(temporaries), self.stage.index, partial(self.saved_at, place, back))

    def weight_gradients(self, state: BackwardState) -> Iterator[Snapshot]:
        """Yield the snapshots of the pass that computes queued weight gradients, which begins in state `state`."""
        widest = max(self._weight_bytes(), default=0)
        extras = () if self.fused else (workspace("weight gradient", widest),)
        around = [*self.in_flight([*state.before, *self.reduced(state, True)]), *self._opened(0)]
        yield Snapshot("weight gradients", 0, (*extras, *around))

    def _weight_bytes(self) -> Iterator[int]:
        """Yield the bytes of the weight of the QKV product and of the first MLP product on this rank."""
        config, tp = self.at.config, self.at.layout.tp
        yield (self.at.heads + 2 * self.at.kv_heads) * config.head_dim * config.hidden * self.x
        yield config.intermediate // tp * (2 if config.gated else 1) * config.hidden * self.x

    def _unit_backward(self, place: int, split: bool) -> Iterator[NamedSnapshot]:
        """Yield (snapshot name, tensors) of the backward of unit `place` (index); split: input gradients only."""
        unit = self.units[place]
        if unit == "head":
            if self.at.config.encoder:
                yield ".rows", [activation("gradient of the last layer's output", self.stream)]
            if self.at.config.head not in ("next", "masked"):
                return
            yield "", [*loss_backward(self.at, self.saved)]
            if not any(each.name == "head.weight.gradient" for each in self.saved):
                yield from loss_snapshots(self.at, self.saved, self.compiled, True)
        elif self._known(unit):
            ends = {GRADIENT: self.units[-1]} | ({} if self.stage.first else {INPUT: self.units[0]})
            arrived = frozenset(name for name, end in ends.items() if end == unit)
            layer = int(unit.split(".")[1])
            if self._spread(unit):
                saved = self.whole, self.saved
                yield from mixture_backward_extras(self.at, layer, saved, self.stream, Backward(arrived))
            else:
                state = Backward(arrived, self.tapped, self.tapped and not split)
                yield from backward_extras(self.at, layer, state)
        elif unit.startswith("layers."):
            again = self.of_whole[place] + self._beside(unit) - self.of_unit[place]
            more = [activation("recomputed", again)] if again > 0 else []
            for name, extras in self._layer_backward(unit, split):
                yield name, [*more, *extras]
        elif unit in LOOKED_UP:
            yield "", [*table_backward(self.at, unit)]

    def _beside(self, unit: str) -> int:
        """Return the bytes of a layer's saved activations that stay in addition to the recomputed ones: its narrow
        input, and results that the backward never reads. unit: "layers.N"."""
        if self.at.layout.recompute == "none":
            return 0
        names = [f"{unit}.input"] if self.x < self.wide else []
        if not self.at.config.post_norms:
            names += [f"{unit}.mlp.{what}" for what in ("down.sum", "output")]
            down = self.at.config.intermediate // self.at.layout.tp * self.at.config.hidden
            if not self.queued and down < FUSED_ACCUMULATION_MIN_NUMEL:
                names.append(f"{unit}.mlp.down.product")  # of a larger weight it is read: its own function makes it
        return sum(each.bytes for each in self.saved if each.name in names)

    def _layer_backward(self, unit: str, split: bool) -> Iterator[NamedSnapshot]:
        """Yield (snapshot name, tensors) of an uncompiled layer's backward. unit: "layers.N"; split: no weight
        gradients."""
        at, config, layout, x = self.at, self.at.config, self.at.layout, self.x
        gradient = activation("gradient of the layer's output", self.stream * (2 if layout.tp > 1 else 1))
        weights, number = not (self.fused or split), int(unit.split(".")[1])
        after = config.encoder  # norms follow the residual additions: their backward comes first
        gone = [f"{unit}.mlp_norm."] if after else []
        around = [gradient, *self._used(gone)]
        if config.has_experts(number):
            for name, extras in mixture_backward(at, f"{unit}.mlp", self.whole, split):
                yield f".mlp{name}", [gradient, *extras]
        else:
            width = config.intermediate // layout.tp
            columns = self.tokens * width * x
            product = width * config.hidden * x if weights else 0
            if config.gated:
                both = activation("gradients of gate and up", (2 + split) * columns)
                yield ".mlp", [gradient, both]
                if product > columns:
                    grads = activation("gradient of down's input", columns)
                    yield ".mlp.down", [gradient, grads, workspace("weight gradient of down", product)]
            else:
                extra = activation("gradient of up's output", columns + (columns if split else 0))
                yield ".mlp", [*around, extra, workspace("weight gradient", product)]
        if config.norm == "rmsnorm" and not (split or after):
            sums = workspace("gradients inside a norm", 4 * (self.stream // x) * self.wide)
            yield (
                ".mlp_norm",
                [gradient._replace(bytes=self.stream), *self._used([f"{unit}.mlp.", f"{unit}.mlp_post_norm."]), sums],
            )
        # Everything of the MLP is freed when attention's turn comes, but for what weight gradients wait for.
        gone = [f"{unit}.{each}." for each in ("mlp", "mlp_norm", "mlp_post_norm", "attention_post_norm")]
        gone += [] if at.ring or split else [f"{unit}.attention.output."]
        around = [gradient, *self._used([*gone, *([f"{unit}.attention_norm."] if after else [])])]
        if split:
            of_products = queued_bytes(at, self._of(unit), number, attention=False)
            around.append(activation("queue of the MLP's weight gradients", of_products))
        elif unit == self.units[-1]:  # of a stage that is not the last one
            around.append(message("gradient from the next stage", self.stream))
        for name, extras in attention_backward(at, layer_kind(config, number)):
            yield f".attention{name}", [*around, *extras]

    def _of(self, unit: str) -> list[Saved]:
        """Return the activations that a unit such as "layers.3" saves without recompute; indexed at the first call."""
        if not self._by_units:
            for each in self.whole:
                self._by_units.setdefault(".".join(each.name.split(".")[:2]), []).append(each)
        return self._by_units.get(unit, [])

    def _used(self, names: Sequence[str]) -> Iterator[Temporary]:
        """Yield an entry of negative bytes for freed saved activations: those whose names begin with one of `names`."""
        begin = tuple(names)
        units = {".".join(name.split(".")[:2]) for name in begin}
        freed = sum(each.bytes for unit in units for each in self._of(unit) if each.name.startswith(begin))
        if freed:
            yield activation("freed", -freed)

    def _queue_of(self, unit: str) -> int:
        """Return the bytes that a layer's queued weight gradients keep allocated. unit: such as "layers.3"."""
        layer = int(unit.split(".")[1])
        if self._known(unit):
            return compiled_peaks.queued_bytes(self.at, layer)
        return int(queued_bytes(self.at, self._of(unit), layer))

    def _gathered(self, place: int, step: int) -> list[Temporary]:
        """Return ZeRO-3's gathered parameters of units `place` and `place + step` (1 in forward, -1 in backward)."""
        following = place + step
        names = {self.units[place], *((self.units[following],) if 0 <= following < len(self.units) else ())}
        if step < 0:
            names -= set(LOOKED_UP)
        if self.tied and ("head" in names or (step > 0 and self.stage.first and self.stage.last)):
            names.add("embedding")
        return [
            message(f"{flat.name} gathered", flat.padded * self.x)
            for name in sorted(names)
            for flat in self.flats.get(name, ())
            if flat.zero == 3
        ]

    def _reductions(self, place: int, state: BackwardState, split: bool, later: bool = False) -> list[Temporary]:
        """Return the tensors of gradient reductions in flight, and unsharded gradient buffers, in the backward of unit
        `place` (index). split: input gradients only; later: the unit allocates its gradient buffers at its end."""
        if split:
            return self.in_flight(state.before)
        posted = [*state.before, *self._reduced(range(place + 1, len(self.units)), state)]
        return [*self.in_flight(posted), *([] if later else self._opened(place))]

    def _opened(self, place: int) -> list[Temporary]:
        """Return the unsharded gradient buffers of unit `place` (index), and of an embedding tied to the head."""
        now = list(self.flats.get(self.units[place], ())) if place < len(self.units) else []
        opened = list(now)
        if self.tied and self.stage.first and self.stage.last:  # the head's part of it is there from the beginning
            opened += [flat for flat in self.flats.get("embedding", ()) if flat not in now]
        return [each for flat in opened for each in self._whole(flat)]

    def _known(self, unit: str) -> bool:
        """Return True if a unit such as "layers.3" is a compiled layer whose kernels are modelled."""
        return self.compiled and unit.startswith("layers.") and known(self.at)

    def _spread(self, unit: str) -> bool:
        """Return True if a unit such as "layers.3" is a layer whose experts are expert-parallel."""
        return self.at.spread and unit.startswith("layers.") and self.at.config.has_experts(int(unit.split(".")[1]))

    def _waits(self, place: int) -> bool:
        """Return True if unit `place` is a layer: its gradients are complete only after the weight-gradient pass."""
        return self.units[place].startswith("layers.")

    def _reduced(self, places: Iterable[int], state: BackwardState) -> list[Reduction]:
        """Return, in order, the reductions that a backward in state `state` starts for the units `places` (indices)."""
        flats = [flat for place in sorted(places, reverse=True) for flat in self.flats.get(self.units[place], ())]
        return [Reduction(flat, state.later) for flat in flats if flat.zero >= 2 or state.last]

    def in_flight(self, posted: Sequence[Reduction]) -> list[Temporary]:
        """Return the tensors that reductions in flight hold: the last of `posted`, all reductions started."""
        found = []
        for flat, later in [each for each in posted if each.flat.zero][-REDUCTIONS_IN_FLIGHT:]:
            shard = flat.padded // flat.shards * self.master
            if flat.zero >= 2 and later:
                found.append(message(f"{flat.name} shard of a later micro-batch", shard))
            if self.at.device == "cpu":  # gloo sends to each rank alone
                found.append(message(f"{flat.name} parts of other ranks", shard * (flat.shards - 1)))
            found += self._whole(flat)
        return found

    def _whole(self, flat: Flat) -> list[Temporary]:
        """Return the unsharded gradient of a flat buffer under ZeRO-2 and 3, unless it is one of the reused buffers."""
        if flat.zero < 2 or flat.padded in self.reused:
            return []
        return [Temporary("gradients", f"{flat.name} unsharded gradient", flat.padded * self.master)]

    def reduced(self, state: BackwardState, weights: bool | None = None) -> list[Reduction]:
        """Return the reductions a backward starts. weights: True its weight pass, False its input pass, None both."""
        places = (at for at in range(len(self.units)) if weights is None or self._waits(at) == weights)
        return self._reduced(places, state)


def _of_loss(saved: Saved) -> bool:
    """Return True if the loss saved an activation itself: it is freed only when the whole backward is over."""
    return (saved.name.startswith("head.") and saved.name.endswith(".gradient")) or saved.name == "loss"
