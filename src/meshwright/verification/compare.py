"""Comparison of the ranks' results with one device's: the first value that differs, its error, and the pattern of the
error."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from meshwright.layout import Layout
from meshwright.parallel.flat_buffers import TensorSlice
from meshwright.spec.parameter_entries import TRAINED_BUFFERS, BufferKind
from meshwright.verification.patterns import describe_pattern, list_in_backward_order
from meshwright.verification.problem import Problem
from meshwright.verification.ranks import RankResult
from meshwright.verification.reference import ParameterValues, Reference

TOLERANCES = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 0.1}
"""Largest relative error that passes, by parameter dtype."""
BF16_MIXTURE_TOLERANCE = 0.5  # rounding changes the routing of tokens between two nearly equal experts


def choose_tolerance(problem: Problem) -> float:
    """Return the largest relative error at which a layout's results on a training problem count as correct. The
    tolerance depends on the parameter dtype and, in bf16, on whether the model has experts."""
    mixture = problem.dtype == "bfloat16" and problem.config.experts > 0
    return BF16_MIXTURE_TOLERANCE if mixture else TOLERANCES[problem.dtype]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of comparing a layout's training run with the single-device reference.

    Attributes:
        worst_name, worst_error: Name and relative error of the tensor that differs most among gradients, updates and
            optimizer states.
        loss_error, gradient_norm_error: Largest relative errors of a loss and of a gradient norm.
        failure: One-line description of the first difference beyond the tolerance; None if all values agree.
        step: Step (from 0) of the difference in `failure`; None without a difference, or if it belongs to no single
            step.
    """

    worst_name: str
    worst_error: float
    loss_error: float
    gradient_norm_error: float
    failure: str | None
    step: int | None = None

    @property
    def passed(self) -> bool:
        """True if no value differs from the reference by more than the tolerance."""
        return self.failure is None


def compare(reference: Reference, results: Sequence[RankResult], layout: Layout) -> Comparison:
    """Compare the losses, norms, gradients, updates, optimizer state, parameters and counters of every rank with the
    single-device `reference`. results: one per rank. layout: layout on which the ranks trained."""
    refused = next((result.refused for result in results if result.refused), None)
    if refused is not None:
        return Comparison("", math.inf, math.inf, math.inf, refused)
    comparing = _LayoutComparison(reference, results, layout)
    found = list(comparing.find_differences())
    text, step = found[0] if found else (None, None)
    return Comparison(comparing.worst_name, comparing.worst, comparing.loss_error, comparing.norm_error, text, step)


Difference = tuple[str, int | None]  # (description, step from 0; None: no single step)


