"""Prompts of records: given beside the answers, repeated in them, or only the beginning that two answers share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

from meshwright.data.records.messages import MalformedRecord, Message

Turns: TypeAlias = tuple[Message, ...]
_SYSTEM = ("system", "developer")


def separate_prompt(prompt: Turns, branches: Sequence[Turns], keys: Sequence[str]) -> tuple[Turns, tuple[Turns, ...]]:
    """Return (prompt, branches) in which no branch repeats the prompt, as published records do; white space counts for
    nothing in this. A system message that branches begin with becomes that of the prompt.

    keys: those of the prompt and of each branch, for errors. Raises `MalformedRecord` if a branch begins with other
    turns of the user, has another system message, or no turn after the prompt.
    """
    system, asked = _split_system(prompt)
    rests = []
    for key, branch in zip(keys[1:], branches, strict=True):
        own, rest = _split_system(branch)
        if system and own and _describe(own) != _describe(system):
            raise MalformedRecord(f'has two system messages, and that of "{key}" differs: remove one')
        system = system or own
        if asked and _describe(rest[: len(asked)]) == _describe(asked):
            rest = rest[len(asked) :]
        elif asked and any(turn.role == "user" for turn in itertools.takewhile(lambda turn: not _answers(turn), rest)):
            raise MalformedRecord(
                f'has a turn of the user at the beginning of "{key}" that does not repeat "{keys[0]}": give what comes '
                f'before the answer once, in "{keys[0]}"'
            )
        if not rest:
            raise MalformedRecord(f'has no answer in "{key}" after the prompt')
        rests.append(rest)
    return (*system, *asked), tuple(rests)


def find_shared_prompt(chosen: Turns, rejected: Turns) -> tuple[Turns, tuple[Turns, ...]]:
    """Return (prompt, branches) of two whole conversations: the prompt is their common beginning, () if there is none;
    each branch keeps its last turn.
    """
    common = 0
    while common < min(len(chosen), len(rejected)) - 1 and chosen[common] == rejected[common]:
        common += 1
    return chosen[:common], (chosen[common:], rejected[common:])


def _split_system(turns: Turns) -> tuple[Turns, Turns]:
    """Return (system messages at the beginning, the other turns)."""
    count = len([*itertools.takewhile(lambda turn: turn.role in _SYSTEM, turns)])
    return turns[:count], turns[count:]


def _answers(turn: Message) -> bool:
    """Return True for a turn of the assistant."""
    return turn.role == "assistant"


def _describe(turns: Turns) -> list[Any]:
    """Return roles and texts of turns without white space around them."""
    return [(turn.role, *(text.strip() for text in turn.list_texts())) for turn in turns]
