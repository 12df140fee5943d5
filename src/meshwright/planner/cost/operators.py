"""Operators of a transformer: what each computes, moves, sends, saves for the backward and holds as parameters.

They are rows of `operators.toml`, from which `blocks` lists those of a layer, of the embedding and of the head. FLOPs,
times, memory, bytes on the wire and numbers of parameters are read from these lists: `operations`, `communication`,
`traffic`, `memory/saved`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from functools import cache, cached_property
from typing import Any, Literal, NamedTuple

from meshwright.planner.cost.engines import Fusion
from meshwright.planner.cost.micro_batch import MicroBatch, Number
from meshwright.toml import read_packaged_toml

Phase = Literal["forward", "recompute", "input", "weight"]
"""Forward; recomputed forward; gradients of inputs; gradients of weights."""

Collective = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]

FLASH_BACKWARD = 2.5
"""Matrix products in a flash kernel's backward for each one in its forward: five to two, as the backward computes the
scores again (Dao et al. 2022, arXiv:2205.14135, algorithm 4)."""

WIDE = 4
"""Bytes of a float32 value."""

Row = Mapping[str, Any]
"""Row of a table of `operators.toml`."""


class Operation(NamedTuple):
    """One kernel of an operator in one phase (forward or backward pass), called `count` times.

    Attributes:
        name: Such as "attention.qkv".
        kind: "product" (matrix product), "float32 product" (matrix product in float32 whatever the model's type),
            "attention" (flash kernel), "elementwise", "lookup" or "loss".
        phase: "forward", "recompute", "input" (gradients of inputs) or "weight" (gradients of weights).
        flops: FLOPs of matrix products in one call, 2 per multiply-add.
        bytes: Bytes read and written by one call.
        shape: (M, N, K) of a matrix product; of a flash kernel (queries, mean number of keys per query, elements of a
            head); None for other kinds.
        count: Number of calls.
    """

    name: str
    kind: Literal["product", "float32 product", "attention", "elementwise", "lookup", "loss"]
    phase: Phase
    flops: Number
    bytes: Number
    shape: tuple[Number, Number, Number] | None = None
    count: Number = 1.0


class SavedTensor(NamedTuple):
    """A tensor that the forward saves for the backward in the engine `meshwright`. name: such as "mlp.up.input"; shape:
    sizes on this rank; kind: element type, "x" (type of activations), "wide" (at least float32), "index" (int64),
    "int32" or "bool"."""

    name: str
    shape: tuple[Number, ...]
    kind: str

    def compute(self, dimensions: Mapping[str, Number]) -> SavedTensor:
        """Return a copy in which each size of the shape is a number. Before, sizes are text, as in the planner's
        tables, such as "2 tokens". dimensions: {name or formula of a size: value}."""
        return SavedTensor(self.name, tuple([dimensions[axis] for axis in self.shape]), self.kind)


class CollectiveCall(NamedTuple):
    """Equal collective calls of an operator in one phase.

    Attributes:
        part: Component of the step time to which the calls count: "tensor", "context" or "expert".
        axis: Axis of the layout whose ranks take part; "ring": messages between neighbours in cp.
        operation: Collective such as "all-reduce", or "send".
        sites: (call site in `comm/`, bytes of the full vector) of each vector that one call carries.
        phase: "forward", "input" (input gradients), or "recompute" where `timed_calls` repeats the call.
        count: Number of calls.
        again: How often activation checkpointing repeats the calls: 0 or 1, an array for many layouts.
        overlaps: Computation that overlaps the calls: "attention" of the same layer; "weight": weight gradients;
            "product": the matrix product before or after the call, in slices; "shared": the shared expert, in the same
            phase. None: the calls are exposed.
        timed: False for messages of a few bytes a token, which the time model leaves out.
    """

    part: str
    axis: str
    operation: Collective
    sites: tuple[tuple[str, Number], ...]
    phase: Phase = "forward"
    count: Number = 1
    again: Number = 0
    overlaps: Literal["attention", "weight", "product", "shared"] | None = None
    timed: bool = True

    @property
    def size(self) -> Number:
        """Bytes of the full vector of one call, summed over its sites."""
        return sum(size for _, size in self.sites)


def in_eight_bits(name: str) -> bool:
    """Return True if fp8 training computes the matrix product `name`, such as "attention.qkv", in fp8. These are the
    linear layers of transformer layers. Attention's own products, routers and the head stay in 16 bits (as in
    Transformer Engine, and in torchao as torchtitan uses it)."""
    return name in ("attention.qkv", "attention.output") or name.endswith((".up", ".down", "_up"))


class MemoryAccess(NamedTuple):
    """Memory accesses of an elementwise operation in one pass. kernels: number of kernels; narrow: values of the
    model's type that are read or written, per element; wide: the same number for float32 values."""

    kernels: float
    narrow: float
    wide: float = 0.0

    def bytes(self, itemsize: int) -> float:
        """Return the bytes read and written per element. itemsize: bytes of a value in the model's type."""
        return self.narrow * itemsize + self.wide * WIDE


@cache
def elementwise_traffic(operation: str, fusion: Fusion = "eager") -> tuple[MemoryAccess, MemoryAccess]:
    """Return the memory accesses of an elementwise operation in (forward, backward). operation: key of
    elementwise.toml, such as "rmsnorm"; fusion: "eager" (one kernel per operation), "kernels" (hand-fused) or
    "compiled" (torch.compile)."""
    table = read_packaged_toml("planner/cost/elementwise.toml")[operation]
    forward, backward = table.get(fusion) or table["any"]
    return MemoryAccess(*forward), MemoryAccess(*backward)


