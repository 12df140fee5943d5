"""Records of instruction and chat data: both sides in every form, and lines about what is none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from meshwright.data.records.exchanges import (
    exchange,
    first_request,
    json_line,
    read_rows,
    record_names,
    with_response,
    write_rows,
)
from meshwright.errors import UserError

ALPACA = {"instruction": "Translate.", "input": "Haus", "output": "house"}
CHAT = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello", "name": "kept"},
    ]
}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
PREFERENCE = {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"}
PREFERENCE_CHAT = {
    "prompt": [{"role": "user", "content": "Hi"}],
    "chosen": [{"role": "assistant", "content": "Hello"}],
    "rejected": [{"role": "assistant", "content": "Go away"}],
}
FORMS = {
    "alpaca": (ALPACA, "Translate.\n\nHaus", "house", "Translate."),
    "chat": (CHAT, "system: Be brief.\n\nuser: Hi", "Hello", "Hi"),
    "sharegpt": (SHAREGPT, "Hi", "Hello", "Hi"),
    "preference": (PREFERENCE, "Hi", "Hello", "Hi"),
    "preference chat": (PREFERENCE_CHAT, "Hi", "Hello", "Hi"),
    "no rejected": ({"prompt": "Hi", "chosen": "Hello"}, "Hi", "Hello", "Hi"),
    "no output": ({"instruction": "Sing."}, "Sing.", "", "Sing."),
    "unanswered chat": ({"messages": [{"role": "user", "content": "Hi"}]}, "Hi", "", "Hi"),
    "no input": ({"instruction": "Sing.", "input": None, "output": "La"}, "Sing.", "La", "Sing."),
}


@pytest.mark.parametrize("form", FORMS)
def test_both_sides_of_every_form_are_found(form: str):
    record, prompt, response, first = FORMS[form]
    assert exchange(record, "x") == (prompt, response)
    assert first_request(record, "x") == first


@pytest.mark.parametrize("form", FORMS)
def test_another_response_stands_where_the_old_one_stood_and_nothing_else_changes(form: str):
    record = FORMS[form][0]
    before = json.dumps(record)
    changed = with_response(record, "new", "x")
    assert exchange(changed, "x") == (FORMS[form][1], "new")
    assert json.dumps(record) == before
    old = FORMS[form][2]
    if old:  # the same text with the one answer exchanged
        assert json.dumps(changed) == before.replace(f'"{old}"', '"new"')


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"text": "x"}, 'neither "instruction"'),
        ({"instructions": "x"}, 'did you mean "instruction"?'),
        ({"instruction": 3}, '"instruction" is the number 3, not a string'),
        ({"messages": "Hi"}, "not a list of messages"),
        ({"messages": ["Hi"]}, "messages[0] is the string 'Hi', not a message"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages[0].content is a list of 1, not a string"),
        ({"messages": [{"role": "usr", "content": "x"}]}, 'did you mean "user"?'),
        ({"conversations": [{"from": "human", "value": None}]}, "conversations[0].value is null, not a string"),
    ],
)
def test_what_is_no_record_is_one_line_with_its_place(record: dict, said: str):
    with pytest.raises(UserError, match="^file:3: ") as caught:
        exchange(record, "file:3")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_record_keeps_its_name_wherever_it_stands_and_however_it_is_labelled():
    labelled = {**ALPACA, "annotation": {"refuses": False}}
    assert record_names([ALPACA, CHAT]) == record_names([CHAT, labelled])[::-1]
    names = record_names([ALPACA, ALPACA, CHAT, ALPACA])
    assert len(set(names)) == 4 and [name.partition("-")[2] for name in names] == ["", "2", "", "3"]
    assert record_names([{**ALPACA, "output": "home"}])[0] not in names


def test_lines_lists_and_compressed_files_hold_the_same_records(tmp_path: Path):
    rows = [ALPACA, CHAT, {**ALPACA, "odd": "\ud83d", "big": 2**70, "float": 0.1 + 0.2}]
    write_rows(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    (tmp_path / "d.jsonl").write_bytes(
        b"\xef\xbb\xbf\r\n" + (tmp_path / "a.jsonl").read_bytes().replace(b"\n", b"\r\n")
    )
    for name in ("a.jsonl", "b.json", "c.jsonl.gz", "d.jsonl"):
        assert [row for _, row in read_rows(tmp_path / name)] == rows, name
    assert [where.rpartition("/")[2] for where, _ in read_rows(tmp_path / "a.jsonl")] == [
        f"a.jsonl:{n}" for n in (1, 2, 3)
    ]
    assert "é".encode() in json_line({"a": "é"})


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": ', "a.jsonl:2: not JSON"),
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"\r\n \n", "is empty"),
        ("a.jsonl", b"\xef\xbb\xbf [1, 2]", "record 1: not an object"),
        ("a.jsonl", b'"text"\n', "a.jsonl:1: not an object"),
        ("a.jsonl", b'{"a": "\xff"}', "a.jsonl:1: not UTF-8 (byte 7)"),
        ("a.json", b'[{"a": 1},', "a.json: not JSON"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 999, mtime=0)[:30], "cut short"),
        ("a.jsonl.gz", b"no gzip", "not a readable gzip file"),
    ],
)
def test_a_damaged_file_is_one_line_that_says_where(tmp_path: Path, name: str, data: bytes, said: str):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError) as caught:
        read_rows(tmp_path / name)
    assert said in str(caught.value)


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path):
    (tmp_path / "chats.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"did you mean .*chats\.jsonl"):
        read_rows(tmp_path / "chat.jsonl")
    (tmp_path / "chats2.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"chats\*.jsonl is a pattern that 2 files fit; name the files"):
        read_rows(tmp_path / "chats*.jsonl")
    (tmp_path / "chats[2].jsonl").write_text('{"a": 1}')
    assert [row for _, row in read_rows(tmp_path / "chats[2].jsonl")] == [{"a": 1}]
    with pytest.raises(UserError, match="is a directory"):
        read_rows(tmp_path)
    with pytest.raises(UserError, match="cannot write"):
        write_rows(tmp_path / "no" / "file", [])
