"""Operators of a model with an adapter, derived from those of the model without: frozen weights get no gradients,
nothing before the first adapter has a backward pass, adapted layers have two more products, and quantized weights are
dequantized."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from meshwright.planner.cost import elementwise
from meshwright.planner.cost.micro_batch import ITEM_BYTES, Adapted, LayerKind, MicroBatch, Number
from meshwright.planner.cost.operators import Linear, Operation, Operator, Phase, SavedTensor, pointwise, products
from meshwright.spec.adapter_config import BLOCK, RECORD_BYTES
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table


def freeze(
    at: MicroBatch, operators: Iterable[Operator], kind: LayerKind | None = None, arrives: bool = True
) -> Iterator[Operator]:
    """Yield the operators of a model with an adapter for those of the model without, in order.

    kind: of the layer; None: embedding or head, which have no adapter. arrives: the gradient of the first operator's
    input is computed, because of a trained parameter before it or another pipeline stage.
    """
    differentiable = kind is None or arrives or bool(kind.adapted)
    beside = arrives  # the gradient of the mixture's input is computed; the shared expert reads it after the others
    for operator in operators:
        adapted = next((one for one in kind.adapted if one.layer == operator.name), None) if kind else None
        shared = operator.name.startswith("mlp.shared")
        beside = arrives if operator.name == "mlp.router" else beside
        found = _freeze(at, operator, adapted, beside if shared else arrives)
        if operator.name == "mlp.combine" and arrives and not beside:
            found = found._replace(saved=_combined_alone(at, found.saved))
        if operator.name == "mlp.router" and kind and any(one.layer == "mlp.shared.up" for one in kind.adapted):
            # The input that the shared expert's adapter reads.
            read = tuple(one for one in operator.saved if one.name == "mlp.input")
            found = found._replace(saved=(*read, *found.saved))
        yield found if differentiable else found._replace(kept=())
        beside = beside or (shared and adapted is not None)
        arrives = arrives or adapted is not None


def _combined_alone(at: MicroBatch, saved: tuple[SavedTensor, ...]) -> tuple[SavedTensor, ...]:
    """Return the saved tensors of the experts' combination, given those of a trained router, if neither the router nor
    the experts' input has a gradient."""
    order = (one for one in saved if one.name == "mlp.experts.order")
    chosen = at.routed_tokens, at.config.experts_per_token
    return (*order, *(() if at.config.routed_input else (SavedTensor("mlp.router.weights", chosen, "x"),)))


def _freeze(at: MicroBatch, operator: Operator, adapted: Adapted | None, arrives: bool) -> Operator:
    """Return an operator with frozen parameters. adapted: its adapter, if it has one; arrives: its input has a
    gradient."""
    name, leaves = operator.name, arrives or adapted is not None
    product = next((one for one in operator.operations if one.name == name and one.kind == "product"), None)
    operations = [
        one
        for one in operator.operations
        if one.phase == "forward" or (one.phase != "weight" and arrives and one.name != f"{name}.bias")
    ]
    # Inputs of frozen products, and the vectors that a norm's factors multiply, have weight gradients alone to serve.
    inputs = {f"{name}.input", "mlp.input"} if product and not adapted else set()
    saved = [one for one in operator.saved if leaves and one.name not in inputs and not one.name.endswith(".scaled")]
    if adapted and not arrives:  # the output and the input that A reads
        saved = list(operator.saved)
    calls = [
        one
        for one in operator.collectives
        if one.phase == "forward" or (arrives if "input" in one.sites[0][0] else leaves)
    ]
    found = operator._replace(
        operations=tuple(operations), saved=tuple(saved), collectives=tuple(calls), parameters=0, expert_parameters=0
    )
    if product is None or product.shape is None:
        return found
    if at.config.adapter and at.config.adapter.packed and name.startswith(PACKED):
        found = found._replace(operations=(*_unpacked(at, product, arrives), *found.operations))
    return found if adapted is None else _with_adapter(at, found, product, adapted, arrives)


PACKED = ("attention.", "mlp.up", "mlp.down", "mlp.shared.up", "mlp.shared.down")
"""Beginnings of the names of products whose frozen weights `adapter.base` packs."""


