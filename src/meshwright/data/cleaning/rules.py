"""Cleaning rules that look at one document at a time, and the masks."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from meshwright.data.cleaning import heuristics, heuristics_datatrove
from meshwright.data.cleaning.blocked_words import BlockedWords, hash_word_list
from meshwright.data.cleaning.decontamination import EvaluationSets, hash_evaluation_sets
from meshwright.data.cleaning.language import SHORT_TEXTS, check_languages, find_foreign_language, load_identifier
from meshwright.data.cleaning.minhash import MinHash
from meshwright.data.cleaning.personal_data import MASKS_VERSION, mask_personal_data
from meshwright.data.cleaning.repetition import measure_repeated_lines
from meshwright.data.cleaning.sentences import split_sentences
from meshwright.data.records.parsed_example import Example
from meshwright.recipe import CleanRecipe

RULES = (
    *("encoding", "extraction", "schema", "control_characters", "length", "repetition", "language"),
    *(rule for family in heuristics.RULES.values() for rule in family),
    *("blocked_words", "contamination", "exact_duplicates", "near_duplicates", "sentence_duplicates"),
)
"""Rules in the order in which they run; a document is counted under the first that drops it."""

# Unicode category Cc without tab, newline, form feed and carriage return, which are white space in real texts.
_CONTROL = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f]")
_CODE = re.compile(
    r"\.(?:asm|bash|c|cc|clj|cmake|cpp|cs|css|cu|cuh|cxx|dart|el|erl|ex|exs|f90|go|gradle|h|hh|hpp|hs|html?|hxx|java|jl|js"
    r"|jsx|json|kt|lean|lisp|lua|m|mjs|ml|mli|nim|nix|php|pl|pm|proto|ps1|py|pyi|pyx|r|rb|rkt|rs|s|scala|scm|sh|sol|sql"
    r"|sv|swift|tcl|tex|tf|toml|ts|tsx|v|vhd|vue|xml|ya?ml|zig)(?:\.gz|\.zst)?(?:#\d+)?$",
    re.IGNORECASE,
)


def list_enabled_rules(recipe: CleanRecipe, extracts: bool = False) -> tuple[str, ...]:
    """Return the names of the cleaning rules that the `[data.clean]` table `recipe` enables, in the order in which they
    run. extracts: True if the sources are WARC files, whose pages may fail in text extraction (rule "extraction")."""
    off = {rule for family, rules in heuristics.RULES.items() if family not in recipe.heuristics for rule in rules}
    switches = {
        "extraction": extracts,
        "fineweb_newlines": "fineweb" in recipe.heuristics and recipe.heuristics_like == "datatrove",
        "schema": recipe.required_keys,
        "language": recipe.languages,
        "blocked_words": recipe.blocked_words,
        "contamination": recipe.evaluation_sets,
        "exact_duplicates": recipe.exact_duplicates,
        "near_duplicates": recipe.near_duplicates,
        "sentence_duplicates": recipe.sentence_duplicates,
    }
    off |= {rule for rule, switch in switches.items() if not switch}
    return tuple(rule for rule in RULES if rule not in off)


def collect_key_fields(recipe: CleanRecipe, cache: Path, log: Callable[[str], None]) -> dict[str, Any]:
    """Return a JSON object of everything that determines the results of cleaning; it enters the cache key of prepared
    data. It contains the `[data.clean]` table `recipe`, the hashes of the files that it names, and the versions of the
    masks and of the libraries that rules use.

    cache: directory that stores file listings of remote stores. log: receives a line when a store is unreachable and
    its stored listing is used. Raises `UserError` if a file cannot be read, or a library is not installed.
    """
    return {
        **recipe.model_dump(),
        "evaluation_sets": hash_evaluation_sets(recipe.evaluation_sets, cache, log),
        "blocked_words": hash_word_list(recipe.blocked_words) if recipe.blocked_words else None,
        **({"masks_version": MASKS_VERSION} if recipe.mask else {}),
        **({"spacy": _find_library_version("spacy", heuristics_datatrove.load_spacy)} if _uses_spacy(recipe) else {}),
        **(
            {"short_texts": SHORT_TEXTS, "py3langid": _find_library_version("py3langid", load_identifier)}
            if recipe.languages
            else {}
        ),
    }


def _uses_spacy(recipe: CleanRecipe) -> bool:
    """Return True if the `[data.clean]` table `recipe` enables rules that split texts by spaCy."""
    return bool(recipe.heuristics) and recipe.heuristics_like == "datatrove"


def _find_library_version(library: str, load: Callable[[], Any]) -> str:
    """Return the version of the installed package `library`. load: imports the package; raises `UserError` if it is
    missing."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        load()
        raise


