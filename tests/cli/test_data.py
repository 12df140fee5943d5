"""`meshwright data`: text for people, one JSON document for programs."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshwright.data.cleaning.rules import list_enabled_rules
from meshwright.recipe import CleanRecipe
from meshwright.terminal import escape_control_characters, escape_in_table
from tests.adapters.adapter_cases import small, write_base


@pytest.fixture
def recipe(tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe whose corpus has 50 short documents, one of them twice."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(50):
        (texts / f"{number:02d}.txt").write_text(f"document \x1b[1m{number}\n" * 3 + "and more words\n" * 2)
    (texts / "copy.txt").write_text((texts / "07.txt").read_text())
    tiny_recipe.write_text(
        tiny_recipe.read_text().replace(
            '"stdlib"', f'"{texts}"\nvalidation_fraction = 0.3\nclean.maximum_control_fraction = 0.1'
        )
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tiny_recipe


def test_prepare_prints_one_document_and_progress_on_standard_error(command_line, recipe: Path):
    outcome = command_line("data", "prepare", recipe, "data.sequence=16", "--json")
    assert outcome.code == 0, outcome.errors
    answer = json.loads(outcome.output)
    assert answer["schema"] == 1
    assert answer["documents"] == 50 and len(answer["sha256"]) == 64
    assert answer["tokens"] == answer["bytes"] + 2 * 50
    assert answer["dropped"] == {rule: int(rule == "exact_duplicates") for rule in list_enabled_rules(CleanRecipe())}
    assert "kept 50 of 51 documents; dropped: exact_duplicates 1" in outcome.errors
    again = command_line("data", "prepare", recipe, "data.sequence=16", "--json")
    assert json.loads(again.output) == answer and again.errors == ""


def test_prepare_repairs_damaged_files(command_line, recipe: Path):
    answer = json.loads(command_line("data", "prepare", recipe, "--json").output)
    shard = Path(answer["directory"]) / "train" / "00000.tokens.bin"
    contents = bytearray(shard.read_bytes())
    contents[100] ^= 1
    shard.write_bytes(contents)
    outcome = command_line("data", "prepare", recipe, "--json")
    assert f"{shard} is damaged (its sha256 differs): preparing it again" in outcome.errors
    assert json.loads(outcome.output) == answer


def test_show_draws_rows_with_their_documents_and_masked_targets(command_line, recipe: Path):
    outcome = command_line("data", "show", recipe, "--rows", "3", "data.sequence=100")
    assert outcome.code == 0, outcome.errors
    assert outcome.output.count("\nsample ") == 3
    assert "no target: another document follows" in outcome.output
    assert "dropped by exact_duplicates    1  (first: copy.txt)" in outcome.output
    assert "\x1b" not in outcome.output and "document \\x1b[1m" in outcome.output


def test_show_counts_masked_text(command_line, recipe: Path):
    outcome = command_line("data", "show", recipe, "--rows", "0", 'data.clean.mask=["email"]')
    assert outcome.code == 0, outcome.errors
    assert re.search(r"masked email +0\n", outcome.output)


def test_masked_text_is_masked_in_training_samples(command_line, recipe: Path, tmp_path: Path):
    for path in (tmp_path / "texts").iterdir():
        path.write_text(f"{path.read_text()}write to {path.stem}@example.org\n")
    outcome = command_line("data", "prepare", recipe, 'data.clean.mask=["email"]', "--json")
    answer = json.loads(outcome.output)
    assert answer["masked"] == {"email": 50}
    [text] = Path(answer["directory"], "validation").glob("*.text.txt")
    kept = text.read_text()
    assert kept.count("write to <email>\n") == answer["splits"]["validation"]["documents"] and "@" not in kept


def test_report_writes_one_page_about_the_cleaning(command_line, recipe: Path, tmp_path: Path):
    page = tmp_path / "page.html"
    outcome = command_line("data", "report", recipe, "--output", page)
    assert (outcome.code, outcome.output) == (0, f"report: {page}\n")
    assert "<b>exact_duplicates</b>" in page.read_text() and "repeats 07.txt" in page.read_text()
    answer = json.loads(command_line("data", "report", recipe, "--json").output)
    assert Path(answer["report"]).read_text() == page.read_text()
    assert answer["dropped"]["exact_duplicates"] == 1 and answer["documents"] == {"before": 51, "after": 50}
    outcome = command_line("data", "report", recipe, "--output", tmp_path / "nowhere" / "page.html")
    assert outcome.code == 2 and "cannot write" in outcome.errors.splitlines()[-1]


def test_show_prints_samples_that_training_reads(command_line, recipe: Path):
    answer = json.loads(command_line("data", "show", recipe, "--rows", "4", "data.sequence=100", "--json").output)
    assert len(answer["rows"]) == 4
    for row in answer["rows"]:
        documents = row["documents"]
        assert documents[0]["start"] == 0 and documents[-1]["stop"] == 100
        assert [one["stop"] for one in documents[:-1]] == [two["start"] for two in documents[1:]]
        # Targets are masked exactly at the ends of documents; the last document may end beyond the row.
        ends = [one["stop"] - 1 for one in documents[:-1]]
        assert [place for place in row["masked_targets"] if place != 99] == ends
        assert row["target_tokens"] == 100 - len(row["masked_targets"])
        for document in documents[1:]:
            assert document["text"].startswith("<|endoftext|>")


def test_without_a_document_mask_every_row_is_one_document(command_line, recipe: Path):
    outcome = command_line("data", "show", recipe, "data.document_mask=false", "data.sequence=100", "--json")
    assert all(len(row["documents"]) == 1 and not row["masked_targets"] for row in json.loads(outcome.output)["rows"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.source=missing.txt", 'data.source: "missing.txt" does not exist'),
        ("data.tokenizer=bpee", 'did you mean "bpe"?'),
        ("data.clean.encoding=utf9", 'unknown encoding "utf9"; did you mean "utf-8"?'),
        ("data.sequence=1000000", "add text"),
        ("data.clean.minimum_characters=10000", "no document remains after cleaning; dropped by rule: length 51"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(command_line, recipe: Path, override: str, said: str):
    outcome = command_line("data", "prepare", recipe, override, "--json")
    assert (outcome.code, outcome.output) == (2, "")
    line = outcome.errors.strip().splitlines()[-1]
    assert line.startswith("meshwright: error: ") and said in line


def test_help_shows_example_without_heavy_imports():
    program = """
