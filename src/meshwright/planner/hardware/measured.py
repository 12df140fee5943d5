"""Measurements of `meshwright probe`: seconds as functions of sizes, as the cluster file keeps them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from itertools import combinations
from typing import Any, TypeVar

import numpy as np

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.planner.hardware.values import read_count, read_number, read_text
from meshwright.program.durations import Floats

FORMS = ("forward", "input-gradient", "weight-gradient")
"""The three products of a linear function: x Wᵀ, g W, gᵀ x."""


Shapes = tuple[tuple[int, int, int], ...]
"""(tokens, outputs, inputs) of linear layers."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Measured seconds of an operation as a function of its bytes. sizes: bytes, ascending; seconds: seconds for each
    size."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise `ValueError` unless each size has its time and sizes are ascending."""
        if len(self.sizes) != len(self.seconds) or not self.sizes:
            raise ValueError(f"{len(self.sizes)} sizes, {len(self.seconds)} times")
        if list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError("sizes are not ascending")

    def seconds_at(self, size: Any) -> Any:
        """Return the seconds of the measured operation on `size` bytes (a number or an array), interpolated between
        measured sizes; constant below the smallest size, proportional to size above the largest.

        Noise is removed: a larger size is never faster than a smaller one.
        """
        beyond = np.maximum(1.0, np.divide(size, self.sizes[-1]))
        return np.interp(size, self.sizes, np.maximum.accumulate(self.seconds)) * beyond


