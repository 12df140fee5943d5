"""Report of a pipeline schedule: checked, simulated, ready to print and draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import ArrayLike

from meshwright.documents import to_json_dict
from meshwright.errors import UserError
from meshwright.program.check_pipeline import check_pipeline
from meshwright.program.durations import EQUAL_DURATIONS, Durations
from meshwright.program.pipeline import Kind, PipelineProgram
from meshwright.program.simulate_pipeline import PipelineTiming, simulate_pipeline
from meshwright.program.timeline import Timeline, build_pipeline_timeline
from meshwright.schedules.auto import SearchResult
from meshwright.schedules.components import ComponentDurations, ComponentTiming, simulate_components
from meshwright.schedules.library import generate, search_auto
from meshwright.schedules.transfers import with_transfers


@dataclass(frozen=True)
class ScheduleReport:
    """Result of `meshwright schedule`: a checked pipeline schedule with its simulation. Times are in the unit in which
    the durations of steps were given.

    Attributes:
        program: The schedule as generated (compute steps only) or loaded.
        complete: The steps of `program` with sends and receives between them.
        timing: Simulated start and end of each step.
        parts: A second simulation in which each step is divided into attention, dispatch, MLP and combine; None if it
            was not requested.
        found: Result of the search with all its candidates, if the schedule is `auto`; else None.
    """

    program: PipelineProgram  # as generated or loaded
    complete: PipelineProgram  # with explicit sends and receives
    timing: PipelineTiming
    parts: ComponentTiming | None = None  # if steps were split into layer components
    found: SearchResult | None = None  # search result of `auto`

    def to_json_dict(self) -> dict[str, Any]:
        """Return the report as the JSON object that `meshwright schedule --json` prints, except the list of files that
        the command has written."""
        program, timing = self.program, self.timing
        copies = timing.weight_copies
        document: dict[str, Any] = {
            "schedule": program.name,
            "ranks": program.ranks,
            "micro_batches": program.micro_batches,
            "chunks": program.chunks,
            "placement": program.placement,
            "makespan": timing.makespan,
            "idle": timing.idle,
            "bubble_fraction": timing.bubble_fraction,
            "bubble_to_ideal": timing.bubble_to_ideal,
            "peak_activations": timing.peak_activations,
            "weight_copies": float(copies.max()),
            "weight_copies_by_rank": copies,
            "transfers": timing.messages_sent,
            "checked": True,
            "steps": self.steps(),
        }
        if self.parts is not None:
            document["all_to_all"] = self.parts.all_to_all
            document["exposed_all_to_all"] = self.parts.exposed
        if self.found is not None:
            document["found_by"] = self.found.winner.name
            document["lower_bound"] = self.found.lower_bound
            document["candidates"] = [
                {"name": one.name, "makespan": one.makespan, "peak_activations": max(one.peak), "fits": one.fits}
                for one in self.found.candidates
            ]
        if program.asynchronous:
            document["steady_bubble_fraction"] = timing.steady_bubble_fraction
        return to_json_dict(document)

    def steps(self) -> list[list[str]]:
        """Return for each rank its compute steps in execution order, as text in PyTorch's notation: `2F5` is the
        forward of micro-batch 5 on stage 2; overlapped steps are joined by ` | `."""
        s = self.program.steps
        ranks: list[list[str]] = [[] for _ in range(self.program.ranks)]
        before = -1
        for index, (rank, kind, group) in enumerate(
            zip(s.rank.tolist(), s.kind.tolist(), s.group_index.tolist(), strict=True)
        ):
            if kind > Kind.UPDATE:
                continue
            word = self.program.describe(index)
            if group == before:
                ranks[rank][-1] += f" | {word}"
            else:
                ranks[rank].append(word)
            before = group
        return ranks

    def timeline(self) -> Timeline:
        """Return the simulated schedule as a timeline to draw (Gantt chart), with notes on each rank's idle time and
        peak activations, and curves of saved activations over time."""
        idle, peak = self.timing.idle.tolist(), self.timing.peak_activations.tolist()
        notes = [f"idle {i:.4g}, peak {p:.4g}" for i, p in zip(idle, peak, strict=True)]
        levels = {}
        for rank in range(self.program.ranks):
            times, values = self.timing.compute_activations(rank)
            levels[rank] = list(zip(times.tolist(), values.tolist(), strict=True))
        if self.parts is not None:
            return build_pipeline_timeline(self.timing.program, self.parts, notes, levels)
        return build_pipeline_timeline(self.program, self.timing, notes, levels)

    def summary(self) -> str:
        """Return the report as a few lines of text, as `meshwright schedule` prints it."""
        program, timing = self.program, self.timing
        copies = float(timing.weight_copies.max())
        chunks = f", {program.chunks} chunks per rank" if program.chunks > 1 else ""
        replicas = f", {program.replicas} replicas in opposite directions" if program.replicas > 1 else ""
        lines = [
            f"{program.name}: {program.ranks} ranks, {program.micro_batches} micro-batches{chunks}{replicas}; checked",
            f"makespan {timing.makespan:.6g}; bubble {100 * timing.bubble_fraction:.1f}% of it, "
            f"{100 * timing.bubble_to_ideal:.1f}% of the mean busy time of a rank ({float(timing.busy.mean()):.6g})",
        ]
        if program.asynchronous:
            steady = 100 * timing.steady_bubble_fraction
            lines.append(f"asynchronous weight updates: bubble {steady:.1f}% while the pipeline is full")
        if self.parts is not None:
            lines.append(
                f"all-to-all per rank {_format_range(self.parts.all_to_all.tolist())}, exposed "
                f"{_format_range(self.parts.exposed.tolist())}"
            )
        peak, messages, idle = (
            _format_range(values.tolist()) for values in (timing.peak_activations, timing.messages_sent, timing.idle)
        )
        lines.append(
            f"peak activations {peak} micro-batches; weight copies {copies:g}; messages sent per rank {messages}; "
            f"idle {idle}"
        )
        if self.found is not None:
            lines += ["", self.found.explain()]
        return "\n".join(lines)

    def table(self) -> list[list[str]]:
        """Return a table of the report as lines of text cells: a header, then one line per rank with times, peak
        of saved activations, weight copies and messages."""
        timing = self.timing
        columns = (timing.busy, timing.idle, timing.peak_activations, timing.weight_copies, timing.messages_sent)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        heads = ["rank", "busy", "idle", "peak activations", "weight copies", "messages sent"]
        return [heads, *([str(rank), *map(_format_figure, row)] for rank, row in enumerate(rows))]


def schedule(
    name: str,
    ranks: int | None = None,
    micro_batches: int | None = None,
    chunks: int | None = None,
    durations: Durations = EQUAL_DURATIONS,
    memory: float | None = None,
    parts: Sequence[float] | None = None,
) -> ScheduleReport:
    """Generate (or load), verify and simulate a pipeline schedule; `meshwright schedule` prints the report.

    name: schedule such as "1f1b", `auto` (search), or `@FILE`. ranks, micro_batches: numbers of pipeline ranks and
    micro-batches; None only for a file. chunks: stages per rank (None: the schedule's default). durations: times of one
    micro-batch, in any unit. In each field, one number or a list [ranks] is the time on all stages of a rank together,
    divided equally among them; a list [stages] has the time of each stage. memory: maximum number of micro-batches
    whose activations a rank holds at once (None: no limit); activations of one of the rank's n stages count as 1/n.
    Only `auto` uses it.

    parts: times of attention, dispatch, MLP and combine in a forward on all stages of a rank, used instead of
    `durations`. The input gradient takes the same four times, the weight gradient only the times of attention and MLP.
    Each step is then split into these components, and simulated with two streams per rank. None: steps are not split.
    Raises UserError for unknown names and invalid numbers, ProgramError for an incorrect program."""
    found, cut = None, None
    if name == "auto":
        # Durations of a rank's whole share: the search chooses the placement.
        wanted = durations if parts is None else _split_parts(parts, 1, durations.transfer).to_durations()
        found = search_auto(ranks, micro_batches, chunks, wanted, memory)
        program = found.program
    else:
        program = generate(name, ranks, micro_batches, chunks)
    check_pipeline(program)
    if parts is None:
        durations = durations.split(program)
        timing = simulate_pipeline(program, durations)
    else:
        shares = _split_parts(parts, program.chunks, durations.transfer)
        durations, cut = shares.to_durations(), simulate_components(program, shares)
        timing = cut.timing
    complete = program
    if not program.has_transfers:
        complete = with_transfers(program, durations)
        check_pipeline(complete)
    return ScheduleReport(program, complete, timing, cut, found)


def _split_parts(parts: Sequence[float], chunks: int, transfer: ArrayLike) -> ComponentDurations:
    """Return the durations of one stage's layer components: the forward times of a rank divided by its number of
    stages. The backward gets the same times as the forward.

    parts: forward times of attention, dispatch, MLP and combine, summed over the rank's stages. chunks: number of
    stages of a rank. transfer: time of one message, stored unchanged; one number for all stage boundaries (UserError
    for a list)."""
    if len(parts) != 4:
        raise UserError(f"parts: {len(parts)} durations; expected 4: attention, dispatch, MLP, combine")
    if not isinstance(transfer, (int, float)):
        raise UserError("parts: requires one transfer time for all stages")
    attention, dispatch, mlp, combine = (part / chunks for part in parts)
    forward = (attention, dispatch, mlp, combine)
    return ComponentDurations(forward, forward, (attention, mlp), float(transfer))


def _format_figure(value: float) -> str:
    """Return a number as text: all digits before the decimal point, four significant digits without trailing zeros."""
    return f"{value:.4g}" if abs(value) < 9999.5 else f"{value:.0f}"


def _format_range(values: list[float]) -> str:
    """Return the range of `values` as text: `1 to 4`, or `4` if all values are equal."""
    low, high = min(values), max(values)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
