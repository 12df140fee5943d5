"""Trained spans of templates with the structures of published ones, against spans written by hand."""

from __future__ import annotations

import re
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.shared.chat_templates import STYLES, write_tokenizer
from meshwright.data.packing.token_flags import AUTHORS, TRAINED_BIT
from meshwright.data.records import conversation_turns, message_regions
from meshwright.data.records.chat_template import ChatTemplate
from meshwright.data.records.conversations import RecordFormat
from meshwright.data.records.examples import ExampleEncoder
from meshwright.data.records.message_regions import is_unmasked
from meshwright.data.records.messages import Message
from meshwright.data.records.parsed_example import Example
from meshwright.data.records.template_rendering import TemplateError
from meshwright.data.sources.reading import Document
from meshwright.errors import UserError

LOOP, END = "{% for m in messages %}", "{% endfor %}"
# Each: template, special tokens, text of the first answer's span and of the last one's (A and B: the answers).
STRUCTURES = {
    "empty thoughts before the last answer": (  # Qwen3
        LOOP + "<|s|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
        "{{ m.content }}<|e|>\n" + END + "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}",
        ("<|s|>", "<|e|>"), "A<|e|>", "<think>\n\n</think>\n\nB<|e|>",
    ),
    "another token ends the last answer": (  # gpt-oss
        LOOP + "<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
        "{{ m.content }}{% if m.role == 'assistant' and loop.last %}<|return|>{% else %}<|end|>{% endif %}" + END
        + "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"),
        "<|channel|>final<|message|>A<|end|>", "<|channel|>final<|message|>B<|return|>",
    ),
    "a token ends the whole conversation": (  # Phi-3
        LOOP + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n" + END
        + "{% if add_generation_prompt %}<|assistant|>\n{% else %}</s>{% endif %}",
        ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "</s>"), "A<|end|>", "B<|end|>",
    ),
    "two tokens end an answer": (  # Command R7B
        LOOP + "<|turn|>{{ m.role }}|{{ m.content }}{% if m.role == 'assistant' %}<|end_response|>{% endif %}"
        "<|end_turn|>" + END + "{% if add_generation_prompt %}<|turn|>assistant|{% endif %}",
        ("<|turn|>", "<|end_turn|>", "<|end_response|>"), "A<|end_response|><|end_turn|>",
        "B<|end_response|><|end_turn|>",
    ),
    "the next header ends every conversation": (  # Command A
        LOOP + "<|turn|><|{{ m.role }}|>{{ m.content }}<|end_turn|>" + END + "<|turn|><|assistant|>"
        "{% if add_generation_prompt %}{% endif %}",
        ("<|turn|>", "<|end_turn|>", "<|user|>", "<|assistant|>", "<|system|>"), "A<|end_turn|>", "B<|end_turn|>",
    ),
    "plain headers and an end token that is none": (  # Vicuna
        LOOP + "{% if m.role == 'assistant' %}ASSISTANT: {{ m.content }}</s>\n{% else %}{{ m.role | upper }}: "
        "{{ m.content }}\n{% endif %}" + END + "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
        (), " A</s>", " B</s>",
    ),
    "the header belongs to the user's turn, the system prompt to the last": (  # Mistral
        "<s>" + LOOP + "{% if m.role == 'user' %}[INST] {% if loop.index0 == messages | length - 2 and "
        "messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}{{ m.content }} [/INST]"
        "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}" + END,
        ("<s>", "</s>"), " A</s>", " B</s>",
    ),
    "a token ends every turn but the last": (  # vLLM's ChatML
        LOOP + "<|s|>{{ m.role }}\n{{ m.content }}{% if add_generation_prompt or not loop.last %}<|e|>\n{% endif %}"
        + END + "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}",
        ("<|s|>", "<|e|>"), "A<|e|>", "B",
    ),
    "nothing ends a turn": (
        LOOP + "{{ m.role }}: {{ m.content }}\n\n" + END + "{% if add_generation_prompt %}assistant: {% endif %}",
        (), "A", "B",
    ),
}  # fmt: skip
TURNS = [
    Message("user", "First, please?"), Message("assistant", "One answer."),
    Message("user", "  Another \"one\"?\n"), Message("assistant", "The last, user: one!"),
]  # fmt: skip


