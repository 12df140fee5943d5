"""Chat templates: conversations rendered to text as `transformers` does, with the character ranges of the responses and
of the special tokens that the template itself writes.
"""

from __future__ import annotations

import bisect
import itertools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from meshwright.data.records.conversation_turns import ConversationTurnFinder, locate_context, make_turn_finder
from meshwright.data.records.message_regions import (
    PARTS,
    MessageRegions,
    count_masked_characters,
    has_text,
    list_unmasked_strings,
    locate_messages,
)
from meshwright.data.records.messages import THOUGHT, Message, list_strings
from meshwright.data.records.response_spans import TurnFinder, assign_marked_spans
from meshwright.data.records.template_process import RenderProcess
from meshwright.data.records.template_rendering import BEGIN, END, LimitReached, NotATemplate, Renderer, TemplateError
from meshwright.data.records.template_sources import load_own_sources
from meshwright.errors import UserError

# A string of at most 64 characters in a template, without escapes.
_LITERAL = re.compile(r"'([^'\\\n]{2,64})'|\"([^\"\\\n]{2,64})\"")
_MAX_LITERALS = 500
Tools: TypeAlias = Sequence[Mapping[str, Any]]
Variables: TypeAlias = Mapping[str, Any]


class TemplateInputs(NamedTuple):
    """Inputs of a chat template besides the messages. tools: JSON schemas of the functions that the assistant may call.
    variables: further variables of the template, such as {"enable_thinking": False}."""

    tools: Tools = ()
    variables: Variables = {}

    def to_key(self) -> str:
        """Return a cache key, JSON text. Inputs with the same key make the template write the same text around
        turns."""
        return json.dumps([bool(self.tools), self.variables], sort_keys=True)


