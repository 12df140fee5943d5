"""Activation checkpointing: backward recomputes activations from fewer saved ones (Chen et al. 2016, arXiv:1604.06174).

Idea: full recomputation saves the input of each block. Selective recomputation saves those results of matrix products
and of sums over ranks that backward or recomputation reads, and recomputes norms, activations and attention, which are
large and cheap (Korthikanti et al. 2022, arXiv:2205.05198, section 5).
Mathematics: unchanged, as the same operators run again on the same inputs.
Communication: results of reductions are saved, all-gathers and the all-to-alls of Ulysses are repeated in backward.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import meshwright.adapters.experts
import meshwright.comm.operators
import meshwright.comm.products
import meshwright.model.grouped_product
import meshwright.model.tiled_attention
import meshwright.model.varlen_attention
import meshwright.parallel.context  # noqa: F401  (these define the operators that are named below)
from meshwright.model.axis_operations import Function, Recompute

T = TypeVar("T")
aten = torch.ops.aten
ours = torch.ops.meshwright


def _get_overloads(namespace: Any, *names: str) -> frozenset[Any]:
    """Return the default overloads of the operators `names` in `namespace`, such as `torch.ops.aten`; PyTorch passes
    overloads (`torch.ops.aten.mm.default`) to the policy of selective activation checkpointing."""
    return frozenset(getattr(namespace, name).default for name in names)


MATRIX_PRODUCTS = _get_overloads(aten, "mm", "addmm", "linear")
MATRIX_PRODUCTS |= _get_overloads(ours, "grouped_product", "gather_product", "product_sum")
KERNELS = "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"
RING = _get_overloads(ours, "ring_attention", "flash_ring_attention")
ATTENTION = RING | _get_overloads(ours, "tiled_attention", "varlen_attention")
ATTENTION |= _get_overloads(aten, *(f"_scaled_dot_product_{name}" for name in KERNELS))

# Saved, as small results of communication: reductions, ring attention, dispatched and combined tokens. Repeated in
# backward, as large as the slices of all ranks: the all-gathers of sequence parallelism (Korthikanti et al. 2022,
# section 4.2.2) and the all-to-alls of Ulysses.
ROWS = _get_overloads(ours, "launch_rows", "wait_for_rows", "reduce_scatter_rows")
# The output of a layer with an adapter is saved, not the output of its base layer, which nothing else reads.
ADAPTED = _get_overloads(ours, "add_low_rank", "add_expert_low_rank")
SAVED = MATRIX_PRODUCTS | ADAPTED | RING | ROWS | _get_overloads(ours, "reduce_from", "reduce_scatter_to")
GATHERED = _get_overloads(ours, "gather_from", "all_to_all", "join_from", "gather_rows")


class _SavedResults(TorchDispatchMode):
    """Selective activation checkpointing of an uncompiled function: its forward saves the results of some operators,
    its recomputation takes them in the same order.

    operators: overloads of torch.ops. results: (operator, saved result or, if it is discarded, its shape, versions of
    the result), appended by the mode of the forward and taken by that of the recomputation. recomputes: True for the
    latter mode. Raises RuntimeError if backward recomputes other operators, or if a saved result was modified."""

    def __init__(self, operators: frozenset[Any], results: deque[Any], recomputes: bool) -> None:
        super().__init__()
        self.operators, self.results, self.recomputes = operators, results, recomputes

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled functions that are called inside run compiled."""
        return True

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Run `operator` on `arguments` and `options`, or return its saved result."""
        if self.recomputes and operator in self.operators:
            computed, saved, versions = self.results.popleft() if self.results else ("nothing", None, None)
            if computed != operator:
                raise RuntimeError(f"activation checkpointing: backward recomputes {operator}, forward ran {computed}")
            if versions is not None and _read_versions(saved) != versions:
                raise RuntimeError(f"activation checkpointing: the saved result of {operator} was modified in place")
            first = arguments[0][0] if isinstance(arguments[0], list) else arguments[0]
            return first.new_empty(()).expand(saved) if isinstance(saved, torch.Size) else saved
        if operator in ADAPTED:
            self.discard(arguments[0])
        result = operator(*arguments, **(options or {}))
        if operator in self.operators:
            saved = tree_map(_detach, result)
            self.results.append((operator, saved, _read_versions(saved)))
        return result

    def discard(self, x: torch.Tensor) -> None:
        """If `x` is (a view of) a saved result, save only the shape of the latter."""
        for number, (operator, saved, _) in enumerate(self.results):
            if isinstance(saved, torch.Tensor) and saved.untyped_storage()._cdata == x.untyped_storage()._cdata:
                self.results[number] = operator, saved.shape, None


def _detach(x: torch.Tensor) -> torch.Tensor:
    """Return `x` without autograd graph, with the version counter of `x`, which counts its modifications in place."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # excluded below autograd
        return x.detach()


