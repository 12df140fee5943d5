"""Local ranks that are shared by the tests of this folder, started once for each number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from meshwright.comm.faults import Fault
from meshwright.verification import cases, mutations, run
from meshwright.verification.local_faults import LOCAL_FAULTS
from tests.verification.kept_ranks import KeptRanks
from tests.verification.local_fault_names import NEEDS_RANKS


@pytest.fixture(scope="session", autouse=True)
def kept_ranks_and_references() -> Iterator[None]:
    """Share rank processes and single-device references between tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "LocalRanks", KeptRanks)
        patch.setattr(run, "Reference", cache(run.Reference))
        yield
    for ranks in KeptRanks.started.values():
        ranks.close()


@pytest.fixture
def fewer_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restrict faults to the kinds that one step reveals (those that need several steps take most of the time), at a
    site with several calls to one of them, which is harder to see than all. test_verify.py plants local faults, and
    each fault in all calls, too."""
    monkeypatch.setattr(mutations, "KINDS", ("skip", "double", "wrong group"))
    monkeypatch.setattr(mutations, "LOCAL_FAULTS", {})
    every = mutations.list_possible_faults

    def fewer(*of: Any) -> list[Fault]:
        faults = every(*of)
        single = {(fault.site, fault.operation, fault.kind) for fault in faults if fault.call is not None}
        return [each for each in faults if each.call or (each.site, each.operation, each.kind) not in single]

    monkeypatch.setattr(mutations, "list_possible_faults", fewer)


@pytest.fixture
def two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant faults in models of two layers, the minimum for a site's calls to occur in several layers. The layout is
    verified without faults on the problem in which they are planted."""
    plain = cases.CaseBuilder.make_sgd_problem
    monkeypatch.setattr(cases.CaseBuilder, "make_sgd_problem", lambda maker, layers=5: plain(maker, min(layers, 2)))
    monkeypatch.setattr(
        cases.CaseBuilder, "make_default_cases", lambda maker: [cases.Case("plain", maker.make_sgd_problem())]
    )


@pytest.fixture
def three_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify models of three layers: a first, a middle and a last one."""
    plain = cases.CaseBuilder.make_sgd_problem
    monkeypatch.setattr(cases.CaseBuilder, "make_sgd_problem", lambda maker, layers=5: plain(maker, min(layers, 3)))


@pytest.fixture
def fewer_local_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restrict local faults to those that need several ranks; test_verify_step.py plants the others on one rank."""
    monkeypatch.setattr(mutations, "LOCAL_FAULTS", {name: LOCAL_FAULTS[name] for name in sorted(NEEDS_RANKS)})


@pytest.fixture
def first_case_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run only the case "updates" (AdamW, a skipped step, resumes), with three layers.

    Models with router biases keep five layers: with three, an expert of dots-llm1 has exactly the mean load in a step,
    and rounding decides the sign of its bias update.
    """

    def first(maker: cases.CaseBuilder) -> list[cases.Case]:
        return [cases.Case("updates", maker.make_update_problem(layers=5 if maker.config.router_bias else 3))]

    monkeypatch.setattr(cases.CaseBuilder, "make_default_cases", first)
