"""Deliberate bugs (faults) in code without collectives: while a fault is planted, one function of the engine is
replaced by a buggy stand-in, and the verification must fail.

A stand-in is called with a counter, the original function, and the arguments of the call. The counter records how often
the stand-in changed a result: a fault that changed none on a layout is ignored.
"""

from __future__ import annotations

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
from meshwright.parallel import ring_spans
from meshwright.parallel.zero import FsdpUnit, UnshardedGradient
from meshwright.training import optimizer, trainer
from meshwright.training.language_model import LanguageModelTask
from meshwright.training.optimizer import Optimizer
from meshwright.training.trainer import Trainer


class FaultCounter:
    """Counter of the values on this rank that a planted fault (deliberate bug) has changed."""

    def __init__(self) -> None:
        """Start at a count of 0."""
        self.count = 0
        self._met: list[object] = []  # referenced, as the id of a freed object can be reused

    def record_if(self, changed: bool) -> bool:
        """Count one changed value if `changed` is True; return `changed`."""
        self.count += bool(changed)
        return bool(changed)

    def has_seen(self, value: object) -> bool:
        """Return True if an earlier call of this method got the same object `value` (by identity). A fault can thus act
        only from the second use of an object on."""
        met = any(each is value for each in self._met)
        self._met.append(value)
        return met


FaultyFunction = Callable[..., Any]  # (counter, original function, arguments of the call)


@dataclass(frozen=True, slots=True)
class LocalFaultSpec:
    """Definition of a deliberate bug: the function or method called `name` of `owner` (a module or class) is replaced
    by `wrong`.

    wrong: buggy function, called with a `FaultCounter`, the original function, and the arguments of the call. case:
    name of the small training problem that detects the bug (`mutations.py`)."""

    owner: Any
    name: str
    wrong: FaultyFunction
    case: str = "updates"


@dataclass(frozen=True, slots=True)
class LocalFault:
    """Deliberate bug in code without collectives. name: its description and key in `LOCAL_FAULTS`, such as "gradient
    clipping missing"."""

    name: str

    def __str__(self) -> str:
        """Return the fault's name."""
        return self.name

    @contextmanager
    def plant(self) -> Iterator[FaultCounter]:
        """Context manager in which the fault is planted in this process: the buggy function replaces the correct one.
        Yields the counter of changed values."""
        plan, counter = LOCAL_FAULTS[self.name], FaultCounter()
        kind = plan.owner.__dict__[plan.name]
        original = kind.__func__ if isinstance(kind, classmethod) else kind

        def wrong(*arguments: Any, **options: Any) -> Any:
            """Call the buggy function with the counter, the original function and the arguments of the call."""
            return plan.wrong(counter, original, *arguments, **options)

        replacement: Any = classmethod(wrong) if isinstance(kind, classmethod) else wrong
        setattr(plan.owner, plan.name, replacement)
        try:
            yield counter
        finally:
            setattr(plan.owner, plan.name, kind)


# --- gradients and updates


def _overwrite_gradient(
    counter: FaultCounter, original: FaultyFunction, gradient: UnshardedGradient, index: int
) -> Any:
    """Buggy stand-in for `UnshardedGradient.view` (`original`): each micro-batch overwrites the gradient instead of
    adding to it. `original` returns (view of the gradient number `index`, overwrite): backward overwrites the view if
    the flag `overwrite` is True, else adds to the view. The stand-in always returns True. `counter` counts the flags
    that this changes."""
    view, stale = original(gradient, index)
    counter.record_if(not stale)
    return view, True


