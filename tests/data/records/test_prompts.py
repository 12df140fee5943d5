"""A prompt is in an example once, whether a record has it next to its answers, in them, or both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.data import prepare
from meshwright.data.records.conversations import RecordFormat
from meshwright.data.records.messages import MalformedRecord, Message
from meshwright.data.records.parsed_example import Example
from meshwright.recipe import DataRecipe

SYSTEM, ASK = {"role": "system", "content": "S"}, {"role": "user", "content": "Q"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("good", "bad"))
ASKED = (Message("system", "S"), Message("user", "Q"))


def parse(kind: str, **record: Any) -> Example:
    [example] = RecordFormat(kind).parse_examples(record)
    return example


@pytest.mark.parametrize(
    ("prompt", "before", "more"),
    [
        ("Q", [SYSTEM, ASK], {}),
        ("Q", [SYSTEM, ASK], {"system": "S"}),
        ("Q", [ASK], {"system": "S"}),
        ([SYSTEM, ASK], [ASK], {}),
        ([SYSTEM, ASK], [SYSTEM, ASK | {"content": " Q\n"}], {}),
        ([SYSTEM, ASK], [SYSTEM], {}),
        ([SYSTEM, ASK], [], {}),
    ],
)
def test_prompt_repeated_in_answers_is_removed(prompt: Any, before: list, more: dict):
    good, bad = ((Message("assistant", text),) for text in ("good", "bad"))
    chosen, rejected = [*before, GOOD], [*before, BAD]
    for rest in (rejected, "bad") if before != [SYSTEM] else (rejected,):
        found = parse("preference", prompt=prompt, chosen=chosen, rejected=rest, **more)
        assert (found.prompt, found.branches) == (ASKED, (good, bad))
    for kind, marks in (("instruction", {}), ("unpaired", {"label": True})):
        found = parse(kind, prompt=prompt, completion=chosen, **marks, **more)
        assert (found.prompt, found.branches) == (ASKED, (good,))


def test_prompt_of_several_turns_is_recognized_in_answers():
    turns = [GOOD, ASK, BAD, ASK | {"content": "R"}]
    found = parse("instruction", prompt=turns, completion=[*turns, GOOD, ASK, BAD])
    assert [message.content for message in found.prompt] == ["good", "Q", "bad", "R"]
    assert [message.content for message in found.branches[0]] == ["good", "Q", "bad"]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ([ASK | {"content": "R"}, GOOD], 'a turn of the user at the beginning of "{}" that does not repeat "prompt"'),
        ([SYSTEM | {"content": "T"}, ASK, GOOD], 'has two system messages, and that of "{}" differs'),
        ([SYSTEM, ASK], 'has no answer in "{}" after the prompt'),
    ],
)
def test_answers_with_another_prompt_are_refused(answer: list, problem: str):
    prompt = [SYSTEM, ASK]
    for kind, key, more in (
        ("preference", "rejected", {"chosen": "good"}),
        ("instruction", "completion", {}),
        ("unpaired", "completion", {"label": 1}),
    ):
        with pytest.raises(MalformedRecord, match=problem.format(key)):
            parse(kind, prompt=prompt, **more, **{key: answer})


def test_unpaired_completions_have_one_judged_answer_and_may_hold_the_prompt():
    judged = ((Message("assistant", "bad"),),)
    implicit = parse("unpaired", completion=[SYSTEM, ASK, BAD], label=False, chat_template_kwargs={"depth": 1})
    assert (implicit.prompt, implicit.branches, implicit.label, implicit.unused) == (ASKED, judged, False, set())
    several = parse("unpaired", prompt="Q", completion=[GOOD, ASK, BAD], label=False)
    assert [message.content for message in several.prompt] == ["Q", "good", "Q"] and several.branches == judged
    assert RecordFormat("unpaired").find_schema({"completion": [ASK, BAD], "label": 1}) == ("completion", "label")


def test_empty_answer_of_a_text_with_turns_is_an_example_without_response(tmp_path: Path):
    start = "\n\nHuman: Q?\n\nAssistant:"
    records = [{"chosen": f"{start} A", "rejected": f"{start} {text}"} for text in ("", "B")]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    recipe = DataRecipe(
        source=str(path), records="preference", template="instruction", tokenizer="bytes", sequence=99,
        validation_fraction=0.0, cache=str(tmp_path / "cache"), clean={"minimum_characters": 1},
    )  # fmt: skip
    report = prepare(recipe).summary()["splits"]["train"]["packing"]
    assert (report["without_response"], report["trained"]) == (1, 1)
