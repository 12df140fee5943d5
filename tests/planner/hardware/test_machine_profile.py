"""Hardware profiles of first starts: one for each CPU, torch version, ranks and threads; damaged ones are ignored."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.errors import UserError
from meshwright.machine import profile_directory
from meshwright.planner.hardware.cluster import cluster
from meshwright.planner.hardware.machine_profile import HardwareProfile, HardwareProfileKey, read_profile, write_profile
from meshwright.toml import read_toml
from tests.planner.calibration_cases import cluster_file


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


@pytest.fixture
def profile(tmp_path: Path) -> HardwareProfile:
    tables = read_toml(cluster_file(tmp_path / "elsewhere"), "cluster file")
    return HardwareProfile(("bf16",), ("tp",), tables)


KEY = HardwareProfileKey.here(2, 2, 1)


def test_profile_read_back_equals_what_was_written(profile: HardwareProfile):
    assert read_profile(KEY) is None
    write_profile(KEY, profile)
    assert read_profile(KEY) == profile
    assert [each.suffix for each in profile_directory().iterdir()] == [".json"]


@pytest.mark.parametrize(
    "other", [{"processor": "another"}, {"cores": 3}, {"torch": "1.0"}, {"ranks": 1}, {"threads": 2}], ids=str
)
def test_profile_of_another_machine_is_not_read(profile: HardwareProfile, other: dict[str, object]):
    write_profile(KEY, profile)
    elsewhere = replace(KEY, **other)
    assert read_profile(elsewhere) is None
    elsewhere.path.write_bytes(KEY.path.read_bytes())  # under the name of another machine
    assert read_profile(elsewhere) is None


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"version": 0}', b"\xff\xfe"])
def test_damaged_profile_is_ignored(profile: HardwareProfile, damage: bytes):
    write_profile(KEY, profile)
    KEY.path.write_bytes(damage)
    assert read_profile(KEY) is None
    with pytest.raises(UserError, match="no hardware profile of this machine"):
        cluster("this")


def test_profile_of_another_version_is_ignored(profile: HardwareProfile):
    write_profile(KEY, profile)
    KEY.path.write_text(json.dumps(json.loads(KEY.path.read_text()) | {"version": 0}))
    assert read_profile(KEY) is None


def test_profile_covers_only_its_precisions_and_axes(profile: HardwareProfile):
    assert profile.covers(["bf16"], ()) and profile.covers(["bf16"], ("tp",))
    assert not profile.covers(["fp32", "bf16"], ()) and not profile.covers(["bf16"], ("tp", "cp"))


def test_concurrent_writes_leave_one_complete_profile(profile: HardwareProfile):
    """Readers see one of the written files, and no other file is left."""
    write_profile(KEY, profile)
    others = [replace(profile, axes=axes) for axes in ((), ("cp",), ("cp", "tp"))]
    writers = [
        threading.Thread(target=lambda each=each: [write_profile(KEY, each) for _ in range(20)]) for each in others
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert read_profile(KEY) in (profile, *others)
    assert len(list(profile_directory().iterdir())) == 1


def test_cluster_this_is_profile_with_most_ranks_within_cores(profile: HardwareProfile, monkeypatch):
    monkeypatch.setattr("meshwright.planner.hardware.machine_profile.count_available_cores", lambda: 2)
    with pytest.raises(UserError, match="no hardware profile of this machine"):
        cluster("this")

    def keep(name: str, **key: object) -> None:
        write_profile(replace(KEY, **key), replace(profile, cluster={**profile.cluster, "name": name}))

    keep("too many", ranks=4)
    assert cluster("this").name == "too many"  # used if there is no better one
    keep("alone", ranks=1)
    assert cluster("this").name == "alone"
    keep("both", ranks=2)
    keep("elsewhere", ranks=2, processor="another")
    keep("of more cores", ranks=2, cores=8)
    write_profile(replace(KEY, ranks=2, threads=1), replace(profile, cluster={**profile.cluster, "name": "both"}))
    assert cluster("this").name == "both"


def test_damaged_tables_are_skipped(profile: HardwareProfile, monkeypatch):
    monkeypatch.setattr("meshwright.planner.hardware.machine_profile.count_available_cores", lambda: 2)
    write_profile(KEY, replace(profile, cluster={"device": 7}))
    with pytest.raises(UserError, match="no hardware profile of this machine"):
        cluster("this")
    write_profile(replace(KEY, ranks=1), profile)
    assert cluster("this").name == profile.cluster["name"]
