"""Computing activations again in the backward pass instead of keeping them (Chen et al. 2016, arXiv:1604.06174)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

MATRIX_PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default})

Function = Callable[..., torch.Tensor]


def recomputed(function: Function, kind: str, compile_options: dict[str, Any] | None = None) -> Function:
    """`function`, compiled if there are options for torch.compile, that keeps of its activations:

    "none": what its backward pass needs; "selective": the results of matrix products, from which norms, activations and
    attention are computed again (after Korthikanti et al. 2022, arXiv:2205.05198, section 5); "full": its inputs alone.
    """
    assert kind in ("none", "selective", "full"), kind
    if kind == "selective":
        contexts = functools.partial(create_selective_checkpoint_contexts, _keep_products)
        function = _checkpointed(function, context_fn=contexts)
    if compile_options is not None:
        function = torch.compile(function, **compile_options)
    return _checkpointed(function) if kind == "full" else function


def _checkpointed(function: Function, **options: Any) -> Function:
    def run(*arguments: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return function(*arguments)
        # Nothing here is random, so random states need not be kept and restored.
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, **options)

    return run


def _keep_products(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    kept = operator in MATRIX_PRODUCTS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
