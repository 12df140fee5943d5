"""The device catalogue: names as reported by drivers, dense peaks, sources."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.names import PRECISIONS
from meshwright.planner.hardware.devices import DEVICES, Link, find_device, peak_flops
from meshwright.toml import read_packaged_toml

CATALOGUE: dict[str, Any] = read_packaged_toml("planner/hardware/devices.toml")
ENTRIES: dict[str, dict[str, Any]] = CATALOGUE["devices"]


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
        ("NVIDIA GH200 120GB", "gh200-quad"),
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
def test_driver_name_finds_device(name: str, device: str):
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
def test_similar_device_with_other_peaks_is_unknown(name: str):
    assert peak_flops(name, "bf16") is None


def test_every_device_has_catalogue_name_and_source():
    for device in DEVICES:
        assert find_device(device.name) is device
        assert CATALOGUE["sources"][ENTRIES[device.name]["source"]]
        for precision in PRECISIONS:
            peak = peak_flops(device.name, precision)
            assert peak is None or 1e13 < peak < 1e16


def test_peaks_are_dense():
    assert peak_flops("NVIDIA H200", "bf16") == 989e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp8") == 1979e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "tf32") == 156e12
    assert peak_flops("Tesla V100-SXM2-32GB", "bf16") is None
    assert peak_flops("Tesla V100-SXM2-32GB", "fp16") == 125e12


def test_peaks_match_collected_table(shared_data):
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


# --- the catalogue against its source table

PARTS = {"mi250x": 2}  # devices that a program sees for one published part
GH200 = {"gh200": 0, "gh200-141": 1}  # two memories in one row: "96/141"
COLUMNS = {
    "peak_fp8_dense_tflops": ("peaks.fp8", 1),
    "peak_fp4_dense_tflops": ("peaks.fp4", 1),
    "peak_fp32_vector_tflops": ("peaks.fp32", 1),
    "peak_tf32_dense_tflops": ("peaks.tf32", 1),
    "peak_bf16_dense_tflops": ("peaks.bf16", 1),
    "measured_bf16_matmul_tflops_MAMF": ("measured.bf16", 1),
    "hbm_gb": ("memory.gb", 1),
    "hbm_gbs": ("memory.gb_per_second", 1),
    "scaleup_uni_gbs": ("links.scaleup", 1),
    "scaleup_p2p_uni_gbs": ("links.pair", 0),
    "scaleup_domain": ("links.domain", -1),
    "pcie_uni_gbs": ("links.host", 0),
    "node_gpus": ("links.node", 0),
    "inter_node_uni_gbs_per_gpu": ("links.across", 0),
    "tdp_w": ("power_watts", 1),
    "sm_count": ("chip.multiprocessors", 1),
    "boost_mhz": ("chip.clock_mhz", 0),
}
"""Column -> key of the catalogue, and of what a part of n devices has n times as much (1), as much (0), or 1/n (-1)."""


def parts_of(name: str, row: dict[str, str]) -> bool:
    """Whether a device of the catalogue is that of a row of the table."""
    if name in GH200:
        return row["name"].startswith("GH200")
    return ENTRIES[name]["published"] == row["name"]


def test_devices_have_the_figures_of_the_catalogue():
    for device in DEVICES:
        entry, links = ENTRIES[device.name], device.links
        assert device.peaks == entry["peaks"] and device.architecture == entry["architecture"]
        assert device.memory_bandwidth == entry["memory"]["gb_per_second"] * 1e9
        assert (links.domain, links.node) == (entry["links"]["domain"], entry["links"]["node"])
        assert links.pair == entry["links"]["pair"] * 1e9
        for key, kind in (("scaleup", entry["links"]["kind"]), ("host", "pcie"), ("across", "network")):
            figure, latency = entry["links"].get(key), CATALOGUE["latency_seconds"][kind]["seconds"]
            expected = None if figure is None else Link(figure * 1e9, latency)
            assert getattr(links, key) == expected, (device.name, key)


def test_catalogue_matches_table_figure_by_figure(shared_data: Path):
    with open(shared_data / "measured" / "hardware.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    compared = 0
    for row in rows:
        found = [device for device in DEVICES if parts_of(device.name, row)]
        assert found, f"{row['name']} is in no catalogue"
        for device in found:
            for column, (field, power) in COLUMNS.items():
                figure: Any = ENTRIES[device.name]
                for key in field.split("."):
                    figure = None if figure is None else figure.get(key)
                text = row[column]
                numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text.split("(")[0])]
                if text.startswith("n/a"):
                    numbers = []
                assert (figure is not None) == bool(numbers), (device.name, field, text)
                if not numbers:
                    continue
                if "/" in text and device.name in GH200:
                    numbers = [numbers[GH200[device.name]]]
                figure = figure * PARTS.get(device.name, 1) ** power
                assert min(numbers) <= figure <= max(numbers), (device.name, field, text)
                compared += 1
            prices = [float(number) for number in re.findall(r"[\d.]+", row["ondemand_usd_per_gpu_hour"].split("(")[0])]
            price = ENTRIES[device.name].get("price_usd_per_hour")
            assert price == ([prices[0], prices[-1]] if prices else None), device.name
            reported = row["measured_allreduce_busbw_node_gbs"].split("/")
            ring = re.match(r"[\d.]+", reported[0])
            assert device.all_reduce_ring == (float(ring[0]) * 1e9 if ring else None), device.name
            switch = re.match(r" ([\d.]+)", reported[1]) if len(reported) > 1 and "NVLS" in reported[1] else None
            assert device.all_reduce_switch == (float(switch[1]) * 1e9 if switch else None), device.name
    assert compared > 400
    assert find_device("v100").peaks["fp16"] == 125  # "n/a (fp16 TC 125)" in the column of bf16


def test_unverified_figures_are_marked(shared_data: Path):
    with open(shared_data / "measured" / "hardware.csv", newline="") as file:
        for row in csv.DictReader(file):
            for name, entry in ENTRIES.items():
                if parts_of(name, row):
                    assert (entry["source"] == "recall") == ("recall" in row["source"].split(";")[0]), name
                    if "price_usd_per_hour" in entry:
                        read = row["price_basis"].startswith("read")
                        assert read == (entry.get("sources", {}).get("price", entry["source"]) == "mercatus"), name


def test_every_figure_has_a_source():
    for name, entry in ENTRIES.items():
        for source in (entry["source"], *entry.get("sources", {}).values()):
            assert len(CATALOGUE["sources"][source]) > 4, name
    for name, latency in CATALOGUE["latency_seconds"].items():
        assert len(CATALOGUE["sources"][latency["source"]]) > 4, name


def test_links_are_one_direction():
    """NVLink of an H100: 900 GB/s is the sum of both directions; its network adapter of 400 Gbit/s has 50 GB/s."""
    links = find_device("h100-sxm").links
    assert (links.scaleup.bandwidth, links.across.bandwidth) == (450e9, 50e9)


def test_memory_is_that_of_the_driver():
    """In data sheets, GB may be GiB or 10^9 bytes: an H100's 80 GB are 79.6 GiB, a B300's 288 GB are 268.6 GiB."""
    for device in DEVICES:
        published = ENTRIES[device.name]["memory"]["gb"] * 1e9
        assert 0.97 * published < device.memory_bytes < 1.08 * published, device.name
    assert find_device("h100-sxm").memory_bytes == 81559 * 2**20
    assert find_device("b300").memory_bytes == 275040 * 2**20
    assert find_device("mi300x").memory_bytes == 192e9
