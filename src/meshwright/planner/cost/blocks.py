"""The operators of a transformer in order: of a layer, the embedding, and the head with its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from meshwright.planner.cost.adapters import adapt_operators
from meshwright.planner.cost.attention import attention_operators
from meshwright.planner.cost.micro_batch import LayerKind, MicroBatch, Number, layer_kind
from meshwright.planner.cost.mlp import mixture_operators, mlp_operators
from meshwright.planner.cost.operators import (
    WIDE,
    CollectiveCall,
    LinearShape,
    Operation,
    Operator,
    SavedTensor,
    elementwise_kernels,
    elementwise_operator,
    index_tensor,
    linear_operator,
    make_operator,
    rms_norm_saved,
    wide_tensor,
    x_tensor,
)
from meshwright.planner.cost.tensor_parallel import column_parallel_calls, row_parallel_calls


def layer_operators(batch: MicroBatch, layer: int, input_gradient: bool = False) -> tuple[Operator, ...]:
    """Return the operators of the transformer layer with index `layer` in forward order. Names of saved tensors are
    relative to the layer.

    input_gradient: True if the gradient of the layer's input is computed even if all earlier parameters are frozen, as
    in every pipeline stage but the first.
    """
    kind = layer_kind(batch.config, layer)
    key = "layer", layer if layer in batch.routed else kind, input_gradient
    return _cached(
        batch, key, lambda: _unadapted_layer(batch, layer, kind), kind=kind, arrives=input_gradient or not kind.begins
    )


def _cached(
    batch: MicroBatch, key: tuple[object, ...], unadapted: Callable[[], Iterable[Operator]], **adapted: Any
) -> tuple[Operator, ...]:
    """Return the operators with the key `key` of a micro-batch, computed on the first call. unadapted: returns them as
    they are without adapter; adapted: further arguments of `adapt_operators`."""
    if key not in batch.operators:
        found = unadapted()
        batch.operators[key] = tuple(
            found if batch.config.adapter is None else adapt_operators(batch, found, **adapted)
        )
    return batch.operators[key]


def _unadapted_layer(batch: MicroBatch, layer: int, kind: LayerKind) -> Iterator[Operator]:
    """Yield the operators of a layer as they are without adapter. kind: kind of the layer.

    Decoders normalise before attention and MLP (`pre_norms`), after them (`post_norms`), or both; encoders normalise
    only after the residual addition.
    """
    config = batch.config
    before, after = config.pre_norms and not config.encoder, config.post_norms
    inner = list(mixture_operators(batch, layer)) if kind.mixed else list(mlp_operators(batch))
    for name, operators in (("attention", list(attention_operators(batch, kind))), ("mlp", inner)):
        if before:
            yield norm_operator(batch, f"{name}_norm")
        yield from operators
        if after:
            yield norm_operator(batch, f"{name}_post_norm")
        yield from residual_operators(batch)
        if config.encoder:
            yield norm_operator(batch, f"{name}_norm")


# --- norms and the residual stream


def norm_operator(batch: MicroBatch, name: str, rows: Number | None = None) -> Operator:
    """Return the operator of a norm over the hidden dimension. name: such as "mlp_norm"; rows: number of normalised
    vectors; None: all tokens of this rank's residual stream."""
    config = batch.config
    shape = (batch.rows, batch.slice, config.hidden) if rows is None else (rows, config.hidden)
    elements = (batch.rows * batch.slice if rows is None else rows) * config.hidden
    kernels = elementwise_kernels(batch, "norm", elements, config.norm)
    parameters = config.hidden * (1 + config.norm_bias)
    return make_operator(name, kernels, saved=_norm_saved(batch, name, shape), parameters=parameters)


