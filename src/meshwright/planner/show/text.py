"""Tables and lines that `meshwright plan` prints on a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from meshwright.collectives.quantities import ByteUnit, format_size
from meshwright.layout import Layout
from meshwright.planner.calibrate import RunFigures
from meshwright.planner.cost.bounds import StepProperties, bound_seconds
from meshwright.planner.cost.step_time import StepTime
from meshwright.planner.hardware.calibration import Calibration
from meshwright.planner.memory.ledger import Ledger
from meshwright.planner.memory.rank_memory import merge_layers
from meshwright.planner.memory.snapshot import Allocation
from meshwright.planner.models import model_document
from meshwright.planner.problem import Problem
from meshwright.planner.search.estimate import Estimate
from meshwright.planner.search.nearest import Nearest
from meshwright.planner.search.search import SearchResult, TooLargeLayout
from meshwright.planner.search.shortlist import MOST_PRICED
from meshwright.planner.show.explain import OperationTime
from meshwright.terminal import LEAST_WORDS, format_table, wrap_line
from meshwright.toml import read_packaged_toml

WIDE = 200
"""Characters of a line if the width of the terminal is unknown."""

LEAST_PART = 1e-6
"""Smallest fraction of a step's time that is shown as a part; less is rounding error."""


def headline(problem: Problem, model: str) -> str:
    """Return one line of text on a planning problem: model, cluster, sequence length and batch. model: name of the
    model, to be printed."""
    sizes, cluster = model_document(problem.config), problem.cluster
    total, used = sizes["parameters"], sizes["active_parameters"]
    active = "" if used == total else f", {_count(used)} active"
    compiled = ", compiled" if problem.compile else ""
    reserved = f", {format_size(problem.reserve)} of it reserved" if problem.reserve else ""
    calibrated = "" if cluster.calibration is None else f"; {cluster.calibration.line}"
    return (
        f"{model}: {_count(total)} parameters{active}; "
        f"{problem.batch:,} sequence{'s' * (problem.batch > 1)} of {problem.sequence:,} tokens on "
        f"{cluster.name} ({cluster.devices:,} devices, "
        f"{format_size(cluster.device.memory_bytes)} each{reserved}); {problem.engine.name}{compiled}, "
        f"{problem.precision}{calibrated}"
    )


def search_text(result: SearchResult, width: int = WIDE) -> str:
    """Format the result of a search as text. width: maximum characters of a line; long words may exceed it."""
    lines = [f"searched {result.searched:,} layouts in {result.seconds:.2f} s"]
    if not result.best:
        lines.append("none of them fits in memory")
    else:
        lines += _best(result, width)
        lines.append(wrap_line(f"  {selection_note(result.best)}", width, "  "))
    if result.undecided:
        lines.append(wrap_line(f"  {undecided_text(result)}", width, "  "))
    if result.advice and result.best:
        lines.append("faster layouts that do not fit:")
        lines += [wrap_line(f"  {advice_text(result, one)}", width, "    ") for one in result.advice]
    return "\n".join(lines)


def _best(result: SearchResult, width: int) -> Iterator[str]:
    """Yield the lines of a text table of the best layouts of a search. width: maximum characters of a line; long words
    may exceed it."""
    unit = ByteUnit.find(max(one.memory.device_bytes for one in result.best))
    cells = best_cells(result, unit)
    rows = [(step, f"{low} - {high}", *rest) for _, step, low, high, *rest, _ in cells]
    figures = format_table([("step s", "low - high", "tokens/s/device", "MFU", unit.name), *rows])
    names = ["   layout", *(f"{number}  {layout}" for number, (layout, *_) in enumerate(cells, 1))]
    widest = max(map(len, names))
    fits = widest + len(figures[1]) + 4 + LEAST_WORDS <= width  # else the figures stand below their layout
    before = widest if fits else 1
    indent = " " * (before + len(figures[1]) + 4)
    for name, line, why in zip(names, figures, ("compared with the first", *(row[-1] for row in cells)), strict=True):
        if not fits:
            yield name
        yield wrap_line(f"{name if fits else '':{before}}  {line}  {why}", width, indent)


