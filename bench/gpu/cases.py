"""Cases of a benchmark on a GPU: one that fails does not stop the others, and the JSON is written after each."""

from __future__ import annotations

import gc
import json
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from common import RESULTS, write_result

SHOWN_CHARACTERS = 600


class Cases:
    """The results of a script by section and title.

    name: of the JSON under `bench/results`; without it nothing is written and the document is printed at the end.
    seconds: no case begins later than this after the first; those left out are listed. only: regular expression that a
    case's "SECTION: TITLE" contains; other cases are not run, and their results in the JSON stay. "case_seconds" of the
    document: seconds of each case, the longest first.
    """

    def __init__(
        self, name: str | None, header: dict[str, Any], seconds: float = 540.0, only: str | None = None
    ) -> None:
        self.name, self.seconds, self.only = name, seconds, only
        self.begun = time.perf_counter()
        earlier: dict[str, Any] = {}
        if only is not None and name is not None:
            earlier = json.loads((RESULTS / f"{name}.json").read_text())
            earlier["run_again"] = only
        self.document: dict[str, Any] = {**earlier, **header, "failed": {}, "left_out": []}

    def run(self, section: str, title: str, case: Callable[[], Any], holds: Callable[[Any], bool] | None = None) -> Any:
        """Run one case and keep what it returns. An exception, or a result for which `holds` is false, is a failure
        with its reason; None is returned after an exception, and for a case that is not run."""
        if self.only is not None and not re.search(self.only, f"{section}: {title}"):
            return None
        if time.perf_counter() - self.begun > self.seconds:
            self.document["left_out"].append(f"{section}: {title}")
            self._write()
            return None
        free_memory()
        begun = time.perf_counter()
        found = None
        try:
            found = case()
            self.document.setdefault(section, {})[title] = found
            if holds is not None and not holds(found):
                self.document["failed"][f"{section}: {title}"] = f"failed: {found}"
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
            cause = f" <- {error.__cause__}"[-SHOWN_CHARACTERS:] if error.__cause__ else ""
            self.document["failed"][f"{section}: {title}"] = reason[:SHOWN_CHARACTERS] + cause
        shown = self.document["failed"].get(f"{section}: {title}", found)
        seconds = self.document.get("case_seconds", {}) | {f"{section}: {title}": round(time.perf_counter() - begun, 1)}
        self.document["case_seconds"] = dict(sorted(seconds.items(), key=lambda each: -each[1]))
        print(f"{section}: {title}  {seconds[f'{section}: {title}']} s  {shown}", file=sys.stderr, flush=True)
        self._write()
        return found

    def _write(self) -> None:
        self.document["seconds"] = round(time.perf_counter() - self.begun, 1)
        if self.name is not None:
            keys = ("benchmark", "date", "machine")
            write_result(self.name, {k: v for k, v in self.document.items() if k not in keys}, quiet=True)

    def end(self) -> int:
        """Print the longest cases, and the document where it is not written. Return the exit code: 1 if a case failed
        or was left out."""
        whole = time.perf_counter() - self.begun
        longest = [f"{seconds} s {title}" for title, seconds in self.document.get("case_seconds", {}).items()][:10]
        print(f"{whole:.0f} s, of which {'; '.join(longest)}", file=sys.stderr)
        if self.name is None:
            print(self.document)
        return 1 if self.document["failed"] or self.document["left_out"] else 0


def free_memory() -> None:
    """Drop what earlier cases left in reference cycles and in the allocator's cache."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def step_seconds(step: Callable[[], Any], warm: int, steps: int, cuda: bool) -> float:
    """Median seconds of a step, the device's work included; peak memory is that of the measured steps."""
    seconds = []
    for turn in range(warm + steps):
        if cuda:
            torch.cuda.synchronize()
            if turn == warm:
                torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[warm:])
