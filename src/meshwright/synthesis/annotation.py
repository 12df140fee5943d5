"""To annotation tools and back: records as the JSON Lines of doccano and Prodigy, and what came of them.

Three tasks: `classify` (the labels of a record), `spans` (stretches of its text that perform an act), `rewrite` (a
better response). A row carries the name of its record, so what comes back finds it in the file that was exported.

doccano: backend/data_import/pipeline and data_export/pipeline of version 1.8 (text classification, sequence labelling,
sequence to sequence). Prodigy: prodi.gy/docs/api-interfaces (choice, spans_manual, text_input). Both count characters
of a text as Python does, by code points.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from meshwright.data.records.exchanges import Exchange, Record, exchange, record_names, with_response
from meshwright.errors import UserError
from meshwright.names import unknown
from meshwright.synthesis.speech_acts import LABELS, Annotation, Span, act_named, annotated, annotation_of, from_labels

TOOLS = ("doccano", "prodigy")
TASKS = ("classify", "spans", "rewrite")
NAME = "record"  # the key of a row that says which task it is, of which record
_PROMPT, _RESPONSE = "Prompt:\n", "\n\nResponse:\n"
# What a tool's row says in the task's own terms; all else of it is kept as the tool's.
_OWN = {
    "doccano": {"text", "label", "entities", NAME},
    "prodigy": {"text", "options", "accept", "spans", "tokens", "user_input", "answer", "config", "meta", NAME},
}
Value: TypeAlias = "frozenset[str] | tuple[Span, ...] | str"  # what an annotator says, by task


class Row(NamedTuple):
    """A row as it came back. answer: "labelled", or why it says nothing; value: what it says; fields: the tool's."""

    answer: str
    value: Value | None
    fields: dict[str, Any]


def shown(sides: Exchange) -> str:
    """The text of a record as an annotator reads it."""
    return f"{_PROMPT}{sides.prompt}{_RESPONSE}{sides.response}"


def export_rows(records: Sequence[tuple[str, Record]], tool: str, task: str) -> Iterator[Record]:
    """The rows of `tool` for (where, record) pairs, with the labels that they carry as a first suggestion."""
    check_names(tool, task)
    for (where, record), name in zip(records, record_names([record for _, record in records]), strict=True):
        sides = exchange(record, where)
        said = annotation_of(record, sides, where)
        # The same keys in every row: doccano reads them as a table, and would fill what is missing with nulls.
        row: Record = {"text": _task_text(task, sides), NAME: f"{task} {name}"}
        if tool == "doccano":
            if not row["text"]:
                raise UserError(f"{where}: the prompt is empty, which doccano refuses; leave the record out")
            yield {**row, "label": _doccano_label(task, said, sides)}
        else:
            own = said.tool.get(f"prodigy {task}")  # of one annotator's row: which of several it should be is not known
            kept = own[0] if isinstance(own, list) and len(own) == 1 and isinstance(own[0], dict) else {}
            yield {**row, **_prodigy_fields(task, said, sides), **kept}


def import_rows(
    records: Sequence[tuple[str, Record]],
    rows: Iterable[tuple[str, Record]],
    tool: str,
    leave_out_rejected: bool = False,
) -> tuple[list[Record], dict[str, Any]]:
    """The records with what the rows say of them, in their order, and a summary as JSON.

    A label or span holds where more than half of a record's annotators say so; where they are even, or no rewriting has
    more than half, the record is `disputed` and stays as it was. Summary: counts of `records`, `rows`, of rows by
    `answers` (labelled, unlabelled, unanswered, rejected, ignored); of records `labelled`, `changed` (by that), `left`
    (no row said anything), `rejected`, `left_out`, `several` (said by several annotators), `agreed` (all the same);
    `disputed`: their names.
    """
    check_names(tool, TASKS[0])
    names = record_names([record for _, record in records])
    places = {name: place for place, name in enumerate(names)}
    sides = [exchange(record, where) for where, record in records]
    before = [annotation_of(record, side, where) for (where, record), side in zip(records, sides, strict=True)]
    back: dict[int, list[Row]] = {}
    task = None
    read = 0
    for where, row in rows:
        named, name = _named(row, where)
        task = task or named
        if named != task:
            raise UserError(f"{where}: a row of the task {named} among rows of {task}; import them apart")
        if name not in places:
            raise UserError(f"{where}: no record is named {name}; give the records that were exported, as they were")
        place = places[name]
        _check_text(row, task, sides[place], where)
        back.setdefault(place, []).append(_READ[tool](row, task, sides[place], before[place], where))
        read += 1

    answers = dict.fromkeys(("labelled", "unlabelled", "unanswered", "rejected", "ignored"), 0)
    summary: dict[str, Any] = {"records": len(records), "rows": read, "task": task, "answers": answers}
    summary |= dict.fromkeys(("labelled", "changed", "left", "rejected", "left_out", "several", "agreed"), 0)
    summary["disputed"] = []
    kept: list[Record] = []
    for place, (where, record) in enumerate(records):
        came = back.get(place, [])
        for one in came:
            answers[one.answer] += 1
        values = [row.value for row in came if row.value is not None]
        rejected = not values and any(row.answer == "rejected" for row in came)
        decided = _decided(values)
        summary["rejected"] += rejected
        summary["left"] += not values and not rejected
        summary["several"] += len(values) > 1
        summary["agreed"] += len(values) > 1 and len(set(values)) == 1
        if values and decided is None:
            summary["disputed"].append(names[place])
        if decided is not None:
            fields = [row.fields for row in came if row.value is not None]
            changed = _with_value(record, decided, before[place], f"{tool} {task}", fields, where)
            summary["labelled"] += 1
            summary["changed"] += _said(before[place], sides[place], decided) != decided
            record = changed
        if rejected and leave_out_rejected:
            summary["left_out"] += 1
        else:
            kept.append(record)
    return kept, summary


