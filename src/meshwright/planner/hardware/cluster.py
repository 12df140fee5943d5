"""Cluster: a number of devices of a kind, in nodes, and the links inside and between nodes.

cluster("64xh100-sxm")      64 devices in nodes of 8
cluster("2x8xa100-80")      2 nodes of 8
cluster("cluster.toml")     a file: the fields below, or what `meshwright probe` writes
cluster("this")             what `meshwright probe`, else the first start of a run, has measured of this machine
cluster({"device": "h100-sxm", "devices": 64, "across_gb_per_second": 25})
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshwright.errors import UserError
from meshwright.limits import get_limit, make_limit_error, shorten, shorten_repr
from meshwright.names import LISTED, PRECISIONS, refuse_unknown, unknown
from meshwright.planner.hardware.calibration import Calibration, read_calibration
from meshwright.planner.hardware.devices import DEVICES, GIGA, TERA, Device, Link, find_device
from meshwright.planner.hardware.machine_profile import profiles_here
from meshwright.planner.hardware.measured import Measured, read_measured
from meshwright.planner.hardware.values import read_count, read_number, read_text
from meshwright.toml import read_toml

_FASTEST = 1e6
"""Upper limit of plausible rates, in 10¹² operations or bytes a second."""
FIELDS = (
    *("name", "device", "devices", "devices_per_node", "inside_gb_per_second", "across_gb_per_second"),
    *("inside_latency_seconds", "across_latency_seconds", "measured", "calibration"),
)
DEVICE_FIELDS = ("like", "name", "memory_bytes", "memory_gb_per_second", "peaks", "power_watts")
"""Keys of a device that a cluster file describes itself; `like`: catalogue device whose figures are the defaults."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices of one kind in nodes, and the links between them.

    Attributes:
        name: Such as "64xh100-sxm".
        device: Peaks and memory of each device.
        devices: Number of devices in all nodes.
        devices_per_node: Number of devices in a node (a scale-up domain, which may span machines).
        inside: Link within a node.
        across: Link between nodes.
        measured: Speeds measured by `meshwright probe`; None: the device catalogue's speeds are used.
        calibration: Ratios of measured to predicted time and memory of finished runs; None: no runs were compared.
    """

    name: str
    device: Device
    devices: int
    devices_per_node: int
    inside: Link
    across: Link
    measured: Measured | None = None
    calibration: Calibration | None = None

    def peak(self, precision: str) -> float:
        """Return the dense peak of one device in FLOP/s. precision: such as "bf16". Raises `UserError` for a precision
        that is unknown or that the device lacks."""
        if precision not in PRECISIONS:
            raise UserError(unknown("precision", precision, PRECISIONS))
        peak = self.device.peak(precision)
        if peak is None:
            has = [name for name in PRECISIONS if self.device.peak(name) is not None]
            raise UserError(f"{self.device.name} has no known peak for {precision}; it has {', '.join(has)}")
        return peak

    @property
    def kind(self) -> str:
        """torch's device type: "cpu" where `meshwright probe` measured processors, else "cuda"."""
        found = self.measured
        return "cpu" if found is not None and found.backend != "nccl" and not found.copies else "cuda"

    @property
    def time_factor(self) -> float:
        """Calibration factor on predicted seconds; 1 without calibration."""
        return 1.0 if self.calibration is None else self.calibration.time_factor

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.devices // self.devices_per_node


def this_machine() -> Path:
    """Return the path of this machine's cluster file, which `meshwright probe` writes: in $XDG_CONFIG_HOME, else
    ~/.config."""
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "meshwright" / "cluster.toml"


def cluster(wanted: str | Mapping[str, Any], where: str = "cluster") -> Cluster:
    """Return the cluster that `wanted` describes: a shorthand such as "64xh100-sxm", the path of a cluster file, "this"
    (this machine, as measured by `meshwright probe`), or a mapping with `FIELDS` as keys.

    Bandwidths in a mapping are in 10⁹ bytes a second, one direction, per device; missing fields are taken from the
    device catalogue. where: name of the argument or file, with which the text of a `UserError` begins.
    """
    if isinstance(wanted, Mapping):
        return _from_mapping(wanted, where)
    if not isinstance(wanted, str):
        raise UserError(f"{where}: should be text such as 64xh100-sxm or a table, not {shorten_repr(wanted)}")
    text = wanted.strip()
    if text.lower() == "this":
        path = this_machine()
        if not path.exists():
            for kept, tables in profiles_here():
                with suppress(UserError):  # a damaged one is as good as none
                    return _from_mapping(tables, str(kept))
            raise UserError(
                f'{where} "this": no hardware profile of this machine ({path}); run "meshwright probe", or '
                '"meshwright train" without --no-probe'
            )
        return _from_mapping(read_toml(path, "cluster file"), str(path))
    if text.endswith(".toml") or "/" in text or _is_file(text):
        path = Path(text).expanduser()
        return _from_mapping(read_toml(path, "cluster file"), str(path))
    return _from_shorthand(text, where)


