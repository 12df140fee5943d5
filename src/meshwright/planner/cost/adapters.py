"""Operators of a model with an adapter, derived from those of the model without: frozen weights get no gradients,
nothing before the first adapter has a backward pass, adapted layers have two more products, and quantized weights are
dequantized."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache

from meshwright.planner.cost.dimensions import Dimensions
from meshwright.planner.cost.micro_batch import ITEM_BYTES, Adapted, LayerKind, MicroBatch, Number
from meshwright.planner.cost.operators import Operation, Operator, SavedTensor, elementwise_kernels, sum_parameters
from meshwright.planner.cost.tables import list_rows
from meshwright.spec.adapter_config import BLOCK, RECORD_BYTES
from meshwright.spec.config import ModelConfig
from meshwright.spec.parameters import parameter_table


def adapt_operators(
    batch: MicroBatch, operators: Iterable[Operator], kind: LayerKind | None = None, arrives: bool = True
) -> Iterator[Operator]:
    """Yield the operators of a model with an adapter (such as LoRA), in order. Frozen weights have no gradients, and
    the adapter's matrix products are added.

    operators: operators of the same model without adapter; kind: kind of their layer, None for embedding and head,
    which have no adapter; arrives: True if the gradient of the first operator's input is computed, because a trained
    parameter or another pipeline stage precedes it."""
    differentiable = kind is None or arrives or bool(kind.adapted)
    shared_arrives = arrives  # of the shared expert, which reads the mixture's input after the others
    for operator in operators:
        adapted = next((one for one in kind.adapted if one.layer == operator.name), None) if kind else None
        shared = operator.name.startswith("mlp.shared")
        shared_arrives = arrives if operator.name == "mlp.router" else shared_arrives
        found = _freeze_operator(batch, operator, adapted, shared_arrives if shared else arrives)
        if operator.name == "mlp.combine" and kind and arrives and not shared_arrives:
            # Neither the router nor the experts' input gets a gradient.
            order = [one for one in found.saved if one.name == "mlp.experts.order"]
            routed = Dimensions(batch, kind)["routed"], batch.config.experts_per_token
            weights = [] if batch.config.routed_input else [SavedTensor("mlp.router.weights", routed, "x")]
            found = found.replace(saved=(*order, *weights))
        if operator.name == "mlp.router" and kind and any(one.layer == "mlp.shared.up" for one in kind.adapted):
            # The input that the shared expert's adapter reads.
            read = tuple(one for one in operator.saved if one.name == "mlp.input")
            found = found.replace(saved=(*read, *found.saved))
        yield found if differentiable else found.replace(kept=())
        shared_arrives = shared_arrives or (shared and adapted is not None)
        arrives = arrives or adapted is not None


def _freeze_operator(batch: MicroBatch, operator: Operator, adapted: Adapted | None, input_gradient: bool) -> Operator:
    """Return an operator whose weights are frozen: without weight gradients, and with the adapter's matrix products if
    `adapted` is given. adapted: adapter of this operator; None: it has none. input_gradient: True if the gradient of
    the operator's input is computed."""
    name, leaves = operator.name, input_gradient or adapted is not None
    product = next((one for one in operator.operations if one.name == name and one.kind == "product"), None)
    operations = [
        one
        for one in operator.operations
        if one.phase == "forward" or (one.phase != "weight" and input_gradient and one.name != f"{name}.bias")
    ]
    # Inputs of frozen products, and the vectors that a norm's factors multiply, have weight gradients alone to serve.
    inputs = {f"{name}.input", "mlp.input"} if product and not adapted else set()
    saved = [one for one in operator.saved if leaves and one.name not in inputs and not one.name.endswith(".scaled")]
    if adapted and not input_gradient:  # the output and the input that A reads
        saved = list(operator.saved)
    calls = [
        one
        for one in operator.collectives
        if one.phase == "forward" or (input_gradient if "input" in one.sites[0][0] else leaves)
    ]
    found = operator.replace(
        operations=tuple(operations), saved=tuple(saved), collectives=tuple(calls), parameters=(0, 0)
    )
    if product is None or product.shape is None:
        return found
    if batch.config.adapter and batch.config.adapter.packed and name.startswith(PACKED):
        # The weight is dequantized before the product of the forward, and of the backward.
        row = {"name": f"{name}.unpack", "work": f"unpacked_{batch.config.adapter.packed}"}
        sizes = {"elements": product.shape[1] * product.shape[2], "count": 1}
        unpack = elementwise_kernels(batch, row | {size: size for size in sizes}, sizes)
        needed = [one for one in unpack if one.phase == "forward" or input_gradient]
        found = found.replace(operations=(*needed, *found.operations))
    return found if adapted is None else _add_adapter(batch, found, product, adapted, input_gradient)


