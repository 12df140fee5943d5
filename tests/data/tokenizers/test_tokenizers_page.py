"""docs/tokenizers.md shows the actual tokens of its text."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from meshwright.data.tokenizers.kinds import KINDS
from meshwright.data.tokenizers.report import describe_tokens
from meshwright.data.tokenizers.tokenizer import load_tokenizer, write_tokenizer

REPOSITORY = Path(__file__).resolve().parents[3]
PAGE = REPOSITORY / "docs" / "tokenizers.md"
TEXT = "The Licensor grants naïve 世界 <|endoftext|>"


class Row(NamedTuple):
    """Return the tokens of the text by one kind."""

    kind: str
    vocabulary: int
    bytes_per_token: float
    tokens: int
    exact: bool
    decoded: str
    line: str


@cache
def rows() -> list[Row]:
    """Return each kind, trained on the licence."""
    licence = (REPOSITORY / "LICENSE").read_text()
    found = []
    for kind in KINDS:
        with TemporaryDirectory() as directory:
            write_tokenizer(Path(directory), kind, 1000, None, iter([licence]))
            tokenizer = load_tokenizer(Path(directory))
        shown = describe_tokens(tokenizer, TEXT)
        found.append(
            Row(
                kind,
                tokenizer.vocabulary,
                len(licence.encode()) / len(tokenizer.encode([licence])[0]),
                len(shown["tokens"]),
                shown["exact"],
                shown["decoded"],
                " ".join(f"‹{token['text']}›" for token in shown["tokens"]),
            )
        )
    return found


def test_page_shows_example_tokens_of_each_kind():
    page = PAGE.read_text()
    assert f"`{TEXT}`" in page and f"{(REPOSITORY / 'LICENSE').stat().st_size:,} bytes" in page
    shown = re.findall(r"^```tokens (\w+)\n(.*)\n```$", page, re.MULTILINE)
    assert dict(shown) == {row.kind: row.line for row in rows()} and len(shown) == len(KINDS)
    for row in rows():
        back = "exactly" if row.exact else f"`{row.decoded}`"
        assert f'| `"{row.kind}"` | {row.vocabulary} | {row.bytes_per_token:.2f} | {row.tokens} | {back} |' in page


def test_the_page_says_which_kinds_lose_text():
    table = dict(
        re.findall(r'^\| `"(\w+)"` \|.*\| (.*?) \|$', PAGE.read_text().partition("## The same")[0], re.MULTILINE)
    )
    assert list(table) == list(KINDS)
    assert {kind for kind, loses in table.items() if loses.startswith("nothing")} == {
        kind for kind, what in KINDS.items() if what.unknown is None
    }
