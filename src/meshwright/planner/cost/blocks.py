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


def block(batch: MicroBatch, layer: int, arrives: bool = False) -> Iterator[Operator]:
    """Yield the operators of the layer with index `layer`, in the order of its forward. Names of saved tensors are
    relative to the layer. arrives: the gradient of the layer's input is computed even if all parameters before it are
    frozen, as in all pipeline stages but the first."""
    kind = layer_kind(batch.config, layer)
    found = _block(batch, layer, kind)
    return found if batch.config.adapter is None else freeze(batch, found, kind, arrives or not kind.begins)


def _block(batch: MicroBatch, layer: int, kind: LayerKind) -> Iterator[Operator]:
    """Yield the operators of a layer without adapter.

    Decoders normalise before attention and MLP (`pre_norms`), after them (`post_norms`), or both; encoders only after
    the residual addition.
    """
    config = batch.config
    before, after = config.pre_norms and not config.encoder, config.post_norms
    inner = list(mixture(batch, layer)) if kind.mixed else list(feed_forward(batch))
    for name, operators in (("attention", list(attention(batch, kind))), ("mlp", inner)):
        if before:
            yield norm(batch, f"{name}_norm")
        yield from operators
        if after:
            yield norm(batch, f"{name}_post_norm")
        yield from residual(batch)
        if config.encoder:
            yield norm(batch, f"{name}_norm")


# --- norms and the residual stream


def norm(batch: MicroBatch, name: str, rows: Number | None = None) -> Operator:
    """Return a norm over the hidden dimension. name: such as "mlp_norm"; rows: number of vectors normalised, if not all
    tokens of this rank's residual stream."""
    config = batch.config
    stream = batch.rows * batch.slice if rows is None else rows
    shape = (batch.rows, batch.slice, config.hidden) if rows is None else (rows, config.hidden)
    return Operator(
        name, pointwise(batch, "norm", stream * config.hidden, config.norm), tuple(_normed(batch, name, shape)),
        parameters=config.hidden * (1 + config.norm_bias),
    )  # fmt: skip


def _normed(batch: MicroBatch, name: str, shape: tuple[Number, ...]) -> Iterator[SavedTensor]:
    """Yield the tensors that a norm saves. shape: of its input."""
    if batch.config.norm == "layernorm":
        yield SavedTensor(f"{name}.input", shape, "x")
        for what in ("mean", "deviation"):  # PyTorch keeps them in the input's type on a CPU
            yield SavedTensor(f"{name}.{what}", (*shape[:-1], 1), "x" if batch.device == "cpu" else "wide")
    else:
        yield SavedTensor(f"{name}.input", shape, "wide")
        yield from scaled(name, shape, batch.config.zero_centred_norms)


def residual(batch: MicroBatch) -> Iterator[Operator]:
    """Yield a residual addition, and before it the multiplication of what is added (Granite) and the dropout of the
    engine's runs, where there are any."""
    elements = batch.rows * batch.slice * batch.config.hidden
    if batch.config.residual_scale != 1:
        yield Operator("residual.scale", pointwise(batch, "residual.scale", elements, "scaled_residual"))
    yield Operator("residual", pointwise(batch, "residual", elements, "residual"))
    if batch.engine.dropout:
        yield Operator("dropout", pointwise(batch, "dropout", elements, "residual_dropout"))


# --- both ends


def embedding(batch: MicroBatch) -> Iterator[Operator]:
    """Yield the embedding of tokens, positions and token types, and the norm after it."""
    return _embedding(batch) if batch.config.adapter is None else freeze(batch, _embedding(batch), arrives=False)


def _embedding(batch: MicroBatch) -> Iterator[Operator]:
    """Yield the operators of `embedding` without adapter."""
    config, size, hidden = batch.config, batch.itemsize, batch.config.hidden
    looked_up, table = batch.all_tokens * hidden, batch.vocabulary * hidden
    # The gradient of the rows is accumulated into a zeroed float32 table.
    back = looked_up * (size + 3 * elementwise.WIDE) + table * (2 * elementwise.WIDE + size)
    saved = []
    if batch.layout.tp > 1:
        saved.append(SavedTensor("embedding.places", (batch.rows, batch.tokens), "index"))
        saved.append(SavedTensor("embedding.elsewhere", (batch.rows, batch.tokens), "bool"))
    yield Operator(
        "embedding",
        (
            Operation("embedding", "lookup", "forward", 0.0, 2.0 * size * looked_up),
            Operation("embedding", "lookup", "input", 0.0, 1.0 * back),
        ),
        tuple(saved), collectives=tuple(leave(batch, "embedding", in_block=False)), parameters=table,
    )  # fmt: skip
    stream = batch.rows * batch.slice * hidden
    if config.embedding_factor != 1:
        yield Operator("embedding.scale", pointwise(batch, "embedding.scale", stream, "scaled"))
    if config.embedding_norm:
        yield norm(batch, "embedding_norm")
    places = batch.rows if batch.masked else 1, batch.tokens
    if config.positions == "learned":
        index = SavedTensor("positions.places", places, "index")
        yield Operator(
            "positions", pointwise(batch, "positions", stream, "residual", "eager"),
            (index,) if batch.masked or batch.layout.cp == 1 else (), parameters=config.max_positions * hidden,
        )  # fmt: skip
    if config.token_types:
        index = SavedTensor("token_types.places", places, "index")
        yield Operator(
            "token types", pointwise(batch, "token types", stream, "residual", "eager"),
            (index,) if config.positions == "learned" else (), parameters=config.token_types * hidden,
        )  # fmt: skip


