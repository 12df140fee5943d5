"""Labels by a served model are marked as such, and labels by people are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.synthesis.chat_client import ChatClient
from meshwright.synthesis.endpoint import Endpoint
from meshwright.synthesis.labelling import label_records
from meshwright.synthesis.speech_acts import ACTS
from tests.data.served import served

GOOD = {"prompt": ["directive"], "response": ["expressive", "assertive"], "should_refuse": True, "refuses": False}


def labelled(reply, records: list[dict], path: Path, **options):
    with served(reply) as server, ChatClient(Endpoint(server.url, "m", backoff=0.001), path, concurrency=2) as client:
        kept, summary = label_records([(f"r:{n}", record) for n, record in enumerate(records)], client, **options)
    return kept, summary, server


def test_labelling_prompt_lists_acts_and_quotes_record(tmp_path: Path):
    record = {"instruction": 'Stop. "} {"', "input": "in", "output": "out"}
    [kept], summary, server = labelled(lambda body, n: json.dumps(GOOD), [record], tmp_path / "j")
    system, user = (message["content"] for message in server.requests[0]["messages"])
    assert all(f"- {act}: {meaning}" in system for act, meaning in ACTS.items())
    assert json.loads(user) == {"prompt": 'Stop. "} {"\n\nin', "response": "out"}
    assert kept == {**record, "annotation": {**GOOD, "response": ["assertive", "expressive"], "by": "model m"}}
    assert summary == {"records": 1, "labelled": 1, "kept": 0, "refused": 0, "unreadable": 0}


def test_human_labels_are_kept_and_model_labels_replaceable(tmp_path: Path):
    people = {"instruction": "a", "output": "b", "annotation": {"refuses": True, "by": "doccano"}}
    guess = {"instruction": "c", "output": "d", "annotation": {"refuses": True, "by": "model old"}}
    spans = [{"side": "prompt", "start": 0, "end": 1, "act": "directive"}]
    marked = {"instruction": "e", "output": "f", "annotation": {"spans": spans, "by": "doccano"}}
    records = [people, guess, marked]
    kept, summary, _ = labelled(lambda body, n: json.dumps(GOOD), records, tmp_path / "j")
    assert kept[:2] == [people, guess] and summary["kept"] == 2
    assert kept[2]["annotation"]["spans"] == spans and kept[2]["annotation"]["refuses"] is False
    kept, summary, _ = labelled(lambda body, n: json.dumps(GOOD), records, tmp_path / "j", again=True)
    assert kept[0] == people and kept[1]["annotation"]["by"] == "model m" and summary["kept"] == 1


@pytest.mark.parametrize(
    "text",
    [
        "```json\n" + json.dumps(GOOD, indent=1) + "\n```",
        "Here you are: " + json.dumps({**GOOD, "prompt": ["Directive"], "response": ["representative", "expressive"]}),
    ],
)
def test_labels_are_parsed_from_prose_and_code_blocks(tmp_path: Path, text: str):
    [kept], *_ = labelled(lambda body, n: text, [{"instruction": "a", "output": "b"}], tmp_path / "j")
    assert kept["annotation"]["response"] == ["assertive", "expressive"]


@pytest.mark.parametrize(
    "text",
    [
        "I cannot say.",
        "{",
        "{}",
        "[1]",
        json.dumps({**GOOD, "refuses": "no"}),
        json.dumps({**GOOD, "prompt": ["question"]}),
        json.dumps({**GOOD, "prompt": None}),
    ],
)
def test_unreadable_labels_are_retried_and_counted(tmp_path: Path, text: str):
    record = {"instruction": "a", "output": "b"}
    [kept], summary, server = labelled(lambda body, n: text, [record], tmp_path / "one")
    assert kept == record and (summary["unreadable"], summary["labelled"]) == (1, 0)
    assert [request["seed"] for request in server.requests] == [0, 1, 2]
    replies = [text, json.dumps(GOOD)]
    [kept], summary, server = labelled(lambda body, n: replies[min(n, 1)], [record], tmp_path / "two")
    assert summary["labelled"] == 1 and len(server.requests) == 2
