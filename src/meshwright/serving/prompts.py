"""Prompts of a served model: conversion of text and conversations to token IDs and back. Free of torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from meshwright.data.records.examples import ExampleEncoder
from meshwright.data.records.template_inputs import Conversation
from meshwright.data.tokenizers import special_tokens
from meshwright.data.tokenizers.detokenizer import TokenBytes
from meshwright.data.tokenizers.library import convert_library_errors, parse_tokenizer
from meshwright.errors import UserError
from meshwright.spec.config import ModelConfig
from meshwright.spec.config_reader import Reader
from meshwright.untrusted import read_file, read_json


class PromptTooLong(UserError):
    """Error: a prompt has more tokens than the model's maximum length."""


class Prompts:
    """Tokenizer and chat template of a served model: converts prompts to token IDs and back. directory: Hugging Face
    directory from which special tokens and chat template are read.

    Attributes:
        start: ID of the start (BOS) token put before a text; None if the model has none.
        ends: IDs of the end tokens, which end a text.
        vocabulary: Number of token IDs of the model, which are 0 to `vocabulary - 1`.
        max_length: Maximum number of tokens of a prompt and its answer together.
        chat_ends: `ends`, and the token that ends an assistant turn in the chat template.
        chat_template: Jinja source of the chat template; None if it is missing or unusable.
        token_bytes: UTF-8 bytes of each token ID, which may be a part of a character; of a special token, its name's.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, start: int | None = None, ends: Iterable[int] = (), vocabulary: int,
        max_length: int, directory: Path,
    ) -> None:  # fmt: skip
        """Wrap a tokenizer. start, ends, vocabulary, max_length: the attributes of the same names. directory: Hugging
        Face directory of the tokenizer."""
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self.tokenizer, self.start, self.ends = tokenizer, start, frozenset(ends)
        self.vocabulary, self.max_length = vocabulary, max_length
        added = tokenizer.get_added_tokens_decoder()  # an end token may be an ordinary one, such as a newline
        ends_and_start = {added[each].content for each in {start, *self.ends} if each in added}
        named = special_tokens.read_special_tokens(directory) | ends_and_start
        self._special = special_tokens.find_special_tokens(tokenizer, named)
        self._encoder = special_tokens.make_text_encoder(tokenizer, self._special)
        self._longest_token = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self.token_bytes = TokenBytes(tokenizer)
        self._chat, turn_end, self._chat_problem = _load_chat(directory)
        self.chat_template = self._chat.template.source if self._chat else None
        self.chat_ends = self.ends if turn_end is None else self.ends | {turn_end}

    @classmethod
    def from_directory(cls, directory: Path, config: ModelConfig, max_length: int) -> Prompts:
        """Load tokenizer and chat template from a Hugging Face directory. config: configuration of the model.
        max_length: maximum number of tokens of prompt and answer. Raises UserError if the tokenizer is missing or
        damaged."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{directory} has no tokenizer.json, which is needed to tokenize prompts")
        tokenizer = parse_tokenizer(read_file(path), path)
        start = config.bos_token if config.bos_token is not None else config.eos_token
        sizes = {"vocabulary": config.vocabulary, "max_length": max_length}
        return cls(tokenizer, start=start, ends=read_end_tokens(directory, config), directory=directory, **sizes)

    def encode(
        self, text: str, add_start: bool = True, *, empty: bool = False, parse_special: bool = False
    ) -> list[int]:
        """Tokenize a text and return its token IDs, after the start token if `add_start`. Special tokens that the text
        spells become their token IDs if `parse_special`; otherwise they are tokenized as ordinary text. If the text
        begins with a parsed start token, no second start token is added.

        Raises UserError for a text that must be longer than `max_length` tokens (checked before tokenizing), for a
        token ID outside the model's vocabulary, and for a result without tokens unless `empty` is True.
        """
        self._check_characters(len(text))
        encoder = self._encoder
        if parse_special:
            encoder, names, pattern = self._special_parser
            text = pattern.sub(lambda match: names[match[0]], text)
        with convert_library_errors("text becomes no tokens"):
            tokens = encoder.encode(text, add_special_tokens=False).ids
        start = [self.start] if add_start and self.start is not None else []
        return self.check(tokens if parse_special and tokens[:1] == start else start + tokens, empty=empty)

    @cached_property
    def _special_parser(self) -> tuple[Tokenizer, dict[str, str], re.Pattern[str]]:
        """Tokenizer that parses special tokens in a text, for `encode`: (tokenizer, names, pattern).

        names: {special token: random name}. `encode` replaces each special token that the regular expression `pattern`
        finds (longer tokens first) by its random name, and then tokenizes the text. This copy of the tokenizer knows
        special tokens only by these names, so that ordinary text cannot spell one by accident."""
        encoder, names = special_tokens.make_template_encoder(self.tokenizer, self._special)
        longest_first = sorted(names, key=lambda token: (-len(token), token))
        return encoder, names, re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def encode_chat(self, given: Conversation, header: bool = True) -> list[int]:
        """Tokenize the conversation `given`, formatted by the model's chat template, and return its token IDs. header:
        True: append the header of the assistant's next turn (needed for a prompt).

        Raises UserError if the template is missing or unusable, if it refuses the conversation or ignores its tools or
        tool calls, or if its text is so long that it has more than `max_length` tokens."""
        self._check_characters(given.count_characters())
        return self.check(self._require_chat().encode_prompt(given.messages, header, given.tools, given.variables))

    def render_chat(self, given: Conversation, header: bool = True) -> str:
        """Render the conversation `given` to text by the model's chat template. header: True: append the header of the
        assistant's next turn. Raises UserError if the template is missing or unusable, refuses the conversation, or
        ignores its tools or tool calls."""
        return self._require_chat().render_prompt(given.messages, header, given.tools, given.variables)

    def check(self, tokens: Sequence[int], *, empty: bool = False) -> list[int]:
        """Check token IDs and return them as a list. Raises UserError if one is outside the model's vocabulary, or if
        `tokens` is empty unless `empty` is True."""
        if not tokens and not empty:
            raise UserError("the prompt is empty: it needs at least one token")
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < self.vocabulary:
                raise UserError(f"token {token} is not in the model's vocabulary, 0 to {self.vocabulary - 1}")
        return list(tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of a sequence of token IDs, without special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def get_token_text(self, token: int) -> str:
        r"""Return the text of a single token ID. If its bytes are not whole characters, they are written as
        `bytes:\xe2\x80`, as in OpenAI's API."""
        data = self.token_bytes[token]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _check_characters(self, count: int) -> None:
        """Raise PromptTooLong if a text of `count` characters must have more than `max_length` tokens, even if every
        token were as long as the longest in the vocabulary."""
        if count > self.max_length * self._longest_token:
            limit = f"the maximum length of {self.max_length:,} tokens"
            raise PromptTooLong(f"the prompt has {count:,} characters, more than {limit} can hold")

    def _require_chat(self) -> ExampleEncoder:
        """Return the encoder of conversations. Raises UserError if the chat template is missing or unusable."""
        if self._chat is None:
            raise UserError(self._chat_problem)
        return self._chat


def read_end_tokens(directory: Path, config: ModelConfig) -> frozenset[int]:
    """Return the IDs of the end-of-text tokens: the union of the IDs in config.json (`config`) and in
    generation_config.json of `directory`. IDs outside the vocabulary are left out, as in config.json. Raises UserError
    for another type."""
    path = directory / "generation_config.json"
    try:
        found = {**read_json(path, "config_bytes")} if path.is_file() else {}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is not a JSON object: {error}") from None
    return frozenset(config.eos_tokens).union(Reader(found, {}, str(path)).tokens("eos_token_id", config.vocabulary))


def _load_chat(directory: Path) -> tuple[ExampleEncoder | None, int | None, str]:
    """Load the chat template of a Hugging Face directory. Return (encoder of conversations, ID of the token that ends
    an assistant turn or None, ""), or (None, None, reason) if the template is missing or unusable."""
    try:
        chat = ExampleEncoder.from_directory(directory, "the model's chat template")
        return chat, chat.find_turn_end(), ""
    except UserError as error:
        return None, None, str(error)
