"""Layers and bytes that each rank of a layout would hold of a model, by the rules of training."""

from __future__ import annotations

from typing import Any

from meshwright.errors import UserError
from meshwright.layout import Layout
from meshwright.planner.cost.micro_batch import DTYPES, ITEM_BYTES
from meshwright.planner.memory.states import flats_of, list_states
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import ParameterTable, parameter_table
from meshwright.spec.partition import Partition
from meshwright.spec.refuse import refuse
from meshwright.spec.stage_times import program_for

PRECISION_OF = {"F64": "fp32", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}
MAX_RANKS = 100_000


def describe_placement(config: ModelConfig, layout_text: str, dtype: str, sequence: int) -> dict[str, Any]:
    """Return the layers, experts and bytes that each rank of a layout would hold, as a JSON dict.

    config: the model. layout_text: layout notation, such as "pp2 tp2 zero3". dtype: dtype of the model files by its
    safetensors name, such as "BF16"; it determines the precision if the layout names none. sequence: tokens of a
    sequence, for which the layers are balanced over pipeline stages. Raises `UserError` if the layout does not fit the
    model.

    Result: {"layout", "precision", "ranks": one dict per rank}. A rank's keys: "rank"; its coordinate on each of tp,
    cp, dp and pp of size > 1; "stages" and "layers" (indices); "embedding" and "head" (True if the rank holds them);
    "experts" (indices, with ep); "elements" and "bytes": size of the parameters that the rank keeps between steps,
    padding included; "training_bytes": persistent memory of AdamW training, {kind, such as "parameters", "gradients" or
    "optimizer": bytes}.
    """
    layout = Layout.parse(layout_text)
    if layout.world_size > MAX_RANKS:
        raise UserError(f'layout "{layout}": it has {layout.world_size:,} ranks; at most {MAX_RANKS:,} are listed')
    refuse(layout, config, batch=layout.dp * layout.micro_batches, planning=True)
    precision = layout.precision or PRECISION_OF.get(dtype, "bf16")
    kept = DTYPES[precision]
    table = parameter_table(config)
    partition = Partition.of(program_for(layout, config, sequence), config, table, sequence)
    places = [_describe_stage(partition, layout, at, kept) for at in range(layout.pp)]
    experts = (
        [_list_held_experts(table, layout, coordinate) for coordinate in range(layout.ep)] if layout.ep > 1 else [[]]
    )
    ranks = []
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        axes = {axis: at[axis] for axis in ("tp", "cp", "dp", "pp") if getattr(layout, axis) > 1}
        spread = {"experts": experts[at["ep"]]} if layout.ep > 1 else {}
        ranks.append({"rank": rank, **axes, **places[at["pp"]], **spread})
    return {"layout": str(layout), "precision": precision, "ranks": ranks}


def _describe_stage(partition: Partition, layout: Layout, coordinate: int, dtype: str) -> dict[str, Any]:
    """Return the contents of a rank with coordinate `coordinate` on axis pp, as a JSON dict.

    partition: assignment of layers to stages. layout: axes over which the stage's parameters are sharded. dtype: torch
    name of the parameters' dtype, such as "bfloat16". Keys: "stages" and "layers": indices. "embedding" and "head":
    True if the rank holds them. "elements" and "bytes": size of the parameters that the rank keeps between steps.
    "training_bytes": persistent memory of AdamW training, {kind, such as "parameters", "gradients" or "optimizer":
    bytes}.
    """
    stages, units = partition.stages_on(coordinate), partition.units_on(coordinate)
    flats = flats_of(partition.table, layout, units)
    kinds: dict[str, int] = {}
    for kind, state in list_states(flats, dtype, "float32", "adamw"):
        kinds[kind] = kinds.get(kind, 0) + state.bytes
    return {
        "stages": [stage.index for stage in stages],
        "layers": sorted(layer for stage in stages for layer in stage.layers),
        "embedding": "embedding" in units,
        "head": any(stage.last for stage in stages),
        "elements": kinds["parameters"] // ITEM_BYTES[dtype],
        "bytes": kinds["parameters"],
        "training_bytes": kinds,
    }


def _list_held_experts(table: ParameterTable, layout: Layout, coordinate: int) -> list[int]:
    """Return the indices of the experts that a rank holds under expert parallelism, ascending. table: the model's
    parameters. layout: its axis ep is the number of ranks over which the experts are divided. coordinate: the rank's
    coordinate on axis ep."""
    held = {
        entry.expert[0] for entry in table.entries if entry.expert is not None and entry.ep_rank(layout) == coordinate
    }
    return sorted(held)
