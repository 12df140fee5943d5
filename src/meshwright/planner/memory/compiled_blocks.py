"""Transformer block compiled by torch.compile (inductor), on one rank: the activations that its forward saves, the
kernels of its forward and backward with the buffers that they read and write, by the tables of
`compiled_blocks.torch-*.toml`, and the memory at the peaks of both."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.machine import torch_version
from meshwright.planner.cost.cached import cached_method
from meshwright.planner.cost.dimensions import Dimensions, element_types
from meshwright.planner.cost.micro_batch import ITEM_BYTES, LayerKind, MicroBatch, Number
from meshwright.planner.cost.operators import SavedTensor
from meshwright.planner.cost.tables import Item, holds, parse_tensor, select, select_items
from meshwright.planner.memory.attention_tiles import attention_workspaces
from meshwright.planner.memory.inductor import Kernel, KernelMemory, find_peak
from meshwright.planner.memory.snapshot import Allocation, activation, count_bytes
from meshwright.toml import read_packaged_toml

GRADIENT, INPUT, INPUT_GRADIENT = "gradient of the output", "input", "gradient of the input"

COLLECTED = "weight gradients"
"""Snapshot at the end of a compiled backward, which returns all weight gradients of the block together."""

_KERNEL = re.compile(r"(?:(.*?):\s*)?(?:(use|call|tiles|ring)\s+)?(.*?)(?:\s*->\s*(.*))?", re.DOTALL)
"""Condition, verb, buffers read and buffers written of a kernel in the tables."""
_FILE = re.compile(r"compiled_blocks\.torch-(\d+)\.(\d+)\.toml")


def can_predict_compiled(batch: MicroBatch) -> bool:
    """Return True if the memory of the model's layers can be predicted under torch.compile. It cannot for norms after
    attention, MLP or the rotary rotation, for experts with weighted inputs, and with an adapter."""
    config = batch.config
    unknown = config.post_norms or config.rotated_norm or config.routed_input
    return not unknown and config.adapter is None


# --- the tables


@cache
def _read_tables() -> Mapping[str, Any]:
    """Return the tables of compiled layers for the installed version of torch: of the latest version that is not newer,
    else of the oldest. `shapes` of the result is {buffer: [(its element type and shape, such as "rows
    tokens hidden", whose sizes are not computed yet; the condition)]}; `groups` {group: its buffers}."""
    versions = {(int(found[1]), int(found[2])): each.name for each in Path(__file__).parent.iterdir()
                if (found := _FILE.match(each.name))}  # fmt: skip
    older = [version for version in versions if version <= (installed_torch() or version)]
    file = read_packaged_toml(f"planner/memory/{versions[max(older, default=min(versions))]}")
    groups = {name: text.split(",") for name, text in file["groups"].items()}
    shapes = defaultdict[str, list[tuple[SavedTensor, str]]](list)
    for text, names in file["shapes"].items():
        shape, _, condition = text.partition("?")
        for name in names:
            shapes[name].append((parse_tensor(Item(name, shape)), condition))
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


@lru_cache(maxsize=1024)
def _select_names(table: str, name: str, true: frozenset[str]) -> list[str]:
    """Return the names in one list of the tables of compiled layers whose conditions hold. table, name: keys of the
    list, such as "saved" and "decoder"; true: names that hold in conditions, such as "gated"."""
    return list[str](select(_read_tables()[table][name], true, _read_tables()["groups"]))


@lru_cache(maxsize=256)
def _select_kernels(name: str, true: frozenset[str]) -> list[tuple[str, tuple[str, ...], tuple[Item, ...]]]:
    """Return the kernels of one list in the tables of compiled layers whose conditions hold, without the buffers whose
    conditions do not hold. name: the list, such as "attention"; true: names that hold in conditions, such as "gated".

    A kernel is (verb, names of the buffers that it reads, buffers that it writes). Verb: "" for a kernel of inductor;
    "call", "tiles" or "ring" for an operator that inductor does not fuse. The value of a written buffer is the name of
    the buffer whose memory it overwrites ("": newly allocated memory)."""
    tables = _read_tables()
    for each, condition in tables["conditions"].items():  # in order: conditions may contain earlier ones
        if holds(condition, true):
            true |= {each}
    found = []
    for text in tables["kernels"][name]:
        line = _KERNEL.fullmatch(text)
        assert line is not None, text
        condition, verb, *buffers = (part or "" for part in line.groups())
        if not holds(condition, true):
            continue
        if verb == "use":
            found += _select_kernels(buffers[0], true)
            continue
        reads, writes = (select_items(part.split(","), true, tables["groups"]) for part in buffers)
        found.append((verb, tuple(item.name for item in reads), writes))
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
        gradients, results: Names of the output gradients that the backward receives, and of the buffers that the
            forward returns.
        orders: Possible orders of the kernels of a mixture's backward.
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
        self.saved = _select_names("saved", "encoder" if self.name == "encoder" else "decoder", properties)
        self.true = properties | set(self.saved)
        names = (_select_names("block", name, self.true) for name in ("gradients", "results", "orders"))
        self.gradients, self.results, self.orders = names

    @cached_method
    def entry(self, name: str) -> SavedTensor:
        """Return the buffer called `name` with its shape and element type."""
        found: SavedTensor = next(one for one, condition in self.tables["shapes"][name] if holds(condition, self.true))
        return found.compute(self.dimensions)

    def bytes(self, name: str) -> int:
        """Return the bytes of the buffer called `name`, such as "attention.qkv.output"."""
        entry = self.entry(name)
        return math.prod(entry.shape) * ITEM_BYTES[element_types(self.batch.dtype)[entry.kind]]

    @cached_property
    def backward_kernels(self) -> list[Kernel]:
        """Kernels of the backward in order, recomputed kernels included. Inductor may order the kernels of a mixture of
        experts in several ways; the order with the lowest memory peak is returned."""
        found = [self._kernels(f"{self.name}_backward", order) for order in self.orders or [""]]
        given = {name: self.bytes(name) for name in (INPUT, GRADIENT, *self.saved)}

        def compute_peak(kernels: list[Kernel]) -> Number:
            """Return the peak bytes of kernels in the given order, without temporaries inside them."""
            plain = [each._replace(inside=()) for each in kernels]
            return find_peak(plain, given, {INPUT_GRADIENT, *list_weight_gradients(kernels)}).bytes

        return found[0] if len(found) == 1 else min(found, key=compute_peak)

    def _kernels(self, name: str, order: str = "") -> list[Kernel]:
        """Return the kernels of one list in the tables, such as "attention", that this layer has. order: name of an
        order of kernels in a mixture's backward, tested by conditions; "": not such a list."""
        found = []
        for verb, reads, writes in _select_kernels(name, self.true | {order}):
            made = tuple(self._buffer(item.name) for item in writes)
            label = "attention" if verb == "ring" else made[0].name if made else ", ".join(reads)
            inside = attention_workspaces(self.batch, self.kind) if verb in ("ring", "tiles") else ()
            over = {item.name: item.value for item in writes if item.value}
            found.append(Kernel(label, reads, made, over, tuple(inside), verb in ("call", "tiles")))
        return found

    def _buffer(self, name: str) -> Allocation:
        """Return the memory buffer called `name`."""
        dtype = element_types(self.batch.dtype)[self.entry(name).kind]
        category = "gradients" if name.startswith("weight gradient") else "activations"
        return Allocation(category, name, dtype=dtype, bytes=self.bytes(name))

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
            returned |= list_weight_gradients(kernels)
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
            left.append(Allocation("workspace", "weight gradient", bytes=self._weight_gradients()))
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
    def operands(self) -> dict[str, list[str]]:
        """{linear layer, such as "mlp.up": [name of its input, name of the gradient of its output]}, the operands of
        its queued weight gradient, in the order in which these are computed."""
        return {name: _select_names("operands", name, self.true) for name in self.tables["operands"]}

    def _weight_gradients(self) -> int:
        """Return the peak bytes while queued weight gradients are computed one after another. Each frees its operands
        when it is done."""
        most = used = 0
        for name, pair in self.operands.items():
            most = max(most, self.bytes(f"weight gradient of {name.rpartition('.')[2]}") - used)
            used += sum(self.bytes(each) for each in pair if each != GRADIENT)
        return most


def list_weight_gradients(kernels: Sequence[Kernel]) -> set[str]:
    """Return the names of the weight gradients that kernels compute."""
    return {made.name for kernel in kernels for made in kernel.makes if made.category == "gradients"}
