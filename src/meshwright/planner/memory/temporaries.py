"""Temporary tensors in addition to saved activations, in forward and backward, by the rows of `tensors.toml`;
workspaces of the weights and masks of adapters.

They follow the engine's code. Checked against PyTorch's allocator on a CPU; workspaces of CUDA kernels follow their
sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from meshwright.planner.cost.adapters import PACKED
from meshwright.planner.cost.blocks import layer_operators
from meshwright.planner.cost.dimensions import Dimensions, layer_dimensions
from meshwright.planner.cost.micro_batch import MicroBatch, Number
from meshwright.planner.cost.tables import parse_item, select
from meshwright.planner.memory.snapshot import Allocation, NamedSnapshot, activation
from meshwright.spec.adapter_config import BLOCK
from meshwright.spec.policy import UNPACKED_AT_ONCE
from meshwright.toml import read_packaged_toml


@cache
def _rows(section: str, properties: frozenset[str]) -> list[dict[str, Any]]:
    """Return the rows of one section of `tensors.toml`, each a memory snapshot of a pass: `name`; `tensors`, the
    tensors allocated then, as parsed items; `freed`, `held`: beginnings of the names of saved activations that are
    freed before, or made by then.

    section: such as "mlp"; properties: names of the properties that hold, which conditions test."""
    table = read_packaged_toml("planner/memory/tensors.toml")
    rows = select(table[section], properties, table["groups"])
    return [{"freed": (), "held": (), **row, "tensors": list(map(parse_item, row["tensors"]))} for row in rows]


class Pass(NamedTuple):
    """A forward or backward pass through an FSDP unit, of which memory snapshots are computed.

    Attributes:
        dimensions: Sizes that `tensors.toml` names, such as "2 tokens hidden", with the properties that its conditions
            test.
        saved: Saved activations of the unit, some of which snapshots count as freed or as already made.
        prefix: Beginning of the names of `saved`, such as "layers.3.", which `tensors.toml` leaves out.
    """

    dimensions: Dimensions
    saved: Sequence[Allocation] = ()
    prefix: str = ""

    def snapshots(self, section: str) -> Iterator[NamedSnapshot]:
        """Yield (snapshot name, tensors) for each memory snapshot of a section of `tensors.toml` whose condition holds.
        The tensors are its temporaries and the saved activations made so far. One entry with negative bytes stands for
        all saved activations freed so far. section: such as "attention"."""
        for row in _rows(section, self.dimensions.true):
            freed, held = (tuple(self.prefix + name for name in row[key]) for key in ("freed", "held"))
            found = [activation(each.name, each.bytes) for each in self.saved if each.name.startswith(held)]
            if gone := sum(each.bytes for each in self.saved if freed and each.name.startswith(freed)):
                found.append(activation("freed", -gone))
            for item in row["tensors"]:
                category, _, name = item.name.format(self.prefix[:-1]).rpartition(": ")
                found.append(Allocation(category or "activations", name, bytes=int(self.dimensions[item.value])))
            yield row["name"], found


# --- adapters


def count_unpacked_bytes(batch: MicroBatch, layer: int, name: str = "", result: int = 0) -> int:
    """Return the most bytes that the dequantization of one of a layer's weights takes: the dequantized weight, with the
    larger of the dequantization's buffer and the product's result. 0 if weights are not quantized.

    name: only weights of operators whose names begin with it; result: bytes of the product's result."""
    if batch.config.adapter is None or batch.config.adapter.packed is None:
        return 0
    found = (one for one in layer_operators(batch, layer) if one.name.startswith(PACKED) and one.name.startswith(name))
    most = max((one.shape[1] * one.shape[2] for each in found for one in each.operations[:3] if one.shape), default=0)
    once = min(most, UNPACKED_AT_ONCE[batch.device] * BLOCK)
    return int(most * batch.itemsize + max(result, 6 * once))


MASK_BYTES = 12
"""Bytes of each element while the mask of an adapter's dropout is computed: three int32 numbers."""


def adapter_sizes(batch: MicroBatch, layer: int) -> dict[str, Number]:
    """Return {dimension: bytes} of the temporaries of a layer's adapters: of the dropout masks of the products up and
    down, in a dense MLP or in routed experts ("up_masks"), and the largest of the masks that the layer's forward adds
    to all saved activations ("masks"); of a dense MLP, also of its dequantized weights ("up_unpacked")."""
    if batch.config.adapter is None:
        return {}
    mixed = batch.config.has_experts(layer)
    kernels = (one for each in layer_operators(batch, layer) for one in each.operations if one.phase == "forward")
    adapted = (one for one in kernels if one.name.endswith(".adapter.a") and one.shape)
    masks = {one.name: int(MASK_BYTES * one.shape[0] * one.shape[2] * one.count) for one in adapted if one.shape}
    others = [size for name, size in masks.items() if ".experts." not in name and name != "mlp.down.adapter.a"]
    mlp, sizes = "mlp.experts" if mixed else "mlp", layer_dimensions(batch, layer)
    found: dict[str, Number] = {"masks": max(others, default=0)}
    for name, result in (("down", "rows tokens width x"), ("up", "stream x")):
        found[f"{name}_masks"] = masks.get(f"{mlp}.{name}.adapter.a", 0)
        found[f"{name}_unpacked"] = 0 if mixed else count_unpacked_bytes(batch, layer, f"mlp.{name}", sizes[result])
    return found