PACKED = ("attention.", "mlp.up", "mlp.down", "mlp.shared.up", "mlp.shared.down")
"""Prefixes of the names of matrix products whose frozen weights `adapter.base` quantizes."""


def _add_adapter(
    batch: MicroBatch, operator: Operator, product: Operation, adapted: Adapted, input_gradient: bool
) -> Operator:
    """Return the operator of a frozen linear layer with the operators of its adapter added (sections "adapter" and
    "adapter_matrix" of `operators.toml`). product: matrix product with the frozen weight; adapted: the adapter;
    input_gradient: True if the gradient of the layer's input is computed."""
    assert batch.config.adapter and product.shape
    rank, (rows, outputs, inputs) = batch.config.adapter.rank, product.shape
    routed, kind = ".experts." in operator.name, LayerKind(None, False, rotates=False)
    widths = [outputs * width // whole for width, whole in adapted.matrices]  # on this rank
    sizes = {
        "adapted_rows": rows, "adapted_outputs": outputs, "adapted_inputs": inputs, "products": product.count,
        "rank": rank, "matrices": len(widths), "low": len(widths) * rank, "written": sum(widths),
        # Of routed experts the copies that this rank computes are saved, and each expert has its own norms.
        "saved_rows": operator.saved[-1].shape[0] if routed else rows, "held": product.count if routed else 1,
    }  # fmt: skip
    layer, prefix = Dimensions(batch, kind, sizes, {"routed_adapter": routed}), f"{operator.name}.adapter"
    found = [Operator(row, batch, layer) for row in list_rows("adapter", layer.true, prefix, ())]
    for number, width in enumerate(widths):
        dimensions = Dimensions(batch, kind, sizes | {"matrix_width": width})
        for row in list_rows("adapter_matrix", layer.true, prefix, ()):
            one = Operator(row, batch, dimensions)
            found.append(one.replace(kept=[each._replace(name=f"{each.name}.{number}") for each in one.kept]))
    operations = (one for each in found for one in each.operations)
    unneeded = () if input_gradient else (".a", ".dropout")  # gradients of the layer's input
    added = [one for one in operations if one.phase != "input" or not one.name.endswith(unneeded)]
    return operator.replace(
        operations=(*operator.operations, *added),
        saved=(*operator.saved, *(one for each in found for one in each.saved)),
        kept=(*operator.kept, *(one for each in found for one in each.kept)),
        parameters=sum_parameters(found),
    )


@lru_cache(maxsize=64)
def frozen_bytes_per_trained(config: ModelConfig, dtype: str) -> float:
    """Return (bytes of a model's frozen parameters) / (number of its trained parameters); 0 without adapter. dtype:
    torch's type name of unquantized parameters."""
    if config.adapter is None:
        return 0.0
    entries = parameter_table(config).entries
    trained = sum(entry.numel for entry in entries if entry.trainable)
    sizes = {None: float(ITEM_BYTES[dtype])} | {name: size / BLOCK for name, size in RECORD_BYTES.items()}
    frozen: Number = sum(entry.numel * sizes[entry.packed] for entry in entries if not entry.trainable)
    return float(frozen / trained)
