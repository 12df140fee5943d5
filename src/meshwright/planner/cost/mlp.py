"""The operators of a dense MLP and of a mixture of experts, in order, each with its cost."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.planner.cost.micro_batch import MicroBatch, Number, Routed
from meshwright.planner.cost.operators import (
    CollectiveCall,
    LinearShape,
    Operator,
    SavedTensor,
    elementwise_kernels,
    linear_operator,
)
from meshwright.planner.cost.tensor_parallel import (
    column_parallel_calls,
    hidden_bytes,
    row_parallel_calls,
    row_parallel_saved,
)


def mlp_operators(batch: MicroBatch) -> Iterator[Operator]:
    """Yield the operators of a dense MLP."""
    yield Operator("mlp.input", collectives=tuple(column_parallel_calls(batch, "mlp.input")))
    yield from _mlp_products(batch, "mlp", batch.config.intermediate // batch.tp, row_parallel_saved(batch, "mlp.down"))
    yield Operator("mlp.output", collectives=tuple(row_parallel_calls(batch, "mlp.output")))


def _mlp_products(
    batch: MicroBatch, name: str, width: Number, kept: tuple[SavedTensor, ...], input_saved: bool = False
) -> Iterator[Operator]:
    """Yield the operators of an MLP: up (with gate) product, activation, down product.

    name: prefix of their names, such as "mlp"; width: hidden features on this rank; kept: tensors of the down product
    that are saved under selective recompute; input_saved: True if another operator saves the MLP's input.
    """
    config, gated, tokens = batch.config, batch.config.gated, (batch.rows, batch.tokens)
    up = width * (2 if gated else 1)
    x_input = SavedTensor(f"{name}.up.input", (*tokens, config.hidden), "x")
    x_up = SavedTensor(f"{name}.up.output", (*tokens, up), "x")
    reads_up = gated or config.activation != "relu"  # ReLU's backward reads its result alone
    yield linear_operator(
        batch, f"{name}.up", LinearShape(batch.all_tokens, up, config.hidden, bias=config.mlp_bias),
        saved=(*([] if input_saved else [x_input]), *([x_up] if reads_up else [])), kept=(x_up,),
    )  # fmt: skip
    columns = *tokens, width
    yield Operator(
        f"{name}.activation",
        elementwise_kernels(
            batch, f"{name}.activation", batch.all_tokens * width, "gated_activation" if gated else "activation",
            batch.engine.activation_fusion,
        ),
        (SavedTensor(f"{name}.activation", columns, "x"),) if gated else (),
    )  # fmt: skip
    yield linear_operator(
        batch, f"{name}.down", LinearShape(batch.all_tokens, config.hidden, width, bias=config.mlp_bias),
        saved=(SavedTensor(f"{name}.down.input", columns, "x"),), kept=kept,
    )  # fmt: skip


# --- mixtures of experts


def mixture_operators(batch: MicroBatch, layer: int) -> Iterator[Operator]:
    """Yield the operators of a mixture of experts in forward order: router, dispatch, this rank's experts, combine,
    shared expert. layer: index of the layer, for which the numbers of routed tokens may be known."""
    config, layout, fusion = batch.config, batch.layout, batch.engine.activation_fusion
    load, held = batch.load(layer), config.experts // batch.ep
    arriving = batch.copies * (batch.etp if batch.expert_parallel else 1)  # of equal load, by which times are predicted
    width, hidden = batch.expert_width, config.hidden
    # False: only dispatch and combine communicate.
    meets = layout.tp > 1 and (not batch.expert_parallel or config.shared_intermediate > 0)
    if meets:
        yield Operator("mlp.input", collectives=tuple(column_parallel_calls(batch, "mlp.input")))
    yield from _router_operators(batch)
    copied = (SavedTensor("mlp.experts.unweighted", (batch.copies, hidden), "x"),) if config.routed_input else ()
    yield Operator(
        "mlp.copies", elementwise_kernels(batch, "mlp.copies", batch.copies * hidden, "token_copies"), copied
    )
    if batch.expert_parallel:
        yield from _dispatch_operators(batch, load, arriving)
    # A rank adds its slice of the second bias.
    biased, slices = config.mlp_bias, batch.etp if batch.expert_parallel else batch.tp
    matrices = (
        LinearShape(arriving / held, 2 * width, hidden, held, biased),
        LinearShape(arriving / held, hidden, width, held),
    )
    held_parameters = matrices[0].parameters, matrices[1].parameters + biased * held * (hidden // slices)
    owned = "expert_parameters" if batch.expert_parallel else "parameters"
    computed = load.computed
    x_up = SavedTensor("mlp.experts.up.output", (computed, 2 * width), "x")
    x_input = SavedTensor("mlp.experts.up.input", (computed, hidden), "x")
    ends = SavedTensor("mlp.experts.ends", (held,), "int32")
    found = linear_operator(
        batch, "mlp.experts.up", matrices[0], saved=(ends, x_input, x_up), kept=(x_up,), parameters=0,
    )  # fmt: skip
    yield found._replace(**{owned: held_parameters[0]})
    if biased:
        columns = arriving * (2 * width + hidden // slices)
        yield Operator("mlp.experts.bias", elementwise_kernels(batch, "mlp.experts.bias", columns, "grouped_bias"))
    clamped = config.swiglu_limit is not None  # one function, which saves its input alone
    name = "clamped_swiglu" if clamped else "gated_activation"
    yield Operator(
        "mlp.experts.activation", elementwise_kernels(batch, "mlp.experts.activation", arriving * width, name, fusion),
        () if clamped else (SavedTensor("mlp.experts.activation", (computed, width), "x"),),
    )  # fmt: skip
    down = SavedTensor("mlp.experts.down.input", (computed, width), "x")
    found = linear_operator(
        batch, "mlp.experts.down", matrices[1], saved=(down,),
        kept=(SavedTensor("mlp.experts.down.output", (computed, hidden), "x"),), parameters=0,
    )  # fmt: skip
    yield found._replace(**{owned: held_parameters[1]})
    yield from _combine_operators(batch, load)
    if config.shared_intermediate:
        yield from _shared_expert_operators(batch)
    if meets:
        output = SavedTensor("mlp.output", (batch.rows, batch.slice, hidden), "x")
        yield Operator("mlp.output", kept=(output,), collectives=tuple(row_parallel_calls(batch, "mlp.output")))


def _router_operators(batch: MicroBatch) -> Iterator[Operator]:
    """Yield the operators of the router: linear layer, top-k choice of experts with their weights, load-balancing
    loss."""
    config, routed = batch.config, batch.routed_tokens
    chosen, experts = config.experts_per_token, config.experts
    wide = config.router == "sigmoid" and batch.narrow  # it multiplies copies in the type of sums
    apart = (
        batch.expert_parallel and batch.layout.tp > 1
    )  # the shared expert reads all tokens, the router a slice of them
    saved = []
    if not wide or (config.shared_intermediate and not apart):
        saved.append(SavedTensor("mlp.input", (routed, config.hidden), "x"))
    if wide:
        saved.append(SavedTensor("mlp.router.input", (routed, config.hidden), "wide"))
        saved.append(SavedTensor("mlp.router.weight", (experts, config.hidden), "wide"))
    logits = SavedTensor("mlp.router.logits", (routed, experts), "wide" if config.router == "sigmoid" else "x")
    product = LinearShape(routed, experts, config.hidden, bias=config.mlp_bias)
    yield linear_operator(
        batch, "mlp.router", product, saved=tuple(saved), kept=(logits,),
        parameters=experts * (config.hidden + config.router_bias + config.mlp_bias),
    )  # fmt: skip
    saved = [
        SavedTensor("mlp.router.scores", (routed, experts), "wide"),
        SavedTensor("mlp.router.chosen", (routed, chosen), "index"),
    ]
    if config.normalise_choice:
        saved.append(SavedTensor("mlp.router.unnormalised", (routed, chosen), "wide"))
        saved.append(SavedTensor("mlp.router.sum", (routed, 1), "wide"))
    saved.append(SavedTensor("mlp.router.weights", (routed, chosen), "x"))
    yield Operator("mlp.routing", elementwise_kernels(batch, "mlp.routing", routed * experts, "routing"), tuple(saved))
    yield _balance_operator(batch)


def _balance_operator(batch: MicroBatch) -> Operator:
    """Return the operator of the load-balancing loss and the update of the router's biases."""
    config, layout = batch.config, batch.layout
    saved, kept, calls = [], [], []
    shape = batch.rows, config.experts
    if config.router_loss:
        saved.append(SavedTensor("mlp.router.load", shape, "wide"))
        axes = ["cp"] * (layout.cp > 1) + ["tp"] * (batch.expert_parallel and layout.tp > 1)
        kept = [SavedTensor(f"mlp.router.load.{number}", shape, "wide") for number in range(len(axes))]
        again, load = layout.recompute == "full", 4 * batch.rows * config.experts
        calls = [
            CollectiveCall("expert", axis, "all-reduce", ((f"router.load.{axis}", load),), again=again, timed=False)
            for axis in axes
        ]
    if config.router_bias:
        saved.append(SavedTensor("mlp.router.above_mean", (config.experts,), "wide"))
    return Operator("mlp.balance", (), tuple(saved), tuple(kept), tuple(calls))


