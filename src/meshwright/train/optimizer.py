"""AdamW and SGD on flat shards: the elementwise update of torch's fused kernels, one call for all shards.

A shard is a 1-D slice of a unit's flat master buffer. Its first `decay_numel` entries (matrices) get weight decay, the
rest (norms, biases) none, so that each shard is at most two parameters of a `torch.optim` optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from meshwright.parallel.data import Shard
    from meshwright.recipe import TrainRecipe


STATE_KINDS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum",)}


class Optimizer:
    """Decoupled AdamW (Loshchilov & Hutter, arXiv 1711.05101, algorithm 2) or SGD with momentum over flat shards.

    State lives in one 1-D tensor per shard and kind, laid out like the shard's master, so that a checkpoint can cut it
    along the same offsets.
    """

    def __init__(self, shards: Sequence[Shard], train: TrainRecipe) -> None:
        self.shards = list(shards)
        self.name = train.optimizer
        self.router_bias_rate = train.router_bias_rate
        self.step_count = 0
        kinds = STATE_KINDS[self.name] if self.name == "adamw" or train.momentum else ()
        self._state = {kind: [torch.zeros_like(shard.master) for shard in self.shards] for kind in kinds}
        groups: list[dict] = [
            {"params": [], "weight_decay": train.weight_decay},
            {"params": [], "weight_decay": 0.0},
        ]
        self._views: list[tuple[torch.Tensor, int, slice]] = []
        for index, shard in enumerate(self.shards):
            for group, part in zip(
                groups, (slice(0, shard.decay_numel), slice(shard.decay_numel, shard.master.numel())), strict=True
            ):
                if part.start < part.stop:
                    view = shard.master[part]
                    group["params"].append(view)
                    self._views.append((view, index, part))
        groups = [group for group in groups if group["params"]]
        self._torch: torch.optim.Optimizer | None = None
        if groups and self.name == "adamw":  # a rank may own nothing of a small model
            first, second = train.betas
            self._torch = torch.optim.AdamW(
                groups, lr=train.learning_rate, betas=(first, second), eps=train.epsilon, fused=True
            )
        elif groups:
            # torch's SGD couples the decay to the gradient; that is what "SGD with weight decay" means everywhere.
            self._torch = torch.optim.SGD(groups, lr=train.learning_rate, momentum=train.momentum, fused=True)
        self._bind_state()

    def _bind_state(self) -> None:
        """Hand our flat state tensors (as views) to torch's optimizer."""
        self._steps: list[torch.Tensor] = []
        for view, index, part in self._views:
            assert self._torch is not None
            state = {kind: tensors[index][part] for kind, tensors in self._state.items()}
            if self.name == "adamw":
                count = torch.tensor(float(self.step_count), device=view.device)
                self._steps.append(count)
                self._torch.state[view] = {"step": count, **state}
            elif state:
                self._torch.state[view] = {"momentum_buffer": state["momentum"]}

    def step(self, learning_rate: float, gradient_scale: float = 1.0) -> None:
        """Update the masters in place from the shards' gradients, first multiplied by `gradient_scale` (clipping)."""
        self.step_count += 1
        for shard in self.shards:
            for low, high in shard.balancing:  # by the sign of the load above the mean (arXiv:2408.15664, algorithm 1)
                load = shard.gradient[low:high]
                shard.master[low:high].sub_(load.sign(), alpha=self.router_bias_rate)
                load.zero_()
        if self._torch is None:
            return
        gradients = [self.shards[index].gradient[part] for _, index, part in self._views]
        if gradient_scale != 1.0:
            torch._foreach_mul_(gradients, gradient_scale)
        for (view, _, _), gradient in zip(self._views, gradients, strict=True):
            view.grad = gradient
        for group in self._torch.param_groups:
            group["lr"] = learning_rate
        self._torch.step()
        for view, _, _ in self._views:
            view.grad = None

    def state_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Kind of state → one 1-D tensor per shard, the live ones: a loader fills them in place."""
        return self._state

    def restore_step_count(self, step_count: int) -> None:
        """Set the number of updates done (bias correction), after `state_tensors` were filled."""
        self.step_count = step_count
        for count in self._steps:
            count.fill_(float(step_count))
