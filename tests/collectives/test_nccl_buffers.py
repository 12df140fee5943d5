"""NCCL's buffers: communicators of a layout, and bytes against published measurements."""

from __future__ import annotations

import pytest

from meshwright.collectives.nccl_buffers import estimate_buffer_bytes, list_communicators
from meshwright.comm import mesh
from meshwright.layout import Layout

LAYOUTS = [
    "dp1", "dp8 zero3", "dp2 tp4", "dp2 tp2 pp2 mb4", "dp4 cp2 tp2", "dp8 hs4 zero3", "tp4", "pp4 mb4", "dp8 ep8",
    "dp4 tp2 ep2:etp2", "dp4 tp2 ep4 hs2 zero3", "cp4:ulysses dp2",
]  # fmt: skip


@pytest.mark.parametrize("text", LAYOUTS)
def test_communicators_are_those_of_the_mesh(text: str) -> None:
    """Axes over the same ranks share a communicator, unless one is a layer's and the other that of gradients."""
    layout = Layout.parse(text)
    names = [*(name for name in mesh.AXIS_NAMES if name != "dp"), *(mesh.EXPERT_AXES if layout.expert_parallel else ())]
    groups = {name: next(ranks for ranks in layout.groups(name) if 0 in ranks) for name in names}
    of_states = {groups[name] for name in mesh.STATE_AXES}
    expected: dict[tuple[tuple[int, ...], bool], set[str]] = {}
    for name, ranks in groups.items():
        if len(ranks) > 1:
            key = ranks, name in mesh.LAYER_AXES and ranks in of_states
            expected.setdefault(key, set()).add(name)
    found = {
        (tuple(range(0, each.size * each.stride, each.stride)), each.separate): set(axes)
        for each, axes in list_communicators(layout).items()
    }
    assert found == expected


def test_buffers_match_published_measurements() -> None:
    """An all-to-all of 8 H100 (NVIDIA/nccl, issue 1685: 4.34 - 1.06 GB); all-reduces of 4 and 2 A100 (issue 964)."""
    exchange = estimate_buffer_bytes(Layout.parse("dp8 ep8"), 8) - estimate_buffer_bytes(Layout.parse("dp8"), 8)
    assert exchange == pytest.approx(3.28e9, rel=0.01)
    assert estimate_buffer_bytes(Layout.parse("dp4"), 4) == pytest.approx(688e6, rel=0.03)
    assert estimate_buffer_bytes(Layout.parse("dp2"), 4) >= 544e6
    assert estimate_buffer_bytes(Layout(), 8) == 0


def test_messages_to_other_nodes_have_fewer_channels() -> None:
    inside, across = (estimate_buffer_bytes(Layout.parse("pp2 mb2"), devices) for devices in (2, 1))
    assert inside - across == 30 * (14 << 20)
    assert estimate_buffer_bytes(Layout.parse("pp4 mb4"), 8) > estimate_buffer_bytes(Layout.parse("pp2 mb4"), 8)