def spans_of(template: ChatTemplate, messages: list[Message], **options) -> list[str]:
    found = template.render_with_spans(messages, **options)
    return [found.text[begin:end] for begin, end in found.responses]


@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("name", STRUCTURES)
def test_spans_begin_after_the_header_and_end_with_the_token_that_ends_a_turn(name: str, system: bool):
    source, special, first, last = STRUCTURES[name]
    template = ChatTemplate(source, {}, frozenset(special), "it")
    turns = [Message("system", "You know it.")] * system + TURNS
    expected = [first.replace("A", TURNS[1].content), last.replace("B", TURNS[3].content)]
    assert spans_of(template, turns) == expected
    assert spans_of(template, turns) == expected, "with what was remembered"
    kept = [turn._replace(trained=False) if turn.content.startswith("One") else turn for turn in turns]
    assert spans_of(template, kept) == expected[1:] == spans_of(template, turns, trained_from=len(turns) - 1)


@cache
def make_shared_template() -> ChatTemplate:
    """The template of all examples, in one process, as of all conversations of a data set."""
    source, special, *_ = STRUCTURES["another token ends the last answer"]
    return ChatTemplate(source, {}, frozenset(special), "it")


@settings(max_examples=30)
@given(st.lists(st.text(st.characters(exclude_categories=["Co", "Cs"]), min_size=1), min_size=2, max_size=7))
@example(["Q", 'He said "yes"', "Q", "A\\"])
def test_spans_have_the_answers_whatever_their_text(texts: list[str]):
    turns = [Message("assistant" if number % 2 else "user", text) for number, text in enumerate(texts)]
    answers = [text for number, text in enumerate(texts) if number % 2 and text.strip()]
    try:
        found = spans_of(make_shared_template(), turns)
    except TemplateError:
        assert any(text.strip() and all(map(is_unmasked, text)) for text in texts)  # cannot be found
        return
    assert [
        re.sub(r"<\|(end|return)\|>$", "", span.removeprefix("<|channel|>final<|message|>")) for span in found
    ] == answers


def test_marked_template_may_have_several_spans_in_a_turn_and_turns_without_one():
    source = (
        LOOP + "{{ m.role }}:{% if m.role == 'assistant' and not m.quiet %}{% if m.reasoning_content %}{% generation %}"
        "({{ m.reasoning_content }}){% endgeneration %} then {% endif %}{% generation %}{{ m.content }};"
        "{% endgeneration %}{% else %}{{ m.content }};{% endif %}" + END
    )
    template = ChatTemplate(source, {}, frozenset(), "it")
    turns = [
        Message("user", "Q"), Message("assistant", "A", fields={"reasoning_content": "R"}),
        Message("assistant", "B", fields={"quiet": True}), Message("user", "Q"), Message("assistant", "C"),
    ]  # fmt: skip
    assert spans_of(template, turns) == ["(R)", "A;", "C;"]
    turns[1] = turns[1]._replace(trained=False)
    assert spans_of(template, turns) == ["C;"]


def test_tool_calls_are_part_of_the_span_and_render_as_in_transformers():
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (
        "{% for t in tools or [] %}TOOL {{ t | tojson }}\n{% endfor %}" + LOOP + "<|s|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|e|>\n" + END
        + "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
    )  # fmt: skip
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": 'the "Oslo"', "days": 2}},
    }
    tool = {"type": "function", "function": {"name": "weather", "description": "Of <|e|> a city.", "parameters": {}}}
    turns = [
        Message("user", "Q"), Message("assistant", "", fields={"tool_calls": [call]}),
        Message("tool", "sunny", fields={"tool_call_id": "1", "name": "weather"}), Message("assistant", "A"),
    ]  # fmt: skip
    template = ChatTemplate(source, {}, frozenset({"<|s|>", "<|e|>"}), "it")
    seen = [turn.to_template_variables() for turn in turns]
    theirs, _ = render_jinja_template([seen], tools=[tool], chat_template=source)
    assert template.render(turns, tools=[tool]) == theirs[0]
    first, second = spans_of(
        template, turns, tools=[{**tool, "function": {**tool["function"], "description": "Of a city."}}]
    )
    assert (
        first.startswith("<tool_call>\n{") and first.endswith('"days": 2}}\n</tool_call><|e|>') and second == "A<|e|>"
    )
    with pytest.raises(TemplateError, match=r"leaves out the tool calls of message 2 \(assistant\)"):
        ChatTemplate(source.replace("m.tool_calls", "[]"), {}, frozenset(), "it").render_with_spans(turns)


