"""Checks of what a scheduler and its block pool count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from meshwright.serving.blocks import BlockPool
from meshwright.serving.scheduler import Scheduler


def check_pool(pool: BlockPool, held: Mapping[int, Sequence[Iterable[int]]]) -> None:
    """Assert that free, cached and held blocks make up the pool, and that the holders are those of `held`: for each
    sequence's age, the blocks it holds in each block table."""
    holders: dict[int, list[int]] = {}
    tables: dict[int, int] = {}
    for age in sorted(held):
        for table, blocks in enumerate(held[age]):
            for block in blocks:
                holders.setdefault(block, []).append(age)
                assert tables.setdefault(block, table) == table == pool._tables[block], "a block of two tables"
    assert {block: ages for block, ages in enumerate(pool._holders) if ages} == holders, "holders differ"
    owned = Counter((ages[-1], tables[block]) for block, ages in holders.items())
    assert +pool.owned == owned, "owned blocks are miscounted"
    parts = [*pool._free, *pool._cached, *holders]
    assert len(parts) == pool.size and set(parts) == set(range(pool.size)), (
        f"{pool.stats['free']} free + {pool.stats['cached']} cached + {len(holders)} held blocks of {pool.size}"
    )
    known = {(pool._tables[at], content): at for at, content in enumerate(pool._hashes) if content is not None}
    assert known == pool._block_of and not set(known.values()) & set(pool._free), "the prefix cache is damaged"


def check_scheduler(scheduler: Scheduler) -> None:
    """Assert that the pool's blocks are those of the sequences and of their tables, that no sequence holds more than
    its most, that the admission state is safe, and that at least one sequence can run."""
    held = {
        each.age: [table[released:] for table, released in zip(each.tables, each.released, strict=True)]
        for each in scheduler._admitted
    }
    check_pool(scheduler.pool, held)
    for each in scheduler._admitted:
        assert all(len(blocks) <= most for blocks, most in zip(held[each.age], each.most_blocks, strict=True))
        assert not any(any(table[:count]) for table, count in zip(each.tables, each.released, strict=True))
    scheduler._state = None
    assert scheduler._get_admission_state().safe
    assert scheduler.stats["places"] >= 1
