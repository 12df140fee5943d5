"""Every tensor that the engine's eager forward of one micro-batch through one stage keeps for its backward on one rank.

From the configuration, the layout and the shapes of the batch alone; each storage once. Left out are parameters (and
what ZeRO gathers of them), the micro-batch itself (tokens, targets, where documents begin), which is there all through
the step, and the tables of positions, which stay from step to step (`position_tables`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from meshwright.layout import Layout
from meshwright.planner.memory import compiled_blocks, compiled_layers
from meshwright.planner.memory import saved_blocks as blocks
from meshwright.planner.memory.attention_tiles import Starts
from meshwright.planner.memory.saved_blocks import Entry, Local
from meshwright.spec.chunks import keeps_head_gradient, loss_chunks
from meshwright.spec.config import ModelConfig
from meshwright.spec.stages import Stage, whole_model
from meshwright.spec.work import count_predictions

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "bool": 1}


@dataclass(frozen=True, slots=True)
class Saved:
    """An activation saved by a forward for its backward. name: such as "layers.3.mlp.up.input"; dtype: torch's type
    name; bytes: of its whole storage."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Routed:
    """Number of token copies in one mixture of experts. arrived: received by this rank over ep; computed: computed by
    its experts, which includes those that the other etp ranks received."""

    arrived: int
    computed: int


def saved_activations(
    config: ModelConfig,
    layout: Layout,
    rows: int,
    sequence: int,
    *,
    stage: Stage | None = None,
    at_once: bool = True,
    documents: bool = False,
    parameter_dtype: str = "float32",
    device: str = "cpu",
    tp_rank: int = 0,
    routed: Mapping[int, Routed] | None = None,
    pairs: bool = False,
    compiled: bool = False,
) -> list[Saved]:
    """Return the activations that one rank saves of a micro-batch of `rows` sequences of `sequence` tokens.

    stage: pipeline stage, None for the whole model; at_once: its backward directly follows its forward; documents: True
    if sequences pack several; device: "cpu" or "cuda", whose attention differs; tp_rank: rank along tp; routed: token
    copies by layer with experts, equal load unless given; pairs: training on response pairs; compiled: blocks and final
    norm are compiled, where that is modelled.
    """
    stage = whole_model(config) if stage is None else stage
    types = _types(parameter_dtype)
    at = replace(local_sizes(config, layout, rows, sequence, documents, parameter_dtype, device), pairs=pairs)
    entries = _entries(at, stage, at_once, tp_rank, routed or {}, compiled)
    return [_saved(entry, types) for entry in entries]


def position_tables(config: ModelConfig, sequence: int, parameter_dtype: str = "float32") -> list[Saved]:
    """Return the cosine and sine tables of rotary positions for `sequence` tokens, rounded up to a power of two; none
    for other positions. parameter_dtype: torch's type name."""
    if config.positions != "rope":
        return []
    types = _types(parameter_dtype)
    shape = 1 << (sequence - 1).bit_length(), config.head_dim // 2
    return [_saved(Entry(f"rotation.table.{part}", shape, "wide"), types) for part in ("cosine", "sine")]


def _types(parameter_dtype: str) -> dict[str, str]:
    """Return torch's type name of each element type: "x" (activations), "wide" (at least float32), "index", "int32",
    "bool". parameter_dtype: torch's type name of activations and parameters."""
    wide = parameter_dtype if parameter_dtype == "float64" else "float32"
    return {"x": parameter_dtype, "wide": wide, "index": "int64", "int32": "int32", "bool": "bool"}


def _saved(entry: Entry, types: Mapping[str, str]) -> Saved:
    """Return an entry (name, shape, element type) as a saved activation. types: torch's type name by element type."""
    dtype = types[entry.kind]
    return Saved(entry.name, entry.shape, dtype, math.prod(entry.shape) * ITEM_BYTES[dtype])


