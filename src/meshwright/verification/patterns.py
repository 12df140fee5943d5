"""Description of the error pattern of a wrong gradient: a rank's contribution missing or counted twice, another
parameter's or step's gradient."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from meshwright.flight_recorder.verdict import name_ranks
from meshwright.layout import Layout
from meshwright.parallel.flat_buffers import TensorSlice
from meshwright.verification.reference import Reference

NO_PATTERN = "no recognized pattern"
TOO_SHORT = "too few elements to identify a pattern"

_FORWARD = (
    *("embedding", "positions", "embedding_norm", "hidden_norm", "projection", "attention_norm", "attention.qkv"),
    *("attention.query_norm", "attention.key_norm", "attention.query_up", "attention.latent_norm"),
    *("attention.latent_up", "attention", "attention.output", "attention_post_norm", "mlp_norm", "mlp.router"),
    *("mlp.up", "mlp.experts.up", "mlp.experts.down", "mlp.shared_gate", "mlp.shared.up", "mlp.shared.down"),
    *("mlp.down", "mlp_post_norm", "norm", "final_norm", "head"),
)
"""Modules of the engine in the order of the forward pass; those of a layer without its prefix. "attention": its
sinks."""


def list_in_backward_order(reference: Reference) -> list[str]:
    """Return the names of all parameters of the reference's model, in the order in which the backward pass computes
    their gradients (head first, embedding last)."""
    places = []
    for tensor in reference.table.trained.tensors:
        module = tensor.name.rpartition(".adapter.")[0] or tensor.name.rpartition(".")[0]
        if layer := re.fullmatch(r"layers\.(\d+)\.(.+)", module):
            place = (1, int(layer[1]), _FORWARD.index(layer[2]))
        elif later := re.fullmatch(r"prediction\.(?:block\.)?(.+)", module):
            place = (3, 0, _FORWARD.index(later[1]))
        elif projection := re.fullmatch(r"projections\.(\d+)", module):
            place = (4, int(projection[1]), 0)
        else:
            place = (2 if module in ("final_norm", "head") else 0, 0, _FORWARD.index(module))
        places += [(place, entry.name) for entry in tensor.entries]
    return [name for _, name in sorted(places, key=lambda each: each[0], reverse=True)]


def describe_pattern(
    reference: Reference, slices: Sequence[Sequence[TensorSlice]], layout: Layout, step: int, name: str
) -> str:
    """Describe how the wrong gradient of the parameter `name` in step `step` (from 0) differs from the reference, such
    as "contribution of rank 1 missing". A least-squares fit finds how often each rank's contribution is in the sum.
    slices: gradient slices of each rank, [rank][slice]. layout: layout of the run."""
    truth = reference.gradients[step][name]
    mine = [[item for item in of_rank if item.name == name] for of_rank in slices]
    if _is_unsummed_over_tp(reference, mine, layout, truth, name):
        return "partial gradients were not summed over tp"
    if _is_unsummed_over_pp(mine, layout, truth):
        return "partial gradients of shared parameters were not summed over pp"
    # cp ranks share sequences, and the reference has gradients of whole sequences only: contributions are those of dp.
    parts = reference.split_gradient(step, layout.dp * layout.micro_batches)
    contributions = torch.stack([rows[name] for rows in parts]).double()
    replicas = {rank: group for group in layout.groups("dp") for rank in group}
    before = reference.gradients[step - 1][name] if step else None
    found: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(mine):
        labels = [(member, micro_batch) for member in replicas[rank] for micro_batch in range(layout.micro_batches)]
        for item in of_rank:
            values, right = item.tensor, item.select(truth)
            if not float((values - right).norm()) <= 1e-6 * float(truth.norm()):
                previous = None if before is None else item.select(before)
                what = _describe_slice(values.double(), right.double(), item.select(contributions), labels, previous)
                if what in (NO_PATTERN, TOO_SHORT):
                    what = _match_other_entry(reference, step, item) or what
                found.setdefault(what, []).append(rank)
    if not found:
        return "a small error everywhere"
    too_short = found.pop(TOO_SHORT, [])
    if not found:
        found = {NO_PATTERN: []}
    next(iter(found.values())).extend(too_short)
    wrong = sorted({rank for ranks in found.values() for rank in ranks})
    everywhere = len(wrong) == sum(bool(of_rank) for of_rank in mine)
    where = "" if everywhere else f", on {name_ranks(wrong)} alone"
    if not everywhere and [*found] == [NO_PATTERN]:
        return f"differs on {name_ranks(wrong)} alone"
    if len(found) == 1:
        return next(iter(found)) + where
    return "; ".join(f"on {name_ranks(ranks)} {what}" for what, ranks in found.items())


def _is_unsummed_over_tp(
    reference: Reference, slices: Sequence[Sequence[TensorSlice]], layout: Layout, truth: torch.Tensor, name: str
) -> bool:
    """Return True if the tp (for experts, etp) ranks hold partial gradients of the parameter `name` that were not
    summed. layout: layout of the run. truth: the correct gradient. reference: gives the sharding of the parameter.
    slices: slices of this gradient on each rank, [rank][slice]."""
    entry = reference.table.entry(name)
    axis = entry.partial_axis(layout)
    if axis is None:
        return False
    copies = entry.replicas(layout)
    sharing = [group[at : at + copies] for group in layout.groups(axis) for at in range(0, len(group), copies)]
    return all(_are_partial([slices[rank] for rank in ranks], truth) for ranks in sharing)


def _is_unsummed_over_pp(slices: Sequence[Sequence[TensorSlice]], layout: Layout, truth: torch.Tensor) -> bool:
    """Return True if pipeline ranks that share a parameter (tied embeddings) hold partial gradients that were not
    summed. layout: layout of the run. truth: the correct gradient. slices: slices of this gradient on each rank,
    [rank][slice]."""
    holding = [[slices[rank] for rank in group if slices[rank]] for group in layout.groups("pp")]
    return all(len(ranks) != 1 and _are_partial(ranks, truth) for ranks in holding)


def _are_partial(slices: Sequence[Sequence[TensorSlice]], truth: torch.Tensor) -> bool:
    """Return True if the ranks' slices of a gradient sum to `truth`, but the slices of the first rank alone do not
    equal `truth`. slices: [rank][slice]; they cover the same elements on each rank."""
    for same in zip(*slices, strict=True):
        right = same[0].select(truth)
        total = torch.stack([item.tensor for item in same]).sum(dim=0)
        if not float((total - right).norm()) <= 1e-6 * float(truth.norm()) or torch.equal(same[0].tensor, right):
            return False
    return True


def _match_other_entry(reference: Reference, step: int, item: TensorSlice) -> str | None:
    """Return "the gradient of NAME" if the gradient slice `item` equals that of another parameter (NAME) of the same
    size, in step `step` (from 0) of the reference; None otherwise."""
    size = float(item.tensor.norm())
    for name, values in reference.gradients[step].items():
        alike = name != item.name and values.numel() == reference.gradients[step][item.name].numel()
        if alike and float((item.select(values) - item.tensor).norm()) < 1e-6 * size:
            return f"the gradient of {name}"
    return None


def _describe_slice(
    values: torch.Tensor,
    truth: torch.Tensor,
    parts: torch.Tensor,
    labels: Sequence[tuple[int, int]],
    before: torch.Tensor | None,
) -> str:
    """Describe how the gradient slice of one rank differs from the correct one, such as "zero" or "contribution of rank
    1 missing".

    values [n]: the rank's gradient. truth [n]: the correct gradient, the sum of `parts` [contributions, n]. labels:
    (rank, micro-batch) of each contribution. before [n]: correct gradient of the previous step; None in the first step.
    """
    size = float(truth.norm())
    if not bool(values.isfinite().all()):
        return "not finite"
    if float(values.norm()) == 0:
        return "zero"
    if before is not None and float((values - before).norm()) < 1e-6 * size:
        return "the gradient of the step before"
    factor = float(values @ truth) / max(size * size, 1e-300)
    if float((values - factor * truth).norm()) < 1e-6 * max(size, float(values.norm())):
        return f"{factor:.4g} x the reference"
    counted = [index for index in range(len(parts)) if float(parts[index].norm()) > 1e-6 * size]
    if values.numel() <= len(counted):
        return TOO_SHORT
    basis = parts[counted].T
    times = torch.linalg.lstsq(basis, values[:, None], driver="gelsd").solution[:, 0]
    if float((basis @ times - values).norm()) < 1e-6 * size:
        return _describe_counts({labels[index]: value for index, value in zip(counted, times.tolist(), strict=True)})
    return NO_PATTERN


def _describe_counts(often: dict[tuple[int, int], float]) -> str:
    """Describe which contributions to a gradient sum are missing or counted more than once. often: (rank, micro-batch)
    of a contribution -> number of times that it is in the sum (correct: 1)."""
    ranks = sorted({rank for rank, _ in often})
    missing = {label for label, times in often.items() if abs(times) < 1e-4}
    gone = [rank for rank in ranks if all(label in missing for label in often if label[0] == rank)]
    if len(missing) == len(often):
        return "zero"
    if gone and len(gone) == len(ranks) - 1 and len(ranks) > 1:
        alone = next(rank for rank in ranks if rank not in gone)
        return f"only the contribution of rank {alone}: not summed"
    if missing and all(rank in gone for rank, _ in missing):
        return f"contribution of {name_ranks(gone)} missing"
    if missing:
        rank, micro_batch = min(missing)
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return f"contribution of rank {rank}, micro-batch {micro_batch + 1}{more} missing"
    extra = sorted({rank for (rank, _), times in often.items() if times > 1 + 1e-4})
    if extra:
        return f"contribution of {name_ranks(extra)} counted more than once"
    return "contributions of the ranks summed with wrong weights"
