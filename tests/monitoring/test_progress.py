"""Progress: a bar on a terminal, a few plain lines elsewhere, nothing on silent ranks."""

from __future__ import annotations

import io
import re

import pytest

from meshwright.monitoring import progress
from meshwright.monitoring.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(stream: io.StringIO, steps: int = 50, show: bool = True, done: int = 0, stop: int | None = None) -> str:
    shown = Progress(steps, stream=stream, show=show)
    shown.print_line("before the first step")
    shown.begin(done)
    for step in range(done + 1, (stop or steps) + 1):
        shown.step(step, (f"loss {step}.0", "9 tokens/s", "lr 1.00e-03", "grad norm 1.5", "MFU 40.0%"))
    shown.print_line("a [bold]line[/bold] that stays " + "and is long " * 20)
    shown.close()
    return stream.getvalue()


def test_log_file_gets_every_line_and_both_end_steps():
    lines = run(io.StringIO()).splitlines()
    figures = "9 tokens/s  lr 1.00e-03  grad norm 1.5  MFU 40.0%  elapsed 0:00"
    assert lines[0] == "before the first step" and lines[1] == f"step 1/50  loss 1.0  {figures}  ETA 0:00"
    assert lines[2] == f"step 50/50  loss 50.0  {figures}"
    assert len(lines) == 4 and lines[3].startswith("a [bold]line[/bold] that stays and is long")


def test_resumed_run_prints_its_first_step():
    assert "step 31/50  loss 31.0" in run(io.StringIO(), done=30)


def test_progress_lines_are_seconds_apart(monkeypatch):
    clock = iter(range(1000, 2000))  # a second a look
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    lines = [line for line in run(io.StringIO(), 40).splitlines() if line.startswith("step")]
    steps = [int(line.split()[1].partition("/")[0]) for line in lines]
    assert 4 <= len(steps) <= 12 and steps[0] == 1 and steps[-1] == 40


def test_terminal_gets_progress_bar_and_unchanged_lines(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    text = run(Terminal())
    assert "\x1b[" in text and "50/50" in text and "loss 50.0" in text
    assert "before the first step\n" in text
    assert "a [bold]line[/bold] that stays " + "and is long " * 20 in text.replace("\x1b[?25h", "")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden and comes back


@pytest.mark.parametrize("columns", [60, 80])
def test_narrow_terminal_gets_long_lines_broken_between_items(columns: int, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    line = (
        "predicted: 67 ms a step (60 to 83 ms; 3 runs); memory of rank 0 552 MiB (" + "tensors 9 MiB, " * 6 + "); 8 MiB"
    )
    lines = {}
    for stream in (Terminal(), io.StringIO()):
        Progress(9, stream=stream).print_line(line)
        lines[type(stream)] = stream.getvalue().splitlines()
    assert lines[io.StringIO] == [line]
    assert max(map(len, lines[Terminal])) <= columns and " ".join(map(str.strip, lines[Terminal])) == re.sub(
        r"\); ", ") ", line
    )
    starts = [each.lstrip() for each in lines[Terminal] if not each.startswith("    ")]
    assert [start.split()[0] for start in starts] == ["predicted:", "memory", "8"]


@pytest.mark.parametrize("columns", [30, 60, 80, 200])
def test_bar_line_keeps_step_and_remaining_time_at_every_width(columns: int, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = re.findall(r"step 49/50 [^\r\n]*", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", run(Terminal(), 50, stop=49)))
    assert shown and "ETA 0:00" in shown[-1] and len(shown[-1].rstrip()) <= columns
    assert ("loss 49.0" in shown[-1]) == (columns > 30) and ("elapsed" in shown[-1]) == (columns == 200)


def test_remaining_time_follows_the_measured_steps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    shown = Progress(100, stream=io.StringIO())
    shown.begin(0)
    for step in range(1, 11):
        now[0] += 6.0
        shown.step(step, ("loss 1.0",))
    assert shown._stream.getvalue().splitlines()[-1] == "step 10/100  loss 1.0  elapsed 1:00  ETA 9:00"


def test_clock_times_are_formatted_with_hours_where_needed():
    assert [progress.format_clock(seconds) for seconds in (0.4, 59.6, 3599, 3600, 90_061)] == [
        *("0:00", "1:00", "59:59", "1:00:00", "25:01:01")
    ]


def test_silent_ranks_print_nothing():
    assert run(io.StringIO(), show=False) == "" and run(Terminal(), show=False) == ""


def test_progress_can_be_closed_twice_or_unstarted():
    shown = Progress(3, stream=Terminal())
    shown.close()
    shown.begin(0)
    shown.close()
    shown.close()
