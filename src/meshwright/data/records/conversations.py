"""Instruction, chat and preference records, parsed to conversations whatever a file calls their keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from meshwright.names import nearest
from meshwright.recipe.data import RECORD_KEYS

ROLES = ("system", "user", "assistant", "tool", "developer")
# What ShareGPT's `from` and some others say.
_OTHER_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
_CONTENT_KEYS = ("content", "value")
_ROLE_KEYS = ("role", "from")


class Message(NamedTuple):
    """One turn of a conversation. role: "system", "user" or "assistant". content: its text. input: the text that an
    instruction applies to (Alpaca's `input`), or "".
    """

    role: str
    content: str
    input: str = ""

    def template_variables(self) -> dict[str, str]:
        """Return the variables for the template: `content`, the whole text, and `instruction` and `input`
        separately.
        """
        whole = f"{self.content}\n\n{self.input}" if self.input else self.content
        return {"role": self.role, "content": whole, "instruction": self.content, "input": self.input}


class Example(NamedTuple):
    """A parsed training example: a prompt and one or two continuations (`branches`).

    Instructions and chats have one branch; a preference has the chosen one first, then the rejected one. Assistant
    turns in branches are responses; those in the prompt are context.
    """

    prompt: tuple[Message, ...]
    branches: tuple[tuple[Message, ...], ...]

    def text(self) -> str:
        """Join the texts of all messages, for rules and counts that look at text."""
        messages = (*self.prompt, *(message for branch in self.branches for message in branch))
        return "\n\n".join(part for message in messages for part in (message.content, message.input) if part)

    def rewrite_texts(self, rewrite: Callable[[str], str]) -> Example:
        """Return a copy with `rewrite` applied to every text."""

        def of(messages: Sequence[Message]) -> tuple[Message, ...]:
            return tuple(Message(one.role, rewrite(one.content), rewrite(one.input)) for one in messages)

        return Example(of(self.prompt), tuple(map(of, self.branches)))


class Records(NamedTuple):
    """Format of record files. kind: "instruction", "chat" or "preference". renamed: key in the files by standard key,
    such as {"prompt": "question"}; others have their standard names.
    """

    kind: str
    renamed: Mapping[str, str] = {}

    def file_key(self, part: str) -> str:
        """Return the key under which files store a part such as "prompt"."""
        return self.renamed.get(part, part)

    @property
    def columns(self) -> list[str]:
        """Keys to read from column formats such as Parquet."""
        keys = [self.file_key(part) for part in RECORD_KEYS[self.kind]]
        return [*keys, "conversations", "messages"] if self.kind == "chat" else keys

    def parse_example(self, record: Any) -> Example:
        """Parse a JSON record to prompt and responses. Raises `Malformed` with what is wrong with it."""
        if not isinstance(record, dict):
            raise Malformed(f"is {_describe_value(record)}, not an object")
        match self.kind:
            case "instruction":
                return self._parse_instruction(record)
            case "chat":
                return Example((), (self._parse_messages(record, self._find_chat_key(record)),))
            case _:
                return self._parse_preference(record)

    def show_format(self) -> str:
        """Return an example of a well-formed record as text, for errors."""
        turn = '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        parts = {part: turn if part == "messages" else '"..."' for part in RECORD_KEYS[self.kind]}
        return "{" + ", ".join(f'"{self.file_key(part)}": {value}' for part, value in parts.items()) + "}"

    def _parse_instruction(self, record: dict[str, Any]) -> Example:
        """Parse an instruction record with an optional input."""
        instruction, output = (self._get_text(record, part) for part in ("instruction", "output"))
        given = self._get_text(record, "input") if record.get(self.file_key("input")) is not None else ""
        prompt = Message("user", instruction, given)
        return Example((), ((prompt, Message("assistant", output)),))

    def _find_chat_key(self, record: dict[str, Any]) -> str:
        """Return the key of the messages: the configured one, or ShareGPT's "conversations"."""
        key = self.file_key("messages")
        return "conversations" if key not in record and not self.renamed and "conversations" in record else key

    def _parse_preference(self, record: dict[str, Any]) -> Example:
        """Parse a preference record, whose prompt may also be the common beginning of both conversations."""
        prompt_key = self.file_key("prompt")
        prompt: tuple[Message, ...] | None = None
        if prompt_key in record:
            prompt = (
                (Message("user", record[prompt_key]),)
                if isinstance(record[prompt_key], str)
                else self._parse_messages(record, prompt_key)
            )
        branches = []
        for part in ("chosen", "rejected"):
            key = self.file_key(part)
            text = record.get(key)
            branches.append(
                (Message("assistant", text),)
                if isinstance(text, str)
                else self._parse_messages(record, key, "or a string")
            )
        chosen, rejected = branches
        if prompt is None:  # both tell the whole conversation
            common = 0
            while common < min(len(chosen), len(rejected)) - 1 and chosen[common] == rejected[common]:
                common += 1
            if not common:
                raise Malformed(
                    f'has no key "{prompt_key}", and "{self.file_key("chosen")}" and "{self.file_key("rejected")}" do '
                    "not begin with the same message"
                )
            return Example(chosen[:common], (chosen[common:], rejected[common:]))
        whole = [branch[: len(prompt)] == prompt and len(branch) > len(prompt) for branch in branches]
        return Example(
            prompt,
            tuple(branch[len(prompt) :] if long else branch for branch, long in zip(branches, whole, strict=True)),
        )

    def _get_text(self, record: dict[str, Any], part: str) -> str:
        """Return the string under the key of `part`, such as "prompt". Raises `Malformed` if it is missing or not a
        string.
        """
        key = self.file_key(part)
        if key not in record:
            raise self._missing_key_error(record, key, part)
        if not isinstance(record[key], str):
            raise Malformed(f'"{key}" is {_describe_value(record[key])}, not a string')
        return str(record[key])

    def _missing_key_error(self, record: dict[str, Any], key: str, part: str) -> Malformed:
        """Build the error for a record without `key`, the key of `part` ("prompt" ...), with the nearest key that it
        has.
        """
        held = ", ".join(f'"{one}"' for one in list(record)[:8]) or "no keys"
        close = nearest(key, record)
        right = f'"{close}"' if close else '"..."'
        return Malformed(f'has no key "{key}" (it has {held}); set data.record_keys = {{{part} = {right}}}')

    def _parse_messages(self, record: dict[str, Any], key: str, alternative: str = "") -> tuple[Message, ...]:
        """Parse the list of messages under `key`. alternative: what else the key may hold, for the error."""
        if key not in record:
            raise self._missing_key_error(
                record, key, next(part for part in RECORD_KEYS[self.kind] if self.file_key(part) == key)
            )
        turns = record[key]
        if not isinstance(turns, list):
            raise Malformed(f'"{key}" is {_describe_value(turns)}, not a list of messages {alternative}'.rstrip())
        if not turns:
            raise Malformed(f'"{key}" is an empty list: no message')
        return tuple(_parse_message(turn, f"{key}[{number}]") for number, turn in enumerate(turns))


class Malformed(Exception):
    """Error whose message says what is wrong with a record, as a clause that follows "the record"."""


def _parse_message(turn: Any, where: str) -> Message:
    """Parse one message (`turn`) with role and content, under the keys of OpenAI or ShareGPT. where: its position,
    for errors.
    """
    if not isinstance(turn, dict):
        raise Malformed(f'{where} is {_describe_value(turn)}, not a message {{"role": "...", "content": "..."}}')
    values = []
    for names in (_ROLE_KEYS, _CONTENT_KEYS):
        key = next((name for name in names if name in turn), None)
        if key is None:
            held = ", ".join(f'"{one}"' for one in list(turn)[:8]) or "no keys"
            raise Malformed(f'{where} has no "{names[0]}" (it has {held})')
        values.append((key, turn[key]))
    (role_key, role), (content_key, content) = values
    if not isinstance(role, str):
        raise Malformed(f"{where}.{role_key} is {_describe_value(role)}, not a string")
    known = _OTHER_ROLES.get(role, role)
    if known not in ROLES:
        close = nearest(role, (*ROLES, *_OTHER_ROLES))
        hint = f'; did you mean "{close}"?' if close else f" (known: {', '.join((*ROLES, *_OTHER_ROLES))})"
        raise Malformed(f'{where}.{role_key} is "{role}", a role that is not known{hint}')
    if isinstance(content, list) and content and all(_is_text_part(part) for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Malformed(f"{where}.{content_key} is {_describe_value(content)}, not a string")
    return Message(known, content)


def _is_text_part(part: Any) -> bool:
    """Return whether a content part in OpenAI's format is text."""
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _describe_value(value: Any) -> str:
    """Return a few words about a JSON value of the wrong type, for an error."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return f"the string {value[:40]!r}"
        case list():
            return f"a list of {len(value)}"
        case dict():
            return "an object"
    return f"the number {value}"
