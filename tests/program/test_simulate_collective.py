"""Simulator of collective programs against hand calculation and a naive simulator."""

from __future__ import annotations

import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meshwright.program.collective import ARRIVING, SENDING, Builder, CollectiveProgram
from meshwright.program.flows import FairSharing, compute_fair_rates
from meshwright.program.network import Network, Routes
from meshwright.program.order import match_transfers
from meshwright.program.simulate_collective import CollectiveSimulator, simulate_collective


def matched(program: CollectiveProgram) -> Any:
    """Match the program without checking it: these programs do not compute an operation."""
    s = program.steps
    sends, receives = match_transfers(s.rank, s.peer, s.has_kind(SENDING), s.has_kind(ARRIVING))
    return SimpleNamespace(program=program, sends=sends, receives=receives)


def find_route(network: Network, source: int, target: int) -> list[int]:
    """Return the links of a message from one rank to another, in order."""
    return network.find_routes(np.array([source]), np.array([target])).link.tolist()


def line(ranks: int, latency: float = 0.0, bandwidth: float = 1.0, gap: float = 0.0) -> Network:
    """Return a line of ranks: link i leads from rank i to the next, link ranks - 1 + i back."""
    left = np.arange(ranks - 1)

    def find_routes(source, target):
        paths = [
            list(range(a, b)) if a < b else [ranks - 1 + i for i in range(a - 1, b - 1, -1)]
            for a, b in zip(source, target, strict=True)
        ]
        return Routes(np.cumsum([0, *map(len, paths)]), np.array([link for path in paths for link in path], np.int64))

    return Network(
        "line",
        ranks,
        np.concatenate([left, left + 1]),
        np.concatenate([left + 1, left]),
        np.full(2 * ranks - 2, latency),
        np.full(2 * ranks - 2, bandwidth),
        find_routes,
        gap=gap,
    )


def transfers(ranks: int, chunks: int, *rounds: list[tuple[int, int, int]], reduce: bool = False) -> Any:
    """Return a program of rounds of (source, target, chunks sent)."""
    program = Builder("all-reduce", "by hand", ranks, chunks)
    for one in rounds:
        with program.round():
            for source, target, count in one:
                program.transfer(source, target, 0, count, reduce=reduce)
    return matched(program.build())


# --- rates


def test_flows_share_link_evenly():
    assert compute_fair_rates(np.array([0, 1, 2]), np.array([5, 5, 5]), 3, np.full(6, 12.0)).tolist() == [4, 4, 4]


def test_unused_bandwidth_goes_to_other_flows():
    # Textbook example: link 0 of capacity 1 with three flows, one of which continues over link 1 of capacity 2
    # with a fourth flow, which gets the rest of link 1.
    rates = compute_fair_rates(np.array([0, 1, 2, 2, 3]), np.array([0, 0, 0, 1, 1]), 4, np.array([1.0, 2.0]))
    assert rates == pytest.approx([1 / 3, 1 / 3, 1 / 3, 5 / 3])


def naive_rates(paths: list[list[int]], bandwidth: np.ndarray) -> list[float]:
    """Progressive filling as in textbooks: the globally tightest link settles its flows, then the next."""
    rate: dict[int, float] = {}
    while len(rate) < len(paths):
        shares = {}
        for link in {link for path in paths for link in path}:
            users = [i for i, path in enumerate(paths) if link in path]
            still_open = [i for i in users if i not in rate]
            if still_open:
                used = sum(rate[i] for i in users if i in rate)
                shares[link] = (bandwidth[link] - used) / len(still_open)
        tightest = min(shares, key=lambda link: shares[link])
        for i, path in enumerate(paths):
            if tightest in path and i not in rate:
                rate[i] = shares[tightest]
    return [rate[i] for i in range(len(paths))]


def random_paths(generator: random.Random, flows: int, links: int) -> list[list[int]]:
    return [generator.sample(range(links), generator.randint(1, min(4, links))) for _ in range(flows)]


@pytest.mark.parametrize("seed", range(30))
def test_bandwidth_shares_follow_progressive_filling(seed: int):
    generator = random.Random(seed)
    paths = random_paths(generator, generator.randint(1, 25), generator.randint(2, 12))
    bandwidth = np.array([generator.choice([0.5, 1, 1, 2, 7.3]) for _ in range(12)])
    flow = np.repeat(np.arange(len(paths)), [len(path) for path in paths])
    rates = compute_fair_rates(flow, np.array([link for path in paths for link in path]), len(paths), bandwidth)
    assert rates == pytest.approx(naive_rates(paths, bandwidth))


