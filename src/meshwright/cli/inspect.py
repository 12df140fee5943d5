"""`meshwright inspect`: files, tensors and statistics of a model, and which rank of a layout holds what."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from meshwright.cli import plumbing
from meshwright.cli.plumbing import json_option, print_progress, result_printer
from meshwright.cli.tables import FittedTable, make_fact_table
from meshwright.terminal import escape_in_table, print_message, render_tables

_WIDTH = 160
_OPTIONAL = (("zeros",), ("mean", "std"), ("first values",), ("min", "max"), ("type",), ("count",))
"""Columns of tensors that a narrow terminal does not show, least important first."""


@plumbing.command(
    "inspect",
    "meshwright inspect runs/quickstart",
    "meshwright inspect models/llama --name '*.layers.0.*' --values 8",
    'meshwright inspect models/llama --layout "pp2 tp2 zero3" --no-statistics',
    "meshwright inspect model-00001-of-00003.safetensors --json",
)
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--name", "names", multiple=True, metavar="GLOB", help="Show only matching tensors; may be repeated.")
@click.option("--tensors", "every", is_flag=True, help="Print a line for each tensor, also if layers are alike.")
@click.option("--layout", help="Show the layers and bytes of each rank under this layout.")
@click.option("--sequence", type=click.IntRange(min=1), default=2048, help="Tokens, for which stages are balanced.")
@click.option("--values", type=click.IntRange(0, 1000), default=3, help="Number of first values to print per tensor.")
@click.option("--statistics/--no-statistics", default=True, help="Read all values, or the headers alone.")
@json_option
def command(
    path: Path, names: tuple[str, ...], every: bool, layout: str | None, sequence: int, values: int, statistics: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Show what PATH contains: a run directory (its newest complete checkpoint), a checkpoint, a Hugging Face
    directory, or one file of it. Tensors are read one at a time and in blocks, which needs little memory. Tensors that
    differ only in the numbers of layers and experts share a line, unless --tensors or --name asks for each.

    \f
    names: globs of tensor names to show, empty for all. every: a line for each tensor. layout: also show the layers and
    bytes that each rank of this layout would hold. sequence: tokens per sequence, for which the layout's pipeline
    stages are balanced. values: number of first values of each tensor to show. statistics: read all values (else the
    headers only). as_json: print JSON.
    """
    from meshwright.inspection.report import inspect_model

    with result_printer(as_json) as answer:
        document = inspect_model(
            path, names=names, layout=layout, sequence=sequence, values=values if statistics else None,
            progress=_print_progress, log=print_message,
        )  # fmt: skip
        tensors = document["tensors"] if every or names else _merge_alike(document["tensors"])
        parts = [_make_totals_table(document), "", _make_tensor_table(tensors)]
        if layout is not None:
            parts += ["", _make_placement_table(document["placement"])]
        answer(document, render_tables(parts, _WIDTH))


def _print_progress(done: int, total: int) -> None:
    """Print the progress of reading tensors on one line of the terminal, if there is one. done, total: bytes."""
    print_progress(f"reading {done / max(1, total):.0%} of {_format_bytes(total)}", done == total)


