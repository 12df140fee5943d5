"""A directory has one run at a time; its files."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from meshwright.checkpoint import directory_lock
from meshwright.errors import UserError
from meshwright.monitoring.run_directory import RunDirectory


def test_second_run_gets_name_of_process_in_directory(tmp_path):
    with RunDirectory(tmp_path / "run"):
        with pytest.raises(
            UserError,
            match=rf"run is in use by process {os.getpid()} on {socket.gethostname()} since \d{{4}}-.*; wait until",
        ) as one:
            RunDirectory(tmp_path / "run").lock()
        assert one.value.exit_code == 2
    with RunDirectory(tmp_path / "run"):
        pass


def test_start_that_fails_leaves_no_new_directory(tmp_path):
    def fail(place, file=None):
        with pytest.raises(UserError, match="wrong"), RunDirectory(place) as directory:
            if file:
                (directory.path / file).touch()
            raise UserError("wrong")

    fail(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    fail(tmp_path)  # one that existed
    fail(tmp_path / "used", "metrics.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "used"]
    assert sorted(path.name for path in (tmp_path / "used").iterdir()) == [".lock", "metrics.jsonl"]


def test_start_that_fails_on_its_ranks_leaves_no_process_ids(tmp_path):
    for name, made in (("new", False), ("empty", True), ("used", True)):
        place = tmp_path / name
        if made:
            place.mkdir()
        if name == "used":
            (place / "metrics.jsonl").write_text("")
        directory = RunDirectory(place)
        directory.lock()
        directory.write_ranks([1, 2])
        directory.close()
        assert (place / "ranks.json").exists() == (name == "used") and place.exists() == made
        RunDirectory(place).lock()


def test_start_that_waited_for_a_removed_lock_file_locks_the_directory(tmp_path, monkeypatch):
    """It has opened the lock file that a start which fails then removes, together with the directory."""
    failing, waiting = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "run")
    failing.__enter__()
    lapse = threading.Timer(0.1, failing.__exit__, (None, None, None))
    lapse.start()
    waiting.lock()
    lapse.join()
    monkeypatch.setattr(directory_lock, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(UserError, match=f"is in use by process {os.getpid()}"):
        RunDirectory(tmp_path / "run").lock()
    waiting.unlock()


def test_killed_run_leaves_no_lock_behind(tmp_path):
    code = (
        "import sys, time; from meshwright.monitoring.run_directory import RunDirectory; "
        "RunDirectory(sys.argv[1]).lock(); print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(UserError, match=f"in use by process {holder.pid}"):
            RunDirectory(tmp_path).lock()
        holder.send_signal(signal.SIGKILL)
    assert (tmp_path / ".lock").exists()
    with RunDirectory(tmp_path):
        pass


def test_lock_of_a_lost_host_delays_a_restart_and_refuses_a_second_start(tmp_path, monkeypatch):
    """A file server keeps the lock of a lost host for some time; the process id of that host is meaningless here."""
    holder = RunDirectory(tmp_path)
    descriptor = holder.lock()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"process": 1, "host": "node7", "since": "2026-01-01 00:00:00"}).encode(), 0)
    monkeypatch.setattr(directory_lock, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(UserError, match="in use by process 1 on node7 since 2026-01-01"):
        RunDirectory(tmp_path).lock()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    lapse = threading.Timer(0.1, holder.unlock)
    lapse.start()
    with RunDirectory(tmp_path):
        lapse.join()


def test_surviving_child_process_keeps_directory_locked(tmp_path):
    directory = RunDirectory(tmp_path)
    descriptor = directory.lock()
    with subprocess.Popen(["sleep", "60"], pass_fds=[descriptor]) as child:
        os.close(descriptor)  # as when the launcher is killed
        with pytest.raises(UserError, match="in use by"):
            RunDirectory(tmp_path).lock()
        child.kill()
    RunDirectory(tmp_path).lock()


def test_start_waits_for_children_of_a_killed_run(tmp_path, monkeypatch):
    """Forked data-loader workers hold the lock until they notice that their parent has exited."""
    code = (
        "import os, sys, time; from meshwright.monitoring.run_directory import RunDirectory; "
        "RunDirectory(sys.argv[1]).lock(); os.fork() and os.kill(os.getpid(), 9); time.sleep(0.3)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    monkeypatch.setattr(directory_lock, "PATIENCE_SECONDS", 0.0)
    with RunDirectory(tmp_path):
        pass


def test_foreign_files_are_kept(tmp_path):
    (tmp_path / "recipe.toml").write_text("mine")
    (tmp_path / "notes").mkdir()
    with RunDirectory(tmp_path) as directory:
        directory.write_recipe("layout = 'dp1'\n")
        directory.write_ranks([11, 12])
    assert (tmp_path / "recipe.toml").read_text() == "mine" and (tmp_path / "notes").is_dir()
    assert (tmp_path / "recipe.resolved.toml").read_text() == "layout = 'dp1'\n"
    assert json.loads((tmp_path / "ranks.json").read_text()) == {"0": 11, "1": 12}


def test_file_at_directory_path_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run directory .*/file/run: .*/file is a file; give another"):
        RunDirectory(tmp_path / "file" / "run").lock()
    with pytest.raises(UserError, match=r"file is a file"):
        RunDirectory(tmp_path / "file").lock()
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(UserError, match=r"checkpoints in it is a file"):
        RunDirectory(tmp_path).lock()


def test_unwritable_directory_is_one_error_line():
    with pytest.raises(UserError, match=r"run directory /proc/run cannot be made: "):
        RunDirectory("/proc/run").lock()


def test_last_step_is_read_despite_truncated_line(tmp_path):
    directory = RunDirectory(tmp_path)
    assert directory.read_last_step() is None
    lines = "".join(json.dumps({"step": step, "text": "x" * 100}) + "\n" for step in range(1, 2000))
    directory.metrics.write_text(lines + '{"event": "slow"}\n{"step": 20')
    assert directory.read_last_step() == 1999


def test_last_step_is_that_of_a_step_though_the_event_of_an_earlier_save_follows(tmp_path):
    directory = RunDirectory(tmp_path)
    event = '{"event": "save", "step": 10, "stall_seconds": 0.1}\n'
    directory.metrics.write_text('{"step": 10}\n{"step": 11}\n' + event)
    assert directory.read_last_step() == 11
    directory.metrics.write_text(event + "[1]\n7\n")
    assert directory.read_last_step() is None


def test_full_disk_at_lock_is_one_error_line(tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(UserError, match="cannot be written: .*[Nn]o space left"):
        RunDirectory(tmp_path / "run").lock()
    monkeypatch.undo()
    with RunDirectory(tmp_path / "run"):  # the failed attempt holds no lock
        pass