def head(batch: MicroBatch, keeps_gradient: bool) -> Iterator[Operator]:
    """Yield the operators of the final norm, the vocabulary product and the loss. keeps_gradient: the forward computes
    the head's gradients; else the backward computes the logits a second time."""
    return _head(batch, keeps_gradient) if batch.config.adapter is None else freeze(batch, _head(batch, keeps_gradient))


def _head(batch: MicroBatch, keeps_gradient: bool) -> Iterator[Operator]:
    """Yield the operators of `head` without adapter."""
    if batch.config.encoder:
        yield from encoder_head(batch)
        return
    yield norm(batch, "final_norm")
    if batch.config.logit_divisor != 1:  # the head's input is divided, not the logits
        stream = batch.rows * batch.slice * batch.config.hidden
        yield Operator("head.scale", pointwise(batch, "head.scale", stream, "scaled"))
    product = linear(
        batch, "head", Linear(batch.all_tokens, batch.vocabulary, batch.config.hidden),
        collectives=tuple(enter(batch, "head.input", in_block=False)),
    )  # fmt: skip
    if not keeps_gradient:
        product = product._replace(operations=(*product.operations, product.operations[0]._replace(phase="recompute")))
    yield product
    if batch.config.logit_softcap:
        capped = pointwise(batch, "head.softcap", batch.all_tokens * batch.vocabulary, "capped_logits")
        again = () if keeps_gradient else (capped[0]._replace(phase="recompute"),)
        yield Operator("head.softcap", (*capped, *again))
    yield _loss(batch, batch.all_tokens * batch.vocabulary)._replace(collectives=tuple(_loss_collectives(batch)))


def prediction_input(batch: MicroBatch) -> Iterator[Operator]:
    """Yield the operators before the block of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, eq. 21): norms of
    the hidden states and of the next tokens' embeddings, and the product that joins them."""
    yield from (norm(batch, name) for name in ("prediction_hidden_norm", "prediction_embedding_norm"))
    yield linear(
        batch, "prediction_projection", Linear(batch.rows * batch.slice, batch.config.hidden, 2 * batch.config.hidden)
    )


def _loss(batch: MicroBatch, logits: Number) -> Operator:
    """Return the loss over a number of logits."""
    moved = logits * batch.engine.loss_bytes / 2
    both: tuple[Phase, Phase] = ("forward", "input")
    return Operator("loss", tuple(Operation("loss", "loss", phase, 0.0, moved) for phase in both))


def _loss_collectives(batch: MicroBatch) -> Iterator[CollectiveCall]:
    """Yield the all-reduces of a vocabulary-parallel loss: the highest logit, the sum of exponentials and the target's
    logit of each token; and the loss of responses with preferences over cp."""
    if batch.layout.tp > 1:
        for site in ("loss.target_logit", "loss.maximum", "loss.sum"):
            yield CollectiveCall("tensor", "tp", "all-reduce", ((site, batch.all_tokens * batch.wide),))
    if batch.responses and batch.layout.cp > 1:
        size = 8 * batch.rows * batch.responses
        yield CollectiveCall("context", "cp", "all-reduce", (("loss.responses", size),), timed=False)


def encoder_head(batch: MicroBatch) -> Iterator[Operator]:
    """Yield the operators of an encoder's head: transform, norm, vocabulary product and loss of masked tokens; or
    pooler and classifier."""
    config, hidden = batch.config, batch.config.hidden
    masked = config.head == "masked"
    places = batch.predictions
    dense, out = ("transform", "head") if masked else ("pooler", "classifier")
    outputs = config.vocabulary if masked else len(config.labels)
    yield linear(batch, dense, Linear(places, hidden, hidden, bias=True))
    yield Operator(f"{dense}.activation", pointwise(batch, f"{dense}.activation", places * hidden, "activation"))
    if masked:
        yield norm(batch, "transform_norm", places)
    if outputs:
        # The matrix over the vocabulary is the embedding's.
        parameters = outputs if masked else outputs * (hidden + 1)
        yield linear(batch, out, Linear(places, outputs, hidden, bias=True), parameters=parameters)
        yield _loss(batch, places * outputs)
