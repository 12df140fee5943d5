"""Chat templates: conversations rendered to text as `transformers` does, with the character ranges of the responses and
of the special tokens that the template itself writes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from meshwright.data.records.message_regions import MessageRegions, list_parts, locate_messages
from meshwright.data.records.messages import Message, list_strings
from meshwright.data.records.response_spans import Edges, TurnFinder, assign_marked_spans, find_turn_end_token
from meshwright.data.records.template_process import RenderProcess
from meshwright.data.records.template_rendering import BEGIN, END, LimitReached, NotATemplate, Renderer, TemplateError
from meshwright.errors import UserError
from meshwright.names import TEMPLATES, nearest
from meshwright.untrusted import read_file

_NEEDED = {"chatml": ("<|im_start|>", "<|im_end|>")}  # special tokens that a template writes itself
# A string of at most 64 characters in a template, without escapes.
_LITERAL = re.compile(r"'([^'\\\n]{2,64})'|\"([^\"\\\n]{2,64})\"")
Tools: TypeAlias = Sequence[Mapping[str, Any]]


class RenderedConversation(NamedTuple):
    """A conversation rendered to text by a chat template.

    text: the rendered conversation. responses: character ranges [begin, end) in `text` of the assistant's turns to be
    trained on, end token included; a turn may have several. own: character ranges [begin, end) in `text` of the special
    tokens that the template itself wrote; a special token spelled out in a message is ordinary text. turns: (begin,
    end, role) of each message's text, in order; empty if the template looks into texts, so that they cannot be found.
    """

    text: str
    responses: list[tuple[int, int]]
    own: list[tuple[int, int]]
    turns: list[tuple[int, int, str]]


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template with the special tokens of its tokenizer.

    source: Jinja text. named: special tokens by the variable that stands for them in templates, such as {"bos_token":
    "<s>"}. special: all special tokens; message text is never encoded as one of them. where: name of the template in
    error messages.
    """

    source: str
    named: Mapping[str, str]
    special: frozenset[str]
    where: str

    @cached_property
    def marks_responses(self) -> bool:
        """True if the template marks the assistant's turns by {% generation %}."""
        return re.search(r"\{%-?\+?\s*generation\b", self.source) is not None

    @cached_property
    def _renderer(self) -> Renderer | RenderProcess:
        """Compiled template. It renders in this process if it comes with Meshwright, else in a sandboxed subprocess."""
        try:
            return (Renderer if self.source in _load_own_sources() else RenderProcess)(self.source, self.named)
        except NotATemplate as error:
            line = f", line {error.line}" if error.line else ""
            raise UserError(f"{self.where}{line}: not a Jinja template ({error})") from None
        except LimitReached as error:
            raise UserError(f"{self.where} {error}: no template needs that") from None

    @cached_property
    def _takes_parts(self) -> bool:
        """True if the template renders the content of a message only as a list of parts, as multimodal ones may."""
        found = []
        for content in ("A?", [{"type": "text", "text": "A?"}]):
            try:
                found.append("A?" in self._renderer.render_marked([{"role": "user", "content": content}], True))
            except (TemplateError, LimitReached):
                found.append(False)
        return found == [False, True]

    @cached_property
    def leaves_out_system(self) -> bool:
        """True if the template accepts a system message, but leaves it out of conversations that end with an answer."""
        turns = [Message(role, text) for role, text in (("system", "S1."), ("user", "A?"), ("assistant", "B."))]
        try:
            return "S1." not in self.render(turns)
        except TemplateError:
            return False

    def check(self) -> None:
        """Compile the template. Raises `UserError` if the source is not valid Jinja."""
        _ = self._renderer

    def render(self, messages: Sequence[Message], *, tools: Tools = (), prompt: bool = False) -> str:
        """Render the conversation `messages` to plain text, as `transformers.apply_chat_template(tokenize=False)` does.

        tools: JSON schemas of the functions that the assistant may call. prompt: append the header of the assistant's
        next turn. Raises `TemplateError` if the template refuses the messages.
        """
        return self._render_marked([message.template_variables() for message in messages], tools, prompt)[0]

    def render_with_spans(
        self, messages: Sequence[Message], trained_from: int = 0, *, tools: Tools = (), prompt: bool = False
    ) -> RenderedConversation:
        """Render a conversation, and find the character ranges of the assistant's turns to be trained on: those that
        are not blank, whose index in `messages` is at least `trained_from`, and that are not marked as context.

        tools, prompt: as in `render`; with a prompt there are no ranges. Raises `TemplateError` if the template refuses
        the messages, leaves out the text of one, or the ranges cannot be determined.
        """
        seen = [message.template_variables() for message in messages]
        text, marked = self._render_marked(seen, tools, prompt)
        if prompt or trained_from >= len(messages):
            return RenderedConversation(text, [], self._find_own_tokens(seen, tools, text, prompt), [])
        regions = locate_messages(seen, text, lambda some: self._render_marked(some, tools, False)[0], self._literals)
        own = (
            self._find_own_tokens(seen, tools, text, False)
            if regions is None
            else [match.span() for match in self._special_pattern.finditer(regions.hidden)]
        )
        turns = [number for number, message in enumerate(messages) if message.role == "assistant"]
        wanted = [number for number in turns if number >= trained_from and messages[number].trained is not False]
        wanted = [number for number in wanted if list_parts(seen[number])]
        if regions is not None:
            _check_all_rendered(seen, regions)
        if self.marks_responses:
            spans = self._assign_marked(marked, turns, wanted, regions)
        else:
            spans = [self._find_turn(messages, seen, number, text, tools, regions) for number in wanted]
        found = [] if regions is None else _list_turns(messages, regions, spans)
        return RenderedConversation(text, spans, own, found)

    def _render_marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools, prompt: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation; returns (text, character ranges [begin, end) that {% generation %} marks). messages:
        the template's variables for each message (`role`, `content` ...). tools, prompt: as in `render`.
        """
        if self._takes_parts:
            messages = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
        try:
            marked = self._renderer.render_marked(messages, prompt, tools)
        except LimitReached as error:
            raise UserError(f"{self.where} {error}: no template needs that for a conversation") from None
        parts = re.split(f"([{BEGIN}{END}])", marked)
        text, spans, begin = "", [], 0
        for part in parts:
            if part == BEGIN:
                begin = len(text)
            elif part == END:
                spans.append((begin, len(text)))
            else:
                text += part
        return text, [(begin, end) for begin, end in spans if begin < end]

    def _assign_marked(
        self, marked: list[tuple[int, int]], turns: list[int], wanted: list[int], regions: MessageRegions | None
    ) -> list[tuple[int, int]]:
        """Return the spans among `marked`, those of {% generation %}, that belong to the turns `wanted`. turns: indices
        of the assistant's turns. Raises `TemplateError` if it cannot be determined whose they are.
        """
        if regions is not None:
            return [span for turn, span in assign_marked_spans(marked, regions.ranges, turns) if turn in wanted]
        if len(marked) == len(turns):
            return [span for turn, span in zip(turns, marked, strict=True) if turn in wanted]
        if len(wanted) == len(turns):
            return marked
        raise TemplateError(
            f"marks {len(marked)} parts with {{% generation %}}, but the assistant has {len(turns)} turns, and which "
            "part is of which turn cannot be determined, as the template looks into the messages' text"
        )

    def _find_turn(
        self, messages: Sequence[Message], seen: Sequence[Mapping[str, Any]], number: int, text: str, tools: Tools,
        regions: MessageRegions | None,
    ) -> tuple[int, int]:  # fmt: skip
        """Return the character range [begin, end) in the rendered `text` of the assistant's turn with index `number`:
        from after its header to the special token that ends it. seen: the template's variables of `messages`. Raises
        `TemplateError` if it cannot be determined.
        """
        if regions is not None and regions.ranges[number] is not None:
            found = self._turn_finder.find(regions, number, lambda: self._look_up_edges(seen, number, tools))
            if found is not None:
                return found
        return self._find_turn_by_prefix(messages, number, text, tools)

    def _look_up_edges(self, seen: Sequence[Mapping[str, Any]], number: int, tools: Tools) -> Edges:
        """Render the conversation up to the turn `number` for the text around it. seen: the template's variables of the
        messages.
        """

        def render_end(some: Sequence[Mapping[str, Any]], prompt: bool) -> str | None:
            """Return what the template writes after the text of the last of `some` messages."""
            try:
                text = self._render_marked(some, tools, prompt)[0]
                regions = locate_messages(
                    some, text, lambda hidden: self._render_marked(hidden, tools, prompt)[0], self._literals
                )
            except TemplateError:
                return None
            return (
                None
                if regions is None
                else regions.hidden[max((e for _, e in filter(None, regions.ranges)), default=0) :]
            )

        return Edges(render_end(seen[:number], True) if number else None, render_end(seen[: number + 1], False))

    @cached_property
    def _turn_finder(self) -> TurnFinder:
        """Finder of the assistant's turns, with what the template writes around the turn of a simple conversation."""
        header, end = "", None
        with suppress(TemplateError):
            user, answer = Message("user", "A?").template_variables(), Message("assistant", "B.").template_variables()
            plain, asked = (self._render_marked([user], (), prompt)[0] for prompt in (False, True))
            header = asked.removeprefix(plain) if asked.startswith(plain) else ""
            edges = self._look_up_edges([user, answer], 1, ())
            end = None if edges.closing is None else find_turn_end_token(self._special_pattern, edges.closing)
        return TurnFinder(self._special_pattern, header, end)

    @cached_property
    def _literals(self) -> list[str]:
        """Strings in the template's source that it may look for in messages, such as "</think>"; no special tokens."""
        found = {match[1] if match[1] is not None else match[2] for match in _LITERAL.finditer(self.source)}
        return [each for each in found if each.strip() and not self._special_pattern.search(each)]

    def _find_turn_by_prefix(
        self, messages: Sequence[Message], number: int, text: str, tools: Tools
    ) -> tuple[int, int]:
        """Return the character range [begin, end) of the assistant's turn messages[number] in the rendered `text` of a
        template whose text for the first messages is the beginning of its text for all. Raises `TemplateError` if it is
        not.
        """
        before = self.render(messages[:number], tools=tools, prompt=True) if number else ""
        plain = self.render(messages[:number], tools=tools) if number else ""
        after = text if number == len(messages) - 1 else self.render(messages[: number + 1], tools=tools)
        differ = (at for at, (one, other) in enumerate(zip(before, text, strict=False)) if one != other)
        begin = next(differ, min(len(before), len(text)))
        if begin < len(plain) or not text.startswith(after) or len(after) < begin:
            raise TemplateError(
                f"does not mark the assistant's turns with {{% generation %}}, and message {number + 1} (assistant) "
                "cannot be found in its text, as the template looks into the messages' text; put {% generation %} and "
                "{% endgeneration %} around the assistant's turns in a .jinja file"
            )
        content = messages[number].content.strip()
        found = text.find(content, begin, len(after))
        ends = self._special_pattern.search(text, found + len(content) if found >= 0 else begin, len(after))
        return begin, ends.end() if ends else len(after)

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        """Regular expression that finds special tokens as tokenizers do: the leftmost match, and the longest of those
        that begin at one position.
        """
        tokens = sorted(self.special, key=lambda token: (-len(token), token))
        return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")

    @cached_property
    def _special_affixes(self) -> tuple[frozenset[str], frozenset[str], int]:
        """Tuple (proper prefixes of the special tokens, their proper suffixes, characters in the longest special
        token).
        """
        beginnings = {token[:size] for token in self.special for size in range(1, len(token))}
        ends = {token[-size:] for token in self.special for size in range(1, len(token))}
        return frozenset(beginnings), frozenset(ends), max(map(len, self.special), default=0)

    def _may_spell(self, content: str) -> bool:
        """Return True if `content`, the text of a message, contains a special token or could form one together with the
        text around it.
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

    def _find_own_tokens(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools, text: str, prompt: bool
    ) -> list[tuple[int, int]]:
        """Return the character ranges [begin, end) in the rendered `text` of the special tokens that the template
        itself wrote, not a message. messages: the template's variables for each message (`role`, `content` ...). tools,
        prompt: as in `render`.

        If a message contains anything like a special token, the template is rendered again with the characters of all
        messages replaced by private-use characters; the special tokens that remain are the template's own. Raises
        `TemplateError` if the two kinds cannot be distinguished.
        """
        texts, described = list_strings(list(messages)), list_strings(list(tools))
        if not any(map(self._may_spell, texts + described)):
            return [match.span() for match in self._special_pattern.finditer(text)]
        regions = locate_messages(messages, text, lambda some: self._render_marked(some, tools, prompt)[0])
        if regions is not None and not any(map(self._may_spell, described)):
            return [match.span() for match in self._special_pattern.finditer(regions.hidden)]
        match = next(filter(None, map(self._special_pattern.search, texts + described)), None)
        what = f"the special token {match[0]}" if match else "a part of a special token"
        raise TemplateError(
            f"inspects the text of messages, and one contains {what}, which cannot be distinguished from the "
            "template's own; remove it from the record"
        )


def _check_all_rendered(messages: Sequence[Mapping[str, Any]], regions: MessageRegions) -> None:
    """Raise `TemplateError` if the template left out text of a message; reasoning it may leave out. messages: the
    template's variables for each message.
    """
    for number, (message, rendered) in enumerate(zip(messages, regions.rendered, strict=True), 1):
        for part in ("content", "tool_calls"):
            left_out = part in list_parts(message, hidden=True) - rendered
            if left_out and message["role"] != "system":  # whose loss is a warning (see `leaves_out_system`)
                name = part.replace("_", " ")
                raise TemplateError(
                    f"leaves out the {name} of message {number} ({message['role']}): take another template, or remove "
                    "them from the record"
                )


def _list_turns(
    messages: Sequence[Message], regions: MessageRegions, spans: Sequence[tuple[int, int]]
) -> list[tuple[int, int, str]]:
    """Return (begin, end, role) of each message in the text, in its order; an assistant's turn includes its spans."""
    turns = []
    for message, held in zip(messages, regions.ranges, strict=True):
        if held is not None:
            own = [span for span in spans if span[0] < held[1] and held[0] < span[1]]
            begins, ends = zip(held, *(own if message.role == "assistant" else ()), strict=True)
            turns.append((min(begins), max(ends), message.role))
    return sorted(turns)


