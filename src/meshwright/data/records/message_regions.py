"""Character positions of the messages in a rendered conversation, found without assumptions about the chat template.

Every character of the messages, except white space and those that JSON escapes, is replaced by a placeholder, a
private-use character that belongs to one part of one message, and the template is rendered again. If the result, with
the placeholders replaced back, equals the original text, the template copies message text without inspecting it, and
each placeholder tells which message its position belongs to."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data.records.messages import list_strings, map_strings
from meshwright.data.records.template_rendering import TemplateError

PARTS = ("content", "tool_calls", "reasoning", "other")
_PART_OF_KEY = {
    "content": "content", "instruction": "content", "input": "content", "tool_calls": "tool_calls",
    "reasoning_content": "reasoning", "thinking": "reasoning",
}  # fmt: skip
_KEPT_KEYS = ("role", "id", "tool_call_id", "type")  # of messages and tool calls: templates compare them
_KEPT = re.compile(r'[\s\x00-\x1f"\\]')
_FIRST, _LAST = 0xF0000, 0x10FFEF  # private-use planes, without the marks of {% generation %} blocks
PLACEHOLDERS = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]+")
_UNUSABLE = (0xFFFFE, 0xFFFFF)


class TooManyCharacters(Exception):
    """Error: messages have more distinct characters than there are private-use characters for placeholders."""


class MessageRegions(NamedTuple):
    """Positions of the messages in a rendered conversation, found by rendering it with placeholders (private-use
    characters) for the messages' characters.

    masked: the rendered text with placeholders. ranges: for each message the range [begin, end) from its first to its
    last placeholder in the text; None: the message has no placeholder. text_counts: int64 [messages, parts], number of
    placeholders in the text by message and part (one of `PARTS`: content, tool calls, reasoning, other). source_counts:
    the same numbers, counted in the messages themselves. positions: int64 [characters], positions of all placeholders
    in the text, ascending. owners: int64 [characters, 2], the source of each placeholder: (index of the message, index
    in `PARTS`).
    """

    masked: str
    ranges: list[tuple[int, int] | None]
    text_counts: NDArray[np.int64]
    source_counts: NDArray[np.int64]
    positions: NDArray[np.int64]
    owners: NDArray[np.int64]

    def is_repeated(self, number: int) -> bool:
        """Return True if the template repeats text of the message with index `number`: the rendered text has more of
        its characters than the message itself."""
        return bool(self.text_counts[number, :-1].sum() > self.source_counts[number, :-1].sum())

    def list_positions(self, number: int, part: int | None = None) -> NDArray[np.int64]:
        """Return the positions in the text of the characters of the message with index `number`, ascending. part: index
        in `PARTS` (content, tool calls ...), to return only characters of this part; None: characters of all parts."""
        first, last = np.searchsorted(self.positions, self.ranges[number] or (0, 0))
        messages, parts = self.owners[first:last].T
        own = (messages == number) & ((parts == part) | (part is None))
        places: NDArray[np.int64] = self.positions[first:last][own]
        return places

    def list_neighbour_bounds(self) -> list[tuple[int, int] | None]:
        """Return for each message (end of the previous message in the text, beginning of the next one); None if the
        message is not in the text, or is interleaved with another message."""
        found: list[tuple[int, int] | None] = [None] * len(self.ranges)
        placed = sorted((held, number) for number, held in enumerate(self.ranges) if held is not None)
        before = 0
        for at, (held, number) in enumerate(placed):
            after = placed[at + 1][0][0] if at + 1 < len(placed) else len(self.masked)
            if before <= held[0] and held[1] <= after:
                found[number] = before, after
            before = max(before, held[1])
        return found


def list_unmasked_strings(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> list[str]:
    """Return the strings that a template may render and that are not masked by placeholders: keys and IDs inside
    messages, and all keys and strings of tools and further variables."""
    found, waiting = list[str](), [*(value for message in messages for value in message.values())]
    found += [str(message[key]) for message in messages for key in _KEPT_KEYS if key in message]
    found += list_strings([*tools, variables])
    waiting += [*tools, variables]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            found += map(str, value)
            found += [str(value[key]) for key in _KEPT_KEYS if key in value]
        waiting += value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return found


def is_unmasked(letter: str) -> bool:
    """Return True if the character `letter` is never replaced by a placeholder: white space, control characters, and
    characters that JSON escapes."""
    return _KEPT.match(letter) is not None


def count_masked_characters(text: str) -> int:
    """Return the number of characters in `text` that are replaced by placeholders."""
    return len(_KEPT.sub("", text))


def has_text(message: Mapping[str, Any]) -> bool:
    """Return True if a message, as template variables, has text other than white space."""
    return any(
        text.strip()
        for key, value in message.items()
        if key not in _KEPT_KEYS
        for text in list_strings(value, _KEPT_KEYS)
    )


class Placeholders:
    """Table of placeholders: private-use Unicode characters, each of which replaces one character of one part of one
    message. In a conversation rendered with placeholders, every character shows from which message it comes.
    """

    def __init__(self) -> None:
        """Start with an empty table."""
        self._letters: list[str] = []
        self._owners: list[tuple[int, int]] = []  # (index of the message, index in `PARTS`) of each character

    def mask(
        self, messages: Sequence[Mapping[str, Any]], first: int = 0, kept: re.Pattern[str] | None = None
    ) -> tuple[list[Mapping[str, Any]], int]:
        """Replace the characters of messages by placeholders, beginning with message number `first`, until the
        private-use characters run out. Return (messages, end): a copy of all messages, of which `first` to `end` - 1
        are masked.

        kept: pattern, enclosed in one group, of strings that stay unmasked; None: there are none. Raises
        `TooManyCharacters` if the private-use characters do not suffice for one message.
        """
        shown = list(messages)
        for number in range(first, len(messages)):
            tables = [_PlaceholderTable(self, number, part) for part in range(len(PARTS))]
            try:
                shown[number] = {
                    key: value if key in _KEPT_KEYS else map_strings(value, _make_masker(tables, key, kept), _KEPT_KEYS)
                    for key, value in messages[number].items()
                }
            except TooManyCharacters:
                if number == first:
                    raise
                return shown, number
        return shown, len(messages)

    def unmask(self, text: str) -> str:
        """Return `text` with each placeholder replaced by the character for which it stands."""
        return text.translate({_FIRST + number: letter for number, letter in enumerate(self._letters)})

    def locate(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find the placeholders in `text`; return (positions [characters], owners [characters, 2]), int64. An owner is
        (index of the message, index in `PARTS`)."""
        codes = _to_codes(text).astype(np.int64) - _FIRST
        places = np.flatnonzero((codes >= 0) & (codes < len(self._owners)))
        return places, np.array(self._owners, np.int64).reshape(-1, 2)[codes[places]]

    def add(self, letter: str, owner: tuple[int, int]) -> int:
        """Create a placeholder for the character `letter` and return its code point. owner: (index of the message,
        index in `PARTS`) from which the character comes."""
        while _FIRST + len(self._letters) in _UNUSABLE:
            self._letters.append("")
            self._owners.append((0, len(PARTS) - 1))
        code = _FIRST + len(self._letters)
        if code > _LAST:
            raise TooManyCharacters
        self._letters.append(letter)
        self._owners.append(owner)
        return code


