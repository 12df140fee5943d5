"""Late completion finds code that touches the buffers of a collective call in flight, and nothing in the engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from meshwright.comm import collectives
from meshwright.comm.mesh import Mesh
from meshwright.layout import Layout
from meshwright.spec.presets import preset
from meshwright.verification.cases import CaseBuilder
from meshwright.verification.late_completion import _is_freed, complete_late
from tests.verification.kept_ranks import KeptRanks
from tests.verification.late_faults import FAULTS, run_with_fault


def results(layout: str, fault: str | None, late: bool = True) -> list[Any]:
    """The result of each rank of a layout."""
    parsed = Layout.parse(layout)
    problem = CaseBuilder(parsed, preset("qwen3-0.6b")).make_late_case().problem
    problem = dataclasses.replace(problem, late_completion=late)
    found = KeptRanks(parsed.world_size).run(run_with_fault, problem, layout, fault)
    return [result for (result,) in found]


@pytest.mark.parametrize("fault", FAULTS)
def test_buffer_touched_in_flight_is_reported(fault: str):
    layout, site, _ = FAULTS[fault]
    reports = [each.refused for each in results(layout, fault) if each.refused is not None]
    assert reports and all(report.startswith(f"late completion: {site}") for report in reports), reports


@pytest.mark.parametrize("layout", sorted({layout for layout, *_ in FAULTS.values()}))
def test_engine_touches_no_buffer_in_flight(layout: str):
    """The results are those of calls that complete at any time, bit for bit."""
    late, usual = results(layout, None), results(layout, None, late=False)
    assert [each.refused for each in late] == [None] * len(late)
    for one, other in zip(late, usual, strict=True):
        assert one.steps.keys() == other.steps.keys() == {0, 1}
        for step in one.steps:
            pairs = zip(one.steps[step].weights, other.steps[step].weights, strict=True)
            assert all(torch.equal(a.tensor, b.tensor) for a, b in pairs)


def on_one_rank(kind: str) -> list[str]:
    """The faults of one misuse of an all-gather over two ranks."""
    mesh = Mesh.create(Layout(dp=2))
    whole, part = torch.zeros(4), torch.full((2,), mesh.rank + 1.0)
    with complete_late() as late:
        handle = collectives.all_gather(whole, part, mesh.data, "test.site", async_op=True)
        assert whole.isnan().all()
        if kind == "freed":
            whole.untyped_storage().resize_(0)
        elif kind == "written":
            whole[0] = 1.0
        elif kind == "changed":
            part[0] = 7.0
        if kind != "forgotten":
            handle.wait()
        if kind == "right":
            assert whole.tolist() == [1, 1, 2, 2]
    mesh.close()
    return late.faults


@pytest.mark.parametrize(
    ("kind", "report"),
    [
        ("right", None),
        ("freed", "a buffer was freed before its result arrived"),
        ("written", "a buffer was written before its result arrived"),
        ("changed", "a buffer was changed while it was being sent"),
        ("forgotten", "never waited for"),
    ],
)
def test_report_names_call_and_misuse(kind: str, report: str | None):
    expected = [] if report is None else [f"test.site (all_gather over data): {report}"]
    assert KeptRanks(2).run(on_one_rank, kind) == [expected] * 2


def test_freed_storage_is_recognised_through_views():
    whole = torch.zeros(4, 6)
    view = whole[1:, 2:4]
    assert not _is_freed(view) and not _is_freed(whole[:0])
    whole.untyped_storage().resize_(4 * 21)
    assert _is_freed(view) and not _is_freed(whole[0]) and _is_freed(whole)
