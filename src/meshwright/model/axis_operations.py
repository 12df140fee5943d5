"""Operations along the parallel axes that a model calls. The classes here are for one device and communicate nothing;
`meshwright.parallel` derives those of a mesh from them, and a model is built with either.

Shapes: B sequences, S tokens of a sequence (on this rank), H hidden, V vocabulary, N query heads, K key-value heads,
D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from meshwright.model.documents import Documents
from meshwright.model.scaled_dot_product import AttentionMask, MaskForm, attend, make_attention_mask
from meshwright.model.tiled_attention import ScoreSettings

Function = Callable[..., Any]
Meanwhile = Callable[[], None]
"""Computation that is queued while a message is in flight."""
X = TypeVar("X", Tensor, None)


def do_nothing() -> None:
    """Compute nothing while a message is in flight."""


class Overlap(NamedTuple):
    """Overlap of the products of a tensor-parallel linear layer with their collective calls (`comm/products.py`).

    `forward`, `backward`: collective call that overlaps with the product of the output, and with that of the input
    gradient: "gather" (the operand is all-gathered), "scatter" or "reduce" (the product is reduce-scattered or
    all-reduced), or "" (none). `saves_gathered`: True if the gathered input is saved for backward, False if backward
    gathers it again. `axis`: `Axis.key` of the tp ranks; `site`: label of the calls in traces."""

    forward: str
    backward: str
    saves_gathered: bool
    axis: str
    site: str


class TokenAxis:
    """Base class of the communication over a parallel axis (`name`: "tp" or "cp") whose ranks hold different tokens of
    the same sequences. The class itself is for one device: its `size` (number of ranks) is 1, and nothing is
    communicated.
    """

    name: str
    size = 1

    def reduce(self, x: Tensor, site: str) -> Tensor:
        """Return the sum of `x` (any shape) over the ranks of the axis (on one device `x` itself); backward passes the
        gradient through unchanged. `site`: label of the call in traces."""
        return x


class TensorOperations(TokenAxis):
    """Communication of tensor parallelism: `enter` precedes a column-parallel linear layer, `leave` follows a
    row-parallel linear layer. This base class is for one device, where every method returns its input. Argument `site`
    of all methods: label of the call in traces."""

    name = "tp"
    rank = 0
    trivial = True
    """True on one rank: a bias may be added inside the matrix product."""
    sequence_parallel = False
    """Between `leave` and `enter` each rank holds S / size tokens of a sequence."""
    saves_gathered = True
    """Products that overlap with an all-gather save the gathered input for backward."""

    def enter(self, x_BSH: Tensor, site: str) -> Tensor:
        """Return the input [B, S, H] of a column-parallel linear layer, complete on every tp rank. With sequence
        parallelism, it is the all-gather of the ranks' token slices `x_BSH`; without it and on one device, it is
        `x_BSH` itself. `site`: label of the call in traces."""
        return x_BSH

    def leave(self, x_BSH: Tensor, site: str) -> Tensor:
        """Return the sum over tp ranks of `x_BSH`, each rank's partial result of a row-parallel linear layer (on one
        device `x_BSH` itself). The result is [B, S, H] or, with sequence parallelism, this rank's token slice [B, S /
        tp, H]. `site`: label of the call in traces."""
        return x_BSH

    def overlap(self, column: bool, site: str) -> Overlap | None:
        """Return the overlap of a linear layer's products with their collective calls; None: there is none, and `enter`
        or `leave` is called. `column`: True for a column-parallel layer. `site`: label of the calls in traces."""
        return None

    def average(self, x: Tensor, site: str) -> Tensor:
        """Return the mean of `x` (any shape) over the tp ranks; backward returns the mean of the ranks' gradients (on
        one device: `x` itself and its gradient). `site`: label of the calls in traces."""
        return x

    def gather(self, x: Tensor, site: str, dim: int) -> Tensor:
        """Return the tp ranks' `x` concatenated along dim `dim` (on one device `x` itself). Backward sums the gradient
        over ranks and returns this rank's slice of that sum. `site`: label of the call in traces."""
        return x

    def split_tokens(self, x_BSH: Tensor, site: str) -> Tensor:
        """Return this rank's token slice [B, S / tp, H] of an `x_BSH` that is equal on all tp ranks (on one device
        `x_BSH` itself). `site`: label of the call in traces."""
        return x_BSH

    def join_tokens(self, x_BSH: Tensor, site: str) -> Tensor:
        """Return the concatenation [B, S, H] of the tp ranks' token slices `x_BSH` [B, S / tp, H] (on one device
        `x_BSH` itself). `site`: label of the call in traces."""
        return x_BSH

    def all_reduce(self, x: Tensor, site: str, op: str = "sum") -> None:
        """Replace `x` by its sum (op="max": its maximum) over the tp ranks, in place and without autograd (on one
        device do nothing). `site`: label of the call in traces."""


