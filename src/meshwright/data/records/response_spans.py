"""Character ranges of the assistant's turns in a rendered conversation, for templates without {% generation %} marks.

A turn begins after the header that `add_generation_prompt` writes. It ends with the token that ends the assistant's
turns, which the model has to learn. Both are found in the template's own text between two messages (see
`message_regions`), by rendering the conversation up to the turn; results are cached by the text between messages."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from meshwright.data.records.message_regions import PLACEHOLDERS, MessageRegions, is_unmasked

_MAX_DELIMITERS = 4096  # remembered


class TurnDelimiters(NamedTuple):
    """Text that a template writes around an assistant turn that ends a conversation. header: text from the end of the
    previous message up to the position at which the model begins to generate; None: unknown. closing: text after the
    turn; None: unknown."""

    header: str | None
    closing: str | None


class TurnFinder:
    """Finder of the range of assistant turns in rendered conversations, by the text that the template writes between
    messages. Each template has one finder, which caches results.

    special: pattern of the special tokens. header: text that the template writes before an assistant turn that follows
    a user turn, "" if none. end: special token that ends an assistant turn; None: there is none. other_end: special
    token that ends the turns of other roles, and assistant turns that are not the last; None: there is none, or it also
    begins a turn. begins: special tokens of an assistant turn's header. Such a token ends a turn only if it directly
    follows the turn's text.
    """

    def __init__(
        self, special: re.Pattern[str], header: str, end: str | None, other_end: str | None = None,
        begins: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        """Start with an empty cache; arguments: see the class."""
        self._special, self._header, self._end, self._other_end = special, header, end, other_end
        self._begins = begins
        self._delimiters: dict[Hashable, TurnDelimiters] = {}
        self._repeats: set[str] = set()  # text between a turn and its repetition

    def exclude_repeats(
        self, regions: MessageRegions, number: int, count_masked_characters: Callable[[], int]
    ) -> MessageRegions:
        """Exclude repeated text from the range of the assistant turn with message index `number`. If the template
        writes the turn's text again later, such as the name of a called function, the range is shortened to end before
        the repetition. Return the changed `regions`.

        count_masked_characters: renders the conversation up to this turn with placeholders for message text, and
        returns how many of the turn's placeholders occur in the text.
        """
        if not regions.is_repeated(number):
            return regions
        places = regions.list_positions(number)
        jumps = np.flatnonzero(np.diff(places) > 1) + 1
        between = [self._cut_before_special_token(regions.masked[places[at - 1] + 1 : places[at]]) for at in jumps]
        end = next((int(at) for at, text in zip(jumps, between, strict=True) if text in self._repeats), 0)
        if not end:
            end = count_masked_characters()
            if not 0 < end < len(places):
                return regions
            if text := self._cut_before_special_token(regions.masked[places[end - 1] + 1 : places[end]]):
                self._repeats.add(text)
        ranges = list(regions.ranges)
        ranges[number] = int(places[0]), int(places[end - 1]) + 1
        return regions._replace(ranges=ranges)

    def _cut_before_special_token(self, text: str) -> str:
        """Return `text` from its first special token on; "" if it has none."""
        match = self._special.search(text)
        return text[match.start() :] if match else ""

    def find(
        self, regions: MessageRegions, number: int, around: tuple[int, int], context: Hashable,
        render: Callable[[], TurnDelimiters],
    ) -> tuple[int, int] | None:  # fmt: skip
        """Return the character range [begin, end) of the assistant turn with message index `number`; None if its
        beginning cannot be determined. regions: positions of the messages; the turn must have a position. around: (end
        of the previous message in the text, beginning of the next one). context: further part of the cache key:
        whatever else determines the text around the turn, such as the roles of the messages. render: renders the
        conversation up to this turn and returns its delimiters."""
        here = regions.ranges[number]
        assert here is not None
        before, after = around
        gap, rest = regions.masked[before : here[0]], regions.masked[here[1] : after]
        delimiters = self._find_delimiters(gap, rest, (context, after == len(regions.masked)), render)
        begin = self._measure_header(gap, delimiters.header)
        return None if begin is None else (before + begin, here[1] + self._measure_closing(rest, delimiters.closing))

    def _find_delimiters(
        self, gap: str, rest: str, context: Hashable, render: Callable[[], TurnDelimiters]
    ) -> TurnDelimiters:
        """Return the delimiters of a turn (the template's text around it), from the cache or by `render`.

        gap, rest: text before and after the turn, with placeholders for message text. context: further part of the
        cache key. render: renders the conversation up to the turn and returns the delimiters.
        """
        # Turns share a cache entry if their special tokens and the text between these are equal. Text before the first
        # special token is not in the key: it may belong to a message (white space, JSON).
        cuts = [self._special.search(text) for text in (gap, rest)]
        if cuts[0] is None or cuts[1] is None:
            key: Hashable = gap, rest, context
            if key not in self._delimiters:
                self._cache_delimiters(key, render())
            return self._delimiters[key]
        sizes = [cut.start() for cut in cuts if cut is not None]
        starts = [text[:size] for text, size in zip((gap, rest), sizes, strict=True)]
        shared = (
            *(self._cut_after_last_special_token(text[size:]) for text, size in zip((gap, rest), sizes, strict=True)),
            context,
            "shared",
        )
        if (held := self._delimiters.get(shared)) is not None:
            return TurnDelimiters(*(start + (text or "") for start, text in zip(starts, held, strict=True)))
        if (known := self._delimiters.get((gap, rest, context))) is not None:
            return known
        found = render()
        if all(text is not None and text.startswith(start) for text, start in zip(found, starts, strict=True)):
            self._cache_delimiters(
                shared, TurnDelimiters(*((text or "")[size:] for text, size in zip(found, sizes, strict=True)))
            )
        else:
            self._cache_delimiters((gap, rest, context), found)
        return found

    def _cache_delimiters(self, key: Hashable, delimiters: TurnDelimiters) -> None:
        """Cache the delimiters of a turn under `key`."""
        if len(self._delimiters) >= _MAX_DELIMITERS:
            self._delimiters.clear()
        self._delimiters[key] = delimiters

    def _cut_after_last_special_token(self, text: str) -> str:
        """Return `text` up to the end of its last special token, with "?" for each run of placeholders: a cache key."""
        return PLACEHOLDERS.sub("?", text[: max((match.end() for match in self._special.finditer(text)), default=0)])

    def find_end(self, text: str, begin: int, content: str) -> int:
        """Return the position in `text` at which a turn ends: after the special token that follows its `content`, else
        the end of `text`. begin: position of the turn's first character."""
        found = text.find(content, begin)
        ends = self._special.search(text, found + len(content) if found >= 0 else begin)
        return ends.end() if ends else len(text)

    def _measure_header(self, gap: str, header: str | None) -> int | None:
        """Return the length in characters of an assistant turn's header, which the template writes before the model's
        text; None if it cannot be determined.

        gap: template text between the previous message and the turn's content; it starts with the header and may go on
        with text that the model generates. header: generation prompt that the template appends after the previous
        message; None: unknown."""
        if header is not None:
            if gap.startswith(header):
                return len(header)
            common = measure_common_prefix(gap, header)
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
        """Return the number of characters of `rest`, the template's text after an assistant turn, that still belong to
        the turn, such as its end token. closing: the template's text after this turn if the conversation ended with it;
        None: unknown.
        """
        common = rest if closing is None else rest[: measure_common_prefix(rest, closing)]
        if self._end is not None and self._end in common:
            return common.index(self._end) + len(self._end)
        if end := _find_first_run(self._special, common, self._begins):
            return end
        # Before it may come only what has no placeholder, such as white space or the turn's last quotation mark.
        place = rest.find(self._other_end) if self._other_end else -1
        if place >= 0 and self._other_end and all(map(is_unmasked, rest[:place])):
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
    """Return the end position of the first run of adjacent special tokens in `text`; 0 if it has none. begins: special
    tokens that begin a turn. A run stops before such a token, unless it is the run's first token.
    """
    match = special.search(text)
    end = 0 if match is None else match.end()
    while end and (match := special.match(text, end)) is not None and match.end() > end:
        if match[0] in begins:
            break
        end = match.end()
    return end


def measure_common_prefix(one: str, other: str) -> int:
    """Return the length of the longest common prefix of the texts `one` and `other`."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # compared in C, as the texts may be long
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def assign_marked_spans(
    marked: Sequence[tuple[int, int]], ranges: Sequence[tuple[int, int] | None], turns: Sequence[int]
) -> list[tuple[int, tuple[int, int]]]:
    """Assign each character range `marked`, from {% generation %} blocks, to an assistant turn: the turn whose text the
    range contains, else the next turn after the range. Return [(index of the message, range)]. turns: message indices
    of the assistant turns. ranges: range of each message in the text; None if it is not in the text."""
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
