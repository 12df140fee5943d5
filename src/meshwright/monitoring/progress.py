"""Progress of a run on stderr: a live bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from typing import Any

PLAIN_SECONDS = 5.0  # between plain lines, so that a log file stays readable


class Progress:
    """Progress display of a run on stderr. steps: number of steps of the whole run; show: False (on ranks other than 0)
    shows nothing; stream: output, None: stderr."""

    def __init__(self, steps: int, *, stream: Any = None, show: bool = True) -> None:
        self._stream = stream or sys.stderr
        self._steps, self._show, self._last = steps, show, 0.0
        self._bar: Any = None

    def begin(self, done: int) -> None:
        """Start the progress bar (on a terminal). done: steps done before this process began."""
        if self._show and self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
            )
            self._task = self._bar.add_task("training", total=self._steps, completed=done, figures="")
            self._bar.start()

    def line(self, text: str) -> None:
        """Print one plain line, above the bar."""
        if not self._show:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def step(self, done: int, figures: str) -> None:
        """Show that `done` steps are done. figures: text after the bar, such as loss and throughput."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, figures=figures)
        elif self._show and (done == self._steps or not self._last or time.monotonic() - self._last > PLAIN_SECONDS):
            self._last = time.monotonic()
            print(f"step {done}/{self._steps}  {figures}", file=self._stream, flush=True)

    def close(self) -> None:
        """Stop the bar and restore the terminal."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
