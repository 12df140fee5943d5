"""Transformer block compiled by torch.compile (inductor), on one rank: the activations that its forward saves, and the
kernels of its forward and backward with the buffers that they read and write, by the tables of
`compiled_blocks.torch-*.toml`."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Collection, Iterator
from functools import cache, cached_property
from importlib import metadata, resources
from typing import Any, NamedTuple

from meshwright.planner.cost.micro_batch import ITEM_BYTES, MicroBatch, layer_kind
from meshwright.planner.cost.operators import SavedTensor
from meshwright.planner.memory.inductor import Buffer, Kernel, find_peak
from meshwright.planner.memory.temporaries import ring_backward, tiled_backward

GRADIENT, INPUT, INPUT_GRADIENT = "gradient of the output", "input", "gradient of the input"

RANDOM_STATE = 632
"""Numbers of eight bytes in the state of a CPU's random numbers."""

_FILE = re.compile(r"compiled_blocks\.torch-(\d+)\.(\d+)\.toml")


def can_predict_compiled(batch: MicroBatch) -> bool:
    """Return True if the memory of the model's layers compiled by torch.compile can be predicted; False for norms after
    attention, MLP or the rotary rotation, for experts with weighted inputs, and with an adapter."""
    config = batch.config
    unknown = config.post_norms or config.rotated_norm or config.routed_input
    return not unknown and config.adapter is None


# --- the tables


class _BufferUse(NamedTuple):
    """A buffer in a kernel's list. name: its name; over: name of the buffer whose memory it overwrites, "" for none;
    condition: condition on the layer under which the list includes it, "" for always."""

    name: str
    over: str
    condition: str


class _TableLine(NamedTuple):
    """A line of the table of kernels. condition: condition under which it applies; use: name of another list of kernels
    to include, "" for a kernel; verb: "" (a kernel of inductor), "call", "tiles" or "ring" (an operator that inductor
    does not fuse); reads, writes: buffers."""

    condition: str
    use: str
    verb: str
    reads: tuple[_BufferUse, ...]
    writes: tuple[_BufferUse, ...]


class _Tables(NamedTuple):
    """Content of a file compiled_blocks.torch-*.toml.

    Attributes:
        version: Version of torch, such as "2.13".
        conditions: Named conditions on a layer.
        saved: Activations that the forward saves, for "encoder" and "decoder".
        kernels: Lists of kernels, by name such as "dense_backward".
        shapes: (element type, size, size ...) of each buffer.
    """

    version: str
    conditions: dict[str, str]
    saved: dict[str, tuple[_BufferUse, ...]]
    kernels: dict[str, tuple[_TableLine, ...]]
    shapes: dict[str, tuple[str, ...]]


@cache
def _tables() -> _Tables:
    """Return the tables for the installed version of torch: the latest that is not newer, else the oldest."""
    folder = resources.files("meshwright.planner.memory")
    versions = {(int(found[1]), int(found[2])): each for each in folder.iterdir() if (found := _FILE.match(each.name))}
    older = [version for version in versions if version <= (installed_torch() or version)]
    file = tomllib.loads(versions[max(older, default=min(versions))].read_text(encoding="utf-8"))
    groups: dict[str, str] = file["groups"]

    def items(text: str) -> tuple[_BufferUse, ...]:
        """Parse a comma-separated list of buffers, in which `@name ? condition` is a group."""
        found = []
        for each in filter(None, (part.strip() for part in text.split(","))):
            name, _, condition = (part.strip() for part in each.partition("?"))
            if name.startswith("@"):
                found += [
                    one._replace(condition=_join_conditions(condition, one.condition))
                    for one in items(groups[name[1:]])
                ]
            else:
                name, _, over = (part.strip() for part in name.partition(" = "))
                found.append(_BufferUse(name, over, condition))
        return tuple(found)

    def line(text: str) -> _TableLine:
        """Parse a kernel, `[condition:] [verb] reads -> writes` or `[condition:] use list`."""
        *condition, kernel = re.split(r":\s*", text, maxsplit=1)
        found = re.match(r"(use|call|tiles|ring) (.*)", kernel, re.DOTALL)
        verb, rest = (found[1], found[2]) if found else ("", kernel)
        if verb == "use":
            return _TableLine("".join(condition), rest, verb, (), ())
        reads, _, writes = rest.partition("->")
        return _TableLine("".join(condition), "", verb, items(reads), items(writes))

    return _Tables(
        file["torch"], file["conditions"],
        {kind: items(",".join(names)) for kind, names in file["saved"].items()},
        {kind: tuple(map(line, lines)) for kind, lines in file["kernels"].items()},
        {name: tuple(shape.split()) for shape, names in file["shapes"].items() for name in names},
    )  # fmt: skip


def _join_conditions(first: str, second: str) -> str:
    """Return the condition that holds if the conditions `first` and `second` both do ("" always holds)."""
    if not (first and second):
        return first or second
    return " | ".join(f"{one} & {other}" for one in first.split("|") for other in second.split("|"))


