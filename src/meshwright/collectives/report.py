"""Report of `meshwright collective`: a program generated, chosen or loaded, checked, and simulated on a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from meshwright.collectives.choose import AlgorithmOptions, Choice, Chooser
from meshwright.collectives.cost import compute_closed_form_seconds
from meshwright.collectives.crossover import Crossover, Curves
from meshwright.collectives.library import find_generator, generate
from meshwright.collectives.quantities import format_bytes, format_seconds
from meshwright.collectives.topologies import parse_topology
from meshwright.documents import to_json_dict
from meshwright.errors import UserError
from meshwright.names import ALGORITHM_ALIASES, OPERATIONS, REDUCTIONS, unknown
from meshwright.program.check_collective import CheckedCollective, check_collective
from meshwright.program.collective import CollectiveProgram
from meshwright.program.load import load_program
from meshwright.program.simulate_collective import CollectiveTiming, simulate_collective
from meshwright.terminal import format_table

REDUCING = ("reduce", "reduce-scatter", "all-reduce")
MAX_RANKS = 1 << 17  # limit for an answer within a minute
MAX_RANKS_TO_CHOOSE_FOR = 1 << 14  # likewise, with `auto`
_FEW_RANKS = 32  # limit for the search of crossovers


@dataclass(frozen=True)
class CollectiveReport:
    """Result of `meshwright collective`: a verified collective program with its simulated times on a network.

    Attributes:
        checked: The verified program.
        settings: The algorithm's options.
        total_bytes: Size of the full vector.
        timing: Simulated times.
        closed_form_seconds: Time by the algorithm's formula; None if there is no formula.
        chooser: Simulator of all algorithms on the network.
        choice: Ranking of the algorithms by time if the algorithm is `auto`; else None.
        crossovers: Sizes at which the fastest algorithm changes, None if not computed.
        measured: Times measured in a real run of the program and of torch.distributed's own call, as returned by
            `comm.measure_program.measure`; empty without such a run.
    """

    checked: CheckedCollective
    settings: AlgorithmOptions
    total_bytes: int
    timing: CollectiveTiming
    closed_form_seconds: float | None
    chooser: Chooser
    choice: Choice | None = None
    crossovers: list[Crossover] | None = None
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def lower_bound_seconds(self) -> float:
        """Lower bound in seconds of the time that any program needs for this operation, vector size and network."""
        return self.chooser.compute_lower_bound(self.total_bytes)

    def to_json_dict(self) -> dict[str, Any]:
        """Return the report as the JSON object that `meshwright collective --json` prints, except the list of files
        that the command has written."""
        program, timing = self.checked.program, self.timing
        link = timing.busiest_link
        options = {"segments": self.settings.segments, "groups": self.settings.groups, "dims": self.settings.dims}
        document: dict[str, Any] = {
            "operation": program.operation,
            "algorithm": program.algorithm,
            "ranks": program.ranks,
            "bytes": self.total_bytes,
            "topology": timing.network.name,
            **{name: value for name, value in options.items() if value is not None},
            "checked": True,
            "rounds": self.checked.rounds,
            "bytes_sent": timing.bytes_sent,
            "seconds": timing.seconds,
            "closed_form_seconds": self.closed_form_seconds,
            "lower_bound_seconds": self.lower_bound_seconds,
            "measured_seconds": None,
            "busiest_link": None
            if link is None
            else {
                "link": timing.network.format_link(link),
                "bytes": timing.link_bytes[link],
                "busy_seconds": timing.link_busy[link],
            },
            **self.measured,
        }
        if self.choice is not None:
            document["reason"] = self.choice.reason
            document["ranking"] = [
                {
                    "algorithm": one.algorithm,
                    "settings": one.settings.describe(),
                    "seconds": one.seconds,
                    "closed_form_seconds": one.closed_form_seconds,
                }
                for one in self.choice.ranking
            ]
            document["refused"], document["left_out"] = self.choice.refused, self.choice.left_out
        if self.crossovers is not None:
            document["crossovers"] = [
                {"bytes": one.size, "before": one.before, "after": one.after} for one in self.crossovers
            ]
        return to_json_dict(document)

    def rows(self) -> list[tuple[str, str]]:
        """Return the numbers of the report (times, bytes, bounds) for printing, as pairs of texts (label, value)."""
        timing = self.timing
        least, most = float(timing.bytes_sent.min()), float(timing.bytes_sent.max())
        if round(least) == round(most):
            sent = f"{format_bytes(most)} by every rank"
        else:
            mean = format_bytes(float(timing.bytes_sent.mean()))
            sent = f"{format_bytes(least)} to {format_bytes(most)} by a rank, {mean} on average"
        form = "none" if self.closed_form_seconds is None else format_seconds(self.closed_form_seconds)
        rows = [
            ("checked", "every contribution arrives exactly once; no race; no deadlock even if sends block"),
            ("rounds", f"{self.checked.rounds:,}"),
            ("bytes sent", sent),
            ("simulated", format_seconds(timing.seconds)),
            ("closed form", form),
            ("lower bound", format_seconds(self.lower_bound_seconds)),
        ]
        link = timing.busiest_link
        if link is not None:
            busy, moved = timing.link_busy[link] / timing.seconds, format_bytes(float(timing.link_bytes[link]))
            rows.append(("busiest link", f"{timing.network.format_link(link)}: {moved}, busy {busy:.0%} of the time"))
        if self.measured:
            rows.append(("measured", format_seconds(self.measured["measured_seconds"])))
            rows.append(("torch.distributed", f"{format_seconds(self.measured['native_seconds'])}, the same result"))
        return rows

    def title(self) -> str:
        """Return one line of text on the report: operation, algorithm, options, number of ranks, vector size and
        network."""
        program = self.checked.program
        options = self.settings.describe()
        return (
            f"{program.operation} {program.algorithm}{f' ({options})' if options else ''} on {program.ranks} ranks, "
            f"{format_bytes(self.total_bytes)}, {self.timing.network.name}"
        )

    def summary(self) -> str:
        """Return the whole report as text, as `meshwright collective` prints it."""
        lines = [self.title(), *(f"  {name:<18}{value}" for name, value in self.rows())]
        if self.choice is not None:
            lines += ["", f"chosen: {self.choice.reason}", "", *format_ranking(self.choice)]
        if self.crossovers is not None:
            lines += ["", format_crossovers(self.crossovers)]
        return "\n".join(lines)


RANKING_HEAD = ("algorithm", "settings", "simulated", "closed form")


def list_ranking_rows(choice: Choice) -> list[tuple[str, str, str, str]]:
    """Return the algorithms of `choice`, ranked by simulated time, as table rows of text, fastest first. Columns, as in
    `RANKING_HEAD`: algorithm, options, simulated time, time by formula; missing values are empty cells."""
    return [
        (
            one.algorithm,
            one.settings.describe(),
            format_seconds(one.seconds),
            "" if one.closed_form_seconds is None else format_seconds(one.closed_form_seconds),
        )
        for one in choice.ranking
    ]


def format_ranking(choice: Choice) -> list[str]:
    """Return the algorithms of `choice` as lines of text. They are sorted by time, fastest first; then come algorithms
    that were skipped or do not accept the number of ranks."""
    rows = [RANKING_HEAD, *([cell or "-" for cell in row] for row in list_ranking_rows(choice))]
    lines = [f"  {line}" for line in format_table(rows, right=(False, False, True, True))]
    if choice.left_out:
        lines.append(f"  not simulated, as their closed forms are far from the best: {', '.join(choice.left_out)}")
    return lines + [f"  refused: {reason}" for reason in choice.refused.values()]


def format_crossovers(crossovers: Sequence[Crossover]) -> str:
    """Return crossovers as text: `crossovers: butterfly, from 167 KiB all-pairs, from 1.29 MiB
    hierarchical-scatter`."""
    if not crossovers:
        return "crossovers: none from 1 KiB to 1 GiB"
    return "crossovers: " + ", ".join(
        [crossovers[0].before, *(f"from {format_bytes(one.size)} {one.after}" for one in crossovers)]
    )


@dataclass(frozen=True)
class CollectiveOptions(AlgorithmOptions):
    """Options for the function `collective`: options of the algorithm (segments, ranks per node, sides of the grid), of
    the operation and of the network.

    Attributes:
        root: Source or destination rank; None: 0.
        reduction: "sum" (None, the default), "mean", "minimum" or "maximum".
        latency, bandwidth: Latency in seconds and bandwidth in bytes per second of links for which the topology's text
            gives none; None: defaults.
        reduce_bytes_per_second: Rate of local reductions.
        crossovers: True to also find the sizes at which the fastest algorithm changes; applies to `auto` on few ranks
            only.
    """

    root: int | None = None
    reduction: str | None = None
    latency: float | None = None
    bandwidth: float | None = None
    reduce_bytes_per_second: float = np.inf
    crossovers: bool = True


def collective(
    operation: str,
    algorithm: str,
    ranks: int | None,
    total_bytes: int | None,
    topology_text: str = "switch",
    options: CollectiveOptions = CollectiveOptions(),
) -> CollectiveReport:
    """Generate (or choose, or load), verify and simulate a collective operation; `meshwright collective` prints the
    report.

    operation: such as "all-reduce". algorithm: a name, `auto` (choose the fastest), or `@FILE` (load). ranks: number of
    ranks (None for a file). total_bytes: size of the full vector (None for a barrier). topology_text: network, such as
    `torus:4x4`. options: options of the algorithm, the operation and the network. Raises UserError for invalid
    arguments, ProgramError for an incorrect program.
    """
    root, reduction = options.root, options.reduction
    requested = AlgorithmOptions(options.segments, options.groups, options.dims)
    if operation not in OPERATIONS:
        raise UserError(unknown("operation", operation, OPERATIONS))
    if algorithm != "auto" and not algorithm.startswith("@"):
        find_generator(operation, algorithm)
    if total_bytes is None:
        if operation != "barrier":
            raise UserError(f"{operation}: the size of the vector is missing, such as --bytes 64MiB")
        total_bytes = 0
    program = None
    if algorithm.startswith("@"):
        program = _load_program(operation, algorithm, ranks, root, reduction)
        for option in ("segments", "groups", "dims"):
            if getattr(requested, option) is not None:
                raise UserError(f"{algorithm[1:]}: --{option} is for generated programs, not for files")
        ranks, root = program.ranks, program.root
    if ranks is None:
        raise UserError(f"{operation} {algorithm}: the number of ranks is missing, such as --ranks 8")
    most = MAX_RANKS_TO_CHOOSE_FOR if algorithm == "auto" else MAX_RANKS
    if ranks > most:
        raise UserError(
            f"{operation} {algorithm} on {ranks:,} ranks would take too long; at most {most:,} are accepted"
        )
    if reduction is not None and reduction not in REDUCTIONS:
        raise UserError(unknown("reduction", reduction, REDUCTIONS))
    if reduction not in (None, "sum") and operation not in REDUCING:
        raise UserError(f"{operation} reduces nothing; --reduction is for {', '.join(REDUCING)}")
    network = parse_topology(topology_text, ranks, options.latency, options.bandwidth)
    chooser = Chooser(operation, network, root or 0, options.reduce_bytes_per_second, requested)
    choice, settings, form = None, requested, None
    if algorithm == "auto":
        choice = chooser.choose(total_bytes)
        settings, form = choice.best.settings, choice.best.closed_form_seconds
        program = chooser.generate_program(choice.best.algorithm, choice.best.settings)
    elif program is None:
        name = ALGORITHM_ALIASES.get(operation, {}).get(algorithm, algorithm)
        fitting = chooser.resolve_settings(name)
        settings = replace(requested, groups=requested.groups or fitting.groups, dims=requested.dims or fitting.dims)
        program = generate(operation, name, ranks, root=root or 0, **asdict(settings))
        form = compute_closed_form_seconds(operation, name, network, total_bytes, **asdict(settings))
    if reduction is not None:
        program = replace(program, reduction=reduction)
    checked = check_collective(program)
    timing = simulate_collective(checked, network, total_bytes, options.reduce_bytes_per_second)
    found = None
    if options.crossovers and choice is not None and ranks <= _FEW_RANKS and operation != "barrier":
        found = Curves.simulate_promising(chooser).find_crossovers()
    return CollectiveReport(checked, settings, total_bytes, timing, form, chooser, choice, found)


def _load_program(
    operation: str, file: str, ranks: int | None, root: int | None, reduction: str | None
) -> CollectiveProgram:
    """Load a collective program from a file and check that it fits the request.

    file: path with leading `@`. ranks, root (source or destination rank), reduction ("sum", "mean", "minimum" or
    "maximum"): expected values, None: not checked. Raises UserError if the operation or an expected value differs.
    """
    program = load_program(file, "collective")
    if program.operation != operation:
        raise UserError(f"{file[1:]}: a program for {program.operation}, not for {operation}")
    given = {"ranks": (ranks, program.ranks), "root": (root, program.root), "reduction": (reduction, program.reduction)}
    for option, (wanted, has) in given.items():
        if wanted not in (None, has):
            raise UserError(f"{file[1:]}: its {option} is {has}; leave out --{option} {wanted}")
    return program
