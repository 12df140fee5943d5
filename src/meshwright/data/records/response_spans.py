"""Which characters of a rendered conversation are the assistant's turns, without marks in the template.

A turn begins where the template's prompt for it ends: after the header that `add_generation_prompt` writes. It ends
with the token that ends the assistant's turns, which the model has to learn. Both are found in the template's own text
between two messages (see `message_regions`), by rendering the conversation up to the turn; the same text between
messages need not be looked at twice.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from meshwright.data.records.message_regions import STAND_INS, MessageRegions, is_kept

_MOST_EDGES = 4096  # remembered


class Edges(NamedTuple):
    """Text that a template writes around an assistant turn in conversations that end there. header: what follows the
    message before in a prompt, up to where the model begins to write; None: not known. closing: what follows the turn
    if it is the last one; None: not known.
    """

    header: str | None
    closing: str | None


class TurnFinder:
    """Finds where assistant turns begin and end in the text between messages.

    special: pattern of the special tokens. header: what the template appends as the header of an assistant turn after a
    user turn, "" if nothing. end: special token that ends an assistant turn; None: none does. other_end: special token
    that ends other turns, and an assistant turn that is not the last one, if it is not the one that begins a turn.
    begins: special tokens of the header of an assistant turn, which do not end one, except as the first token after it.
    """

    def __init__(
        self, special: re.Pattern[str], header: str, end: str | None, other_end: str | None = None,
        begins: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self._special, self._header, self._end, self._other_end = special, header, end, other_end
        self._begins = begins
        self._edges: dict[Hashable, Edges] = {}
        self._repeats: set[str] = set()  # text between a turn and letters of it that are repeated after it

    def end_turn(self, regions: MessageRegions, number: int, count_letters: Callable[[], int]) -> MessageRegions:
        """Return the regions with that of the assistant turn `number` ended before letters of it that the template
        repeats later, such as the name of a called function in the header of its result. count_letters: renders the
        conversation up to this turn, and returns how many letters of it there are in the text.
        """
        if not regions.is_repeated(number):
            return regions
        places = regions.list_places(number)
        jumps = np.flatnonzero(np.diff(places) > 1) + 1
        between = [self._from_special(regions.hidden[places[at - 1] + 1 : places[at]]) for at in jumps]
        end = next((int(at) for at, text in zip(jumps, between, strict=True) if text in self._repeats), 0)
        if not end:
            end = count_letters()
            if not 0 < end < len(places):
                return regions
            if text := self._from_special(regions.hidden[places[end - 1] + 1 : places[end]]):
                self._repeats.add(text)
        ranges = list(regions.ranges)
        ranges[number] = int(places[0]), int(places[end - 1]) + 1
        return regions._replace(ranges=ranges)

    def _from_special(self, text: str) -> str:
        """Return `text` from its first special token on, "" if it has none."""
        match = self._special.search(text)
        return text[match.start() :] if match else ""

    def find(
        self, regions: MessageRegions, number: int, around: tuple[int, int], context: Hashable,
        look_up: Callable[[], Edges],
    ) -> tuple[int, int] | None:  # fmt: skip
        """Return the characters [begin, end) of the assistant turn with index `number`, which has text in the
        conversation; None if its beginning cannot be determined. around: end of the message before it in the text, and
        beginning of the one after it. context: what the text around it depends on, such as the roles of the messages.
        look_up: renders the conversation up to this turn.
        """
        here = regions.ranges[number]
        assert here is not None
        before, after = around
        gap, rest = regions.hidden[before : here[0]], regions.hidden[here[1] : after]
        edges = self._get_edges(gap, rest, (context, after == len(regions.hidden)), look_up)
        begin = self._measure_header(gap, edges.header)
        return None if begin is None else (before + begin, here[1] + self._measure_closing(rest, edges.closing))

    def _get_edges(self, gap: str, rest: str, context: Hashable, look_up: Callable[[], Edges]) -> Edges:
        """Return the edges of a turn with the text `gap` before it and `rest` after it. Those with the same special
        tokens, and the same text between these, are looked up once: text before the first special token, which may
        belong to a message (white space, JSON), is at the beginning of both the conversation and the edges.
        """
        cuts = [self._special.search(text) for text in (gap, rest)]
        if cuts[0] is None or cuts[1] is None:
            key: Hashable = gap, rest, context
            if key not in self._edges:
                self._remember(key, look_up())
            return self._edges[key]
        sizes = [cut.start() for cut in cuts if cut is not None]
        starts = [text[:size] for text, size in zip((gap, rest), sizes, strict=True)]
        shared = (
            *(self._cut_last(text[size:]) for text, size in zip((gap, rest), sizes, strict=True)),
            context,
            "shared",
        )
        if (held := self._edges.get(shared)) is not None:
            return Edges(*(start + (text or "") for start, text in zip(starts, held, strict=True)))
        if (known := self._edges.get((gap, rest, context))) is not None:
            return known
        found = look_up()
        if all(text is not None and text.startswith(start) for text, start in zip(found, starts, strict=True)):
            self._remember(shared, Edges(*((text or "")[size:] for text, size in zip(found, sizes, strict=True))))
        else:
            self._remember((gap, rest, context), found)
        return found

    def _remember(self, key: Hashable, edges: Edges) -> None:
        """Store the edges of a turn under `key`."""
        if len(self._edges) >= _MOST_EDGES:
            self._edges.clear()
        self._edges[key] = edges

    def _cut_last(self, text: str) -> str:
        """Return `text` up to the end of its last special token, with one stand-in for each run of letters in it."""
        return STAND_INS.sub("?", text[: max((match.end() for match in self._special.finditer(text)), default=0)])

    def find_end(self, text: str, begin: int, content: str) -> int:
        """Return the end of a turn with the text `content` in `text`, which ends with the turn, from `begin` on."""
        found = text.find(content, begin)
        ends = self._special.search(text, found + len(content) if found >= 0 else begin)
        return ends.end() if ends else len(text)

    def _measure_header(self, gap: str, header: str | None) -> int | None:
        """Return how many characters of `gap`, the template's text before a turn, come before what the model writes;
        None if that cannot be determined. header: as in `Edges`.
        """
        if header is not None:
            if gap.startswith(header):
                return len(header)
            common = count_common(gap, header)
            if common == len(gap):
                return common
            # A token or word in which the two begin to differ belongs to the turn.
            stops = [match.end() for match in self._special.finditer(gap) if match.end() <= common]
            stops += [place + 1 for place in range(common) if gap[place].isspace()]
            if stops:
                return max(stops)
        place = gap.rfind(self._header) if self._header.strip() else -1
        return place + len(self._header) if place >= 0 else None

    def _measure_closing(self, rest: str, closing: str | None) -> int:
        """Return how many characters of `rest`, the template's text after a turn, end the turn. closing: as in
        `Edges`.
        """
        common = rest if closing is None else rest[: count_common(rest, closing)]
        if self._end is not None and self._end in common:
            return common.index(self._end) + len(self._end)
        if end := _find_first_run(self._special, common, self._begins):
            return end
        # Before it may come only what has no stand-in, such as white space or the turn's last quotation mark.
        place = rest.find(self._other_end) if self._other_end else -1
        if place >= 0 and self._other_end and all(map(is_kept, rest[:place])):
            return place + len(self._other_end)
        plain = "" if closing is None else closing.rstrip()
        return len(plain) if rest.startswith(plain) else 0


def find_turn_end_token(special: re.Pattern[str], closing: str, begins: frozenset[str] = frozenset()) -> str | None:
    """Return the special token that ends an assistant turn; None if there is none. closing: the text that the template
    writes after an assistant turn at the end of a conversation. begins: special tokens that begin a turn.
    """
    end = _find_first_run(special, closing, begins)
    tokens = [match[0] for match in special.finditer(closing, 0, end)] if end else []
    return tokens[-1] if tokens else None


def _find_first_run(special: re.Pattern[str], text: str, begins: frozenset[str]) -> int:
    """Return the end of the first special tokens in `text` that follow one another directly; 0 if there are none. A
    token of `begins`, which begins a turn, ends the run before it, unless it is the first.
    """
    match = special.search(text)
    end = 0 if match is None else match.end()
    while end and (match := special.match(text, end)) is not None and match.end() > end:
        if match[0] in begins:
            break
        end = match.end()
    return end


def count_common(one: str, other: str) -> int:
    """Return the number of characters at the beginning that both texts have in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # compared in C, as the texts may be long
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def assign_marked_spans(
    marked: Sequence[tuple[int, int]], ranges: Sequence[tuple[int, int] | None], turns: Sequence[int]
) -> list[tuple[int, tuple[int, int]]]:
    """Return (index of the message, span) for each span that {% generation %} marks: the assistant turn whose text it
    has, or else that follows it. turns: indices of the assistant turns. ranges: as in `MessageRegions`.
    """
    placed = sorted((held, turn) for turn in turns if (held := ranges[turn]) is not None)
    begins = [held[0] for held, _ in placed]
    # Turns that end before a span cannot have its text; of mixed turns the latest end counts.
    ends = list(itertools.accumulate((held[1] for held, _ in placed), max))
    found = []
    for begin, end in marked:
        later = bisect.bisect_left(begins, end)
        near = range(bisect.bisect_right(ends, begin), later)
        own = next((placed[at][1] for at in near if placed[at][0][1] > begin), None)
        if own is None:
            own = placed[later][1] if later < len(placed) else turns[-1] if turns else None
        if own is not None:
            found.append((own, (begin, end)))
    return found