def check_names(tool: str, task: str) -> None:
    """`UserError` unless both are known."""
    for kind, word, known in (("annotation tool", tool, TOOLS), ("task", task, TASKS)):
        if word not in known:
            raise UserError(unknown(kind, word, known))


def _task_text(task: str, sides: Exchange) -> str:
    return sides.prompt if task == "rewrite" else shown(sides)


def _doccano_label(task: str, said: Annotation, sides: Exchange) -> list[Any]:
    match task:
        case "classify":
            return list(said.labels())
        case "spans":
            return [[*_shown_at(span, sides), span.act] for span in said.spans or ()]
        case _:
            return [sides.response] if sides.response else []


def _prodigy_fields(task: str, said: Annotation, sides: Exchange) -> Record:
    match task:
        case "classify":
            options = [{"id": label, "text": label.replace(":", ": ").replace("-", " ")} for label in LABELS]
            return {"options": options, "accept": list(said.labels()), "config": {"choice_style": "multiple"}}
        case "spans":
            places = [(*_shown_at(span, sides), span.act) for span in said.spans or ()]
            return {"spans": [{"start": start, "end": end, "label": act} for start, end, act in places]}
        case _:
            return {"user_input": sides.response}


def _named(row: Record, where: str) -> tuple[str, str]:
    """The task and the record's name of a row."""
    task, _, name = str(row.get(NAME, "")).partition(" ")
    if task not in TASKS or not name:
        raise UserError(
            f'{where}: no "{NAME}" that says which record the row is of; only rows of data export come back'
        )
    return task, name


def _doccano_row(row: Record, task: str, sides: Exchange, before: Annotation, where: str) -> Row:
    label = row.get("label", row.get("entities"))
    if not isinstance(label, list):
        raise UserError(f'{where}: "label" is not a list, as doccano writes it')
    fields = {key: value for key, value in row.items() if key not in _OWN["doccano"]}
    suggested = _doccano_label(task, before, sides)
    if not label and (task == "rewrite" or not suggested):  # nobody was here, or nothing holds: it looks alike
        return Row("unlabelled", None, fields)
    if task != "rewrite":
        return Row("labelled", _value(row, task, label, sides, where), fields)
    texts = [text for text in label if text != sides.response] or label
    if len(texts) > 1 or not isinstance(texts[0], str):
        raise UserError(f"{where}: {len(texts)} new responses; leave one of them in doccano")
    return Row("labelled", texts[0], fields)


def _prodigy_row(row: Record, task: str, sides: Exchange, before: Annotation, where: str) -> Row:
    fields = {key: value for key, value in row.items() if key not in _OWN["prodigy"]}
    match row.get("answer"):
        case None:
            return Row("unanswered", None, fields)
        case "reject" | "ignore" as answer:
            return Row({"reject": "rejected", "ignore": "ignored"}[answer], None, fields)
        case "accept":
            pass
        case other:
            raise UserError(f'{where}: "answer" is {other!r}, neither accept, reject nor ignore')
    if task == "rewrite":
        text = row.get("user_input")
        if not isinstance(text, str):
            raise UserError(f'{where}: "user_input" is not a string; text_input writes it there')
        return Row("labelled", text, fields)
    if task == "classify" and "label" in row:
        raise UserError(f"{where}: one label to accept or reject; import the answers to the choice of data export")
    said = row.get("accept" if task == "classify" else "spans", [])
    if not isinstance(said, list):
        raise UserError(f'{where}: "{"accept" if task == "classify" else "spans"}" is not a list')
    return Row("labelled", _value(row, task, said, sides, where), fields)


_READ: dict[str, Callable[[Record, str, Exchange, Annotation, str], Row]]
_READ = {"doccano": _doccano_row, "prodigy": _prodigy_row}


