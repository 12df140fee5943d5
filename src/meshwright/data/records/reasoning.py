"""Choice of the reasoning that examples keep (see `DataRecipe.thinking`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.data.records.messages import THOUGHT, Message

if TYPE_CHECKING:
    from meshwright.data.records.conversations import Example


def select_reasoning(example: Example, thinking: str) -> list[Example]:
    """Return the example with the reasoning that `thinking` selects (see `DataRecipe.thinking`). With "all" a
    conversation with reasoning becomes several: each assistant turn ends an example of its own, as it does when the
    model is used, because templates leave out the reasoning of earlier turns.
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
    """Return a branch without the reasoning of assistant turns before the last one."""
    last = max((at for at, message in enumerate(branch) if message.role == "assistant"), default=0)
    return tuple(message if at == last else _drop_reasoning(message) for at, message in enumerate(branch))


def _has_reasoning(message: Message) -> bool:
    """Return True if an assistant's message has reasoning, in its own field or between <think> and </think>."""
    marked = message.role == "assistant" and THOUGHT.match(message.content) is not None
    return marked or "reasoning_content" in message.fields


def _drop_reasoning(message: Message) -> Message:
    """Return a message without reasoning."""
    if not _has_reasoning(message):
        return message
    fields = {key: value for key, value in message.fields.items() if key != "reasoning_content"}
    thought = THOUGHT.match(message.content)
    return message._replace(fields=fields).cut_content(thought.end() if thought else 0)
