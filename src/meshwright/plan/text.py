"""What `meshwright plan` prints for a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from meshwright.plan.calibrate import RunFigures
from meshwright.plan.calibration import Calibration
from meshwright.plan.estimate import Estimate, model_document
from meshwright.plan.explain import Row
from meshwright.plan.memory import GIB, by_layers
from meshwright.plan.search import MOST_PRICED, Found
from meshwright.plan.space import Problem


def headline(problem: Problem, model: str) -> str:
    """What is planned, in a line."""
    sizes = model_document(problem.config)
    active = (
        "" if sizes["active_parameters"] == sizes["parameters"] else f", {_count(sizes['active_parameters'])} active"
    )
    cluster = problem.cluster
    compiled = ", compiled" if problem.compile else ""
    calibrated = "" if cluster.calibration is None else f"; {cluster.calibration.line}"
    return (
        f"{model}: {_count(sizes['parameters'])} parameters{active}; {problem.batch:,} sequences of "
        f"{problem.sequence:,} tokens on {cluster.name} ({cluster.devices:,} devices, "
        f"{cluster.device.memory_bytes / GIB:.1f} GiB each); {problem.engine.name}{compiled}, "
        f"{problem.precision}{calibrated}"
    )


def found_text(found: Found) -> str:
    """The table of a search."""
    problem = found.problem
    lines = [f"searched {found.searched:,} layouts in {found.seconds:.2f} s"]
    if not found.best:
        lines.append("none of them fits" if not found.advice else "none of them fits; the fastest:")
    else:
        head = ("", "layout", "step s", "low - high", "tokens/s/device", "MFU", "GiB", "compared with the first")
        lines += table(
            [
                head,
                *(
                    _row(number, one, why)
                    for number, (one, why) in enumerate(zip(found.best, found.reasons, strict=True), 1)
                ),
            ]
        )
    if found.undecided:
        lines.append(f"  {undecided_text(found)}")
    room = problem.cluster.device.memory_bytes
    for one in found.advice:
        wants = f"{one.layout}: {one.seconds:.3g} s, but {(one.bytes - room) / GIB:.1f} GiB too much"
        if one.instead is None:
            lines.append(f"  {wants}; no single change makes it fit")
        else:
            lines.append(f"  {wants}; with {one.change} it fits: {one.instead_seconds:.3g} s")
    return "\n".join(lines)


def undecided_text(found: Found) -> str:
    """What a search leaves open that stopped."""
    what = "better than the last of these" if found.best else "small enough"
    return f"stopped after {MOST_PRICED} exact prices: {found.undecided:,} more layouts may be {what}"


def _row(number: int, one: Estimate, why: str) -> tuple[str, ...]:
    time = one.time
    return (
        str(number), str(one.layout), f"{time.seconds:.4g}", f"{time.low:.4g} - {time.high:.4g}",
        f"{one.tokens_per_second_per_device:,.0f}", f"{one.mfu:.1%}", f"{one.memory.device_bytes / GIB:.1f}", why,
    )  # fmt: skip


def recipe_text(own: Estimate | str, best: Estimate | None) -> str:
    """What a recipe's own layout costs beside the best one, or why it cannot be."""
    if isinstance(own, str):
        return f"the recipe's own layout: {own}"
    fits = "" if own.fits else ", which does not fit"
    beside = "" if best is None else f": {own.time.seconds / best.time.seconds:.2f} times the first"
    return (
        f"the recipe's own layout: {own.layout}, {own.time.seconds:.4g} s{beside}; "
        f"{own.memory.device_bytes / GIB:.1f} GiB{fits}"
    )


def estimate_text(one: Estimate) -> str:
    """One layout: its time by part, its memory by category and by item."""
    time, memory, room = one.time, one.memory, one.problem.cluster.device.memory_bytes
    lines = [
        f"{one.layout}: {time.seconds:.4g} s a step ({time.low:.4g} to {time.high:.4g}), "
        f"{one.tokens_per_second_per_device:,.0f} tokens/s a device, "
        f"{one.model_flops_per_device / 1e12:.1f} TFLOP/s a device, MFU {one.mfu:.1%}",
        "  time: " + ", ".join(
            f"{part} {seconds:.3g} s ({seconds / time.seconds:.0%})"
            for part, seconds in time.breakdown.items()
            if seconds
        ),
    ]  # fmt: skip
    verdict = "fits" if one.fits else f"does not fit: {(memory.device_bytes - room) / GIB:.1f} GiB too much"
    where = f" on rank {memory.pp_rank} of pp" if one.layout.pp > 1 else ""
    lines.append(
        f"  memory: {memory.device_bytes / GIB:.1f} of {room / GIB:.1f} GiB, {verdict}; "
        f"fullest{where} at {memory.moment}"
    )
    lines += [f"  {line}" for line in table(list(_bill(one)))]
    lines += [f"  warning: {line}" for line in one.warnings]
    return "\n".join(lines)


def _bill(one: Estimate) -> Iterator[tuple[str, ...]]:
    yield "", "GiB", "of which"
    memory = one.memory
    for category, size in memory.by_category().items():
        if not size:
            continue
        largest = by_layers(item for item in memory.items if item.category == category)
        named = ", ".join(f"{item.name} {item.bytes / GIB:.2f}" for item in largest[:3] if item.bytes >= 0.005 * GIB)
        more = f" and {len(largest) - 3} more" if len(largest) > 3 and named else ""
        yield category, f"{size / GIB:.2f}", named + more


def calibrated_text(runs: Sequence[RunFigures], found: Calibration, path: str) -> str:
    """What runs said, and what was kept of it."""
    head = ("run", "layout", "predicted s", "measured s", "ratio", "memory not explained")
    rows = [
        (
            each.run, each.layout, f"{each.predicted_seconds:.4g}", f"{each.measured_seconds:.4g}", f"{each.ratio:.3f}",
            "-" if not each.peak_bytes else f"{(each.unexplained_bytes or 0) / each.peak_bytes:+.1%}",
        )
        for each in runs
    ]  # fmt: skip
    share = found.unexplained_share
    memory = "" if share is None else f", {share:+.1%} of memory beyond what is itemised"
    return "\n".join([*table([head, *rows]), f"{found.line}{memory}", f"cluster file: {path}"])


def explain_text(rows: Sequence[Row], most: int = 24) -> str:
    """The table of operations, longest first."""
    head = ("operation", "phase", "count", "shape", "GFLOP", "MB", "FLOP/byte", "bound by", "ms", "share")
    shown = [
        (
            row.name, row.phase, f"{row.count:g}", " x ".join(f"{size:,.0f}" for size in row.shape),
            f"{row.flops / 1e9:,.1f}", f"{row.bytes / 1e6:,.1f}", f"{row.intensity:,.0f}", row.bound,
            f"{row.seconds * 1e3:,.3f}", f"{row.share:.1%}",
        )
        for row in rows[:most]
    ]  # fmt: skip
    rest = sum(row.share for row in rows[most:])
    more = [f"{len(rows) - most} more operations take {rest:.1%}"] if len(rows) > most else []
    return "\n".join(["one micro-batch on one rank:", *table([head, *shown]), *more])


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they need; the second one and words left, numbers right."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    left = [any(c.isalpha() for row in rows[1:] for c in row[at]) for at in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if words else cell.rjust(width)
            for cell, width, words in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in rows
    ]


def _count(number: int) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.4g} {letter}"
    return f"{number:,}"
