"""Faults in local code: while a fault is planted, one function of the engine is replaced by a wrong one.

Each counts only where it changes a result, so that a fault that a layout cannot have is not counted.
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
from meshwright.model import tiled_attention
from meshwright.model.documents import Documents
from meshwright.parallel import context
from meshwright.parallel.zero import FsdpUnit, UnshardedGradient
from meshwright.parallel.zero_engine import ZeroEngine
from meshwright.training import trainer
from meshwright.training.language_model import LanguageModelTask
from meshwright.training.optimizer import Optimizer
from meshwright.training.trainer import Trainer


class FaultCounter:
    """Counts how often a planted fault changed something on this rank."""

    def __init__(self) -> None:
        """Start at 0."""
        self.count = 0
        self._met: list[object] = []  # kept: the id of a freed object would be used again

    def record_if(self, changed: bool) -> bool:
        """Add 1 to the count if `changed`, that is, if the fault altered a value; return `changed`."""
        self.count += bool(changed)
        return bool(changed)

    def seen_before(self, thing: object) -> bool:
        """Return True if this method was called with the object `thing` before."""
        met = any(each is thing for each in self._met)
        self._met.append(thing)
        return met


FaultyFunction = Callable[..., Any]  # (counter, original function, arguments of the call)


@dataclass(frozen=True, slots=True)
class LocalFaultSpec:
    """A deliberate bug in local code: the method or function `owner.name` is replaced by `wrong`, which gets a
    counter, the original and its arguments. case: name of the problem that exposes it.
    """

    case: str
    owner: Any
    name: str
    wrong: FaultyFunction


@dataclass(frozen=True, slots=True)
class LocalFault:
    """A deliberate bug in local code, by its name in `LOCAL_FAULTS`."""

    name: str

    def __str__(self) -> str:
        """Return the fault's name."""
        return self.name

    @property
    def case(self) -> str:
        """Name of the problem that exposes the fault: updates, dtypes or long sequences."""
        return LOCAL_FAULTS[self.name].case

    @contextmanager
    def planted(self) -> Iterator[FaultCounter]:
        """Plant the fault in this process within the context; yields its counter."""
        plan, counter = LOCAL_FAULTS[self.name], FaultCounter()
        kind = plan.owner.__dict__[plan.name]
        original = kind.__func__ if isinstance(kind, classmethod) else kind

        def wrong(*arguments: Any, **options: Any) -> Any:
            """Call the faulty function with the counter and the original function."""
            return plan.wrong(counter, original, *arguments, **options)

        replacement: Any = classmethod(wrong) if isinstance(kind, classmethod) else wrong
        setattr(plan.owner, plan.name, replacement)
        try:
            yield counter
        finally:
            setattr(plan.owner, plan.name, kind)


# --- gradients and updates


def _overwritten(counter: FaultCounter, original: FaultyFunction, gradient: UnshardedGradient, index: int) -> Any:
    """Faulty `UnshardedGradient.view`: micro-batches overwrite the gradient instead of accumulating."""
    view, stale = original(gradient, index)
    counter.record_if(not stale)
    return view, True


def _unclipped(counter: FaultCounter, original: FaultyFunction, self: Trainer, verdict: Any) -> float:
    """Faulty `Trainer._gradient_scale`: no clipping."""
    scale = 1.0 / verdict.loss_scale
    counter.record_if(scale != original(self, verdict))
    return scale


def _clipped_twice(counter: FaultCounter, original: FaultyFunction, self: Trainer, verdict: Any) -> float:
    """Faulty `Trainer._gradient_scale`: the clipping factor is squared."""
    clipped = original(self, verdict) * verdict.loss_scale
    counter.record_if(clipped != 1.0)
    return float(clipped**2 / verdict.loss_scale)


def _clipped_locally(counter: FaultCounter, original: FaultyFunction, self: Trainer, verdict: Any) -> float:
    """Faulty `Trainer._gradient_scale`: clipping by this rank's norm instead of the global one."""
    norm = math.sqrt(float(self.parallel.squared_norm_share())) / verdict.loss_scale
    counter.record_if(not math.isclose(norm, verdict.gradient_norm))
    return min(1.0, self.recipe.train.clip / (norm + 1e-6)) / verdict.loss_scale


def _decay_moved(by: int) -> FaultyFunction:
    """Return a faulty `ZeroEngine._shard` in which weight decay applies to `by` more elements of the flat buffer."""

    def wrong(counter: FaultCounter, original: FaultyFunction, self: ZeroEngine, unit: FsdpUnit) -> Any:
        """Faulty `ZeroEngine._shard`: the weight-decay range is moved."""
        shard = original(self, unit)
        end = shard.master.numel()
        held = [last - unit.start for _, _, last in unit.flat.within(unit.start, unit.stop)]  # the rest is padding
        moved = min(max(shard.decay_numel + by, 0), end)
        counter.record_if(moved != shard.decay_numel and min(moved, shard.decay_numel) < max(held, default=0))
        return dataclasses.replace(shard, decay_numel=moved)

    return wrong