_COUNT = r"[-+.0-9][-+.0-9e]*"  # of which only whole numbers above 0 are right
_EXAMPLES = "64xh100-sxm, 2x8xa100-80 (nodes x devices), a cluster file, or this"


def _is_file(text: str) -> bool:
    """Return True if text names an existing file; False also for text that cannot be a path."""
    with suppress(OSError, ValueError):
        return Path(text).is_file()
    return False


def _from_shorthand(text: str, where: str) -> Cluster:
    """Parse text such as 64xh100-sxm or 2x8xa100-80 (nodes x devices per node) into a cluster. Raises `UserError`,
    whose text begins with `where`, for invalid text."""
    where = f'{where} "{shorten(text)}"'
    match = re.fullmatch(rf"\s*({_COUNT})\s*x\s*(?:({_COUNT})\s*x\s*)?([a-z][a-z0-9-]*)\s*", text.lower())
    if match is None:
        known = find_device(text.lower())
        hint = f"; such as 8x{known.name}" if known else f"; such as {_EXAMPLES}"
        if known is None and re.fullmatch(r"[a-z][a-z0-9-]*", text.lower()):
            hint = f"; {_unknown_device(text)}"
        raise UserError(f"{where} is not a number and kind of devices{hint}")
    counts = [_whole(part, where) for part in match.groups()[:2] if part is not None]
    table: dict[str, Any] = {"device": _catalogued(match[3], where).name, "devices": math.prod(counts)}
    if len(counts) == 2:
        table["devices_per_node"] = counts[1]
    return replace(_from_mapping(table, where), name=text.lower())


def _whole(part: str, where: str) -> int:
    """Parse a number in a shorthand such as 64xh100-sxm. part: its text, such as "64". Raises `UserError`, whose text
    begins with `where`, for a number that is not whole or too large."""
    if not re.fullmatch("[0-9]{1,9}", part) or int(part) < 1:
        right = f"a whole number, at least 1 and at most {get_limit('ranks'):,}"
        raise UserError(f'{where}: "{shorten(part)}" devices; it takes {right}')
    return int(part)


def _catalogued(name: Any, where: str) -> Device:
    """Return the device with a catalogue name, such as "h100-sxm", or a driver's name, such as "NVIDIA H100 80GB HBM3".
    Raises `UserError`, whose text begins with `where`, for an unknown name."""
    if not isinstance(name, str):
        raise UserError(f"{where}: device should be a name such as h100-sxm or a table, not {shorten_repr(name)}")
    if re.fullmatch(r"cpus?|processors?|cores?", name.strip().lower()):
        raise UserError(
            f"{where}: CPUs are not in the catalogue; run `meshwright probe` on the machine, then use the cluster this"
        )
    device = find_device(name.strip())
    if device is None:
        raise UserError(f"{where}: {_unknown_device(name)}")
    return device


def _unknown_device(name: str) -> str:
    """Return the error text for an unknown device name, with the catalogue's names that begin with it, else the most
    similar ones."""
    known = [device.name for device in DEVICES]
    begun = [each for each in known if each.startswith(f"{name.strip().lower()}-")]
    if begun:
        return f'unknown device "{name}"; did you mean {" or ".join(begun)}?'
    return unknown("device", name, known, LISTED)


