"""Time of a micro-batch, operation by operation: sizes, arithmetic intensity, and the bound."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from meshwright.layout import Layout
from meshwright.names import BIDIRECTIONAL_SCHEDULES
from meshwright.planner.cost.blocks import list_operations
from meshwright.planner.cost.bubbles import followed_at_once
from meshwright.planner.cost.layer_times import MICRO_BATCH_PARTS, micro_batch_of_layout
from meshwright.planner.cost.operators import Operation
from meshwright.planner.cost.rates import Rates, launch_seconds
from meshwright.planner.cost.reference_step import measured_step_factors
from meshwright.planner.memory.rank_memory import distinct_ranks, stages_at
from meshwright.planner.problem import Problem


@dataclass(frozen=True, slots=True)
class OperationTime:
    """Predicted cost of one operation of a micro-batch in one phase.

    Attributes:
        operation: Such as "attention.qkv".
        phase: "forward", "recompute", "input" (gradients of inputs) or "weight" (gradients of weights).
        count: Number of calls.
        shape: (M, N, K) of a matrix product; empty for elementwise operations.
        flops, bytes, seconds: Sums over all calls.
        share: Fraction of the micro-batch's seconds.
        bound: Limiting resource: "compute", "memory" or "start" (kernel launch).
    """

    operation: str
    phase: str
    count: float
    shape: tuple[float, ...]
    flops: float
    bytes: float
    seconds: float
    share: float
    bound: str

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs per byte read or written; 0 without bytes."""
        return self.flops / self.bytes if self.bytes else 0.0

    def document(self) -> dict[str, object]:
        """Return the JSON entry of the operation."""
        return asdict(self) | {"intensity": self.intensity}


def explain(problem: Problem, layout: Layout, pp_rank: int = 0) -> list[OperationTime]:
    """Return the operations of one micro-batch on pipeline rank `pp_rank` of a layout, with their predicted cost,
    longest first. problem: model, cluster, batch and engine."""
    rates = Rates.of(problem.cluster, problem.precision, problem.engine.fusion)
    factors = measured_step_factors(problem.cluster, problem.precision, problem.engine)
    longer = problem.cluster.time_factor * factors[MICRO_BATCH_PARTS.index("compute")]
    batch = micro_batch_of_layout(problem, layout)
    place = stages_at(problem, layout)[pp_rank]
    if layout.schedule in BIDIRECTIONAL_SCHEDULES:  # a micro-batch is of one replica
        place = place[:1]
    at_once = followed_at_once(layout.schedule, layout.pp) and not problem.pairs
    calls: dict[tuple[str, str], list[Operation]] = {}
    for stage in place:
        for one in list_operations(batch, stage, at_once=at_once):
            calls.setdefault((one.name, one.phase), []).append(one)
    seconds = {key: sum(longer * rates.seconds(one, batch.kernel) for one in each) for key, each in calls.items()}
    whole = sum(seconds.values()) or 1.0
    found = []
    for (name, phase), each in calls.items():
        flops, moved = (sum(getattr(one, of) * one.count for one in each) for of in ("flops", "bytes"))
        count, took = sum(one.count for one in each), seconds[name, phase]
        limits = flops / rates.product, moved / rates.memory, count * launch_seconds(each[0])
        bound, shape = ("compute", "memory", "start")[limits.index(max(limits))], each[0].shape or ()
        found.append(OperationTime(name, phase, count, shape, flops, moved, took, took / whole, bound))
    return sorted(found, key=lambda row: -row.seconds)


def find_busiest_rank(problem: Problem, layout: Layout) -> int:
    """Return the index of the pipeline rank with the most compute seconds per micro-batch."""
    ranks = sorted(distinct_ranks(problem, layout))
    return max(ranks, key=lambda rank: sum(row.seconds for row in explain(problem, layout, rank)))