@cache
def _load_own_sources() -> frozenset[str]:
    """Return the Jinja sources of all chat templates that come with Meshwright."""
    return frozenset(_load_own_source(name) for name in TEMPLATES if name != "model")


def _load_own_source(name: str) -> str:
    """Load the Jinja source of the chat template `name`, such as "chatml", that comes with Meshwright."""
    return (files("meshwright.data.records") / f"{name}.jinja").read_text("utf-8")


def find_template(name: str, own: str | None, tokenizer: str) -> tuple[str, str]:
    """Find the chat template that the setting data.template = `name` selects; returns (its Jinja source, its name in
    error messages).

    own: Jinja source of the tokenizer's own template, or None. tokenizer: the tokenizer's name, for errors. Raises
    `UserError` if there is no such template.
    """
    if name == "model":
        if own is None:
            others = " or ".join(f'"{one}"' for one in TEMPLATES if one != "model")
            raise UserError(
                f'data.template = "model": the tokenizer "{tokenizer}" has no chat_template; '
                f"set data.template to {others}, or to a .jinja file"
            )
        return own, "the chat template of the tokenizer"
    if name in TEMPLATES:
        return _load_own_source(name), f'the template "{name}"'
    path = Path(name).expanduser()
    if not path.is_file():
        close = nearest(name, TEMPLATES)
        hint = (
            f'; did you mean "{close}"?' if close else f"; known: {', '.join(TEMPLATES)}, or the path of a .jinja file"
        )
        raise UserError(f'data.template: "{name}" is neither a template nor a file{hint}')
    try:
        return read_file(path, "config_bytes").decode(), str(path)
    except UnicodeDecodeError as error:
        raise UserError(f"data.template: {path} cannot be read: byte {error.start} is not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"data.template: {path} cannot be read: {error.strerror or error}") from None


def check_template_tokens(name: str, special: Collection[str], tokenizer: str) -> None:
    """Raise `UserError` if the chat template `name`, such as "chatml", writes special tokens that the tokenizer does
    not have. special: the tokenizer's special tokens. tokenizer: its name, for the error.
    """
    missing = [token for token in _NEEDED.get(name, ()) if token not in special]
    if missing:
        raise UserError(
            f'data.template = "{name}" writes {" and ".join(missing)}, which are not special tokens of the tokenizer '
            f'"{tokenizer}": any text could spell them; set data.template = "instruction", or add them to it'
        )
