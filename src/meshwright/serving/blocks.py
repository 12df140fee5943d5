"""Pool of KV blocks: holders of each block, and a prefix cache over blocks that nobody holds.

One pool serves all block tables of a model (`spec.block_tables`). A block belongs to one table from its allocation
until it is free again or evicted; the prefix cache knows it by its table and the hash of its content.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence

from meshwright.spec.block_tables import BLOCK_TOKENS, first_block_in_window


class HashChain:
    """Hashes of the full KV blocks of a sequence, each computed from the block's tokens and the hash of the block
    before. Equal hashes mean equal prefixes, thus equal keys and values.

    tokens: token IDs of the sequence so far. salt: text that is included in all hashes, so that only chains with equal
    salts have equal hashes.

    Attributes:
        hashes: One hash of 16 bytes for each full block so far, in order.
    """

    def __init__(self, tokens: Sequence[int] = (), salt: str = "") -> None:
        """Hash the full blocks of `tokens`; arguments: see the class."""
        self.hashes: list[bytes] = []
        self._salt = hashlib.blake2b(salt.encode(), digest_size=16).digest()
        self.extend(array("i", tokens))

    def extend(self, tokens: array[int]) -> None:
        """Append the hash of each KV block that has become full since the last call. tokens: all token IDs of the
        sequence, tokens of earlier calls included."""
        for block in range(len(self.hashes), len(tokens) // BLOCK_TOKENS):
            content = tokens[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS].tobytes()
            parent = self.hashes[-1] if self.hashes else self._salt
            self.hashes.append(hashlib.blake2b(parent + content, digest_size=16).digest())


class BlockPool:
    """Pool of KV blocks with a prefix cache. A block is in one of three states. Free: it has no content. Held: one or
    more sequences use it. Cached: no sequence uses it, but the prefix cache still finds its content by hash. If no
    block is free, an allocation evicts the cached block that was released the longest time ago.

    Methods identify a sequence (`holder`) by its age, an admission number: the sequence admitted last, the youngest,
    has the largest age. A sequence has one block table or several (one per sliding window), each given by its number
    (`table`).

    Attributes:
        size: Number of KV blocks.
        owned: {(age of a sequence, number of its block table): number of KV blocks in this table of which the sequence
            is the youngest holder}. Such a block becomes available when this sequence and all older sequences have
            ended.
        releases: Number of calls of `release` so far.
    """

    def __init__(self, size: int) -> None:
        """Create a pool of `size` KV blocks, all free."""
        self.size, self.releases = size, 0
        self.owned: Counter[tuple[int, int]] = Counter()
        self._free = list(range(size - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._holders: list[list[int]] = [[] for _ in range(size)]
        self._tables = [0] * size  # to which each block belongs
        self._hashes: list[bytes | None] = [None] * size
        self._block_of: dict[tuple[int, bytes], int] = {}

    @property
    def stats(self) -> dict[str, int]:
        """Number of KV blocks in each state: `free`, `cached` and `held`, see the class."""
        free, cached = len(self._free), len(self._cached)
        return {"free": free, "cached": cached, "held": self.size - free - cached}

    @property
    def available(self) -> int:
        """Number of KV blocks that can be allocated now: free blocks and cached blocks."""
        return len(self._free) + len(self._cached)

    def allocate(self, holder: int, table: int = 0) -> int:
        """Allocate a KV block for a block table of a sequence, and return the block's index. If no block is free, a
        cached block is evicted, possibly of another block table. holder: age of the sequence (its admission number,
        larger for younger sequences). table: number of the block table. At least one block must be available."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            content = self._hashes[block]
            assert content is not None
            del self._block_of[self._tables[block], content]
            self._hashes[block] = None
        self._tables[block] = table
        self._holders[block].append(holder)
        self.owned[holder, table] += 1
        return block

    def find(self, hashes: Sequence[bytes], windows: Sequence[int | None] = (None,)) -> tuple[int, list[list[int]]]:
        """Find the longest prefix of a sequence whose KV blocks are in the prefix cache. Return (number of blocks in
        the prefix, lists of block indices). There is one list for each block table; a list has only the blocks inside
        the table's sliding window before the token that follows the prefix.

        hashes: hash of each block of the sequence, in order (see `HashChain`). windows: sliding window of each block
        table in tokens, None: no window. A prefix counts as cached if the pool still has all blocks inside these
        windows, held or cached; blocks before a window are not needed."""
        count, begins = 0, [0] * len(windows)  # of the run of known blocks of each table that ends here
        for end, content in enumerate(hashes, 1):
            for table in range(len(windows)):
                if (table, content) not in self._block_of:
                    begins[table] = end
            if not any(begins):
                count = end
            elif any(begin and window is None for begin, window in zip(begins, windows, strict=True)):
                break
            else:
                firsts = [first_block_in_window(end * BLOCK_TOKENS, window) for window in windows]
                count = end if all(begin <= first for begin, first in zip(begins, firsts, strict=True)) else count
        firsts = [first_block_in_window(count * BLOCK_TOKENS, window) for window in windows]
        return count, [
            [self._block_of[table, content] for content in hashes[first:count]] for table, first in enumerate(firsts)
        ]

    def find_youngest_holder(self, block: int) -> int | None:
        """Return the age (admission number) of the youngest sequence that holds the KV block with index `block` (the
        sequence admitted last); None if no sequence holds it."""
        return self._holders[block][-1] if self._holders[block] else None

    def share(self, block: int, holder: int) -> None:
        """Add a sequence to the holders of the KV block with index `block`, which `find` returned. holder: age of the
        sequence (its admission number, larger for younger sequences), which must be younger than the present
        holders."""
        holders, table = self._holders[block], self._tables[block]
        if holders:
            assert holders[-1] < holder
            self.owned[holders[-1], table] -= 1
        else:
            del self._cached[block]
        holders.append(holder)
        self.owned[holder, table] += 1

    def release(self, block: int, holder: int) -> None:
        """Remove a sequence from the holders of the KV block with index `block`. A block without holders becomes cached
        if it was added to the prefix cache by `register`, else free. holder: age of the sequence (its admission
        number).

        Callers release the blocks of a sequence from its last to its first: the beginnings of prompts, which more
        requests share than the ends, then stay cached longer.
        """
        holders, table = self._holders[block], self._tables[block]
        if holders[-1] == holder:
            self.owned[holder, table] -= 1
            if len(holders) > 1:
                self.owned[holders[-2], table] += 1
            elif self._hashes[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None
        holders.remove(holder)
        if not self.owned[holder, table]:
            del self.owned[holder, table]
        self.releases += 1

    def register(self, block: int, content: bytes) -> None:
        """Add the KV block with index `block`, which must be full and held by a sequence, to the prefix cache, so that
        `find` finds it by `content`, its hash from `HashChain`. Does nothing if another block of the same block table
        is registered under that hash."""
        if (self._tables[block], content) not in self._block_of:
            self._block_of[self._tables[block], content] = block
            self._hashes[block] = content