def _dispatch_operators(batch: MicroBatch, load: Routed, arriving: Number) -> Iterator[Operator]:
    """Yield the operators that send token copies to expert-parallel ranks: all-to-all over ep, all-gather over etp, and
    sorting of the copies by expert.

    load: copies that this rank receives and computes; arriving: copies under equal load, from which seconds are
    predicted.
    """
    config, hidden = batch.config, batch.config.hidden
    full, repeated = batch.layout.recompute == "full", batch.layout.recompute != "none"
    rows, sent = _copied_bytes(batch)
    saved = tuple(
        SavedTensor(f"mlp.experts.{name}", (load.computed,), "index") for name in ("order_here", "inverse_here")
    )
    kept = (SavedTensor("mlp.experts.dispatched", (load.arrived, hidden), "x"),) if batch.layout.ep > 1 else ()
    counts = 8 * (config.experts // batch.ep + 1), 8 * (config.experts + 1)
    calls = [
        *_forward_and_backward("ep", "all-to-all", "experts.dispatch", (sent, rows), full),
        *_forward_and_backward("etp", "all-gather", "experts.gather", (rows * batch.etp,) * 2, full),
        # The time model leaves out what selective recompute gathers again.
        *([_untimed_call("etp", "experts.gather", rows, batch.etp - 1)] if repeated and not full else []),
        _untimed_call("ep", "experts.counts", counts[0], batch.ep - 1),
        _untimed_call("etp", "experts.counts", counts[1], batch.etp - 1),
    ]
    if not batch.layout.tensor_sequence_parallel and batch.layout.tp > 1:
        back = (("experts.input.backward", hidden_bytes(batch)),)
        calls.append(CollectiveCall("expert", "tp", "all-gather", back, "input"))
    of = elementwise_kernels(batch, "mlp.exchange", arriving * hidden, "dispatch")
    yield Operator("mlp.exchange", of, saved, kept, tuple(calls))


def _combine_operators(batch: MicroBatch, load: Routed) -> Iterator[Operator]:
    """Yield the operators that return the experts' results to the ranks of their tokens and sum them, weighted by the
    router: if experts are expert-parallel, a reduce-scatter over etp and an all-to-all over ep. load: copies that this
    rank receives and computes."""
    config, layout, hidden = batch.config, batch.layout, batch.config.hidden
    full, repeated = layout.recompute == "full", layout.recompute != "none"
    rows, sent = _copied_bytes(batch)
    saved: tuple[SavedTensor, ...] = (
        SavedTensor("mlp.experts.inverse", (batch.copies,), "index"),
        SavedTensor("mlp.experts.order", (batch.copies,), "index"),
    )
    if not config.routed_input:  # else the weights multiply the inputs
        saved += (SavedTensor("mlp.experts.output", (batch.routed_tokens, config.experts_per_token, hidden), "x"),)
    kept, calls = [], []
    if layout.ep > 1:
        kept.append(SavedTensor("mlp.experts.combined", (batch.copies, hidden), "x"))
    if layout.etp > 1:
        kept.append(SavedTensor("mlp.experts.sum", (load.arrived, hidden), "x"))
    if batch.expert_parallel:
        calls += _forward_and_backward("etp", "reduce-scatter", "experts.sum", (rows * batch.etp,) * 2, full)
        calls += _forward_and_backward("ep", "all-to-all", "experts.combine", (rows, sent), full)
        if not layout.tensor_sequence_parallel and layout.tp > 1:
            size = hidden_bytes(batch)
            calls.append(CollectiveCall("expert", "tp", "all-gather", (("experts.output", size),)))
            if repeated and config.shared_intermediate:  # else a recomputed block stops before its last gather
                calls.append(CollectiveCall("expert", "tp", "all-gather", (("experts.output", size),), timed=False))
    yield Operator("mlp.combine", (), saved, tuple(kept), tuple(calls))


def _copied_bytes(batch: MicroBatch) -> tuple[Number, Number]:
    """Return the bytes of all token copies (one for each token and chosen expert) as (held in the activations' type,
    sent to experts in the type used for dispatch)."""
    elements = batch.copies * batch.config.hidden
    eight_bit = batch.eight_bit and batch.engine.eight_bit_activations
    return elements * batch.itemsize, elements * (1 if eight_bit else batch.itemsize)


def _forward_and_backward(
    axis: str, operation: str, site: str, sizes: tuple[Number, Number], again: bool
) -> list[CollectiveCall]:
    """Return [a collective of the forward, its counterpart in the backward], such as all-gather and reduce-scatter.

    axis, operation, site: axis, collective and call site of the forward; sizes: bytes of the full vector in (forward,
    backward); again: True if activation checkpointing repeats the forward's.
    """
    opposite = {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather"}.get(operation, operation)
    return [
        CollectiveCall("expert", axis, operation, ((site, sizes[0]),), "forward", 1, again),  # type: ignore[arg-type]
        CollectiveCall("expert", axis, opposite, ((f"{site}.backward", sizes[1]),), "input"),  # type: ignore[arg-type]
    ]


def _untimed_call(axis: str, site: str, size: Number, count: Number) -> CollectiveCall:
    """Return messages that count as bytes sent but that the time model leaves out. axis, site: axis and call site;
    size: bytes of each; count: number of messages."""
    return CollectiveCall("expert", axis, "send", ((site, size),), "forward", count, timed=False)


def _shared_expert_operators(batch: MicroBatch) -> Iterator[Operator]:
    """Yield the operators of the shared expert, which computes every token. It shares its saved input with the mixture,
    unless the mixture has only a slice of the tokens."""
    config, tokens = batch.config, (batch.rows, batch.tokens)
    name, width = "mlp.shared", config.shared_intermediate // batch.tp
    down = SavedTensor(f"{name}.down.output", (*tokens, config.hidden), "x")
    apart = batch.expert_parallel and batch.layout.tp > 1
    yield from _mlp_products(batch, name, width, (down,), input_saved=not apart)
    if config.shared_gate:
        gate = SavedTensor(f"{name}.gate", (*tokens, 1), "x")
        output = SavedTensor(f"{name}.output", (*tokens, config.hidden), "x")
        yield linear_operator(
            batch, f"{name}.gate", LinearShape(batch.all_tokens, 1, config.hidden), saved=(gate, output), kept=(gate,)
        )