class RenderedConversation(NamedTuple):
    """A conversation rendered to text by a chat template. A range is [begin, end) in characters of `text`.

    text: the rendered conversation. responses: ranges of the assistant's turns to be trained on, end token included; a
    turn may have several ranges. context: ranges within `responses` that are not trained on; a token that overlaps such
    a range is not trained on either. template_tokens: ranges of the special tokens that the template itself wrote; a
    special token spelled out in a message is ordinary text. turns: (begin, end, role) of each message's text, in order;
    empty if they cannot be found, because the template inspects message text. left_out: message fields that the
    template does not render: "reasoning" (of the last turn that has some) and "name".
    """

    text: str
    responses: list[tuple[int, int]]
    template_tokens: list[tuple[int, int]]
    turns: list[tuple[int, int, str]]
    left_out: frozenset[str] = frozenset()
    context: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template with the special tokens of its tokenizer.

    source: Jinja text. named: {variable of templates: special token}, such as {"bos_token": "<s>"}. special: all
    special tokens; message text is never encoded as one of them. where: name of the template in error messages.
    """

    source: str
    named: Mapping[str, str]
    special: frozenset[str]
    where: str

    @cached_property
    def marks_responses(self) -> bool:
        """True if the template encloses the assistant's turns in {% generation %} blocks."""
        return re.search(r"\{%-?\+?\s*generation\b", self.source) is not None

    @cached_property
    def _renderer(self) -> Renderer | RenderProcess:
        """Compiled template. A template that is part of Meshwright is rendered in this process, any other in a
        sandboxed subprocess."""
        try:
            return (Renderer if self.source in load_own_sources() else RenderProcess)(self.source, self.named)
        except NotATemplate as error:
            line = f", line {error.line}" if error.line else ""
            raise UserError(f"{self.where}{line}: not a Jinja template ({error})") from None
        except LimitReached as error:
            raise UserError(f"{self.where} {error}: no template needs that") from None

    @cached_property
    def _takes_parts(self) -> bool:
        """True if the template renders message content only as a list of parts, [{"type": "text", "text": ...}], as
        some multimodal templates do.
        """
        found = []
        for content in ("A?", [{"type": "text", "text": "A?"}]):
            try:
                found.append("A?" in self._renderer.render_marked([{"role": "user", "content": content}], True))
            except (TemplateError, LimitReached):
                found.append(False)
        return found == [False, True]

    @cached_property
    def leaves_out_system(self) -> bool:
        """True if the template accepts a system message but does not render it in conversations that end with an
        answer.
        """
        turns = [Message(role, text) for role, text in (("system", "S1."), ("user", "A?"), ("assistant", "B."))]
        try:
            return "S1." not in self.render(turns)
        except TemplateError:
            return False

    def check(self) -> None:
        """Compile the template. Raises `UserError` if the source is not valid Jinja."""
        _ = self._renderer

    def render(
        self, messages: Sequence[Message], *, tools: Tools = (), variables: Variables | None = None,
        prompt: bool = False,
    ) -> str:  # fmt: skip
        """Render the conversation `messages` to plain text, as `transformers.apply_chat_template(tokenize=False)` does.

        tools: JSON schemas of the functions that the assistant may call. variables: further variables of the template
        (`chat_template_kwargs`), such as {"enable_thinking": False}. prompt: append the header of the assistant's next
        turn. Raises `TemplateError` if the template refuses the messages.
        """
        given = TemplateInputs(tools, variables or {})
        return self._render_marked([message.to_template_variables() for message in messages], given, prompt)[0]

    def render_with_spans(
        self, messages: Sequence[Message], trained_from: int = 0, *, tools: Tools = (),
        variables: Variables | None = None, prompt: bool = False,
    ) -> RenderedConversation:  # fmt: skip
        """Render a conversation, and find the character ranges of the assistant's turns to be trained on. These are
        turns that are not blank, have an index of at least `trained_from` in `messages`, and are not excluded from
        training.

        tools, variables, prompt: as in `render`; if `prompt` is True, no ranges are searched. Raises `TemplateError` if
        the template refuses the messages, leaves out the text of a message, or the ranges cannot be determined.
        """
        seen, given = [message.to_template_variables() for message in messages], TemplateInputs(tools, variables or {})
        if any(BEGIN in text or END in text for message in messages for text in message.list_texts()):
            raise TemplateError(f"cannot render U+{ord(BEGIN):X} and U+{ord(END):X}: remove them from the record")
        text, marked = self._render_marked(seen, given, prompt)
        if prompt or trained_from >= len(messages):
            return RenderedConversation(text, [], self._find_template_tokens(seen, given, text, None, prompt), [])

        def render(some: Sequence[Mapping[str, Any]], prompt: bool = False) -> str:
            """Render the messages `some` with the same tools and variables."""
            return self._render_marked(some, given, prompt)[0]

        regions = locate_messages(seen, text, render, self._literals)
        own = self._find_template_tokens(seen, given, text, regions)
        turns = [number for number, message in enumerate(messages) if message.role == "assistant"]
        wanted = [number for number in turns if number >= trained_from and messages[number].trained is not False]
        wanted = [number for number in wanted if has_text(seen[number])]
        if regions is not None:
            _check_all_rendered(seen, regions)
        else:
            _check_contents_verbatim(seen, text)
        search = ConversationTurnFinder(self._turn_finder, seen, text, render, self._literals, given.to_key())
        if regions is not None:
            regions = search.exclude_repeats(regions, turns)
        if self.marks_responses:
            spans = self._assign_marked(marked, turns, wanted, regions)
        else:
            spans = search.find(regions, wanted)
        context = locate_context(messages, wanted, regions)
        found = [] if regions is None else _list_turns(messages, regions, spans)
        left_out = frozenset() if regions is None else _list_left_out(seen, regions)
        return RenderedConversation(text, spans, own, found, left_out, context)

    def list_unrendered_functions(
        self, messages: Sequence[Message], tools: Tools, variables: Variables | None = None, prompt: bool = False
    ) -> list[tuple[str, str]]:
        """Find functions whose names the template does not render. Return ("tools", name) for each such function of
        `tools`, and ("messages", name) for each such function that `messages` call. For this test the names are
        replaced by random names, since a text may contain the name as a word. variables, prompt: as in `render`. Raises
        `TemplateError` if the template refuses the messages."""
        names: dict[str, tuple[str, str]] = {}  # random name -> where the function is, and its name

        def rename(one: Mapping[str, Any], where: str) -> dict[str, Any]:
            """Return a copy of the tool or call `one` with a random name, and note its old name and `where` ("tools" or
            "messages")."""
            name = f"f{secrets.token_hex(8)}"
            names[name] = where, one["function"]["name"]
            return {**one, "function": {**one["function"], "name": name}}

        renamed = [rename(one, "tools") for one in tools]
        turns = []
        for message in messages:
            calls = [rename(one, "messages") for one in message.fields.get("tool_calls", ())]
            turns.append(message._replace(fields={**message.fields, "tool_calls": calls}) if calls else message)
        if not names:
            return []
        text = self.render(turns, tools=renamed, variables=variables, prompt=prompt)
        return [lost for name, lost in names.items() if name not in text]

    def _render_marked(
        self, messages: Sequence[Mapping[str, Any]], given: TemplateInputs, prompt: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation; return (text, character ranges [begin, end) inside {% generation %} blocks). messages:
        dicts of template variables (`role`, `content` ...). given: tools and further variables. prompt: True: append
        the header of the assistant's next turn."""
        if self._takes_parts:
            messages = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
        try:
            marked = self._renderer.render_marked(messages, prompt, given.tools, given.variables)
        except LimitReached as error:
            raise UserError(f"{self.where} {error}: no template needs that for a conversation") from None
        texts, spans, begin, size = [], [], 0, 0
        for part in re.split(f"([{BEGIN}{END}])", marked):
            if part == BEGIN:
                begin = size
            elif part == END:
                spans.append((begin, size))
            else:
                texts.append(part)
                size += len(part)
        return "".join(texts), [(begin, end) for begin, end in spans if begin < end]

    def _assign_marked(
        self, marked: list[tuple[int, int]], turns: list[int], wanted: list[int], regions: MessageRegions | None
    ) -> list[tuple[int, int]]:
        """Return those of the character ranges `marked`, from {% generation %} blocks, that belong to the assistant's
        turns `wanted` (message indices). turns: indices of all assistant turns. regions: positions of the messages in
        the text; None: unknown. Raises `TemplateError` if a range cannot be assigned to a turn."""
        trained = set(wanted)
        if regions is not None:
            return [span for turn, span in assign_marked_spans(marked, regions.ranges, turns) if turn in trained]
        if len(marked) == len(turns):
            return [span for turn, span in zip(turns, marked, strict=True) if turn in trained]
        if len(wanted) == len(turns):
            return marked
        raise TemplateError(
            f"marks {len(marked)} parts with {{% generation %}}, but the assistant has {len(turns)} turns, and which "
            "part is of which turn cannot be determined, as the template inspects the messages' text"
        )

    @cached_property
    def _turn_finder(self) -> TurnFinder:
        """Finder of the assistant's turns in conversations rendered by this template."""
        return make_turn_finder(
            self._special_pattern,
            lambda some, prompt=False: self._render_marked(some, TemplateInputs(), prompt)[0],
            self._literals,
        )

    @cached_property
    def _literals(self) -> list[str]:
        """String literals in the template's source, such as "</think>", for which the template may search in messages.
        Special tokens are excluded."""
        found = {match[1] if match[1] is not None else match[2] for match in _LITERAL.finditer(self.source)}
        kept = (each for each in found if each.strip() and not self._may_spell_special_token(each))
        return sorted(kept)[:_MAX_LITERALS]

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        """Regular expression that finds special tokens as tokenizers do: the leftmost token first; of tokens that begin
        at the same position, the longest."""
        tokens = sorted(self.special, key=lambda token: (-len(token), token))
        return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")

    @cached_property
    def _special_affixes(self) -> tuple[frozenset[str], frozenset[str], int]:
        """Affixes of the special tokens: (their proper prefixes, their proper suffixes, length of the longest special
        token in characters).
        """
        beginnings = {token[:size] for token in self.special for size in range(1, len(token))}
        ends = {token[-size:] for token in self.special for size in range(1, len(token))}
        return frozenset(beginnings), frozenset(ends), max(map(len, self.special), default=0)

    def _may_join_special_token(self, text: str) -> bool:
        """Return True if `text`, a key or description of a tool, begins or ends with a part of a special token, so that
        it could form one with adjacent text.
        """
        return not text.replace("_", "").replace("-", "").isalnum() and self._may_spell_special_token(text)

    def _may_spell_special_token(self, content: str) -> bool:
        """Return True if `content`, the text of a message, contains a special token, or begins or ends with a part of
        one, so that it could form one with adjacent text.
        """
        if self._special_pattern.search(content):
            return True
        beginnings, ends, longest = self._special_affixes
        for text in (content, content.strip()):
            sizes = range(1, min(len(text), longest) + 1)
            if any(text[-size:] in beginnings or text[:size] in ends for size in sizes):
                return True
            if 0 < len(text) < longest and any(text in token for token in self.special):
                return True
        return False

    def _find_template_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        given: TemplateInputs,
        text: str,
        regions: MessageRegions | None,
        prompt: bool = False,
    ) -> list[tuple[int, int]]:
        """Return the character ranges [begin, end), in the rendered `text`, of the special tokens that come from the
        template itself and not from the text of a message. messages: dicts of template variables (`role`, `content`
        ...). given: tools and further variables. regions: positions of the messages; None: unknown. prompt: True if the
        text ends with the header of the assistant's next turn.

        If a message contains anything like a special token, the template is rendered again with placeholders for
        message text; the special tokens that remain are the template's. Raises `TemplateError` if the two kinds cannot
        be distinguished.
        """
        texts, unhidden = list_strings(list(messages)), list_unmasked_strings(messages, given.tools, given.variables)
        spelled = any(self._special_pattern.search(each) or self._may_join_special_token(each) for each in unhidden)
        if not spelled and not any(map(self._may_spell_special_token, texts)):
            return [match.span() for match in self._special_pattern.finditer(text)]
        if regions is None and not spelled:
            regions = locate_messages(messages, text, lambda some: self._render_marked(some, given, prompt)[0])
        if regions is not None and not spelled:
            return [match.span() for match in self._special_pattern.finditer(regions.masked)]
        match = next(filter(None, map(self._special_pattern.search, texts + unhidden)), None)
        what = f"the special token {match[0]}" if match else "a part of a special token"
        raise TemplateError(
            f"inspects the text of messages, and one contains {what}, which cannot be distinguished from the "
            "template's own; remove it from the record"
        )


