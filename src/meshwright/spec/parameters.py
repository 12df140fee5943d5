"""The parameter table: one entry for every tensor of a model, with its shape, sharding and place in the flat buffers.

An entry (`Row`) is a tensor as Hugging Face names and shapes it on disk. Entries are concatenated to engine tensors
(query, key and value are one matrix here), engine tensors to FSDP units (the flat buffers of ZeRO). Model builder,
planner, checkpoint, gradient reduction and server read the same table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from meshwright.layout import Layout
from meshwright.spec.config import ModelConfig
from meshwright.spec.disk_names import DISK_NAMES
from meshwright.spec.rows import Box, Initial, Part, Row, SplitAxis, Tensor

__all__ = ["Box", "Initial", "ParameterTable", "Row", "Tensor", "parameter_table"]


@dataclass(frozen=True)
class ParameterTable:
    """List of all parameters of a model, in forward order of its FSDP units and, within a unit, in the order of its
    flat buffer.

    rows: entries, one for each tensor on disk. tensors: engine tensors, each one or several entries concatenated
    (query, key and value, or all experts). units: names of the FSDP units. tied: the head uses the embedding matrix.
    """

    rows: tuple[Row, ...]
    tensors: tuple[Tensor, ...]
    units: tuple[str, ...]
    tied: bool = False

    @cached_property
    def _row_by_name(self) -> dict[str, Row]:
        """The parameter entries by their names on disk."""
        return {row.name: row for row in self.rows}

    @cached_property
    def _tensor_by_name(self) -> dict[str, Tensor]:
        """The engine tensors by name."""
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def _tensors_by_unit(self) -> dict[str, tuple[Tensor, ...]]:
        """The engine tensors of each FSDP unit."""
        found: dict[str, list[Tensor]] = {unit: [] for unit in self.units}
        for tensor in self.tensors:
            found[tensor.unit].append(tensor)
        return {unit: tuple(tensors) for unit, tensors in found.items()}

    def row(self, name: str) -> Row:
        """Return the parameter entry with this name on disk."""
        return self._row_by_name[name]

    def tensor(self, name: str) -> Tensor:
        """Return the engine tensor of this name."""
        return self._tensor_by_name[name]

    def unit_tensors(self, unit: str, layout: Layout | None = None, part: Part | None = None) -> tuple[Tensor, ...]:
        """Return the tensors of the FSDP unit named `unit` in the order of its flat buffers: those with weight decay
        first. `part`: only those in this flat buffer ("dense" or "experts").
        """
        tensors = self._tensors_by_unit[unit]
        return tensors if part is None else tuple(each for each in tensors if each.part(layout or Layout()) == part)

    def unit_parts(self, unit: str, layout: Layout) -> tuple[Part, ...]:
        """Return the names of an FSDP unit's flat buffers: "dense", and "experts" if experts are sharded over axes of
        their own."""
        apart = any(tensor.part(layout) == "experts" for tensor in self._tensors_by_unit[unit])
        return ("dense", "experts") if apart else ("dense",)

    def needed_by(self, unit: str) -> tuple[str, ...]:
        """Return the FSDP units whose tensors are needed to compute `unit`: itself, and the embedding for a tied
        head."""
        return (unit, "embedding") if self.tied and unit == "head" else (unit,)

    @cached_property
    def numel(self) -> int:
        """The model's parameter count; a tied embedding counts once."""
        return sum(row.numel for row in self.rows)

    @cached_property
    def active_numel(self) -> int:
        """The number of parameters that one token uses on average: of each layer's experts only those that it is routed
        to."""
        return round(sum(row.numel * row.active for row in self.rows))

    def local_slices(self, row: Row, layout: Layout, coordinates: Mapping[str, int]) -> tuple[Box, ...]:
        """Return the boxes of a parameter entry that the rank at ``coordinates`` (as ``layout.coordinates`` returns)
        holds.

        Together the ranks' boxes cover the entry, each element on ``row.replicas(layout)`` ranks of tp; an expert under
        expert parallelism is covered once by each block of ep x etp ranks.
        """
        offset = self.tensor(row.tensor).local_offset(row, layout)
        dims = range(len(row.engine_shape))
        boxes = []
        for intervals in itertools.product(*(row.intervals(layout, coordinates, dim) for dim in dims)):
            starts, sizes, local = (tuple(part) for part in zip(*intervals, strict=True))
            boxes.append(Box(starts, sizes, (local[0] + offset, *local[1:])))
        return tuple(boxes)

    def unit_numel(self, unit: str, layout: Layout | None = None, part: Part = "dense") -> int:
        """Return the number of elements in a rank's flat buffer ("dense" or "experts") of an FSDP unit, before ZeRO
        shards it; without a layout, on one device.
        """
        tensors = self.unit_tensors(unit, layout, part)
        return sum(math.prod(tensor.local_shape(layout or Layout())) for tensor in tensors)

    def unit_decay_numel(self, unit: str, layout: Layout | None = None, part: Part = "dense") -> int:
        """Return the number of elements with weight decay, which come first, in a rank's flat buffer ("dense" or
        "experts") of an FSDP unit; without a layout, on one device.
        """
        tensors = [tensor for tensor in self.unit_tensors(unit, layout, part) if tensor.decay]
        return sum(math.prod(tensor.local_shape(layout or Layout())) for tensor in tensors)

    def tensor_range(self, tensor: Tensor, layout: Layout | None = None) -> tuple[int, int]:
        """Return the element range [start, stop) of a tensor's local shard in the rank's flat buffer of its FSDP
        unit; without a layout, on one device.
        """
        layout = layout or Layout()
        together = self.unit_tensors(tensor.unit, layout, tensor.part(layout))
        before = itertools.takewhile(lambda other: other.name != tensor.name, together)
        start = sum(math.prod(other.local_shape(layout)) for other in before)
        return start, start + math.prod(tensor.local_shape(layout))

    def row_range(self, row: Row, layout: Layout | None = None) -> tuple[int, int]:
        """Return the element range [start, stop) of an entry's local shard in the rank's flat buffer of its FSDP
        unit, in engine orientation; without a layout, on one device.
        """
        layout = layout or Layout()
        tensor = self.tensor(row.tensor)
        start = self.tensor_range(tensor, layout)[0]
        start += tensor.local_offset(row, layout) * math.prod(tensor.local_shape(layout)[1:])
        return start, start + math.prod(row.local_shape(layout))


