"""Notes on the cleaning rules, for report and documentation: what each drops, and the source of its threshold."""

from __future__ import annotations

_GOPHER = "arXiv:2112.11446, appendix A1.1"
_TABLE = f"{_GOPHER}, table A1"
_C4 = "arXiv:1910.10683, section 2.2"
_FINEWEB = "arXiv:2406.17557, section 3.6"

RULE_NOTES: dict[str, tuple[str, str]] = {
    "encoding": ("does not decode, or is not text", ""),
    "extraction": ("a page on which the extractor fails, or takes more than 10 s of CPU time or 2 GiB", ""),
    "schema": ("a record without its text or a required key, or with a value of another type", ""),
    "control_characters": ("control characters are more than maximum_control_fraction of it", ""),
    "length": ("blank, shorter than minimum_characters or longer than maximum_characters", ""),
    "repetition": ("more than maximum_repetition of its lines repeat an earlier line", ""),
    "language": (
        "not in languages with minimum_language_probability, less for short texts",
        "arXiv:2406.17557, section 3.3: 0.65",
    ),
    "gopher_words": ("fewer than 50 or more than 100,000 words", _GOPHER),
    "gopher_word_length": ("a mean word of fewer than 3 or more than 10 characters", _GOPHER),
    "gopher_symbols": ("more than 0.1 hash signs or ellipses per word", _GOPHER),
    "gopher_bullets": ("more than 0.9 of its lines begin with a bullet", _GOPHER),
    "gopher_ellipses": ("more than 0.3 of its lines end with an ellipsis", _GOPHER),
    "gopher_letters": ("fewer than 0.8 of its words have a letter", _GOPHER),
    "gopher_stop_words": ("fewer than two of: the, be, to, of, and, that, have, with", _GOPHER),
    "gopher_duplicate_lines": ("more than 0.30 of its lines repeat an earlier line", _TABLE),
    "gopher_duplicate_paragraphs": ("more than 0.30 of its paragraphs repeat an earlier paragraph", _TABLE),
    "gopher_duplicate_line_characters": ("repeated lines have more than 0.20 of its characters", _TABLE),
    "gopher_duplicate_paragraph_characters": ("repeated paragraphs have more than 0.20 of its characters", _TABLE),
    "gopher_top_2_gram": ("its most frequent 2-gram of words has more than 0.20 of its characters", _TABLE),
    "gopher_top_3_gram": ("its most frequent 3-gram of words has more than 0.18 of its characters", _TABLE),
    "gopher_top_4_gram": ("its most frequent 4-gram of words has more than 0.16 of its characters", _TABLE),
    "gopher_duplicate_5_grams": ("repeated 5-grams of words have more than 0.15 of its characters", _TABLE),
    "gopher_duplicate_6_grams": ("repeated 6-grams of words have more than 0.14 of its characters", _TABLE),
    "gopher_duplicate_7_grams": ("repeated 7-grams of words have more than 0.13 of its characters", _TABLE),
    "gopher_duplicate_8_grams": ("repeated 8-grams of words have more than 0.12 of its characters", _TABLE),
    "gopher_duplicate_9_grams": ("repeated 9-grams of words have more than 0.11 of its characters", _TABLE),
    "gopher_duplicate_10_grams": ("repeated 10-grams of words have more than 0.10 of its characters", _TABLE),
    "c4_curly_bracket": ("contains a curly bracket", _C4),
    "c4_lorem_ipsum": ("contains lorem ipsum", _C4),
    "c4_sentences": ("fewer than 3 sentences in the lines that C4 keeps", _C4),
    "fineweb_punctuation": ("at most 0.12 of its lines end with punctuation", _FINEWEB),
    "fineweb_duplicate_lines": ("repeated lines have at least 0.1 of its characters", _FINEWEB),
    "fineweb_short_lines": ("at least 0.67 of its lines are shorter than 30 characters", _FINEWEB),
    "fineweb_newlines": ("more than 0.3 line breaks per word, as datatrove alone has it", "datatrove 0.10"),
    "blocked_words": ("holds a word of the list blocked_words", _C4),
    "contamination": (
        "more than maximum_contamination of its words stand in runs of contamination_words that evaluation sets hold",
        "arXiv:2005.14165, appendix C: 13 words",
    ),
    "exact_duplicates": (
        "its text (of a record, everything in it), without surrounding white space, repeats that of an earlier "
        "document",
        "",
    ),
    "near_duplicates": (
        "shares a band of its MinHash with an earlier document",
        "arXiv:2406.17557, section 3.4: 14 bands of 8 rows over 5 words",
    ),
    "sentence_duplicates": ("all its sentences are part of spans of three that occur before in the corpus", _C4),
}
