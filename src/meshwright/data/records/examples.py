"""Encoding of records: each conversation through the chat template to tokens with a response mask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.packing.shards import EncodedDocument
from meshwright.data.packing.token_flags import TRAINED_BIT, UNDESIRABLE_BIT, encode_role
from meshwright.data.records.chat_template import ChatTemplate, RenderedConversation, Tools, Variables
from meshwright.data.records.messages import Message
from meshwright.data.records.template_rendering import TemplateError
from meshwright.data.sources.reading import MAX_DOCUMENT_LENGTH, Document
from meshwright.data.tokenizers.library import convert_library_errors
from meshwright.data.tokenizers.special_tokens import make_template_encoder
from meshwright.data.tokenizers.tokenizer import TextTokenizer, find_tokenizer
from meshwright.errors import UserError
from meshwright.recipe.data import DataRecipe

VERSION = 5  # of parsing records and finding what is trained on


def collect_record_fields(recipe: DataRecipe, template: str) -> list[Any]:
    """Return a JSON list of everything in the recipe that determines how records become tokens; it enters the cache key
    of prepared data. template: Jinja source of the chat template."""
    keys = [recipe.record_keys, recipe.message_keys, recipe.record_roles]
    return [VERSION, recipe.records, *keys, recipe.thinking, template]


# What a template may leave out with a warning: {name: (what, consequence)}.
_LEFT_OUT = {
    "reasoning": ("reasoning", "it is not trained"),
    "tools": ("tools", "the model does not see them"),
    "name": ("name of a message", "the model does not see it"),
}


class ExampleEncoder:
    """Tokenizes records with a chat template. A preference record becomes two token sequences (chosen and rejected),
    any other record becomes one: prompt and response."""

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate) -> None:
        """Compile the template and prepare the tokenizer. Raises `UserError` if the source is not valid Jinja."""
        self.tokenizer, self.template = tokenizer, template
        self._system_messages = 0  # records with one
        self._left_out = Counter[str]()  # conversations of which the template leaves something out, by `_LEFT_OUT`
        self._encoder, self._names = make_template_encoder(tokenizer.tokenizer, tokenizer.special)
        template.check()

    @classmethod
    def from_directory(cls, directory: Path, where: str | None = None) -> ExampleEncoder:
        """Create an encoder from the tokenizer and chat template in a Hugging Face model directory. where: name of the
        template in error messages; None: derived from the directory. Raises `UserError` if the tokenizer has no chat
        template."""
        found = find_tokenizer(str(directory))
        assert found is not None, directory
        where = where or f"the chat template of {directory}"
        if (source := found.chat_template) is None:
            raise UserError(
                f"{where} is missing, so the format of a turn is unknown: add a chat_template.jinja, or give a plain "
                "prompt (/v1/completions, without --chat)"
            )
        tokenizer = found.load()
        return cls(tokenizer, ChatTemplate(source, found.list_named_tokens(), tokenizer.special, where))

    def encode_documents(self, documents: Sequence[Document]) -> Iterator[list[EncodedDocument]]:
        """Tokenize `documents`, which are records; yield for each record the list of its token sequences with flags
        (loss target, role). A preference record has two sequences, the chosen and the rejected one, any other record
        has one. Raises `UserError` if the template refuses a record, or if the record is too long."""
        rendered: list[RenderedConversation] = []
        branches = []
        for document in documents:
            assert document.example is not None, document.name
            if (size := len(document.text or "")) > MAX_DOCUMENT_LENGTH:
                raise UserError(
                    f"{document.name}: the record has {size:,} characters, and at most {MAX_DOCUMENT_LENGTH:,} are "
                    f"tokenized in one piece; shorten it, or set data.clean.maximum_characters = {MAX_DOCUMENT_LENGTH} "
                    "to drop such records"
                )
            prompt, of_it, tools, _, label, variables = document.example
            self._system_messages += any(message.role == "system" for message in (*prompt, *of_it[0]))
            branches.append((len(of_it), (document.text or "").encode(), label is False))
            try:
                if tools:
                    lost = self.template.list_unrendered_functions((*prompt, *of_it[0]), tools, variables)
                    self._left_out["tools"] += any(where == "tools" for where, _ in lost)
                rendered += [
                    self.template.render_with_spans((*prompt, *each), len(prompt), tools=tools, variables=variables)
                    for each in of_it
                ]
            except TemplateError as error:
                raise UserError(f"{document.name}: {self.template.where} {error}") from None
        self._left_out.update(name for one in rendered for name in one.left_out)
        encoded = iter(self._tokenize(rendered))
        for count, text, undesirable in branches:
            pieces = [next(encoded) for _ in range(count)]
            for _, trained in pieces:
                trained |= np.where(trained & TRAINED_BIT, UNDESIRABLE_BIT * undesirable, 0).astype(np.uint8)
            # The record's text is stored once, with its first document.
            yield [
                EncodedDocument(tokens, b"" if number else text, trained)
                for number, (tokens, trained) in enumerate(pieces)
            ]

    def encode_prompt(
        self, messages: Sequence[Message], header: bool = True, tools: Tools = (), variables: Variables | None = None
    ) -> list[int]:
        """Tokenize a conversation that the assistant is to continue; returns token ids. header: True to append the
        header of the assistant's next turn. tools: JSON schemas of functions. variables: further variables of the
        template. Raises `UserError` if the template refuses the messages, or leaves out tools or calls."""
        ((tokens, _),) = self._tokenize([self._render_prompt(messages, header, tools, variables)])
        return [int(token) for token in tokens]

    def render_prompt(
        self, messages: Sequence[Message], header: bool = True, tools: Tools = (), variables: Variables | None = None
    ) -> str:
        """Render a conversation that the assistant is to continue to text: the text that `encode_prompt` tokenizes for
        the same arguments, with the same errors. messages: the conversation. header: True to append the header of the
        assistant's next turn. tools: JSON schemas of functions. variables: further variables of the template."""
        return self._render_prompt(messages, header, tools, variables).text

    def _render_prompt(
        self, messages: Sequence[Message], header: bool, tools: Tools, variables: Variables | None
    ) -> RenderedConversation:
        """Render a conversation and check that the template renders all tools and calls. messages: the conversation.
        header: True to append the header of the assistant's next turn. tools: JSON schemas of functions. variables:
        further variables of the template."""
        given: dict[str, Any] = {"tools": tools, "variables": variables}
        try:
            rendered = self.template.render_with_spans(messages, len(messages), prompt=header, **given)
            lost = self.template.list_unrendered_functions(messages, tools, variables, header)
        except TemplateError as error:
            raise UserError(f"{self.template.where} {error}") from None
        for field, name in lost:
            raise UserError(
                f"{field}: {self.template.where} leaves out the function {name[:40]}: it is not made for tools"
            )
        return rendered

    def list_warnings(self) -> Iterator[str]:
        """Yield warnings for the user about the template and the documents encoded so far, such as text that the
        template does not render."""
        if self.find_turn_end() is None:
            yield f"{self.template.where} ends the assistant's turns without a token: a model does not learn to stop"
        if self._system_messages and self.template.leaves_out_system:
            count = f"{self._system_messages:,} record{'s' * (self._system_messages != 1)}"
            yield (
                f"{self.template.where} leaves out the system message where a conversation ends with an answer, as in "
                f"{count}: the model does not see it"
            )
        for name, (what, consequence) in _LEFT_OUT.items():
            if number := self._left_out[name]:
                count = f"{number:,} conversation{'s' * (number != 1)}"
                yield f"{self.template.where} leaves out the {what} of {count}: {consequence}"

    def find_turn_end(self) -> int | None:
        """Return the id of the special token that ends an assistant turn, or None if the template writes none."""
        try:
            rendered = self.template.render_with_spans([Message("user", "A?"), Message("assistant", "B.")])
        except TemplateError:
            return None
        ((tokens, trained),) = self._tokenize([rendered])
        for token in tokens[trained & TRAINED_BIT != 0][::-1].tolist():
            if self.tokenizer.tokenizer.id_to_token(token) in self.tokenizer.special:
                return int(token)
            if self.tokenizer.decode([token]).strip():
                break
        return None

    def _tokenize(self, rendered: Sequence[RenderedConversation]) -> list[tuple[NDArray[Any], NDArray[np.uint8]]]:
        """Tokenize rendered conversations; return for each (token ids [tokens], flags uint8 [tokens]). Flags mark loss
        targets and store the role of each token's turn (`token_flags`)."""
        named = [_rename_template_tokens(one, self._names) for one in rendered]
        with convert_library_errors("text cannot be tokenized"):
            encodings = self._encoder.encode_batch([text for text, _ in named], add_special_tokens=False)
        result = []
        for one, (_, shift), encoding in zip(rendered, named, encodings, strict=True):
            tokens = np.array(encoding.ids, dtype=self.tokenizer.dtype)
            flags = np.zeros(len(tokens), np.uint8)
            if len(tokens):
                places = np.array(encoding.offsets, np.int64)
                marked = [(begin, end, encode_role(role)) for begin, end, role in one.turns]
                marked += [(begin, end, TRAINED_BIT) for begin, end in one.responses]
                begins, ends = np.maximum.accumulate(places).T
                begins = np.where(places[:, 0] == places[:, 1], ends, begins)  # without characters: after that before
                for begin, end, bits in [*marked, *((begin, end, 0) for begin, end in one.context)]:
                    # A token is in a range if it has a character of it; one without characters, if it is between such
                    # tokens. A token of two turns belongs to the first one.
                    first = np.searchsorted(ends, shift(begin), side="right")
                    held = flags[first : np.searchsorted(begins, shift(end))]
                    if bits == 0:
                        held &= ~np.uint8(TRAINED_BIT)
                    else:
                        held |= np.where((held == 0) | (bits == TRAINED_BIT), bits, 0).astype(np.uint8)
                flags[0] &= ~np.uint8(TRAINED_BIT)  # nothing comes before it that could predict it
            result.append((tokens, flags))
        return result


def _rename_template_tokens(
    rendered: RenderedConversation, names: Mapping[str, str]
) -> tuple[str, Callable[[int], int]]:
    """Replace the special tokens that the template wrote in the conversation `rendered` by random names that no message
    can contain. Return (new text, function that maps a character position in the old text to the position in the new
    text). names: {special token: its random name}."""
    parts: list[str] = []
    moved: list[tuple[int, int]] = []  # (place in the text, by how much what follows it moves)
    at = shift = 0
    for begin, end in rendered.template_tokens:
        name = names[rendered.text[begin:end]]
        parts += [rendered.text[at:begin], name]
        shift += len(name) - (end - begin)
        moved.append((end, shift))
        at = end
    parts.append(rendered.text[at:])
    ends = np.array([end for end, _ in moved], np.int64)
    shifts = [0, *(by for _, by in moved)]

    def shift_position(position: int) -> int:
        """Convert a character position in the old text to one in the new text."""
        return position + shifts[int(np.searchsorted(ends, position, side="right"))]

    return "".join(parts), shift_position
