"""Filter for documents with blocked words, as in C4 (Raffel et al. 2020, arXiv:1910.10683, section 2.2)."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from meshwright.errors import UserError
from meshwright.untrusted import read_file

# Scripts that put no spaces between words: Thai, Lao, Myanmar, Khmer, kana, Han.
_JOINED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u9fff"
_LETTER = rf"[^\W{_JOINED}]"  # a letter of any other script
_WORD = re.compile(rf"{_LETTER}+")


class BlockedWords:
    """Filter that finds blocked words and phrases in texts. path: UTF-8 file with one word or phrase per line; blank
    lines are ignored.

    Matching ignores case and takes whole words only. In scripts without spaces between words (Chinese, Japanese, Thai
    ...) a blocked word also matches inside a longer string.
    """

    def __init__(self, path: str) -> None:
        """Read the list in the file `path`. Raises `UserError` if it cannot be read or lists nothing."""
        try:
            lines = _read_list(path).decode("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable_error(path, error) from None
        listed = {line.strip().casefold() for line in lines} - {""}
        if not listed:
            raise UserError(f"data.clean.blocked_words: {path} lists no words; write one word or phrase per line")
        self.words = {word for word in listed if _WORD.fullmatch(word)}
        self.phrases = sorted(listed - self.words)

    def find_blocked(self, text: str) -> str | None:
        """Return one word or phrase of the list (case-folded) that `text` contains, or None if it contains none."""
        folded = text.casefold()
        if found := self.words.intersection(_WORD.findall(folded)):
            return min(found)
        return next(
            (phrase for phrase in self.phrases if phrase in folded and _occurs_as_whole_words(phrase, folded)), None
        )


def hash_word_list(path: str) -> str:
    """Return the hex SHA-256 of the word list in the file `path`. Raises `UserError` if it cannot be read."""
    try:
        return hashlib.sha256(_read_list(path)).hexdigest()
    except OSError as error:
        raise _unreadable_error(path, error) from None


def _read_list(path: str) -> bytes:
    """Return the raw bytes of the word list in the file `path`. Raises `OSError` if it is unreadable or too large."""
    return read_file(Path(path).expanduser(), "word_list_bytes")


def _occurs_as_whole_words(phrase: str, text: str) -> bool:
    """Return True if `phrase` occurs in `text` as whole words, not inside a longer word. In scripts without spaces
    between words any occurrence counts. Both arguments are case-folded.
    """
    edge = r"(?!)" if re.search(f"[{_JOINED}]", phrase) else _LETTER
    return re.search(rf"(?<!{edge}){re.escape(phrase)}(?!{edge})", text) is not None


def _unreadable_error(path: str, error: Exception) -> UserError:
    """Build the `UserError` for the word list in the file `path`, which cannot be read because of `error`."""
    reason = (error.strerror if isinstance(error, OSError) else None) or "it is not UTF-8 text"
    return UserError(f"data.clean.blocked_words: {path} cannot be read: {reason}")