def _check_all_rendered(messages: Sequence[Mapping[str, Any]], regions: MessageRegions) -> None:
    """Raise `TemplateError` if the template did not render all text of a message; only reasoning may be left out.
    messages: dicts of template variables. regions: positions of the messages in the rendered text."""
    for number, message in enumerate(messages):
        for part in ("content", "tool_calls"):
            place = PARTS.index(part)
            given, shown = int(regions.source_counts[number, place]), int(regions.text_counts[number, place])
            if part == "content" and (thought := THOUGHT.match(message["content"])):  # templates may leave it out
                given -= count_masked_characters(thought[0])
            if shown < given and message["role"] != "system":  # whose loss is a warning (see `leaves_out_system`)
                name = part.replace("_", " ")
                raise TemplateError(
                    f"leaves out {'a part of ' if shown else ''}the {name} of message {number + 1} "
                    f"({message['role']}): take another template, or remove them from the record"
                )


def _check_contents_verbatim(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Raise `TemplateError` if the content of a message, without surrounding white space and reasoning, does not occur
    verbatim in the rendered `text`. For templates that inspect message text. messages: dicts of template variables."""
    at = 0
    for number, message in enumerate(messages):
        thought = THOUGHT.match(message["content"])
        content = message["content"][thought.end() if thought else 0 :].strip()
        place = text.find(content, at)  # after the message before it, or else anywhere
        at = at if place < 0 else place + len(content)
        if place < 0 and content not in text and message["role"] != "system":
            raise TemplateError(
                f"leaves out a part of the content of message {number + 1} ({message['role']}), or changes it: take "
                "another template, or remove them from the record"
            )


def _list_left_out(messages: Sequence[Mapping[str, Any]], regions: MessageRegions) -> frozenset[str]:
    """Return the message fields ("reasoning", "name") that the template did not render, for
    `RenderedConversation.left_out`. messages: dicts of template variables. regions: positions of the messages in the
    text."""
    reasoning, other = PARTS.index("reasoning"), PARTS.index("other")
    held = [number for number in range(len(messages)) if regions.source_counts[number, reasoning]]
    lost = {"reasoning"} if held and not regions.text_counts[held[-1], reasoning] else set[str]()
    named = [number for number, message in enumerate(messages) if message.get("name")]
    return frozenset(lost | {"name" for number in named if not regions.text_counts[number, other]})


def _list_turns(
    messages: Sequence[Message], regions: MessageRegions, spans: Sequence[tuple[int, int]]
) -> list[tuple[int, int, str]]:
    """Return (begin, end, role) of each message, ordered by position in the text. regions: positions of the messages.
    spans: ranges to be trained on; the range of an assistant turn is extended by the spans that overlap it."""
    turns, ordered = [], sorted(spans)
    stops = list(itertools.accumulate((end for _, end in ordered), max))
    for message, held in zip(messages, regions.ranges, strict=True):
        if held is not None:
            near = range(bisect.bisect_right(stops, held[0]), bisect.bisect_left(ordered, (held[1],)))
            own = [ordered[at] for at in near if held[0] < ordered[at][1]]
            begins, ends = zip(held, *(own if message.role == "assistant" else ()), strict=True)
            turns.append((min(begins), max(ends), message.role))
    return sorted(turns)