def _from_mapping(table: Mapping[str, Any], where: str) -> Cluster:
    """Return the cluster described by a table with `FIELDS` as keys. Raises `UserError`, whose text begins with
    `where`, for an invalid table."""
    refuse_unknown(table, FIELDS, where)
    for key in ("device", "devices"):
        if key not in table:
            raise UserError(f"{where}: {key} is missing; device and devices are required, such as h100-sxm and 64")
    device = (_described if isinstance(table["device"], Mapping) else _catalogued)(table["device"], where)
    devices = _count(table, "devices", where)
    size = _count(table, "devices_per_node", where) if "devices_per_node" in table else _node_size(device, devices)
    size = min(size, devices)
    if size == 4 and isinstance(table["device"], str):  # superchips in nodes of four share power and links
        device = next((each for each in DEVICES if each.name == f"{device.name}-quad"), device)
    if devices % size:
        right = " or ".join(str(each) for each in (devices // size * size, -(-devices // size) * size) if each)
        fits = next(each for each in range(size, 0, -1) if devices % each == 0)
        another = f", or nodes of another size ({devices // fits}x{fits})" if fits > 1 else ""
        raise UserError(f"{where}: {devices} devices do not fill nodes of {size}; choose {right}{another}")
    published = _published_links(device, size)
    inside = _link(published["inside"], "inside", table, where, needed=size > 1)
    across = _link(published["across"], "across", table, where, needed=devices > size)
    inside = inside or across or Link(math.inf, 0.0)  # a device alone
    measured = read_measured(table["measured"], where) if "measured" in table else None
    calibration = read_calibration(table["calibration"], where) if "calibration" in table else None
    name = read_text(table.get("name", f"{devices}x{device.name}"), f"{where}: name")
    return Cluster(name, device, devices, size, inside, across or inside, measured, calibration)


def _node_size(device: Device, devices: int) -> int:
    """Return the number of devices per node in a cluster of `devices` devices: the larger of the device's usual node
    and its scale-up domain. If a job does not fill whole domains, it uses the largest multiple of a usual node (a tray)
    that divides `devices`, such as 64 of 72 for 128 GB200."""
    if device.links is None:
        return devices
    tray, domain = device.links.node, device.links.domain
    if domain <= tray or devices <= domain or devices % domain == 0:
        return max(tray, domain)
    return max((size for size in range(tray, domain, tray) if devices % size == 0), default=domain)


def _published_links(device: Device, size: int) -> dict[str, Link | None]:
    """Return the catalogue's links {"inside": within a node of `size` devices, "across": between nodes}; None where it
    has none.

    Inside, the link is the scale-up link, such as NVLink. It is PCIe if the scale-up domain has fewer than `size`
    devices. In a full mesh, where each pair of devices has a separate wire, the bandwidth is at most that of `size` - 1
    wires."""
    links = device.links
    if links is None:
        return {"inside": None, "across": None}
    if size > links.domain or not links.scaleup.bandwidth:
        assert links.host is not None, device.name
        return {"inside": links.host, "across": links.across}
    bandwidth = min(max(links.scaleup.bandwidth, links.pair), links.pair * max(1, size - 1))
    return {"inside": Link(bandwidth, links.scaleup.latency), "across": links.across}


def _link(published: Link | None, which: str, table: Mapping[str, Any], where: str, needed: bool) -> Link | None:
    """Return a link whose bandwidth and latency are those of a cluster file, as far as the file has them, else the
    catalogue's. If the bandwidth is unknown, return None, or raise `UserError` if `needed`.

    published: the catalogue's link; None: unknown. which: "inside" or "across" nodes, the prefix of the file's keys;
    table: content of the file; where: beginning of the error text."""
    found = {} if published is None else {"bandwidth": published.bandwidth, "latency": published.latency}
    for field, key, unit in (
        ("bandwidth", f"{which}_gb_per_second", GIGA), ("latency", f"{which}_latency_seconds", 1.0),
    ):  # fmt: skip
        if key in table:
            found[field] = read_number(table[key], f"{where}: {key}") * unit
        elif field == "bandwidth" and field not in found and needed:
            raise UserError(f"{where}: {key} is missing, and no published figure is known")
    return Link(found["bandwidth"], found.get("latency", 0.0)) if "bandwidth" in found else None


def _described(table: Mapping[str, Any], where: str) -> Device:
    """Return the device described by the `device` table of a cluster file (keys `DEVICE_FIELDS`). Raises `UserError`,
    whose text begins with `where`, for an invalid table."""
    where = f"{where}: device"
    refuse_unknown(table, DEVICE_FIELDS, where)
    figures: dict[str, Any] = {
        field: _read_figure(table[key], f"{where}: {key}", unit) * unit
        for key, field, unit in (
            ("memory_bytes", "memory_bytes", 1.0), ("memory_gb_per_second", "memory_bandwidth", GIGA),
            ("power_watts", "power_watts", 1.0),
        )
        if key in table
    }  # fmt: skip
    peaks = table.get("peaks", {})
    if not isinstance(peaks, Mapping):
        raise UserError(f"{where}: peaks should be a table such as {{ bf16 = 989 }}, 10^12 operations per second")
    refuse_unknown(peaks, PRECISIONS, f"{where}: peaks", "precision")
    rates = {name: _read_figure(peak, f"{where}: peaks.{name}", TERA) for name, peak in peaks.items()}
    if "like" in table:
        base = _catalogued(table["like"], where)
        return replace(base, **figures, peaks={**base.peaks, **rates})
    for key in ("name", "memory_bytes", "memory_gb_per_second", "peaks"):
        if key not in table:
            raise UserError(f"{where}: {key} is missing; give it, or like = a name from the catalogue")
    return Device(read_text(table["name"], f"{where}: name"), rates, **figures)


def _read_figure(value: Any, name: str, unit: float) -> float:
    """Return a figure of a device from a cluster file. Raises `UserError` unless it is a number above 0, and if a rate
    is so large that it must be in plain operations or bytes a second.

    value: the figure, in multiples of `unit`, which is 1e12 (operations) or 1e9 (bytes) for rates; name: its key, with
    which the error begins."""
    number = read_number(value, name)
    if unit > 1 and number >= _FASTEST * 1e12 / unit:
        what = "10^12 operations" if unit == TERA else "10^9 bytes"
        meant = f"did you mean {number / unit:g}?"
        raise UserError(f"{name} is in {what} per second; {number:g} is too large, {meant}")
    return number


def _count(table: Mapping[str, Any], key: str, where: str) -> int:
    """Return a number of devices from a table. key: its name in the table; where: beginning of the error text. Raises
    `UserError` unless it is a whole number from 1 to the limit."""
    value = read_count(table[key], f"{where}: {key}")
    if problem := make_limit_error("ranks", value, key):
        raise UserError(f"{where}: {problem}")
    return value