def _next_rate(counter: FaultCounter, original: FaultyFunction, step: int, train: Any) -> float:
    """Faulty `learning_rate`: that of the next step."""
    counter.record_if(original(step + 1, train) != original(step, train))
    return float(original(step + 1, train))


def _more_terms(counter: FaultCounter, original: FaultyFunction, *arguments: Any) -> int:
    """Faulty `count_terms`: one term too many."""
    counter.record_if(True)
    return int(original(*arguments)) + 1


def _never_skipped(counter: FaultCounter, original: FaultyFunction, *arguments: Any) -> Any:
    """Faulty `Trainer._agree`: a non-finite step is not skipped."""
    verdict = original(*arguments)
    verdict.finite = verdict.finite or counter.record_if(True)
    return verdict


# --- parameters


def _not_rounded(counter: FaultCounter, original: FaultyFunction, self: FsdpUnit) -> None:
    """Faulty `FsdpUnit.update_parameters`: from its second call on, parameters are not copied from the master
    weights."""
    master = self.master
    if counter.seen_before(self) and counter.record_if(self.parameter_shard.data_ptr() != master.data_ptr()):
        self.master = self.parameter_shard  # as where the dtypes agree: nothing is copied
    original(self)
    self.master = master


def _not_gathered(counter: FaultCounter, original: FaultyFunction, self: FsdpUnit) -> None:
    """Faulty `FsdpUnit.update_parameters`: from its second call on, parameters are not all-gathered (ZeRO-1 and 2)."""
    zero = self.zero
    if counter.seen_before(self) and counter.record_if(zero in (1, 2)):
        self.unshard()
        self.zero = 0
    original(self)
    self.zero = zero


# --- samples


def _next_samples(counter: FaultCounter, original: FaultyFunction, self: LanguageModelTask, step: int) -> Any:
    """Faulty `samples_of_step`: sample numbers are off by one."""
    counter.record_if(True)
    share = self.recipe.train.batch // self.mesh.dp.size
    return self.order.sample(step * self.recipe.train.batch + self.mesh.dp.rank * share + 1 + np.arange(share))


def _samples_of_rank_0(counter: FaultCounter, original: FaultyFunction, self: LanguageModelTask, step: int) -> Any:
    """Faulty `samples_of_step`: every rank reads rank 0's samples."""
    share = self.recipe.train.batch // self.mesh.dp.size
    counter.record_if(self.mesh.dp.rank > 0)
    return self.order.sample(step * self.recipe.train.batch + np.arange(share))


def _one_epoch(counter: FaultCounter, original: FaultyFunction, self: SampleOrder, numbers: Any) -> Any:
    """Faulty `SampleOrder.sample`: every epoch repeats the first one's permutation."""
    wanted = np.asarray(numbers)
    counter.record_if(bool((wanted >= self.sequences).any()))
    return original(self, wanted % self.sequences)


# --- what a checkpoint restores


def _restored_without(key: str) -> FaultyFunction:
    """Return a faulty `Trainer.restore` that ignores the entry `key` of `state.json`."""

    def wrong(counter: FaultCounter, original: FaultyFunction, self: Trainer, state: dict[str, Any]) -> None:
        """Faulty `Trainer.restore`: the key has its initial value."""
        fresh: Any = None if key == "loss_scale" else 0
        counter.record_if(state.get(key) != fresh)
        original(self, {**state, key: fresh})

    return wrong


def _finite_steps_forgotten(
    counter: FaultCounter, original: FaultyFunction, self: Trainer, state: dict[str, Any]
) -> None:
    """Faulty `Trainer.restore`: the loss scale's count of finite steps is 0."""
    scale = state.get("loss_scale")
    if scale is not None and counter.record_if(scale["finite_steps"] != 0):
        state = {**state, "loss_scale": {**scale, "finite_steps": 0}}
    original(self, state)


def _optimizer_forgotten(counter: FaultCounter, original: FaultyFunction, self: Optimizer, step_count: int) -> None:
    """Faulty `Optimizer.restore_step_count`: the optimizer state is zeroed."""
    original(self, step_count)
    for tensors in self.state_tensors().values():
        for tensor in tensors:
            counter.record_if(bool(tensor.any()))
            tensor.zero_()


# --- attention


def _no_documents(counter: FaultCounter, original: FaultyFunction, cls: type[Documents], ids_BS: Any) -> Documents:
    """Faulty `Documents.from_ids`: attention crosses document boundaries."""
    found = original(cls, ids_BS)
    counter.record_if(found.starts_BS is not None)
    return cls(None)


