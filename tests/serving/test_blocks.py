"""Block pool against a model of it, and the prefix cache's hash chain."""

from __future__ import annotations

import random
from array import array
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from meshwright.serving.blocks import BlockPool, HashChain
from meshwright.spec.block_tables import BLOCK_TOKENS, count_blocks
from tests.serving.pool_checks import check_pool


def test_chain_hash_covers_block_and_all_before_it():
    tokens = list(range(40))
    hashes = HashChain(tokens).hashes
    assert len(hashes) == 2 and len(set(hashes)) == 2
    assert HashChain(tokens[:32]).hashes == hashes
    assert HashChain([99, *tokens[1:]]).hashes[1] != hashes[1]  # a block of equal tokens with another prefix
    assert HashChain(tokens, "salt").hashes[0] != hashes[0]
    grown = HashChain()
    for end in range(41):
        grown.extend(array("i", tokens[:end]))
    assert grown.hashes == hashes
    assert [count_blocks(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert BLOCK_TOKENS == 16


def test_released_blocks_are_evicted_least_recently_used_first():
    pool, hashes = BlockPool(4), HashChain(range(64)).hashes
    blocks = [pool.allocate(0) for _ in range(3)]
    for block, content in zip(blocks, hashes, strict=False):
        pool.register(block, content)
    assert pool.find(hashes) == (3, [blocks])  # held ones, too
    for block in reversed(blocks):
        pool.release(block, 0)
    assert (pool.stats["free"], pool.stats["cached"], pool.available) == (1, 3, 4)
    assert pool.find(hashes) == (3, [blocks])
    pool.allocate(1)  # the free one
    assert pool.allocate(1) == blocks[2]  # released first: the end of the prefix
    assert pool.find(hashes) == (2, [blocks[:2]])
    pool.share(blocks[0], 2)
    assert pool.allocate(2) == blocks[1]
    assert pool.find(hashes) == (1, [blocks[:1]])
    with pytest.raises(KeyError):
        pool.allocate(3)  # nothing is available


def test_block_of_cached_content_is_not_cached_twice():
    pool, (content, *_) = BlockPool(2), HashChain(range(16)).hashes
    first, second = pool.allocate(0), pool.allocate(1)
    pool.register(first, content)
    pool.register(second, content)
    pool.release(second, 1)
    assert (pool.stats["free"], pool.stats["cached"]) == (1, 0)
    pool.release(first, 0)
    assert pool.stats["cached"] == 1 and pool.find([content]) == (1, [[first]])


def test_block_of_one_table_is_unknown_to_another():
    pool, (content, *_) = BlockPool(2), HashChain(range(16)).hashes
    blocks = [pool.allocate(0, table) for table in range(2)]
    pool.register(blocks[0], content)
    assert pool.find([content], [None, None]) == (0, [[], []])
    pool.register(blocks[1], content)
    assert pool.find([content], [None, None]) == (1, [[blocks[0]], [blocks[1]]])
    for block in blocks:
        pool.release(block, 0)
    assert pool.stats["cached"] == 2
    taken = pool.allocate(1, 1)  # evicted from table 0
    assert taken == blocks[0] and pool.find([content], [None, None])[0] == 0
    pool.register(taken, content)  # which table 1 has already
    pool.release(taken, 1)
    assert (pool.stats["free"], pool.stats["cached"]) == (1, 1)


@pytest.mark.parametrize("windows", [(None,), (2,), (40,), (None, 20), (17, None, 49)])
def test_longest_prefix_has_the_blocks_inside_every_window(windows: tuple[int | None, ...]):
    """Against a search from the longest prefix down, token by token."""
    draw, hashes, found = random.Random(0), HashChain(range(16 * 7)).hashes, Counter()
    for _ in range(150):
        pool, known = BlockPool(7 * len(windows)), list[dict[int, int]]()
        for table in range(len(windows)):
            known.append({at: pool.allocate(0, table) for at in range(7) if draw.random() < 0.8})
            for at, block in known[-1].items():
                pool.register(block, hashes[at])
        for count in range(7, -1, -1):
            seen = [range(0 if window is None else max(0, 16 * count - window + 1), 16 * count) for window in windows]
            blocks = [sorted({token // 16 for token in each}) for each in seen]
            if all(at in own for own, needed in zip(known, blocks, strict=True) for at in needed):
                break
        wanted = [[own[at] for at in needed] for own, needed in zip(known, blocks, strict=True)]
        assert pool.find(hashes, windows) == (count, wanted)
        found[count] += 1
    assert len(found) >= 3


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(["allocate", "prefix", "fill", "release"]), st.integers(0, 99)), max_size=60))
def test_free_cached_and_held_blocks_sum_to_pool(actions: list[tuple[str, int]]):
    pool, tables = BlockPool(6), {}
    chains = [HashChain([kind] * 64).hashes for kind in range(3)]
    kinds: dict[int, int] = {}
    for age, (action, number) in enumerate(actions):
        if action == "allocate" and pool.available:
            tables[age], kinds[age] = [pool.allocate(age)], number % 3
        elif action == "prefix":
            kinds[age] = number % 3
            _, [tables[age]] = pool.find(chains[number % 3])
            for block in tables[age]:
                pool.share(block, age)
        elif tables:
            one = sorted(tables)[number % len(tables)]
            if action == "fill":
                for block, content in zip(tables[one], chains[kinds[one]], strict=False):
                    pool.register(block, content) if pool._hashes[block] is None else None
                if pool.available and len(tables[one]) < 4:
                    tables[one].append(pool.allocate(one))
            else:
                for block in reversed(tables.pop(one)):
                    pool.release(block, one)
        check_pool(pool, {one: [table] for one, table in tables.items()})
        held = {block for table in tables.values() for block in table}
        assert pool.stats["free"] + pool.stats["cached"] + len(held) == 6
        for one, table in tables.items():
            youngest = [pool.find_youngest_holder(block) for block in table]
            assert pool.owned[one, 0] == youngest.count(one)


def test_pool_check_detects_lost_block_and_wrong_holder():
    pool = BlockPool(3)
    block = pool.allocate(0)
    check_pool(pool, {0: [[block]]})
    for held in ({}, {0: [[]]}, {1: [[block]]}, {0: [[block, block + 1]]}, {0: [[], [block]]}):
        with pytest.raises(AssertionError):
            check_pool(pool, held)
    pool._free.pop()
    with pytest.raises(AssertionError, match="1 free"):
        check_pool(pool, {0: [[block]]})
