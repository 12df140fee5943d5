"""Prompt and response of records in every format, and one-line errors for other records."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from meshwright.data.records.exchanges import (
    find_first_request,
    name_records,
    read_records,
    replace_response,
    split_exchange,
    to_json_line,
    write_records,
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
def test_prompt_and_response_are_found_in_every_format(form: str):
    record, prompt, response, first = FORMS[form]
    assert split_exchange(record, "x") == (prompt, response)
    assert find_first_request(record, "x") == first


@pytest.mark.parametrize("form", FORMS)
def test_imported_response_leaves_other_fields_unchanged(form: str):
    record = FORMS[form][0]
    before = json.dumps(record)
    changed = replace_response(record, "new", "x")
    assert split_exchange(changed, "x") == (FORMS[form][1], "new")
    assert json.dumps(record) == before
    old = FORMS[form][2]
    if old:  # only the answer is replaced
        assert json.dumps(changed) == before.replace(f'"{old}"', '"new"')


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"text": "x"}, 'neither "instruction"'),
        ({"instructions": "x"}, 'did you mean "instruction"?'),
        ({"instruction": 3}, '"instruction" is the number 3, not a string'),
        ({"messages": "Hi"}, "not a list of messages"),
        ({"messages": ["Hi"]}, "messages[0] is the string 'Hi', not a message"),
        (
            {"messages": [{"role": "user", "content": [1]}]},
            'messages[0].content[0] is the number 1, not {"type": "text", "text": "..."}',
        ),
        ({"messages": [{"role": "usr", "content": "x"}]}, 'did you mean "user"?'),
        (
            {"conversations": [{"from": "human", "value": None}]},
            "conversations[0].value is null, and the message has no tool_calls",
        ),
    ],
)
def test_invalid_record_error_names_position(record: dict, said: str):
    with pytest.raises(UserError, match="^file:3: ") as caught:
        split_exchange(record, "file:3")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_record_name_is_independent_of_position_and_labels():
    labelled = {**ALPACA, "annotation": {"refuses": False}}
    assert name_records([ALPACA, CHAT]) == name_records([CHAT, labelled])[::-1]
    names = name_records([ALPACA, ALPACA, CHAT, ALPACA])
    assert len(set(names)) == 4 and [name.partition("-")[2] for name in names] == ["", "2", "", "3"]
    assert name_records([{**ALPACA, "output": "home"}])[0] not in names


def test_records_are_written_to_the_file_that_a_link_names(tmp_path: Path):
    (link := tmp_path / "link.jsonl").symlink_to(tmp_path / "records.jsonl")
    write_records(link, [ALPACA])
    assert link.is_symlink() and json.loads((tmp_path / "records.jsonl").read_text()) == ALPACA


def test_records_read_alike_from_lines_lists_and_compressed_files(tmp_path: Path):
    rows = [ALPACA, CHAT, {**ALPACA, "odd": "\ud83d", "big": 2**70, "float": 0.1 + 0.2}]
    write_records(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    (tmp_path / "d.jsonl").write_bytes(
        b"\xef\xbb\xbf\r\n" + (tmp_path / "a.jsonl").read_bytes().replace(b"\n", b"\r\n")
    )
    write_records(tmp_path / "e.jsonl.gz", rows)
    write_records(tmp_path / "f.jsonl.zst", rows)
    assert gzip.decompress((tmp_path / "e.jsonl.gz").read_bytes()) == (tmp_path / "a.jsonl").read_bytes()
    for name in ("a.jsonl", "b.json", "c.jsonl.gz", "d.jsonl", "e.jsonl.gz", "f.jsonl.zst"):
        assert [row for _, row in read_records(tmp_path / name)] == rows, name
    assert [where.rpartition("/")[2] for where, _ in read_records(tmp_path / "a.jsonl")] == [
        f"a.jsonl:{n}" for n in (1, 2, 3)
    ]
    assert "é".encode() in to_json_line({"a": "é"})


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": ', "a.jsonl:2: not JSON"),
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"\r\n \n", "is empty"),
        ("a.jsonl", b"\xef\xbb\xbf [1, 2]", "record 1: not an object"),
        ("a.jsonl", b'"text"\n', "a.jsonl:1: not an object"),
        ("a.jsonl", b'{"a": "\xff"}', "a.jsonl:1: not UTF-8 (byte 7)"),
        ("a.json", b'[{"a": 1},', "a.json: the JSON list is cut short"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 999, mtime=0)[:30], "cut short"),
        ("a.jsonl.gz", b"no gzip", "not a readable gzip file"),
    ],
)
def test_damaged_record_file_error_names_position(tmp_path: Path, name: str, data: bytes, said: str):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError) as caught:
        read_records(tmp_path / name)
    assert said in str(caught.value)


def test_missing_file_and_directory_errors_name_path(tmp_path: Path):
    (tmp_path / "chats.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"did you mean .*chats\.jsonl"):
        read_records(tmp_path / "chat.jsonl")
    (tmp_path / "chats2.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"chats\*.jsonl is a pattern that matches 2 files; name the files"):
        read_records(tmp_path / "chats*.jsonl")
    (tmp_path / "chats[2].jsonl").write_text('{"a": 1}')
    assert [row for _, row in read_records(tmp_path / "chats[2].jsonl")] == [{"a": 1}]
    with pytest.raises(UserError, match="is a directory"):
        read_records(tmp_path)
    with pytest.raises(UserError, match="cannot write"):
        write_records(tmp_path / "no" / "file", [])