def parameter_table(config: ModelConfig) -> ParameterTable:
    """Return the parameter table of a model, planning-only families included."""
    builder = _Builder(config)
    builder.build()
    units: dict[str, dict[str, list[Row]]] = {}
    for row in builder.rows:
        units.setdefault(row.unit, {}).setdefault(row.tensor, []).append(row)
    tensors = []
    for unit, grouped in units.items():
        found = [Tensor(name, unit, tuple(parts)) for name, parts in grouped.items()]
        tensors += sorted(found, key=lambda tensor: not tensor.decay)
    rows = tuple(row for tensor in tensors for row in tensor.rows)
    return ParameterTable(rows, tuple(tensors), tuple(units), config.tied_head)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter entry belongs. unit: FSDP unit. part: key in `DISK_NAMES`. tensor: engine tensor, without
    suffix (default: as `part`). offset: as in `Row`. layer, expert: numbers, if it belongs to one.
    """

    unit: str
    part: str
    layer: int | None = None
    tensor: str | None = None
    offset: int = 0
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class _Cut:
    """How axes cut a parameter entry; fields as in `Row` (`blocks` default: the whole dim)."""

    split: Mapping[SplitAxis, int] = field(default_factory=dict)
    blocks: tuple[int, ...] = ()
    granularity: int = 1
    remainder: Literal["refuse", "replicate", "pad"] = "refuse"
    partial: Literal["sequence", "heads"] | None = None


_BY_TOKENS, _BY_HEADS = _Cut(partial="sequence"), _Cut(partial="heads")
_VOCABULARY = _Cut({"tp": 0}, remainder="pad")
_COLUMNS, _ROWS = _Cut({"tp": 0}), _Cut({"tp": 1})  # column parallel, row parallel


class _Builder:
    """Collects the parameter entries of a model in ``rows``, unit by unit in forward order."""

    def __init__(self, config: ModelConfig) -> None:
        """Start without entries."""
        self.config = config
        self.names = DISK_NAMES[config.family]
        self.rows: list[Row] = []
        # GPT-2's recipe: the matrices that add to the residual stream begin smaller, by the number of additions
        # (Radford et al. 2019, section 2.3). An encoder norms each sum, which needs no such care.
        self.normal = Initial("normal", config.initializer_range)
        additions = 1 if config.encoder else 2 * config.layers
        self.residual = Initial("normal", config.initializer_range / math.sqrt(additions))

    def build(self) -> None:
        """Append the entries of the whole model: embeddings, layers, head."""
        config = self.config
        hidden, vocabulary = config.hidden, config.vocabulary
        self.add(_Place("embedding", "embedding"), (vocabulary, hidden), _VOCABULARY)
        # In units of their own: the flat buffer of a tied embedding is the same on the first and on the last stage.
        if config.token_types:
            self.add(_Place("token_types", "token_types"), (config.token_types, hidden), _BY_TOKENS)
        if config.positions == "learned":
            self.add(_Place("positions", "positions"), (config.max_positions, hidden), _BY_TOKENS)
        if config.embedding_norm:
            self.norm(_Place("embedding_norm", "embedding_norm"))
        for layer in range(config.layers):
            self.layer(f"layers.{layer}", layer)
        if config.encoder:
            self.encoder_head()
            return
        self.norm(_Place("head", "final_norm"))
        if not config.tied:
            self.add(_Place("head", "head"), (vocabulary, hidden), _VOCABULARY)

    def encoder_head(self) -> None:
        """Append an encoder's head: transform, norm and output bias (masked language modelling), or pooler and
        classifier. Every tp rank would hold all of it but the output bias."""
        hidden = self.config.hidden
        dense = {"masked": "transform"}.get(self.config.head, "pooler")
        for shape, suffix in (((hidden, hidden), "weight"), ((hidden,), "bias")):
            self.add(_Place("head", dense), shape, _BY_TOKENS, suffix=suffix)
        if self.config.head == "masked":
            self.norm(_Place("head", "transform_norm"))
            self.add(_Place("head", "head"), (self.config.vocabulary,), _VOCABULARY, suffix="bias")
        elif self.config.head == "classes":
            classes = len(self.config.labels)
            for shape, suffix in (((classes, hidden), "weight"), ((classes,), "bias")):
                self.add(_Place("head", "classifier"), shape, _BY_TOKENS, suffix=suffix)

    def layer(self, unit: str, layer: int) -> None:
        """Append the entries of transformer layer number `layer` to FSDP unit `unit`."""
        config = self.config
        hidden, head_dim, intermediate = config.hidden, config.head_dim, config.intermediate
        query, key = config.heads * head_dim, config.kv_heads * head_dim
        attention, mlp = f"{unit}.attention", f"{unit}.mlp"

        def norm(part: str) -> None:
            """Append one of the layer's norms."""
            self.norm(_Place(unit, part, layer, f"{unit}.{part}"))

        norm("attention_norm")
        if "qkv" in self.names:
            # BLOOM's file mixes the three head by head; GPT-2's has all queries, all keys, all values.
            mixed = config.family == "bloom"
            blocks, granularity = ((3 * query,), 3 * head_dim) if mixed else ((query,) * 3, head_dim)
            place, cut = _Place(unit, "qkv", layer, f"{attention}.qkv"), _Cut({"tp": 0}, blocks, granularity)
            self.linear(place, 3 * query, hidden, cut, bias=config.qkv_bias)
        else:
            for part, size, offset in (("query", query, 0), ("key", key, query), ("value", key, query + key)):
                cut = _Cut({"tp": 0}, granularity=head_dim)
                if part != "query":  # key-value heads fewer than ranks are shared
                    cut = replace(cut, remainder="replicate", partial="heads")
                place = _Place(unit, part, layer, f"{attention}.qkv", offset)
                self.linear(place, size, hidden, cut, bias=config.qkv_bias)
        if config.query_key_norm:
            for part in ("query_norm", "key_norm"):
                self.norm(_Place(unit, part, layer, f"{attention}.{part}"), head_dim, _BY_HEADS)
        place, cut = _Place(unit, "attention_output", layer, f"{attention}.output"), _Cut({"tp": 1}, (), head_dim)
        self.linear(place, hidden, query, cut, bias=config.output_bias)
        if config.post_norms:
            norm("attention_post_norm")

        norm("mlp_norm")
        if config.has_experts(layer):
            self.mixture(unit, mlp, layer)
        else:
            self.feed_forward(unit, mlp, layer, intermediate)
        if config.post_norms:
            norm("mlp_post_norm")

    def feed_forward(self, unit: str, mlp: str, layer: int, width: int, prefix: str = "") -> None:
        """Append an MLP's gate, up and down projections. `mlp`: prefix of the engine tensors; `width`: the intermediate
        size; `prefix`: that of the keys in `DISK_NAMES`."""
        hidden, bias = self.config.hidden, self.config.mlp_bias
        for part, offset in (("gate", 0), ("up", width)) if self.config.gated else (("up", 0),):
            self.linear(_Place(unit, prefix + part, layer, f"{mlp}.up", offset), width, hidden, _COLUMNS, bias=bias)
        self.linear(_Place(unit, f"{prefix}down", layer, f"{mlp}.down"), hidden, width, _ROWS, bias=bias)

    def mixture(self, unit: str, mlp: str, layer: int) -> None:
        """Append a router, its experts (all in one tensor per projection) and the shared expert of layer number
        `layer`. `unit`: FSDP unit; `mlp`: prefix of the engine tensors.
        """
        config = self.config
        hidden, width = config.hidden, config.expert_intermediate
        # Ranks of tp hold columns of every expert, or (expert parallelism) route their own tokens: what each finds out
        # about a choice is a part.
        router = _Place(unit, "router", layer, f"{mlp}.router")
        self.add(router, (config.experts, hidden), _BY_HEADS)
        if config.router_bias:
            name = "e_score_correction_bias"
            self.add(router, (config.experts,), _BY_HEADS, suffix="bias", disk_suffix=name, balances=True)
        for expert in range(config.experts):
            start = expert * 2 * width
            for part, offset in (("expert_gate", start), ("expert_up", start + width)):
                place = _Place(unit, part, layer, f"{mlp}.experts.up", offset, expert)
                self.linear(place, width, hidden, _COLUMNS, bias=False)
            place = _Place(unit, "expert_down", layer, f"{mlp}.experts.down", expert * hidden, expert)
            self.linear(place, hidden, width, _ROWS, bias=False)
        if config.shared_intermediate:
            self.feed_forward(unit, f"{mlp}.shared", layer, config.shared_intermediate, "shared_")
        if config.shared_gate:
            self.add(_Place(unit, "shared_expert_gate", layer, f"{mlp}.shared_gate"), (1, hidden), _BY_HEADS)

    def linear(self, place: _Place, output: int, inputs: int, cut: _Cut, *, bias: bool) -> None:
        """Append a weight [output, inputs] and its bias. `cut`: tp:0, column parallel, outputs are cut; tp:1, row
        parallel, inputs are.
        """
        column = cut.split["tp"] == 0
        self.add(place, (output, inputs), cut, initial=self.normal if column else self.residual)
        if bias:  # of row parallel layers added after the ranks' products are summed, to each rank's sequence slice
            at = place if column else replace(place, offset=0)
            self.add(at, (output,), cut if column else _BY_TOKENS, suffix="bias")

    def norm(self, place: _Place, size: int | None = None, cut: _Cut = _BY_TOKENS) -> None:
        """Append a norm's weight [size] (default: hidden) and, if the model has norm biases, its bias."""
        # Gemma 2 multiplies by 1 + weight.
        ones = Initial("zeros" if self.config.family == "gemma2" else "ones")
        shape = (size or self.config.hidden,)
        self.add(place, shape, cut, initial=ones)
        if self.config.norm_bias:
            self.add(place, shape, cut, suffix="bias")

    def add(
        self,
        place: _Place,
        shape: tuple[int, ...],
        cut: _Cut,
        *,
        suffix: str = "weight",
        disk_suffix: str | None = None,
        initial: Initial | None = None,
        balances: bool = False,
    ) -> None:
        """Append one entry. `suffix`: "weight" or "bias"; `disk_suffix`: the one on disk, if it differs; the others as
        fields of `Row`."""
        transposed = self.config.family == "gpt2" and place.layer is not None and len(shape) == 2
        expert = place.expert
        self.rows.append(
            Row(
                name=f"{self.names[place.part].format(i=place.layer, e=expert)}.{disk_suffix or suffix}",
                shape=shape[::-1] if transposed else shape,
                transposed=transposed,
                tensor=f"{place.tensor or place.part}.{suffix}",
                offset=place.offset,
                unit=place.unit,
                split=cut.split,
                blocks=cut.blocks or tuple(shape[dim] for dim in cut.split.values()),
                granularity=cut.granularity,
                remainder=cut.remainder,
                partial=cut.partial,
                initial=initial or (self.normal if len(shape) > 1 else Initial("zeros")),
                # Every matrix, embeddings too, as nanoGPT, Megatron-LM and the Trainer of transformers do, so that a
                # recipe means the same here; vectors (norms, biases) not. A tied embedding is the head's matrix.
                decay=len(shape) > 1,
                active=1.0 if expert is None else self.config.experts_per_token / self.config.experts,
                balances=balances,
                expert=None if expert is None else (expert, self.config.experts),
            )
        )
