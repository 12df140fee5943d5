"""The assistant's turns of one conversation in its rendered text, found by rendering its beginnings where needed."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

import numpy as np

from meshwright.data.records.message_regions import PARTS, MessageRegions, is_kept, locate_messages
from meshwright.data.records.messages import Message
from meshwright.data.records.response_spans import Edges, TurnFinder, count_common, find_turn_end_token
from meshwright.data.records.template_rendering import TemplateError

_MOST_RENDERED = 4_000_000  # messages, for the turns of one conversation; about two minutes
Seen: TypeAlias = Sequence[Mapping[str, Any]]


class Render(Protocol):
    """Function that renders the beginning of a conversation (the template's variables of each message) to text.

    prompt: append the header of the assistant's next turn. Raises `TemplateError` if the template refuses it.
    """

    def __call__(self, messages: Seen, prompt: bool = ..., /) -> str:
        """Return the text."""


class ConversationTurns:
    """Finds the assistant's turns of a conversation in its rendered `text`.

    finder: finder of turns of the same template, which remembers the text around them. messages: the template's
    variables of each message. literals: as in `locate_messages`. inputs: what else the template is given, as a key.
    """

    def __init__(
        self, finder: TurnFinder, messages: Seen, text: str, render: Render, literals: Sequence[str], inputs: Hashable
    ) -> None:
        self._finder, self._messages, self._text = finder, messages, text
        self._render, self._literals, self._inputs = render, literals, inputs
        self._left = _MOST_RENDERED

    def end_turns(self, regions: MessageRegions, turns: Sequence[int]) -> MessageRegions:
        """Return the regions with the assistant's `turns` (indices) ended before letters of them that are repeated
        later.
        """
        for number in turns:
            regions = self._finder.end_turn(regions, number, lambda: self._count_letters(number))  # noqa: B023
        return regions

    def find(self, regions: MessageRegions | None, turns: Sequence[int]) -> list[tuple[int, int]]:
        """Return the character range [begin, end) of each of the assistant's `turns` (indices): from after its header
        to the special token that ends it. regions: where the messages are; None: not known. Raises `TemplateError` if
        one cannot be determined.
        """
        around = None if regions is None else regions.list_surroundings()
        return [self._find_turn(regions, number, None if around is None else around[number]) for number in turns]

    def _find_turn(
        self, regions: MessageRegions | None, number: int, around: tuple[int, int] | None
    ) -> tuple[int, int]:
        """Return the range of the turn `number`. around: as in `TurnFinder.find`; None: unknown, or mixed with another
        message.
        """
        if regions is not None and around is not None:
            context = self._inputs, *map(_describe_shape, self._messages[max(0, number - 1) : number + 1])
            found = self._finder.find(regions, number, around, context, lambda: self._look_up(number))
            if found is not None:
                return found
        return self._find_by_prefix(number)

    def _look_up(self, number: int) -> Edges:
        """Render the conversation up to the turn `number` for the text around it."""
        self._spend(4 * number)
        return look_up_edges(self._messages[: number + 1], self._render, self._literals)

    def _count_letters(self, number: int) -> int:
        """Return how many letters of the turn `number` a conversation that ends with it has; 0 if that is unknown."""
        self._spend(2 * number)
        some = self._messages[: number + 1]
        with suppress(TemplateError):
            regions = locate_messages(some, self._render(some), self._render, self._literals)
            return 0 if regions is None else len(regions.list_places(number))
        return 0

    def _find_by_prefix(self, number: int) -> tuple[int, int]:
        """Return the range of the turn `number` for a template whose text for the first messages is the beginning of
        its text for all. Raises `TemplateError` if it is not.
        """
        self._spend(3 * number)
        text, messages = self._text, self._messages
        before = self._render(messages[:number], True) if number else ""
        plain = self._render(messages[:number]) if number else ""
        after = text if number == len(messages) - 1 else self._render(messages[: number + 1])
        begin = count_common(before, text)
        if begin < len(plain) or not text.startswith(after) or len(after) < begin:
            raise TemplateError(
                f"does not mark the assistant's turns with {{% generation %}}, and message {number + 1} (assistant) "
                "cannot be found in its text, as the template looks into the messages' text; put {% generation %} and "
                "{% endgeneration %} around the assistant's turns in a .jinja file"
            )
        return begin, self._finder.find_end(after, begin, messages[number]["content"].strip())

    def _spend(self, messages: int) -> None:
        """Count rendered messages. Raises `TemplateError` if they are too many, as in a conversation without end."""
        self._left -= messages
        if self._left < 0:
            raise TemplateError(
                f"has to be rendered again for the turns of a conversation of {len(self._messages):,} messages, which "
                "takes too long: split the conversation, or put {% generation %} and {% endgeneration %} around the "
                "assistant's turns in a .jinja file"
            )


def make_turn_finder(special: re.Pattern[str], render: Render, literals: Sequence[str]) -> TurnFinder:
    """Return the finder of a template's turns, with what it writes around the turn of a simple conversation. special:
    pattern of the special tokens.
    """
    header, end, other, begins = "", None, None, frozenset[str]()
    with suppress(TemplateError):
        user, answer = Message("user", "A?").template_variables(), Message("assistant", "B.").template_variables()
        plain, asked = render([user], False), render([user], True)
        header = asked.removeprefix(plain) if asked.startswith(plain) else ""
        edges = look_up_edges([user, answer], render, literals)
        other = _find_other_end(special, edges.header or "", header, plain.partition("A?")[0])
        begins = frozenset(special.findall(edges.header or "")) - {other}
        end = None if edges.closing is None else find_turn_end_token(special, edges.closing, begins)
    return TurnFinder(special, header, end, other, begins)


def look_up_edges(messages: Seen, render: Render, literals: Sequence[str]) -> Edges:
    """Render a conversation that ends with an assistant turn for the text around this turn."""

    def render_end(some: Seen, prompt: bool) -> str | None:
        """Return what the template writes after the text of the last of `some` messages."""
        try:
            text = render(some, prompt)
            regions = locate_messages(some, text, lambda hidden: render(hidden, prompt), literals)
        except TemplateError:
            return None
        if regions is None:
            return None
        return regions.hidden[max((end for _, end in filter(None, regions.ranges)), default=0) :]

    return Edges(render_end(messages[:-1], True) if len(messages) > 1 else None, render_end(messages, False))


def locate_context(
    messages: Sequence[Message], turns: Sequence[int], regions: MessageRegions | None
) -> list[tuple[int, int]]:
    """Return the character ranges [begin, end) of the parts that `messages` mark as context in the assistant's `turns`
    (indices), in the rendered text. Raises `TemplateError` if they cannot be determined.
    """
    found = []
    for number in turns:
        content, context = messages[number].content, messages[number].context
        if not context:
            continue
        letters = np.array([at for at, letter in enumerate(content) if not is_kept(letter)], np.int64)
        places = np.empty(0, np.int64) if regions is None else regions.list_places(number, PARTS.index("content"))
        if len(places) != len(letters):
            raise TemplateError(
                f"looks into the text of message {number + 1} or changes it, so that the parts of it that are not to "
                "be trained cannot be found: mark whole messages instead"
            )
        for begin, end in context:
            inside = places[np.searchsorted(letters, begin) : np.searchsorted(letters, end)]
            if len(inside):
                first, last = np.searchsorted(letters, (begin, end - 1), side="right") - 1
                # White space at the edges of the part belongs to it, as far as the template keeps it.
                low = int(places[first] + begin - letters[first]) if first >= 0 else int(inside[0] - letters[0] + begin)
                high = int(places[last] + end - letters[last])
                low = min(low, int(inside[0]))
                high = min(high, int(places[last + 1])) if last + 1 < len(places) else high
                found.append((max(low, 0), high))
    return found


def _describe_shape(message: Mapping[str, Any]) -> tuple[str, ...]:
    """Return role and the names of the fields of a message, on which the text around it depends."""
    return (message["role"], *sorted(key for key, value in message.items() if value))


def _find_other_end(special: re.Pattern[str], after: str, header: str, before: str) -> str | None:
    """Return the special token that ends turns of others than the assistant; None if there is none, or it begins a
    turn. after: what follows a user turn in a prompt. header: what the template appends to it as a header. before: what
    comes before the first user turn.
    """
    first, own = special.match(after), special.findall(header)
    if first is None or first[0] in own[-1:] or (first[0] in own and first[0] in before):
        return None
    return first[0]