def _norm_saved(batch: MicroBatch, name: str, shape: tuple[Number, ...]) -> Iterator[SavedTensor]:
    """Yield the tensors that a norm saves for the backward. name: prefix of their names; shape: shape of the norm's
    input."""
    if batch.config.norm == "layernorm":
        yield x_tensor(f"{name}.input", *shape)
        for what in ("mean", "deviation"):  # PyTorch keeps them in the input's type on a CPU
            yield SavedTensor(f"{name}.{what}", (*shape[:-1], 1), "x" if batch.device == "cpu" else "wide")
    else:
        yield wide_tensor(f"{name}.input", *shape)
        yield from rms_norm_saved(name, shape, batch.config.zero_centred_norms)


def residual_operators(batch: MicroBatch) -> Iterator[Operator]:
    """Yield the operators of a residual addition x + f(x): before it, where the model has them, the scaling of f(x) by
    a constant (Granite) and dropout."""
    elements = batch.rows * batch.slice * batch.config.hidden
    if batch.config.residual_scale != 1:
        yield elementwise_operator(batch, "residual.scale", elements, "scaled_residual")
    yield elementwise_operator(batch, "residual", elements, "residual")
    if batch.engine.dropout:
        yield elementwise_operator(batch, "dropout", elements, "residual_dropout")


# --- both ends


def embedding_operators(batch: MicroBatch) -> tuple[Operator, ...]:
    """Return the operators of the embedding: lookups of tokens, positions and token types, and the norm after them if
    the model has one."""
    return _cached(batch, ("embedding",), lambda: _unadapted_embedding(batch), arrives=False)


def _unadapted_embedding(batch: MicroBatch) -> Iterator[Operator]:
    """Yield the operators of the embedding as they are without adapter."""
    config, size, hidden = batch.config, batch.itemsize, batch.config.hidden
    looked_up, table = batch.all_tokens * hidden, batch.vocabulary * hidden
    # The gradient of the rows is accumulated into a zeroed float32 table.
    back = looked_up * (size + 3 * WIDE) + table * (2 * WIDE + size)
    saved = []
    if batch.layout.tp > 1:
        saved.append(index_tensor("embedding.places", batch.rows, batch.tokens))
        saved.append(SavedTensor("embedding.elsewhere", (batch.rows, batch.tokens), "bool"))
    lookups = (
        Operation("embedding", "lookup", "forward", 0.0, 2.0 * size * looked_up),
        Operation("embedding", "lookup", "input", 0.0, 1.0 * back),
    )
    calls = row_parallel_calls(batch, "embedding", in_block=False)
    yield make_operator("embedding", lookups, saved=saved, collectives=calls, parameters=table)
    stream = batch.rows * batch.slice * hidden
    if config.embedding_factor != 1:
        yield elementwise_operator(batch, "embedding.scale", stream, "scaled")
    if config.embedding_norm:
        yield norm_operator(batch, "embedding_norm")
    shape, learned = (batch.rows if batch.masked else 1, batch.tokens), config.positions == "learned"
    for name, entries, indexed in (
        ("positions", config.max_positions if learned else 0, batch.masked or batch.layout.cp == 1),
        ("token types", config.token_types, learned),
    ):
        if entries:
            index = [index_tensor(f"{name.replace(' ', '_')}.places", *shape)] * indexed
            yield elementwise_operator(
                batch, name, stream, "residual", "eager", saved=index, parameters=entries * hidden
            )


def head_operators(batch: MicroBatch, keeps_gradient: bool) -> tuple[Operator, ...]:
    """Return the operators of the final norm, the language-model head (product with the vocabulary matrix) and
    the loss.

    keeps_gradient: True if the forward already computes the gradients of the head's input and weight and saves them;
    else the backward computes the logits a second time.
    """
    return _cached(batch, ("head", keeps_gradient), lambda: _unadapted_head(batch, keeps_gradient))