def _unpacked(at: MicroBatch, product: Operation, arrives: bool) -> Iterator[Operation]:
    """Yield the kernels that unpack the weight of a product, again for the input's gradient."""
    assert at.config.adapter and product.shape
    _, outputs, inputs = product.shape
    of = elementwise.traffic(f"unpacked_{at.config.adapter.packed}").forward
    phases: tuple[Phase, ...] = ("forward", "input") if arrives else ("forward",)
    for phase in phases:
        moved = of.bytes(at.itemsize) * outputs * inputs / of.kernels
        yield Operation(f"{product.name}.unpack", "elementwise", phase, 0.0, moved, None, of.kernels)


def _with_adapter(at: MicroBatch, operator: Operator, product: Operation, adapted: Adapted, arrives: bool) -> Operator:
    """Return the operator of a linear layer with the products of its adapter. product: of the base weight."""
    assert at.config.adapter and product.shape
    rank, dora = at.config.adapter.rank, at.config.adapter.kind == "dora"
    rows, outputs, inputs = product.shape
    matrices, name, count = len(adapted.shares), f"{operator.name}.adapter", product.count
    routed = ".experts." in operator.name
    first = products(at, f"{name}.a", Linear(rows, matrices * rank, inputs, count))
    found = [one for one in first if arrives or one.phase != "input"]
    parts, written = [], 0.0
    for number, share in enumerate(adapted.shares):
        width = outputs * share
        found += products(at, f"{name}.b", Linear(rows, width, rank, count))
        parts.append(SavedTensor(f"{name}.product.{number}", (rows, width), "x"))
        written = written + width
    found += pointwise(at, f"{name}.scale", rows * count * matrices * rank, "scaled")
    found += pointwise(at, f"{name}.sum", rows * count * outputs, "adapted")
    if at.config.adapter.dropout:
        dropped = pointwise(at, f"{name}.dropout", rows * inputs, "adapter_dropout")
        found += [one for one in dropped if arrives or one.phase != "input"]
    saved, parameters = [SavedTensor(f"{name}.low", (rows, matrices * rank), "x")], matrices * rank * inputs
    parameters = (parameters + rank * written) * count
    kept = saved[:1]
    if routed:  # of the copies that this rank's experts compute
        copies = operator.kept[0].shape[0]
        kept = saved = [SavedTensor(f"{name}.low", (copies, matrices * rank), "x")]
        kept = kept + [
            SavedTensor(f"{name}.product.{number}", (copies, outputs * share), "x")
            for number, share in enumerate(adapted.shares)
        ]
    if dora:
        norms = Linear(written, rank, inputs), Linear(rank, rank, inputs, matrices), Linear(written, rank, rank)
        found += [products(at, f"{name}.norms", each)[0] for each in norms]
        found += pointwise(at, f"{name}.magnitude", rows * outputs, "scaled_by_vector")
        saved += [
            SavedTensor(f"{name}.unscaled", (rows, outputs), "x"),
            SavedTensor(f"{name}.factors", (outputs,), "x"),
        ]
        saved += [SavedTensor(f"{name}.norms", (written,), "x")]
        for number, share in enumerate(adapted.shares):  # products of which the norms are computed
            parts.append(SavedTensor(f"{name}.norms.{number}.aa", (rank, rank), "x"))
            parts += [SavedTensor(f"{name}.norms.{number}.{of}", (outputs * share, rank), "x") for of in ("wa", "baa")]
        parameters = parameters + written
    owned = "expert_parameters" if routed and at.expert_parallel else "parameters"
    return operator._replace(
        operations=(*operator.operations, *found), saved=(*operator.saved, *saved),
        kept=(*operator.kept, *kept, *(parts if dora else ())),
    )._replace(**{owned: parameters})  # fmt: skip


@lru_cache(maxsize=64)
def frozen_bytes(config: ModelConfig, dtype: str) -> float:
    """Return the bytes of frozen parameters for each trained parameter of a model; 0 without adapter. dtype: torch's
    type name of the parameters."""
    if config.adapter is None:
        return 0.0
    entries = parameter_table(config).entries
    trained = sum(entry.numel for entry in entries if entry.trainable)
    sizes = {None: float(ITEM_BYTES[dtype])} | {name: size / BLOCK for name, size in RECORD_BYTES.items()}
    frozen: Number = sum(entry.numel * sizes[entry.packed] for entry in entries if not entry.trainable)
    return float(frozen / trained)
