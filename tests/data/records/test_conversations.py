"""Records of every format are parsed to conversations; malformed ones give a one-line error."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from meshwright.data import prepare
from meshwright.data.records import record_files
from meshwright.data.records.conversations import RecordFormat
from meshwright.data.records.messages import Message
from meshwright.data.sources.reading import Reader
from meshwright.data.sources.resolution import find_files
from meshwright.data.tokenizers.report import measure_tokenizer
from meshwright.errors import UserError
from meshwright.recipe import DataRecipe, Recipe
from meshwright.toml import read_toml

CHAT = [{"role": "user", "content": "Q é"}, {"role": "assistant", "content": "A"}]
RECORDS: dict[str, list[Any]] = {
    "instruction": [{"instruction": "Add.", "input": "1 2", "output": "3"}, {"instruction": "Hi", "output": "Ho\r\n"}],
    "chat": [{"messages": CHAT}, {"messages": [{"role": "system", "content": "S"}, *CHAT, *CHAT]}],
    "preference": [
        {"prompt": "Q", "chosen": "good", "rejected": "bad"},
        {"prompt": "R", "chosen": "b", "rejected": "c"},
    ],
    "unpaired": [
        {"prompt": "Q", "completion": "good", "label": True},
        {"prompt": "R", "completion": "bad", "label": False},
    ],
}


def write(path: Path, records: list[Any]) -> Path:
    """Write the records in the format of the suffix."""
    match path.suffix:
        case ".json":
            path.write_text(json.dumps(records, indent=1))
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
        case ".gz":
            path.write_bytes(gzip.compress("".join(json.dumps(record) + "\n" for record in records).encode()))
        case _:
            path.write_text("\n".join(map(json.dumps, records)))
    return path


def read(path: Path, kind: str, **renamed: str):
    [file] = find_files([str(path)], records=True)
    return list(Reader(records=RecordFormat(kind, renamed)).read_documents(file))


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".jsonl.gz"])
@pytest.mark.parametrize("kind", RECORDS)
def test_record_parses_alike_in_every_format(tmp_path: Path, kind: str, suffix: str):
    documents = read(write(tmp_path / f"data{suffix}", RECORDS[kind]), kind)
    records = RecordFormat(kind)
    assert [document.example for document in documents] == [records.parse_example(record) for record in RECORDS[kind]]
    place = {".json": ":record ", ".parquet": ":row "}.get(suffix, ":")
    assert [document.name for document in documents] == [f"data{suffix}{place}{number}" for number in (1, 2)]


def test_records_parse_to_expected_conversations():
    [add, hi] = map(RecordFormat("instruction").parse_example, RECORDS["instruction"])
    assert add.branches == ((Message("user", "Add.", "1 2"), Message("assistant", "3")),) and add.prompt == ()
    assert add.join_texts() == "Add.\n\n1 2\n\n3"
    assert hi.branches[0][0] == Message("user", "Hi")
    share = {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}], "id": 7}
    assert RecordFormat("chat").parse_example(share).branches == ((Message("user", "Q"), Message("assistant", "A")),)
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}, {"type": "text", "text": "!"}]}]}
    assert RecordFormat("chat").parse_example(parts).branches == ((Message("user", "Q!"),),)
    renamed = RecordFormat("instruction", {"instruction": "question", "output": "answer"})
    assert renamed.parse_example({"question": "Q", "answer": "A"}).branches[0][1] == Message("assistant", "A")


def test_preference_formats_parse_alike():
    turn = {role: {"role": role, "content": role[0]} for role in ("user", "assistant")}
    good, bad = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
    history = [turn["user"], turn["assistant"], turn["user"]]
    ways = [
        {"prompt": history, "chosen": "good", "rejected": "bad"},
        {"prompt": history, "chosen": [good], "rejected": [bad]},
        {"prompt": history, "chosen": [*history, good], "rejected": [*history, bad]},
        {"chosen": [*history, good], "rejected": [*history, bad]},
    ]
    example, *others = (RecordFormat("preference").parse_example(way) for way in ways)
    assert others == [example] * 3
    assert [message.content for message in example.prompt] == ["u", "a", "u"]
    assert [branch[0].content for branch in example.branches] == ["good", "bad"]


@pytest.mark.parametrize("label", [True, False])
def test_unpaired_labels_of_trl_and_llama_factory_parse_alike(label: bool):
    """Schemas of TRL's unpaired preference and of LLaMA-Factory's KTO data (`kto_tag`)."""
    shared = {"kto_tag": label, "system": "S"}
    turns = [{"role": role, "content": text} for role, text in (("system", "S"), ("user", "Q"), ("assistant", "a"))]
    for record in (
        {"prompt": "Q", "completion": "a", "label": label, "system": "S"},
        {"prompt": turns[:2], "completion": turns[2:], "label": int(label)},
        {"prompt": turns[:2], "completion": turns[2:], "label": str(label)},
        {"instruction": "Q", "output": "a", **shared},
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "a"}], **shared},
        {"messages": turns[1:], **shared},
    ):
        found = RecordFormat("unpaired").parse_example(record)
        assert found.prompt == (Message("system", "S"), Message("user", "Q"))
        assert (found.branches, found.label, found.unused) == (((Message("assistant", "a"),),), label, set())
    more = {"prompt": "Q", "completion": "a", "label": label, "score": 3, "kto_tag": label, "messages": turns}
    assert RecordFormat("unpaired").parse_example(more).unused == {"score", "kto_tag", "messages"}


@pytest.mark.parametrize(
    "kind, record, problem",
    [
        (
            "instruction",
            {"instruction": "Q", "outputs": "A"},
            'no key "output" .* data.record_keys = {output = "outputs"}',
        ),
        ("instruction", {"instruction": "Q", "output": None}, '"output" is null, not a string'),
        ("instruction", {"instruction": "Q", "input": 3, "output": "A"}, '"input" is the number 3, not a string'),
        ("instruction", ["Q", "A"], 'is a list of 2, not an object; expected {"instruction": "..."'),
        ("unpaired", {"prompt": "Q", "completion": "a", "label": "yes"}, "\"label\" is the string 'yes', not true"),
        ("unpaired", {"prompt": "Q", "completion": "a"}, 'no key "label" .it has "prompt", "completion"'),
        ("unpaired", {"completion": "a", "label": True}, 'no key "prompt"'),
        ("unpaired", {"text": "a", "label": True}, 'no key "prompt"'),
        (
            "unpaired",
            {"prompt": "Q", "completion": [CHAT[1], CHAT[0]], "label": True},
            'ends with a turn of role "user"; the judged',
        ),
        ("chat", {"messages": "Q"}, "\"messages\" is the string 'Q', not a list of messages"),
        ("chat", {"messages": []}, '"messages" is an empty list'),
        ("chat", {"text": "Q"}, 'no key "messages" .it has "text".'),
        ("chat", {"messages": [CHAT[0], "A"]}, r"messages\[1\] is the string 'A', not a message"),
        (
            "chat",
            {"messages": [{"role": "user", "content": 5}]},
            r"messages\[0\].content is the number 5, not a string",
        ),
        (
            "chat",
            {"messages": [{"role": "usr", "content": "Q"}]},
            r'messages\[0\].role is "usr", .* did you mean "user"',
        ),
        ("chat", {"messages": [{"role": "user"}]}, r'messages\[0\] has no "content" .it has "role".'),
        ("preference", {"prompt": "Q", "chosen": "A"}, 'no key "rejected"'),
        (
            "preference",
            {"prompt": "Q", "chosen": 1, "rejected": "B"},
            '"chosen" is the number 1, not a list .* or a string',
        ),
        ("preference", {"chosen": "A", "rejected": "B"}, 'no key "prompt", and .* do not begin with the same message'),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_malformed_record_error_shows_expected_format(tmp_path: Path, suffix: str, kind: str, record, problem: str):
    good = RECORDS[kind][0]  # before a record without its keys, it would make the file change its schema
    before = [good] if not isinstance(record, dict) or good.keys() - {"input", "label"} <= record.keys() else []
    path = write(tmp_path / f"data{suffix}", [*before, record])
    where = f"{path}: record {len(before) + 1}" if suffix == ".json" else f"{path}:{len(before) + 1}"
    with pytest.raises(UserError, match=f"^{where}: the record .*{problem}"):
        read(path, kind)


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
@pytest.mark.parametrize(
    "kind, first, then, problem",
    [
        (
            "instruction",
            RECORDS["instruction"][1],
            {"prompt": "Q", "completion": "A"},
            r'no key "instruction" \(it has "prompt", "completion"\)',
        ),
        ("instruction", RECORDS["instruction"][0], {"instruction": "Q"}, r'no key "output" \(it has "instruction"\)'),
        ("chat", {"messages": CHAT}, {"conversations": CHAT}, r'no key "messages" \(it has "conversations"\)'),
        ("chat", {"conversations": CHAT}, {"messages": CHAT}, r'no key "conversations" \(it has "messages"\)'),
        ("preference", RECORDS["preference"][0], {"chosen": CHAT, "rejected": CHAT}, 'no key "prompt"'),
        (
            "preference",
            {"chosen": CHAT, "rejected": CHAT},
            {"prompt": "Q", "chosen": "A", "rejected": "B"},
            'the key "prompt", which the records before it do not have',
        ),
        (
            "unpaired",
            {"prompt": "Q", "completion": "A", "label": True},
            {"messages": CHAT, "label": True},
            r'no key "prompt" \(it has "messages", "label"\)',
        ),
    ],
)
def test_file_that_changes_its_schema_is_refused(tmp_path: Path, suffix: str, kind: str, first, then, problem: str):
    path = write(tmp_path / f"data{suffix}", [first, first, then])
    where = f"{path}: record 3" if suffix == ".json" else f"{path}:3"
    with pytest.raises(UserError, match=f"^{where}: the record has {problem}.*a file of their own; expected {{"):
        read(path, kind)
    assert len(read(write(path, [then]), kind) if problem != r'no key "output" \(it has "instruction"\)' else [0]) == 1


def test_openai_preferences_keep_one_schema(tmp_path: Path):
    answers = {"preferred_output": CHAT[1:], "non_preferred_output": [{"role": "assistant", "content": "B"}]}
    record = {"input": {"messages": CHAT[:1]}, **answers}
    assert len(read(write(tmp_path / "data.jsonl", [record] * 3), "preference")) == 3
    with pytest.raises(UserError, match=':2: the record has no key "input"'):
        read(write(tmp_path / "data.jsonl", [record, RECORDS["preference"][0]]), "preference")


def test_files_of_one_source_may_have_different_schemas(tmp_path: Path):
    write(tmp_path / "a.jsonl", [{"messages": CHAT}])
    write(tmp_path / "b.jsonl", [{"conversations": CHAT}])
    reader = Reader(records=RecordFormat("chat"))
    found = [one.example for file in find_files([str(tmp_path)]) for one in reader.read_documents(file)]
    assert len(found) == 2 and found[0] == found[1]


def test_columns_that_are_not_read_are_counted_like_unused_keys(tmp_path: Path):
    """The same records as JSON Lines and as Parquet; required keys are read but not used."""
    rows = [{"messages": CHAT, "id": n, "meta": {"url": "u"}, "score": float(n)} for n in range(600)]
    counts = []
    for suffix in (".jsonl", ".parquet"):
        data = prepare(
            DataRecipe(
                source=str(write(tmp_path / f"data{suffix}", rows)),
                records="chat",
                template="instruction",
                tokenizer="bytes",
                sequence=80,
                validation_fraction=0.0,
                cache=str(tmp_path / "cache"),
                clean={"required_keys": {"meta.url": "text"}, "exact_duplicates": False},
            )
        )
        counts.append(data.summary()["unused_keys"])
    assert counts[0] == {"id": 600, "meta": 600, "score": 600}
    assert counts[1] == counts[0]


def test_malformed_records_are_dropped_with_required_keys(tmp_path: Path):
    records = [*RECORDS["instruction"], {"instruction": "Q"}, {"instruction": "Q", "output": "A", "score": "high"}]
    records = [{"score": 1, **record} for record in records]
    data = prepare(
        DataRecipe(
            source=str(write(tmp_path / "data.jsonl", records)),
            records="instruction",
            clean={"required_keys": {"score": "number"}},
            tokenizer="bytes",
            sequence=80,
            validation_fraction=0.0,
            cache=str(tmp_path / "cache"),
        )
    )
    assert data.summary()["dropped"]["schema"] == 2
    assert data.split("train").documents == 2


@pytest.mark.parametrize(
    "text, problem",
    [
        ('[{"instruction": "Q", "output": "A"}, {"instruction": "Q", "out', "record 2 is cut short"),
        ('[{"instruction": "Q", "output": "A"},', "cut short, its end is missing"),
        ('[{"instruction": "Q", "output": "A"}', "cut short, its end is missing"),
        ('[{"instruction": "Q", "output": "A"} {"a": 1}]', "record 1: not JSON .a comma"),
        ('[{"instruction": "Q", "output": "A"}] x', "record 1: not JSON .there is more after"),
        ('[{"instruction": "Q" "output": "A"}, {"instruction": "Q", "output": "A"}]', "record 1: not JSON .Expecting"),
        ('{"instruction": "Q", "output": "A"}\n{}', 'not a JSON list: .* data.format = "jsonl"'),
        ("", "is empty"),
    ],
)
def test_damaged_json_list_error_names_record(tmp_path: Path, text: str, problem: str):
    path = tmp_path / "data.json"
    path.write_text(text)
    with pytest.raises(UserError, match=problem):
        read(path, "instruction")


def test_huge_json_number_error_names_record(tmp_path: Path):
    text = '{"instruction": "Q", "output": "A", "id": %s}' % ("1" * 5000)
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "a.json").write_text(f"[{text}]")
    for name, where in (("a.jsonl", ":1: the record"), ("a.json", ": record 1:")):
        with pytest.raises(UserError, match=rf"{name}{where}.* not JSON .*digits"):
            read(tmp_path / name, "instruction")


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_json_list_reading_is_independent_of_chunk_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int):
    monkeypatch.setattr(record_files, "_CHUNK", chunk)
    records = [{"instruction": f'"Q{number}" \\ \n é😀', "output": "A" * number} for number in range(1, 30)]
    path = tmp_path / "data.json"
    path.write_text("\ufeff" + json.dumps(records, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [one.example for one in read(path, "instruction")] == list(
        map(RecordFormat("instruction").parse_example, records)
    )


def test_long_json_list_is_read_in_bounded_memory(tmp_path: Path):
    path = tmp_path / "data.json"
    row = json.dumps({"instruction": "Q" * 10_000, "output": "A"})
    path.write_text("[" + ",\n".join([row] * 2_000) + "]")
    [file] = find_files([str(path)], records=True)
    tracemalloc.start()
    assert sum(1 for _ in Reader(records=RecordFormat("instruction")).read_documents(file)) == 2_000
    assert tracemalloc.get_traced_memory()[1] < 12e6  # of 20 MB
    tracemalloc.stop()
    path.write_text(json.dumps([{"instruction": "Q" * 20_000_000, "output": "A"}]))
    [document] = read(path, "instruction")
    assert len(document.text) == 20_000_003


def test_record_too_long_for_tokenizer_is_refused_or_dropped(tmp_path: Path):
    records = [{"instruction": "Q" * 17_000_000, "output": "A"}, {"instruction": "Q", "output": "A"}]
    settings = {"records": "instruction", "tokenizer": "bytes", "sequence": 80, "validation_fraction": 0.0}
    path = write(tmp_path / "data.jsonl", records)
    settings |= {"source": str(path), "cache": str(tmp_path / "cache")}
    with pytest.raises(UserError, match=r"data.jsonl:1: .* 17,000,003 characters.* data.clean.maximum_characters"):
        prepare(DataRecipe(**settings))
    data = prepare(DataRecipe(**settings, clean={"maximum_characters": 1000}))
    assert data.summary()["dropped"]["length"] == 1 and data.split("train").documents == 1


@pytest.mark.parametrize("kind", RECORDS)
def test_tokenizer_report_covers_records(tmp_path: Path, kind: str):
    records = RECORDS[kind]
    if kind == "unpaired":  # each split needs two
        records = [{"prompt": f"Q{number}", "completion": "a", "label": number % 2 == 0} for number in range(12)]
    path = write(tmp_path / "data.jsonl", records)
    recipe = DataRecipe(
        source=str(path),
        records=kind,
        template="instruction",
        tokenizer="bytes",
        sequence=250,
        validation_fraction=0.5,
        cache=str(tmp_path / "cache"),
    )
    data = prepare(recipe)
    report = measure_tokenizer(recipe, data)
    texts = [*data.iterate_documents("validation")]
    assert texts and {*texts} <= {document.text for document in read(path, kind)}
    assert report["round_trip"]["exact"] == report["round_trip"]["documents"] == len(texts)
    assert report["tokens"] == data.summary()["tokens"] > report["bytes"]


def test_files_without_records_are_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match="a.txt: records must be JSON Lines .* a JSON list .* or Parquet"):
        read(tmp_path / "a.txt", "chat")
    path = write(tmp_path / "b.parquet", [{"question": "Q", "answer": "A"}])
    with pytest.raises(UserError, match="none of the columns instruction, input, output, .*it has question, answer."):
        read(path, "instruction")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="not a complete Parquet file"):
        read(path, "instruction")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"instruction": "Q", "output": "A"}\n' * 99)[:-12])
    with pytest.raises(UserError, match="is cut short"):
        read(tmp_path / "c.jsonl.gz", "instruction")
    (tmp_path / "d.jsonl").write_text('{"instruction": "Q", "output": "A"}\n{"instruction": "Q", ')
    with pytest.raises(UserError, match="d.jsonl:2: the record is not JSON"):
        read(tmp_path / "d.jsonl", "instruction")


def test_cleaning_covers_whole_records_and_masks_reach_tokens(tmp_path: Path):
    records = [
        {"instruction": "Write to", "input": "ann@example.org", "output": "Done, bob@example.org knows."},
        {"instruction": "Twice", "output": "the same"},
        {"instruction": "Twice", "output": "the same"},
    ]
    path = write(tmp_path / "data.jsonl", records)
    path.write_bytes(path.read_bytes() + b'\n{"instruction": "Q", "output": "\xff"}')
    data = prepare(
        DataRecipe(
            source=str(path),
            records="instruction",
            clean={"mask": ["email"]},
            tokenizer="bytes",
            sequence=200,
            validation_fraction=0.0,
            cache=str(tmp_path / "cache"),
        )
    )
    dropped = {rule: count for rule, count in data.summary()["dropped"].items() if count}
    assert dropped == {"encoding": 1, "exact_duplicates": 1}
    batch = data.split("train").read_batch([0])
    text = data.tokenizer.decode(batch.tokens[0])
    assert "<email>" in text and "@" not in text
    trained = data.tokenizer.decode(batch.targets[0][batch.targets[0] >= 0])
    assert trained == "Done, <email> knows.<|endoftext|>the same<|endoftext|>"


@pytest.mark.parametrize(
    "keys, problem",
    [
        ({"template": "chatml"}, "template applies to records"),
        ({"records": "chats"}, 'unknown kind "chats"; did you mean "chat"'),
        ({"records": "chat", "record_keys": {"message": "x"}}, 'unknown key of chat records "message"'),
        ({"records": "chat", "text_key": "x"}, "text_key applies to text"),
        ({"records": "chat", "format": "wet"}, 'format "wet" is text'),
        ({"records": "chat", "clean": {"heuristics": ["c4"]}}, "must stay whole"),
        ({"records": "preference", "train_on": "all"}, "trained on their responses"),
    ],
)
def test_contradicting_recipe_keys_are_refused(tiny_recipe: Path, keys: dict[str, Any], problem: str):
    tables = read_toml(tiny_recipe, "recipe")
    tables["data"] |= keys
    with pytest.raises(UserError, match=problem):
        Recipe.from_tables(tables)


def test_only_records_equal_in_everything_are_duplicates(tmp_path: Path):
    """A prompt has a desirable and an undesirable answer of one text; texts may be cut differently into turns."""

    def count(kind: str, *records: dict[str, Any], **clean: Any) -> int:
        path = write(tmp_path / "data.jsonl", list(records))
        recipe = DataRecipe(
            source=str(path), records=kind, template="instruction", tokenizer="bytes", sequence=99,
            validation_fraction=0.0, cache=str(tmp_path / "cache"), clean={"minimum_characters": 1, **clean},
        )  # fmt: skip
        return prepare(recipe).summary()["dropped"]["exact_duplicates"]

    good = {"prompt": "Q", "completion": "A", "label": True}
    assert count("unpaired", good, good | {"label": False}, good | {"completion": " A\n"}) == 1
    turns = [{"prompt": one, "completion": "c"} for one in ("a\n\nb", "a")]
    assert count("instruction", turns[0], turns[1] | {"completion": "b\n\nc"}) == 0
    tools = [{"name": name} for name in "fg"]
    assert count("instruction", *({"prompt": "Q", "completion": "A", "tools": [tool]} for tool in tools)) == 0
    weighted = [{"messages": [CHAT[0], CHAT[1] | {"weight": weight}, *CHAT]} for weight in (0, 1)]
    assert count("chat", *weighted) == 0 and count("chat", *weighted, weighted[0] | {"source": "x"}) == 1
    mails = [{"prompt": f"{name}@example.org", "completion": "A"} for name in ("ann", "bob")]
    assert count("instruction", *mails) == 0 and count("instruction", *mails, mask=["email"]) == 1


@pytest.mark.parametrize("place", ["tool", "name"])
def test_record_with_a_lone_surrogate_outside_its_texts_is_dropped(tmp_path: Path, place: str):
    bad = {"messages": [CHAT[0] | ({"name": "\ud800"} if place == "name" else {}), CHAT[1]]}
    bad |= {"tools": [{"name": "f", "description": "\ud800"}]} if place == "tool" else {}
    path = write(tmp_path / "data.jsonl", [{"messages": CHAT}, bad])
    recipe = DataRecipe(
        source=str(path), records="chat", template="instruction", tokenizer="bytes", sequence=99,
        validation_fraction=0.0, cache=str(tmp_path / "cache"), clean={"minimum_characters": 1},
    )  # fmt: skip
    assert prepare(recipe).summary()["dropped"]["encoding"] == 1
