"""Correct ranks make matching calls in every group under every layout: no hang diagnosis, no circular wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from meshwright.comm.handle import Handle
from meshwright.flight_recorder.circular_wait import find_circular_wait
from meshwright.layout import Layout
from meshwright.parallel import zero
from meshwright.verification import run
from meshwright.verification.cases import Case, CaseBuilder
from meshwright.verification.ranks import run_rank
from meshwright.verification.run import _choose_default_models
from tests.verification.kept_ranks import KeptRanks


class PostedLate:
    """Handle of a call that is posted when it is waited for."""

    def __init__(self, post: Callable[[], Handle]) -> None:
        self._post = post

    def wait(self) -> None:
        self._post().wait()


def run_rank_with_late_sums(*arguments: Any) -> Any:
    """Train on this rank as `run_rank` does; rank 0 posts its sums over replicas after all its other reductions."""
    post = zero.all_reduce

    def post_late(tensor: Any, axis: Any, site: str, **options: Any) -> Any:
        late = site == zero.REPLICA_SITE and axis.ranks[0] == 0 and axis.rank == 0
        return PostedLate(lambda: post(tensor, axis, site, **options)) if late else post(tensor, axis, site, **options)

    with mock.patch.object(zero, "all_reduce", post_late):
        return run_rank(*arguments)


LAYOUTS = (
    "dp2 zero3 tp2",
    "cp4",
    "cp2:ulysses tp2",
    "pp4:zb-v mb4",
    "dp2 pp2:dualpipe mb4",
    "dp4 zero2 hs2",
    "dp2 tp2 ep4",
)


def test_healthy_ranks_agree_on_calls_of_every_layout():
    for text in LAYOUTS:
        layout = Layout.parse(text)
        _, config = _choose_default_models(layout, mixture=False)[0]
        ranks = KeptRanks(layout.world_size)
        ranks.run(run_rank, replace(CaseBuilder(layout, config, "float32").make_sgd_problem(3), steps=2), text)
        snapshot = ranks.calls()
        assert all(len(each.calls.calls) > 20 and each.calls.torn == 0 for each in snapshot.seen)
        assert snapshot.verdict is None, f"{text}: {snapshot.verdict.line}"
        assert find_circular_wait([each.calls for each in snapshot.seen if each.calls]) is None, text


@pytest.mark.parametrize("planted", [False, True])
def test_verification_fails_on_calls_that_can_wait_in_a_circle_under_nccl(
    monkeypatch: pytest.MonkeyPatch, planted: bool
):
    """Although all values are right, as gloo runs the calls of several groups concurrently."""
    monkeypatch.setattr(run, "LocalRanks", KeptRanks)
    if planted:
        monkeypatch.setattr(run, "run_rank", run_rank_with_late_sums)
    layout = Layout.parse("dp4 zero2 hs2")
    _, config = _choose_default_models(layout, mixture=False)[0]
    case = Case("sgd", CaseBuilder(layout, config).make_sgd_problem(2))
    with run._Verifier("float64", lambda line: None) as verifier:
        found = verifier.compare(case, layout)
        monkeypatch.setattr(run, "run_rank", run_rank)
        assert verifier.compare(case, layout).passed, "a case after the failed one, on the same ranks"
    assert found.worst_error < 1e-10 and found.passed != planted
    if planted:
        assert found.failure is not None and found.failure.startswith("circular wait: rank 0 in call")
        assert "data.gradients.replicas over replica" in found.failure
