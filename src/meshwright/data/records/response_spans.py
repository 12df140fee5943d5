"""Which characters of a rendered conversation are the assistant's turns, without marks in the template.

A turn begins where the template's prompt for it ends: after the header that `add_generation_prompt` writes. It ends
with the token that ends the assistant's turns, which the model has to learn. Both are found in the template's own text
between two messages (see `message_regions`), by rendering the conversation up to the turn; the same text between
messages need not be looked at twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshwright.data.records.message_regions import MessageRegions, is_kept

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
    """

    def __init__(self, special: re.Pattern[str], header: str, end: str | None, other_end: str | None = None) -> None:
        self._special, self._header, self._end, self._other_end = special, header, end, other_end
        self._offsets: dict[tuple[str, str, str], tuple[int, int]] = {}

    def find(self, regions: MessageRegions, number: int, look_up: Callable[[], Edges]) -> tuple[int, int] | None:
        """Return the characters [begin, end) of the assistant turn with index `number`, which has text in the
        conversation; None if its beginning cannot be determined. look_up: renders the conversation up to this turn.
        """
        here = regions.ranges[number]
        assert here is not None
        others = [each for place, each in enumerate(regions.ranges) if each is not None and place != number]
        if any(begin < here[1] and here[0] < end for begin, end in others):
            return None  # the template repeats or reorders texts
        before = max((end for _, end in others if end <= here[0]), default=0)
        after = min((begin for begin, _ in others if begin >= here[1]), default=len(regions.hidden))
        gap, rest = regions.hidden[before : here[0]], regions.hidden[here[1] : after]
        key = gap, rest, "last" if after == len(regions.hidden) else ""
        if key not in self._offsets:
            edges = look_up()
            begin = self._measure_header(gap, edges.header)
            if begin is None:
                return None
            if len(self._offsets) >= _MOST_EDGES:
                self._offsets.clear()
            self._offsets[key] = begin, self._measure_closing(rest, edges.closing)
        begin, end = self._offsets[key]
        return before + begin, here[1] + end

    def _measure_header(self, gap: str, header: str | None) -> int | None:
        """Return how many characters of `gap`, the template's text before a turn, come before what the model writes;
        None if that cannot be determined. header: as in `Edges`.
        """
        if header is not None:
            if gap.startswith(header):
                return len(header)
            common = _count_common(gap, header)
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
        common = rest if closing is None else rest[: _count_common(rest, closing)]
        if self._end is not None and self._end in common:
            return common.index(self._end) + len(self._end)
        if end := _find_first_run(self._special, common):
            return end
        # Before it may come only what has no stand-in, such as white space or the turn's last quotation mark.
        place = rest.find(self._other_end) if self._other_end else -1
        if place >= 0 and self._other_end and all(map(is_kept, rest[:place])):
            return place + len(self._other_end)
        plain = "" if closing is None else closing.rstrip()
        return len(plain) if rest.startswith(plain) else 0


def find_turn_end_token(special: re.Pattern[str], closing: str) -> str | None:
    """Return the special token that ends an assistant turn; None if there is none. closing: the text that the template
    writes after an assistant turn at the end of a conversation.
    """
    end = _find_first_run(special, closing)
    tokens = [match[0] for match in special.finditer(closing, 0, end)] if end else []
    return tokens[-1] if tokens else None


def _find_first_run(special: re.Pattern[str], text: str) -> int:
    """Return the end of the first special tokens in `text` that follow one another directly; 0 if there are none."""
    match = special.search(text)
    end = 0 if match is None else match.end()
    while end and (match := special.match(text, end)) is not None and match.end() > end:
        end = match.end()
    return end


def _count_common(one: str, other: str) -> int:
    """Return the number of characters at the beginning that both texts have in common."""
    differ = (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def assign_marked_spans(
    marked: Sequence[tuple[int, int]], ranges: Sequence[tuple[int, int] | None], turns: Sequence[int]
) -> list[tuple[int, tuple[int, int]]]:
    """Return (index of the message, span) for each span that {% generation %} marks: the assistant turn whose text it
    has, or else that follows it. turns: indices of the assistant turns. ranges: as in `MessageRegions`.
    """
    found = []
    for begin, end in marked:
        own = [turn for turn in turns if (held := ranges[turn]) is not None and held[0] < end and begin < held[1]]
        later = [turn for turn in turns if (held := ranges[turn]) is not None and held[0] >= end]
        if own or later or turns:
            found.append(((own or later or turns[-1:])[0], (begin, end)))
    return found
