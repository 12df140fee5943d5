"""A list of words that no document may hold, as C4 has one (Raffel et al. 2020, arXiv:1910.10683, section 2.2)."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from meshwright.errors import UserError
from meshwright.untrusted import read_file

# Scripts that put no spaces between words: Thai, Lao, Myanmar, Khmer, kana, Han.
_JOINED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u9fff"
_LETTER = rf"[^\W{_JOINED}]"  # of the others
_WORD = re.compile(rf"{_LETTER}+")


class BlockedWords:
    """The words and phrases of a UTF-8 file, one a line; blank lines do not count.

    They stand in a text as whole words, in any case. In scripts that put no spaces between words (Chinese, Japanese,
    Thai ...) a listed word is found inside others too.
    """

    def __init__(self, path: str) -> None:
        """`UserError`: a file that cannot be read, or that lists nothing."""
        try:
            lines = _content(path).decode("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(path, error) from None
        listed = {line.strip().casefold() for line in lines} - {""}
        if not listed:
            raise UserError(f"data.clean.blocked_words: {path} lists no word; it has one a line")
        self.words = {word for word in listed if _WORD.fullmatch(word)}
        self.phrases = sorted(listed - self.words)

    def first(self, text: str) -> str | None:
        """A listed word that `text` holds, or None."""
        folded = text.casefold()
        if found := self.words.intersection(_WORD.findall(folded)):
            return min(found)
        return next((phrase for phrase in self.phrases if phrase in folded and _stands_alone(phrase, folded)), None)


def digest(path: str) -> str:
    """The SHA-256 of the list. `UserError`: it cannot be read."""
    try:
        return hashlib.sha256(_content(path)).hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from None


def _content(path: str) -> bytes:
    return read_file(Path(path).expanduser(), "word_list_bytes")


def _stands_alone(phrase: str, text: str) -> bool:
    edge = r"(?!)" if re.search(f"[{_JOINED}]", phrase) else _LETTER
    return re.search(rf"(?<!{edge}){re.escape(phrase)}(?!{edge})", text) is not None


def _unreadable(path: str, error: Exception) -> UserError:
    reason = (error.strerror if isinstance(error, OSError) else None) or "it is not UTF-8 text"
    return UserError(f"data.clean.blocked_words: {path} cannot be read: {reason}")
