"""Admission against an explicit search of worst-case futures, and its effect on a pool under pressure."""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from meshwright.planner.serving.ledger import ServingSizes
from meshwright.serving.admission import AdmissionState
from meshwright.serving.request import Request
from meshwright.serving.sampling import Sampling, TokenResult
from meshwright.serving.scheduler import Scheduler
from tests.serving.pool_checks import check_scheduler


class Claim(NamedTuple):
    """Blocks that a sequence may still allocate in each table, and of each table those it owns and how many more it
    may own at once."""

    remaining: int
    owned: tuple[int, ...]
    room: tuple[int, ...]

    def take(self, count: int) -> Claim:
        return Claim(
            self.remaining - count,
            tuple(each + count for each in self.owned),
            tuple(each - count for each in self.room),
        )


def grow(remaining: int, owned: int) -> Claim:
    """A sequence with one table without a window."""
    return Claim(remaining, (owned,), (remaining,))


def build(available: int, claims: Sequence[Claim]) -> AdmissionState:
    most = [[own + room for own, room in zip(each.owned, each.room, strict=True)] for each in claims]
    tables = len(claims[0].owned)
    return AdmissionState(available, tables, [each.remaining for each in claims], most, [each.owned for each in claims])


def can_end_in_order(available: int, claims: Sequence[Claim]) -> bool:
    """By simulation: each sequence, oldest first, repeatedly allocates a block in each table until its end; it first
    releases one where it may own no more, and at its end releases all. Younger ones do not run."""
    for remaining, owned, room in claims:
        left = list(room)
        for _ in range(remaining):
            for table, free in enumerate(left):
                available -= free > 0
                left[table] -= free > 0
            if available < 0:
                return False
        available += sum(owned) + sum(room) - sum(left)
    return True


ONE_TABLE = [grow(*values) for values in itertools.product(range(3), repeat=2)]
TWO_TABLES = [
    Claim(remaining, owned, room)
    for remaining in range(3)
    for owned in itertools.product(range(2), range(3))
    for room in itertools.product(range(3), range(2))
]


@pytest.mark.parametrize(("kinds", "sizes", "most"), [(ONE_TABLE, (1, 2, 3), 4), (TWO_TABLES, (1, 2), 5)])
def test_safe_states_allow_all_requests_to_finish_oldest_first(kinds: list[Claim], sizes: tuple[int, ...], most: int):
    counts = {True: 0, False: 0}
    for claims in itertools.chain.from_iterable(itertools.product(kinds, repeat=size) for size in sizes):
        if len(kinds) > 9 and (zlib.crc32(repr(claims).encode()) % 10):  # a tenth of them
            continue
        for available in range(most):
            state = build(available, claims)
            expected = can_end_in_order(available, claims)
            assert state.safe == expected
            counts[expected] += 1
            if not expected:
                continue
            for index, claim in enumerate(claims):  # the allowance is exact, up to the claim
                tables = len(claim.owned)
                for taken in range(min(claim.remaining, *claim.room, available // tables) + 1):
                    after = [*claims[:index], claim.take(taken), *claims[index + 1 :]]
                    assert can_end_in_order(available - tables * taken, after) == (
                        taken <= state.compute_allowance(index)
                    )
    assert min(counts.values()) > 500


def test_state_without_safe_order_is_unsafe():
    """A state without any order in which all can end is never safe: an explicit search over all orders."""
    for values in itertools.product(range(4), repeat=4):
        claims = [grow(*values[:2]), grow(*values[2:])]
        for available in range(4):
            state = build(available, claims)
            possible = any(can_end_in_order(available, order) for order in itertools.permutations(claims))
            assert possible or not state.safe
            first_waits = claims[0].remaining > available
            assert not (state.safe and first_waits), "the oldest never waits in a safe state"


@settings(max_examples=100)
@given(
    claims=st.lists(
        st.builds(Claim, st.integers(0, 5), *[st.tuples(st.integers(0, 4), st.integers(0, 4))] * 2),
        min_size=1,
        max_size=6,
    ),
    available=st.integers(0, 20),
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), max_size=12),
)
def test_incremental_admission_state_equals_rebuilt_one(
    claims: list[Claim], available: int, steps: list[tuple[int, int]]
):
    state = build(available, claims)
    for index, count in steps:
        if not state.safe or index >= len(claims):
            continue
        count = min(count, claims[index].remaining, *claims[index].room, state.compute_allowance(index))
        state.take(index, count)
        claims[index] = claims[index].take(count)
        available -= 2 * count
        anew = build(available, claims)
        assert anew.safe
        assert [state.compute_allowance(i) for i in range(len(claims))] == [
            anew.compute_allowance(i) for i in range(len(claims))
        ]
        joined, anew = (each.admit(most=[2, 1], remaining=2, cached=[0, 0], shared={}) for each in (state, anew))
        assert [joined.safe, joined.compute_allowance(len(claims))] == [anew.safe, anew.compute_allowance(len(claims))]


