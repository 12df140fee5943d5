"""Admission against an explicit search of worst-case futures, and its effect on a pool under pressure."""

from __future__ import annotations

import itertools
import random

import hypothesis.strategies as st
from hypothesis import given, settings

from meshwright.serving.admission import AdmissionState
from meshwright.serving.request import Request
from meshwright.serving.sampling import Sampling, TokenResult
from meshwright.serving.scheduler import Scheduler
from meshwright.serving.step_limits import StepLimits
from tests.serving.pool_checks import check_scheduler


def can_end_in_order(available: int, claims: list[tuple[int, int]]) -> bool:
    """By simulation: each sequence (remaining, owned), oldest first, takes block after block until its end and then
    gives all back, while the younger ones stand still."""
    for remaining, owned in claims:
        for _ in range(remaining):
            if not available:
                return False
            available -= 1
        available += remaining + owned
    return True


def test_safe_states_allow_all_requests_to_finish_oldest_first():
    counts = {True: 0, False: 0}
    for size in (1, 2, 3):
        for values in itertools.product(range(3), repeat=2 * size):
            claims = list(zip(values[::2], values[1::2], strict=True))
            for available in range(4):
                state = AdmissionState(
                    available, [r for r, _ in claims], [r + o for r, o in claims], [o for _, o in claims]
                )
                expected = can_end_in_order(available, claims)
                assert state.safe == expected
                counts[expected] += 1
                if not expected:
                    continue
                for index, (remaining, owned) in enumerate(claims):  # the allowance is exact, up to the claim
                    for taken in range(min(remaining, available) + 1):
                        after = [*claims[:index], (remaining - taken, owned + taken), *claims[index + 1 :]]
                        assert can_end_in_order(available - taken, after) == (taken <= state.allowance(index))
    assert min(counts.values()) > 500


def test_unsafe_states_of_any_order_of_ends_are_refused():
    """A state without any order in which all can end is never safe: an explicit search over all orders."""
    for values in itertools.product(range(4), repeat=4):
        claims = list(zip(values[::2], values[1::2], strict=True))
        for available in range(4):
            state = AdmissionState(
                available, [r for r, _ in claims], [r + o for r, o in claims], [o for _, o in claims]
            )
            possible = any(can_end_in_order(available, list(order)) for order in itertools.permutations(claims))
            assert possible or not state.safe
            first_waits = claims[0][0] > available
            assert not (state.safe and first_waits), "the oldest never waits in a safe state"


@settings(max_examples=100, deadline=None)
@given(
    claims=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6),
    available=st.integers(0, 12),
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), max_size=12),
)
def test_incremental_admission_state_equals_rebuilt_one(
    claims: list[tuple[int, int]], available: int, steps: list[tuple[int, int]]
):
    def build() -> AdmissionState:
        return AdmissionState(available, [r for r, _ in claims], [r + o for r, o in claims], [o for _, o in claims])

    state = build()
    for index, count in steps:
        if not state.safe or index >= len(claims):
            continue
        remaining, owned = claims[index]
        count = min(count, remaining, state.allowance(index))
        state.take(index, count)
        claims[index] = (remaining - count, owned + count)
        available -= count
        assert build().safe
        assert [state.allowance(i) for i in range(len(claims))] == [build().allowance(i) for i in range(len(claims))]
        joined, anew = (each.admit(most=2, remaining=2, cached=0, shared={}) for each in (state, build()))
        assert [joined.safe, joined.allowance(len(claims))] == [anew.safe, anew.allowance(len(claims))]


def test_a_shared_block_counts_for_its_youngest_holder():
    # The oldest needs 2 more of 2 available; the second owns 3 of which the newcomer shares 2.
    state = AdmissionState(2, [2, 2], [3, 5], [1, 3])
    assert state.safe
    joined = state.admit(most=6, remaining=4, cached=0, shared={1: 2})
    assert joined.safe  # when both older ones have ended: 2 + 1 + 1 available for 4
    assert not state.admit(most=7, remaining=5, cached=0, shared={1: 2}).safe
    assert not state.admit(most=6, remaining=4, cached=1, shared={1: 2}).safe  # the oldest lacks a block


def run(requests: list[Request], blocks: int, reserved: bool = False) -> tuple[int, int, int]:
    """Return steps, pauses and the most sequences that ran at once; `reserved`: only as many as can all
    grow to their most at once (worst-case reservation)."""
    longest = max(-(-(request.longest - 1) // 16) for request in requests)
    scheduler = Scheduler(StepLimits(blocks, 64, blocks // longest if reserved else 16, 256))
    for request in requests:
        scheduler.add(request)
    steps = most = 0
    while not scheduler.idle:
        oldest = scheduler._admitted[0] if scheduler._admitted else None
        batch = scheduler.schedule()
        assert batch is not None, "deadlock"
        assert oldest is None or oldest in batch.sequences, "the oldest sequence pauses"
        scheduler.publish(batch, [TokenResult(1) for _ in batch.output_rows])
        check_scheduler(scheduler)
        steps += 1
        most = max(most, len(batch.sequences))
    return steps, scheduler.stats["pauses"], most


def test_all_admitted_finish_sooner_than_with_worst_case_reservation():
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