def _check_text(row: Record, task: str, sides: Exchange, where: str) -> None:
    """`UserError` where the text is not the one that was exported, but for its line ends: its labels are of another."""
    text = _task_text(task, sides)
    if row.get("text") not in (text, text.replace("\r\n", "\n").replace("\r", "\n")):
        raise UserError(f"{where}: the text is not the one that was exported, so what is said of it is of another text")


def _value(row: Record, task: str, said: list[Any], sides: Exchange, where: str) -> Value:
    """The labels or spans of a row."""
    if task == "classify":
        if not all(isinstance(label, str) for label in said):
            raise UserError(f"{where}: a label is not a string; was this a project of another kind?")
        from_labels(set(said), where)  # which refuses a label that is none
        return frozenset(said)
    return tuple(sorted({_span(one, row["text"], sides, where) for one in said}))


def _span(one: Any, seen: str, sides: Exchange, where: str) -> Span:
    """A span of the text that came back as one of a side. What it has of the headings beside that side is left out."""
    if isinstance(one, dict):
        start, end = one.get("start", one.get("start_offset")), one.get("end", one.get("end_offset"))
        label = one.get("label")
    else:
        start, end, label = one if isinstance(one, list) and len(one) == 3 else (None, None, None)
    if type(start) is not int or type(end) is not int or not 0 <= start < end <= len(seen):
        raise UserError(f"{where}: a span is {start} to {end}, not inside the text of {len(seen)} characters")
    act = act_named(label, where)
    text = shown(sides)
    if seen != text:
        start, end = _before_line_ends(text, start), _before_line_ends(text, end)
    inside = []
    for side, first in _starts(sides).items():
        low, high = max(start, first), min(end, first + len(getattr(sides, side)))
        if low < high:
            inside.append(Span(side, low - first, high - first, act))
    if len(inside) != 1:
        where_to = "both sides" if inside else "neither side"
        raise UserError(
            f"{where}: the span {start} to {end} touches {where_to}; mark inside the prompt or the response"
        )
    return inside[0]


def _before_line_ends(text: str, place: int) -> int:
    """Where in `text` the character is that is number `place` once each of its line ends counts as one character."""
    at = 0
    while place > 0:
        at += 2 if text.startswith("\r\n", at) else 1
        place -= 1
    return at


def _starts(sides: Exchange) -> dict[str, int]:
    """Where each side begins in the shown text."""
    return {"prompt": len(_PROMPT), "response": len(_PROMPT) + len(sides.prompt) + len(_RESPONSE)}


def _shown_at(span: Span, sides: Exchange) -> tuple[int, int]:
    first = _starts(sides)[span.side]
    return first + span.start, first + span.end


def _decided(values: Sequence[Value]) -> Value | None:
    """What more than half of the annotators say; None where they are even or too few agree."""
    if not values:
        return None
    half = len(values) / 2
    if isinstance(values[0], str):
        most = max(values, key=values.count)
        return most if values.count(most) > half else None
    said = [set(value) for value in values if not isinstance(value, str)]
    votes: dict[Any, int] = {}
    for one in said:
        for item in one:
            votes[item] = votes.get(item, 0) + 1
    if half in votes.values():
        return None
    held = {item for item, count in votes.items() if count > half}
    return frozenset(held) if isinstance(values[0], frozenset) else tuple(sorted(held))


def _said(before: Annotation, sides: Exchange, like: Value) -> Value | None:
    """What the record said before, in the terms of `like`; None where it said nothing."""
    if isinstance(like, str):
        return sides.response
    if isinstance(like, tuple):
        return before.spans
    return frozenset(before.labels()) if before.judged else None


def _with_value(
    record: Record, value: Value, before: Annotation, source: str, fields: list[dict[str, Any]], where: str
) -> Record:
    """The record with what was decided of it. A response that was rewritten loses what was said of the old one.

    source: tool and task; fields: what the tool added to each of the rows.
    """
    said = {side: getattr(before, side) for side in ("prompt", "response", "should_refuse", "refuses", "spans")}
    kept: Mapping[str, Any] = before.tool
    by: str | None = source.partition(" ")[0]
    if isinstance(value, str):
        if value != exchange(record, where).response:
            record = with_response(record, value, where)
            spans = None if before.spans is None else tuple(span for span in before.spans if span.side == "prompt")
            said |= {"response": None, "refuses": None, "spans": spans}
            kept = {}  # hashes of a text that is no more
        by = before.by
    elif isinstance(value, tuple):
        said["spans"] = value
        by = before.by if before.judged else by
    else:
        said |= from_labels(set(value), where)
    if any(fields):
        kept = {**kept, source: fields}
    return annotated(record, Annotation(**said, by=by, tool=kept))