def best_cells(result: SearchResult, unit: ByteUnit) -> list[tuple[str, ...]]:
    """Return one table row per best layout of a search: layout, seconds of a step, their low and high bound,
    tokens/s/device, MFU, memory in `unit`, remark. The remark says why the layout is slower than the first, and ends
    with "tight" if little memory stays free."""
    return [
        (
            str(one.layout), f"{one.time.seconds:.4g}", f"{one.time.low:.4g}", f"{one.time.high:.4g}",
            f"{one.tokens_per_second_per_device:,.0f}", f"{one.mfu:.1%}", unit.number(one.memory.device_bytes),
            f"{why}; tight" if one.tight else why,
        )
        for one, why in zip(result.best, result.reasons, strict=True)
    ]  # fmt: skip


def advice_text(result: SearchResult, too_large: TooLargeLayout) -> str:
    """Format a layout that is fast but does not fit, and the change that makes it fit. too_large: the layout and its
    change."""
    problem = result.problem
    took = seconds_text(problem, too_large.layout, too_large.seconds)
    wants = f"{too_large.layout}: {took}, but {format_size(too_large.bytes - problem.usable_bytes)} too much"
    change = change_text(problem, too_large)
    return f"{wants}; it fits with {change}" if change else f"{wants}; {NO_CHANGE} makes it fit"


NO_CHANGE = "no combination of three changes"


def change_text(problem: Problem, too_large: TooLargeLayout) -> str | None:
    """Format the change that makes a layout fit, and the seconds of a step after the change; None if no change is
    known. too_large: the layout and its change."""
    if too_large.instead is None or too_large.instead_seconds is None:
        return None
    return f"{too_large.change}: {seconds_text(problem, too_large.instead, too_large.instead_seconds)}"


def seconds_text(problem: Problem, layout: Layout, seconds: float) -> str:
    """Format a layout's step time with its bounds, such as `1.2 s (1 to 1.5)`. seconds: expected step time after
    calibration."""
    cluster = problem.cluster
    seconds, low, high, _ = bound_seconds(cluster, StepProperties.of(problem, layout, seconds / cluster.time_factor))
    return f"{seconds:.3g} s ({low:.3g} to {high:.3g})"


def nearest_text(nearest: Nearest, width: int = WIDE) -> str:
    """Format the layouts that come closest to fitting, for a search in which no layout fits. width: maximum characters
    of a line; long words may exceed it."""
    lines = ["the layout that needs the least memory, which does not fit either:", estimate_text(nearest.least, width)]
    return "\n".join([*lines, wrap_line(nearest_line(nearest), width, "  ")])


def nearest_line(nearest: Nearest) -> str:
    """Format one sentence on the number of devices that would suffice, for a search in which no layout fits. nearest:
    layouts that come closest to fitting."""
    enough = nearest.enough
    if enough is None:
        return "The number of devices that would suffice is unknown."
    took = seconds_text(enough.problem, enough.layout, enough.time.seconds)
    memory = format_size(enough.memory.device_bytes)
    return f"{nearest.devices:,} devices would suffice: {enough.layout}, {took}, {memory} per device."


def undecided_text(result: SearchResult) -> str:
    """Format a note on the number of layouts that may be better but were not predicted exactly, because the search
    reached its limit."""
    what = "better than the last one listed" if result.best else "small enough"
    return f"stopped after {MOST_PRICED} exact prices: {result.undecided:,} more layouts may be {what}"