def test_cached_rates_match_routes_in_any_order():
    routes = Routes(np.array([0, 1, 2, 4]), np.array([0, 1, 0, 1]))
    sharing = FairSharing(routes, np.array([1.0, 4.0]))
    first = sharing.compute_rates(np.array([0, 1, 2]))
    assert first == pytest.approx([0.5, 3.5, 0.5])
    assert sharing.compute_rates(np.array([1, 2, 0])) == pytest.approx([3.5, 0.5, 0.5])


# --- time


def test_message_time_is_latency_plus_bytes_over_rate():
    timing = simulate_collective(transfers(4, 8, [(0, 3, 2)]), line(4, 0.5, 10.0), 80.0)
    assert timing.seconds == pytest.approx(3 * 0.5 + 20 / 10)
    assert (timing.start.tolist(), timing.end.tolist()) == ([0.0], [timing.seconds])
    assert timing.bytes_sent.tolist() == [20, 0, 0, 0]
    assert timing.link_bytes.tolist() == [20, 20, 20, 0, 0, 0]


def test_latency_takes_no_bandwidth():
    # 0 -> 1 flows alone until the message 0 -> 2, with the latency of two links, starts to flow.
    timing = simulate_collective(transfers(3, 1, [(0, 1, 1), (0, 2, 1)]), line(3, 1.0, 10.0), 30.0)
    # 1: 10 bytes by t=2, then half rate: 20 bytes until t=6. 2: 20 bytes by t=6, the last 10 alone.
    assert timing.end.tolist() == [pytest.approx(6.0), pytest.approx(7.0)]


def test_both_directions_of_a_cable_carry_at_once():
    timing = simulate_collective(transfers(2, 1, [(0, 1, 1), (1, 0, 1)]), line(2, 1.0, 10.0), 30.0)
    assert timing.seconds == pytest.approx(1 + 3)


def test_ended_flow_leaves_its_bandwidth_to_others():
    timing = simulate_collective(transfers(3, 4, [(0, 2, 3), (1, 2, 1)]), line(3), 4.0)
    assert timing.end.tolist() == pytest.approx([4.0, 2.0])


def test_grouped_messages_between_same_ranks_pay_one_latency():
    program = Builder("all-reduce", "by hand", 2, 4)
    with program.round():
        program.transfer(0, 1, [0, 2])
    timing = simulate_collective(matched(program.build()), line(2, 1.0), 4.0)
    assert timing.end.tolist() == [pytest.approx(1 + 2)] * 2


def test_grouped_messages_on_one_link_start_one_gap_apart():
    program = Builder("all-reduce", "by hand", 4, 1)
    with program.round():
        program.signal(1, [0, 3, 2])  # left, right over two links, right
    timing = simulate_collective(matched(program.build()), line(4, 10.0, gap=0.25), 0.0)
    assert sorted(timing.end.tolist()) == [10.0, 12.5, 20.0]
    assert timing.start.tolist() == [0.0] * 3


def test_transfer_starts_when_both_ends_are_posted():
    # Rank 2 is busy with rank 1 for 3 seconds; only then can it receive from rank 0.
    timing = simulate_collective(transfers(3, 3, [(1, 2, 3)], [(0, 2, 1)]), line(3), 3.0)
    assert timing.start.tolist() == [pytest.approx(3.0), 0.0]
    assert timing.seconds == pytest.approx(4.0)


def test_a_group_ends_when_all_of_its_messages_have():
    timing = simulate_collective(transfers(3, 4, [(1, 0, 1), (1, 2, 4)], [(1, 0, 1)]), line(3), 4.0)
    assert timing.start.tolist() == [0.0, 0.0, pytest.approx(4.0)]


def test_signals_cost_their_latency():
    program = Builder("barrier", "by hand", 3, 1)
    for source in (0, 1):
        with program.round():
            program.signal(source, source + 1)
    timing = simulate_collective(matched(program.build()), line(3, 0.25), 0.0)
    assert timing.seconds == 0.5 and timing.busiest_link is None


def test_reduction_time_delays_next_group():
    network = line(3, 0.0, 10.0)
    program = transfers(3, 1, [(0, 1, 1)], [(1, 2, 1)], reduce=True)
    assert simulate_collective(program, network, 40.0).seconds == pytest.approx(8.0)
    assert simulate_collective(program, network, 40.0, reduce_bytes_per_second=20.0).seconds == pytest.approx(12.0)


def test_local_steps_run_one_after_another():
    program = Builder("all-reduce", "by hand", 2, 1, scratch=1)
    for _ in range(3):
        with program.round():
            program.copy([0, 1], 0, 1, combine=True)
    with program.round():
        program.transfer(0, 1, 0)
    timing = simulate_collective(matched(program.build()), line(2, 1.0, 10.0), 10.0, reduce_bytes_per_second=5.0)
    assert timing.start.tolist() == [pytest.approx(6.0)] and timing.seconds == pytest.approx(8.0)


