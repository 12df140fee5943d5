"""NCCL's ordering rule: no circular wait of ranks over all communicators."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.flight_recorder.call_log import RankCalls
from meshwright.flight_recorder.call_ring import CallWriter
from meshwright.flight_recorder.circular_wait import find_circular_wait

DATA, TENSOR = ((0, 2), (1, 3)), ((0, 1), (2, 3))


def record(*ranks: Sequence[object]) -> list[RankCalls]:
    """Return the recorded calls of ranks. Each rank is a list of calls: (site, ranks) is a collective, a list of
    (sender, receiver) pairs are messages posted as one group."""
    found = []
    for rank, calls in enumerate(ranks):
        ring = CallWriter()
        for call in calls:
            if isinstance(call, list):
                with ring.post_together():
                    for pair in call:
                        group = ring.register_group(range(len(ranks)), pair)
                        ring.post(group, "pipeline", "transfer", "pp", 8, "f", (1,))
            else:
                site, members = call  # type: ignore[misc]
                ring.post(ring.register_group(members), site, "all_reduce", site, 8, "f", (1,))
        calls_of_rank = ring.read()
        found.append(RankCalls(rank, len(ranks), 1, calls_of_rank.calls, calls_of_rank.counts))
    return found


def on_two_axes(rank: int, first: str) -> list[object]:
    """Return one call over each of two axes of 2 x 2 ranks. first: axis whose call is posted first."""
    calls = [("data", DATA[rank % 2]), ("tensor", TENSOR[rank // 2])]
    return calls if first == "data" else calls[::-1]


def test_equal_call_order_on_all_ranks_has_no_circular_wait():
    assert find_circular_wait(record(*(on_two_axes(rank, "data") * 3 for rank in range(4)))) is None


def test_circular_wait_of_two_axes_names_its_ranks():
    orders = ("data", "tensor", "tensor", "data")
    found = find_circular_wait(record(*(on_two_axes(rank, first) for rank, first in enumerate(orders))))
    assert found is not None and found.startswith("circular wait: rank 0 in call 1 (all_reduce data over data)")
    assert "of ranks 0,2 at " in found
    for waiting, awaited in ((0, 2), (2, 3), (3, 1), (1, 0)):
        assert f"rank {waiting} in " in found and f"for rank {awaited}" in found


def test_different_call_order_within_one_communicator_is_named():
    both = (0, 1)
    found = find_circular_wait(record([("a", both), ("b", both)], [("b", both), ("a", both)]))
    assert found is not None and "different calls" in found and "all_reduce a" in found and "all_reduce b" in found


def test_crossing_messages_are_a_circular_wait_unless_posted_as_group():
    there, back = (0, 1), (1, 0)
    assert find_circular_wait(record([[there, back]], [[back, there]])) is None
    found = find_circular_wait(record([[there], [back]], [[back], [there]]))
    assert found is not None and found.startswith("circular wait: rank 0 in call 1 (transfer pipeline over pp)")


def test_message_group_matches_messages_posted_one_by_one():
    first, second = (0, 1), (0, 2)
    assert find_circular_wait(record([[first], [second, (2, 0)]], [[first]], [[(2, 0), second]])) is None
    assert find_circular_wait(record([[first], [first]], [[first, first]])) is None


def test_call_that_one_rank_never_makes_is_named():
    found = find_circular_wait(record([("a", (0, 1))], []))
    assert found is not None and found.endswith("for rank 1, which makes no such call")


def test_overwritten_calls_are_left_out():
    whole = record(*(on_two_axes(rank, "data") * 4 for rank in range(4)))
    cut = [RankCalls(each.rank, 4, 1, each.calls[each.rank :], each.counts) for each in whole]
    assert find_circular_wait(cut) is None


def test_group_whose_calls_one_rank_has_overwritten_is_left_out():
    """As after a layout in which that rank made few calls over the group, and many over others."""
    before = [("before", (0, 1))]
    whole = record(before, [*before, ("after", (1, 2))], [("after", (1, 2))])
    full = [RankCalls(each.rank, 3, 1, each.calls[-1:], each.counts) for each in whole]
    assert find_circular_wait(full) is None
    full[2] = record([], [], [])[2]
    found = find_circular_wait(full)
    assert found is not None and found.endswith("for rank 2, which makes no such call")


def test_calls_of_an_earlier_run_are_left_out():
    orders = [on_two_axes(rank, first) for rank, first in enumerate(("data", "tensor", "tensor", "data"))]
    later = record(*(order + on_two_axes(rank, "data") for rank, order in enumerate(orders)))
    assert find_circular_wait(later) is not None
    assert find_circular_wait(later, record(*orders)) is None
    assert find_circular_wait(record(*(order * 2 for order in orders)), record(*orders)) is not None
