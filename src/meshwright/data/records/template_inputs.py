"""What a record or a request gives its chat template beside the messages: tools and further variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.data.records.messages import (
    MalformedRecord,
    Message,
    MessageFormat,
    check_depth,
    check_tool_results,
    describe_value,
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
    """Return JSON schemas of functions as chat templates expect them, {"type": "function", "function": {...}}. value: a
    list of them, or of the functions alone, or either as JSON text. Raises `MalformedRecord` otherwise.
    """
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
    """Return the variables of a chat template that a record or a request gives as `chat_template_kwargs` (TRL, vLLM),
    such as {"enable_thinking": false}, or as JSON text; a null variable is left out. Raises `MalformedRecord` if it is
    no object, or has a name that is no variable of its own.
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


def parse_conversation(
    messages: Sequence[Any], tools: Any, variables: Any
) -> tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...], dict[str, Any]]:
    """Return (messages, tools, variables) of a request to a server as its chat template is given them. messages, tools,
    variables: as in OpenAI's API, `variables` its `chat_template_kwargs` in vLLM's. Raises `UserError`, whose text
    begins with the position of what is wrong, such as "messages[2].content".
    """
    try:
        turns = MessageFormat().parse_all(list(messages), "messages", set())
        check_tool_results(turns, "messages")
        return turns, parse_tools(tools, "tools"), parse_variables(variables, "chat_template_kwargs")
    except MalformedRecord as error:
        raise UserError(str(error).replace('"', "", 2) if str(error).startswith('"') else str(error)) from None
