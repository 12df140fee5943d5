"""AdamW and SGD on flat shards, by torch's fused kernels, in one call for all shards of equal weight decay.

A shard is a 1-D slice of an FSDP unit's flat master buffer. Its first `decay_numel` elements (matrices) have weight
decay, the rest (norms, biases) none, so that it gives torch at most two tensors. torch's functional optimizers are
called, since importing its optimizer classes loads the compiler, which takes over a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from meshwright.parallel.zero import FsdpUnit
from meshwright.recipe import TrainRecipe

STATE_KINDS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum",)}


class _Group(NamedTuple):
    """Slices of shards with the same weight decay and learning rate, which one fused call updates.

    masters, gradients: views of the shards' master weights and gradients. state: optimizer state, one list of views for
    each kind. updates: scalar tensors, number of updates done, for AdamW's bias correction."""

    masters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    state: list[list[torch.Tensor]]
    updates: list[torch.Tensor]


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

    def __init__(self, shards: Sequence[FsdpUnit], train: TrainRecipe) -> None:
        """Allocate zero optimizer state for the shards. train: the recipe's [train] table."""
        self.shards = list(shards)
        self.name = train.optimizer
        self.step_count = 0
        self._train = train
        kinds = STATE_KINDS[self.name] if self.name == "adamw" or train.momentum else ()
        self._state = {kind: [torch.zeros_like(shard.master) for shard in self.shards] for kind in kinds}
        self._groups: dict[tuple[float, float], _Group] = {}
        """Groups by (weight decay, factor on the learning rate)."""
        for index, shard in enumerate(self.shards):
            # The product of rate and weight decay does not depend on the width (arXiv:2203.03466, appendix B.3).
            decay = train.weight_decay / shard.rate_factor
            self._add_slice(index, slice(None, shard.decay_numel), decay, shard.rate_factor)
            self._add_slice(index, slice(shard.decay_numel, None), 0.0, 1.0)

    def _add_slice(self, index: int, part: slice, weight_decay: float, rate_factor: float) -> None:
        """Add a slice of a shard to the group of its weight decay and factor on the learning rate. index: number of the
        shard; part: the slice of its elements."""
        shard = self.shards[index]
        master = shard.master[part]
        if not master.numel():  # in a small model a rank's shard may be empty
            return
        empty = _Group([], [], [[] for _ in self._state], [])
        group = self._groups.setdefault((weight_decay, rate_factor), empty)
        group.masters.append(master)
        group.gradients.append(shard.gradient[part])
        group.updates.append(torch.zeros((), device=master.device))
        for views, tensors in zip(group.state, self._state.values(), strict=True):
            views.append(tensors[index][part])

    @torch.no_grad()
    def step(self, learning_rate: float, gradient_scale: float | GpuScale = 1.0, loss_scale: float = 1.0) -> None:
        """Update the master weights of all shards in place from their gradients. learning_rate: learning rate of this
        step.

        gradient_scale: factor by which the gradients are first multiplied (norm clipping and loss scale), or a
        `GpuScale`, which the fused kernels apply on the GPU. loss_scale: factor by which the loss was multiplied.

        Router biases, which balance the load of experts, are not updated by gradients. The gradient elements at their
        indices hold the load of each expert minus the mean load. Each bias is changed by `router_bias_rate`, down if
        that difference is positive and up if it is negative (arXiv:2408.15664).
        """
        self.step_count += 1
        self._balance_experts(gradient_scale, loss_scale)
        options: dict[str, Any] = {"fused": True, "maximize": False}
        if isinstance(gradient_scale, GpuScale):
            options |= {"grad_scale": gradient_scale.divisor, "found_inf": gradient_scale.skip}
        elif gradient_scale != 1.0:
            for group in self._groups.values():
                torch._foreach_mul_(group.gradients, gradient_scale)
        for (weight_decay, rate_factor), group in self._groups.items():
            self._update(group, lr=learning_rate * rate_factor, weight_decay=weight_decay, **options)

    def _balance_experts(self, gradient_scale: float | GpuScale, loss_scale: float) -> None:
        """Update the router biases (arXiv:2408.15664, algorithm 1), and set their gradients to 0. Arguments: as in
        `step`."""
        for shard in self.shards:
            for low, high in shard.balancing:
                load = shard.gradient[low:high]
                # An excess as small as the rounding of its sum is none: its sign would depend on the layout.
                sign = torch.where(load.abs() > 16 * loss_scale * torch.finfo(load.dtype).eps, load, 0).sign()
                if isinstance(gradient_scale, GpuScale):
                    sign *= 1 - gradient_scale.skip
                shard.master[low:high].sub_(sign, alpha=self._train.router_bias_rate)
                load.zero_()

    def _update(self, group: _Group, **options: Any) -> None:
        """Update the slices of `group` in place by one fused torch call. options: arguments of the call: learning rate,
        weight decay, scale of the gradients. AdamW multiplies the weights by 1 - learning rate x decay (decoupled); SGD
        adds decay x weights to the gradient."""
        masters, gradients, state, updates = group
        if self.name == "adamw":
            beta1, beta2 = self._train.betas
            options |= {"beta1": beta1, "beta2": beta2, "eps": self._train.epsilon, "amsgrad": False}
            adamw(masters, gradients, state[0], state[1], [], updates, **options)
        else:
            options |= {"momentum": self._train.momentum, "dampening": 0.0, "nesterov": False}
            momentum: list[torch.Tensor | None] = [*state[0]] if state else []
            sgd(masters, gradients, momentum, **options)

    def state_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Return the optimizer state by kind ("exp_avg" ...), one 1-D tensor per shard. These are the optimizer's own
        tensors, not copies, so that a checkpoint can be loaded into them in place."""
        return self._state

    def restore_step_count(self, step_count: int) -> None:
        """Set the number of updates done, on which AdamW's bias correction depends, to `step_count`. Called after a
        checkpoint's values were loaded into the tensors of `state_tensors`."""
        self.step_count = step_count
        for group in self._groups.values():
            for updates in group.updates:
                updates.fill_(float(step_count))
