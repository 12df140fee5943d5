"""Construction of the parameter table: one entry for every tensor of a model, with its shape, sharding and position in
the flat buffers.

A `ParameterEntry` is a tensor as Hugging Face names and shapes it on disk. Entries are concatenated to model parameters
in memory (query, key and value are one matrix there), model parameters to FSDP units (the flat buffers of ZeRO). Model
builder, planner, checkpoint, gradient reduction and server read the same table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from meshwright.spec.adapter_entries import add_adapter_entries
from meshwright.spec.config import ModelConfig
from meshwright.spec.disk_names import DISK_NAMES
from meshwright.spec.latent_attention import LatentAttention
from meshwright.spec.parameter_entries import Box, Initial, ModelParameter, ParameterEntry, SplitAxis
from meshwright.spec.parameter_table import ParameterTable
from meshwright.spec.width_scaling import compute_initial_std_factor, compute_learning_rate_factor

__all__ = ["Box", "Initial", "ParameterTable", "ParameterEntry", "ModelParameter", "parameter_table"]


def parameter_table(config: ModelConfig) -> ParameterTable:
    """Build the parameter table of the model with configuration `config`, of any family. With an adapter, the base
    model's parameters are frozen, and entries of the adapter's parameters are added. Raises `UserError` if the
    adapter's targets match no linear layer, or the adapter's rank is too high."""
    builder = _Builder(config)
    builder.build()
    units: dict[str, dict[str, list[ParameterEntry]]] = {}
    adapter = config.adapter
    entries = builder.entries if adapter is None else add_adapter_entries(builder.entries, adapter)
    for entry in (*entries, *make_projection_entries(config)):
        units.setdefault(entry.unit, {}).setdefault(entry.tensor, []).append(entry)
    tensors = []
    for unit, grouped in units.items():
        found = [ModelParameter(name, unit, tuple(parts)) for name, parts in grouped.items()]
        tensors += sorted(found, key=lambda tensor: not tensor.decay)
    ordered = tuple(entry for tensor in tensors for entry in tensor.entries)
    return ParameterTable(ordered, tuple(tensors), tuple(units), config.tied_head or config.prediction_layers > 0)


def make_projection_entries(config: ModelConfig) -> Iterator[ParameterEntry]:
    """Yield the parameter entries of distillation's projections, matrices [teacher's hidden size, hidden size] that map
    the student's hidden states to the teacher's size. They belong to the FSDP unit of the head and are replicated over
    tp. config: configuration of the student.
    """
    for layer, width in config.projections:
        yield ParameterEntry(
            name=f"distillation.projections.{layer}.weight",
            shape=(width, config.hidden),
            tensor=f"projections.{layer}.weight",
            unit="head",
            partial="sequence",
            initial=Initial("normal", config.hidden**-0.5),
            decay=True,
            exported=False,
        )


@dataclass(frozen=True, slots=True)
class _EntryPosition:
    """Position in the model of one tensor of a checkpoint (a parameter entry), such as the query matrix of layer 3.

    In the model, several such tensors may be concatenated along dim 0 to one parameter, such as "qkv".

    Attributes:
        unit: Name of the FSDP unit that holds the tensor.
        part: Role of the tensor, such as "query"; a key of `DISK_NAMES`, which maps it to the Hugging Face name.
        layer: Index of the tensor's layer; None outside layers.
        tensor: Name of the model parameter that contains the tensor, without ".weight" or ".bias"; None: `part`.
        offset: First index of the tensor along dim 0 of the model parameter.
        expert: Index of the tensor's expert in the layer; None outside experts.
    """

    unit: str
    part: str
    layer: int | None = None
    tensor: str | None = None
    offset: int = 0
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class _Sharding:
    """Sharding of a parameter entry over mesh axes.

    Attributes:
        split: {axis: dim along which the axis shards the entry}.
        blocks: Sizes along that dim of consecutive blocks, each sharded separately (empty: one block).
        granularity: Shard boundaries are multiples of this number.
        remainder: What happens if tp does not divide the dim: refuse the layout, let ranks share heads, or pad.
        partial: Reason why tp ranks that hold the same values have partial gradients; None: their gradients are
            complete.
    """

    split: Mapping[SplitAxis, int] = field(default_factory=dict)
    blocks: tuple[int, ...] = ()
    granularity: int = 1
    remainder: Literal["refuse", "replicate", "pad"] = "refuse"
    partial: Literal["sequence", "heads", "gate"] | None = None


_BY_TOKENS, _BY_HEADS = _Sharding(partial="sequence"), _Sharding(partial="heads")
_VOCABULARY = _Sharding({"tp": 0}, remainder="pad")
_COLUMNS, _ROWS = _Sharding({"tp": 0}), _Sharding({"tp": 1})  # column parallel, row parallel


class _Builder:
    """Builder of the parameter entries (tensors of a checkpoint) of the model with configuration `config`. The entries
    are collected in the attribute ``entries``, FSDP unit by unit in forward order."""

    def __init__(self, config: ModelConfig) -> None:
        """Start without entries; `build` appends those of the model with configuration `config`."""
        self.config = config
        self.names = DISK_NAMES[config.family]
        self.entries: list[ParameterEntry] = []
        # As in GPT-2, matrices that write to the residual stream have a smaller initial standard deviation, divided by
        # the root of the number of residual additions (Radford et al. 2019, section 2.3); not in a post-norm encoder.
        self.normal = Initial("normal", config.initializer_range)
        additions = 1 if config.encoder else 2 * config.layers
        self.residual = Initial("normal", config.initializer_range / math.sqrt(additions))

    def build(self) -> None:
        """Append the parameter entries of the whole model to `entries`: embeddings, layers, head."""
        config = self.config
        hidden, vocabulary = config.hidden, config.vocabulary
        self.add(_EntryPosition("embedding", "embedding"), (vocabulary, hidden), _VOCABULARY)
        # Separate units: a tied embedding has the same flat buffer on the first and on the last stage.
        if config.token_types:
            self.add(_EntryPosition("token_types", "token_types"), (config.token_types, hidden), _BY_TOKENS)
        if config.positions == "learned":
            self.add(_EntryPosition("positions", "positions"), (config.max_positions, hidden), _BY_TOKENS)
        if config.embedding_norm:
            self.add_norm(_EntryPosition("embedding_norm", "embedding_norm"))
        for layer in range(config.layers):
            self.add_layer(f"layers.{layer}", layer)
        if config.encoder:
            self.add_encoder_head()
            return
        self.add_norm(_EntryPosition("head", "final_norm"))
        if not config.tied:
            self.add(_EntryPosition("head", "head"), (vocabulary, hidden), _VOCABULARY)
        if config.prediction_layers:
            self.add_prediction(config.layers)

    def add_prediction(self, layer: int) -> None:
        """Append the parameter entries of the multi-token prediction module. They belong to the FSDP unit of the head.
        layer: index of the layer under which checkpoint files store the module."""
        norms = (f"prediction_{name}" for name in ("embedding_norm", "hidden_norm", "norm"))
        for part in norms:
            self.add_norm(_EntryPosition("head", part, layer, part.replace("_", ".", 1)))
        hidden = self.config.hidden
        place = _EntryPosition("head", "prediction_projection", layer, "prediction.projection")
        self.add(place, (hidden, 2 * hidden), _BY_TOKENS)
        self.add_layer("head", layer, "prediction.block")

    def add_encoder_head(self) -> None:
        """Append the parameter entries of an encoder's head. For masked language modeling these are the transform, norm
        and output bias. Otherwise they are the pooler and, for classification, the classifier. All but the output bias
        are replicated over tp."""
        hidden = self.config.hidden
        dense = {"masked": "transform"}.get(self.config.head, "pooler")
        for shape, suffix in (((hidden, hidden), "weight"), ((hidden,), "bias")):
            self.add(_EntryPosition("head", dense), shape, _BY_TOKENS, suffix=suffix)
        if self.config.head == "masked":
            self.add_norm(_EntryPosition("head", "transform_norm"))
            self.add(_EntryPosition("head", "head"), (self.config.vocabulary,), _VOCABULARY, suffix="bias")
        elif self.config.head == "classes":
            classes = len(self.config.labels)
            for shape, suffix in (((classes, hidden), "weight"), ((classes,), "bias")):
                self.add(_EntryPosition("head", "classifier"), shape, _BY_TOKENS, suffix=suffix)

    def add_layer(self, unit: str, layer: int, name: str | None = None) -> None:
        """Append the parameter entries of the transformer layer with index `layer`. unit: name of its FSDP unit, such
        as "layers.0". name: prefix of the names of its model parameters; None: `unit`."""
        config = self.config
        hidden, head_dim, intermediate = config.hidden, config.head_dim, config.intermediate
        query, key = config.heads * head_dim, config.kv_heads * head_dim
        name = name or unit
        attention, mlp = f"{name}.attention", f"{name}.mlp"

        def norm(part: str) -> None:
            """Append the parameter entries of one of the layer's norms. part: its key in `DISK_NAMES`, such as
            "mlp_norm"."""
            self.add_norm(_EntryPosition(unit, part, layer, f"{name}.{part}"))

        if config.pre_norms:
            norm("attention_norm")
        if config.latent:
            self.add_latent_attention(unit, attention, layer, config.latent)
        elif "qkv" in self.names:
            # BLOOM's file interleaves query, key and value per head; others have all queries, all keys, all values.
            mixed, width = config.family == "bloom", query + 2 * key
            blocks, granularity = ((width,), 3 * head_dim) if mixed else ((query, key, key), head_dim)
            place, cut = (
                _EntryPosition(unit, "qkv", layer, f"{attention}.qkv"),
                _Sharding({"tp": 0}, blocks, granularity),
            )
            self.add_linear(place, width, hidden, cut, bias=config.qkv_bias)
        else:
            for part, size, offset in (("query", query, 0), ("key", key, query), ("value", key, query + key)):
                cut = _Sharding({"tp": 0}, granularity=head_dim)
                if part != "query":  # with fewer key-value heads than ranks, neighbouring ranks share one
                    cut = replace(cut, remainder="replicate", partial="heads")
                place = _EntryPosition(unit, part, layer, f"{attention}.qkv", offset)
                self.add_linear(place, size, hidden, cut, bias=config.qkv_bias)
        if config.query_key_norm:
            for part, size in (("query_norm", query), ("key_norm", key)):
                cut = _Sharding({"tp": 0}, granularity=head_dim)  # one weight for each feature of each head
                if part == "key_norm":
                    cut = replace(cut, remainder="replicate", partial="heads")
                size, cut = (size, cut) if config.projection_norm else (head_dim, _BY_HEADS)
                self.add_norm(_EntryPosition(unit, part, layer, f"{attention}.{part}"), size, cut)
        if config.attention_sinks:
            place = _EntryPosition(unit, "sinks", layer, f"{attention}.sinks")
            self.add(place, (config.heads,), _COLUMNS, suffix="", initial=self.normal)
        values = config.value_dim
        place, cut = (
            _EntryPosition(unit, "attention_output", layer, f"{attention}.output"),
            _Sharding({"tp": 1}, (), values),
        )
        self.add_linear(place, hidden, config.heads * values, cut, bias=config.output_bias)
        if config.post_norms:
            norm("attention_post_norm")

        if config.pre_norms:
            norm("mlp_norm")
        if config.has_experts(layer):
            self.add_mixture(unit, mlp, layer)
        else:
            self.add_feed_forward(unit, mlp, layer, intermediate)
        if config.post_norms:
            norm("mlp_post_norm")

    def add_latent_attention(self, unit: str, attention: str, layer: int, latent: LatentAttention) -> None:
        """Append the parameter entries of the projections and norms of multi-head latent attention, without the output
        projection. `unit`: FSDP unit; `attention`: prefix of the model parameters' names; `layer`: layer index."""
        config = self.config
        for part, parameter, offset, shape, head in latent.tensors(config.hidden, config.heads, config.head_dim):
            place = _EntryPosition(unit, part, layer, f"{attention}.{parameter}", offset)
            cut = _Sharding({"tp": 0}, granularity=head) if head else _BY_HEADS
            if len(shape) > 1:
                self.add(place, shape, cut)
            else:
                self.add_norm(place, shape[0], cut)

    def add_feed_forward(self, unit: str, mlp: str, layer: int, width: int, prefix: str = "") -> None:
        """Append the parameter entries of an MLP: gate (of a gated MLP), up and down projections. `unit`: FSDP unit;
        `mlp`: prefix of the model parameters' names, such as "layers.0.mlp"; `layer`: layer index; `width`:
        intermediate size; `prefix`: prefix of their keys in `DISK_NAMES` ("shared_" for a shared expert)."""
        hidden, bias = self.config.hidden, self.config.mlp_bias
        if not prefix and "gate_up" in self.names:
            cut = _Sharding({"tp": 0}, (width, width))
            self.add_linear(_EntryPosition(unit, "gate_up", layer, f"{mlp}.up"), 2 * width, hidden, cut, bias=bias)
        else:
            for part, offset in (("gate", 0), ("up", width)) if self.config.gated else (("up", 0),):
                self.add_linear(
                    _EntryPosition(unit, prefix + part, layer, f"{mlp}.up", offset), width, hidden, _COLUMNS, bias=bias
                )
        self.add_linear(_EntryPosition(unit, f"{prefix}down", layer, f"{mlp}.down"), hidden, width, _ROWS, bias=bias)

    def add_mixture(self, unit: str, mlp: str, layer: int) -> None:
        """Append the parameter entries of router, experts and shared expert of the layer with index `layer`. The up and
        gate projections of all experts form one model parameter, their down projections another. `unit`: FSDP unit;
        `mlp`: prefix of the model parameters' names."""
        config = self.config
        hidden, width = config.hidden, config.expert_intermediate
        # The router's gradient is partial over tp: ranks hold columns of every expert, or route different tokens.
        router = _EntryPosition(unit, "router", layer, f"{mlp}.router")
        self.add(router, (config.experts, hidden), _BY_HEADS)
        if config.mlp_bias:
            self.add(router, (config.experts,), _BY_HEADS, suffix="bias")
        if config.router_bias:
            name = ".e_score_correction_bias"
            self.add(router, (config.experts,), _BY_HEADS, suffix="bias", disk_suffix=name, balances=True)
        both = (
            _Sharding({"tp": 0}, granularity=2) if config.experts_interleaved else _Sharding({"tp": 0}, (width, width))
        )
        fused = (("expert_gate_up", 0, 2 * width, both),)
        apart = (("expert_gate", 0, width, _COLUMNS), ("expert_up", width, width, _COLUMNS))
        for expert in range(config.experts):
            for part, offset, outputs, cut in fused if "expert_gate_up" in self.names else apart:
                place = _EntryPosition(unit, part, layer, f"{mlp}.experts.up", expert * 2 * width + offset, expert)
                self.add_linear(place, outputs, hidden, cut, bias=config.mlp_bias)
            place = _EntryPosition(unit, "expert_down", layer, f"{mlp}.experts.down", expert * hidden, expert)
            self.add_linear(place, hidden, width, _ROWS, bias=False)
            if config.mlp_bias:  # each rank adds its slice of the bias to its partial sum
                self.add(place, (hidden,), _COLUMNS, suffix="bias")
        if config.shared_intermediate:
            self.add_feed_forward(unit, f"{mlp}.shared", layer, config.shared_intermediate, "shared_")
        if config.shared_gate:
            place = _EntryPosition(unit, "shared_expert_gate", layer, f"{mlp}.shared_gate")
            self.add(place, (1, hidden), _Sharding(partial="gate"))

    def add_linear(self, place: _EntryPosition, output: int, inputs: int, cut: _Sharding, *, bias: bool) -> None:
        """Append the entry of a weight [output, inputs]. place: its position in the model. cut: its sharding; a split
        {"tp": 0} is column parallel (outputs are sharded), {"tp": 1} row parallel (inputs are sharded). bias: True to
        append a bias [output] too."""
        column = cut.split["tp"] == 0
        self.add(place, (output, inputs), cut, initial=self.normal if column else self.residual)
        if bias:  # a row-parallel layer adds it after the reduction, to each rank's token slice
            at = place if column else replace(place, offset=0)
            self.add(at, (output,), cut if column else _BY_TOKENS, suffix="bias")

    def add_norm(self, place: _EntryPosition, size: int | None = None, cut: _Sharding = _BY_TOKENS) -> None:
        """Append the entry of a norm's weight and, if the model has norm biases, of its bias. place: its position in
        the model. size: number of elements (None: hidden size). cut: its sharding; by default replicated over tp, with
        partial gradients under sequence parallelism."""
        ones = Initial("zeros" if self.config.zero_centred_norms else "ones")
        shape = (size or self.config.hidden,)
        self.add(place, shape, cut, initial=ones)
        if self.config.norm_bias:
            self.add(place, shape, cut, suffix="bias")

    def add(
        self,
        place: _EntryPosition,
        shape: tuple[int, ...],
        cut: _Sharding,
        *,
        suffix: str = "weight",
        disk_suffix: str | None = None,
        initial: Initial | None = None,
        balances: bool = False,
    ) -> None:
        """Append one parameter entry (tensor of a checkpoint). place: its position in the model. shape: its shape as
        `nn.Linear` stores it, [output, input]. cut: its sharding. suffix: end of the parameter's name: "weight",
        "bias", or "" for a parameter that belongs neither to a linear layer nor to a norm. disk_suffix: end of its name
        on disk (None: `suffix`). initial: initial values (None: the default for its number of dims). balances: True for
        a router bias that balances the experts' load."""
        expert, keys = place.expert, self.config.experts_keys
        stacked = expert is not None and keys is not None and keys.stacked
        turned = keys.transposed if stacked and keys else self.config.family == "gpt2" and place.layer is not None
        transposed = turned and len(shape) == 2
        end = f".{suffix}" if suffix else ""
        disk_end = f"{'_bias' * (suffix == 'bias')}[{expert}]" if stacked else end
        matrix, ratio = len(shape) > 1, self.config.hidden / (self.config.mup_base_hidden or self.config.hidden)
        start = initial or (self.normal if matrix else Initial("zeros"))
        if matrix and ratio != 1.0:
            start = replace(start, std=start.std * compute_initial_std_factor(place.part, ratio))
        self.entries.append(
            ParameterEntry(
                name=f"{self.names[place.part].format(i=place.layer, e=expert)}{disk_suffix or disk_end}",
                shape=shape[::-1] if transposed else shape,
                transposed=transposed,
                tensor=f"{place.tensor or place.part}{end}",
                offset=place.offset,
                unit=place.unit,
                split=cut.split,
                blocks=cut.blocks or tuple(shape[dim] for dim in cut.split.values()),
                granularity=cut.granularity,
                remainder=cut.remainder,
                partial=cut.partial,
                initial=start,
                # Matrices decay, embeddings too, vectors (norms, biases) do not: as in nanoGPT, Megatron-LM and the
                # Trainer of transformers. A tied embedding is the head's matrix.
                decay=matrix,
                rate=compute_learning_rate_factor(place.part, len(shape), ratio),
                active=1.0 if expert is None else self.config.experts_per_token / self.config.experts,
                balances=balances,
                expert=None if expert is None else (expert, self.config.experts),
                stacked=stacked,
            )
        )
