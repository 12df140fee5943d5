"""Worked examples of collectives: ring and tree all-reduce number by number, their crossover, two tiers of links."""

from __future__ import annotations

from math import log2

from meshwright.collectives.quantities import format_bytes, format_seconds
from meshwright.collectives.report import CollectiveOptions, CollectiveReport, collective
from meshwright.gallery.charts import draw_ring_all_reduce
from meshwright.gallery.execution import Round, check_program, execute, format_vector
from meshwright.gallery.explanation import ExampleWriter

VECTORS = [[scale * chunk for chunk in (1.0, 2.0, 3.0, 4.0)] for scale in (1, 10, 100, 1000)]
ALPHA, BANDWIDTH = 5e-6, 25e9  # seconds a message, bytes per second of a link


def explain_ring_all_reduce(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: the ring all-reduce of four ranks' vectors, number by
    number."""
    checked = check_program("all-reduce", "ring", 4)
    writer.add_text(
        "Rank 0 holds 1 2 3 4, rank 1 ten times that, rank 2 a hundred times, rank 3 a thousand times. In each "
        "round every rank sends one number to the next rank: three rounds add, three rounds copy the sums."
    )
    rounds = execute(checked, VECTORS)
    for number, one in enumerate(rounds):
        _show_round(writer, one, " (reduce-scatter)" if 0 < number < 4 else " (all-gather)" if number else "")
    writer.add_figure("ring-all-reduce", "Ring all-reduce on 4 ranks, round by round", draw_ring_all_reduce)
    sent = float(checked.bytes_sent(1.0).max())
    writer.add_text(
        f"{checked.rounds} = 2 (4 − 1) rounds; each rank sends {checked.rounds} of 4 chunks, {sent:g} = "
        f"2 (4 − 1)/4 of the vector. With N bytes, latency α and bandwidth B: 2 (n − 1) (α + N/(n B))."
    )
    writer.record_result("rounds", checked.rounds)
    writer.record_result("share of the vector sent", sent)
    writer.record_result("sum of chunk 0", rounds[-1].values[3, 0])


def explain_tree_all_reduce(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: the binomial-tree all-reduce of four ranks' vectors, number
    by number."""
    checked = check_program("all-reduce", "binomial-tree", 4)
    writer.add_text(
        "The whole vector is one chunk: ranks hold 1, 10, 100 and 1000. Pairs add up to rank 0, then the sum is "
        "copied down the same tree."
    )
    rounds = execute(checked, [vector[:1] for vector in VECTORS])
    for one in rounds:
        _show_round(writer, one)
    sent = checked.bytes_sent(1.0)
    writer.add_text(
        f"{checked.rounds} = 2 log₂ 4 rounds, each of the whole vector: {checked.rounds} (α + N/B), against "
        f"6 (α + N/(4 B)) of the ring. Ranks send {sent.min():g} to {sent.max():g} times the vector."
    )
    writer.record_result("rounds", checked.rounds)
    writer.record_result("most sent, vectors", float(sent.max()))
    writer.record_result("sum of chunk 0", rounds[-1].values[3, 0])


def _show_round(writer: ExampleWriter, one: Round, suffix: str = "") -> None:
    """Append to `writer` a table with every rank's vector after one round (sends that run at the same time) of a
    collective program.

    one: the round. suffix: text added to the table's title.
    """
    into = {arrow.target: arrow for arrow in one.arrows}
    rows = []
    for rank, values in enumerate(one.values):
        arrow = into.get(rank)
        said = f"{'adds' if arrow.adds else 'takes'} chunk {arrow.slot} of rank {arrow.source}" if arrow else ""
        rows.append((f"rank {rank}", format_vector(values), said))
    writer.add_table(f"{one.title.capitalize()}{suffix}:", ("", "vector", "in this round"), rows)


def explain_ring_tree_crossover(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: the vector size at which ring and tree all-reduce on 8 ranks
    take equally long, by closed form and by simulation."""
    n, beta = 8, 1 / BANDWIDTH
    levels = log2(n)
    size = (2 * (n - 1) - 2 * levels) * ALPHA / ((2 * levels - 2 * (n - 1) / n) * beta)
    writer.add_text(
        f"n = {n} ranks on a switch, α = {format_seconds(ALPHA)}, 1/β = {BANDWIDTH / 1e9:g} GB/s. "
        f"Ring: {2 * (n - 1)} α + {2 * (n - 1) / n:g} S β. Tree: {2 * levels:g} α + {2 * levels:g} S β."
    )
    writer.add_text(
        f"Equal at S = ({2 * (n - 1)} − {2 * levels:g}) α / (({2 * levels:g} − {2 * (n - 1) / n:g}) β) = "
        f"{size:,.0f} bytes ({format_bytes(size)})."
    )
    rows = []
    for bytes_ in (1024, 65536, round(size), 1 << 20, 1 << 26):
        ring, tree = (_simulate_all_reduce(algorithm, n, bytes_) for algorithm in ("ring", "binomial-tree"))
        seconds = ring.timing.seconds, tree.timing.seconds
        first = "equal" if bytes_ == round(size) else "ring" if seconds[0] < seconds[1] else "tree"
        rows.append((format_bytes(bytes_), *map(format_seconds, seconds), first))
        if bytes_ == round(size):
            writer.record_result("ring at the crossover, s", seconds[0])
            writer.record_result("tree at the crossover, s", seconds[1])
    writer.add_table("Both programs, simulated:", ("vector", "ring", "tree", "faster"), rows)
    writer.add_text(
        "Rabenseifner, 2 log₂ n α + 2 (n−1)/n S β, is never slower than either; for short vectors butterfly halves the "
        "rounds. `auto` ranks all algorithms."
    )
    writer.record_result("crossover, bytes", size)


def _simulate_all_reduce(algorithm: str, ranks: int, size: int, topology: str = "switch") -> CollectiveReport:
    """Simulate an all-reduce of a vector of `size` bytes on `ranks` ranks; return its report, which has the simulated
    time.

    algorithm: name such as "ring". topology: kind of network, such as "switch" or "nodes:2x4" (2 nodes of 4 ranks).
    Links have a latency of 5 µs and a bandwidth of 25 GB/s; links inside nodes keep the topology's defaults.
    """
    options = CollectiveOptions(latency=ALPHA, bandwidth=BANDWIDTH, crossovers=False)
    return collective("all-reduce", algorithm, ranks, size, topology, options)


def explain_hierarchical_all_reduce(writer: ExampleWriter) -> None:
    """Compute a worked example and append it to `writer`: a flat ring compared with the hierarchical all-reduce, on two
    nodes of four ranks."""
    size, nodes, each = 1 << 26, 2, 4
    reports = {
        name: _simulate_all_reduce(name, nodes * each, size, "nodes:2x4") for name in ("ring", "hierarchical-scatter")
    }
    network = reports["ring"].timing.network
    (alpha, fast), (far, slow) = network.tiers
    writer.add_text(
        f"{nodes} nodes of {each} ranks, a vector of {format_bytes(size)}; inside a node {format_seconds(alpha)} "
        f"and {fast / 1e9:g} GB/s a rank, between nodes {format_seconds(far)} and {slow / 1e9:g} GB/s."
    )
    share = size / each
    inside = (each - 1) * (alpha + share / fast)
    across = 2 * (nodes - 1) * (far + share / nodes / slow)
    writer.add_table(
        "Hierarchical, three phases:", ("phase", "rounds", "bytes of a rank", "time"),
        [("reduce-scatter in the node", each - 1, format_bytes((each - 1) * share), format_seconds(inside)),
         ("all-reduce of 1/4 across", 2 * (nodes - 1), format_bytes(share), format_seconds(across)),
         ("all-gather in the node", each - 1, format_bytes((each - 1) * share), format_seconds(inside))],
    )  # fmt: skip
    seconds = {name: report.timing.seconds for name, report in reports.items()}
    writer.add_text(
        f"Sum {format_seconds(2 * inside + across)}; the simulated program takes "
        f"{format_seconds(seconds['hierarchical-scatter'])}, a flat ring {format_seconds(seconds['ring'])}: "
        f"{seconds['ring'] / seconds['hierarchical-scatter']:.1f} times as long. In the ring the slow links carry "
        f"2 (8 − 1)/8 = 1.75 of the vector through one rank of each node; here 1/4 of it through each of four."
    )
    writer.record_result("phases, s", 2 * inside + across)
    writer.record_result("simulated, s", seconds["hierarchical-scatter"])
    writer.record_result("ring, s", seconds["ring"])
