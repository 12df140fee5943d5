"""Conversations rendered by chat templates, compared with `transformers.apply_chat_template`."""

from __future__ import annotations

import numpy as np
import pytest

from bench.shared.chat_templates import STYLES, write_tokenizer
from meshwright.data.packing.token_flags import TRAINED_BIT
from meshwright.data.records.chat_template import ChatTemplate
from meshwright.data.records.examples import ExampleEncoder
from meshwright.data.records.messages import Message
from meshwright.data.records.parsed_example import Example
from meshwright.data.records.template_rendering import TemplateError
from meshwright.data.records.template_sources import check_template_tokens, find_template
from meshwright.data.sources.reading import Document
from meshwright.errors import UserError

TURNS = [
    Message("system", "You know what the fox does."),
    Message("user", "What does the quick fox do?\n\n"),
    Message("assistant", "It jumps over <the lazy> dog. Wörter, 日本語!"),
    Message("user", "  And {{ then }} [INST]? "),
    Message("assistant", "it sleeps"),
]


class Pair:
    """Return a tokenizer with a template, loaded by us and by `transformers`."""

    def __init__(self, directory, style: str, kind: str = "byte-level") -> None:
        from transformers import AutoTokenizer

        self.style = STYLES[style]
        self.directory = write_tokenizer(directory, self.style, kind)
        self.theirs = AutoTokenizer.from_pretrained(self.directory)
        self.ours = ExampleEncoder.from_directory(self.directory)

    def turns(self, turns=TURNS):
        return list(turns if self.style.system else turns[1:])

    def pieces(self, *turns: Message, prompt: tuple[Message, ...] = ()):
        """Return (tokens, response mask) of one conversation."""
        [[piece]] = self.ours.encode_documents([Document("d", "", None, Example(prompt, (turns,)))])
        return piece.tokens, piece.flags & TRAINED_BIT

    def apply(self, turns, **options):
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        return self.theirs.apply_chat_template(messages, tokenize=True, return_dict=True, **options)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory):
    made: dict[tuple[str, str], Pair] = {}

    def pair(style: str, kind: str = "byte-level") -> Pair:
        if (style, kind) not in made:
            made[style, kind] = Pair(tmp_path_factory.mktemp(style), style, kind)
        return made[style, kind]

    return pair


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize("style", STYLES)
def test_chat_template_tokens_match_transformers(pairs, style: str, kind: str):
    pair = pairs(style, kind)
    turns = pair.turns()
    tokens, _ = pair.pieces(*turns)
    assert tokens.tolist() == pair.apply(turns)["input_ids"]
    assert pair.ours.encode_prompt(turns[:-1]) == pair.apply(turns[:-1], add_generation_prompt=True)["input_ids"]


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_generation_marks_match_transformers_assistant_mask(pairs, kind: str):
    pair = pairs("marked", kind)
    turns = [turn._replace(content=turn.content.replace("日本語", "words")) for turn in pair.turns()]
    _, trained = pair.pieces(*turns)
    assert trained.tolist() == pair.apply(turns, return_assistant_tokens_mask=True)["assistant_masks"]


@pytest.mark.parametrize("style", [style for style in STYLES if style != "marked"])
def test_template_without_generation_marks_trains_answers_and_end_token(pairs, style: str):
    pair = pairs(style)
    tokens, trained = pair.pieces(*pair.turns())
    end = {"gemma": "<end_of_turn>"}.get(style, pair.style.eos)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], trained, [0]])))
    spans = [pair.theirs.decode(tokens[begin:stop]) for begin, stop in edges.reshape(-1, 2)]
    first, second = (turn.content for turn in TURNS if turn.role == "assistant")
    assert [span.strip() for span in spans] == [
        f"{first}{' ' * (style == 'llama-2')}{end}",
        f"{second}{' ' * (style == 'llama-2')}{end}",
    ]


