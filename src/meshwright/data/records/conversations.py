"""Records of instruction, chat and preference data: whatever a file calls their parts, they become conversations."""

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
    """A turn. `input`: of an instruction, the text that it is about."""

    role: str
    content: str
    input: str = ""

    def as_template_sees_it(self) -> dict[str, str]:
        """`content` is all of it; the instruction and its input are there one by one as well."""
        whole = f"{self.content}\n\n{self.input}" if self.input else self.content
        return {"role": self.role, "content": whole, "instruction": self.content, "input": self.input}


class Example(NamedTuple):
    """What a record says: after the messages of `prompt` comes one of `branches`.

    An instruction and a chat have one branch; of a preference the first is chosen and the second rejected. The
    assistant's turns in branches are responses; those in the prompt are not.
    """

    prompt: tuple[Message, ...]
    branches: tuple[tuple[Message, ...], ...]

    def text(self) -> str:
        """All that people wrote, for the rules that look at text."""
        messages = (*self.prompt, *(message for branch in self.branches for message in branch))
        return "\n\n".join(part for message in messages for part in (message.content, message.input) if part)

    def rewritten(self, rewrite: Callable[[str], str]) -> Example:
        """With `rewrite` of every text."""

        def of(messages: Sequence[Message]) -> tuple[Message, ...]:
            return tuple(Message(one.role, rewrite(one.content), rewrite(one.input)) for one in messages)

        return Example(of(self.prompt), tuple(map(of, self.branches)))


class Records(NamedTuple):
    """What records are and what their keys are called."""

    kind: str
    renamed: Mapping[str, str] = {}

    def key(self, part: str) -> str:
        return self.renamed.get(part, part)

    @property
    def columns(self) -> list[str]:
        """The keys that it looks at, for formats that store them apart."""
        keys = [self.key(part) for part in RECORD_KEYS[self.kind]]
        return [*keys, "conversations", "messages"] if self.kind == "chat" else keys

    def example(self, record: Any) -> Example:
        """The conversation of a record. `Malformed` says what is wrong with it."""
        if not isinstance(record, dict):
            raise Malformed(f"is {_said(record)}, not an object")
        match self.kind:
            case "instruction":
                return self._instruction(record)
            case "chat":
                return Example((), (self._messages(record, self._chat_key(record)),))
            case _:
                return self._preference(record)

    def shown(self) -> str:
        """What a right record looks like."""
        turn = '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        parts = {part: turn if part == "messages" else '"..."' for part in RECORD_KEYS[self.kind]}
        return "{" + ", ".join(f'"{self.key(part)}": {value}' for part, value in parts.items()) + "}"

    def _instruction(self, record: dict[str, Any]) -> Example:
        instruction, output = (self._text(record, part) for part in ("instruction", "output"))
        given = self._text(record, "input") if record.get(self.key("input")) is not None else ""
        prompt = Message("user", instruction, given)
        return Example((), ((prompt, Message("assistant", output)),))

    def _chat_key(self, record: dict[str, Any]) -> str:
        """The key of the turns: as it is called, else as ShareGPT calls it."""
        key = self.key("messages")
        return "conversations" if key not in record and not self.renamed and "conversations" in record else key

    def _preference(self, record: dict[str, Any]) -> Example:
        prompt_key = self.key("prompt")
        prompt: tuple[Message, ...] | None = None
        if prompt_key in record:
            prompt = (
                (Message("user", record[prompt_key]),)
                if isinstance(record[prompt_key], str)
                else self._messages(record, prompt_key)
            )
        branches = []
        for part in ("chosen", "rejected"):
            key = self.key(part)
            text = record.get(key)
            branches.append(
                (Message("assistant", text),) if isinstance(text, str) else self._messages(record, key, "or a string")
            )
        chosen, rejected = branches
        if prompt is None:  # both tell the whole conversation
            common = 0
            while common < min(len(chosen), len(rejected)) - 1 and chosen[common] == rejected[common]:
                common += 1
            if not common:
                raise Malformed(
                    f'has no key "{prompt_key}", and "{self.key("chosen")}" and "{self.key("rejected")}" do not begin '
                    "with the same message"
                )
            return Example(chosen[:common], (chosen[common:], rejected[common:]))
        whole = [branch[: len(prompt)] == prompt and len(branch) > len(prompt) for branch in branches]
        return Example(
            prompt,
            tuple(branch[len(prompt) :] if long else branch for branch, long in zip(branches, whole, strict=True)),
        )

    def _text(self, record: dict[str, Any], part: str) -> str:
        key = self.key(part)
        if key not in record:
            raise self._missing(record, key, part)
        if not isinstance(record[key], str):
            raise Malformed(f'"{key}" is {_said(record[key])}, not a string')
        return str(record[key])

    def _missing(self, record: dict[str, Any], key: str, part: str) -> Malformed:
        held = ", ".join(f'"{one}"' for one in list(record)[:8]) or "no keys"
        close = nearest(key, record)
        right = f'"{close}"' if close else '"..."'
        return Malformed(f'has no key "{key}" (it has {held}); set data.record_keys = {{{part} = {right}}}')

    def _messages(self, record: dict[str, Any], key: str, alternative: str = "") -> tuple[Message, ...]:
        if key not in record:
            raise self._missing(record, key, next(part for part in RECORD_KEYS[self.kind] if self.key(part) == key))
        turns = record[key]
        if not isinstance(turns, list):
            raise Malformed(f'"{key}" is {_said(turns)}, not a list of messages {alternative}'.rstrip())
        if not turns:
            raise Malformed(f'"{key}" is an empty list: no message')
        return tuple(_message(turn, f"{key}[{number}]") for number, turn in enumerate(turns))


class Malformed(Exception):
    """What is wrong with a record, as the end of a sentence that begins with it."""


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise Malformed(f'{where} is {_said(turn)}, not a message {{"role": "...", "content": "..."}}')
    values = []
    for names in (_ROLE_KEYS, _CONTENT_KEYS):
        key = next((name for name in names if name in turn), None)
        if key is None:
            held = ", ".join(f'"{one}"' for one in list(turn)[:8]) or "no keys"
            raise Malformed(f'{where} has no "{names[0]}" (it has {held})')
        values.append((key, turn[key]))
    (role_key, role), (content_key, content) = values
    if not isinstance(role, str):
        raise Malformed(f"{where}.{role_key} is {_said(role)}, not a string")
    known = _OTHER_ROLES.get(role, role)
    if known not in ROLES:
        close = nearest(role, (*ROLES, *_OTHER_ROLES))
        hint = f'; did you mean "{close}"?' if close else f" (known: {', '.join((*ROLES, *_OTHER_ROLES))})"
        raise Malformed(f'{where}.{role_key} is "{role}", a role that is not known{hint}')
    if isinstance(content, list) and content and all(_is_text_part(part) for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Malformed(f"{where}.{content_key} is {_said(content)}, not a string")
    return Message(known, content)


def _is_text_part(part: Any) -> bool:
    """Whether it is a part of a content as OpenAI's interface writes them, and text."""
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _said(value: Any) -> str:
    """A wrong value, shortly."""
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
