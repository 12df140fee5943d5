"""Rounds and bytes of the collective algorithms against the closed forms of their papers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import ceil, floor, log2, prod

import numpy as np
import pytest

from meshwright.collectives.double_binary_tree import build_two_trees, compute_in_order_parents
from meshwright.collectives.grid import find_nearly_cubic, resolve_ranks_per_node
from meshwright.collectives.library import generate
from meshwright.errors import UserError
from meshwright.program import collective
from meshwright.program.collective import CollectiveProgram, Kind
from meshwright.program.order import find_posting_order, match_transfers
from tests.collectives.execution import rounds, sent

COUNTS = (*range(1, 18), 24, 32)
POWERS = (1, 2, 4, 8, 16, 32, 64)


def up(n: int) -> int:
    """log2 n, rounded up."""
    return ceil(log2(n))


def core(n: int) -> int:
    """Return the largest power of two up to n."""
    return 1 << floor(log2(n))


def folded(n: int) -> int:
    """Return the additional rounds if n is not a power of two."""
    return 0 if n == core(n) else 2


def node(n: int) -> int:
    """Return the default number of ranks per node."""
    return resolve_ranks_per_node("", n)


Form = Callable[[int], float]
# Rounds, and the fraction of the vector sent by the rank that sends most (None: tested below).
CLOSED_FORMS: dict[tuple[str, str], tuple[Form, Form | None]] = {
    ("send-receive", "direct"): (lambda n: n > 1, lambda n: n > 1),
    ("barrier", "dissemination"): (up, lambda n: 0),
    ("barrier", "binomial-tree"): (lambda n: 2 * up(n), lambda n: 0),
    ("broadcast", "binomial-tree"): (up, up),
    ("broadcast", "scatter-all-gather"): (
        lambda n: up(n) + n - 1 if n > 1 else 0,
        lambda n: 2 * (n - 1) / n,
    ),
    ("broadcast", "hierarchical"): (lambda n: up(node(n)) + up(n // node(n)), lambda n: up(node(n)) + up(n // node(n))),
    ("scatter", "binomial-tree"): (up, lambda n: (n - 1) / n),
    ("scatter", "linear"): (lambda n: n > 1, lambda n: (n - 1) / n),
    ("gather", "binomial-tree"): (up, None),
    ("gather", "linear"): (lambda n: n > 1, lambda n: (n > 1) / n),
    ("reduce", "binomial-tree"): (up, lambda n: n > 1),
    ("reduce", "hierarchical"): (lambda n: up(node(n)) + up(n // node(n)), lambda n: n > 1),
    ("all-gather", "ring"): (lambda n: n - 1, lambda n: (n - 1) / n),
    ("all-gather", "bidirectional-ring"): (lambda n: n - 1, lambda n: (n - 1) / n),
    ("all-gather", "recursive-doubling"): (lambda n: log2(core(n)) + folded(n), None),
    ("all-gather", "bruck"): (up, lambda n: (n - 1) / n),
    ("all-gather", "pairwise"): (lambda n: n - 1, lambda n: (n - 1) / n),
    ("all-gather", "all-pairs"): (lambda n: n > 1, lambda n: (n - 1) / n),
    ("all-gather", "hierarchical"): (lambda n: node(n) + n // node(n) - 2, lambda n: (n - 1) / n),
    ("all-gather", "torus"): (lambda n: n - 1, lambda n: (n - 1) / n),
    ("all-gather", "mesh"): (lambda n: n - 1, lambda n: (n + 1) / n if n > 2 else (n > 1) / n),
    ("reduce-scatter", "ring"): (lambda n: n - 1, lambda n: (n - 1) / n),
    ("reduce-scatter", "bidirectional-ring"): (lambda n: n - 1, lambda n: (n - 1) / n),
    ("reduce-scatter", "recursive-halving"): (lambda n: log2(core(n)) + folded(n), None),
    ("reduce-scatter", "pairwise"): (lambda n: n - 1, lambda n: (n - 1) / n),
    ("reduce-scatter", "all-pairs"): (lambda n: n > 1, lambda n: (n - 1) / n),
    ("reduce-scatter", "hierarchical"): (lambda n: node(n) + n // node(n) - 2, lambda n: (n - 1) / n),
    ("reduce-scatter", "torus"): (lambda n: n - 1, lambda n: (n - 1) / n),
    ("reduce-scatter", "mesh"): (lambda n: n - 1, lambda n: (n - 1) / n),
    ("all-reduce", "ring"): (lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n),
    ("all-reduce", "bidirectional-ring"): (lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n),
    ("all-reduce", "halving-doubling"): (lambda n: 2 * up(n), up),
    ("all-reduce", "rabenseifner"): (
        lambda n: 2 * log2(core(n)) + folded(n),
        lambda n: 2 * (core(n) - 1) / core(n) + (folded(n) > 0),
    ),
    ("all-reduce", "butterfly"): (lambda n: log2(core(n)) + folded(n), lambda n: log2(core(n)) + (folded(n) > 0)),
    ("all-reduce", "binomial-tree"): (lambda n: 2 * up(n), up),
    ("all-reduce", "hierarchical"): (
        lambda n: 2 * up(node(n)) + 2 * (n // node(n) - 1),
        lambda n: up(node(n)) + 2 * (n // node(n) - 1) / (n // node(n)),
    ),
    ("all-reduce", "hierarchical-scatter"): (lambda n: 2 * (node(n) + n // node(n) - 2), lambda n: 2 * (n - 1) / n),
    ("all-reduce", "torus"): (lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n),
    ("all-reduce", "mesh"): (lambda n: 2 * (n - 1), lambda n: 2 if n > 2 else n - 1),
    ("all-reduce", "all-pairs"): (lambda n: 2 * (n > 1), lambda n: 2 * (n - 1) / n),
    ("all-to-all", "pairwise"): (lambda n: n - 1, lambda n: (n - 1) / n),
    ("all-to-all", "ring"): (lambda n: n - 1, lambda n: (n - 1) / 2),
    ("all-to-all", "bruck"): (up, lambda n: sum(bin(i).count("1") for i in range(n)) / n),
    ("all-to-all", "all-pairs"): (lambda n: n > 1, lambda n: (n - 1) / n),
    ("all-to-all", "hierarchical"): (
        lambda n: node(n) + n // node(n) - 2,
        lambda n: 2 - 1 / node(n) - node(n) / n,
    ),
}


@pytest.mark.parametrize(("operation", "name"), CLOSED_FORMS)
def test_rounds_and_bytes_are_those_of_the_closed_form(operation: str, name: str):
    expected_rounds, expected_bytes = CLOSED_FORMS[operation, name]
    for n in COUNTS:
        program = generate(operation, name, n)
        assert rounds(program) == expected_rounds(n), n
        if expected_bytes:
            assert sent(program).max() == pytest.approx(float(expected_bytes(n))), n


@pytest.mark.parametrize("name", ["ring", "bidirectional-ring", "all-pairs", "hierarchical-scatter", "torus"])
def test_bandwidth_optimal_all_reduce_sends_minimum_bytes(name: str):
    for n in COUNTS:
        assert sent(generate("all-reduce", name, n)) == pytest.approx(2 * (n - 1) / n)


@pytest.mark.parametrize(
    ("operation", "name", "expected"),
    [
        ("all-reduce", "rabenseifner", lambda n: 2 * (n - 1) / n),
        ("all-reduce", "butterfly", log2),
        ("all-gather", "recursive-doubling", lambda n: (n - 1) / n),
        ("reduce-scatter", "recursive-halving", lambda n: (n - 1) / n),
    ],
)
def test_powers_of_two_make_every_rank_send_equally(operation: str, name: str, expected: Form):
    for n in POWERS:
        assert sent(generate(operation, name, n)) == pytest.approx(expected(n))


def test_extra_ranks_send_vector_once_and_receive_result_once():
    part = sent(generate("all-reduce", "rabenseifner", 6))  # extra 0 and 2, stand-ins 1 and 3
    assert part.tolist() == [1, 2.5, 1, 2.5, 1.5, 1.5]
    part = sent(generate("all-reduce", "butterfly", 5))
    assert part.tolist() == [1, 3, 2, 2, 2]
    part = sent(generate("reduce-scatter", "recursive-halving", 3))  # rank 1 stands in for 0 and 1, gives 2 its third
    assert part == pytest.approx([1, 1 / 3 + 1 / 3, 2 / 3])
    part = sent(generate("all-gather", "recursive-doubling", 3))
    assert part == pytest.approx([1 / 3, 2 / 3 + 2 / 3, 1 / 3])


@pytest.mark.parametrize("name", ["reduce-scatter-gather"])
def test_reduce_by_halving_halves_messages_in_log_n_rounds(name: str):
    for n in POWERS:
        program = generate("reduce", name, n)
        assert rounds(program) == 2 * log2(n)
        assert lockstep(program, by="rank") == pytest.approx(2 * (n - 1) / n)


@pytest.mark.parametrize("segments", [1, 2, 5, 16])
def test_segments_follow_each_other_one_round_apart(segments: int):
    for n in (2, 3, 7, 8, 13):
        levels, height, below = up(n), floor(log2(n)), floor(log2(max(1, n - 1)))
        for operation, name, expected in (
            ("broadcast", "binomial-tree", levels + segments - 1),
            ("reduce", "binomial-tree", levels + segments - 1),
            ("all-reduce", "binomial-tree", 2 * levels + segments - 1),
            ("broadcast", "ring", n - 1 + segments - 1),
            ("reduce", "ring", n - 1 + segments - 1),
            ("all-reduce", "double-binary-tree", 2 * height + segments - 1),
            ("broadcast", "double-binary-tree", below + segments),
            ("reduce", "double-binary-tree", below + segments),
        ):
            assert rounds(generate(operation, name, n, segments=segments)) == expected, (operation, name, n)


def test_segments_change_no_bytes():
    for operation, name in (("broadcast", "ring"), ("reduce", "binomial-tree"), ("all-reduce", "double-binary-tree")):
        few, many = (sent(generate(operation, name, 11, segments=k)) for k in (2, 6))
        assert few == pytest.approx(many)


def test_chain_sends_vector_once_over_all_links_but_one():
    assert sent(generate("broadcast", "ring", 6, root=2)).tolist() == [1, 0, 1, 1, 1, 1]
    assert sent(generate("reduce", "ring", 6, root=2)).tolist() == [1, 1, 0, 1, 1, 1]


# Two trees


@pytest.mark.parametrize("n", range(1, 70))
def test_in_order_tree_is_binary_and_minimal(n: int):
    parent = compute_in_order_parents(n)[1:].tolist()
    assert parent.count(0) == 1
    children = Counter(parent)
    assert all(children[node] <= 2 for node in range(1, n + 1))
    assert {node for node in range(1, n + 1) if not children[node]} == set(range(1, n + 1, 2))
    for node in range(1, n + 1):
        steps, at = 0, node
        while parent[at - 1]:
            steps, at = steps + 1, parent[at - 1]
        assert steps <= floor(log2(n))
        # In-order numbering: the left subtree of a node comes before it, the right one after.
        left = node < parent[node - 1]
        assert parent[node - 1] == 0 or all((below < parent[node - 1]) == left for below in _subtree(node, parent))


def _subtree(node: int, parent: list[int]) -> list[int]:
    below = [child + 1 for child, above in enumerate(parent) if above == node]
    return [node, *(deeper for child in below for deeper in _subtree(child, parent))]


@pytest.mark.parametrize("n", range(1, 70))
def test_no_rank_is_an_inner_node_of_both_trees(n: int):
    for ranks, root in ((np.arange(n), None), (np.arange(1, n + 1), 0)):
        inner = [
            {int(parent) for parents, _ in tree for parent in parents} - {root} for tree in build_two_trees(ranks, root)
        ]
        assert inner[0].isdisjoint(inner[1])


def test_second_tree_is_first_one_mirrored_or_shifted():
    def edges(tree: list[tuple[np.ndarray, np.ndarray]]) -> set[tuple[int, int]]:
        return {(int(a), int(b)) for parents, children in tree for a, b in zip(parents, children, strict=True)}

    for n in (2, 6, 8, 14):
        first, second = map(edges, build_two_trees(np.arange(n)))
        assert second == {(n - 1 - a, n - 1 - b) for a, b in first}
    for n in (3, 7, 13):
        first, second = map(edges, build_two_trees(np.arange(n)))
        assert second == {((a + 1) % n, (b + 1) % n) for a, b in first}


def test_two_trees_move_at_most_twice_the_vector():
    for n in COUNTS:
        program = generate("all-reduce", "double-binary-tree", n)
        assert sent(program).max() <= 2
        assert lockstep(program, by="rank") <= (2 * floor(log2(n)) + 8 - 1) * 2 / 8
        broadcast = generate("broadcast", "double-binary-tree", n)
        assert sent(broadcast).max() <= 1


# Time on links


def lockstep(program: CollectiveProgram, by: str) -> float:
    """Return the vectors sent in sequence if each round lasts as long as the rank (or pair) that sends most."""
    s = program.steps
    sends, receives = match_transfers(s.rank, s.peer, s.kind == Kind.SEND, np.isin(s.kind, (Kind.RECEIVE, Kind.REDUCE)))
    schedule = find_posting_order(s.group_rank, s.group_index[sends], s.group_index[receives])
    moment = np.maximum(schedule.rounds[s.group_index[sends]], schedule.rounds[s.group_index[receives]])
    load: Counter[tuple[int, ...]] = Counter()
    for at, rank, peer, count in zip(moment, s.rank[sends], s.peer[sends], s.count[sends], strict=True):
        load[(int(at), int(rank), int(peer)) if by == "link" else (int(at), int(rank))] += int(count)
    longest: dict[int, int] = {}
    for (at, *_), count in load.items():
        longest[at] = max(longest.get(at, 0), count)
    return sum(longest.values()) / program.chunks


def bucket(sides: tuple[int, ...]) -> float:
    """(X-1)/X + (Y-1)/XY + (Z-1)/XYZ ..."""
    return sum((side - 1) / prod(sides[: i + 1]) for i, side in enumerate(sides))


@pytest.mark.parametrize(("name", "sides"), [("2d-torus", (4, 4)), ("2d-torus", (5, 5)), ("3d-torus", (3, 3, 3))])
def test_torus_with_equal_sides_keeps_all_links_busy(name: str, sides: tuple[int, ...]):
    n, d = prod(sides), len(sides)
    program = generate("all-reduce", name, n)
    assert rounds(program) == 2 * sum(side - 1 for side in sides)
    assert lockstep(program, by="link") == pytest.approx(2 * bucket(sides) / (2 * d))
    loads = link_loads(program)
    assert len(loads) == 2 * d * n  # every link of the torus, in both directions
    assert max(loads.values()) == min(loads.values())
    assert all(distance(pair, sides, around=True) == 1 for pair in loads)


@pytest.mark.parametrize(("name", "sides"), [("2d-mesh", (4, 4)), ("2d-mesh", (3, 5)), ("mesh", (2, 3, 4))])
def test_mesh_sends_to_neighbours_at_one_way_ring_time(name: str, sides: tuple[int, ...]):
    program = generate("all-reduce", name, prod(sides), dims=sides)
    assert all(distance(pair, sides, around=False) == 1 for pair in link_loads(program))
    if len(set(sides)) == 1:
        assert lockstep(program, by="link") == pytest.approx(2 * bucket(sides) / len(sides))


@pytest.mark.parametrize("operation", ["reduce-scatter", "all-gather"])
def test_axis_by_axis_torus_halves_ring_time(operation: str):
    for sides in ((3, 5), (4, 4), (3, 3, 4)):
        n = prod(sides)
        program = generate(operation, "torus", n, dims=sides)
        assert lockstep(program, by="link") == pytest.approx((n - 1) / n / 2)
        assert all(distance(pair, sides, around=True) == 1 for pair in link_loads(program))


def test_two_directions_halve_the_time_of_a_ring():
    for operation in ("all-reduce", "reduce-scatter", "all-gather"):
        one = lockstep(generate(operation, "ring", 8), by="link")
        assert lockstep(generate(operation, "bidirectional-ring", 8), by="link") == pytest.approx(one / 2)


@pytest.mark.parametrize("operation", ["all-reduce", "reduce-scatter", "all-gather", "all-to-all"])
def test_a_ring_sends_to_the_next_rank_only(operation: str):
    assert set(link_loads(generate(operation, "ring", 7))) == {(rank, (rank + 1) % 7) for rank in range(7)}


def link_loads(program: CollectiveProgram) -> Counter[tuple[int, int]]:
    s = program.steps
    loads: Counter[tuple[int, int]] = Counter()
    for step in np.flatnonzero(s.kind == Kind.SEND):
        loads[int(s.rank[step]), int(s.peer[step])] += int(s.count[step])
    return loads


def distance(pair: tuple[int, int], sides: tuple[int, ...], around: bool) -> int:
    a, b = (np.array(np.unravel_index(rank, sides)) for rank in pair)
    hops = abs(a - b)
    return int((np.minimum(hops, np.array(sides) - hops) if around else hops).sum())


# Nodes


def leaving(program: CollectiveProgram, groups: int) -> np.ndarray:
    """Return the fraction of the vector that each rank sends out of its node: [ranks]."""
    s = program.steps
    out = (s.kind == Kind.SEND) & (s.rank // groups != s.peer // groups)
    return np.bincount(s.rank[out], s.count[out], minlength=program.ranks) / program.chunks


def test_hierarchical_algorithms_send_only_a_share_between_nodes():
    n, g, k = 12, 4, 3
    first = leaving(generate("all-reduce", "hierarchical", n, groups=g), g)
    assert first == pytest.approx(np.where(np.arange(n) % g == 0, 2 * (k - 1) / k, 0))
    scattered = leaving(generate("all-reduce", "hierarchical-scatter", n, groups=g), g)
    assert scattered == pytest.approx(2 * (k - 1) / n)
    for operation in ("reduce-scatter", "all-gather"):
        assert leaving(generate(operation, "hierarchical", n, groups=g), g) == pytest.approx((k - 1) / n)
    exchanged = generate("all-to-all", "hierarchical", n, groups=g)
    assert leaving(exchanged, g) == pytest.approx((k - 1) / k)
    s = exchanged.steps
    assert ((s.kind == Kind.SEND) & (s.rank // g != s.peer // g)).sum() == n * (k - 1)
    assert leaving(generate("broadcast", "hierarchical", n, root=6, groups=g), g).sum() == k - 1


def test_pairwise_exchanges_in_pairs_for_powers_of_two():
    for n, in_pairs in ((8, True), (6, False)):
        for operation in ("all-to-all", "reduce-scatter", "all-gather"):
            s = generate(operation, "pairwise", n).steps
            moved = s.kind != Kind.COPY
            partners = [
                set(s.peer[moved & (s.group_index == group)].tolist()) for group in np.unique(s.group_index[moved])
            ]
            assert all(len(found) == 1 for found in partners) == in_pairs


def test_bruck_and_recursive_all_gather_send_once_per_round():
    for operation, name in (
        ("all-to-all", "bruck"),
        ("all-gather", "recursive-doubling"),
        ("all-reduce", "rabenseifner"),
    ):
        s = generate(operation, name, 16).steps
        assert np.bincount(s.rank[s.kind == Kind.SEND]).max() <= {"rabenseifner": 8}.get(name, 4)


# Arrangements


def test_grids_are_as_square_as_number_of_ranks_allows():
    assert find_nearly_cubic(12, 2) == (3, 4)
    assert find_nearly_cubic(64, 3) == (4, 4, 4)
    assert find_nearly_cubic(24, 3) == (2, 3, 4)
    assert find_nearly_cubic(14, 2) == (2, 7)
    assert find_nearly_cubic(7, 2) is None
    assert find_nearly_cubic(1, 3) == (1, 1, 1)


def test_default_node_size_is_divisor_up_to_square_root():
    assert [node(n) for n in (1, 2, 4, 6, 7, 12, 16, 48, 64)] == [1, 1, 2, 2, 1, 3, 4, 6, 8]


def refusal(*arguments: object, **options: object) -> str:
    with pytest.raises(UserError) as error:
        generate(*arguments, **options)  # type: ignore[arg-type]
    return str(error.value)


def test_unsupported_counts_are_refused_with_valid_ones():
    assert refusal("all-reduce", "2d-torus", 7) == (
        "2d-torus cannot take 7 ranks: no 2 sides of at least 2 multiply to 7; near are 6 (2x3) and 8 (2x4)"
    )
    assert "near are 8 (2x2x2) and 12 (2x2x3)" in refusal("all-reduce", "3d-torus", 9)
    assert "near are 4 (2x2) and 6 (2x3)" in refusal("all-gather", "2d-mesh", 2)
    assert refusal("all-reduce", "2d-mesh", 8, dims=(3, 3)) == "2d-mesh: dims 3x3 hold 9 ranks, not 8"
    assert refusal("all-reduce", "2d-torus", 8, dims=(2, 2, 2)) == "2d-torus: dims 2x2x2 are 3 sides, not 2"
    assert "valid are 1, 2, 4, 8" in refusal("all-reduce", "hierarchical", 8, groups=3)
    assert "root 4 is not one of ranks 0 to 3" in refusal("broadcast", "ring", 4, root=4)
    assert "there must be at least 1" in refusal("all-reduce", "ring", 0)
    assert "0 segments" in refusal("broadcast", "ring", 4, segments=0)


def test_programs_beyond_any_memory_are_refused_at_once(monkeypatch: pytest.MonkeyPatch):
    assert "on 100,000 ranks is too large a program: 100,000 chunks on each rank" in refusal(
        "all-reduce", "ring", 100000
    )
    assert "too large" in refusal("all-to-all", "bruck", 100000)
    assert "too large" in refusal("broadcast", "ring", 4, segments=10**9)
    monkeypatch.setattr(collective, "MAX_STEPS", 100)
    assert "more than 100 steps" in refusal("all-reduce", "ring", 8)


def test_unsupported_options_and_names_are_refused():
    assert refusal("all-reduce", "ring", 4, segments=2) == (
        "ring all-reduce takes no segments; segments is for binomial-tree, double-binary-tree"
    )
    assert "takes no root" in refusal("all-reduce", "ring", 4, root=1)
    assert 'did you mean "rabenseifner"?' in refusal("all-reduce", "rabenseifer", 4)
    assert 'did you mean "all-reduce"?' in refusal("allreduce", "ring", 4)
    assert "needs a size and a topology" in refusal("all-reduce", "auto", 4)