def test_prompt_answers_and_blank_answers_are_not_targets(pairs):
    pair = pairs("chatml")
    turns = pair.turns()
    tokens, trained = pair.pieces(turns[-1], prompt=tuple(turns[:-1]))
    assert pair.theirs.decode(tokens[trained.astype(bool)]) == "it sleeps<|im_end|>"
    tokens, trained = pair.pieces(*turns[:-1], Message("assistant", " \n"))
    assert pair.theirs.decode(tokens[trained.astype(bool)]) == f"{turns[2].content}<|im_end|>"


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@pytest.mark.parametrize("style", STYLES)
def test_message_text_never_becomes_special_token(pairs, style: str, kind: str):
    """Any message text gives as many special tokens as harmless text, and decodes to itself."""
    pair = pairs(style, kind)
    special = {pair.theirs.convert_tokens_to_ids(token) for token in pair.style.special}
    harmless = sum(token in special for token in pair.pieces(*pair.turns())[0])
    for token in pair.style.special:
        for evil in (token, f"a{token}b{token}", f"{token[1:]} {token[:-1]}", token[2:-2], f" {token}"):
            turns = [turn._replace(content=evil) for turn in pair.turns()]
            tokens, _ = pair.pieces(*turns)
            assert sum(one in special for one in tokens) == harmless, (token, evil)
            rendered = pair.ours.template.render(turns)
            if kind == "byte-level":
                assert pair.theirs.decode(tokens) == rendered
            with_theirs = pair.apply(turns)["input_ids"]
            if token in evil:  # tokenized as plain text, the rendered template has other tokens
                assert sum(one in special for one in with_theirs) > harmless


@pytest.mark.parametrize("source, content", [("<|{}|>", "x"), ("{}x|>", "<|"), ("<|x{}", "|>"), ("<|{}", " x|> ")])
def test_special_token_partly_spelled_by_message_is_text(source: str, content: str):
    before, after = source.split("{}")
    template = ChatTemplate(
        f"{{% for m in messages %}}{before}{{{{ m.content | trim }}}}{after}{{% endfor %}}",
        {},
        frozenset({"<|x|>"}),
        "",
    )
    rendered = template.render_with_spans([Message("user", content)], prompt=True)
    assert (rendered.text, rendered.template_tokens) == ("<|x|>", [])


def test_template_that_inspects_text_refuses_special_token_in_message():
    source = "{% for m in messages %}{{ '<|a|>' + (m.content.split('</t>')[-1]) }}{% endfor %}"
    template = ChatTemplate(source, {}, frozenset({"<|a|>"}), "it")
    assert template.render_with_spans([Message("user", "x</t>y")], prompt=True).text == "<|a|>y"
    with pytest.raises(TemplateError, match=r"one contains the special token <\|a\|>"):
        template.render_with_spans([Message("user", "x</t><|a|>")], prompt=True)


def test_template_with_undetermined_answers_is_refused_with_advice():
    """The template shortens earlier answers, as those of reasoning models do."""
    source = (
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' and not loop.last %}..{% else %}"
        "{{ m.content }}{% endif %};{% endfor %}"
    )
    template = ChatTemplate(source, {}, frozenset(), "it")
    one = [Message("user", "Q"), Message("assistant", "A")]
    assert template.render_with_spans(one).responses == [(len("user:Q;"), len("user:Q;assistant:A;"))]
    with pytest.raises(
        TemplateError, match=r"leaves out the content of message 2 \(assistant\): take another template"
    ):
        template.render_with_spans([*one, *one])


def test_template_refusal_names_the_record(pairs):
    pair = pairs("gemma")
    document = Document("chats.jsonl:7", "", None, Example((), (tuple(TURNS),)))
    with pytest.raises(UserError, match=r"chats.jsonl:7: the chat template of .* System role not supported"):
        list(pair.ours.encode_documents([document]))


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ 1.5 ** 9999 }}", "{{ messages[9].a.b }}", "{{ 'a' + 1 }}"])
def test_template_failure_names_the_record(source: str):
    with pytest.raises(TemplateError, match="^cannot render it: "):
        ChatTemplate(source, {}, frozenset(), "it").render([Message("user", "Q")])