def elementwise_kernels(batch: MicroBatch, row: Row, dimensions: Mapping[str, Number]) -> Iterator[Operation]:
    """Yield the kernels of an elementwise operation, forward and backward, or in the row's phase alone. row: its row of
    [kernels] in `operators.toml`; dimensions: {name or formula of a size: value}."""
    engine, fused = batch.engine, batch.engine.fuses_gates or batch.engine.fusion != "kernels"
    fusion = {"activation": engine.fusion if fused else "eager", None: engine.fusion}
    named = row.get("fusion")
    elements, count = dimensions[row["elements"]], dimensions[row["count"]]
    phases: tuple[Phase, ...] = ("forward", "input")
    for phase, access in zip(phases, elementwise_traffic(row["work"], fusion.get(named, named)), strict=True):
        moved = access.bytes(batch.itemsize) * elements
        if access.narrow + access.wide and row.get("phase", phase) == phase:
            kernels = max(access.kernels, 1.0)
            yield Operation(row["name"], "elementwise", phase, 0.0, moved / kernels, None, count * kernels)


PARTS = {"tp": "tensor", "cp": "context", "ring": "context", "ep": "expert", "etp": "expert"}
"""Part of the step time to which a collective over an axis counts, unless its row names another."""


class Operator:
    """An operator of a transformer on one rank, such as a linear layer or a norm, with its kernels, tensors and
    collectives. They are computed from one row of the table `operators.toml`, each attribute on first use.

    row: the parsed row; batch: sizes of the micro-batch; dimensions: {name or formula of a size: value} of the layer.

    Attributes:
        name: Such as "attention.qkv".
        operations: Kernels in forward and backward, without recomputation.
        saved: Tensors that the forward saves for the backward without recompute.
        kept: Tensors that the forward saves under selective recompute.
        collectives: Collective calls.
        parameters: Numbers of (dense, expert-parallel) parameters on this rank.
    """

    def __init__(self, row: Row, batch: MicroBatch, dimensions: Mapping[str, Number]) -> None:
        self.name: str = row["name"]
        self._row, self._batch, self._dimensions = row, batch, dimensions

    def replace(self, **attributes: Any) -> Operator:
        """Return a copy with other values of the given attributes, such as `saved`."""
        found = copy(self)
        found.__dict__.update(attributes)
        return found

    @cached_property
    def operations(self) -> tuple[Operation, ...]:
        """Kernels in forward and backward, without recomputation."""
        sizes, found = self._dimensions, list[Operation]()
        for row in self._row["kernels"]:
            if "work" in row:
                found += elementwise_kernels(self._batch, row, sizes)
                continue
            shape: Any = tuple([sizes[axis] for axis in row["shape"]]) or None
            multiplies = row["kind"].endswith("product")
            flops = math.prod(shape, start=2.0) if multiplies else sizes[row["flops"]]
            moved, count = sizes[row["bytes"]], sizes[row["count"]]
            found.append(Operation(row["name"], row["kind"], row["phase"], flops, moved, shape, count))
        if "repeat" in self._row:
            found.append(found[0]._replace(phase=self._row["repeat"]))
        return tuple(found)

    @cached_property
    def saved(self) -> tuple[SavedTensor, ...]:
        """Tensors that the forward saves for the backward without recompute."""
        return tuple([each.compute(self._dimensions) for each in self._row["saved"]])

    @cached_property
    def kept(self) -> tuple[SavedTensor, ...]:
        """Tensors that the forward saves under selective recompute."""
        return tuple([each.compute(self._dimensions) for each in self._row["kept"]])

    @cached_property
    def collectives(self) -> tuple[CollectiveCall, ...]:
        """Collective calls of forward and backward; without the repetitions under activation checkpointing."""
        found, sizes = [], self._dimensions
        for row in self._row["calls"]:
            again = sum(self._batch.recompute == mode for mode in row.get("again", ()))
            call = CollectiveCall(
                row.get("part", PARTS[row["axis"]]), row["axis"], row["operation"],
                tuple((name, sizes[size]) for name, size in row["sites"]), row.get("phase", "forward"),
                sizes[row.get("count", "1")], again, row.get("overlaps"), row.get("timed", True),
            )  # fmt: skip
            found.append(call)
            if "back" in row:
                (name, size), other = call.sites[0], row.get("back_bytes")
                back = ((f"{name}.backward", size if other is None else sizes[other]),)
                found.append(CollectiveCall(call.part, call.axis, row["back"], back, "input", overlaps=call.overlaps))
        return tuple(found)

    @cached_property
    def parameters(self) -> tuple[Number, Number]:
        """Numbers of (dense, expert-parallel) parameters on this rank."""
        numel = sum(self._dimensions[size] for size in self._row["parameters"])
        return (0, numel) if "owner" in self._row else (numel, 0)


def sum_parameters(operators: Iterable[Operator]) -> tuple[Number, Number]:
    """Return the numbers of (dense, expert-parallel) parameters of operators on this rank."""
    found = [operator.parameters for operator in operators]
    return sum(dense for dense, _ in found), sum(experts for _, experts in found)
