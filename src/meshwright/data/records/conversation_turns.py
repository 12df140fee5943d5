"""Character ranges of the assistant's turns of one conversation in its rendered text, found by rendering prefixes of
the conversation where needed."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeAlias

import numpy as np

from meshwright.data.records.message_regions import PARTS, MessageRegions, is_unmasked, locate_messages
from meshwright.data.records.messages import Message
from meshwright.data.records.response_spans import (
    TurnDelimiters,
    TurnFinder,
    find_turn_end_token,
    measure_common_prefix,
)
from meshwright.data.records.template_rendering import TemplateError

_MAX_RENDERED = 4_000_000  # messages, for the turns of one conversation; about two minutes
TemplateMessages: TypeAlias = Sequence[Mapping[str, Any]]


class Render(Protocol):
    """Function that renders messages to text by a chat template. Parameters: the first messages of a conversation, as
    dicts of template variables (`role`, `content` ...); True to append the header of the assistant's next turn. Raises
    `TemplateError` if the template refuses the messages."""

    def __call__(self, messages: TemplateMessages, prompt: bool = ..., /) -> str:
        """Return the text of `messages`. prompt: append the header of the assistant's next turn."""


class ConversationTurnFinder:
    """Finder of the assistant's turns in `text`, the rendered text of one conversation.

    finder: finder for all conversations of this template, with its cache. messages: dicts of template variables
    (`role`, `content` ...). render: renders messages by the template. literals: strings that the template may search
    for in messages (see `locate_messages`). inputs: cache key of the template's other inputs (tools, variables).
    """

    def __init__(
        self,
        finder: TurnFinder,
        messages: TemplateMessages,
        text: str,
        render: Render,
        literals: Sequence[str],
        inputs: Hashable,
    ) -> None:
        """Start with a full budget of rendered messages; arguments: see the class."""
        self._finder, self._messages, self._text = finder, messages, text
        self._render, self._literals, self._inputs = render, literals, inputs
        self._left = _MAX_RENDERED

    def exclude_repeats(self, regions: MessageRegions, turns: Sequence[int]) -> MessageRegions:
        """Exclude repeated text from the ranges of assistant turns. Where the template writes a turn's text again
        later, such as the name of a called function, the range is shortened to end before the repetition. Return the
        changed `regions`. regions: positions of the messages. turns: message indices of the assistant's turns.
        """
        for number in turns:
            regions = self._finder.exclude_repeats(regions, number, lambda: self._count_masked_characters(number))  # noqa: B023
        return regions

    def find(self, regions: MessageRegions | None, turns: Sequence[int]) -> list[tuple[int, int]]:
        """Return the character range [begin, end) of each of the assistant's `turns` (message indices): from the end of
        its header to the end of the special token that closes it. regions: positions of the messages in the text; None:
        unknown. Raises `TemplateError` if a range cannot be determined."""
        around = None if regions is None else regions.list_neighbour_bounds()
        return [self._find_turn(regions, number, None if around is None else around[number]) for number in turns]

    def _find_turn(
        self, regions: MessageRegions | None, number: int, around: tuple[int, int] | None
    ) -> tuple[int, int]:
        """Return the character range [begin, end) of the turn with message index `number`. regions: positions of the
        messages in the text; None: unknown. around: (end of the previous message in the text, beginning of the next
        one); None: unknown, or the turn is interleaved with another message."""
        if regions is not None and around is not None:
            context = self._inputs, *map(_describe_shape, self._messages[max(0, number - 1) : number + 1])
            found = self._finder.find(regions, number, around, context, lambda: self._render_delimiters(number))
            if found is not None:
                return found
        return self._find_by_prefix(number)

    def _render_delimiters(self, number: int) -> TurnDelimiters:
        """Render the conversation up to the turn with message index `number`, inclusive, and return the text that the
        template writes around that turn."""
        self._count_rendered(4 * number)
        return render_delimiters(self._messages[: number + 1], self._render, self._literals)

    def _count_masked_characters(self, number: int) -> int:
        """Render the conversation up to the turn with message index `number`, inclusive, with placeholders for message
        text; return the number of placeholders of that turn in the text, 0 if it cannot be determined."""
        self._count_rendered(2 * number)
        some = self._messages[: number + 1]
        with suppress(TemplateError):
            regions = locate_messages(some, self._render(some), self._render, self._literals)
            return 0 if regions is None else len(regions.list_positions(number))
        return 0

    def _find_by_prefix(self, number: int) -> tuple[int, int]:
        """Return the character range [begin, end) of the turn with message index `number`. Works for templates that
        render the first messages of a conversation to a prefix of the whole text; raises `TemplateError` for other
        templates."""
        self._count_rendered(3 * number)
        text, messages = self._text, self._messages
        before = self._render(messages[:number], True) if number else ""
        plain = self._render(messages[:number]) if number else ""
        after = text if number == len(messages) - 1 else self._render(messages[: number + 1])
        begin = measure_common_prefix(before, text)
        if begin < len(plain) or not text.startswith(after) or len(after) < begin:
            raise TemplateError(
                f"does not mark the assistant's turns with {{% generation %}}, and message {number + 1} (assistant) "
                "cannot be found in its text, as the template inspects the messages' text; put {% generation %} and "
                "{% endgeneration %} around the assistant's turns in a .jinja file"
            )
        return begin, self._finder.find_end(after, begin, messages[number]["content"].strip())

    def _count_rendered(self, messages: int) -> None:
        """Subtract `messages`, a number of rendered messages, from the budget that bounds the time for one
        conversation. Raises `TemplateError` if the budget is used up."""
        self._left -= messages
        if self._left < 0:
            raise TemplateError(
                f"has to be rendered again for the turns of a conversation of {len(self._messages):,} messages, which "
                "takes too long: split the conversation, or put {% generation %} and {% endgeneration %} around the "
                "assistant's turns in a .jinja file"
            )


