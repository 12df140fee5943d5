"""NCCL's buffers against published measurements."""

from __future__ import annotations

import pytest

from meshwright.collectives.communicators import Communicator
from meshwright.collectives.nccl_buffers import estimate_buffer_bytes
from meshwright.layout import Layout


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


def test_reductions_of_zero_3_take_buffers_of_another_communicator() -> None:
    apart, shared = (estimate_buffer_bytes(Layout.parse(f"dp8 {zero}"), 8) for zero in ("zero3", "zero2"))
    assert apart == 2 * shared == 2 * 2 * 24 * (14 << 20)


def test_sub_axes_take_buffers_unless_their_ranks_have_a_communicator_already() -> None:
    layout = Layout.parse("tp2 pp4 mb4")
    channels = 2 * 24 * (14 << 20)
    apart = {"pp[0,3]": Communicator(2, 6, "pp[0,3]")}
    known = {"tp/2": Communicator(2, 1, ""), "pp[0,1,2,3]": Communicator(4, 2, "")}
    without = estimate_buffer_bytes(layout, 8)
    assert estimate_buffer_bytes(layout, 8, apart) - without == channels
    assert estimate_buffer_bytes(layout, 8, known) - without == channels, "a ring on the pipeline's communicator"
