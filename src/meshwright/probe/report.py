"""What a probe found, as the cluster file that `plan` reads, as a document and as text for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.planner.devices import find_device
from meshwright.planner.measured import Curve, Measured, read
from meshwright.probe.compare import THRESHOLD, Slow
from meshwright.toml import format_toml, format_toml_value

_TERA, _GIGA = 1e12, 1e9
_DIGITS = 4  # more would be noise


def cluster_tables(found: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The tables of the cluster file, from what `rank.measure` returned; `device`: "cpu" or "cuda"."""
    measured = read(found["measured"], "probe")
    hosts: list[str] = found["hosts"]
    per_node = measured.ranks
    name = f"{hosts[0]}: {len(hosts)} x {found['device']['name']}"
    tables: dict[str, Any] = {
        "name": name,
        "devices": len(hosts),
        "devices_per_node": per_node,
        **_link(measured, "inside", "inside"),
        **_link(measured, "across", "across"),
        "device": _device(measured, found["device"], device),
        "measured": _rounded(found["measured"]),
    }
    return tables


def _device(measured: Measured, said: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The catalogue's device with the memory that it has here, or what was measured of one that is in no catalogue."""
    known = find_device(said["name"]) if device == "cuda" else None
    if known is not None:
        return {"like": known.name, "memory_bytes": said["memory_bytes"]}
    peaks = {precision: _rounded(rate / _TERA) for precision, rate in product_rates(measured).items()}
    return {
        "name": said["name"],
        "memory_bytes": said["memory_bytes"],
        "memory_gb_per_second": _rounded((pass_rate(measured) or 0.0) / _GIGA),
        "peaks": peaks,
    }


def product_rates(measured: Measured, ranks: int | None = None) -> dict[str, float]:
    """Best FLOP/s of one rank by precision, while all (or so many) computed at once."""
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


def pass_rate(measured: Measured, ranks: int | None = None) -> float | None:
    """Bytes a second of one rank that copies the largest tensor, while all (or so many) do; None if not measured."""
    wanted = (measured.ranks if ranks is None else ranks, measured.threads)
    for each in measured.passes:
        if (each.name, each.precision) == ("copy", "fp32") and (each.ranks, each.threads) == wanted:
            return each.curve.sizes[-1] / each.curve.seconds[-1]
    return None


def _link(measured: Measured, which: str, place: str) -> dict[str, float]:
    """Bandwidth and latency of a link, from messages between two ranks; nothing where there are none."""
    pairs = [each for each in measured.collectives if (each.operation, each.place) == ("send-receive", place)]
    if not pairs:
        return {}
    curve = min(pairs, key=lambda each: each.ranks).curve
    bandwidth, latency = rate_and_latency(curve)
    return {f"{which}_gb_per_second": _rounded(bandwidth / _GIGA), f"{which}_latency_seconds": _rounded(latency)}


def rate_and_latency(curve: Curve) -> tuple[float, float]:
    """Bytes a second at the largest size beyond the time of the smallest, which is the latency."""
    latency = min(curve.seconds)
    beyond = max(curve.seconds[-1] - latency, 0.05 * curve.seconds[-1])
    return curve.sizes[-1] / beyond, latency


def write_cluster_file(tables: Mapping[str, Any], head: Sequence[str]) -> str:
    """The text of the cluster file: `head` as comments, then the tables, lists of tables one by one."""
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


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if value != int(value) else value
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value


def document(found: Mapping[str, Any], tables: Mapping[str, Any], path: str) -> dict[str, Any]:
    """What --json prints."""
    return {
        "cluster_file": path,
        **tables,
        "hosts": found["hosts"],
        "ratios": found["ratios"],
        "threshold": THRESHOLD,
        "slow": [{**each, "line": Slow(**each).line} for each in found["slow"]],
        "failed": found["failed"] and {**found["failed"], "line": failed_line(found)},
        "seconds": found["seconds"],
    }


def failed_line(found: Mapping[str, Any]) -> str:
    """Of a rank on which the training steps of the reference model failed."""
    rank, line = found["failed"]["rank"], found["failed"]["line"]
    return (
        f"training steps of the reference model failed on rank {rank} (on {found['hosts'][rank]}), and predicted times "
        f"will be less sure; all else was measured: {line}"
    )


def summary(found: Mapping[str, Any], tables: Mapping[str, Any], path: str) -> str:
    """What a person reads."""
    measured = read(found["measured"], "probe")
    ranks, threads = measured.ranks, measured.threads
    hosts = len(set(found["hosts"]))
    across = f" on each of {hosts} hosts" if hosts > 1 else ""
    each = "" if measured.backend == "nccl" or not measured.threads else f" of {threads} thread{'s' * (threads > 1)}"
    rows = [("device", f"{found['device']['name']}, {found['device']['memory_bytes'] / 2**30:.1f} GiB a rank")]
    rows.append(("ranks", f"{ranks}{each}{across}, {measured.backend}"))
    alone = product_rates(measured, 1)
    for precision, rate in product_rates(measured).items():
        line = f"{_flops(rate)} a rank"
        if ranks > 1 and precision in alone:
            line += f", all at once; {_flops(alone[precision])} alone"
        rows.append((f"products {precision}", line))
    copying, copying_alone = pass_rate(measured), pass_rate(measured, 1)
    if copying is not None:
        line = f"{copying / _GIGA:.1f} GB/s a rank"
        if ranks > 1 and copying_alone is not None:
            line += f", all at once; {copying_alone / _GIGA:.1f} GB/s alone"
        rows.append(("memory", line))
    for name, curve in measured.copies:
        rows.append((name.replace("-", " "), f"{curve.sizes[-1] / curve.seconds[-1] / _GIGA:.1f} GB/s"))
    for each_collective in measured.collectives:
        curve = each_collective.curve
        where = f" {each_collective.place}" if hosts > 1 else ""
        named = f"{each_collective.operation} {each_collective.ranks}{where}"
        small, large = curve.seconds[0], curve.sizes[-1] / curve.seconds[-1] / _GIGA
        rows.append(
            (named, f"{small * 1e6:.0f} µs at {_bytes(curve.sizes[0])}, {large:.2f} GB/s at {_bytes(curve.sizes[-1])}")
        )
    if measured.steps:
        rows.append(("steps", ", ".join(f"{each.layout} {_seconds(each.seconds)}" for each in measured.steps)))
    if measured.disk_write is not None and measured.disk_read is not None:
        rows.append(
            ("disk", f"{measured.disk_write / _GIGA:.2f} GB/s written, {measured.disk_read / _GIGA:.2f} GB/s read")
        )
    starts = dict(measured.starts)
    rows.append(
        ("starting", ", ".join(f"{name.replace('_', ' ')} {_seconds(value)}" for name, value in starts.items()))
    )
    if len(found["hosts"]) > 1 and found["ratios"]:
        worst = {what: max(range(len(by)), key=by.__getitem__) for what, by in found["ratios"].items()}
        said = [f"{what}: rank {at} at {found['ratios'][what][at]:.2f}" for what, at in worst.items()]
        rows.append(("slowest", f"{', '.join(said)} times the others (named above {THRESHOLD:g})"))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    lines += [f"warning: {Slow(**each).line}" for each in found["slow"]]
    if found["failed"]:
        lines.append(f"warning: {failed_line(found)}")
    lines.append(f"cluster file: {path} (in {found['seconds']:.0f} s); `--cluster this` reads it")
    return "\n".join(lines)


def _flops(rate: float) -> str:
    return f"{rate / _TERA:.1f} TFLOP/s" if rate >= _TERA else f"{rate / _GIGA:.1f} GFLOP/s"


def _bytes(size: float) -> str:
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:g} {unit}"
    return f"{size:g} B"


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"
