"""Worked examples of tensor parallelism: the product of a linear layer, split by columns and by rows."""

from __future__ import annotations

import numpy as np

from meshwright.gallery.execution import Floats, check_program, execute, format_vector
from meshwright.gallery.explanation import ExampleWriter
from meshwright.layout import Layout
from meshwright.spec.parameters import parameter_table
from meshwright.spec.presets import preset

X = np.array([[1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 0.0, -1.0]])
W = np.array([[1.0, 0.0, 2.0, 1.0], [0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 2.0], [2.0, 0.0, 1.0, 1.0]])
GRADIENT = np.array([[1.0, 0.0, 1.0, 2.0], [1.0, 1.0, 0.0, 1.0]])
"""Activations [2 tokens, 4 features], weights [4, 4], and gradient of the output."""


def explain_column_parallel_linear(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: a column-parallel linear layer Y = X W with the columns of W
    split over two ranks, in forward and in backward with its all-reduce."""
    halves = np.split(W, 2, axis=1)
    writer.add_table(
        "X (2 tokens) and W; rank 0 holds columns 0 and 1 of W, rank 1 columns 2 and 3:", *_make_operand_table()
    )
    parts = [X @ half for half in halves]
    writer.add_table(
        "Forward: every rank has all of X and multiplies it with its columns.",
        ("rank", "token 0 of Y", "token 1 of Y"), [(f"rank {r}", *map(format_vector, y)) for r, y in enumerate(parts)],
    )  # fmt: skip
    whole = np.concatenate(parts, axis=1)
    writer.add_text(
        f"Side by side: Y = [{format_vector(whole[0])}], [{format_vector(whole[1])}]. A row-split layer that follows "
        "takes the halves as they are; where the whole Y is needed, an all-gather of 2 ranks sends 1/2 of it from each."
    )
    _show_reduction(
        writer, [dy @ half.T for dy, half in zip(np.split(GRADIENT, 2, axis=1), halves, strict=True)],
        f"Backward: with dY = [{format_vector(GRADIENT[0])}], [{format_vector(GRADIENT[1])}]: "
        "dX = dY₀ W₀ᵀ + dY₁ W₁ᵀ has a part on each rank, so that the input's gradient is all-reduced; dW of "
        "a rank is Xᵀ dY of its columns and stays there.",
    )  # fmt: skip
    writer.add_text(_describe_split("model.layers.0.mlp.up_proj.weight"))
    writer.record_result("Y[0, 3]", whole[0, 3])
    writer.record_result("difference from X W", float(np.abs(whole - X @ W).max()))


def explain_row_parallel_linear(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: a row-parallel linear layer Y = X W with the rows of W and
    the columns of X split over two ranks, whose partial products an all-reduce sums."""
    writer.add_table("X (2 tokens) and W; rank 0 holds rows 0 and 1 of W, rank 1 rows 2 and 3:", *_make_operand_table())
    parts = [x @ w for x, w in zip(np.split(X, 2, axis=1), np.split(W, 2, axis=0), strict=True)]
    total = _show_reduction(
        writer, parts,
        "Forward: a rank has 2 features of X (a column-split layer left them there) and multiplies them with its rows. "
        "Each product has the shape of Y, and Y is their sum.",
    )  # fmt: skip
    writer.add_text(
        "Backward: dX of a rank is dY W_rᵀ, of its own features: no communication. With sequence parallelism the "
        "all-reduce becomes a reduce-scatter, and an all-gather before the next column-split layer."
    )
    writer.add_text(_describe_split("model.layers.0.mlp.down_proj.weight"))
    once, halves = 0.0, [0.0, 0.0]
    for index in range(10):
        once += 0.1
        halves[index // 5] += 0.1
    writer.add_text(
        f"Order matters in floating point: ten times 0.1 added one by one is {once!r}; two ranks with five each give "
        f"{halves[0]!r} + {halves[1]!r} = {sum(halves)!r}."
    )
    writer.record_result("Y[0, 3]", total[0, 3])
    writer.record_result("difference from X W", float(np.abs(total - X @ W).max()))
    writer.record_result("ten times 0.1, one by one", once)
    writer.record_result("ten times 0.1, on two ranks", sum(halves))


def _make_operand_table() -> tuple[tuple[str, str], list[tuple[str, str]]]:
    """Return (column names, rows) of a table of the activations X and weights W (constants of this module) of the
    worked examples on linear layers."""
    rows = [(format_vector(X[at]) if at < len(X) else "", format_vector(row)) for at, row in enumerate(W)]
    return ("rows of X", "rows of W"), rows


def _show_reduction(writer: ExampleWriter, parts: list[Floats], words: str) -> Floats:
    """Append to `writer` a table with two ranks' partial results and their sum, computed by the ring all-reduce; return
    the sum.

    parts: the ranks' arrays, of one shape [2 tokens, features]. words: title of the table.
    """
    checked = check_program("all-reduce", "ring", 2)
    sums = [execute(checked, [part.reshape(2, -1)[:, at].tolist() for part in parts])[-1].values[0]
            for at in range(parts[0].size // 2)]  # fmt: skip
    total = np.stack(sums, axis=1).reshape(parts[0].shape)
    rows = [(f"rank {rank}", *map(format_vector, part)) for rank, part in enumerate(parts)]
    rows.append(("all-reduce", *map(format_vector, total)))
    writer.add_table(words, ("", "token 0", "token 1"), rows)
    sent = float(checked.bytes_sent(1.0)[0])
    size = parts[0].size * 4
    writer.add_text(
        f"A ring all-reduce on 2 ranks: {checked.rounds} rounds, each rank sends {sent:g} times the "
        f"{parts[0].size} numbers, {sent * size:g} bytes in fp32."
    )
    writer.record_result("bytes sent", sent * size)
    return total


def _describe_split(name: str) -> str:
    """Return a sentence on how tensor parallelism over two ranks splits a weight of the preset "llama-tiny", with the
    weight's full and local shapes. name: name of the weight."""
    entry = parameter_table(preset("llama-tiny")).entry(name)
    whole, local = (" × ".join(map(str, shape)) for shape in (entry.shape, entry.local_shape(Layout(tp=2))))
    kind = "column-split (the disk holds Wᵀ, so that its rows are cut)" if entry.split["tp"] == 0 else "row-split"
    return f"In Meshwright the parameter table says so: {name} of llama-tiny, {whole}, is {kind}: {local} under tp2."
