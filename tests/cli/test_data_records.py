"""`meshwright data label, balance, export, import, vary`: input and output files, one document, one-line errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.served import served
from tests.synthesis.test_labelling import GOOD
from tests.synthesis.test_variants import evolving, self_instruct_model


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six records, the first two of them labelled."""
    monkeypatch.chdir(tmp_path)
    records = [{"instruction": f"Do thing {n}", "input": "", "output": f"Done {n} 😀"} for n in range(6)]
    records[0]["annotation"] = {
        "prompt": ["directive"],
        "response": ["assertive"],
        "should_refuse": False,
        "refuses": False,
    }
    records[1]["annotation"] = {
        "prompt": ["directive"],
        "response": ["verdictive"],
        "should_refuse": True,
        "refuses": False,
    }
    path = Path("chats.jsonl")
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def lines(path: Path | str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_records_are_labelled_exported_imported_and_reported(command_line, chats: Path):
    with served(lambda body, number: json.dumps(GOOD)) as server:
        outcome = command_line(
            "data", "label", chats, "--url", server.url, "--model", "m", "--output", "l.jsonl", "--json"
        )
    answer = json.loads(outcome.output)
    assert (answer["labelled"], answer["kept"], answer["usage"]["requests"]) == (4, 2, 4)
    assert len(lines("l.jsonl")) == 6 and lines("l.jsonl")[2]["annotation"]["by"] == "model m"

    outcome = command_line("data", "export", "l.jsonl", "--to", "prodigy", "--output", "p.jsonl")
    assert (outcome.code, outcome.output) == (0, "6 rows: p.jsonl\n")
    rows = lines("p.jsonl")
    for row, answer_ in zip(rows, ["accept", "accept", "accept", "reject", "ignore", None], strict=True):
        if answer_:
            row["answer"] = answer_
    rows[2]["accept"] = ["prompt:directive", "refuses"]
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ("data", "import", "p.jsonl", "--from", "prodigy", "--records", "l.jsonl", "--output", "done.jsonl")
    outcome = command_line(*arguments)
    assert outcome.code == 0 and "labelled 3, unanswered 1, rejected 1, ignored 1" in outcome.output
    assert lines("done.jsonl")[2]["annotation"]["by"] == "prodigy" and lines("done.jsonl")[2]["annotation"]["refuses"]
    outcome = command_line(*arguments, "--leave-out-rejected", "--json")
    assert json.loads(outcome.output)["left_out"] == 1 and len(lines("done.jsonl")) == 5

    outcome = command_line("data", "balance", "done.jsonl", "l.jsonl", "--html", "b.html")
    assert outcome.code == 0 and "done.jsonl: 5 of 5 records labelled, 2 by a model's guess" in outcome.output
    assert "Speech acts of done.jsonl, l.jsonl" in Path("b.html").read_text()
    outcome = command_line("data", "balance", chats, "--target", "assertive=1,verdictive=1,directive=2", "--json")
    answer = json.loads(outcome.output)
    assert answer["groups"]["all"]["response"]["acts"]["directive"] == {"count": 0, "share": 0, "add": 2}
    assert answer["groups"]["all"]["refusals"]["answered"] == 1 and answer["target"]["directive"] == 0.5


def test_vary_writes_new_instructions_and_second_run_requests_none(command_line, chats: Path):
    for method, model, made in (("self-instruct", self_instruct_model, 5), ("evol-instruct", evolving, 12)):
        with served(model) as server:
            arguments = [
                "data",
                "vary",
                chats,
                "--method",
                method,
                "--count",
                5,
                "--rounds",
                2,
                "--output",
                "new.jsonl",
            ]
            arguments += [
                "--url",
                server.url,
                "--model",
                "m",
                "--price-in",
                1,
                "--journal",
                f"{method}.journal",
                "--json",
            ]
            first = json.loads(command_line(*arguments).output)
            assert first["records"] == made <= len(lines("new.jsonl")) and first["usage"]["cost"] > 0
            data, asked = Path("new.jsonl").read_bytes(), len(server.requests)
            again = json.loads(command_line(*arguments).output)
            assert Path("new.jsonl").read_bytes() == data and len(server.requests) == asked
            assert again["usage"]["sent"] == 0 and again["records"] == first["records"]


def test_api_key_is_sent_and_never_written_or_printed(command_line, chats: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_KEY", "sk-sesame")
    with served(lambda body, number: json.dumps(GOOD)) as server:
        outcome = command_line(
            *(
                "data",
                "label",
                chats,
                "--url",
                server.url,
                "--model",
                "m",
                "--key-variable",
                "MY_KEY",
                "--output",
                "l.jsonl",
            )
        )
    assert outcome.code == 0 and {head["Authorization"] for head in server.headers} == {"Bearer sk-sesame"}
    assert "sesame" not in outcome.output + outcome.errors
    assert not [path for path in Path().iterdir() if b"sesame" in path.read_bytes()]


SERVER = ("--url", "http://127.0.0.1:1/v1", "--model", "m", "--tries", "1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("balance", "chat.jsonl"), 'did you mean "chats.jsonl"'),
        (("balance", "chats.jsonl", "--target", "asertive=1"), 'did you mean "assertive"'),
        (("balance", "chats.jsonl", "--html", "no/page.html"), "cannot write no/page.html"),
        (("export", "chats.jsonl", "--to", "docano", "--output", "x"), 'did you mean "doccano"'),
        (("export", "chats.jsonl", "--to", "doccano", "--task", "span", "--output", "x"), 'did you mean "spans"'),
        (("export", "chats.jsonl", "--to", "doccano", "--output", "no/x"), "cannot write no/x"),
        (("import", "chats.jsonl", "--from", "doccano", "--records", "chats.jsonl", "--output", "x"), 'no "record"'),
        (("vary", "chats.jsonl", "--method", "self-instruct", *SERVER, "--output", "x"), "Connection refused"),
        (("vary", "chats.jsonl", "--method", "evolinstruct", *SERVER, "--output", "x"), 'did you mean "evol-instruct"'),
        (("label", "chats.jsonl", *SERVER, "--key-variable", "NO_SUCH", "--output", "x"), "NO_SUCH is not set"),
        (("label", "chats.jsonl", *SERVER, "--output", "x", "--journal", "chats.jsonl"), "RECORDS is the same file"),
        (
            ("label", "chats.jsonl", "--url", "localhost", "--model", "m", "--output", "x"),
            "not the address of a server",
        ),
        (("label", "chats.jsonl", "--model", "m", "--output", "x"), "--url is missing"),
        (("export", "chats.jsonl", "--to", "doccano", "--output", "./chats.jsonl"), "RECORDS is the same file"),
        (("balance", "chats.jsonl", "--html", "chats.jsonl"), "FILE... is the same file"),
        (("vary", "chats.jsonl", "--method", "self-instruct", *SERVER, "--output", "chats.jsonl"), "SEEDS is the same"),
        (("label", "chats.jsonl", *SERVER, "--output", "x", "--journal", "x"), "--journal is the same file"),
    ],
)
def test_user_mistake_is_one_line_exit_2_without_output(command_line, chats: Path, arguments, said: str):
    before = chats.read_bytes()
    outcome = command_line("data", *arguments)
    assert (outcome.code, outcome.output) == (2, "")
    line = outcome.errors.strip().splitlines()[-1]
    assert line.startswith("meshwright: error: ") and said in line
    assert chats.read_bytes() == before and not Path("x").exists()


def test_file_that_is_no_journal_is_refused_and_kept(command_line, chats: Path):
    Path("kept").write_text("text\n")
    outcome = command_line("data", "label", "chats.jsonl", *SERVER, "--output", "x", "--journal", "kept")
    assert outcome.code == 2 and "kept:1: not a journal of requests" in outcome.errors
    assert Path("kept").read_text() == "text\n"
