"""Trees of messages, as OpenAssistant publishes them, flattened to conversations.

A tree has a prompt and replies to it, replies to these, and so on; each path from the prompt to a leaf is a
conversation (Köpf et al. 2023, arXiv:2304.07327, section 3). Paths share their first messages: an assistant turn is
trained on in the first conversation that has it, and is context in the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from meshwright.data.records.messages import MalformedRecord, Message, MessageFormat, describe_value

MAX_MESSAGES = 10_000  # of a tree
_USED = ("replies", "parent_id", "message_id", "deleted", "review_result", "rank")  # in addition to the message itself
ParsedRecord: TypeAlias = tuple[str, Any, str | None]  # as in `record_files`


def is_tree(record: Mapping[str, Any]) -> bool:
    """Return True if a record is a tree of messages with alternative replies (OpenAssistant): {"message_tree_id",
    "prompt": {"text", "role", "replies"}}."""
    return isinstance(record.get("prompt"), dict) and "replies" in record["prompt"]


def list_conversations(
    record: Mapping[str, Any], messages: MessageFormat, unused: set[str]
) -> list[tuple[Message, ...]]:
    """List the conversations in a tree of messages: its paths from the root to a leaf, cut after their last assistant
    turn; there may be none. A path ends before a message that was deleted or that reviewers rejected.

    record: the tree as JSON. messages: field names and roles of the messages. unused: set to which ignored keys are
    added. Raises `MalformedRecord` for a malformed message, or more than 10,000 messages.
    """
    found: list[tuple[Message, ...]] = []
    seen: set[int] = set()  # assistant turns that are trained on
    waiting: list[tuple[dict[str, Any], tuple[Message, ...], tuple[int, ...], str]] = []
    if _is_accepted(record["prompt"]):
        waiting.append((record["prompt"], (), (), "prompt"))
    count = total = 0
    while waiting:
        node, before, numbers, where = waiting.pop()
        count += 1
        if count > MAX_MESSAGES:
            raise MalformedRecord(f"has a tree of more than {MAX_MESSAGES:,} messages")
        plain = {key: value for key, value in node.items() if key not in _USED} if isinstance(node, dict) else node
        way, numbers = (*before, messages.parse(plain, where, "prompt", unused)), (*numbers, count)
        replies = node.get("replies") or []
        if not isinstance(replies, list):
            raise MalformedRecord(f"{where}.replies is {describe_value(replies)}, not a list of messages")
        good = [(at, one) for at, one in enumerate(replies) if not isinstance(one, dict) or _is_accepted(one)]
        good.sort(key=lambda reply: _get_rank(reply[1]))
        waiting += [(one, way, numbers, f"{where[:80]}.replies[{at}]") for at, one in reversed(good)]
        if not good:
            while way and way[-1].role != "assistant":
                way, numbers = way[:-1], numbers[:-1]
            total += len(way)
            if total > 10 * MAX_MESSAGES:
                raise MalformedRecord(f"has a tree of more than {10 * MAX_MESSAGES:,} messages in its conversations")
            if way and numbers[-1] not in seen:
                found.append(
                    tuple(
                        turn._replace(trained=False) if turn.role == "assistant" and number in seen else turn
                        for turn, number in zip(way, numbers, strict=True)
                    )
                )
                seen.update(number for turn, number in zip(way, numbers, strict=True) if turn.role == "assistant")
    return found


def _is_accepted(reply: Mapping[str, Any]) -> bool:
    """Return False for a reply that was deleted or that reviewers rejected."""
    return not reply.get("deleted") and reply.get("review_result") is not False


def _get_rank(reply: Any) -> float:
    """Return the rank of a reply among its siblings, 0 for the best, infinity for replies without a rank."""
    rank = reply.get("rank") if isinstance(reply, dict) else None
    return rank if isinstance(rank, int | float) else float("inf")


def group_rows(records: Iterable[ParsedRecord]) -> Iterator[ParsedRecord]:
    """Group table rows that hold one message each ("message_id", "parent_id") to trees of messages. Consecutive rows
    with the same "message_tree_id" become one record, at the position of the first of these rows. Other records are
    yielded unchanged. A message without its parent, a cycle, or two rows with the same ID are reported as the tree's
    problem."""
    rows: list[dict[str, Any]] = []
    place = ""
    for position, value, problem in records:
        is_row = isinstance(value, dict) and {"message_id", "parent_id", "text", "role"} <= value.keys()
        if rows and not (is_row and _continues_tree(rows[0], value)):
            yield _build_tree(rows, place)
            rows = []
        if not is_row:
            yield position, value, problem
            continue
        place = place if rows else position
        rows.append(value if len(rows) <= MAX_MESSAGES else {})
    if rows:
        yield _build_tree(rows, place)


def _continues_tree(first: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Return True if `row` belongs to the tree of messages that begins with the row `first`: both have the same
    "message_tree_id" or, if there is no such ID, `row` has a parent.
    """
    if "message_tree_id" in first or "message_tree_id" in row:
        return bool(first.get("message_tree_id") == row.get("message_tree_id"))
    return row["parent_id"] is not None


def _build_tree(rows: list[dict[str, Any]], position: str) -> ParsedRecord:
    """Build the tree of messages from `rows` (messages with IDs of their parents). Return the record (`position`, tree,
    None), or (`position`, None, problem) if the rows form no tree."""
    if len(rows) > MAX_MESSAGES:
        return position, None, f"begins a tree of more than {MAX_MESSAGES:,} messages"
    nodes = {row["message_id"]: {**row, "replies": []} for row in rows if isinstance(row["message_id"], str | int)}
    if len(nodes) < len(rows):
        return position, None, "begins a tree in which two messages have one message_id"
    roots = []
    for node in nodes.values():
        parent = node["parent_id"]
        if parent is None:
            roots.append(node)
        elif not isinstance(parent, str | int) or parent not in nodes:
            return position, None, f"begins a tree in which message {node['message_id']} has no parent {parent}"
        else:
            nodes[parent]["replies"].append(node)
    reached, waiting = 0, list(roots)
    while waiting:
        reached += 1
        waiting += waiting.pop()["replies"]
    if len(roots) != 1 or reached < len(nodes):
        wrong = "messages that reply to each other in a circle" if reached < len(nodes) else f"{len(roots)} prompts"
        return position, None, f"begins a tree with {wrong}; it should have one prompt, whose parent_id is null"
    return position, {"message_tree_id": rows[0].get("message_tree_id"), "prompt": roots[0]}, None
