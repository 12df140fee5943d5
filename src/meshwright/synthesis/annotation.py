"""Exchange with annotation tools: records as JSON Lines of doccano and Prodigy, and the annotations that come back.

Three tasks: `classify` (labels of a record), `spans` (character ranges that perform a speech act), `rewrite` (a better
response). Each line, called a row, carries the name of its record, which identifies it on import.

doccano: backend/data_import/pipeline and data_export/pipeline of version 1.8 (text classification, sequence labelling,
sequence to sequence). Prodigy: prodi.gy/docs/api-interfaces (choice, spans_manual, text_input). Both count characters
as Python does, by code points.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from meshwright.data.records.exchanges import Exchange, Record, name_records, replace_response, split_exchange
from meshwright.errors import UserError
from meshwright.names import unknown
from meshwright.synthesis.speech_acts import (
    LABELS,
    Annotation,
    Span,
    parse_annotation,
    parse_label_set,
    replace_annotation,
    resolve_act,
)

TOOLS = ("doccano", "prodigy")
TASKS = ("classify", "spans", "rewrite")
NAME = "record"  # key of a row: its task and the name of its record
_PROMPT, _RESPONSE = "Prompt:\n", "\n\nResponse:\n"
# Keys of a row that are read or written here; all others are kept as the tool's fields.
_OWN = {
    "doccano": {"text", "label", "entities", NAME},
    "prodigy": {"text", "options", "accept", "spans", "tokens", "user_input", "answer", "config", "meta", NAME},
}
Value: TypeAlias = "frozenset[str] | tuple[Span, ...] | str"  # an annotator's answer, by task


class ImportedRow(NamedTuple):
    """One annotator's answer for one data record, read from one row (JSON line) that an annotation tool exported.

    answer: "labelled" if the row has a value; else the reason why it has no value: "unlabelled", "unanswered",
    "rejected" or "ignored". value: the labels, spans or rewritten response; None unless "labelled". fields: all other
    JSON fields of the row; the next export writes them back for the tool.
    """

    answer: str
    value: Value | None
    fields: dict[str, Any]


def format_record(sides: Exchange) -> str:
    """Format the prompt and response of a record (`sides`), under headings, as the text that annotators read."""
    return f"{_PROMPT}{sides.prompt}{_RESPONSE}{sides.response}"


def export_rows(records: Sequence[tuple[str, Record]], tool: str, task: str) -> Iterator[Record]:
    """Yield one JSON object per record in the format that an annotation tool imports, with the labels that the record
    already has.

    records: (position for errors such as "a.jsonl:17", record). tool: "doccano" or "prodigy". task: "classify" (labels
    of a record), "spans" (character ranges) or "rewrite" (a better response). Raises `UserError` for an unknown tool or
    task, and for a record that cannot be parsed or exported.
    """
    check_tool_and_task(tool, task)
    for (where, record), name in zip(records, name_records([record for _, record in records]), strict=True):
        sides = split_exchange(record, where)
        present = parse_annotation(record, sides, where)
        # The same keys in every row: doccano reads them as a table, and would fill what is missing with nulls.
        row: Record = {"text": _make_task_text(task, sides), NAME: f"{task} {name}"}
        if tool == "doccano":
            if not row["text"]:
                raise UserError(f"{where}: the prompt is empty, which doccano refuses; remove the record")
            yield {**row, "label": _make_doccano_label(task, present, sides)}
        else:
            own = present.tool.get(f"prodigy {task}")  # restored only if there was a single annotator
            kept = own[0] if isinstance(own, list) and len(own) == 1 and isinstance(own[0], dict) else {}
            yield {**row, **_make_prodigy_fields(task, present, sides), **kept}


def import_rows(
    records: Sequence[tuple[str, Record]],
    rows: Iterable[tuple[str, Record]],
    tool: str,
    leave_out_rejected: bool = False,
) -> tuple[list[Record], dict[str, Any]]:
    """Merge the rows (JSON lines) that an annotation tool exported into their data records; return (records in order,
    summary as JSON). Raises `UserError` for a row that belongs to none of the records, is of another task than the
    other rows, or cannot be parsed.

    records, rows: (position for errors such as "a.jsonl:17", record or row). tool: "doccano" or "prodigy".
    leave_out_rejected: True: omit records that annotators rejected. A label or span is set if more than half of a
    record's annotators set it. A record is disputed, and stays unchanged, if exactly half set a label or span, or if no
    rewritten text has a majority.

    Summary: `records`, `rows`: numbers of records and rows. `task`: name of the task. `answers`: {answer (see
    `ImportedRow`): number of rows}. `disputed`: names of disputed records. All other keys are numbers of records:
    `labelled`: given a value. `changed`: given another value than before. `left`: neither labelled nor rejected.
    `rejected`; `left_out`: rejected and omitted. `several`: several annotators gave a value; `agreed`: these are equal.
    """
    check_tool_and_task(tool, TASKS[0])
    names = name_records([record for _, record in records])
    places = {name: place for place, name in enumerate(names)}
    sides = [split_exchange(record, where) for where, record in records]
    before = [parse_annotation(record, side, where) for (where, record), side in zip(records, sides, strict=True)]
    back: dict[int, list[ImportedRow]] = {}
    task = None
    for where, row in rows:
        named, name = _parse_record_name(row, where)
        task = task or named
        if named != task:
            raise UserError(f"{where}: a row of the task {named} among rows of {task}; import them separately")
        if name not in places:
            raise UserError(f"{where}: no record is named {name}; pass the exported records, unchanged")
        place = places[name]
        _check_text(row, task, sides[place], where)
        if tool == "doccano":
            answer = _parse_doccano_row(row, task, sides[place], before[place], where)
        else:
            answer = _parse_prodigy_row(row, task, sides[place], where)
        back.setdefault(place, []).append(answer)

    answers = dict.fromkeys(("labelled", "unlabelled", "unanswered", "rejected", "ignored"), 0)
    summary: dict[str, Any] = {"records": len(records), "rows": sum(map(len, back.values())), "task": task}
    counts = ("labelled", "changed", "left", "rejected", "left_out", "several", "agreed")
    summary |= {"answers": answers, **dict.fromkeys(counts, 0), "disputed": []}
    kept: list[Record] = []
    for place, (where, record) in enumerate(records):
        came = back.get(place, [])
        for one in came:
            answers[one.answer] += 1
        values = [row.value for row in came if row.value is not None]
        rejected = not values and any(row.answer == "rejected" for row in came)
        decided = _take_majority(values)
        summary["rejected"] += rejected
        summary["left"] += not values and not rejected
        summary["several"] += len(values) > 1
        summary["agreed"] += len(values) > 1 and len(set(values)) == 1
        if values and decided is None:
            summary["disputed"].append(names[place])
        if decided is not None:
            fields = [row.fields for row in came if row.value is not None]
            changed = _replace_value(record, decided, before[place], f"{tool} {task}", fields, where)
            summary["labelled"] += 1
            summary["changed"] += _get_present_value(before[place], sides[place], decided) != decided
            record = changed
        if rejected and leave_out_rejected:
            summary["left_out"] += 1
        else:
            kept.append(record)
    return kept, summary


def check_tool_and_task(tool: str, task: str) -> None:
    """Raise `UserError` unless `tool` is "doccano" or "prodigy" and `task` is "classify", "spans" or "rewrite"."""
    for kind, word, known in (("annotation tool", tool, TOOLS), ("task", task, TASKS)):
        if word not in known:
            raise UserError(unknown(kind, word, known))


def _make_task_text(task: str, sides: Exchange) -> str:
    """Return the text that annotators read: the prompt for the task "rewrite", prompt and response for "classify" and
    "spans". sides: prompt and response of the record.
    """
    return sides.prompt if task == "rewrite" else format_record(sides)


def _make_doccano_label(task: str, present: Annotation, sides: Exchange) -> list[Any]:
    """Return the value of doccano's field `label` for one record: label names for the task "classify", lists [start,
    end, act] of character ranges in the exported text for "spans", the response for "rewrite".

    present: the record's present annotation. sides: the record's prompt and response.
    """
    match task:
        case "classify":
            return list(present.list_labels())
        case "spans":
            return [[*_map_to_exported_text(span, sides), span.act] for span in present.spans or ()]
        case _:
            return [sides.response] if sides.response else []


def _make_prodigy_fields(task: str, present: Annotation, sides: Exchange) -> Record:
    """Return the JSON fields from which Prodigy shows one record: options and accepted labels for the task "classify",
    spans for "spans", the response for "rewrite". present: the record's present annotation. sides: the record's prompt
    and response."""
    match task:
        case "classify":
            options = [{"id": label, "text": label.replace(":", ": ").replace("-", " ")} for label in LABELS]
            return {"options": options, "accept": list(present.list_labels()), "config": {"choice_style": "multiple"}}
        case "spans":
            places = [(*_map_to_exported_text(span, sides), span.act) for span in present.spans or ()]
            return {"spans": [{"start": start, "end": end, "label": act} for start, end, act in places]}
        case _:
            return {"user_input": sides.response}


def _parse_record_name(row: Record, where: str) -> tuple[str, str]:
    """Split the field "record" of a row into (annotation task such as "spans", name of the data record). where:
    position of the row, for the `UserError` for a missing or invalid field."""
    task, _, name = str(row.get(NAME, "")).partition(" ")
    if task not in TASKS or not name:
        raise UserError(
            f'{where}: no "{NAME}" with the name of the record; only rows written by data export can be imported'
        )
    return task, name


def _parse_doccano_row(row: Record, task: str, sides: Exchange, before: Annotation, where: str) -> ImportedRow:
    """Parse one row (JSON line) exported by doccano; return the annotator's answer.

    task: "classify", "spans" or "rewrite". sides: prompt and response of the record. before: the record's annotation
    before the import. where: position of the row, for the `UserError`.
    """
    label = row.get("label", row.get("entities"))
    if not isinstance(label, list):
        raise UserError(f'{where}: "label" is not a list, which doccano writes')
    fields = {key: value for key, value in row.items() if key not in _OWN["doccano"]}
    suggested = _make_doccano_label(task, before, sides)
    if not label and (task == "rewrite" or not suggested):  # not annotated, or no label set: doccano exports both alike
        return ImportedRow("unlabelled", None, fields)
    if task != "rewrite":
        return ImportedRow("labelled", _parse_value(row, task, label, sides, where), fields)
    texts = [text for text in label if text != sides.response] or label
    if len(texts) > 1 or not isinstance(texts[0], str):
        raise UserError(f"{where}: {len(texts)} new responses; keep one of them in doccano")
    return ImportedRow("labelled", texts[0], fields)


def _parse_prodigy_row(row: Record, task: str, sides: Exchange, where: str) -> ImportedRow:
    """Parse one row (JSON line) exported by Prodigy; return the annotator's answer.

    task: "classify", "spans" or "rewrite". sides: prompt and response of the record. where: position of the row, for
    the `UserError`.
    """
    fields = {key: value for key, value in row.items() if key not in _OWN["prodigy"]}
    match row.get("answer"):
        case None:
            return ImportedRow("unanswered", None, fields)
        case "reject" | "ignore" as answer:
            return ImportedRow({"reject": "rejected", "ignore": "ignored"}[answer], None, fields)
        case "accept":
            pass
        case other:
            raise UserError(f'{where}: "answer" is {other!r}, neither accept, reject nor ignore')
    if task == "rewrite":
        text = row.get("user_input")
        if not isinstance(text, str):
            raise UserError(f'{where}: "user_input" is not a string, which text_input writes')
        return ImportedRow("labelled", text, fields)
    if task == "classify" and "label" in row:
        raise UserError(f"{where}: one label to accept or reject; only rows of the choice interface can be imported")
    marks = row.get("accept" if task == "classify" else "spans", [])
    if not isinstance(marks, list):
        raise UserError(f'{where}: "{"accept" if task == "classify" else "spans"}" is not a list')
    return ImportedRow("labelled", _parse_value(row, task, marks, sides, where), fields)


def _check_text(row: Record, task: str, sides: Exchange, where: str) -> None:
    """Raise `UserError` unless the text in a row equals the text that was exported for its record, apart from line
    ends. task: "classify", "spans" or "rewrite". sides: prompt and response of the record. where: position of the row,
    for the error."""
    text = _make_task_text(task, sides)
    if row.get("text") not in (text, text.replace("\r\n", "\n").replace("\r", "\n")):
        raise UserError(f"{where}: the text differs from the exported one, so its annotation does not apply")


def _parse_value(row: Record, task: str, items: list[Any], sides: Exchange, where: str) -> Value:
    """Parse the labels or spans in one row that an annotation tool exported; return a frozenset of label names or a
    tuple of `Span`.

    row: the row as a JSON object, with the annotated "text". task: "classify" (labels) or "spans". items: list of
    labels or spans in the row. sides: prompt and response of the record. where: position of the row, for errors.
    """
    if task == "classify":
        if not all(isinstance(label, str) for label in items):
            raise UserError(f"{where}: a label is not a string; is this a project of another task?")
        parse_label_set(set(items), where)  # raises for an unknown label
        return frozenset(items)
    return tuple(sorted({_parse_span(one, row["text"], sides, where) for one in items}))


def _parse_span(one: Any, seen: str, sides: Exchange, where: str) -> Span:
    """Convert a span that annotators marked in the exported text (headings, prompt and response) to a span of the
    prompt or of the response. Marked characters of a heading are cut off.

    one: JSON object or list [start, end, label], in characters. seen: the text that annotators saw. sides: prompt and
    response of the record. where: position of the row, for errors. Raises `UserError` if the span touches both prompt
    and response, or neither.
    """
    if isinstance(one, dict):
        start, end = one.get("start", one.get("start_offset")), one.get("end", one.get("end_offset"))
        label = one.get("label")
    else:
        start, end, label = one if isinstance(one, list) and len(one) == 3 else (None, None, None)
    if type(start) is not int or type(end) is not int or not 0 <= start < end <= len(seen):
        raise UserError(f"{where}: a span is {start} to {end}, not inside the text of {len(seen)} characters")
    act = resolve_act(label, where)
    text = format_record(sides)
    if seen != text:
        start, end = _restore_position(text, start), _restore_position(text, end)
    inside = []
    for side, first in _find_side_offsets(sides).items():
        low, high = max(start, first), min(end, first + len(getattr(sides, side)))
        if low < high:
            inside.append(Span(side, low - first, high - first, act))
    if len(inside) != 1:
        where_to = "both sides" if inside else "neither side"
        raise UserError(
            f"{where}: the span {start} to {end} touches {where_to}; mark inside the prompt or the response"
        )
    return inside[0]


def _restore_position(text: str, position: int) -> int:
    """Convert a character position from a text with normalized line ends (LF) to the original `text`, which may have
    CRLF. position: position in the normalized text.
    """
    at = 0
    for _ in range(position):
        at += 2 if text.startswith("\r\n", at) else 1
    return at


def _find_side_offsets(sides: Exchange) -> dict[str, int]:
    """Return {"prompt": offset, "response": offset}: character positions at which prompt and response begin in the text
    that `format_record` writes. sides: prompt and response of the record."""
    return {"prompt": len(_PROMPT), "response": len(_PROMPT) + len(sides.prompt) + len(_RESPONSE)}


def _map_to_exported_text(span: Span, sides: Exchange) -> tuple[int, int]:
    """Return the character range [start, end), in the text that `format_record` writes, of a span of the prompt or
    response. sides: prompt and response of the record."""
    first = _find_side_offsets(sides)[span.side]
    return first + span.start, first + span.end


def _take_majority(values: Sequence[Value]) -> Value | None:
    """Combine the values of several annotators by majority: the rewritten text that more than half of them wrote, or
    the set of labels or spans that more than half of them set. Return None if `values` is empty, if no text has a
    majority, or if exactly half set some label or span. values: one per annotator."""
    if not values:
        return None
    half = len(values) / 2
    if isinstance(values[0], str):
        most = max(values, key=values.count)
        return most if values.count(most) > half else None
    sets = [set(value) for value in values if not isinstance(value, str)]
    votes: dict[Any, int] = {}
    for one in sets:
        for item in one:
            votes[item] = votes.get(item, 0) + 1
    if half in votes.values():
        return None
    held = {item for item, count in votes.items() if count > half}
    return frozenset(held) if isinstance(values[0], frozenset) else tuple(sorted(held))


def _get_present_value(before: Annotation, sides: Exchange, like: Value) -> Value | None:
    """Return the value that a record had before the import; None if it had no labels or spans. The type of the imported
    value `like` selects which: labels (frozenset of names), spans (tuple) or response (str). before: the record's
    annotation before the import. sides: the record's prompt and response.
    """
    if isinstance(like, str):
        return sides.response
    if isinstance(like, tuple):
        return before.spans
    return frozenset(before.list_labels()) if before.judged else None


def _replace_value(
    record: Record, value: Value, before: Annotation, source: str, fields: list[dict[str, Any]], where: str
) -> Record:
    """Return a copy of the record with the value on which its annotators agreed. If the value is a new response, the
    labels and spans of the old response are removed.

    value: labels, spans or rewritten response. before: the record's annotation before the import. source: tool and
    task, such as "doccano spans". fields: the tool's other JSON fields, one dict per annotator. where: position of the
    record, for errors.
    """
    labels = {side: getattr(before, side) for side in ("prompt", "response", "should_refuse", "refuses", "spans")}
    kept: Mapping[str, Any] = before.tool
    by: str | None = source.partition(" ")[0]
    if isinstance(value, str):
        if value != split_exchange(record, where).response:
            record = replace_response(record, value, where)
            spans = None if before.spans is None else tuple(span for span in before.spans if span.side == "prompt")
            labels |= {"response": None, "refuses": None, "spans": spans}
            kept = {}  # they have hashes of the replaced text
        by = before.by
    elif isinstance(value, tuple):
        labels["spans"] = value
        by = before.by if before.judged else by
    else:
        labels |= parse_label_set(set(value), where)
    if any(fields):
        kept = {**kept, source: fields}
    return replace_annotation(record, Annotation(**labels, by=by, tool=kept))
