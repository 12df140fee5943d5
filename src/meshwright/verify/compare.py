"""Whether the ranks came to one device's answer; if not, which parameter first, by how much, and in what pattern."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from meshwright.layout import Layout
from meshwright.model.rows import Part
from meshwright.parallel.pieces import Piece
from meshwright.verify.ranks import RankResult
from meshwright.verify.reference import Reference, Rows

TOLERANCES = {"float64": 1e-10, "float32": 1e-5}
NO_PATTERN = "in no pattern that has a name"
TOO_SHORT = "too few values to tell"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The largest relative error over all gradients and updates and whose it is, those of losses and norms, and, where
    one exceeds the tolerance, a line that says what differs first."""

    worst_name: str
    worst_error: float
    loss_error: float
    gradient_norm_error: float
    failure: str | None
    step: int | None = None  # to which the failure belongs, from 0

    @property
    def passed(self) -> bool:
        return self.failure is None


def compare(reference: Reference, results: Sequence[RankResult], layout: Layout) -> Comparison:
    """Hold every rank's losses, norms, gradients and updates against the reference."""
    refused = next((result.refused for result in results if result.refused), None)
    if refused is not None:
        return Comparison("", math.inf, math.inf, math.inf, refused)
    tolerance = TOLERANCES[reference.problem.dtype]
    worst_name, worst, norm_error = "", 0.0, 0.0
    loss_error = max(_relative(result.final_loss, reference.final_loss) for result in results)
    failure: str | None = None
    at: int | None = None
    for step in range(reference.problem.steps):
        if step in reference.skipped:
            if any(math.isfinite(result.norms[step]) for result in results):
                failure = failure or f"step {step + 1}: some rank took a gradient for finite that another knew was not"
            continue
        errors = _errors(_copies(layout, [r.gradients[step] for r in results], reference), reference.gradients[step])
        name, error = max(errors.items(), key=lambda item: item[1])
        if error > worst:
            worst_name, worst = name, error
        step_loss_error = max(_relative(result.losses[step], reference.losses[step]) for result in results)
        step_norm_error = max(_relative(result.norms[step], reference.norms[step]) for result in results)
        loss_error, norm_error = max(loss_error, step_loss_error), max(norm_error, step_norm_error)
        if failure is None and error > tolerance:
            first = next(row for row in _backward_order(reference) if errors[row] > tolerance)
            pattern = _pattern(reference, [r.gradients[step] for r in results], layout, step, first)
            failure = f"step {step + 1}: the gradient of {first} is off by {errors[first]:.1e} ({pattern})"
            if step_loss_error > tolerance:
                failure += f"; the loss is {_times(results, reference, step)}"
            at = step
        if failure is None and step_loss_error > tolerance:
            times = _times(results, reference, step)
            failure, at = f"step {step + 1}: the loss is off by {step_loss_error:.1e} ({times})", step
        if failure is None and step_norm_error > tolerance:
            norm = f"the gradient norm is off by {step_norm_error:.1e} though every gradient is right"
            failure, at = f"step {step + 1}: {norm}", step
    updates = {name: after - reference.weights[0][name] for name, after in reference.weights[-1].items()}
    made = [
        {name: after - reference.weights[0][name] for name, after in copy.items()}
        for copy in _copies(layout, [result.masters for result in results], reference)
    ]
    # Adding an update to a weight rounds it, on both sides; what that alone can make of it says nothing of the update.
    rounding = reference.problem.steps * torch.finfo(getattr(torch, reference.problem.dtype)).eps
    grains = {name: rounding * float(weights.double().norm()) for name, weights in reference.weights[0].items()}
    errors = _errors(made, updates, grains)
    name, error = max(errors.items(), key=lambda item: item[1])
    if error > worst:
        worst_name, worst = name, error
    if failure is None and error > tolerance:
        first = next(row for row in _backward_order(reference) if errors[row] > tolerance)
        failure = f"the update of {first} after {reference.problem.steps} steps is off by {errors[first]:.1e}"
    if failure is None and loss_error > tolerance:
        failure = f"the loss after the last update is off by {loss_error:.1e}"
    return Comparison(worst_name, worst, loss_error, norm_error, failure, at)


