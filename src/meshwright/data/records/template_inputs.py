"""Inputs of a chat template besides the messages: tools and further variables, as records and requests give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshwright.data.records.messages import (
    MalformedRecord,
    Message,
    MessageFormat,
    check_depth,
    check_tool_results,
    describe_value,
    list_strings,
    load_json,
)
from meshwright.errors import UserError

# Parameters of `apply_chat_template` that are no variables of a template, and variables that are given otherwise.
_RESERVED = {
    "messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs", "processor_kwargs",
}  # fmt: skip


def parse_tools(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    """Parse the tools of a record or request to JSON schemas as chat templates expect them, {"type": "function",
    "function": {...}}. value: a list of such schemas, or of functions without the outer object, {"name": ...}; the list
    or an item may also be JSON text. where: position of the value, for errors. Raises `MalformedRecord` for anything
    else."""
    if value is None or value == "":
        return ()
    value = load_json(value, where) if isinstance(value, str) else value
    if not isinstance(value, list):
        raise MalformedRecord(f'"{where}" is {describe_value(value)}, not a list of functions')
    tools = []
    check_depth(value, where)
    for number, tool in enumerate(value):
        tool = load_json(tool, f"{where}[{number}]") if isinstance(tool, str) else tool
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise MalformedRecord(
                f'{where}[{number}] is {describe_value(tool)}, not {{"type": "function", "function": {{"name": ...}}}}'
            )
        tools.append({"type": "function", "function": function} if tool is function else tool)
    return tuple(tools)


def parse_variables(value: Any, where: str) -> dict[str, Any]:
    """Parse `chat_template_kwargs` (TRL, vLLM), such as {"enable_thinking": false}, to variables of a chat template;
    variables with the value null are left out. value: a JSON object or JSON text. where: position of the value, for
    errors. Raises `MalformedRecord` if it is no object, or sets a variable that the template gets from elsewhere, such
    as "messages".
    """
    value = load_json(value or "{}", where) if isinstance(value, str) else value
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MalformedRecord(f'"{where}" is {describe_value(value)}, not an object of template variables')
    check_depth(value, where)
    for name in value:
        if name in _RESERVED or name.endswith("_token") or not name.isidentifier():
            raise MalformedRecord(f'"{where}" has "{name[:40]}", which is not a variable that a record may set')
    return {name: one for name, one in value.items() if one is not None}


class Conversation(NamedTuple):
    """A conversation that the assistant is to continue, with all inputs of the chat template. tools: JSON schemas of
    the functions that the assistant may call. variables: further variables of the template, such as {"enable_thinking":
    False}."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = {}

    def count_characters(self) -> int:
        """Return the number of characters of all texts of the conversation, including those of tools and variables."""
        texts = (text for message in self.messages for text in message.list_texts())
        return sum(map(len, texts)) + sum(map(len, list_strings([*self.tools, self.variables])))


def parse_conversation(messages: Sequence[Any], tools: Any, variables: Any) -> Conversation:
    """Parse the inputs of a chat request, given as JSON: messages, tools and variables (`chat_template_kwargs` of
    vLLM's API). Raises `UserError`, whose text begins with the position of the mistake, such as "messages[2].content".
    """
    try:
        turns = MessageFormat().parse_all(list(messages), "messages", set())
        check_tool_results(turns, "messages")
        return Conversation(turns, parse_tools(tools, "tools"), parse_variables(variables, "chat_template_kwargs"))
    except MalformedRecord as error:
        said = str(error)
        raise UserError(said[1:].replace('"', "", 1) if said.startswith('"') else said) from None
