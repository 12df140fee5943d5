"""Topologies: parsing, valid routes, and capacities of links."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshwright.collectives import networks
from meshwright.collectives.quantities import (
    format_bytes,
    format_exact_rate,
    format_exact_seconds,
    format_seconds,
    parse_bytes,
    parse_rate,
    parse_seconds,
)
from meshwright.collectives.topologies import TOPOLOGIES, parse_topology
from meshwright.errors import UserError
from meshwright.program.network import Network

EVERY = [
    ("switch", 1),
    ("switch", 6),
    ("full-mesh", 5),
    ("ring", 2),
    ("ring", 5),
    ("ring", 8),
    ("torus:4x4", 16),
    ("torus:2x3", 6),
    ("torus:1x5", 5),
    ("torus:3x2x4", 24),
    ("torus:2x2x2x3", 24),
    ("mesh:3x4", 12),
    ("mesh:2x3x2", 12),
    ("nodes:3x4", 12),
    ("nodes:3x4,rails", 12),
    ("nodes:3x4,adapters=2", 12),
    ("nodes:1x4,adapters=1", 4),
    ("spine-leaf:3x4,oversubscription=4", 12),
    ("spine-leaf:3x4,spines=2", 12),
]
every = pytest.mark.parametrize(("text", "ranks"), EVERY)


def find_route(network: Network, source: int, target: int) -> np.ndarray:
    """Return the links of a message from rank `source` to rank `target`, in order."""
    return network.find_routes(np.array([source]), np.array([target])).link


def pairs(network: Network) -> tuple[np.ndarray, np.ndarray]:
    found = [(a, b) for a in range(network.ranks) for b in range(network.ranks) if a != b]
    both = np.array(found, np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def hops(network: Network, source: int) -> dict[int, int]:
    """Return the number of links from `source` to every vertex, by breadth-first search."""
    found, edge = {source: 0}, {source}
    while edge:
        reached = {
            int(b) for a, b in zip(network.link_from, network.link_to, strict=True) if int(a) in edge
        } - found.keys()
        found |= dict.fromkeys(reached, max(found.values()) + 1)
        edge = reached
    return found


@every
def test_every_route_is_a_path_from_source_to_target(text: str, ranks: int):
    network = parse_topology(text, ranks)
    sources, targets = pairs(network)
    routes = network.find_routes(sources, targets)
    assert len(routes) == len(sources)
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        links = routes.link[routes.first[number] : routes.first[number + 1]]
        stops = [source, *network.link_to[links]]
        assert stops[:-1] == list(network.link_from[links]) and stops[-1] == target
        assert list(find_route(network, int(source), int(target))) == list(links)


@every
def test_routes_are_shortest(text: str, ranks: int):
    network = parse_topology(text, ranks)
    for source in range(ranks):
        distance = hops(network, source)
        for target in set(range(ranks)) - {source}:
            assert len(find_route(network, source, target)) == distance[target], (source, target)


@every
def test_every_cable_has_two_equal_directions(text: str, ranks: int):
    network = parse_topology(text, ranks)

    def ends(one, other):
        return sorted(zip(one, other, network.latency, network.bandwidth, strict=True))

    assert ends(network.link_from, network.link_to) == ends(network.link_to, network.link_from)
    assert len({network.format_link(link) for link in range(network.links)}) == network.links


@every
def test_partitions_name_a_block_for_every_rank(text: str, ranks: int):
    network = parse_topology(text, ranks)
    for block in network.partitions:
        assert len(block) == network.vertices and (block[:ranks] >= 0).all()
        assert set(block[block >= 0]) == set(range(block.max() + 1))


@every
def test_canonical_topology_name_parses_to_same_network(text: str, ranks: int):
    one = parse_topology(text, ranks, latency=3.7e-6, bandwidth=1.1e9 / 3)
    other = parse_topology(one.name, ranks)
    assert other.name == one.name
    for column in ("link_from", "link_to", "latency", "bandwidth"):
        assert np.array_equal(getattr(one, column), getattr(other, column)), column


@every
def test_distances_match_cheapest_paths(text: str, ranks: int):
    """Against Floyd and Warshall's algorithm."""
    network = parse_topology(text, ranks)
    distance = np.full((network.vertices, network.vertices), np.inf)
    np.fill_diagonal(distance, 0.0)
    np.minimum.at(distance, (network.link_from, network.link_to), network.latency)
    for middle in range(network.vertices):
        distance = np.minimum(distance, distance[:, middle : middle + 1] + distance[middle])
    assert network.compute_distances(0) == pytest.approx(distance[0, :ranks])
    assert network.compute_distances(0, towards=True) == pytest.approx(distance[:ranks, 0])
    between = [distance[a, b] for a, b in itertools.permutations(range(ranks), 2)]
    assert network.min_latency <= min(between, default=0.0) * (1 + 1e-12)


