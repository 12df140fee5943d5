"""Parsed training examples, and the choice of the reasoning that they keep."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from meshwright.data.records.messages import THOUGHT, Message, join_texts, map_strings


class Example(NamedTuple):
    """A parsed training example: a prompt and its continuations (`branches`).

    A preference has two branches, the chosen and the rejected one; other records have one branch. Assistant turns in
    branches are responses to be trained on; assistant turns in the prompt are context. label: for an unpaired record
    True if its response is desirable; None for other records. tools: JSON schemas of the functions that the assistant
    may call, as chat templates expect them. unused: ignored keys of the record and its messages, such as "source" and
    "messages.id". variables: further variables of the chat template.
    """

    prompt: tuple[Message, ...]
    branches: tuple[tuple[Message, ...], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    unused: frozenset[str] = frozenset()
    label: bool | None = None
    variables: Mapping[str, Any] = {}

    def encode_content(self) -> bytes:
        """Serialize all texts and template inputs of the example to JSON for duplicate detection; results are equal for
        records that differ only in white space around their texts. Raises UnicodeEncodeError if a string has a lone
        surrogate."""
        held = [self.prompt, self.branches, self.tools, self.label, self.variables]
        text = json.dumps(map_strings(held, str.strip), sort_keys=True, ensure_ascii=False, default=str)
        return text.encode()

    def join_texts(self) -> str:
        """Join the texts of all messages by blank lines, for cleaning rules and counts."""
        return join_texts((*self.prompt, *(message for branch in self.branches for message in branch)))

    def rewrite_texts(self, rewrite: Callable[[str], str]) -> Example:
        """Return a copy in which `rewrite(text)` replaces each text of every message."""
        return self.change_messages(lambda message: message.rewrite_texts(rewrite))

    def change_messages(self, change: Callable[[Message], Message]) -> Example:
        """Return a copy in which each message is replaced by `change(message)`."""
        prompt, *branches = (tuple(map(change, messages)) for messages in (self.prompt, *self.branches))
        return self._replace(prompt=prompt, branches=tuple(branches))


def select_reasoning(example: Example, thinking: str) -> list[Example]:
    """Drop the reasoning of assistant turns that the setting `thinking` does not keep; return the resulting examples.

    thinking: "template": keep all reasoning, the template decides what it renders. "none": drop all reasoning. "last":
    keep the reasoning of the last assistant turn only. "all": return one example for each assistant turn, which ends
    with this turn, because templates render only the reasoning of the last turn. All settings but "all" return one
    example.
    """
    if thinking == "none":
        return [example.change_messages(_drop_reasoning)]
    if thinking == "last":
        branches = tuple(map(_keep_last_reasoning, example.branches))
        return [example._replace(prompt=tuple(map(_drop_reasoning, example.prompt)), branches=branches)]
    if thinking == "all" and any(map(_has_reasoning, branch := example.branches[0])):
        context = [one._replace(trained=False) if one.role == "assistant" else one for one in branch]
        ends = [at for at, one in enumerate(branch) if one.role == "assistant" and one.trained is not False]
        return [example._replace(branches=((*context[:end], branch[end]),)) for end in ends] or [example]
    return [example]


def _keep_last_reasoning(branch: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return a copy of `branch` (the continuation of a prompt) in which only the last assistant turn keeps its
    reasoning."""
    last = max((at for at, message in enumerate(branch) if message.role == "assistant"), default=0)
    return tuple(message if at == last else _drop_reasoning(message) for at, message in enumerate(branch))


def _has_reasoning(message: Message) -> bool:
    """Return True if an assistant's message has reasoning, in a separate field or between <think> and </think>."""
    marked = message.role == "assistant" and THOUGHT.match(message.content) is not None
    return marked or "reasoning_content" in message.fields


def _drop_reasoning(message: Message) -> Message:
    """Return a message without reasoning."""
    if not _has_reasoning(message):
        return message
    fields = {key: value for key, value in message.fields.items() if key != "reasoning_content"}
    thought = THOUGHT.match(message.content)
    return message._replace(fields=fields).cut_content(thought.end() if thought else 0)