@pytest.mark.parametrize("style", STYLES)
def test_turn_end_token_is_found_despite_trailing_white_space(pairs, style: str):
    pair = pairs(style)
    assert pair.theirs.convert_ids_to_tokens(pair.ours.find_turn_end()) == {"gemma": "<end_of_turn>"}.get(
        style, pair.style.eos
    )


@pytest.mark.parametrize("style", ["chatml", "llama-2"])  # whose tokens are `<|...|>` and `</s>`
def test_turn_end_token_of_marked_responses_is_their_last_token(pairs, style: str):
    pair = pairs(style)
    source = (
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content + END }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    for end, found in ((f"{pair.style.eos}\n", pair.style.eos), ("\n", None), (f"{pair.style.eos}.", None)):
        template = ChatTemplate(source.replace("END", repr(end)), {}, pair.ours.template.special, "it")
        number = ExampleEncoder(pair.ours.tokenizer, template).find_turn_end()
        assert (number if number is None else pair.theirs.convert_ids_to_tokens(number)) == found


def test_record_of_millions_of_characters_is_refused_before_tokenization(pairs):
    example = Example((), ((Message("user", "Q"), Message("assistant", "A" * 1_000_001)),))
    document = Document("chats.jsonl:7", example.join_texts(), None, example)
    with pytest.raises(UserError, match=r"chats.jsonl:7: .* 1,000,004 characters.*clean.maximum_characters = 1000000"):
        list(pairs("chatml").ours.encode_documents([document]))


def test_templates_run_in_sandbox():
    template = ChatTemplate("{{ messages.__class__.__mro__ }}", {}, frozenset(), "it")
    with pytest.raises(TemplateError, match="unsafe"):
        template.render([Message("user", "Q")])


@pytest.mark.parametrize(
    "name, problem",
    [
        ("instructions", 'did you mean "instruction"'),
        ("no/such.jinja", "is neither a template nor a file; known: instruction, chatml, model"),
        ("model", 'has no chat_template; set data.template to "instruction" or "chatml"'),
    ],
)
def test_missing_template_is_refused(name: str, problem: str):
    with pytest.raises(UserError, match=problem):
        find_template(name, None, "bpe")


def test_chatml_requires_its_special_tokens():
    check_template_tokens("chatml", {"<|im_start|>", "<|im_end|>"}, "qwen")
    check_template_tokens("instruction", set(), "gpt2")
    with pytest.raises(UserError, match=r'writes <\|im_end\|>, which are not special tokens of the tokenizer "gpt2"'):
        check_template_tokens("chatml", {"<|im_start|>"}, "gpt2")


def test_invalid_template_file_is_refused_with_line(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    source, where = find_template(str(path), None, "bpe")
    with pytest.raises(UserError, match=r"t.jinja, line 2: not a Jinja template"):
        ChatTemplate(source, {}, frozenset(), where).check()


@pytest.mark.parametrize("name", ["instruction", "chatml"])
def test_built_in_templates_render_alike_in_transformers(pairs, name: str):
    pair = pairs("chatml")
    source, where = find_template(name, None, "")
    ours = ExampleEncoder(
        pair.ours.tokenizer, ChatTemplate(source, {"eos_token": "<|im_end|>"}, pair.ours.template.special, where)
    )
    turns = TURNS[:3]
    [[piece]] = ours.encode_documents([Document("d", "", None, Example((), (tuple(turns),)))])
    theirs = pair.apply(turns, chat_template=source, return_assistant_tokens_mask=True)
    assert piece.tokens.tolist() == theirs["input_ids"]
    assert (piece.flags & TRAINED_BIT).tolist() == theirs["assistant_masks"]


def test_instruction_template_renders_instruction_input_and_output():
    source, where = find_template("instruction", None, "")
    template = ChatTemplate(source, {"eos_token": "</s>", "bos_token": "<s>"}, frozenset({"<s>", "</s>"}), where)
    text = "<s>### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3</s>"
    assert template.render([Message("user", "Add.", "1 2"), Message("assistant", "3")]) == text
    assert template.render([Message("user", "Add.", "1 2")], prompt=True) == text.removesuffix("3</s>")
    assert "Input" not in template.render([Message("user", "Add.")])
