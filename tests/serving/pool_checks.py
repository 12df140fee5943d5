"""Checks of what a scheduler and its block pool count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from meshwright.serving.blocks import BlockPool
from meshwright.serving.scheduler import Scheduler


def check_pool(pool: BlockPool, tables: Mapping[int, Sequence[int]]) -> None:
    """Assert that free, cached and held blocks make up the pool, and that the holders are those of `tables`: for each
    sequence's age, the blocks it holds."""
    holders: dict[int, list[int]] = {}
    for age in sorted(tables):
        for block in tables[age]:
            holders.setdefault(block, []).append(age)
    assert {block: ages for block, ages in enumerate(pool._holders) if ages} == holders, "holders differ"
    assert +pool.owned == Counter(ages[-1] for ages in holders.values()), "owned blocks are miscounted"
    parts = [*pool._free, *pool._cached, *holders]
    assert len(parts) == pool.size and set(parts) == set(range(pool.size)), (
        f"{pool.free} free + {pool.cached} cached + {len(holders)} held blocks of {pool.size}"
    )
    known = {content: block for block, content in enumerate(pool._hashes) if content is not None}
    assert known == pool._block_of and not set(known.values()) & set(pool._free), "the prefix cache is damaged"


def check_scheduler(scheduler: Scheduler) -> None:
    """Assert that the pool's blocks are those of the sequences and that the admission state is safe."""
    check_pool(scheduler.pool, {each.age: each.table[each.first_held :] for each in scheduler._admitted})
    scheduler._state = None
    assert scheduler._admission_state().safe
