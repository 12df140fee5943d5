"""Rendezvous directories of local ranks: removed at the end, or after a kill by the next launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from meshwright.launcher.rendezvous_directory import UNLOCKED_PREFIX, UNLOCKED_SECONDS, create_rendezvous_directory


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_rendezvous_directory_is_removed_at_the_end(temporary: Path) -> None:
    with pytest.raises(KeyError), create_rendezvous_directory() as place:
        (place / "ranks").touch()
        assert list(temporary.iterdir()) == [place]
        raise KeyError
    assert list(temporary.iterdir()) == []


def test_next_launcher_removes_rendezvous_directory_of_killed_one(
    temporary: Path,
) -> None:
    code = (
        "import os; from meshwright.launcher.rendezvous_directory import create_rendezvous_directory\n"
        "with create_rendezvous_directory() as place:\n"
        "    (place / 'ranks').touch(); print(place, flush=True); input()"
    )
    command = [sys.executable, "-c", code]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    places = [Path(process.stdout.readline().strip()) for process in processes if process.stdout is not None]
    os.kill(processes[0].pid, signal.SIGKILL)
    processes[0].communicate()
    assert sorted(temporary.iterdir()) == sorted(places)
    with create_rendezvous_directory() as place:
        assert sorted(temporary.iterdir()) == sorted([places[1], place])
    processes[1].communicate("\n")
    assert list(temporary.iterdir()) == []


def test_only_own_rendezvous_directories_are_removed(temporary: Path) -> None:
    kept = temporary / "kept"
    kept.mkdir()
    (kept / "file").touch()
    (temporary / "meshwright-rendezvous-link").symlink_to(kept)
    (temporary / "meshwright-rendezvous-file").touch()
    with create_rendezvous_directory():
        pass
    assert sorted(path.name for path in temporary.iterdir()) == [
        "kept", "meshwright-rendezvous-file", "meshwright-rendezvous-link",
    ]  # fmt: skip
    assert (kept / "file").exists()


def test_unlocked_rendezvous_directory_is_removed_after_one_minute(temporary: Path) -> None:
    old, young = temporary / f"{UNLOCKED_PREFIX}old", temporary / f"{UNLOCKED_PREFIX}young"
    old.mkdir(), young.mkdir()
    os.utime(old, (0, time.time() - 2 * UNLOCKED_SECONDS))
    with create_rendezvous_directory():
        assert young.exists() and not old.exists()
