"""Progress of a run on stderr: a live line with a bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from meshwright.terminal import wrap_items

PLAIN_SECONDS = 5.0  # minimum time between plain lines, to keep log files short
RECENT = 50  # number of last steps from whose mean duration the remaining time is estimated


class Progress:
    """Progress bar and lines of a run, on a terminal or in a log file. steps: number of steps of the whole run; stream:
    output stream, None for stderr; show: False to print nothing, on ranks other than 0."""

    def __init__(self, steps: int, *, stream: Any = None, show: bool = True) -> None:
        """Start without output; arguments: see the class."""
        self._stream = stream or sys.stderr
        self._steps, self._show, self._last, self._done = steps, show, 0.0, 0
        self._bar: Any = None
        self._figures: Sequence[str] = ()
        self._begun = time.monotonic()
        self._ends: deque[float] = deque(maxlen=RECENT + 1)  # times at which the last steps ended

    def begin(self, done: int) -> None:
        """Start the clock and, on a terminal, the progress bar. done: number of steps done before this process
        began."""
        self._done, self._begun = done, time.monotonic()
        self._ends.append(self._begun)
        if self._show and self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, ProgressColumn, Task
            from rich.progress import Progress as RichProgress
            from rich.text import Text

            bar = BarColumn(bar_width=10)

            class Figures(ProgressColumn):
                """Progress column with the step's values ("loss 3.117" ...), as many as fit next to the bar."""

                def render(column, task: Task) -> Text:  # noqa: N805
                    """Return the column's text. task: rich's state of the progress bar."""
                    width = console.width
                    bar.bar_width = max(5, width // 8)
                    room = width - len(self._format_position()) - bar.bar_width - 3
                    return Text(join_fitting(self._list_figures(), room), no_wrap=True, overflow="crop")

            class Position(ProgressColumn):
                """Progress column with the number of steps done and of all steps."""

                def render(column, task: Task) -> Text:  # noqa: N805
                    """Return the column's text. task: rich's state of the progress bar."""
                    return Text(self._format_position(), no_wrap=True)

            console = Console(file=self._stream)
            self._bar = RichProgress(Position(), bar, Figures(), console=console)
            self._task = self._bar.add_task("training", total=self._steps, completed=done)
            self._bar.start()

    def print_line(self, text: str) -> None:
        """Print one line of text, above the bar if there is one. On a terminal, a line that is too long is wrapped at
        the semicolons between its items."""
        if not self._show:
            return
        if self._stream.isatty():
            text = wrap_items(text, self._terminal_width())
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def step(self, done: int, figures: Sequence[str]) -> None:
        """Display that `done` steps are done. figures: values as texts such as "loss 3.117", the most important first;
        as many as fit are displayed."""
        self._done, self._figures = done, figures
        self._ends.append(time.monotonic())
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
        elif self._show and (done == self._steps or not self._last or self._ends[-1] - self._last > PLAIN_SECONDS):
            self._last = self._ends[-1]
            print("  ".join([self._format_position(), *figures, *self._format_times()]), file=self._stream, flush=True)

    def close(self) -> None:
        """Remove the progress bar and restore the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _terminal_width(self) -> int:
        """Return the width in columns of the terminal to which `stream` prints."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except OSError:
            columns = 80
        return shutil.get_terminal_size((columns, 24)).columns  # the environment variable COLUMNS takes precedence

    def _format_position(self) -> str:
        """Format the number of steps done and of all steps as `step 58/60`."""
        return f"step {self._done}/{self._steps}"

    def _list_figures(self) -> list[str]:
        """Return the texts to display on a terminal, the most important first: remaining time, values of the step,
        elapsed time."""
        elapsed, *remaining = self._format_times()
        return [*remaining, *self._figures, elapsed]

    def _format_times(self) -> list[str]:
        """Return texts for the elapsed and the remaining time; the remaining time only while steps are left and at
        least one step has been timed."""
        now = time.monotonic()
        times = [f"elapsed {format_clock(now - self._begun)}"]
        if (measured := len(self._ends) - 1) > 0 and (left := self._steps - self._done) > 0:
            seconds = left * (self._ends[-1] - self._ends[0]) / measured
            times.append(f"ETA {format_clock(max(0.0, seconds - (now - self._ends[-1])))}")
        return times


def join_fitting(parts: Sequence[str], width: int) -> str:
    """Join as many of the texts `parts`, in order, as fit into `width` characters, separated by two spaces. The first
    text is always included."""
    line = "".join(parts[:1])
    for part in parts[1:]:
        if len(line) + 2 + len(part) > width:
            break
        line = f"{line}  {part}"
    return line


def format_clock(seconds: float) -> str:
    """Format a duration in seconds as `m:ss` or `h:mm:ss`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
