"""Peaks are found by what drivers call a device, and are the dense ones."""

from __future__ import annotations

import csv

import pytest

from meshwright.names import PRECISIONS
from meshwright.plan.devices import DEVICES, find_device, peak_flops


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA A800-SXM4-80GB", "a800"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI250X / MI250", "mi250x"),
    ],
)
def test_a_driver_name_finds_its_device(name: str, device: str):
    found = find_device(name)
    assert found is not None
    assert found.name == device


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "NVIDIA L40",
        "NVIDIA A100X",
        "NVIDIA H200 NVL",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    ],
)
def test_a_relative_with_other_peaks_is_unknown_rather_than_wrong(name: str):
    assert peak_flops(name, "bf16") is None


def test_every_device_is_found_by_its_catalogue_name_and_says_its_source():
    for device in DEVICES:
        assert find_device(device.name) is device
        assert device.source
        for precision in PRECISIONS:
            peak = peak_flops(device.name, precision)
            assert peak is None or 1e13 < peak < 1e16


def test_dense_peaks_that_are_often_printed_twice_as_large():
    assert peak_flops("NVIDIA H200", "bf16") == 989e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp8") == 1979e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "tf32") == 156e12
    assert peak_flops("Tesla V100-SXM2-32GB", "bf16") is None
    assert peak_flops("Tesla V100-SXM2-32GB", "fp16") == 125e12


def test_peaks_are_those_of_the_collected_table(shared_data):
    with (shared_data / "measured" / "hardware.csv").open(newline="") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    names = {
        "a100-40": "A100-SXM4-40GB", "a100-80": "A100-SXM4-80GB", "a800": "A800-SXM4-80GB", "gh200": "GH200-96/141GB",
        "h100-nvl": "H100-NVL-94GB", "h100-pcie": "H100-PCIe-80GB", "h100-sxm": "H100-SXM5-80GB",
        "h800": "H800-SXM5-80GB", "h20": "H20-96GB", "h200": "H200-SXM5-141GB", "gb300": "GB300-NVL72",
        "gb200": "GB200-NVL72", "b300": "B300-SXM-288GB", "b200": "B200-SXM-180GB", "l40s": "L40S-48GB",
        "l4": "L4-24GB", "a10g": "A10G-24GB", "a40": "A40-48GB", "rtx4090": "RTX4090-24GB", "rtx3090": "RTX3090-24GB",
        "mi300x": "MI300X-192GB", "mi325x": "MI325X-256GB", "mi355x": "MI355X-288GB",
    }  # fmt: skip
    columns = {"bf16": "peak_bf16_dense_tflops", "tf32": "peak_tf32_dense_tflops", "fp32": "peak_fp32_vector_tflops"}
    for device, name in names.items():
        for precision, column in columns.items():
            text = rows[name][column]
            peak = peak_flops(device, precision)
            assert (peak is None) == (text in ("", "n/a")), (device, precision)
            if peak is not None:
                assert peak == pytest.approx(float(text) * 1e12), (device, precision)
