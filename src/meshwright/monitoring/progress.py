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
    """Progress display of a run on stderr. steps: number of steps of the whole run; show: False shows nothing, for
    ranks other than 0; stream: where to print, None for stderr."""

    def __init__(self, steps: int, *, stream: Any = None, show: bool = True) -> None:
        self._stream = stream or sys.stderr
        self._steps, self._show, self._last, self._done = steps, show, 0.0, 0
        self._bar: Any = None
        self._figures: Sequence[str] = ()
        self._begun = time.monotonic()
        self._ends: deque[float] = deque(maxlen=RECENT + 1)  # times at which the last steps ended

    def begin(self, done: int) -> None:
        """Start the clock and, on a terminal, the progress bar. done: steps done before this process began."""
        self._done, self._begun = done, time.monotonic()
        self._ends.append(self._begun)
        if self._show and self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, ProgressColumn, Task
            from rich.progress import Progress as RichProgress
            from rich.text import Text

            bar = BarColumn(bar_width=10)

            class Figures(ProgressColumn):
                """Column of the figures that fit next to the bar on the console's line."""

                def render(column, task: Task) -> Text:  # noqa: N805
                    """Return the text of the column."""
                    width = console.width
                    bar.bar_width = max(5, width // 8)
                    room = width - len(self._position()) - bar.bar_width - 3
                    return Text(fit(self._all_figures(), room), no_wrap=True, overflow="crop")

            class Position(ProgressColumn):
                """Column of the steps done and in all."""

                def render(column, task: Task) -> Text:  # noqa: N805
                    """Return the text of the column."""
                    return Text(self._position(), no_wrap=True)

            console = Console(file=self._stream)
            self._bar = RichProgress(Position(), bar, Figures(), console=console)
            self._task = self._bar.add_task("training", total=self._steps, completed=done)
            self._bar.start()

    def line(self, text: str) -> None:
        """Print one plain line, above the bar if there is one. On a terminal, a line that is too long is broken at the
        semicolons between its items."""
        if not self._show:
            return
        if self._stream.isatty():
            text = wrap_items(text, self._width())
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def step(self, done: int, figures: Sequence[str]) -> None:
        """Show that `done` steps are done. figures: texts such as "loss 3.117", the most important first; a narrow
        terminal shows the first ones."""
        self._done, self._figures = done, figures
        self._ends.append(time.monotonic())
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
        elif self._show and (done == self._steps or not self._last or self._ends[-1] - self._last > PLAIN_SECONDS):
            self._last = self._ends[-1]
            print("  ".join([self._position(), *figures, *self._times()]), file=self._stream, flush=True)

    def close(self) -> None:
        """Stop the bar and restore the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _width(self) -> int:
        """Return the number of columns of the terminal to which the stream prints (not of standard output's
        terminal)."""
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except OSError:
            columns = 80
        return shutil.get_terminal_size((columns, 24)).columns  # the environment variable COLUMNS takes precedence

    def _position(self) -> str:
        """Return text for the number of steps done and of all steps: `step 58/60`."""
        return f"step {self._done}/{self._steps}"

    def _all_figures(self) -> list[str]:
        """Return the figures for a terminal, the most important first: the remaining time, those of the step, the
        elapsed time."""
        elapsed, *remaining = self._times()
        return [*remaining, *self._figures, elapsed]

    def _times(self) -> list[str]:
        """Return texts for the elapsed time and, while steps are left and one is measured, for the remaining time."""
        now = time.monotonic()
        times = [f"elapsed {format_clock(now - self._begun)}"]
        if (measured := len(self._ends) - 1) > 0 and (left := self._steps - self._done) > 0:
            seconds = left * (self._ends[-1] - self._ends[0]) / measured
            times.append(f"ETA {format_clock(max(0.0, seconds - (now - self._ends[-1])))}")
        return times


def fit(parts: Sequence[str], width: int) -> str:
    """Join texts by two spaces, in order, as many as fit into `width` characters; the first is always included."""
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
