"""Operations along the parallel axes that a model calls. The classes here are those of one device, where ranks never
meet; `meshwright.parallel` derives from them those of a mesh, and a model is built with either.

Shapes: B rows, S tokens in a row (on this rank), H hidden, V vocabulary, N query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from meshwright.model.documents import Documents
from meshwright.model.scaled_dot_product import attend, visibility

Function = Callable[..., Any]


class TokenAxis(Protocol):
    """An axis whose ranks hold different tokens of the same rows."""

    name: str
    size: int

    def reduce(self, x: torch.Tensor, site: str) -> torch.Tensor:
        """The sum of the ranks' `x`; backward the gradient as it is."""


class TensorOperations:
    """Where ranks meet that split matrix products: before column-parallel products, after row-parallel ones."""

    name = "tp"
    size = 1
    rank = 0
    trivial = True
    """No rank meets another: a bias may be added within its product."""
    sequence_parallel = False
    """Between `leave` and `enter` each rank holds S / size tokens of a row."""

    def enter(self, x_BSH: torch.Tensor, site: str) -> torch.Tensor:
        """The input of a column-parallel product, [B, S, H] on every rank."""
        return x_BSH

    def leave(self, x_BSH: torch.Tensor, site: str) -> torch.Tensor:
        """The sum of the ranks' partial results of a row-parallel product (with sequence parallelism a slice of it)."""
        return x_BSH

    def reduce(self, x: torch.Tensor, site: str) -> torch.Tensor:
        """The sum of the ranks' `x`; backward the gradient as it is."""
        return x

    def gather(self, x: torch.Tensor, site: str, dim: int) -> torch.Tensor:
        """The ranks' `x` concatenated along `dim`; backward the slice of the summed gradient."""
        return x

    def split_tokens(self, x_BSH: torch.Tensor, site: str) -> torch.Tensor:
        """This rank's slice of tokens that all ranks hold, [B, S / size, H]."""
        return x_BSH

    def join_tokens(self, x_BSH: torch.Tensor, site: str) -> torch.Tensor:
        """The inverse of `split_tokens`: all ranks' slices, [B, S, H]."""
        return x_BSH

    def all_reduce(self, x: torch.Tensor, site: str, op: str = "sum") -> None:
        """Replace `x` by its sum (op="max": its maximum) over the ranks, without autograd."""


class ContextOperations:
    """Attention over rows whose tokens are split over ranks."""

    name = "cp"
    size = 1

    def visibility(
        self, documents: Documents, tokens: int, window: int | None, device: torch.device, cached: int = 0
    ) -> torch.Tensor | None:
        """Argument `visible` of `attend` for `tokens` tokens of every row on this rank."""
        return visibility(documents, tokens, window, device, cached)

    def attend(
        self, q_BNSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, visible: torch.Tensor | None
    ) -> torch.Tensor:
        """Causal attention of this rank's queries over the keys of all ranks, [B, N, S, D]."""
        return attend(q_BNSD, k_BKSD, v_BKSD, visible)

    def reduce(self, x: torch.Tensor, site: str) -> torch.Tensor:
        """The sum of the ranks' `x`; backward the gradient as it is."""
        return x


class TokenDispatcher(Protocol):
    """Sends tokens to the ranks that hold their experts, and results back. Its calls cannot be compiled."""

    expert_ranks: int
    """Ranks among which experts are split."""
    width_ranks: int
    """Ranks that split the width of each expert."""

    def dispatch(self, x_NH: torch.Tensor, ends_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Rows sorted by expert, which end at `ends_E`, to their experts: the rows [R, H] of the experts held here,
        sorted by them, where each expert's end, and the routes back for `combine`."""

    def combine(self, y_RH: torch.Tensor, routes: Any) -> torch.Tensor:
        """The results of dispatched rows (partial sums over `width_ranks`), [N, H] in the order before `dispatch`."""


class Recompute:
    """Which activations of a block are saved for backward: here all that autograd asks for."""

    kind = "none"

    def wrap(
        self,
        function: Function,
        compile_options: dict[str, Any] | None = None,
        around: Callable[[Function], Function] = lambda compiled: compiled,
    ) -> Function:
        """`function`, compiled if there are options for torch.compile, inside of `around` then."""
        return function if compile_options is None else around(torch.compile(function, **compile_options))

    def wrap_parts(
        self,
        first: Function,
        second: Function,
        compile_options: dict[str, Any],
        around: Callable[[Function], Function],
    ) -> tuple[Function, Function]:
        """Two consecutive parts of a function, of which only the first can be compiled."""
        return self.wrap(first, compile_options, around), self.wrap(second)


@dataclass(frozen=True)
class AxisOperations:
    """All operations of a model that involve other ranks, and its recomputation. `dispatcher`: None where experts are
    split by columns over the tensor axis, as all MLPs."""

    tensor: TensorOperations = field(default_factory=TensorOperations)
    context: ContextOperations = field(default_factory=ContextOperations)
    dispatcher: TokenDispatcher | None = None
    recompute: Recompute = field(default_factory=Recompute)


SINGLE_DEVICE = AxisOperations()
