"""Prompts: encoding, refused prompts, and the bytes of a token."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.shared.fake_engine import SAMPLE, make_prompts
from meshwright.data.records.messages import Message
from meshwright.data.records.template_inputs import Conversation
from meshwright.errors import UserError
from meshwright.serving.prompts import Prompts
from tests.data.fallback_tokenizer import fallback_tokenizer


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    return make_prompts(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    tokenizer, directory = fallback_tokenizer(), tmp_path_factory.mktemp("sentencepiece")
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    size = tokenizer.get_vocab_size()
    return Prompts(tokenizer, start=0, ends=[0], vocabulary=size, max_length=64, directory=directory)


def test_prompt_has_start_token_and_no_special_text(prompts: Prompts):
    (end,) = prompts.ends
    tokens = prompts.encode("a<|endoftext|>b")
    assert tokens[0] == prompts.start == end
    assert end not in tokens[1:]
    assert prompts.decode(tokens[1:]) == "a<|endoftext|>b"
    assert prompts.encode("a<|endoftext|>b", add_start=False) == tokens[1:]


def test_special_tokens_are_parsed_where_asked(prompts: Prompts, sentencepiece: Prompts):
    for one, special in ((prompts, "<|endoftext|>"), (sentencepiece, "<s>")):
        start, letter = one.start, one.encode("a", add_start=False)
        for text, tokens in (
            ("a", [start, *letter]),
            (f"a{special}", [start, *letter, start]),
            (f"{special}{special}", [start, start]),
            ("", [start]),
            (special[:-1], one.encode(special[:-1])),
        ):
            assert one.encode(text, parse_special=True) == tokens
        assert one.encode(special, add_start=False, parse_special=True) == [start]
        assert one.encode("", add_start=False, empty=True, parse_special=True) == []
    middle = prompts.encode("a<|endoftext|>b", parse_special=True)
    assert middle == prompts.check([prompts.start, *prompts.encode("a", add_start=False), *prompts.encode("b")])


def test_token_bytes_concatenate_to_text_bytes(prompts: Prompts, sentencepiece: Prompts):
    for one, text in ((prompts, SAMPLE), (sentencepiece, " some señor 日本")):
        tokens = one.encode(text, add_start=False)
        assert b"".join(map(one.token_bytes.__getitem__, tokens)) == text.encode()


def test_token_text_shows_bytes_of_incomplete_characters(prompts: Prompts, sentencepiece: Prompts):
    for one in (prompts, sentencepiece):
        shown = [one.get_token_text(token) for token in one.encode("日", add_start=False)]
        assert shown[-1] in ("日", "bytes:\\xa5") or shown[-1].startswith("bytes:")
    assert sentencepiece.get_token_text(1 + 0xE6) == "bytes:\\xe6"
    assert sentencepiece.get_token_text(0) == "<s>"
    assert sentencepiece.get_token_text(257) == " "


@pytest.mark.parametrize("token", [-1, 10**6, 2**31])
def test_token_of_another_vocabulary_is_refused(prompts: Prompts, token: int):
    with pytest.raises(UserError, match=f"token {token} is not in the model's vocabulary, 0 to"):
        prompts.check([1, token, 2])


def test_empty_prompt_is_refused(sentencepiece: Prompts):
    assert sentencepiece.encode("") == [0]
    for use in (lambda: sentencepiece.encode("", add_start=False), lambda: sentencepiece.check([])):
        with pytest.raises(UserError, match="the prompt is empty"):
            use()


def test_oversized_text_is_refused_before_tokenization(prompts: Prompts, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prompts, "_encoder", None)
    with pytest.raises(UserError, match="10,000,000 characters, more than the maximum length of 512 tokens"):
        prompts.encode("x" * 10**7)
    monkeypatch.setattr(prompts, "_chat", None)
    with pytest.raises(UserError, match="10,000,000 characters"):
        prompts.encode_chat(Conversation([Message("user", "x" * 10**7)]))


def test_conversation_is_encoded_by_the_template(prompts: Prompts):
    turns = [Message("user", "hi")]
    assert prompts.render_chat(Conversation(turns)) == "<|endoftext|>### Instruction:\nhi\n\n### Response:\n"
    tokens = prompts.encode_chat(Conversation(turns))
    assert prompts.tokenizer.decode(tokens, skip_special_tokens=False) == prompts.render_chat(Conversation(turns))


def test_conversation_refused_by_template_is_user_error(prompts: Prompts):
    with pytest.raises(UserError, match="no place for a message of the role tool"):
        prompts.encode_chat(Conversation([Message("tool", "x")]))


def test_model_without_template_cannot_chat(sentencepiece: Prompts):
    assert sentencepiece.chat_template is None
    with pytest.raises(UserError, match="the model's chat template is missing"):
        sentencepiece.encode_chat(Conversation([Message("user", "hi")]))


def test_directory_gives_tokenizer_template_and_all_end_tokens(tmp_path: Path):
    made = make_prompts(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9, -3, 300]}))
    config = SimpleNamespace(bos_token=None, eos_token=5, eos_tokens=(5,), vocabulary=300)
    read = Prompts.from_directory(tmp_path, config, 64)
    assert read.ends == {5, 7, 9}
    assert read.chat_ends == {5, 7, 9} | made.ends  # the template ends a turn by the tokenizer's end token
    assert read.chat_template == made.chat_template
    assert read.start == 5
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, True]}))
    with pytest.raises(UserError, match=r'generation_config\.json: "eos_token_id" must be a token id'):
        Prompts.from_directory(tmp_path, config, 64)


@pytest.mark.parametrize(
    ("template", "reason"),
    [("{% for %}", "line 1"), ("{{ '{:>5000000}'.format(1) }}", "more than the limit")],
)
def test_unusable_template_leaves_completions(tmp_path: Path, template: str, reason: str):
    make_prompts(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    config = SimpleNamespace(bos_token=None, eos_token=5, eos_tokens=(5,), vocabulary=300)
    read = Prompts.from_directory(tmp_path, config, 64)
    assert read.encode("ab", add_start=False)
    with pytest.raises(UserError, match=f"the model's chat template.*{reason}"):
        read.encode_chat(Conversation([Message("user", "hi")]))


def test_directory_without_tokenizer_is_one_line(tmp_path: Path):
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        Prompts.from_directory(tmp_path, None, 64)  # type: ignore[arg-type]
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        Prompts.from_directory(tmp_path, None, 64)  # type: ignore[arg-type]
