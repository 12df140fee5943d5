"""Conversion of OpenAI's and Anthropic's preference records to the common schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from meshwright.data.records.messages import MalformedRecord, Message, describe_value

# OpenAI's keys by the standard ones; those of `input` by their path.
OPENAI_PREFERENCE = {
    "prompt": "input.messages", "tools": "input.tools", "chosen": "preferred_output",
    "rejected": "non_preferred_output",
}  # fmt: skip
OPENAI_PREFERENCE_COLUMNS = ("input", "preferred_output", "non_preferred_output")
_HH_TURN = re.compile(r"\n\n(Human|Assistant): ?")  # Anthropic's helpful and harmless data


def is_openai_preference(record: Mapping[str, Any]) -> bool:
    """Return True for a preference record in OpenAI's schema: {"input": {"messages", "tools"}, "preferred_output",
    "non_preferred_output"}."""
    return "chosen" not in record and any(key in record for key in OPENAI_PREFERENCE_COLUMNS[1:])


def flatten_openai_preference(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return an OpenAI preference record in which the values of `input` have top-level keys, such as "input.messages".
    Raises `MalformedRecord` if `input` is no object."""
    given = record.get("input")
    if not isinstance(given, dict):
        held = "no key" if given is None else f"{describe_value(given)} under the key"
        raise MalformedRecord(f'has {held} "input"; it should be {{"messages": [...]}}')
    flat = {key: value for key, value in record.items() if key != "input"}
    return flat | {f"input.{key}": value for key, value in given.items()}


def split_turns(text: str, is_prompt: bool) -> tuple[Message, ...]:
    """Split a text with turns "Human:" and "Assistant:" (Anthropic) into messages; return () if it has no such turns.
    is_prompt: True: a last turn without text is left out; False: it is kept as an empty answer."""
    turns = _HH_TURN.split(text)
    if len(turns) <= 2 or turns[0].strip():
        return ()
    roles = ({"Human": "user", "Assistant": "assistant"}[name] for name in turns[1::2])
    found = [Message(*turn) for turn in zip(roles, map(str.strip, turns[2::2]), strict=True)]
    return tuple(found[:-1] if is_prompt and len(found) > 1 and not found[-1].content else found)
