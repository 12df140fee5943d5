"""Ranks that are well make the same calls in every group, whatever the layout: nobody would be blamed, or wait in a
circle."""

from __future__ import annotations

from tests.flight_recorder.circular_wait import find_circular_wait
from meshwright.layout import Layout
from meshwright.verification.run import _default_models, _Verifier

LAYOUTS = (
    "dp2 zero3 tp2",
    "cp4",
    "cp2:ulysses tp2",
    "pp4:zb-v mb4",
    "dp2 pp2:dualpipe mb4",
    "dp4 zero2 hs2",
    "dp2 tp2 ep4",
)


def test_healthy_ranks_agree_on_calls_of_every_layout(first_case_alone: None):
    with _Verifier("float32", lambda line: None) as bench:
        for text in LAYOUTS:
            layout = Layout.parse(text)
            name, config = _default_models(layout, mixture=False)[0]
            bench.verify(layout, name, config)
            snapshot = bench.ranks(layout.world_size).calls()
            assert all(len(each.calls.calls) > 20 and each.calls.torn == 0 for each in snapshot.seen)
            assert snapshot.verdict is None, f"{text}: {snapshot.verdict.line}"
            assert find_circular_wait([each.calls for each in snapshot.seen if each.calls]) is None, text
