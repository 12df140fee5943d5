"""Clusters: devices in nodes, with links of the catalogue or of the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import UserError
from meshwright.planner.hardware.cluster import cluster, this_machine
from meshwright.planner.hardware.devices import DEVICES


@pytest.mark.parametrize(
    ("text", "devices", "per_node", "inside", "across"),
    [
        ("64xh100-sxm", 64, 8, 450e9, 50e9),
        ("2x8xa100-80", 16, 8, 300e9, 25e9),
        ("4xh100-sxm", 4, 4, 450e9, 50e9),
        ("1xh100-sxm", 1, 1, 450e9, 50e9),
        ("16x4xa100-40", 64, 4, 300e9, 25e9),
        ("64 x H100-SXM", 64, 8, 450e9, 50e9),
        ("72xgb200", 72, 72, 900e9, 50e9),  # one scale-up domain, 18 trays
        ("144xgb300", 144, 72, 900e9, 100e9),
        ("2x36xgb200", 72, 36, 900e9, 50e9),
        ("36xgb200", 36, 36, 900e9, 50e9),  # nine trays of a rack
        ("128xgb200", 128, 64, 900e9, 50e9),  # 16 trays of each of two racks
        ("120xgb300", 120, 60, 900e9, 100e9),
        ("16xh800", 16, 8, 200e9, 50e9),
        ("8xmi300x", 8, 8, 448e9, 50e9),
        ("4x2xmi300x", 8, 2, 64e9, 50e9),  # a full mesh: one of seven links connects a pair
        ("2xa40", 2, 2, 56e9, 12.5e9),  # a bridged pair
        ("8xa40", 8, 8, 31e9, 12.5e9),  # PCIe beyond the pair
        ("2xa100-pcie", 2, 2, 300e9, 12.5e9),
        ("8xl40s", 8, 8, 31e9, 12.5e9),  # no direct link
        ("8xgh200", 8, 1, 450e9, 50e9),  # one device per node
        ("2x4xgh200", 8, 4, 450e9, 25e9),  # JUPITER's and Alps' nodes
    ],
)
def test_shorthand_gives_devices_and_nodes(text: str, devices: int, per_node: int, inside: float, across: float):
    found = cluster(text)
    assert (found.devices, found.devices_per_node) == (devices, per_node)
    assert found.nodes * per_node == devices
    assert (found.inside.bandwidth, found.across.bandwidth) == (inside, across)
    assert 0 < found.inside.latency <= found.across.latency < 2e-5
    assert found.measured is None


def test_superchips_in_nodes_of_four_share_power():
    """Unless the cluster file describes the device itself."""
    assert cluster("8x4xgh200").device.name == "gh200-quad" and cluster("8xgh200").device.name == "gh200"
    described = {"device": {"like": "gh200", "power_watts": 1000}, "devices": 8, "devices_per_node": 4}
    assert cluster(described | {"inside_gb_per_second": 150}).device.measured == {"bf16": 828.6}


def test_every_device_forms_a_node():
    for device in DEVICES:
        assert cluster(f"1x{device.name}").device is device
        links = device.links
        assert cluster({"device": device.name, "devices": max(links.node, links.domain)}).nodes == 1


def test_peaks_are_operations_per_second():
    assert cluster("8xh100-sxm").peak("bf16") == 989e12
    with pytest.raises(UserError, match="v100 has no known peak for bf16; it has fp32, fp16"):
        cluster("8xv100").peak("bf16")
    with pytest.raises(UserError, match='unknown precision "bf61"; did you mean "bf16"'):
        cluster("8xv100").peak("bf61")


def test_mapping_overrides_catalogue():
    found = cluster({"device": "h100-sxm", "devices": 128, "devices_per_node": 4, "across_gb_per_second": 12.5})
    assert (found.devices_per_node, found.inside.bandwidth, found.across.bandwidth) == (4, 450e9, 12.5e9)
    assert found.across.latency == cluster("128xh100-sxm").across.latency
    found = cluster({"device": "a40", "devices": 8, "inside_gb_per_second": 20, "inside_latency_seconds": 2e-5})
    assert (found.inside.bandwidth, found.inside.latency) == (20e9, 2e-5)
    assert cluster({"device": "h100-sxm", "devices": 4, "devices_per_node": 8}).devices_per_node == 4


def test_file_equals_mapping(tmp_path: Path):
    file = tmp_path / "ours.toml"
    file.write_text('name = "ours"\ndevice = "h800"\ndevices = 2048\nacross_gb_per_second = 50\n')
    assert cluster(str(file)) == cluster({"name": "ours", "device": "h800", "devices": 2048})
    assert cluster(str(file)).name == "ours"


def test_device_table_defines_device(tmp_path: Path):
    own = {"name": "x1", "memory_bytes": 2**36, "memory_gb_per_second": 1000, "peaks": {"bf16": 200}}
    fields: dict[str, Any] = {"device": own, "devices": 16, "devices_per_node": 8}
    links = {"inside_gb_per_second": 100, "across_gb_per_second": 10}
    found = cluster({**fields, **links})
    assert (found.peak("bf16"), found.device.memory_bytes, found.device.memory_bandwidth) == (200e12, 2**36, 1e12)
    with pytest.raises(UserError, match="across_gb_per_second is missing"):
        cluster({**fields, "inside_gb_per_second": 100})
    found = cluster({"device": {"like": "h200", "memory_bytes": 150e9}, "devices": 8})
    assert (found.device.memory_bytes, found.device.peaks["bf16"], found.device.name) == (150e9, 989, "h200")


@pytest.mark.parametrize(
    ("wanted", "line"),
    [
        ("8xh100-sx", 'cluster "8xh100-sx": unknown device "h100-sx"; did you mean "h100-sxm"?'),
        ("12xh100-sxm", "12 devices do not fill nodes of 8; choose 8 or 16, or nodes of another size (2x6)"),
        (
            "9217xtpu7x",
            "9217 devices do not fill nodes of 9216; choose 9216 or 18432, or nodes of another size (13x709)",
        ),
        ("90xgb300", "90 devices do not fill nodes of 72; choose 72 or 144"),
        ("13xh100-sxm", "13 devices do not fill nodes of 8; choose 8 or 16"),
        ("0xh100-sxm", '"0" devices; it takes a whole number, at least 1'),
        ("2.5xh100-sxm", '"2.5" devices; it takes a whole number, at least 1'),
        ("-8xh100-sxm", '"-8" devices; it takes a whole number, at least 1'),
        (f"{'9' * 5000}xh100-sxm", '..." devices; it takes a whole number, at least 1 and at most 1,048,576'),
        ("9999x9999xh100-sxm", "devices 99980001 is too large: at most 1,048,576 (published clusters"),
        ("2x0xh100-sxm", '"0" devices; it takes a whole number, at least 1'),
        ("h100-sxm", "such as 8xh100-sxm"),
        ("h100", 'unknown device "h100"; did you mean h100-nvl or h100-pcie or h100-96 or h100-sxm?'),
        ("2x8", "is not a number and kind of devices; such as 64xh100-sxm, 2x8xa100-80"),
        ("", "is not a number and kind of devices"),
        ("2xcpu", "CPUs are not in the catalogue; run `meshwright probe` on the machine, then use the cluster this"),
        (8, "should be text such as 64xh100-sxm or a table, not 8"),
        ({"devices": 8}, "device is missing"),
        ({"device": "h100-sxm"}, "devices is missing"),
        (
            {"device": "h100-sxm", "devices": 8, "inside_gbs": 3},
            'unknown field "inside_gbs"; did you mean "inside_gb_per_second"?',
        ),
        ({"device": "h100-sxm", "devices": 8.5}, "devices takes a whole number, at least 1, not 8.5"),
        ({"device": "h100-sxm", "devices": "9" * 5000}, "devices takes a whole number, at least 1, not '999"),
        (
            {"device": "h100-sxm", "devices": 1_000_000_000_039, "devices_per_node": 999_999_999_999},
            "devices 1000000000039 is too large: at most 1,048,576",
        ),
        (
            {"device": "h100-sxm", "devices": 8, "devices_per_node": 10**400},
            "devices_per_node a number of about 401 digits is too large",
        ),
        (
            {"device": "h100-sxm", "devices": 8, "inside_gb_per_second": 10**400},
            "inside_gb_per_second takes a number above 0, not a number of about 401 digits",
        ),
        ({"device": "h100-sxm", "devices": True}, "devices takes a whole number, at least 1, not True"),
        (
            {"device": "h100-sxm", "devices": 64, "devices_per_node": 6},
            "choose 60 or 66, or nodes of another size (16x4)",
        ),
        (
            {"device": "h100-sxm", "devices": 8, "inside_gb_per_second": 0},
            "inside_gb_per_second takes a number above 0, not 0",
        ),
        (
            {"device": "h100-sxm", "devices": 8, "across_gb_per_second": "50"},
            "across_gb_per_second takes a number above 0",
        ),
        ({"device": 3, "devices": 8}, "device should be a name such as h100-sxm or a table, not 3"),
        ({"device": {"peaks": {"bf17": 1}}, "devices": 8}, 'unknown precision "bf17"'),
        (
            {"device": {"like": "h200", "peaks": {"bf16": 989e12}}, "devices": 8},
            "peaks.bf16 is in 10^12 operations per second; 9.89e+14 is too large, did you mean 989?",
        ),
        (
            {"device": {"like": "h200", "memory_gb_per_second": 4.8e12}, "devices": 8},
            "memory_gb_per_second is in 10^9 bytes per second; 4.8e+12 is too large, did you mean 4800?",
        ),
        ({"device": {"memory": 1}, "devices": 8}, 'device: unknown field "memory"; did you mean "memory_bytes"?'),
        ({"device": "tpu7x", "devices": 9216 * 2}, "across_gb_per_second is missing, and no published figure is known"),
        ({"device": "h100-sxm", "devices": 8, "measured": {}}, "damaged (backend is missing)"),
    ],
)
def test_invalid_cluster_is_one_line_with_suggestion(wanted: Any, line: str):
    with pytest.raises(UserError) as caught:
        cluster(wanted)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_missing_or_damaged_file_is_named(tmp_path: Path):
    (tmp_path / "ours.toml").write_text("device = ")
    with pytest.raises(UserError, match=r"ours.toml:1: not valid TOML"):
        cluster(str(tmp_path / "ours.toml"))
    with pytest.raises(UserError, match=r"no such cluster file: .*our.toml; did you mean .*ours.toml"):
        cluster(str(tmp_path / "our.toml"))
    (tmp_path / "ours.toml").write_text('device = "h100-sxm"\ndevices = 12\n')
    with pytest.raises(UserError, match=r"ours.toml: 12 devices do not fill nodes of 8"):
        cluster(str(tmp_path / "ours.toml"))


def test_cluster_this_is_the_file_of_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # directory of the profiles of first starts
    with pytest.raises(UserError, match=r'no hardware profile of this machine .*run "meshwright probe"'):
        cluster("this")
    this_machine().parent.mkdir()
    this_machine().write_text('device = "h100-sxm"\ndevices = 4\n')
    assert cluster("this").devices == 4
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert this_machine() == tmp_path / ".config" / "meshwright" / "cluster.toml"
