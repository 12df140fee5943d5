"""Sender of a run's metrics to trackers, each from its own thread: none can stop a run or delay a step."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.errors import UserError
from meshwright.monitoring.metrics import read_metrics
from meshwright.monitoring.recipe_keys import flatten
from meshwright.monitoring.resuming import list_values_by_key
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.monitoring.trackers import FAILED, TrackedRun, Tracker, make_tracker
from meshwright.recipe import Recipe

WAITING = 2000  # capacity of a tracker's queue; when it is full, the oldest lines are dropped
TRIES = 3  # attempts to send one line
LONGEST_PAUSE = 60.0  # maximum seconds between attempts; the pause doubles from PAUSE on
PAUSE = 1.0
START_SECONDS = 10.0  # maximum time that the first step waits for trackers to start
PATIENCE_SECONDS = 20.0  # time limit for queued lines at the end of a run
PATIENCE_AFTER_FAILURE = 2.0  # the same after a failure, whose message other processes wait for
LONGEST_REASON = 160  # characters
KEEP_SECONDS = 1.0  # minimum time between writes of the progress file

Line = tuple[int, dict[str, float | str]]


class Tracking:
    """Sender of a run's metrics to the trackers named in its recipe. Created on rank 0 when `metrics.jsonl` is open.
    `UserError` if a tracker cannot be created.

    recipe: the run's recipe. layout: notation such as "dp2 zero1", sent with the recipe's values. directory: run
    directory. step: steps done in the resumed checkpoint, 0 in a fresh run. log: prints a line on the console.
    """

    def __init__(
        self, recipe: Recipe, layout: str, directory: RunDirectory, step: int, log: Callable[[str], None]
    ) -> None:
        """Create the trackers and start their threads; arguments: see the class."""
        self._senders: list[_TrackerThread] = []
        if not recipe.track.to:
            return
        known = directory.read_trackers()
        lock = threading.Lock()
        entries: dict[str, dict[str, str]] = {}

        def keep() -> None:
            """Write the trackers' stored strings (run IDs ...) to the run directory; may be called from several
            threads."""
            with lock:
                directory.write_trackers(entries)

        parameters = list_values_by_key(recipe) | {"layout": layout}
        for name in recipe.track.to:
            entries[name] = kept = dict(known.get(name, {}))
            sent = kept.get("sent", "0")
            before = min(step, int(sent) if sent.isdecimal() else 0)
            run = TrackedRun(recipe.run.name, directory.path, step == 0, before, kept)
            tracker = make_tracker(recipe, name)
            missing = deque(line for line in map(flatten_line, _read_lines(directory, step)) if line[0] > before)
            self._senders.append(_TrackerThread(name, tracker, run, parameters, missing, keep, log))
        deadline = time.monotonic() + START_SECONDS
        for sender in self._senders:  # keeps the start of trackers out of the time and memory of the first steps
            sender.tried.wait(max(0.0, deadline - time.monotonic()))

    def queue_line(self, line: Mapping[str, Any]) -> None:
        """Queue a line of `metrics.jsonl` (JSON dict of one step or event) for all trackers."""
        for sender in self._senders:
            sender.put(flatten_line(line))

    def queue_values(self, step: int, values: Mapping[str, Any]) -> None:
        """Queue values of the step `step` that are not in `metrics.jsonl`, such as the prediction, for all trackers.
        values: nested dicts of numbers and texts."""
        for sender in self._senders:
            sender.put((step, flatten_values(values)))

    def finish(self, status: str) -> None:
        """Report the run's end to the trackers, wait a limited time until they have received all lines, and log the
        number of lost lines.

        status: "finished", "stopped" (the run may be resumed) or "failed".
        """
        patience = PATIENCE_AFTER_FAILURE if status == FAILED else PATIENCE_SECONDS
        deadline = time.monotonic() + patience
        for sender in self._senders:
            sender.close(status)
        for sender in self._senders:
            sender.join(max(0.0, deadline - time.monotonic()))
        self._senders = []


class _TrackerThread:
    """Queue and thread that send lines (step, values by name) to one tracker.

    Attributes:
        name: The tracker's name in `track.to`.
        tracker: The tracker.
        run: Description of the run, which the tracker gets at its start.
        recipe: Dotted key -> value.
        missing: Lines of metrics.jsonl that an earlier start of the run may not have sent; sent first and never
            dropped.
        keep: Function that writes, to the run directory, the strings that trackers need to resume.
        log: Prints a line on the console."""

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        run: TrackedRun,
        recipe: Mapping[str, Any],
        missing: deque[Line],
        keep: Callable[[], None],
        log: Callable[[str], None],
    ) -> None:
        """Start the thread; arguments: see the class."""
        self.name, self.tracker, self.run, self.recipe = name, tracker, run, recipe
        self._keep, self._log = keep, log
        self._missing = missing  # lines of `metrics.jsonl` that the tracker may lack: never dropped
        self._waiting: deque[Line] = deque()
        self._news = threading.Condition()
        self.tried = threading.Event()  # set after the first attempt to start the tracker
        self._status: str | None = None  # set by `close`
        self._sent = self._lost = 0
        self._in_flight = 0  # lines being sent
        self._last_error = self._finish_error = ""
        self._kept_at = 0.0
        self._thread = threading.Thread(target=self._send_all, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, line: Line) -> None:
        """Queue a line (step, values by name) without blocking; if the queue is full, the oldest line is dropped."""
        with self._news:
            if len(self._waiting) == WAITING:
                self._waiting.popleft()
                self._lost += 1
            self._waiting.append(line)
            self._news.notify()

    def close(self, status: str) -> None:
        """Signal the thread that there are no more lines. status: "finished", "stopped" or "failed"."""
        with self._news:
            self._status = status
            self._news.notify()

    def join(self, seconds: float) -> None:
        """Wait at most `seconds` for the thread to send all queued lines and to end. Lines that were not delivered are
        logged with their number and the reason, and so is a tracker that did not accept the end of the run."""
        self._thread.join(seconds)
        late = self._thread.is_alive()
        with self._news:
            lost = self._lost + self._in_flight + len(self._waiting) + len(self._missing)
        if lost:
            reason = self._last_error or ("timed out" if late else "they were logged faster than it accepts them")
            self._log(f"tracker {self.name}: {lost} of {lost + self._sent} lines were lost ({reason})")
        elif late or self._finish_error:
            reason = self._finish_error or "timed out"
            self._log(f"tracker {self.name} has every line, but not the end of the run ({reason})")

    # --- in the thread

    def _send_all(self) -> None:
        """Main function of the thread: start the tracker, send all lines to it, and report the run's end to it."""
        if not self._retry(lambda: self.tracker.start(self.run, self.recipe)):
            return
        self._save_progress(self.run.step, now=True)
        last = self.run.step
        while (line := self._next_line()) is not None:
            last, values = line
            if self._retry(lambda: self.tracker.log(last, values), TRIES):  # noqa: B023
                self._sent += 1
            elif self._status is not None:
                return  # the run has ended: queued lines are lost
            else:
                self._lost += 1
            self._in_flight = 0
            self._save_progress(last - 1)  # more lines of this step may come
        try:
            self.tracker.finish(self._status or FAILED)
        except Exception as error:
            self._finish_error = _format_error(error)
        self._save_progress(last, now=True)

    def _next_line(self) -> Line | None:
        """Wait for the next line (step, values by name) and return it; None if no line is left and the run
        has ended.
        """
        with self._news:
            while not self._missing and not self._waiting:
                if self._status is not None:
                    return None
                self._news.wait()
            self._in_flight = 1
            return (self._missing or self._waiting).popleft()

    def _retry(self, call: Callable[[], None], tries: int | None = None) -> bool:
        """Call `call` until a call does not raise, with growing pauses between the calls; return True. Give up and
        return False after `tries` failures (None: no limit), or at the first failure after the run has ended."""
        pause, tried = PAUSE, 0
        while True:
            try:
                call()
                return True
            except Exception as error:
                self._log_failure(_format_error(error))
            finally:
                self.tried.set()
            tried += 1
            if self._status is not None or tried == tries:
                return False
            with self._news:
                self._news.wait_for(lambda: self._status is not None, pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _log_failure(self, reason: str) -> None:
        """Store `reason` as the tracker's latest error; log only the tracker's first error."""
        if not self._last_error:
            self._log(f"tracker {self.name} failed: {reason}; training continues, and sending is retried")
        self._last_error = reason

    def _save_progress(self, step: int, now: bool = False) -> None:
        """Store in the run directory that the tracker has received all lines up to step `step`, so that a resumed run
        sends only later lines. now: True to write at once; False to write at most once in `KEEP_SECONDS`."""
        self.run.kept["sent"] = str(max(step, 0))
        if now or time.monotonic() - self._kept_at > KEEP_SECONDS:
            self._kept_at = time.monotonic()
            try:
                self._keep()
            except UserError:
                pass  # after a resume the same lines are sent again


def flatten_values(values: Mapping[str, Any], prefix: str = "") -> dict[str, float | str]:
    """Flatten nested dicts to {path: number or text}, with paths such as "seconds_by_part/forward"; values that are not
    finite are left out. prefix: text before each path."""
    flat = flatten(values, "/", prefix)
    texts = {key: value for key, value in flat.items() if isinstance(value, str)}
    numbers = (bool, int, float)
    return texts | {
        key: float(value) for key, value in flat.items() if isinstance(value, numbers) and math.isfinite(value)
    }


def flatten_line(line: Mapping[str, Any]) -> Line:
    """Convert a line of `metrics.jsonl` (JSON dict) to (step, {path: value}). In the line of an event, the event's name
    is the first part of each path ("save/stall_seconds")."""
    event = line.get("event")
    rest = {key: value for key, value in line.items() if key not in ("step", "event")}
    return int(line.get("step", 0)), flatten_values(rest, f"{event}/" if event else "")


def _read_lines(directory: RunDirectory, step: int) -> list[dict[str, Any]]:
    """Read the lines of `metrics.jsonl` in a run directory (`directory`) up to step `step` (inclusive) as dicts; no
    lines for a fresh run (step 0)."""
    return [line for line in read_metrics(directory.metrics) if line.get("step", 0) <= step] if step else []


def _format_error(error: Exception) -> str:
    """Format an exception as one short line."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 3]}..."