class _PlaceholderTable(dict[int, int]):
    """Translation table (`str.translate`) for one part of a message, which creates a placeholder when a character
    occurs for the first time."""

    def __init__(self, placeholders: Placeholders, message: int, part: int) -> None:
        """Start empty. placeholders: table to which new placeholders are added. message, part: index of the message,
        and index in `PARTS`, from which the characters come."""
        super().__init__()
        self.masked: dict[str, str] = {}  # masked copies by text
        self._placeholders, self._owner = placeholders, (message, part)

    def __missing__(self, code: int) -> int:
        """Create and return the placeholder's code point for the character with code point `code`."""
        letter = chr(code)
        self[code] = code if is_unmasked(letter) else self._placeholders.add(letter, self._owner)
        return self[code]


def _make_masker(tables: Sequence[_PlaceholderTable], key: str, kept: re.Pattern[str] | None) -> Callable[[str], str]:
    """Return a function that replaces the characters of a string by placeholders. key: key of the string in a message,
    which selects the translation table. tables: one for each of `PARTS` of a message. kept: pattern of strings that
    stay unmasked; None: there are none."""
    table = tables[PARTS.index(_PART_OF_KEY.get(key, "other"))]

    def mask(text: str) -> str:
        """Return `text` with placeholders, cached by text."""
        if text not in table.masked:
            pieces = kept.split(text) if kept else [text]
            pieces[::2] = [piece.translate(table) for piece in pieces[::2]]
            table.masked[text] = "".join(pieces)
        return table.masked[text]

    return mask


