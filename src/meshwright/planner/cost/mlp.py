"""The operators of a dense MLP and of a mixture of experts, in order, each with its cost."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.cost.micro_batch import MicroBatch, Number, Routed
from meshwright.planner.cost.operators import (
    CollectiveCall,
    LinearShape,
    Operator,
    SavedTensor,
    elementwise_operator,
    forward_and_backward,
    index_tensor,
    linear_operator,
    make_operator,
    wide_tensor,
    x_tensor,
)
from meshwright.planner.cost.tensor_parallel import (
    column_parallel_calls,
    hidden_bytes,
    row_parallel_calls,
    row_parallel_saved,
)


def mlp_operators(batch: MicroBatch) -> Iterator[Operator]:
    """Yield the operators of a dense MLP."""
    yield make_operator("mlp.input", collectives=column_parallel_calls(batch, "mlp.input"))
    yield from _mlp_products(batch, "mlp", batch.config.intermediate // batch.tp, row_parallel_saved(batch, "mlp.down"))
    yield make_operator("mlp.output", collectives=row_parallel_calls(batch, "mlp.output"))


def _mlp_products(
    batch: MicroBatch, name: str, width: Number, kept: tuple[SavedTensor, ...], input_saved: bool = False
) -> Iterator[Operator]:
    """Yield the operators of an MLP: up (with gate) product, activation, down product.

    name: prefix of their names, such as "mlp"; width: hidden features on this rank; kept: tensors of the down product
    that are saved under selective recompute; input_saved: True if another operator saves the MLP's input.
    """
    config, gated, tokens = batch.config, batch.config.gated, (batch.rows, batch.tokens)
    up, fusion = width * (2 if gated else 1), batch.engine.activation_fusion
    x_input = [] if input_saved else [x_tensor(f"{name}.up.input", *tokens, config.hidden)]
    x_up = [x_tensor(f"{name}.up.output", *tokens, up)]
    reads_up = gated or config.activation != "relu"  # ReLU's backward reads its result alone
    up_shape = LinearShape(batch.all_tokens, up, config.hidden, bias=config.mlp_bias)
    yield linear_operator(batch, f"{name}.up", up_shape, saved=x_input + x_up * reads_up, kept=x_up)
    work = "gated_activation" if gated else "activation"
    saved = [x_tensor(f"{name}.activation", *tokens, width)] * gated
    yield elementwise_operator(batch, f"{name}.activation", batch.all_tokens * width, work, fusion, saved=saved)
    down_shape = LinearShape(batch.all_tokens, config.hidden, width, bias=config.mlp_bias)
    x_down = x_tensor(f"{name}.down.input", *tokens, width)
    yield linear_operator(batch, f"{name}.down", down_shape, saved=[x_down], kept=kept)


# --- mixtures of experts


def mixture_operators(batch: MicroBatch, layer: int) -> Iterator[Operator]:
    """Yield the operators of a mixture of experts in forward order: router, dispatch, this rank's experts, combine,
    shared expert. layer: index of the layer, for which the numbers of routed tokens may be known."""
    config, layout, hidden = batch.config, batch.layout, batch.config.hidden
    load = batch.load(layer)
    # Of equal load, by which times are predicted.
    arriving = batch.copies * (batch.etp if batch.expert_parallel else 1)
    # False: only dispatch and combine communicate.
    meets = layout.tp > 1 and (not batch.expert_parallel or config.shared_intermediate > 0)
    if meets:
        yield make_operator("mlp.input", collectives=column_parallel_calls(batch, "mlp.input"))
    yield from _router_operators(batch)
    copied = [x_tensor("mlp.experts.unweighted", batch.copies, hidden)] * config.routed_input
    yield elementwise_operator(batch, "mlp.copies", batch.copies * hidden, "token_copies", saved=copied)
    if batch.expert_parallel:
        yield _dispatch_operator(batch, load, arriving)
    yield from _expert_operators(batch, load.computed, arriving)
    yield _combine_operator(batch, load)
    if config.shared_intermediate:
        yield from _shared_expert_operators(batch)
    if meets:
        output = x_tensor("mlp.output", batch.rows, batch.slice, hidden)
        yield make_operator("mlp.output", kept=[output], collectives=row_parallel_calls(batch, "mlp.output"))


def _expert_operators(batch: MicroBatch, computed: Number, arriving: Number) -> Iterator[Operator]:
    """Yield the operators of this rank's experts: up product with gate, activation, down product. computed: token
    copies that they compute; arriving: those under equal load, from which seconds are predicted."""
    config, hidden, width = batch.config, batch.config.hidden, batch.expert_width
    held, biased = config.experts // batch.ep, config.mlp_bias
    owned = "expert_parameters" if batch.expert_parallel else "parameters"
    up, down = (
        LinearShape(arriving / held, 2 * width, hidden, held, biased),
        LinearShape(arriving / held, hidden, width, held),
    )
    # A rank adds its slice of the second bias.
    bias = hidden // (batch.etp if batch.expert_parallel else batch.tp) if biased else 0
    x_input, x_up = (
        x_tensor(f"mlp.experts.up.{name}", computed, size) for name, size in (("input", hidden), ("output", 2 * width))
    )
    saved = SavedTensor("mlp.experts.ends", (held,), "int32"), x_input, x_up
    parameters = {"parameters": 0, owned: up.parameters}
    yield linear_operator(batch, "mlp.experts.up", up, saved=saved, kept=[x_up], **parameters)
    if biased:
        yield elementwise_operator(batch, "mlp.experts.bias", arriving * (2 * width + bias), "grouped_bias")
    clamped = config.swiglu_limit is not None  # one function, which saves its input alone
    work = "clamped_swiglu" if clamped else "gated_activation"
    activated = [x_tensor("mlp.experts.activation", computed, width)] * (not clamped)
    name, fusion = "mlp.experts.activation", batch.engine.activation_fusion
    yield elementwise_operator(batch, name, arriving * width, work, fusion, saved=activated)
    x_down, output = (
        x_tensor("mlp.experts.down.input", computed, width),
        x_tensor("mlp.experts.down.output", computed, hidden),
    )
    parameters = {"parameters": 0, owned: down.parameters + held * bias}
    yield linear_operator(batch, "mlp.experts.down", down, saved=[x_down], kept=[output], **parameters)


def _router_operators(batch: MicroBatch) -> Iterator[Operator]:
    """Yield the operators of the router: linear layer, top-k choice of experts with their weights, load-balancing
    loss."""
    config, routed = batch.config, batch.routed_tokens
    chosen, experts, hidden = config.experts_per_token, config.experts, config.hidden
    wide = config.router == "sigmoid" and batch.narrow  # it multiplies copies in the type of sums
    # The shared expert reads all tokens, the router a slice of them.
    apart = batch.expert_parallel and batch.layout.tp > 1
    saved = [x_tensor("mlp.input", routed, hidden)] if not wide or (config.shared_intermediate and not apart) else []
    if wide:
        saved += [wide_tensor("mlp.router.input", routed, hidden), wide_tensor("mlp.router.weight", experts, hidden)]
    logits = SavedTensor("mlp.router.logits", (routed, experts), "wide" if config.router == "sigmoid" else "x")
    yield linear_operator(
        batch, "mlp.router", LinearShape(routed, experts, hidden, bias=config.mlp_bias), saved=saved, kept=[logits],
        parameters=experts * (hidden + config.router_bias + config.mlp_bias),
    )  # fmt: skip
    saved = [wide_tensor("mlp.router.scores", routed, experts), index_tensor("mlp.router.chosen", routed, chosen)]
    if config.normalise_choice:
        saved += [wide_tensor("mlp.router.unnormalised", routed, chosen), wide_tensor("mlp.router.sum", routed, 1)]
    saved.append(x_tensor("mlp.router.weights", routed, chosen))
    yield elementwise_operator(batch, "mlp.routing", routed * experts, "routing", saved=saved)
    yield _balance_operator(batch)


def _balance_operator(batch: MicroBatch) -> Operator:
    """Return the operator of the load-balancing loss and the update of the router's biases."""
    config, layout, shape = batch.config, batch.layout, (batch.rows, batch.config.experts)
    axes = ["cp"] * (layout.cp > 1) + ["tp"] * (batch.expert_parallel and layout.tp > 1) if config.router_loss else []
    again, load = layout.recompute == "full", 4 * batch.rows * config.experts
    saved = [wide_tensor("mlp.router.load", *shape)] if config.router_loss else []
    saved += [wide_tensor("mlp.router.above_mean", config.experts)] if config.router_bias else []
    return make_operator(
        "mlp.balance", saved=saved,
        kept=(wide_tensor(f"mlp.router.load.{number}", *shape) for number in range(len(axes))),
        collectives=(
            CollectiveCall("expert", axis, "all-reduce", ((f"router.load.{axis}", load),), again=again, timed=False)
            for axis in axes
        ),
    )  # fmt: skip