# --- networks


def test_switch_has_one_port_per_rank_and_message_latency():
    network = parse_topology("switch,10GB/s,4us", 5)
    assert network.links == 10 and set(network.bandwidth) == {10e9}
    assert network.latency[find_route(network, 1, 3)].sum() == 4e-6


def test_torus_has_two_cables_except_for_dimension_2():
    assert parse_topology("torus:4x4", 16).links == 16 * 2 * 2
    assert parse_topology("torus:2x4", 8).links == 8 * (1 + 2)
    assert parse_topology("mesh:4x4", 16).links == 2 * 2 * 4 * 3


def test_torus_routes_last_dimension_first_in_shorter_direction():
    network = parse_topology("torus:4x5", 20)
    names = [network.format_link(link) for link in find_route(network, 0, 3 * 5 + 3)]
    assert names == ["rank 0 → rank 4", "rank 4 → rank 3", "rank 3 → rank 18"]


def test_rail_messages_change_rail_inside_their_own_node():
    network = parse_topology("nodes:2x4,rails", 8)
    names = [network.format_link(link) for link in find_route(network, 1, 6)]
    assert names == ["rank 1 → node 0", "node 0 → rank 2", "rank 2 → rail 2", "rail 2 → rank 6"]
    assert [network.format_link(link) for link in find_route(network, 2, 6)] == names[2:]


def test_devices_with_shared_adapter_reach_it_over_inner_links():
    network = parse_topology("nodes:2x4,adapters=2,inner=100GB/s,1us,outer=10GB/s,8us", 8)
    names = [network.format_link(link) for link in find_route(network, 1, 6)]
    assert names == ["rank 1 → node 0", "node 0 → network (link 0)", "network → node 1 (link 1)", "node 1 → rank 6"]
    assert network.latency[find_route(network, 1, 6)].sum() == pytest.approx(9e-6)
    assert network.bandwidth[find_route(network, 1, 6)].tolist() == [100e9, 10e9, 10e9, 100e9]


def test_oversubscription_divides_uplink_bandwidth_of_leaf():
    network = parse_topology("spine-leaf:2x8,25GB/s,oversubscription=4,spines=2", 16)
    assert network.bandwidth[find_route(network, 0, 9)].tolist() == [25e9, 25e9, 25e9, 25e9]
    assert network.format_link(find_route(network, 0, 9)[1]) == "leaf 0 → spine 1"
    assert network.bandwidth[find_route(network, 0, 7)].tolist() == [25e9, 25e9]
    trunk = network.bandwidth[[i for i in range(network.links) if network.format_link(i).startswith("leaf 0 → spine")]]
    assert trunk.sum() == 8 * 25e9 / 4


def test_shapes_report_properties_needed_by_algorithms():
    assert parse_topology("torus:2x3x4", 24).dims == (2, 3, 4)
    assert parse_topology("nodes:8", 16).ranks_per_node == 8
    assert parse_topology("nodes:2x8", 16).ranks_per_node == 8
    assert parse_topology("spine-leaf:4", 12).ranks_per_node == 4


def test_omitted_topology_settings_come_from_arguments_or_defaults():
    assert parse_topology("switch", 4).name == "switch,25GB/s,5us"
    assert parse_topology("switch,1us", 4, latency=2e-6, bandwidth=1e9).name == "switch,1GB/s,1us"
    assert (
        parse_topology("nodes:2", 4, latency=2e-6, bandwidth=1e9).name == "nodes:2x2,inner=450GB/s,3us,outer=1GB/s,2us"
    )
    assert networks.build_switch(2).bandwidth[0] == 25e9 and networks.build_switch(2).latency.sum() / 2 == 5e-6


