"""The JSON document of a plan: of one layout, or of a search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright.collectives.quantities import GIB
from meshwright.planner.memory.rank_memory import distinct_ranks, memory_of
from meshwright.planner.problem import Problem
from meshwright.planner.search.estimate import Estimate, model_document
from meshwright.planner.search.search import SearchResult
from meshwright.planner.search.shortlist import MOST_PRICED

MOST_TOP = 100
"""Maximum number of layouts that a search returns."""


def plan_document(problem: Problem, best: Sequence[Estimate], result: SearchResult | None = None) -> dict[str, Any]:
    """Return the JSON document of a plan, as `meshwright plan --json` prints it.

    problem: model, cluster, batch and engine; best: estimates to list, fastest first; result: search that found them,
    None if the user gave the layout.
    """
    document: dict[str, Any] = {
        "model": model_document(problem.config),
        "cluster": {"name": problem.cluster.name, "devices": problem.cluster.devices},
        "engine": problem.engine.name, "sequence": problem.sequence, "batch": problem.batch,
        "layouts": [one.document() for one in best],
    }  # fmt: skip
    if result is None:
        return document | {"searched": 0, "search_seconds": 0.0}
    document |= {"searched": result.searched, "search_seconds": result.seconds, "undecided": result.undecided}
    for one, why in zip(document["layouts"], result.reasons, strict=True):
        one["compared_with_first"] = why
    document["too_large"] = [
        {
            "layout": str(one.layout), "step_seconds": one.seconds, "change": one.change,
            "instead": None if one.instead is None else str(one.instead), "instead_step_seconds": one.instead_seconds,
        }
        for one in result.advice
    ]  # fmt: skip
    return document


def ledger_documents(estimate: Estimate) -> list[dict[str, Any]]:
    """Return the memory ledger of an estimate as JSON objects, one per tensor at the memory peak of a pipeline rank. Of
    several ranks with equal memory only one is listed. nccl_bytes: what NCCL's buffers take at most, beside the rest.

    Keys of an object: name, category; shape, dtype: of one tensor; bytes: of all tensors equal to this one together;
    stage: pipeline stage, null if it belongs to none; first, last: events between which it is allocated."""
    problem, layout = estimate.problem, estimate.layout
    return [
        {
            "pp": rank.pp_rank, "when": rank.peak_snapshot, "peak_bytes": rank.peak_bytes,
            "framework_bytes": rank.framework_bytes, "unexplained_bytes": rank.slack_bytes,
            "nccl_bytes": rank.nccl_bytes, "items": [item._asdict() for item in rank.items],
        }
        for rank in (memory_of(problem, layout, place) for place in sorted(distinct_ranks(problem, layout)))
    ]  # fmt: skip


def no_fit_error(result: SearchResult) -> str:
    """Return the error line for a search in which no layout fits. It names the number of devices, the GiB of each, and
    what to change."""
    problem, count = result.problem, result.problem.cluster.devices
    reserved = f", with {problem.reserve / GIB:.1f} GiB more reserved" if problem.reserve else ""
    none = f"none of the {MOST_PRICED} fastest layouts" if result.undecided else "no layout"
    return (
        f"{none} of {count:,} device{'s' * (count > 1)} fits into {problem.usable_bytes / GIB:.1f} GiB each{reserved}; "
        "use more devices, a smaller batch or shorter sequences"
    )