def test_one_simulator_serves_several_sizes():
    simulator = CollectiveSimulator(transfers(3, 4, [(0, 2, 3), (1, 2, 1)]), line(3))
    assert [simulator.run(size).seconds for size in (4.0, 8.0, 4.0)] == pytest.approx([4.0, 8.0, 4.0])


# --- against a naive simulator


def naive_simulation(program: Any, network: Network, total_bytes: float) -> tuple[float, dict[int, float]]:
    """Naive simulation: one object per message, all rates recomputed at every event."""
    steps = program.program.steps
    group_of = steps.group_index
    messages: dict[tuple[int, int], float] = defaultdict(float)
    for send, receive in zip(program.sends, program.receives, strict=True):
        size = steps.count[send] * total_bytes / program.program.chunks
        messages[int(group_of[send]), int(group_of[receive])] += size
    rank_of = steps.group_rank.tolist()
    path = {m: find_route(network, rank_of[m[0]], rank_of[m[1]]) for m in messages}
    latency: dict[tuple[int, int], float] = {}
    before: dict[tuple[int, int], int] = defaultdict(int)
    for m in sorted(
        messages,
        key=lambda m: min(
            a for a, b in zip(program.sends, program.receives, strict=True) if (group_of[a], group_of[b]) == m
        ),
    ):
        alone = sum(network.latency[link] for link in path[m])
        latency[m] = alone * (1 + network.gap * before[m[0], path[m][0]])
        before[m[0], path[m][0]] += 1
    posted: set[int] = set()
    ended_at: dict[tuple[int, int], float] = {}
    starts: dict[tuple[int, int], float] = {}
    left = dict(messages)
    now = 0.0
    while len(ended_at) < len(messages):
        changed = True
        while changed:  # post all groups that can be posted
            changed = False
            for group, rank in enumerate(rank_of):
                done = all(m in ended_at for m in messages if group - 1 in m)
                if group not in posted and (group == 0 or rank_of[group - 1] != rank or (group - 1 in posted and done)):
                    posted.add(group)
                    changed = True
        for m in messages:
            if m not in starts and m[0] in posted and m[1] in posted:
                starts[m] = now + latency[m]
        flowing = [m for m in starts if m not in ended_at and starts[m] <= now + 1e-12 and left[m] > 0]
        rates = dict(zip(flowing, naive_rates([path[m] for m in flowing], network.bandwidth), strict=True))
        soon = [now + left[m] / rates[m] for m in flowing]
        soon += [starts[m] for m in starts if starts[m] > now + 1e-12]
        soon += [starts[m] for m in starts if m not in ended_at and left[m] == 0]
        moment = min(soon)
        for m in flowing:
            left[m] -= rates[m] * (moment - now)
            left[m] = 0.0 if left[m] < 1e-9 else left[m]
        now = moment
        for m in starts:
            if m not in ended_at and left[m] == 0 and starts[m] <= now + 1e-12:
                ended_at[m] = now
    ends = {
        number: ended_at[int(group_of[send]), int(group_of[receive])]
        for number, (send, receive) in enumerate(zip(program.sends, program.receives, strict=True))
    }
    return now, ends


def random_program(generator: random.Random) -> Any:
    """Return rounds of random transfers that cannot deadlock; each rank takes part in some."""
    ranks = generator.randint(2, 6)
    program = Builder("all-reduce", "random", ranks, 12)
    for _ in range(generator.randint(1, 6)):
        with program.round():
            for _ in range(generator.randint(1, 5)):
                source, target = generator.sample(range(ranks), 2)
                if generator.random() < 0.1:
                    program.signal(source, target)
                else:
                    program.transfer(source, target, 0, generator.randint(1, 12))
    return matched(program.build())


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_match_naive_simulation(seed: int):
    generator = random.Random(seed)
    program = random_program(generator)
    network = line(program.program.ranks, generator.choice([0.0, 0.3, 1.0]), generator.choice([1.0, 2.5]), 0.2)
    network.bandwidth[generator.randrange(network.links)] = 0.7
    seconds, ends = naive_simulation(program, network, 24.0)
    timing = simulate_collective(program, network, 24.0)
    assert timing.seconds == pytest.approx(seconds)
    assert timing.end == pytest.approx([ends[i] for i in range(len(ends))])


# --- networks


def test_least_latencies_and_distances_match_cheapest_paths():
    network = line(4, 0.5)
    assert network.min_latency == 0.5
    assert network.compute_distances(0).tolist() == [0, 0.5, 1.0, 1.5]
    network.latency[0] = 2.0  # from rank 0 to rank 1, not back
    assert network.compute_distances(0).tolist() == [0, 2.0, 2.5, 3.0]
    assert network.compute_distances(0, towards=True).tolist() == [0, 0.5, 1.0, 1.5]


def test_links_have_names():
    assert line(3).format_link(2) == "rank 1 → rank 0"
