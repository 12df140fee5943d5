"""Messages of conversations, parsed from the published schemas: OpenAI, ShareGPT, TRL, OpenAssistant.

Other data of a message than role and text are stored under the names of OpenAI's schema, which chat templates read.
Keys that no schema defines are reported as ignored; content that cannot be represented, such as an image, is an error.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from meshwright.names import ROLES, nearest
from meshwright.untrusted import describe_parse_error

# Role names of ShareGPT's `from`, of LLaMA-Factory, OpenAssistant and others.
OTHER_ROLES = {
    "human": "user", "prompter": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "model": "assistant", "function": "tool", "observation": "tool", "ipython": "tool",
}  # fmt: skip
CALL_ROLE = "function_call"  # ShareGPT: the text is a call, or several, as JSON
# Keys that other schemas use for a standard key of a message, the standard one first.
_SYNONYMS = {
    "role": ("role", "from"),
    "content": ("content", "value", "text"),
    "reasoning_content": ("reasoning_content", "reasoning", "thinking"),
    "trained": ("train", "weight"),
    "part": ("text", "content", "value"),  # of a content in parts without `type`
}
_KEPT = ("name", "tool_call_id")
_EMPTY: tuple[Any, ...] = (None, "", [])  # values that count as missing where another key has one
_MAX_DEPTH = 64  # levels of a tool's schema or a call's arguments
THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)
"""Reasoning at the beginning of an assistant's text."""
_REPLACED = ("function_call", "refusal")  # used where `tool_calls`, the content, are empty
_MEDIA = {
    "image_url": "an image", "image": "an image", "input_image": "an image", "input_audio": "audio", "audio": "audio",
    "audio_url": "audio", "video": "a video", "video_url": "a video", "file": "a file", "document": "a file",
}  # fmt: skip

# Parts of a content that are text: {type: (key of the text, whether it is text or reasoning)}.
_TEXT_PARTS = {
    "text": ("text", "text"), "input_text": ("text", "text"), "output_text": ("text", "text"),
    "refusal": ("refusal", "text"), "reasoning": ("text", "thinking"), "thinking": ("thinking", "thinking"),
}  # fmt: skip


class MalformedRecord(Exception):
    """Error: a record does not fit its format. The message is a clause that follows "the record", such as 'has no key
    "prompt"'.
    """


class Message(NamedTuple):
    """One turn of a conversation. role: "system", "user", "assistant", "tool" or "developer". content: the message's
    text. input: the text that an instruction applies to (Alpaca's `input`), or "". fields: further fields under the
    names of OpenAI's schema and of chat templates (`tool_calls`, `tool_call_id`, `name`, `reasoning_content` ...), as
    JSON values. trained: True if an assistant turn is trained on, False if not; None: decided by its position in the
    example. context: character ranges [begin, end) of the content that are not trained on, ascending."""

    role: str
    content: str
    input: str = ""
    fields: Mapping[str, Any] = {}
    trained: bool | None = None
    context: tuple[tuple[int, int], ...] = ()

    def to_template_variables(self) -> dict[str, Any]:
        """Return the message as variables of a chat template: `role`, `content` (content and input joined),
        `instruction` (content alone), `input`, and its other fields; reasoning also under `thinking`, gpt-oss's name.
        """
        whole = f"{self.content}\n\n{self.input}" if self.input else self.content
        seen = {**self.fields, "role": self.role, "content": whole, "instruction": self.content, "input": self.input}
        return {**seen, "thinking": seen["reasoning_content"]} if "reasoning_content" in seen else seen

    def list_texts(self) -> Iterator[str]:
        """Yield the message's texts: reasoning, content, input, and the strings in its tool calls."""
        calls = list_strings([call["function"]["arguments"] for call in self.fields.get("tool_calls", ())])
        yield from filter(None, (self.fields.get("reasoning_content"), self.content, self.input, *calls))

    def rewrite_texts(self, rewrite: Callable[[str], str]) -> Message:
        """Return a copy in which `rewrite(text)` replaces each of the message's texts (see `list_texts`)."""
        fields = dict(self.fields)
        if "reasoning_content" in fields:
            fields["reasoning_content"] = rewrite(fields["reasoning_content"])
        if "tool_calls" in fields:
            functions = [call["function"] for call in fields["tool_calls"]]
            changed = [{**one, "arguments": map_strings(one["arguments"], rewrite)} for one in functions]
            calls = zip(fields["tool_calls"], changed, strict=True)
            fields["tool_calls"] = [{**call, "function": function} for call, function in calls]
        cuts = [0, *(at for each in self.context for at in each), len(self.content)]
        pieces = [rewrite(self.content[begin:end]) for begin, end in itertools.pairwise(cuts)]
        ends = list(itertools.accumulate(map(len, pieces)))
        context = tuple(zip(ends[:-1:2], ends[1::2], strict=True)) if self.context else ()
        return self._replace(content="".join(pieces), input=rewrite(self.input), fields=fields, context=context)

    def cut_content(self, begin: int) -> Message:
        """Return a copy without the first `begin` characters of the content."""
        context = ((max(first - begin, 0), end - begin) for first, end in self.context if end > begin)
        return self._replace(content=self.content[begin:], context=tuple(context))


