"""Every file or argument is read, or refused in one line."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzz.inputs import generated
from tests.fuzz.parsers import PARSERS

FEW = 60
SECONDS = 10.0  # of CPU time for an input, including the first one, whose reader imports PyTorch
MEMORY_BYTES = 4 << 30  # in addition to the memory that is already mapped


@pytest.fixture
def directory() -> Iterator[Path]:
    """Empty directory, in memory if possible."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as made:
        yield Path(made)


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """Limit the address space, so that an unbounded allocation raises MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


class TooSlow(BaseException):
    """Raised by the timer; a BaseException, which no reader mistakes for a refusal."""


@contextmanager
def bounded_time(text: bytes) -> Iterator[None]:
    """Raise AssertionError if the block takes more than `SECONDS` of CPU time."""

    def stop(number: int, frame: object) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    except TooSlow:
        raise AssertionError(f"an input takes more than {SECONDS} s: {text[:1000]!r}") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def find_faults(name: str, numbers: range, directory: Path) -> dict[str, object]:
    """Read the inputs `numbers` of a parser; returns the counts of inputs and refusals, CPU seconds, and faults,
    {where: the first input that failed there}.

    Input n depends only on the seed "NAME n": `MESHWRIGHT_FUZZ=n:n+1` repeats it.
    """
    parser, refused, begun = PARSERS[name], 0, time.process_time()
    make, faults = parser.inputs(), dict[str, str]()
    for number in numbers:
        text = make(Random(f"{name} {number}"))
        try:
            with bounded_time(text):
                parser.read(text, directory)
        except parser.refusals as error:
            refused += 1
            line = " ".join(str(error).split())
            if not line or len(line) >= 10_000:
                faults.setdefault("no line that a person can read", f"input {number}: {line[:300]!r}: {text[:300]!r}")
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{type(error).__name__} in {last.filename}:{last.lineno}"
            faults.setdefault(place, f"input {number}: {str(error)[:300]!r}: {text[:300]!r}")
    seconds = round(time.process_time() - begun, 1)
    return {"inputs": len(numbers), "refused": refused, "processor_seconds": seconds, "faults": faults}


@pytest.mark.parametrize("name", PARSERS)
def test_corrupted_input_is_read_or_refused_in_one_line(name: str, directory: Path, bounded_memory: None):
    assert not find_faults(name, range(FEW), directory)["faults"]


def find_generated_faults(name: str, examples: int, directory: Path) -> None:
    """Read inputs that hypothesis generates; a failure shows the shortest input that it finds."""
    parser = PARSERS[name]

    @settings(max_examples=examples, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(text=generated(parser.inputs()))
    def read(text: bytes) -> None:
        try:
            with bounded_time(text):
                parser.read(text, directory)
        except parser.refusals as error:
            assert 0 < len(" ".join(str(error).split())) < 10_000

    read()


@pytest.mark.parametrize("name", PARSERS)
def test_generated_input_is_read_or_refused_in_one_line(name: str, directory: Path, bounded_memory: None):
    find_generated_faults(name, FEW // 4, directory)


@pytest.mark.fuzz
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", PARSERS)
def test_many_generated_inputs_are_read_or_refused(name: str, directory: Path, bounded_memory: None):
    first, _, end = os.environ.get("MESHWRIGHT_FUZZ", "0:100000").rpartition(":")
    find_generated_faults(name, max(1, (int(end) - int(first or 0)) // 10), directory)


@pytest.mark.fuzz
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", PARSERS)
def test_many_corrupted_inputs_are_read_or_refused(
    name: str, directory: Path, bounded_memory: None, record_property: Callable[[str, object], None]
):
    first, _, end = os.environ.get("MESHWRIGHT_FUZZ", "0:100000").rpartition(":")
    found = find_faults(name, range(int(first or 0), int(end)), directory)
    record_property("found", json.dumps(found))
    assert not found["faults"]


def test_an_input_that_takes_too_long_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules[__name__], "SECONDS", 0.05)

    def read() -> None:
        while True:
            with suppress(Exception):
                list(range(100))

    with pytest.raises(AssertionError, match=r"more than 0\.05 s: b'slow'"), bounded_time(b"slow"):
        read()
