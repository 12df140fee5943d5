"""`metrics.jsonl` survives kills, resumes and a full disk; the slow rank is found."""

from __future__ import annotations

import errno
import json
import math
import os

import pytest
import torch

from meshwright.monitoring.metrics import MetricsFile, SlowRankWatch, read_metrics, read_peak_memory_bytes


def write(path, *lines, resume_step=0):
    file = MetricsFile(path, resume_step)
    for line in lines:
        assert file.write(line) is None
    file.close()


def step(number: int, **more) -> dict:
    return {"step": number, "loss": 1.0 / number, **more}


def test_metric_lines_round_trip(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, step(1), {"event": "save", "step": 1}, step(2, seconds_by_part={"data": 0.5}))
    assert read_metrics(path) == [step(1), {"event": "save", "step": 1}, step(2, seconds_by_part={"data": 0.5})]
    assert path.read_bytes().count(b"\n") == 3


def test_values_unsupported_by_json_become_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, {"step": 1, "loss": math.nan, "parts": {"norm": math.inf, "fine": 1.5}})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "step": 1, "loss": None, "parts": {"norm": None, "fine": 1.5},
    }  # fmt: skip


def test_resumed_run_drops_metrics_after_its_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, *[step(number) for number in range(1, 8)], {"event": "slow_rank", "step": 7})
    write(path, step(6, again=True), resume_step=5)
    assert read_metrics(path) == [*[step(number) for number in range(1, 6)], step(6, again=True)]


def test_event_of_a_save_is_kept_though_it_follows_later_steps(tmp_path):
    """On a GPU the stall of a save is known after a later step."""
    path = tmp_path / "metrics.jsonl"
    saves = [{"event": "save", "step": number, "stall_seconds": 0.25} for number in (2, 4)]
    lines = [step(1), step(2), step(3), saves[0], step(4), step(5), step(6), saves[1]]
    write(path, *lines)
    write(path, step(5, again=True), resume_step=4)
    assert read_metrics(path) == [step(1), step(2), step(3), saves[0], step(4), saves[1], step(5, again=True)]
    write(path, resume_step=2)
    assert read_metrics(path) == [step(1), step(2), saves[0]]
    assert path.read_bytes() == b"".join(json.dumps(line).encode() + b"\n" for line in [step(1), step(2), saves[0]])


def test_fresh_run_drops_all_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, step(1), step(2))
    write(path, step(1, fresh=True))
    assert read_metrics(path) == [step(1, fresh=True)]


@pytest.mark.parametrize("rest", [b'{"step": 3, "lo', b'{"step": 3}', b"\xff\x00", b'"st'])
def test_truncated_last_line_is_skipped_and_removed_on_resume(tmp_path, rest):
    path = tmp_path / "metrics.jsonl"
    write(path, step(1), step(2))
    with path.open("ab") as file:
        file.write(rest)
    assert read_metrics(path)[:2] == [step(1), step(2)]
    write(path, step(4), resume_step=3)
    assert read_metrics(path) == [step(1), step(2), step(4)]


class SmallDisk:
    """os.pwrite on a disk with a limited number of bytes."""

    def __init__(self, monkeypatch, size: int) -> None:
        self.size, self._pwrite = size, os.pwrite
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, descriptor: int, data: bytes, offset: int) -> int:
        fits = data[: max(0, self.size - offset)]
        if data and not fits:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._pwrite(descriptor, fits, offset)


@pytest.mark.parametrize("room", [0, 5], ids=["none of a line fits", "a part of it fits"])
def test_lines_rejected_by_full_disk_are_written_later(tmp_path, monkeypatch, room):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    file.write(step(1))
    disk = SmallDisk(monkeypatch, path.stat().st_size + room)
    assert "no space left on device" in file.write(step(2))
    assert "no space left on device" in file.write(step(3))
    assert read_metrics(path) == [step(1)] and path.read_bytes().endswith(b"}\n")  # no half line between
    disk.size = 10**6
    assert file.write(step(4)) is None
    assert read_metrics(path) == [step(1), step(2), step(3), step(4)]


# --- slow ranks


def test_slow_rank_is_named_at_end_of_window():
    watch = SlowRankWatch(4, factor=1.5, window=3)
    found = [watch.add([1.0, 1.1, 2.0, 0.9]) for _ in range(6)]
    assert [found[number] for number in (0, 1, 3, 4)] == [None] * 4
    assert found[2] == (2, pytest.approx(2.0)) and found[5] == (2, pytest.approx(2.0))


def test_ranks_within_factor_and_single_delays_are_not_named():
    watch = SlowRankWatch(3, factor=1.5, window=10)
    assert [watch.add([1.0, 1.4, 1.0]) for _ in range(10)] == [None] * 10
    assert [watch.add([1.0, 5.0 if number == 4 else 1.0, 1.0]) for number in range(10)] == [None] * 10


def test_slow_compilation_of_first_step_is_not_reported():
    watch = SlowRankWatch(2, factor=1.5, window=10)
    assert [watch.add([1.0, 60.0 if number == 0 else 1.0]) for number in range(10)] == [None] * 10
    assert watch.between_windows


def test_two_ranks_are_compared_and_one_is_not():
    assert SlowRankWatch(2, 1.5, window=1).add([0.1, 0.4]) == (1, pytest.approx(4.0))
    assert SlowRankWatch(1, 1.5, window=1).add([0.1]) is None
    assert SlowRankWatch(2, 1.5, window=1).add([0.0, 0.0]) is None


def test_peak_memory_includes_freed_memory():
    before = read_peak_memory_bytes(torch.device("cpu"))
    block = torch.ones(2**26)  # 256 MiB, touched
    size = block.nbytes
    del block
    assert read_peak_memory_bytes(torch.device("cpu")) - before > 0.5 * size or before > 2 * size
