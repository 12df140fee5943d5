"""Faults planted in local code: while one is planted, one function of the engine is replaced by a wrong one.

Each strikes only where it changes what the function does, so that a fault that a layout cannot have is not counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from meshwright.data.order import SampleOrder
from meshwright.model import ring_attention, tiled_attention
from meshwright.model.documents import Documents
from meshwright.parallel.data import DataParallel
from meshwright.parallel.gradients import GradientSums
from meshwright.parallel.units import UnitBuffers
from meshwright.train import trainer
from meshwright.train.optimizer import Optimizer
from meshwright.train.trainer import Trainer


class Strikes:
    """How often a planted fault changed something on this rank."""

    def __init__(self) -> None:
        self.count = 0
        self._met: list[object] = []  # kept: the id of a freed object would be used again

    def when(self, changed: bool) -> bool:
        """Count a strike if something is changed; whether it is."""
        self.count += bool(changed)
        return bool(changed)

    def again(self, thing: object) -> bool:
        """Whether an object is met for a second time."""
        met = any(each is thing for each in self._met)
        self._met.append(thing)
        return met


Wrong = Callable[..., Any]  # takes the strikes, the right function and its arguments


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where a fault is planted: `owner.name`, a method or function; `case`: the problem that shows it."""

    case: str
    owner: Any
    name: str
    wrong: Wrong


@dataclass(frozen=True, slots=True)
class LocalFault:
    """One of `PLANS`, by name."""

    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def case(self) -> str:
        """Name of the problem that shows it: updates, dtypes or long."""
        return PLANS[self.name].case

    @contextmanager
    def planted(self) -> Iterator[Strikes]:
        """Inside, the fault is planted in this process."""
        plan, strikes = PLANS[self.name], Strikes()
        kind = plan.owner.__dict__[plan.name]
        right = kind.__func__ if isinstance(kind, classmethod) else kind

        def wrong(*arguments: Any, **options: Any) -> Any:
            return plan.wrong(strikes, right, *arguments, **options)

        replacement: Any = classmethod(wrong) if isinstance(kind, classmethod) else wrong
        setattr(plan.owner, plan.name, replacement)
        try:
            yield strikes
        finally:
            setattr(plan.owner, plan.name, kind)


# --- gradients and updates


def _overwritten(strikes: Strikes, right: Wrong, sums: GradientSums, parameter: Any) -> Any:
    view, stale = right(sums, parameter)
    strikes.when(not stale)
    return view, True


def _unclipped(strikes: Strikes, right: Wrong, self: Trainer, verdict: Any) -> float:
    scale = 1.0 / verdict.loss_scale
    strikes.when(scale != right(self, verdict))
    return scale


def _clipped_twice(strikes: Strikes, right: Wrong, self: Trainer, verdict: Any) -> float:
    clipped = right(self, verdict) * verdict.loss_scale
    strikes.when(clipped != 1.0)
    return float(clipped**2 / verdict.loss_scale)


def _clipped_locally(strikes: Strikes, right: Wrong, self: Trainer, verdict: Any) -> float:
    norm = math.sqrt(float(self.parallel.squared_norm_share())) / verdict.loss_scale
    strikes.when(not math.isclose(norm, verdict.gradient_norm))
    return min(1.0, self.recipe.train.clip / (norm + 1e-6)) / verdict.loss_scale


def _decay_moved(by: int) -> Wrong:
    def wrong(strikes: Strikes, right: Wrong, self: DataParallel, unit: UnitBuffers) -> Any:
        shard = right(self, unit)
        end = shard.master.numel()
        held = [last - unit.start for _, _, last in unit.flat.within(unit.start, unit.stop)]  # the rest is padding
        moved = min(max(shard.decay_numel + by, 0), end)
        strikes.when(moved != shard.decay_numel and min(moved, shard.decay_numel) < max(held, default=0))
        return dataclasses.replace(shard, decay_numel=moved)

    return wrong


def _next_rate(strikes: Strikes, right: Wrong, step: int, train: Any) -> float:
    strikes.when(right(step + 1, train) != right(step, train))
    return float(right(step + 1, train))


def _more_terms(strikes: Strikes, right: Wrong, *arguments: Any) -> int:
    strikes.when(True)
    return int(right(*arguments)) + 1


def _never_skipped(strikes: Strikes, right: Wrong, *arguments: Any) -> Any:
    verdict = right(*arguments)
    verdict.finite = verdict.finite or strikes.when(True)
    return verdict


# --- parameters


def _not_rounded(strikes: Strikes, right: Wrong, self: UnitBuffers) -> None:
    master = self.master
    if strikes.again(self) and strikes.when(self.source.data_ptr() != master.data_ptr()):
        self.master = self.source  # as where the dtypes agree: nothing is copied
    right(self)
    self.master = master


def _not_gathered(strikes: Strikes, right: Wrong, self: UnitBuffers) -> None:
    zero = self.zero
    if strikes.again(self) and strikes.when(zero in (1, 2)):
        self.need()
        self.zero = 0
    right(self)
    self.zero = zero


# --- samples


def _next_samples(strikes: Strikes, right: Wrong, self: Trainer, step: int) -> Any:
    strikes.when(True)
    share = self.recipe.train.batch // self.mesh.dp.size
    return self.order.sample(step * self.recipe.train.batch + self.mesh.dp.rank * share + 1 + np.arange(share))


def _samples_of_rank_0(strikes: Strikes, right: Wrong, self: Trainer, step: int) -> Any:
    share = self.recipe.train.batch // self.mesh.dp.size
    strikes.when(self.mesh.dp.rank > 0)
    return self.order.sample(step * self.recipe.train.batch + np.arange(share))


