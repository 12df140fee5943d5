"""Time of a micro-batch, operation by operation: sizes, arithmetic intensity, and the bound."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.layout import Layout
from meshwright.names import BIDIRECTIONAL_SCHEDULES
from meshwright.planner.cost.layer_times import MICRO_BATCH_PARTS
from meshwright.planner.cost.micro_batch import DTYPES, MicroBatch
from meshwright.planner.cost.operations import list_operations
from meshwright.planner.cost.operators import Operation
from meshwright.planner.cost.rates import Rates, attention_kernel
from meshwright.planner.cost.reference_step import measured_step_factors
from meshwright.planner.cost.step_time import followed_at_once
from meshwright.planner.memory.rank_memory import distinct_ranks, stages_at
from meshwright.planner.problem import Problem

_COMPUTE = MICRO_BATCH_PARTS.index("compute")


@dataclass(frozen=True, slots=True)
class OperationTime:
    """Predicted cost of one operation of a micro-batch in one phase.

    Attributes:
        name: Such as "attention.qkv".
        phase: "forward", "recompute", "input" or "weight" (gradients).
        count: Number of calls.
        shape: M, N, K of a matrix product; empty for elementwise operations.
        flops, bytes, seconds: Sums over all calls.
        share: Fraction of the micro-batch's seconds.
        bound: Limiting resource: "compute", "memory" or "start" (kernel launch).
    """

    name: str
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
        return {
            "operation": self.name, "phase": self.phase, "count": self.count, "shape": list(self.shape),
            "flops": self.flops, "bytes": self.bytes, "intensity": self.intensity, "bound": self.bound,
            "seconds": self.seconds, "share": self.share,
        }  # fmt: skip


def explain(problem: Problem, layout: Layout, pp_rank: int = 0) -> list[OperationTime]:
    """Return the operations of one micro-batch on pipeline rank `pp_rank`, with their predicted cost, longest first."""
    rates = Rates.of(problem.cluster, problem.precision, problem.engine.fusion)
    kernel = attention_kernel(problem.engine, problem.cluster, problem.config)
    rows = problem.batch // (layout.dp * layout.micro_batches)
    factors = measured_step_factors(problem.cluster, problem.precision, problem.engine)
    longer = problem.cluster.time_factor * factors[_COMPUTE]
    batch = MicroBatch.of(
        problem.config, layout, rows, problem.sequence, dtype=DTYPES[problem.precision], engine=problem.engine,
        kernel=kernel, documents=problem.documents, eight_bit=rates.eight_bit,
    )  # fmt: skip
    found: dict[tuple[str, str], list[tuple[Operation, float]]] = {}
    place = stages_at(problem, layout)[pp_rank]
    if layout.schedule in BIDIRECTIONAL_SCHEDULES:  # a micro-batch is of one replica
        place = place[:1]
    for stage in place:
        for one in list_operations(batch, stage, at_once=followed_at_once(layout) and not problem.pairs):
            found.setdefault((one.name, one.phase), []).append((one, longer * rates.seconds(one, kernel)))
    whole = sum(seconds for each in found.values() for _, seconds in each) or 1.0
    return sorted(
        (_operation_time(name, phase, each, whole, rates) for (name, phase), each in found.items()), key=_longest
    )


def find_busiest_rank(problem: Problem, layout: Layout) -> int:
    """Return the index of the pipeline rank with the most compute seconds per micro-batch."""
    return max(
        distinct_ranks(problem, layout), key=lambda rank: sum(row.seconds for row in explain(problem, layout, rank))
    )


def _longest(row: OperationTime) -> float:
    """Return the sort key of an operation's cost (`row`) that puts the longest operation first."""
    return -row.seconds


def _operation_time(
    name: str, phase: str, each: list[tuple[Operation, float]], whole: float, rates: Rates
) -> OperationTime:
    """Return the cost of an operation in a phase. each: its calls, (operation, seconds) for each size; whole: seconds
    of the micro-batch; rates: speeds of the device, which decide `bound`."""
    count = sum(one.count for one, _ in each)
    flops, moved = (sum(getattr(one, of) * one.count for one, _ in each) for of in ("flops", "bytes"))
    seconds = sum(took for _, took in each)
    first = each[0][0]
    starts = count * (
        rates.product_launch if first.kind in ("product", "float32 product", "attention") else rates.memory_launch
    )
    parts = {"compute": flops / rates.product, "memory": moved / rates.memory, "start": starts}
    bound = max(parts, key=lambda part: parts[part])
    return OperationTime(name, phase, count, first.shape or (), flops, moved, seconds, seconds / whole, bound)
