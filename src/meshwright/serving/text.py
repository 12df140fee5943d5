"""Incremental detokenization: tokens to text, in pieces of complete characters."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer makes of bytes that are no whole character (yet)
CONTEXT_TOKENS = 4


class IncrementalDetokenizer:
    """Incremental detokenizer: returns the text of tokens that follow the token IDs `before`, piece by piece; the
    joined pieces equal the text decoded at once.

    Only the last tokens are decoded each time, with those before them as context (a tokenizer may drop the space before
    a first word).
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(before[-CONTEXT_TOKENS:])
        self._known = len(self._window)  # tokens of the window whose text has been given
        self._given = len(self._decode())  # characters of the window's text that have been given

    def push(self, token: int) -> str:
        """Append a token; return the text that it completes, empty while a character is incomplete."""
        self._window.append(token)
        text = self._decode()
        whole = text.rstrip(UNFINISHED)
        piece = whole[self._given :]
        self._given = max(self._given, len(whole))
        if piece and whole == text:
            self._window = self._window[self._known :]
            self._known = len(self._window)
            self._given = len(self._decode())
        return piece

    def rest(self) -> str:
        """Return the remaining text at the end: bytes that never became a character."""
        return self._decode()[self._given :]

    def _decode(self) -> str:
        """Decode the current window of tokens."""
        return str(self._tokenizer.decode(self._window, skip_special_tokens=True))
