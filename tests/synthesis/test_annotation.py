"""Export to and import from doccano and Prodigy: unchanged records, changed labels, and counts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.records.exchanges import split_exchange
from meshwright.errors import UserError
from meshwright.synthesis.annotation import TASKS, TOOLS, export_rows, import_rows
from meshwright.synthesis.speech_acts import ACTS, LABELS, Annotation, Span, replace_annotation

PLAIN = {"instruction": "Say hello", "output": "Hello! I will.", "source": {"deep": [1, 2.5, None]}}
ODD = {"instruction": "Grüße 👋🏽 an", "input": "Zeile\r\nzwei", "output": "Sure! 😀\r\nHere. \n", "extra": 1.5}
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}], "f": 0.1 + 0.2}


def placed(records: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    return [(f"records:{number}", record) for number, record in enumerate(records, 1)]


def rows_of(records: list[dict[str, Any]], tool: str, task: str) -> list[dict[str, Any]]:
    """Return the rows as written to a file and returned by an annotator who changes nothing."""
    rows = [json.loads(json.dumps(row)) for row in export_rows(placed(records), tool, task)]
    return [{**row, "answer": "accept"} for row in rows] if tool == "prodigy" else rows


def back(records: list[dict[str, Any]], rows: list[dict[str, Any]], tool: str, **options: Any):
    return import_rows(placed(records), [(f"rows:{n}", row) for n, row in enumerate(rows, 1)], tool, **options)


texts = st.text(st.sampled_from('ab \n\r\t😀é👋🏽\u200d\u0301中\ufeff\u2028"\\<'), max_size=12)
acts = st.sets(st.sampled_from(list(ACTS))).map(lambda held: tuple(act for act in ACTS if act in held))


@st.composite
def judged_records(draw: st.DrawFn) -> dict[str, Any]:
    record = {"instruction": "x" + draw(texts), "output": draw(texts), "own": draw(st.integers() | texts)}
    sides = split_exchange(record, "x")
    spans = []
    for side, text in zip(("prompt", "response"), sides, strict=True):
        for start in draw(st.sets(st.integers(0, max(0, len(text) - 1)), max_size=2)) if text else ():
            spans.append(Span(side, start, draw(st.integers(start + 1, len(text))), draw(st.sampled_from(list(ACTS)))))
    said = Annotation(draw(acts), draw(acts), draw(st.booleans()), draw(st.booleans()), tuple(sorted(set(spans))), "us")
    return replace_annotation(record, said)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tool", TOOLS)
@settings(max_examples=25)
@given(records=st.lists(judged_records(), max_size=2))
def test_untouched_export_imports_unchanged(records: list, tool: str, task: str):
    kept, summary = back(records, rows_of(records, tool, task), tool)
    for record, again in zip(records, kept, strict=True):
        before, after = dict(record["annotation"]), dict(again["annotation"])
        assert (before.pop("by"), after.pop("by")) in {("us", "us"), ("us", tool)}
        assert after == before and {**again, "annotation": 0} == {**record, "annotation": 0}
    assert summary["rows"] == summary["records"] == len(records) and summary["changed"] == 0


@settings(max_examples=25)
@given(record=judged_records())
def test_span_offsets_count_characters_of_exported_text(record: dict):
    sides = split_exchange(record, "x")
    [doccano] = rows_of([record], "doccano", "spans")
    [prodigy] = rows_of([record], "prodigy", "spans")
    expected = sorted(
        (getattr(sides, s["side"])[s["start"] : s["end"]], s["act"]) for s in record["annotation"]["spans"]
    )
    assert sorted((doccano["text"][start:end], act) for start, end, act in doccano["label"]) == expected
    assert sorted((prodigy["text"][s["start"] : s["end"]], s["label"]) for s in prodigy["spans"]) == expected


def test_rows_of_doccano_have_keys_of_its_three_projects():
    record = replace_annotation(
        ODD, Annotation((), ("commissive",), False, True, (Span("response", 0, 5, "commissive"),))
    )
    [row] = rows_of([record], "doccano", "classify")
    assert (set(row), row["label"]) == ({"text", "label", "record"}, ["response:commissive", "refuses"])
    [row] = rows_of([record], "doccano", "spans")
    assert row["label"] == [[44, 49, "commissive"]] and row["text"][44:49] == "Sure!"
    [row] = rows_of([record], "doccano", "rewrite")
    assert (row["text"], row["label"]) == (split_exchange(ODD, "x").prompt, [ODD["output"]])


def test_rows_of_prodigy_have_the_keys_of_its_interfaces():
    record = replace_annotation(ODD, Annotation(response=("commissive",), spans=(Span("prompt", 6, 7, "expressive"),)))
    [row] = export_rows(placed([record]), "prodigy", "classify")
    assert [option["id"] for option in row["options"]] == list(LABELS)
    assert row["accept"] == ["response:commissive"] and row["config"] == {"choice_style": "multiple"}
    [row] = export_rows(placed([record]), "prodigy", "spans")
    assert row["spans"] == [{"start": 14, "end": 15, "label": "expressive"}] and row["text"][14] == "👋"
    [row] = export_rows(placed([record]), "prodigy", "rewrite")
    assert row["user_input"] == ODD["output"]


# Export of doccano 1.8.4 after importing the rows of these records and changing a label, a span and a response.
# ruff: noqa: E501
WRITTEN_BY_DOCCANO = {
    "classify": r"""
{"id":1,"text":"Prompt:\nGrüße 👋🏽 an\n\nZeile\r\nzwei\n\nResponse:\nSure! 😀\r\nHere. \n","record":"classify NAME1","label":["prompt:directive","response:commissive"],"Comments":[]}
{"id":2,"text":"Prompt:\nhi\n\nResponse:\nhello","record":"classify NAME2","label":["refuses"],"Comments":["sure?"]}
""",
    "spans": r"""
{"id":3,"text":"Prompt:\nGrüße 👋🏽 an\n\nZeile\r\nzwei\n\nResponse:\nSure! 😀\r\nHere. \n","record":"spans NAME1","label":[[44,51,"commissive"],[53,57,"assertive"]],"Comments":[]}
{"id":4,"text":"Prompt:\nhi\n\nResponse:\nhello","record":"spans NAME2","label":[[8,10,"commissive"]],"Comments":[]}
""",
    "rewrite": r"""
{"id":5,"text":"Grüße 👋🏽 an\n\nZeile\r\nzwei","record":"rewrite NAME1","label":["neu 😀"],"Comments":[]}
{"id":6,"text":"hi","record":"rewrite NAME2","label":["hello"],"Comments":[]}
""",
}


def by_doccano(task: str) -> list[dict[str, Any]]:
    from meshwright.data.records.exchanges import name_records

    first, second = name_records([ODD, CHAT])
    lines = WRITTEN_BY_DOCCANO[task].replace("NAME1", first).replace("NAME2", second).split("\n")
    return [json.loads(line) for line in lines if line]


def test_doccano_labels_are_imported_with_tool_fields():
    (first, second), summary = back([ODD, CHAT], by_doccano("classify"), "doccano")
    assert first["annotation"]["prompt"] == ["directive"] and first["annotation"]["response"] == ["commissive"]
    assert second["annotation"]["refuses"] is True and second["annotation"]["should_refuse"] is False
    assert second["annotation"]["by"] == "doccano"
    assert second["annotation"]["tool"] == {"doccano classify": [{"id": 2, "Comments": ["sure?"]}]}
    assert (summary["labelled"], summary["changed"]) == (2, 2)


def test_doccano_spans_are_imported():
    (first, second), _ = back([ODD, CHAT], by_doccano("spans"), "doccano")
    found = [(ODD["output"][s["start"] : s["end"]], s["act"]) for s in first["annotation"]["spans"]]
    assert found == [("Sure! 😀", "commissive"), ("Here", "assertive")]
    assert second["annotation"]["spans"] == [{"side": "prompt", "start": 0, "end": 2, "act": "commissive"}]
    related = by_doccano("spans")  # a project with relations writes objects, under another key
    for row in related:
        row["entities"] = [{"id": 9, "start_offset": a, "end_offset": b, "label": c} for a, b, c in row.pop("label")]
        row["relations"] = []
    kept, _ = back([ODD, CHAT], related, "doccano")
    assert kept[0]["annotation"]["spans"] == first["annotation"]["spans"]


def test_doccano_rewrite_replaces_response_and_drops_its_labels():
    labelled = replace_annotation(ODD, Annotation(("directive",), ("commissive",), False, False, by="us"))
    (first, second), summary = back([labelled, CHAT], by_doccano("rewrite"), "doccano")
    assert first["output"] == "neu 😀" and first["extra"] == 1.5
    assert first["annotation"]["prompt"] == ["directive"] and "response" not in first["annotation"]
    assert {**second, "annotation": 0} == {**CHAT, "annotation": 0} and summary["changed"] == 1


# Answers in the form of Prodigy's documentation, with its additional fields.
ADDED = {
    "_input_hash": -1204379214,
    "_task_hash": 1867154,
    "_view_id": "choice",
    "_session_id": "acts-ann",
    "_timestamp": 1690289516,
}


def test_prodigy_fields_survive_round_trip():
    [row] = rows_of([PLAIN], "prodigy", "classify")
    row |= {**ADDED, "accept": ["response:commissive", "response:expressive"]}
    [record], summary = back([PLAIN], [row], "prodigy")
    assert record["annotation"]["response"] == ["commissive", "expressive"] and record["annotation"]["prompt"] == []
    assert record["annotation"]["tool"] == {"prodigy classify": [ADDED]} and record["source"] == PLAIN["source"]
    assert summary["changed"] == 1
    [again] = export_rows(placed([record]), "prodigy", "classify")
    assert {key: again[key] for key in ADDED} == ADDED
    [record_again], summary = back([record], [{**again, "answer": "accept"}], "prodigy")
    assert record_again == record and summary["changed"] == 0
    # Hashes differ by task, and for a text with another response.
    [spans] = export_rows(placed([record]), "prodigy", "spans")
    assert not set(ADDED) & set(spans)
    [rewriting] = rows_of([record], "prodigy", "rewrite")
    [rewritten], _ = back([record], [{**rewriting, "user_input": "Better."}], "prodigy")
    [again] = export_rows(placed([rewritten]), "prodigy", "classify")
    assert rewritten["output"] == "Better." and not set(ADDED) & set(again)


def test_prodigy_span_tokens_are_dropped():
    [row] = rows_of([PLAIN], "prodigy", "spans")
    row["tokens"] = [{"text": "Prompt", "start": 0, "end": 6, "id": 0, "ws": False}]
    row["spans"] = [{"start": 29, "end": 35, "token_start": 9, "token_end": 9, "label": "EXPRESSIVE"}]
    [record], _ = back([PLAIN], [row], "prodigy")
    spans = [{"side": "response", "start": 0, "end": 6, "act": "expressive"}]
    assert record["annotation"] == {"spans": spans, "by": "prodigy"}


def test_rejected_and_ignored_annotations_change_nothing():
    records = [{**PLAIN, "n": n} for n in range(5)]
    rows = rows_of(records, "prodigy", "classify")
    rows[0]["answer"], rows[1]["answer"] = "reject", "ignore"
    del rows[2]["answer"]
    rows[3]["accept"] = ["refuses"]
    kept, summary = back(records, rows[:4], "prodigy")
    assert summary["answers"] == {"labelled": 1, "unlabelled": 0, "unanswered": 1, "rejected": 1, "ignored": 1}
    assert (summary["rejected"], summary["left"], summary["labelled"], summary["left_out"]) == (1, 3, 1, 0)
    assert [kept[n] for n in (0, 1, 2, 4)] == [records[n] for n in (0, 1, 2, 4)]
    kept, summary = back(records, rows[:4], "prodigy", leave_out_rejected=True)
    assert [record["n"] for record in kept] == [1, 2, 3, 4] and summary["left_out"] == 1


def test_unlabelled_doccano_row_clears_only_exported_labels():
    labelled = replace_annotation(PLAIN, Annotation(("directive",), (), False, False))
    records = [PLAIN, labelled]
    rows = rows_of(records, "doccano", "classify")
    rows[1]["label"] = []
    # Both have the same name except for its number: the annotation is not part of it.
    kept, summary = back(records, rows, "doccano")
    assert summary["answers"]["unlabelled"] == 1 and summary["changed"] == 1
    assert kept[0] == PLAIN and kept[1]["annotation"]["prompt"] == []


def test_annotator_majority_wins_and_tie_keeps_labels():
    names = ["prompt:directive", "response:assertive", "refuses"]
    rows = [
        {**row, "label": held}
        for held in (names, names[:2], names[:1])
        for row in rows_of([PLAIN], "doccano", "classify")
    ]
    [record], summary = back([PLAIN], rows, "doccano")
    assert record["annotation"]["prompt"] == ["directive"] and record["annotation"]["response"] == ["assertive"]
    assert record["annotation"]["refuses"] is False
    assert (summary["several"], summary["agreed"], summary["disputed"]) == (1, 0, [])
    [record], summary = back([PLAIN], rows[:2], "doccano")  # one of two annotators set "refuses"
    assert record == PLAIN and len(summary["disputed"]) == 1 and summary["labelled"] == 0
    [record], summary = back([PLAIN], [rows[0], rows[0]], "doccano")
    assert record["annotation"]["refuses"] is True and summary["agreed"] == 1


def test_normalized_line_ends_do_not_move_spans():
    [row] = rows_of([ODD], "doccano", "spans")
    row["text"] = row["text"].replace("\r\n", "\n")
    row["label"] = [[row["text"].index("Here"), row["text"].index("Here") + 4, "assertive"]]
    [record], _ = back([ODD], [row], "doccano")
    [span] = record["annotation"]["spans"]
    assert ODD["output"][span["start"] : span["end"]] == "Here"


def test_span_over_heading_is_clipped_to_its_side():
    [row] = rows_of([PLAIN], "doccano", "spans")
    row["label"] = [[row["text"].index("Response"), len(row["text"]), "commissive"]]
    [record], _ = back([PLAIN], [row], "doccano")
    assert record["annotation"]["spans"] == [{"side": "response", "start": 0, "end": 14, "act": "commissive"}]


@pytest.mark.parametrize(
    ("tool", "task", "change", "said"),
    [
        ("doccano", "classify", {"label": ["response:asertive"]}, 'did you mean "response:assertive"?'),
        ("doccano", "classify", {"label": [[0, 1, "assertive"]]}, "a project of another task"),
        ("doccano", "classify", {"label": "refuses"}, '"label" is not a list'),
        ("doccano", "rewrite", {"text": "Say  hello"}, "the text differs from the exported one"),
        ("doccano", "classify", {"text": "edited"}, "the text differs from the exported one"),
        ("doccano", "classify", {"record": None}, 'no "record"'),
        ("doccano", "classify", {"record": "classify 0123"}, "no record is named 0123"),
        ("doccano", "spans", {"label": [[0, 3, "assertive"]]}, "touches neither side"),
        ("doccano", "spans", {"label": [[9, 40, "assertive"]]}, "touches both sides"),
        ("doccano", "spans", {"label": [[9, 9, "assertive"]]}, "a span is 9 to 9, not inside"),
        ("doccano", "spans", {"label": [[9, 400, "assertive"]]}, "a span is 9 to 400, not inside"),
        ("doccano", "spans", {"label": [[9, 12, "happy"]]}, 'unknown speech act "happy"'),
        ("doccano", "rewrite", {"label": ["one", "two"]}, "2 new responses"),
        ("prodigy", "classify", {"answer": "yes"}, "\"answer\" is 'yes', neither accept"),
        ("prodigy", "classify", {"label": "refuses"}, "one label to accept or reject"),
        ("prodigy", "rewrite", {"user_input": None}, '"user_input" is not a string'),
        ("prodigy", "spans", {"spans": None}, '"spans" is not a list'),
    ],
)
def test_unusable_row_error_names_position(tool: str, task: str, change: dict, said: str):
    [row] = rows_of([PLAIN], tool, task)
    with pytest.raises(UserError, match="^rows:1: ") as caught:
        back([PLAIN], [{**row, **change}], tool)
    assert said in str(caught.value)


def test_rows_of_two_tasks_are_not_mixed():
    rows = rows_of([PLAIN], "doccano", "classify") + rows_of([PLAIN], "doccano", "rewrite")
    with pytest.raises(UserError, match="rows:2: a row of the task rewrite among rows of classify"):
        back([PLAIN], rows, "doccano")


def test_unknown_names_and_damaged_annotations_are_refused():
    with pytest.raises(UserError, match='unknown annotation tool "docano".*did you mean "doccano"'):
        list(export_rows([], "docano", "spans"))
    with pytest.raises(UserError, match='unknown task "span"'):
        list(export_rows([], "doccano", "span"))
    for damaged, said in (
        ({"response": ["asertive"]}, 'did you mean "assertive"'),
        ({"response": "assertive"}, "not a list of speech acts"),
        ({"refuses": "no"}, "neither true nor false"),
        ({"refuse": True}, 'unknown key "refuse"'),
        ({"spans": [{"side": "response", "start": 0, "end": 99, "act": "assertive"}]}, "not inside the response of 14"),
        ([], "is not an object"),
    ):
        with pytest.raises(UserError, match="^records:1: ") as caught:
            list(export_rows(placed([{**PLAIN, "annotation": damaged}]), "doccano", "classify"))
        assert said in str(caught.value)
    with pytest.raises(UserError, match="the prompt is empty"):
        list(export_rows(placed([{"instruction": "", "output": "x"}]), "doccano", "rewrite"))
