"""The operators of a transformer in order: of a layer, the embedding, and the head with its loss."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.cost import elementwise
from meshwright.planner.cost.adapters import freeze
from meshwright.planner.cost.attention import attention
from meshwright.planner.cost.micro_batch import LayerKind, MicroBatch, Number, layer_kind
from meshwright.planner.cost.mlp import feed_forward, mixture
from meshwright.planner.cost.operators import (
    CollectiveCall,
    Linear,
    Operation,
    Operator,
    Phase,
    SavedTensor,
    linear,
    pointwise,
    scaled,
)
from meshwright.planner.cost.tensor_parallel import enter, leave


def block(at: MicroBatch, layer: int, arrives: bool = False) -> Iterator[Operator]:
    """Yield the operators of the layer with index `layer`, in the order of its forward. Names of saved tensors are
    relative to the layer. arrives: the gradient of the layer's input is computed even if all parameters before it are
    frozen, as in all pipeline stages but the first."""
    kind = layer_kind(at.config, layer)
    found = _block(at, layer, kind)
    return found if at.config.adapter is None else freeze(at, found, kind, arrives or not kind.begins)


def _block(at: MicroBatch, layer: int, kind: LayerKind) -> Iterator[Operator]:
    """Yield the operators of a layer without adapter.

    Decoders normalise before attention and MLP (`pre_norms`), after them (`post_norms`), or both; encoders only after
    the residual addition.
    """
    config = at.config
    before, after = config.pre_norms and not config.encoder, config.post_norms
    inner = list(mixture(at, layer)) if kind.mixed else list(feed_forward(at))
    for name, operators in (("attention", list(attention(at, kind))), ("mlp", inner)):
        if before:
            yield norm(at, f"{name}_norm")
        yield from operators
        if after:
            yield norm(at, f"{name}_post_norm")
        yield from residual(at)
        if config.encoder:
            yield norm(at, f"{name}_norm")


# --- norms and the residual stream


def norm(at: MicroBatch, name: str, rows: Number | None = None) -> Operator:
    """Return a norm over the hidden dimension. name: such as "mlp_norm"; rows: number of vectors normalised, if not all
    tokens of this rank's residual stream."""
    config = at.config
    stream = at.rows * at.slice if rows is None else rows
    shape = (at.rows, at.slice, config.hidden) if rows is None else (rows, config.hidden)
    return Operator(
        name, pointwise(at, "norm", stream * config.hidden, config.norm), tuple(_normed(at, name, shape)),
        parameters=config.hidden * (1 + config.norm_bias),
    )  # fmt: skip


def _normed(at: MicroBatch, name: str, shape: tuple[Number, ...]) -> Iterator[SavedTensor]:
    """Yield the tensors that a norm saves. shape: of its input."""
    if at.config.norm == "layernorm":
        yield SavedTensor(f"{name}.input", shape, "x")
        for what in ("mean", "deviation"):  # PyTorch keeps them in the input's type on a CPU
            yield SavedTensor(f"{name}.{what}", (*shape[:-1], 1), "x" if at.device == "cpu" else "wide")
    else:
        yield SavedTensor(f"{name}.input", shape, "wide")
        yield from scaled(name, shape, at.config.zero_centred_norms)


def residual(at: MicroBatch) -> Iterator[Operator]:
    """Yield a residual addition, and before it the multiplication of what is added (Granite) and the dropout of the
    engine's runs, where there are any."""
    elements = at.rows * at.slice * at.config.hidden
    if at.config.residual_scale != 1:
        yield Operator("residual.scale", pointwise(at, "residual.scale", elements, "scaled_residual"))
    yield Operator("residual", pointwise(at, "residual", elements, "residual"))
    if at.engine.dropout:
        yield Operator("dropout", pointwise(at, "dropout", elements, "residual_dropout"))


# --- both ends


def embedding(at: MicroBatch) -> Iterator[Operator]:
    """Yield the embedding of tokens, positions and token types, and the norm after it."""
    return _embedding(at) if at.config.adapter is None else freeze(at, _embedding(at), arrives=False)


