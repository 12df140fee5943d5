"""Seconds of operations and collectives on a machine that `meshwright probe` measured, interpolated from its curves.

Matrix products are looked up by shape and pass, elementwise operations by kind (else by bytes), attention by the bytes
of its scores, collectives by the bytes of the vector and the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from meshwright.planner.cost.cached import cached_method
from meshwright.planner.cost.micro_batch import Number
from meshwright.planner.cost.operators import FLASH_BACKWARD, Operation
from meshwright.planner.hardware.measured import Curve, Measured, Products
from meshwright.spec.policy import SLICE_LOGITS, TILE_QUERIES

LOSS_SLICE_BYTES = 2.0 * 4 * SLICE_LOGITS
"""Bytes read and written by one kernel of the loss on CPUs, which processes a slice of the logits that fits into the
caches."""

SCORE_BYTES = 4
HEAD_SIZES = (32, 128)
"""Head sizes at which attention is measured; the time of other sizes is interpolated linearly."""

RING_PIECES = (32, 128)
"""Tokens of the KV blocks of ring attention that are measured. The seconds of a score are linear in the inverse of this
number, as results are merged once for each query and KV block (parallel/context.py)."""

BACKWARD = "-backward"

_FORMS = {"forward": "forward", "recompute": "forward", "input": "input-gradient", "weight": "weight-gradient"}


def attention_scores(queries: Number, keys_seen: Number, row: Number) -> Number:
    """Return the number of scores q·k that attention on a CPU computes. It works in tiles of queries: all queries of a
    tile compute scores for every key of the tile's last query, on average half a tile more than they attend to.

    queries: number of queries, over one or more heads; keys_seen: mean number of keys that a query attends to; row:
    tokens of the sequence."""
    return queries * (keys_seen + 0.5 * np.minimum(TILE_QUERIES, row))


def attention_name(head_size: int, piece: int | None = None) -> str:
    """Return the name under which the measured times of attention are stored, such as "attention-64" or "ring-64-128":
    a curve of seconds as a function of the bytes of float32 scores.

    head_size: elements of a head; piece: tokens of a KV block in ring attention, None without a ring.
    """
    return f"attention-{head_size}" if piece is None else f"ring-{head_size}-{piece}"


class MeasuredRates:
    """Predictor of an operation's seconds on a machine that `meshwright probe` measured, in one precision, while all
    ranks compute at once."""

    def __init__(self, measured: Measured, precision: str, eager: bool = True) -> None:
        """Prepare the predictions for a precision such as "bf16". eager: elementwise operations run as single kernels,
        which were measured one by one; False for compiled ones."""
        self._measured, self._precision, self._eager = measured, precision, eager
        starts = dict(measured.starts)
        # Overhead of autograd for a kernel: recording it in the forward, finding it in the backward. Devices to which
        # work is submitted asynchronously hide it.
        overhead = starts.get("differentiated_operation", 0.0) - 2 * starts.get("operation", 0.0)
        self.start = 0.0 if measured.copies else max(0.0, overhead / 2)

    @classmethod
    def of(cls, measured: Measured | None, precision: str, eager: bool) -> MeasuredRates | None:
        """Return the rates from which kernel times on a measured machine are predicted. None if its matrix products or
        memory-bound kernels were not measured in this precision.

        measured: measurements of the machine; None: there are none. precision: such as "bf16". eager: True if
        elementwise operations run as single kernels, False if torch.compile fuses them."""
        if measured is None or measured.product(precision) is None:
            return None
        found = cls(measured, precision, eager)
        return found if found.one_pass("add") is not None else None

    def seconds(self, operation: Operation) -> Number | None:
        """Return the seconds of all `count` calls of an operation; None if operations of its kind were not measured.
        The result is a number, or an array over layouts if the operation's sizes are arrays."""
        if operation.kind == "product":
            assert operation.shape is not None
            return operation.count * (
                self._products(_FORMS[operation.phase]).seconds_at(*_linear_sizes(operation)) + self.start
            )
        if operation.kind == "float32 product":
            return None
        if operation.kind == "attention":
            return self._attention(operation)
        name = operation.name.rpartition(".")[2] + (BACKWARD if operation.phase == "input" else "")
        own = self.one_pass(name) if self._eager else None
        if own is not None:  # with all its overhead
            return operation.count * own.seconds_at(operation.bytes)
        # A fused activation forms exponentials as the plain one does: processors are held up by these, not by memory.
        fused = self.one_pass("silu") if name.startswith("activation") and not self._measured.copies else None
        curve = fused or self.one_pass("add")
        assert curve is not None
        if operation.kind == "loss" and not self._measured.copies:
            slices = np.maximum(1.0, operation.bytes / LOSS_SLICE_BYTES)
            return operation.count * slices * curve.seconds_at(operation.bytes / slices)
        return operation.count * (curve.seconds_at(operation.bytes) + self.start)

    @cached_method
    def one_pass(self, name: str) -> Curve | None:
        """Return the measured curve of a memory-bound kernel: seconds as a function of bytes read and written. It is in
        this precision, or in float32 if only this was measured; None if neither was. name: such as "add"."""
        return self._measured.one_pass(name, self._precision) or self._measured.one_pass(name, "fp32")

    @property
    def memory(self) -> float:
        """Memory bandwidth for large tensors, such as optimizer state, in bytes a second."""
        curve = self._measured.one_pass("copy", "fp32") or self.one_pass("add")
        assert curve is not None
        return float(curve.sizes[-1] / curve.seconds_at(curve.sizes[-1]))

    def _products(self, form: str) -> Products:
        """Return the measured matrix products of one pass of linear layers. form: the pass, "forward", "input-gradient"
        or "weight-gradient"; the forward's products are returned for a pass that was not measured."""
        found = self._measured.product(self._precision, form) or self._measured.product(self._precision)
        assert found is not None
        return found

    def _attention(self, operation: Operation) -> Number | None:
        """Return the seconds of all calls of an attention operation, forward or backward; None if attention was not
        measured."""
        assert operation.shape is not None
        way = BACKWARD if operation.phase == "input" else ""
        row, keys_seen, size = operation.shape
        queries = operation.flops / (4.0 * keys_seen * size * (FLASH_BACKWARD if way else 1.0))  # of all heads
        scores = SCORE_BYTES * attention_scores(queries, keys_seen, row)
        if operation.name.endswith(".ring"):
            small, large = (self._of_heads(scores, size, way, piece) for piece in RING_PIECES)
            if small is not None and large is not None:
                share = (1 / row - 1 / RING_PIECES[1]) / (1 / RING_PIECES[0] - 1 / RING_PIECES[1])
                return operation.count * np.maximum(0.5 * large, large + share * np.maximum(0.0, small - large))
        seconds = self._of_heads(scores, size, way)
        return None if seconds is None else operation.count * seconds

    def _of_heads(self, scores: Number, size: Number, way: str, piece: int | None = None) -> Number | None:
        """Return the seconds of attention with heads of `size` elements, interpolated between the two nearest measured
        head sizes; None if attention was not measured.

        scores: bytes of all scores; way: "" for the forward, "-backward" for the backward; piece: tokens of a KV block
        in ring attention, None without a ring."""
        narrow, wide = (self.one_pass(attention_name(each, piece) + way) for each in HEAD_SIZES)
        if narrow is None or wide is None:
            return None
        low, high = narrow.seconds_at(scores), wide.seconds_at(scores)
        slope = np.maximum(0.0, high - low) / (HEAD_SIZES[1] - HEAD_SIZES[0])
        return np.maximum(0.25 * low, low + slope * (size - HEAD_SIZES[0]))


