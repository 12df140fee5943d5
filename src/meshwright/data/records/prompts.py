"""Separation of prompt and responses in records: the prompt is given separately, repeated in the responses, or their
common prefix."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

from meshwright.data.records.messages import MalformedRecord, Message

Turns: TypeAlias = tuple[Message, ...]
_SYSTEM = ("system", "developer")


def separate_prompt(prompt: Turns, branches: Sequence[Turns], keys: Sequence[str]) -> tuple[Turns, tuple[Turns, ...]]:
    """Remove the prompt from the beginning of each branch (continuation), where published records often repeat it;
    return (prompt, branches). White space around texts is ignored in the comparison. A system message at the beginning
    of a branch is moved to the prompt.

    keys: record keys of the prompt and of each branch, for errors. Raises `MalformedRecord` if a branch begins with
    other user turns, has another system message, or no turn after the prompt.
    """
    system, asked = _split_system(prompt)
    rests = []
    for key, branch in zip(keys[1:], branches, strict=True):
        own, rest = _split_system(branch)
        if system and own and _normalize(own) != _normalize(system):
            raise MalformedRecord(f'has two system messages, and that of "{key}" differs: remove one')
        system = system or own
        if asked and _normalize(rest[: len(asked)]) == _normalize(asked):
            rest = rest[len(asked) :]
        elif asked and any(
            turn.role == "user" for turn in itertools.takewhile(lambda turn: not _is_assistant_turn(turn), rest)
        ):
            raise MalformedRecord(
                f'has a turn of the user at the beginning of "{key}" that does not repeat "{keys[0]}": give what comes '
                f'before the answer once, in "{keys[0]}"'
            )
        if not rest:
            raise MalformedRecord(f'has no answer in "{key}" after the prompt')
        rests.append(rest)
    return (*system, *asked), tuple(rests)


def find_shared_prompt(chosen: Turns, rejected: Turns) -> tuple[Turns, tuple[Turns, ...]]:
    """Split the whole conversations `chosen` and `rejected` into (prompt, branches): the prompt is their common prefix,
    () if they have none; each branch keeps at least its last turn."""
    common = 0
    while common < min(len(chosen), len(rejected)) - 1 and chosen[common] == rejected[common]:
        common += 1
    return chosen[:common], (chosen[common:], rejected[common:])


def _split_system(turns: Turns) -> tuple[Turns, Turns]:
    """Split turns into (leading system messages, the other turns)."""
    count = len([*itertools.takewhile(lambda turn: turn.role in _SYSTEM, turns)])
    return turns[:count], turns[count:]


def _is_assistant_turn(turn: Message) -> bool:
    """Return True if the role of the message `turn` is "assistant"."""
    return turn.role == "assistant"


def _normalize(turns: Turns) -> list[Any]:
    """Return role and texts of each of `turns`, without surrounding white space, for comparison."""
    return [(turn.role, *(text.strip() for text in turn.list_texts())) for turn in turns]
