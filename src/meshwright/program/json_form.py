"""JSON form of collective and pipeline programs: a header, and one list per step column with one entry per step.

{"dialect": "collective", "format": 1, "operation": "all-reduce", "algorithm": "ring", "ranks": 2, ...,
 "steps": {"rank": [0, 0, ...], "group": [0, 0, ...], "kind": ["send", "reduce", ...], ...}}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import IntEnum
from itertools import chain
from typing import Any, TypeVar

import numpy as np

from meshwright.errors import UserError
from meshwright.limits import shorten
from meshwright.names import unknown
from meshwright.program import collective, pipeline
from meshwright.program.collective import CollectiveProgram
from meshwright.program.contract import check_header
from meshwright.program.order import Integers
from meshwright.program.pipeline import PipelineProgram

Program = CollectiveProgram | PipelineProgram

_FORMAT = 1
_COLLECTIVE = {"operation": "", "algorithm": "", "ranks": 0, "chunks": 0, "root": 0, "scratch": 0, "reduction": "sum"}
_PIPELINE = {"name": "", "ranks": 0, "micro_batches": 0, "placement": ()}
_OPTIONAL = ("root", "scratch", "reduction")
_COLUMNS = {
    "collective": ("rank", "group", "kind", "slot", "count", "peer", "source"),
    "pipeline": ("rank", "group", "kind", "stage", "replica", "micro_batch", "component"),
}
_WORDS: dict[tuple[str, str], type[IntEnum]] = {
    ("collective", "kind"): collective.Kind,
    ("pipeline", "kind"): pipeline.Kind,
    ("pipeline", "component"): pipeline.Component,
}
_MAX_INTEGER = 2**31 - 1

T = TypeVar("T")


def to_json_dict(program: Program) -> dict[str, object]:
    """Convert a collective program or pipeline schedule to a JSON object: header fields such as "ranks" by name, and
    under "steps" one list per step column. `from_json_dict` reverses it."""
    dialect = "collective" if isinstance(program, CollectiveProgram) else "pipeline"
    header = {name: getattr(program, name) for name in (_COLLECTIVE if dialect == "collective" else _PIPELINE)}
    if "placement" in header:
        header["placement"] = [list(stages) for stages in header["placement"]]
    steps = {}
    for name in _COLUMNS[dialect]:
        column = getattr(program.steps, name).tolist()
        if words := _WORDS.get((dialect, name)):
            words_by_number = _list_words(words)
            column = [words_by_number[number] for number in column]
        steps[name] = column
    return {"dialect": dialect, "format": _FORMAT, **header, "steps": steps}


def format_json(program: Program) -> str:
    """Return a collective program or pipeline schedule as JSON text, with one line for each step column."""
    value = to_json_dict(program)
    steps = value.pop("steps")
    assert isinstance(steps, dict)
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items()]
    columns = [f"    {json.dumps(name)}: {json.dumps(column)}" for name, column in steps.items()]
    return "{\n" + ",\n".join(lines) + ',\n  "steps": {\n' + ",\n".join(columns) + "\n  }\n}\n"


def from_json_dict(value: object, where: str = "program") -> Program:
    """Build a collective or pipeline program from the parsed JSON object `value`. where: prefix of error messages.

    Raises `UserError` that names the invalid key.
    """
    table = _require_object(value, where)
    dialect = table.get("dialect")
    if not isinstance(dialect, str) or dialect not in _COLUMNS:
        raise UserError(f'{where}: "dialect" should be "collective" or "pipeline", not {_format_value(dialect)}')
    header = dict(_COLLECTIVE if dialect == "collective" else _PIPELINE)
    _refuse_unknown_keys(table, ("dialect", "format", *header, "steps"), where)
    if table.get("format") != _FORMAT or isinstance(table.get("format"), bool):
        raise UserError(f'{where}: "format" should be {_FORMAT}, not {_format_value(table.get("format"))}')
    for name, usual in header.items():
        if name in table:
            header[name] = _require_type(table[name], usual, f'{where}: "{name}"')
        elif name not in _OPTIONAL:
            raise UserError(f'{where}: "{name}" is missing')
    columns = _parse_columns(table.get("steps"), dialect, f'{where}: "steps"')
    if dialect == "collective":
        return _build_collective(header, columns, where)
    return _build_pipeline(header, columns, where)


def _build_collective(header: Mapping[str, Any], columns: dict[str, Integers], where: str) -> CollectiveProgram:
    """Build a collective program from the header and step columns of its JSON form; raises `UserError` for invalid
    values.

    header: keys such as `operation` and `ranks`. columns: column name -> array [steps]. where: prefix of error
    messages.
    """
    values = dict(header)
    algorithm = values.pop("algorithm")
    if algorithm != " ".join(algorithm.split()) or "#" in algorithm or not algorithm:
        raise UserError(
            f'{where}: "algorithm" should be a name on one line without "#", not {_format_value(algorithm)}'
        )
    check_header(**values, where=where)
    _check_range(columns, "rank", values["ranks"], where)
    _check_group_order(columns, where)
    return CollectiveProgram(**values, algorithm=algorithm, steps=collective.Steps.from_unsorted(**columns))


def _build_pipeline(header: Mapping[str, Any], columns: dict[str, Integers], where: str) -> PipelineProgram:
    """Build a pipeline program from the header and step columns of its JSON form; raises `UserError` for invalid
    values.

    header: keys such as `name` and `placement`. columns: column name -> array [steps]. where: prefix of error messages.
    """
    name, ranks, micro_batches = header["name"], header["ranks"], header["micro_batches"]
    for key, number in (("ranks", ranks), ("micro_batches", micro_batches)):
        if number < 1:
            raise UserError(f'{where}: "{key}" is {number}; it must be at least 1')
    placement = _parse_placement(header["placement"], ranks, f'{where}: "placement"')
    for column, size in (
        ("rank", ranks),
        ("stage", len(placement[0])),
        ("replica", len(placement)),
        ("micro_batch", micro_batches),
    ):
        _check_range(columns, column, size, where)
    _check_group_order(columns, where)
    rows = np.stack([columns[column] for column in _COLUMNS["pipeline"]], axis=1)
    return pipeline.build_program(name, ranks, micro_batches, placement, rows)


def _parse_placement(value: object, ranks: int, where: str) -> pipeline.Placement:
    """Return the rank of each stage, indexed by replica, then by stage, from JSON lists of ranks (`value`); raises
    `UserError` with prefix `where`.

    ranks: number of ranks of the program.
    """
    form = "should be one list of ranks for each replica, one entry a stage"
    if not isinstance(value, list) or not value or not all(isinstance(stages, list) and stages for stages in value):
        raise UserError(f"{where} {form}, not {_format_value(value)}")
    for rank in chain.from_iterable(value):
        if not isinstance(rank, int) or isinstance(rank, bool):
            raise UserError(f"{where}: {_format_value(rank)} is not a rank; ranks are 0 to {ranks - 1}")
    if error := pipeline.find_placement_error(value, ranks):
        raise UserError(f"{where}: {error[1]}")
    return tuple(tuple(stages) for stages in value)


def _parse_columns(value: object, dialect: str, where: str) -> dict[str, Integers]:
    """Return column name -> array [steps] from the JSON object `value`; words such as `send` become the numbers of
    `Kind`.

    dialect: kind of program, `collective` or `pipeline`. where: prefix of error messages. Raises `UserError` for
    missing or invalid columns.
    """
    table = _require_object(value, where)
    names = _COLUMNS[dialect]
    _refuse_unknown_keys(table, names, where)
    columns: dict[str, Integers] = {}
    for name in names:
        column, at = table.get(name), f'{where}: "{name}"'
        if not isinstance(column, list):
            raise UserError(f"{at} should be a list with one entry a step, not {_format_value(column)}")
        if words := _WORDS.get((dialect, name)):
            numbers = {word: number for number, word in _list_words(words).items()}
            for number, entry in enumerate(column):
                if not isinstance(entry, str) or entry not in numbers:
                    raise UserError(f"{at}, entry {number}: {unknown(name, str(entry), numbers)}")
            column = [numbers[word] for word in column]
        wrong = next(
            (i for i, n in enumerate(column) if type(n) is not int or not -_MAX_INTEGER <= n <= _MAX_INTEGER), None
        )
        if wrong is not None:
            raise UserError(f"{at}, entry {wrong} should be an integer, not {_format_value(column[wrong])}")
        columns[name] = np.array(column, np.int64)
        if len(column) != len(columns[names[0]]):
            raise UserError(f'{at} has {len(column)} entries and "{names[0]}" has {len(columns[names[0]])}')
    return columns


def _check_range(columns: Mapping[str, Integers], name: str, size: int, where: str) -> None:
    """Raise `UserError` with prefix `where` unless all entries of the column `name` are in 0 .. size - 1.

    columns: column name -> array [steps].
    """
    bad = (columns[name] < 0) | (columns[name] >= size)
    if bad.any():
        entry = int(np.argmax(bad))
        raise UserError(
            f'{where}: "steps": "{name}", entry {entry} is {columns[name][entry]}; it should be 0 to {size - 1}'
        )


def _check_group_order(columns: Mapping[str, Integers], where: str) -> None:
    """Raise `UserError` with prefix `where` if, on some rank, a step has a lower group number than the step before it.
    A group is steps that run together.

    columns: column name -> array [steps]; `rank` and `group` are used.
    """
    by_rank = np.argsort(columns["rank"], kind="stable")
    rank, group = columns["rank"][by_rank], columns["group"][by_rank]
    back = (np.diff(group, prepend=0) < 0) & (np.diff(rank, prepend=-1) == 0)
    if back.any():
        raise UserError(
            f'{where}: "steps": "group", entry {by_rank[int(np.argmax(back))]} is lower than that of the '
            "previous step of its rank; list the steps of a rank in execution order"
        )


def _require_object(value: object, where: str) -> dict[str, object]:
    """Return the value if it is a JSON object, else raise `UserError`. where: name of the value in the message."""
    if not isinstance(value, dict):
        raise UserError(f"{where} should be a JSON object, not {_format_value(value)}")
    return value


def _refuse_unknown_keys(table: Mapping[str, object], known: Iterable[str], where: str) -> None:
    """Raise `UserError` for the first key of the JSON object `table` that is not in `known`; the message names the
    nearest known key. where: prefix of the message."""
    known = list(known)
    for name in table:
        if name not in known:
            raise UserError(f"{where}: {unknown('key', name, known)}")


def _require_type(value: object, like: T, where: str) -> T:
    """Return `value` if it has the type of the example value `like` (an int, str or list), else raise `UserError`.
    where: name of the value in the message."""
    kind, words = {int: (int, "an integer"), str: (str, "a string")}.get(type(like), (list, "a list"))
    if type(value) is not kind or (isinstance(value, int) and abs(value) > _MAX_INTEGER):
        raise UserError(f"{where} should be {words}, not {_format_value(value)}")
    return value  # type: ignore[return-value]


def _list_words(words: type[IntEnum]) -> dict[int, str]:
    """Return {number: word} of the members of the enumeration `words`, with each word as the JSON form writes it, such
    as `weight-gradient`."""
    return {int(word): word.name.lower().replace("_", "-") for word in words}


def _format_value(value: object) -> str:
    """Return the text of a JSON value for an error message, shortened if it is long."""
    return shorten(json.dumps(value, default=str))
