"""Text of an answer up to a stop string, in pieces of complete characters."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.data.tokenizers.detokenizer import IncrementalDetokenizer


class AnswerText:
    """Text of one answer that the client sees: detokenized tokens up to the first stop string, which is left out.

    Text that may be the beginning of a stop string is held back until later tokens decide, so that the joined pieces do
    not depend on how tokens are divided into outputs. detokenizer: converts the tokens to text. stop: stop strings,
    none of them empty. min_tokens: number of first tokens whose text is not searched for stop strings.

    Attributes:
        offsets: For each token, the index in the answer's text of the first character that the token completes; may lie
            beyond the visible text for tokens of a stop string.
        stopped_by: Stop string that ended the text; None if no stop string has ended it.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        """Start with empty text; arguments: see the class."""
        assert all(stop), "an empty stop string ends every text before it begins"
        self.offsets: list[int] = []
        self.stopped_by: str | None = None
        self._detokenizer, self._stop, self._min_tokens = detokenizer, tuple(stop), min_tokens
        self._held = ""  # text not yet visible: the longest end of it that begins a stop string
        self._characters = 0

    def push(self, token: int) -> str:
        """Append a token; return the text that becomes visible, perhaps empty. If the token completes a stop string,
        `stopped_by` is set, and no token may follow."""
        assert self.stopped_by is None
        self.offsets.append(self._characters)
        return self._append_text(self._detokenizer.push(token), searched=len(self.offsets) > self._min_tokens)

    def finish(self) -> str:
        """Return the text held back so far, at the end of an answer; empty if a stop string ended it."""
        if self.stopped_by is not None:
            return ""
        piece = self._append_text(self._detokenizer.flush(), searched=True)
        if self.stopped_by is None:
            piece, self._held = piece + self._held, ""
        return piece

    def _append_text(self, piece: str, searched: bool) -> str:
        """Append the text `piece`, and return the text that becomes visible. A suffix that may be the beginning of a
        stop string is held back; text from a complete stop string on is dropped. searched: False: do not search for
        stop strings and return all text."""
        self._characters += len(piece)
        text = self._held + piece
        if not searched or not self._stop:
            return text
        found = [(at, len(stop), stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, _, self.stopped_by = min(found)
            self._held = ""
            return text[:at]
        kept = self._count_held(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def _count_held(self, text: str) -> int:
        """Return the number of last characters of `text` to hold back: the longest suffix that is a proper prefix of a
        stop string."""
        longest = min(max(map(len, self._stop)) - 1, len(text))
        return next((n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0)
