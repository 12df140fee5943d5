"""Progress: a bar on a terminal, a few plain lines elsewhere, nothing where nobody should speak."""

from __future__ import annotations

import io

from meshwright.monitoring import progress
from meshwright.monitoring.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(stream: io.StringIO, steps: int = 50, show: bool = True, done: int = 0) -> str:
    shown = Progress(steps, stream=stream, show=show)
    shown.line("before the first step")
    shown.begin(done)
    for step in range(done + 1, steps + 1):
        shown.step(step, f"loss {step}.0")
    shown.line("a [bold]line[/bold] that stays " + "and is long " * 20)
    shown.close()
    return stream.getvalue()


def test_log_file_gets_every_line_and_both_end_steps():
    lines = run(io.StringIO()).splitlines()
    assert lines[:3] == ["before the first step", "step 1/50  loss 1.0", "step 50/50  loss 50.0"]
    assert len(lines) == 4 and lines[3].startswith("a [bold]line[/bold] that stays and is long")


def test_a_resumed_run_shows_its_first_step_too():
    assert "step 31/50  loss 31.0" in run(io.StringIO(), done=30)


def test_progress_lines_are_seconds_apart(monkeypatch):
    clock = iter(range(1000, 2000))  # a second a look
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    lines = [line for line in run(io.StringIO(), 40).splitlines() if line.startswith("step")]
    steps = [int(line.split()[1].partition("/")[0]) for line in lines]
    assert 4 <= len(steps) <= 12 and steps[0] == 1 and steps[-1] == 40


def test_terminal_gets_progress_bar_and_unchanged_lines():
    text = run(Terminal())
    assert "\x1b[" in text and "50/50" in text and "loss 50.0" in text
    assert "before the first step\n" in text
    assert "a [bold]line[/bold] that stays " + "and is long " * 20 in text.replace("\x1b[?25h", "")
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden and comes back


def test_ranks_that_should_be_silent_are():
    assert run(io.StringIO(), show=False) == "" and run(Terminal(), show=False) == ""


def test_progress_can_be_closed_twice_or_unstarted():
    shown = Progress(3, stream=Terminal())
    shown.close()
    shown.begin(0)
    shown.close()
    shown.close()