def local_sizes(
    config: ModelConfig, layout: Layout, rows: int, sequence: int, documents: bool | Starts, parameter_dtype: str,
    device: str,
) -> Local:  # fmt: skip
    """Return the sizes of a micro-batch on one rank, from which closed forms compute.

    rows, sequence: sequences, and tokens of each; documents: True if sequences pack several, or for each sequence the
    tokens at which they begin; device: "cpu" or "cuda".
    """
    tokens = sequence // layout.cp
    sliced = layout.tp if layout.tp > 1 and layout.tensor_sequence_parallel else 1
    narrow = parameter_dtype in ("bfloat16", "float16")
    starts = None if isinstance(documents, bool) else documents
    masked = any(len(row) > 1 for row in starts) if starts is not None else bool(documents)
    return Local(
        config, layout, rows, sequence, tokens, tokens // sliced, narrow, device, masked, starts if masked else None
    )


def _entries(
    at: Local, stage: Stage, at_once: bool, tp_rank: int, routed: Mapping[int, Routed], compiled: bool
) -> Iterator[Entry]:
    """Yield the activations that one rank saves of a micro-batch in a stage.

    at: sizes of the micro-batch; at_once: the stage's backward directly follows its forward; tp_rank: rank along tp;
    routed: token copies by layer with experts; compiled: blocks are compiled.
    """
    config, again = at.config, at.layout.recompute
    stream = at.rows, at.slice, config.hidden
    mixtures = any(config.has_experts(layer) for layer in stage.layers)
    if stage.first:
        yield from _looked_up(at)
    else:
        yield Entry("input", stream, "x")
    yield from _shared_by_layers(at, stage, mixtures)
    input_kept = not stage.first and (config.norm == "layernorm" or not at.narrow)
    for layer in stage.layers:
        name, mixed = f"layers.{layer}", config.has_experts(layer)
        rows = routed.get(layer) or _balanced(at)
        if compiled and compiled_blocks.known(at, layer):
            if stage.first or layer != stage.layers[0]:
                yield Entry(f"{name}.input", stream, "x")
            yield from compiled_layers.kept(at, layer)
            if mixed and at.spread and again == "none":
                yield from blocks.mixture(at, f"{name}.mlp", rows.computed)
            elif mixed and at.spread and again == "selective":
                yield Entry(f"{name}.mlp.input", stream, "x")
                yield from blocks.mixture_products(at, f"{name}.mlp", rows.arrived, rows.computed)
            continue
        if again != "none" and (stage.first or layer != stage.layers[0]):
            yield Entry(f"{name}.input", stream, "x")
        if again == "selective":
            yield from blocks.products(at, name, mixed, rows.arrived, rows.computed)
        elif again == "none":
            first = layer == stage.layers[0]
            yield from blocks.layer(at, name, layer, rows.computed, input_kept and first)
    if stage.last and config.encoder:
        yield from _encoder_head(at)
    elif stage.last:
        if compiled and config.norm == "rmsnorm":
            yield Entry("final_norm.input", stream, "x")
            yield Entry("final_norm.scale", (*stream[:-1], 1), "wide")
        else:
            yield from blocks.norm(at, "final_norm")
        yield from _loss(at, stage, at_once, tp_rank)
    elif mixtures:
        yield Entry("balance", (), "wide")


def _balanced(at: Local) -> Routed:
    """Return the token copies of a mixture on a rank if every expert gets equally many. at: sizes of the
    micro-batch."""
    copies = at.routed * at.config.experts_per_token
    return Routed(copies, copies * (at.layout.etp if at.spread else 1))


def _looked_up(at: Local) -> Iterator[Entry]:
    """Yield the activations that the embedding lookup saves: indices of tokens, positions and token types, and the norm
    after it. at: sizes of the micro-batch."""
    if at.layout.tp > 1:
        yield Entry("embedding.places", (at.rows, at.tokens), "index")
        yield Entry("embedding.elsewhere", (at.rows, at.tokens), "bool")
    if at.config.embedding_norm:
        yield from blocks.norm(at, "embedding_norm")
    if at.config.positions == "learned":
        rows = at.rows if at.masked else 1
        if at.masked or at.layout.cp == 1:
            yield Entry("positions.places", (rows, at.tokens), "index")
        if at.config.token_types:
            yield Entry("token_types.places", (rows, at.tokens), "index")