def recipe_text(recipe_estimate: Estimate | str, best: Estimate | None) -> str:
    """Format the predicted cost of the layout that a recipe names, relative to the best layout. recipe_estimate:
    estimate of the recipe's layout; or text with the reason why it cannot run, which is then printed. best: estimate of
    the best layout; None: no layout fits."""
    if isinstance(recipe_estimate, str):
        return f"the recipe's own layout: {recipe_estimate}"
    fits = "" if recipe_estimate.fits else ", which does not fit"
    ratio = "" if best is None else f": {recipe_estimate.time.seconds / best.time.seconds:.2f} times the first"
    memory, layout = recipe_estimate.memory.device_bytes, recipe_estimate.layout
    seconds = seconds_text(recipe_estimate.problem, layout, recipe_estimate.time.seconds)
    return f"the recipe's own layout: {layout}, {seconds}{ratio}; {format_size(memory)}{fits}"


def estimate_text(estimate: Estimate, width: int = WIDE) -> str:
    """Format one estimate as text: time by part, memory by category and by item. width: maximum characters of a line;
    long words may exceed it."""
    time = estimate.time
    parts = [f"{part} {took:.3g} s ({share_text(took / time.seconds)})" for part, took in list_parts(time).items()]
    rows = list(_bill(estimate, ByteUnit.find(estimate.memory.device_bytes)))
    figures = format_table([row[:2] for row in rows])
    described = [f"time: {', '.join(parts)}", f"memory: {memory_text(estimate)}"]
    if estimate.layout.world_size > 1:
        described.insert(1, f"communication: {communication_text(estimate)}")
    lines = [wrap_line(f"{estimate.layout}: {step_text(estimate)}", width, "  ")]
    lines += [wrap_line(f"  {line}", width, "    ") for line in described]
    aligned = " " * (len(figures[0]) + 4)
    billed = (f"  {line}  {row[-1]}".rstrip() for line, row in zip(figures, rows, strict=True))
    lines += [wrap_line(line, width, aligned) for line in billed]
    return "\n".join([*lines, *(wrap_line(f"  warning: {said}", width, "    ") for said in estimate.warnings)])


def list_parts(time: StepTime) -> dict[str, float]:
    """Return {part: seconds} of a step time, without parts that take hardly any time."""
    return {part: seconds for part, seconds in time.breakdown.items() if seconds > LEAST_PART * time.seconds}


def step_text(estimate: Estimate) -> str:
    """Format the predicted step time of an estimate with its bounds, and the throughput and model FLOP utilisation that
    follow from it."""
    time, rate = estimate.time, estimate.model_flops_per_device
    flops = f"{rate / 1e12:.1f} TFLOP/s" if rate >= 1e11 else f"{rate / 1e9:.1f} GFLOP/s"
    took = f"{time.seconds:.4g} s per step ({time.low:.4g} to {time.high:.4g})"
    tokens = f"{estimate.tokens_per_second_per_device:,.0f} tokens/s per device"
    return f"{took}, {tokens}, {flops} per device, MFU {estimate.mfu:.1%}"


def memory_text(estimate: Estimate) -> str:
    """Format the predicted memory of a device in one line: bytes, limit, if it fits, and the memory snapshot (point in
    time) of the peak. estimate: estimate of the layout."""
    memory, room = estimate.memory, estimate.problem.usable_bytes
    over = memory.device_bytes - room
    verdict = f"fits{', tight' * estimate.tight}" if estimate.fits else f"does not fit: {format_size(over)} too much"
    where = f" on pipeline rank {memory.pp_rank}" if estimate.layout.pp > 1 else ""
    used = format_size(memory.device_bytes)
    return f"{used} of {format_size(room)}, {verdict}; peak{where} at {memory.peak_snapshot}"


def communication_text(estimate: Estimate) -> str:
    """Format the seconds of communication in a step: the exposed part, which no computation overlaps, and the total."""
    exposed, total = estimate.exposed_seconds, estimate.communication_seconds
    share = share_text(exposed / estimate.time.seconds)
    return f"{exposed:.3g} s exposed ({share} of the step), {total:.3g} s in total"