def make_turn_finder(special: re.Pattern[str], render: Render, literals: Sequence[str]) -> TurnFinder:
    """Create the finder of assistant turns for a template. The header and end tokens of a turn are taken from a
    rendered conversation of one question and one answer.

    special: pattern of the special tokens. render: renders a conversation by the template. literals: strings that the
    template may search for in messages (see `locate_messages`).
    """
    header, end, other, begins = "", None, None, frozenset[str]()
    with suppress(TemplateError):
        user, answer = Message("user", "A?").to_template_variables(), Message("assistant", "B.").to_template_variables()
        plain, asked = render([user], False), render([user], True)
        header = asked.removeprefix(plain) if asked.startswith(plain) else ""
        delimiters = render_delimiters([user, answer], render, literals)
        other = _find_other_end(special, delimiters.header or "", header, plain.partition("A?")[0])
        begins = frozenset(special.findall(delimiters.header or "")) - {other}
        end = None if delimiters.closing is None else find_turn_end_token(special, delimiters.closing, begins)
    return TurnFinder(special, header, end, other, begins)


def render_delimiters(messages: TemplateMessages, render: Render, literals: Sequence[str]) -> TurnDelimiters:
    """Render a conversation that ends with an assistant turn, and return the template's text around this turn.
    messages: dicts of template variables (`role`, `content` ...). render: renders messages by the template. literals:
    strings that the template may search for in messages (see `locate_messages`)."""

    def render_end(some: TemplateMessages, prompt: bool) -> str | None:
        """Return the template's text after the last message of `some`; None if the template refuses them or inspects
        message text."""
        try:
            text = render(some, prompt)
            regions = locate_messages(some, text, lambda hidden: render(hidden, prompt), literals)
        except TemplateError:
            return None
        if regions is None:
            return None
        return regions.masked[max((end for _, end in filter(None, regions.ranges)), default=0) :]

    return TurnDelimiters(render_end(messages[:-1], True) if len(messages) > 1 else None, render_end(messages, False))


def locate_context(
    messages: Sequence[Message], turns: Sequence[int], regions: MessageRegions | None
) -> list[tuple[int, int]]:
    """Return the character ranges [begin, end), in the rendered text, of those parts of assistant turns that are not to
    be trained on (`Message.context`). turns: message indices of the turns. regions: positions of the messages in the
    text; None: unknown. Raises `TemplateError` if the ranges cannot be determined."""
    found = []
    for number in turns:
        content, context = messages[number].content, messages[number].context
        if not context:
            continue
        letters = np.array([at for at, letter in enumerate(content) if not is_unmasked(letter)], np.int64)
        places = np.empty(0, np.int64) if regions is None else regions.list_positions(number, PARTS.index("content"))
        if len(places) != len(letters):
            raise TemplateError(
                f"looks into the text of message {number + 1} or changes it, so that the parts of it that are not to "
                "be trained cannot be found: mark whole messages instead"
            )
        for begin, end in context:
            inside = places[np.searchsorted(letters, begin) : np.searchsorted(letters, end)]
            if len(inside):
                first, last = np.searchsorted(letters, (begin, end - 1), side="right") - 1
                # White space at the delimiters of the part belongs to it, as far as the template keeps it.
                low = int(places[first] + begin - letters[first]) if first >= 0 else int(inside[0] - letters[0] + begin)
                high = int(places[last] + end - letters[last])
                low = min(low, int(inside[0]))
                high = min(high, int(places[last + 1])) if last + 1 < len(places) else high
                found.append((max(low, 0), high))
    return found


def _describe_shape(message: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a cache key of a message, (role, sorted names of its fields), on which the template's text around the
    message depends.
    """
    return (message["role"], *sorted(key for key, value in message.items() if value))


def _find_other_end(special: re.Pattern[str], after: str, header: str, before: str) -> str | None:
    """Return the special token that ends turns of roles other than the assistant's. Return None if there is no such
    token, or if it also begins a turn.

    after: text that the template writes after a user turn, before the model generates. header: header of the
    assistant's turn, the last part of `after`. before: text before the first user turn.
    """
    first, own = special.match(after), special.findall(header)
    if first is None or first[0] in own[-1:] or (first[0] in own and first[0] in before):
        return None
    return first[0]