_RECORD = re.compile(r":(?:row )?\d+(?:[ #]|$)")


def is_code_file(name: str) -> bool:
    """Return True if a document is a source code or markup file, by the suffix of its name ("a/b.py"). For a record or
    page inside a file, such as "x.wet:17 https://example.org/a.html", return False."""
    return _CODE.search(name) is not None and _RECORD.search(name) is None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of the cleaning rules for one document.

    rule: name of the rule that drops the document; None if it is kept. why: the measured value, such as "0.42 > 0.30".
    text: the text after masking and line filters. content: `text` in UTF-8. digest: SHA-256 of `content` without
    surrounding white space; for an instruction, chat or preference record, SHA-256 of all its texts and template
    inputs. changes: number of masked items or removed lines by kind ("email" ...). sentences: sentences of the text, if
    the document is kept and spans of sentences are deduplicated; else empty.
    """

    rule: str | None
    why: str = ""
    text: str = ""
    content: bytes = b""
    digest: bytes = b""
    changes: dict[str, int] = field(default_factory=dict)
    sentences: Sequence[str] = ()


class Rewriter:
    """Applier of the masks and line filters that `[data.clean]` of the recipe enables. rewrites: True if any mask or
    line filter is enabled.
    """

    def __init__(self, recipe: CleanRecipe) -> None:
        """Store the enabled masks and line filters. recipe: the `[data.clean]` table."""
        self.recipe = recipe
        self.rewrites = bool(recipe.mask) or "c4" in recipe.heuristics
        like_datatrove = recipe.heuristics_like == "datatrove"
        checks = heuristics_datatrove.CHECKS if like_datatrove else heuristics.CHECKS
        self._checks = {family: check for family, check in checks.items() if family in recipe.heuristics}
        self._filter_lines = heuristics_datatrove.filter_c4_lines if like_datatrove else heuristics.filter_c4_lines

    def rewrite_text(self, text: str, name: str = "") -> tuple[str, dict[str, int]]:
        """Mask a text and filter its lines; returns (new text, {kind: number of masked items or removed lines}), the
        kinds "email", "phone", "key", "ip" and "c4_lines". name: the document's name, such as "a/b.py", which
        distinguishes code from prose.
        """
        changes: dict[str, int] = {}
        if "c4" in self.recipe.heuristics and (self.recipe.heuristics_on_code or not is_code_file(name)):
            text, changes["c4_lines"] = self._filter_lines(text)
        if self.recipe.mask:
            text, masked = mask_personal_data(text, self.recipe.mask)
            changes |= masked
        return text, changes

    def rewrite_example(self, example: Example, name: str = "") -> tuple[Example, dict[str, int]]:
        """Mask every text of the record `example`; return (new record, {kind: number of masked items}). name: the
        document's name, such as "a.jsonl:17"."""
        total = Counter[str]()

        def rewrite(text: str) -> str:
            """Return `text` with masks applied, and count them."""
            text, changes = self.rewrite_text(text, name)
            total.update(changes)
            return text

        return example.rewrite_texts(rewrite), dict(total)


