"""Records of collective calls, as read from a rank's ring buffer. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that must make the same calls in the same order: all ranks of a process group, or the sender and receiver
    of point-to-point messages.

    ranks: global ranks of the process group. pair: (sender, receiver) of point-to-point messages, as global ranks; None
    for collectives. purpose: distinguishes process groups of the same ranks, such as "reductions" (under NCCL).
    """

    ranks: tuple[int, ...]
    pair: tuple[int, int] | None = None
    purpose: str = ""

    @property
    def members(self) -> tuple[int, ...]:
        """Global ranks that take part in each call: sender and receiver of messages, or all ranks of the process
        group."""
        return self.ranks if self.pair is None else self.pair

    @property
    def name(self) -> str:
        """Text for reports: `ranks 0-3` (of `members`) or, with a purpose, `ranks 0-3 for reductions`."""
        return f"ranks {format_ranks(self.members)}{self.purpose and f' for {self.purpose}'}"

    def to_text(self) -> str:
        """Format the group as `0-3`, `0-6/2` (every second rank from 0 to 6), `1,5,6`, with a purpose `0-3:reductions`
        or, for messages from rank 2 to rank 3, `0-3:2>3`. The inverse is `from_text`."""
        rest = self.purpose if self.pair is None else f"{self.pair[0]}>{self.pair[1]}"
        return f"{format_ranks(self.ranks)}{rest and ':'}{rest}"

    @classmethod
    def from_text(cls, text: str) -> Group:
        """Parse the text of a group, such as `0-3`, `0-3:reductions` or, for messages from rank 2 to rank 3, `0-3:2>3`.
        For invalid text, return a group without ranks."""
        ranks, _, rest = text.partition(":")
        try:
            first, is_pair, second = rest.partition(">")
            pair = (int(first), int(second)) if is_pair else None
            return cls(_parse_ranks(ranks), pair, "" if is_pair else rest)
        except ValueError:
            return cls(())


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks as brief text: `0-3`, `0-6/2` (every second rank from 0 to 6), `1,5,6`."""
    if len(ranks) > 2:
        step = ranks[1] - ranks[0]
        if step > 0 and all(b - a == step for a, b in pairwise(ranks)):
            return f"{ranks[0]}-{ranks[-1]}" + (f"/{step}" if step > 1 else "")
    return ",".join(map(str, ranks))


def _parse_ranks(text: str) -> tuple[int, ...]:
    """Parse the text that `format_ranks` writes: `0-3`, `0-6/2` (every second rank from 0 to 6) or `1,5,6`. Raises
    ValueError."""
    if "-" not in text:
        return tuple(int(rank) for rank in text.split(","))
    span, _, step = text.partition("/")
    first, _, last = span.partition("-")
    return tuple(range(int(first), int(last) + 1, int(step or 1)))


@dataclass(frozen=True, slots=True)
class Call:
    """One communication call of a rank: a collective, or the sending or receiving of a message. Times are seconds of
    the machine's monotonic clock, which all its processes share.

    Attributes:
        number: Position among all calls of the rank, counted from 1.
        site: Label of the calling line of code, such as "data.gradients".
        operation: Name of the collective, such as "all_reduce".
        axis: Mesh axis, such as "data".
        group: Ranks that take part in the call.
        index: Position among the rank's calls in this group, counted from 1.
        payload_bytes: Bytes of the call's data on this rank.
        form: Dtype and shape of the call's data, such as "float32[128, 64]".
        place: File, line and function of the code that makes the call.
        posted: Time at which the rank entered the call; equal for all messages of one NCCL group call.
        waited: Time at which the process began to wait for the call's completion; None before that time.
        done: Time of completion; None while the call is not complete.
    """

    number: int
    site: str
    operation: str
    axis: str
    group: Group
    index: int
    payload_bytes: int
    form: str
    place: str
    posted: float
    waited: float | None = None
    done: float | None = None

    @property
    def description(self) -> str:
        """Operation, site (label of the calling line) and mesh axis as text: `all_reduce data.gradients over data`."""
        return f"{self.operation} {self.site} over {self.axis}"

    @property
    def name(self) -> str:
        """Text that identifies the call within its group: `call 57 (all_reduce data.gradients over data)`."""
        return f"call {self.index} ({self.description})"

    @property
    def waiting(self) -> bool:
        """True if the process has begun to wait for the call and the call is not complete."""
        return self.waited is not None and self.done is None


@dataclass(frozen=True, slots=True)
class RankCalls:
    """Latest calls of one rank, read from its ring buffer.

    Attributes:
        rank: Global rank.
        ranks: World size.
        process: Process id; 0 if no process has opened the ring buffer.
        calls: Latest recorded calls, oldest first, with consecutive numbers.
        counts: Number of calls that the rank has made so far in each group.
        torn: Number of records that were being written while they were read, and are left out.
        gave_up: True if the rank recorded that a call timed out.
    """

    rank: int
    ranks: int
    process: int
    calls: tuple[Call, ...] = ()
    counts: dict[Group, int] = field(default_factory=dict)
    torn: int = 0
    gave_up: bool = False

    @property
    def last(self) -> Call | None:
        """Latest call that the rank entered; None without one."""
        return self.calls[-1] if self.calls else None

    @property
    def waiting(self) -> Call | None:
        """Oldest incomplete call for which the rank's process has begun to wait; None without one. On a GPU, which runs
        calls in order, this is the call that is running."""
        return next((call for call in self.calls if call.waiting), None)

    @property
    def last_done(self) -> Call | None:
        """Latest completed call; None without one."""
        return next((call for call in reversed(self.calls) if call.done is not None), None)
