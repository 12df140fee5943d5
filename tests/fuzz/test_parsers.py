"""Whatever a file or an argument holds, it is read, or refused in one line."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.parsers import PARSERS

FEW, MANY = 60, int(os.environ.get("MESHWRIGHT_FUZZ", 100_000))
SECONDS = 10.0  # of processor time for an input, also where it is the first and its reader imports PyTorch
MEMORY_BYTES = 4 << 30  # beside what the process has already mapped


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """An allocation without bound is a MemoryError, and not the end of the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


class TooSlow(BaseException):
    """The timer's; a reader that takes any `Exception` for a refusal must not take this for one."""


@contextmanager
def bounded_time(text: bytes) -> Iterator[None]:
    """AssertionError where the block takes more than `SECONDS` of processor time."""

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


def read_or_refuse(name: str, count: int, directory: Path) -> None:
    parser = PARSERS[name]

    @settings(
        max_examples=count, derandomize=True, phases=[Phase.generate], deadline=None, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )  # fmt: skip
    @given(st.data())
    def check(data: st.DataObject) -> None:
        text = data.draw(inputs)
        try:
            with bounded_time(text):
                parser.read(text, directory)
        except parser.refusals as error:
            line = " ".join(str(error).split())
            assert line and len(line) < 10_000, "a refusal is one line that a person can read"

    inputs = parser.inputs()
    check()


@pytest.mark.parametrize("name", PARSERS)
def test_corrupted_input_is_read_or_refused_in_one_line(name: str, tmp_path: Path, bounded_memory: None):
    read_or_refuse(name, FEW, tmp_path)


@pytest.mark.fuzz
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", PARSERS)
def test_many_corrupted_inputs_are_read_or_refused(name: str, tmp_path: Path, bounded_memory: None):
    read_or_refuse(name, MANY, tmp_path)


def test_an_input_that_takes_too_long_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules[__name__], "SECONDS", 0.05)

    def read() -> None:
        while True:
            with suppress(Exception):
                list(range(100))

    with pytest.raises(AssertionError, match=r"more than 0\.05 s: b'slow'"), bounded_time(b"slow"):
        read()