class _LayoutComparison:
    """Comparison of all ranks' results with the single-device reference, in the order of computation: step by step,
    gradients before updates, final state last.

    Attributes:
        worst, worst_name: Largest relative error so far of a gradient, update or optimizer state, and the name of its
            parameter.
        loss_error, norm_error: Largest relative errors so far of a loss and of a gradient norm.
    """

    def __init__(self, reference: Reference, results: Sequence[RankResult], layout: Layout) -> None:
        """Start with no errors. reference: single-device results. results: one for each rank. layout: layout on which
        the ranks trained."""
        self.reference, self.results, self.layout = reference, results, layout
        self.tolerance = choose_tolerance(reference.problem)
        self.worst_name, self.worst, self.loss_error, self.norm_error = "", 0.0, 0.0, 0.0

    def find_differences(self) -> Iterator[Difference]:
        """Yield every difference beyond the tolerance as (description, step), in the order of computation. step:
        training step, from 0; None if the difference belongs to no single step."""
        for step in sorted(self.results[0].steps):
            yield from self._compare_counters(step)
            if step == self.reference.problem.nan_step:
                if any(math.isfinite(result.steps[step].norm) for result in self.results):
                    disagree = "ranks disagree on whether the gradient is finite (overflow check not all-reduced)"
                    yield f"step {step + 1}: {disagree}", None
            else:
                yield from self._compare_gradients(step)
            yield from self._compare_weights(step)
        if self.reference.problem.steps in self.results[0].counters:
            yield from self._compare_end()

    def _compare_counters(self, steps: int) -> Iterator[Difference]:
        """Yield (description, None) for each checkpoint counter, such as the number of samples, that differs from the
        reference after `steps` steps. None: the difference belongs to no single step."""
        for name, right in self.reference.compute_expected_counters(steps).items():
            found = (result.counters[steps][name] for result in self.results)
            if (wrong := next((value for value in found if value != right), None)) is not None:
                yield f"{name} is {wrong} after {steps} steps, not {right}", None

    def _compare_gradients(self, step: int) -> Iterator[Difference]:
        """Yield the differences (description, step) of gradients, loss, gradient norm and loss scale in step `step`
        (from 0)."""
        reference, results = self.reference, [result.steps[step] for result in self.results]
        slices = [result.gradients for result in results]
        copies = _assemble_copies(self.layout, slices, reference)
        errors = self._track_worst(_find_worst_errors(copies, reference.gradients[step]))
        truth = reference.losses[step]
        loss = max(_compute_relative_error(result.loss, truth) for result in results)
        norm = max(_compute_relative_error(result.norm, reference.norms[step]) for result in results)
        self.loss_error, self.norm_error = max(self.loss_error, loss), max(self.norm_error, norm)
        farthest = max((result.loss for result in results), key=lambda value: _compute_relative_error(value, truth))
        ratio = f"ratio to reference {farthest / truth:.9g}" if math.isfinite(farthest) else "not finite"
        if (first := self._find_first_wrong(errors)) is not None:
            pattern = describe_pattern(reference, slices, self.layout, step, first)
            also = f"; the loss is off by {loss:.1e} ({ratio})" if loss > self.tolerance else ""
            yield f"step {step + 1}: the gradient of {first} is off by {errors[first]:.1e} ({pattern}){also}", step
        if loss > self.tolerance:
            yield f"step {step + 1}: the loss is off by {loss:.1e} ({ratio})", step
        if norm > self.tolerance:
            yield f"step {step + 1}: the gradient norm is off by {norm:.1e} although every gradient is right", step
        if any(result.scale != reference.scales[step] for result in results):
            yield f"step {step + 1}: the loss scale is not {reference.scales[step]:g}", step

    def _compare_weights(self, step: int) -> Iterator[Difference]:
        """Yield the differences (description, None) of the master weights after step `step` (from 0): a weight's change
        since the start of the run differs from that of the reference, or copies of a weight on several ranks differ
        from each other. None: the difference belongs to no single step."""
        reference, problem = self.reference, self.reference.problem
        start, end = reference.weights[0], reference.weights[step + 1]
        copies = _assemble_copies(self.layout, [result.steps[step].weights for result in self.results], reference)
        made = [{name: after - start[name] for name, after in copy.items()} for copy in copies]
        # Adding an update to a weight rounds, here and in the reference; that rounding is not an error of the update.
        rounding = (step + 1) * torch.finfo(getattr(torch, problem.resolved_master_dtype)).eps
        rounding_norms = {name: rounding * float(weights.norm()) for name, weights in start.items()}
        updates = {name: after - start[name] for name, after in end.items()}
        errors = self._track_worst(_find_worst_errors(made, updates, rounding_norms))
        if (first := self._find_first_wrong(errors)) is not None:
            steps = f"{step + 1} steps" if step else "1 step"
            yield f"the update of {first} after {steps} is off by {errors[first]:.1e}", None
        if (name := _find_unequal(copies)) is not None:
            yield f"replicas of {name} differ after step {step + 1}", None

    def _compare_end(self) -> Iterator[Difference]:
        """Yield the differences (description, None) of optimizer state, parameters, checkpoint counters and validation
        loss after the last step."""
        reference, results = self.reference, self.results
        slices = [result.optimizer for result in results]
        kinds = {held.kind for of_rank in slices for held in of_rank}
        # Router biases have their own update rule.
        optimized = {entry.name for entry in reference.table.trained.entries if not entry.balances}
        if kinds != set(reference.optimizer):
            yield f"the optimizer state has {sorted(kinds)}, not {sorted(reference.optimizer)}", None
        for kind in sorted(kinds & set(reference.optimizer)):
            of_kind = [[held for held in of_rank if held.kind == kind] for of_rank in slices]
            copies = _assemble_copies(self.layout, of_kind, reference)
            truth = {name: state for name, state in reference.optimizer[kind].items() if name in optimized}
            errors = self._track_worst(_find_worst_errors(copies, truth))
            if (first := self._find_first_wrong(errors)) is not None:
                yield f"the optimizer state {kind} of {first} is off by {errors[first]:.1e}", None
        last_weights = [result.steps[max(result.steps)].weights for result in results]
        masters = reference.frozen | next(iter(_assemble_copies(self.layout, last_weights, reference)))
        for rank, result in enumerate(results):
            for held in result.parameters:
                if not torch.equal(held.tensor, held.select(masters[held.name]).to(held.tensor.dtype)):
                    yield f"the parameter {held.name} on rank {rank} is not its master weight, rounded", None
        yield from self._compare_counters(reference.problem.steps)
        for rank, result in enumerate(results):
            yield from ((f"{text} (rank {rank})", None) for text in result.not_restored)
        loss = max(_compute_relative_error(result.final_loss, reference.final_loss) for result in results)
        self.loss_error = max(self.loss_error, loss)
        if loss > self.tolerance:
            yield f"the validation loss after the last update is off by {loss:.1e}", None

    def _track_worst(self, errors: dict[str, float]) -> dict[str, float]:
        """Update `worst` and `worst_name` if one of `errors` exceeds `worst`. errors: {parameter: relative error};
        returned unchanged."""
        name, error = max(errors.items(), key=lambda item: item[1])
        if error > self.worst:
            self.worst_name, self.worst = name, error
        return errors

    def _find_first_wrong(self, errors: dict[str, float]) -> str | None:
        """Return the first parameter, in the order in which backward computes gradients, whose error exceeds the
        tolerance; None if no error does. errors: {parameter: relative error}."""
        if max(errors.values()) <= self.tolerance:
            return None
        return next(name for name in list_in_backward_order(self.reference) if errors.get(name, 0.0) > self.tolerance)


