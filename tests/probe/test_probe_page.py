"""docs/probe.md matches the code: options, fields, shorthands, counts, the threshold of slow ranks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from meshwright.cli.probe import command
from meshwright.planner.hardware.cluster import DEVICE_FIELDS, FIELDS, cluster
from meshwright.planner.hardware.devices import DEVICES
from meshwright.probe.compare import THRESHOLD
from meshwright.probe.points import MeasurementPlan

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "probe.md").read_text()


def first_column(title: str, place: int) -> list[str]:
    """Return the names in back ticks in the first column of the table number `place` (from 0) below a title."""
    below = PAGE[PAGE.index(title) :]
    table = re.findall(r"(?:^\|.*\|$\n?)+", below, re.MULTILINE)[place]
    return [name for line in table.splitlines() for name in re.findall(r"`([^`]+)`", line.split("|")[1])]


def test_every_option_is_documented():
    options = {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
    assert set(first_column("# Probe", 0)) == options


def test_every_cluster_field_is_documented():
    assert set(first_column("## Clusters", 1)) == set(FIELDS)
    for field in DEVICE_FIELDS:
        assert f"`{field}`" in PAGE, field


@pytest.mark.parametrize("text", [name for name in first_column("## Clusters", 0) if name != "this"])
def test_documented_shorthands_are_clusters(text: str):
    assert cluster(text).devices == {"64xh100-sxm": 64, "2x8xa100-80": 16, "72xgb200": 72}[text]


def test_documented_cluster_file_is_valid():
    [text] = re.findall(r"^```toml cluster\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    found = cluster(tomllib.loads(text))
    assert (found.nodes, found.across.bandwidth) == (32, 25e9)


def test_documented_numbers_match_code():
    assert f"**{THRESHOLD:g}**" in PAGE
    assert f"{len(DEVICES)} accelerators" in PAGE
    cpu, cuda = MeasurementPlan.default("cpu"), MeasurementPlan.default("cuda")
    assert (
        f"over {len(cpu.shapes)} shapes in {' and '.join(cpu.precisions)}; on a GPU {len(cuda.shapes)} shapes" in PAGE
    )
    assert f"from {4 * cpu.pass_sizes[0] // 2**10} KiB to {4 * cpu.pass_sizes[-1] // 2**20} MiB" in PAGE
    assert f"GPU: {4 * cuda.pass_sizes[-1] // 2**30} GiB" in PAGE
    assert f"{cpu.disk_bytes // 2**20} MiB written" in PAGE
