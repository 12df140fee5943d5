"""Published peaks of accelerators, dense (data sheets often print twice that, for 2:4 sparsity), with their source."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

_TERA = 1e12
_READ = "stas00/ml-engineering, compute/accelerator (read 2026-08)"
_RECALL = "vendor data sheet, from memory"


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator. Peaks are in 10¹² operations a second, dense; None: not in hardware, or not known.

    ``pattern`` matches what drivers call it, as ``torch.cuda.get_device_name`` returns it. ``bf16`` and ``fp16`` are
    matrix units that accumulate in float32, ``fp32`` is the vector units' peak.
    """

    name: str
    pattern: str
    fp32: float
    tf32: float | None
    fp16: float
    bf16: float | None
    fp8: float | None
    source: str


# Longer names of a make come before shorter ones where one begins the other.
DEVICES: tuple[Device, ...] = (
    Device("v100", r"V100", 15.7, None, 125, None, None, _RECALL),
    Device("a100-40", r"A100.*40GB", 19.5, 156, 312, 312, None, _READ),
    Device("a100-80", r"A100.*80GB", 19.5, 156, 312, 312, None, _READ),
    Device("a800", r"A800", 19.5, 156, 312, 312, None, _RECALL),
    Device("gh200", r"GH200", 67, 494.5, 989, 989, 1979, _READ),
    Device("h100-nvl", r"H100 NVL", 60, 418, 835, 835, 1671, _RECALL),
    Device("h100-pcie", r"H100 (PCIe|80GB HBM2e)", 51, 378, 756, 756, 1513, _READ),
    Device("h100-sxm", r"H100 .*(HBM3|SXM)", 67, 494.5, 989, 989, 1979, _READ),
    Device("h800", r"H800(?! PCIe)", 67, 494.5, 989, 989, 1979, f"{_RECALL}; DeepSeek-V3 report"),
    Device("h20", r"H20", 44, 74, 148, 148, 296, _RECALL),
    Device("h200", r"H200(?! NVL)", 67, 494.5, 989, 989, 1979, _READ),
    Device("gb300", r"GB300", 80, 1250, 2500, 2500, 5000, _READ),
    Device("gb200", r"GB200", 80, 1250, 2500, 2500, 5000, _READ),
    Device("b300", r"B300", 80, 1125, 2250, 2250, 4500, _READ),
    Device("b200", r"B200", 80, 1125, 2250, 2250, 4500, _READ),
    Device("l40s", r"L40S", 91.6, 183, 362, 362, 733, _READ),
    Device("l4", r"L4", 30.3, 60, 121, 121, 242, _RECALL),
    Device("a10g", r"A10G", 31.2, 35, 70, 70, None, f"{_RECALL}; figures differ by source (70 or 125 in fp16)"),
    Device("a10", r"A10", 31.2, 62.5, 125, 125, None, _RECALL),
    Device("a40", r"A40", 37.4, 74.8, 149.7, 149.7, None, _RECALL),
    Device("rtx4090", r"RTX 4090(?! (D|Laptop))", 82.6, 82.6, 165.2, 165.2, 330.3, _RECALL),
    Device("rtx3090", r"RTX 3090(?! Ti)", 35.6, 35.6, 71, 71, None, _RECALL),
    # One MI250X is two devices to a program; these are one's.
    Device("mi250x", r"MI250X", 23.95, None, 191.5, 191.5, None, _READ),
    Device("mi300x", r"MI300X", 163.4, 653.7, 1307, 1307, 2615, _READ),
    Device("mi325x", r"MI325X", 163.4, 653.7, 1307, 1307, 2615, _READ),
    Device("mi355x", r"MI355X", 157.3, None, 2300, 2300, 4600, f"{_READ}; 2300 in one table, 2500 in another"),
)


@cache
def find_device(name: str) -> Device | None:
    """The device of a catalogue name (``h100-sxm``) or of a driver's (``NVIDIA H100 80GB HBM3``); None if unknown.

    A part of a GPU (MIG) is unknown: its share of the peak is not in its name.
    """
    for device in DEVICES:
        if name.lower() == device.name:
            return device
    if "MIG" in name:
        return None
    for device in DEVICES:
        if re.search(rf"(?<![A-Za-z0-9]){device.pattern}(?![A-Za-z0-9])", name):
            return device
    return None


def peak_flops(device_name: str, precision: str) -> float | None:
    """Published dense peak of a device in operations a second; None for an unknown device or precision it lacks.

    ``precision``: fp32, tf32, bf16, fp16 or fp8. ``device_name``: a catalogue name or a driver's.
    """
    device = find_device(device_name)
    if device is None:
        return None
    peaks = {"fp32": device.fp32, "tf32": device.tf32, "bf16": device.bf16, "fp16": device.fp16, "fp8": device.fp8}
    peak = peaks[precision]
    return None if peak is None else peak * _TERA
