"""Transformer block compiled by torch.compile (inductor), on one rank: the activations that its forward saves, the
kernels of its forward and backward with the buffers that they read and write, by the tables of
`compiled_blocks.torch-*.toml`, and the memory at the peaks of both."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from importlib import resources
from typing import Any, NamedTuple

from meshwright.planner.cost.cached import cached_method
from meshwright.planner.cost.dimensions import Dimensions, element_bytes, layer_dimensions
from meshwright.planner.cost.micro_batch import LayerKind, MicroBatch, Number
from meshwright.planner.cost.operators import SavedTensor
from meshwright.planner.cost.tables import Item, holds, parse_tensor, select, select_items
from meshwright.planner.hardware.machine_profile import torch_version
from meshwright.planner.memory.inductor import Buffer, Kernel, KernelMemory, find_peak
from meshwright.planner.memory.snapshot import Allocation, NamedSnapshot, activation, count_bytes, workspace
from meshwright.planner.memory.temporaries import Pass, ring_backward, tiled_backward
from meshwright.toml import read_packaged_toml

GRADIENT, INPUT, INPUT_GRADIENT = "gradient of the output", "input", "gradient of the input"

COLLECTED = "weight gradients"
"""Snapshot at the end of a compiled backward, which returns all weight gradients of the block together."""

_VERBS = ("use", "call", "tiles", "ring")
_FILE = re.compile(r"compiled_blocks\.torch-(\d+)\.(\d+)\.toml")


def can_predict_compiled(batch: MicroBatch) -> bool:
    """Return True if the memory of the model's layers can be predicted under torch.compile. It cannot for norms after
    attention, MLP or the rotary rotation, for experts with weighted inputs, and with an adapter."""
    config = batch.config
    unknown = config.post_norms or config.rotated_norm or config.routed_input
    return not unknown and config.adapter is None


# --- the tables


class _TableLine(NamedTuple):
    """One kernel of a compiled layer, as the tables `compiled_blocks.torch-*.toml` list it.

    verb: "" for a kernel of inductor; "call", "tiles" or "ring" for an operator that inductor does not fuse. reads:
    names of the buffers that the kernel reads. writes: buffers that it writes, each with the name of the buffer whose
    memory it overwrites ("": newly allocated memory)."""

    verb: str
    reads: tuple[str, ...]
    writes: tuple[Item, ...]


@cache
def _read_tables() -> Mapping[str, Any]:
    """Return the tables of compiled layers for the installed version of torch: of the latest version that is not newer,
    else of the oldest. Keys of the result: `shapes`: {buffer: element type and shape, such as "x rows tokens hidden"};
    `groups`: {group: its buffers}; `kernels`, `conditions`."""
    folder = resources.files("meshwright.planner.memory")
    versions = {(int(found[1]), int(found[2])): each.name for each in folder.iterdir()
                if (found := _FILE.match(each.name))}  # fmt: skip
    older = [version for version in versions if version <= (installed_torch() or version)]
    file = read_packaged_toml(f"planner/memory/{versions[max(older, default=min(versions))]}")
    groups = {name: text.split(",") for name, text in file["groups"].items()}
    shapes = {name: shape for shape, names in file["shapes"].items() for name in names}
    return {**file, "groups": groups, "shapes": shapes}


def installed_torch() -> tuple[int, int] | None:
    """Return (major, minor) version of the installed torch, without importing it; None if there is none."""
    found = re.match(r"(\d+)\.(\d+)", torch_version())
    return None if found is None else (int(found[1]), int(found[2]))


def version_warning() -> str | None:
    """Return a warning if the tables of compiled layers are for another version of torch than the installed one; else
    None."""
    here, version = installed_torch(), _read_tables()["torch"]
    if here is None or version == "{}.{}".format(*here):
        return None
    return f"compiled blocks: kernels are those of torch {version}, not of the installed {here[0]}.{here[1]}"


@lru_cache(maxsize=256)
def _select_kernels(name: str, true: frozenset[str]) -> list[_TableLine]:
    """Return the kernels of one list in the tables of compiled layers whose conditions hold, without the buffers whose
    conditions do not hold. name: the list, such as "attention"; true: names that hold in conditions, such as "gated".
    """
    tables = _read_tables()
    for each, condition in tables["conditions"].items():  # in order: conditions may contain earlier ones
        if holds(condition, true):
            true |= {each}
    found = []
    for text in tables["kernels"][name]:  # "[condition:] [verb] reads -> writes" or "[condition:] use list"
        *condition, kernel = re.split(r":\s*", text, maxsplit=1)
        if not holds("".join(condition), true):
            continue
        first, _, rest = kernel.partition(" ")
        verb, rest = (first, rest) if first in _VERBS else ("", kernel)
        if verb == "use":
            found += _select_kernels(rest, true)
            continue
        reads, writes = (select_items(part.split(","), true, tables["groups"]) for part in rest.split("->"))
        found.append(_TableLine(verb, tuple(item.name for item in reads), writes))
    return found


# --- a block


class Backward(NamedTuple):
    """State in which a compiled layer's backward runs.

    arrived: names of gradients that another pipeline stage sent, which stay allocated until the backward ends; queues:
    True if weight gradients are queued, so that the backward returns their operands (`model/weight_gradients.py`);
    at_once: True if the queued weight gradients are computed right after the backward."""

    arrived: frozenset[str] = frozenset()
    queues: bool = False
    at_once: bool = False


@lru_cache(maxsize=64)
def compiled_block(batch: MicroBatch, kind: LayerKind) -> CompiledBlock:
    """Return the compiled layer of one kind, the same object for equal micro-batches. batch: sizes of the
    micro-batch."""
    return CompiledBlock(batch, kind)


class CompiledBlock:
    """A transformer layer compiled by torch.compile on one rank, with its kernels and buffers. If its experts are
    expert-parallel, only the part before the mixture of experts is compiled, and is meant here.

    batch: sizes of a micro-batch on the rank; kind: kind of the layer. Buffers have names such as
    "attention.qkv.output".

    Attributes:
        name: "dense", "encoder", "mixture", or "front" for a layer whose mixture is expert-parallel.
        saved: Names of the activations that the forward saves for the backward, without the block's input; under full
            recompute, those that the recomputed forward saves.
        true: Names that hold in conditions of the tables: properties of the layer, such as "gated", and saved
            activations.
    """

    def __init__(self, batch: MicroBatch, kind: LayerKind) -> None:
        self.batch, self.kind, self.tables = batch, kind, _read_tables()
        self.recomputes = batch.layout.recompute == "full"
        self.dimensions = Dimensions(batch, kind)
        properties = self.dimensions.true
        self.name = next(name for name in ("encoder", "front", "mixture", "dense") if name in properties)
        listed = self.tables["saved"]["encoder" if self.name == "encoder" else "decoder"]
        self.saved: list[str] = select(listed, properties, self.tables["groups"])
        self.true = properties | set(self.saved)
        self._entries: dict[str, SavedTensor] = {}
        wide_router = "wide_router" in properties
        self._types = {
            "router": "x" if batch.config.router == "softmax" else "wide", "product": "wide" if wide_router else "x",
        }  # fmt: skip

    def entry(self, name: str) -> SavedTensor:
        """Return the buffer called `name` with its shape and element type."""
        if name not in self._entries:
            found = parse_tensor(Item(name, self.tables["shapes"][name])).compute(self.dimensions)
            self._entries[name] = found._replace(kind=self._types.get(found.kind, found.kind))
        return self._entries[name]

    def bytes(self, name: str) -> int:
        """Return the bytes of the buffer called `name`, such as "attention.qkv.output"."""
        entry = self.entry(name)
        return math.prod(entry.shape) * element_bytes(self.batch.dtype, entry.kind)

    @property
    def gradients(self) -> tuple[str, ...]:
        """Names of the output gradients that the backward receives."""
        return (GRADIENT, "gradient of the mixture's input") if self.name == "front" else (GRADIENT,)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the buffers that the forward returns."""
        return ("input of the sum", "mlp.input") if self.name == "front" else ("result",)

    @cached_property
    def backward_kernels(self) -> list[Kernel]:
        """Kernels of the backward in order, recomputed kernels included. Inductor may order the kernels of a mixture of
        experts in several ways; the order with the lowest memory peak is returned."""
        orders = [""]
        if self.name == "mixture" and "mlp.input" in self.saved:
            orders = ["at_once"]
        elif self.name == "mixture":
            wide = "wide_router" in self.true
            orders = ["shared_first"] * (not wide) + ["experts_first"] * (wide or "shared" in self.true)
        found = [self._kernels(f"{self.name}_backward", order) for order in orders]
        return found[0] if len(found) == 1 else min(found, key=self._peak)

    def _peak(self, kernels: list[Kernel]) -> Number:
        """Return the peak bytes of backward kernels that run in the given order, without temporaries inside kernels."""
        given = {name: self.bytes(name) for name in (INPUT, GRADIENT, *self.saved)}
        weights = {made.name for kernel in kernels for made in kernel.makes if made.category == "gradients"}
        return find_peak([each._replace(inside=()) for each in kernels], given, {*weights, INPUT_GRADIENT}).bytes

    def _kernels(self, name: str, order: str = "") -> list[Kernel]:
        """Return the kernels of one list in the tables, such as "attention", that this layer has. order: name of an
        order of kernels in a mixture's backward, tested by conditions; "": not such a list."""
        found = []
        for line in _select_kernels(name, self.true | {order}):
            made = tuple(self._buffer(item.name, line.verb in ("call", "tiles")) for item in line.writes)
            label = "attention" if line.verb == "ring" else made[0].name if made else ", ".join(line.reads)
            over = {item.name: item.value for item in line.writes if item.value}
            found.append(Kernel(label, line.reads, made, over, tuple(self._inside(line.verb))))
        return found

    def _buffer(self, name: str, operator: bool) -> Buffer:
        """Return the memory buffer called `name`. operator: True if a custom operator returns the buffer; inductor then
        does not reuse its memory."""
        kind = self.entry(name).kind
        kind = "wide" if kind == "x" and not self.batch.narrow else kind
        category = "gradients" if name.startswith("weight gradient") else "activations"
        return Buffer(name, kind, self.bytes(name), category, operator)

    def _inside(self, verb: str) -> Iterator[Allocation]:
        """Yield the temporary allocations inside an operator that inductor calls. verb: "ring" or "tiles" for kinds of
        attention; nothing is yielded for other operators."""
        if verb == "ring":
            yield from ring_backward(self.batch, self.kind)
        elif verb == "tiles" and "cuda_attention" not in self.true:
            yield from tiled_backward(self.batch, self.kind)

    # --- memory peaks

    @property
    def saved_tensors(self) -> list[SavedTensor]:
        """Activations that the forward saves in addition to its input; none under full recompute."""
        return [] if self.recomputes else list(map(self.entry, self.saved))

    @cached_property
    def forward(self) -> KernelMemory:
        """Memory at the peak of the forward, without its input; tensors that it saves are included."""
        return find_peak(self._kernels(self.name), {}, {*self.saved, *self.results})

    @cached_method
    def backward(self, state: Backward) -> list[KernelMemory]:
        """Return the memory at the peak and at the end (`COLLECTED`) of the backward; under full recompute, these are
        preceded by the peak of the recomputed forward. state: how the backward runs."""
        found, kernels, returned = list[KernelMemory](), self.backward_kernels, {INPUT_GRADIENT}
        if state.queues:
            kernels = [each for each in kernels if not each.name.startswith("weight gradient")]
            returned |= {name for pair in self.operands.values() for name in pair}
        else:
            returned |= {made.name for kernel in kernels for made in kernel.makes if made.category == "gradients"}
        saved = {name: self.bytes(name) for name in self.saved}
        given = {name: self.bytes(name) for name in (INPUT, *self.gradients) if name not in state.arrived}
        gradients = [activation(name, self.bytes(name)) for name in self.gradients]
        recomputed = [activation(name, size) for name, size in saved.items()] if self.recomputes else []
        if self.recomputes:
            again = self.forward
            found.append(KernelMemory("forward again", again.buffers, 0, (*again.inside, *gradients)))
        peak = find_peak(kernels, given | saved, returned)
        found.append(KernelMemory(peak.name, peak.buffers, peak.gone, (*peak.inside, *gradients, *recomputed)))
        made = {each.name: each for kernel in kernels for each in kernel.makes if each.name in returned}
        gone = 0 if self.recomputes else sum(size for name, size in saved.items() if name not in returned)
        left = [each for each in recomputed if each.name in returned]
        if GRADIENT in state.arrived or GRADIENT in returned:
            left += gradients[:1]
        if state.at_once and self.batch.narrow and self.batch.device != "cuda":  # else products add to the sums
            left.append(workspace("weight gradient", self._weight_gradients()))
        return [*found, KernelMemory(COLLECTED, made, gone + given.get(INPUT, 0), tuple(left))]

    @property
    def peak_temporaries(self) -> Number:
        """Peak bytes of temporaries over forward and backward, without weight gradients, whose size does not depend on
        the batch."""
        return max(
            held.bytes - count_bytes(each for each in held.buffers.values() if each.category == "gradients")
            for held in (self.forward, *self.backward(Backward()))
        )

    @property
    def queued_bytes(self) -> int:
        """Bytes that queued weight gradients keep allocated: inputs and output gradients of the linear layers."""
        return sum(self.bytes(name) for pair in self.operands.values() for name in pair)

    @cached_property
    def operands(self) -> dict[str, tuple[str, str]]:
        """{linear layer, such as "mlp.up": (name of its input, name of the gradient of its output)}, the operands of
        its queued weight gradient, in the order in which these are computed."""
        gathers = "gathers" in self.true
        return {
            "mlp.down": ("mlp.down.input", "mlp.down.product.gradient" if gathers else GRADIENT),
            "mlp.up": ("mlp.up.input", "mlp.up.output.gradient"),
            "attention.output": (
                "attention.output.input", "attention.output.product.gradient" if gathers else "gradient between",
            ),
            "attention.qkv": ("attention.qkv.input", "attention.qkv.output.gradient"),
        }  # fmt: skip

    def _weight_gradients(self) -> int:
        """Return the peak bytes while queued weight gradients are computed one after another. Each frees its operands
        when it is done."""
        most = used = 0
        for name, pair in self.operands.items():
            most = max(most, self.bytes(f"weight gradient of {name.rpartition('.')[2]}") - used)
            used += sum(self.bytes(each) for each in pair if each != GRADIENT)
        return most


def list_mixture_backward(
    block: CompiledBlock, layer: int, saved: tuple[Sequence[Allocation], Sequence[Allocation]], state: Backward
) -> Iterator[NamedSnapshot]:
    """Yield (snapshot name, temporaries) for the backward of a layer that is compiled except for its expert-parallel
    mixture.

    block: the compiled part; layer: index of the layer; saved: its saved activations, as a pair (without recompute,
    with the layout's recompute); state: how the backward runs."""
    mlp = f"layers.{layer}.mlp"
    whole, here = (count_bytes(each for each in of if each.name.startswith(f"{mlp}.")) for of in saved)
    again = whole - here
    front = [held.snapshot(f"layers.{layer}") for held in block.backward(state)]
    if block.recomputes:
        yield front.pop(0)
        again += sum(map(block.bytes, block.saved))
    for name, extras in Pass(layer_dimensions(block.batch, layer), saved[0], f"layers.{layer}.").snapshots("mixture"):
        yield name, [activation("recomputed", again), *extras]
    for name, extras in front:
        yield name, [*extras, activation(f"{mlp}: freed", -here)]