# --- invalid texts


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("swich", 4, 'unknown name "swich"; did you mean "switch"?'),
        ("", 4, 'unknown name ""'),
        ("torus", 8, "for 8 ranks, valid is torus:2x4"),
        ("torus:2x2", 8, "2x2 does not give 8 ranks; valid is torus:2x4"),
        ("torus:2xb", 8, '"2xb" is not a shape'),
        ("torus:-2x-4", 8, "is not a shape"),
        ("ring:8", 8, 'ring has no shape: omit ":8"'),
        ("nodes:3", 8, "3 does not give 8 ranks; valid is nodes:4x2"),
        ("nodes:2x2x2", 8, "2x2x2 does not give 8 ranks"),
        ("nodes:2x4,3us", 8, "3us of which links? For example nodes:2x8,inner=450GB/s,3us"),
        ("nodes:2x4,inner=3us,4us", 8, "inner has two latencies"),
        ("nodes:2x4,rail", 8, 'unknown setting "rail"; did you mean "rails"?'),
        ("nodes:2x4,outr=3us", 8, 'unknown setting "outr"; did you mean "outer"?'),
        ("nodes:2x4,adapters=3", 8, "3 adapters do not divide 4 devices"),
        ("nodes:2x4,adapters=1.5", 8, "is not a whole number"),
        ("nodes:2x4,adapters=2,rails", 8, "leave out adapters or rails"),
        ("spine-leaf:2x4,oversubscription=0", 8, '"0" is not a number above 0'),
        ("switch,25Gb/s", 8, '"25Gb/s" is not a rate such as 25GB/s or 100Mbit/s'),
        ("switch,0GB/s", 8, "a rate must be above 0"),
        ("switch,5", 8, '"5" is not a time such as 5us'),
        ("switch", 0, "there must be at least 1"),
    ],
)
def test_topology_mistake_is_one_line_with_correction(text: str, ranks: int, message: str):
    with pytest.raises(UserError) as caught:
        parse_topology(text, ranks)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_every_example_is_valid():
    ranks = {"torus": 16, "mesh": 16, "nodes": 16, "spine-leaf": 32}
    for name, kind in TOPOLOGIES.items():
        assert parse_topology(kind.example, ranks.get(name, 8)).ranks == ranks.get(name, 8)


# --- quantities


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("64MiB", 64 << 20),
        ("1GB", 10**9),
        ("1.5 KiB", 1536),
        ("2kb", 2000),
        ("1e3", 1000),
        ("0.3kb", 300),
        ("0.3KiB", 307),
        ("0", 0),
    ],
)
def test_byte_counts_are_parsed_with_units(text: str, value: int):
    assert parse_bytes(text) == value


def test_times_and_rates():
    assert parse_seconds("5us") == 5e-6 and parse_seconds("0.1 ms") == 1e-4 and parse_seconds("0s") == 0
    assert parse_rate("25GB/s") == 25e9 and parse_rate("100Mbit/s") == 12.5e6 and parse_rate("1GiB/s") == 2**30


@pytest.mark.parametrize(
    "text", ["", "MiB", "-4", "4 parsecs", "1.5", "1.5B", "1..5GB", "nan", "inf", "1e400", "5us", "٣"]
)
def test_invalid_byte_counts_are_refused(text: str):
    with pytest.raises(UserError):
        parse_bytes(text)


@pytest.mark.parametrize("value", [5e-6, 1.0, 1 / 3, 3.7e-9, 0.1 + 0.2, 0.0])
def test_exact_quantities_are_read_back(value: float):
    assert parse_seconds(format_exact_seconds(value)) == value
    if value:
        assert parse_rate(format_exact_rate(value * 1e9)) == value * 1e9


def test_quantities_are_shown_in_the_unit_that_fits():
    assert [format_bytes(value) for value in (0, 1000, 1536, 64 << 20)] == [
        "0 bytes",
        "1,000 bytes",
        "1.5 KiB",
        "64 MiB",
    ]
    assert [format_bytes(value) for value in (1e18, 1e30)] == ["909,495 TiB", "9.09e+17 TiB"]
    assert [format_seconds(value) for value in (0, 5e-6, 0.00123, 2, 3e-10)] == [
        "0 s",
        "5 µs",
        "1.23 ms",
        "2 s",
        "0.3 ns",
    ]
