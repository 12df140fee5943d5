"""AdamW and SGD on flat shards, by torch's fused kernels, in one call for all shards of equal weight decay.

A shard is a 1-D slice of an FSDP unit's flat master buffer. Its first `decay_numel` elements (matrices) have weight
decay, the rest (norms, biases) none, so that it gives torch at most two tensors. torch's functional optimizers are
called, since importing its optimizer classes loads the compiler, which takes over a second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

if TYPE_CHECKING:
    from meshwright.recipe import TrainRecipe


STATE_KINDS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum",)}


class Shard(Protocol):
    """Interface of the slice of a flat buffer that the optimizer updates on one rank, such as a
    `parallel.zero.FsdpUnit`.

    master, gradient: master weights and their gradient, 1-D, of equal length and dtype. decay_numel: number of
    elements, from the first, that have weight decay. rate_factor: factor on the learning rate of the elements with
    weight decay (µP). balancing: index ranges (start, stop) of the router biases that balance the load of experts.
    """

    master: torch.Tensor
    gradient: torch.Tensor
    decay_numel: int
    rate_factor: float
    balancing: tuple[tuple[int, int], ...]


class _ShardSlice(NamedTuple):
    """Slice of a shard of a flat buffer whose elements have the same weight decay and learning rate.

    master, gradient: views of the shard's master weights and gradient. state: optimizer state, {kind such as "exp_avg":
    view}. updates: scalar tensor, number of updates done, for AdamW's bias correction."""

    master: torch.Tensor
    gradient: torch.Tensor
    state: dict[str, torch.Tensor]
    updates: torch.Tensor


class GpuScale(NamedTuple):
    """Gradient scale that is computed on the GPU, so that the host does not wait for it. divisor: float32 scalar by
    which gradients are divided; skip: float32 scalar, 1 if the update is skipped, else 0."""

    divisor: torch.Tensor
    skip: torch.Tensor


class Optimizer:
    """Decoupled AdamW (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2) or SGD with momentum, for the shards of one
    rank's flat buffers. train: the recipe's [train] table.

    The state is one 1-D tensor per shard and kind ("exp_avg" ...), laid out like the shard's master weights, so that
    checkpoints slice both alike."""

    def __init__(self, shards: Sequence[Shard], train: TrainRecipe) -> None:
        """Allocate zero optimizer state for the shards. train: the recipe's [train] table."""
        self.shards = list(shards)
        self.name = train.optimizer
        self.router_bias_rate = train.router_bias_rate
        self.step_count = 0
        self._betas, self._epsilon, self._momentum = train.betas, train.epsilon, train.momentum
        kinds = STATE_KINDS[self.name] if self.name == "adamw" or train.momentum else ()
        self._state = {kind: [torch.zeros_like(shard.master) for shard in self.shards] for kind in kinds}
        self._groups: defaultdict[tuple[float, float], list[_ShardSlice]] = defaultdict(list)
        """Slices by their (weight decay, factor on the learning rate)."""
        for index, shard in enumerate(self.shards):
            cut, end = shard.decay_numel, shard.master.numel()
            # The product of rate and weight decay does not depend on the width (arXiv:2203.03466, appendix B.3).
            for decay, rate, part in (
                (train.weight_decay / shard.rate_factor, shard.rate_factor, slice(0, cut)), (0.0, 1.0, slice(cut, end)),
            ):  # fmt: skip
                if part.start < part.stop:  # in a small model a rank's shard may be empty
                    state = {kind: tensors[index][part] for kind, tensors in self._state.items()}
                    updates = torch.zeros((), device=shard.master.device)
                    found = _ShardSlice(shard.master[part], shard.gradient[part], state, updates)
                    self._groups[decay, rate].append(found)

    @torch.no_grad()
    def step(self, learning_rate: float, gradient_scale: float | GpuScale = 1.0) -> None:
        """Update the master weights of all shards in place from their gradients. learning_rate: learning rate of this
        step.

        gradient_scale: factor by which the gradients are first multiplied (norm clipping and loss scale), or a
        `GpuScale`, which the fused kernels apply on the GPU.

        Router biases, which balance the load of experts, are not updated by gradients. The gradient elements at their
        indices hold the load of each expert minus the mean load. Each bias is changed by `router_bias_rate`, down if
        that difference is positive and up if it is negative (arXiv:2408.15664).
        """
        self.step_count += 1
        for shard in self.shards:
            for low, high in shard.balancing:  # arXiv:2408.15664, algorithm 1
                load = shard.gradient[low:high]
                # An excess as small as the rounding of its sum is none: its sign would depend on the layout.
                sign = torch.where(load.abs() > 16 * torch.finfo(load.dtype).eps, load, 0).sign()
                if isinstance(gradient_scale, GpuScale):
                    sign *= 1 - gradient_scale.skip
                shard.master[low:high].sub_(sign, alpha=self.router_bias_rate)
                load.zero_()
        scale = dict[str, Any]()
        if isinstance(gradient_scale, GpuScale):
            scale = {"grad_scale": gradient_scale.divisor, "found_inf": gradient_scale.skip}
        elif gradient_scale != 1.0 and self._groups:
            torch._foreach_mul_([part.gradient for part in chain(*self._groups.values())], gradient_scale)
        for (decay, rate), parts in self._groups.items():
            self._update(parts, learning_rate * rate, decay, scale)

    def _update(self, parts: list[_ShardSlice], learning_rate: float, decay: float, scale: dict[str, Any]) -> None:
        """Update the slices `parts` in place by one fused torch call.

        decay: weight-decay coefficient of all these slices. scale: arguments of the call that scale the gradients or
        skip the update; {} for none. AdamW multiplies the weights by 1 - learning_rate x decay (decoupled); SGD adds
        decay x weights to the gradient."""
        masters, gradients = [part.master for part in parts], [part.gradient for part in parts]
        state = [[part.state[kind] for part in parts] for kind in self._state]
        common: dict[str, Any] = {"lr": learning_rate, "weight_decay": decay, "fused": True, "maximize": False}
        common |= scale
        if self.name == "adamw":
            updates, (beta1, beta2) = [part.updates for part in parts], self._betas
            common |= {"beta1": beta1, "beta2": beta2, "eps": self._epsilon, "amsgrad": False}
            adamw(masters, gradients, state[0], state[1], [], updates, **common)
        else:
            common |= {"momentum": self._momentum, "dampening": 0.0, "nesterov": False}
            momentum: list[torch.Tensor | None] = [*state[0]] if state else []
            sgd(masters, gradients, momentum, **common)

    def state_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Return the optimizer state by kind ("exp_avg" ...), one 1-D tensor per shard. These are the optimizer's own
        tensors, not copies, so that a checkpoint can be loaded into them in place."""
        return self._state

    def restore_step_count(self, step_count: int) -> None:
        """Set the number of updates done, on which AdamW's bias correction depends, to `step_count`. Called after a
        checkpoint's values were loaded into the tensors of `state_tensors`."""
        self.step_count = step_count
        for part in chain(*self._groups.values()):
            part.updates.fill_(float(step_count))
