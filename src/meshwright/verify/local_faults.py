"""Faults planted in local code: one function of the engine is replaced while they are planted."""
from __future__ import annotations
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LocalFault:
    name: str

    @contextmanager
    def planted(self) -> Iterator[Any]:
        yield None