def _one_epoch(strikes: Strikes, right: Wrong, self: SampleOrder, numbers: Any) -> Any:
    wanted = np.asarray(numbers)
    strikes.when(bool((wanted >= self.sequences).any()))
    return right(self, wanted % self.sequences)


# --- what a checkpoint restores


def _restored_without(key: str) -> Wrong:
    def wrong(strikes: Strikes, right: Wrong, self: Trainer, state: dict[str, Any]) -> None:
        fresh: Any = None if key == "loss_scale" else 0
        strikes.when(state.get(key) != fresh)
        right(self, {**state, key: fresh})

    return wrong


def _finite_steps_forgotten(strikes: Strikes, right: Wrong, self: Trainer, state: dict[str, Any]) -> None:
    scale = state.get("loss_scale")
    if scale is not None and strikes.when(scale["finite_steps"] != 0):
        state = {**state, "loss_scale": {**scale, "finite_steps": 0}}
    right(self, state)


def _optimizer_forgotten(strikes: Strikes, right: Wrong, self: Optimizer, step_count: int) -> None:
    right(self, step_count)
    for tensors in self.state_tensors().values():
        for tensor in tensors:
            strikes.when(bool(tensor.any()))
            tensor.zero_()


# --- attention


def _no_documents(strikes: Strikes, right: Wrong, cls: type[Documents], ids_BS: Any) -> Documents:
    found = right(cls, ids_BS)
    strikes.when(found.starts_BS is not None)
    return cls(None)


def _sees_next(strikes: Strikes, right: Wrong, span: Any, triangle: torch.Tensor, first_RS: Any) -> Any:
    strikes.when(len(triangle) > 1)
    return right(span, torch.triu(triangle, 2), first_RS)


def _tile_forgets(strikes: Strikes, right: Wrong, span: Any, triangle: torch.Tensor, first_RS: Any) -> Any:
    """Every tile but the first loses the first key that it sees."""
    found = []
    for tile in right(span, triangle, first_RS):
        keys, mask = tile.keys, tile.mask
        if tile.queries.start > 0 and strikes.when(keys.stop - keys.start > 1):
            wide = mask is not None and mask.shape[-1] == keys.stop - keys.start
            mask = mask[..., 1:] if wide else mask
            keys = slice(keys.start + 1, keys.stop)
        found.append(tile._replace(keys=keys, mask=mask))
    return found


def _ring_forgets(strikes: Strikes, right: Wrong, *arguments: Any) -> Any:
    """Of what queries see of another rank's keys, the last piece is left out."""
    found = right(*arguments)
    return found[:-1] if strikes.when(len(found) > 1 and arguments[0] != arguments[1]) else found


PLANS: dict[str, _Plan] = {
    "gradients of micro-batches overwrite each other": _Plan("updates", GradientSums, "_view", _overwritten),
    "gradients are not clipped": _Plan("updates", Trainer, "_gradient_scale", _unclipped),
    "gradients are clipped twice": _Plan("updates", Trainer, "_gradient_scale", _clipped_twice),
    "gradients are clipped by the norm of one rank": _Plan("updates", Trainer, "_gradient_scale", _clipped_locally),
    "weight decay ends an element late": _Plan("updates", DataParallel, "_shard", _decay_moved(1)),
    "weight decay ends an element early": _Plan("updates", DataParallel, "_shard", _decay_moved(-1)),
    "norms and biases decay": _Plan("updates", DataParallel, "_shard", _decay_moved(1 << 40)),
    "the learning rate is that of the next step": _Plan("updates", trainer, "learning_rate", _next_rate),
    "the loss is divided by one target too many": _Plan("updates", trainer, "count_terms", _more_terms),
    "a step that is not finite is not skipped": _Plan("updates", Trainer, "_agree", _never_skipped),
    "parameters are not rounded from their master weights": _Plan("dtypes", UnitBuffers, "publish", _not_rounded),
    "parameters are not gathered after the update": _Plan("updates", UnitBuffers, "publish", _not_gathered),
    "samples begin one number late": _Plan("updates", Trainer, "_samples", _next_samples),
    "every rank reads the samples of the first": _Plan("updates", Trainer, "_samples", _samples_of_rank_0),
    "every epoch has the order of the first": _Plan("updates", SampleOrder, "sample", _one_epoch),
    "the step is not restored": _Plan("updates", Trainer, "restore", _restored_without("step")),
    "the count of updates is not restored": _Plan("updates", Trainer, "restore", _restored_without("optimizer_steps")),
    "the count of skipped steps is not restored": _Plan(
        "updates", Trainer, "restore", _restored_without("skipped_steps")
    ),
    "the counter of skipped steps in a row is not restored": _Plan(
        "updates", Trainer, "restore", _restored_without("skipped_in_a_row")
    ),
    "the counter of finite steps is not restored": _Plan("updates", Trainer, "restore", _finite_steps_forgotten),
    "the loss scale is not restored": _Plan("updates", Trainer, "restore", _restored_without("loss_scale")),
    "the optimizer state is not restored": _Plan("updates", Optimizer, "restore_step_count", _optimizer_forgotten),
    "attention crosses documents": _Plan("updates", Documents, "from_ids", _no_documents),
    "a token sees the next one": _Plan("long", tiled_attention, "tiles_of", _sees_next),
    "attention tiles lose a key": _Plan("long", tiled_attention, "tiles_of", _tile_forgets),
    "a ring step leaves keys out": _Plan("long", ring_attention, "spans", _ring_forgets),
}
