"""Accelerators: published peaks (dense), memory and links, from the catalogue `devices.toml`, which has the sources."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from meshwright.toml import read_packaged_toml

GIGA, TERA = 1e9, 1e12

_CATALOGUE = read_packaged_toml("planner/hardware/devices.toml")


@dataclass(frozen=True, slots=True)
class Link:
    """Link between devices. bandwidth: bytes a second, in one direction, per device; latency: seconds of one
    message."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True)
class Links:
    """Interconnects of a device. None: not known.

    Attributes:
        scaleup: Link to all devices of the scale-up domain together.
        pair: Bandwidth to a single device of the domain in bytes a second, in one direction; less than that of
            `scaleup` in a full mesh, where each pair of devices has separate wires.
        domain: Number of devices of a scale-up domain.
        host: PCIe, which also leads to devices of the node outside the domain.
        node: Number of devices of a node.
        across: Link to other nodes.
    """

    scaleup: Link
    pair: float
    domain: int
    host: Link | None
    node: int
    across: Link | None


@dataclass(frozen=True, slots=True)
class Device:
    """Published and measured figures of an accelerator, an entry of the device catalogue. None: not in hardware, or
    unknown.

    Attributes:
        name: Catalogue name, such as "h100-sxm".
        peaks: Dense peaks in 10^12 operations a second by precision; a precision that is missing is not in hardware.
        memory_bytes: Bytes of memory that the driver reports.
        memory_bandwidth: Bytes a second.
        pattern: Regular expression for the names that drivers report (``torch.cuda.get_device_name``); None: found by
            its catalogue name only.
        architecture: Such as "Hopper".
        measured: Fastest measured matrix products in 10^12 operations a second, by precision.
        all_reduce_ring, all_reduce_switch: Bus bandwidth of a large all-reduce in a node, in bytes a second: in rings,
            and reduced in the switch.
        links: Interconnects; None for CPUs.
        power_watts: Thermal design power.
    """

    name: str
    peaks: Mapping[str, float] = field(hash=False)
    memory_bytes: float
    memory_bandwidth: float
    pattern: str | None = None
    architecture: str = ""
    measured: Mapping[str, float] = field(default_factory=dict, hash=False)
    all_reduce_ring: float | None = None
    all_reduce_switch: float | None = None
    links: Links | None = None
    power_watts: float | None = None

    def peak(self, precision: str) -> float | None:
        """Return the dense peak in operations a second; None where the device has none. precision: "fp32", "tf32",
        "bf16", "fp16", "fp8" or "fp4"."""
        return self.peaks[precision] * TERA if precision in self.peaks else None

    @property
    def shares(self) -> dict[str, float]:
        """(FLOP/s of the fastest measured matrix product) / (peak FLOP/s), by measured precision, "bf16" or "fp8".
        Without precisions that have no stated peak, as on CPUs."""
        return {name: best / self.peaks[name] for name, best in self.measured.items() if name in self.peaks}


def _device(name: str, entry: Mapping[str, Any]) -> Device:
    """Build a `Device` from its entry in the device catalogue devices.toml. name: its catalogue name, such as
    "h100-sxm"."""
    measured, memory, links = entry.get("measured", {}), entry["memory"], entry["links"]
    scaleup, host, across = (
        Link(links[name] * GIGA, _CATALOGUE["latency_seconds"][kind]["seconds"]) if name in links else None
        for name, kind in (("scaleup", links["kind"]), ("host", "pcie"), ("across", "network"))
    )
    ring, switch = (measured[method] * GIGA if method in measured else None for method in ("ring", "switch"))
    assert scaleup is not None, name
    return Device(
        name, entry["peaks"], memory["driver_mib"] * 2.0**20 if "driver_mib" in memory else memory["gb"] * GIGA,
        memory["gb_per_second"] * GIGA, entry.get("pattern"), entry["architecture"],
        {precision: measured[precision] for precision in ("bf16", "fp8") if precision in measured},
        ring, switch, Links(scaleup, links["pair"] * GIGA, links["domain"], host, links["node"], across),
        entry.get("power_watts"),
    )  # fmt: skip


DEVICES: tuple[Device, ...] = tuple(_device(name, entry) for name, entry in _CATALOGUE["devices"].items())


@cache
def find_device(name: str) -> Device | None:
    """Return the device with a catalogue name (``h100-sxm``) or a driver's name (``NVIDIA H100 80GB HBM3``). None for
    an unknown name, and for a MIG slice of a GPU, whose share of the peak is not in its name."""
    known = next((each for each in DEVICES if each.name == name.lower()), None)
    if known is not None or "MIG" in name:
        return known
    whole = r"(?<![A-Za-z0-9]){}(?![A-Za-z0-9])"
    return next((each for each in DEVICES if each.pattern and re.search(whole.format(each.pattern), name)), None)


@cache
def architecture_share(architecture: str) -> float:
    """Return the fraction of their bf16 peak that devices of an architecture (such as "Hopper") reach in measured
    matrix products: the median over the devices; 0 if none was measured."""
    alike = [each.shares for each in DEVICES if each.architecture == architecture]
    return statistics.median([one["bf16"] for one in alike if "bf16" in one] or [0.0])


@cache
def compare_eight_bit_shares(family: str) -> float:
    """Return (fraction of the fp8 peak) / (fraction of the bf16 peak) that matrix products reach: the median over the
    devices of a family of architectures (such as "Hopper") on which both were measured; 1 if there are none."""
    alike = [each.shares for each in DEVICES if each.architecture.startswith(family)]
    return statistics.median([one["fp8"] / one["bf16"] for one in alike if one.keys() >= {"fp8", "bf16"}] or [1.0])


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the published dense peak of a device in operations a second; None for an unknown device or precision.

    ``precision``: fp32, tf32, bf16, fp16 or fp8. ``device_name``: a catalogue name or a driver's.
    """
    device = find_device(device_name)
    return None if device is None else device.peak(precision)
