"""Records to tokens: each conversation through the template, each token with the word whether it is of a response."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.data.packing.shards import Piece
from meshwright.data.records.chat_template import ChatTemplate, Rendered
from meshwright.data.records.conversations import Message
from meshwright.data.records.template_rendering import TemplateError
from meshwright.data.sources.reading import LONGEST_DOCUMENT, Document
from meshwright.data.tokenizers.special_tokens import template_encoder
from meshwright.data.tokenizers.tokenizer import TextTokenizer, find_tokenizer
from meshwright.errors import UserError


class ExampleEncoder:
    """Makes of a record the tokens of prompt and response; of a preference record those of both its responses."""

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate) -> None:
        """`UserError`: it is no Jinja template."""
        self.tokenizer, self.template = tokenizer, template
        self._encoder, self._names = template_encoder(tokenizer.tokenizer, tokenizer.special)
        template.check()

    @classmethod
    def of_directory(cls, directory: Path, where: str | None = None) -> ExampleEncoder:
        """Of a tokenizer's files with a chat template. `where`: what errors call that. `UserError`: there is none."""
        found = find_tokenizer(str(directory))
        assert found is not None, directory
        if (source := found.chat_template) is None:
            raise UserError(
                f"{directory}: its tokenizer comes without a chat template, so nothing says how a turn is written; "
                "give a text to be continued (without --chat), or put a chat_template.jinja there"
            )
        tokenizer = found.load()
        where = where or f"the chat template of {directory}"
        return cls(tokenizer, ChatTemplate(source, found.named_tokens(), tokenizer.special, where))

    def pieces(self, documents: Sequence[Document]) -> Iterator[list[Piece]]:
        """`UserError`: the template does not take a record, or it is too long to be tokenized in one piece."""
        rendered: list[Rendered] = []
        branches = []
        for document in documents:
            assert document.example is not None, document.name
            if (size := len(document.text or "")) > LONGEST_DOCUMENT:
                raise UserError(
                    f"{document.name}: the record has {size:,} characters, and at most {LONGEST_DOCUMENT:,} are "
                    f"tokenized in one piece; shorten it, or set data.clean.maximum_characters = {LONGEST_DOCUMENT} "
                    "to leave such records out"
                )
            prompt, of_it = document.example.prompt, document.example.branches
            branches.append((len(of_it), (document.text or "").encode()))
            try:
                rendered += [self.template.rendered((*prompt, *branch), len(prompt)) for branch in of_it]
            except TemplateError as error:
                raise UserError(f"{document.name}: {self.template.where} {error}") from None
        encoded = iter(self._encode(rendered))
        for count, text in branches:
            pieces = [next(encoded) for _ in range(count)]
            # The text is the record's: counted once.
            yield [Piece(tokens, b"" if number else text, trained) for number, (tokens, trained) in enumerate(pieces)]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens that the assistant's next turn follows. `UserError`: the template does not take the messages."""
        try:
            rendered = self.template.rendered(messages, prompt=True)
        except TemplateError as error:
            raise UserError(f"{self.template.where} {error}") from None
        ((tokens, _),) = self._encode([rendered])
        return [int(token) for token in tokens]

    def turn_end(self) -> int | None:
        """The token that ends the assistant's turn, if it is a special one; white space may be marked behind it."""
        try:
            rendered = self.template.rendered([Message("user", "A?"), Message("assistant", "B.")])
        except TemplateError:
            return None
        ((tokens, trained),) = self._encode([rendered])
        for token in tokens[trained != 0][::-1].tolist():
            if self.tokenizer.tokenizer.id_to_token(token) in self.tokenizer.special:
                return int(token)
            if self.tokenizer.decode([token]).strip():
                break
        return None

    def _encode(self, rendered: Sequence[Rendered]) -> list[tuple[NDArray[Any], NDArray[np.uint8]]]:
        named = [_renamed(one, self._names) for one in rendered]
        encodings = self._encoder.encode_batch([text for text, _ in named], add_special_tokens=False)
        result = []
        for (_, spans), encoding in zip(named, encodings, strict=True):
            tokens = np.array(encoding.ids, dtype=self.tokenizer.dtype)
            trained = np.zeros(len(tokens), np.uint8)
            if spans and len(tokens):
                places = np.array(encoding.offsets, np.int64)
                for begin, end in spans:
                    # A token is trained if it has some character of the response; one without any, if it lies among
                    # such.
                    inside = np.flatnonzero((places[:, 0] < end) & (places[:, 1] > begin))
                    if len(inside):
                        trained[inside[0] : inside[-1] + 1] = 1
                trained[0] = 0  # nothing comes before it that could predict it
            result.append((tokens, trained))
        return result


def _renamed(rendered: Rendered, names: Mapping[str, str]) -> tuple[str, list[tuple[int, int]]]:
    """The text with the template's own special tokens under their other names, and where the responses are in it."""
    parts: list[str] = []
    moved: list[tuple[int, int]] = []  # (place in the text, by how much what follows it moves)
    at = shift = 0
    for begin, end in rendered.own:
        name = names[rendered.text[begin:end]]
        parts += [rendered.text[at:begin], name]
        shift += len(name) - (end - begin)
        moved.append((end, shift))
        at = end
    parts.append(rendered.text[at:])
    ends = np.array([end for end, _ in moved], np.int64)
    shifts = [0, *(by for _, by in moved)]

    def place(position: int) -> int:
        return position + shifts[int(np.searchsorted(ends, position, side="right"))]

    return "".join(parts), [(place(begin), place(end)) for begin, end in rendered.responses]