def _sees_next(
    counter: FaultCounter, original: FaultyFunction, span: Any, triangle: torch.Tensor, first_RS: Any
) -> Any:
    """Faulty `tiles_of`: the causal mask lets each token see the next one."""
    counter.record_if(len(triangle) > 1)
    return original(span, torch.triu(triangle, 2), first_RS)


def _tile_forgets(
    counter: FaultCounter, original: FaultyFunction, span: Any, triangle: torch.Tensor, first_RS: Any
) -> Any:
    """Faulty `tiles_of`: every tile but the first misses its first key."""
    found = []
    for tile in original(span, triangle, first_RS):
        keys, mask = tile.keys, tile.mask
        if tile.queries.start > 0 and counter.record_if(keys.stop - keys.start > 1):
            wide = mask is not None and mask.shape[-1] == keys.stop - keys.start
            mask = mask[..., 1:] if wide else mask
            keys = slice(keys.start + 1, keys.stop)
        found.append(tile._replace(keys=keys, mask=mask))
    return found


def _ring_forgets(counter: FaultCounter, original: FaultyFunction, *arguments: Any) -> Any:
    """Faulty `spans`: the last KV block of another rank is left out."""
    found = original(*arguments)
    return found[:-1] if counter.record_if(len(found) > 1 and arguments[0] != arguments[1]) else found


LOCAL_FAULTS: dict[str, LocalFaultSpec] = {
    "gradient accumulation overwrites instead of adding": LocalFaultSpec(
        "updates", UnshardedGradient, "view", _overwritten
    ),
    "gradient clipping missing": LocalFaultSpec("updates", Trainer, "_gradient_scale", _unclipped),
    "gradient clipping applied twice": LocalFaultSpec("updates", Trainer, "_gradient_scale", _clipped_twice),
    "gradient clipping uses the local norm": LocalFaultSpec("updates", Trainer, "_gradient_scale", _clipped_locally),
    "weight-decay range one element too long": LocalFaultSpec("updates", ZeroEngine, "_shard", _decay_moved(1)),
    "weight-decay range one element too short": LocalFaultSpec("updates", ZeroEngine, "_shard", _decay_moved(-1)),
    "weight decay applied to norms and biases": LocalFaultSpec("updates", ZeroEngine, "_shard", _decay_moved(1 << 40)),
    "learning rate off by one step": LocalFaultSpec("updates", trainer, "learning_rate", _next_rate),
    "loss normalized by one target too many": LocalFaultSpec("updates", LanguageModelTask, "count_terms", _more_terms),
    "non-finite step not skipped": LocalFaultSpec("updates", Trainer, "_agree", _never_skipped),
    "parameters not rounded from master weights": LocalFaultSpec("dtypes", FsdpUnit, "update_parameters", _not_rounded),
    "parameters not all-gathered after the update": LocalFaultSpec(
        "updates", FsdpUnit, "update_parameters", _not_gathered
    ),
    "sample index off by one": LocalFaultSpec("updates", LanguageModelTask, "samples_of_step", _next_samples),
    "all ranks read rank 0's samples": LocalFaultSpec(
        "updates", LanguageModelTask, "samples_of_step", _samples_of_rank_0
    ),
    "every epoch uses the first epoch's permutation": LocalFaultSpec("updates", SampleOrder, "sample", _one_epoch),
    "step counter not restored": LocalFaultSpec("updates", Trainer, "restore", _restored_without("step")),
    "update counter not restored": LocalFaultSpec("updates", Trainer, "restore", _restored_without("optimizer_steps")),
    "skipped-step counter not restored": LocalFaultSpec(
        "updates", Trainer, "restore", _restored_without("skipped_steps")
    ),
    "consecutive-skip counter not restored": LocalFaultSpec(
        "updates", Trainer, "restore", _restored_without("skipped_in_a_row")
    ),
    "finite-step counter not restored": LocalFaultSpec("updates", Trainer, "restore", _finite_steps_forgotten),
    "loss scale not restored": LocalFaultSpec("updates", Trainer, "restore", _restored_without("loss_scale")),
    "optimizer state not restored": LocalFaultSpec("updates", Optimizer, "restore_step_count", _optimizer_forgotten),
    "attention not masked across documents": LocalFaultSpec("updates", Documents, "from_ids", _no_documents),
    "causal mask off by one": LocalFaultSpec("long sequences", tiled_attention, "tiles_of", _sees_next),
    "attention tile drops a key": LocalFaultSpec("long sequences", tiled_attention, "tiles_of", _tile_forgets),
    "ring attention drops a KV block": LocalFaultSpec("long sequences", context, "spans", _ring_forgets),
}