def _clip_wrongly(factor: Callable[[Trainer, Any, float], float]) -> FaultyFunction:
    """Return a buggy stand-in for `Trainer._gradient_scale` that multiplies gradients by a wrong clipping factor.
    factor: function (trainer, outcome of the step, right clipping factor) -> wrong clipping factor."""

    def wrong(counter: FaultCounter, original: FaultyFunction, self: Trainer, verdict: Any) -> float:
        """Return the factor on gradients: the wrong clipping factor / loss scale. `counter` counts the results that
        this changes. `verdict`: outcome of the step."""
        right = original(self, verdict) * verdict.loss_scale
        clipped = factor(self, verdict, right)
        counter.record_if(not math.isclose(clipped, right))
        return clipped / float(verdict.loss_scale)

    return wrong


def _clip_locally(trainer: Trainer, verdict: Any, right: float) -> float:
    """Return the clipping factor computed from the norm of this rank's gradient shard instead of the global norm (a
    planted fault). trainer: trainer of this rank. verdict: outcome of the step, with the loss scale. right: the correct
    factor, unused."""
    norm = math.sqrt(float(trainer.parallel.squared_norm_share())) / verdict.loss_scale
    return min(1.0, trainer.recipe.train.clip / (norm + 1e-6))


def _make_decay_fault(by: int) -> FaultyFunction:
    """Return a buggy stand-in for `FsdpUnit.__init__` (flat buffers of parameters that are sharded together) that
    applies weight decay to the wrong number of elements of this rank's shard. by: number of elements too many;
    negative: too few."""

    def wrong(counter: FaultCounter, original: FaultyFunction, self: FsdpUnit, *arguments: Any) -> None:
        """Build an FSDP unit by `original`, then move the weight-decay range of its shard. `counter` counts each
        changed result."""
        original(self, *arguments)
        held = [last - self.start for _, _, last in self.flat.find_slices(self.start, self.stop)]  # without padding
        moved = min(max(self.decay_numel + by, 0), self.stop - self.start)
        differs = moved != self.decay_numel and min(moved, self.decay_numel) < max(held, default=0)
        counter.record_if(self.trainable and differs)  # the optimizer reads no range of frozen parameters
        self.decay_numel = moved

    return wrong


def _use_next_learning_rate(counter: FaultCounter, original: FaultyFunction, step: int, train: Any) -> float:
    """Buggy stand-in for `learning_rate` (`original`): returns the learning rate of step `step` + 1. `train`: settings
    of the learning rate. `counter` counts the results that this changes."""
    counter.record_if(original(step + 1, train) != original(step, train))
    return float(original(step + 1, train))


def _add_term(counter: FaultCounter, original: FaultyFunction, *arguments: Any) -> Callable[[], Any]:
    """Buggy stand-in for `LanguageModelTask.count_terms` (`original`): counts one loss term too many. `counter` counts
    each call."""
    counter.record_if(True)
    count = original(*arguments)
    return lambda: count() + 1


def _never_skip_step(counter: FaultCounter, original: FaultyFunction, *arguments: Any) -> Any:
    """Buggy stand-in for `Trainer._read_outcome` (`original`): marks the outcome of a non-finite step as finite, so
    that the step is not skipped. `counter` counts the changed outcomes."""
    verdict = original(*arguments)
    verdict.finite = verdict.finite or counter.record_if(True)
    return verdict


# --- optimizer (Loshchilov & Hutter, arXiv:1711.05101, algorithm 2)


def _omit_bias_correction(counter: FaultCounter, original: FaultyFunction, *tensors: Any, **options: Any) -> None:
    """Buggy stand-in for torch's `adamw` (`original`) without bias correction: moments are not divided by 1 - beta^t.
    `tensors`: arguments of `adamw`, of which the last is the list of update counts t. `counter` counts each call."""
    counter.record_if(True)
    *others, updates = tensors
    original(*others, [torch.full_like(done, 1e9) for done in updates], **options)
    torch._foreach_add_(updates, 1.0)


