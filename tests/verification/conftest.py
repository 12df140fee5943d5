"""Local ranks that stay from test to test of this folder: each number of them is started once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from meshwright.comm.local import LocalRanks
from meshwright.flight_recorder.rank_report import Snapshot
from meshwright.verification import cases, mutations, run
from meshwright.verification.local_faults import LOCAL_FAULTS
from tests.verification.local_fault_names import NEEDS_RANKS


class KeptRanks:
    """Stands for `LocalRanks`; closing it leaves them for the next test."""

    started: dict[int, LocalRanks] = {}

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks = self.started.setdefault(world_size, LocalRanks(world_size))

    def run(self, *arguments: Any, **options: Any) -> list[Any]:
        return self._ranks.run(*arguments, **options)

    def calls(self) -> Snapshot:
        return self._ranks.calls()

    def close(self) -> None:
        pass


@pytest.fixture(scope="session", autouse=True)
def kept_ranks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "LocalRanks", KeptRanks)
        yield
    for ranks in KeptRanks.started.values():
        ranks.close()


@pytest.fixture
def fewer_kinds(monkeypatch: pytest.MonkeyPatch, fewer_local_faults: None) -> None:
    """Faults of the kinds that a step shows; those that several steps must show take most of the time."""
    monkeypatch.setattr(mutations, "KINDS", ("skip", "double", "wrong group"))


@pytest.fixture
def two_layers(monkeypatch: pytest.MonkeyPatch, first_case_alone: None) -> None:
    """Faults planted in models of two layers, the fewest in which a layer's calls are those of another layer, too."""
    plain = cases.CaseBuilder.plain
    monkeypatch.setattr(cases.CaseBuilder, "plain", lambda maker, layers=5: plain(maker, min(layers, 2)))


@pytest.fixture
def fewer_local_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local faults that need several ranks: test_verify_step.py plants the others on one."""
    monkeypatch.setattr(mutations, "LOCAL_FAULTS", {name: LOCAL_FAULTS[name] for name in sorted(NEEDS_RANKS)})


@pytest.fixture
def first_case_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the cases of a layout the first, in three layers: the step with AdamW, a skipped step and resumes.

    A model whose routers have biases keeps five: in three, an expert of dots-llm1 has exactly the mean load in a step,
    and rounding decides by which sign its bias moves.
    """

    def first(maker: cases.CaseBuilder) -> list[cases.Case]:
        return [cases.Case("updates", maker.updates(layers=5 if maker.config.router_bias else 3))]

    monkeypatch.setattr(cases.CaseBuilder, "default", first)
