"""Pool of KV blocks: holders of each block, and a prefix cache over blocks that nobody holds."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 16


def count_blocks(tokens: int) -> int:
    """Return the number of KV blocks (16 tokens each) that `tokens` tokens need: tokens / 16, rounded up."""
    return -(-tokens // BLOCK_TOKENS)


class HashChain:
    """Hash of each full KV block of a sequence, computed from the block's tokens and the hash of the block before:
    equal hashes mean equal prefixes, thus equal keys and values.

    Attributes:
        hashes: One hash of 16 bytes for each full block so far, in order.
    """

    def __init__(self, tokens: Sequence[int] = (), salt: str = "") -> None:
        """`salt`: hashes of different salts differ."""
        self.hashes: list[bytes] = []
        self._salt = hashlib.blake2b(salt.encode(), digest_size=16).digest()
        self.extend(array("i", tokens))

    def extend(self, tokens: array[int]) -> None:
        """Append the hashes of full blocks that are new. tokens: all token IDs of the sequence, from its first on."""
        for block in range(len(self.hashes), len(tokens) // BLOCK_TOKENS):
            content = tokens[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS].tobytes()
            parent = self.hashes[-1] if self.hashes else self._salt
            self.hashes.append(hashlib.blake2b(parent + content, digest_size=16).digest())


class BlockPool:
    """Pool of KV blocks with a prefix cache. A block is free (no content), held by one or more sequences, or cached:
    held by none, its content found by hash until the block is needed; the least recently released one is evicted first.

    Methods identify a sequence (`holder`) by its age, a number that grows with each admission: the youngest has the
    largest.

    Attributes:
        size: Number of KV blocks.
        owned: {holder: number of blocks of which it is the youngest holder}; these become available when it and all
            older sequences have ended.
        releases: Number of releases since the start, one for each block and holder.
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
        """Number of KV blocks without content."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Number of KV blocks that no sequence holds but that the prefix cache still finds; they can be evicted."""
        return len(self._cached)

    @property
    def available(self) -> int:
        """Number of KV blocks that can be allocated now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def allocate(self, holder: int) -> int:
        """Allocate a KV block to a sequence and return its index. A cached block is evicted if none is free. holder:
        age of the sequence. At least one block must be available."""
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
        """Return the indices of the KV blocks with the longest known prefix of a sequence, held or cached ones. hashes:
        of the sequence's blocks, in order."""
        blocks = []
        for content in hashes:
            if (block := self._block_of.get(content)) is None:
                break
            blocks.append(block)
        return blocks

    def youngest_holder(self, block: int) -> int | None:
        """Return the age of the youngest sequence that holds the KV block with index `block`; None if no sequence holds
        it."""
        return self._holders[block][-1] if self._holders[block] else None

    def share(self, block: int, holder: int) -> None:
        """Let one more sequence hold the KV block with index `block`, which `find` returned. holder: age of the
        sequence, which is younger than (a number above) those that hold the block."""
        holders = self._holders[block]
        if holders:
            assert holders[-1] < holder
            self.owned[holders[-1]] -= 1
        else:
            del self._cached[block]
        holders.append(holder)
        self.owned[holder] += 1

    def release(self, block: int, holder: int) -> None:
        """Let a sequence no longer hold a KV block; a block that none holds then is cached if it was registered, else
        free. holder: age of the sequence.

        A sequence releases its last block first: beginnings of prompts, which more requests share, then stay cached
        longer.
        """
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
        """Make a full, held KV block findable in the prefix cache, unless another block with the same hash is. content:
        hash of the block, from `HashChain`."""
        if content not in self._block_of:
            self._block_of[content] = block
            self._hashes[block] = content