class MessageFormat(NamedTuple):
    """Field names and roles of the messages in a file. keys: {standard key ("role", "content"): key in the files}.
    roles: {role in the files: standard role}."""

    keys: Mapping[str, str] = {}
    roles: Mapping[str, str] = {}

    def parse_all(self, turns: Any, where: str, unused: set[str], alternative: str = "") -> tuple[Message, ...]:
        """Parse `turns`, a list of messages. where: key of the list in the record, for errors. unused: set to which
        ignored keys, such as "messages.id", are added. alternative: other allowed types, such as "or a string", for the
        error. Raises `MalformedRecord` if the value is no list, is empty, has a malformed message, or a tool's result
        without a call."""
        if not isinstance(turns, list):
            problem = f'"{where}" is {describe_value(turns)}, not a list of messages {alternative}'
            raise MalformedRecord(problem.rstrip())
        if not turns:
            raise MalformedRecord(f'"{where}" is an empty list: no message')
        return tuple(self.parse(turn, f"{where}[{number}]", where, unused) for number, turn in enumerate(turns))

    def parse(self, turn: Any, where: str, key: str, unused: set[str]) -> Message:
        """Parse one message, the JSON object `turn`. where: position of the message, such as "messages[2]", for errors.
        key: key of the list of messages in the record. unused: set to which ignored keys, such as "messages.id", are
        added. Raises `MalformedRecord` for a missing key, an unknown role, or a content that is not text."""
        if not isinstance(turn, dict):
            raise MalformedRecord(
                f'{where} is {describe_value(turn)}, not a message {{"role": "...", "content": "..."}}'
            )
        role_key, content_key = self._find_key(turn, "role", where), self._find_key(turn, "content", "")
        written = turn[role_key]
        if not isinstance(written, str):
            raise MalformedRecord(f"{where}.{role_key} is {describe_value(written)}, not a string")
        role = self._parse_role(written, f"{where}.{role_key}")
        fields: dict[str, Any] = {}
        if calls := _parse_calls(turn, where):
            fields["tool_calls"] = calls
        thought, reasoning_key = "", self._find_key(turn, "reasoning_content", "")
        if reasoning_key and turn[reasoning_key] is not None:
            thought = _get_string(turn, reasoning_key, where)
        refuses = turn.get("refusal") not in _EMPTY and turn.get(content_key) in _EMPTY
        content = ""
        context: tuple[tuple[int, int], ...] | None = None
        if refuses:
            content = _get_string(turn, "refusal", where)
        elif content_key and turn[content_key] is not None:
            content, more, context = parse_content(turn[content_key], f"{where}.{content_key}")
            thought += more
        elif not calls:
            if content_key:
                raise MalformedRecord(f"{where}.{content_key} is null, and the message has no tool_calls")
            self._find_key(turn, "content", where)
        if written == CALL_ROLE and not content_key:
            self._find_key(turn, "content", where)
        if written == CALL_ROLE:
            fields["tool_calls"], content = _parse_call_text(content, f"{where}.{content_key}"), ""
        if thought.strip():
            fields["reasoning_content"] = thought
        fields |= {name: _get_string(turn, name, where) for name in _KEPT if turn.get(name) is not None}
        used = {role_key, content_key, reasoning_key, *_KEPT, "tool_calls", *_SYNONYMS["trained"]}
        used |= {name for name in _REPLACED if turn.get(name) in _EMPTY}
        used |= {"refusal"} if refuses else set()
        used |= {"function_call"} if turn.get("tool_calls") in _EMPTY else set()
        unused.update(f"{key}.{name}" for name in turn if name not in used and turn[name] is not None)
        trained = _parse_trained(turn, where)
        if role != "assistant" and (trained or context not in (None, ((0, len(content)),))):
            marked = f"{where}.{content_key} has parts to be trained"
            if key := next((key for key in _SYNONYMS["trained"] if turn.get(key)), ""):
                marked = f"{where}.{key} is {describe_value(turn[key])}"
            raise MalformedRecord(f'{marked}, but only messages of the assistant are trained on, not of "{role}"')
        return Message(
            role, content, fields=fields, trained=trained, context=context if role == "assistant" and context else ()
        )

    def _find_key(self, turn: Mapping[str, Any], standard_key: str, where: str) -> str:
        """Return the key of `turn`, a message as JSON, for `standard_key`, such as "content": of several synonyms the
        first whose value is not empty. where: position of the message, for the `MalformedRecord` that is raised if the
        message has no such key; if `where` is "", return "" instead."""
        names = (self.keys[standard_key],) if standard_key in self.keys else _SYNONYMS[standard_key]
        held = [name for name in names if name in turn]
        key = next((name for name in held if turn[name] not in _EMPTY), held[0] if held else "")
        if not key and where:
            has = ", ".join(f'"{one}"' for one in list(turn)[:8]) or "no keys"
            raise MalformedRecord(f'{where} has no "{names[0]}" (it has {has})')
        return key

    def _parse_role(self, written: str, where: str) -> str:
        """Return the standard role for the role `written` in a file. where: position of the message, for errors. Raises
        `MalformedRecord` for an unknown role."""
        if written == CALL_ROLE:
            return "assistant"
        role = self.roles.get(written) or OTHER_ROLES.get(written, written)
        if role not in ROLES:
            known = (*ROLES, *OTHER_ROLES, CALL_ROLE, *self.roles)
            close = nearest(written, known)
            hint = f'; did you mean "{close}"?' if close else f" (known: {', '.join(known)})"
            raise MalformedRecord(
                f'{where} is "{written[:40]}", an unknown role{hint}; '
                f'data.record_roles = {{"{written[:40]}" = "user"}} maps it'
            )
        return role


