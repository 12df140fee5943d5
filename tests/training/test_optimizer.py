"""The optimizer on flat shards against torch.optim on whole parameters, with weight-decay groups."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from meshwright.recipe import TrainRecipe
from meshwright.training.optimizer import GpuScale, Optimizer

SHAPES = [[(7, 5), (3, 11), (5,), (1,)], [(4, 4)], [(9,)]]  # per unit: matrices, with weight decay, then vectors
RATES = [3e-3, 1e-3, 2e-3, 5e-4, 5e-4]


def recipe(**changes) -> TrainRecipe:
    return TrainRecipe(steps=10, batch=1, **{"learning_rate": 1e-3, "weight_decay": 0.3} | changes)


def values(seed: int, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator, dtype=dtype) for shape in unit] for unit in SHAPES]


@dataclass
class Shard:
    """Elements [start, stop) of the flat buffer of a unit."""

    unit: str
    master: torch.Tensor
    gradient: torch.Tensor
    decay_numel: int
    start: int
    stop: int
    balancing: tuple[tuple[int, int], ...] = ()
    rate_factor: float = 1.0


def flat(unit: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.reshape(-1) for value in unit])


def cut(dtype: torch.dtype, cuts: list[float]) -> list[Shard]:
    """Cut every unit's flat buffer at the same fractions, so that shards begin and end inside tensors."""
    shards = []
    for number, unit in enumerate(values(0, dtype)):
        whole, decay = flat(unit), sum(value.numel() for value in unit if value.ndim == 2)
        bounds = [round(len(whole) * part) for part in (0.0, *cuts, 1.0)]
        for start, stop in pairwise(bounds):
            master = whole[start:stop].clone()
            decayed = min(max(decay - start, 0), stop - start)
            shards.append(Shard(f"unit {number}", master, torch.zeros_like(master), decayed, start, stop))
    return shards


def fill(shards: list[Shard], step: int, dtype: torch.dtype) -> None:
    gradients = {f"unit {number}": flat(unit) for number, unit in enumerate(values(step + 1, dtype))}
    for shard in shards:
        shard.gradient.copy_(gradients[shard.unit][shard.start : shard.stop])