def locate_messages(
    messages: Sequence[Mapping[str, Any]],
    text: str,
    render: Callable[[Sequence[Mapping[str, Any]]], str],
    literals: Sequence[str] = (),
) -> MessageRegions | None:
    """Find the positions of the messages in their rendered `text`; None if they cannot be found, because the template
    inspects message text.

    render: renders messages, dicts of template variables, to text. literals: strings that the template may search for
    in message text, such as "</think>". If the template renders another text when all characters are replaced by
    placeholders, these strings are not replaced in a second attempt.
    """
    texts = list_strings(list(messages)) if literals else []
    found = sorted({each for each in literals if any(each in text for text in texts)}, key=len, reverse=True)
    for kept in ([], found) if found else ([],):
        pattern = re.compile(f"({'|'.join(map(re.escape, kept))})") if kept else None
        try:
            hidden, places, owners = _find_characters(messages, text, render, pattern)
        except (TooManyCharacters, TemplateError):
            continue
        begins, ends = np.full(len(messages), len(text)), np.zeros(len(messages), np.int64)
        np.minimum.at(begins, owners[:, 0], places)
        np.maximum.at(ends, owners[:, 0], places + 1)
        given = np.array([_count_by_part(message, pattern) for message in messages], np.int64).reshape(-1, len(PARTS))
        letters = np.zeros_like(given)
        np.add.at(letters, (owners[:, 0], owners[:, 1]), 1)
        ranges = [(begin, end) if end else None for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        return MessageRegions(hidden, ranges, letters, given, places, owners)
    return None


def _find_characters(
    messages: Sequence[Mapping[str, Any]],
    text: str,
    render: Callable[[Sequence[Mapping[str, Any]]], str],
    kept: re.Pattern[str] | None,
) -> tuple[str, NDArray[np.int64], NDArray[np.int64]]:
    """Render a conversation with placeholders for the messages' characters; return (text with placeholders, positions
    of the placeholders [characters], their owners [characters, 2]: message index, index in `PARTS`). The conversation
    is rendered several times if there are too few private-use characters for all messages.

    render: renders messages, dicts of template variables, to text. kept: pattern of strings that stay unmasked; None:
    there are none. Raises `TemplateError` if the template inspects message text.
    """
    whole, first = _to_codes(text).copy(), 0
    found: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    while first < len(messages) or not found:
        placeholders = Placeholders()
        shown, first = placeholders.mask(messages, first, kept)
        hidden = render(shown)
        if placeholders.unmask(hidden) != text:
            raise TemplateError("inspects message text")
        places, owners = placeholders.locate(hidden)
        whole[places] = _to_codes(hidden)[places]
        found.append((places, owners))
    places, owners = (np.concatenate(each) for each in zip(*found, strict=True))
    order = np.argsort(places, kind="stable")
    return whole.tobytes().decode("utf-32-le", "surrogatepass"), places[order], owners[order]


def _to_codes(text: str) -> NDArray[np.uint32]:
    """Return the code points of a text, uint32 [characters]."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _count_by_part(message: Mapping[str, Any], kept: re.Pattern[str] | None) -> list[int]:
    """Return for each of `PARTS` of a message (content, tool calls ...) the number of characters that can be replaced
    by placeholders. kept: pattern of strings that are never replaced; None: there are none."""
    counts = [0] * len(PARTS)
    for key in ("content", "tool_calls", "reasoning_content"):  # others have the same texts again
        for text in list_strings(message.get(key), _KEPT_KEYS):
            pieces = kept.split(text)[::2] if kept else (text,)
            counts[PARTS.index(_PART_OF_KEY[key])] += sum(map(count_masked_characters, pieces))
    return counts
