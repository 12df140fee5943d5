"""`meshwright.collective`: a collective operation, checked, timed and run, as `meshwright collective` reports it. Free
of torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TypedDict, Unpack

from meshwright.collectives import report
from meshwright.collectives.quantities import parse_bytes
from meshwright.collectives.report import CollectiveReport
from meshwright.names import check_options


class CollectiveOptions(TypedDict, total=False):
    """Options of `collective`, all optional.

    Attributes:
        root: Source rank of a broadcast or scatter, destination rank of a reduce or gather; default 0.
        segments: Number of segments into which a pipelined algorithm cuts the vector.
        groups: Number of ranks per node, for hierarchical algorithms.
        dims: Sides of the grid, for tori and meshes, such as `(4, 4)`.
        reduction: `"sum"`, `"mean"`, `"minimum"` or `"maximum"`; default sum.
        latency: Latency in seconds of links for which the topology gives no latency; default 5e-6.
        bandwidth: Bytes per second, each direction, of links for which the topology gives no bandwidth; default 25e9.
        reduce_bytes_per_second: Rate in bytes per second at which a rank reduces received data; default infinite.
        crossovers: With `"auto"` on few ranks: also find the vector sizes at which the fastest algorithm changes;
            default True.
    """

    root: int | None
    segments: int | None
    groups: int | None
    dims: tuple[int, ...] | None
    reduction: str | None
    latency: float | None
    bandwidth: float | None
    reduce_bytes_per_second: float
    crossovers: bool


def collective(
    operation: str, algorithm: str, ranks: int | None = None, bytes: int | str | None = None, *,
    topology: str = "switch", run: bool = False, **options: Unpack[CollectiveOptions],
) -> CollectiveReport:  # fmt: skip
    """Generate, choose or read a program of a collective operation; return it checked, with its simulated times.

    Args:
        operation: Operation such as `"all-reduce"` or `"all-gather"`.
        algorithm: Name of an algorithm, `"auto"` for the fastest, or `"@FILE"` to read a program from a file.
        ranks: Number of ranks; None only with `"@FILE"`, where the program of the file has it.
        bytes: Size of the full vector in bytes, a number or text such as `"64MiB"`; None only for a barrier.
        topology: Network, such as `"switch"`, `"torus:4x4"`, `"nodes:2x8,rails"`.
        run: Run the program on processes of this machine, and compare it with the call of torch.distributed.
        **options: Fields of `CollectiveOptions`.

    Returns:
        The checked program and its times in seconds: `report.timing.seconds`, `.lower_bound_seconds`, `.measured`.

    Raises:
        UserError: A name is unknown, or a number is out of range.
        ProgramError: The program of a file is wrong: rank, step and reason.
        CheckFailed: The results of a run differ from torch.distributed's.

    Examples:
        >>> import meshwright as mw
        >>> report = mw.collective("all-reduce", "ring", ranks=8, bytes="64MiB")
        >>> report.checked.rounds, int(report.timing.bytes_sent[0]) == 2 * 7 * 64 * 2**20 // 8
        (14, True)
        >>> mw.collective("all-reduce", "auto", ranks=8, bytes="1KiB").choice.best.algorithm
        'butterfly'
    """
    check_options(collective, options, CollectiveOptions)
    total_bytes = parse_bytes(bytes, "bytes") if isinstance(bytes, str) else bytes
    found = report.collective(operation, algorithm, ranks, total_bytes, topology, report.CollectiveOptions(**options))
    if not run:
        return found
    from meshwright.comm.measure_program import measure

    return replace(found, measured=measure(found.checked, found.total_bytes))
