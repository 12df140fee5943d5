"""Instruction, chat and preference records, parsed to conversations; the recipe maps the keys that files use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from meshwright.names import ROLES, nearest
from meshwright.recipe.data import RECORD_KEYS

# Role names of ShareGPT's `from` and of other formats.
_OTHER_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
_CONTENT_KEYS = ("content", "value")
_ROLE_KEYS = ("role", "from")


class Message(NamedTuple):
    """One turn of a conversation. role: "system", "user", "assistant", "tool" or "developer". content: the message's
    text. input: the text that an instruction applies to (Alpaca's `input`), or "". fields: what else the message has
    under the names of OpenAI's schema and of chat templates (`tool_calls`, `tool_call_id`, `name`, `reasoning_content`
    ...), as JSON values. trained: whether an assistant turn is trained on; None: by its place in the example.
    """

    role: str
    content: str
    input: str = ""
    fields: Mapping[str, Any] = {}
    trained: bool | None = None

    def template_variables(self) -> dict[str, Any]:
        """Return the message as variables of a chat template: `role`, `content` (content and input joined),
        `instruction` (content alone), `input`, and the message's other fields.
        """
        whole = f"{self.content}\n\n{self.input}" if self.input else self.content
        return {**self.fields, "role": self.role, "content": whole, "instruction": self.content, "input": self.input}


class Example(NamedTuple):
    """A parsed training example: a prompt and its continuations (`branches`).

    Instructions and chats have one branch; a preference has two, the chosen and the rejected one. Assistant turns in
    branches are responses to be trained on; those in the prompt are context. tools: JSON schemas of the functions that
    the assistant may call, as chat templates expect them. label: of an unpaired preference, whether the response is
    desirable; else None.
    """

    prompt: tuple[Message, ...]
    branches: tuple[tuple[Message, ...], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    label: bool | None = None

    def join_texts(self) -> str:
        """Join the texts of all messages by blank lines, for cleaning rules and counts."""
        messages = (*self.prompt, *(message for branch in self.branches for message in branch))
        return "\n\n".join(part for message in messages for part in (message.content, message.input) if part)

    def rewrite_texts(self, rewrite: Callable[[str], str]) -> Example:
        """Return a copy in which `rewrite(text)` replaces the text of every message, content and input each."""

        def rewrite_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
            return tuple(one._replace(content=rewrite(one.content), input=rewrite(one.input)) for one in messages)

        return self._replace(prompt=rewrite_messages(self.prompt), branches=tuple(map(rewrite_messages, self.branches)))


class RecordFormat(NamedTuple):
    """Format of a file of records (JSON objects or Parquet rows). kind: "instruction", "chat" or "preference". renamed:
    {standard key: key in the files}, such as {"prompt": "question"}; other keys have their standard names.
    """

    kind: str
    renamed: Mapping[str, str] = {}

    def get_file_key(self, part: str) -> str:
        """Return the key that the files use for the standard key `part`, such as "question" for "prompt"; `part` itself
        if it is not renamed.
        """
        return self.renamed.get(part, part)

    @property
    def columns(self) -> list[str]:
        """Names of the columns to read from files with columns, such as Parquet: the keys that this format has."""
        keys = [self.get_file_key(part) for part in RECORD_KEYS[self.kind]]
        return [*keys, "conversations", "messages"] if self.kind == "chat" else keys

    def parse_example(self, record: Any) -> Example:
        """Parse `record`, a parsed JSON value, to prompt and responses. Raises `MalformedRecord` if it is no object,
        lacks a key of this format, or has a value of a wrong type.
        """
        if not isinstance(record, dict):
            raise MalformedRecord(f"is {_describe_value(record)}, not an object")
        match self.kind:
            case "instruction":
                return self._parse_instruction(record)
            case "chat":
                return Example((), (self._parse_messages(record, self._find_chat_key(record)),))
            case _:
                return self._parse_preference(record)

    def format_example_record(self) -> str:
        """Return the JSON text of a well-formed record of this format, for error messages."""
        turn = '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        parts = {part: turn if part == "messages" else '"..."' for part in RECORD_KEYS[self.kind]}
        return "{" + ", ".join(f'"{self.get_file_key(part)}": {value}' for part, value in parts.items()) + "}"

    def _parse_instruction(self, record: dict[str, Any]) -> Example:
        """Parse an instruction record (`instruction`, `output` and an optional `input`). Raises `MalformedRecord` if a
        key is missing or not a string.
        """
        instruction, output = (self._get_text(record, part) for part in ("instruction", "output"))
        given = self._get_text(record, "input") if record.get(self.get_file_key("input")) is not None else ""
        prompt = Message("user", instruction, given)
        return Example((), ((prompt, Message("assistant", output)),))

    def _find_chat_key(self, record: dict[str, Any]) -> str:
        """Return the key of the list of messages: the key configured for "messages" or, if nothing is configured and
        the record has only that, ShareGPT's "conversations".
        """
        key = self.get_file_key("messages")
        return "conversations" if key not in record and not self.renamed and "conversations" in record else key

    def _parse_preference(self, record: dict[str, Any]) -> Example:
        """Parse a preference record (`prompt`, `chosen`, `rejected`). If the key `prompt` is missing, the prompt is the
        common beginning of the chosen and the rejected conversation. Raises `MalformedRecord` if a key is missing, has
        a value of a wrong type, or no common beginning exists.
        """
        prompt_key = self.get_file_key("prompt")
        prompt: tuple[Message, ...] | None = None
        if prompt_key in record:
            prompt = (
                (Message("user", record[prompt_key]),)
                if isinstance(record[prompt_key], str)
                else self._parse_messages(record, prompt_key)
            )
        branches = []
        for part in ("chosen", "rejected"):
            key = self.get_file_key(part)
            text = record.get(key)
            branches.append(
                (Message("assistant", text),)
                if isinstance(text, str)
                else self._parse_messages(record, key, "or a string")
            )
        chosen, rejected = branches
        if prompt is None:  # both have the whole conversation
            common = 0
            while common < min(len(chosen), len(rejected)) - 1 and chosen[common] == rejected[common]:
                common += 1
            if not common:
                first, second = (self.get_file_key(part) for part in ("chosen", "rejected"))
                raise MalformedRecord(
                    f'has no key "{prompt_key}", and "{first}" and "{second}" do not begin with the same message'
                )
            return Example(chosen[:common], (chosen[common:], rejected[common:]))
        whole = [branch[: len(prompt)] == prompt and len(branch) > len(prompt) for branch in branches]
        return Example(
            prompt,
            tuple(branch[len(prompt) :] if long else branch for branch, long in zip(branches, whole, strict=True)),
        )

    def _get_text(self, record: dict[str, Any], part: str) -> str:
        """Return the string of `record` under the standard key `part`, such as "prompt". Raises `MalformedRecord` if it
        is missing or not a string.
        """
        key = self.get_file_key(part)
        if key not in record:
            raise self._missing_key_error(record, key, part)
        if not isinstance(record[key], str):
            raise MalformedRecord(f'"{key}" is {_describe_value(record[key])}, not a string')
        return str(record[key])

    def _missing_key_error(self, record: dict[str, Any], key: str, part: str) -> MalformedRecord:
        """Build the error for a record that lacks `key`, the key in the files for the standard key `part` ("prompt"
        ...); it suggests the most similar key of the record.
        """
        held = ", ".join(f'"{one}"' for one in list(record)[:8]) or "no keys"
        close = nearest(key, record)
        right = f'"{close}"' if close else '"..."'
        return MalformedRecord(f'has no key "{key}" (it has {held}); set data.record_keys = {{{part} = {right}}}')

    def _parse_messages(self, record: dict[str, Any], key: str, alternative: str = "") -> tuple[Message, ...]:
        """Parse the list of messages in `record` under `key`, as the files spell the key. alternative: other allowed
        types, such as "or a string", for the error. Raises `MalformedRecord` if the list is missing, empty or has a
        malformed message.
        """
        if key not in record:
            raise self._missing_key_error(
                record, key, next(part for part in RECORD_KEYS[self.kind] if self.get_file_key(part) == key)
            )
        turns = record[key]
        if not isinstance(turns, list):
            raise MalformedRecord(f'"{key}" is {_describe_value(turns)}, not a list of messages {alternative}'.rstrip())
        if not turns:
            raise MalformedRecord(f'"{key}" is an empty list: no message')
        return tuple(_parse_message(turn, f"{key}[{number}]") for number, turn in enumerate(turns))


class MalformedRecord(Exception):
    """Error: a record does not fit its format. The message is a clause that follows "the record", such as 'has no key
    "prompt"'.
    """


def _parse_message(turn: Any, where: str) -> Message:
    """Parse the JSON object `turn` of one message, with role and content under the keys of OpenAI (`role`, `content`)
    or ShareGPT (`from`, `value`). where: position of the message, such as "messages[2]", for errors. Raises
    `MalformedRecord` for a missing key, an unknown role or a content that is not text.
    """
    if not isinstance(turn, dict):
        raise MalformedRecord(f'{where} is {_describe_value(turn)}, not a message {{"role": "...", "content": "..."}}')
    values = []
    for names in (_ROLE_KEYS, _CONTENT_KEYS):
        key = next((name for name in names if name in turn), None)
        if key is None:
            held = ", ".join(f'"{one}"' for one in list(turn)[:8]) or "no keys"
            raise MalformedRecord(f'{where} has no "{names[0]}" (it has {held})')
        values.append((key, turn[key]))
    (role_key, role), (content_key, content) = values
    if not isinstance(role, str):
        raise MalformedRecord(f"{where}.{role_key} is {_describe_value(role)}, not a string")
    known = _OTHER_ROLES.get(role, role)
    if known not in ROLES:
        close = nearest(role, (*ROLES, *_OTHER_ROLES))
        hint = f'; did you mean "{close}"?' if close else f" (known: {', '.join((*ROLES, *_OTHER_ROLES))})"
        raise MalformedRecord(f'{where}.{role_key} is "{role}", an unknown role{hint}')
    if isinstance(content, list) and content and all(_is_text_part(part) for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise MalformedRecord(f"{where}.{content_key} is {_describe_value(content)}, not a string")
    return Message(known, content)


def _is_text_part(part: Any) -> bool:
    """Return whether a part of a message's content, in OpenAI's list format, is text rather than an image or audio."""
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _describe_value(value: Any) -> str:
    """Describe a JSON value of the wrong type in a few words, such as "a list of 3", for an error."""
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