def _make_option_fault(change: Callable[[dict[str, Any]], dict[str, Any]]) -> FaultyFunction:
    """Return a buggy stand-in for an optimizer function of torch, such as `adamw`, that runs it with wrong options.
    change: function (right options by name) -> wrong values by option name."""

    def wrong(counter: FaultCounter, original: FaultyFunction, *tensors: Any, **options: Any) -> None:
        """Update the parameters with the wrong options. `counter` counts the calls in which they differ."""
        changed = change(options)
        counter.record_if(any(options[name] != value for name, value in changed.items()))
        original(*tensors, **options | changed)

    return wrong


def _put_epsilon_inside_root(counter: FaultCounter, original: FaultyFunction, *tensors: Any, **options: Any) -> None:
    """Buggy stand-in for torch's `adamw` (`original`): divides by sqrt(v + epsilon) instead of sqrt(v) + epsilon.
    `tensors`: lists of parameters, gradients, first and second moments, maxima (unused) and update counts. `counter`
    counts each call."""
    counter.record_if(True)
    rate, beta1, beta2 = options["lr"], options["beta1"], options["beta2"]
    parameters, gradients, first, second, _, updates = tensors
    for w, g, m, v, t in zip(parameters, gradients, first, second, updates, strict=True):
        t += 1
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        root = (v / (1 - beta2 ** t.item()) + options["eps"]).sqrt()
        w.mul_(1 - rate * options["weight_decay"]).addcdiv_(m / (1 - beta1 ** t.item()), root, value=-rate)


# --- parameters


def _skip_rounding(counter: FaultCounter, original: FaultyFunction, self: FsdpUnit) -> None:
    """Buggy stand-in for `FsdpUnit.update_parameters` (`original`): from the second call on an FSDP unit on, the
    parameters are not set to the rounded master weights. `counter` counts the omitted copies."""
    master = self.master
    if counter.has_seen(self) and counter.record_if(self.parameter_shard.data_ptr() != master.data_ptr()):
        self.master = self.parameter_shard  # as where the dtypes agree: nothing is copied
    original(self)
    self.master = master


def _skip_all_gather(counter: FaultCounter, original: FaultyFunction, self: FsdpUnit) -> None:
    """Buggy stand-in for `FsdpUnit.update_parameters` (`original`): from the second call on an FSDP unit on, the
    parameters are not all-gathered under ZeRO-1 and 2. `counter` counts the omitted all-gathers."""
    zero = self.zero
    if counter.has_seen(self) and counter.record_if(zero in (1, 2)):
        self.unshard()
        self.zero = 0
    original(self)
    self.zero = zero


# --- samples


def _read_samples_from(offset: Callable[[LanguageModelTask, int], int]) -> FaultyFunction:
    """Return a buggy stand-in for `LanguageModelTask.samples_of_step` that reads wrong samples on this rank. offset:
    function (task, samples per dp rank) -> position in the global batch of the first sample to read."""

    def wrong(counter: FaultCounter, original: FaultyFunction, self: LanguageModelTask, step: int) -> Any:
        """Return this rank's samples of `step`. `counter` counts the calls that return wrong samples."""
        share, first = self.recipe.train.batch // self.mesh.dp.size, step * self.recipe.train.batch
        counter.record_if(offset(self, share) != self.mesh.dp.rank * share)
        return self.order.sample(first + offset(self, share) + np.arange(share))

    return wrong


def _repeat_first_epoch(counter: FaultCounter, original: FaultyFunction, self: SampleOrder, numbers: Any) -> Any:
    """Planted fault in place of `SampleOrder.sample` (`original`): every epoch repeats the permutation of the first
    epoch. `numbers`: global sample numbers, one or an array of any shape. `counter`: counts the calls whose result this
    changes."""
    wanted = np.asarray(numbers)
    counter.record_if(bool((wanted >= self.sequences).any()))
    return original(self, wanted % self.sequences)


# --- resuming from a checkpoint