class ContextOperations(TokenAxis):
    """Attention under context parallelism, which splits the tokens of each sequence over ranks. This base class
    computes attention on one device, which holds all tokens."""

    name = "cp"

    def make_attention_mask(
        self, documents: Documents, tokens: int, window: int | None, device: torch.device, form: MaskForm = "boolean"
    ) -> AttentionMask:
        """Return the attention mask for the argument `visible` of `attend`; None for plain causal attention. This base
        class builds the mask of unsharded sequences.

        `documents`: document boundaries in packed sequences; `tokens`: number of tokens of each sequence on this rank;
        `window`: sliding window in tokens (None: none); `device`: device of the mask. `form`: mask format of the
        attention kernel, from `choose_mask_form`. "first": index of the first visible key of each query; "varlen":
        document boundaries; "boolean": one entry for each query and key.
        """
        return make_attention_mask(documents, self.size * tokens, window, device, form)

    def attend(
        self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, visible: AttentionMask,
        scores: ScoreSettings | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the causal attention [B, N, S, D] of this rank's queries `q_BNSD` to the keys of all cp ranks; on one
        device, to the given keys.

        `k_BKSD`, `v_BKSD`: this rank's keys and values, of K heads. `visible`: attention mask from
        `make_attention_mask`; `scores`: scale and softcap of the attention scores; None: 1 / √D and no softcap."""
        return attend(q_BNSD, k_BKSD, v_BKSD, visible, scores)


class TokenDispatcher(Protocol):
    """Interface of a token dispatcher of expert parallelism, which sends tokens to the ranks that hold their experts
    and combines the results.

    expert_ranks: number of ranks with different experts (ep). width_ranks: number of ranks that split the width of each
    expert (etp); width_rank: index of this rank among them. torch.compile cannot trace `dispatch` and `combine`."""

    expert_ranks: int
    """Ranks among which experts are split."""
    width_ranks: int
    """Ranks that split the width of each expert."""
    width_rank: int

    def dispatch(self, x_NH: Tensor, ends_E: Tensor, meanwhile: Meanwhile) -> tuple[Tensor, Tensor, Any]:
        """Send token copies `x_NH` to the ranks of their experts. A token has one copy for each of its experts; the N
        copies are sorted by expert.

        `ends_E[e]`: index at which the copies of expert e end (exclusive). `meanwhile`: called while the copies are in
        flight, to compute what needs none of them. Return three things: the R copies received for this rank's experts,
        [R, H], sorted by expert; the exclusive end index of each of these experts' copies; and an opaque state for
        `combine`.
        """

    def dispatch_keys(self, keys_N: Tensor, routes: Any) -> Tensor:
        """Send one random-number key of each token copy to the rank of the copy's expert, along the same routes as an
        earlier `dispatch`. Adapters derive their dropout masks from these keys.

        keys_N: int64, key of each of the N copies that were dispatched. routes: third result of that `dispatch`. Return
        the keys of the R copies that this rank received, [R].
        """

    def combine(self, y_RH: Tensor, routes: Any) -> Tensor:
        """Send expert outputs back to the ranks of their tokens. Return the outputs of the N token copies that this
        rank dispatched, [N, H], in the order of `x_NH`.

        y_RH: expert outputs of the R token copies that this rank received. If several ranks split each expert's width
        (`width_ranks` > 1), the outputs are partial sums, which `combine` also adds up. routes: third result of
        `dispatch`.
        """


class Recompute:
    """Activation checkpointing of transformer blocks. This base class applies none: autograd saves all that backward
    needs.
    """

    kind = "none"

    def wrap(self, function: Function, compile_options: dict[str, Any] | None = None) -> Function:
        """Return a replacement for `function`, the forward of a transformer block or of a part of it. This base class
        compiles it, if requested; subclasses also add selective activation checkpointing. compile_options: keyword
        arguments of torch.compile; None: do not compile.
        """
        return function if compile_options is None else torch.compile(function, **compile_options)

    def wrap_block(self, function: Function) -> Function:
        """Return a replacement for `function`, the forward of a whole transformer block. This base class returns
        `function` itself; subclasses may checkpoint it.
        """
        return function

    def discard(self, x: Tensor) -> Tensor:
        """Return `x`, the result of an operator, whose value neither backward nor a recomputation by activation
        checkpointing reads. This base class does no more; subclasses exclude `x` from the saved activations."""
        return x


class Units:
    """Hooks that the model calls before and after each FSDP unit, to all-gather the unit's parameters before use and
    reshard them after use. The model continues with the tensor that a hook returns, so that a subclass can wrap it in
    an autograd function whose backward calls hooks, too. The hooks of this base class do nothing, for models with
    unsharded parameters."""

    def enter(self, unit: str, x: X) -> X:
        """Hook called before the first use of the parameters of the FSDP unit named `unit`.

        `x`: the unit's input (None before the embedding). Return `x`. A subclass may wrap `x` in an autograd identity
        function, whose backward runs after the unit's backward."""
        return x

    def leave(self, unit: str, x: Tensor) -> Tensor:
        """Hook called after the last use of the parameters of the FSDP unit named `unit` in forward.

        `x`: the unit's output. Return `x`. A subclass may wrap `x` in an autograd identity function, whose backward
        runs before the unit's backward."""
        return x


NO_UNITS = Units()


@dataclass(frozen=True)
class AxisOperations:
    """Parallel operations that a model is built with: communication and activation checkpointing. By default there is
    one device and no checkpointing.

    `tensor`, `context`: communication of tensor and context parallelism. `dispatcher`: token dispatcher of expert
    parallelism; None: tp ranks split the width of each expert instead. `recompute`: activation checkpointing.
    """

    tensor: TensorOperations = field(default_factory=TensorOperations)
    context: ContextOperations = field(default_factory=ContextOperations)
    dispatcher: TokenDispatcher | None = None
    recompute: Recompute = field(default_factory=Recompute)


SINGLE_DEVICE = AxisOperations()
