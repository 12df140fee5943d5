"""Text output of the samples of `meshwright data show`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshwright.cli.tables import make_table
from meshwright.terminal import escape_control_characters

if TYPE_CHECKING:
    from rich.text import Text

_LINES = 10  # maximum lines of a document
_TRAINED, _SPECIAL = "bold green", "magenta"


def make_role_table(marks: Mapping[str, Any]) -> Any:
    """Format the numbers of turns, tokens and tokens that are trained on (loss mask) of each role in chat data as a
    rich table. marks: these numbers, as `count_tokens_by_role` returns them."""
    from rich.console import Group
    from rich.text import Text

    table = make_table("author", "turns", "tokens", "trained tokens", "trained")
    for author, tokens in marks["tokens"].items():
        trained = marks["trained_tokens"].get(author, 0)
        turns = f"{marks['turns'][author]:,}" if author in marks["turns"] else "-"
        table.add_row(author, turns, f"{tokens:,}", f"{trained:,}", f"{trained / tokens:.0%}")
    return Group(table, Text(f"{marks['spans']:,} spans of trained tokens, before examples are cut to a row"))


def make_sample_table(row: Mapping[str, Any]) -> Any:
    """Format one training sample as a rich table: for each document packed into it, the range of its token positions
    and its text. row: the sample's entry in the result of `describe_samples`."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    masked = set(row["masked_targets"])
    length = row["documents"][-1]["stop"] + row.get("padding", 0)
    title = Text.assemble(
        (f"\nsample {row['sample']:,}", "bold"), f": {length:,} tokens, {row['target_tokens']:,} of them have a target"
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for number, document in enumerate(row["documents"]):
        colour = ("cyan", "yellow")[number % 2]
        place = f"{document['start']}-{document['stop'] - 1}"
        place += f" {document['label']}" if "label" in document else ""
        for line in (
            _format_example_lines(document)
            if "parts" in document
            else map(Text, _shorten_lines(escape_control_characters(document["text"])))
        ):
            table.add_row(Text(place, style=colour), Text.assemble(("│ ", colour), line))
            place = ""
        if "parts" not in document and document["stop"] - 1 in masked:
            table.add_row("", Text("┴ no target: another document follows", style="red"))
    if padding := row.get("padding"):
        table.add_row("", Text(f"┴ {padding:,} tokens of padding", style="red"))
    return Group(title, table)


def _format_example_lines(document: Mapping[str, Any]) -> list[Text]:
    """Format one instruction or chat example as lines of rich text: tokens that are trained on in green between ⟦ and
    ⟧, special tokens in magenta, the chat template's own text dim. A long example is shortened in the middle.

    document: entry of "documents" in the result of `describe_samples` that has "parts", the example's pieces of text.
    """
    from rich.text import Text

    whole = Text()
    parts = document["parts"]
    for number, part in enumerate(parts):
        begins = part["trained"] and not (number and parts[number - 1]["trained"])
        ends = part["trained"] and not (number + 1 < len(parts) and parts[number + 1]["trained"])
        style = _TRAINED if part["trained"] else "dim" if part["author"] == "template" else ""
        whole.append("⟦" * begins, style=_TRAINED)
        whole.append(escape_control_characters(part["text"]), style=_SPECIAL if part["special"] else style)
        whole.append("⟧" * ends, style=_TRAINED)
    lines = list(whole.split("\n", allow_blank=True))
    if len(lines) <= 2 * _LINES:
        return lines
    return [*lines[:_LINES], Text(f"⋯ {len(lines) - 2 * _LINES} more lines ⋯"), *lines[-_LINES:]]


def _shorten_lines(text: str) -> list[str]:
    """Return the lines of `text`. If there are more than `_LINES`, the middle ones are replaced by one line that states
    how many are left out."""
    lines = text.split("\n")
    if len(lines) <= _LINES:
        return lines
    half = (_LINES - 1) // 2
    return [*lines[:half], f"⋯ {len(lines) - 2 * half} more lines ⋯", *lines[-half:]]