def relative_errors(values: Rows, truth: Rows, grains: dict[str, float] | None = None) -> dict[str, float]:
    """The relative error of each tensor: |a - b| / max(|b|, 1e-3 sqrt(n) x root mean square over all of `truth`), for
    some true gradients are zero (a key bias). Infinite where a value is missing or not finite. `grains`: norms of
    differences, by name, that are not counted."""
    count = sum(b.numel() for b in truth.values())
    mean_square = sum(float(b.double().square().sum()) for b in truth.values()) / count
    errors = {}
    for name, b in truth.items():
        difference = float((values[name].double() - b.double()).norm())
        if grains is not None and math.isfinite(difference):
            difference = max(0.0, difference - grains[name])
        scale = max(float(b.double().norm()), 1e-3 * math.sqrt(b.numel() * mean_square))
        error = difference / scale if scale > 0 else (0.0 if difference == 0 else math.inf)
        errors[name] = error if math.isfinite(error) else math.inf
    return errors


def holders(layout: Layout, part: Part = "dense") -> list[tuple[int, ...]]:
    """Groups of ranks that hold one whole copy of gradients and masters together: those that share ZeRO's shards, each
    with its ranks of tp, on all stages; of experts that are spread over ranks of their own, with those of its block of
    ep x etp."""
    everyone = range(layout.world_size)
    block = layout.ep * layout.etp
    stages = {rank: group for group in layout.groups("pp") for rank in group}
    if part == "dense":
        axis, beside = "shard", {rank: group for group in layout.groups("tp") for rank in group}
    else:
        axis, beside = "expert_shard", {rank: tuple(everyone[rank // block * block :][:block]) for rank in everyone}
    sharing = layout.groups(axis) if layout.zero else [(rank,) for rank in everyone]
    first = [ranks for ranks in sharing if beside[ranks[0]][0] == stages[ranks[0]][0] == ranks[0]]
    return [
        tuple(member for rank in ranks for neighbour in beside[rank] for member in stages[neighbour]) for ranks in first
    ]


def _copies(layout: Layout, pieces: Sequence[Sequence[Piece]], reference: Reference) -> list[Rows]:
    """Every copy of the rows that the ranks hold, put together; what nobody holds is not a number. What several ranks
    of tp or pp hold is once that of each of them. Of experts there may be more copies, or fewer, than of all else."""
    parts: tuple[Part, Part] = ("dense", "experts")
    dense, experts = (_copies_of(layout, pieces, reference, part) for part in parts)
    return [
        dense[number % len(dense)] | experts[number % len(experts)] for number in range(max(len(dense), len(experts)))
    ]


def _copies_of(layout: Layout, pieces: Sequence[Sequence[Piece]], reference: Reference, part: Part) -> list[Rows]:
    names = [row.name for row in reference.table.rows if row.part(layout) == part]
    if not names:
        return [{}]
    copies = []
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    for ranks in holders(layout, part):
        for tp, pp in itertools.product(range(layout.tp if part == "dense" else 1), range(layout.pp)):
            rows = {name: torch.full_like(reference.weights[0][name], math.nan) for name in names}
            for rank in sorted(ranks, key=lambda rank: (places[rank]["pp"] == pp, places[rank]["tp"] == tp)):
                for piece in pieces[rank]:
                    if piece.name in rows:
                        piece.put(rows[piece.name])
            copies.append(rows)
    return copies


def _errors(copies: Iterable[Rows], truth: Rows, grains: dict[str, float] | None = None) -> dict[str, float]:
    """The largest error of each row over all copies."""
    errors = dict.fromkeys(truth, 0.0)
    for copy in copies:
        for name, error in relative_errors(copy, truth, grains).items():
            errors[name] = max(errors[name], error)
    return errors


def _times(results: Sequence[RankResult], reference: Reference, step: int) -> str:
    """The loss of the rank that is farthest off, beside what it should be."""
    truth = reference.losses[step]
    worst = max((result.losses[step] for result in results), key=lambda loss: _relative(loss, truth))
    return f"{worst / truth:.4g} times as large as it should be" if math.isfinite(worst) else "not finite"


def _relative(value: float, truth: float) -> float:
    error = abs(value - truth) / abs(truth)
    return error if math.isfinite(error) else math.inf


_FORWARD = (
    *("embedding", "positions", "attention_norm", "attention.qkv", "attention.query_norm", "attention.key_norm"),
    *("attention.output", "mlp_norm", "mlp.router", "mlp.up", "mlp.experts.up", "mlp.experts.down", "mlp.shared_gate"),
    *("mlp.shared.up", "mlp.shared.down", "mlp.down", "final_norm", "head"),
)
"""The engine's tensors in the order in which a forward pass comes to them, those of each layer together."""


def _backward_order(reference: Reference) -> list[str]:
    """Rows in the order in which the backward pass comes to them."""
    places = []
    for tensor in reference.table.tensors:
        module = tensor.name.rpartition(".")[0]
        if layer := re.fullmatch(r"layers\.(\d+)\.(.+)", module):
            place = (1, int(layer[1]), _FORWARD.index(layer[2]))
        else:
            place = (2 if module in ("final_norm", "head") else 0, 0, _FORWARD.index(module))
        places += [(place, row.name) for row in tensor.rows]
    return [name for _, name in sorted(places, key=lambda each: each[0], reverse=True)]


def _pattern(reference: Reference, pieces: Sequence[Sequence[Piece]], layout: Layout, step: int, name: str) -> str:
    """What a wrong gradient looks like: how often each rank's part is in it, as the least squares say."""
    truth = reference.gradients[step][name]
    mine = [[piece for piece in of_rank if piece.name == name] for of_rank in pieces]
    if _apart_on_tp(reference, mine, layout, truth, name):
        return "each rank of tp has its own part alone, not summed"
    if _apart_on_pp(mine, layout, truth):
        return "each stage that has it has its own part alone, not summed"
    # Ranks of cp have tokens of the same rows: what each contributes is not a gradient that one device can tell.
    parts = reference.parts(step, layout.dp * layout.micro_batches)
    contributions = torch.stack([rows[name] for rows in parts]).double()
    replicas = {rank: group for group in layout.groups("dp") for rank in group}
    before = reference.gradients[step - 1][name] if step else None
    found: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(mine):
        labels = [(member, micro_batch) for member in replicas[rank] for micro_batch in range(layout.micro_batches)]
        for piece in of_rank:
            values, right = piece.tensor, piece.of(truth)
            if not float((values - right).norm()) <= 1e-6 * float(truth.norm()):
                previous = None if before is None else piece.of(before)
                what = _describe(values.double(), right.double(), piece.of(contributions), labels, previous)
                if what in (NO_PATTERN, TOO_SHORT):
                    what = _of_another(reference, step, piece) or what
                found.setdefault(what, []).append(rank)
    if not found:
        return "a small error everywhere"
    too_short = found.pop(TOO_SHORT, [])
    if not found:
        found = {NO_PATTERN: []}
    next(iter(found.values())).extend(too_short)
    wrong = sorted({rank for ranks in found.values() for rank in ranks})
    everywhere = len(wrong) == sum(bool(of_rank) for of_rank in mine)
    where = "" if everywhere else f", on {_ranks(wrong)} alone"
    if not everywhere and [*found] == [NO_PATTERN]:
        return f"differs on {_ranks(wrong)} alone"
    if len(found) == 1:
        return next(iter(found)) + where
    return "; ".join(f"on {_ranks(ranks)} {what}" for what, ranks in found.items())


def _apart_on_tp(
    reference: Reference, pieces: Sequence[Sequence[Piece]], layout: Layout, truth: torch.Tensor, name: str
) -> bool:
    """Whether neighbouring ranks of tp, whose parts are to be summed, have the right gradient together but not each."""
    row = reference.table.row(name)
    if "tp" not in row.gradient_axes(layout):
        return False
    size, copies = float(truth.norm()), row.replicas(layout)
    for group in layout.groups("tp"):
        for first in range(0, len(group), copies):
            for same in zip(*(pieces[rank] for rank in group[first : first + copies]), strict=True):
                right = same[0].of(truth)
                total = torch.stack([piece.tensor for piece in same]).sum(dim=0)
                if not float((total - right).norm()) <= 1e-6 * size or torch.equal(same[0].tensor, right):
                    return False
    return True


def _apart_on_pp(pieces: Sequence[Sequence[Piece]], layout: Layout, truth: torch.Tensor) -> bool:
    """Whether the ranks of pp that hold a row have the right gradient together but not each."""
    size = float(truth.norm())
    for group in layout.groups("pp"):
        holding = [pieces[rank] for rank in group if pieces[rank]]
        if len(holding) == 1:
            return False
        for same in zip(*holding, strict=True):
            right = same[0].of(truth)
            total = torch.stack([piece.tensor for piece in same]).sum(dim=0)
            if not float((total - right).norm()) <= 1e-6 * size or torch.equal(same[0].tensor, right):
                return False
    return True


def _of_another(reference: Reference, step: int, piece: Piece) -> str | None:
    """Whether a piece holds what belongs to another row of the same size."""
    size = float(piece.tensor.norm())
    for name, values in reference.gradients[step].items():
        alike = name != piece.name and values.numel() == reference.gradients[step][piece.name].numel()
        if alike and float((piece.of(values) - piece.tensor).norm()) < 1e-6 * size:
            return f"the gradient of {name}"
    return None


def _describe(
    values: torch.Tensor,
    truth: torch.Tensor,
    parts: torch.Tensor,
    labels: Sequence[tuple[int, int]],
    before: torch.Tensor | None,
) -> str:
    """The pattern of one rank's slice. `parts`: what each (rank, micro-batch) of `labels` contributes to it."""
    size = float(truth.norm())
    if not bool(values.isfinite().all()):
        return "not finite"
    if float(values.norm()) == 0:
        return "zero"
    if before is not None and float((values - before).norm()) < 1e-6 * size:
        return "the gradient of the step before"
    factor = float(values @ truth) / max(size * size, 1e-300)
    if float((values - factor * truth).norm()) < 1e-6 * max(size, float(values.norm())):
        return "twice too large" if abs(factor - 2) < 1e-6 else f"{factor:.4g} times as large as it should be"
    counted = [index for index in range(len(parts)) if float(parts[index].norm()) > 1e-6 * size]
    if values.numel() <= len(counted):
        return TOO_SHORT
    basis = parts[counted].T
    times = torch.linalg.lstsq(basis, values[:, None], driver="gelsd").solution[:, 0]
    if float((basis @ times - values).norm()) < 1e-6 * size:
        return _counts({labels[index]: value for index, value in zip(counted, times.tolist(), strict=True)})
    return NO_PATTERN


def _counts(often: dict[tuple[int, int], float]) -> str:
    """How often the parts are in a sum that should hold each once."""
    ranks = sorted({rank for rank, _ in often})
    missing = {label for label, times in often.items() if abs(times) < 1e-4}
    gone = [rank for rank in ranks if all(label in missing for label in often if label[0] == rank)]
    if len(missing) == len(often):
        return "zero"
    if gone and len(gone) == len(ranks) - 1 and len(ranks) > 1:
        alone = next(rank for rank in ranks if rank not in gone)
        return f"the part of rank {alone} alone, not summed"
    if missing and all(rank in gone for rank, _ in missing):
        return f"the part of {_ranks(gone)} is missing"
    if missing:
        rank, micro_batch = min(missing)
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return f"the part of rank {rank}, micro-batch {micro_batch + 1}{more} is missing"
    extra = sorted({rank for (rank, _), times in often.items() if times > 1 + 1e-4})
    if extra:
        return f"the part of {_ranks(extra)} is counted more than once"
    return "a sum of the ranks' parts in the wrong proportions"


def _ranks(ranks: Sequence[int]) -> str:
    text = " and ".join(filter(None, [", ".join(map(str, ranks[:-1])), str(ranks[-1])]))
    return f"rank{'s' * (len(ranks) > 1)} {text}"
