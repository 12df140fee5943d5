"""Chat templates: conversations rendered to text as `transformers` does, with the character ranges of the responses and
of the special tokens that the template itself writes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from meshwright.data.records.conversations import Message
from meshwright.data.records.template_process import RenderProcess
from meshwright.data.records.template_rendering import BEGIN, END, LimitReached, NotATemplate, Renderer, TemplateError
from meshwright.errors import UserError
from meshwright.names import TEMPLATES, nearest
from meshwright.untrusted import read_file

_NEEDED = {"chatml": ("<|im_start|>", "<|im_end|>")}  # special tokens that a template writes itself
_FIRST, _LAST = 0xF0000, 0xFFFFD  # private-use characters: stand-ins for those of messages


class RenderedConversation(NamedTuple):
    """A conversation rendered to text by a chat template.

    text: the rendered conversation. responses: character ranges [begin, end) in `text` of the assistant's turns to be
    trained on, end token included. own: character ranges [begin, end) in `text` of the special tokens that the template
    itself wrote; a special token spelled out in a message is ordinary text.
    """

    text: str
    responses: list[tuple[int, int]]
    own: list[tuple[int, int]]


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

    def check(self) -> None:
        """Compile the template. Raises `UserError` if the source is not valid Jinja."""
        _ = self._renderer

    def render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Render the conversation `messages` to plain text, as `transformers.apply_chat_template(tokenize=False)` does.

        prompt: append the header of the assistant's next turn. Raises `TemplateError` if the template refuses the
        messages.
        """
        return self._render_marked([message.template_variables() for message in messages], prompt)[0]

    def render_with_spans(
        self, messages: Sequence[Message], trained_from: int = 0, *, prompt: bool = False
    ) -> RenderedConversation:
        """Render a conversation, and find the character ranges of the assistant's turns to be trained on: those that
        are not blank and whose index in `messages` is at least `trained_from`.

        prompt: True: append the header of the assistant's next turn, and return no ranges. Raises `TemplateError` if
        the template refuses the messages, or the ranges cannot be determined.
        """
        seen = [message.template_variables() for message in messages]
        text, marked = self._render_marked(seen, prompt)
        turns = [number for number, message in enumerate(messages) if message.role == "assistant"]
        if prompt or trained_from >= len(messages):
            spans: list[tuple[int, int]] = []
        elif self.marks_responses:
            if len(marked) != len(turns):
                raise TemplateError(
                    f"marks {len(marked)} parts with {{% generation %}}, but the assistant has {len(turns)} turns"
                )
            spans = marked
        else:
            spans = [self._find_turn(messages, number, text) for number in turns]
        wanted = [
            span
            for number, span in zip(turns, spans, strict=False)
            if number >= trained_from and messages[number].content.strip()
        ]
        return RenderedConversation(text, wanted, self._find_own_tokens(seen, text, prompt))

    def _render_marked(self, messages: Sequence[Mapping[str, str]], prompt: bool) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation; returns (text, character ranges [begin, end) that {% generation %} marks). messages:
        the template's variables for each message (`role`, `content` ...). prompt: append the header of the assistant's
        next turn.
        """
        try:
            marked = self._renderer.render_marked(messages, prompt)
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
        return text, spans

    def _find_turn(self, messages: Sequence[Message], number: int, text: str) -> tuple[int, int]:
        """Return the character range [begin, end) in the rendered `text` of the assistant's turn messages[number]: from
        after its header to the special token that ends it. Raises `TemplateError` if it cannot be determined.
        """
        before = self.render(messages[:number], prompt=True) if number else ""
        plain = self.render(messages[:number]) if number else ""
        after = text if number == len(messages) - 1 else self.render(messages[: number + 1])
        differ = (at for at, (one, other) in enumerate(zip(before, text, strict=False)) if one != other)
        begin = next(differ, min(len(before), len(text)))
        if begin < len(plain) or not text.startswith(after) or len(after) < begin:
            raise TemplateError(
                "does not mark the assistant's turns with {% generation %}, and they cannot be inferred: its text for "
                f"the first {number + 1} messages is not the beginning of its text for all of them; put "
                "{% generation %} and {% endgeneration %} around the assistant's turns in a .jinja file"
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

    def _find_own_tokens(self, messages: Sequence[Mapping[str, str]], text: str, prompt: bool) -> list[tuple[int, int]]:
        """Return the character ranges [begin, end) in the rendered `text` of the special tokens that the template
        itself wrote, not a message. messages: the template's variables for each message (`role`, `content` ...).
        prompt: True if the header of the assistant's next turn was appended.

        If a message contains anything like a special token, the template is rendered again with the characters of all
        messages replaced by private-use characters; the special tokens that remain are the template's own. Raises
        `TemplateError` if the two kinds cannot be distinguished.
        """
        if not any(self._may_spell(message["content"]) for message in messages):
            return [match.span() for match in self._special_pattern.finditer(text)]
        letters = sorted({letter for one in messages for letter in one["content"] if not letter.isspace()})
        if len(letters) <= _LAST - _FIRST:
            hide = {ord(letter): _FIRST + number for number, letter in enumerate(letters)}
            show = {number: letter for letter, number in hide.items()}
            hidden_messages = [
                {key: value if key == "role" else value.translate(hide) for key, value in one.items()}
                for one in messages
            ]
            hidden, _ = self._render_marked(hidden_messages, prompt)
            if hidden.translate(show) == text:
                return [match.span() for match in self._special_pattern.finditer(hidden)]
        match = next(filter(None, (self._special_pattern.search(one["content"]) for one in messages)), None)
        what = f"the special token {match[0]}" if match else "a part of a special token"
        raise TemplateError(
            f"inspects the text of messages, and one contains {what}, which cannot be distinguished from the "
            "template's own; remove it from the record"
        )


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
