"""Correct ranks make matching calls in every group under every layout: no hang diagnosis, no circular wait."""

from __future__ import annotations

from dataclasses import replace

from meshwright.layout import Layout
from meshwright.verification.cases import CaseBuilder
from meshwright.verification.ranks import run_rank
from meshwright.verification.run import _choose_default_models
from tests.flight_recorder.circular_wait import find_circular_wait
from tests.verification.kept_ranks import KeptRanks

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