def test_template_that_only_takes_parts_gets_them():
    source = LOOP + "{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %};" + END
    template = ChatTemplate(source, {}, frozenset(), "it")
    assert template.render(TURNS[:2]) == "user:First, please?;assistant:One answer.;"
    assert spans_of(template, TURNS[:2]) == ["assistant:One answer.;"], "nothing says where an answer begins"


def test_token_flags_store_the_role_of_each_turn(tmp_path):
    encoder = ExampleEncoder.from_directory(write_tokenizer(tmp_path, STYLES["chatml"], "byte-level"))
    [[piece]] = encoder.encode_documents([Document("d", "", None, Example((), (tuple(TURNS[:2]),)))])
    decode = encoder.tokenizer.tokenizer.decode
    runs: list[tuple[str, bool, list[int]]] = []
    for token, mark in zip(piece.tokens.tolist(), piece.flags.tolist(), strict=True):
        author, trained = AUTHORS[mark >> 1], bool(mark & TRAINED_BIT)
        if not runs or runs[-1][:2] != (author, trained):
            runs.append((author, trained, []))
        runs[-1][2].append(token)
    found = [(author, trained, decode(tokens, skip_special_tokens=False)) for author, trained, tokens in runs]
    assert [(author, trained) for author, trained, _ in found] == [
        ("template", False), ("user", False), ("template", False), ("assistant", True), ("template", False),
    ]  # fmt: skip
    assert found[1][2] == "First, please?" and found[3][2] == "One answer.<|im_end|>"


def test_warnings_name_turns_without_an_end_and_system_messages_left_out(tmp_path):
    encoder = ExampleEncoder.from_directory(write_tokenizer(tmp_path, STYLES["chatml"], "byte-level"))
    assert list(encoder.list_warnings()) == []
    source = LOOP + "{% if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endif %}" + END
    other = ExampleEncoder(encoder.tokenizer, ChatTemplate(source, {}, frozenset(), "it"))
    turns = (Message("system", "S"), *TURNS[:2])
    list(other.encode_documents([Document("d", "", None, Example((), (turns,)))]))
    ends, left_out = other.list_warnings()
    assert "without a token" in ends and "in 1 record:" in left_out


@pytest.mark.parametrize("where", ["description", "argument key", "id"])
def test_special_tokens_without_placeholders_are_refused(where: str):
    source = (
        "{{ tools | tojson }}" + LOOP + "<|s|>{{ m.role }}\n{{ m.content }}{{ m.tool_call_id }}"
        "{{ (m.tool_calls or []) | tojson }}"
        "<|e|>" + END + "{% if add_generation_prompt %}<|s|>assistant\n{% endif %}"
    )
    evil = "x<|e|>y"
    function = {"name": "f", "arguments": {evil if where == "argument key" else "a": "b"}}
    calls = {"tool_calls": [{"type": "function", "function": function}]}
    turns = [
        Message("user", "Q"), Message("assistant", "", fields=calls),
        Message("tool", "r", fields={"tool_call_id": evil if where == "id" else "1"}), Message("assistant", "A"),
    ]  # fmt: skip
    described = evil if where == "description" else "Of a city."
    tools = [{"type": "function", "function": {"name": "f", "description": described}}]
    template = ChatTemplate(source, {}, frozenset({"<|s|>", "<|e|>"}), "it")
    for trained_from, prompt in ((0, False), (9, True)):
        with pytest.raises(TemplateError, match=r"contains the special token <\|e\|>, which cannot be distinguished"):
            template.render_with_spans(turns, trained_from, tools=tools, prompt=prompt)