def _make_totals_table(document: Mapping[str, Any]) -> Any:
    """Format the totals of a model as a rich table: architecture, files, tensors, values that are not finite. document:
    result of `inspect_model`."""
    from rich.text import Text

    facts = make_fact_table()
    facts.add_row("path", escape_in_table(document["path"]))
    if document["family"]:
        facts.add_row("architecture", f"{document['family']}, {document['parameters_of_config']:,} parameters")
    types = ", ".join(f"{dtype} {_format_bytes(size)}" for dtype, size in document["bytes_by_type"].items())
    facts.add_row("tensors", f"{document['tensors_in_all']:,} of {document['elements']:,} elements: {types}")
    for file in document["files"]:
        facts.add_row(
            "file",
            f"{escape_in_table(file['file'])}: {file['tensors']:,} tensors, {_format_bytes(file['bytes'])}",
        )
    if document["not_in_index"]:
        facts.add_row("not in the index", escape_in_table(", ".join(document["not_in_index"])))
    if document["config_problem"]:
        facts.add_row("config.json", Text(escape_in_table(document["config_problem"]), style="red"))
    if found := document["not_finite"]:
        names = ", ".join(list(found)[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        facts.add_row("not finite", Text(f"{sum(found.values()):,} values, in {escape_in_table(names)}", style="red"))
    return facts


def _make_tensor_table(tensors: Sequence[Mapping[str, Any]]) -> Any:
    """Format tensors as a rich table, one line each: type, shape, size, statistics, first values. tensors: entries of
    `inspect_model`, perhaps merged by `_merge_alike`."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tensor", overflow="fold")
    read = any(tensor.get("statistics") for tensor in tensors)
    columns = ["type", "shape", "size", *(["mean", "std", "min", "max", "zeros"] if read else [])]
    if merged := any("count" in tensor for tensor in tensors):
        columns.insert(2, "count")
    for name in columns:
        table.add_column(name, justify="left" if name in ("type", "shape") else "right", no_wrap=True)
    if read and not merged:
        table.add_column("first values", overflow="fold")
    for tensor in tensors:
        shape = " × ".join(map(str, tensor["shape"])) or "scalar"
        cells: list[Any] = [
            escape_in_table(tensor["name"]),
            tensor["type"],
            shape,
            *((f"{tensor['count']:,}",) if merged else ()),
            _format_bytes(tensor["bytes"]),
        ]
        if found := tensor.get("statistics"):
            cells += [_format_number(found[key]) for key in ("mean", "std", "min", "max")]
            cells.append(f"{found['zeros']:,}")
            if merged:
                table.add_row(*cells)
                continue
            odd = [f"{found[key]:,} {word}" for key, word in (("nan", "NaN"), ("infinite", "infinite")) if found[key]]
            cells.append(Text.assemble(" ".join(map(_format_number, tensor["first"])), (" ".join(["", *odd]), "red")))
        table.add_row(*cells)
    return FittedTable(table, _OPTIONAL)


def _merge_alike(tensors: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Merge the entries of tensors that have equal type and shape and whose names differ only in numbers, such as one
    weight of all layers. Return one entry for each such set: its name with `*` in place of the numbers, "count" (number
    of tensors), the sum of their bytes, and the statistics over all their values. Entries are unchanged if no two
    match.

    tensors: entries of the result of `inspect_model`, one dict for each tensor.
    """
    alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for tensor in tensors:
        name = re.sub(r"(?<=\.)\d+(?=\.)", "*", tensor["name"])
        alike.setdefault((name, tensor["type"], *tensor["shape"]), []).append(tensor)
    if len(alike) == len(tensors):
        return list(tensors)
    merged: list[Mapping[str, Any]] = []
    for (name, *_), group in alike.items():
        one = {**group[0], "name": name, "count": len(group), "bytes": sum(tensor["bytes"] for tensor in group)}
        found = [tensor["statistics"] for tensor in group if tensor.get("statistics")]
        if found:
            one["statistics"] = {
                "min": min((each["min"] for each in found if each["min"] is not None), default=None),
                "max": max((each["max"] for each in found if each["max"] is not None), default=None),
                "zeros": sum(each["zeros"] for each in found), "mean": None, "std": None,
            }  # fmt: skip
            if all(each["mean"] is not None and each["std"] is not None for each in found):
                mean = fmean(each["mean"] for each in found)  # the tensors have equally many values
                square = fmean(each["std"] ** 2 + each["mean"] ** 2 for each in found)
                one["statistics"] |= {"mean": mean, "std": max(0.0, square - mean**2) ** 0.5}
        merged.append(one)
    return merged


def _make_placement_table(placement: Mapping[str, Any]) -> Any:
    """Format the contents of a layout's ranks (layers, other modules, bytes) as a rich table, one line for each set of
    ranks with the same contents. placement: entry "placement" of the result of `inspect_model`.
    """
    from rich.table import Table

    title = f"layout {placement['layout']}, parameters in {placement['precision']}"
    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    for name in ("ranks", "layers", "also"):
        table.add_column(name, overflow="fold")
    for name in ("parameters kept", "in training, AdamW"):
        table.add_column(name, justify="right", no_wrap=True)
    alike: dict[tuple[str, str, int, int], list[int]] = {}
    for rank in placement["ranks"]:
        alike.setdefault(_describe_rank_contents(rank), []).append(rank["rank"])
    for (layers, also, size, training), ranks in alike.items():
        table.add_row(_format_ranges(ranks), layers, also, _format_bytes(size), _format_bytes(training))
    return table


def _describe_rank_contents(rank: Mapping[str, Any]) -> tuple[str, str, int, int]:
    """Return the contents of a rank under a layout: (layers as text, other modules as text, bytes of its parameters,
    bytes of all its model states in training with AdamW). rank: the rank's entry in the placement of `inspect_model`.
    """
    also = [name for name in ("embedding", "head") if rank[name]]
    if "experts" in rank:
        also.append(f"experts {_format_ranges(rank['experts'])}")
    return _format_ranges(rank["layers"]), ", ".join(also), rank["bytes"], sum(rank["training_bytes"].values())


def _format_ranges(numbers: Sequence[int]) -> str:
    """Format ascending integers (`numbers`) as ranges: `0-3, 8`."""
    cuts = [0, *(at for at, (one, other) in enumerate(pairwise(numbers), 1) if other != one + 1), len(numbers)]
    runs = [(numbers[first], numbers[stop - 1]) for first, stop in pairwise(cuts) if stop > first]
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _format_number(value: float | int | bool | None) -> str:
    """Format `value`, a statistic of a tensor such as its mean, with four significant digits; None as `-`."""
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _format_bytes(count: float) -> str:
    """Format a number of bytes (`count`) in B, KiB, MiB or GiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
