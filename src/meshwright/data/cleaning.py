"""Which documents are dropped, by which rule: encoding, control characters, length, repetition, exact duplicates."""

from __future__ import annotations

import hashlib
import re

from meshwright.recipe import CleanRecipe

RULES = ("encoding", "control_characters", "length", "repetition", "exact_duplicates")
"""In the order in which they are asked; a document is counted under the first that drops it."""

# Unicode category Cc without tab, newline, form feed and carriage return, which are white space in real texts.
_CONTROL = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f]")


class Cleaner:
    """Asks the rules of `[data.clean]` about one document after another; remembers contents for the duplicates."""

    def __init__(self, recipe: CleanRecipe) -> None:
        self.recipe = recipe
        self._seen: set[bytes] = set()

    def check(self, text: str | None) -> tuple[str | None, bytes]:
        """(rule that drops the document or None, SHA-256 of its normalised text).

        Normalised: UTF-8 without white space at both ends. `text` None, or with lone surrogates, did not decode.
        """
        try:
            content = text.strip().encode() if text is not None else None
        except UnicodeEncodeError:
            content = None
        if text is None or content is None:
            return "encoding", b""
        rule = self._rule(text, blank=not content)
        digest = hashlib.sha256(content).digest()
        if rule is None and self.recipe.exact_duplicates:
            if digest in self._seen:
                return "exact_duplicates", digest
            self._seen.add(digest)
        return rule, digest

    def _rule(self, text: str, blank: bool) -> str | None:
        recipe = self.recipe
        if len(_CONTROL.findall(text)) > recipe.maximum_control_fraction * len(text):
            return "control_characters"
        if blank or len(text) < recipe.minimum_characters:
            return "length"
        if recipe.maximum_characters is not None and len(text) > recipe.maximum_characters:
            return "length"
        if repetition(text) > recipe.maximum_repetition:
            return "repetition"
        return None


def repetition(text: str) -> float:
    """The share of a text's lines that stood in it before; blank lines and white space around lines do not count."""
    lines = [stripped for line in text.split("\n") if (stripped := line.strip())]
    return 1 - len(set(lines)) / len(lines) if lines else 0.0
