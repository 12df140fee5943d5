"""Computing activations again in the backward pass instead of keeping them (Chen et al. 2016, arXiv:1604.06174)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import meshwright.comm.operators
import meshwright.model.grouped_product
import meshwright.model.ring_attention
import meshwright.model.tiled_attention  # noqa: F401  (these define the operators that are named below)

aten = torch.ops.aten
EXPERTS = torch.ops.meshwright.grouped_product.default
MATRIX_PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.linear.default, EXPERTS})
ATTENTION = frozenset(
    {
        torch.ops.meshwright.tiled_attention.default,
        torch.ops.meshwright.ring_attention.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)

# What ranks have summed, or found in a ring, is small and came over the wire: it is kept, and so are tokens that
# travelled to their experts and back. What sequence parallelism gathered is as large as the ranks' slices together: it
# is gathered again (Korthikanti et al. 2022, section 4.2.2), and what ranks traded is traded again.
SUMS = frozenset(
    {
        torch.ops.meshwright.reduce_from.default,
        torch.ops.meshwright.reduce_scatter_to.default,
        torch.ops.meshwright.ring_attention.default,
        torch.ops.meshwright.reduce_scatter_rows.default,
        torch.ops.meshwright.exchange.default,
    }
)
GATHERED = frozenset(
    {
        torch.ops.meshwright.gather_from.default,
        torch.ops.meshwright.all_to_all.default,
        torch.ops.meshwright.join_from.default,
        torch.ops.meshwright.gather_rows.default,
    }
)

Function = Callable[..., Any]


def recomputed(
    function: Function,
    kind: str,
    compile_options: dict[str, Any] | None = None,
    around: Callable[[Function], Function] = lambda compiled: compiled,
) -> Function:
    """`function`, compiled if there are options for torch.compile, with what is to be `around` it then, that keeps of
    its activations:

    "none": what its backward pass needs; compiled, the results of matrix products and attention, because everything
    else is elementwise, and fused into the kernels of the backward pass it costs less again than it costs to keep;
    "selective": the results of matrix products, and of sums over ranks, from which norms, activations and attention are
    computed again (after Korthikanti et al. 2022, arXiv:2205.05198, section 5); "full": its inputs alone.
    """
    assert kind in ("none", "selective", "full"), kind
    if kind == "selective":
        function = _keeping(function, MATRIX_PRODUCTS | SUMS)
    elif kind == "none" and compile_options is not None:
        function = _keeping(function, MATRIX_PRODUCTS | ATTENTION | SUMS | GATHERED)
    if compile_options is not None:
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(_not_about_in_place)
        function = around(torch.compile(function, **compile_options))
    return _checkpointed(function) if kind == "full" else function


def recomputed_parts(
    first: Function,
    second: Function,
    kind: str,
    compile_options: dict[str, Any],
    around: Callable[[Function], Function],
) -> tuple[Function, Function]:
    """Two parts of a function, of which the first alone is compiled, each as `recomputed` would have it; where all of
    it is computed again ("full"), that is for both together, by who calls them."""
    if kind == "full":
        return around(torch.compile(first, **compile_options)), second
    return recomputed(first, kind, compile_options, around), recomputed(second, kind)


def _keeping(function: Function, operators: frozenset[Any]) -> Function:
    """`function` of which the backward pass keeps the results of `operators`."""

    def policy(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in operators else CheckpointPolicy.PREFER_RECOMPUTE

    return _checkpointed(function, context_fn=functools.partial(create_selective_checkpoint_contexts, policy))


def _checkpointed(function: Function, **options: Any) -> Function:
    def run(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*arguments)
        # Nothing here is random, so random states need not be kept and restored.
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, **options)

    return run


def _not_about_in_place(record: logging.LogRecord) -> bool:
    """Drops the warning that a checkpointed region must not work in place: blocks do not."""
    return "Detected that context_fn is passed" not in record.getMessage()