def compute_relative_errors(
    values: ParameterValues, truth: ParameterValues, rounding_norms: dict[str, float] | None = None
) -> dict[str, float]:
    """Return {parameter: relative error} of `values` against the expected values `truth`. The error of a tensor a with
    the expected value b is ‖a-b‖ / max(‖b‖, floor); infinity if this is not finite.

    floor: 1e-3 sqrt(elements of b) x root mean square of all elements in `truth`. The floor is needed for gradients
    that are zero in exact arithmetic, such as the gradient of a key bias. rounding_norms: {parameter: norm of the
    tolerated rounding error}, subtracted from ‖a-b‖ (down to 0); None: nothing is subtracted.
    """
    count = sum(b.numel() for b in truth.values())
    mean_square = sum(float(b.double().square().sum()) for b in truth.values()) / count
    errors = {}
    for name, b in truth.items():
        difference = float((values[name].double() - b.double()).norm())
        if rounding_norms is not None and math.isfinite(difference):
            difference = max(0.0, difference - rounding_norms[name])
        scale = max(float(b.double().norm()), 1e-3 * math.sqrt(b.numel() * mean_square))
        error = difference / scale if scale > 0 else (0.0 if difference == 0 else math.inf)
        errors[name] = error if math.isfinite(error) else math.inf
    return errors


