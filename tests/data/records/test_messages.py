"""Records of the published schemas keep everything that their makers use; the rest is counted or refused."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from meshwright.data.records import record_files
from meshwright.data.records.conversations import RecordFormat
from meshwright.data.records.messages import MalformedRecord, Message, MessageFormat
from meshwright.data.records.parsed_example import Example, select_reasoning
from meshwright.data.records.trees import group_rows
from meshwright.data.sources.reading import Reader
from meshwright.data.sources.resolution import find_files

CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": {}}}
ASK, TELL = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}


def chat(*turns: dict, **more: object) -> Example:
    [example] = RecordFormat("chat").parse_examples({"messages": [*turns], **more})
    return example


def problem(record: dict, kind: str = "chat") -> str:
    with pytest.raises(MalformedRecord) as caught:
        RecordFormat(kind).parse_examples(record)
    return str(caught.value)


@pytest.mark.parametrize(
    "turn",
    [
        {
            "tool_calls": [
                {"id": "1", "type": "function", "function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}
            ]
        },
        {"tool_calls": [{"id": "1", "type": "function", "function": CALL}], "content": ""},
        {"tool_calls": [{"id": "1", **CALL}]},
    ],
)
def test_tool_calls_and_results_are_kept_with_arguments_as_objects(turn: dict):
    result = {"role": "tool", "tool_call_id": "1", "name": "weather", "content": "sunny"}
    found = chat(ASK, {"role": "assistant", "content": None, **turn}, result, TELL, tools=[TOOL])
    _, call, answer, _ = found.branches[0]
    assert call.content == "" and call.fields["tool_calls"] == [{"id": "1", "type": "function", "function": CALL}]
    assert (answer.role, answer.fields) == ("tool", {"tool_call_id": "1", "name": "weather"})
    assert found.tools == (TOOL,) and not found.unused


def test_sharegpt_calls_observations_system_and_tools_become_openai_ones():
    record = {
        "system": "Help.",
        "tools": json.dumps([TOOL["function"]]),
        "conversations": [
            {"from": "human", "value": "Q"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "sunny"},
            {"from": "gpt", "value": "A"},
        ],
    }
    [found] = RecordFormat("chat").parse_examples(record)
    assert [message.role for message in found.branches[0]] == ["system", "user", "assistant", "tool", "assistant"]
    assert found.branches[0][2].fields["tool_calls"] == [{"type": "function", "function": CALL}]
    assert found.tools == (TOOL,)


def test_older_openai_function_calls_and_functions_are_read():
    turn = {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    found = chat(ASK, turn, {"role": "function", "name": "weather", "content": "sunny"}, functions=[TOOL["function"]])
    assert found.branches[0][1].fields["tool_calls"][0]["function"] == CALL and found.tools == (TOOL,)


@pytest.mark.parametrize(
    ("mark", "trained"), [({"weight": 0}, False), ({"train": False}, False), ({"weight": 1}, True), ({}, None)]
)
def test_marks_of_turns_select_the_trained_ones(mark: dict, trained: bool | None):
    assert chat(ASK, TELL | mark).branches[0][1].trained is trained


def test_reasoning_has_one_name_whatever_the_schema():
    for turn in (
        {"reasoning_content": "R"}, {"reasoning": "R"}, {"thinking": "R"},
        {"content": [{"type": "thinking", "thinking": "R"}, {"type": "text", "text": "A"}]},
    ):  # fmt: skip
        [_, message] = chat(ASK, TELL | turn).branches[0]
        assert (message.content, message.fields) == ("A", {"reasoning_content": "R"})
        assert message.to_template_variables()["thinking"] == "R"
    assert chat(ASK, {"role": "assistant", "content": None, "refusal": "No."}).branches[0][1].content == "No."


def test_alpaca_history_and_system_come_before_the_instruction():
    record = {
        "instruction": "Third?",
        "input": "x",
        "output": "3",
        "system": "S",
        "history": [["First?", "1"], ["Second?", "2"]],
    }
    [found] = RecordFormat("instruction").parse_examples(record)
    assert [(message.role, message.content) for message in found.branches[0]] == [
        ("system", "S"), ("user", "First?"), ("assistant", "1"), ("user", "Second?"), ("assistant", "2"),
        ("user", "Third?"), ("assistant", "3"),
    ]  # fmt: skip
    assert found.branches[0][-2].input == "x" and all(message.trained is None for message in found.branches[0])


def test_prompt_and_completion_are_read_as_texts_and_as_messages():
    for prompt, completion in (("Q", "A"), ([ASK], [TELL])):
        [found] = RecordFormat("instruction").parse_examples({"prompt": prompt, "completion": completion})
        assert found == Example((Message("user", "Q"),), ((Message("assistant", "A"),),))


def test_texts_with_human_and_assistant_turns_are_split():
    start = "\n\nHuman: Q1\n\nAssistant: A1\n\nHuman: Q2\n\nAssistant:"
    [found] = RecordFormat("preference").parse_examples({"chosen": f"{start} good", "rejected": f"{start} bad"})
    assert [message.content for message in found.prompt] == ["Q1", "A1", "Q2"]
    assert [[message.content for message in branch] for branch in found.branches] == [["good"], ["bad"]]


def test_preference_with_conversations_and_single_messages_is_read():
    record = {
        "conversations": [{"from": "human", "value": "Q"}],
        "chosen": {"from": "gpt", "value": "good"}, "rejected": {"from": "gpt", "value": "bad"},
    }  # fmt: skip
    [found] = RecordFormat("preference").parse_examples(record)
    assert found.prompt == (Message("user", "Q"),) and [branch[0].content for branch in found.branches] == [
        "good",
        "bad",
    ]


def test_unused_keys_of_records_and_messages_are_listed():
    assert chat(ASK | {"id": 7}, TELL, source="web", score=None).unused == {"source", "messages.id"}


def test_keys_and_roles_are_mapped_by_the_recipe():
    messages = MessageFormat({"role": "speaker", "content": "words"}, {"narrator": "system"})
    record = {"messages": [{"speaker": "narrator", "words": "S"}, {"speaker": "bot", "words": "A"}]}
    [found] = RecordFormat("chat", messages=messages).parse_examples(record)
    assert found.branches[0] == (Message("system", "S"), Message("assistant", "A"))


def call(**parts: object) -> dict:
    return {"role": "assistant", "content": None, "tool_calls": [parts]}


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (
            [ASK, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            'messages[1].content[0] is an image ("type": "image_url")',
        ),
        ([ASK, {"role": "tool", "content": "x"}], "messages[1] is a tool's result, and no call comes before it"),
        ([ASK, TELL, {"role": "tool", "content": "x"}], "messages[2] is a tool's result"),
        (
            [call(id="1", **CALL), {"role": "tool", "tool_call_id": "2", "content": "x"}],
            "messages[1].tool_call_id is the string '2', and the calls before it have the string '1'",
        ),
        ([{"role": "assistant", "content": None}], "messages[0].content is null, and the message has no tool_calls"),
        ([call(name="f", arguments="{")], "messages[0].tool_calls[0].arguments is not JSON"),
        ([call(function={})], 'not {"name": "...", "arguments": {...}}'),
        ([{"role": "user", "content": [{"type": ["x"]}]}], 'messages[0].content[0] is an object, not {"type": "text"'),
        ([ASK, TELL | {"weight": 0.5}], "messages[1].weight is the number 0.5; it should be 0 or 1"),
        ([{"role": "narrator", "content": "x"}], 'data.record_roles = {"narrator" = "user"} maps it'),
        ([{"from": "function_call", "value": "weather"}], "messages[0].value is not JSON"),
        ([ASK, TELL | {"train": True, "weight": 0}], "messages[1] has train and weight, which contradict each other"),
        ([ASK | {"weight": 1}, TELL], "messages[0].weight is the number 1, but only messages of the assistant"),
        ([call(id=[[]], **CALL)], "messages[0].tool_calls[0].id is a list of 1, not a string"),
        ([ASK | {"name": {}}, TELL], "messages[0].name is an object, not a string"),
        ([call(**CALL), {"role": "tool", "tool_call_id": 1, "content": "x"}], "tool_call_id is the number 1, not a st"),
        (
            [ASK, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}],
            'messages[1].content[0] is a part of the type "tool_use", not {"type": "text"',
        ),
    ],
)
def test_content_that_cannot_be_represented_is_refused_by_name(turns: list, expected: str):
    assert expected in problem({"messages": turns})


def test_contradicting_system_prompts_and_malformed_tools_are_refused():
    record = {"messages": [{"role": "system", "content": "S"}, ASK, TELL], "system": "T"}
    assert problem(record) == 'has "system" and a system message, and they differ: remove one'
    assert chat(*record["messages"], system="S").branches[0][0].content == "S"
    assert problem({"messages": [ASK, TELL], "tools": [{"function": 1}]}).startswith(
        'tools[0] is an object, not {"type"'
    )


# --- trees


def node(text: str, role: str, *replies: dict, **more: object) -> dict:
    return {"text": text, "role": role, "replies": [*replies], **more}


TREE = node(
    "Q", "prompter",
    node("A2", "assistant", rank=1),
    node("A1", "assistant", node("Q2", "prompter", node("A3", "assistant"), node("A4", "assistant")), rank=0),
    node("bad", "assistant", deleted=True),
)  # fmt: skip


def test_tree_gives_a_conversation_for_each_leaf_and_trains_each_answer_once():
    found = RecordFormat("chat").parse_examples({"message_tree_id": "t", "prompt": TREE})
    ways = [[(message.content, message.trained) for message in each.branches[0]] for each in found]
    assert ways == [
        [("Q", None), ("A1", None), ("Q2", None), ("A3", None)],
        [("Q", None), ("A1", False), ("Q2", None), ("A4", None)],
        [("Q", None), ("A2", None)],
    ]


def test_rows_of_a_message_table_become_the_tree():
    def flatten(one: dict, parent: str | None) -> list[dict]:
        number = one["text"]
        mine = {"message_id": number, "parent_id": parent, "message_tree_id": "t", **one}
        del mine["replies"]
        return [mine, *(row for reply in one["replies"] for row in flatten(reply, number))]

    rows = [(f":{place}", row, None) for place, row in enumerate(flatten(TREE, None))]
    other = (":9", {"messages": [ASK, TELL]}, None)
    [(place, record, wrong), last] = list(group_rows([*rows, other]))
    assert (place, wrong, last) == (":0", None, other)
    contents = [[m.content for m in each.branches[0]] for each in RecordFormat("chat").parse_examples(record)]
    assert contents == [["Q", "A1", "Q2", "A3"], ["Q", "A1", "Q2", "A4"], ["Q", "A2"]]


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        ([("a", None), ("b", "c"), ("c", "b")], "reply to each other in a circle"),
        ([("a", None), ("b", "x")], "message b has no parent x"),
        ([("a", None), ("a", "a")], "two messages have one message_id"),
        ([("a", None), ("b", None)], "2 prompts"),
    ],
)
def test_rows_that_are_no_tree_are_refused(links: list[tuple[str, str | None]], expected: str):
    rows = [
        (":1", {"message_id": own, "parent_id": parent, "message_tree_id": "t", "text": "x", "role": "prompter"}, None)
        for own, parent in links
    ]
    [(place, value, wrong)] = list(group_rows(rows))
    assert (place, value) == (":1", None) and expected in str(wrong)


# --- reasoning

THINKING = Example(
    (),
    (
        (
            Message("user", "Q1"), Message("assistant", "A1", fields={"reasoning_content": "R1"}),
            Message("user", "Q2"), Message("assistant", "<think>\nR2\n</think>\n\nA2"),
        ),
    ),
)  # fmt: skip


def test_reasoning_is_kept_as_the_recipe_says():
    def thoughts(example: Example) -> list[bool]:
        return [
            "R1" in message.fields.values() or "R2" in message.content
            for message in example.branches[0]
            if message.role == "assistant"
        ]

    assert [thoughts(each) for each in select_reasoning(THINKING, "template")] == [[True, True]]
    assert [thoughts(each) for each in select_reasoning(THINKING, "last")] == [[False, True]]
    [none] = select_reasoning(THINKING, "none")
    assert thoughts(none) == [False, False] and none.branches[0][3].content == "A2"
    first, second = select_reasoning(THINKING, "all")
    assert [len(each.branches[0]) for each in (first, second)] == [2, 4]
    assert [message.trained for message in second.branches[0]] == [None, False, None, None]
    plain = Example((), ((Message("user", "Q"), Message("assistant", "A")),))
    assert select_reasoning(plain, "all") == [plain]


def test_cleaning_reaches_reasoning_and_arguments_of_calls():
    call = {
        "role": "assistant",
        "content": None,
        "reasoning": "secret",
        "tool_calls": [{"name": "f", "arguments": {"a": ["secret"]}}],
    }
    found = chat(ASK, call)
    assert found.join_texts() == "Q\n\nsecret\n\nsecret"
    masked = found.rewrite_texts(lambda text: text.replace("secret", "X"))
    assert masked.join_texts() == "Q\n\nX\n\nX" and found.join_texts() == "Q\n\nsecret\n\nsecret"


def test_hostile_values_end_quickly_and_clearly():
    began = time.process_time()
    thoughts = Example((), ((Message("assistant", "<think>" * 50_000 + "x", fields={"reasoning_content": "R"}),),))
    [found] = select_reasoning(thoughts, "none")
    assert found.branches[0][0].content == thoughts.branches[0][0].content and not found.branches[0][0].fields
    tags = Message("assistant", "Write <think>x</think> tags.", fields={"reasoning_content": "R"})
    [found] = select_reasoning(Example((), ((tags,),)), "none")
    assert found.branches[0][0].content == tags.content
    deep: dict = {}
    for _ in range(500):
        deep = {"a": deep}
    assert "nested more than 64 levels deep" in problem({"messages": [call(name="f", arguments=deep)]})
    assert "nested more than 64 levels deep" in problem({"messages": [ASK, TELL], "tools": [{"name": "f", "x": deep}]})
    big = node("Q", "prompter", node("A", "assistant", rank=10**400), node("B", "assistant", rank=0))
    assert len(RecordFormat("chat").parse_examples({"prompt": big})) == 2
    assert time.process_time() - began < 20


def test_deleted_trees_and_trees_without_answers_have_no_conversation():
    for tree in (node("Q", "prompter"), {**TREE, "deleted": True}, {**TREE, "review_result": False}):
        assert RecordFormat("chat").parse_examples({"message_tree_id": "t", "prompt": tree}) == []


def test_a_tree_that_is_too_large_leaves_the_following_records_alone():
    rows = [
        (
            f":{number}",
            {"message_id": number, "parent_id": number - 1 if number else None, "text": "x", "role": "prompter"},
            None,
        )
        for number in range(10_002)
    ]
    chat_record = {"messages": [ASK, TELL], "message_id": "m", "parent_id": None}
    [(_, _, wrong), last] = list(group_rows([*rows, (":x", chat_record, None)]))
    assert "more than 10,000 messages" in str(wrong) and last == (":x", chat_record, None)


def test_keys_of_another_schema_are_not_used():
    assert chat(ASK, TELL, text="x", conversations=[], functions=[TOOL["function"]], tools=[TOOL]).unused == {
        "text", "conversations", "functions",
    }  # fmt: skip
    [found] = RecordFormat("instruction").parse_examples({"instruction": "Q", "output": "A", "completion": "x"})
    assert found.unused == {"completion"}


def test_texts_with_turns_and_a_prompt_are_split_alike():
    start = "\n\nHuman: Q1\n\nAssistant:"
    [found] = RecordFormat("preference").parse_examples(
        {"prompt": start, "chosen": " good", "rejected": f"{start} bad"}
    )
    assert found.prompt == (Message("user", "Q1"),)
    assert [[message.content.strip() for message in branch] for branch in found.branches] == [["good"], ["bad"]]


def test_openai_preferences_are_read_as_preferences():
    given = {"messages": [ASK], "tools": [TOOL], "parallel_tool_calls": True}
    other = {"role": "assistant", "content": "No."}
    record = {"input": given, "preferred_output": [TELL], "non_preferred_output": [other]}
    (found,) = RecordFormat("preference").parse_examples(record)
    plain = {"prompt": [ASK], "chosen": [TELL], "rejected": [other], "tools": [TOOL]}
    assert found == RecordFormat("preference").parse_examples(plain)[0]._replace(
        unused=frozenset({"input.parallel_tool_calls"})
    )
    for wrong, problem in (
        ({**record, "input": 3}, r'has the number 3 under the key "input"; it should be {"messages"'),
        ({**record, "non_preferred_output": None}, r'"non_preferred_output" is null, not a list of messages'),
        ({**record, "input": {"messages": [{"role": "usr"}]}}, r"input.messages\[0\].role is \"usr\""),
    ):
        with pytest.raises(MalformedRecord, match=problem):
            RecordFormat("preference").parse_examples(wrong)


def test_parts_of_an_answer_may_have_marks_as_in_axolotl():
    parts = [
        {"text": "A "},
        {"content": "b", "train": False},
        {"type": "text", "text": "c", "weight": 0},
        {"value": "d"},
    ]
    turn = chat(ASK, {"role": "assistant", "content": parts}).branches[0][1]
    assert (turn.content, turn.context) == ("A bcd", ((2, 4),))
    doubled = turn.rewrite_texts(lambda text: text * 2)
    assert (doubled.content, doubled.context) == ("A A bcbcdd", ((4, 8),))
    assert turn.cut_content(3)[-1] == ((0, 1),) and turn.cut_content(4)[-1] == ()
    assert chat({"role": "user", "content": [{"text": "Q", "train": False}]}, TELL).branches[0][0].context == ()
    for role, content, problem in (
        ("user", [{"text": "Q", "train": True}], r'content has parts to be trained, but only .* not of "user"'),
        ("user", [{"text": "Q", "weight": 0}, {"text": "R"}], "has parts to be trained"),
        ("assistant", [{"text": "A", "train": "no"}], r"content\[0\].train is the string 'no'; it should be 0 or 1"),
        ("assistant", [{"type": "thinking", "thinking": "A", "train": False}], "is reasoning with a mark"),
    ):
        with pytest.raises(MalformedRecord, match=problem):
            chat({"role": role, "content": content})
    with pytest.raises(MalformedRecord, match=r"messages\[0\].train is true, but only messages of the assistant"):
        chat(ASK | {"train": True}, TELL)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (3, "is the number 3, not an object of template variables"),
        ({"messages": []}, 'has "messages", which is not a variable that a record may set'),
        ({"eos_token": "x"}, 'has "eos_token", which is not'),
        ({"a b": 1}, 'has "a b", which is not'),
        ("{", "is not JSON"),
    ],
)
def test_template_variables_of_a_record_are_checked(given, problem: str):
    good = chat(ASK, TELL, chat_template_kwargs='{"enable_thinking": false, "depth": null}')
    assert good.variables == {"enable_thinking": False} and not good.unused
    with pytest.raises(MalformedRecord, match=problem):
        chat(ASK, TELL, chat_template_kwargs=given)


def test_large_integers_in_calls_keep_their_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rounding = partial(json.loads, parse_int=float)  # as orjson, which may not be installed, beyond 64 bits
    monkeypatch.setattr(record_files, "_find_orjson_parser", lambda: rounding)
    turn = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"account": 2**80}}]}
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": [ASK, turn]}))
    [document] = Reader(records=RecordFormat("chat")).read_documents(*find_files([str(tmp_path / "data.jsonl")]))
    assert document.example is not None
    [call] = document.example.branches[0][1].fields["tool_calls"]
    assert call["function"]["arguments"] == {"account": 2**80}


def test_fields_that_parquet_adds_to_structs_are_left_out(tmp_path: Path):
    """A column of structs has the fields of all rows: calls get the arguments of other functions as nulls."""
    calls = ({"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "time", "arguments": {"zone": "UTC"}})
    tool = {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}
    other = {"name": "time", "parameters": {"properties": {"zone": {"type": "string"}}}}
    rows = [
        {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [tool, other]}
        for call in calls
    ]
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    found = [
        document.example for document in Reader(records=RecordFormat("chat")).read_documents(*find_files([str(path)]))
    ]
    assert found == [chat(*row["messages"], tools=row["tools"]) for row in rows]
    null = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"unit": None}}]}
    assert chat(ASK, null).branches[0][1].fields["tool_calls"][0]["function"]["arguments"] == {"unit": None}


def test_empty_values_do_not_hide_those_of_other_keys():
    turn = {"role": "assistant", "content": "", "tool_calls": [], "reasoning_content": None}
    assert chat(ASK, turn | {"refusal": "No."}).branches[0][1].content == "No."
    assert chat(ASK, turn | {"thinking": "Hm."}).branches[0][1].fields == {"reasoning_content": "Hm."}
    found = chat(ASK, turn | {"function_call": CALL})
    assert found.branches[0][1].fields["tool_calls"][0]["function"] == CALL and not found.unused


def test_values_that_another_key_replaces_are_listed_as_unused():
    turn = {"role": "assistant", "content": "A", "refusal": "No.", "tool_calls": [CALL], "function_call": CALL}
    assert chat(ASK, turn).unused == {"messages.refusal", "messages.function_call"}
    tree = {**node("Q", "prompter", node("A", "assistant", rank=0)), "synthetic": False, "labels": {}, "deleted": False}
    [found] = RecordFormat("chat").parse_examples({"message_tree_id": "t", "prompt": tree})
    assert found.unused == {"prompt.synthetic", "prompt.labels"}


def test_system_may_be_a_list_of_texts():
    blocks = [{"type": "text", "text": "S"}, {"type": "text", "text": "T"}]
    assert chat(ASK, TELL, system=blocks).branches[0][0] == Message("system", "ST")
    wrong = {"messages": [ASK, TELL], "system": [{"type": "image", "source": {}}]}
    assert problem(wrong) == '"system"[0] is an image ("type": "image"): only text is supported'
