"""Sends a run's figures to trackers, each from a thread of its own: none can stop a run or hold up a step."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from meshwright.errors import UserError
from meshwright.monitoring.metrics import read_metrics
from meshwright.monitoring.resuming import values_by_key
from meshwright.monitoring.run_directory import RunDirectory
from meshwright.monitoring.trackers import FAILED, TrackedRun, Tracker, make_tracker
from meshwright.recipe import Recipe

WAITING = 2000  # lines that wait for a tracker; of more, the oldest are lost
TRIES = 3  # of one line
LONGEST_PAUSE = 60.0  # seconds between tries, which double from PAUSE on
PAUSE = 1.0
START_SECONDS = 10.0  # that the first step waits for trackers at most
PATIENCE_SECONDS = 20.0  # for what waits when the run ends
PATIENCE_AFTER_FAILURE = 2.0  # others wait for the reason
LONGEST_REASON = 160  # characters
KEEP_SECONDS = 1.0  # between notes of how far a tracker is

Line = tuple[int, dict[str, float | str]]


class Tracking:
    """The trackers of a recipe. `step`: steps done in the checkpoint that the run goes on from (0: a fresh run).

    Made by rank 0 when `metrics.jsonl` is open. `UserError` for trackers that cannot be made.
    """

    def __init__(
        self, recipe: Recipe, layout: str, directory: RunDirectory, step: int, say: Callable[[str], None]
    ) -> None:
        self._senders: list[_Sender] = []
        if not recipe.track.to:
            return
        known = directory.read_trackers()
        lock = threading.Lock()
        entries: dict[str, dict[str, str]] = {}

        def keep() -> None:
            with lock:
                directory.write_trackers(entries)

        parameters = values_by_key(recipe) | {"layout": layout}
        for name in recipe.track.to:
            entries[name] = kept = dict(known.get(name, {}))
            sent = kept.get("sent", "0")
            before = min(step, int(sent) if sent.isdecimal() else 0)
            run = TrackedRun(recipe.run.name, directory.path, step == 0, before, kept)
            tracker = make_tracker(recipe, name)
            missing = deque(line for line in map(figures_of, _lines(directory, step)) if line[0] > before)
            self._senders.append(_Sender(name, tracker, run, parameters, missing, keep, say))
        deadline = time.monotonic() + START_SECONDS
        for sender in self._senders:  # what the start takes should not stand in the first steps' time and memory
            sender.tried.wait(max(0.0, deadline - time.monotonic()))

    def line(self, line: Mapping[str, Any]) -> None:
        """A line of `metrics.jsonl`."""
        for sender in self._senders:
            sender.put(figures_of(line))

    def values(self, step: int, values: Mapping[str, Any]) -> None:
        """Other figures, nested, and texts."""
        for sender in self._senders:
            sender.put((step, figures(values)))

    def finish(self, status: str) -> None:
        """The run is over: wait, not for long, until trackers have what they were sent; say what was lost."""
        patience = PATIENCE_AFTER_FAILURE if status == FAILED else PATIENCE_SECONDS
        deadline = time.monotonic() + patience
        for sender in self._senders:
            sender.close(status)
        for sender in self._senders:
            sender.join(max(0.0, deadline - time.monotonic()))
        self._senders = []


class _Sender:
    """One tracker, its thread and the lines that wait for it."""

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        run: TrackedRun,
        recipe: Mapping[str, Any],
        missing: deque[Line],
        keep: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self.name, self.tracker, self.run, self.recipe = name, tracker, run, recipe
        self._keep, self._say = keep, say
        self._missing = missing  # that `metrics.jsonl` has and the tracker may not: never dropped
        self._waiting: deque[Line] = deque()
        self._news = threading.Condition()
        self.tried = threading.Event()  # once it has been told, or not, that the run begins
        self._status: str | None = None  # once nothing more comes
        self._sent = self._lost = 0
        self._under_way = 0  # lines that the tracker is being told
        self._trouble = self._end_trouble = ""
        self._kept_at = 0.0
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, line: Line) -> None:
        """Another line; returns at once."""
        with self._news:
            if len(self._waiting) == WAITING:
                self._waiting.popleft()
                self._lost += 1
            self._waiting.append(line)
            self._news.notify()

    def close(self, status: str) -> None:
        """Nothing more comes."""
        with self._news:
            self._status = status
            self._news.notify()

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread, at most so long, and say what was lost."""
        self._thread.join(seconds)
        late = self._thread.is_alive()
        with self._news:
            lost = self._lost + self._under_way + len(self._waiting) + len(self._missing)
        if lost:
            reason = self._trouble or ("it takes too long" if late else "they came faster than it takes them")
            self._say(f"tracker {self.name}: {lost} of {lost + self._sent} lines were lost ({reason})")
        elif late or self._end_trouble:
            reason = self._end_trouble or "it takes too long"
            self._say(f"tracker {self.name} has every line, but was not told that the run has ended ({reason})")

    # --- in the thread

    def _work(self) -> None:
        if not self._until_it_works(lambda: self.tracker.start(self.run, self.recipe)):
            return
        self._note(self.run.step, now=True)
        last = self.run.step
        while (line := self._next()) is not None:
            last, values = line
            if self._until_it_works(lambda: self.tracker.log(last, values), TRIES):  # noqa: B023
                self._sent += 1
            elif self._status is not None:
                return  # it is lost, and what waits
            else:
                self._lost += 1
            self._under_way = 0
            self._note(last - 1)  # more lines of this step may come
        try:
            self.tracker.finish(self._status or FAILED)
        except Exception as error:
            self._end_trouble = _words(error)
        self._note(last, now=True)

    def _next(self) -> Line | None:
        """Take the next line; None at the end."""
        with self._news:
            while not self._missing and not self._waiting:
                if self._status is not None:
                    return None
                self._news.wait()
            self._under_way = 1
            return (self._missing or self._waiting).popleft()

    def _until_it_works(self, call: Callable[[], None], tries: int | None = None) -> bool:
        """Call again and again, after longer and longer pauses, until it raises nothing. False when the tries are used
        up, or when it fails and the run is over."""
        pause, tried = PAUSE, 0
        while True:
            try:
                call()
                return True
            except Exception as error:
                self._complain(_words(error))
            finally:
                self.tried.set()
            tried += 1
            if self._status is not None or tried == tries:
                return False
            with self._news:
                self._news.wait_for(lambda: self._status is not None, pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _complain(self, reason: str) -> None:
        if not self._trouble:
            self._say(f"tracker {self.name} takes nothing: {reason}; training goes on, and it is tried again")
        self._trouble = reason

    def _note(self, step: int, now: bool = False) -> None:
        """Keep how far the tracker is: what a run that goes on need not send again."""
        self.run.kept["sent"] = str(max(step, 0))
        if now or time.monotonic() - self._kept_at > KEEP_SECONDS:
            self._kept_at = time.monotonic()
            try:
                self._keep()
            except UserError:
                pass  # the same lines come again, then


def figures(values: Mapping[str, Any], prefix: str = "") -> dict[str, float | str]:
    """Numbers and texts by the way to them ("seconds_by_part/forward"); what is not finite is left out."""
    found: dict[str, float | str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= figures(value, f"{prefix}{key}/")
        elif isinstance(value, str):
            found[prefix + key] = value
        elif isinstance(value, (bool, int, float)) and math.isfinite(value):
            found[prefix + key] = float(value)
    return found


def figures_of(line: Mapping[str, Any]) -> Line:
    """A line of `metrics.jsonl`: its step and its figures, those of an event under its name ("save/stall_seconds")."""
    event = line.get("event")
    rest = {key: value for key, value in line.items() if key not in ("step", "event")}
    return int(line.get("step", 0)), figures(rest, f"{event}/" if event else "")


def _lines(directory: RunDirectory, step: int) -> list[dict[str, Any]]:
    return [line for line in read_metrics(directory.metrics) if line.get("step", 0) <= step] if step else []


def _words(error: Exception) -> str:
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return said if len(said) <= LONGEST_REASON else f"{said[: LONGEST_REASON - 3]}..."