import sys
from meshwright.cli.main import main
assert main(["data", "show", "--help"]) == 0
print({"torch", "numpy", "tokenizers", "pydantic", "rich"} & set(sys.modules))
"""
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "meshwright data show recipe.toml --rows 4" in outcome.stdout
    assert outcome.stdout.endswith("set()\n")


def test_control_characters_are_escaped():
    assert escape_in_table("a\n\x00b\u2028") == "a\\n\\x00b\\u2028"
    assert escape_control_characters("a\tb\x1b[2J\r\x00é\u202e") == "a   b\\x1b[2J\\r\\x00é\\u202e"


@pytest.fixture
def chats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe of chats with a system message, two turns and a key that is not used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    turns = [{"role": "system", "content": "Help."}]
    for question in ("What is <this>?", "And that?"):
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": "Number 7."}]
    lines = [
        json.dumps({"messages": [*turns[:-1], {"role": "assistant", "content": f"Number {number}."}], "source": "web"})
        for number in range(30)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token if m.role == 'assistant' else '' }}"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (tmp_path / "chat.jinja").write_text(template)
    recipe = tmp_path / "chats.toml"
    recipe.write_text(
        'layout = "dp1"\n[model]\nfamily = "llama"\nlayers = 1\nhidden = 16\nheads = 2\n[data]\nrecords = "chat"\n'
        f'source = "{tmp_path}/chats.jsonl"\ntemplate = "{tmp_path}/chat.jinja"\ntokenizer = "bytes"\nsequence = 200\n'
        "validation_fraction = 0.2\n[train]\nsteps = 1\nbatch = 1\nlearning_rate = 0.1\n"
    )
    return recipe


def test_show_counts_turns_and_tokens_by_author_and_marks_what_is_trained(command_line, chats: Path, tmp_path: Path):
    page = tmp_path / "samples.html"
    outcome = command_line("data", "show", chats, "--rows", "1", "--html", page, "--json")
    answer = json.loads(outcome.output)
    documents = answer["splits"]["train"]["documents"]
    marks = answer["marks"]
    assert marks["turns"] == {"system": documents, "user": 2 * documents, "assistant": 2 * documents}
    assert marks["spans"] == 2 * documents and set(marks["trained_tokens"]) == {"assistant"}
    assert marks["tokens"]["user"] == documents * len("What is <this>?And that?")
    assert marks["trained_tokens"]["assistant"] == marks["tokens"]["assistant"]
    assert answer["unused_keys"] == {"source": 30}
    parts = answer["rows"][0]["documents"][0]["parts"]
    assert [(part["author"], part["trained"], part["text"]) for part in parts[:2]] == [
        ("template", False, "<system>"), ("system", False, "Help."),
    ]  # fmt: skip
    trained = "".join(part["text"] for part in parts if part["trained"])
    assert re.fullmatch(r"Number 7\.(<\|.*?\|>)Number \d+\.\1", trained)
    html = page.read_text()
    assert '<span class="part trained" title="assistant">Number 7.</span>' in html and "&lt;this&gt;" in html
    text = command_line("data", "show", chats, "--rows", "1").output
    assert re.search(r"⟦Number 7\.<\|.*\|>⟧<user>And that\?<assistant>⟦Number", text), text
    assert re.search(r"^keys not used\s+source \(30\)$", text, re.MULTILINE)
    assert re.search(rf"^user\s+{2 * documents}\s+[\d,]+\s+0\s+0%$", text, re.MULTILINE)


def test_recipe_maps_messages_and_keeps_the_reasoning_of_every_turn(command_line, chats: Path, tmp_path: Path):
    """Through the command: keys, roles, thinking, and the warning about turns without an end."""
    turns = [
        {"who": "narrator", "words": "Help."}, {"who": "user", "words": "Q1"},
        {"who": "bot", "words": "A1", "reasoning": "R1"}, {"who": "user", "words": "Q2"},
    ]  # fmt: skip
    lines = [
        json.dumps({"messages": [*turns, {"who": "bot", "words": f"A{number}", "reasoning": "R2"}]})
        for number in range(20)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{% if loop.last and m.reasoning_content %}({{ m.reasoning_content }})"
        "{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    keys = ('data.message_keys={role="who", content="words"}', 'data.record_roles={narrator="system"}')
    command = ("data", "show", chats, "--rows", "0", "--json", "data.clean.exact_duplicates=false", *keys)
    outcome = command_line(*command, "data.thinking=all")
    answer = json.loads(outcome.output)
    kept = answer["splits"]["train"]["documents"]
    assert answer["documents"] == 40 and answer["marks"]["spans"] == kept and answer["unused_keys"] == {}
    assert answer["marks"]["trained_tokens"]["assistant"] >= kept * len("(R1)A1")
    assert "ends the assistant's turns without a token" in outcome.errors
    plain = json.loads(command_line(*command).output)
    assert plain["documents"] == 20 and plain["marks"]["spans"] == 2 * plain["splits"]["train"]["documents"]


def test_teacher_caches_its_most_probable_tokens_once(command_line, recipe: Path, tmp_path: Path):
    config = dataclasses.replace(small(layers=1), vocabulary=257, max_positions=256)
    write_base(tmp_path / "teacher", config, torch.float32)
    given = ["data", "teacher", recipe, "data.tokenizer=bytes", f"distill.teacher={tmp_path / 'teacher'}", "--json"]
    first, again = (json.loads(command_line(*given, "distill.top_k=3").output) for _ in range(2))
    assert first["computed"] == first["sequences"] > 0 and again["computed"] == 0
    assert 0 < first["mean_rest"] < 1 and first["directory"] == again["directory"]
    for more, message in (
        ((), "distill.top_k is 0"),
        (("distill.top_k=3", "--layout", "tp3"), "tp3 does not divide the model's"),
        (("distill.top_k=3", "--layout", "dp2 bf16"), "computed in fp32; leave bf16 out"),
        (("distill.top_k=3", "--layout", "dp2 zeppelin"), "zeppelin"),
    ):
        refused = command_line(*given, *more)
        assert refused.code == 2 and message in refused.errors and len(refused.errors.splitlines()) == 1
    (file,) = Path(first["directory"]).glob("validation-*-ids.npy")
    expected = file.read_bytes()
    file.unlink()
    on_ranks = json.loads(command_line(*given, "distill.top_k=3", "--layout", "dp2 zero3").output)
    assert 0 < on_ranks["computed"] < first["sequences"] and file.read_bytes() == expected