def usage_text(best: Sequence[Estimate], width: int = WIDE) -> str:
    """Format instructions below a plan: the recipe keys with which the first of the best layouts is trained (left out
    if it cannot be trained), then the legend of the layout notation. best: estimates, fastest first. width: maximum
    characters of a line."""
    keys = [] if best[0].problem.only_planned else recipe_block(best[0]).splitlines()
    block = ["recipe keys:", *(f"  {line}" for line in keys)] if keys else []
    legend = "; ".join(f"{part} {meaning}" for part, meaning in notation_legend(one.layout for one in best))
    return "\n".join([*block, wrap_line(f"notation: {legend}", width, "  ")])


def notation_legend(layouts: Iterable[Layout]) -> list[tuple[str, str]]:
    """Return (part of the layout notation, meaning), such as ("dpN", "N replicas ..."), for every part that occurs in
    `layouts`."""
    words = {word for layout in layouts for word in str(layout).split()}

    def occurs(pattern: str) -> bool:
        """Return True if the regular expression `pattern` matches a word of the layouts; one without ":" may also match
        the beginning of a word, up to a ":"."""
        return any(re.fullmatch(pattern if ":" in pattern else rf"{pattern}(:.*)?", word) for word in words)

    parts = read_packaged_toml("planner/show/notation.toml")["parts"]
    return [(part, meaning) for pattern, part, meaning in parts if occurs(pattern)]


def recipe_block(estimate: Estimate) -> str:
    """Return TOML lines of recipe keys with which `meshwright train` runs an estimate's layout, sequence length and
    batch."""
    problem = estimate.problem
    return f'layout = "{estimate.layout}"\ndata.sequence = {problem.sequence}\ntrain.batch = {problem.batch}\n'


def selection_note(best: Iterable[Estimate]) -> str:
    """Return a note to print below a table of the best layouts. It says that the table has the fastest layout of each
    kind, and explains the mark "tight" if a layout has this mark. best: estimates in the table."""
    tight = any(one.tight for one in best)
    mark = " Tight: less than 5% of the memory limit stays free." if tight else ""
    return f"The fastest layout of each kind; others of the same kind differ in the sizes of the axes.{mark}"


def share_text(share: float) -> str:
    """Format `share`, a fraction in [0, 1], as a percentage; `<1%` below 0.5%."""
    return f"{share:.0%}" if share >= 0.005 else "<1%"