def reference(train: TrainRecipe, dtype: torch.dtype, steps: int, scale: float = 1.0) -> list[torch.Tensor]:
    """Return torch's optimizer on whole parameters, with weight decay on those of two dims."""
    units = values(0, dtype)
    parameters = [value for unit in units for value in unit]
    groups = [
        {"params": [p for p in parameters if p.ndim == 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    if train.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, betas=tuple(train.betas), eps=train.epsilon, foreach=False)
    else:
        optimizer = torch.optim.SGD(groups, momentum=train.momentum, foreach=False)
    for step in range(steps):
        for parameter, gradient in zip(parameters, (g for unit in values(step + 1, dtype) for g in unit), strict=True):
            parameter.grad = gradient * scale
        for group in optimizer.param_groups:
            group["lr"] = RATES[step]
        optimizer.step()
    return [flat(unit) for unit in units]


def together(shards: list[Shard]) -> list[torch.Tensor]:
    names = dict.fromkeys(shard.unit for shard in shards)
    return [torch.cat([shard.master for shard in shards if shard.unit == name]) for name in names]


TRAINS = {
    "adamw": recipe(),
    "adamw, other betas": recipe(betas=[0.8, 0.99], epsilon=1e-3, weight_decay=0.0),
    "sgd": recipe(optimizer="sgd"),
    "sgd with momentum": recipe(optimizer="sgd", momentum=0.9),
}


@pytest.mark.parametrize("name", TRAINS)
@pytest.mark.parametrize("cuts", [[], [0.37, 0.8]], ids=["whole", "cut anywhere"])
def test_flat_shards_are_updated_as_torch_updates_whole_parameters(name, cuts):
    train, shards = TRAINS[name], cut(torch.float64, cuts)
    optimizer = Optimizer(shards, train)
    for step in range(5):
        fill(shards, step, torch.float64)
        optimizer.step(RATES[step])
    for ours, theirs in zip(together(shards), reference(train, torch.float64, 5), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_only_matrices_decay():
    shards = cut(torch.float64, [])
    optimizer = Optimizer(shards, recipe(weight_decay=0.5))
    before = [shard.master.clone() for shard in shards]
    optimizer.step(0.1)  # gradients are zero: only weight decay changes weights
    for shard, old in zip(shards, before, strict=True):
        torch.testing.assert_close(shard.master[: shard.decay_numel], old[: shard.decay_numel] * 0.95)
        assert torch.equal(shard.master[shard.decay_numel :], old[shard.decay_numel :])
    assert [shard.decay_numel for shard in shards] == [68, 16, 0]


def test_gradient_scale_matches_scaled_gradients():
    shards = cut(torch.float64, [0.5])
    optimizer = Optimizer(shards, TRAINS["sgd with momentum"])
    for step in range(3):
        fill(shards, step, torch.float64)
        optimizer.step(RATES[step], 0.125)
    expected = reference(TRAINS["sgd with momentum"], torch.float64, 3, scale=0.125)
    for ours, theirs in zip(together(shards), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", TRAINS)
def test_gpu_scale_divides_gradients_or_skips_the_update(name):
    """By the arguments of torch's fused kernels; a skipped update changes no weight, state, router bias or count."""
    train, shards = TRAINS[name], cut(torch.float32, [0.5])
    shards[0].balancing = ((0, 2),)
    optimizer = Optimizer(shards, train)
    for step, skip in enumerate((0.0, 1.0, 0.0)):
        fill(shards, 0 if step == 0 else 1, torch.float32)
        kinds = optimizer.state_tensors().values()
        before = [
            tensor.clone() for tensor in (*(shard.master for shard in shards), *(t for kind in kinds for t in kind))
        ]
        scale = GpuScale(torch.tensor(float("nan") if skip else 8.0), torch.tensor(skip))
        optimizer.step(RATES[0 if step == 0 else 1], scale)
        kinds = optimizer.state_tensors().values()
        after = [*(shard.master for shard in shards), *(t for kind in kinds for t in kind)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) == bool(skip)
    expected = cut(torch.float32, [0.5])
    expected[0].balancing = ((0, 2),)
    on_host = Optimizer(expected, train)
    for step in range(2):
        fill(expected, step, torch.float32)
        on_host.step(RATES[step], 0.125)
    for ours, theirs in zip(shards, expected, strict=True):
        torch.testing.assert_close(ours.master, theirs.master)


@pytest.mark.parametrize("name", TRAINS)
def test_copied_optimizer_state_continues_bit_for_bit(name):
    train, shards, copies = TRAINS[name], cut(torch.float32, [0.3]), cut(torch.float32, [0.3])
    undisturbed, first = Optimizer(shards, train), Optimizer(copies, train)
    for step in range(2):
        for some, optimizer in ((shards, undisturbed), (copies, first)):
            fill(some, step, torch.float32)
            optimizer.step(RATES[step])
    resumed = Optimizer(copies, train)
    for kind, tensors in resumed.state_tensors().items():
        for tensor, saved in zip(tensors, first.state_tensors()[kind], strict=True):
            tensor.copy_(saved)
    resumed.restore_step_count(first.step_count)
    for step in range(2, 5):
        for some, optimizer in ((shards, undisturbed), (copies, resumed)):
            fill(some, step, torch.float32)
            optimizer.step(RATES[step])
    assert all(torch.equal(a.master, b.master) for a, b in zip(shards, copies, strict=True))
    assert resumed.step_count == undisturbed.step_count == 5


def test_optimizer_state_is_allocated_at_start():
    shards = cut(torch.float32, [0.3])
    state = Optimizer(shards, recipe()).state_tensors()
    assert list(state) == ["exp_avg", "exp_avg_sq"]
    assert [tensor.shape for tensor in state["exp_avg"]] == [shard.master.shape for shard in shards]
    assert Optimizer(shards, recipe(optimizer="sgd")).state_tensors() == {}


def test_rank_without_parameters_counts_steps():
    nothing = torch.zeros(0)
    optimizer = Optimizer([Shard("unit", nothing, nothing.clone(), 0, 8, 8)], recipe())
    optimizer.step(1e-3, 0.5)
    optimizer.restore_step_count(7)
    assert optimizer.step_count == 7
