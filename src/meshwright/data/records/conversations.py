"""Instruction, chat, preference and unpaired records, parsed to conversations; the recipe maps the keys that files
use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from meshwright.data.records.messages import (
    MalformedRecord,
    Message,
    MessageFormat,
    check_tool_results,
    describe_value,
    parse_content,
)
from meshwright.data.records.parsed_example import Example, select_reasoning
from meshwright.data.records.preference_forms import (
    OPENAI_PREFERENCE,
    OPENAI_PREFERENCE_COLUMNS,
    flatten_openai_preference,
    is_openai_preference,
    split_turns,
)
from meshwright.data.records.prompts import find_shared_prompt, separate_prompt
from meshwright.data.records.template_inputs import parse_tools, parse_variables
from meshwright.data.records.trees import is_tree, list_conversations
from meshwright.names import nearest
from meshwright.recipe.data import MORE_RECORD_KEYS, RECORD_KEYS


class RecordFormat(NamedTuple):
    """Format of a file of records (JSON objects or Parquet rows).

    kind: "instruction", "chat", "preference" or "unpaired". renamed: {standard key: key in the files}, such as
    {"prompt": "question"}; other keys have their standard names. messages: names of keys and roles in messages.
    thinking: which reasoning of assistant turns is kept: "template" (what the template renders), "last" (of the last
    turn), "none", or "all" (each turn ends a separate example).
    """

    kind: str
    renamed: Mapping[str, str] = {}
    messages: MessageFormat = MessageFormat()
    thinking: str = "template"

    def get_file_key(self, standard_key: str) -> str:
        """Return the key in the files for `standard_key`, such as "prompt"; the same key unless it is renamed."""
        return self.renamed.get(standard_key, standard_key)

    @property
    def columns(self) -> list[str]:
        """Names of the columns to read from Parquet files: the keys that a record of this format may have."""
        tree = ("message_tree_id", "message_id", "parent_id", "text", "role", "rank", "deleted", "review_result")
        more = {"chat": tree, "preference": OPENAI_PREFERENCE_COLUMNS}.get(self.kind, ())
        return [*map(self.get_file_key, (*RECORD_KEYS[self.kind], *MORE_RECORD_KEYS[self.kind])), *more]

    def parse_examples(self, record: Any) -> list[Example]:
        """Parse `record`, a JSON value, to training examples, usually one. A tree of messages gives one example for
        each conversation in the tree. If the reasoning of every turn is to be trained on, each assistant turn gives one
        example. Raises `MalformedRecord` if it is no object, lacks a key of this format, or has a value of a wrong
        type."""
        if not isinstance(record, dict):
            raise MalformedRecord(f"is {describe_value(record)}, not an object")
        if self.kind == "chat" and is_tree(record):
            unused: set[str] = set()
            unused.update(str(key) for key in record if key not in ("message_tree_id", "tree_state", "prompt"))
            ways = list_conversations(record, self.messages, unused)
            found = [Example((), (way,), unused=frozenset(unused)) for way in ways]
        else:
            found = [self.parse_example(record)]
        return [example for each in found for example in select_reasoning(each, self.thinking)]

    def parse_example(self, record: dict[str, Any]) -> Example:
        """Parse a record that is one example. Raises `MalformedRecord` if it lacks a key of this format, or has a value
        of a wrong type."""
        if self.kind == "preference" and "chosen" not in self.renamed and is_openai_preference(record):
            renamed = {**self.renamed, **OPENAI_PREFERENCE}
            return self._replace(renamed=renamed).parse_example(flatten_openai_preference(record))
        unused: set[str] = set()
        parse = {"instruction": self._parse_instruction, "chat": self._parse_chat, "unpaired": self._parse_unpaired}
        prompt, branches = parse.get(self.kind, self._parse_preference)(record, unused)
        label = self._parse_label(record) if self.kind == "unpaired" else None
        system = self._parse_system(record)
        if system:
            given = [message.content for message in (*prompt, *branches[0]) if message.role == "system"]
            if given and given != [system]:
                key = self.get_file_key("system")
                raise MalformedRecord(f'has "{key}" and a system message, and they differ: remove one')
            if not given and (prompt or len(branches) > 1):
                prompt = (Message("system", system), *prompt)
            elif not given:
                branches = ((Message("system", system), *branches[0]),)
        tools = self._parse_tools(record)
        for branch in branches:
            check_tool_results((*prompt, *branch), self.get_file_key(RECORD_KEYS[self.kind][0]))
        used = {*map(self.get_file_key, self._list_used_keys(record))}
        unused.update(str(key) for key, value in record.items() if key not in used and value is not None)
        variables = parse_variables(record.get(key := self.get_file_key("chat_template_kwargs")), key)
        return Example(prompt, branches, tools, frozenset(unused), label, variables)

    def _list_used_keys(self, record: Mapping[str, Any]) -> list[str]:
        """Return the standard keys that the parser reads from `record`, by the record's schema; all other keys are
        ignored.
        """
        keys = [*RECORD_KEYS[self.kind], *MORE_RECORD_KEYS[self.kind]]
        left: set[str] = set()
        if self.kind == "instruction":
            completes = self.get_file_key("instruction") not in record
            left = {"instruction", "input", "output", "history"} if completes else {"prompt", "completion"}
        elif self.kind == "chat":
            left = {"conversations"} if self.get_file_key("messages") in record else {"messages"}
        elif self.kind == "unpaired":
            held = {*self._find_unpaired_parts(record), "system", "tools", "chat_template_kwargs"}
            left = {*keys} - (held | {"input", "history"} if "instruction" in held else held)
        elif self.get_file_key("prompt") in record:
            left = {"conversations"}
        if record.get(self.get_file_key("tools")) is not None:
            left.add("functions")
        return [key for key in keys if key not in left]

    def find_schema(self, record: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the required keys of the schema that `record` follows, by their names in the files, such as
        ("messages",) or ShareGPT's ("conversations",)."""
        if self.kind == "instruction":
            completes = self._is_trl_instruction(record)
            return tuple(map(self.get_file_key, ("prompt", "completion") if completes else ("instruction", "output")))
        if self.kind == "unpaired":
            return tuple(map(self.get_file_key, self._find_unpaired_parts(record)))
        if self.kind == "chat":
            return ("prompt",) if is_tree(record) else (self._get_messages_key(record),)
        if is_openai_preference(record):
            return OPENAI_PREFERENCE_COLUMNS
        answers = (self.get_file_key("chosen"), self.get_file_key("rejected"))
        if (prompt := self.get_file_key("prompt")) in record:
            return (prompt, *answers)
        return ("conversations", *answers) if "conversations" in record else answers

    def check_schema(self, record: Any, schema: tuple[str, ...]) -> None:
        """Raise `MalformedRecord` if a record does not follow `schema`, the keys that `find_schema` returned for the
        earlier records of its file: a file that changes its schema is a mixture, or damaged."""
        if not isinstance(record, dict):
            return
        advice = "all records of a file must have the same keys; put records of another schema into a file of their own"
        if missing := next((key for key in schema if key not in record), None):
            held = ", ".join(f'"{key}"' for key in list(record)[:8]) or "no keys"
            raise MalformedRecord(f'has no key "{missing}" (it has {held}), which the records before it have; {advice}')
        if added := next((key for key in self.find_schema(record) if key not in schema), None):
            raise MalformedRecord(f'has the key "{added}", which the records before it do not have; {advice}')

    def _is_trl_instruction(self, record: Mapping[str, Any]) -> bool:
        """Return True if an instruction record has TRL's keys (`prompt` and `completion`) instead of Alpaca's."""
        return self.get_file_key("instruction") not in record and self.get_file_key("completion") in record

    def _find_unpaired_parts(self, record: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the standard keys that an unpaired record (one labelled response) must have. They depend on its
        schema: TRL's, in which the prompt may be part of `completion`, or LLaMA-Factory's, in which "kto_tag" labels a
        conversation or an Alpaca record."""

        def has(part: str) -> bool:
            """Return True if the record has the file's key for the standard key `part`."""
            return self.get_file_key(part) in record

        labels = "kto_tag" if has("kto_tag") and not has("label") else "label"
        if not has("prompt") and not has("completion"):
            if chat := next((part for part in ("messages", "conversations") if has(part)), None):
                return (chat, labels)
            if has("instruction"):
                return ("instruction", "output", labels)
        if not has("prompt") and isinstance(record.get(self.get_file_key("completion")), list):
            return ("completion", labels)
        return ("prompt", "completion", labels)

    def _get_messages_key(self, record: Mapping[str, Any]) -> str:
        """Return the key of the list of messages in a chat record: the key configured for "messages", by default
        "messages". If no key is configured, and the record has ShareGPT's "conversations" but no "messages", return
        "conversations".
        """
        key = self.get_file_key("messages")
        shared = key not in record and "messages" not in self.renamed and "conversations" in record
        return "conversations" if shared else key

    def format_example_record(self) -> str:
        """Return the JSON text of a well-formed record of this format, for error messages."""
        turn = '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        values = {"messages": turn, "label": "true"}
        parts = {part: values.get(part, '"..."') for part in RECORD_KEYS[self.kind]}
        return "{" + ", ".join(f'"{self.get_file_key(part)}": {value}' for part, value in parts.items()) + "}"

    def _parse_tools(self, record: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
        """Return the functions of a record: `tools`, or OpenAI's older `functions`."""
        for part in ("tools", "functions"):
            if part in MORE_RECORD_KEYS[self.kind] and record.get(key := self.get_file_key(part)) is not None:
                return parse_tools(record[key], key)
        return ()

    def _parse_system(self, record: Mapping[str, Any]) -> str:
        """Return the system prompt of `record`, its value `system`, a string or a list of parts (Anthropic); "" if it
        is missing or null."""
        value = record.get(key := self.get_file_key("system"))
        return "" if value is None else parse_content(value, f'"{key}"')[0]

    def _parse_instruction(
        self, record: dict[str, Any], unused: set[str]
    ) -> tuple[tuple[Message, ...], tuple[tuple[Message, ...], ...]]:
        """Parse an instruction record to (prompt, branches). Branches are the continuations of the prompt, here one.
        The record has Alpaca's `instruction`, `output`, `input` and `history` (pairs of question and answer, which are
        trained on), or TRL's `prompt` and `completion`. unused: set to which ignored keys of messages are added. Raises
        `MalformedRecord` if a key is missing or has a value of a wrong type."""
        if self._is_trl_instruction(record):
            return self._parse_completion(record, unused)
        instruction, output = (self._get_text(record, part) for part in ("instruction", "output"))
        given = self._get_optional_text(record, "input")
        turns: list[Message] = []
        history, key = record.get(self.get_file_key("history")) or [], self.get_file_key("history")
        if not isinstance(history, list):
            raise MalformedRecord(f'"{key}" is {describe_value(history)}, not a list of [question, answer]')
        for number, pair in enumerate(history):
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
                raise MalformedRecord(f'"{key}"[{number}] is {describe_value(pair)}, not [question, answer]')
            turns += [Message("user", pair[0]), Message("assistant", pair[1])]
        return (), ((*turns, Message("user", instruction, given), Message("assistant", output)),)

    def _parse_completion(
        self, record: dict[str, Any], unused: set[str]
    ) -> tuple[tuple[Message, ...], tuple[tuple[Message, ...], ...]]:
        """Parse `record` with TRL's keys `prompt` and `completion` to (prompt, branches), with one branch, the
        completion. unused: set to which ignored keys of messages are added. Raises `MalformedRecord` if a key is
        missing or has a value of a wrong type."""
        prompt = self._parse_side(record, "prompt", "user", unused)
        completion = self._parse_side(record, "completion", "assistant", unused)
        return separate_prompt(prompt, (completion,), [*map(self.get_file_key, ("prompt", "completion"))])

    def _parse_chat(
        self, record: dict[str, Any], unused: set[str]
    ) -> tuple[tuple[Message, ...], tuple[tuple[Message, ...], ...]]:
        """Parse a chat record to (prompt, branches): an empty prompt, and one branch with all messages. unused: set to
        which ignored keys of messages are added. Raises `MalformedRecord` if it has no list of messages."""
        key = self._get_messages_key(record)
        if key not in record:
            raise self._missing_key_error(record, key, "messages")
        return (), (self.messages.parse_all(record[key], key, unused),)

    def _parse_preference(
        self, record: dict[str, Any], unused: set[str]
    ) -> tuple[tuple[Message, ...], tuple[tuple[Message, ...], ...]]:
        """Parse a preference record (`prompt`, `chosen`, `rejected`) to (prompt, branches), with two branches, the
        chosen and the rejected response. If the key `prompt` is missing, the prompt is the common beginning of the
        chosen and the rejected conversation; these may be texts with turns "Human:" and "Assistant:" (Anthropic).
        unused: set to which ignored keys of messages are added. Raises `MalformedRecord` if a key is missing, has a
        value of a wrong type, or no common beginning exists."""
        prompt_key = self.get_file_key("prompt")
        prompt: tuple[Message, ...] | None = None
        if prompt_key in record:
            prompt = self._parse_side(record, "prompt", "user", unused, split=True)
        elif "conversations" in record:  # LLaMA-Factory
            prompt_key = "conversations"
            prompt = self.messages.parse_all(record["conversations"], "conversations", unused)
        chosen, rejected = (
            self._parse_side(record, part, "assistant", unused, split=True) for part in ("chosen", "rejected")
        )
        answers = [self.get_file_key(part) for part in ("chosen", "rejected")]
        if prompt is not None:
            return separate_prompt(prompt, (chosen, rejected), (prompt_key, *answers))
        prompt, branches = find_shared_prompt(chosen, rejected)
        if not prompt:
            raise MalformedRecord(
                f'has no key "{prompt_key}", and "{answers[0]}" and "{answers[1]}" do not begin with the same message'
            )
        return prompt, branches

    def _parse_unpaired(
        self, record: dict[str, Any], unused: set[str]
    ) -> tuple[tuple[Message, ...], tuple[tuple[Message, ...], ...]]:
        """Parse a record that has a single response with a label, good or bad (as for KTO). Return (turns of the
        prompt, branches); `branches` has one item, the tuple with the response turn. The last turn of the record is the
        response, the turns before it are the prompt.

        The record is in a format of TRL (`prompt` and `completion`) or LLaMA-Factory (instruction, `messages` or
        `conversations`). unused: set to which ignored keys of messages are added. Raises `MalformedRecord` if a key is
        missing or has a value of a wrong type, or if the last turn is not the assistant's."""
        part = self._find_unpaired_parts(record)[0]
        if part == "completion":
            turns = self._parse_side(record, "completion", "assistant", unused)
        elif part in ("prompt", "instruction"):
            parse = self._parse_completion if part == "prompt" else self._parse_instruction
            prompt, (branch,) = parse(record, unused)
            turns = (*prompt, *branch)
        else:
            key = self.get_file_key(part)
            turns = self.messages.parse_all(record[key], key, unused)
        if turns[-1].role != "assistant":
            raise MalformedRecord(
                f'ends with a turn of role "{turns[-1].role}"; the judged response is an assistant\'s'
            )
        return turns[:-1], (turns[-1:],)

    def _parse_label(self, record: Mapping[str, Any]) -> bool:
        """Return the label of an unpaired record, under the standard key "label" or LLaMA-Factory's "kto_tag": True, 1
        or "true" for a desirable response. Raises `MalformedRecord` for anything else.
        """
        key = self.get_file_key(part := self._find_unpaired_parts(record)[-1])
        if key not in record:
            raise self._missing_key_error(dict(record), key, part)
        value = record[key]
        value = {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value
        if value not in (True, False):
            raise MalformedRecord(f'"{key}" is {describe_value(value)}, not true (desirable) or false (undesirable)')
        return bool(value)

    def _parse_side(
        self, record: dict[str, Any], standard_key: str, role: str, unused: set[str], split: bool = False
    ) -> tuple[Message, ...]:
        """Parse the value of `record` under `standard_key`, such as "prompt" or "chosen", to messages. The value is a
        text (one message of `role`), one message, or a list of messages. split: True: a text may have several turns,
        "Human:" and "Assistant:". unused: set to which ignored keys of messages are added. Raises `MalformedRecord` for
        any other value."""
        key = self.get_file_key(standard_key)
        if key not in record:
            raise self._missing_key_error(record, key, standard_key)
        value = record[key]
        if isinstance(value, str):
            if split and (turns := split_turns(value, standard_key == "prompt")):
                return turns
            return (Message(role, value),)
        if isinstance(value, dict):
            return (self.messages.parse(value, key, key, unused),)
        return self.messages.parse_all(value, key, unused, "or a string")

    def _get_text(self, record: dict[str, Any], standard_key: str) -> str:
        """Return the string of `record` under `standard_key`, such as "prompt". Raises `MalformedRecord` if it is
        missing or not a string.
        """
        key = self.get_file_key(standard_key)
        if key not in record:
            raise self._missing_key_error(record, key, standard_key)
        if not isinstance(record[key], str):
            raise MalformedRecord(f'"{key}" is {describe_value(record[key])}, not a string')
        return str(record[key])

    def _get_optional_text(self, record: dict[str, Any], standard_key: str) -> str:
        """Return the string of `record` under `standard_key`; "" if it is missing or null."""
        return "" if record.get(self.get_file_key(standard_key)) is None else self._get_text(record, standard_key)

    def _missing_key_error(self, record: dict[str, Any], key: str, standard_key: str) -> MalformedRecord:
        """Build the error for a record that lacks `key`, the key in the files for `standard_key`, such as "prompt". It
        suggests the most similar key of the record."""
        held = ", ".join(f'"{one}"' for one in list(record)[:8]) or "no keys"
        close = nearest(key, record)
        right = f'"{close}"' if close else '"..."'
        return MalformedRecord(
            f'has no key "{key}" (it has {held}); set data.record_keys = {{{standard_key} = {right}}}'
        )