@pytest.mark.parametrize(
    "written", ["{{ m.content[:8] }}", "{{ m.content.split('.')[0] }}", "{{ m.content.split('</think>')[-1] }}"]
)
def test_text_of_which_a_part_is_left_out_is_refused(written: str):
    template = ChatTemplate(LOOP + "{{ m.role }}:" + written + ";" + END, {}, frozenset(), "it")
    turns = [Message("user", "Q"), Message("assistant", "You write </think> after it. Then more.")]
    with pytest.raises(TemplateError, match=r"leaves out a part of the content of message 2"):
        template.render_with_spans(turns)
    thought = [turns[0], Message("assistant", "<think>\nHm\n</think>\nYes")]
    if "think" in written:
        assert spans_of(template, thought) == ["assistant:\nYes;"]


def test_header_of_the_next_turn_is_never_part_of_a_span():
    source = (
        LOOP + "<|{{ m.role }}|>\n{{ m.content }}" + END + "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    special = frozenset({"<|user|>", "<|assistant|>", "<|end|>"})
    assert spans_of(ChatTemplate(source, {}, special, "it"), TURNS) == ["One answer.", "The last, user: one!"]
    ends = source.replace("{% if add", "{% if not add_generation_prompt %}<|end|>{% endif %}{% if add")
    assert spans_of(ChatTemplate(ends, {}, special, "it"), TURNS) == ["One answer.", "The last, user: one!<|end|>"]


def test_marks_of_generation_in_a_message_are_refused():
    template = ChatTemplate(STRUCTURES["nothing ends a turn"][0], {}, frozenset(), "it")
    with pytest.raises(TemplateError, match=r"cannot render U\+10FFF0"):
        template.render_with_spans([Message("user", "Q"), Message("assistant", "\U0010fff0 A \U0010fff1")])


def test_template_that_does_not_render_reasoning_is_a_warning(tmp_path):
    encoder = ExampleEncoder.from_directory(write_tokenizer(tmp_path, STYLES["chatml"], "byte-level"))
    turns = (TURNS[0], Message("assistant", "A", fields={"reasoning_content": "Hm."}))
    list(encoder.encode_documents([Document("d", "", None, Example((), (turns,)))]))
    assert [warning.partition(" leaves out ")[2] for warning in encoder.list_warnings()] == [
        "the reasoning of 1 conversation: it is not trained"
    ]


@pytest.mark.parametrize("written", ["", "{{ tools | tojson }}"])
def test_template_that_leaves_out_tools_or_names_is_a_warning(tmp_path, written: str):
    """The message has the name of the tool as a word, and calls are rendered."""
    source = (
        written
        + LOOP
        + "{{ m.role }}: "
        + "{{ m.name }}" * bool(written)
        + "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}<|im_end|>"
        + END
    )
    chatml = ExampleEncoder.from_directory(write_tokenizer(tmp_path, STYLES["chatml"], "byte-level"))
    encoder = ExampleEncoder(chatml.tokenizer, ChatTemplate(source, {}, chatml.tokenizer.special, "it"))
    tools = ({"type": "function", "function": {"name": "search"}},)
    call = {"type": "function", "function": {"name": "search", "arguments": {}}}
    turns = (Message("user", "Please search it."), Message("assistant", "A", fields={"tool_calls": [call]}))
    named = (Message("user", "Q", fields={"name": "Ann"}), turns[1])
    records = [Example((), (turns,), tools), Example((), (turns,)), Example((), (named,))]
    list(encoder.encode_documents([Document("d", "", None, record) for record in records]))
    left_out = [warning.partition(" leaves out ")[2] for warning in encoder.list_warnings()]
    lost = ("the tools of 1 conversation", "them"), ("the name of a message of 1 conversation", "it")
    assert left_out == ([] if written else [f"{what}: the model does not see {which}" for what, which in lost])
    if not written:
        with pytest.raises(UserError, match="^tools: .* leaves out the function search"):
            encoder.encode_prompt(turns[:1], tools=tools)


def make_call_template(prefix: str = "") -> ChatTemplate:
    """A template as gpt-oss's, in which the header of a tool's result has the name of the called function."""
    source = (
        LOOP + "{% if m.tool_calls %}<|start|>assistant" + prefix + " to={{ m.tool_calls[0].function.name }}<|message|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% elif m.role == 'tool' %}<|start|>functions."
        "{{ messages[loop.index0 - 1].tool_calls[0].function.name }}<|message|>{{ m.content }}<|end|>{% else %}"
        "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}" + END
        + "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    )  # fmt: skip
    return ChatTemplate(source, {}, frozenset({"<|start|>", "<|message|>", "<|call|>", "<|end|>"}), "it")


def make_calls(count: int) -> list[Message]:
    """A conversation in which the assistant calls a function `count` times, with arguments that end in a number."""
    turns = [Message("user", "Ask.")]
    for number in range(count):
        call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo", "days": number}}}
        turns += [Message("assistant", "", fields={"tool_calls": [call]}), Message("tool", f"Sunny {number}.")]
    return [*turns, Message("assistant", "Fine.")]


def test_name_of_a_call_in_the_header_of_its_result_is_not_part_of_the_call():
    template, turns = make_call_template(), make_calls(12)
    found = template.render_with_spans(turns)
    calls = [f' to=weather<|message|>{{"city": "Oslo", "days": {number}}}<|call|>' for number in range(12)]
    assert [found.text[begin:end] for begin, end in found.responses] == [*calls, "<|message|>Fine.<|end|>"]
    tools = [found.text[begin:end] for begin, end, role in found.turns if role == "tool"]
    assert tools == [f"Sunny {number}." for number in range(12)]


def test_long_conversations_are_rendered_a_few_times_whatever_is_around_their_texts(monkeypatch: pytest.MonkeyPatch):
    count = 0

    def render(self, *given):
        nonlocal count
        count += 1
        return unchanged(self, *given)

    unchanged = ChatTemplate._render_marked
    monkeypatch.setattr(ChatTemplate, "_render_marked", render)
    source, special, *_ = STRUCTURES["empty thoughts before the last answer"]
    spaces = ["", " ", "\n", "  \n", '"', "\\", "\n\n", "\t"]
    turns = [
        Message("assistant" if number % 2 else "user", spaces[number % 8] + f"It {number}" + spaces[number // 8 % 8])
        for number in range(256)
    ]  # fmt: skip
    found = spans_of(ChatTemplate(source, {}, frozenset(special), "it"), turns)
    answers = [turn.content for turn in turns[1::2]]
    assert found == [*(f"{text}<|e|>" for text in answers[:-1]), f"<think>\n\n</think>\n\n{answers[-1]}<|e|>"]
    plain, count = count, 0
    assert plain < 30
    spans_of(make_call_template(" now"), make_calls(100))
    assert count < 30


def test_messages_with_more_characters_than_placeholders_are_rendered_several_times(monkeypatch: pytest.MonkeyPatch):
    source, special, *_ = STRUCTURES["another token ends the last answer"]
    turns = [*TURNS * 5, Message("user", "What is <|end|>?"), *TURNS[1:] * 4, Message("assistant", "So.")]
    whole = ChatTemplate(source, {}, frozenset(special), "it").render_with_spans(turns)
    monkeypatch.setattr(message_regions, "_LAST", 0xF0000 + 60)
    assert ChatTemplate(source, {}, frozenset(special), "it").render_with_spans(turns) == whole
    monkeypatch.setattr(message_regions, "_LAST", 0xF0000 + 5)  # not enough for one message
    with pytest.raises(TemplateError, match="inspects the messages' text"):
        ChatTemplate(source, {}, frozenset(special), "it").render_with_spans(TURNS * 2)


def test_conversation_that_would_be_rendered_without_end_is_refused(monkeypatch: pytest.MonkeyPatch):
    source = LOOP + "{{ m.role }}:{{ m.content }}{% if m.content | lower != m.content %}!{% endif %};" + END
    template = ChatTemplate(source, {}, frozenset(), "it")
    assert len(spans_of(template, TURNS * 5)) == 10
    monkeypatch.setattr(conversation_turns, "_MAX_RENDERED", 200)
    with pytest.raises(TemplateError, match=r"a conversation of 20 messages, which takes too long: split"):
        spans_of(template, TURNS * 5)


@pytest.mark.parametrize("trim", ["", " | trim"])
def test_parts_that_are_marked_as_context_are_not_trained_nor_are_tokens_across_their_edges(tmp_path, trim: str):
    style = STYLES["chatml"]._replace(
        template=STYLES["chatml"].template.replace("['content']", f"['content']{trim}", 2)
    )
    encoder = ExampleEncoder.from_directory(write_tokenizer(tmp_path, style, "byte-level"))

    def find_trained(*parts: tuple[str, bool]) -> tuple[str, str]:
        content = [{"text": text, "train": trained} for text, trained in parts]
        record = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": content}]}
        (example,) = RecordFormat("chat").parse_examples(record)
        [[piece]] = encoder.encode_documents([Document("d", "", None, example)])
        decode, trained = encoder.tokenizer.tokenizer.decode, piece.flags & TRAINED_BIT != 0
        rest = decode(piece.tokens[~trained].tolist(), skip_special_tokens=False)
        return decode(piece.tokens[trained].tolist(), skip_special_tokens=False), rest.partition("assistant\n")[2]

    assert find_trained(("the fox", True), (" over the dog", False), (" asks.", True)) == (
        "the fox asks.<|im_end|>", " over the dog\n",
    )  # fmt: skip
    assert find_trained(("the fox", False), (" asks", True)) == (" asks<|im_end|>", "the fox\n")
    assert find_trained(("the fox", True), (" asks", False)) == ("the fox<|im_end|>", " asks\n")
    assert find_trained(("the f", True), ("ox asks", False)) == ("the<|im_end|>", " fox asks\n")
    assert find_trained(("the fo", False), ("x asks", True)) == (" asks<|im_end|>", "the fox\n")


def test_parts_that_cannot_be_found_in_the_text_are_refused():
    template = ChatTemplate(LOOP + "{{ m.role }}:{{ m.content | upper }};" + END, {}, frozenset(), "it")
    marked = Message("assistant", "ONE, TWO", context=((0, 3),))
    assert template.render_with_spans([Message("user", "Q"), marked]).context == [(17, 20)]
    looks = ChatTemplate(
        LOOP + "{{ m.role }}:{{ m.content }}{{ '!' if 'O' in m.content }};" + END, {}, frozenset(), "it"
    )
    with pytest.raises(TemplateError, match="looks into the text of message 2 .* mark whole messages instead"):
        looks.render_with_spans([Message("user", "Q"), marked])


def test_variables_of_a_record_are_those_of_apply_chat_template(tmp_path):
    from transformers import AutoTokenizer

    source = (
        LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n" + END + "{{ extra | tojson if extra else '' }}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    )
    style = STYLES["chatml"]._replace(template=source)
    encoder = ExampleEncoder.from_directory(write_tokenizer(tmp_path, style, "byte-level"))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    for variables in ({}, {"enable_thinking": False}, {"enable_thinking": True, "extra": {"a": [1, "b"]}}):
        (example,) = RecordFormat("chat").parse_examples({"messages": messages, "chat_template_kwargs": variables})
        [[piece]] = encoder.encode_documents([Document("d", "", None, example)])
        expected = theirs.apply_chat_template(messages, return_dict=False, **variables)
        assert piece.tokens.tolist() == expected
        prompt = theirs.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False, **variables)
        assert encoder.encode_prompt(example.branches[0][:1], variables=example.variables) == prompt
    with pytest.raises(TemplateError, match="contains the special token"):
        encoder.template.render_with_spans(TURNS, variables={"extra": "<|im_end|>"})