def _restore_without(key: str) -> FaultyFunction:
    """Return a buggy stand-in for `Trainer.restore` that does not restore the entry `key` of the checkpoint's
    `state.json`, so that the trainer keeps its initial value."""

    def wrong(counter: FaultCounter, original: FaultyFunction, self: Trainer, state: dict[str, Any]) -> None:
        """Restore the trainer from `state` with the initial value of the key. `counter` counts the calls in which the
        two values differ."""
        fresh: Any = None if key == "loss_scale" else 0
        counter.record_if(state.get(key) != fresh)
        original(self, {**state, key: fresh})

    return wrong


def _forget_finite_steps(counter: FaultCounter, original: FaultyFunction, self: Trainer, state: dict[str, Any]) -> None:
    """Buggy stand-in for `Trainer.restore` (`original`): the loss scale's number of consecutive finite steps is
    restored as 0. `counter` counts the calls in which it was not 0. `state`: content of the checkpoint's `state.json`.
    """
    scale = state.get("loss_scale")
    if scale is not None and counter.record_if(scale["finite_steps"] != 0):
        state = {**state, "loss_scale": {**scale, "finite_steps": 0}}
    original(self, state)


def _forget_optimizer(counter: FaultCounter, original: FaultyFunction, self: Optimizer, step_count: int) -> None:
    """Buggy stand-in for `Optimizer.restore_step_count` (`original`) that also sets the optimizer state to zero.
    `counter` counts the tensors that were not zero."""
    original(self, step_count)
    for tensors in self.state_tensors().values():
        for tensor in tensors:
            counter.record_if(bool(tensor.any()))
            tensor.zero_()


# --- attention


def _ignore_documents(counter: FaultCounter, original: FaultyFunction, cls: type[Documents], ids_BS: Any) -> Documents:
    """Buggy stand-in for `Documents.from_ids` (`original`) with which attention crosses document boundaries. `counter`
    counts the changed results."""
    found = original(cls, ids_BS)
    counter.record_if(found.starts_BS is not None)
    return cls(None)


def _see_next_token(
    counter: FaultCounter, original: FaultyFunction, span: Any, triangle: torch.Tensor, first_RS: Any
) -> Any:
    """Buggy stand-in for `cut_span` (`original`), which splits attention into tiles and gives each tile a mask. The
    causal mask (`triangle`) is changed so that each token attends to the next token too. `counter` counts the calls in
    which the mask changes. span, first_RS: passed on to `original`."""
    counter.record_if(len(triangle) > 1)
    return original(span, torch.triu(triangle, 2), first_RS)


def _drop_key(counter: FaultCounter, original: FaultyFunction, span: Any, triangle: torch.Tensor, first_RS: Any) -> Any:
    """Buggy stand-in for `cut_span` (`original`), which splits attention into tiles and gives each tile a mask. Every
    tile omits the first of its keys, except the tiles with the sequence's first queries. `counter` counts the changed
    tiles. span, triangle, first_RS: passed on to `original`."""
    found = []
    for tile in original(span, triangle, first_RS):
        keys, mask = tile.keys, tile.mask
        if tile.queries.start > 0 and counter.record_if(keys.stop - keys.start > 1):
            wide = mask is not None and mask.shape[-1] == keys.stop - keys.start
            mask = mask[..., 1:] if wide else mask
            keys = slice(keys.start + 1, keys.stop)
        found.append(tile._replace(keys=keys, mask=mask))
    return found


def _drop_kv_block(counter: FaultCounter, original: FaultyFunction, *arguments: Any) -> Any:
    """Buggy stand-in for `list_spans` (`original`), which lists the pairs (query chunk, key chunk) that a step of ring
    attention computes. If the step is on another rank's KV block and has several pairs, the last pair is left out.
    `counter` counts the omitted pairs."""
    found = original(*arguments)
    return found[:-1] if counter.record_if(len(found) > 1 and arguments[0] != arguments[1]) else found