def _linear_sizes(operation: Operation) -> tuple[Number, Number, Number]:
    """Return (tokens, outputs, inputs) of the linear layer of which `operation` is a matrix product (forward, input
    gradient or weight gradient)."""
    assert operation.shape is not None
    rows, columns, inner = (np.maximum(1.0, size) for size in operation.shape)
    if operation.phase == "input":
        return rows, inner, columns
    return (inner, rows, columns) if operation.phase == "weight" else (rows, columns, inner)


# --- between ranks


class MeasuredCost(NamedTuple):
    """Seconds of a collective as a function of the bytes of the full vector. curve: measured seconds; scale: factor on
    them."""

    curve: Curve
    scale: float

    def seconds_at(self, size: Number) -> Number:
        """Return the seconds of the collective on a vector of `size` bytes (a number or an array); 0 for size 0."""
        return self.scale * self.curve.seconds_at(size) * (np.asarray(size) > 0)


def measured_cost(measured: Measured, operation: str, ranks: int, nodes: int) -> MeasuredCost | None:
    """Return the cost function of a collective among `ranks` ranks on `nodes` nodes, scaled from the nearest measured
    number of ranks; None if it was not measured. operation: such as "all-reduce"."""
    place = "inside" if nodes == 1 else "across" if ranks == nodes else "world"
    name = "send-receive" if operation == "send" else operation
    found = [each for each in measured.collectives if (each.operation, each.place) == (name, place)]
    if not found:
        return None
    nearest = min(found, key=lambda each: (abs(math.log(each.ranks / ranks)), each.ranks))
    # A rank sends (n - 1) / n of the vector to the n ranks of its group, in an all-reduce twice.
    sent, measured_sent = ((size - 1) / size for size in (ranks, nearest.ranks))
    return MeasuredCost(nearest.curve, 1.0 if operation == "send" else sent / measured_sent)


class CostByLayout:
    """Seconds of a collective as a function of its bytes, for many candidate layouts at once. costs: one function for
    each distinct process group; which: index into `costs` for each candidate layout, [candidates]."""

    def __init__(self, costs: Sequence[Any], which: Any) -> None:
        self._costs, self._which = costs, which

    def seconds_at(self, size: Any) -> Any:
        """Return the seconds of the collective for each candidate layout: [..., candidates]. size: bytes of the full
        vector, a number or an array [..., candidates]."""
        sizes = np.asarray(size, dtype=np.float64)
        sizes = np.broadcast_to(sizes, np.broadcast_shapes(sizes.shape, self._which.shape))
        seconds = np.zeros(sizes.shape)
        for number in np.unique(self._which):
            ways = self._which == number
            seconds[..., ways] = self._costs[number].seconds_at(sizes[..., ways])
        return seconds