def _embedding(at: MicroBatch) -> Iterator[Operator]:
    """Yield the operators of `embedding` without adapter."""
    config, size, hidden = at.config, at.itemsize, at.config.hidden
    looked_up, table = at.all_tokens * hidden, at.vocabulary * hidden
    # The gradient of the rows is accumulated into a zeroed float32 table.
    back = looked_up * (size + 3 * elementwise.WIDE) + table * (2 * elementwise.WIDE + size)
    saved = []
    if at.layout.tp > 1:
        saved.append(SavedTensor("embedding.places", (at.rows, at.tokens), "index"))
        saved.append(SavedTensor("embedding.elsewhere", (at.rows, at.tokens), "bool"))
    yield Operator(
        "embedding",
        (
            Operation("embedding", "lookup", "forward", 0.0, 2.0 * size * looked_up),
            Operation("embedding", "lookup", "input", 0.0, 1.0 * back),
        ),
        tuple(saved), collectives=tuple(leave(at, "embedding", in_block=False)), parameters=table,
    )  # fmt: skip
    stream = at.rows * at.slice * hidden
    if config.embedding_factor != 1:
        yield Operator("embedding.scale", pointwise(at, "embedding.scale", stream, "scaled"))
    if config.embedding_norm:
        yield norm(at, "embedding_norm")
    places = at.rows if at.masked else 1, at.tokens
    if config.positions == "learned":
        index = SavedTensor("positions.places", places, "index")
        yield Operator(
            "positions", pointwise(at, "positions", stream, "residual", "eager"),
            (index,) if at.masked or at.layout.cp == 1 else (), parameters=config.max_positions * hidden,
        )  # fmt: skip
    if config.token_types:
        index = SavedTensor("token_types.places", places, "index")
        yield Operator(
            "token types", pointwise(at, "token types", stream, "residual", "eager"),
            (index,) if config.positions == "learned" else (), parameters=config.token_types * hidden,
        )  # fmt: skip


def head(at: MicroBatch, keeps_gradient: bool) -> Iterator[Operator]:
    """Yield the operators of the final norm, the vocabulary product and the loss. keeps_gradient: the forward computes
    the head's gradients; else the backward computes the logits a second time."""
    return _head(at, keeps_gradient) if at.config.adapter is None else freeze(at, _head(at, keeps_gradient))


def _head(at: MicroBatch, keeps_gradient: bool) -> Iterator[Operator]:
    """Yield the operators of `head` without adapter."""
    if at.config.encoder:
        yield from encoder_head(at)
        return
    yield norm(at, "final_norm")
    if at.config.logit_divisor != 1:  # the head's input is divided, not the logits
        stream = at.rows * at.slice * at.config.hidden
        yield Operator("head.scale", pointwise(at, "head.scale", stream, "scaled"))
    product = linear(
        at, "head", Linear(at.all_tokens, at.vocabulary, at.config.hidden),
        collectives=tuple(enter(at, "head.input", in_block=False)),
    )  # fmt: skip
    if not keeps_gradient:
        product = product._replace(operations=(*product.operations, product.operations[0]._replace(phase="recompute")))
    yield product
    if at.config.logit_softcap:
        capped = pointwise(at, "head.softcap", at.all_tokens * at.vocabulary, "capped_logits")
        again = () if keeps_gradient else (capped[0]._replace(phase="recompute"),)
        yield Operator("head.softcap", (*capped, *again))
    yield _loss(at, at.all_tokens * at.vocabulary)._replace(collectives=tuple(_loss_collectives(at)))


def prediction_input(at: MicroBatch) -> Iterator[Operator]:
    """Yield the operators before the block of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, eq. 21): norms of
    the hidden states and of the next tokens' embeddings, and the product that joins them."""
    yield from (norm(at, name) for name in ("prediction_hidden_norm", "prediction_embedding_norm"))
    yield linear(at, "prediction_projection", Linear(at.rows * at.slice, at.config.hidden, 2 * at.config.hidden))


def _loss(at: MicroBatch, logits: Number) -> Operator:
    """Return the loss over a number of logits."""
    moved = logits * at.engine.loss_bytes / 2
    both: tuple[Phase, Phase] = ("forward", "input")
    return Operator("loss", tuple(Operation("loss", "loss", phase, 0.0, moved) for phase in both))


def _loss_collectives(at: MicroBatch) -> Iterator[CollectiveCall]:
    """Yield the all-reduces of a vocabulary-parallel loss: the highest logit, the sum of exponentials and the target's
    logit of each token; and the loss of responses with preferences over cp."""
    if at.layout.tp > 1:
        for site in ("loss.target_logit", "loss.maximum", "loss.sum"):
            yield CollectiveCall("tensor", "tp", "all-reduce", ((site, at.all_tokens * at.wide),))
    if at.responses and at.layout.cp > 1:
        size = 8 * at.rows * at.responses
        yield CollectiveCall("context", "cp", "all-reduce", (("loss.responses", size),), timed=False)


def encoder_head(at: MicroBatch) -> Iterator[Operator]:
    """Yield the operators of an encoder's head: transform, norm, vocabulary product and loss of masked tokens; or
    pooler and classifier."""
    config, hidden = at.config, at.config.hidden
    masked = config.head == "masked"
    places = at.predictions
    dense, out = ("transform", "head") if masked else ("pooler", "classifier")
    outputs = config.vocabulary if masked else len(config.labels)
    yield linear(at, dense, Linear(places, hidden, hidden, bias=True))
    yield Operator(f"{dense}.activation", pointwise(at, f"{dense}.activation", places * hidden, "activation"))
    if masked:
        yield norm(at, "transform_norm", places)
    if outputs:
        # The matrix over the vocabulary is the embedding's.
        parameters = outputs if masked else outputs * (hidden + 1)
        yield linear(at, out, Linear(places, outputs, hidden, bias=True), parameters=parameters)
        yield _loss(at, places * outputs)