def _shared_by_layers(at: Local, stage: Stage, mixtures: bool) -> Iterator[Entry]:
    """Yield the tensors that are saved once a micro-batch for all layers: rotations of positions, masks, targets. at:
    sizes of the micro-batch; mixtures: the stage has mixtures of experts."""
    config, layout = at.config, at.layout
    rows = at.rows if at.masked else 1
    if config.positions == "rope" and (at.masked or layout.cp > 1):
        for part in ("cosine", "sine"):
            yield Entry(f"rotation.{part}", (rows, 1, at.tokens, config.head_dim // 2), "wide")
    if config.encoder:
        if at.masked:
            yield Entry("attention.added", (at.rows, 1, at.tokens, at.tokens), "x")
        return
    length = at.tokens if at.ring else at.whole
    for window in sorted({config.layer_window(layer) or 0 for layer in stage.layers}):
        limited = 0 < window < at.whole
        if blocks.varlen(at, window or None):
            continue
        if at.device == "cuda" and not at.ring and blocks.masked(at, window or None):
            if layout.recompute != "none":  # else layers keep what they make of it
                yield Entry(f"attention.visible.{window or 'all'}", (rows, 1, length, length), "bool")
        elif limited or (at.masked and at.ring):
            yield Entry(f"attention.first_visible.{window or 'all'}", (rows, length), "index")
    if mixtures and (config.router_loss or layout.recompute != "none"):
        yield Entry("router.targets", (at.rows,), "index")


def _encoder_head(at: Local) -> Iterator[Entry]:
    """Yield the activations that an encoder saves after its last layer: transform, norm and loss of masked tokens, or
    pooler and classifier. at: sizes of the micro-batch."""
    config = at.config
    places = count_predictions(config, at.rows, at.tokens)
    inside = places, config.hidden
    if config.head != "masked":
        yield Entry("pooler.input", inside, "x")
        yield Entry("pooler.output", inside, "x")
        if config.labels:
            yield Entry("classifier.logarithms", (places, len(config.labels)), "wide")
            yield Entry("loss", (), "wide")
            yield Entry("loss.weight", (), "wide")
        return
    yield Entry("transform.places", (places,), "index")
    yield Entry("transform.input", inside, "x")
    yield Entry("transform.output", inside, "x")
    yield Entry("transform_norm.input", inside, "x")
    for what in ("mean", "deviation"):  # PyTorch keeps them in the input's type on a CPU
        yield Entry(f"transform_norm.{what}", (places, 1), "x" if at.device == "cpu" else "wide")
    several = len(loss_chunks(places, config.vocabulary, at.device)) > 1
    yield Entry("head.hidden.gradient", inside, "x")
    yield Entry("head.weight.gradient", (config.vocabulary, config.hidden), "wide" if several else "x")
    yield Entry("head.bias.gradient", (config.vocabulary,), "wide")
    yield Entry("loss", (), "wide")


def _loss(at: Local, stage: Stage, at_once: bool, tp_rank: int) -> Iterator[Entry]:
    """Yield the tensors that the loss saves: the head's gradients if its forward computes them, else the head's input
    and two softmax statistics of each token, from which the backward computes them.

    at: sizes of the micro-batch; at_once: the stage's backward directly follows its forward; tp_rank: rank along tp.
    """
    config, layout = at.config, at.layout
    tokens, width = at.rows * at.tokens, -(-config.vocabulary // layout.tp)
    widest = min(width, config.vocabulary)
    chunks = loss_chunks(tokens, widest, at.device)
    if not at.pairs and keeps_head_gradient(tokens, widest, len(stage.layers), layout.recompute, at_once):
        yield Entry("head.hidden.gradient", (tokens, config.hidden), "x")
        here = max(0, min(width, config.vocabulary - tp_rank * width))  # the last ranks' rows may be fewer
        yield Entry("head.weight.gradient", (here, config.hidden), "x" if len(chunks) == 1 else "wide")
    else:
        yield Entry("head.input", (tokens, config.hidden), "x")
        yield Entry("head.known", (2, tokens), "wide")
    yield Entry("loss", (), "wide")
