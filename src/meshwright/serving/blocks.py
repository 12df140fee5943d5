"""Pool of KV blocks: holders of each block, and a prefix cache over blocks that nobody holds."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 16


def count_blocks(tokens: int) -> int:
    """Return the number of blocks that hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)


class HashChain:
    """Hashes of a sequence's full blocks, each of its tokens and of all before it; blocks of equal hashes hold equal
    keys and values.

    Attributes:
        hashes: 16 bytes for each full block so far.
    """

    def __init__(self, tokens: Sequence[int] = (), salt: str = "") -> None:
        """`salt`: hashes of different salts differ."""
        self.hashes: list[bytes] = []
        self._salt = hashlib.blake2b(salt.encode(), digest_size=16).digest()
        self.extend(array("i", tokens))

    def extend(self, tokens: array[int]) -> None:
        """Add the hashes of the full blocks of `tokens`, the whole sequence, that are not in the chain yet."""
        for block in range(len(self.hashes), len(tokens) // BLOCK_TOKENS):
            content = tokens[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS].tobytes()
            parent = self.hashes[-1] if self.hashes else self._salt
            self.hashes.append(hashlib.blake2b(parent + content, digest_size=16).digest())


class BlockPool:
    """Pool of KV blocks. Each is free, held by one or more sequences, or cached: held by none, found again by the hash
    of its content until it is needed, the least recently released first.

    A holder is the age of a sequence, a number that grows with each admission; a block's holders join in that order.

    Attributes:
        size: Number of blocks.
        owned: For each holder, the number of blocks of which it is the youngest holder: those that become available
            when it and all older ones end.
        releases: Blocks that holders gave back so far.
    """

    def __init__(self, size: int) -> None:
        """`size`: number of blocks, all free."""
        self.size = size
        self.owned: Counter[int] = Counter()
        self.releases = 0
        self._free = list(range(size - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first
        self._holders: list[list[int]] = [[] for _ in range(size)]
        self._hashes: list[bytes | None] = [None] * size
        self._block_of: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks of the prefix cache that nobody holds."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that can be allocated: free or cached."""
        return len(self._free) + len(self._cached)

    def allocate(self, holder: int) -> int:
        """Return a block for a holder, evicting a cached one if none is free. One must be available."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            content = self._hashes[block]
            assert content is not None
            del self._block_of[content]
            self._hashes[block] = None
        self._holders[block].append(holder)
        self.owned[holder] += 1
        return block

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest prefix of a hash chain that the pool has, held or cached."""
        blocks = []
        for content in hashes:
            if (block := self._block_of.get(content)) is None:
                break
            blocks.append(block)
        return blocks

    def youngest_holder(self, block: int) -> int | None:
        """Return the youngest holder of a block, None if nobody holds it."""
        return self._holders[block][-1] if self._holders[block] else None

    def share(self, block: int, holder: int) -> None:
        """Add a holder, younger than all present ones, to a block that `find` returned."""
        holders = self._holders[block]
        if holders:
            assert holders[-1] < holder
            self.owned[holders[-1]] -= 1
        else:
            del self._cached[block]
        holders.append(holder)
        self.owned[holder] += 1

    def release(self, block: int, holder: int) -> None:
        """Remove a holder from a block. A sequence releases its last block first: the beginnings of prompts, which more
        requests share, stay cached for longer."""
        holders = self._holders[block]
        if holders[-1] == holder:
            self.owned[holder] -= 1
            if len(holders) > 1:
                self.owned[holders[-2]] += 1
            elif self._hashes[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None
        holders.remove(holder)
        if not self.owned[holder]:
            del self.owned[holder]
        self.releases += 1

    def register(self, block: int, content: bytes) -> None:
        """Make a held block, now full, known to the prefix cache, unless another block of equal content is."""
        if content not in self._block_of:
            self._block_of[content] = block
            self._hashes[block] = content