class Cleaner(Rewriter):
    """Applier of the rules of `[data.clean]` to one document at a time: all rules except those for duplicates, which
    compare documents. rules: names of all enabled rules, duplicates included.

    Raises `UserError` for an unknown language, an unreadable evaluation set or word list, or a missing library.
    """

    def __init__(self, recipe: CleanRecipe, extracts: bool = False) -> None:
        """Load the evaluation sets and word lists that `recipe`, the `[data.clean]` table, names. extracts: True if the
        sources have pages whose texts are extracted.
        """
        super().__init__(recipe)
        self.rules = list_enabled_rules(recipe, extracts)
        if _uses_spacy(recipe):
            heuristics_datatrove.load_spacy()
        if recipe.languages:
            check_languages(recipe.languages)
        self.blocked = BlockedWords(recipe.blocked_words) if recipe.blocked_words else None
        self.evaluation = (
            EvaluationSets(recipe.evaluation_sets, recipe.contamination_words) if recipe.evaluation_sets else None
        )
        self.minhash = (
            MinHash(recipe.minhash_bands, recipe.minhash_rows, recipe.minhash_words) if recipe.near_duplicates else None
        )

    def judge_document(
        self,
        text: str | None,
        name: str = "",
        problem: heuristics.Finding | None = None,
        example: Example | None = None,
    ) -> Verdict:
        """Mask one document and apply the rules to it; return the verdict (kept, or dropped by which rule and why).

        text: the document's text (undecodable bytes as lone surrogates); None if the file is not text. name: the
        document's name. problem: (rule that the reader found violated, reason); None if there is none. example: the
        record whose joined texts are `text`; None for plain text."""
        if problem is not None:
            return Verdict(*problem)
        try:
            raw = text.encode() if text is not None else None
        except UnicodeEncodeError:
            raw = None
        if text is None or raw is None:
            return Verdict("encoding", "does not decode" if text is not None else "is not text")
        rewritten, changes = text, dict[str, int]()
        if self.rewrites and example is not None:
            example, changes = self.rewrite_example(example, name)
            rewritten = example.join_texts()
        elif self.rewrites:
            rewritten, changes = self.rewrite_text(text, name)
        content = raw if rewritten is text else rewritten.encode()
        stripped = content if content[:1].isalnum() and content[-1:].isalnum() else rewritten.strip().encode()
        found = self._check_text(rewritten, blank=not stripped, emptied=bool(raw.strip()))
        prose = self.recipe.heuristics_on_code or not is_code_file(name)
        if found is None and prose:
            found = self._check_prose(rewritten)
        if found is None and self.evaluation is not None:
            share = self.evaluation.measure_overlap(rewritten)
            if share > self.recipe.maximum_contamination:
                found = "contamination", f"{share:.2f} of the words are in an evaluation set"
        rule, why = found or (None, "")
        compares = found is None and prose and self.recipe.sentence_duplicates
        sentences = split_sentences(rewritten) if compares else ()
        try:
            whole = stripped if example is None else example.encode_content()
        except UnicodeEncodeError:  # in a tool or a name
            return Verdict("encoding", "does not decode")
        return Verdict(rule, why, rewritten, content, hashlib.sha256(whole).digest(), changes, sentences)

    def _check_text(self, text: str, blank: bool, emptied: bool) -> heuristics.Finding | None:
        """Apply the rules for any kind of text (control characters, length, repeated lines); return (name of the first
        violated rule, measured value as text), or None if the text passes.

        text: the document's text after masking and line filters. blank: True if `text` is only white space. emptied:
        True if `text` is blank because masking and line filters removed everything else.
        """
        recipe = self.recipe
        if recipe.maximum_control_fraction < 1:
            controls = len(_CONTROL.findall(text))
            if controls > recipe.maximum_control_fraction * len(text):
                return "control_characters", f"{controls:,} of {len(text):,} characters"
        if blank and emptied and "c4" in recipe.heuristics:
            return "c4_sentences", "no line remains"
        most = len(text) if recipe.maximum_characters is None else recipe.maximum_characters
        if blank or not recipe.minimum_characters <= len(text) <= most:
            return "length", f"{len(text):,} characters"
        if recipe.maximum_repetition < 1:
            share = measure_repeated_lines(text)
            if share > recipe.maximum_repetition:
                return "repetition", f"{share:.2f} of the lines"
        return None

    def _check_prose(self, text: str) -> heuristics.Finding | None:
        """Apply the rules for prose (language, heuristics, blocked words); returns (name of the first rule that the
        text violates, measured value as text), or None if it passes.
        """
        if self.recipe.languages:
            minimum = self.recipe.minimum_language_probability
            if found := find_foreign_language(text, self.recipe.languages, minimum):
                return "language", found
        for check in self._checks.values():
            if finding := check(text):
                return finding
        if self.blocked is not None and (word := self.blocked.find_blocked(text)):
            return "blocked_words", f'contains "{word}"'
        return None