@dataclass(frozen=True, slots=True)
class Products:
    """Measured matrix products of linear layers in one precision.

    Attributes:
        precision: Such as "bf16".
        form: Pass of the linear layer: "forward", "input-gradient" or "weight-gradient".
        ranks, threads: Number of processes that computed concurrently, and threads of each.
        shapes: (tokens, outputs, inputs) of each linear layer.
        seconds: Median seconds of one product, for each shape.
    """

    precision: str
    form: str
    ranks: int
    threads: int
    shapes: Shapes
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise `ValueError` unless each shape has three sizes and its time, and the pass is known."""
        if len(self.shapes) != len(self.seconds) or not self.shapes:
            raise ValueError(f"{len(self.shapes)} shapes, {len(self.seconds)} times")
        if any(len(shape) != 3 for shape in self.shapes):
            raise ValueError("a shape is (tokens, out, in)")
        if self.form not in FORMS:
            raise ValueError(f'unknown form "{self.form}"')

    def seconds_at(self, tokens: Any, out: Any, inner: Any) -> Any:
        """Return the predicted seconds of a matrix product of a linear layer with `tokens` rows, `out` outputs and
        `inner` inputs (numbers or arrays of one shape); exact for measured shapes.

        The prediction is a launch overhead plus FLOPs and bytes at constant rates, times a correction: the geometric
        mean of measured / predicted seconds of the measured shapes, weighted by the inverse fourth power of their
        distance in log sizes.
        """
        costs, places, logarithms = _fit(self)
        sizes = np.stack(np.broadcast_arrays(tokens, out, inner), axis=-1).astype(np.float64)
        squares = ((np.log2(sizes)[..., None, :] - places) ** 2).sum(axis=-1)  # of distances: [..., shapes]
        weights = np.maximum(squares, 1e-12) ** -2
        correction = np.exp((weights * logarithms).sum(axis=-1) / weights.sum(axis=-1))
        predicted = _loads(self.precision, sizes) @ costs * correction
        return np.where(squares.min(axis=-1) < 1e-12, np.take(self.seconds, squares.argmin(axis=-1)), predicted)[()]


@dataclass(frozen=True, slots=True)
class KernelCurve:
    """Measured memory-bound kernel, run by `ranks` concurrent processes of `threads` threads.

    name: "copy" (into an existing tensor), "add" (of two tensors into a new one), "silu" (into a new tensor) and
    others; precision: such as "bf16"; curve: seconds as a function of bytes read and written.
    """

    name: str
    precision: str
    ranks: int
    threads: int
    curve: Curve


@dataclass(frozen=True, slots=True)
class CollectiveCurve:
    """Measured seconds of a collective, run by all groups of `ranks` ranks at once.

    operation: such as "all-reduce"; place: "inside" (ranks of a node), "across" (one rank of each node) or "world" (all
    ranks); curve: seconds as a function of the bytes of the full vector (of an all-to-all: a rank's input; of a
    send-receive: the message).
    """

    operation: str
    ranks: int
    place: str
    curve: Curve


@dataclass(frozen=True, slots=True)
class CopyCurve:
    """Measured seconds of a copy between host and device. name: "to-device" or "to-host"; curve: seconds as a function
    of the bytes copied."""

    name: str
    curve: Curve


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """Measured training step (forward, backward and gradient reductions) of the reference model. layout: layout of the
    step, in layout notation; seconds: its duration."""

    layout: str
    seconds: float

    def __post_init__(self) -> None:
        """Raise `UserError` unless the layout is valid notation."""
        Layout.parse(self.layout)


@dataclass(frozen=True, slots=True)
class Measured:
    """Speeds that `meshwright probe` measured on a machine. Bandwidths are in bytes a second.

    Attributes:
        backend: Backend of torch.distributed, such as "gloo".
        ranks, threads: Number of processes, and threads of each.
        products: Matrix products.
        passes: Memory-bound kernels.
        collectives: Collectives.
        copies: Copies between host and device; none on CPUs.
        disk_write, disk_read: Bandwidths of the disk; None if not measured.
        starts: Start-up times and overheads, (name, seconds): "rank" (start of a process until it has its device),
            "meeting" (until all ranks have connected), "operation" (launch overhead of a tiny operation) ...
        steps: Training steps of the reference model.
        yardstick: Seconds of a fixed matrix product, which shows the processors' speed during the measurement.
        disturbed: Fraction of the time in which a rank waited for its core because other programs used it; None if
            negligible.
    """

    backend: str
    ranks: int
    threads: int
    products: tuple[Products, ...]
    passes: tuple[KernelCurve, ...]
    collectives: tuple[CollectiveCurve, ...] = ()
    copies: tuple[CopyCurve, ...] = ()
    disk_write: float | None = None
    disk_read: float | None = None
    starts: tuple[tuple[str, float], ...] = ()
    steps: tuple[ReferenceStep, ...] = ()
    yardstick: float | None = None
    disturbed: float | None = None

    def product(self, precision: str, form: str = "forward", ranks: int | None = None) -> Products | None:
        """Return the measured matrix products in a precision, such as "bf16", and a pass (`form`: "forward",
        "input-gradient" or "weight-gradient"); None if not measured.

        ranks: number of processes that compute at once, None for all ranks of the machine. If this number was not
        measured, the next larger measured number is used, else the largest."""
        found = [each for each in self.products if each.precision == precision and each.form == form]
        return _nearest(found, self.ranks if ranks is None else ranks)

    def one_pass(self, name: str, precision: str = "fp32", ranks: int | None = None) -> Curve | None:
        """Return the measured curve of a memory-bound kernel: seconds as a function of bytes read and written; None if
        not measured. name: "copy", "add", "silu" ...; precision: such as "fp32"; ranks: number of processes that
        compute at once, None for all ranks of the machine."""
        found = [each for each in self.passes if each.name == name and each.precision == precision]
        chosen = _nearest(found, self.ranks if ranks is None else ranks)
        return None if chosen is None else chosen.curve

    def tables(self) -> dict[str, Any]:
        """Return the measurements as dictionaries, lists and numbers for a cluster file; `read_measured` is
        the inverse."""
        found: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if str(field.type) in _RECORDS:
                found[field.name] = [_table(each) for each in value]
            elif value is not None:
                found[field.name] = dict(value) if isinstance(value, tuple) else value
        return found


_ITEM_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


def _loads(precision: str, sizes: Floats) -> Floats:
    """Return the terms of a linear cost model for matrix products: (1, FLOPs, bytes read and written), [..., 3]. Their
    coefficients are (launch overhead, seconds per FLOP, seconds per byte). precision: such as "bf16"; sizes: (tokens,
    outputs, inputs) of linear layers [..., 3]."""
    tokens, out, inner = np.moveaxis(sizes, -1, 0)
    moved = _ITEM_BYTES.get(precision, 4) * (tokens * inner + out * inner + tokens * out)
    return np.stack([np.ones(tokens.shape), 2.0 * tokens * out * inner, moved], axis=-1)


@cache
def _fit(products: Products) -> tuple[Floats, Floats, Floats]:
    """Fit a cost model to measured matrix products, for predictions at other shapes. Return three arrays:

    (launch overhead, seconds per FLOP, seconds per byte), each at least 0, by least squares of relative errors; log2 of
    the measured shapes [shapes, 3]; logarithms of measured / fitted seconds [shapes]."""
    shapes, seconds = np.array(products.shapes, dtype=np.float64), np.array(products.seconds)
    loads = _loads(products.precision, shapes)
    rows = loads / seconds[:, None]
    scales = rows.max(axis=0)
    best, least = np.array([0.0, 1.0, 0.0]), math.inf
    for kept in (list(kept) for size in (1, 2, 3) for kept in combinations(range(3), size)):
        part = (rows / scales)[:, kept]
        found, _, rank, _ = np.linalg.lstsq(part, np.ones(len(part)))
        error = float(((part @ found - 1) ** 2).sum())
        if rank == len(kept) and found.min() >= 0 and error < least * (1 - 1e-9):
            best, least = np.zeros(3), error
            best[kept] = found
    costs = best / scales
    return costs, np.log2(shapes), np.log(seconds / (loads @ costs))


_ByRanks = TypeVar("_ByRanks", Products, KernelCurve)


def _nearest(measurements: list[_ByRanks], ranks: int) -> _ByRanks | None:
    """Choose from measurements with different numbers of ranks: the smallest number that is at least `ranks`, else the
    largest. Among measurements with this number, the one with most threads is returned; None for an empty list."""
    order = sorted(measurements, key=lambda each: (each.ranks, -each.threads))
    return next((each for each in order if each.ranks >= ranks), order[-1] if order else None)


# --- tables of a cluster file; a file that is read may be damaged


def _table(record: Any) -> dict[str, Any]:
    """Return a measurement as a table for a cluster file: {field: number, text or list}. A field that is a curve is
    replaced by the keys `bytes` and `seconds`. record: the measurement."""
    found = asdict(record)
    curve = found.pop("curve", None)
    return found if curve is None else found | {"bytes": curve["sizes"], "seconds": curve["seconds"]}


def read_measured(table: Any, where: str) -> Measured:
    """Parse the measured speeds of a cluster file. table: its parsed `measured` table; where: the file, with which the
    `UserError` for the first invalid entry begins."""
    try:
        if not isinstance(table, Mapping):
            raise TypeError(f"it should be a table, not {table!r}")
        found: Measured = _record(Measured, table)
        return replace(found, disturbed=min(found.disturbed, 0.9)) if found.disturbed else found
    except KeyError as error:
        reason = f"{error.args[0]} is missing"
    except (TypeError, ValueError, AttributeError, UserError) as error:
        reason = str(error)
    raise UserError(f"{where}: the measurements are damaged ({reason}); run `meshwright probe` again")


def _record(kind: Any, table: Mapping[str, Any], where: str = "") -> Any:
    """Parse a measurement, or all of a machine. kind: its dataclass; table: {field: value}, for a field that is a curve
    the keys `bytes` and `seconds`; where: prefix of the names in errors. Raises `KeyError` for a missing field,
    `ValueError` or `UserError` for an invalid value."""
    values: dict[str, Any] = {}
    for field in fields(kind):
        if field.type == "Curve":
            values[field.name] = Curve(*(_read_numbers(table[key], key) for key in ("bytes", "seconds")))
        elif field.default is MISSING or field.name in table:
            value, name, text = table[field.name], f"{where}{field.name}", str(field.type)
            if text in _RECORDS:
                values[field.name] = tuple(_record(_RECORDS[text], each, f"{name}.") for each in value)
            else:
                values[field.name] = _READERS[text](value, name)
    return kind(**values)


def _read_numbers(values: Any, name: str) -> tuple[float, ...]:
    """Return a list of numbers above 0 as a tuple. Raises `UserError` for anything else; name: its key."""
    return tuple(read_number(each, name) for each in values)


_RECORDS = {
    f"tuple[{kind.__name__}, ...]": kind for kind in (Products, KernelCurve, CollectiveCurve, CopyCurve, ReferenceStep)
}
"""Class of the measurements in a field of `Measured`, by the type of the field."""
_READERS: dict[str, Callable[[Any, str], Any]] = {
    "str": read_text, "int": read_count, "float": read_number, "float | None": read_number,
    "tuple[float, ...]": _read_numbers,
    "Shapes": lambda value, name: tuple(tuple(read_count(size, name) for size in shape) for shape in value),
    "tuple[tuple[str, float], ...]": lambda of, _: tuple((name, read_number(each, name)) for name, each in of.items()),
}  # fmt: skip
"""Reader of a value by the type of its field."""
