"""From token IDs back to text: incrementally, in pieces of complete characters, and the bytes of a single token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from meshwright.untrusted import parse_json

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # decoded from bytes that are not (yet) a whole character
CONTEXT_TOKENS = 4


class IncrementalDetokenizer:
    """Incremental detokenizer: converts tokens to text one at a time, in pieces of whole characters; the joined pieces
    equal the text decoded at once. `before`: token IDs that precede the first pushed token, such as the prompt's.

    Each call decodes only the last tokens, with a few earlier tokens as context (a tokenizer may drop the space before
    a first word).
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        """Start after the tokens `before`."""
        self._tokenizer = tokenizer
        self._window = list(before[-CONTEXT_TOKENS:])
        self._known = len(self._window)  # tokens of the window whose text has been given
        self._given = len(self._decode())  # characters of the window's text that have been given

    def push(self, token: int) -> str:
        """Append a token; return the new text, empty while its last character is incomplete."""
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

    def flush(self) -> str:
        """Return the text that is still held back after the last token: replacement characters (U+FFFD) for the bytes
        of an incomplete character, else empty."""
        return self._decode()[self._given :]

    def _decode(self) -> str:
        """Decode the tokens that are not yet returned as text, preceded by a few earlier tokens as context."""
        return str(self._tokenizer.decode(self._window, skip_special_tokens=True))


class TokenBytes(dict[int, bytes]):
    """Dictionary {token ID: UTF-8 bytes that it stands for} of a `tokenizer`; each entry is computed at first
    access."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Create an empty dictionary for `tokenizer`."""
        self._tokenizer = tokenizer
        self._added = tokenizer.get_added_tokens_decoder()
        decoder: Any = parse_json(tokenizer.to_str()).get("decoder") or {}
        kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if "type" in part}
        self._byte_of_letter = _map_byte_letters() if "ByteLevel" in kinds else None
        self._bytes_by_name = "ByteFallback" in kinds
        self._space = "▁" if kinds & {"Replace", "Metaspace"} else ""

    def __missing__(self, token: int) -> bytes:
        """Compute, store and return the bytes of the ID `token`, which is looked up for the first time."""
        self[token] = data = self._find_bytes(token)
        return data

    def _find_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes that a token ID stands for; empty if the tokenizer has no such token."""
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if token in self._added:
            return str(piece).encode()
        if self._byte_of_letter is not None and all(letter in self._byte_of_letter for letter in piece):
            return bytes(self._byte_of_letter[letter] for letter in piece)
        if self._bytes_by_name and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        if self._space:
            return str(piece).replace(self._space, " ").encode()
        return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()


def _map_byte_letters() -> dict[str, int]:
    """Return {character: byte} of byte-level BPE vocabularies, in which one character stands for each byte (the inverse
    of GPT-2's `bytes_to_unicode`)."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    shown = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    hidden = (byte for byte in range(256) if byte not in shown.values())
    return shown | dict(zip((letter for letter in letters if ord(letter) >= 256), hidden, strict=True))
