"""Results of a probe: the hardware profile that `plan` reads, the JSON document, and the text for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.collectives.quantities import format_bytes
from meshwright.planner.hardware.devices import find_device
from meshwright.planner.hardware.measured import Curve, Measured, read_measured
from meshwright.probe.compare import THRESHOLD, SlowRank
from meshwright.terminal import format_table
from meshwright.toml import format_toml, format_toml_value

_TERA, _GIGA = 1e12, 1e9
_DIGITS = 4  # significant digits; more would be noise


def make_cluster_tables(found: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Build the hardware profile, which the planner reads, as TOML tables {name: table}. found: result of
    `probe.ranks.probe`. device: "cpu" or "cuda"."""
    measured = read_measured(found["measured"], "probe")
    hosts: list[str] = found["hosts"]
    per_node = measured.ranks
    name = f"{hosts[0]}: {len(hosts)} x {found['device']['name']}"
    tables: dict[str, Any] = {
        "name": name,
        "devices": len(hosts),
        "devices_per_node": per_node,
        **_make_link(measured, "inside", "inside"),
        **_make_link(measured, "across", "across"),
        "device": _make_device_table(measured, found["device"], device),
        "measured": _round_floats(found["measured"]),
    }
    return tables


def _make_device_table(measured: Measured, reported: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Build the table `device` of the hardware profile. A GPU in the project's device catalogue gets its name in the
    catalogue and the reported memory. Any other device gets the reported name and memory, and the measured rates.

    measured: measured speeds. reported: {"name", "memory_bytes"} of the device. device: "cpu" or "cuda"."""
    known = find_device(reported["name"]) if device == "cuda" else None
    if known is not None:
        return {"like": known.name, "memory_bytes": reported["memory_bytes"]}
    peaks = {precision: _round_floats(rate / _TERA) for precision, rate in find_best_product_rates(measured).items()}
    return {
        "name": reported["name"],
        "memory_bytes": reported["memory_bytes"],
        "memory_gb_per_second": _round_floats((find_copy_rate(measured) or 0.0) / _GIGA),
        "peaks": peaks,
    }


def find_best_product_rates(measured: Measured, ranks: int | None = None) -> dict[str, float]:
    """Return {precision: highest FLOP/s of one rank in matrix products}. ranks: number of ranks that computed at once
    on a host (None: `measured.ranks`)."""
    wanted = measured.ranks if ranks is None else ranks
    rates: dict[str, float] = {}
    for each in measured.products:
        if each.ranks == wanted and each.threads == measured.threads:
            best = max(
                2.0 * tokens * out * inner / seconds
                for (tokens, out, inner), seconds in zip(each.shapes, each.seconds, strict=True)
            )
            rates[each.precision] = max(best, rates.get(each.precision, 0.0))
    return rates


def find_copy_rate(measured: Measured, ranks: int | None = None) -> float | None:
    """Return the memory bandwidth of one rank in bytes per second (read plus written), from copies of the largest
    measured tensor; None if no copy was measured. ranks: number of ranks that copied at once on a host (None:
    `measured.ranks`)."""
    wanted = (measured.ranks if ranks is None else ranks, measured.threads)
    for each in measured.passes:
        if (each.name, each.precision) == ("copy", "fp32") and (each.ranks, each.threads) == wanted:
            return each.curve.sizes[-1] / each.curve.seconds[-1]
    return None


def _make_link(measured: Measured, which: str, place: str) -> dict[str, float]:
    """Return the bandwidth and latency between two ranks, from timed messages, in the form of a hardware profile:
    {"<which>_gb_per_second": 10^9 bytes per second, "<which>_latency_seconds": seconds}; {} if no messages were timed.

    measured: measured speeds. which: name of the link, with which the keys begin. place: "inside" for messages between
    ranks of one host, "across" for ranks of different hosts."""
    pairs = [each for each in measured.collectives if (each.operation, each.place) == ("send-receive", place)]
    if not pairs:
        return {}
    curve = min(pairs, key=lambda each: each.ranks).curve
    bandwidth, latency = fit_link(curve)
    return {
        f"{which}_gb_per_second": _round_floats(bandwidth / _GIGA),
        f"{which}_latency_seconds": _round_floats(latency),
    }


def fit_link(curve: Curve) -> tuple[float, float]:
    """Estimate bandwidth and latency of a link from timed messages; return (bytes per second, seconds). The latency is
    the shortest time of any message. The bandwidth is the size of the largest message divided by its time less the
    latency. curve: seconds over message bytes."""
    latency = min(curve.seconds)
    beyond = max(curve.seconds[-1] - latency, 0.05 * curve.seconds[-1])
    return curve.sizes[-1] / beyond, latency


def format_cluster_file(tables: Mapping[str, Any], head: Sequence[str]) -> str:
    """Format the hardware profile as TOML text. tables: its TOML tables. head: comment lines above them."""
    plain = {key: value for key, value in tables.items() if key != "measured"}
    measured = tables["measured"]
    lists = {key: value for key, value in measured.items() if isinstance(value, list)}
    rest = {key: value for key, value in measured.items() if key not in lists}
    lines = [f"# {line}" for line in head]
    lines += ["", format_toml({**plain, "measured": rest}).rstrip("\n")]
    for key, entries in lists.items():
        for entry in entries:
            lines += ["", f"[[measured.{key}]]"]
            lines += [f"{name} = {format_toml_value(value)}" for name, value in entry.items()]
    return "\n".join(lines) + "\n"


def _round_floats(value: Any) -> Any:
    """Round all floats in a JSON value to `_DIGITS` significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if value != int(value) else value
    if isinstance(value, Mapping):
        return {key: _round_floats(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_round_floats(item) for item in value]
    return value


def make_document(found: Mapping[str, Any], tables: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Build the JSON document of `meshwright probe --json`. found: result of `probe.ranks.probe`. tables: TOML tables
    of the hardware profile. path: file to which the hardware profile was written."""
    return {
        "cluster_file": path,
        **tables,
        "hosts": found["hosts"],
        "ratios": found["ratios"],
        "threshold": THRESHOLD,
        "slow": [{**each, "line": SlowRank(**each).line} for each in found["slow"]],
        "failed": found["failed"] and {**found["failed"], "line": format_failure(found)},
        "seconds": found["seconds"],
    }


def format_failure(found: Mapping[str, Any]) -> str:
    """Format the error that ended the timing of training steps of a small reference model, as one line: rank, host and
    error. found: result of `probe.ranks.probe`, which has such an error."""
    rank, line = found["failed"]["rank"], found["failed"]["line"]
    return (
        f"training steps of the reference model failed on rank {rank} (on {found['hosts'][rank]}), so predicted times "
        f"will be less accurate; everything else was measured: {line}"
    )


def format_summary(found: Mapping[str, Any], path: str) -> str:
    """Format the measured rates as text for the terminal, one line for each quantity, then warnings. found: result of
    `probe.ranks.probe`. path: file to which the hardware profile was written."""
    measured = read_measured(found["measured"], "probe")
    ranks, threads = measured.ranks, measured.threads
    hosts = len(set(found["hosts"]))
    across = f" on each of {hosts} hosts" if hosts > 1 else ""
    each = "" if measured.backend == "nccl" or not measured.threads else f" of {threads} thread{'s' * (threads > 1)}"
    rows = [("device", f"{found['device']['name']}, {found['device']['memory_bytes'] / 2**30:.1f} GiB per rank")]
    rows.append(("ranks", f"{ranks}{each}{across}, {measured.backend}"))
    alone = find_best_product_rates(measured, 1)
    for precision, rate in find_best_product_rates(measured).items():
        line = f"{_format_flops(rate)} per rank"
        if ranks > 1 and precision in alone:
            line += f" with all ranks busy; {_format_flops(alone[precision])} alone"
        rows.append((f"matmul {precision}", line))
    copying, copying_alone = find_copy_rate(measured), find_copy_rate(measured, 1)
    if copying is not None:
        line = f"{copying / _GIGA:.1f} GB/s per rank"
        if ranks > 1 and copying_alone is not None:
            line += f" with all ranks busy; {copying_alone / _GIGA:.1f} GB/s alone"
        rows.append(("memory", line))
    for copy in measured.copies:
        rate = copy.curve.sizes[-1] / copy.curve.seconds[-1]
        rows.append((copy.name.replace("-", " "), f"{rate / _GIGA:.1f} GB/s"))
    for each_collective in measured.collectives:
        curve = each_collective.curve
        where = f" {each_collective.place}" if hosts > 1 else ""
        named = f"{each_collective.operation} {each_collective.ranks}{where}"
        small, large = curve.seconds[0], curve.sizes[-1] / curve.seconds[-1] / _GIGA
        rows.append(
            (
                named,
                f"{small * 1e6:.0f} µs at {format_bytes(curve.sizes[0])}, "
                f"{large:.2f} GB/s at {format_bytes(curve.sizes[-1])}",
            )
        )
    if measured.steps:
        rows.append(("steps", ", ".join(f"{each.layout} {_format_seconds(each.seconds)}" for each in measured.steps)))
    if measured.disk_write is not None and measured.disk_read is not None:
        rows.append(
            ("disk", f"{measured.disk_write / _GIGA:.2f} GB/s written, {measured.disk_read / _GIGA:.2f} GB/s read")
        )
    if measured.disturbed is not None:
        rows.append(("other load", f"a rank waited for a core {measured.disturbed:.0%} of the time; probe again"))
    starts = dict(measured.starts)
    rows.append(
        ("start-up", ", ".join(f"{name.replace('_', ' ')} {_format_seconds(value)}" for name, value in starts.items()))
    )
    if len(found["hosts"]) > 1 and found["ratios"]:
        worst = {what: max(range(len(by)), key=by.__getitem__) for what, by in found["ratios"].items()}
        ratios = [f"{what}: rank {at} at {found['ratios'][what][at]:.2f}" for what, at in worst.items()]
        rows.append(("slowest", f"{', '.join(ratios)} times the others (reported above {THRESHOLD:g})"))
    lines = format_table(rows, right=(False, False))
    lines += [f"warning: {SlowRank(**each).line}" for each in found["slow"]]
    if found["failed"]:
        lines.append(f"warning: {format_failure(found)}")
    lines.append(f"cluster file: {path} (measured in {found['seconds']:.0f} s); `--cluster this` reads it")
    return "\n".join(lines)


def _format_flops(rate: float) -> str:
    """Format a rate given in FLOP/s as GFLOP/s or TFLOP/s."""
    return f"{rate / _TERA:.1f} TFLOP/s" if rate >= _TERA else f"{rate / _GIGA:.1f} GFLOP/s"


def _format_seconds(value: float) -> str:
    """Format a duration `value` in seconds as text in s, ms or µs, whichever suits its size."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"