def _unadapted_head(batch: MicroBatch, keeps_gradient: bool) -> Iterator[Operator]:
    """Yield the operators of `head_operators` as they are without adapter. keeps_gradient: the forward computes and
    saves the head's gradients."""
    if batch.config.encoder:
        yield from encoder_head_operators(batch)
        return
    yield norm_operator(batch, "final_norm")
    if batch.config.logit_divisor != 1:  # the head's input is divided, not the logits
        stream = batch.rows * batch.slice * batch.config.hidden
        yield elementwise_operator(batch, "head.scale", stream, "scaled")
    shape = LinearShape(batch.all_tokens, batch.vocabulary, batch.config.hidden)
    calls = column_parallel_calls(batch, "head.input", in_block=False)
    product = linear_operator(batch, "head", shape, collectives=calls)
    if not keeps_gradient:
        product = product._replace(operations=(*product.operations, product.operations[0]._replace(phase="recompute")))
    yield product
    if batch.config.logit_softcap:
        capped = elementwise_kernels(batch, "head.softcap", batch.all_tokens * batch.vocabulary, "capped_logits")
        again = () if keeps_gradient else (capped[0]._replace(phase="recompute"),)
        yield make_operator("head.softcap", (*capped, *again))
    yield _loss_operator(batch, batch.all_tokens * batch.vocabulary, _loss_collectives(batch))


def prediction_input_operators(batch: MicroBatch) -> Iterator[Operator]:
    """Yield the operators that compute the input of the multi-token-prediction layer (DeepSeek-V3, arXiv:2412.19437,
    eq. 21): norms of the hidden states and of the next tokens' embeddings, and the linear layer that reads both
    concatenated."""
    yield from (norm_operator(batch, name) for name in ("prediction_hidden_norm", "prediction_embedding_norm"))
    shape = LinearShape(batch.rows * batch.slice, batch.config.hidden, 2 * batch.config.hidden)
    yield linear_operator(batch, "prediction_projection", shape)


def _loss_operator(batch: MicroBatch, logits: Number, calls: Iterable[CollectiveCall] = ()) -> Operator:
    """Return the operator of the cross-entropy loss. logits: their number on this rank; calls: its collectives."""
    forward = Operation("loss", "loss", "forward", 0.0, logits * batch.engine.loss_bytes / 2)
    return make_operator("loss", (forward, forward._replace(phase="input")), collectives=calls)


def _loss_collectives(batch: MicroBatch) -> Iterator[CollectiveCall]:
    """Yield the all-reduces of the loss: over tp, for each token the maximum logit, the sum of exponentials and the
    target's logit (vocabulary-parallel cross-entropy); over cp, the sums of log-probabilities of responses in
    preference training."""
    if batch.layout.tp > 1:
        for site in ("loss.target_logit", "loss.maximum", "loss.sum"):
            yield CollectiveCall("tensor", "tp", "all-reduce", ((site, batch.all_tokens * batch.wide),))
    if batch.responses and batch.layout.cp > 1:
        size = 8 * batch.rows * batch.responses
        yield CollectiveCall("context", "cp", "all-reduce", (("loss.responses", size),), timed=False)


def encoder_head_operators(batch: MicroBatch) -> Iterator[Operator]:
    """Yield the operators of an encoder's head: for masked-language models a linear transform, norm, vocabulary product
    and loss of the masked tokens; for classifiers a pooler and a linear classifier."""
    config, hidden = batch.config, batch.config.hidden
    masked = config.head == "masked"
    places = batch.predictions
    dense, out = ("transform", "head") if masked else ("pooler", "classifier")
    outputs = config.vocabulary if masked else len(config.labels)
    yield linear_operator(batch, dense, LinearShape(places, hidden, hidden, bias=True))
    yield elementwise_operator(batch, f"{dense}.activation", places * hidden, "activation")
    if masked:
        yield norm_operator(batch, "transform_norm", places)
    if outputs:
        # The matrix over the vocabulary is the embedding's.
        parameters = outputs if masked else outputs * (hidden + 1)
        yield linear_operator(batch, out, LinearShape(places, outputs, hidden, bias=True), parameters=parameters)
        yield _loss_operator(batch, places * outputs)
