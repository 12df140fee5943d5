"""Which documents are dropped, by which rule, and what in the others is masked: what one document decides alone."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field

from meshwright.data.cleaning import heuristics
from meshwright.data.cleaning.blocked_words import BlockedWords
from meshwright.data.cleaning.decontamination import EvaluationSets
from meshwright.data.cleaning.language import check_languages, identify
from meshwright.data.cleaning.minhash import MinHash
from meshwright.data.cleaning.personal_data import mask
from meshwright.data.cleaning.repetition import repeated_lines
from meshwright.recipe import CleanRecipe

RULES = (
    *("encoding", "schema", "control_characters", "length", "repetition", "language"),
    *(rule for family in heuristics.RULES.values() for rule in family),
    *("blocked_words", "contamination", "exact_duplicates", "near_duplicates"),
)
"""In the order in which they are asked; a document is counted under the first that drops it."""

# Unicode category Cc without tab, newline, form feed and carriage return, which are white space in real texts.
_CONTROL = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f]")
_CODE = re.compile(
    r"\.(?:asm|bash|c|cc|clj|cmake|cpp|cs|css|cu|cuh|cxx|dart|el|erl|ex|exs|f90|go|gradle|h|hh|hpp|hs|html?|hxx|java|jl|js"
    r"|jsx|json|kt|lean|lisp|lua|m|mjs|ml|mli|nim|nix|php|pl|pm|proto|ps1|py|pyi|pyx|r|rb|rkt|rs|s|scala|scm|sh|sol|sql"
    r"|sv|swift|tcl|tex|tf|toml|ts|tsx|v|vhd|vue|xml|ya?ml|zig)(?:\.gz|\.zst)?(?:#\d+)?$",
    re.IGNORECASE,
)


def asked(recipe: CleanRecipe) -> tuple[str, ...]:
    """The rules that a recipe asks for, in their order."""
    off = {rule for family, rules in heuristics.RULES.items() if family not in recipe.heuristics for rule in rules}
    switches = {
        "schema": recipe.required_keys,
        "language": recipe.languages,
        "blocked_words": recipe.blocked_words,
        "contamination": recipe.evaluation_sets,
        "exact_duplicates": recipe.exact_duplicates,
        "near_duplicates": recipe.near_duplicates,
    }
    off |= {rule for rule, switch in switches.items() if not switch}
    return tuple(rule for rule in RULES if rule not in off)


_RECORD = re.compile(r":(?:row )?\d+(?:[ #]|$)")


def is_code(name: str) -> bool:
    """Whether a document is a file of source code or of a language for machines, by its name. Records are none,
    whatever a page's address ends with."""
    return _CODE.search(name) is not None and _RECORD.search(name) is None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a document's own text decides.

    `rule` drops it (None: nothing does), `why` says what was measured. `text`: it, masked. `content`: UTF-8 of that,
    `digest` its SHA-256 without white space at both ends. `changes`: how much of what was masked or left out.
    """

    rule: str | None
    why: str = ""
    text: str = ""
    content: bytes = b""
    digest: bytes = b""
    changes: dict[str, int] = field(default_factory=dict)


class Rewriter:
    """Masks and leaves out of a text what `[data.clean]` says."""

    def __init__(self, recipe: CleanRecipe) -> None:
        self.recipe = recipe
        self.rewrites = bool(recipe.mask) or "c4" in recipe.heuristics

    def rewritten(self, text: str, name: str = "") -> tuple[str, dict[str, int]]:
        """The text as it is kept, and how much of what was masked (`key` ...) or left out (`c4_lines`)."""
        changes: dict[str, int] = {}
        if "c4" in self.recipe.heuristics and (self.recipe.heuristics_on_code or not is_code(name)):
            text, changes["c4_lines"] = heuristics.c4_lines(text)
        if self.recipe.mask:
            text, masked = mask(text, self.recipe.mask)
            changes |= masked
        return text, changes


class Cleaner(Rewriter):
    """Asks the rules of `[data.clean]` that look at one document at a time.

    `UserError`: a language that is not known, an evaluation set that cannot be read, a library that is missing.
    """

    def __init__(self, recipe: CleanRecipe) -> None:
        super().__init__(recipe)
        self.rules = asked(recipe)
        if recipe.languages:
            check_languages(recipe.languages)
        self.blocked = BlockedWords(recipe.blocked_words) if recipe.blocked_words else None
        self.evaluation = (
            EvaluationSets(recipe.evaluation_sets, recipe.contamination_words) if recipe.evaluation_sets else None
        )
        self.minhash = (
            MinHash(recipe.minhash_bands, recipe.minhash_rows, recipe.minhash_words) if recipe.near_duplicates else None
        )

    def judge(self, text: str | None, name: str = "", problem: str | None = None) -> Verdict:
        """The verdict on a document. `text` None, or with lone surrogates, did not decode; `problem`: its record's."""
        if problem is not None:
            return Verdict("schema", problem)
        try:
            raw = text.encode() if text is not None else None
        except UnicodeEncodeError:
            raw = None
        if text is None or raw is None:
            return Verdict("encoding", "does not decode" if text is not None else "is not text")
        rewritten, changes = self.rewritten(text, name) if self.rewrites else (text, {})
        content = raw if rewritten is text else rewritten.encode()
        stripped = content if content[:1].isalnum() and content[-1:].isalnum() else rewritten.strip().encode()
        found = self._text_rules(rewritten, blank=not stripped, emptied=bool(raw.strip()))
        if found is None and not (is_code(name) and not self.recipe.heuristics_on_code):
            found = self._prose_rules(rewritten)
        if found is None and self.evaluation is not None:
            share = self.evaluation.share(rewritten)
            if share > self.recipe.maximum_contamination:
                found = "contamination", f"{share:.2f} of the words are in an evaluation set"
        rule, why = found or (None, "")
        return Verdict(rule, why, rewritten, content, hashlib.sha256(stripped).digest(), changes)

    def _text_rules(self, text: str, blank: bool, emptied: bool) -> heuristics.Finding | None:
        recipe = self.recipe
        if recipe.maximum_control_fraction < 1:
            controls = len(_CONTROL.findall(text))
            if controls > recipe.maximum_control_fraction * len(text):
                return "control_characters", f"{controls:,} of {len(text):,} characters"
        if blank and emptied and "c4" in recipe.heuristics:
            return "c4_sentences", "no line is left"
        if blank or len(text) < recipe.minimum_characters:
            return "length", f"{len(text):,} characters"
        if recipe.maximum_characters is not None and len(text) > recipe.maximum_characters:
            return "length", f"{len(text):,} characters"
        if recipe.maximum_repetition < 1:
            share = repeated_lines(text)
            if share > recipe.maximum_repetition:
                return "repetition", f"{share:.2f} of the lines"
        return None

    def _prose_rules(self, text: str) -> heuristics.Finding | None:
        if self.recipe.languages:
            language, probability = identify(text)
            if language not in self.recipe.languages or probability < self.recipe.minimum_language_probability:
                return "language", f"{language}, probability {probability:.2f}"
        for family, ask in heuristics.ASK.items():
            if family in self.recipe.heuristics and (found := ask(text)):
                return found
        if self.blocked is not None and (word := self.blocked.first(text)):
            return "blocked_words", f'holds "{word}"'
        return None
