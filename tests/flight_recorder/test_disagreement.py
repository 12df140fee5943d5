"""Diagnosis of hangs from recorded calls: each test simulates one cause and checks which rank is blamed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.flight_recorder.call_log import Call, Group, RankCalls
from meshwright.flight_recorder.disagreement import diagnose
from meshwright.flight_recorder.rank_report import Snapshot
from meshwright.flight_recorder.verdict import RankState, describe_position

quickly = settings(max_examples=40)
STEP = ["targets", *["gradients"] * 3, "norm", "verdict", *["parameters"] * 3]
"""Sites of the calls of one step, all over one group."""


class Rank:
    """Recorded calls of one rank, one per second."""

    def __init__(self, rank: int, ranks: int, clock: float = 0.0) -> None:
        self.rank, self.ranks, self.clock = rank, ranks, clock
        self.calls: list[Call] = []
        self.counts: dict[Group, int] = {}

    def call(self, site: str, group: Group, form: str = "float32[4]", done: bool = True, waits: bool = True) -> None:
        self.clock += 1.0
        index = self.counts[group] = self.counts.get(group, 0) + 1
        operation = "transfer" if group.pair else "all_reduce"
        waited, end = (self.clock if waits else None), (self.clock + 0.5 if done else None)
        self.calls.append(
            Call(
                len(self.calls) + 1,
                site,
                operation,
                "axis",
                group,
                index,
                16,
                form,
                f"{site}.py:1 (f)",
                self.clock,
                waited,
                end,
            )
        )

    def seen(self, state: str = "S", ended: str = "", keep: int = 1000) -> RankState:
        return RankState(
            self.rank, RankCalls(self.rank, self.ranks, 100, tuple(self.calls[-keep:]), self.counts), state, ended
        )


def in_step(count: int, calls: int, group: Group | None = None) -> list[Rank]:
    """Return ranks that have made the same first `calls` calls."""
    group = group or Group(tuple(range(count)))
    ranks = [Rank(rank, count) for rank in range(count)]
    for at in range(calls):
        for rank in ranks:
            rank.call(STEP[at % len(STEP)], group)
    return ranks


def left_waiting(ranks: list[Rank], odd: int, calls: int, group: Group) -> None:
    for rank in ranks:
        if rank.rank != odd:
            rank.call(STEP[calls % len(STEP)], group, done=False)


@quickly
@given(st.integers(2, 6), st.integers(0, 60), st.data())
def test_absent_rank_is_named_with_missing_call(count, calls, data):
    odd = data.draw(st.integers(0, count - 1))
    state, kind, state_text = data.draw(st.sampled_from([("T", "stopped", "(state T)"), ("R", "behind", "running")]))
    group = Group(tuple(range(count)))
    ranks = in_step(count, calls, group)
    left_waiting(ranks, odd, calls, group)
    verdict = diagnose([rank.seen(state if rank.rank == odd else "S") for rank in ranks], ranks[odd].clock + 30)
    assert (verdict.kind, verdict.blamed, verdict.group, verdict.index) == (kind, (odd,), group, calls + 1)
    site = STEP[calls % len(STEP)]
    assert verdict.line.startswith(f"rank {odd} has not entered call {calls + 1} of ranks ")
    assert f"(all_reduce {site} over axis), where rank" in verdict.line and state_text in verdict.line
    if calls:
        last = f"call {calls} (all_reduce {STEP[(calls - 1) % len(STEP)]} over axis)"
        assert f"its last completed call was {last}, 29.5 s ago" in verdict.line


@quickly
@given(st.integers(2, 5), st.integers(0, 26), st.integers(1, 4), st.booleans(), st.data())
def test_rank_is_named_with_first_call_it_skipped(count, at, skipped, silent, data):
    """With two ranks there is no majority: earlier calls predict which rank is wrong. silent: mismatched calls of equal
    shape complete without an error."""
    odd = data.draw(st.integers(0, count - 1))
    group = Group(tuple(range(count)))
    steps = 3 * len(STEP)  # earlier calls, from which the next ones are predicted
    ranks = in_step(count, steps + at, group)
    sequence = [STEP[n % len(STEP)] for n in range(steps + at, steps + at + 3 * len(STEP))]
    theirs = sequence[skipped:]
    first = next(
        n for n, (a, b) in enumerate(zip(sequence, theirs, strict=False)) if a != b
    )  # first visible difference
    for rank in ranks:
        mine = theirs if rank.rank == odd else sequence
        for n in range(first + 2 * silent + 1):
            rank.call(mine[n], group, done=n < first + 2 * silent)
    verdict = diagnose([rank.seen() for rank in ranks], 1000.0)
    assert (verdict.kind, verdict.blamed, verdict.index) == ("skipped", (odd,), steps + at + first + 1)
    assert f"rank {odd} has skipped call {verdict.index} of ranks " in verdict.line
    assert f"(all_reduce {sequence[first]} over axis)" in verdict.line and f"{theirs[first]}.py:1" in verdict.line


@quickly
@given(st.integers(2, 5), st.integers(0, 8), st.data())
def test_rank_with_different_shape_is_named_with_both_shapes(count, at, data):
    odd = data.draw(st.integers(0, count - 1))
    group = Group(tuple(range(count)))
    ranks = in_step(count, 2 * len(STEP) + at, group)
    for rank in ranks:
        rank.call(STEP[at], group, form="float32[5]" if rank.rank == odd else "float32[4]", done=False)
    verdict = diagnose([rank.seen(ended="was killed by signal 6" if rank.rank != odd else "") for rank in ranks], 99.0)
    assert (verdict.kind, verdict.blamed) == ("shape", (odd,))
    assert verdict.line.startswith(f"rank {odd} passes float32[5] to call {2 * len(STEP) + at + 1} of ranks ")
    assert "float32[4]" in verdict.line and f"at {STEP[at]}.py:1 (f)" in verdict.line


@quickly
@given(st.integers(2, 6), st.data())
def test_agreeing_ranks_are_not_blamed_at_any_position(count, data):
    """With several groups, and ring buffers that go back to different calls."""
    ranks = [Rank(rank, count) for rank in range(count)]
    world, low = Group(tuple(range(count))), Group(tuple(range(0, count, 2)))
    plan = data.draw(st.lists(st.sampled_from([world, low]), min_size=1, max_size=40))
    for group in plan:
        for rank in ranks:
            if rank.rank in group.ranks:
                rank.call("x", group)
    ahead = data.draw(st.integers(0, count - 1))  # it has posted one more call, and computes
    ranks[ahead].call("y", world, done=False, waits=False)
    keep = data.draw(st.lists(st.integers(1, 50), min_size=count, max_size=count))
    assert diagnose([rank.seen(keep=keep[rank.rank]) for rank in ranks], 99.0) is None


def test_unequal_all_to_all_and_row_reduce_scatter_pass():
    ranks, group = in_step(2, 3), Group((0, 1))
    for rank in ranks:
        rank.call("dispatch", group, form=f"bfloat16[{rank.rank + 7}, 64]")
        rank.calls[-1] = replace(rank.calls[-1], operation="all_to_all", payload_bytes=rank.rank)
        rank.call("rows", group, form=f"bfloat16[{rank.rank + 7}, 64]")
        rank.calls[-1] = replace(rank.calls[-1], operation="reduce_scatter", payload_bytes=1920)
    assert diagnose([rank.seen() for rank in ranks], 99.0) is None
    ranks[1].calls[-1] = replace(ranks[1].calls[-1], payload_bytes=2048)
    assert diagnose([rank.seen() for rank in ranks], 99.0).kind == "disagree"
    ranks[1].calls[-1] = replace(ranks[1].calls[-1], payload_bytes=1920, form="bfloat16[8, 65]")
    assert diagnose([rank.seen() for rank in ranks], 99.0).is_call_mismatch


@pytest.mark.parametrize("lost", ["form", "name"])
def test_call_name_lost_on_full_heap_matches_any_name(lost):
    unknown = {"form": ""} if lost == "form" else {"site": "?", "operation": "?", "axis": "?", "form": ""}
    for count in (2, 3):
        ranks = in_step(count, 20)
        for rank in ranks[1:]:
            rank.calls[15:] = [replace(call, **unknown) for call in rank.calls[15:]]
        assert diagnose([rank.seen() for rank in ranks], 99.0) is None
    ranks = in_step(3, 20)
    ranks[0].calls[19] = replace(ranks[0].calls[19], **unknown)
    ranks[1].calls[19] = replace(ranks[1].calls[19], form="float32[5]")
    verdict = diagnose([rank.seen() for rank in ranks], 99.0)
    assert verdict.is_call_mismatch and 0 not in verdict.blamed, "the other two ranks are still compared"
    ranks[0].calls[19] = replace(ranks[0].calls[19], site="other", operation="all_reduce", form="")
    assert diagnose([rank.seen() for rank in (ranks[0], ranks[2])], 99.0).is_call_mismatch, (
        "calls of different sites must not match"
    )


@pytest.mark.parametrize("stages", [2, 4, 7])
def test_pipeline_hang_is_attributed_to_first_stopped_stage(stages):
    """Later stages wait for activations from the stopped stage, earlier ones for gradients, along a chain."""
    ranks = [Rank(rank, stages) for rank in range(stages)]
    everybody, stopped = tuple(range(stages)), stages // 2
    for rank in ranks:
        for other in (rank.rank - 1, rank.rank + 1):
            if not 0 <= other < stages:
                continue
            down, up = Group(everybody, (rank.rank, other)), Group(everybody, (other, rank.rank))
            rank.call("pipeline", down)
            rank.call("pipeline", up)
    for rank in ranks:
        if rank.rank != stopped:
            source = rank.rank - 1 if rank.rank > stopped else rank.rank + 1
            rank.call("pipeline", Group(everybody, (source, rank.rank)), done=False)
    verdict = diagnose([rank.seen("T" if rank.rank == stopped else "S") for rank in ranks], 99.0)
    assert (verdict.kind, verdict.blamed) == ("stopped", (stopped,))
    assert f"rank {stopped} has not entered call 2 of ranks" in verdict.line


def test_ranks_waiting_in_circle_are_all_named():
    ranks = [Rank(rank, 3) for rank in range(3)]
    for rank in ranks:
        rank.call("ring", Group((0, 1, 2), ((rank.rank - 1) % 3, rank.rank)), done=False)
    verdict = diagnose([rank.seen() for rank in ranks], 11.0)
    assert (verdict.kind, verdict.blamed) == ("circle", (0, 2, 1))
    assert (
        "have been waiting for each other for 10.0 s: rank 0 in call 1 (transfer ring over axis) for rank 2"
        in verdict.line
    )


def test_stopped_or_dead_rank_in_common_call_is_found():
    group = Group((0, 1, 2))
    for state, ended, kind in (("T", "", "stopped"), ("", "was killed by signal 9 (SIGKILL)", "dead")):
        ranks = in_step(3, 5, group)
        for rank in ranks:
            rank.call("norm", group, done=False)
        seen = [rank.seen() for rank in ranks[:2]] + [ranks[2].seen(state, ended)]
        verdict = diagnose(seen, 99.0)
        assert (verdict.kind, verdict.blamed) == (kind, (2,)), verdict.line
        assert describe_position(seen[2]) == "in call 6 (all_reduce norm over axis)"


def test_late_rank_is_distinguished_from_dead_network():
    group = Group((0, 1, 2))
    ranks = in_step(3, 5, group)
    for rank in ranks:
        rank.clock += 20.0 * (rank.rank == 1)
        rank.call("norm", group, done=False)
    verdict = diagnose([rank.seen() for rank in ranks], ranks[0].clock + 25)
    assert (verdict.kind, verdict.blamed) == ("late", (1,)) and "20.0 s after rank 0" in verdict.line
    verdict = diagnose([rank.seen() for rank in ranks], ranks[0].clock + 125)
    assert (verdict.kind, verdict.blamed) == ("link", ()) and "the network carries no data between them" in verdict.line


@pytest.mark.parametrize("state, ended, kind", [("T", "", "stopped"), ("X", "", "dead"), ("S", "", "behind")])
def test_rank_with_fewest_queued_calls_is_named(state, ended, kind):
    """As on CUDA: rank 1 hangs and rank 0 keeps queueing. Rank 3 depends on rank 1 through rank 2, which is behind."""
    ranks = [Rank(rank, 4) for rank in range(4)]
    groups = {pair: Group(pair) for pair in ((0, 1), (1, 2), (2, 3))}
    for pair, counts in (((0, 1), (9, 4)), ((1, 2), (4, 6)), ((2, 3), (3, 5))):
        for rank, count in zip(pair, counts, strict=True):
            for _ in range(count):
                ranks[rank].call("gradients", groups[pair])
    seen = [rank.seen(state if rank.rank == 1 else "X" if rank.rank == 0 else "S") for rank in ranks]
    verdict = diagnose(seen, 30.0)
    assert (verdict.kind, verdict.blamed, verdict.index) == (kind, (1,), 5)
    assert re.match(
        r"rank 1 has not entered call 5 of ranks 0,1 \(all_reduce gradients over axis\), which rank 0 queued "
        r"25\.0 s ago at gradients\.py:1 \(f\); its last completed call was call 4",
        verdict.line,
    ), verdict.line
    assert Snapshot(seen, now=30.0).format_report(verdict.line)
    assert diagnose([rank.seen() for rank in ranks], 30.0) is None, "some ranks are only faster"
    assert diagnose([rank.seen("X") for rank in in_step(3, 5)], 30.0) is None, "all have made equally many calls"
    for rank in ranks:
        rank.calls = []  # overwritten by calls of other groups
    short = diagnose([each.seen(state) for each, state in zip(ranks, "XTSS", strict=True)], 30.0)
    assert short.blamed == (1,) and "has made 4 calls of ranks 0,1 and rank 0 9" in short.line


def test_ranks_of_another_host_are_reported_as_unknown():
    ranks = in_step(4, 5)
    for rank in ranks[:2]:
        rank.call("norm", Group((0, 1, 2, 3)), done=False)
    verdict = diagnose([rank.seen() for rank in ranks[:2]], 99.0)
    assert verdict.blamed == (2, 3) and "ranks 2, 3, whose calls cannot be read on this host" in verdict.line
    left_behind = diagnose([ranks[0].seen(), ranks[2].seen("T")], 99.0)
    assert left_behind.blamed == (2,), "a readable rank that is behind is blamed first"


@pytest.mark.parametrize("purpose, named", [("", "ranks 0-2"), ("reductions", "ranks 0-2 for reductions")])
def test_hang_report_lists_every_rank_up_to_diverging_calls(purpose, named):
    group = Group((0, 1, 2), purpose=purpose)
    ranks = in_step(3, 4, group)
    left_waiting(ranks, 2, 4, group)
    snapshot = Snapshot([rank.seen("T" if rank.rank == 2 else "S") for rank in ranks], now=9.0, when="then")
    text = snapshot.format_report(snapshot.verdict.line)
    assert text.splitlines()[0] == snapshot.verdict.line
    assert snapshot.verdict.line.startswith(f"rank 2 has not entered call 5 of {named} (all_reduce norm")
    waiting = f"has been waiting for 4.0 s in call 5 of {named} (all_reduce norm"
    assert f"  rank 0 (process 100, sleeping): {waiting}" in text and f"calls of {named}:" in text
    assert "> rank 2 (process 100, stopped (state T)): waits in no call" in text
    assert ">       5  all_reduce norm over axis float32[4] (ranks 0,1); not entered (rank 2)" in text
    assert "        4  all_reduce gradients over axis float32[4] (all)" in text
    assert not Snapshot(
        [RankState(0), RankState(1)]
    ).has_calls and "rank 1 (state unknown): has made no call" in Snapshot([RankState(1)]).format_report("")