def _dispatch_operator(batch: MicroBatch, load: Routed, arriving: Number) -> Operator:
    """Return the operator that sends token copies to expert-parallel ranks: all-to-all over ep, all-gather over etp,
    and sorting of the copies by expert.

    load: copies that this rank receives and computes; arriving: copies under equal load, from which seconds are
    predicted.
    """
    config, hidden = batch.config, batch.config.hidden
    full, repeated = batch.layout.recompute == "full", batch.layout.recompute != "none"
    rows, sent = _copied_bytes(batch)
    counts = 8 * (config.experts // batch.ep + 1), 8 * (config.experts + 1)
    calls = [
        *forward_and_backward("expert", "ep", "all-to-all", "experts.dispatch", (sent, rows), full),
        *forward_and_backward("expert", "etp", "all-gather", "experts.gather", (rows * batch.etp,) * 2, full),
        # The time model leaves out what selective recompute gathers again.
        *([_untimed_call("etp", "experts.gather", rows, batch.etp - 1)] if repeated and not full else []),
        _untimed_call("ep", "experts.counts", counts[0], batch.ep - 1),
        _untimed_call("etp", "experts.counts", counts[1], batch.etp - 1),
    ]
    if not batch.layout.tensor_sequence_parallel and batch.layout.tp > 1:
        back = (("experts.input.backward", hidden_bytes(batch)),)
        calls.append(CollectiveCall("expert", "tp", "all-gather", back, "input"))
    return elementwise_operator(
        batch, "mlp.exchange", arriving * hidden, "dispatch", collectives=calls,
        saved=(index_tensor(f"mlp.experts.{name}", load.computed) for name in ("order_here", "inverse_here")),
        kept=[x_tensor("mlp.experts.dispatched", load.arrived, hidden)] * (batch.layout.ep > 1),
    )  # fmt: skip


def _combine_operator(batch: MicroBatch, load: Routed) -> Operator:
    """Return the operator that returns the experts' results to the ranks of their tokens and sums them, weighted by the
    router: if experts are expert-parallel, a reduce-scatter over etp and an all-to-all over ep. load: copies that this
    rank receives and computes."""
    config, layout, hidden = batch.config, batch.layout, batch.config.hidden
    full, repeated = layout.recompute == "full", layout.recompute != "none"
    rows, sent = _copied_bytes(batch)
    saved = [index_tensor(f"mlp.experts.{name}", batch.copies) for name in ("inverse", "order")]
    if not config.routed_input:  # else the weights multiply the inputs
        saved.append(x_tensor("mlp.experts.output", batch.routed_tokens, config.experts_per_token, hidden))
    kept = [x_tensor("mlp.experts.combined", batch.copies, hidden)] * (layout.ep > 1)
    kept += [x_tensor("mlp.experts.sum", load.arrived, hidden)] * (layout.etp > 1)
    calls = []
    if batch.expert_parallel:
        calls += forward_and_backward("expert", "etp", "reduce-scatter", "experts.sum", (rows * batch.etp,) * 2, full)
        calls += forward_and_backward("expert", "ep", "all-to-all", "experts.combine", (rows, sent), full)
        if not layout.tensor_sequence_parallel and layout.tp > 1:
            gather = CollectiveCall("expert", "tp", "all-gather", (("experts.output", hidden_bytes(batch)),))
            # Without a shared expert a recomputed block stops before its last gather.
            again = [gather._replace(timed=False)] * (repeated and config.shared_intermediate > 0)
            calls += [gather, *again]
    return make_operator("mlp.combine", saved=saved, kept=kept, collectives=calls)


def _copied_bytes(batch: MicroBatch) -> tuple[Number, Number]:
    """Return the bytes of all token copies (one for each token and chosen expert) as (held in the activations' type,
    sent to experts in the type used for dispatch)."""
    elements = batch.copies * batch.config.hidden
    eight_bit = batch.eight_bit and batch.engine.eight_bit_activations
    return elements * batch.itemsize, elements * (1 if eight_bit else batch.itemsize)


def _untimed_call(axis: str, site: str, size: Number, count: Number) -> CollectiveCall:
    """Return messages that count as bytes sent but that the time model leaves out. axis, site: axis and call site;
    size: bytes of each; count: number of messages."""
    return CollectiveCall("expert", axis, "send", ((site, size),), "forward", count, timed=False)


def _shared_expert_operators(batch: MicroBatch) -> Iterator[Operator]:
    """Yield the operators of the shared expert, which computes every token. It shares its saved input with the mixture,
    unless the mixture has only a slice of the tokens."""
    config, tokens = batch.config, (batch.rows, batch.tokens)
    name, width = "mlp.shared", config.shared_intermediate // batch.tp
    down = x_tensor(f"{name}.down.output", *tokens, config.hidden)
    apart = batch.expert_parallel and batch.layout.tp > 1
    yield from _mlp_products(batch, name, width, (down,), input_saved=not apart)
    if config.shared_gate:
        gate, shape = x_tensor(f"{name}.gate", *tokens, 1), LinearShape(batch.all_tokens, 1, config.hidden)
        output = x_tensor(f"{name}.output", *tokens, config.hidden)
        yield linear_operator(batch, f"{name}.gate", shape, saved=(gate, output), kept=(gate,))