_read_versions = functools.partial(tree_map, lambda x: getattr(x, "_version", None))
"""Function that returns the version counter of each tensor in the result of an operator."""


def discard(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, whose value neither backward nor recomputation reads. If it is (a view of) a result that selective
    activation checkpointing has saved, save it no longer. (Compiled blocks save only what backward reads.)"""
    mode = None if torch.compiler.is_compiling() else _get_current_dispatch_mode()
    if isinstance(mode, _SavedResults):
        mode.discard(x)
    return x


class ActivationCheckpointing(Recompute):
    """Activation checkpointing of a transformer block. `kind`:

    * "none": save all that backward needs. A compiled block saves only the results of matrix products, attention and
      communication, because elementwise work fused into backward kernels is cheaper to recompute than to save;
    * "selective": save the results of matrix products and of sums over ranks, except those given to `discard`;
    * "full": save only the block's inputs.
    """

    def __init__(self, kind: str) -> None:
        assert kind in ("none", "selective", "full"), kind
        self.kind = kind

    def wrap(self, function: Function, compile_options: dict[str, Any] | None = None) -> Function:
        """Return a replacement for `function`, the forward of a transformer block or of a part of it, with selective
        activation checkpointing: the results of some operators are saved, all others are recomputed in backward. This
        applies to the kind "selective", and to "none" if the function is compiled. In all other cases `function` is
        compiled if requested, and returned without checkpointing.

        compile_options: keyword arguments of torch.compile; None: do not compile."""
        compiled = compile_options is not None
        if self.kind == "selective":
            function = _checkpoint_saving(function, SAVED, compiled)
        elif self.kind == "none" and compiled:
            function = _checkpoint_saving(function, SAVED | ATTENTION | GATHERED, compiled)
        if compiled:
            logging.getLogger("torch._higher_order_ops.wrap").addFilter(_drop_in_place_warning)
        return super().wrap(function, compile_options)

    def wrap_block(self, function: Function) -> Function:
        """Return a function that runs `function`, the forward of a whole block, and checkpoints the block for the kind
        "full"; for other kinds return `function` itself."""
        return _checkpoint_always(function) if self.kind == "full" else function

    def discard(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` and call the function `discard`."""
        return discard(x)


def _checkpoint_saving(function: Function, operators: frozenset[Any], compiled: bool) -> Function:
    """Wrap `function` in selective activation checkpointing: save the results of `operators` (overloads of torch.ops),
    recompute all other results in backward. compiled: True if `function` will be compiled.
    """

    def make_modes() -> tuple[_SavedResults, _SavedResults]:
        """Return the modes of the forward and of the recomputation of one call."""
        results = deque[Any]()
        return _SavedResults(operators, results, False), _SavedResults(operators, results, True)

    make_compiled = functools.partial(create_selective_checkpoint_contexts, list(operators))
    return _checkpoint_always(function, context_fn=make_compiled if compiled else make_modes)


def _checkpoint_always(function: Function, **options: Any) -> Function:
    """Wrap `function` in torch.utils.checkpoint; where gradients are disabled, call it directly. `options`: keyword
    arguments of torch.utils.checkpoint."""

    def run(*arguments: Any) -> Any:
        """Run `function(*arguments)`: under activation checkpointing if gradients are enabled, else directly."""
        if not torch.is_grad_enabled():
            return function(*arguments)
        compiling = torch.compiler.is_compiling()
        body = function if compiling else functools.partial(_run_with_stored_results, function, [])
        # No operator is random: RNG states need not be saved.
        return checkpoint(body, *arguments, use_reentrant=False, preserve_rng_state=False, **options)

    return run


_stored = threading.local()
"""`call`: results of `compute_once` in the checkpointed function that runs, and numbers of its next calls."""


def _run_with_stored_results(function: Function, results: list[Any], *arguments: Any) -> Any:
    """Call `function(*arguments)` with `results` as the store of `compute_once`: a forward appends results to this
    list, a recomputation by activation checkpointing reads them from it."""
    _stored.call = results, itertools.count()
    try:
        return function(*arguments)
    finally:
        del _stored.call


def compute_once(compute: Callable[[], T]) -> T:
    """Compute a value once per forward: return `compute()` in forward, and the same stored result in a recomputation by
    activation checkpointing. The result must not require a gradient."""
    results, numbers = getattr(_stored, "call", (list[T](), itertools.count()))
    if (number := next(numbers)) == len(results):
        results.append(compute())
    return results[number]


def _drop_in_place_warning(record: logging.LogRecord) -> bool:
    """Logging filter that drops torch's warning about in-place operations in checkpointed regions. (Transformer blocks
    have no such operations.) Return False if `record` is this warning, else True."""
    return "Detected that context_fn is passed" not in record.getMessage()