def list_copy_groups(layout: Layout, part: BufferKind = "dense") -> list[tuple[int, ...]]:
    """Return groups of global ranks; the ranks of each group together hold at least one full copy of all gradients and
    master weights.

    A group consists of the ranks over which ZeRO shards a parameter (without ZeRO: one rank), the tensor-parallel peers
    of these ranks (for experts: the peers in blocks of ep x etp consecutive ranks), and the pipeline peers of all these
    ranks. layout: layout of the run. part: kind of flat buffer: "dense", or "experts" (routed experts under expert
    parallelism).
    """
    everyone = range(layout.world_size)
    block = layout.ep * layout.etp
    stages = {rank: group for group in layout.groups("pp") for rank in group}
    if part == "dense":
        axis, same = "shard", {rank: group for group in layout.groups("tp") for rank in group}
    else:
        axis, same = "expert_shard", {rank: tuple(everyone[rank // block * block :][:block]) for rank in everyone}
    sharing = layout.groups(axis) if layout.zero else [(rank,) for rank in everyone]
    first = [ranks for ranks in sharing if same[ranks[0]][0] == stages[ranks[0]][0] == ranks[0]]
    return [
        tuple(member for rank in ranks for neighbour in same[rank] for member in stages[neighbour]) for ranks in first
    ]


def _assemble_copies(
    layout: Layout, slices: Sequence[Sequence[TensorSlice]], reference: Reference
) -> list[ParameterValues]:
    """Assemble every full copy of all parameters from the ranks' slices; return one dict {parameter: values} per copy,
    with NaN for elements that no rank holds.

    layout: layout of the run. slices: [rank][slice]. reference: gives the shapes. If dense parameters and experts have
    different numbers of copies, the smaller set of copies is used more than once.
    """
    dense, experts = (_assemble_copies_of(layout, slices, reference, part) for part in TRAINED_BUFFERS)
    return [
        dense[number % len(dense)] | experts[number % len(experts)] for number in range(max(len(dense), len(experts)))
    ]


def _assemble_copies_of(
    layout: Layout, slices: Sequence[Sequence[TensorSlice]], reference: Reference, part: BufferKind
) -> list[ParameterValues]:
    """Assemble every full copy of the parameters in one kind of flat buffer; return one dict {parameter: values} per
    copy, with NaN for elements that no rank holds.

    layout: layout of the run. slices: [rank][slice]. reference: gives the shapes. part: "dense", or "experts" (routed
    experts under expert parallelism). A group of `list_copy_groups` may hold an element on several pp and tp ranks. The
    group therefore gives one copy for each pp rank (for dense parameters: for each pair of pp and tp rank), in which
    that rank's elements take precedence.
    """
    names = [entry.name for entry in reference.table.entries if entry.buffer_kind(layout) == part]
    if not names:
        return [{}]
    copies = []
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    for ranks in list_copy_groups(layout, part):
        for tp, pp in itertools.product(range(layout.tp if part == "dense" else 1), range(layout.pp)):
            entries = {name: torch.full_like(reference.weights[0][name], math.nan) for name in names}
            for rank in sorted(ranks, key=lambda rank: (places[rank]["pp"] == pp, places[rank]["tp"] == tp)):
                for held in slices[rank]:
                    if held.name in entries:
                        held.write_into(entries[held.name])
            copies.append(entries)
    return copies


def _find_worst_errors(
    copies: Iterable[ParameterValues], truth: ParameterValues, rounding_norms: dict[str, float] | None = None
) -> dict[str, float]:
    """Return {parameter: largest relative error over several full copies of the parameters}. truth: expected values.
    rounding_norms: {parameter: norm of the tolerated rounding error}, subtracted from the norm of the difference; None:
    nothing is subtracted."""
    errors = dict.fromkeys(truth, 0.0)
    for copy in copies:
        for name, error in compute_relative_errors(copy, truth, rounding_norms).items():
            errors[name] = max(errors[name], error)
    return errors


def _compute_relative_error(value: float, truth: float) -> float:
    """Return |value - truth| / |truth|; infinity if this is not finite."""
    error = abs(value - truth) / abs(truth)
    return error if math.isfinite(error) else math.inf


def _find_unequal(copies: Sequence[ParameterValues]) -> str | None:
    """Return the name of the first parameter whose values differ between full copies of the parameters; None if all
    copies are equal."""
    first, *others = copies
    return next(
        (name for name in first for copy in others if not _is_equal_or_non_finite(first[name], copy[name])), None
    )


def _is_equal_or_non_finite(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if the tensors a and b have equal values, or if `a` has non-finite values (these are reported
    elsewhere)."""
    return torch.equal(a, b) or not bool(a.isfinite().all())
