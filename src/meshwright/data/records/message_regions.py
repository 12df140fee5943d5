"""Positions of the messages in a rendered conversation, found without assumptions about the template.

Every character of the messages but white space and what JSON escapes is replaced by a private-use character that stands
for one letter of one part of one message, and the template is rendered again. If the result, translated back, is the
true text, the template copies texts without looking into them, and each private-use character says whose text it is.
"""

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
STAND_INS = re.compile(f"[{chr(_FIRST)}-{chr(_LAST)}]+")
_UNUSABLE = (0xFFFFE, 0xFFFFF)


class TooManyLetters(Exception):
    """Error: messages have more different letters than there are private-use characters."""


class MessageRegions(NamedTuple):
    """Positions of the messages in a rendered conversation.

    hidden: the rendered text with private-use characters in place of the messages' letters. ranges: for each message
    the characters [begin, end) from its first to its last letter in the text; None: it has none there. letters: for
    each message and each of `PARTS` the number of its letters in the text, int64 [messages, parts]. given: the same of
    the messages themselves. places: positions of all messages' letters in the text, ascending, int64 [letters].
    owners: what each belongs to, (index of the message, index in `PARTS`), int64 [letters, 2].
    """

    hidden: str
    ranges: list[tuple[int, int] | None]
    letters: NDArray[np.int64]
    given: NDArray[np.int64]
    places: NDArray[np.int64]
    owners: NDArray[np.int64]

    def is_repeated(self, number: int) -> bool:
        """Return True if the text has more letters of the message `number` than the message itself."""
        return bool(self.letters[number, :-1].sum() > self.given[number, :-1].sum())

    def list_places(self, number: int, part: int | None = None) -> NDArray[np.int64]:
        """Return the positions of the letters of the message `number`, ascending. part: only of this one of `PARTS`."""
        first, last = np.searchsorted(self.places, self.ranges[number] or (0, 0))
        messages, parts = self.owners[first:last].T
        own = (messages == number) & ((parts == part) | (part is None))
        places: NDArray[np.int64] = self.places[first:last][own]
        return places

    def list_surroundings(self) -> list[tuple[int, int] | None]:
        """Return for each message (end of the message before it in the text, beginning of the one after it); None if it
        is not in the text, or mixed with another one.
        """
        found: list[tuple[int, int] | None] = [None] * len(self.ranges)
        placed = sorted((held, number) for number, held in enumerate(self.ranges) if held is not None)
        before = 0
        for at, (held, number) in enumerate(placed):
            after = placed[at + 1][0][0] if at + 1 < len(placed) else len(self.hidden)
            if before <= held[0] and held[1] <= after:
                found[number] = before, after
            before = max(before, held[1])
        return found