def check_tool_results(messages: Sequence[Message], where: str) -> None:
    """Raise `MalformedRecord` if a tool's result does not follow a call of that tool. where: key of the list of
    messages."""
    open_calls: list[Any] | None = None  # ids of the calls that results may answer
    for number, message in enumerate(messages):
        if message.role != "tool":
            calls = message.fields.get("tool_calls")
            if calls is None and message.role == "assistant" and "<tool_call" in message.content:
                calls = [{}]  # written out in the text, as in Hermes' data
            open_calls = [call.get("id") for call in calls] if calls else None
        elif open_calls is None:
            raise MalformedRecord(
                f"{where}[{number}] is a tool's result, and no call comes before it: an assistant message with "
                "tool_calls should"
            )
        elif None not in open_calls and message.fields.get("tool_call_id", open_calls[0]) not in open_calls:
            given = describe_value(message.fields["tool_call_id"])
            known = ", ".join(map(describe_value, open_calls))
            raise MalformedRecord(f"{where}[{number}].tool_call_id is {given}, and the calls before it have {known}")


def map_strings(value: Any, change: Callable[[str], str], kept: Sequence[str] = ()) -> Any:
    """Return a copy of a JSON value in which every string value s (not the keys of objects) is replaced by `change(s)`.
    kept: keys whose values stay unchanged.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: one if key in kept else map_strings(one, change, kept) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(one, change, kept) for one in value]
    return value


def list_strings(value: Any, kept: Sequence[str] = ()) -> list[str]:
    """Return all string values in a JSON value (not the keys of objects), in order. kept: keys whose values are left
    out."""
    found: list[str] = []

    def note(text: str) -> str:
        """Append `text` to the result, and return it unchanged, as `map_strings` requires."""
        found.append(text)
        return text

    map_strings(value, note, kept)
    return found


def _parse_calls(turn: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the tool calls of the message `turn` as {"type": "function", "function": {"name", "arguments": object}},
    with "id" if given. where: position of the message, for errors. Raises `MalformedRecord` for a call in another form.
    """
    calls = turn.get("tool_calls")
    if calls in _EMPTY and turn.get("function_call") not in _EMPTY:  # OpenAI's older form
        calls = [turn["function_call"]]
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise MalformedRecord(f"{where}.tool_calls is {describe_value(calls)}, not a list of calls")
    return [_parse_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)]