@cache
def _alternatives(condition: str) -> tuple[tuple[tuple[str, bool], ...], ...]:
    """Parse a condition such as "a & !b | c" into alternatives, of which one must hold; each is a list of (name,
    required value) pairs that must all hold."""
    return tuple(
        tuple((name.strip().lstrip("!"), not name.strip().startswith("!")) for name in every.split("&"))
        for every in condition.split("|")
    )


def _holds(condition: str, true: Collection[str]) -> bool:
    """Return True if a condition such as "a & !b | c" holds; "" always does. true: names that are true."""
    return not condition or any(
        all((name in true) == value for name, value in every) for every in _alternatives(condition)
    )


def installed_torch() -> tuple[int, int] | None:
    """Return (major, minor) version of the installed torch, without importing it; None if there is none."""
    try:
        found = re.match(r"(\d+)\.(\d+)", metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return None
    return None if found is None else (int(found[1]), int(found[2]))


def version_warning() -> str | None:
    """Return a warning if the tables of compiled kernels are of another version of torch than the installed one; else
    None."""
    here, version = installed_torch(), _tables().version
    if here is None or version == "{}.{}".format(*here):
        return None
    return f"compiled blocks: kernels are those of torch {version}, not of the installed {here[0]}.{here[1]}"


# --- a block


class CompiledBlock:
    """A transformer layer compiled by torch.compile on one rank, with its kernels and buffers; if its experts are
    expert-parallel, only the part before the mixture, which is not compiled.

    batch: sizes of a micro-batch on the rank; layer: index of the layer. Buffers have names such as
    "attention.qkv.output".
    """

    def __init__(self, batch: MicroBatch, layer: int) -> None:
        self.batch, self.kind = batch, layer_kind(batch.config, layer)
        self.tables = _tables()
        self.name = "dense"
        if batch.config.encoder:
            self.name = "encoder"
        elif self.kind.mixed:
            self.name = "front" if batch.expert_parallel else "mixture"
        self.cuda = batch.device == "cuda" and not batch.ring  # PyTorch's CUDA kernels compute attention
        self.repeated = batch.repeats(self.kind.window)
        self.recompute = batch.layout.recompute
        self.summed = batch.layout.tp > 1
        self.gathers = self.summed and batch.layout.tensor_sequence_parallel
        self.sizes = self._sizes()
        properties = self._properties()
        listed = self.tables.saved["encoder" if self.name == "encoder" else "decoder"]
        self.saved = [item.name for item in listed if _holds(item.condition, properties)]
        """Names of the activations that the forward saves for the backward, without the block's input; under full
        recompute, those that the recomputed forward saves."""
        self.true = {*properties, *self.saved}

    def _properties(self) -> set[str]:
        """Return the names of the layer's properties that are true, such as "rotated"; conditions in the tables are
        made of these names."""
        at, config, kind = self.batch, self.batch.config, self.kind
        every = {
            self.name: True, self.recompute: True, config.router: True, "summed": self.summed, "gathers": self.gathers,
            "ring": at.ring, "ulysses": at.ulysses, "cuda": self.cuda, "narrow": at.narrow,
            "rotated": kind.rotates or config.query_key_norm, "query_key_norm": config.query_key_norm,
            "repeated": self.repeated, "dense_mask": self.cuda and at.dense_mask(kind.window), "gated": config.gated,
            "shared": config.shared_intermediate > 0, "shared_gate": config.shared_gate,
            "normalised": config.normalise_choice, "router_loss": config.router_loss, "router_bias": config.router_bias,
            "wide_router": self._wide_router,
        }  # fmt: skip
        return {name for name, value in every.items() if value}

    @property
    def _wide_router(self) -> bool:
        """True if the router multiplies float32 copies of its input and weight."""
        return self.batch.config.router == "sigmoid" and self.batch.narrow

    def _sizes(self) -> dict[str, int]:
        """Return {name: size}: the dimensions of which the shapes in the tables consist."""
        at, config = self.batch, self.batch.config
        heads, kv_heads, length = at.heads, at.kv_heads, at.tokens
        if at.ulysses:  # those of attention, after the all-to-all
            heads, kv_heads, length = heads // at.cp, kv_heads * at.key_value_copies // at.cp, at.sequence
        padded = self.cuda and (at.dense_mask(self.kind.window) or not at.narrow)
        width, expert, shared = (
            columns // at.layout.tp
            for columns in (config.intermediate, config.expert_intermediate, config.shared_intermediate)
        )
        return {
            "1": 1, "2": 2, "rows": at.rows, "slice": at.slice, "tokens": at.tokens, "all_tokens": at.rows * at.tokens,
            "mixture_tokens": at.slice if self.name == "front" else at.tokens, "hidden": config.hidden,
            "statistics": 2 if config.norm == "layernorm" else 1, "known": 2 if at.narrow else 1,
            "qkv": at.qkv_width, "heads": at.heads, "kv_heads": at.kv_heads, "head": config.head_dim,
            "inner": at.heads * config.head_dim, "core_heads": heads, "core_tokens": length,
            "core_all": heads + 2 * kv_heads, "core_keys": heads if self.repeated else kv_heads,
            "lines": -(-length // 32) * 32 if padded else length, "mask_rows": at.rows if at.masked else 1,
            "random_state": RANDOM_STATE, "up": width * (2 if config.gated else 1), "width": width,
            "experts": config.experts, "chosen": config.experts_per_token,
            "copies": at.rows * at.tokens * config.experts_per_token, "expert_up": 2 * expert, "expert_width": expert,
            "shared_up": 2 * shared, "shared_width": shared,
        }  # fmt: skip

    def entry(self, name: str) -> SavedTensor:
        """Return the buffer called `name` with its shape and element type."""
        kind, *sizes = self.tables.shapes[name]
        if kind == "router":
            kind = "x" if self.batch.config.router == "softmax" else "wide"
        elif kind == "product":
            kind = "wide" if self._wide_router else "x"
        return SavedTensor(name, tuple(self.sizes[size] for size in sizes), kind)

    def bytes(self, name: str) -> int:
        """Return the bytes of the buffer called `name`, such as "attention.qkv.output"."""
        entry = self.entry(name)
        each = {
            "x": self.batch.itemsize,
            "wide": self.batch.wide,
            "index": ITEM_BYTES["int64"],
            "int32": ITEM_BYTES["int32"],
        }
        return math.prod(entry.shape) * each[entry.kind]

    @property
    def gradients(self) -> tuple[str, ...]:
        """Names of the output gradients that the backward receives."""
        return (GRADIENT, "gradient of the mixture's input") if self.name == "front" else (GRADIENT,)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the buffers that the forward returns."""
        return ("input of the sum", "mlp.input") if self.name == "front" else ("result",)

    def forward(self) -> list[Kernel]:
        """Return the kernels of the forward in order."""
        return self._kernels(self.name)

    @cached_property
    def backward(self) -> list[Kernel]:
        """Kernels of the backward in order, recomputed ones included. For a mixture of experts, whose kernels inductor
        may order in several ways, the order with the lowest memory peak."""
        orders = [""]
        if self.name == "mixture" and "mlp.input" in self.saved:
            orders = ["at_once"]
        elif self.name == "mixture":
            orders = ["shared_first"] * (not self._wide_router)
            orders += ["experts_first"] * (self._wide_router or "shared" in self.true)
        found = [self._kernels(f"{self.name}_backward", order) for order in orders]
        return found[0] if len(found) == 1 else min(found, key=self._peak)

    def _peak(self, kernels: list[Kernel]) -> int:
        """Return the peak bytes of backward kernels in the given order, without temporaries inside calls."""
        given = {name: self.bytes(name) for name in (INPUT, GRADIENT, *self.saved)}
        weights = {made.name for kernel in kernels for made in kernel.makes if made.category == "gradients"}
        return find_peak([each._replace(inside=()) for each in kernels], given, {*weights, INPUT_GRADIENT}).bytes

    def _kernels(self, name: str, order: str = "") -> list[Kernel]:
        """Return the kernels listed under `name` in the tables, such as "attention", that apply to this layer. order:
        name of the order of kernels in a mixture's backward, which conditions may contain; "" for none."""
        true = {*self.true, order}
        for each, condition in self.tables.conditions.items():
            if _holds(condition, true):
                true.add(each)
        return list(self._listed(name, true))

    def _listed(self, name: str, true: Collection[str]) -> Iterator[Kernel]:
        """Yield the kernels of a list in the tables, included lists expanded. true: names of conditions that hold."""
        for line in self.tables.kernels[name]:
            if not _holds(line.condition, true):
                continue
            if line.use:
                yield from self._listed(line.use, true)
                continue
            reads = tuple(item.name for item in line.reads if _holds(item.condition, true))
            written = [item for item in line.writes if _holds(item.condition, true)]
            made = tuple(self._buffer(item.name, line.verb in ("call", "tiles")) for item in written)
            label = "attention" if line.verb == "ring" else made[0].name if made else ", ".join(reads)
            over = {item.name: item.over for item in written if item.over}
            yield Kernel(label, reads, made, over, tuple(self._inside(line.verb)))

    def _buffer(self, name: str, operator: bool) -> Buffer:
        """Return the memory buffer called `name`. operator: True if a custom operator returns it, so that inductor does
        not reuse its memory."""
        kind = self.entry(name).kind
        kind = "wide" if kind == "x" and not self.batch.narrow else kind
        category = "gradients" if name.startswith("weight gradient") else "activations"
        return Buffer(name, kind, self.bytes(name), category, operator)

    def _inside(self, verb: str) -> Iterator[Any]:
        """Yield the temporary allocations inside an operator that inductor calls. verb: "ring" or "tiles" for
        attention; others have none."""
        batch = self.batch
        if verb == "ring":
            yield from ring_backward(batch)
        elif verb == "tiles" and not self.cuda:
            heads = self.sizes["core_heads"]
            yield from tiled_backward(batch, heads, (self.sizes["core_all"] - heads) // 2, self.kind)
