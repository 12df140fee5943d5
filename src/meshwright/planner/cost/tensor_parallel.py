"""Collectives of tensor parallelism around column-parallel and row-parallel linear layers, and the tensors that
row-parallel ones save (Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022, arXiv:2205.05198,
section 4.2.2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from meshwright.planner.cost.micro_batch import MicroBatch, Number
from meshwright.planner.cost.operators import CollectiveCall, SavedTensor


def hidden_bytes(batch: MicroBatch) -> Number:
    """Return the bytes of the hidden states of all tokens of this cp rank."""
    return batch.all_tokens * batch.config.hidden * batch.itemsize


def column_parallel_calls(batch: MicroBatch, site: str, in_block: bool = True) -> Iterator[CollectiveCall]:
    """Yield the tp collectives at the input of a column-parallel linear layer: with sequence parallelism an all-gather
    of the input and a reduce-scatter of its gradient; else an all-reduce of the gradient.

    site: name of the call site, such as "mlp.input"; in_block: True if the linear layer is part of a transformer layer,
    whose collectives may be recomputed and overlapped.
    """
    if batch.layout.tp == 1:
        return
    forward, back = ((site, hidden_bytes(batch)),), ((f"{site}.backward", hidden_bytes(batch)),)
    behind: Literal["weight"] | None = "weight" if batch.engine.overlaps_tensor else None
    if not batch.layout.tensor_sequence_parallel:
        yield CollectiveCall("tensor", "tp", "all-reduce", back, "input", overlaps=behind)
        return
    # Engines that recompute only the attention core keep what was gathered.
    recompute = batch.layout.recompute
    again = in_block and (recompute == "full" or (recompute == "selective" and batch.engine.selective != "core"))
    yield CollectiveCall("tensor", "tp", "all-gather", forward, "forward", 1, again, _sliced(batch, in_block))
    yield CollectiveCall("tensor", "tp", "reduce-scatter", back, "input", overlaps=behind)


def row_parallel_calls(batch: MicroBatch, site: str, in_block: bool = True) -> Iterator[CollectiveCall]:
    """Yield the tp collectives at the output of a row-parallel linear layer: with sequence parallelism a reduce-scatter
    of the output and an all-gather of its gradient; else an all-reduce of the output.

    site: name of the call site, such as "mlp.output"; in_block: True if the linear layer is part of a transformer
    layer, whose collectives may be recomputed and overlapped. An engine with `stops_early` does not repeat a layer's
    last collective in recomputation, as only a norm after the MLP would read its result.
    """
    if batch.layout.tp == 1:
        return
    forward, back = ((site, hidden_bytes(batch)),), ((f"{site}.backward", hidden_bytes(batch)),)
    last = site != "attention.output" and not batch.config.post_norms
    again = in_block and batch.layout.recompute == "full" and not (last and batch.engine.stops_early)
    if not batch.layout.tensor_sequence_parallel:
        yield CollectiveCall("tensor", "tp", "all-reduce", forward, "forward", 1, again)
        return
    sliced = _sliced(batch, in_block)
    yield CollectiveCall("tensor", "tp", "reduce-scatter", forward, "forward", 1, again, sliced)
    yield CollectiveCall("tensor", "tp", "all-gather", back, "input", overlaps=sliced)


def mean_square_calls(batch: MicroBatch) -> Iterator[CollectiveCall]:
    """Yield the all-reduces of a norm over a dimension that is sharded over tp: of each token's mean square, and of its
    gradient."""
    if batch.layout.tp == 1:
        return
    site, size = "norm.mean_square", batch.all_tokens * batch.wide
    yield CollectiveCall("tensor", "tp", "all-reduce", ((site, size),), "forward", 1, batch.layout.recompute == "full")
    yield CollectiveCall("tensor", "tp", "all-reduce", ((f"{site}.backward", size),), "input")


def _sliced(batch: MicroBatch, in_block: bool) -> Literal["product"] | None:
    """Return "product" if the engine splits a collective into slices that overlap the matrix product before or after
    it; else None. in_block: the product is part of a transformer layer."""
    return "product" if in_block and batch.engine.overlaps_tensor == "products" else None


def row_parallel_saved(batch: MicroBatch, name: str) -> tuple[SavedTensor, ...]:
    """Return the tensors of a row-parallel linear layer that selective recompute saves: its result on this rank and,
    under tp, the sum over the ranks. name: such as "attention.output"."""
    product = SavedTensor(f"{name}.product", (batch.rows, batch.tokens, batch.config.hidden), "x")
    if batch.layout.tp == 1:
        return (product,)
    return product, SavedTensor(f"{name}.sum", (batch.rows, batch.slice, batch.config.hidden), "x")