def _parse_call(call: Any, where: str) -> dict[str, Any]:
    """Parse one tool call, {"function": {"name", "arguments"}} or {"name", "arguments"}; arguments may be JSON text.
    where: position of the call, for errors."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MalformedRecord(f'{where} is {describe_value(call)}, not {{"name": "...", "arguments": {{...}}}}')
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = load_json(arguments or "{}", f"{where}.arguments")
    check_depth(arguments, f"{where}.arguments")
    if arguments is not None and not isinstance(arguments, dict):
        raise MalformedRecord(f"{where}.arguments is {describe_value(arguments)}, not an object")
    parsed = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    return {"id": _get_string(call, "id", where), **parsed} if call.get("id") is not None else parsed


def _parse_call_text(text: str, where: str) -> list[dict[str, Any]]:
    """Parse the text of a ShareGPT turn `function_call`: one call, or a list of calls, as JSON. where: position of the
    turn, for errors."""
    value = load_json(text, where)
    if value == []:
        raise MalformedRecord(f"{where} is an empty list of calls")
    return [_parse_call(call, where) for call in (value if isinstance(value, list) else [value])]


def parse_content(content: Any, where: str) -> tuple[str, str, tuple[tuple[int, int], ...] | None]:
    """Parse a message's content, a string or a list of parts; return (text, reasoning, character ranges of the text
    that are not trained on). The ranges are None unless a part is marked (`train`, `weight`). Parts may lack `type`, as
    in axolotl. where: position of the message, for errors. Raises `MalformedRecord` for anything else, such as an
    image."""
    if isinstance(content, str):
        return content, "", None
    if not isinstance(content, list) or not content:
        raise MalformedRecord(f"{where} is {describe_value(content)}, not a string")
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    context: list[tuple[int, int]] | None = None
    size = 0
    for number, part in enumerate(content):
        kind = part.get("type", "") if isinstance(part, dict) else ""
        kind = kind if isinstance(kind, str) else "-"
        if kind in _MEDIA:
            raise MalformedRecord(f'{where}[{number}] is {_MEDIA[kind]} ("type": "{kind}"): only text is supported')
        name, of = _TEXT_PARTS.get(kind, ("", ""))
        if not kind and isinstance(part, dict):
            name, of = next((key for key in _SYNONYMS["part"] if key in part), ""), "text"
        if not name or not isinstance(part.get(name), str):
            other = f'a part of the type "{kind[:40]}"' if len(kind) > 1 and not name else describe_value(part)
            raise MalformedRecord(f'{where}[{number}] is {other}, not {{"type": "text", "text": "..."}}')
        texts[of].append(part[name])
        trained = _parse_trained(part, f"{where}[{number}]")
        if of != "text" and trained is not None:
            raise MalformedRecord(f"{where}[{number}] is reasoning with a mark: only parts of the answer may have one")
        begin, size = size, size + (len(part[name]) if of == "text" else 0)
        if trained is not None:
            context = context or []
        if trained is False and context is not None and begin < size:
            joined = context and context[-1][1] == begin
            context.append((context.pop()[0] if joined else begin, size))
    text, thought = ("".join(texts[kind]) for kind in ("text", "thinking"))
    return text, thought, None if context is None else tuple(context)


def _parse_trained(turn: Mapping[str, Any], where: str) -> bool | None:
    """Parse the training mark of `turn`, a message or a part of a message: `train` (axolotl), or `weight` 0 or 1
    (OpenAI). Return True if the text is trained on, False if not, None if there is no mark. where: position of `turn`,
    for errors. Raises `MalformedRecord` for another value, or for two marks that contradict each other.
    """
    marks = {key: turn[key] for key in _SYNONYMS["trained"] if turn.get(key) is not None}
    for key, value in marks.items():
        if value not in (0, 1):
            raise MalformedRecord(f"{where}.{key} is {describe_value(value)}; it should be 0 or 1, true or false")
    trained = {*map(bool, marks.values())}
    if len(trained) > 1:
        raise MalformedRecord(f"{where} has {' and '.join(marks)}, which contradict each other: remove one")
    return trained.pop() if trained else None


def _get_string(values: Mapping[str, Any], key: str, where: str) -> str:
    """Return the string under `key` of the JSON object `values`. where: position of the object, for errors. Raises
    `MalformedRecord` if the value is not a string."""
    if not isinstance(values[key], str):
        raise MalformedRecord(f"{where}.{key} is {describe_value(values[key])}, not a string")
    return str(values[key])


def check_depth(value: Any, where: str) -> None:
    """Raise `MalformedRecord` if a JSON value is nested deeper than `_MAX_DEPTH` levels. where: position of the value,
    for the error."""
    level, depth = [value], 0
    while level := [
        one
        for each in level
        if isinstance(each, dict | list)
        for one in (each.values() if isinstance(each, dict) else each)
    ]:
        depth += 1
        if depth > _MAX_DEPTH:
            raise MalformedRecord(f"{where} is nested more than {_MAX_DEPTH} levels deep")


def load_json(text: str, where: str) -> Any:
    """Parse JSON text. where: position of the text, for errors. Raises `MalformedRecord` if the text is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedRecord(f"{where} is not JSON ({describe_parse_error(error)[:80]})") from None


def describe_value(value: Any) -> str:
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


def join_texts(messages: Iterable[Message]) -> str:
    """Join the texts of messages by blank lines, for cleaning rules and counts."""
    return "\n\n".join(text for message in messages for text in message.list_texts())