def list_unhidden(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> list[str]:
    """Return the strings that a template may render and that have no stand-ins: keys inside messages, ids, and all that
    tools and further variables have.
    """
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


def is_kept(letter: str) -> bool:
    """Return True for a character that has no stand-in: white space, control characters, and what JSON escapes."""
    return _KEPT.match(letter) is not None


def count_letters(text: str) -> int:
    """Return the number of characters in `text` that get stand-ins."""
    return len(_KEPT.sub("", text))


def has_text(message: Mapping[str, Any]) -> bool:
    """Return True if a message, as template variables, has text other than white space."""
    return any(
        text.strip()
        for key, value in message.items()
        if key not in _KEPT_KEYS
        for text in list_strings(value, _KEPT_KEYS)
    )


class StandIns:
    """Private-use characters that stand for the letters of messages, each for one letter of one part of a message."""

    def __init__(self) -> None:
        self._letters: list[str] = []
        self._owners: list[tuple[int, int]] = []  # (index of the message, index in `PARTS`) of each character

    def hide(
        self, messages: Sequence[Mapping[str, Any]], first: int = 0, kept: re.Pattern[str] | None = None
    ) -> tuple[list[Mapping[str, Any]], int]:
        """Return (messages, end): copies with stand-ins for the letters of messages [first, end), as many as there are
        private-use characters for. kept: what stays unchanged in texts, with one group around all of it. Raises
        `TooManyLetters` if they do not suffice for one message.
        """
        shown = list(messages)
        for number in range(first, len(messages)):
            tables = [_StandInTable(self, number, part) for part in range(len(PARTS))]
            try:
                shown[number] = {
                    key: value if key in _KEPT_KEYS else map_strings(value, _translator(tables, key, kept), _KEPT_KEYS)
                    for key, value in messages[number].items()
                }
            except TooManyLetters:
                if number == first:
                    raise
                return shown, number
        return shown, len(messages)

    def show(self, text: str) -> str:
        """Return `text` with the letters in place of their stand-ins."""
        return text.translate({_FIRST + number: letter for number, letter in enumerate(self._letters)})

    def locate(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (positions of the stand-ins in a hidden `text` [letters], their owners (index of the message, index in
        `PARTS`) [letters, 2]), int64.
        """
        codes = _to_codes(text).astype(np.int64) - _FIRST
        places = np.flatnonzero((codes >= 0) & (codes < len(self._owners)))
        return places, np.array(self._owners, np.int64).reshape(-1, 2)[codes[places]]

    def add(self, letter: str, owner: tuple[int, int]) -> int:
        """Return the code of a new stand-in for `letter`. owner: (index of the message, index in `PARTS`)."""
        while _FIRST + len(self._letters) in _UNUSABLE:
            self._letters.append("")
            self._owners.append((0, len(PARTS) - 1))
        code = _FIRST + len(self._letters)
        if code > _LAST:
            raise TooManyLetters
        self._letters.append(letter)
        self._owners.append(owner)
        return code


class _StandInTable(dict[int, int]):
    """Table for `str.translate` that creates the stand-ins of one part of a message as letters occur."""

    def __init__(self, stand_ins: StandIns, message: int, part: int) -> None:
        super().__init__()
        self.hidden: dict[str, str] = {}  # texts that have been hidden
        self._stand_ins, self._owner = stand_ins, (message, part)

    def __missing__(self, code: int) -> int:
        letter = chr(code)
        self[code] = code if is_kept(letter) else self._stand_ins.add(letter, self._owner)
        return self[code]


def _translator(tables: Sequence[_StandInTable], key: str, kept: re.Pattern[str] | None) -> Callable[[str], str]:
    """Return the function that hides the strings under `key` of a message. tables: one for each of `PARTS`. kept: as in
    `StandIns.hide`.
    """
    table = tables[PARTS.index(_PART_OF_KEY.get(key, "other"))]

    def hide(text: str) -> str:
        """Return `text` with stand-ins; the same text of a part is hidden once."""
        if text not in table.hidden:
            pieces = kept.split(text) if kept else [text]
            pieces[::2] = [piece.translate(table) for piece in pieces[::2]]
            table.hidden[text] = "".join(pieces)
        return table.hidden[text]

    return hide


def locate_messages(
    messages: Sequence[Mapping[str, Any]],
    text: str,
    render: Callable[[Sequence[Mapping[str, Any]]], str],
    literals: Sequence[str] = (),
) -> MessageRegions | None:
    """Find the messages in their rendered `text`; None if the template looks into texts, so that they cannot be found.

    render: renders messages (the template's variables of each) to text. literals: strings that the template may look
    for in texts, such as "</think>"; if the text does not come out else, they stay as they are.
    """
    texts = list_strings(list(messages)) if literals else []
    found = sorted({each for each in literals if any(each in text for text in texts)}, key=len, reverse=True)
    for kept in ([], found) if found else ([],):
        pattern = re.compile(f"({'|'.join(map(re.escape, kept))})") if kept else None
        try:
            hidden, places, owners = _find_letters(messages, text, render, pattern)
        except (TooManyLetters, TemplateError):
            continue
        begins, ends = np.full(len(messages), len(text)), np.zeros(len(messages), np.int64)
        np.minimum.at(begins, owners[:, 0], places)
        np.maximum.at(ends, owners[:, 0], places + 1)
        given = np.array([_count_given(message, pattern) for message in messages], np.int64).reshape(-1, len(PARTS))
        letters = np.zeros_like(given)
        np.add.at(letters, (owners[:, 0], owners[:, 1]), 1)
        ranges = [(begin, end) if end else None for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        return MessageRegions(hidden, ranges, letters, given, places, owners)
    return None


def _find_letters(
    messages: Sequence[Mapping[str, Any]],
    text: str,
    render: Callable[[Sequence[Mapping[str, Any]]], str],
    kept: re.Pattern[str] | None,
) -> tuple[str, NDArray[np.int64], NDArray[np.int64]]:
    """Return (text with private-use characters for the messages' letters, positions of these [letters], their owners
    [letters, 2]). It is rendered once for as many messages as there are private-use characters for. render: as in
    `locate_messages`. kept: as in `StandIns.hide`. Raises `TemplateError` if the template looks into texts.
    """
    whole, first = _to_codes(text).copy(), 0
    found: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    while first < len(messages) or not found:
        stand_ins = StandIns()
        shown, first = stand_ins.hide(messages, first, kept)
        hidden = render(shown)
        if stand_ins.show(hidden) != text:
            raise TemplateError("looks into texts")
        places, owners = stand_ins.locate(hidden)
        whole[places] = _to_codes(hidden)[places]
        found.append((places, owners))
    places, owners = (np.concatenate(each) for each in zip(*found, strict=True))
    order = np.argsort(places, kind="stable")
    return whole.tobytes().decode("utf-32-le", "surrogatepass"), places[order], owners[order]


def _to_codes(text: str) -> NDArray[np.uint32]:
    """Return the code points of a text, uint32 [characters]."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def _count_given(message: Mapping[str, Any], kept: re.Pattern[str] | None) -> list[int]:
    """Return the number of letters in each of `PARTS` of a message. kept: as in `StandIns.hide`."""
    counts = [0] * len(PARTS)
    for key in ("content", "tool_calls", "reasoning_content"):  # others have the same texts again
        for text in list_strings(message.get(key), _KEPT_KEYS):
            pieces = kept.split(text)[::2] if kept else (text,)
            counts[PARTS.index(_PART_OF_KEY[key])] += sum(map(count_letters, pieces))
    return counts