def _bill(estimate: Estimate, unit: ByteUnit) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of a table of memory on the pipeline rank with the highest peak: (category, its memory in `unit`,
    its largest items). estimate: estimate of the layout."""
    yield "", unit.name, "of which"
    memory, process = estimate.memory, estimate.problem.process or (("CUDA context", estimate.memory.framework_bytes),)
    for category, size in memory.by_category().items():
        if not size:
            continue
        items = merge_layers(item for item in memory.items if item.category == category)
        named = [(item.name, item.bytes) for item in items[:3] if item.bytes >= 0.005 * unit.bytes]
        if named and (rest := items[len(named) :]):
            named.append((f"{len(rest)} more", sum(item.bytes for item in rest)))
        parts = process if category == "framework" else named
        shown = ", ".join(f"{name} {unit.number(part)}" for name, part in parts)
        if category == "unexplained":
            shown = f"allowance of {size / memory.peak_bytes:.0%} of all tensors, such as for fragmentation"
        yield category, unit.number(size), shown
    if memory.nccl_bytes:
        yield "NCCL", unit.number(memory.nccl_bytes), "buffers, at most; not in the peak or the fit, see --reserve"


def ledger_text(memory: Ledger, width: int = WIDE) -> str:
    """Format every tensor of a rank at its memory peak as a table; equal tensors of several layers share a line.
    memory: memory of the rank. width: maximum characters of a line; columns that do not fit are dropped."""
    unit = ByteUnit.find(memory.peak_bytes)
    rows = tensor_rows(merge_layers(memory.items), unit)
    title = f"pipeline rank {memory.pp_rank} at {memory.peak_snapshot}: {format_size(memory.peak_bytes)} of tensors"
    return "\n".join([title, *format_table(rows, width, ("category", "stage", "lifetime", "dtype", "shape"))])


def tensor_rows(items: Sequence[Allocation], unit: ByteUnit) -> list[tuple[str, ...]]:
    """Return the rows of a table of tensors (`items`), the header first. Cells: name, category, shape, dtype, size in
    `unit`, stage, and the events between which the tensor is allocated ("temporary" if both events are the same)."""
    rows: list[tuple[str, ...]] = [("tensor", "category", "shape", "dtype", unit.name, "stage", "lifetime")]
    for item in items:
        lifetime = "temporary" if item.first == item.last else f"{item.first} to {item.last}"
        stage = "-" if item.stage is None else str(item.stage)
        size, shape = unit.number(item.bytes), shape_text(item.shape)
        rows.append((item.name, item.category, shape, item.dtype or "-", size, stage, lifetime))
    return rows


def shape_text(shape: Sequence[float]) -> str:
    """Format a shape, such as `4,096 x 128`; "-" for an empty one."""
    return " x ".join(f"{size:,.0f}" for size in shape) or "-"


def calibrated_text(runs: Sequence[RunFigures], calibration: Calibration, path: str) -> str:
    """Format the predicted and measured figures of finished runs, and the calibration that was written to the cluster
    file `path`."""
    head = ("run", "layout", "predicted s", "measured s", "ratio", "unexplained memory")
    rows = [
        (
            each.run, each.layout, f"{each.predicted_seconds:.4g}", f"{each.measured_seconds:.4g}", f"{each.ratio:.3f}",
            "-" if not (peak := each.predicted_peak_bytes) else f"{(each.unexplained_bytes or 0) / peak:+.1%}",
        )
        for each in runs
    ]  # fmt: skip
    share = calibration.unexplained_share
    memory = "" if share is None else f", {share:+.1%} of memory unexplained"
    return "\n".join([*format_table([head, *rows]), f"{calibration.line}{memory}", f"cluster file: {path}"])


def explain_text(layout: Layout, pp_rank: int, rows: Sequence[OperationTime], width: int = WIDE, most: int = 24) -> str:
    """Format the `most` longest operations of a micro-batch on pipeline rank `pp_rank` as a table. layout: the layout.
    rows: all operations, longest first. width: maximum characters of a line; columns that do not fit are dropped."""
    head = ("operation", "phase", "count", "shape", "GFLOP", "MB", "FLOP/byte", "bound by", "ms", "share")
    shown = [
        (
            row.operation, row.phase, f"{row.count:g}", shape_text(row.shape),
            f"{row.flops / 1e9:,.1f}", f"{row.bytes / 1e6:,.1f}", f"{row.intensity:,.0f}", row.bound,
            f"{row.seconds * 1e3:,.3f}", f"{row.share:.1%}",
        )
        for row in rows[:most]
    ]  # fmt: skip
    rest = sum(row.share for row in rows[most:])
    more = [f"{len(rows) - most} more operations take {rest:.1%}"] if len(rows) > most else []
    where = f" on pipeline rank {pp_rank}" if layout.pp > 1 else ""
    total = sum(row.seconds for row in rows)
    several = f"{layout.micro_batches:,} micro-batch{'es' * (layout.micro_batches > 1)}"
    title = f"computation of a micro-batch{where}: {total * 1e3:,.4g} ms; {several} per step"
    lines = format_table([head, *shown], width, ("MB", "GFLOP", "count", "shape", "FLOP/byte"))
    return "\n".join([wrap_line(title, width, "  "), *lines, *more])


def _count(number: int) -> str:
    """Format a number of parameters briefly, such as `8.03 B`."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= size:
            return f"{number / size:.4g} {letter}"
    return f"{number:,}"
