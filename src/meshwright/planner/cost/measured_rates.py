"""Seconds of operations and collectives on a machine that `probe` has measured, read from its curves.

A product takes what one of its shape and form took; elementwise work what the same work took, or a sum of as many
bytes; attention what its scores took; a collective what its vector took, among as many ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from meshwright.planner.cost.micro_batch import Number
from meshwright.planner.cost.operators import FLASH_BACKWARD, Operation
from meshwright.planner.hardware.measured import Curve, Measured, Products
from meshwright.program.durations import Floats
from meshwright.spec.policy import SLICE_LOGITS, TILE_QUERIES

LOSS_SLICE_BYTES = 2.0 * 4 * SLICE_LOGITS
"""Read and written by one kernel of the loss on processors, which works on so many logits at once that they stay in the
caches."""

SCORE_BYTES = 4
HEAD_SIZES = (32, 128)
"""Head sizes at which attention is measured; the time of other sizes is interpolated linearly."""

RING_PIECES = (32, 128)
"""Tokens of the pieces of rings that are measured. What a score costs in a ring lies on a line over the inverse of
that: results are merged for each query and piece of keys (parallel/context.py)."""

BACKWARD = "-backward"

_FORMS = {"forward": "forward", "recompute": "forward", "input": "input-gradient", "weight": "weight-gradient"}
_CALLED = {"send": "send-receive"}


def attention_scores(queries: float, keys_seen: float, row: float) -> float:
    """Return the number of scores that CPU attention computes for one or more heads. queries: number of queries;
    keys_seen: keys that each attends to on average; row: tokens of the sequence.

    This is half a tile of keys more for each query than it attends to, as all queries of a tile compute the scores of
    its last one.
    """
    return queries * (keys_seen + 0.5 * min(TILE_QUERIES, row))


def attention_name(head_size: int, piece: int | None = None) -> str:
    """Return the name of a measured attention curve, such as "attention-64"; the curve gives seconds as a function of
    the bytes of float32 scores.

    head_size: elements of a head; piece: tokens of a KV block in ring attention, None without a ring.
    """
    return f"attention-{head_size}" if piece is None else f"ring-{head_size}-{piece}"


class MeasuredRates:
    """Predictor of the seconds of operations on each rank of a machine that `meshwright probe` measured, in one
    precision, while all ranks compute."""

    def __init__(self, measured: Measured, precision: str, eager: bool = True) -> None:
        """Prepare the predictions for a precision such as "bf16". eager: elementwise operations run as single kernels,
        which were measured one by one; False for compiled ones."""
        self._measured, self._precision, self._eager = measured, precision, eager
        self._passes: dict[str, Curve | None] = {}
        starts = dict(measured.starts)
        # Overhead of autograd for a kernel: recording it in the forward, finding it in the backward. Devices to which
        # work is submitted asynchronously hide it.
        beside = starts.get("differentiated_operation", 0.0) - 2 * starts.get("operation", 0.0)
        self.start = 0.0 if measured.copies else max(0.0, beside / 2)

    @classmethod
    def of(cls, measured: Measured | None, precision: str, eager: bool) -> MeasuredRates | None:
        """Return the rates of a precision such as "bf16"; None if its matrix products or memory-bound kernels were not
        measured. eager: elementwise operations run as single kernels, not compiled."""
        if measured is None or measured.product(precision) is None:
            return None
        found = cls(measured, precision, eager)
        return found if found.one_pass("add") is not None else None

    def seconds(self, one: Operation) -> Number | None:
        """Return the seconds of all calls of an operation, of one layout or of an array of them; None if its kind was
        not measured."""
        numbers = one.flops, one.bytes, one.count, *(one.shape or ())
        if not any(isinstance(each, np.ndarray) for each in numbers):
            return self._seconds(one)
        found = []
        for flops, size, count, *shape in zip(*(each.tolist() for each in np.broadcast_arrays(*numbers)), strict=True):
            each = self._seconds(one._replace(flops=flops, bytes=size, count=count, shape=tuple(shape) or None))
            if each is None:
                return None
            found.append(each)
        return np.array(found)

    def _seconds(self, one: Operation) -> Number | None:
        """Return the seconds of all calls of an operation of one layout; None if its kind was not measured."""
        if one.kind == "product":
            assert one.shape is not None
            return one.count * (self._products(_FORMS[one.phase]).at(*_linear_sizes(one)) + self.start)
        if one.kind == "float32 product":
            return None
        if one.kind == "attention":
            return self._attention(one)
        name = one.name.rpartition(".")[2] + (BACKWARD if one.phase == "input" else "")
        own = self.one_pass(name) if self._eager else None
        if own is not None:  # with all that it costs beside its work
            return one.count * own.at(one.bytes)
        # A fused activation forms exponentials as the plain one does: processors are held up by these, not by memory.
        fused = self.one_pass("silu") if name.startswith("activation") and not self._measured.copies else None
        curve = fused or self.one_pass("add")
        assert curve is not None
        if one.kind == "loss" and not self._measured.copies:
            slices = one.bytes / LOSS_SLICE_BYTES
            return one.count * max(1.0, slices) * curve.at(one.bytes / max(1.0, slices))
        return one.count * (curve.at(one.bytes) + self.start)

    def one_pass(self, name: str) -> Curve | None:
        """Return the curve (seconds as a function of bytes) of a memory-bound kernel such as "add", in this precision,
        else in float32; None if neither was measured."""
        if name not in self._passes:
            own = self._measured.one_pass(name, self._precision)
            self._passes[name] = own or self._measured.one_pass(name, "fp32")
        return self._passes[name]

    @property
    def memory(self) -> float:
        """Memory bandwidth for large tensors, such as optimizer state, in bytes a second."""
        curve = self._measured.one_pass("copy", "fp32") or self.one_pass("add")
        assert curve is not None
        return curve.sizes[-1] / curve.at(curve.sizes[-1])

    def _products(self, form: str) -> Products:
        """Return the measured matrix products of a form ("forward", "input-gradient", "weight-gradient"), else those of
        the forward."""
        found = self._measured.product(self._precision, form) or self._measured.product(self._precision)
        assert found is not None
        return found

    def _attention(self, one: Operation) -> Number | None:
        """Return the seconds of all calls of an attention operation, forward or backward; None if attention was not
        measured."""
        assert one.shape is not None
        way = BACKWARD if one.phase == "input" else ""
        row, keys_seen, size = one.shape
        queries = one.flops / (4.0 * keys_seen * size * (FLASH_BACKWARD if way else 1.0))  # of all heads
        scores = SCORE_BYTES * attention_scores(queries, keys_seen, row)
        if one.name.endswith(".ring"):
            small, large = (self._of_heads(scores, size, way, piece) for piece in RING_PIECES)
            if small is not None and large is not None:
                share = (1 / row - 1 / RING_PIECES[1]) / (1 / RING_PIECES[0] - 1 / RING_PIECES[1])
                return one.count * max(0.5 * large, large + share * max(0.0, small - large))
        seconds = self._of_heads(scores, size, way)
        return None if seconds is None else one.count * seconds

    def _of_heads(self, scores: float, size: float, way: str, piece: int | None = None) -> float | None:
        """Return the seconds of attention, interpolated between the two measured head sizes; None if not measured.

        scores: bytes of its scores; size: elements of a head; way: "" for the forward, "-backward" for the backward;
        piece: tokens of a KV block in ring attention, None without a ring.
        """
        narrow, wide = (self.one_pass(attention_name(each, piece) + way) for each in HEAD_SIZES)
        if narrow is None or wide is None:
            return None
        low, high = narrow.at(scores), wide.at(scores)
        slope = max(0.0, high - low) / (HEAD_SIZES[1] - HEAD_SIZES[0])
        return max(0.25 * low, low + slope * (size - HEAD_SIZES[0]))


def _linear_sizes(one: Operation) -> tuple[float, float, float]:
    """Return (tokens, outputs, inputs) of the linear layer whose forward, input-gradient or weight-gradient product an
    operation is."""
    assert one.shape is not None
    rows, columns, inner = (max(1.0, size) for size in one.shape)
    if one.phase == "input":
        return rows, inner, columns
    return (inner, rows, columns) if one.phase == "weight" else (rows, columns, inner)


# --- between ranks


class MeasuredCost(NamedTuple):
    """Seconds of a collective as a function of bytes: a measured curve, scaled to a number of ranks. sizes: bytes of
    the full vector; seconds: for each size."""

    sizes: Floats
    seconds: Floats

    @classmethod
    def of(cls, curve: Curve, scale: float = 1.0) -> MeasuredCost:
        """Return the cost function of a measured curve, with its seconds multiplied by `scale`."""
        return cls(np.array(curve.sizes), scale * np.maximum.accumulate(curve.seconds))

    def at(self, size: Any) -> Any:
        """Return the seconds of the collective on a vector of `size` bytes (a number or an array), interpolated between
        measured sizes; beyond the largest, proportional to size."""
        beyond = np.maximum(1.0, np.asarray(size) / self.sizes[-1])
        seconds = np.interp(size, self.sizes, self.seconds) * beyond * (np.asarray(size) > 0)
        return seconds if np.ndim(size) else float(seconds)


def measured_cost(measured: Measured, operation: str, ranks: int, nodes: int) -> MeasuredCost | None:
    """Return the cost function of a collective among `ranks` ranks on `nodes` nodes, scaled from the nearest measured
    number of ranks; None if it was not measured. operation: such as "all-reduce"."""
    place = "inside" if nodes == 1 else "across" if ranks == nodes else "world"
    name = _CALLED.get(operation, operation)
    found = [each for each in measured.collectives if (each.operation, each.place) == (name, place)]
    if not found:
        return None
    nearest = min(found, key=lambda each: (abs(math.log(each.ranks / ranks)), each.ranks))
    if operation == "send":
        return MeasuredCost.of(nearest.curve)
    return MeasuredCost.of(nearest.curve, _sent_fraction(ranks) / _sent_fraction(nearest.ranks))


def _sent_fraction(ranks: int) -> float:
    """Return the fraction (n - 1) / n of a vector that each of `ranks` ranks sends in a collective; an all-reduce sends
    twice that."""
    return (ranks - 1) / ranks


class CostByLayout:
    """Cost function of a collective for many candidate layouts at once. costs: the cost function of each distinct group
    of ranks; which [candidates]: index into `costs`."""

    def __init__(self, costs: Sequence[Any], which: Any) -> None:
        self._costs, self._which = costs, which

    def at(self, size: Any) -> Any:
        """Return the seconds of the collective for each candidate layout: [..., candidates]. size: bytes of the full
        vector, a number or an array [..., candidates]."""
        sizes = np.asarray(size, dtype=np.float64)
        sizes = np.broadcast_to(sizes, np.broadcast_shapes(sizes.shape, self._which.shape))
        seconds = np.zeros(sizes.shape)
        for number in np.unique(self._which):
            ways = self._which == number
            seconds[..., ways] = self._costs[number].at(sizes[..., ways])
        return seconds