def test_shared_block_counts_for_its_youngest_holder():
    # The oldest needs 2 more of 2 available; the second owns 3 of which the newcomer shares 2.
    state = AdmissionState(2, 1, [2, 2], [[3], [5]], [[1], [3]])
    assert state.safe
    joined = state.admit(most=[6], remaining=4, cached=[0], shared={(1, 0): 2})
    assert joined.safe  # when both older ones have ended: 2 + 1 + 1 available for 4
    assert not state.admit(most=[7], remaining=5, cached=[0], shared={(1, 0): 2}).safe
    assert not state.admit(most=[6], remaining=4, cached=[1], shared={(1, 0): 2}).safe  # the oldest lacks a block


def test_block_shared_by_younger_sequence_is_not_reclaimed_before_window():
    # Tables without a window and with one of at most 2 blocks; the oldest has 2 and 2 and grows by 3.
    state = AdmissionState(3, 2, [3], [[5, 2]], [[2, 2]])
    assert state.safe and state.compute_allowance(0) == 1
    joined = state.admit(most=[2, 2], remaining=0, cached=[0, 0], shared={(0, 0): 2})
    assert joined.safe  # blocks of the first table are kept until the end: nothing changes for the oldest
    assert not state.admit(most=[2, 2], remaining=0, cached=[0, 0], shared={(0, 1): 1}).safe


def run(requests: list[Request], blocks: int, reserved: bool = False) -> tuple[int, int, int]:
    """Return steps, pauses and the most sequences that ran concurrently; `reserved`: admit only as many as can all
    grow to their most together (worst-case reservation)."""
    longest = max(-(-(request.max_total_tokens - 1) // 16) for request in requests)
    scheduler = Scheduler(ServingSizes(64, blocks // longest if reserved else 16, 256, blocks=blocks))
    for request in requests:
        scheduler.add(request)
    steps = most = 0
    while not scheduler.idle:
        oldest = scheduler._admitted[0] if scheduler._admitted else None
        batch = scheduler.schedule()
        assert batch is not None, "deadlock"
        assert oldest is None or oldest in [chunk.sequence for chunk in batch.chunks], "the oldest sequence pauses"
        scheduler.record_results(batch, [TokenResult(1) for _ in batch.output_rows])
        check_scheduler(scheduler)
        steps += 1
        most = max(most, len(batch.chunks))
    return steps, scheduler.stats["pauses"], most


def test_admission_finishes_sooner_than_worst_case_reservation():
    numbers = random.Random(0)
    requests = [
        Request(str(n), tuple(numbers.choices(range(99), k=numbers.randint(1, 60))), Sampling(max_tokens=150))
        for n in range(20)
    ]
    steps, pauses, most = run(requests, blocks=30)
    steps_reserved, pauses_reserved, most_reserved = run(requests, blocks=30, reserved=True)
    assert pauses > 0 and pauses_reserved == 0
    assert most > most_reserved
    assert steps < steps_reserved