LOCAL_FAULTS: dict[str, LocalFaultSpec] = {
    "gradient accumulation overwrites instead of adding": LocalFaultSpec(
        UnshardedGradient, "view", _overwrite_gradient
    ),
    "gradient clipping missing": LocalFaultSpec(Trainer, "_gradient_scale", _clip_wrongly(lambda *_: 1.0)),
    "gradient clipping applied twice": LocalFaultSpec(
        Trainer, "_gradient_scale", _clip_wrongly(lambda trainer, verdict, right: right**2)
    ),
    "gradient clipping uses the local norm": LocalFaultSpec(Trainer, "_gradient_scale", _clip_wrongly(_clip_locally)),
    "weight-decay range one element too long": LocalFaultSpec(FsdpUnit, "__init__", _make_decay_fault(1)),
    "weight-decay range one element too short": LocalFaultSpec(FsdpUnit, "__init__", _make_decay_fault(-1)),
    "weight decay applied to norms and biases": LocalFaultSpec(FsdpUnit, "__init__", _make_decay_fault(1 << 40)),
    "learning rate off by one step": LocalFaultSpec(trainer, "learning_rate", _use_next_learning_rate),
    "loss normalized by one target too many": LocalFaultSpec(LanguageModelTask, "count_terms", _add_term),
    "non-finite step not skipped": LocalFaultSpec(Trainer, "_read_outcome", _never_skip_step),
    "AdamW without bias correction": LocalFaultSpec(optimizer, "adamw", _omit_bias_correction),
    "AdamW with betas swapped": LocalFaultSpec(
        optimizer, "adamw", _make_option_fault(lambda right: {"beta1": right["beta2"], "beta2": right["beta1"]})
    ),
    "AdamW with epsilon inside the square root": LocalFaultSpec(optimizer, "adamw", _put_epsilon_inside_root),
    "SGD momentum without decay": LocalFaultSpec(
        optimizer, "sgd", _make_option_fault(lambda right: {"momentum": 1.0}), "momentum"
    ),
    "parameters not rounded from master weights": LocalFaultSpec(
        FsdpUnit, "update_parameters", _skip_rounding, "dtypes"
    ),
    "parameters not all-gathered after the update": LocalFaultSpec(FsdpUnit, "update_parameters", _skip_all_gather),
    "sample index off by one": LocalFaultSpec(
        LanguageModelTask, "samples_of_step", _read_samples_from(lambda task, share: task.mesh.dp.rank * share + 1)
    ),
    "all ranks read rank 0's samples": LocalFaultSpec(
        LanguageModelTask, "samples_of_step", _read_samples_from(lambda task, share: 0)
    ),
    "every epoch uses the first epoch's permutation": LocalFaultSpec(SampleOrder, "sample", _repeat_first_epoch),
    "step counter not restored": LocalFaultSpec(Trainer, "restore", _restore_without("step")),
    "update counter not restored": LocalFaultSpec(Trainer, "restore", _restore_without("optimizer_steps")),
    "skipped-step counter not restored": LocalFaultSpec(Trainer, "restore", _restore_without("skipped_steps")),
    "consecutive-skip counter not restored": LocalFaultSpec(Trainer, "restore", _restore_without("skipped_in_a_row")),
    "finite-step counter not restored": LocalFaultSpec(Trainer, "restore", _forget_finite_steps),
    "loss scale not restored": LocalFaultSpec(Trainer, "restore", _restore_without("loss_scale")),
    "optimizer state not restored": LocalFaultSpec(Optimizer, "restore_step_count", _forget_optimizer),
    "attention not masked across documents": LocalFaultSpec(Documents, "from_ids", _ignore_documents),
    "causal mask off by one": LocalFaultSpec(tiled_attention, "cut_span", _see_next_token, "long sequences"),
    "attention tile drops a key": LocalFaultSpec(tiled_attention, "cut_span", _drop_key, "long sequences"),
    "ring attention drops a KV block": LocalFaultSpec(ring_spans, "list_spans", _drop_kv_block, "long sequences"),
}
"""Name of each local fault -> what it replaces, and the case that exposes it."""
