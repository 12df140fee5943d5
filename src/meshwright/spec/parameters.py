"""The parameter table: one entry for every tensor of a model, with its shape, sharding and place in the flat buffers.

An entry (`Row`) is a tensor as Hugging Face names and shapes it on disk. Entries are concatenated to engine tensors
(query, key and value are one matrix here), engine tensors to FSDP units (the flat buffers of ZeRO). Model builder,
planner, checkpoint, gradient reduction and server read the same table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
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
        self.add("embedding", "embedding", (vocabulary, hidden), {"tp": 0}, remainder="pad")
        # In units of their own: the flat buffer of a tied embedding is the same on the first and on the last stage.
        if config.token_types:
            self.add("token_types", "token_types", (config.token_types, hidden), partial="sequence")
        if config.positions == "learned":
            self.add("positions", "positions", (config.max_positions, hidden), partial="sequence")
        if config.embedding_norm:
            self.norm("embedding_norm", "embedding_norm")
        for layer in range(config.layers):
            self.layer(f"layers.{layer}", layer)
        if config.encoder:
            self.encoder_head()
            return
        self.norm("head", "final_norm")
        if not config.tied:
            self.add("head", "head", (vocabulary, hidden), {"tp": 0}, remainder="pad")

    def encoder_head(self) -> None:
        """Append an encoder's head: transform, norm and output bias (masked language modelling), or pooler and
        classifier. Every tp rank would hold all of it but the output bias."""
        hidden = self.config.hidden
        dense = {"masked": "transform"}.get(self.config.head, "pooler")
        for shape, suffix in (((hidden, hidden), "weight"), ((hidden,), "bias")):
            self.add("head", dense, shape, suffix=suffix, partial="sequence")
        if self.config.head == "masked":
            self.norm("head", "transform_norm", tensor="transform_norm")
            self.add("head", "head", (self.config.vocabulary,), {"tp": 0}, suffix="bias", remainder="pad")
        elif self.config.head == "classes":
            classes = len(self.config.labels)
            for shape, suffix in (((classes, hidden), "weight"), ((classes,), "bias")):
                self.add("head", "classifier", shape, suffix=suffix, partial="sequence")

    def layer(self, unit: str, layer: int) -> None:
        """Append the entries of transformer layer number `layer` to FSDP unit `unit`."""
        config = self.config
        hidden, head_dim, intermediate = config.hidden, config.head_dim, config.intermediate
        query, key = config.heads * head_dim, config.kv_heads * head_dim
        attention, mlp = f"{unit}.attention", f"{unit}.mlp"

        self.norm(unit, "attention_norm", layer)
        if "qkv" in self.names:
            # BLOOM's file mixes the three head by head; GPT-2's has all queries, all keys, all values.
            mixed = config.family == "bloom"
            blocks, granularity = ((3 * query,), 3 * head_dim) if mixed else ((query,) * 3, head_dim)
            self.linear(
                unit, f"{attention}.qkv", "qkv", layer, 3 * query, hidden, column=True, bias=config.qkv_bias,
                blocks=blocks, granularity=granularity,
            )  # fmt: skip
        else:
            for part, size, offset in (("query", query, 0), ("key", key, query), ("value", key, query + key)):
                self.linear(
                    unit, f"{attention}.qkv", part, layer, size, hidden, column=True, bias=config.qkv_bias,
                    offset=offset, granularity=head_dim, replicate=part != "query",
                )  # fmt: skip
        if config.query_key_norm:
            self.norm(unit, "query_norm", layer, tensor=f"{attention}.query_norm", size=head_dim, partial="heads")
            self.norm(unit, "key_norm", layer, tensor=f"{attention}.key_norm", size=head_dim, partial="heads")
        self.linear(
            unit, f"{attention}.output", "attention_output", layer, hidden, query, column=False,
            bias=config.output_bias, granularity=head_dim,
        )  # fmt: skip
        if config.post_norms:
            self.norm(unit, "attention_post_norm", layer)

        self.norm(unit, "mlp_norm", layer)
        if config.has_experts(layer):
            self.mixture(unit, mlp, layer)
        else:
            self.feed_forward(unit, mlp, layer, intermediate)
        if config.post_norms:
            self.norm(unit, "mlp_post_norm", layer)

    def feed_forward(self, unit: str, mlp: str, layer: int, width: int, prefix: str = "") -> None:
        """Append an MLP's gate, up and down projections. `mlp`: prefix of the engine tensors; `width`: the intermediate
        size; `prefix`: that of the keys in `DISK_NAMES`."""
        hidden, bias = self.config.hidden, self.config.mlp_bias
        for part, offset in (("gate", 0), ("up", width)) if self.config.gated else (("up", 0),):
            self.linear(unit, f"{mlp}.up", prefix + part, layer, width, hidden, column=True, bias=bias, offset=offset)
        self.linear(unit, f"{mlp}.down", f"{prefix}down", layer, hidden, width, column=False, bias=bias)

    def mixture(self, unit: str, mlp: str, layer: int) -> None:
        """Append a router, its experts (all in one tensor per projection) and the shared expert of layer number
        `layer`. `unit`: FSDP unit; `mlp`: prefix of the engine tensors.
        """
        config = self.config
        hidden, width = config.hidden, config.expert_intermediate
        # Ranks of tp hold columns of every expert, or (expert parallelism) route their own tokens: what each finds out
        # about a choice is a part.
        self.add(unit, "router", (config.experts, hidden), tensor=f"{mlp}.router", layer=layer, partial="heads")
        if config.router_bias:
            self.add(
                unit, "router", (config.experts,), tensor=f"{mlp}.router", layer=layer, suffix="bias",
                disk_suffix="e_score_correction_bias", partial="heads", balances=True,
            )  # fmt: skip
        for expert in range(config.experts):
            start = expert * 2 * width
            for part, offset in (("expert_gate", start), ("expert_up", start + width)):
                self.linear(
                    unit, f"{mlp}.experts.up", part, layer, width, hidden, column=True, bias=False, offset=offset,
                    expert=expert,
                )  # fmt: skip
            self.linear(
                unit, f"{mlp}.experts.down", "expert_down", layer, hidden, width, column=False, bias=False,
                offset=expert * hidden, expert=expert,
            )  # fmt: skip
        if config.shared_intermediate:
            self.feed_forward(unit, f"{mlp}.shared", layer, config.shared_intermediate, "shared_")
        if config.shared_gate:
            self.add(unit, "shared_expert_gate", (1, hidden), tensor=f"{mlp}.shared_gate", layer=layer, partial="heads")

    def linear(
        self, unit: str, tensor: str, part: str, layer: int, output: int, inputs: int, *, column: bool, bias: bool,
        offset: int = 0, blocks: tuple[int, ...] = (), granularity: int = 1, replicate: bool = False,
        expert: int | None = None,
    ) -> None:  # fmt: skip
        """Append a weight [output, inputs] and its bias. `column`: column parallel, outputs are cut over tp; else row
        parallel, inputs are. `part`: key in `DISK_NAMES`; `replicate`: heads fewer than ranks are shared; the others
        as fields of `Row`.
        """
        remainder: Literal["refuse", "replicate"] = "replicate" if replicate else "refuse"
        partial: Literal["heads"] | None = "heads" if replicate else None
        self.add(
            unit, part, (output, inputs), {"tp": 0 if column else 1}, tensor=tensor, layer=layer, offset=offset,
            blocks=blocks, granularity=granularity, remainder=remainder, partial=partial,
            initial=self.normal if column else self.residual, expert=expert,
        )  # fmt: skip
        if not bias:
            return
        if column:
            self.add(
                unit, part, (output,), {"tp": 0}, tensor=tensor, layer=layer, offset=offset, suffix="bias",
                blocks=blocks, granularity=granularity, remainder=remainder, partial=partial,
            )  # fmt: skip
        else:  # added after the ranks' products are summed, to each rank's piece of the sequence
            self.add(unit, part, (output,), tensor=tensor, layer=layer, suffix="bias", partial="sequence")

    def norm(
        self, unit: str, part: str, layer: int | None = None, *, tensor: str | None = None, size: int | None = None,
        partial: Literal["sequence", "heads"] = "sequence",
    ) -> None:  # fmt: skip
        """Append a norm's weight [size] and, if the model has norm biases, its bias. `part`: key in `DISK_NAMES`;
        `tensor`: name of the engine tensor; `size`: default hidden; `partial`: field of `Row`.
        """
        tensor = tensor or (part if layer is None else f"{unit}.{part}")
        # Gemma 2 multiplies by 1 + weight.
        ones = Initial("zeros" if self.config.family == "gemma2" else "ones")
        shape = (size or self.config.hidden,)
        self.add(unit, part, shape, tensor=tensor, layer=layer, partial=partial, initial=ones)
        if self.config.norm_bias:
            self.add(unit, part, shape, tensor=tensor, layer=layer, partial=partial, suffix="bias")

    def add(
        self, unit: str, part: str, shape: tuple[int, ...], split: Mapping[SplitAxis, int] | None = None, *,
        tensor: str | None = None, layer: int | None = None, suffix: str = "weight", offset: int = 0,
        blocks: tuple[int, ...] = (), granularity: int = 1,
        remainder: Literal["refuse", "replicate", "pad"] = "refuse",
        partial: Literal["sequence", "heads"] | None = None, initial: Initial | None = None,
        expert: int | None = None, disk_suffix: str | None = None, balances: bool = False,
    ) -> None:  # fmt: skip
        """Append one entry. `part`: key in `DISK_NAMES`; `suffix`: "weight" or "bias"; the others as fields of
        `Row`."""
        split = split or {}
        transposed = self.config.family == "gpt2" and layer is not None and len(shape) == 2
        self.rows.append(
            Row(
                name=f"{self.names[part].format(i=layer, e=expert)}.{disk_suffix or suffix}",
                shape=shape[::-1] if transposed else shape,
                transposed=transposed,
                tensor=f"{tensor or part}.{suffix}",
                offset=offset,
                unit=unit,
                split=split,
                blocks=blocks or tuple(shape[dim] for dim in split.values()),
                granularity=granularity,
                remainder=remainder,
                partial=partial,
                initial=initial or (self.normal if len(shape) > 1 else Initial("zeros")),
                # Every matrix, embeddings too, as nanoGPT, Megatron-LM and the Trainer of transformers do, so that a
                # recipe means the same here; vectors (norms, biases) not. A tied embedding is the head's matrix.
                decay=len(shape) > 1,
                active=1.0 if expert is None else self.config.experts_per_token / self.config.experts,
                balances=balances,
                expert=None if expert is None else (expert, self.config.experts),
            )
        )
